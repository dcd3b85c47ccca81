"""From rectangles of global indices to slice copies: cut at tensor ends, cut at carries, collapse what repeats.

A lattice here is a flat source offset, a live storage offset and axes (count, source stride, live stride). After
`split_at_carries` every axis walks one dim of its checkpoint tensor and never runs over its end; `collapse` then joins equal
lattices in arithmetic progression (along one dim) until nothing changes, so nested repeats become axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.errors import ProbeError
from weightbridge.probe.fields import Field
from weightbridge.probe.reconstruct import Rectangles, chain_links

__all__ = [
    "Axis",
    "Dims",
    "Lattice",
    "Runs1D",
    "collapse",
    "copies_of_tensor",
    "dims_of",
    "place_rectangles",
    "split_at_carries",
]

Int64Array = npt.NDArray[np.int64]
Axis = tuple[int, int, int]
"""(count, source stride, live stride), in elements."""
Dims = tuple[tuple[int, int], ...]
"""(extent, row-major stride) of the dims of a checkpoint tensor that are longer than 1, outermost first."""

_MAX_PIECES = 1 << 21
_MAX_LAG = 32
_MAX_COMPARED = 1 << 16


class Lattice(NamedTuple):
    """group: what must be equal for two lattices to collapse: the checkpoint tensor, or a constant's bits."""

    group: int
    start: int
    live: int
    axes: tuple[Axis, ...]


class Runs1D(NamedTuple):
    """Rectangles placed in memory, as parallel arrays: an outer and an inner axis, counts of 1 where there is none.

    source: global element index g of the first element. live: its storage offset.
    """

    source: Int64Array
    live: Int64Array
    outer: tuple[Int64Array, Int64Array, Int64Array]
    inner: tuple[Int64Array, Int64Array, Int64Array]

    @property
    def numel(self) -> int:
        return int((self.outer[0] * self.inner[0]).sum())


def dims_of(shape: Sequence[int]) -> Dims:
    """The dims of a row-major tensor that an axis can walk."""
    dims, stride = [], 1
    for extent in reversed(shape):
        if extent > 1:
            dims.append((extent, stride))
        stride *= extent
    return tuple(reversed(dims))


def place_rectangles(rects: Rectangles, field: Field, numel: int, product: int) -> tuple[Runs1D, Int64Array]:
    """Rectangles of a field as lattices of global indices in [0, numel), and the positions of elements left over.

    Slopes are known modulo `product` only. One of the two readings of a slope keeps the second element within the
    checkpoint; a rectangle that leaves it later was in line by accident and is halved until it does not. Single elements
    that name no checkpoint element are left over.
    """
    good: list[Rectangles] = []
    stray: list[Int64Array] = []
    while len(rects.row):
        lifted = rects._replace(
            row_slope=_lift(rects.value, rects.row_slope, rects.height, numel, product),
            col_slope=_lift(rects.value, rects.col_slope, rects.width, numel, product),
        )
        rows = (lifted.height - 1).astype(np.float64) * lifted.row_slope
        cols = (lifted.width - 1).astype(np.float64) * lifted.col_slope
        low = lifted.value + np.minimum(rows, 0) + np.minimum(cols, 0)
        high = lifted.value + np.maximum(rows, 0) + np.maximum(cols, 0)
        inside = (low > 0.5) & (high < numel + 0.5)
        good.append(lifted.pick(inside))
        nothing = (rects.value == 0) & (lifted.row_slope == 0) & (lifted.col_slope == 0)
        single = (rects.height == 1) & (rects.width == 1)
        left_over = rects.pick(single & ~inside & ~nothing)
        stray.append(left_over.row * field.cols + left_over.col)
        rects = _halve(rects.pick(~inside & ~nothing & ~single), product)
        if len(rects.row) > _MAX_PIECES:
            raise ProbeError("what the loader writes is neither copies of checkpoint elements nor constants")
    return _in_memory(Rectangles.join(good), field), np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *stray]))


