"""Finding atoms in a worker's boxes: all pairs and only those, and never all atoms against all boxes of a large tensor."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tests.unit import plan_cases as cases

from weightbridge.layout.boxes import BoxTable, expand
from weightbridge.layout.source_map import CopyTable, LiveTensor, SourceMap
from weightbridge.plan.plan import AtomTable
from weightbridge.plan.planner import PlanOptions, make_plan
from weightbridge.program import lower, places
from weightbridge.program.places import match_boxes


def atoms_of(rows) -> AtomTable:
    """rows: (tensor, ((start, step, count), ...))."""
    boxes = np.array([r[1] for r in rows], dtype=np.int64)
    zero = np.zeros(len(rows), dtype=np.int64)
    return AtomTable(
        tensor=np.array([r[0] for r in rows], dtype=np.int64), start=boxes[:, :, 0], step=boxes[:, :, 1],
        count=boxes[:, :, 2], class_id=zero, stream_offset=zero,
    )  # fmt: skip


def boxes_of(rows) -> BoxTable:
    table = atoms_of(rows)
    return BoxTable(
        tensor=table.tensor, live=table.tensor, start=table.start, step=table.step, count=table.count,
        live_start=table.tensor, live_stride=np.ones_like(table.start),
    )  # fmt: skip


def elements(box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, a + n * s, s) for a, s, n in box)))


def pairs_by_sets(atoms, wanted, boxes) -> list[tuple[int, int]]:
    return [
        (i, j)
        for i, atom in enumerate(wanted)
        for j, (tensor, box) in enumerate(boxes)
        if atoms[atom][0] == tensor and elements(atoms[atom][1]) <= elements(box)
    ]


def random_line(rng, extent: int) -> tuple[int, int, int]:
    start, step = int(rng.integers(extent)), int(rng.choice([1, 1, 1, 2, 3]))
    most = (extent - 1 - start) // step + 1
    count = int(rng.integers(1, most + 1))
    return (start, step if count > 1 else 1, count)


@pytest.mark.parametrize("few", [0, 4, 64])
def test_pairs_are_those_of_which_the_box_holds_the_whole_atom(monkeypatch, few: int) -> None:
    """few: how many boxes of a tensor are compared one by one; with 0 every tensor goes through the grid."""
    monkeypatch.setattr(places, "_FEW_BOXES", few)
    monkeypatch.setattr(places, "_PAIRS_AT_ONCE", 5)
    rng = np.random.default_rng(few)
    total = 0
    for dims in (1, 2, 3, 2):
        extents = [12, 7, 5][:dims]
        row = lambda: (int(rng.integers(3)), tuple(random_line(rng, n) for n in extents))  # noqa: B023, E731
        atoms = [*(row() for _ in range(30)), (2, tuple((0, 1, 1) for _ in extents))]
        boxes = [*(row() for _ in range(40)), *atoms[:5], atoms[3]]
        wanted = np.flatnonzero(rng.random(len(atoms)) < 0.8)
        position, box = match_boxes(atoms_of(atoms), wanted, boxes_of(boxes))
        found = list(zip(position.tolist(), box.tolist(), strict=True))
        assert found == pairs_by_sets(atoms, wanted, boxes)
        total += len(found)
    assert total > 60


def test_boxes_of_fewer_or_more_dims_than_the_atoms_have() -> None:
    atoms = atoms_of([(0, ((2, 1, 3), (0, 1, 1)))])
    for few in (((1, 1, 5),), ((1, 1, 5), (0, 1, 1), (0, 1, 1))):
        position, box = match_boxes(atoms, np.array([0]), boxes_of([(0, few)] * 3))
        assert (position.tolist(), box.tolist()) == ([0, 0, 0], [0, 1, 2])
    assert [len(a) for a in match_boxes(atoms, np.zeros(0, dtype=np.int64), boxes_of([(1, ((0, 1, 1),))]))] == [0, 0]


def shuffled(spec, seed: int, run: int) -> SourceMap:
    """The whole 2-D tensor in one live tensor, its runs of `run` elements in random order."""
    rows, columns = spec.tensors[0].shape
    starts = np.random.default_rng(seed).permutation(rows * columns // run) * run
    copies = CopyTable.from_rows([(0, 0, int(s), i * run, ((run, 1, 1),)) for i, s in enumerate(starts)])
    live = LiveTensor(name="live", shape=(rows * columns,), strides=(1,), dtype=spec.tensors[0].dtype)
    return SourceMap(spec_digest=spec.digest, live=(live,), copies=copies)


@pytest.mark.parametrize("run", [1, 3])
def test_an_irregular_layout_is_not_looked_up_box_by_box(monkeypatch, run: int) -> None:
    """One copy for every `run` elements, in random order: pairs examined grow as elements do, not as their square."""
    examined: list[int] = []
    contains = places._contains

    def counted(atoms, atom, boxes, box):
        examined.append(len(atom))
        return contains(atoms, atom, boxes, box)

    monkeypatch.setattr(places, "_contains", counted)
    for rows in (20, 40, 80):
        spec = cases.spec_of((rows, 60))
        maps = [cases.everything(spec), shuffled(spec, 5, run)]
        table = expand(maps[1], spec)
        n = rows * 60 // run
        assert len(table) == n
        columns = (table.start, table.step, table.count)
        atoms = AtomTable(
            tensor=table.tensor, start=columns[0], step=columns[1], count=columns[2], class_id=table.tensor,
            stream_offset=table.live_start,
        )  # fmt: skip
        examined.clear()
        position, box = match_boxes(atoms, np.arange(n), table)
        assert position.tolist() == box.tolist() == list(range(n))
        assert sum(examined) <= 4 * n
    plan = make_plan(
        spec, cases.topology(cases.trainer(0), cases.rollout("e", 0, "b")), maps, options=PlanOptions(alignment=64)
    )
    program = lower(plan, spec, maps[1], 1)
    (table,) = (r.assemble.table for r in program.rounds)
    order = np.argsort(table["src_offset"])  # the stream is row-major here: run i of the tensor at byte 2 * run * i
    inverse = np.argsort(np.random.default_rng(5).permutation(n))
    assert (table["dst_offset"][order] == inverse * 2 * run).all()
    assert (table["count"].prod(axis=1) == run).all()
