"""One planner fault of each kind, on an uneven job with two engines of different layout: refused, and the culprit named."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tests.unit.plan_cases import rollout, rows, spec_of, takes, topology, trainer

from weightbridge.errors import InternalError
from weightbridge.plan import HOP, PlanOptions, make_plan, verify_plan

SPEC = spec_of((50, 14), (14, 50), (50, 14), (11,), dtype=["BF16", "BF16", "BF16", "F32"])


def engine_of_columns(rank):
    """Rank of two: columns of the matrices, the vector whole."""
    return takes(SPEC, *((i, slice(None), rows(SPEC.tensors[i].shape[1], rank, 2)) for i in range(3)), (3,))


def engine_of_rows(rank):
    """Rank of four: rows of the matrices, the last rank has fewer; every second element of the vector on odd ranks."""
    return takes(SPEC, *((i, rows(SPEC.tensors[i].shape[0], rank, 4)) for i in range(3)), (3, slice(rank % 2, None, 2)))


class Job:
    """Three trainers with 17, 17 and 16 rows on two nodes; engine e on one node, engine f on two and unevenly."""

    def __init__(self):
        self.topology = topology(
            trainer(0), trainer(1), trainer(2, node="b"),
            rollout("e", 0, "c"), rollout("e", 1, "c"),
            rollout("f", 0, "d"), rollout("f", 1, "d"), rollout("f", 2, "d"), rollout("f", 3, "e"),
        )  # fmt: skip
        trainers = [takes(SPEC, *((i, rows(t.shape[0], r, 3)) for i, t in enumerate(SPEC.tensors))) for r in range(3)]
        self.maps = [*trainers, *map(engine_of_columns, range(2)), *map(engine_of_rows, range(4))]
        self.plan = make_plan(SPEC, self.topology, self.maps, options=PlanOptions(slot_bytes=1024, alignment=64))

    def name(self, worker):
        return self.topology.workers[int(worker)].name

    def node(self, worker):
        return self.topology.workers[int(worker)].node

    def forwarded(self):
        """A hop, its route and the route's class."""
        hop = self.plan.hops[0]
        route = self.plan.routes[hop["route"]]
        return hop, route, self.plan.classes[route["class_id"]]

    def nodes(self, workers):
        return {self.node(w) for w in workers}

    def refused(self, **changes):
        """The message with which the plan with these other columns is refused."""
        with pytest.raises(InternalError) as caught:
            verify_plan(replace(self.plan, **changes), SPEC, self.maps)
        return str(caught.value)


@pytest.fixture(scope="module")
def job():
    return Job()


def with_row(table, at, **columns):
    found = table.copy()
    for name, value in columns.items():
        found[name][at] = value
    return found


def test_the_job_is_uneven_and_its_plan_is_right(job):
    facts = verify_plan(job.plan, SPEC, job.maps)
    assert facts.trainer_egress_bytes == SPEC.nbytes
    assert len(set(facts.needed_bytes.values())) == 3  # c, d and e need different amounts
    assert job.plan.rounds > 1
    assert len(job.plan.hops) > 3


def test_the_facts_are_what_the_routes_add_up_to(job):
    facts, plan, between = verify_plan(job.plan, SPEC, job.maps), job.plan, set()
    egress, ingress = dict.fromkeys(("trainer/0", "trainer/1", "trainer/2"), 0), dict.fromkeys("cde", 0)
    for r in plan.routes:
        between.add((int(r["sender"]), int(r["entry"])))
        egress[job.name(r["sender"])] += int(r["hi"] - r["lo"])
        ingress[job.node(r["entry"])] += int(r["hi"] - r["lo"])
    for h in plan.hops:
        between.add((int(h["src"]), int(h["dst"])))
        ingress[job.node(h["dst"])] += int(plan.routes["hi"][h["route"]] - plan.routes["lo"][h["route"]])
    assert facts.trainer_egress_per_worker == egress
    assert facts.rollout_node_ingress_bytes == facts.needed_bytes == ingress
    assert facts.num_pairs == len(between)
    assert facts.max_out_pairs == max(sum(src == w for src, _ in between) for w in range(9))


# --- the plan and the maps ----------------------------------------------------------------------------------------------


by_boxes_and_elements = pytest.mark.parametrize("exact_numel", [0, 1 << 14], ids=["by_boxes", "by_elements"])


def refused_with_maps(job, exact_numel, **other):
    """The message with which the plan is refused where workers' maps are other ones: trainer_1=..., e_0=..."""
    maps = list(job.maps)
    for name, source_map in other.items():
        maps[job.topology.index[name.replace("_", "/")]] = source_map
    with pytest.raises(InternalError) as caught:
        verify_plan(job.plan, SPEC, maps, exact_numel=exact_numel)
    return str(caught.value)


