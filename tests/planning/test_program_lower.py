"""Lowering: slot layouts, cutting atoms at range ends, descriptors and their merging, casts, refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests import toy_programs as toy
from tests.unit import plan_cases as cases

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.errors import CoverageError, InternalError, UnsupportedError, UsageError
from weightbridge.layout.source_map import CopyTable
from weightbridge.plan.plan import STAGES, AtomTable
from weightbridge.plan.planner import PlanOptions, make_plan
from weightbridge.plan.topology import Role, Topology, Worker
from weightbridge.program import Op, lower, slot_specs
from weightbridge.program import slots as slots_module
from weightbridge.program import writes as writes_module
from weightbridge.program.descriptors import Runs, StreamIndex, _cut
from weightbridge.program.lower import Lowering
from weightbridge.program.slots import SEND, Parts, SlotTable


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
    parts = Parts.of(plan)
    table = SlotTable.of(plan, parts)
    seen = 0
    for worker, program in enumerate(programs):
        assert program.slots == slot_specs(plan, worker)
        trainer = worker in job.topology.trainers
        for stage in (SEND,) if trainer else STAGES:
            slot = int(table.slot(worker, stage))
            stops = table.stops(slot)
            routes = table.route[stops].tolist()
            assert routes == sorted(set(routes)) == routes_in(plan, worker, stage)
            cells, rows = table.cells(stops), table.parts_of(stops)
            offsets = table.offsets(cells, [slot]).tolist()
            found = {
                (parts.route[p], parts.round[p]): (parts.lo[p], parts.hi[p], o)
                for p, o in zip(rows, offsets, strict=True)
            }
            assert len(found) == len(rows)
            for k in range(plan.rounds):
                at = 0
                for route in routes:
                    lo, hi = plan.part(route, k)
                    if hi > lo:
                        assert found.pop((route, k)) == (lo, hi, at)
                        seen += 1
                    at += -(-(hi - lo) // 64) * 64
                assert at <= program.slot(stage).capacity_bytes == table.capacity_bytes(slot)
            assert not found
    assert seen


def routes_in(plan, worker: int, stage: str) -> list[int]:
    """Straight from the plan's tables: the routes whose bytes lie in that slot."""
    if stage == SEND:
        return [i for i, r in enumerate(plan.routes) if r["sender"] == worker]
    index = STAGES.index(stage)
    found = [int(h["route"]) for h in plan.hops if (h["dst"], h["stage"]) == (worker, index)]
    return sorted(found + [i for i, r in enumerate(plan.routes) if index == 0 and r["entry"] == worker])


def test_both_ends_of_each_write_agree_and_lowering_is_deterministic() -> None:
    job = toy.house_job()
    plan, programs = programs_of(job, rounds=4)
    again = [lower(plan, job.spec, m, w) for w, m in enumerate(job.maps)]
    assert [p.digest for p in programs] == [p.digest for p in again]
    num_posts = 0
    for program in programs:
        for k, round_ in enumerate(program.rounds):
            for post in round_.posts:
                (match,) = [
                    a for a in programs[post.peer].rounds[k].awaits if (a.stage, a.peer) == (post.stage, program.worker)
                ]
                assert (match.segments == post.segments).all()
                num_posts += 1
    assert num_posts == sum(len(r.awaits) for p in programs for r in p.rounds) > 0


def relayed_job(num_trainers: int, num_engines: int = 3):
    """Trainers that hold some rows each; single-worker engines on nodes of their own that need all: everybody forwards what
    several trainers sent."""
    spec = cases.spec_of((61, 24), (17, 40))
    workers = [cases.trainer(i) for i in range(num_trainers)]
    maps = [
        cases.takes(spec, *((t, cases.rows(n, i, num_trainers)) for t, n in enumerate((61, 17))))
        for i in range(num_trainers)
    ]
    for e in range(num_engines):
        workers.append(cases.rollout(f"e{e}", 0, f"n{e}"))
        maps.append(cases.everything(spec))
    plan = make_plan(spec, cases.topology(*workers), maps, options=PlanOptions(alignment=64, min_rounds=4))
    return spec, plan, maps


