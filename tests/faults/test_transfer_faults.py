"""Deaths, lost and doubled signals, in every place where they can happen, on jobs with forwards and neighbours."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from tests import toy_programs as toy

from weightbridge.machine.events import Failed, Finished, PostWrites, Signal
from weightbridge.plan.planner import PlanOptions, make_plan
from weightbridge.program import lower
from weightbridge.testing.memory_driver import Faults, MemoryDriver

SEEDS = (6, 132, 195)


@cache
def programs_of(seed: int):
    job = toy.random_job(seed)
    plan = make_plan(
        job.spec, job.topology, job.maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64, min_rounds=4)
    )
    return job, plan, [lower(plan, job.spec, m, w) for w, m in enumerate(job.maps)]


def driver_of(seed: int):
    job, _, programs = programs_of(seed)
    checkpoint = job.checkpoint(seed)
    live = {w: job.live(w, checkpoint if w in job.topology.trainers else None) for w in range(len(programs))}
    return (
        MemoryDriver(programs, {w: [a.view(np.uint8) for a in arrays] for w, arrays in live.items()}),
        live,
        checkpoint,
    )


def check_whole(seed: int, live, checkpoint) -> None:
    job = programs_of(seed)[0]
    for w, arrays in live.items():
        assert all((a == b).all() for a, b in zip(arrays, job.live(w, checkpoint), strict=True)), w


def test_the_jobs_forward_and_read_neighbours() -> None:
    for seed in SEEDS:
        _, plan, programs = programs_of(seed)
        assert plan.rounds > 2
        assert len(plan.hops)
        assert any(r.readers for p in programs for r in p.rounds)


@pytest.mark.parametrize("seed", SEEDS)
def test_death_at_each_instruction_ends_every_survivor_naming_the_dead(seed: int) -> None:
    driver, live, checkpoint = driver_of(seed)
    whole = driver.run(seed=seed)
    num_instructions = Counter(worker for worker, _ in whole.trace)
    for victim, count in num_instructions.items():
        for n in range(count):
            outcome = driver.run(seed=n, attempt=n, faults=Faults(death=(victim, n)))
            assert not outcome.stuck, (victim, n, outcome.stuck)
            assert outcome.finished | outcome.failed.keys() == num_instructions.keys() - {victim}
            assert {f.peer for f in outcome.failed.values()} <= {victim}
    assert not driver.run(seed=seed, attempt=99).failed  # slots are good for the next attempt
    check_whole(seed, live, checkpoint)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_unannounced_death_leaves_waits_that_lead_to_the_dead(seed: int) -> None:
    """What deadline messages are made of: follow whom each worker waits for, and the dead one is at the end."""
    driver, _, _ = driver_of(seed)
    num_instructions = Counter(worker for worker, _ in driver.run(seed=seed).trace)
    for victim, count in num_instructions.items():
        for n in range(0, count, 2):
            outcome = driver.run(seed=n, faults=Faults(death=(victim, n), announce=False))
            assert not outcome.failed
            for worker in outcome.stuck:
                reached, todo = {worker}, [worker]
                while todo:
                    for peer, what in outcome.stuck.get(todo.pop(), ()):
                        assert what
                        if peer not in reached:
                            reached.add(peer)
                            todo.append(peer)
                assert victim in reached, (victim, n, worker, outcome.stuck)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_signal_is_waited_for_by_name(seed: int) -> None:
    driver, _, _ = driver_of(seed)
    num_signals = sum(isinstance(i, Signal) for _, i in driver.run(seed=seed).trace)
    assert num_signals > 10
    for n in range(0, num_signals, 1 + num_signals // 40):
        outcome = driver.run(seed=seed, faults=Faults(drop_signals=frozenset([n])))
        assert not outcome.failed
        signals = [(w, i) for w, i in outcome.trace if isinstance(i, Signal)]
        sender, signal = signals[n]
        waits = outcome.stuck[signal.peer]
        word = signal.tag.kind.name.lower()
        assert any(peer == sender and word in what and str(signal.tag.round) in what for peer, what in waits), (
            signal,
            waits,
        )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_doubled_signal_fails_naming_its_sender_or_comes_too_late_to_matter(seed: int) -> None:
    driver, _, _ = driver_of(seed)
    num_signals = sum(isinstance(i, Signal) for _, i in driver.run(seed=seed).trace)
    num_failed = 0
    for n in range(0, num_signals, 1 + num_signals // 40):
        outcome = driver.run(seed=n, faults=Faults(duplicate_signals=frozenset([n])))
        sender, signal = [(w, i) for w, i in outcome.trace if isinstance(i, Signal)][n]
        assert not outcome.stuck
        if outcome.failed:
            num_failed += 1
            assert {f.peer for w, f in outcome.failed.items() if w != sender} == {sender}
            assert "twice" in outcome.failed[signal.peer].cause
    assert num_failed > 10


def test_nothing_follows_the_end() -> None:
    driver, _, _ = driver_of(SEEDS[0])
    for faults in (Faults(), Faults(death=(0, 3))):
        trace = driver.run(seed=3, faults=faults).trace
        ended = set()
        for worker, instruction in trace:
            assert worker not in ended
            if isinstance(instruction, (Failed, Finished)):
                ended.add(worker)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_corrupted_post_ends_the_attempt_naming_its_sender_and_the_next_is_whole(seed: int) -> None:
    driver, live, checkpoint = driver_of(seed)
    posts = [(w, i) for w, i in driver.run(seed=seed).trace if isinstance(i, PostWrites)]
    assert len(posts) > 3
    for n in range(0, len(posts), 1 + len(posts) // 20):
        outcome = driver.run(seed=seed, faults=Faults(corrupt_posts=frozenset([n])))
        assert not outcome.stuck
        sender, instruction = [(w, i) for w, i in outcome.trace if isinstance(i, PostWrites)][n]
        receiver = driver.programs[sender].rounds[instruction.round].posts[instruction.index].peer
        assert outcome.failed[receiver].peer == sender
        assert f"round {instruction.round} came in corrupted" in outcome.failed[receiver].cause
        assert {f.peer for f in outcome.failed.values()} == {sender}
    assert not driver.run(seed=seed, attempt=99).failed
    check_whole(seed, live, checkpoint)