def third(*first, rank=1):
    """A trainer's map with other pieces of t0."""
    return takes(
        SPEC, *((0, *piece) for piece in first), *((i, rows(SPEC.tensors[i].shape[0], rank, 3)) for i in (1, 2, 3))
    )


@by_boxes_and_elements
def test_a_holder_with_a_hole_in_its_shard(job, exact_numel):
    # rows 17 to 33, and row 20 is not there
    message = refused_with_maps(job, exact_numel, trainer_1=third((slice(17, 20),), (slice(21, 34),)))
    assert re.search(r"tensor 't0': worker 'trainer/1' is said to have \d+ elements that are not in its", message)


@by_boxes_and_elements
def test_a_holder_without_the_tensor(job, exact_numel):
    message = refused_with_maps(job, exact_numel, trainer_1=third())
    assert f"tensor 't0': worker 'trainer/1' is said to have {17 * 14 if exact_numel else ''}" in message


@by_boxes_and_elements
@pytest.mark.parametrize("tensor", [0, 2])
def test_a_needer_of_more_than_it_is_given(job, exact_numel, tensor):
    """f/3 has rows 39 to 49 of t0 and t2, which have equal atoms; now also row 38 of one of them."""
    pieces = [(i, slice(38 if i == tensor else 39, 50)) for i in (0, 2)]
    more = takes(SPEC, *pieces, (1, rows(14, 3, 4)), (3, slice(1, None, 2)))
    message = refused_with_maps(job, exact_numel, f_3=more)
    assert f"tensor 't{tensor}': worker 'f/3' needs 14 elements that it is not given" in message


@by_boxes_and_elements
def test_a_needer_of_a_tensor_that_it_is_not_given(exact_numel):
    spec = spec_of((6, 5), (4,))
    whole, part = takes(spec, (0,), (1,)), takes(spec, (0,))
    topo = topology(trainer(0), rollout("e", 0, "b"), rollout("f", 0, "c"))
    plan = make_plan(spec, topo, [whole, whole, part])
    with pytest.raises(InternalError, match="tensor 't1': worker 'f/0' needs 4 elements"):
        verify_plan(plan, spec, [whole, whole, whole], exact_numel=exact_numel)


@by_boxes_and_elements
def test_what_a_trainer_may_have_is_too_much_for_a_rollout(exact_numel):
    """Both are said to have the same and have the same; only the rollout worker may not have more than it is given."""
    spec = spec_of((6, 5))
    whole, part = takes(spec, (0,)), takes(spec, (0, slice(0, 4)))
    topo = topology(trainer(0), rollout("e", 0, "b"))
    plan = make_plan(spec, topo, [whole, part])
    verify_plan(plan, spec, [whole, part], exact_numel=exact_numel)
    with pytest.raises(InternalError, match="tensor 't0': worker 'e/0' needs 10 elements"):
        verify_plan(plan, spec, [whole, whole], exact_numel=exact_numel)


@by_boxes_and_elements
def test_of_two_who_are_given_the_same_one_needs_more(exact_numel):
    spec = spec_of((6, 5))
    whole, part = takes(spec, (0,)), takes(spec, (0, slice(0, 4)))
    topo = topology(trainer(0), rollout("e", 0, "b"), rollout("f", 0, "c"))
    plan = make_plan(spec, topo, [whole, part, part])
    with pytest.raises(InternalError, match="tensor 't0': worker 'f/0' needs 5 elements"):
        verify_plan(plan, spec, [whole, part, takes(spec, (0, slice(0, 5)))], exact_numel=exact_numel)


@by_boxes_and_elements
def test_one_of_two_equal_tensors_with_swapped_atoms(job, exact_numel):
    a = job.plan.atoms
    i, j = next(
        (i, j)
        for i in range(len(a)) for j in range(i)
        if a.tensor[i] == a.tensor[j] == 2 and a.class_id[i] != a.class_id[j] and (a.count[i] == a.count[j]).all()
    )  # fmt: skip
    start = a.start.copy()
    start[[i, j]] = a.start[[j, i]]
    wrong = replace(job.plan, atoms=replace(a, start=start))
    with pytest.raises(InternalError, match=r"tensor 't2': worker '[^']+' is said to have \d+ elements that are not"):
        verify_plan(wrong, SPEC, job.maps, exact_numel=exact_numel)


