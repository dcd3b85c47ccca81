"""Reading bools that carry their numbers bit by bit (`probe/bits.py`).

What the passes show is kept as one word an element, 8 bytes: bools are few. At the end the numbers are known outright, and
are differenced like residues, so that what follows is the same for every dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.probe.bits import BitTable
from weightbridge.probe.constants import RunCollector, Runs
from weightbridge.probe.difference import SparseEntries

__all__ = ["BitWords", "Numbered"]

_NO_WRITE, _OTHER = 2, 3
"""What an element without a number is, beside the constants 0 and 1."""


class Numbered(NamedTuple):
    """What all passes tell of one field. entries: second differences of g + 1, for each modulus. runs: elements that are
    no copies. computed: position in the field of the first element that is neither, or None."""

    entries: list[SparseEntries]
    runs: Runs
    computed: int | None


class BitWords:
    """The words of one field of [rows, cols] bools."""

    def __init__(self, table: BitTable, rows: int, cols: int) -> None:
        self._table = table
        self._words = np.zeros((rows, cols), dtype=np.uint64)
        self._no_bool = np.zeros((rows, cols), dtype=np.bool_)

    def add(self, pass_: int, raw: npt.NDArray[np.unsignedinteger]) -> None:
        """Put in what a pass shows: [rows, cols] of 0 and 1; an element with other bits, ever, is computed."""
        self._no_bool |= raw > 1
        self._words |= (raw != 0).astype(np.uint64) << np.uint64(pass_)

    def numbered(self) -> Numbered:
        """After the last pass of the table."""
        table, words = self._table, self._words
        low = np.uint64((1 << table.num_bits) - 1)
        number = (words >> np.uint64(1)) & low
        inverse = words >> np.uint64(1 + table.num_bits)
        copied = (words & np.uint64(1) == 1) & (number ^ inverse == low) & (number < table.numel)
        copied &= ~self._no_bool
        kinds = np.full(words.shape, _OTHER, dtype=np.uint8)
        never_written = sum(1 << k for k in range(1, table.num_passes, 2))
        for kind, word in ((0, 0), (1, (1 << table.num_passes) - 1), (_NO_WRITE, never_written)):
            kinds[(words == np.uint64(word)) & ~self._no_bool] = kind
        collector = RunCollector(_NO_WRITE)
        if not copied.all():
            collector.add(0, kinds, ~copied)
        computed = np.flatnonzero(~copied & (kinds == _OTHER))
        index = np.where(copied, number.astype(np.int64) + 1, 0)
        entries = [_differences(index, p) for p in table.moduli]
        return Numbered(entries, collector.finish(), int(computed[0]) if len(computed) else None)


def _differences(index: npt.NDArray[Any], modulus: int) -> SparseEntries:
    """Second differences along both dims, from zeros before the first row and column."""
    padded = np.pad(index % modulus, ((2, 0), (2, 0)))
    second = np.diff(np.diff(padded, n=2, axis=0), n=2, axis=1) % modulus
    row, col = np.nonzero(second)
    return SparseEntries(row.astype(np.int64), col.astype(np.int64), second[row, col])
