"""Lowering all workers of a job: each program is the one its worker makes alone, and equal maps share their work."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from tests import toy_programs as toy
from tests.unit import plan_cases as cases

from weightbridge.errors import CoverageError, UsageError
from weightbridge.layout.source_map import CopyTable
from weightbridge.plan.planner import PlanOptions, make_plan
from weightbridge.program import lower, lower_job
from weightbridge.program.descriptors import Live
from weightbridge.program.program import AS_READY


def planned(spec, topology, maps, *, rounds: int = 1, slot_bytes: int = 1 << 20):
    options = PlanOptions(slot_bytes=slot_bytes, alignment=64, min_rounds=rounds)
    return make_plan(spec, topology, maps, options=options)


def replicas(layers: int = 3, engines: int = 3):
    """Two trainers that hold the rows of each tensor, and engines of two workers with equal layouts, a node each: worker 0
    of an engine needs all of the first tensor of each layer and half the rows of the second, worker 1 the same and the
    other half."""
    spec = cases.spec_of(*[(15, 11), (26, 9)] * layers)
    workers = [cases.trainer(i) for i in range(2)]
    maps = [
        cases.takes(spec, *((t, cases.rows(15 if t % 2 == 0 else 26, i, 2)) for t in range(2 * layers)))
        for i in range(2)
    ]
    for e in range(engines):
        for rank in range(2):
            workers.append(cases.rollout(f"e{e}", rank, f"n{e}"))
            own = ((t,) if t % 2 == 0 else (t, cases.rows(26, rank, 2)) for t in range(2 * layers))
            maps.append(cases.takes(spec, *own))
    return spec, cases.topology(*workers), maps


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_every_program_is_the_one_its_worker_makes_alone(seed: int) -> None:
    job = toy.random_job(seed)
    maps = job.maps
    maps = [next(m for m in maps if m.fingerprint == own.fingerprint) for own in maps]  # some are one object
    plan = planned(job.spec, job.topology, maps, rounds=1 + seed % 4)
    programs = {p.worker: p for p in lower_job(plan, job.spec, maps)}
    assert sorted(programs) == list(range(len(maps)))
    for worker, source_map in enumerate(job.maps):
        assert programs[worker].digest == lower(plan, job.spec, source_map, worker).digest


def test_equal_maps_come_together_and_are_looked_up_once(monkeypatch) -> None:
    spec, topology, maps = replicas()
    plan = planned(spec, topology, maps, rounds=4)
    made: Counter[str] = Counter()
    of = Live.of.__func__

    def counted(cls, atoms, wanted, boxes, spec, elements, source_map, *, to_live):
        made[source_map.fingerprint] += 1
        return of(cls, atoms, wanted, boxes, spec, elements, source_map, to_live=to_live)

    monkeypatch.setattr(Live, "of", classmethod(counted))
    programs = list(lower_job(plan, spec, maps))
    assert [p.worker for p in programs] == [0, 1, 2, 4, 6, 3, 5, 7]
    assert len(made) == 4
    assert set(made.values()) == {1}
    # what is shared is no program's own: buffers and offsets differ, memory is not shared
    tables = [p.rounds[0].assemble.table for p in programs[2:5]]
    assert not any(np.shares_memory(a, b) for i, a in enumerate(tables) for b in tables[:i])
    for p, q in pairwise(programs[2:5]):
        for a, b in zip(p.rounds, q.rounds, strict=True):
            for column in ("dst_buffer", "dst_offset", "count", "op"):
                assert (a.assemble.table[column] == b.assemble.table[column]).all()
            assert {w for w, _ in a.assemble.sources}.isdisjoint(w for w, _ in b.assemble.sources)


def test_workers_with_equal_maps_that_need_different_routes_do_not_share() -> None:
    """Trainers and rollouts on one node: the engine there is fed from its own node, by routes no other engine has."""
    spec = cases.spec_of((40, 8), (24, 6))
    whole = cases.everything(spec)
    topology = cases.topology(
        cases.trainer(0, "a"), cases.trainer(1, "b"), cases.rollout("e0", 0, "a"), cases.rollout("e1", 0, "c"),
        cases.rollout("e2", 0, "c"),
    )  # fmt: skip
    maps = [whole] * 5
    plan = planned(spec, topology, maps, rounds=3)
    programs = {p.worker: p for p in lower_job(plan, spec, maps)}
    for worker in range(5):
        assert programs[worker].digest == lower(plan, spec, whole, worker).digest
    moved = [sum(int(r.assemble.table["count"].prod(axis=1).sum()) for r in programs[w].rounds) for w in (2, 3, 4)]
    assert moved == [40 * 8 + 24 * 6] * 3


def test_the_number_of_descriptors_of_a_small_job_of_experts() -> None:
    """8 experts of 3 dense tensors over 4 trainers and, by other cuts, 2 workers of each of 2 engines; a router that all
    have. Every run of an atom is one descriptor: as many as there are atoms, and one more for each cut inside one."""
    spec = cases.spec_of(*[(40, 16)] * 24, (24, 33))
    held = lambda i, n: [(e * 3 + j,) for e in range(8) if e * n // 8 == i for j in range(3)]  # noqa: E731
    workers = [cases.trainer(i) for i in range(4)]
    maps = [cases.takes(spec, *held(i, 4), (24,)) for i in range(4)]
    for e in range(2):
        for rank in range(2):
            workers.append(cases.rollout(f"e{e}", rank, f"n{e}"))
            maps.append(cases.takes(spec, *held(rank, 2), (24,)))
    plan = planned(spec, cases.topology(*workers), maps, rounds=6)
    begins = {(int(c), int(o)) for c, o in zip(plan.atoms.class_id, plan.atoms.stream_offset, strict=True)}
    for program in lower_job(plan, spec, maps):
        worker = program.worker
        trainer = worker < 4
        wanted = 0
        for i, route in enumerate(plan.routes):
            replica_class = plan.classes[route["class_id"]]
            if route["sender"] == worker if trainer else worker in replica_class.needers:
                cuts = {p for k in range(plan.rounds) for p in plan.part(i, k)} - {int(route["hi"])}
                inner = {o for c, o in begins if c == route["class_id"] and route["lo"] < o < route["hi"]}
                wanted += len(cuts | inner)
        assert sum(len(r.pack) + len(r.assemble.table) for r in program.rounds) == wanted
        assert wanted >= (6 if trainer else 13)


def test_programs_are_made_as_they_are_asked_for() -> None:
    spec, topology, maps = replicas(layers=1)
    plan = planned(spec, topology, maps)
    broken = [*maps[:3], replace(maps[3], copies=CopyTable.empty()), *maps[4:]]
    programs = lower_job(plan, spec, broken)
    assert [next(programs).worker for _ in range(5)] == [0, 1, 2, 4, 6]
    with pytest.raises(CoverageError, match="no place for elements"):
        next(programs)


def test_options_are_recorded_and_a_wrong_number_of_maps_is_refused_at_once() -> None:
    spec, topology, maps = replicas(layers=1)
    plan = planned(spec, topology, maps)
    for program in lower_job(plan, spec, maps, codec="zlib", base_version=7, post_order=AS_READY):
        assert (program.codec, program.base_version, program.post_order) == ("zlib", 7, AS_READY)
    with pytest.raises(UsageError, match="7 source maps for 8 workers"):
        lower_job(plan, spec, maps[:-1])
    other = cases.spec_of((15, 11), (26, 10))
    with pytest.raises(UsageError, match="different checkpoints"):
        lower_job(plan, other, maps)
