"""Plans for links of unlike speed, against an even split, with the numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.plan_cases import everything, rollout, rows, spec_of, takes, topology, trainer

from weightbridge.errors import InternalError
from weightbridge.plan import STAGES, NodeGroup, PlanOptions, decode_plan, encode_plan, make_plan, verify_plan

OPTIONS = PlanOptions(slot_bytes=4 << 20, alignment=64)
RELAY = STAGES.index("relay")


def planned(spec, topo, maps, options=OPTIONS):
    plan = make_plan(spec, topo, maps, options=options)
    facts = verify_plan(plan, spec, maps)
    assert plan.bounds.busiest_link_seconds <= plan.bounds.link_bound_seconds * 1.0001
    assert decode_plan(encode_plan(plan)).digest == plan.digest
    return plan, facts


def edges(plan):
    """(source, target, bytes) of everything that travels, straight from the tables."""
    size = (plan.routes["hi"] - plan.routes["lo"]).tolist()
    found = list(zip(plan.routes["sender"].tolist(), plan.routes["entry"].tolist(), size, strict=True))
    return found + [(src, dst, size[route]) for route, _, src, dst in plan.hops.tolist()]


def crossing(plan, group):
    """(bytes out, bytes in) of a group's uplink."""
    nodes = next(g.nodes for g in plan.topology.groups if g.name == group)
    inside = [w.node in nodes for w in plan.topology.workers]
    out = sum(n for src, dst, n in edges(plan) if inside[src] and not inside[dst])
    return out, sum(n for src, dst, n in edges(plan) if inside[dst] and not inside[src])


def sent(plan):
    found = dict.fromkeys(range(len(plan.topology.workers)), 0)
    for src, dst, n in edges(plan):
        if plan.topology.workers[src].node != plan.topology.workers[dst].node:
            found[src] += n
    return found


# --- what theory says -------------------------------------------------------------------------------------------------


def test_a_trainer_node_at_a_quarter_of_the_speed():
    """Four trainers on nodes of 1, 1, 1 and 1/4 GB/s hold all of a model of 5.2 MB; the rollout node takes 13 GB/s.

    Evenly split each sends 1.3 MB, and the slow one needs 1.3 MB / 0.25 GB/s = 5.2 ms. Split by speed all are done after
    5.2 MB / 3.25 GB/s = 1.6 ms (1.6 MB from each fast one, 0.4 MB from the slow one): 3.25 times sooner.
    """
    spec = spec_of((2600, 1000))
    topo = topology(*(trainer(i, f"t{i}", 1e9) for i in range(3)), trainer(3, "t3", 0.25e9), rollout("e", 0, "b", 13e9))
    plan, facts = planned(spec, topo, [everything(spec)] * 5)
    even_seconds = (spec.nbytes / 4) / 0.25e9
    assert even_seconds == pytest.approx(5.2e-3)
    assert plan.bounds.t_min_seconds == pytest.approx(1.6e-3)
    assert even_seconds / plan.bounds.busiest_link_seconds == pytest.approx(3.25, rel=1e-3)
    assert list(facts.trainer_egress_per_worker.values()) == pytest.approx([1.6e6] * 3 + [0.4e6], rel=1e-3)


def even_split_seconds(topo, nbytes):
    """Time of the busiest link when every trainer sends an equal share of a replica, in equal parts to every rollout node
    first, which passes them on to every other: what is done without an LP, on one worker a node."""
    group_of = {n: g.name for g in topo.groups for n in g.nodes}
    rate = {g.name: g.bandwidth for g in topo.groups} | {w: topo.workers[w].bandwidth for w in range(len(topo.workers))}
    load = {}
    share = nbytes / len(topo.trainers) / len(topo.rollouts)
    for t in topo.trainers:
        for first in topo.rollouts:
            for src, dst in [(t, first), *((first, other) for other in topo.rollouts if other != first)]:
                here, there = (group_of.get(topo.workers[w].node) for w in (src, dst))
                links = [("out", src), ("in", dst), *([("out", here), ("in", there)] if here != there else [])]
                for link in links:
                    load[link] = load.get(link, 0) + share
    return max(n / rate[link] for (way, link), n in load.items() if link in rate)