def _lift(value: Int64Array, slope: Int64Array, count: Int64Array, numel: int, product: int) -> Int64Array:
    signed = np.where(value + slope <= numel, slope, slope - product)
    return np.where(count > 1, signed, 0)


def _halve(rects: Rectangles, product: int) -> Rectangles:
    by_rows = rects.height >= rects.width
    half = np.where(by_rows, rects.height, rects.width) // 2
    slope = np.where(by_rows, rects.row_slope, rects.col_slope)
    moved = np.array(
        [(v + h * s) % product for v, h, s in zip(rects.value.tolist(), half.tolist(), slope.tolist(), strict=True)],
        dtype=np.int64,
    )
    upper = rects._replace(height=np.where(by_rows, half, rects.height), width=np.where(by_rows, rects.width, half))
    lower = rects._replace(
        row=rects.row + np.where(by_rows, half, 0),
        col=rects.col + np.where(by_rows, 0, half),
        height=np.where(by_rows, rects.height - half, rects.height),
        width=np.where(by_rows, rects.width, rects.width - half),
        value=moved,
    )
    return Rectangles.join([upper, lower])


def _in_memory(rects: Rectangles, field: Field) -> Runs1D:
    """Storage offsets, with the two axes made one where they are in line."""
    source = rects.value - 1
    live = field.start + rects.row * field.row_stride + rects.col * field.col_stride
    ones = np.ones(len(source), dtype=np.int64)
    outer = [rects.height, rects.row_slope, field.row_stride * ones]
    inner = [rects.width, rects.col_slope, field.col_stride * ones]
    in_line = (inner[0] > 1) & (outer[0] > 1) & (outer[1] == inner[1] * inner[0]) & (outer[2] == inner[2] * inner[0])
    column = inner[0] == 1
    inner = [
        np.where(column, outer[0], np.where(in_line, inner[0] * outer[0], inner[0])),
        np.where(column, outer[1], inner[1]),
        np.where(column, outer[2], inner[2]),
    ]
    gone = column | in_line
    outer = [np.where(gone, 1, outer[0]), np.where(gone, 0, outer[1]), np.where(gone, 0, outer[2])]
    return Runs1D(source, live, (outer[0], outer[1], outer[2]), (inner[0], inner[1], inner[2]))


def copies_of_tensor(parts: Sequence[Runs1D], offsets: Int64Array, shapes: Sequence[tuple[int, ...]]) -> list[Lattice]:
    """Slice copies of one live tensor from the placed rectangles of all its fields. Pure.

    offsets: [num_tensors + 1] first global index of each checkpoint tensor. Returns lattices with `group` the tensor and
    `start` within it, in memory order.
    """
    pieces = _pieces(parts)
    joined = _joined(pieces)
    copies = _collapsed(joined, offsets, shapes)
    if len(copies) > 1 and len(joined) < len(pieces) <= _MAX_COMPARED:
        # Rows that happen to continue each other (the last of one head, the first of the next) are better left apart when
        # that lets the heads repeat.
        return min(copies, _collapsed(pieces, offsets, shapes), key=len)
    return copies


def _too_irregular() -> ProbeError:
    return ProbeError(
        f"its layout falls into more than {_MAX_PIECES} pieces, too many for an index table. Keep the tensor in checkpoint "
        "order and permute where it is used, or leave it out of `tensors`"
    )


def _collapsed(placed: list[_Placed], offsets: Int64Array, shapes: Sequence[tuple[int, ...]]) -> list[Lattice]:
    pieces: list[Lattice] = []
    for source, live, axes in placed:
        for tensor, start, at, cut in _cut_at_tensors(source, live, axes, offsets):
            for start_offset, live_offset, final in split_at_carries(start, cut, dims_of(shapes[tensor])):
                pieces.append(Lattice(tensor, start_offset, at + live_offset, final))
        if len(pieces) > _MAX_PIECES:
            raise _too_irregular()
    return collapse(pieces, {tensor: dims_of(shapes[tensor]) for tensor in {p.group for p in pieces}})