def messages_of(plan) -> dict:
    """(round, writer, stage, target) -> (source slot, {route: (local, remote, bytes)}, after), from the plan's rows."""
    at: dict[tuple[int, str, int, int], int] = {}  # (worker, stage, route, round) -> offset
    bringer: dict[tuple[int, int], tuple[str, int]] = {}  # (worker, route) -> stage and writer
    moves = [(i, 0, int(r["sender"]), int(r["entry"])) for i, r in enumerate(plan.routes)]
    moves += [(int(h["route"]), int(h["stage"]), int(h["src"]), int(h["dst"])) for h in plan.hops]
    stops = {(int(r["sender"]), SEND, i) for i, r in enumerate(plan.routes)}
    for route, stage, writer, target in moves:
        stops.add((target, STAGES[stage], route))
        bringer[target, route] = (STAGES[stage], writer)
    found: dict = {}
    for k in range(plan.rounds):
        used: dict[tuple[int, str], int] = {}
        for worker, stage, route in sorted(stops):
            at[worker, stage, route, k] = used.get((worker, stage), 0)
            lo, hi = plan.part(route, k)
            used[worker, stage] = at[worker, stage, route, k] + -(-(hi - lo) // 64) * 64
        for route, stage, writer, target in sorted(moves):
            lo, hi = plan.part(route, k)
            if hi > lo:
                source, before = bringer.get((writer, route), (SEND, None))
                _, segments, after = found.setdefault((k, writer, STAGES[stage], target), (source, {}, set()))
                segments[route] = (at[writer, source, route, k], at[target, STAGES[stage], route, k], hi - lo)
                after |= {(source, before)} if before is not None else set()
    return found


@pytest.mark.parametrize("bits", [63, 1])
def test_posts_and_awaits_are_the_messages_of_the_plan(monkeypatch, bits: int) -> None:
    """bits: writers a mask holds; with 1 several masks are needed."""
    monkeypatch.setattr(writes_module, "_MASK_BITS", bits)
    spec, plan, maps = relayed_job(5)
    wanted = messages_of(plan)
    assert max(len(after) for _, _, after in wanted.values()) >= 2
    posted, awaited = {}, {}
    for worker, source_map in enumerate(maps):
        for k, round_ in enumerate(lower(plan, spec, source_map, worker).rounds):
            keys = [(STAGES.index(p.stage), p.peer) for p in round_.posts]
            assert keys == sorted(keys)
            keys = [(STAGES.index(a.stage), a.peer) for a in round_.awaits]
            assert keys == sorted(keys)
            for post in round_.posts:
                assert post.after == tuple(sorted(post.after))
                posted[k, worker, post.stage, post.peer] = (post.source, rows_of(post.segments), set(post.after))
            for a in round_.awaits:
                awaited[k, a.peer, a.stage, worker] = rows_of(a.segments)
    assert posted == wanted
    assert awaited == {key: segments for key, (_, segments, _) in wanted.items()}


def rows_of(segments) -> dict[int, tuple[int, ...]]:
    routes = segments["route"].tolist()
    assert routes == sorted(set(routes))
    columns = (segments[name].tolist() for name in ("local_offset", "remote_offset", "capacity_bytes"))
    return dict(zip(routes, zip(*columns, strict=True), strict=True))


def test_a_plan_that_forwards_what_never_came_is_refused() -> None:
    spec, plan, _ = relayed_job(2)
    engines = plan.topology.rollouts
    hops = plan.hops.copy()
    there = int(hops["dst"][0])
    (third,) = set(engines) - {there, int(hops["src"][0])}
    hops["src"][0] = third  # which gets the route in this very stage, not before
    writes = Lowering.of(replace(plan, hops=hops), spec).writes
    for refused in (lambda: writes.posts(third), lambda: writes.awaits(there)):
        with pytest.raises(
            InternalError, match=rf"'e\d/0' should pass on route {hops['route'][0]}, which never reaches it"
        ):
            refused()


def test_one_message_takes_from_one_slot_only() -> None:
    spec, plan, _ = relayed_job(2)
    first, second, third = plan.topology.rollouts
    entry = plan.routes["entry"].tolist()
    received, exchanged = entry.index(second), entry.index(first)
    rows = [(exchanged, 1, first, second), (received, 2, second, third), (exchanged, 2, second, third)]
    writes = Lowering.of(replace(plan, hops=np.array(rows, dtype=plan.hops.dtype)), spec).writes
    with pytest.raises(
        UnsupportedError, match=f"worker {second} forwards routes .* in stage 'relay' .* several stages"
    ):
        writes.posts(second)
    writes = Lowering.of(replace(plan, hops=np.array(rows[::2], dtype=plan.hops.dtype)), spec).writes
    posts = [p for posts in writes.posts(second) for p in posts]
    assert {(p.stage, p.source, p.peer, p.after) for p in posts} == {
        ("relay", "exchange", third, (("exchange", first),))
    }


def test_parts_are_what_the_plan_says_where_many_routes_are_cut_at_a_time(monkeypatch) -> None:
    plan, _ = programs_of(toy.house_job(), rounds=5)
    monkeypatch.setattr(slots_module, "_CELLS_AT_ONCE", 7)  # one route a chunk
    parts = Parts.of(plan)
    wanted = [(r, k, *plan.part(r, k)) for r in range(len(plan.routes)) for k in range(plan.rounds)]
    found = list(zip(*(c.tolist() for c in (parts.route, parts.round, parts.lo, parts.hi)), strict=True))
    assert found == [(r, k, lo, hi) for r, k, lo, hi in wanted if hi > lo]
    assert parts.first.tolist() == [sum(f[0] < r for f in found) for r in range(len(plan.routes) + 1)]


# --- runs and pieces --------------------------------------------------------------------------------------------------


def random_atoms(rng, num_dims: int, n: int):
    """Atoms of random extents end to end in one class, those of tensor 0 (4-byte elements) first, then those of 1."""
    count = rng.integers(1, 6, (n, num_dims))
    itemsizes = np.array([4, 2])
    tensor = np.sort(rng.integers(0, 2, n))
    nbytes = count.prod(axis=1) * itemsizes[tensor]
    offsets = np.cumsum(nbytes) - nbytes
    zeros = np.zeros_like(count)
    atoms = AtomTable(
        tensor=tensor, start=zeros, step=zeros + 1, count=count, class_id=tensor * 0, stream_offset=offsets
    )
    return atoms, StreamIndex.of(atoms, np.array([nbytes.sum()]), itemsizes), itemsizes[tensor], nbytes


def test_ranges_fall_into_runs_of_atoms_that_hold_exactly_them() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        atoms, index, item, nbytes = random_atoms(rng, int(rng.integers(1, 5)), int(rng.integers(1, 4)))
        begins = np.concatenate(
            [o + np.arange(0, n, i) for o, n, i in zip(atoms.stream_offset, nbytes, item, strict=True)]
        )
        cuts = np.unique(rng.choice([*begins, nbytes.sum()], 4))
        lo, hi = cuts[:-1], cuts[1:]
        runs = Runs.of(index, lo, hi)
        seen = np.zeros(nbytes.sum(), dtype=int)
        for i, (key, a, b, e) in enumerate(zip(runs.key, runs.atom, runs.begin, runs.end, strict=True)):
            assert runs.first[key] <= i < runs.first[key + 1]
            at = atoms.stream_offset[a] + b * item[a]
            assert b < e
            assert lo[key] <= at == lo[key] + runs.offset[i]
            assert atoms.stream_offset[a] + e * item[a] <= hi[key]
            seen[at : atoms.stream_offset[a] + e * item[a]] += 1
        assert (seen[cuts[0] : cuts[-1]] == 1).all()
        assert seen.sum() == cuts[-1] - cuts[0]


def test_runs_of_any_box_fall_into_few_pieces_in_their_own_order() -> None:
    rng = np.random.default_rng(1)
    most = {}
    for i in range(120):
        num_axes, n = i % 4 + 1, int(rng.integers(1, 9))
        counts = rng.integers(1, 6, (n, num_axes))
        begin = rng.integers(0, counts.prod(axis=1))
        end = rng.integers(begin + 1, counts.prod(axis=1) + 1)
        pieces = _cut(counts, begin, end)
        cells: list[list[int]] = [[] for _ in range(n)]
        for row, flat, start, size in zip(pieces.row, pieces.flat, pieces.start, pieces.count, strict=True):
            box = np.meshgrid(*(np.arange(a, a + c) for a, c in zip(start, size, strict=True)), indexing="ij")
            found = np.ravel_multi_index([axis.reshape(-1) for axis in box], counts[row]).tolist()
            assert found[0] == flat
            cells[row] += found
        assert cells == [list(range(a, b)) for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
        most[num_axes] = max(most.get(num_axes, 0), int(np.bincount(pieces.row).max()))
    assert most == {1: 1, 2: 3, 3: 5, 4: 7}


def test_a_cut_inside_an_element_is_refused() -> None:
    one = np.ones((1, 1), dtype=np.int64)
    zero = np.zeros(1, dtype=np.int64)
    atoms = AtomTable(tensor=zero, start=one * 0, step=one, count=one * 8, class_id=zero, stream_offset=zero)
    index = StreamIndex.of(atoms, np.array([32]), np.array([4]))
    with pytest.raises(InternalError, match="inside an element"):
        Runs.of(index, np.array([0]), np.array([6]))
    with pytest.raises(InternalError, match="inside an element"):
        Runs.of(index, np.array([2]), np.array([8]))


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


def test_an_element_that_lies_in_several_places_is_packed_from_one() -> None:
    spec = cases.spec_of((5, 6), (7, 3))
    maps = [cases.takes(spec, (0,), (1,), (0,), (1,), (0,)), cases.everything(spec)]
    topology = cases.topology(cases.trainer(0), cases.rollout("e", 0, "b"))
    plan = make_plan(spec, topology, maps, options=PlanOptions(alignment=64))
    first, second = lower(plan, spec, maps[0], 0).rounds[0].pack
    assert (axes(first), axes(second)) == ([(30, 2, 2)], [(21, 2, 2)])
    assert (first["dst_offset"], second["dst_offset"]) == (0, 60)
    assert first["src_buffer"] in (0, 2, 4)
    assert second["src_buffer"] in (1, 3)


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


def test_an_atom_that_is_dense_in_memory_is_one_run_however_it_is_cut() -> None:
    _, (trainer, rollout) = programs_of(pair_job((37, 5, 7), "F32", src="F32", dst="BF16"), rounds=9)
    at = 0
    for k in range(9):
        for table, sizes in ((trainer.rounds[k].pack, (4, 4)), (rollout.rounds[k].assemble.table, (4, 2))):
            (row,) = table
            ((length, *steps),) = axes(row)
            assert tuple(steps) == sizes
            live = "src_offset" if table is trainer.rounds[k].pack else "dst_offset"
            assert row[live] == at * sizes[0 if live == "src_offset" else 1]
        at += length
    assert at == 37 * 5 * 7


def test_axes_that_are_one_run_on_both_sides_are_merged_before_the_cut() -> None:
    # rows padded to 48: head, whole rows and tail at most, not five pieces, because the outer two dims are one axis
    _, (_, rollout) = programs_of(pair_job((6, 9, 41), live_stride=(9 * 48, 48, 1)), rounds=11)
    assert max(len(r.assemble.table) for r in rollout.rounds) == 3
    assert all(len(axes(row)) <= 2 for r in rollout.rounds for row in r.assemble.table)
    moved = sum(int(r.assemble.table["count"].prod(axis=1).sum()) for r in rollout.rounds)
    assert moved == 6 * 9 * 41


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
    worker = int(plan.hops["dst"][0])
    with pytest.raises(InternalError, match=f"reaches stage 'exchange' of worker {worker} twice"):
        lower(replace(plan, hops=twice), job.spec, job.maps[worker], worker)
