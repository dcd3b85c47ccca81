"""Lowering: slot layouts, cutting atoms at range ends, descriptors and their merging, casts, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests import toy_programs as toy

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.errors import CoverageError, InternalError, UnsupportedError, UsageError
from weightbridge.layout.source_map import CopyTable
from weightbridge.plan.plan import STAGES, AtomTable
from weightbridge.plan.planner import PlanOptions, make_plan
from weightbridge.plan.topology import Role, Topology, Worker
from weightbridge.program import Op, lower, slot_specs
from weightbridge.program.descriptors import StreamIndex, pieces_of
from weightbridge.program.slots import SEND, route_cuts, slot_layout


def pair_job(shape, dtype="BF16", *, src="BF16", dst="BF16", live_stride=None, places=1):
    """One trainer, one rollout on another node, one tensor whole on both; live_stride: of the rollout, per dim."""
    spec = CheckpointSpec(tensors=(TensorSpec(name="w", shape=shape, dtype=dtype_named(dtype)),))
    workers = (
        Worker(name="t/0", role=Role.TRAINER, node="n0", rank=0),
        Worker(name="e/0", role=Role.ROLLOUT, node="n1", rank=0, engine="e"),
    )
    dense = tuple(int(np.prod(shape[d + 1 :])) for d in range(len(shape)))
    box = tuple((0, 1, n) for n in shape)
    layouts = []
    for name, stride, count in ((src, dense, 1), (dst, live_stride or dense, places)):
        layout = toy.Layout()
        for _ in range(count):
            live = layout.add(dtype_named(name), 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)))
            layout.placements.append(toy.Placement(0, box, live, 0, tuple(stride)))
        layouts.append(layout)
    return toy.Job(spec, Topology(workers=workers), layouts)


def programs_of(job, *, rounds: int = 1, slot_bytes: int = 1 << 20):
    options = PlanOptions(slot_bytes=slot_bytes, alignment=64, min_rounds=rounds)
    plan = make_plan(job.spec, job.topology, job.maps, options=options)
    return plan, [lower(plan, job.spec, m, w) for w, m in enumerate(job.maps)]


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [3, 26, 58, 130])
def test_slots_hold_their_routes_in_order_at_multiples_of_64(seed: int) -> None:
    job = toy.random_job(seed)
    plan, programs = programs_of(job, rounds=3)
    cuts = route_cuts(plan)
    for worker, program in enumerate(programs):
        assert program.slots == slot_specs(plan, worker)
        trainer = worker in job.topology.trainers
        for stage in (SEND,) if trainer else STAGES:
            layout = slot_layout(plan, worker, stage, cuts)
            assert (np.diff(layout.routes) > 0).all()
            for k in range(plan.rounds):
                at = 0
                for i, route in enumerate(layout.routes.tolist()):
                    assert (layout.lo[i, k], layout.hi[i, k]) == plan.part(route, k)
                    assert layout.offset[i, k] == at
                    at += -(-int(layout.hi[i, k] - layout.lo[i, k]) // 64) * 64
                assert layout.used_bytes[k] == at <= program.slot(stage).capacity_bytes


def test_both_ends_of_each_write_agree_and_lowering_is_deterministic() -> None:
    job = toy.house_job()
    plan, programs = programs_of(job, rounds=4)
    again = [lower(plan, job.spec, m, w) for w, m in enumerate(job.maps)]
    assert [p.digest for p in programs] == [p.digest for p in again]
    for program in programs:
        for k, round_ in enumerate(program.rounds):
            for post in round_.posts:
                (match,) = [
                    a for a in programs[post.peer].rounds[k].awaits if (a.stage, a.peer) == (post.stage, program.worker)
                ]
                assert (match.segments == post.segments).all()


def test_a_layout_refuses_routes_that_pass_elsewhere() -> None:
    job = toy.house_job()
    plan, _ = programs_of(job)
    layout = slot_layout(plan, 2, "receive", route_cuts(plan))
    assert layout.rows(layout.routes).tolist() == list(range(len(layout.routes)))
    with pytest.raises(InternalError, match="should pass through"):
        layout.rows(np.array([len(plan.routes) + 5]))


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_ranges_fall_into_few_boxes_that_hold_exactly_them() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        num_dims, n = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        count = rng.integers(1, 6, (n, num_dims))
        itemsizes = np.array([4, 2])
        tensor = np.sort(rng.integers(0, 2, n))
        nbytes = count.prod(axis=1) * itemsizes[tensor]
        offsets = np.cumsum(nbytes) - nbytes
        zeros = np.zeros_like(count)
        atoms = AtomTable(
            tensor=tensor, start=zeros, step=zeros + 1, count=count, class_id=tensor * 0, stream_offset=offsets
        )
        index = StreamIndex.of(atoms, np.array([nbytes.sum()]), itemsizes)
        owner = np.concatenate([np.repeat([i], s) for i, s in enumerate(nbytes)])  # [bytes] atom of each byte
        begins = np.concatenate(
            [o + np.arange(0, s, itemsizes[t]) for o, s, t in zip(offsets, nbytes, tensor, strict=True)]
        )
        cuts = np.sort(rng.choice([*begins, nbytes.sum()], 4))
        lo, hi = cuts[:-1], cuts[1:]
        pieces = pieces_of(atoms, index, lo, hi, lo + 1000)
        seen = np.zeros(nbytes.sum(), dtype=int)
        per_atom: dict[tuple[int, int], int] = {}
        for key, atom, start, size, offset in zip(
            pieces.key, pieces.atom, pieces.start, pieces.count, pieces.offset, strict=True
        ):
            per_atom[key, atom] = per_atom.get((key, atom), 0) + 1
            cells = np.stack(
                np.meshgrid(*(np.arange(a, a + c) for a, c in zip(start, size, strict=True)), indexing="ij")
            )
            flat = np.ravel_multi_index(cells.reshape(num_dims, -1), count[atom])
            item = itemsizes[tensor[atom]]
            assert flat[0] * item + offsets[atom] == offset - 1000
            for f in flat:
                at = offsets[atom] + f * item
                assert lo[key] <= at < hi[key]
                seen[at : at + item] += 1
        assert (seen[lo[0] : hi[-1]] == 1).all()
        assert seen.sum() == hi[-1] - lo[0]
        assert len(owner) == nbytes.sum()
        assert max(per_atom.values(), default=0) <= 2 * num_dims - 1


def test_a_cut_inside_an_element_is_refused() -> None:
    one = np.ones((1, 1), dtype=np.int64)
    zero = np.zeros(1, dtype=np.int64)
    atoms = AtomTable(tensor=zero, start=one * 0, step=one, count=one * 8, class_id=zero, stream_offset=zero)
    index = StreamIndex.of(atoms, np.array([32]), np.array([4]))
    with pytest.raises(InternalError, match="inside an element"):
        pieces_of(atoms, index, np.array([0]), np.array([6]), np.array([0]))


# --- descriptors ------------------------------------------------------------------------------------------------------


def axes(row) -> list[tuple[int, int, int]]:
    """(count, source stride, target stride) of the axes that count, outermost first."""
    rows = zip(row["count"].tolist(), row["src_stride"].tolist(), row["dst_stride"].tolist(), strict=True)
    return [a for a in rows if a[0] != 1]


def test_a_dense_tensor_is_one_run_on_both_sides() -> None:
    _, (trainer, rollout) = programs_of(pair_job((5, 6, 7)))
    for table in (trainer.rounds[0].pack, rollout.rounds[0].assemble.table):
        (row,) = table
        assert axes(row) == [(210, 2, 2)]
        assert row["count"].tolist() == [1, 1, 1, 1, 1, 210]
        assert (row["op"], row["itemsize"], row["src_offset"], row["dst_offset"]) == (Op.COPY, 2, 0, 0)


def test_a_transposed_tensor_keeps_its_axes_and_a_padded_one_its_rows() -> None:
    _, (_, rollout) = programs_of(pair_job((5, 6), live_stride=(1, 5)))
    assert axes(rollout.rounds[0].assemble.table[0]) == [(5, 12, 2), (6, 2, 10)]
    _, (_, rollout) = programs_of(pair_job((2, 5, 6), live_stride=(40, 8, 1)))
    assert axes(rollout.rounds[0].assemble.table[0]) == [(10, 12, 16), (6, 2, 2)]


def test_an_element_that_lies_in_several_places_is_assembled_in_all_of_them() -> None:
    _, (_, rollout) = programs_of(pair_job((5, 6), places=3))
    table = rollout.rounds[0].assemble.table
    assert sorted(table["dst_buffer"].tolist()) == [0, 1, 2]
    assert set(table["src_offset"].tolist()) == {0}


@pytest.mark.parametrize(
    ("dtype", "src", "dst", "pack", "assemble"),
    [
        ("BF16", "F32", "BF16", (Op.F32_TO_BF16, 4), (Op.COPY, 2)),
        ("BF16", "BF16", "F32", (Op.COPY, 2), (Op.BF16_TO_F32, 2)),
        ("F32", "BF16", "F16", (Op.BF16_TO_F32, 2), (Op.F32_TO_F16, 4)),
        ("F16", "F32", "BF16", (Op.F32_TO_F16, 4), (Op.F16_TO_BF16, 2)),
        ("U8", "U8", "U8", (Op.COPY, 1), (Op.COPY, 1)),
        ("F64", "F64", "F64", (Op.COPY, 8), (Op.COPY, 8)),
    ],
)
def test_the_stream_is_in_checkpoint_dtypes(dtype, src, dst, pack, assemble) -> None:
    plan, (trainer, rollout) = programs_of(pair_job((3, 5), dtype, src=src, dst=dst))
    (row,) = trainer.rounds[0].pack
    assert (row["op"], row["itemsize"]) == pack
    assert axes(row) == [(15, dtype_named(src).itemsize, dtype_named(dtype).itemsize)]
    (row,) = rollout.rounds[0].assemble.table
    assert (row["op"], row["itemsize"]) == assemble
    assert plan.classes[0].nbytes == 15 * dtype_named(dtype).itemsize


def test_tables_do_not_grow_with_elements() -> None:
    _, programs = programs_of(pair_job((4096, 512)), rounds=4, slot_bytes=1 << 30)
    assert [len(r.pack) for r in programs[0].rounds] == [1, 1, 1, 1]
    _, programs = programs_of(pair_job((4096, 512), live_stride=(1, 4096)), slot_bytes=1000 * 1024)
    assert all(1 <= len(r.assemble.table) <= 3 for r in programs[1].rounds)  # head, whole rows, tail


def test_more_axes_than_a_descriptor_has_are_refused() -> None:
    stride = tuple(3 * 4**d for d in range(7))
    job = pair_job((2,) * 7, live_stride=stride)
    with pytest.raises(UnsupportedError, match="more than 6 axes"):
        programs_of(job)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_cast_without_a_kernel_is_refused_naming_the_tensor() -> None:
    with pytest.raises(UnsupportedError, match=r"'w' needs a cast from U8 to F32"):
        programs_of(pair_job((3,), "F32", src="U8"))
    with pytest.raises(UnsupportedError, match=r"'w' needs a cast from BF16 to I64"):
        programs_of(pair_job((3,), "BF16", dst="I64"))


def test_another_checkpoint_or_a_map_without_the_elements_is_refused() -> None:
    job = pair_job((3, 4))
    plan, _ = programs_of(job)
    with pytest.raises(UsageError, match="different checkpoints"):
        lower(plan, job.spec, replace(job.maps[0], spec_digest="0"), 0)
    with pytest.raises(CoverageError, match="no place for elements of 'w'"):
        lower(plan, job.spec, replace(job.maps[0], copies=CopyTable.empty()), 0)


def test_a_plan_that_leaves_bytes_out_is_refused() -> None:
    job = toy.house_job()
    plan, _ = programs_of(job)
    with pytest.raises(InternalError, match=r"'c/0' needs class \d+, of which \d+ bytes never reach node 'n2'"):
        lower(replace(plan, hops=plan.hops[1:]), job.spec, job.maps[6], 6)
    twice = np.concatenate([plan.hops, plan.hops[:1]])
    with pytest.raises(InternalError, match="reaches stage 'exchange' of worker 5 twice"):
        lower(replace(plan, hops=twice), job.spec, job.maps[5], 5)