_Placed = tuple[int, int, tuple[Axis, ...]]
"""(global index, live offset, axes)"""


def _pieces(parts: Sequence[Runs1D]) -> list[_Placed]:
    """The placed rectangles as tuples, axes of count 1 left out."""
    found: list[_Placed] = []
    for part in parts:
        columns = [part.source, part.live, *part.outer, *part.inner]
        for source, live, n, s, step, m, t, leap in zip(*(c.tolist() for c in columns), strict=True):
            axes = ((n, s, step), (m, t, leap))
            found.append((source, live, tuple(a for a in axes if a[0] > 1)))
    return found


def _joined(pieces: list[_Placed]) -> list[_Placed]:
    """One-axis pieces that continue each other in memory and in the checkpoint made one; the others as they are."""
    lines = sorted((p for p in pieces if len(p[2]) <= 1), key=lambda p: p[1])
    found = [p for p in pieces if len(p[2]) > 1]
    if not lines:
        return found
    source = np.array([p[0] for p in lines], dtype=np.int64)
    live = np.array([p[1] for p in lines], dtype=np.int64)
    axis = np.array([p[2][0] if p[2] else (1, 0, 0) for p in lines], dtype=np.int64)
    count, step, live_step = axis.T
    ahead = source[1:] - (source + (count - 1) * step)[:-1]
    live_ahead = live[1:] - (live + (count - 1) * live_step)[:-1]
    pairs = np.concatenate([axis[:, 1:], np.stack([ahead, live_ahead], 1)])
    ids = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    link = chain_links(live_ahead > 0, count, ids[: len(lines)], ids[len(lines) :])
    first = np.flatnonzero(np.concatenate([[True], ~link]))
    total = np.add.reduceat(count, first)
    for i, n in zip(first.tolist(), total.tolist(), strict=True):
        if n == 1:
            found.append((lines[i][0], lines[i][1], ()))
        elif int(count[i]) > 1:
            found.append((lines[i][0], lines[i][1], ((n, int(step[i]), int(live_step[i])),)))
        else:
            found.append((lines[i][0], lines[i][1], ((n, int(ahead[i]), int(live_ahead[i])),)))
    return found


