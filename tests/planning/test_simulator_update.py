"""One update in virtual time, worked out by hand step by step; faults; credits; what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.errors import UsageError
from weightbridge.layout.source_map import CopyTable, LiveTensor, SourceMap
from weightbridge.machine import Arrived, Kind
from weightbridge.plan import NodeGroup, PlanOptions, Role, Topology, Worker, make_plan
from weightbridge.plan.plan import with_rounds
from weightbridge.program import DESCRIPTOR, SEGMENT, Await, Post, Round, lower
from weightbridge.simulator import (
    Costs,
    LateEngine,
    Links,
    LostWorker,
    SlowNode,
    list_costs,
    simulate,
    skeleton_of,
)
from weightbridge.simulator.result import LANES

MIB = 1 << 20
U8 = dtype_named("U8")

# Powers of two where they divide, so that the sums below are exact enough to compare to a nanosecond.
COSTS = Costs(
    latency_seconds=0.001,
    post_seconds=0.01,
    signal_seconds=0.0001,
    launch_seconds=0.02,
    python_seconds_per_round=0.05,
    agreement_seconds=0.5,
    memory_bandwidth=64.0 * MIB,
    inside_bandwidth=16.0 * MIB,
)


def whole(spec: CheckpointSpec, first: int, numel: int) -> SourceMap:
    """A worker that has elements [first, first + numel) of the one tensor."""
    live = LiveTensor(name="w", shape=(numel,), strides=(1,), dtype=U8)
    copies = CopyTable.from_rows([(0, 0, first, 0, ((numel, 1, 1),))])
    return SourceMap(spec_digest=spec.digest, live=(live,), copies=copies)


def trainer(node: str = "n0", rank: int = 0, rate: float = 2.0 * MIB) -> Worker:
    return Worker(name=f"trainer/{rank}", role=Role.TRAINER, node=node, rank=rank, bandwidth=rate)


def rollout(engine: str, node: str, rank: int = 0, rate: float = 2.0 * MIB) -> Worker:
    return Worker(name=f"{engine}/{rank}", role=Role.ROLLOUT, node=node, rank=rank, engine=engine, bandwidth=rate)


def job(workers, parts, numel: int, *, rounds: int, groups=()):
    """parts: per worker (first, numel) of one U8 tensor. Returns the plan and every worker's program."""
    spec = CheckpointSpec(tensors=(TensorSpec(name="w", shape=(numel,), dtype=U8),))
    topology = Topology(workers=tuple(workers), groups=groups)
    maps = [whole(spec, *part) for part in parts]
    plan = make_plan(spec, topology, maps, options=PlanOptions(slot_bytes=1 << 30))
    plan = with_rounds(plan, rounds, unit_bytes=MIB // 16)
    return plan, [lower(plan, spec, m, w) for w, m in enumerate(maps)]


def pair(*, rounds: int = 3):
    """One trainer, one rollout worker on another node; 4 MiB a round over 2 MiB/s: 2 s a round."""
    numel = rounds * 4 * MIB
    return job([trainer(), rollout("a", "n1")], [(0, numel)] * 2, numel, rounds=rounds)


def steps_of(simulation, worker: int, lane: str):
    """(round, start, end) of a worker's steps in a lane."""
    s = simulation.steps[(simulation.steps["worker"] == worker) & (simulation.steps["lane"] == LANES.index(lane))]
    return [(int(k), float(a), float(b)) for k, a, b in zip(s["round"], s["start"], s["end"], strict=True)]


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_three_rounds_of_two_workers_with_all_costs() -> None:
    """Trainer 0 packs and sends 3 rounds of 4 MiB; rollout 1 assembles them.

    agreement 0.5, Python 0.05, launch 0.02, 4 MiB through memory 0.0625, post 0.01, 4 MiB over the link 2, latency 0.001.

    pack 0      launched at 0.5 + 0.05, done at 0.55 + 0.02 + 0.0625 = 0.6325
    post 0      on the link from 0.6425 to 2.6425; its tag arrives at 2.6435, the sender knows at 2.6445
    pack 1      after post 0 and round 1's Python: from 0.6925, done at 0.775, long before it is needed
    post 1      from 2.6445 + 0.01 = 2.6545 to 4.6545, acknowledged at 4.6565
    assemble 0  from 2.6435 + 0.05 = 2.6935 to 2.776; the credit for round 2 is back in 2.776 + 0.0001 + 0.001
    pack 2      after post 1 and round 2's Python: from 2.7045, done at 2.787
    post 2      from 4.6665 to 6.6665, tag at 6.6675, acknowledged at 6.6685: the trainer goes on
    assemble 2  from 6.6675 + 0.05 = 6.7175 to 6.8: the rollout goes on
    """
    plan, programs = pair()
    done = simulate(plan, programs, costs=COSTS, window_seconds=0)
    packed = [(0, 0.55, 0.6325), (1, 0.6925, 0.775), (2, 2.7045, 2.787)]
    assert steps_of(done, 0, "pack") == [tuple(pytest.approx(v, abs=1e-9) for v in step) for step in packed]
    sent = [(0, 0.6425, 2.6435), (1, 2.6545, 4.6555), (2, 4.6665, 6.6675)]
    assert steps_of(done, 0, "send") == [tuple(pytest.approx(v, abs=1e-9) for v in step) for step in sent]
    assembled = [(0, 2.6935, 2.776), (1, 4.7055, 4.788), (2, 6.7175, 6.8)]
    assert steps_of(done, 1, "assemble") == [tuple(pytest.approx(v, abs=1e-9) for v in step) for step in assembled]
    assert done.stall_seconds == pytest.approx((6.6685, 6.8))
    assert done.ewtt_seconds == pytest.approx(6.8)
    assert done.agst_seconds == pytest.approx((6.6685 + 6.8) / 2)
    assert done.t_min_seconds == pytest.approx(6.0)
    assert done.completed
    assert not done.extrapolated
    assert done.waiting == {}


def test_the_breakdown_adds_up_and_says_what_no_transfer_hid() -> None:
    """Of the 6.8 s above the rollout sees: its transfers 3 x 2.001 s; packing before the first one 0.0825 s and assembling
    after the last 0.0825 s, each by itself (assembly 0 is hidden but for the gap between posts, packs 1 and 2 are hidden);
    its Python and agreement 0.5 + 0.05 (after the last tag). Gaps between its transfers are 0.011 s each, in which nothing
    of it works."""
    result = simulate(*pair(), costs=COSTS, window_seconds=0).as_result()
    assert result.conversion_seconds == pytest.approx(2 * 0.0825, abs=1e-9)
    assert result.control_seconds == pytest.approx(0.5 + 0.05 + 2 * 0.011, abs=1e-9)
    assert result.communication_seconds == pytest.approx(6.8 - 0.165 - 0.572, abs=1e-9)
    assert result.spans.dtype.names == ("worker", "lane", "round", "start", "end", "nbytes")


def test_neighbours_slots_are_read_over_the_inside_links() -> None:
    """One round. Two workers of an engine on one node both need all 16 MiB; each gets 8 MiB from the trainer and reads the
    other 8 MiB over its inside link of 16 MiB/s: 0.5 s, longer than 16 MiB through memory, 0.25 s.

    pack of 16 MiB: 0.55 to 0.55 + 0.02 + 0.25 = 0.82. Two posts, ready at 0.83 and 0.84, over the trainer's link of 2 MiB/s:
    the first has it alone for 0.01 s, then they share it. Together 16 MiB take 8 s, to 8.83; the first was through when
    its 8 MiB were: it had 0.02 MiB at 0.84, so 7.98 MiB are left to it at 1 MiB/s: 8.82.
    Tags at 8.821 and 8.831. Each pays its Python, 0.05 (a signal of a neighbour's comes later), and says READY: the later
    one at 8.831 + 0.05 + 0.0001, heard at 8.8821 by the earlier one, who launches then. The later one has heard READY
    already, so its own signal is sent first and it launches at 8.8811. Both read through at + 0.02 + 0.5: the earlier one ends
    at 9.4021, the last. Its ASSEMBLED takes 0.0001 + 0.001 to its neighbour: 9.4032.
    """
    numel = 16 * MIB
    workers = [trainer(), rollout("a", "n1", 0), rollout("a", "n1", 1)]
    plan, programs = job(workers, [(0, numel)] * 3, numel, rounds=1)
    assert [p.nbytes for p in programs[0].rounds[0].posts] == [8 * MIB] * 2
    done = simulate(plan, programs, costs=COSTS, window_seconds=0)
    assert [s[2] for s in steps_of(done, 0, "send")] == pytest.approx([8.821, 8.831], abs=1e-9)
    ends = {w: steps_of(done, w, "assemble")[0] for w in (1, 2)}
    first, second = sorted(ends.values(), key=lambda s: s[1])
    assert first[1:] == pytest.approx((8.8811, 9.4011), abs=1e-9)
    assert second[1:] == pytest.approx((8.8821, 9.4021), abs=1e-9)
    assert done.ewtt_seconds == pytest.approx(9.4032, abs=1e-9)
    # The later one is through with its own part when the other's ASSEMBLED is there, but its engine is whole only then.
    assert done.stall_end_seconds[1:] == pytest.approx((9.4032, 9.4032), abs=1e-9)
    assert done.agst_seconds == pytest.approx((8.832 + 9.4032 + 9.4032) / 3, abs=1e-9)
    assert done.agst_own_seconds == pytest.approx((8.832 + 9.4032 + 9.4022) / 3, abs=1e-9)
    links = {(u.kind, u.name, u.outgoing): u.nbytes for u in done.links}
    assert links["worker", "trainer/0", True] == 16 * MIB
    assert links["inside", "a/0", True] == links["inside", "a/1", False] == 8 * MIB


def test_an_uplink_between_groups_is_a_link_like_any_other() -> None:
    """The pair above with its nodes in two groups, one uplink at 1 MiB/s: each round takes 4 s instead of 2."""
    numel = 12 * MIB
    groups = (NodeGroup(name="east", nodes=("n0",), bandwidth=1.0 * MIB),)
    plan, programs = job([trainer(), rollout("a", "n1")], [(0, numel)] * 2, numel, rounds=3, groups=groups)
    done = simulate(plan, programs, costs=COSTS, window_seconds=0)
    assert done.ewtt_seconds == pytest.approx(6.8 + 3 * 2)
    assert {(u.kind, u.name, u.outgoing): u.nbytes for u in done.links}["group", "east", True] == 12 * MIB


# --- credits ----------------------------------------------------------------------------------------------------------


def test_a_receiver_that_is_slow_holds_its_sender_back() -> None:
    """The rollout may not assemble before 20.5 s: rounds 0 and 1 fill its two slots, round 2 leaves only after the credit
    that follows assembly 0: 20.5 + 0.02 + 0.0625, + 0.0001 + 0.001 on its way, + 0.01 for the post."""
    plan, programs = pair()
    seen: list[tuple[float, int]] = []

    def observe(seconds, worker, what) -> None:
        if isinstance(what, Arrived) and what.tag.kind is Kind.CREDIT:
            seen.append((seconds, what.tag.round))

    done = simulate(
        plan, programs, costs=COSTS, faults=[LateEngine(engine="a", seconds=20.0)], observe=observe, window_seconds=0
    )
    assert seen == [(pytest.approx(20.5836), 0)]
    starts = [s[1] for s in steps_of(done, 0, "send")]
    assert starts == pytest.approx([0.6425, 2.6545, 20.5936])
    assert steps_of(done, 1, "assemble")[0][1] == pytest.approx(20.5)


@pytest.mark.parametrize(("order", "seconds"), [("oldest_round_first", 1), ("as_ready", 2)])
def test_the_order_of_posts_is_the_programs(order: str, seconds: int) -> None:
    """Two rounds packed and credited at once: oldest first has one post under way at a time, as ready has two."""
    plan, programs = pair()
    done = simulate(plan, [replace(p, post_order=order) for p in programs], costs=COSTS, window_seconds=0)
    sends = steps_of(done, 0, "send")
    assert max(sum(a <= t < b for _, a, b in sends) for _, t, _ in sends) == seconds
    assert done.completed


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_node_that_slows_down_slows_its_transfers_from_then_on() -> None:
    """Half the bandwidth from 1.6425 s on: the first post has 1 s of 2 behind it and takes 2 s for the rest; the other
    two take 4 s each: 5 s more in all."""
    plan, programs = pair()
    fault = SlowNode(node="n1", fraction=0.5, at_seconds=1.6425)
    done = simulate(plan, programs, costs=COSTS, faults=[fault], window_seconds=0)
    assert done.ewtt_seconds == pytest.approx(6.8 + 5)


def test_a_late_engine_holds_all_assembly_back_but_no_receiving() -> None:
    """Engine b parks at 4 s; both engines' workers assemble nothing before 4.5 s, though two rounds are there at 4.7 s.
    Its own stall begins at 4 s, the others' at 0."""
    numel = 12 * MIB
    workers = [trainer(rate=4.0 * MIB), rollout("a", "n1"), rollout("b", "n2")]
    plan, programs = job(workers, [(0, numel)] * 3, numel, rounds=3)
    plain = simulate(plan, programs, costs=COSTS, window_seconds=0)
    late = simulate(plan, programs, costs=COSTS, faults=[LateEngine(engine="b", seconds=4.0)], window_seconds=0)
    for w in (1, 2):
        assert steps_of(plain, w, "assemble")[0][1] < 4.0
        assert steps_of(late, w, "assemble")[0][1] >= 4.5
    assert late.completed
    assert late.stall_begin_seconds == (0, 0, 4)
    assert late.ewtt_seconds == pytest.approx(max(late.stall_end_seconds))
    assert late.stall_seconds[2] == pytest.approx(late.stall_end_seconds[2] - 4)


def test_a_lost_worker_fails_those_that_need_it_and_the_rest_name_whom_they_wait_for() -> None:
    """Two engines; the trainer writes half to each and they exchange. Worker b dies at 3 s, known at 4 s."""
    numel = 12 * MIB
    workers = [trainer(), rollout("a", "n1"), rollout("b", "n2")]
    plan, programs = job(workers, [(0, numel)] * 3, numel, rounds=3)
    fault = LostWorker(worker="b/0", at_seconds=3.0, detection_seconds=1.0)
    done = simulate(plan, programs, costs=COSTS, faults=[fault], window_seconds=0)
    assert not done.completed
    assert done.ewtt_seconds == inf
    assert [(f.worker, f.at_seconds, f.peer, f.cause) for f in done.failures] == [
        (0, 4.0, 2, "lost"),
        (1, 4.0, 2, "lost"),
    ]
    assert done.waiting == {}
    assert sum(u.nbytes for u in done.links if u.name == "b/0") < 12 * MIB


def test_a_loss_comes_to_light_when_it_is_detected() -> None:
    plan, programs = pair()
    fault = LostWorker(worker="a/0", at_seconds=3.0, detection_seconds=50.0)
    done = simulate(plan, programs, costs=COSTS, faults=[fault])
    assert [(f.worker, f.at_seconds, f.peer) for f in done.failures] == [(0, 53.0, 1)]


def test_who_waits_for_one_that_gave_up_is_named_and_nothing_hangs() -> None:
    """Trainer 0 writes to 1, which passes everything on to 2. The trainer dies: 1 gives up, 2 needs only 1 and waits."""
    numel = 12 * MIB
    workers = [trainer(), rollout("a", "n1"), rollout("b", "n2")]
    plan, programs = job(workers, [(0, numel)] * 3, numel, rounds=3)
    segments = np.array([(0, 0, 4 * MIB, 0)], dtype=SEGMENT)
    row = np.ones(1, dtype=DESCRIPTOR)
    chain = [
        Round(pack=row, posts=(Post(stage="receive", source="send", peer=1, segments=segments),)),
        Round(
            posts=(Post(stage="exchange", source="receive", peer=2, segments=segments, after=(("receive", 0),)),),
            awaits=(Await(stage="receive", peer=0, segments=segments),),
        ),
        Round(awaits=(Await(stage="exchange", peer=1, segments=segments),)),
    ]
    programs = [replace(p, rounds=(r,) * 3) for p, r in zip(programs, chain, strict=True)]
    fault = LostWorker(worker="trainer/0", at_seconds=4.0)
    done = simulate(plan, programs, costs=COSTS, faults=[fault])
    assert [(f.worker, f.at_seconds, f.peer) for f in done.failures] == [(1, 5.0, 0)]
    assert done.waiting == {2: ((1, "data of round 1 (exchange)"),)}
    assert not done.completed
    assert simulate(plan, programs, costs=COSTS).completed


def test_what_a_lost_worker_was_about_to_say_is_never_heard() -> None:
    """A signal takes the progress thread 2 s. Assembly 0 ends at 2.776; the credit would be sent at 4.776, but its worker
    is lost at 4.7."""
    plan, programs = pair()
    heard: list[float] = []

    def observe(seconds, worker, what) -> None:
        if worker == 0 and isinstance(what, Arrived):
            heard.append(seconds)

    costs = replace(COSTS, signal_seconds=2.0)
    simulate(plan, programs, costs=costs, observe=observe)
    assert heard == [pytest.approx(4.777, abs=1e-4)]
    heard.clear()
    simulate(plan, programs, costs=costs, observe=observe, faults=[LostWorker(worker="a/0", at_seconds=4.7)])
    assert heard == []


def test_a_worker_that_is_not_needed_any_more_may_be_lost() -> None:
    plan, programs = pair()
    done = simulate(plan, programs, costs=COSTS, faults=[LostWorker(worker="trainer/0", at_seconds=6.75)])
    assert done.failures == ()
    assert done.stall_end_seconds == (pytest.approx(6.6685, abs=1e-4), pytest.approx(6.8, abs=1e-4))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (SlowNode(node="x", fraction=0.5), "no node 'x'"),
        (LostWorker(worker="x", at_seconds=0), "no worker 'x'"),
        (LateEngine(engine="x", seconds=1), "no engine 'x'"),
    ],
)
def test_a_fault_must_name_something_of_the_job(fault, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        simulate(*pair(), faults=[fault])


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_equal_arguments_give_equal_runs_to_the_last_bit() -> None:
    numel = 9 * MIB + 12345
    workers = [
        trainer(),
        trainer(rank=1),
        *(rollout(e, n, r) for e, n, r in [("a", "n1", 0), ("a", "n1", 1), ("b", "n2", 0)]),
    ]
    parts = [(0, numel), (0, numel), (0, 5 * MIB), (4 * MIB, numel - 4 * MIB), (0, numel)]
    plan, programs = job(workers, parts, numel, rounds=5)
    one, other = simulate(plan, programs), simulate(plan, [skeleton_of(p) for p in programs[::-1]])
    assert one.stall_end_seconds == other.stall_end_seconds
    assert one.num_events == other.num_events
    assert (one.steps == other.steps).all()


def test_a_few_rounds_and_their_period_stand_for_all() -> None:
    """Each round of the pair takes 2 s and 0.012 s from post to post; that is the period exactly."""
    plan, programs = pair(rounds=20)
    all_of_it = simulate(plan, programs, costs=COSTS, window_seconds=0)
    some = simulate(plan, programs, costs=COSTS, extrapolate=8, window_seconds=0)
    assert all_of_it.ewtt_seconds == pytest.approx(6.8 + 17 * 2.012)
    assert some.ewtt_seconds == pytest.approx(all_of_it.ewtt_seconds)
    assert some.agst_seconds == pytest.approx(all_of_it.agst_seconds)
    assert some.links == all_of_it.links
    assert "8 of 20 rounds were simulated" in some.extrapolated
    assert "2012.000 ms" in some.extrapolated
    assert some.steps["round"].max() == 7
    assert some.as_result().note == some.extrapolated
    assert not simulate(plan, programs, costs=COSTS, extrapolate=20).extrapolated


def test_what_does_not_fit_together_is_refused() -> None:
    plan, programs = pair(rounds=12)
    with pytest.raises(UsageError, match="extrapolate is 4, expected at least 8"):
        simulate(plan, programs, extrapolate=4)
    with pytest.raises(UsageError, match="leave one of the two out"):
        simulate(plan, programs, extrapolate=8, faults=[LateEngine(engine="a", seconds=1)])
    with pytest.raises(UsageError, match=r"programs of workers \[0\] were given, expected those of 0 to 1"):
        simulate(plan, programs[:1])
    with pytest.raises(UsageError, match="lower it again"):
        simulate(pair(rounds=3)[0], programs)
    with pytest.raises(UsageError, match="memory_bandwidth must be positive"):
        Costs(memory_bandwidth=0)
    with pytest.raises(UsageError, match="latency_seconds must be 0 or more"):
        Costs(latency_seconds=-1e-6)


def test_every_cost_is_listed_with_its_value_unit_and_source() -> None:
    listed = {c.name: (c.value, c.unit) for c in list_costs(Costs(post_seconds=12e-6))}
    assert listed == {
        "latency_seconds": (3e-6, "s"), "post_seconds": (12e-6, "s"), "signal_seconds": (1e-6, "s"),
        "launch_seconds": (20e-6, "s"), "python_seconds_per_round": (200e-6, "s"), "agreement_seconds": (1e-3, "s"),
        "memory_bandwidth": (1e12, "bytes/s"), "inside_bandwidth": (450e9, "bytes/s"),
    }  # fmt: skip
    assert all(len(c.source) > 20 for c in list_costs(Costs()))


def test_the_skeleton_has_the_bytes_and_drives_the_machine_alike() -> None:
    for program in pair()[1]:
        bare = skeleton_of(program)
        for k, (r, b) in enumerate(zip(program.rounds, bare.program.rounds, strict=True)):
            posts = bare.post_bytes[bare.post_first[k] : bare.post_first[k + 1]]
            assert posts.tolist() == [p.nbytes for p in r.posts]
            assert [(p.stage, p.source, p.peer, p.after) for p in b.posts] == [
                (p.stage, p.source, p.peer, p.after) for p in r.posts
            ]
            assert (b.reads, b.readers) == (r.reads, r.readers)
            assert (len(b.pack), len(b.assemble.table)) == (min(len(r.pack), 1), min(len(r.assemble.table), 1))
        assert bare.pack_bytes.sum() == (12 * MIB if program.worker == 0 else 0)
        assert bare.assemble_bytes.sum() == bare.await_bytes.sum() == (12 * MIB if program.worker == 1 else 0)
        assert len(bare.first_rounds(2).program.rounds) == 2


def test_paths_between_workers() -> None:
    workers = (trainer("n0"), trainer("n0", 1), rollout("a", "n1"), rollout("b", "n2"))
    groups = (NodeGroup(name="g", nodes=("n0", "n1"), bandwidth=1e9), NodeGroup(name="h", nodes=("n2",), bandwidth=2e9))
    links = Links(topology=Topology(workers=workers, node_bandwidth=(("n0", 3e9),), groups=groups), costs=Costs())

    def named(path) -> list[tuple[str, str, bool]]:
        return [(links.links[i].kind, links.links[i].name, links.links[i].outgoing) for i in path]

    assert named(links.path(0, 1)) == [("inside", "trainer/0", True), ("inside", "trainer/1", False)]
    assert named(links.path(0, 2)) == [("worker", "trainer/0", True), ("node", "n0", True), ("worker", "a/0", False)]
    assert named(links.path(2, 3)) == [
        ("worker", "a/0", True), ("group", "g", True), ("worker", "b/0", False), ("group", "h", False)
    ]  # fmt: skip
    assert links.path(3, 3) == ()
    names = [("worker", "trainer/0"), ("worker", "trainer/1"), ("node", "n0")]
    assert named(links.of_node("n0")) == [(kind, name, way) for kind, name in names for way in (True, False)]
    assert links.bandwidth[links.number("group", "h", outgoing=False)] == 2e9
    with pytest.raises(UsageError, match="no node link of 'n1'"):
        links.number("node", "n1", outgoing=True)
