"""The verifier refuses every wrong plan: one mutation at a time of a plan that is right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.plan_cases import everything, rollout, rows, spec_of, takes, topology, trainer

from weightbridge.errors import InternalError
from weightbridge.plan import HOP, PlanOptions, ReplicaClass, make_plan, verify_plan
from weightbridge.plan.plan import with_rounds
from weightbridge.plan.routing import busiest_link_seconds


@pytest.fixture(params=[0, 1 << 14], ids=["by_boxes", "by_elements"])
def exact_numel(request):
    return request.param


class Case:
    """Two trainers on one node, a TP2 engine, a whole engine, and a rollout beside trainer 1's own node mate."""

    def __init__(self):
        self.spec = spec_of((64, 48), (48, 64), (9,), dtype=["BF16", "BF16", "F32"])
        shards = [
            takes(self.spec, *((i, rows(t.shape[0], r, 2)) for i, t in enumerate(self.spec.tensors))) for r in range(2)
        ]
        engine = [takes(self.spec, (0, rows(64, r, 2)), (1, slice(0, 48), rows(64, r, 2)), (2,)) for r in range(2)]
        self.topology = topology(
            trainer(0), trainer(1), rollout("e", 0, "b"), rollout("e", 1, "b"), rollout("f", 0, "c"), rollout("g", 0, "a"),
            rollout("h", 0, "d"),
        )  # fmt: skip
        whole = everything(self.spec)
        self.maps = [*shards, *engine, whole, whole, takes(self.spec, (2,))]
        options = PlanOptions(slot_bytes=2048, alignment=64)
        self.plan = make_plan(self.spec, self.topology, self.maps, options=options)

    def refused(self, match, exact_numel=0, **changes):
        """The plan with other columns is refused, and says why."""
        with pytest.raises(InternalError, match=match):
            verify_plan(replace(self.plan, **changes), self.spec, self.maps, exact_numel=exact_numel)

    def routes(self, **columns):
        found = self.plan.routes.copy()
        for name, (at, value) in columns.items():
            found[name][at] = value
        return found

    def atoms(self, **columns):
        changed = {}
        for name, (at, value) in columns.items():
            changed[name] = getattr(self.plan.atoms, name).copy()
            changed[name][at] = value
        return replace(self.plan.atoms, **changed)

    def network_route(self):
        """A route that leaves the trainers' node and is passed on."""
        return int(self.plan.hops["route"][0])


@pytest.fixture(scope="module")
def case():
    return Case()


def test_the_plan_itself_passes(case, exact_numel):
    facts = verify_plan(case.plan, case.spec, case.maps, exact_numel=exact_numel)
    assert facts.trainer_egress_bytes == case.spec.nbytes
    # node b needs everything, c too, a holds everything itself, d needs the last tensor only
    assert facts.rollout_node_ingress_bytes == {"b": case.spec.nbytes, "c": case.spec.nbytes, "a": 0, "d": 36}
    assert facts.needed_bytes["a"] == case.spec.nbytes
    assert len(case.plan.hops) > 3


# --- who has what -------------------------------------------------------------------------------------------------------


def test_an_atom_given_to_a_class_that_does_not_hold_it(case, exact_numel):
    classes = list(case.plan.classes)
    swap = {(0,): (1,), (1,): (0,)}
    classes = tuple(replace(c, holders=swap[c.holders]) for c in classes)
    case.refused("not in its source map", exact_numel, classes=classes)


def test_a_needer_that_does_not_need(case, exact_numel):
    classes = list(case.plan.classes)
    i = next(i for i, c in enumerate(classes) if 3 not in c.needers)
    classes[i] = replace(classes[i], needers=tuple(sorted({*classes[i].needers, 3} - {2})))
    if len({(c.holders, c.needers) for c in classes}) < len(classes):
        j = next(
            j
            for j, c in enumerate(classes)
            if j != i and (c.holders, c.needers) == (classes[i].holders, classes[i].needers)
        )
        classes[j] = replace(classes[j], needers=case.plan.classes[i].needers)
    case.refused("'e/[01]'", exact_numel, classes=tuple(classes))


