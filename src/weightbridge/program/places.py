"""Where atoms lie in one worker's memory: the boxes that contain each atom, found by a join that no layout makes quadratic.

A tensor of few boxes is compared with all of them. A tensor of many (an irregular layout may have one box an element) is
looked up in a grid: boxes of one step and about one size start in one of two cells a dim around the atom's first element.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt

from weightbridge.layout.boxes import BoxTable
from weightbridge.plan.plan import AtomTable
from weightbridge.program.slots import consecutive

__all__ = ["match_boxes"]

Int64Array = npt.NDArray[np.int64]
Pairs = tuple[Int64Array, Int64Array]
"""Position in the list of wanted atoms, and box: both [n]."""

_PAIRS_AT_ONCE = 1 << 20
_FEW_BOXES = 64
"""Boxes of one tensor up to which each of its atoms is compared with all of them."""


def match_boxes(atoms: AtomTable, wanted: Int64Array, boxes: BoxTable) -> Pairs:
    """All pairs such that the box contains the whole atom, sorted by (position in `wanted`, box)."""
    order = np.argsort(boxes.tensor, kind="stable")
    tensors = boxes.tensor[order]
    tensor = atoms.tensor[wanted]
    first = np.searchsorted(tensors, tensor, side="left")
    lengths = np.searchsorted(tensors, tensor, side="right") - first
    few = np.flatnonzero(lengths <= _FEW_BOXES)
    found = list(_checked(atoms, wanted, boxes, order, few, first[few], lengths[few]))
    many = np.flatnonzero(lengths > _FEW_BOXES)
    if len(many):
        num_boxes = np.bincount(boxes.tensor)
        found += _by_grid(atoms, wanted, boxes, many, np.flatnonzero(num_boxes[boxes.tensor] > _FEW_BOXES))
    position, box = (np.concatenate([np.zeros(0, dtype=np.int64), *column]) for column in zip(*found, strict=True))
    if len(found) > 1:
        by_position = np.lexsort((box, position))
        position, box = position[by_position], box[by_position]
    return position, box


def _checked(
    atoms: AtomTable, wanted: Int64Array, boxes: BoxTable, candidates: Int64Array, position: Int64Array,
    first: Int64Array, lengths: Int64Array,
) -> Iterator[Pairs]:  # fmt: skip
    """Compare atom position[i] with boxes candidates[first[i]:first[i] + lengths[i]], a bounded number of pairs at a time."""
    ends = np.cumsum(lengths)
    begin = 0
    while begin < len(position):
        done = ends[begin - 1] if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, done + _PAIRS_AT_ONCE, side="right")))
        who = np.repeat(position[begin:stop], lengths[begin:stop])
        box = candidates[consecutive(first[begin:stop], lengths[begin:stop])]
        inside = _contains(atoms, wanted[who], boxes, box)
        yield who[inside], box[inside]
        begin = stop
    yield np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)


def _by_grid(
    atoms: AtomTable, wanted: Int64Array, boxes: BoxTable, many: Int64Array, crowd: Int64Array
) -> Iterator[Pairs]:
    """Pairs of the atoms at positions `many` with the boxes `crowd`.

    Boxes are grouped by step and by power of two of their span. In a group, a box that contains an element starts, in
    each dim, in the element's cell of that power of two or in the one before, and at the element's residue modulo the
    step. Tensor, cells and residues are one key; keys may wrap around, since every candidate is checked.
    """
    num_dims = boxes.num_dims
    step, count = boxes.step[crowd], boxes.count[crowd]
    level = np.frexp((count - 1) * step)[1].astype(
        np.int64
    )  # the span is more than half of 2**level and no more than it
    patterns, group = np.unique(np.concatenate([step, level], axis=1), axis=0, return_inverse=True)
    by_group = np.argsort(group.reshape(-1), kind="stable")
    bounds = np.searchsorted(group.reshape(-1)[by_group], np.arange(len(patterns) + 1))
    width = min(num_dims, atoms.start.shape[1])
    at = np.zeros((len(many), num_dims), dtype=np.int64)
    at[:, :width] = atoms.start[wanted[many], :width]
    tensor = atoms.tensor[wanted[many]]
    for i, pattern in enumerate(patterns):
        members = crowd[by_group[bounds[i] : bounds[i + 1]]]
        steps, levels = pattern[:num_dims], pattern[num_dims:]
        radix = np.maximum((boxes.start[members].max(axis=0) >> levels) + 1, 1)
        keys = _grid_keys(
            boxes.tensor[members], boxes.start[members] >> levels, boxes.start[members] % steps, radix, steps
        )
        by_key = np.argsort(keys, kind="stable")
        keys, members = keys[by_key], members[by_key]
        near = np.flatnonzero(np.isin(tensor, boxes.tensor[members]))
        for back in product(*((0,) if n == 0 else (0, 1) for n in levels.tolist())):
            cell = (at[near] >> levels) - np.array(back, dtype=np.int64)
            there = np.flatnonzero(((cell >= 0) & (cell < radix)).all(axis=1))
            asked = _grid_keys(tensor[near[there]], cell[there], at[near[there]] % steps, radix, steps)
            first = np.searchsorted(keys, asked, side="left")
            lengths = np.searchsorted(keys, asked, side="right") - first
            yield from _checked(atoms, wanted, boxes, members, many[near[there]], first, lengths)


def _grid_keys(
    tensor: Int64Array, cell: Int64Array, residue: Int64Array, radix: Int64Array, steps: Int64Array
) -> Int64Array:
    key: Int64Array = tensor.copy()
    for dim in range(cell.shape[1]):
        key *= radix[dim]
        key += cell[:, dim]
        key *= steps[dim]
        key += residue[:, dim]
    return key


def _contains(atoms: AtomTable, atom: Int64Array, boxes: BoxTable, box: Int64Array) -> npt.NDArray[np.bool_]:
    """[n] whether every element of atom[i] is an element of box[i]."""
    inside = np.ones(len(atom), dtype=bool)
    for dim in range(max(atoms.count.shape[1], boxes.count.shape[1])):
        start, step, count = (column_of(table, atom, dim, fill) for table, fill in
                              ((atoms.start, 0), (atoms.step, 1), (atoms.count, 1)))  # fmt: skip
        b_start, b_step, b_count = (column_of(table, box, dim, fill) for table, fill in
                                    ((boxes.start, 0), (boxes.step, 1), (boxes.count, 1)))  # fmt: skip
        offset = start - b_start
        inside &= (offset >= 0) & (offset + (count - 1) * step <= (b_count - 1) * b_step)
        if (b_step > 1).any():
            inside &= (offset % b_step == 0) & ((count == 1) | (step % b_step == 0))
    return inside


def column_of(table: Int64Array, rows: Int64Array, dim: int, fill: int) -> Int64Array:
    """Column `dim` of the given rows, or `fill` where the table has no such dim."""
    if dim < table.shape[1]:
        column: Int64Array = table[rows, dim]
        return column
    return np.full(len(rows), fill, dtype=np.int64)
