"""Arithmetic progressions on one dim of a checkpoint tensor: start, step, count, with step >= 1 and count >= 1.

All functions are vectorised over parallel int64 arrays and broadcast. A progression of one element has step 1 by
convention, so that equal sets have equal numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Cells", "contains", "cut_into_progressions", "intersection", "inverse_modulo", "last", "refine"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Cells = tuple[Int64Array, Int64Array, Int64Array]
"""start, step, count: [n] disjoint progressions, in order of their starts."""


def last(start: Int64Array, step: Int64Array, count: Int64Array) -> Int64Array:
    """The last index of each progression."""
    return start + step * (count - 1)


def contains(start: Int64Array, step: Int64Array, count: Int64Array, index: Int64Array | np.int64) -> BoolArray:
    """Whether each progression contains `index`; arguments broadcast."""
    offset = index - start
    found: BoolArray = (offset >= 0) & (offset <= step * (count - 1)) & (offset % step == 0)
    return found


def inverse_modulo(value: Int64Array, modulus: Int64Array) -> Int64Array:
    """The inverse of `value` modulo `modulus`, elementwise, for coprime pairs; 0 where the modulus is 1."""
    old_r, r = np.array(value % modulus), np.array(modulus)
    old_s, s = np.ones_like(old_r), np.zeros_like(old_r)
    while True:
        live = r != 0
        if not live.any():
            break
        quotient = np.where(live, old_r // np.where(live, r, 1), 0)
        old_r, r = np.where(live, r, old_r), np.where(live, old_r - quotient * r, 0)
        old_s, s = np.where(live, s, old_s), np.where(live, old_s - quotient * s, s)
    found: Int64Array = old_s % modulus
    return found


def intersection(a: Cells, b: Cells) -> Cells:
    """The common progression of a and b, elementwise, by the Chinese remainder theorem; count 0 where they are disjoint."""
    (start_a, step_a, count_a), (start_b, step_b, count_b) = a, b
    common = np.gcd(step_a, step_b)
    apart = start_b - start_a
    meets = apart % common == 0
    modulus = step_b // common
    turns = (apart // common) % modulus * inverse_modulo(step_a // common, modulus) % modulus
    step = step_a * modulus
    start = start_a + step_a * turns
    low = np.maximum(start_a, start_b)
    start = (
        start - (start - low) // step * step
    )  # the first common index >= low, as start and low differ by turns of step
    high = np.minimum(last(start_a, step_a, count_a), last(start_b, step_b, count_b))
    count = np.where(meets & (high >= start), (high - start) // step + 1, 0)
    return start, np.where(count > 1, step, 1), count


def refine(start: Int64Array, step: Int64Array, count: Int64Array) -> Cells:
    """Disjoint progressions such that each given one is a union of them and none lies in two classes of equal membership.

    Progressions of step 1 only contribute breakpoints; no array of the dim's extent is made unless a step exceeds 1, and
    then only over the indices of the strided ones' spans. Indices that lie in none of the given ones are left out.
    """
    ends = start + count
    dense = step == 1
    if dense.all():
        # A running sum says how many are open: comparing each point with each progression would cost their product.
        points, where = np.unique(np.concatenate([start, ends]), return_inverse=True)
        opened = np.bincount(where[: len(start)], minlength=len(points))
        covered = np.cumsum(opened - np.bincount(where[len(start) :], minlength=len(points)))[:-1] > 0
        low, high = points[:-1][covered], points[1:][covered]
        return low, np.ones_like(low), high - low
    return _refine_strided(start, step, count, np.unique(np.concatenate([start[dense], ends[dense]])))


def _refine_strided(start: Int64Array, step: Int64Array, count: Int64Array, points: Int64Array) -> Cells:
    low = int(start.min())
    high = int(last(start, step, count).max()) + 1
    label = np.searchsorted(points, np.arange(low, high), side="right").astype(np.int64)
    covered = np.zeros(high - low, dtype=bool)
    num_labels = len(points) + 1
    size = np.zeros(num_labels + int(count[step > 1].sum()), dtype=np.int64)  # each index may get one new label a time
    size[:num_labels] = np.bincount(label, minlength=num_labels)
    for first, stride, length in zip(start.tolist(), step.tolist(), count.tolist(), strict=True):
        own = slice(first - low, first - low + stride * (length - 1) + 1, stride)
        covered[own] = True
        if stride == 1:
            continue  # its ends are among the points
        labels, inverse, hits = np.unique(label[own], return_inverse=True, return_counts=True)
        split = hits < size[labels]  # labels that lie only partly in this progression get a new name inside it
        fresh = np.where(split, num_labels + np.cumsum(split) - 1, labels)
        label[own] = fresh[inverse]
        size[labels[split]] -= hits[split]
        size[fresh[split]] = hits[split]
        num_labels += int(split.sum())
    order = np.argsort(label, kind="stable")
    order = order[covered[order]]  # one label is covered throughout or not at all
    groups = np.split(order + low, np.flatnonzero(np.diff(label[order])) + 1)
    found = [np.concatenate(column) for column in zip(*map(cut_into_progressions, groups), strict=True)]
    by_start = np.argsort(found[0], kind="stable")
    return found[0][by_start], found[1][by_start], found[2][by_start]


def cut_into_progressions(indices: Int64Array) -> Cells:
    """Cut sorted distinct indices into few maximal progressions, greedily from the left."""
    n = len(indices)
    if n == 0:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    gaps = np.diff(indices)
    turns = np.concatenate([np.flatnonzero(np.diff(gaps)) + 1, [n - 1]])  # where a run of equal gaps ends
    starts, steps, counts = [], [], []
    at = 0
    for turn in turns:
        if turn <= at:
            continue  # a run that only reaches the element just taken
        if turn == at + 1 and turn != n - 1 and gaps[at] > gaps[turn]:
            # one wide gap before a narrow one: its left element stands alone, its right one begins the next run
            starts.append(indices[at])
            steps.append(1)
            counts.append(1)
            at = turn
            continue
        starts.append(indices[at])
        steps.append(gaps[at])
        counts.append(turn - at + 1)
        at = turn + 1
    if at == n - 1:
        starts.append(indices[at])
        steps.append(1)
        counts.append(1)
    return np.array(starts, dtype=np.int64), np.array(steps, dtype=np.int64), np.array(counts, dtype=np.int64)