def _cut_at_tensors(
    source: int, live: int, axes: tuple[Axis, ...], offsets: Int64Array
) -> Iterable[tuple[int, int, int, tuple[Axis, ...]]]:
    """(tensor, start within it, live, axes): parts of a lattice of global indices that each lie in one tensor."""
    work = [(source, live, axes)]
    while work:
        source, live, axes = work.pop()
        low = source + sum(min((n - 1) * s, 0) for n, s, _ in axes)
        high = source + sum(max((n - 1) * s, 0) for n, s, _ in axes)
        first, last = (int(i) - 1 for i in np.searchsorted(offsets, [low, high], side="right"))
        if first == last:
            yield first, source - int(offsets[first]), live, axes
            continue
        boundary = int(offsets[first + 1])
        cut = max(range(len(axes)), key=lambda a: abs(axes[a][1]))
        n, s, step = axes[cut]
        if s < 0:
            source, live, s, step = source + (n - 1) * s, live + (n - 1) * step, -s, -step
        rest = axes[:cut] + axes[cut + 1 :]
        rest_low = sum(min((m - 1) * t, 0) for m, t, _ in rest)
        rest_high = sum(max((m - 1) * t, 0) for m, t, _ in rest)
        below = min(n, max(0, -((source + rest_high - boundary) // s)))
        above = min(n, max(below, -((source + rest_low - boundary) // s)))
        for lo, hi in ((0, below), (above, n)):
            if hi > lo:
                axis = ((hi - lo, s, step),) if hi - lo > 1 else ()
                work.append((source + lo * s, live + lo * step, axes[:cut] + axis + axes[cut + 1 :]))
        work.extend((source + i * s, live + i * step, rest) for i in range(below, above))


@lru_cache(maxsize=4096)
def split_at_carries(start: int, axes: tuple[Axis, ...], dims: Dims) -> tuple[tuple[int, int, tuple[Axis, ...]], ...]:
    """Cut a lattice within one tensor so that each axis walks one dim and stays within it.

    A run that begins mid-row becomes a head, whole rows and a tail. Returns (start, live offset, axes) parts; live strides
    are positive again, source strides may be negative. Cached: layers repeat.
    """
    work = [_flip(start, 0, tuple(a for a in axes if a[0] > 1), by_source=True)]
    done: list[tuple[int, int, tuple[Axis, ...]]] = []
    while work:
        here, live, axes = work.pop()
        overflow = _find_overflow(here, axes, dims)
        if overflow is None:
            done.append(_flip(here, live, axes, by_source=False))
            continue
        cut, fit, period = overflow
        n, s, step = axes[cut]
        if period and fit == period and n > period:
            whole, tail = divmod(n, period)
            inner: tuple[Axis, ...] = ((period, s, step),) if period > 1 else ()
            outer: tuple[Axis, ...] = ((whole, period * s, period * step),) if whole > 1 else ()
            work.append((here, live, axes[:cut] + outer + inner + axes[cut + 1 :]))
            fit = n - tail
        else:
            work.append((here, live, _with_count(axes, cut, fit)))
        if n > fit:
            work.append((here + fit * s, live + fit * step, _with_count(axes, cut, n - fit)))
        if len(work) + len(done) > _MAX_PIECES:
            raise _too_irregular()
    return tuple(done)


def _with_count(axes: tuple[Axis, ...], which: int, count: int) -> tuple[Axis, ...]:
    axis = ((count, *axes[which][1:]),) if count > 1 else ()
    return axes[:which] + axis + axes[which + 1 :]


def _flip(start: int, live: int, axes: tuple[Axis, ...], *, by_source: bool) -> tuple[int, int, tuple[Axis, ...]]:
    """The same lattice with every axis walked so that its source (or live) stride is not negative."""
    turned = []
    for n, s, step in axes:
        if (s if by_source else step) < 0:
            start, live, s, step = start + (n - 1) * s, live + (n - 1) * step, -s, -step
        turned.append((n, s, step))
    return start, live, tuple(turned)


def _home(stride: int, dims: Dims) -> int:
    """The outermost dim whose stride divides an axis's: the dim the axis walks."""
    return next(d for d, (_, size) in enumerate(dims) if stride % size == 0)


def _find_overflow(start: int, axes: tuple[Axis, ...], dims: Dims) -> tuple[int, int, int] | None:
    """(axis, steps that fit, steps of a whole period or 0) of an axis that runs over the end of its dim; None if none does."""
    coords, left = [], start
    for _, size in dims:
        coords.append(left // size)
        left %= size
    walked: dict[int, list[tuple[int, int]]] = {}
    for a, (_, s, _) in enumerate(axes):
        if s:
            home = _home(s, dims)
            walked.setdefault(home, []).append((s // dims[home][1], a))
    for home in sorted(walked, reverse=True):
        extent, at, reach = dims[home][0], coords[home], 0
        for step, a in sorted(walked[home]):
            n = axes[a][0]
            if at + reach + (n - 1) * step > extent - 1:
                fit = (extent - 1 - reach - at) // step + 1
                whole = extent // step if extent % step == 0 and at < step else 0
                return a, fit, whole
            reach += (n - 1) * step
    return None


def collapse(lattices: list[Lattice], dims: dict[int, Dims]) -> list[Lattice]:
    """Join equal lattices in arithmetic progression along one dim, to a fixed point. dims: per group. Pure.

    Returns them in memory order, axes outermost in memory first.
    """
    current = [x._replace(axes=_canonical(x.axes, dims[x.group])) for x in lattices]
    while True:
        groups: dict[tuple[int, tuple[Axis, ...]], list[tuple[int, int]]] = {}
        for x in current:
            groups.setdefault((x.group, x.axes), []).append((x.live, x.start))
        following: list[Lattice] = []
        for (group, axes), members in groups.items():
            if len(members) == 1:
                following.append(Lattice(group, members[0][1], members[0][0], axes))
                continue
            for live, start, axis in _progressions(sorted(members), dims[group]):
                joined = _canonical((axis, *axes), dims[group]) if axis[0] > 1 else axes
                following.append(Lattice(group, start, live, joined))
        if len(following) == len(current):
            return sorted(following, key=lambda x: (x.live, x.start))
        current = following


def _canonical(axes: tuple[Axis, ...], dims: Dims) -> tuple[Axis, ...]:
    """Outermost in memory first; axes in line along one dim made one."""
    ordered: list[Axis] = []
    for axis in sorted(axes, key=lambda a: (-a[2], -abs(a[1]))):
        if ordered:
            n, s, step = ordered[-1]
            in_line = s == axis[1] * axis[0] and step == axis[2] * axis[0]
            if in_line and (s == 0 or _home(abs(s), dims) == _home(abs(axis[1]), dims)):
                ordered[-1] = (n * axis[0], axis[1], axis[2])
                continue
        ordered.append(axis)
    return tuple(ordered)


def _progressions(members: list[tuple[int, int]], dims: Dims) -> Iterable[tuple[int, int, Axis]]:
    """(live, start, axis) of progressions among equal lattices, sorted by live offset; an axis of count 1 is a loner."""
    live, start = (np.array(column, dtype=np.int64) for column in zip(*members, strict=True))
    coords = np.zeros((len(live), len(dims)), dtype=np.int64)
    left = start.copy()
    for d, (_, size) in enumerate(dims):
        coords[:, d], left = left // size, left % size
    lag = _best_lag(live, start, coords)
    if lag:
        order = np.argsort(np.arange(len(live)) % lag, kind="stable")
        live, start, coords = live[order], start[order], coords[order]
        same = np.diff(order) > 0
        step, live_step = np.diff(start), np.diff(live)
        follows = same & (np.count_nonzero(np.diff(coords, axis=0), axis=1) <= 1)
        ids = np.unique(np.stack([step, live_step], 1), axis=0, return_inverse=True)[1].reshape(-1)
        ones = np.ones(len(live), dtype=np.int64)
        link = chain_links(follows, ones, 0 * ones, ids)
    else:
        # Nothing repeats three times: pairs may make partners that do.
        step, live_step = np.diff(start), np.diff(live)
        link = np.count_nonzero(np.diff(coords, axis=0), axis=1) <= 1
        link[1::2] = False
    first = np.flatnonzero(np.concatenate([[True], ~link]))
    count = np.diff(np.append(first, len(live)))
    for i, n in zip(first.tolist(), count.tolist(), strict=True):
        yield int(live[i]), int(start[i]), ((n, int(step[i]), int(live_step[i])) if n > 1 else (1, 0, 0))


def _best_lag(live: Int64Array, start: Int64Array, coords: Int64Array) -> int:
    """The distance, in members, at which most triples are in progression; 0 when none is."""
    best, best_score = 0, 0
    for lag in range(1, min(_MAX_LAG, (len(live) - 1) // 2) + 1):
        ahead, live_ahead = start[lag:] - start[:-lag], live[lag:] - live[:-lag]
        one_dim = np.count_nonzero(coords[lag:] - coords[:-lag], axis=1) <= 1
        steady = (
            (ahead[lag:] == ahead[:-lag]) & (live_ahead[lag:] == live_ahead[:-lag]) & one_dim[lag:] & one_dim[:-lag]
        )
        score = int(np.count_nonzero(steady))
        if score > best_score:
            best, best_score = lag, score
        if score == len(live) - 2 * lag:
            break
    return best
