"""From flat lattices to strided boxes: a SourceMap's copies in per-dim checkpoint coordinates.

The probe reports copies as nested lattices over flat offsets. The planner wants, per dim of the checkpoint tensor, one
arithmetic progression, because such boxes are closed under intersection. `expand` converts, splitting a copy where it
runs across a dim's end (an FSDP flat shard that begins mid-row has a head, whole rows and a tail).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import LayoutError
from weightbridge.layout.source_map import CopyTable, SourceMap

__all__ = ["BoxTable", "expand"]

Int64Array = npt.NDArray[np.int64]

_MAX_ROWS = 1 << 24
"""Rows one map may expand to. Beyond it the layout is no set of slice copies (a random permutation, say)."""


@dataclass(frozen=True, kw_only=True)
class BoxTable:
    """Boxes of one worker as parallel arrays; one checkpoint element may lie at several live places, in several rows.

    The checkpoint element of tensor `tensor` with coordinates start_d + step_d * i_d lies at live element
    live_start + sum(i_d * live_stride_d) of live tensor `live`, for 0 <= i_d < count_d.

    tensor, live, live_start: [n]. start, step, count, live_stride: [n, D], D >= the rank of every tensor; the dims a
    tensor lacks have start 0, step 1, count 1, live_stride 0. Steps are positive, live strides may be negative. A dim of
    count 1 has step 1 and live_stride 0.
    """

    tensor: Int64Array
    live: Int64Array
    start: Int64Array
    step: Int64Array
    count: Int64Array
    live_start: Int64Array
    live_stride: Int64Array

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def num_dims(self) -> int:
        return int(self.start.shape[1])


@dataclass(frozen=True, slots=True)
class _Work:
    """Copies of one pattern: `rows` of the source table, their flat starts, and the axes (count, src, live stride)."""

    rows: Int64Array
    src: Int64Array
    live: Int64Array
    axes: tuple[tuple[int, int, int], ...]

    def pick(self, mask: npt.NDArray[np.bool_]) -> _Work:
        return _Work(self.rows[mask], self.src[mask], self.live[mask], self.axes)

    def slice_axis(self, axis: int, first: int, count: int) -> _Work:
        """The part of the lattice with first <= i_axis < first + count."""
        _, src, live = self.axes[axis]
        axes = (*self.axes[:axis], (count, src, live), *self.axes[axis + 1 :])
        return _Work(self.rows, self.src + first * src, self.live + first * live, axes)

    def enumerate_axis(self, axis: int) -> _Work:
        """One row for each index of the axis, which is gone."""
        count, src, live = self.axes[axis]
        i = np.tile(np.arange(count, dtype=np.int64), len(self.rows))
        axes = self.axes[:axis] + self.axes[axis + 1 :]
        rows, starts, lives = (np.repeat(column, count) for column in (self.rows, self.src, self.live))
        return _Work(rows, starts + i * src, lives + i * live, axes)


def expand(source_map: SourceMap, spec: CheckpointSpec, num_dims: int | None = None) -> BoxTable:
    """The copies of `source_map` as per-dim boxes, in an order that depends on the map alone.

    num_dims: D of the result; by default the largest rank in `spec` (at least 1). Raises LayoutError when a copy leaves
    its tensor, or when the map is no union of slices within reason.
    """
    if source_map.spec_digest != spec.digest:
        raise LayoutError(
            f"the source map was probed against checkpoint {source_map.spec_digest}, expected {spec.digest}; "
            "probe again with this checkpoint spec"
        )
    dims = max(1, *(len(t.shape) for t in spec.tensors)) if num_dims is None else num_dims
    copies = source_map.copies
    if not len(copies):
        empty, square = np.zeros(0, dtype=np.int64), np.zeros((0, dims), dtype=np.int64)
        return BoxTable(
            tensor=empty, live=empty, start=square, step=square, count=square, live_start=empty, live_stride=square
        )
    _check_range(copies, spec)
    patterns = _patterns(copies, spec)
    rank = max(len(shape) for shape, _ in patterns)
    if dims < rank:
        raise LayoutError(f"num_dims is {dims} but the checkpoint has a tensor of {rank} dims")
    found: list[tuple[Int64Array, ...]] = []
    num_rows = 0
    for shape, work in patterns:
        for part in _to_boxes(work, shape, dims):
            found.append(part)
            num_rows += len(part[0])
            if num_rows > _MAX_ROWS:
                name = spec.tensors[int(copies.tensor[part[0][0]])].name
                raise LayoutError(
                    f"tensor {name!r}: its layout needs more than {_MAX_ROWS} boxes; it is no slice copy", tensor=name
                )
    rows, start, step, count, live_start, live_stride = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.lexsort((live_start, rows))
    rows = rows[order]
    return BoxTable(
        tensor=copies.tensor[rows], live=copies.live[rows], start=start[order], step=step[order], count=count[order],
        live_start=live_start[order], live_stride=live_stride[order],
    )  # fmt: skip


def _check_range(copies: CopyTable, spec: CheckpointSpec) -> None:
    if int(copies.tensor.min()) < 0 or int(copies.tensor.max()) >= len(spec.tensors):
        raise LayoutError(
            f"a copy names tensor {int(copies.tensor.max())}, the checkpoint has {len(spec.tensors)} tensors"
        )
    extent = (copies.count - 1) * copies.src_stride
    low = copies.src_start + np.minimum(extent, 0).sum(axis=1)
    high = copies.src_start + np.maximum(extent, 0).sum(axis=1)
    sizes = np.diff(spec.numel_offsets)[copies.tensor]
    bad = np.flatnonzero((low < 0) | (high >= sizes))
    if len(bad):
        i = int(bad[0])
        name = spec.tensors[int(copies.tensor[i])].name
        raise LayoutError(
            f"tensor {name!r}: a copy takes elements {int(low[i])} to {int(high[i])}, the tensor has {int(sizes[i])}; "
            "the source map does not belong to this checkpoint",
            tensor=name,
        )


def _patterns(copies: CopyTable, spec: CheckpointSpec) -> list[tuple[tuple[int, ...], _Work]]:
    """Rows grouped by shape, counts and strides, with source strides made positive."""
    shapes: dict[tuple[int, ...], int] = {}
    tensors, position = np.unique(copies.tensor, return_inverse=True)
    known = [shapes.setdefault(spec.tensors[i].shape, len(shapes)) for i in tensors.tolist()]
    shape_of = np.array(known, dtype=np.int64)[position.reshape(-1)]
    backward = (copies.src_stride < 0) & (copies.count > 1)
    turn = np.where(backward, copies.count - 1, 0)
    src = copies.src_start + (turn * copies.src_stride).sum(axis=1)
    live = copies.live_start + (turn * copies.live_stride).sum(axis=1)
    sign = np.where(backward, -1, 1)
    key = np.concatenate(
        [shape_of[:, None], copies.count, sign * copies.src_stride, sign * copies.live_stride], axis=1
    ).astype(np.int64)
    # a dict of bytes finds equal rows several times faster than np.unique
    raw, width = key.tobytes(), key.itemsize * key.shape[1]
    numbers: dict[bytes, int] = {}
    group = np.array(
        [numbers.setdefault(raw[at : at + width], len(numbers)) for at in range(0, len(raw), width)], dtype=np.int64
    )
    patterns = np.frombuffer(b"".join(numbers), dtype=np.int64).reshape(-1, key.shape[1])
    order = np.argsort(group, kind="stable")
    bounds = np.searchsorted(group[order], np.arange(len(patterns) + 1))
    names = list(shapes)
    num_axes = copies.count.shape[1]
    found = []
    for i, pattern in enumerate(patterns.tolist()):
        rows = order[bounds[i] : bounds[i + 1]]
        axes = zip(
            pattern[1 : 1 + num_axes],
            pattern[1 + num_axes : 1 + 2 * num_axes],
            pattern[1 + 2 * num_axes :],
            strict=True,
        )
        found.append((names[pattern[0]], _Work(rows, src[rows], live[rows], tuple(a for a in axes if a[0] > 1))))
    return found


def _to_boxes(first: _Work, shape: tuple[int, ...], num_dims: int) -> list[tuple[Int64Array, ...]]:
    """Boxes (rows, start, step, count, live_start, live_stride) of one pattern: split until every part is a box."""
    dims = [d for d, n in enumerate(shape) if n > 1]  # a dim of extent 1 has no pitch of its own
    sizes = [shape[d] for d in dims]
    pitches = [prod(sizes[i + 1 :]) for i in range(len(sizes))]
    todo = [first]
    found: list[tuple[Int64Array, ...]] = []
    while todo:
        work = todo.pop()
        work = _Work(work.rows, work.src, work.live, tuple(a for a in work.axes if a[0] > 1))
        parts = _split(work, sizes, pitches)
        if parts is not None:
            todo.extend(parts)
            continue
        n = len(work.rows)
        start, live_stride = np.zeros((2, n, num_dims), dtype=np.int64)
        step, count = np.ones((2, n, num_dims), dtype=np.int64)
        rest = work.src
        for d, pitch in zip(dims, pitches, strict=True):
            start[:, d] = rest // pitch
            rest = rest % pitch
        for axis_count, src, live in work.axes:
            i = _dim_of(src, pitches)
            step[:, dims[i]], count[:, dims[i]], live_stride[:, dims[i]] = src // pitches[i], axis_count, live
        found.append((work.rows, start, step, count, work.live, live_stride))
    return found


def _dim_of(stride: int, pitches: list[int]) -> int:
    """The one dim an axis of this flat stride can step along without carrying: that of the largest pitch <= stride."""
    return next(i for i, pitch in enumerate(pitches) if pitch <= stride)


def _split(work: _Work, sizes: list[int], pitches: list[int]) -> list[_Work] | None:
    """Parts that are nearer to boxes, or None when `work` is boxes: each axis along one dim, no carry, one axis a dim."""
    by_dim: dict[int, list[int]] = {}
    for i, (count, src, _) in enumerate(work.axes):
        if src == 0:
            return [work.enumerate_axis(i)]  # one element at several live places
        d = _dim_of(src, pitches)
        if src % pitches[d]:
            return [work.enumerate_axis(i)]  # a diagonal: each element is a box of its own
        at = work.src // pitches[d] % sizes[d]
        carries = at + (count - 1) * (src // pitches[d]) >= sizes[d]
        if carries.any():
            parts = _split_carry(work.pick(carries), i, sizes[d], src // pitches[d], at[carries])
            return parts if carries.all() else [work.pick(~carries), *parts]
        by_dim.setdefault(d, []).append(i)
    for axes in by_dim.values():
        if len(axes) == 1:
            continue
        return [_merge_two(work, sorted(axes, key=lambda i: work.axes[i][1]))]
    return None


def _split_carry(work: _Work, axis: int, size: int, step: int, at: Int64Array) -> list[_Work]:
    """Cut an axis that runs past its dim's end: up to the end, whole periods if they line up, and the rest."""
    count, src, live = work.axes[axis]
    parts = []
    heads = -(-(size - at) // step)
    for head in np.unique(heads).tolist():
        part = work.pick(heads == head)
        periodic = size % step == 0 and head == size // step and count >= 2 * head
        if not periodic:
            parts += [part.slice_axis(axis, 0, head), part.slice_axis(axis, head, count - head)]
            continue
        whole = count // head
        body = part.slice_axis(axis, 0, head)
        parts.append(_Work(body.rows, body.src, body.live, (*body.axes, (whole, src * head, live * head))))
        if count > whole * head:
            parts.append(part.slice_axis(axis, whole * head, count - whole * head))
    return parts


def _merge_two(work: _Work, axes: list[int]) -> _Work:
    """Two axes of one dim, innermost first in `axes`: one axis where they form one progression, else one is enumerated."""
    for inner, outer in pairwise(axes):
        count_in, src_in, live_in = work.axes[inner]
        count_out, src_out, live_out = work.axes[outer]
        if src_out == src_in * count_in and live_out == live_in * count_in:
            rest = tuple(a for i, a in enumerate(work.axes) if i not in (inner, outer))
            return _Work(work.rows, work.src, work.live, (*rest, (count_in * count_out, src_in, live_in)))
    return work.enumerate_axis(min(axes, key=lambda i: work.axes[i][0]))