def two_clusters(*, trainers_east=0, uplink=1e9):
    """Two trainers and four rollout nodes in the west, four (and perhaps trainers) in the east: 4 GB/s a node, 8 a trainer."""
    west, east = [f"w{i}" for i in range(4)], [f"e{i}" for i in range(4)]
    trainers = [trainer(i, f"tw{i}", 8e9) for i in range(2)] + [
        trainer(2 + i, f"te{i}", 8e9) for i in range(trainers_east)
    ]
    rollouts = [rollout(n, 0, n, 4e9) for n in (*west, *east)]
    groups = (
        NodeGroup(name="west", nodes=("tw0", "tw1", *west), bandwidth=uplink),
        NodeGroup(name="east", nodes=(*(t.node for t in trainers[2:]), *east), bandwidth=uplink),
    )
    return topology(*trainers, *rollouts, groups=groups)


def test_two_clusters_joined_by_a_slow_link():
    """A model of 4 MB; the trainers and four of eight replicas in the west, the link between the clusters 1 GB/s.

    Whatever the plan, 4 MB must cross: 4 ms, while a replica takes in its 4 MB in 1 ms. In an even split half of the bytes
    are in the west first and cross to each of four nodes, half cross once to their first node: 2 MB * 4 + 2 MB = 10 MB over
    the link, 10 ms. The LP's plan sends each byte over it once: 2.5 times sooner.
    """
    spec = spec_of((2000, 1000))
    topo = two_clusters()
    plan, facts = planned(spec, topo, [everything(spec)] * len(topo.workers))
    even_seconds = even_split_seconds(topo, spec.nbytes)
    assert even_seconds == pytest.approx(10e-3)
    assert plan.bounds.link_bound_seconds == pytest.approx(4e-3)
    assert plan.bounds.t_min_seconds == pytest.approx(1e-3)
    assert even_seconds / plan.bounds.busiest_link_seconds == pytest.approx(2.5, rel=1e-3)
    assert crossing(plan, "west")[0] == crossing(plan, "east")[1] == spec.nbytes
    assert facts.trainer_egress_bytes == spec.nbytes
    assert set(facts.rollout_node_ingress_bytes.values()) == {spec.nbytes}


def test_two_clusters_with_trainers_in_both():
    """The same with two more trainers, which hold all of it too, in the east.

    Each byte leaves the trainers once, and its other cluster gets it over the link once: with half of them from each side,
    2 MB out of each, 2 ms. Evenly split, half of the bytes of the west's trainers (2 MB) is first in the west and goes to
    four nodes in the east, half is first in the east and crosses once: 1 MB * 4 + 1 MB; and what the east's trainers send to
    first nodes in the west goes back to four: 1 MB * 4. Out of the west go 9 MB, 9 ms: 4.5 times later.
    """
    spec = spec_of((2000, 1000))
    topo = two_clusters(trainers_east=2)
    plan, _ = planned(spec, topo, [everything(spec)] * len(topo.workers))
    even_seconds = even_split_seconds(topo, spec.nbytes)
    assert even_seconds == pytest.approx(9e-3)
    assert plan.bounds.link_bound_seconds == pytest.approx(2e-3)
    assert even_seconds / plan.bounds.busiest_link_seconds == pytest.approx(4.5, rel=1e-3)
    assert sum(crossing(plan, "west")) == spec.nbytes


# --- what crosses, and who passes it on ---------------------------------------------------------------------------------


def test_gateways_share_the_work_and_relay_inside():
    # the west's replica and the east's three, all of 1 GB/s: the east's gateways relay a third each
    spec = spec_of((3000, 500))
    topo = topology(
        trainer(0, "t", 9e9), rollout("w", 0, "w0"), *(rollout(f"e{i}", 0, f"e{i}") for i in range(3)),
        groups=(NodeGroup(name="east", nodes=("e0", "e1", "e2"), bandwidth=2e9),),
    )  # fmt: skip
    plan, _ = planned(spec, topo, [everything(spec)] * 5)
    assert crossing(plan, "east")[1] == spec.nbytes
    loads = sent(plan)
    assert [loads[w] for w in (2, 3, 4)] == pytest.approx([2 / 3 * spec.nbytes] * 3, rel=0.35)
    assert max(loads[w] for w in (1, 2, 3, 4)) <= spec.nbytes * 1.0001


