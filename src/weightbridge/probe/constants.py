"""Settling what holds no code: constants, pads and untouched elements, over all passes of one field.

A constant may be a code in some passes (1.0 is one in every second pass), where it was differenced like an index. It is
never a code in all of them, so another pass tells its bits; the passes that took it for a code are corrected by the
second differences of that constant, which are as sparse as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.dtypes import DType
from weightbridge.probe.codes import CodeTable
from weightbridge.probe.difference import SparseEntries

__all__ = ["Conflict", "RunCollector", "Runs", "Settled", "settle"]

Int64Array = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """Maximal runs of equal elements that hold no code, by position row * cols + col in the field.

    bits: raw bits. untouched: they are the sentinel of the pass (a constant may look so in one pass, not in two).
    """

    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    bits: npt.NDArray[np.uint64]
    untouched: npt.NDArray[np.bool_]


_NO_RUNS = Runs(
    np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=bool)
)


class RunCollector:
    """Joins the runs of successive tiles."""

    def __init__(self, sentinel: int) -> None:
        self._sentinel = np.uint64(sentinel)
        self._parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint64]]] = []
        self.num_runs = 0

    def add(self, base: int, raw: npt.NDArray[Any], invalid: npt.NDArray[np.bool_]) -> None:
        if bool(invalid.all()) and int(raw.min()) == int(raw.max()):
            self.add_runs(
                np.array([base], np.int64), np.array([raw.size], np.int64), np.array([int(raw.flat[0])], np.uint64)
            )
            return
        position = np.flatnonzero(invalid.reshape(-1))
        values = raw[invalid].astype(np.uint64)
        breaks = np.ones(len(position), dtype=bool)
        breaks[1:] = (np.diff(position) != 1) | (values[1:] != values[:-1])
        first = np.flatnonzero(breaks)
        length = np.diff(np.append(first, len(position)))
        self.add_runs(position[first].astype(np.int64) + base, length.astype(np.int64), values[first])

    def add_runs(
        self, start: npt.NDArray[np.int64], length: npt.NDArray[np.int64], bits: npt.NDArray[np.uint64]
    ) -> None:
        """Runs found elsewhere, by position in the field, after all that were added before."""
        if len(start):
            self._parts.append((start, length, bits))
            self.num_runs += len(start)

    def finish(self) -> Runs:
        if not self._parts:
            return _NO_RUNS
        start, length, bits = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        # Tiles cut runs; positions and values tell where they go on.
        breaks = np.ones(len(start), dtype=bool)
        breaks[1:] = (start[1:] != start[:-1] + length[:-1]) | (bits[1:] != bits[:-1])
        first = np.flatnonzero(breaks)
        return Runs(start[first], np.add.reduceat(length, first), bits[first], bits[first] == self._sentinel)


class Conflict(NamedTuple):
    """The first element, by position in the field, that is no constant: what two passes saw, by number of the pass."""

    position: int
    before: int
    after: int


class Settled(NamedTuple):
    """runs: elements that are no copies. entries: per pass, second differences with those elements at residue 0."""

    runs: Runs
    entries: list[SparseEntries]


def settle(
    entries: Sequence[SparseEntries], runs: Sequence[Runs], table: CodeTable, dtype: DType, rows: int, cols: int
) -> Settled | Conflict:
    """Agree on the elements without code of one field of [rows, cols]. Pure."""
    if all(_agree(r, runs[0]) for r in runs):
        return Settled(runs[0], list(entries))
    edges = np.unique(np.concatenate([edge for r in runs for edge in (r.start, r.start + r.length)]))
    start, length = edges[:-1], np.diff(edges)
    inside, bits, untouched = (np.stack(rows_) for rows_ in zip(*(_at(r, start) for r in runs), strict=True))
    some = inside.any(axis=0)
    first = inside.argmax(axis=0)
    column = np.arange(len(start))
    agreed_bits, agreed_untouched = bits[first, column], (untouched & inside).all(axis=0)
    corrected = []
    for k, found in enumerate(entries):
        taken = some & ~inside[k]  # a code in this pass
        residue = np.zeros(len(start), dtype=np.int16)
        invalid = table.decode(dtype, k, agreed_bits.astype(dtype.bits), residue)
        wrong = inside[k] & ~agreed_untouched & (bits[k] != agreed_bits)
        if invalid is not None:
            wrong |= taken & invalid
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            return Conflict(int(start[at]), int(first[at]), k)
        corrected.append(_without(found, start[taken], length[taken], residue[taken], table.moduli[k], rows, cols))
    chosen = np.flatnonzero(some)
    return Settled(_joined(start[chosen], length[chosen], agreed_bits[chosen], agreed_untouched[chosen]), corrected)


def _agree(a: Runs, b: Runs) -> bool:
    """The same elements, each with the same bits or untouched in both."""
    same = all(np.array_equal(x, y) for x, y in ((a.start, b.start), (a.length, b.length), (a.untouched, b.untouched)))
    return same and bool((a.untouched | (a.bits == b.bits)).all())


def _at(
    runs: Runs, position: Int64Array
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Whether each position lies in a run, and that run's bits and untouched flag."""
    if not len(runs.start):
        no = np.zeros(len(position), dtype=bool)
        return no, np.zeros(len(position), dtype=np.uint64), no
    index = np.maximum(np.searchsorted(runs.start, position, side="right") - 1, 0)
    inside = (position >= runs.start[index]) & (position < runs.start[index] + runs.length[index])
    return inside, np.where(inside, runs.bits[index], np.uint64(0)), inside & runs.untouched[index]


