"""Where atoms lie in memory and whether boxes share elements, against plain loops and maps of elements."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.errors import InternalError
from weightbridge.layout.boxes import BoxTable, expand
from weightbridge.layout.source_map import CopyTable, LiveTensor, SourceMap
from weightbridge.program import verify_places
from weightbridge.program.verify_places import check_disjoint_boxes, places_of
from weightbridge.program.verify_tables import AtomIndex

BF16 = dtype_named("BF16")


def map_of(spec: CheckpointSpec, rows, span: int) -> SourceMap:
    live = (LiveTensor(name="live", shape=(span,), strides=(1,), dtype=BF16),)
    return SourceMap(spec_digest=spec.digest, live=live, copies=CopyTable.from_rows(rows))


def index_of(boxes: list[tuple[int, tuple[tuple[int, int, int], ...]]], dims: int) -> AtomIndex:
    """Atoms as (tensor, (start, step, count) per dim); their streams do not matter here."""
    tensor = np.array([t for t, _ in boxes], dtype=np.int64)
    columns = np.array([b for _, b in boxes], dtype=np.int64).reshape(-1, dims, 3)
    start, step, count = (np.ascontiguousarray(columns[:, :, i]) for i in range(3))
    numel = count.prod(axis=1)
    end = np.cumsum(numel) * 2
    return AtomIndex(
        class_base=np.array([0, int(end[-1])]), begin=end - numel * 2, end=end, tensor=tensor, dtypes=(BF16,),
        dtype=np.zeros(len(boxes), dtype=np.int64), itemsize=np.full(len(boxes), 2), numel=numel, start=start, step=step,
        count=count,
    )  # fmt: skip


def elements(box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, a + n * s, s) for a, s, n in box)))


def permuted(rng: random.Random, dim: int) -> tuple[CheckpointSpec, SourceMap]:
    """Two tensors whose rows (or columns) lie in memory in random order, some of them in two places, and a whole one."""
    spec = CheckpointSpec(tensors=tuple(TensorSpec(name=n, shape=(23, 19), dtype=BF16) for n in "abc"))
    rows, at = [], 0
    for tensor in (0, 1):
        lines = list(range(spec.tensors[tensor].shape[dim]))
        rng.shuffle(lines)
        for line in [*lines, *lines[:5]]:
            length, start, stride = (19, line * 19, 1) if dim == 0 else (23, line, 19)
            cut = rng.choice([length, 7, 1])
            for lo in range(0, length, cut):
                n = min(cut, length - lo)
                rows.append((tensor, 0, start + lo * stride, at, ((n, stride, 1),)))
                at += n
    rows.append((2, 0, 0, at, ((23, 19, 19), (19, 1, 1))))
    for first in (0, 1):  # a second time, every other row backwards
        rows.append((2, 0, first * 19, at + (2 + first) * 23 * 19, ((12 - first, 38, -19), (19, 1, 1))))
    return spec, map_of(spec, rows, at + 4 * 23 * 19)


@pytest.mark.parametrize("few", [0, 16, 10_000], ids=["all looked up", "crowded ones looked up", "all compared"])
@pytest.mark.parametrize("dim", [0, 1])
def test_each_atom_is_found_in_just_the_boxes_that_contain_it(dim: int, few: int, monkeypatch) -> None:
    monkeypatch.setattr(verify_places, "_FEW", few)
    rng = random.Random(dim)
    spec, source_map = permuted(rng, dim)
    atoms = []
    for _ in range(120):
        box = []
        for extent in (23, 19):
            count = rng.choice([1, 1, 2, 3])
            step = rng.choice([1, 1, 2]) if count > 1 else 1
            box.append((rng.randrange(extent - (count - 1) * step), step, count))
        atoms.append((rng.randrange(3), tuple(box)))
    index, boxes = index_of(atoms, 2), expand(source_map, spec)
    which = np.arange(0, len(atoms), 2)
    places = places_of(index, spec, source_map, which, to_live=True)
    inside = [elements(zip(*(c[i].tolist() for c in (boxes.start, boxes.step, boxes.count)), strict=True))
              for i in range(len(boxes))]  # fmt: skip
    expected = {
        (a, b) for a in which.tolist() for b in range(len(boxes))
        if atoms[a][0] == boxes.tensor[b] and elements(atoms[a][1]) <= inside[b]
    }  # fmt: skip
    assert len(expected) > 20
    assert len(places.atom) == len(expected)
    assert set(zip(places.atom.tolist(), places.box.tolist(), strict=True)) == expected
    for p, (atom, box) in enumerate(zip(places.atom.tolist(), places.box.tolist(), strict=True)):
        for x, c in enumerate(itertools.product(*(range(a, a + n * s, s) for a, s, n in atoms[atom][1]))):
            digits = [(v - a) // s for v, a, s in zip(c, boxes.start[box], boxes.step[box], strict=True)]
            live = int(boxes.live_start[box]) + sum(
                int(d * s) for d, s in zip(digits, boxes.live_stride[box], strict=True)
            )
            said = places.base[p] + ((x // places.pitch[p]) % places.extent[p] * places.step[p]).sum()
            assert said == live * 2


def test_digits_that_memory_runs_through_are_one() -> None:
    spec = CheckpointSpec(tensors=(TensorSpec(name="a", shape=(3, 4, 5), dtype=BF16),))
    dense = map_of(spec, [(0, 0, 0, 7, ((3, 20, 20), (4, 5, 5), (5, 1, 1)))], 80)
    padded = map_of(spec, [(0, 0, 0, 0, ((3, 20, 24), (4, 5, 5), (5, 1, 1)))], 80)
    whole = index_of([(0, ((0, 1, 3), (0, 1, 4), (0, 1, 5)))], 3)
    assert places_of(whole, spec, dense, np.arange(1), to_live=True).extent.tolist() == [[60]]
    places = places_of(whole, spec, padded, np.arange(1), to_live=True)
    assert (places.extent.tolist(), places.pitch.tolist(), places.step.tolist()) == ([[3, 20]], [[20, 1]], [[48, 2]])


def boxes_of(rows) -> BoxTable:
    """(live_start, ((count, live_stride), ...)) each; what checkpoint element they hold does not matter."""
    axes = max(len(r[1]) for r in rows)
    table = np.array([[*(((1, 0),) * (axes - len(a))), *a] for _, a in rows], dtype=np.int64)
    flat = np.zeros((len(rows), axes), dtype=np.int64)
    return BoxTable(
        tensor=np.zeros(len(rows), dtype=np.int64), live=np.zeros(len(rows), dtype=np.int64), start=flat, step=flat + 1,
        count=table[:, :, 0], live_start=np.array([at for at, _ in rows], dtype=np.int64), live_stride=table[:, :, 1],
    )  # fmt: skip


def shares_by_counting(rows) -> bool:
    taken: list[int] = []
    for at, axes in rows:
        taken += [at + sum(i * s for i, (_, s) in zip(index, axes, strict=True))
                  for index in itertools.product(*(range(n) for n, _ in axes))]  # fmt: skip
    return len(set(taken)) != len(taken)


NAMED = {
    "interleaved columns": [(0, ((4, 10), (3, 1))), (3, ((4, 10), (7, 1)))],
    "interleaved columns that meet": [(0, ((4, 10), (4, 1))), (3, ((4, 10), (7, 1)))],
    "every other element": [(0, ((5, 2),)), (1, ((5, 2),))],
    "odd against threes": [(1, ((5, 2),)), (0, ((3, 3),))],
    "backwards": [(9, ((5, -2),)), (0, ((5, 2),))],
    "backwards into another": [(8, ((5, -2),)), (0, ((5, 2),))],
    "one element again and again": [(0, ((3, 0),))],
    "rows that overlap": [(0, ((3, 4), (5, 1)))],
    "a run over the end of a row": [(0, ((3, 10), (4, 1))), (4, ((8, 1),)), (24, ((6, 1),))],
}


@pytest.mark.parametrize("what", NAMED)
def test_boxes_that_share_an_element_are_found_and_no_others(what: str) -> None:
    check(NAMED[what])


def test_random_boxes_that_share_an_element_are_found_and_no_others() -> None:
    rng = random.Random(5)
    found = [check(random_boxes(rng)) for _ in range(400)]
    assert 100 < sum(found) < 350


def random_boxes(rng: random.Random):
    pitches = rng.choice([(1,), (1, 6), (1, 2, 12), (1, 5, 7)])
    rows = []
    for _ in range(rng.randrange(1, 5)):
        axes = tuple((rng.randrange(1, 5), p * rng.choice([1, 1, 1, 1, -1, 2])) for p in pitches if rng.random() < 0.8)
        low = sum(min(0, (n - 1) * s) for n, s in axes)
        rows.append((rng.randrange(40) - low, axes or ((1, 0),)))
    return rows


def check(rows) -> bool:
    spans = LiveTensor(name="live", shape=(400,), strides=(1,), dtype=BF16)
    source_map = SourceMap(spec_digest="", live=(spans,), copies=CopyTable.empty())
    if not shares_by_counting(rows):
        check_disjoint_boxes(boxes_of(rows), source_map, "a/0")
        return False
    with pytest.raises(InternalError, match=r"'a/0'.*'live' is assembled twice"):
        check_disjoint_boxes(boxes_of(rows), source_map, "a/0")
    return True


def test_a_box_beyond_its_live_tensor_is_refused() -> None:
    source_map = SourceMap(
        spec_digest="", live=(LiveTensor(name="live", shape=(8,), strides=(1,), dtype=BF16),), copies=CopyTable.empty()
    )
    for rows in ([(5, ((4, 1),))], [(2, ((4, -1),))]):
        with pytest.raises(InternalError, match="leaves live tensor 'live'"):
            check_disjoint_boxes(boxes_of(rows), source_map, "a/0")
