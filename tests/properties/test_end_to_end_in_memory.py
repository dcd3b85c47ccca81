"""Source maps -> plan -> programs -> bytes in memory, against a naive copy, on random jobs in random orders of events.

Two families of jobs with oracles of their own: the hypothesis strategies of the test kit (raw bits, all layouts) and the
seeded jobs of tests/toy_programs.py (casts between bf16 and fp32 too).
"""

from __future__ import annotations

from functools import cache

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tests import toy_programs as toy

from weightbridge.errors import InfeasibleError
from weightbridge.plan.plan import STAGES
from weightbridge.plan.planner import PlanOptions, make_plan
from weightbridge.program import decode_program, encode_program, lower, verify_program, verify_programs
from weightbridge.testing.memory_driver import MemoryDriver
from weightbridge.testing.strategies import Job, jobs

MAX_ROUNDS = 40
SLOT_BYTES = (64, 128, 320, 1024, 1 << 20)


def plan_of(job, slot_bytes: int, min_rounds: int = 1):
    """A plan within slot_bytes, or within what the planner says it needs at least; of few rounds, for the time it takes."""

    def make(limit: int):
        options = PlanOptions(slot_bytes=limit, alignment=64, min_rounds=min_rounds)
        return make_plan(job.spec, job.topology, job.maps, options=options)

    try:
        plan = make(slot_bytes)
    except InfeasibleError as error:
        slot_bytes = error.needed_bytes
        plan = make(slot_bytes)
    while plan.rounds > MAX_ROUNDS:
        slot_bytes *= 4
        plan = make(slot_bytes)
    return plan


def planned_bytes(plan) -> dict[tuple[int, int], int]:
    """(source, target) -> bytes, straight from routes and hops."""
    edges = [(r["sender"], r["entry"], r) for r in plan.routes]
    edges += [(h["src"], h["dst"], plan.routes[h["route"]]) for h in plan.hops]
    found: dict[tuple[int, int], int] = {}
    for source, target, route in edges:
        pair = (int(source), int(target))
        found[pair] = found.get(pair, 0) + int(route["hi"] - route["lo"])
    return found


def programs_of(job, plan):
    """Lowered, verified alone and together, and once over the wire."""
    programs = [lower(plan, job.spec, m, w) for w, m in enumerate(job.maps)]
    for program, source_map in zip(programs, job.maps, strict=True):
        verify_program(program, plan, job.spec, source_map)
        verify_program(program, plan, job.spec, source_map, exhaustive=True)
    verify_programs(programs, plan)
    return [decode_program(encode_program(p)) for p in programs]


def check_outcome(job, plan, outcome) -> None:
    workers = range(len(job.topology.workers))
    assert not outcome.failed
    assert not outcome.stuck
    assert outcome.finished == frozenset(workers)
    assert dict(outcome.moved_bytes) == planned_bytes(plan)


def check_network(job, plan) -> None:
    """What the plan promises users: trainers send the model once, a node receives what it needs once."""
    nodes = [w.node for w in job.topology.workers]
    into: dict[str, int] = {}
    for (source, target), nbytes in planned_bytes(plan).items():
        if nodes[source] != nodes[target]:
            into[nodes[target]] = into.get(nodes[target], 0) + nbytes
    for node, nbytes in into.items():
        here = set(job.topology.on_node(node))
        needed = sum(c.nbytes for c in plan.classes if here & set(c.needers))
        assert nbytes <= needed


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(job=jobs(), slot_bytes=st.sampled_from(SLOT_BYTES), min_rounds=st.integers(1, 7), dice=st.data())
def test_memory_equals_a_naive_copy(job: Job, slot_bytes: int, min_rounds: int, dice) -> None:
    plan = plan_of(job, slot_bytes, min_rounds)
    live = {w: job.loaded(w, job.checkpoint(0)) for w in range(len(job.loaders))}
    driver = MemoryDriver(
        programs_of(job, plan),
        {w: [a.view(np.uint8) for a in s] for w, s in live.items()},
        ordered=dice.draw(st.booleans()),
    )
    for version in (1, 2):
        checkpoint = job.checkpoint(version)
        checkpoint.update({name: job.checkpoint(0)[name] for name in job.spec.constants})  # they never travel
        for w in job.topology.trainers:
            job.loaders[w].load(live[w], checkpoint)
        before = {w: [a.copy() for a in live[w]] for w in job.topology.trainers}
        seed, gated = dice.draw(st.integers(0, 1 << 30)), dice.draw(st.booleans())
        check_outcome(job, plan, driver.run(seed=seed, version=version, gated=gated))
        for w in job.topology.rollouts:
            for tensor, found, expected in zip(job.maps[w].live, live[w], job.loaded(w, checkpoint), strict=True):
                assert (found == expected).all(), (w, tensor.name)
        for w, arrays in before.items():
            assert all((a == b).all() for a, b in zip(arrays, live[w], strict=True)), "a trainer's weights changed"
    check_network(job, plan)