def test_copies_go_along_the_rails_to_gateways_and_from_them():
    spec = spec_of((4096, 64))
    engines = [takes(spec, (0, rows(4096, r, 4))) for r in range(4)]
    nodes = ("w0", "w1", "e0", "e1", "e2")
    topo = topology(
        *(trainer(i) for i in range(2)), *(rollout(n, r, n) for n in nodes for r in range(4)),
        groups=(NodeGroup(name="west", nodes=("a", "w0", "w1"), bandwidth=3e9),
                NodeGroup(name="east", nodes=nodes[2:], bandwidth=3e9)),
    )  # fmt: skip
    shards = [takes(spec, (0, rows(4096, r, 2))) for r in range(2)]
    rank = [w.rank for w in topo.workers]
    for engine in (engines, [everything(spec)] * 4):
        plan, _ = planned(spec, topo, [*shards, *engine * 5])
        assert all(rank[src] == rank[dst] for _, _, src, dst in plan.hops.tolist())
        assert RELAY in plan.hops["stage"]


def test_a_busy_node_is_no_gateway():
    # e0's own trainer sends 20 MB through a node limit of 1 GB/s, 20 ms: whatever e0 relayed of the other 10 MB came on top
    spec = spec_of((10_000, 500), (10_000, 1000))
    topo = topology(
        trainer(0, "t", 9e9), trainer(1, "e0", 9e9), rollout("w", 0, "w0", 9e9), rollout("a", 0, "e0", 9e9),
        rollout("b", 0, "e1", 9e9), rollout("sink", 0, "sink", 9e9), node_bandwidth=(("e0", 1e9),),
        groups=(NodeGroup(name="east", nodes=("e0", "e1"), bandwidth=5e9),),
    )  # fmt: skip
    small, large = takes(spec, (0,)), takes(spec, (1,))
    plan, _ = planned(spec, topo, [small, large, small, small, small, large])
    assert plan.bounds.busiest_link_seconds == pytest.approx(20e-3, rel=1e-4)
    assert sent(plan)[3] == 0
    assert crossing(plan, "east") == (20_000_000, 10_000_000)


def test_every_rail_relays_alike():
    # a class for each rank of four engines: the LP gives each class one gateway, but every worker must pass on its share
    spec = spec_of(*[(700, 300)] * 8, (3000, 200))
    ranks = [takes(spec, (r,), (4 + r,), (8,)) for r in range(4)]
    nodes = ("w0", "w1", "w2", "e0", "e1", "e2")
    topo = topology(
        *(trainer(i, bandwidth=4e9) for i in range(4)), *(rollout(n, r, n) for n in nodes for r in range(4)),
        groups=(NodeGroup(name="west", nodes=nodes[:3], bandwidth=2e9), NodeGroup(name="east", nodes=nodes[3:], bandwidth=2e9)),
    )  # fmt: skip
    plan, _ = planned(spec, topo, [*[everything(spec)] * 4, *ranks * 6])
    loads = [sent(plan)[w] for w in topo.rollouts]
    assert max(loads) <= np.mean(loads) * 1.01


def test_a_topology_without_groups_has_no_relays():
    spec = spec_of((4000, 64))
    workers = (trainer(0), *(rollout(f"e{i}", 0, f"n{i}") for i in range(3)))
    for topo in (
        topology(*workers),
        topology(*workers, groups=(NodeGroup(name="all", nodes=("a", "n0", "n1", "n2"), bandwidth=1.0),)),
    ):
        plan, _ = planned(spec, topo, [everything(spec)] * 4)
        assert set(plan.hops["stage"].tolist()) == {STAGES.index("exchange")}
    assert crossing(plan, "all") == (0, 0)


