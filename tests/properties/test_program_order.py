"""What is proven of each program alone, against the order of steps of all programs, and all corruptions of two jobs.

`verify_programs` asks of each pair of steps whether one comes before the other. Whatever it refuses, `verify_job`, which
looks at one program at a time, must refuse too. Mutants here are of everything that orders steps.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from tests import toy_programs as toy
from tests.program_mutations import mutants, mutants_of_steps
from tests.unit.program_cases import house, twins, with_round

from weightbridge.errors import InfeasibleError, InternalError, WeightBridgeError
from weightbridge.plan import PlanOptions, make_plan
from weightbridge.program import WorkerProgram, lower, verify_programs
from weightbridge.program.program import POST_ORDERS
from weightbridge.program.verify import ProgramVerifier
from weightbridge.program.verify_job import verify_job

JOBS, MUTANTS_A_JOB = range(30), 16


@cache
def job_of(seed: int):
    """A random job with its plan, cut finely, and its programs, in either order of posts."""
    job = toy.random_job(seed)
    slot_bytes = (128, 320, 1024)[seed % 3]
    while True:
        try:
            options = PlanOptions(slot_bytes=slot_bytes, alignment=64, unit_bytes=64, min_rounds=3)
            plan = make_plan(job.spec, job.topology, job.maps, options=options)
        except InfeasibleError as error:
            slot_bytes = error.needed_bytes
            continue
        if plan.rounds <= 12:
            break
        slot_bytes *= 2
    order = POST_ORDERS[seed % 2]
    programs = [replace(lower(plan, job.spec, m, w), post_order=order) for w, m in enumerate(job.maps)]
    return job, plan, programs


def changed_in_one(programs: list[WorkerProgram], rng: random.Random) -> None:
    worker, k = rng.randrange(len(programs)), rng.randrange(len(programs[0].rounds))
    found = list(mutants_of_steps(programs[worker], k, len(programs)))
    programs[worker] = rng.choice(found).program


def changed_in_two(programs: list[WorkerProgram], rng: random.Random) -> None:
    """A reader and the one it reads forget each other, so that their lists still fit: only the order of steps can tell."""
    reads = [(p.worker, other, k) for p in programs for k, r in enumerate(p.rounds) for other in r.reads]
    if not reads:
        return
    reader, holder, k = rng.choice(reads)
    for worker, other, side in ((reader, holder, "reads"), (holder, reader, "readers")):
        names = getattr(programs[worker].rounds[k], side)
        programs[worker] = with_round(programs[worker], k, **{side: tuple(n for n in names if n != other)})


@pytest.mark.parametrize("seed", JOBS)
def test_what_the_order_of_all_steps_refuses_each_program_alone_refuses(seed: int) -> None:
    job, plan, programs = job_of(seed)
    verify_job(plan, job.spec, job.maps, programs)
    verify_programs(programs, plan)
    rng = random.Random(seed)
    for _ in range(MUTANTS_A_JOB):
        changed = list(programs)
        for change in rng.choice([(changed_in_one,), (changed_in_two,), (changed_in_two, changed_in_one)]):
            change(changed, rng)
        try:
            verify_programs(changed, plan)
        except WeightBridgeError:
            with pytest.raises(WeightBridgeError):
                verify_job(plan, job.spec, job.maps, changed)


def test_the_jobs_above_have_what_an_order_can_be_wrong_about() -> None:
    reached: Counter[str] = Counter()
    for seed in JOBS:
        _, plan, programs = job_of(seed)
        rounds = [r for p in programs for r in p.rounds]
        reached["forwards"] += any(p.after for r in rounds for p in r.posts)
        reached["readers"] += any(r.readers for r in rounds)
        reached["reuse"] += plan.rounds > 2
    assert min(reached.values()) >= 6, reached


# Of the twins, which have the maps of engine a twice, those of engine b and one of a; their trainers are as the house's.
@pytest.mark.parametrize(
    ("case", "worker"), [(c, w) for c, them in ((house, range(7)), (twins, (2, 4, 5))) for w in them]
)
def test_every_corruption_of_a_program_is_refused(case, worker: int) -> None:
    job, plan, programs = case()
    verifier, name, tried = ProgramVerifier(plan, job.spec), job.topology.workers[worker].name, 0
    for program, source_map in zip(programs, job.maps, strict=True):
        verifier.check(program, source_map)
    for mutant in mutants(programs[worker], len(programs)):
        with pytest.raises((InternalError, InfeasibleError)) as caught:
            verifier.check(mutant.program, job.maps[worker])
        message = str(caught.value)
        assert f"'{name}'" in message, (mutant.what, message)
        assert not mutant.rounds or any(f"round {k}" in message for k in mutant.rounds), (mutant.what, message)
        tried += 1
    assert tried > 400