@pytest.mark.parametrize(("worker", "name"), [(4, "f/0"), (5, "g/0")])  # two with equal maps
def test_a_needer_left_out(case, exact_numel, worker, name):
    classes = list(case.plan.classes)
    i = next(i for i, c in enumerate(classes) if {4, 5, 6} <= set(c.needers))
    classes[i] = replace(classes[i], needers=tuple(w for w in classes[i].needers if w != worker))
    case.refused(rf"worker '{name}' needs \d+ elements", exact_numel, classes=tuple(classes))


def test_an_atom_moved_onto_its_neighbour(case, exact_numel):
    a = case.plan.atoms
    same = next(
        (i, j)
        for i in range(len(a)) for j in range(i)
        if a.tensor[i] == a.tensor[j] and (a.count[i] == a.count[j]).all()
    )  # fmt: skip
    case.refused("in two atoms|share elements", exact_numel, atoms=case.atoms(start=(same[0], a.start[same[1]])))


def test_an_atom_shifted_by_one(case, exact_numel):
    i = int(np.flatnonzero(case.plan.atoms.start[:, 0] > 0)[0])
    start = case.plan.atoms.start[i] - [1, 0]
    case.refused("in two atoms|share elements|source map", exact_numel, atoms=case.atoms(start=(i, start)))


def test_an_atom_outside_its_tensor(case):
    case.refused("outside tensor", atoms=case.atoms(start=(0, [63, 40])))
    case.refused("outside tensor", atoms=case.atoms(count=(0, [0, 40])))
    case.refused("outside tensor", atoms=case.atoms(step=(0, [0, 1])))


def test_an_atom_dropped_with_its_bytes(case, exact_numel):
    a, last = case.plan.atoms, len(case.plan.classes) - 1
    keep = a.class_id < last
    atoms = replace(
        a, **{n: getattr(a, n)[keep] for n in ("tensor", "start", "step", "count", "class_id", "stream_offset")}
    )
    case.refused(
        r"needs \d+ elements",
        exact_numel,
        atoms=atoms,
        classes=case.plan.classes[:last],
        routes=case.plan.routes[:0],
        hops=case.plan.hops[:0],
    )


def test_streams_with_gaps_or_wrong_length(case):
    case.refused("end to end", atoms=case.atoms(stream_offset=(0, 8)))
    classes = list(case.plan.classes)
    classes[0] = replace(classes[0], nbytes=classes[0].nbytes + 64)
    case.refused("lengths of the class streams", classes=tuple(classes))


def test_narrow_elements_before_wide_ones():
    spec = spec_of((3,), (5,), dtype=["U8", "F32"])
    topo, maps = topology(trainer(0), rollout("e", 0, "b")), [everything(spec)] * 2
    plan = make_plan(spec, topo, maps, options=PlanOptions(alignment=64))
    a = plan.atoms
    turned = replace(a, tensor=a.tensor[::-1], count=a.count[::-1], stream_offset=np.array([0, 3]))
    with pytest.raises(InternalError, match="narrow elements before wide"):
        verify_plan(replace(plan, atoms=turned), spec, maps)


def test_classes_out_of_form(case):
    first, *rest = case.plan.classes
    for changed, match in (
        (replace(first, holders=()), "some of each"),
        (replace(first, holders=(2,)), "some of each"),
        (replace(first, needers=(1,)), "some of each"),
        (replace(first, needers=first.needers[::-1]), "not sorted"),
        (rest[0], "same holders and needers"),
    ):
        case.refused(match, classes=(changed, *rest))


# --- who moves what -----------------------------------------------------------------------------------------------------


def test_bytes_sent_twice(case):
    r = case.network_route()
    case.refused("come twice", routes=np.append(case.plan.routes, case.plan.routes[r]))