@by_boxes_and_elements
def test_equal_copies_of_tensors_of_other_shapes(exact_numel):
    """16 elements with pitch 6 are a corner of a (4, 6) tensor, and none of a (6, 4) one."""
    spec = spec_of((4, 6), (6, 4))
    corners = takes(spec, (0, slice(0, 4), slice(0, 4)), (1, slice(0, 4), slice(0, 4)))
    topo = topology(trainer(0), rollout("e", 0, "b"))
    plan = make_plan(spec, topo, [corners, corners])
    stride = corners.copies.src_stride.copy()
    stride[1] = stride[0]
    wrong = replace(corners, copies=replace(corners.copies, src_stride=stride))
    with pytest.raises(InternalError, match=r"tensor 't1': worker '[^']+' (is said to have|needs) \d+ elements"):
        verify_plan(plan, spec, [wrong, wrong], exact_numel=exact_numel)


@by_boxes_and_elements
def test_a_stream_that_holds_a_byte_twice(job, exact_numel):
    """Two atoms of one class and shape get the same place: one byte would be sent twice, another never."""
    a = job.plan.atoms
    i, j = next(
        (i, j)
        for i in range(len(a)) for j in range(i)
        if a.tensor[i] == a.tensor[j] and (a.count[i] == a.count[j]).all()
    )  # fmt: skip
    start = a.start.copy()
    start[i] = a.start[j]
    wrong = replace(job.plan, atoms=replace(a, start=start))
    with pytest.raises(InternalError, match=rf"tensor 't{a.tensor[i]}'.*(share elements|in two atoms)"):
        verify_plan(wrong, SPEC, job.maps, exact_numel=exact_numel)


# --- bytes on their way -------------------------------------------------------------------------------------------------


def test_a_byte_sent_twice(job):
    hop, route, _ = job.forwarded()
    message = job.refused(routes=np.append(job.plan.routes, job.plan.routes[int(hop["route"])]))
    assert f"of class {route['class_id']} into node {job.node(route['entry'])!r} come twice" in message


def test_bytes_of_two_routes_that_overlap(job):
    """A route is cut in two, and the second begins 64 bytes before the first ends."""
    r, i = job.plan.routes, int(np.argmax(job.plan.routes["hi"] - job.plan.routes["lo"]))
    cut, class_id = int(r["lo"][i]) + 128, r["class_id"][i]
    routes = with_row(np.append(r, r[i]), i, hi=cut)
    routes["lo"][-1] = cut - 64
    forwarded = job.plan.hops[job.plan.hops["route"] == i]
    forwarded["route"] = len(r)
    message = job.refused(routes=routes, hops=np.append(job.plan.hops, forwarded))
    assert re.search(rf"bytes {cut - 64} to {cut} of class {class_id} into node '\w' come twice", message)
    routes["lo"][-1] = cut
    mended = replace(job.plan, routes=routes, hops=np.append(job.plan.hops, forwarded), slot_bytes=1 << 20)
    verify_plan(mended, SPEC, job.maps)


def test_a_byte_missing(job):
    hop, route, _ = job.forwarded()
    lo, hi = int(route["lo"]), int(route["hi"])
    message = job.refused(routes=with_row(job.plan.routes, int(hop["route"]), lo=lo + 64))
    assert f"bytes {lo} to {lo + 64} of class {route['class_id']} into node" in message
    assert "are missing" in message
    assert hi > lo + 64


def test_a_route_of_no_bytes(job):
    r = job.plan.routes
    message = job.refused(routes=with_row(np.append(r, r[:1]), len(r), lo=r["hi"][0]))
    assert (
        f"route {len(r)} carries bytes {r['hi'][0]} to {r['hi'][0]} of class {r['class_id'][0]}, which has" in message
    )


def test_a_node_that_is_forgotten(job):
    hop, route, _ = job.forwarded()
    message = job.refused(hops=job.plan.hops[1:])
    assert f"of class {route['class_id']} into node {job.node(hop['dst'])!r} are missing" in message


def test_a_byte_from_somebody_who_does_not_hold_it(job):
    hop, route, class_ = job.forwarded()
    stranger = next(t for t in job.topology.trainers if t not in class_.holders)
    message = job.refused(routes=with_row(job.plan.routes, int(hop["route"]), sender=stranger))
    assert f"route {hop['route']}: worker {job.name(stranger)!r} sends class {route['class_id']}" in message
    assert "does not hold it" in message


