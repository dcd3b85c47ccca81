"""Second differences modulo p of a [rows, cols] field of residues, as sparse entries.

A slice copy makes the index affine in (row, column) on a rectangle. The second difference along both dims is then zero but
for at most 16 elements per rectangle (4 if it fills the field), whatever its size; and as residues are linear in the index
that also holds modulo p. Work is done tile by tile in 16-bit lanes: |a - 2b + c| <= 2(p - 1) < 2**15, in which the multiples
of p are -p, 0 and p. Rows whose difference along the rows vanishes, nearly all of them, cost nothing more.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.probe.codes import Residues

__all__ = ["TILE_NUMEL", "Differencer", "PositionPool", "SparseEntries"]

TILE_NUMEL = 1 << 17
"""Elements of one tile: its few 16-bit work arrays stay in the second-level cache."""


_MAX_POOLED = 1 << 12
"""Entries of one field; more of them are no pattern that comes again."""


class SparseEntries(NamedTuple):
    """Non-zero second differences, sorted by (row, col). residue: in [1, p)."""

    row: npt.NDArray[np.int64]
    col: npt.NDArray[np.int64]
    residue: npt.NDArray[np.int64] | Residues


class PositionPool:
    """Entries in little memory, for as long as a probe lasts: tensors of one form break at the same places in every pass."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def packed(self, entries: SparseEntries) -> SparseEntries:
        """The same entries, positions shared with equal ones seen before, residues (below 2**15) of two bytes."""
        residue = entries.residue.astype(np.int16)
        if len(residue) > _MAX_POOLED:
            return entries._replace(residue=residue)
        key = entries.row.tobytes() + entries.col.tobytes()
        row, col = self._known.setdefault(key, (entries.row, entries.col))
        return SparseEntries(row, col, residue)


class Differencer:
    """Takes the rows of one field from top to bottom and keeps the non-zero second differences.

    Fill `rows_buffer(n)`, call `push(n)`, repeat, `finish()`. Memory: 3 arrays of (tile_rows + 2) x cols 16-bit words.
    """

    def __init__(self, cols: int, modulus: int, tile_rows: int) -> None:
        self._p = modulus
        self._buffer: Residues = np.zeros((tile_rows + 2, cols), dtype=np.int16)
        self._work: list[Residues] = [np.empty((tile_rows + 1, cols), dtype=np.int16) for _ in range(2)]
        self._next_row = 0
        self._found: list[SparseEntries] = []
        self.num_entries = 0

    def rows_buffer(self, num_rows: int) -> Residues:
        """[num_rows, cols] where the caller puts the residues, each in [0, p), of the next rows."""
        return self._buffer[2 : 2 + num_rows]

    def push(self, num_rows: int) -> None:
        """Difference the rows that `rows_buffer` holds."""
        field = self._buffer[: num_rows + 2]
        first = np.subtract(field[1:], field[:-1], out=self._work[0][: num_rows + 1])
        second = np.subtract(first[1:], first[:-1], out=self._work[1][:num_rows])
        dirty = self._rows_not_zero(second)
        if len(dirty):
            # A few rows at a time: the slow path's temporaries stay within the tile as well.
            step = max(1, TILE_NUMEL // max(1, field.shape[1]))
            for lo in range(0, len(dirty), step):
                self._slow_rows(dirty[lo : lo + step], field)
        self._buffer[:2] = field[num_rows:].copy()
        self._next_row += num_rows

    def finish(self) -> SparseEntries:
        if not self._found:
            z = np.zeros(0, dtype=np.int64)
            return SparseEntries(z, z, z)
        return SparseEntries(*(np.concatenate(column) for column in zip(*self._found, strict=True)))

    def _rows_not_zero(self, second: Residues) -> npt.NDArray[np.int64]:
        """Rows of `second` with an element that is no multiple of p. Overwrites it and the other work array."""
        np.abs(second, out=second)
        shifted = np.subtract(second, np.int16(self._p), out=self._work[0][: len(second)])
        # 0 stays 0; p becomes 0 in `shifted`; everything else is positive in both, read as unsigned.
        least = np.minimum(second.view(np.uint16), shifted.view(np.uint16), out=second.view(np.uint16))
        if not int(least.max(initial=0)):
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(least.max(axis=1))

    def _slow_rows(self, rows: npt.NDArray[np.int64], field: Residues) -> None:
        """Column differences of the given rows (tile-relative), scanned for entries."""
        p = self._p
        along_rows = field[rows + 2] - 2 * field[rows + 1] + field[rows]
        # Bring (-2p, 2p) to [0, p): the column difference below then fits 16 bits again.
        along_rows += (along_rows >> 15) & p
        along_rows += (along_rows >> 15) & p
        along_rows -= p
        along_rows += (along_rows >> 15) & p
        both = along_rows.copy()
        both[:, 1:] -= 2 * along_rows[:, :-1]
        both[:, 2:] += along_rows[:, :-2]
        nonzero = (both != 0) & (both != p) & (both != -p)
        where, col = np.nonzero(nonzero)
        if len(where):
            residue = both[where, col].astype(np.int64) % p
            self._found.append(SparseEntries(rows[where] + self._next_row, col.astype(np.int64), residue))
            self.num_entries += len(where)
