"""Routes carry exact shares over few pairs: filling, pools, rails, and whole plans counted from their tables alone."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.unit.plan_cases import everything, rollout, rows, spec_of, takes, topology, trainer

from weightbridge.plan import PlanOptions, make_plan, verify_plan
from weightbridge.plan.filling import Crumbs, Item, cut_points, fill
from weightbridge.plan.flow import solve
from weightbridge.plan.links import link_use
from weightbridge.plan.network import Network
from weightbridge.plan.pools import pools

EXACT = Crumbs(alignment=64, whole_bytes=0, exact_bytes=0.0)


# --- filling ----------------------------------------------------------------------------------------------------------


def test_items_are_laid_end_to_end_over_the_workers():
    found = fill([Item(nbytes=1000), Item(nbytes=600)], {7: 640.0, 3: 640.0, 5: 320.0}, EXACT)
    assert found == [[(7, 640), (3, 360)], [(3, 256), (5, 344)]]  # 280 bytes of room: cut at 256


def test_choosy_items_come_first_and_the_choosiest_of_them():
    items = [Item(nbytes=640), Item(nbytes=640, wanted=(1, 2)), Item(nbytes=640, wanted=(1,))]
    assert fill(items, {1: 640.0, 2: 640.0, 3: 640.0}, EXACT) == [[(3, 640)], [(2, 640)], [(1, 640)]]


def test_an_item_goes_to_whom_it_likes_while_there_is_room():
    items = [Item(nbytes=640, liked=(2,)), Item(nbytes=640, liked=(2, 3)), Item(nbytes=320)]
    assert fill(items, {1: 640.0, 2: 960.0, 3: 0.0}, EXACT) == [[(2, 640)], [(2, 320), (1, 320)], [(1, 320)]]


def test_liking_does_not_take_the_room_of_the_choosy():
    items = [Item(nbytes=640, liked=(2,)), Item(nbytes=640, wanted=(2,))]
    assert fill(items, {1: 640.0, 2: 640.0}, EXACT) == [[(1, 640)], [(2, 640)]]


def test_a_choosy_item_without_room_goes_on_elsewhere():
    found = fill([Item(nbytes=1280, wanted=(2,)), Item(nbytes=640)], {1: 960.0, 2: 960.0}, EXACT)
    assert found == [[(2, 960), (1, 320)], [(1, 640)]]


def test_half_filled_workers_are_filled_up_before_fresh_ones():
    items = [Item(nbytes=n, wanted=(1, 2, 3)) for n in (960, 640, 320)]
    found = fill([*items, Item(nbytes=1280)], dict.fromkeys((1, 2, 3, 4), 800.0), EXACT)
    assert found == [[(1, 768), (2, 192)], [(2, 640)], [(3, 320)], [(3, 448), (4, 832)]]  # 32 bytes are no cut


def test_crumbs_stay_where_they_are():
    generous = Crumbs(alignment=64, whole_bytes=0, exact_bytes=1e9)
    items = [Item(nbytes=100 << 10), Item(nbytes=100 << 10)]
    room = {1: 100 * 1024 - 300.0, 2: 100 * 1024 + 300.0}  # 300 bytes are less than one in 256
    assert [len(parts) for parts in fill(items, dict(room), EXACT)] == [2, 1]
    assert [len(parts) for parts in fill(items, dict(room), generous)] == [1, 1]


def test_crumbs_cancel_out():
    # one stream over 16 workers with room for 1500 bytes each: every cut is up to 63 bytes off, the sum is not
    [parts] = fill([Item(nbytes=24000)], dict.fromkeys(range(16), 1500.0), EXACT)
    assert [w for w, _ in parts] == [*range(16)]
    assert {n for _, n in parts} == {1472, 1536}


def test_short_items_stay_whole_where_most_room_is():
    whole = Crumbs(alignment=64, whole_bytes=500, exact_bytes=0.0)
    items = [Item(nbytes=500), Item(nbytes=400, wanted=(1, 2)), Item(nbytes=501)]
    room = {1: 300.0, 2: 350.0, 3: 751.0}
    assert fill(items, room, whole) == [[(3, 500)], [(2, 400)], [(1, 256), (3, 245)]]


def test_everything_is_laid_even_without_room():
    found = fill([Item(nbytes=1000), Item(nbytes=64, wanted=(1,))], {1: 0.0, 2: 0.0}, EXACT)
    assert [sum(n for _, n in parts) for parts in found] == [1000, 64]


def test_cut_points_are_aligned_and_end_at_the_end():
    assert cut_points([1.0, 1.0, 1.0], 1000, 64) == [320, 640, 1000]
    assert cut_points([3.0, 1.0, 0.0], 1000, 64) == [768, 1000, 1000]
    assert cut_points([0.0, 5.0], 10, 64) == [0, 10]


# --- whole plans ------------------------------------------------------------------------------------------------------


def edges(plan):
    """(from, to, bytes) of everything, straight from the tables."""
    size = (plan.routes["hi"] - plan.routes["lo"]).tolist()
    found = list(zip(plan.routes["sender"].tolist(), plan.routes["entry"].tolist(), size, strict=True))
    return found + [(src, dst, size[route]) for route, _, src, dst in plan.hops.tolist()]


def per_worker(plan, end):
    found = dict.fromkeys(range(len(plan.topology.workers)), 0)
    for edge in edges(plan):
        found[edge[end]] += edge[2]
    return found


def moe_job(engines=4, width=4, rates=None):
    """Two trainers with half of 8 experts each and all of the attention; engines over two nodes of `width` workers.

    Expert e is needed by one worker of each engine, the attention by all of them.
    """
    spec = spec_of(*[(9000, 257)] * (2 * width), (1790, 300), (9, 5))
    experts = range(2 * width)
    trainers = [takes(spec, *((e,) for e in experts if e % 2 == t), (2 * width,), (2 * width + 1,)) for t in range(2)]
    workers, maps = [trainer(t, "t", 40e9) for t in range(2)], trainers
    for e in range(engines):
        for r in experts:
            rate = 1e9 if rates is None else rates[r % width]
            workers.append(rollout(f"e{e}", r, f"n{e}.{r // width}", rate))
            maps.append(takes(spec, (r,), (2 * width,), (2 * width + 1,)))
    return spec, topology(*workers), maps


@pytest.mark.parametrize("rates", [None, (1e9, 2e9, 1e9, 3e9)], ids=["equal", "uneven"])
def test_every_link_carries_its_exact_share(rates):
    spec, topo, maps = moe_job(rates=rates)
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64))
    facts = verify_plan(plan, spec, maps)
    assert facts.trainer_egress_bytes == spec.nbytes
    assert plan.bounds.busiest_link_seconds <= plan.bounds.link_bound_seconds * (1 + 2e-4)
    rate = [w.bandwidth for w in topo.workers]
    into, out = per_worker(plan, 1), per_worker(plan, 0)
    for node in topo.nodes[1:]:
        here = topo.on_node(node)
        seconds = [into[w] / rate[w] for w in here]
        assert max(seconds) <= min(seconds) * 1.001
        passed_on = [out[w] / rate[w] for w in here]
        assert max(passed_on) <= 1.002 * sum(out[w] for w in here) / sum(rate[w] for w in here)
    mean = sum(out[w] for w in topo.rollouts) / sum(rate[w] for w in topo.rollouts)
    assert max(out[w] / rate[w] for w in topo.rollouts) <= 1.002 * mean


def test_what_many_nodes_need_enters_at_few():
    spec, topo, maps = moe_job()
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64))
    wide = [i for i, c in enumerate(plan.classes) if len(c.needers) == 32 and c.nbytes > 1000]
    routes = plan.routes[[c in wide for c in plan.routes["class_id"].tolist()]]
    assert len({topo.workers[w].node for w in routes["entry"].tolist()}) <= 3  # of 8
    out_pairs = Counter(src for src, _ in {(a, b) for a, b, _ in edges(plan) if a in topo.rollouts})
    assert sorted(out_pairs.values())[0] == 3  # experts only: the other three engines
    assert max(out_pairs.values()) == 7
    net = Network(topology=topo, classes=plan.classes)
    flow = solve(net)
    for node in net.rollout_nodes:  # what a node forwards is what the LP says
        wanted = sum(n * (len(net.targets[c]) - 1) for c, into in enumerate(flow.enter) for v, n in into if v == node)
        given = sum(pool.into.get(node, 0.0) * (len(pool.targets) - 1) for pool in pools(net, flow, 256))
        assert given == pytest.approx(wanted, rel=1e-6)


def test_experts_enter_at_a_worker_that_needs_them():
    spec, topo, maps = moe_job()
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64))
    for class_id, entry in plan.routes[["class_id", "entry"]].tolist():
        assert entry in plan.classes[class_id].needers
    for route, _, src, dst in plan.hops.tolist():
        assert dst in plan.classes[plan.routes["class_id"][route]].needers
        assert (topo.workers[src].rank - topo.workers[dst].rank) % 4 == 0  # along the rail


def test_rails_join_workers_that_need_the_same():
    # the second engine's ranks lie on its node in the other order
    spec = spec_of((400, 64))
    orders = ((0, 1, 2, 3), (3, 2, 1, 0))
    topo = topology(trainer(0), *(rollout(f"e{e}", r, f"n{e}") for e, order in enumerate(orders) for r in order))
    maps = [everything(spec), *(takes(spec, (0, rows(400, r, 4))) for order in orders for r in order)]
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64))
    verify_plan(plan, spec, maps)
    assert len(plan.hops)
    assert all(topo.workers[src].rank == topo.workers[dst].rank for _, _, src, dst in plan.hops.tolist())


def test_copies_between_unlike_nodes_go_where_there_is_room():
    # three workers of one node pass on to two of another, whose links are 1 to 3
    spec = spec_of((3000, 100), (90, 10))
    topo = topology(
        trainer(0, "t", 9e9),
        *(rollout("e", r, "n") for r in range(3)),
        rollout("f", 0, "m", 1e9),
        rollout("f", 1, "m", 3e9),
    )
    maps = [everything(spec)] * 6
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64))
    verify_plan(plan, spec, maps)
    into = per_worker(plan, 1)
    assert into[5] / into[4] == pytest.approx(3, rel=2e-3)
    assert [into[w] / spec.nbytes for w in (1, 2, 3)] == pytest.approx([1 / 3] * 3, rel=2e-3)


def test_nodes_of_as_many_workers_but_other_links_are_no_rails():
    spec = spec_of((3000, 100), (90, 10))
    links = ((1e9, 1e9), (1e9, 3e9))
    topo = topology(
        trainer(0, "t", 9e9),
        *(rollout(f"e{v}", r, f"n{v}", rate) for v, rates in enumerate(links) for r, rate in enumerate(rates)),
    )
    maps = [everything(spec)] * 5
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64))
    verify_plan(plan, spec, maps)
    into = per_worker(plan, 1)
    assert [into[w] / spec.nbytes for w in (1, 2, 3, 4)] == pytest.approx([0.5, 0.5, 0.25, 0.75], rel=2e-3)
    assert plan.bounds.busiest_link_seconds <= plan.bounds.link_bound_seconds * 1.001


def test_senders_keep_their_shares_where_a_worker_begins_close_by():
    # the trainers' links are 100 to 101: their cut lies a quarter of a percent before the middle, where the workers change
    spec = spec_of((3000, 1000))
    topo = topology(trainer(0, "t", 1e9), trainer(1, "u", 1.01e9), *(rollout("e", r, "n", 9e9) for r in range(2)))
    maps = [everything(spec)] * 4
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64))
    verify_plan(plan, spec, maps)
    assert len(plan.routes) == 3
    assert plan.bounds.busiest_link_seconds <= plan.bounds.link_bound_seconds * 1.0001


def test_a_sender_meets_few_workers():
    # 16 trainers with a slice each and two nodes of four workers: a slice and a share overlap at 16 + 8 - 1 places at most
    spec = spec_of((1600, 500))
    topo = topology(
        *(trainer(i, f"t{i // 4}") for i in range(16)),
        *(rollout(f"e{v}", r, f"n{v}") for v in range(2) for r in range(4)),
    )
    maps = [*(takes(spec, (0, rows(1600, i, 16))) for i in range(16)), *[everything(spec)] * 8]
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64))
    verify_plan(plan, spec, maps)
    assert len(plan.routes) <= 23


def test_unbalanced_plans_are_for_studies():
    spec, topo, maps = moe_job()
    options = PlanOptions(slot_bytes=1 << 20, alignment=64, balanced=False)
    plan = make_plan(spec, topo, maps, options=options)
    verify_plan(plan, spec, maps)
    even = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64))

    def crowding(p):
        out = [per_worker(p, 0)[w] for w in topo.rollouts]
        return max(out) * len(out) / sum(out)

    assert crowding(plan) > 1.05 > 1.01 > crowding(even)
    assert plan.bounds.link_bound_seconds == pytest.approx(even.bounds.link_bound_seconds)


def test_the_table_of_links_counts_what_crosses_them():
    spec = spec_of((40, 10))
    topo = topology(
        trainer(0, "a"), rollout("near", 0, "a"), rollout("e", 0, "b", 2e9), rollout("f", 0, "c"),
        node_bandwidth=(("c", 5e8), ("nowhere", 1.0)),
    )  # fmt: skip
    maps = [everything(spec)] * 4
    plan = make_plan(spec, topo, maps, options=PlanOptions(alignment=64))
    links = link_use(topo, plan.routes, plan.hops)
    sizes = plan.routes["hi"] - plan.routes["lo"]
    found = dict(zip(links.names, (links.seconds(sizes) * links.rates).round().astype(int).tolist(), strict=True))
    wanted = {(w.name, way): 0 for w in topo.workers for way in ("out", "in")} | {("c", "out"): 0, ("c", "in"): 0}
    for src, dst, n in edges(plan):
        ends = topo.workers[src], topo.workers[dst]
        if ends[0].node != ends[1].node:
            for w, way in zip(ends, ("out", "in"), strict=True):
                for name in {w.name, w.node} & {name for name, _ in wanted}:
                    wanted[name, way] += n
    assert found == wanted
    assert wanted["f/0", "in"] == wanted["c", "in"] == wanted["e/0", "in"] == 800
    assert links.seconds(sizes).max() == pytest.approx(800 / 5e8) == plan.bounds.busiest_link_seconds


def test_what_anybody_may_take_goes_where_its_sender_sends_anyhow():
    """Each of four trainers holds one expert, which one worker needs, and all hold what every worker needs: four pairs do."""
    spec = spec_of(*[(900, 257)] * 4, (1790, 300))
    maps = [takes(spec, (i,), (4,)) for i in range(4)] * 2
    workers = [trainer(i, "t", 1e9) for i in range(4)] + [rollout("e", i, "n", 1e9) for i in range(4)]
    plan = make_plan(spec, topology(*workers), maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64))
    facts = verify_plan(plan, spec, maps)
    assert {(src, dst) for src, dst, _ in edges(plan)} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert facts.max_out_pairs == 1
    out = per_worker(plan, 0)
    assert max(out[t] for t in range(4)) <= min(out[t] for t in range(4)) * 1.001
