"""Whole random jobs in virtual time: bytes are conserved, runs repeat, nothing hangs, and the machines do what they do on
real memory.

When two traces of one plan agree. The times differ, so what depends on them only is excused; each worker must have
  - the same instructions, each as often;
  - the same order of packs, of decodes and of assemblies: they use one lane each in turn;
  - the same order of posts to each peer, and of signals of each kind (and stage) to each peer: they use one channel;
  - its posts in order of rounds; Released after its last post; Finished at the very end, once.
Left open: how kinds interleave, and in which order posts of one round leave for different peers (credits decide that).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests import toy_programs as toy

from weightbridge.deployments import preset
from weightbridge.executor.executor import Executor
from weightbridge.executor.observation import Observe
from weightbridge.kernels.base import Buffer
from weightbridge.kernels.reference import ReferenceKernels
from weightbridge.machine import Assemble, Decode, Finished, Pack, PostWrites, Released, Signal
from weightbridge.plan import PlanOptions, make_plan
from weightbridge.plan.plan import with_rounds
from weightbridge.program import lower, lower_job
from weightbridge.program.program import AS_READY
from weightbridge.simulator import Costs, LateEngine, LostWorker, SlowNode, simulate, skeleton_of
from weightbridge.testing.memory_driver import MemoryDriver
from weightbridge.transports.base import Identity

SEEDS = (2, 3, 6, 132, 195)
INSTRUCTIONS = (Pack, PostWrites, Decode, Assemble, Signal, Released, Finished)


@cache
def job_of(seed: int, rounds: int = 6):
    """A random job (-1: the fixed one with everything in it), its plan in `rounds` rounds, and all programs."""
    job = toy.house_job() if seed < 0 else toy.random_job(seed)
    options = PlanOptions(slot_bytes=1 << 20, alignment=64)
    plan = with_rounds(make_plan(job.spec, job.topology, job.maps, options=options), rounds, unit_bytes=64)
    return job, plan, [lower(plan, job.spec, m, w) for w, m in enumerate(job.maps)]


# --- conservation -----------------------------------------------------------------------------------------------------


def planned_bytes(plan) -> dict[tuple[str, str, bool], int]:
    """(kind, name, outgoing) -> bytes of the workers' links, straight from routes and hops."""
    workers = plan.topology.workers
    edges = [(r["sender"], r["entry"], r) for r in plan.routes]
    edges += [(h["src"], h["dst"], plan.routes[h["route"]]) for h in plan.hops]
    found: dict[tuple[str, str, bool], int] = defaultdict(int)
    for source, target, route in edges:
        kind = "inside" if workers[source].node == workers[target].node else "worker"
        found[kind, workers[source].name, True] += int(route["hi"] - route["lo"])
        found[kind, workers[target].name, False] += int(route["hi"] - route["lo"])
    return found