@by_boxes_and_elements
def test_a_holder_who_is_none(job, exact_numel):
    """The class table itself lies: it names a trainer whose map does not have the bytes."""
    i, class_ = next((i, c) for i, c in enumerate(job.plan.classes) if 2 not in c.holders)
    classes = list(job.plan.classes)
    classes[i] = replace(class_, holders=(*class_.holders, 2))
    with pytest.raises(InternalError, match=r"worker 'trainer/2' is said to have \d+ elements that are not in its"):
        verify_plan(replace(job.plan, classes=tuple(classes)), SPEC, job.maps, exact_numel=exact_numel)


def test_a_round_over_the_budget(job):
    small = job.plan.slot_bytes // 2
    message = job.refused(slot_bytes=small)
    assert f"over {small}" in message
    assert any(f"into slot {slot!r} of" in message for slot in ("send", "receive", "exchange"))
    assert any(f"{w.name!r}" in message for w in job.topology.workers)


def test_routes_piled_on_one_sender_overflow_its_slot(job):
    """Everything a trainer holds leaves by one worker where two could send: nothing is lost, one slot is too small."""
    whole = takes(SPEC, *((i,) for i in range(4)))
    maps = [whole] * 3 + job.maps[3:]
    plan = make_plan(SPEC, job.topology, maps, options=PlanOptions(slot_bytes=1024, alignment=64))
    assert len(np.unique(plan.routes["sender"])) == 3
    piled = plan.routes.copy()
    piled["sender"] = 2
    with pytest.raises(InternalError, match=r"round \d+ puts \d+ bytes into slot 'send' of 'trainer/2', over 1024"):
        verify_plan(replace(plan, routes=piled), SPEC, maps)


def test_a_forward_by_one_who_lacks_the_bytes(job):
    hop, _, _ = job.forwarded()
    has = {int(job.plan.routes["entry"][hop["route"]]), int(hop["dst"])}
    other = next(w for w in job.topology.rollouts if w not in has and job.node(w) != job.node(hop["dst"]))
    message = job.refused(hops=with_row(job.plan.hops, 0, src=other))
    assert f"hop 0: worker {job.name(other)!r} passes route {hop['route']} on in stage 1 before it has it" in message


def test_a_forward_in_the_stage_in_which_it_arrives(job):
    """The second of two hops in a row needs a later stage than the first."""
    route = next(r for r in range(len(job.plan.routes)) if np.count_nonzero(job.plan.hops["route"] == r) > 1)
    first, second = np.flatnonzero(job.plan.hops["route"] == route)[:2]
    message = job.refused(hops=with_row(job.plan.hops, second, src=job.plan.hops["dst"][first]))
    assert (
        f"hop {second}: worker {job.name(job.plan.hops['dst'][first])!r} passes route {route} on in stage 1" in message
    )


def test_a_forward_to_a_node_that_does_not_need_the_bytes(job):
    i, class_id = next(
        (i, c) for i, c in enumerate(job.plan.routes["class_id"]) if len(job.nodes(job.plan.classes[c].needers)) < 3
    )
    idle = next(w for w in job.topology.rollouts if job.node(w) not in job.nodes(job.plan.classes[class_id].needers))
    hop = np.array([(i, 1, job.plan.routes["entry"][i], idle)], HOP)
    message = job.refused(hops=np.append(job.plan.hops, hop))
    assert f"node {job.node(idle)!r} gets bytes of class {class_id}, which nobody there needs" in message


def test_a_forward_to_a_trainer(job):
    hop, _, _ = job.forwarded()
    message = job.refused(hops=np.append(job.plan.hops, np.array([(hop["route"], 1, hop["src"], 2)], HOP)))
    assert f"hop {len(job.plan.hops)}: worker 'trainer/2' gets route {hop['route']} twice, on" in message


def test_a_forward_twice_to_one_worker(job):
    hop, _, _ = job.forwarded()
    message = job.refused(hops=np.append(job.plan.hops, job.plan.hops[:1]))
    assert f"hop {len(job.plan.hops)}: worker {job.name(hop['dst'])!r} gets route {hop['route']} twice" in message


def test_a_forward_twice_to_one_node(job):
    """To a second worker of a node that has its copy."""
    i = next(i for i, h in enumerate(job.plan.hops) if job.node(h["dst"]) in ("c", "d"))
    hop = job.plan.hops[i]
    mate = next(w for w in job.topology.rollouts if w != hop["dst"] and job.node(w) == job.node(hop["dst"]))
    again = np.array([(hop["route"], 1, hop["src"], mate)], HOP)
    message = job.refused(hops=np.append(job.plan.hops, again))
    class_id = job.plan.routes["class_id"][hop["route"]]
    assert f"of class {class_id} into node {job.node(mate)!r} come twice" in message
