"""Each kind of corruption of a program is refused by a message that names the worker, the round and what is wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tests.program_mutations import mutants
from tests.unit.program_cases import house, twins

from weightbridge.errors import WeightBridgeError
from weightbridge.program.verify import ProgramVerifier

AT_A_TIME = 1  # mutants of one kind of one worker; tests/properties has all of them


def verifier_of(job, plan, programs) -> ProgramVerifier:
    """One that has passed all right programs, so that equal maps share what was proven of them."""
    verifier = ProgramVerifier(plan, job.spec)
    for program, source_map in zip(programs, job.maps, strict=True):
        verifier.check(program, source_map)
    return verifier


@pytest.mark.parametrize("case", [house, twins])
def test_each_kind_of_corruption_is_refused_naming_worker_and_round(case) -> None:
    job, plan, programs = case()
    verifier = verifier_of(job, plan, programs)
    seen: Counter[str] = Counter()
    for program, source_map in zip(programs, job.maps, strict=True):
        name = job.topology.workers[program.worker].name
        tried: Counter[str] = Counter()
        for mutant in mutants(program, len(programs)):
            if tried[mutant.what] == AT_A_TIME:
                continue
            tried[mutant.what] += 1
            with pytest.raises(WeightBridgeError) as caught:
                verifier.check(mutant.program, source_map)
            message = str(caught.value)
            assert f"'{name}'" in message, (mutant.what, message)
            assert not mutant.rounds or any(f"round {k}" in message for k in mutant.rounds), (mutant.what, message)
        seen += tried
    assert len(seen) > 60, sorted(seen)


def test_a_worker_with_a_map_seen_before_is_proven_by_what_was_proven_then() -> None:
    """The twins' live sides are equal, their slot sides are not: engine a is entered where engine b is copied to."""
    job, plan, programs = twins()
    assert job.maps[2].fingerprint == job.maps[4].fingerprint
    first, second = programs[2], programs[4]
    assert any(
        a.assemble.table.tobytes() != b.assemble.table.tobytes()
        for a, b in zip(first.rounds, second.rounds, strict=True)
    )
    shared, alone = ProgramVerifier(plan, job.spec), ProgramVerifier(plan, job.spec)
    shared.check(first, job.maps[2])
    assert repr(shared.check(second, job.maps[4])) == repr(alone.check(second, job.maps[4]))


def test_a_twin_that_cuts_its_copies_otherwise_is_proven_on_its_own() -> None:
    """Another way to cut what is assembled is no fault; only the shortcut for equal maps must not be taken."""
    job, plan, programs = twins()
    program = programs[4]
    k, row = next(
        (k, i) for k, r in enumerate(program.rounds) for i, d in enumerate(r.assemble.table) if d["count"][-1] > 2
    )
    table = program.rounds[k].assemble.table
    axis = int(np.flatnonzero(table[row]["count"] > 1)[0])  # the outermost, so that both halves are dense
    halves = table[[row, row]].copy()
    half = int(halves[0]["count"][axis]) // 2
    halves["count"][:, axis] = half, halves[0]["count"][axis] - half
    for side in ("src", "dst"):
        halves[f"{side}_offset"][1] += half * halves[f"{side}_stride"][1, axis]
    cut = np.concatenate([table[:row], halves, table[row + 1 :]])
    rounds = list(program.rounds)
    rounds[k] = replace(rounds[k], assemble=replace(rounds[k].assemble, table=cut))
    verifier_of(job, plan, programs).check(replace(program, rounds=tuple(rounds)), job.maps[4])
