"""Second differences of fields of coded elements in C: what the probe reads after a coded load, at memory speed.

`probe/difference.py` and `probe/constants.py` are the specification. Plain arrays of bits and plain numbers go in here, so
that the probe decides what is a code.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UsageError
from weightbridge.kernels.native import load_native

__all__ = ["FoundDifferences", "NativeDifferencer", "native_differences_available"]

MAX_MODULUS = 1 << 14
"""Moduli are below it: |a - 2b + c| of residues then fits 16-bit lanes."""

_BLOCK = 1024
_MIN_ROOM = 1 << 16


def native_differences_available() -> bool:
    """Whether the extension was built, by a version that has this kernel."""
    module = load_native()
    return module is not None and hasattr(module.lib, "wb_difference")


class FoundDifferences(NamedTuple):
    """What some further rows left behind; positions are row * cols + col, ascending.

    position, residue: non-zero second differences modulo p, in [1, p). run_start, run_length, run_bits: elements that hold
    no code, as runs of equal raw bits; a run may go on in the next piece.
    """

    position: npt.NDArray[np.int64]
    residue: npt.NDArray[np.int64]
    run_start: npt.NDArray[np.int64]
    run_length: npt.NDArray[np.int64]
    run_bits: npt.NDArray[np.uint64]


class NativeDifferencer:
    """Takes the rows of one field from top to bottom. Not for several threads at once.

    first_bits, bit_step: the code of residue c is the raw word (first_bits + c) << bit_step. wide: use wider vector
    instructions where the processor has them; tests turn it off. Memory: 5 bytes a column, and room for what some rows leave
    behind. Raises UsageError when the extension was not built or the modulus is too large.
    """

    def __init__(
        self, *, cols: int, modulus: int, first_bits: int, bit_step: int, numel: int, wide: bool = True
    ) -> None:
        if not native_differences_available():
            raise UsageError("the native kernels were not built; install a C compiler and reinstall")
        if not 1 < modulus < MAX_MODULUS:
            raise UsageError(f"the modulus is {modulus}, expected 2 to {MAX_MODULUS - 1}")
        module = load_native()
        self._ffi, self._lib = module.ffi, module.lib  # type: ignore[union-attr]
        self._wide = wide
        room = max(cols, min(cols + _MIN_ROOM, numel))
        self._state: list[npt.NDArray[Any]] = [
            np.zeros(cols, np.uint16), np.zeros(cols, np.uint16), np.zeros(-(-cols // _BLOCK), np.uint8),
        ]  # fmt: skip
        self._entries = (np.empty(room, np.int64), np.empty(room, np.uint16))
        self._runs = (np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint64))
        self._field = self._ffi.new("wb_field *")
        for name, array in zip(
            (
                "predicted",
                "slope",
                "was_slow",
                "entry_position",
                "entry_residue",
                "run_start",
                "run_length",
                "run_bits",
            ),
            (*self._state, *self._entries, *self._runs),
            strict=True,
        ):
            setattr(self._field, name, self._ffi.cast(self._ffi.typeof(getattr(self._field, name)), array.ctypes.data))
        self._field.cols, self._field.modulus = cols, modulus
        self._field.first, self._field.shift = first_bits, bit_step
        self._field.max_entries = self._field.max_runs = room
        self._next_row = 0

    def push(self, raw: npt.NDArray[np.unsignedinteger]) -> Iterator[FoundDifferences]:
        """Difference the next rows, [n, cols] raw bits of any strides; the GIL is released meanwhile.

        Yields what was found whenever the room for it is used up, and at the end. Reads `raw` in place: the caller keeps it
        unchanged until the iterator is done.
        """
        field = self._field
        if raw.ndim != 2 or raw.shape[1] != field.cols or raw.dtype.itemsize not in (1, 2, 4, 8):
            raise UsageError(f"rows are {raw.shape} of {raw.dtype}, expected [n, {field.cols}] of unsigned integers")
        field.start = self._ffi.cast("char *", raw.ctypes.data)
        field.rows, field.first_row, field.itemsize = len(raw), self._next_row, raw.dtype.itemsize
        field.row_step, field.col_step = raw.strides
        done = 0
        while done < len(raw):
            field.num_entries = field.num_runs = 0
            done = self._lib.wb_difference(field, done, self._wide)
            num_entries, num_runs = field.num_entries, field.num_runs
            yield FoundDifferences(
                self._entries[0][:num_entries].copy(),
                self._entries[1][:num_entries].astype(np.int64),
                *(column[:num_runs].copy() for column in self._runs),
            )
        self._next_row += len(raw)