@pytest.mark.parametrize("seed", [-1, *range(30)])
def test_every_link_carries_what_the_plan_puts_on_it_and_everybody_resumes(seed: int) -> None:
    _, plan, programs = job_of(seed)
    done = simulate(plan, programs)
    assert done.completed
    assert not done.waiting
    expected = planned_bytes(plan)
    found = {(u.kind, u.name, u.outgoing): u.nbytes for u in done.links}
    for key, nbytes in found.items():
        if key[0] == "worker":
            assert nbytes == expected[key], key
        else:
            assert nbytes >= expected[key], key  # neighbours' slots are read over it besides
    moved = done.steps[done.steps["peer"] >= 0]
    assert moved["nbytes"].sum() == sum(n for (_, _, outgoing), n in expected.items() if outgoing)
    read = sum(n for (kind, _, out), n in found.items() if kind == "inside" and out)
    own = sum(int(skeleton_of(p).read_bytes.sum()) for p in programs)
    assert read - sum(n for (kind, _, out), n in expected.items() if kind == "inside" and out) == own
    for use, busy in zip(done.links, done.link_busy_seconds, strict=True):
        assert use.busy_seconds <= busy * (1 + 1e-9) + 1e-15  # a clock of doubles near 1 ms
    assert done.ewtt_seconds >= plan.bounds.t_min_seconds * (1 - 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_repeat_to_the_last_bit(seed: int) -> None:
    _, plan, programs = job_of(seed)
    one, other = (simulate(plan, programs) for _ in range(2))
    assert (one.ewtt_seconds, one.agst_seconds, one.num_events) == (
        other.ewtt_seconds,
        other.agst_seconds,
        other.num_events,
    )
    assert (one.steps == other.steps).all()


def test_costs_only_add_time() -> None:
    _, plan, programs = job_of(-1)
    base = simulate(plan, programs).ewtt_seconds
    for name in ("latency_seconds", "post_seconds", "launch_seconds", "python_seconds_per_round", "agreement_seconds"):
        assert simulate(plan, programs, costs=Costs(**{name: 0.01})).ewtt_seconds > base, name


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [-1, *SEEDS])
def test_a_loss_at_any_time_ends_everybody_or_says_who_waits_for_whom(seed: int) -> None:
    job, plan, programs = job_of(seed)
    whole = simulate(plan, programs)
    for worker in range(len(programs)):
        name = job.topology.workers[worker].name
        for at in np.linspace(0, whole.ewtt_seconds, 5).tolist():
            done = simulate(plan, programs, faults=[LostWorker(worker=name, at_seconds=at, detection_seconds=0.01)])
            failed = {f.worker for f in done.failures}
            assert all(f.peer == worker for f in done.failures)
            assert worker not in failed | set(done.waiting)
            for other, seconds in enumerate(done.stall_end_seconds):
                gave_up = other in failed or other in done.waiting
                same_engine = job.topology.workers[other].engine == job.topology.workers[worker].engine != ""
                assert (
                    gave_up
                    or np.isfinite(seconds)
                    or other == worker
                    or same_engine
                    or _mate_gave_up(job, other, failed, done)
                )
            for waits in done.waiting.values():
                assert waits
                assert all(who in failed or who in done.waiting or who == worker for who, _ in waits), waits


def _mate_gave_up(job, worker: int, failed: set[int], done) -> bool:
    """An engine is whole only if all its workers are."""
    engine = job.topology.workers[worker].engine
    return bool(engine) and any(job.topology.workers[w].engine == engine for w in failed | set(done.waiting))


@pytest.mark.parametrize("seed", [-1, *SEEDS])
def test_slow_nodes_and_late_engines_only_cost_time(seed: int) -> None:
    job, plan, programs = job_of(seed)
    plain = simulate(plan, programs)
    late = max(plain.ewtt_seconds, 0.1)
    engine = next(w.engine for w in job.topology.workers if w.engine)
    done = simulate(plan, programs, faults=[LateEngine(engine=engine, seconds=late)])
    assert done.completed
    assert done.ewtt_seconds > late
    for node in job.topology.nodes:
        slow = simulate(plan, programs, faults=[SlowNode(node=node, fraction=1e-4)])
        assert slow.completed
        assert slow.ewtt_seconds >= plain.ewtt_seconds * (1 - 1e-6)


# --- the executor does the same ---------------------------------------------------------------------------------------