@cache
def seeded(seed: int):
    job = toy.random_job(seed)
    return job, plan_of(job, SLOT_BYTES[seed % len(SLOT_BYTES)], 1 + seed % 4)


@pytest.mark.parametrize("seed", range(40))
def test_memory_equals_a_naive_copy_with_casts(seed: int) -> None:
    job, plan = seeded(seed)
    workers = range(len(job.topology.workers))
    checkpoint = job.checkpoint(seed)
    live = {w: job.live(w, checkpoint if w in job.topology.trainers else None) for w in workers}
    driver = MemoryDriver(programs_of(job, plan), {w: [a.view(np.uint8) for a in arrays] for w, arrays in live.items()})
    check_outcome(job, plan, driver.run(seed=seed))
    for w in workers:
        for found, expected in zip(live[w], job.live(w, checkpoint), strict=True):
            assert (found == expected).all()


def needed_in(job, nodes) -> int:
    """Distinct checkpoint bytes that the rollouts on these nodes need, from their placements."""
    taken = [np.zeros(t.shape, dtype=bool) for t in job.spec.tensors]
    for w in job.topology.rollouts:
        for p in job.layouts[w].placements if job.topology.workers[w].node in nodes else ():
            taken[p.tensor][tuple(slice(a, a + (n - 1) * s + 1, s) for a, s, n in p.box)] = True
    return sum(int(t.sum()) * spec.dtype.itemsize for t, spec in zip(taken, job.spec.tensors, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_between_clusters_each_byte_travels_once(seed: int) -> None:
    """What comes into a cluster, and what its own trainers send first inside it, is together what it needs."""
    job = toy.two_cluster_job(seed)
    plan = plan_of(job, SLOT_BYTES[3 + seed % 2], 1 + seed % 4)
    assert (plan.hops["stage"] == STAGES.index("relay")).any()
    workers, checkpoint = job.topology.workers, job.checkpoint(seed)
    live = {w: job.live(w, checkpoint if w in job.topology.trainers else None) for w in range(len(workers))}
    programs = programs_of(job, plan)
    driver = MemoryDriver(programs, {w: [a.view(np.uint8) for a in arrays] for w, arrays in live.items()})
    outcome = driver.run(seed=seed)
    check_outcome(job, plan, outcome)
    for w in range(len(workers)):
        for found, expected in zip(live[w], job.live(w, checkpoint), strict=True):
            assert (found == expected).all()
    for group in job.topology.groups:
        inside = [w.node in group.nodes for w in workers]
        crossed = sum(n for (a, b), n in outcome.moved_bytes.items() if inside[b] and not inside[a])
        own = sum(
            n for (a, b), n in outcome.moved_bytes.items() if inside[b] and inside[a] and a in job.topology.trainers
        )
        assert crossed + own == needed_in(job, group.nodes)
    sent = sum(n for (a, _), n in outcome.moved_bytes.items() if a in job.topology.trainers)
    assert sent == needed_in(job, job.topology.nodes)


def test_random_jobs_reach_what_they_are_meant_to_reach() -> None:
    """The family above would prove nothing about forwards, neighbours, casts and reuse of slots if it had none."""
    reached = {"hops": 0, "neighbours": 0, "casts": 0, "reuse": 0, "partial": 0, "both stages": 0}
    for seed in range(40):
        job, plan = seeded(seed)
        programs = [lower(plan, job.spec, m, w) for w, m in enumerate(job.maps)]
        rounds = [r for p in programs for r in p.rounds]
        reached["hops"] += len(plan.hops) > 0
        reached["neighbours"] += any(r.readers for r in rounds)
        reached["casts"] += any((r.pack["op"] != 0).any() or (r.assemble.table["op"] != 0).any() for r in rounds)
        reached["reuse"] += plan.rounds > 2
        reached["partial"] += any(len({r.pack.tobytes() for r in p.rounds}) > 1 for p in programs)
        reached["both stages"] += any(len({s for _, s in r.assemble.sources}) > 1 for r in rounds)
    assert all(n >= 3 for n in reached.values()), reached