def test_bytes_missing(case):
    r = case.network_route()
    case.refused("are missing", routes=case.routes(hi=(r, case.plan.routes["hi"][r] - 64)))


def test_a_route_missing(case):
    last = len(case.plan.routes) - 1
    case.refused("are missing", routes=case.plan.routes[:last], hops=case.plan.hops[case.plan.hops["route"] != last])


def test_a_sender_that_does_not_hold(case):
    r = case.network_route()
    case.refused("does not hold it", routes=case.routes(sender=(r, 1 - case.plan.routes["sender"][r])))


def test_a_rollout_as_sender_and_a_trainer_as_entry(case):
    r = case.network_route()
    case.refused("does not hold it", routes=case.routes(sender=(r, 4)))
    case.refused("no rollout worker", routes=case.routes(entry=(r, 0)))


def test_an_entry_on_a_node_that_does_not_need(case):
    local = next(
        i
        for i, r in enumerate(case.plan.routes)
        if r["entry"] == 5 and 6 not in case.plan.classes[r["class_id"]].needers
    )
    case.refused("nobody there needs", routes=case.routes(entry=(local, 6)))


def test_bytes_over_the_network_to_a_node_that_holds_them(case):
    r = int(np.flatnonzero(case.plan.routes["entry"] == 5)[0])
    hops = np.append(
        case.plan.hops, np.array([(case.network_route(), 1, case.plan.routes["entry"][case.network_route()], 5)], HOP)
    )
    case.refused("over the network though it holds it", hops=hops)
    assert case.plan.routes["sender"][r] in (0, 1)


def test_a_hop_missing(case):
    case.refused("are missing", hops=case.plan.hops[1:])


def test_a_second_copy_from_the_trainer_instead_of_a_hop(case):
    route, _, _, dst = case.plan.hops[0].tolist()
    again = case.plan.routes[route : route + 1].copy()
    again["entry"] = dst
    case.refused("out of the trainers come twice", routes=np.append(case.plan.routes, again), hops=case.plan.hops[1:])


def test_a_hop_twice(case):
    case.refused("twice", hops=np.append(case.plan.hops, case.plan.hops[:1]))


def test_a_hop_from_somebody_who_never_got_it(case):
    wrong = case.plan.hops.copy()
    entry = case.plan.routes["entry"][wrong["route"][0]]
    wrong["src"][0] = 6 if entry != 6 else 4
    case.refused("before it has it", hops=wrong)


def test_a_hop_in_the_first_stage(case):
    wrong = case.plan.hops.copy()
    wrong["stage"][0] = 0
    case.refused("before it has it", hops=wrong)


def test_a_hop_inside_the_node(case):
    hops = case.plan.hops
    route = next(i for i, r in enumerate(case.plan.routes) if r["entry"] in (2, 3))
    entry = int(case.plan.routes["entry"][route])
    case.refused("sender's node", hops=np.append(hops, np.array([(route, 1, entry, 5 - entry)], HOP)))


def test_a_hop_to_a_second_worker_of_one_node(case):
    i = next(i for i, h in enumerate(case.plan.hops) if h["dst"] in (2, 3))
    route, stage, src, dst = case.plan.hops[i].tolist()
    hops = np.append(case.plan.hops, np.array([(route, stage, src, 5 - dst)], HOP))
    case.refused("come twice", hops=hops)


def test_ids_out_of_range(case):
    for name in ("class_id", "sender", "entry"):
        case.refused(f"routes.{name}", routes=case.routes(**{name: (0, 99)}))
        case.refused(f"routes.{name}", routes=case.routes(**{name: (0, -1)}))
    for name in ("route", "stage", "src", "dst"):
        wrong = case.plan.hops.copy()
        wrong[name][0] = 99
        case.refused(f"hops.{name}", hops=wrong)
    case.refused("atoms.tensor", atoms=case.atoms(tensor=(0, 3)))
    case.refused("routes|bytes", routes=case.routes(hi=(0, 1 << 40)))


# --- rounds and bounds --------------------------------------------------------------------------------------------------