def executed(seed: int) -> list[list[object]]:
    """Instructions of every worker as real executors carry them out, in threads of this process; the values are checked."""
    job, _, programs = job_of(seed)
    workers = job.topology.workers
    checkpoint = job.checkpoint(seed + 1)
    live = [job.live(w, checkpoint if w in job.topology.trainers else None) for w in range(len(workers))]
    traces: list[list[object]] = [[] for _ in workers]
    errors: list[BaseException] = []

    def told(w: int) -> Observe:
        return lambda seen: traces[w].append(seen.what)

    with ExitStack() as stack:
        executors = [
            Executor(
                workers=workers, program=p, kernels=ReferenceKernels(),
                identity=Identity(worker=workers[w].name, session=f"trace-{seed}"), observe=told(w),
            )
            for w, p in enumerate(programs)
        ]  # fmt: skip
        for executor in executors:
            stack.enter_context(closing(executor))
        endpoints = {w: e.endpoint for w, e in enumerate(executors)}

        def run(w: int) -> None:
            try:
                executors[w].connect(endpoints)
                executors[w].bind([Buffer(a.ctypes.data, a.nbytes) for a in live[w]])
                ready.wait(20)
                executors[w].run(session=1, epoch=0, version=1, attempt=0, assemble_allowed=True, timeout_seconds=20)
                ready.wait(20)  # nobody's memory goes away before all are through
            except BaseException as error:
                errors.append(error)
                ready.abort()

        ready = threading.Barrier(len(workers))
        threads = [threading.Thread(target=run, args=(w,)) for w in range(len(workers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert errors == []
    for w, arrays in enumerate(live):
        assert all((a == b).all() for a, b in zip(arrays, job.live(w, checkpoint), strict=True))
    return [[i for i in trace if isinstance(i, INSTRUCTIONS)] for trace in traces]


def simulated(seed: int, **changes: float) -> list[list[object]]:
    _, plan, programs = job_of(seed)
    traces: list[list[object]] = [[] for _ in programs]

    def observe(_seconds: float, worker: int, what: object) -> None:
        if isinstance(what, INSTRUCTIONS):
            traces[worker].append(what)

    assert simulate(plan, programs, observe=observe, costs=Costs(**changes)).completed
    return traces


def by_resource(program, trace: list[object]) -> dict[tuple[object, ...], list[object]]:
    """The trace taken apart into what must keep its order; see the module."""
    parts: dict[tuple[object, ...], list[object]] = defaultdict(list)
    for i in trace:
        if isinstance(i, (Pack, Decode, Assemble)):
            parts[(type(i).__name__,)].append(i.round)
        elif isinstance(i, PostWrites):
            post = program.rounds[i.round].posts[i.index]
            parts["post", post.peer].append((i.round, post.stage))
        elif isinstance(i, Signal):
            parts[i.tag.kind.name, i.tag.stage, i.peer].append(i.tag.round)
        else:
            parts[(type(i).__name__,)].append(True)
    return dict(parts)


def check_whole_order(trace: list[object]) -> None:
    posted = [i.round for i in trace if isinstance(i, PostWrites)]
    assert posted == sorted(posted)
    assert trace[-1] == Finished()
    if Released() in trace:
        assert trace.index(Released()) > max([n for n, i in enumerate(trace) if isinstance(i, PostWrites)], default=-1)


@pytest.mark.parametrize("seed", [-1, 6, 132, 195])
def test_the_traces_of_the_executor_and_of_the_simulator_agree(seed: int) -> None:
    _, _, programs = job_of(seed)
    real = executed(seed)
    for virtual in (simulated(seed), simulated(seed, latency_seconds=0.01), simulated(seed, memory_bandwidth=1e3)):
        for program, a, b in zip(programs, real, virtual, strict=True):
            assert by_resource(program, a) == by_resource(program, b)
            check_whole_order(a)
            check_whole_order(b)
    assert any(i for trace in real for i in trace if isinstance(i, PostWrites))


def test_a_trace_that_leaves_something_out_or_swaps_it_does_not_agree() -> None:
    """The comparison itself sees a missing signal, two assemblies in the wrong order, and a post too many."""
    program = max(job_of(-1)[2], key=lambda p: sum(len(r.posts) * len(r.awaits) for r in p.rounds))
    trace = simulated(-1)[program.worker]
    whole = by_resource(program, trace)
    signal = next(i for i in trace if isinstance(i, Signal))
    assert by_resource(program, [i for i in trace if i is not signal]) != whole
    assemblies = [n for n, i in enumerate(trace) if isinstance(i, Assemble)]
    swapped = list(trace)
    swapped[assemblies[0]], swapped[assemblies[1]] = trace[assemblies[1]], trace[assemblies[0]]
    assert by_resource(program, swapped) != whole
    assert by_resource(program, [*trace, next(i for i in trace if isinstance(i, PostWrites))]) != whole


@pytest.mark.parametrize("seed", [-1, *SEEDS])
def test_posts_that_leave_as_they_are_ready_keep_all_slots_safe(seed: int) -> None:
    """Values, and the driver's watch over every slot copy, in random orders of events; and it does look further ahead."""
    job, _, programs = job_of(seed)
    checkpoint = job.checkpoint(seed + 1)
    ahead = 0
    for dice in range(6):
        live = {w: job.live(w, checkpoint if w in job.topology.trainers else None) for w in range(len(programs))}
        driver = MemoryDriver(
            [replace(p, post_order=AS_READY) for p in programs],
            {w: [a.view(np.uint8) for a in arrays] for w, arrays in live.items()},
        )
        done = driver.run(seed=dice)
        assert done.finished == set(range(len(programs)))
        for w, arrays in live.items():
            assert all((a == b).all() for a, b in zip(arrays, job.live(w, checkpoint), strict=True))
        for worker in range(len(programs)):
            posted = [i.round for w, i in done.trace if w == worker and isinstance(i, PostWrites)]
            ahead += posted != sorted(posted)
    assert ahead or seed >= 0  # in the job with everything in it some round overtakes another


# --- a whole deployment -----------------------------------------------------------------------------------------------


def test_rounds_in_the_middle_stand_for_all_rounds_of_a_real_deployment() -> None:
    """The full run of qwen3-235b-a22b (16 nodes) against 12 of its rounds and their period: within 1 %."""
    job = preset("qwen3-235b-a22b")
    plan = make_plan(job.spec, job.topology, job.maps, options=PlanOptions(slot_bytes=job.slot_bytes))
    skeletons = [skeleton_of(program) for program in lower_job(plan, job.spec, job.maps)]
    full = simulate(plan, skeletons)
    some = simulate(plan, skeletons, extrapolate=12)
    assert some.extrapolated
    assert some.ewtt_seconds == pytest.approx(full.ewtt_seconds, rel=0.01)
    assert some.agst_seconds == pytest.approx(full.agst_seconds, rel=0.01)
    assert some.links == full.links
    assert full.ratio_to_t_min <= 1.08


@pytest.mark.parametrize(("name", "most"), [("moonlight-16b", 1.08), ("qwen3-30b-a3b", 1.06), ("qwen3-32b", 1.06)])
def test_a_real_deployment_is_updated_in_little_more_than_the_least_time(name: str, most: float) -> None:
    job = preset(name)
    plan = make_plan(job.spec, job.topology, job.maps, options=PlanOptions(slot_bytes=job.slot_bytes))
    result = simulate(plan, lower_job(plan, job.spec, job.maps))
    assert plan.bounds.t_min_seconds < result.ewtt_seconds <= most * plan.bounds.t_min_seconds
    assert not result.extrapolated


def test_a_plan_of_one_level_under_fair_sharing_takes_twice_as_long() -> None:
    """The control: the simulator sees contention where there is some.

    Without the second LP, nearly all first copies of qwen3-30b-a3b go to engine 0, which forwards them to engine 1: both
    steps could run at once at full speed, and take T_min together. But if two rounds leave whenever they can, they share
    engine 0's links fairly and arrive at the same time; both slots are then full until both have been forwarded, and nothing
    is received meanwhile. Receiving and forwarding take turns: 2 x T_min. Oldest round first, the steps overlap again.
    """
    job = preset("qwen3-30b-a3b")
    plans = {
        balanced: make_plan(
            job.spec, job.topology, job.maps, options=PlanOptions(slot_bytes=job.slot_bytes, balanced=balanced)
        )
        for balanced in (False, True)
    }
    programs = {balanced: list(lower_job(plan, job.spec, job.maps)) for balanced, plan in plans.items()}
    as_ready = [replace(p, post_order=AS_READY) for p in programs[False]]
    assert 1.8 < simulate(plans[False], as_ready).ratio_to_t_min < 2.2
    assert simulate(plans[False], programs[False]).ratio_to_t_min < 1.12
    assert simulate(plans[True], programs[True]).ratio_to_t_min <= 1.06