# --- wrong plans --------------------------------------------------------------------------------------------------------

EXCHANGE = STAGES.index("exchange")


class Clusters:
    """Two clusters with trainers in both, planned; `hop` finds a hop by stage and by the clusters of its two ends."""

    def __init__(self):
        self.spec = spec_of((1999, 250))
        self.topology = two_clusters(trainers_east=1)
        self.maps = [everything(self.spec)] * len(self.topology.workers)
        self.plan, _ = planned(self.spec, self.topology, self.maps)
        self.group = [self.topology.group_of[w.node] for w in self.topology.workers]

    def hop(self, stage, src, dst):
        return next(
            i
            for i, (_, s, a, b) in enumerate(self.plan.hops.tolist())
            if (s, self.group[a], self.group[b]) == (stage, src, dst)
        )

    def refused(self, match, **changes):
        with pytest.raises(InternalError, match=match):
            verify_plan(replace(self.plan, **changes), self.spec, self.maps)

    def refused_hop(self, match, at, **columns):
        hops = self.plan.hops.copy()
        for name, value in columns.items():
            hops[name][at] = value
        self.refused(match, hops=hops)


@pytest.fixture(scope="module")
def clusters():
    return Clusters()


def test_a_byte_that_crosses_into_a_group_twice_is_refused(clusters):
    at = clusters.hop(RELAY, 1, 1)  # sent by the entry worker in the west instead of the gateway in the east
    entry = clusters.plan.routes["entry"][clusters.plan.hops["route"][at]]
    clusters.refused_hop("come to group 'east' twice", at, stage=EXCHANGE, src=entry)


def test_a_relay_that_leaves_its_group_is_refused(clusters):
    at = clusters.hop(EXCHANGE, 0, 0)
    hops = clusters.plan.hops
    gateway = next(
        dst for route, _, _, dst in hops[hops["route"] == hops["route"][at]].tolist() if clusters.group[dst] == 1
    )
    clusters.refused_hop("is relayed out of the group", at, stage=RELAY, src=gateway)


def test_a_relay_by_one_who_is_no_gateway_is_refused(clusters):
    at = clusters.hop(EXCHANGE, 0, 0)
    mine = np.flatnonzero(clusters.plan.hops["route"] == clusters.plan.hops["route"][at])
    other = next(i for i in mine if i != at and clusters.group[clusters.plan.hops["dst"][i]] == 0)
    clusters.refused_hop("to which no other group sent it", at, stage=RELAY, src=int(clusters.plan.hops["dst"][other]))


def test_every_multiplier_of_a_certificate_counts(clusters):
    """The certificate is tight, so that changing any one multiplier makes it infeasible or prove less than is claimed."""
    bounds = clusters.plan.bounds
    dual = np.array(bounds.dual)
    uplinks = dual[1 + len(clusters.topology.trainers) + 2 * 8 :]
    assert (uplinks[:4] > 0).any()  # both directions of both groups, then the class's two domains
    assert len(uplinks) == 4 + 2
    for i in np.flatnonzero(dual):
        for factor in (0.99, 1.01):
            changed = dual.copy()
            changed[i] *= factor
            clusters.refused("certificate", bounds=replace(bounds, dual=tuple(changed.tolist())))
    for i in np.flatnonzero(dual == 0):
        changed = dual.copy()
        changed[i] = -1e-12
        clusters.refused("certificate", bounds=replace(bounds, dual=tuple(changed.tolist())))
    clusters.refused("multipliers, expected", bounds=replace(bounds, dual=bounds.dual[:-1]))
    clusters.refused("certificate proves", bounds=replace(bounds, link_bound_seconds=bounds.link_bound_seconds * 1.001))


def test_a_busiest_link_that_leaves_out_an_uplink_is_refused(clusters):
    bounds = clusters.plan.bounds
    clusters.refused(
        "busiest_link_seconds is", bounds=replace(bounds, busiest_link_seconds=bounds.busiest_link_seconds / 2)
    )
