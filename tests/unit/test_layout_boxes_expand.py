"""Expanding flat lattices to per-dim boxes: every (checkpoint element, live element) pair is kept, none is added."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.errors import LayoutError
from weightbridge.layout import boxes as boxes_module
from weightbridge.layout.boxes import expand
from weightbridge.layout.source_map import CopyTable, LiveTensor, SourceMap

BF16 = dtype_named("BF16")


def spec_of(*shapes):
    return CheckpointSpec(
        tensors=tuple(TensorSpec(name=f"t{i}", shape=shape, dtype=BF16) for i, shape in enumerate(shapes))
    )


def map_of(spec, rows):
    live = (LiveTensor(name="live", shape=(1 << 20,), strides=(1,), dtype=BF16),)
    return SourceMap(spec_digest=spec.digest, live=live, copies=CopyTable.from_rows(rows))


def pairs_of_rows(rows):
    found = []
    for tensor, live, src, at, axes in rows:
        for i in product(*(range(count) for count, _, _ in axes)):
            s = src + sum(k * axis[1] for k, axis in zip(i, axes, strict=True))
            d = at + sum(k * axis[2] for k, axis in zip(i, axes, strict=True))
            found.append((tensor, s, live, d))
    return sorted(found)


def pairs_of_boxes(table, spec):
    found = []
    for r in range(len(table)):
        shape = spec.tensors[table.tensor[r]].shape
        pitch = [prod(shape[d + 1 :]) for d in range(len(shape))]
        for i in product(*(range(n) for n in table.count[r])):
            at = [int(table.start[r, d] + table.step[r, d] * k) for d, k in enumerate(i)]
            assert all(0 <= x < n for x, n in zip(at, shape, strict=False))
            assert not any(at[len(shape) :])
            flat = sum(x * p for x, p in zip(at, pitch, strict=False))
            live = int(table.live_start[r] + sum(k * s for k, s in zip(i, table.live_stride[r], strict=True)))
            found.append((int(table.tensor[r]), flat, int(table.live[r]), live))
    return sorted(found)


def check(shapes, rows, *, num_boxes=None):
    spec = spec_of(*shapes)
    table = expand(map_of(spec, rows), spec)
    assert pairs_of_boxes(table, spec) == pairs_of_rows(rows)
    assert (table.step >= 1).all()
    single = table.count == 1
    assert (table.step[single] == 1).all()
    assert (table.live_stride[single] == 0).all()
    if num_boxes is not None:
        assert len(table) == num_boxes
    return table


@pytest.mark.parametrize(
    ("shape", "rows", "num_boxes"),
    [
        ((4, 6), [(0, 0, 0, 0, ((24, 1, 1),))], 1),  # a whole tensor as one flat run
        ((4, 6), [(0, 0, 6, 0, ((12, 1, 1),))], 1),  # whole rows
        ((4, 6), [(0, 0, 4, 0, ((17, 1, 1),))], 3),  # a flat shard: head, two whole rows, tail
        ((4, 6), [(0, 0, 4, 0, ((3, 1, 1),))], 2),  # across one row's end
        ((4, 6), [(0, 0, 2, 0, ((4, 6, 3), (3, 1, 1)))], 1),  # columns
        ((4, 6), [(0, 0, 0, 0, ((6, 1, 4), (4, 6, 1)))], 1),  # a transpose
        ((4, 6), [(0, 0, 1, 0, ((12, 2, 1),))], 1),  # every second column of all rows
        ((4, 6), [(0, 0, 0, 0, ((4, 6, 1),))], 1),  # one column
        ((4, 6), [(0, 0, 23, 0, ((24, -1, 1),))], 1),  # all backwards
        ((4, 6), [(0, 0, 0, 0, ((4, 7, 1),))], 4),  # a diagonal
        ((4, 6), [(0, 0, 0, 0, ((5, 4, 1),))], 3),  # 0 4 | 8 | 12 16: a step that carries unevenly
        ((4, 6), [(0, 0, 0, 0, ((2, 6, 24), (2, 3, 9), (3, 1, 1)))], 2),  # two axes of one dim, not one progression
        ((4, 6), [(0, 0, 0, 0, ((2, 6, 12), (2, 3, 3), (3, 1, 1)))], 1),  # two axes of one dim that are one
        ((4, 6), [(0, 0, 4, 0, ((2, 4, 4), (2, 1, 1)))], 2),  # two axes that only together leave the row
        ((4, 6), [(0, 0, 3, 0, ((2, 2, 2), (2, 1, 1)))], 2),  # two axes that are one, and that one leaves the row
        ((4, 6), [(0, 0, 1, 0, ((2, 3, 9), (2, 2, 1)))], 3),  # 1 3 | 4, and 6 in the next row
        ((24,), [(0, 0, 3, 0, ((4, 0, 5), (2, 1, 1)))], 4),  # one pair of elements at four live places
        ((3, 1, 5, 1), [(0, 0, 0, 0, ((15, 1, 1),))], 1),  # dims of extent 1 have no pitch
        ((), [(0, 0, 0, 7, ())], 1),  # a scalar
        ((2, 3, 4), [(0, 0, 5, 0, ((18, 1, 1),))], 4),  # a flat shard of a cube: row rest, row, whole slab, tail
    ],
)
def test_layouts(shape, rows, num_boxes):
    check([shape], rows, num_boxes=num_boxes)


def test_rows_of_one_pattern_and_many_shapes_are_told_apart():
    rows = [
        (0, 0, 0, 0, ((6, 1, 1),)),
        (1, 0, 0, 6, ((6, 1, 1),)),
        (0, 0, 6, 12, ((6, 1, 1),)),
        (2, 0, 1, 18, ((2, 1, 1),)),
    ]
    table = check([(4, 6), (3, 4), (3,)], rows)
    assert table.num_dims == 2


@st.composite
def lattices(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    size = prod(shape)
    axes, reach = [], 0
    for _ in range(draw(st.integers(0, 3))):
        stride = draw(st.integers(0, max(1, size // 2)))
        count = draw(st.integers(1, 5))
        if stride == 0 or reach + stride * (count - 1) < size:
            reach += stride * (count - 1)
            axes.append((count, stride, draw(st.integers(-40, 40))))
    src = draw(st.integers(0, size - 1 - reach))
    signs = draw(st.lists(st.booleans(), min_size=len(axes), max_size=len(axes)))
    for i, backward in enumerate(signs):
        if backward:
            count, stride, live = axes[i]
            src += (count - 1) * stride
            axes[i] = (count, -stride, live)
    return shape, [(0, 0, src, 5000, tuple(axes))]


@given(lattices())
@settings(max_examples=120, deadline=None)
def test_any_lattice_is_kept_element_for_element(case):
    shape, rows = case
    check([shape], rows)


def test_extra_dims_are_unused():
    spec = spec_of((4, 6))
    table = expand(map_of(spec, [(0, 0, 0, 0, ((24, 1, 1),))]), spec, num_dims=4)
    assert table.count.tolist() == [[4, 6, 1, 1]]
    assert table.live_stride.tolist() == [[6, 1, 0, 0]]


def test_an_empty_map_has_no_boxes():
    spec = spec_of((4, 6))
    assert len(expand(SourceMap(spec_digest=spec.digest, live=(), copies=CopyTable.empty()), spec)) == 0


@pytest.mark.parametrize(
    "row", [(0, 0, 20, 0, ((5, 1, 1),)), (0, 0, 3, 0, ((5, -1, 1),)), (1, 0, 0, 0, ()), (-1, 0, 0, 0, ())]
)
def test_a_copy_outside_its_tensor_is_refused(row):
    spec = spec_of((4, 6))
    with pytest.raises(LayoutError, match=r"tensor"):
        expand(map_of(spec, [row]), spec)


def test_another_checkpoint_is_refused():
    spec = spec_of((4, 6))
    with pytest.raises(LayoutError, match="probe again"):
        expand(map_of(spec_of((6, 4)), []), spec)


def test_too_few_dims_are_refused():
    spec = spec_of((4, 6))
    with pytest.raises(LayoutError, match="num_dims is 1"):
        expand(map_of(spec, [(0, 0, 0, 0, ())]), spec, num_dims=1)


def test_a_map_that_is_no_slice_copy_is_refused(monkeypatch):
    monkeypatch.setattr(boxes_module, "_MAX_ROWS", 3)
    spec = spec_of((5, 5))
    with pytest.raises(LayoutError, match="no slice copy") as caught:
        expand(map_of(spec, [(0, 0, 0, 0, ((5, 6, 1),))]), spec)
    assert caught.value.tensor == "t0"


def test_hundreds_of_thousands_of_rows_need_no_object_each():
    shape = (64, 128)
    spec = spec_of(*[shape] * 3)
    n = 100_000
    z = np.zeros(n, dtype=np.int64)
    ones = np.ones((n, 1), dtype=np.int64)
    i = np.arange(n)
    copies = CopyTable(
        tensor=i % 3, live=z, src_start=i % 64 * 128, live_start=i * 128,
        count=ones * 128, src_stride=ones, live_stride=ones,
    )  # fmt: skip
    table = expand(SourceMap(spec_digest=spec.digest, live=(), copies=copies), spec)
    assert len(table) == n
    assert (table.start[:, 0] == i % 64).all()
    assert (table.count == [1, 128]).all()
