"""Strided boxes in checkpoint coordinates: per dim start, step, count. Closed under intersection.

A batch of n boxes of D dims is three int64 arrays [n, D]; functions broadcast over the leading dims.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightbridge.geometry import progressions
from weightbridge.geometry.progressions import Int64Array

__all__ = ["Boxes", "first_overlap", "inside", "intersection_numel", "numel"]

Boxes = tuple[Int64Array, Int64Array, Int64Array]
"""start, step, count: [..., D]."""

_PAIRS_AT_ONCE = 1 << 20


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

    Sorted by the first dim's start, a box is compared with those that begin before it ends; only pairs whose bounding
    boxes meet pay for the remainder theorem.
    """
    start, step, count = boxes
    n = len(start)
    if n < 2:
        return None
    sweep = int(np.argmax([len(np.unique(start[:, d])) for d in range(start.shape[1])]))
    order = np.argsort(start[:, sweep], kind="stable")
    start, step, count = start[order], step[order], count[order]
    end = progressions.last(start, step, count)
    partners = np.searchsorted(start[:, sweep], end[:, sweep], side="right") - np.arange(n) - 1
    begin = 0
    while begin < n:
        stop = begin + max(1, int(np.searchsorted(np.cumsum(partners[begin:]), _PAIRS_AT_ONCE)))
        left = np.repeat(np.arange(begin, min(stop, n)), partners[begin:stop])
        first = np.repeat(np.cumsum(partners[begin:stop]) - partners[begin:stop], partners[begin:stop])
        right = left + 1 + np.arange(len(left)) - first
        near = ((start[left] <= end[right]) & (start[right] <= end[left])).all(axis=-1)
        left, right = left[near], right[near]
        a = (start[left], step[left], count[left])
        b = (start[right], step[right], count[right])
        hits = np.flatnonzero(intersection_numel(a, b) > 0)
        if len(hits):
            return int(order[left[hits[0]]]), int(order[right[hits[0]]])
        begin = stop
    return None
