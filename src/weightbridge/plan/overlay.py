"""Overlay: refine the boxes of all workers into disjoint atoms, each with one set of holders and one set of needers.

Thousands of tensors share a pattern, so the refinement runs once per *signature* (shape, and who has which boxes of it)
and is tiled over the tensors. Bulk data stay in arrays: no object per box.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weightbridge.errors import CoverageError
from weightbridge.geometry import Boxes, Cells, last, numel, refine
from weightbridge.layout.correspondence import Correspondence

__all__ = ["Atoms", "overlay"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
PackedBits = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Atoms:
    """Disjoint boxes that tile all needed elements, tensor by tensor.

    tensor: [n]. start, step, count: [n, D]. owner_set: [n] row of `owner_sets`. owner_sets: [num_sets, num_kinds] which
    kinds of workers (`Correspondence.kinds`) have the atom in their maps.
    """

    tensor: Int64Array
    start: Int64Array
    step: Int64Array
    count: Int64Array
    owner_set: Int64Array
    owner_sets: BoolArray


def overlay(job: Correspondence) -> Atoms:
    """All atoms that a rollout worker needs. On each, every worker's map is affine.

    Raises CoverageError naming tensor, box and worker when a needed element has no holder.
    """
    rows, dims = job.rows, job.num_dims
    holds = np.array(job.holds, dtype=bool)[list(job.kinds)]
    holders = np.packbits(holds)
    bounds = np.searchsorted(rows[:, 0], np.arange(len(job.spec.tensors) + 1))
    body = np.ascontiguousarray(rows[:, 1:])
    raw, width = body.tobytes(), body.itemsize * body.shape[1]
    signatures: dict[tuple[tuple[int, ...], bytes], int] = {}
    sets: dict[bytes, int] = {}
    pieces: list[tuple[Boxes, Int64Array]] = []
    tiled: list[tuple[int, int]] = []  # (tensor, signature)
    for tensor, (low, high) in enumerate(pairwise(bounds.tolist())):
        if low == high:
            continue
        key = (job.spec.tensors[tensor].shape, raw[low * width : high * width])
        if key not in signatures:
            signatures[key] = len(pieces)
            boxes, owners = refine_signature(body[low:high, 0], _columns(body[low:high, 1:], dims), holds)
            _check_holders(job, tensor, boxes, owners, holders)
            names = [sets.setdefault(packed.tobytes(), len(sets)) for packed in owners]
            pieces.append((boxes, np.array(names, dtype=np.int64)))
        tiled.append((tensor, signatures[key]))
    return _tile(tiled, pieces, sets, len(holds), dims)


def _columns(rows: Int64Array, dims: int) -> Boxes:
    return rows[:, :dims], rows[:, dims : 2 * dims], rows[:, 2 * dims :]


def _ranges(first: Int64Array, length: Int64Array) -> Int64Array:
    """first[0], first[0] + 1, ... (length[0] of them), then those of first[1], and so on."""
    return np.repeat(first - (np.cumsum(length) - length), length) + np.arange(int(length.sum()))


def _tile(
    tiled: list[tuple[int, int]],
    pieces: list[tuple[Boxes, Int64Array]],
    sets: dict[bytes, int],
    num_kinds: int,
    dims: int,
) -> Atoms:
    sizes = np.array([len(names) for _, names in pieces], dtype=np.int64)
    offsets = np.cumsum(sizes) - sizes
    tensor, signature = np.array(tiled, dtype=np.int64).reshape(-1, 2).T
    lengths = sizes[signature]
    take = _ranges(offsets[signature], lengths)
    square = np.zeros((0, dims), dtype=np.int64)
    start, step, count = (np.concatenate([square, *(boxes[i] for boxes, _ in pieces)])[take] for i in range(3))
    names = np.concatenate([np.zeros(0, dtype=np.int64), *(n for _, n in pieces)])[take]
    packed = np.frombuffer(b"".join(sets), dtype=np.uint8).reshape(len(sets), -(-num_kinds // 8))
    owner_sets = np.unpackbits(packed, axis=1, count=num_kinds).astype(bool)
    return Atoms(
        tensor=np.repeat(tensor, lengths), start=start, step=step, count=count, owner_set=names, owner_sets=owner_sets
    )


def _check_holders(job: Correspondence, tensor: int, boxes: Boxes, owners: PackedBits, holders: PackedBits) -> None:
    orphans = np.flatnonzero(~(owners & holders).any(axis=1))
    if not len(orphans):
        return
    i = int(orphans[0])
    spec = job.spec.tensors[tensor]
    rank = len(spec.shape)
    box = tuple(zip(*(column[i, :rank].tolist() for column in boxes), strict=True))
    worker = job.workers[job.kinds[int(np.flatnonzero(np.unpackbits(owners[i]))[0])]]
    missing = int(numel(boxes[2][orphans]).sum())
    raise CoverageError(
        f"tensor {spec.name!r}: worker {worker!r} needs the elements with (start, step, count) per dim {box}, and no trainer "
        f"holds them ({missing} of the tensor's {spec.numel} needed elements have no holder); check that the trainers' "
        "load_weights covers this tensor, or name it as a constant of the checkpoint spec",
        tensor=spec.name,
        box=box,
        worker=worker,
    )


def refine_signature(kind: Int64Array, boxes: Boxes, holds: BoolArray) -> tuple[Boxes, PackedBits]:
    """Atoms of one tensor: (start, step, count) [n, D], and [n, num_kinds / 8 rounded up] who has each, as packed bits.
    Atoms nobody needs are dropped.

    kind: [m] owner of each box. holds: [num_kinds] True for trainers.
    """
    stacked = np.concatenate(boxes, axis=1)
    distinct, which = np.unique(stacked, axis=0, return_inverse=True)
    owners = np.zeros((len(distinct), -(-len(holds) // 8)), dtype=np.uint8)
    np.bitwise_or.at(owners, (which.reshape(-1), kind >> 3), (128 >> (kind & 7)).astype(np.uint8))
    needed = (owners & np.packbits(~holds)).any(axis=1)
    refinement = _Refinement(_columns(distinct, boxes[0].shape[1]), np.asarray(needed))
    atoms, cover = refinement.run()
    if not len(cover):
        return atoms, owners[:0]
    atoms, cover = _merge(atoms, cover)
    sizes = [len(ids) for ids in refinement.covers]
    reach = np.bitwise_or.reduceat(owners[np.concatenate(refinement.covers)], np.cumsum([0, *sizes[:-1]]), axis=0)
    order = np.lexsort(atoms[0].T[::-1])
    return (atoms[0][order], atoms[1][order], atoms[2][order]), reach[cover[order]]


class _Refinement:
    """Dim by dim: cut dim d into cells of equal membership, then refine the next dims among the boxes of that cell only.

    Equal sets of boxes give equal refinements of the remaining dims, so these are remembered. Cutting only among the
    boxes that meet keeps shards that begin mid-row from cutting everybody else's columns.
    """

    def __init__(self, boxes: Boxes, needed: BoolArray) -> None:
        self.start, self.step, self.count = boxes
        self.needed = needed
        self.covers: list[Int64Array] = []
        self._known: dict[tuple[int, bytes], tuple[Boxes, Int64Array]] = {}

    def run(self) -> tuple[Boxes, Int64Array]:
        return self._descend(0, np.arange(len(self.start), dtype=np.int64))

    def _descend(self, dim: int, ids: Int64Array) -> tuple[Boxes, Int64Array]:
        """Atoms over dims [dim, D) of the boxes `ids`, which all contain the cells chosen so far."""
        key = (dim, ids.tobytes())
        if key not in self._known:
            self._known[key] = self._refine(dim, ids)
        return self._known[key]

    def _refine(self, dim: int, ids: Int64Array) -> tuple[Boxes, Int64Array]:
        left = self.start.shape[1] - dim
        if not self.needed[ids].any():
            none = np.zeros((0, left), dtype=np.int64)
            return (none, none, none), np.zeros(0, dtype=np.int64)
        if left == 0:
            self.covers.append(ids)
            one = np.zeros((1, 0), dtype=np.int64)
            return (one, one, one), np.array([len(self.covers) - 1], dtype=np.int64)
        cells, patterns, pattern_of = self._cells(dim, ids)
        below = [self._descend(dim + 1, pattern) for pattern in patterns]
        sizes = np.array([len(cover) for _, cover in below], dtype=np.int64)
        lengths = sizes[pattern_of]
        take = _ranges((np.cumsum(sizes) - sizes)[pattern_of], lengths)
        start, step, count = (
            np.concatenate(
                [np.repeat(own, lengths)[:, None], np.concatenate([boxes[i] for boxes, _ in below])[take]], axis=1
            )
            for i, own in enumerate(cells)
        )
        return (start, step, count), np.concatenate([cover for _, cover in below])[take]

    def _cells(self, dim: int, ids: Int64Array) -> tuple[Cells, list[Int64Array], Int64Array]:
        """Cells of this dim, the different sets of boxes that meet in a cell, and [num_cells] the set of each.

        Only (line, cell) pairs that may meet are looked at, so a thousand short shards cost thousands and not a million.
        """
        lines = np.stack([self.start[ids, dim], self.step[ids, dim], self.count[ids, dim]], axis=1)
        distinct, which = np.unique(lines, axis=0, return_inverse=True)
        which = which.reshape(-1)
        low, stride, length = distinct.T
        cells = refine(low, stride, length)
        first = np.searchsorted(cells[0], low)
        span = np.searchsorted(cells[0], last(low, stride, length), side="right") - first
        line, cell = np.repeat(np.arange(len(low)), span), _ranges(first, span)
        meets = (cells[0][cell] - low[line]) % stride[line] == 0
        line, cell = line[meets], cell[meets]
        line = line[np.argsort(cell, kind="stable")]
        bounds = np.cumsum([0, *np.bincount(cell, minlength=len(cells[0])).tolist()]).tolist()
        by_line, num_boxes = ids[np.argsort(which, kind="stable")], np.bincount(which)
        begin = np.cumsum(num_boxes) - num_boxes
        numbers: dict[bytes, int] = {}
        patterns, pattern_of = [], []
        for lo, hi in pairwise(bounds):
            key = line[lo:hi].tobytes()
            if key not in numbers:
                numbers[key] = len(numbers)
                patterns.append(np.sort(by_line[_ranges(begin[line[lo:hi]], num_boxes[line[lo:hi]])]))
            pattern_of.append(numbers[key])
        return cells, patterns, np.array(pattern_of, dtype=np.int64)


def _merge(atoms: Boxes, cover: Int64Array) -> tuple[Boxes, Int64Array]:
    """Join neighbours along one dim at a time where cover and all other dims agree and the union is one box."""
    start, step, count = atoms
    for dim in range(start.shape[1] - 1, -1, -1):
        others = np.concatenate([np.delete(start, dim, axis=1), step, np.delete(count, dim, axis=1)], axis=1)
        order = np.lexsort((start[:, dim], *others.T[::-1], cover))
        start, step, count, cover, others = start[order], step[order], count[order], cover[order], others[order]
        own_start, own_step, own_count = start[:, dim], step[:, dim], count[:, dim]
        joins = np.zeros(len(cover), dtype=bool)
        joins[1:] = (
            (cover[1:] == cover[:-1])
            & (others[1:] == others[:-1]).all(axis=1)
            & (own_start[1:] == own_start[:-1] + own_step[:-1] * own_count[:-1])
        )
        first = np.flatnonzero(~joins)
        totals = np.add.reduceat(own_count, first) if len(first) else own_count
        start, step, count, cover = start[first], step[first], count[first].copy(), cover[first]
        count[:, dim] = totals
    return (start, step, count), cover
