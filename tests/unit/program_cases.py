"""Small uneven jobs with their plans and right programs, for the tests of programs. Not a test module."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
from tests import toy_programs as toy

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.plan import HOP, ROUTE, Plan, PlanOptions, make_plan
from weightbridge.plan.topology import Role, Topology, Worker
from weightbridge.program import WorkerProgram, lower


@cache
def house() -> tuple[toy.Job, Plan, list[WorkerProgram]]:
    job = toy.house_job()
    options = PlanOptions(slot_bytes=1 << 20, alignment=64, min_rounds=5)
    plan = make_plan(job.spec, job.topology, job.maps, options=options)
    # routes by hand, so that workers 2 and 5 forward to each other and 6 reads 5's slots, whatever the planner prefers
    routes = [
        (0, 0, 320, 0, 2, 5, 0), (0, 320, 512, 0, 3, 3, 3), (0, 512, 684, 0, 3, 3, 1), (1, 0, 192, 1, 5, 3, 4),
        (1, 192, 384, 1, 6, 3, 2), (1, 384, 568, 1, 4, 3, 0), (2, 0, 56, 0, 5, 1, 3), (3, 0, 60, 1, 4, 1, 1),
        (4, 0, 28, 0, 4, 1, 4), (5, 0, 20, 1, 6, 1, 2),
    ]  # fmt: skip
    copies = [
        (0, 2, 5), (1, 3, 4), (2, 3, 6), (3, 5, 3), (4, 6, 3), (5, 4, 2), (6, 5, 2), (7, 4, 2), (8, 4, 2), (9, 6, 2),
    ]  # fmt: skip
    hops = np.array([(route, 1, src, dst) for route, src, dst in copies], dtype=HOP)
    plan = replace(plan, routes=np.array(routes, dtype=ROUTE), hops=hops, rounds=5, unit_bytes=64)
    return job, plan, [lower(plan, job.spec, m, w) for w, m in enumerate(job.maps)]


@cache
def twins() -> tuple[toy.Job, Plan, list[WorkerProgram]]:
    """Two fp32 trainers and two engines of equal layout, TP 2 over 7 and 6 rows, one tensor tied, one cut by columns."""
    bf16, f32 = dtype_named("BF16"), dtype_named("F32")
    spec = CheckpointSpec(
        tensors=(
            TensorSpec(name="up", shape=(13, 20), dtype=bf16),
            TensorSpec(name="down", shape=(9, 22), dtype=bf16),
            TensorSpec(name="tied", shape=(11, 10), dtype=bf16),
            TensorSpec(name="scale", shape=(17,), dtype=f32),
        )
    )
    rng = random.Random(3)
    cuts = {0: (7, 0), 1: (12, 1)}  # tensor -> (first rank's extent, dim)
    seats: list[tuple[Worker, toy.Layout]] = []
    for rank in range(2):
        layout = toy.Layout()
        for t, tensor in enumerate(spec.tensors):
            layout.place(rng, t, f32, _part(tensor.shape, rank, tensor.shape[0] // 2, 0))
        seats.append((Worker(name=f"trainer/{rank}", role=Role.TRAINER, node="n0", rank=rank), layout))
    shared = []
    for rank in range(2):
        layout = toy.Layout()
        for t, tensor in enumerate(spec.tensors):
            extent, dim = cuts.get(t, (0, 0))
            box = _part(tensor.shape, rank, extent, dim) if extent else [(0, 1, n) for n in tensor.shape]
            for _ in range(2 if tensor.name == "tied" else 1):
                layout.place(rng, t, tensor.dtype, box)
        shared.append(layout)
    for engine, node in (("a", "n1"), ("b", "n2")):
        for rank, layout in enumerate(shared):
            seats.append(
                (Worker(name=f"{engine}/{rank}", role=Role.ROLLOUT, node=node, rank=rank, engine=engine), layout)
            )
    job = toy.Job(spec, Topology(workers=tuple(w for w, _ in seats)), [layout for _, layout in seats])
    options = PlanOptions(slot_bytes=1 << 16, alignment=64, unit_bytes=64, min_rounds=4)
    plan = make_plan(spec, job.topology, job.maps, options=options)
    return job, plan, [lower(plan, spec, m, w) for w, m in enumerate(job.maps)]


def _part(shape: tuple[int, ...], rank: int, extent: int, dim: int) -> list[tuple[int, int, int]]:
    """The first `extent` indices of one dim for rank 0, the others for rank 1."""
    box = [(0, 1, n) for n in shape]
    box[dim] = (0, 1, extent) if rank == 0 else (extent, 1, shape[dim] - extent)
    return box


def with_round(program: WorkerProgram, k: int, **changes: object) -> WorkerProgram:
    rounds = list(program.rounds)
    rounds[k] = replace(rounds[k], **changes)
    return replace(program, rounds=tuple(rounds))