def test_a_slot_over_budget(case):
    assert case.plan.rounds > 1
    fewer = with_rounds(case.plan, case.plan.rounds - 1)
    case.refused(r"into slot '(send|receive|exchange)' of", rounds=fewer.rounds, routes=fewer.routes)
    case.refused(r"over 1024", slot_bytes=1024)


def test_cuts_off_alignment_or_inside_an_element(case):
    local = int(np.flatnonzero(case.plan.routes["entry"] == 5)[0])
    for cut in (63, 32):  # inside an element, and between two but off alignment
        halves = np.append(case.plan.routes, case.plan.routes[local])
        halves["hi"][local] = halves["lo"][-1] = cut
        case.refused("off alignment or inside an element", routes=halves)
    halves["hi"][local] = halves["lo"][-1] = 64
    verify_plan(replace(case.plan, routes=halves), case.spec, case.maps)
    case.refused("alignment 12", alignment=12)
    case.refused("rounds is 0", rounds=0)


def test_bounds_that_are_not_proven(case):
    b = case.plan.bounds
    for match, changed in (
        ("t_min_seconds is", replace(b, t_min_seconds=b.t_min_seconds * 0.9)),
        ("busiest_link_seconds is", replace(b, busiest_link_seconds=b.busiest_link_seconds * 1.1)),
        ("certificate proves", replace(b, link_bound_seconds=b.link_bound_seconds * 1.01)),
        ("multipliers, expected", replace(b, dual=b.dual[1:])),
        ("finite", replace(b, dual=(float("nan"), *b.dual[1:]))),
        ("negative multiplier", replace(b, dual=(*b.dual[:-1], -1e-9))),
        ("weigh", replace(b, dual=tuple(2 * d for d in b.dual))),
        ("its links allow", replace(b, dual=(b.dual[0] + 1.0, *b.dual[1:]))),
    ):
        case.refused(match, bounds=changed)
    # too modest a claim is no error: a weaker bound is still a bound
    verify_plan(
        replace(case.plan, bounds=replace(b, link_bound_seconds=b.link_bound_seconds / 2)), case.spec, case.maps
    )


def test_another_checkpoint_or_other_maps(case):
    other = spec_of((64, 48))
    with pytest.raises(InternalError, match="made for checkpoint"):
        verify_plan(case.plan, other, case.maps)
    with pytest.raises(InternalError, match="6 source maps for 7"):
        verify_plan(case.plan, case.spec, case.maps[1:])
    with pytest.raises(InternalError, match="belongs to checkpoint"):
        verify_plan(case.plan, case.spec, [everything(other), *case.maps[1:]])


def test_a_constant_that_is_transferred():
    free, fixed = spec_of((4,), (3,)), spec_of((4,), (3,), constants={"t1": 1.0})
    topo = topology(trainer(0), rollout("e", 0, "b"))
    plan = make_plan(free, topo, [everything(free)] * 2)
    with pytest.raises(InternalError, match="constant of the checkpoint"):
        verify_plan(replace(plan, spec_digest=fixed.digest), fixed, [takes(fixed, (0,), (1,))] * 2)


def test_a_map_that_takes_one_element_twice_is_counted_once(exact_numel):
    spec = spec_of((64, 4))
    twice = takes(spec, (0, slice(0, 40)), (0, slice(20, 64)), (0, slice(0, 40)))
    maps = [everything(spec), twice]
    plan = make_plan(spec, topology(trainer(0), rollout("e", 0, "b")), maps)
    assert verify_plan(plan, spec, maps, exact_numel=exact_numel).rollout_node_ingress_bytes == {"b": spec.nbytes}


def test_the_class_record_is_what_the_mutations_change(case):
    assert isinstance(case.plan.classes[0], ReplicaClass)
    from weightbridge.plan.network import Network

    net = Network(topology=case.topology, classes=case.plan.classes)
    assert busiest_link_seconds(net, case.plan.routes, case.plan.hops) == case.plan.bounds.busiest_link_seconds
