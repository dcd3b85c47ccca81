"""The native kernels: one C file behind cffi. Bit for bit what reference.py does, at memory speed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UsageError
from weightbridge.kernels.base import Buffer, DoneTicket, Kernels, Ticket
from weightbridge.kernels.bounds import check_table

__all__ = ["STREAMING_TABLE_BYTES", "THREADED_TABLE_BYTES", "NativeKernels", "load_native"]

STREAMING_TABLE_BYTES = 16 << 20
"""From this size on a table's long runs bypass the cache: nothing of its beginning would be left there at its end."""

THREADED_TABLE_BYTES = 4 << 20
"""From this size on a table is worth a second thread."""


def load_native() -> Any | None:
    """The compiled module, or None where it was not built. Any failure to load it counts as not built."""
    try:
        return importlib.import_module("weightbridge.kernels._native")
    except ImportError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """copies, batches: memory that the C pointers lead to; kept alive here."""

    copies: npt.NDArray[np.uint8]
    batches: npt.NDArray[np.int64]
    pointers: tuple[Any, Any]
    num_batches: int
    streaming: bool
    num_threads: int


class NativeKernels(Kernels):
    """num_threads: most threads of one launch, the caller's included; only tables of some MiB use more than one.

    None means two, or one on a single core: a second core still adds memory bandwidth, further ones belong to the engine.
    Raises UsageError when the extension was not built.
    """

    name = "native"

    def __init__(self, num_threads: int | None = None) -> None:
        module = load_native()
        if module is None:
            raise UsageError(
                "the native kernels were not built; install a C compiler and reinstall, or choose the kernels 'reference'"
            )
        self._ffi, self._lib = module.ffi, module.lib
        self._num_threads = num_threads if num_threads is not None else min(2, os.cpu_count() or 1)
        if not 1 <= self._num_threads <= 16:
            raise UsageError(f"num_threads is {self._num_threads}, expected 1 to 16")

    def prepare(
        self, table: npt.NDArray[np.void], sources: Sequence[Buffer], destinations: Sequence[Buffer]
    ) -> _Prepared:
        """Check the table, resolve addresses, merge axes, cut and batch. See `Kernels.prepare`."""
        check_table(table, sources, destinations)
        cast = self._ffi.cast
        rows = np.ascontiguousarray(table)
        addresses = [np.array([b.address for b in side] or [0], dtype=np.uint64) for side in (sources, destinations)]
        inputs = (
            cast("wb_row *", rows.ctypes.data), len(rows),
            cast("uint64_t *", addresses[0].ctypes.data), cast("uint64_t *", addresses[1].ctypes.data),
        )  # fmt: skip
        total, num_batches = self._ffi.new("int64_t *"), self._ffi.new("int64_t *")
        num = self._lib.wb_prepare(*inputs, self._ffi.NULL, self._ffi.NULL, num_batches, total)
        copies = np.empty(num * self._ffi.sizeof("wb_copy"), dtype=np.uint8)
        batches = np.empty(num + 1, dtype=np.int64)
        pointers = (cast("wb_copy *", copies.ctypes.data), cast("int64_t *", batches.ctypes.data))
        self._lib.wb_prepare(*inputs, *pointers, num_batches, total)
        return _Prepared(
            copies=copies,
            batches=batches,
            pointers=pointers,
            num_batches=num_batches[0],
            streaming=total[0] >= STREAMING_TABLE_BYTES,
            num_threads=self._num_threads if total[0] >= THREADED_TABLE_BYTES else 1,
        )

    def launch(self, prepared: _Prepared) -> Ticket:
        """Run the table without the GIL; everything is in place on return."""
        self._lib.wb_launch(*prepared.pointers, prepared.num_batches, prepared.streaming, prepared.num_threads)
        return DoneTicket()
