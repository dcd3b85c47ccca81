"""Strided boxes in checkpoint coordinates: per dim start, step, count. Closed under intersection.

A batch of n boxes of D dims is three int64 arrays [n, D]; functions broadcast over the leading dims.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from weightbridge.geometry import progressions
from weightbridge.geometry.progressions import Int64Array

__all__ = ["Boxes", "first_overlap", "inside", "intersection_numel", "meeting_pairs", "numel"]

Boxes = tuple[Int64Array, Int64Array, Int64Array]
"""start, step, count: [..., D]."""

_PAIRS_AT_ONCE = 1 << 20
_FEW_PAIRS = 1 << 10  # up to here all pairs are cheaper than a sort


def numel(count: Int64Array) -> Int64Array:
    """[...] elements of each box; `count` is [..., D]."""
    found: Int64Array = count.prod(axis=-1)
    return found


def intersection_numel(a: Boxes, b: Boxes) -> Int64Array:
    """[...] number of elements that a and b have in common, elementwise over broadcast leading dims."""
    return numel(progressions.intersection(a, b)[2])


def inside(a: Boxes, b: Boxes) -> npt.NDArray[np.bool_]:
    """[...] whether every element of a lies in b."""
    (start_a, step_a, count_a), (start_b, step_b, _) = a, b
    offset = start_a - start_b
    fits = (offset >= 0) & (progressions.last(*a) <= progressions.last(*b)) & (offset % step_b == 0)
    fits &= (count_a == 1) | (step_a % step_b == 0)
    found: npt.NDArray[np.bool_] = fits.all(axis=-1)
    return found


def first_overlap(boxes: Boxes) -> tuple[int, int] | None:
    """Two of the boxes [n, D] that share an element, or None if they are pairwise disjoint.

    Sorted along the dim in which most begin apart, a box is compared with those that begin before it ends; only pairs
    whose bounding boxes meet pay for the remainder theorem.
    """
    start, n = boxes[0], len(boxes[0])
    if n < 2:
        return None
    sweep = _sweep_dim(start)
    order = np.argsort(start[:, sweep], kind="stable")
    begin, end = start[order, sweep], progressions.last(*boxes)[order, sweep]
    after = np.arange(1, n + 1)
    for left, right in _pairs(after, np.searchsorted(begin, end, side="right") - after):
        i, j = _meeting(boxes, boxes, order[left], order[right])
        hits = np.flatnonzero(intersection_numel(_rows(boxes, i), _rows(boxes, j)) > 0)
        if len(hits):
            return int(i[hits[0]]), int(j[hits[0]])
    return None


def meeting_pairs(a: Boxes, b: Boxes) -> Iterator[tuple[Int64Array, Int64Array]]:
    """All pairs (i, j) such that the bounding boxes of box i of `a` [n, D] and box j of `b` [m, D] meet, in batches.

    Boxes that share an element are among them. The cost grows with the pairs that meet along one dim, not with n * m.
    """
    n, m = len(a[0]), len(b[0])
    if n * m <= _FEW_PAIRS:
        yield _meeting(a, b, *np.divmod(np.arange(n * m), max(1, m)))
        return
    sweep = _sweep_dim(np.concatenate([a[0], b[0]]))
    ends_a, ends_b = progressions.last(*a)[:, sweep], progressions.last(*b)[:, sweep]
    order_a, order_b = (np.argsort(boxes[0][:, sweep], kind="stable") for boxes in (a, b))
    begins_a, begins_b = a[0][order_a, sweep], b[0][order_b, sweep]
    first = np.searchsorted(begins_b, a[0][:, sweep], side="right")  # those of b that begin behind this one's start
    for i, at in _pairs(first, np.searchsorted(begins_b, ends_a, side="right") - first):
        yield _meeting(a, b, i, order_b[at])
    first = np.searchsorted(begins_a, b[0][:, sweep])  # those of a that begin at this one's start or behind it
    for j, at in _pairs(first, np.searchsorted(begins_a, ends_b, side="right") - first):
        yield _meeting(a, b, order_a[at], j)


def _sweep_dim(start: Int64Array) -> int:
    """The dim in which most boxes [n, D] begin apart."""
    return int(np.argmax([len(np.unique(column)) for column in start.T]))


def _rows(boxes: Boxes, ids: Int64Array) -> Boxes:
    start, step, count = boxes
    return start[ids], step[ids], count[ids]


def _meeting(a: Boxes, b: Boxes, i: Int64Array, j: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Those of the pairs (i, j) whose bounding boxes meet."""
    left, right = _rows(a, i), _rows(b, j)
    near = ((left[0] <= progressions.last(*right)) & (right[0] <= progressions.last(*left))).all(axis=-1)
    return i[near], j[near]


def _pairs(first: Int64Array, length: Int64Array) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Pairs (i, k) for first[i] <= k < first[i] + length[i], in batches of about `_PAIRS_AT_ONCE`."""
    n, begin, total = len(first), 0, np.cumsum(length)
    while begin < n:
        before = int(total[begin - 1]) if begin else 0
        stop = max(begin + 1, int(np.searchsorted(total, before + _PAIRS_AT_ONCE, side="right")))
        sizes = length[begin:stop]
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        yield np.repeat(np.arange(begin, min(stop, n)), sizes), np.repeat(first[begin:stop], sizes) + within
        begin = stop
