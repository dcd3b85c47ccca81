"""Rounds: level, few segments, as many as slots and costs say. Loads are counted part by part, with none of the planner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from tests.unit.plan_cases import everything, rollout, spec_of, takes, topology, trainer

from weightbridge.errors import InfeasibleError, InternalError, PlanError, UsageError
from weightbridge.plan import PlanOptions, decode_plan, encode_plan, make_plan, verify_plan
from weightbridge.plan import rounds as rounds_module
from weightbridge.plan.leveling import Chain, Uses, level
from weightbridge.plan.plan import with_rounds


def sizes(plan):
    """[rounds][routes] bytes, by `part`."""
    return [[hi - lo for lo, hi in (plan.part(r, k) for r in range(len(plan.routes)))] for k in range(plan.rounds)]


def worst_over_even(plan):
    """The busiest worker's bytes of any round, in or out, over the busiest one's mean."""
    parts, worst, total = sizes(plan), 0, {}
    for part in parts:
        load = {}
        edges = [(r["sender"], r["entry"], n) for r, n in zip(plan.routes, part, strict=True)]
        edges += [(h["src"], h["dst"], part[h["route"]]) for h in plan.hops]
        for src, dst, n in edges:
            for end in (("out", int(src)), ("in", int(dst))):
                load[end] = load.get(end, 0) + n
                total[end] = total.get(end, 0) + n
        worst = max(worst, *load.values())
    return worst / (max(total.values()) / plan.rounds)


def moe(num_experts=6, expert=(500, 64), engines=2):
    """A trainer with everything; engines whose workers need an expert each, all the rest, and something short by themselves."""
    spec = spec_of(*[expert] * num_experts, (700, 31), (5, 3), *[(50, 31)] * engines)
    rest = ((num_experts,), (num_experts + 1,))
    workers, maps = [trainer(0, "t", 99e9)], [everything(spec)]
    for e in range(engines):
        for r in range(num_experts):
            workers.append(rollout(f"e{e}", r, f"n{e}"))
            maps.append(takes(spec, (r,), *rest, (num_experts + 2 + e,)))
    return spec, topology(*workers), maps


# --- what a plan's cuts mean ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_route():
    spec = spec_of((500,))  # 1000 bytes
    return make_plan(spec, topology(trainer(0), rollout("e", 0, "b")), [everything(spec)] * 2)


def cut(plan, rounds, unit, pace, phase):
    routes = plan.routes.copy()
    routes["pace"], routes["phase"] = pace, phase
    return replace(plan, routes=routes, rounds=rounds, unit_bytes=unit).cuts(range(rounds + 1))[:, 0].tolist()


def test_a_route_lasts_from_the_first_round_to_the_last(one_route):
    assert cut(one_route, 5, 64, 16, 0) == [0, 192, 384, 576, 768, 1000]  # 16 units: 3 3 3 3 4
    assert cut(one_route, 5, 64, 16, 4) == [0, 256, 448, 640, 832, 1000]
    assert cut(one_route, 2, 512, 2, 0) == [0, 512, 1000]
    assert cut(one_route, 4, 1024, 1, 2) == [0, 0, 1000, 1000, 1000]


def test_routes_that_follow_each_other_share_a_pace(one_route):
    # 16 units at a pace of 48: a third of the rounds; one before it had 16 units, then 20
    assert cut(one_route, 9, 64, 48, 0) == [0, 320, 640, *[1000] * 7]
    assert cut(one_route, 9, 64, 48, -16 * 9) == [0, 0, 0, 0, 320, 640, 1000, 1000, 1000, 1000]
    assert cut(one_route, 9, 64, 48, -20 * 9 + 8) == [0, 0, 0, 0, 128, 448, 768, 1000, 1000, 1000]


def test_other_rounds_start_without_phases(one_route):
    other = with_rounds(one_route, 3, unit_bytes=128)
    assert other.cuts(range(4))[:, 0].tolist() == [0, 256, 640, 1000]
    assert (other.rounds, other.unit_bytes, other.routes["pace"].tolist()) == (3, 128, [8])


def test_what_does_not_add_up_is_refused():
    spec, topo, maps = moe()
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 16, alignment=64))
    for column, change in (("pace", 0), ("pace", 1), ("phase", -1), ("phase", plan.rounds)):
        routes = plan.routes.copy()
        assert routes["pace"][0] > 1
        routes[column][0] = change
        with pytest.raises(InternalError, match="add up"):
            verify_plan(replace(plan, routes=routes), spec, maps)
    for unit in (0, -64, 96):
        with pytest.raises(InternalError, match="positive multiple of the alignment 64"):
            verify_plan(replace(plan, unit_bytes=unit), spec, maps)


def test_unit_pace_and_phase_travel_and_count():
    spec, topo, maps = moe()
    options = PlanOptions(slot_bytes=1 << 16, alignment=64, unit_bytes=192)
    plan = make_plan(spec, topo, maps, options=options)
    assert plan.unit_bytes == 192
    back = decode_plan(encode_plan(plan))
    assert (back.unit_bytes, back.routes.tolist()) == (192, plan.routes.tolist())
    shifted = plan.routes.copy()
    shifted["phase"][0] += 1
    assert len({plan.digest, replace(plan, unit_bytes=64).digest, replace(plan, routes=shifted).digest}) == 3
    import msgspec

    message = msgspec.msgpack.decode(encode_plan(plan))
    with pytest.raises(PlanError, match="unit or slot size is not positive"):
        decode_plan(msgspec.msgpack.encode({**message, "unit_bytes": 0}))


# --- how many, and in which units -------------------------------------------------------------------------------------


def test_every_round_is_level():
    spec, topo, maps = moe()
    for slot_bytes in (1 << 16, 1 << 17):
        plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=slot_bytes, alignment=64))
        verify_plan(plan, spec, maps)
        assert plan.rounds > 2
        assert worst_over_even(plan) <= 1.01


@pytest.mark.parametrize(("num_experts", "coarsest"), [(4, False), (6, False), (2, True)])
def test_the_coarsest_unit_that_keeps_rounds_level_is_taken(num_experts, coarsest):
    spec, topo, maps = moe(num_experts, expert=(500, 640))
    found = {}
    for unit in (64, None, 3 << 15):
        options = PlanOptions(slot_bytes=1 << 19, alignment=64, unit_bytes=unit)
        plan = make_plan(spec, topo, maps, options=options)
        verify_plan(plan, spec, maps)
        found[unit] = plan.rounds, worst_over_even(plan), sum(n > 0 for part in sizes(plan) for n in part)
        if unit is None:
            assert plan.unit_bytes > 64
            assert (plan.unit_bytes == (1 << 19) // 256) is coarsest
    assert found[None][0] == found[64][0]
    assert found[None][1] <= 1.005
    assert coarsest or found[3 << 15][1] > 1.005
    assert found[3 << 15][2] < found[None][2] < found[64][2]


def test_levelling_counts_a_byte_as_often_as_it_crosses_a_link():
    # one link, two rounds, four routes of a unit: one crosses it three times, so the others go into the other round
    use = csr_matrix(np.array([[3.0, 1.0, 1.0, 1.0]]))
    uses = Uses(use, np.array([6.0 * 64]), np.full(4, 64))
    alone = [Chain(np.array([i]), np.array([1])) for i in range(4)]
    pace, phase = level(alone, uses, 2, 64)
    assert pace.tolist() == [1, 1, 1, 1]
    assert phase.tolist() in ([0, 1, 1, 1], [1, 0, 0, 0])


def test_rounds_are_the_fewest_that_fit():
    spec, topo, maps = moe()
    for slot_bytes in (40_000, 100_000):
        plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=slot_bytes, alignment=64))
        into = np.bincount(plan.hops["dst"], weights=(plan.routes["hi"] - plan.routes["lo"])[plan.hops["route"]])
        sent = (plan.routes["hi"] - plan.routes["lo"]).sum()
        assert plan.rounds == -(-int(max(sent, into.max())) // slot_bytes)
        fewer = with_rounds(plan, plan.rounds - 1)
        with pytest.raises(InternalError, match=r"puts \d+ bytes into slot"):
            verify_plan(fewer, spec, maps)


def test_more_rounds_where_they_pay():
    # 4 MB at 1 GB/s: T = 4 ms. Fill and drain T / K against K * 10 us: least at K = 20
    spec = spec_of((2000, 1000))
    topo = topology(trainer(0), rollout("e", 0, "b"))
    for round_seconds, expected in ((1e-5, 20), (4e-5, 10), (1.0, 1)):
        options = PlanOptions(round_seconds=round_seconds)
        assert make_plan(spec, topo, [everything(spec)] * 2, options=options).rounds == expected
    few = PlanOptions(round_seconds=1.0, min_rounds=3)
    assert make_plan(spec, topo, [everything(spec)] * 2, options=few).rounds == 3


def test_wrong_options_are_refused():
    with pytest.raises(UsageError, match=r"round_seconds must be positive, got -1"):
        PlanOptions(round_seconds=-1)
    with pytest.raises(UsageError, match=r"multiple of alignment, 128 bytes, got 192"):
        PlanOptions(alignment=128, unit_bytes=192)
    with pytest.raises(UsageError, match="got 0"):
        PlanOptions(unit_bytes=0)


def many_classes(engines=6):
    """40 tensors that everybody needs, from 40 trainers, and experts: each worker assembles from hundreds of routes."""
    spec = spec_of(*[(1499, 64)] * 40, *[(10_000, 128)] * 2)
    workers = [trainer(t, f"t{t // 8}") for t in range(40)]
    maps = [takes(spec, (t,), (40 + t % 2, slice(5000 * (t // 2 % 2), 5000 * (t // 2 % 2) + 5000))) for t in range(40)]
    for e in range(engines):
        for r in range(2):
            workers.append(rollout(f"e{e}", r, f"n{e}"))
            maps.append(takes(spec, *((t,) for t in range(40)), (40 + r,)))
    return spec, topology(*workers), maps


def test_many_short_routes_of_one_way_follow_each_other(monkeypatch):
    spec, topo, maps = many_classes()
    options = PlanOptions(slot_bytes=1 << 18, alignment=64)
    found = []
    for many in (16, 1 << 30):
        monkeypatch.setattr(rounds_module, "_MANY", many)
        plan = make_plan(spec, topo, maps, options=options)
        verify_plan(plan, spec, maps)
        assert worst_over_even(plan) <= 1.01
        found.append((plan, sum(n > 0 for part in sizes(plan) for n in part)))
    (chained, few), (_, several) = found
    assert few < several / 3
    units = -(-(chained.routes["hi"] - chained.routes["lo"]) // chained.unit_bytes)
    assert (chained.routes["pace"] > units).sum() > 20


def test_a_sender_that_cannot_bear_a_higher_pace_keeps_its_own(monkeypatch):
    # the trainers' links are the busiest: every route lasts from the first round to the last
    monkeypatch.setattr(rounds_module, "_MANY", 0)
    spec = spec_of(*[(1499, 64)] * 12)
    topo = topology(*(trainer(t, f"t{t}", 1e9) for t in range(4)), rollout("e", 0, "b", 4e9))
    maps = [*(takes(spec, *((i,) for i in range(t, 12, 4))) for t in range(4)), everything(spec)]
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 18, alignment=64))
    units = -(-(plan.routes["hi"] - plan.routes["lo"]) // plan.unit_bytes)
    assert (plan.routes["pace"] == units).all()
    assert worst_over_even(plan) <= 1.01


def test_jobs_too_large_to_level_are_spread_by_rule(monkeypatch):
    monkeypatch.setattr(rounds_module, "_LEVEL_CELLS", 0)
    spec, topo, maps = moe()
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=1 << 16, alignment=64))
    verify_plan(plan, spec, maps)
    assert len(set(plan.routes["phase"].tolist())) > 3
    assert worst_over_even(plan) <= 1.02


def test_the_search_for_rounds_ends(monkeypatch):
    monkeypatch.setattr(rounds_module, "_LEVEL_CELLS", 0)
    monkeypatch.setattr(rounds_module, "_SPARSE", 1)
    monkeypatch.setattr(rounds_module, "_EXHAUSTIVE", 2)
    spec = spec_of(*[(128,)] * 40)
    maps = [everything(spec), *(takes(spec, (r,)) for r in range(40))]
    topo = topology(trainer(0), *(rollout("e", r, f"n{r}") for r in range(40)))
    with pytest.raises(InfeasibleError, match="raise slot_bytes to at least 512") as caught:
        make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=256))
    assert caught.value.needed_bytes == 512