def _joined(
    start: Int64Array, length: Int64Array, bits: npt.NDArray[np.uint64], untouched: npt.NDArray[np.bool_]
) -> Runs:
    if not len(start):
        return Runs(start, length, bits, untouched)
    breaks = np.ones(len(start), dtype=bool)
    breaks[1:] = (start[1:] != start[:-1] + length[:-1]) | (bits[1:] != bits[:-1]) | (untouched[1:] != untouched[:-1])
    first = np.flatnonzero(breaks)
    return Runs(start[first], np.add.reduceat(length, first), bits[first], untouched[first])


def _without(
    entries: SparseEntries,
    start: Int64Array,
    length: Int64Array,
    residue: npt.NDArray[np.int16],
    modulus: int,
    rows: int,
    cols: int,
) -> SparseEntries:
    """The entries of the field with `residue` taken off the given runs of positions."""
    row, col = [entries.row], [entries.col]
    value = [entries.residue]
    for r0, r1, c0, c1, v in _rectangles(start, length, residue, cols):
        for r, row_sign in _second_difference(r0, r1, rows):
            for c, col_sign in _second_difference(c0, c1, cols):
                row.append(r)
                col.append(c)
                value.append(-v * row_sign * col_sign)
    flat = np.concatenate(row) * cols + np.concatenate(col)
    values = np.concatenate(value)
    keep = flat >= 0  # corrections beyond the field's end are marked so
    where, position = np.unique(flat[keep], return_inverse=True)
    total = np.zeros(len(where), dtype=np.int64)
    np.add.at(total, position, values[keep])
    total %= modulus
    where, total = where[total != 0], total[total != 0]
    return SparseEntries(where // cols, where % cols, total)


def _rectangles(
    start: Int64Array, length: Int64Array, residue: npt.NDArray[np.int16], cols: int
) -> list[tuple[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array]]:
    """Runs of positions as rectangles (rows [r0, r1) x columns [c0, c1), value): a head, whole rows and a tail each."""
    value = residue.astype(np.int64)
    end = start + length
    first_row, last_row = start // cols, (end - 1) // cols
    one = first_row == last_row
    begin_col, end_col = start % cols, (end - 1) % cols + 1
    whole = np.full(len(start), cols, dtype=np.int64)
    zero = np.zeros(len(start), dtype=np.int64)
    parts = [
        (first_row, first_row + 1, begin_col, np.where(one, end_col, whole), value),
        (first_row + 1, last_row, zero, whole, np.where(last_row > first_row + 1, value, 0)),
        (last_row, last_row + 1, zero, end_col, np.where(one, 0, value)),
    ]
    return [tuple(column[part[4] != 0] for column in part) for part in parts]


def _second_difference(lo: Int64Array, hi: Int64Array, extent: int) -> list[tuple[Int64Array, int]]:
    """Positions and signs of the second difference of an indicator of [lo, hi); far negative where beyond the field."""
    beyond = -(1 << 50)
    return [(np.where(at < extent, at, beyond), sign) for at, sign in ((lo, 1), (lo + 1, -1), (hi, -1), (hi + 1, 1))]
