"""The native kernels: C behind cffi. Bit for bit what reference.py does, at memory speed."""

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
    """table: what C is given; records: the memory its pointers lead to, kept alive here."""

    table: Any
    records: tuple[npt.NDArray[np.uint8], ...]


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
        result = self._ffi.new("wb_table *")
        self._lib.wb_prepare(*inputs, result)
        sizes = (
            result.num_runs * self._ffi.sizeof("wb_run"),
            result.num_copies * self._ffi.sizeof("wb_copy"),
            (result.num_batches + 1) * self._ffi.sizeof("wb_batch"),
        )
        records = tuple(np.empty(max(size, 8), dtype=np.uint8) for size in sizes)
        result.runs, result.copies, result.batches = (
            cast(f"{kind} *", part.ctypes.data)
            for kind, part in zip(("wb_run", "wb_copy", "wb_batch"), records, strict=True)
        )
        self._lib.wb_prepare(*inputs, result)
        result.streaming = result.total_bytes >= STREAMING_TABLE_BYTES
        result.num_threads = self._num_threads if result.total_bytes >= THREADED_TABLE_BYTES else 1
        return _Prepared(table=result, records=records)

    def launch(self, prepared: _Prepared) -> Ticket:
        """Run the table without the GIL; everything is in place on return."""
        self._lib.wb_launch(prepared.table)
        return DoneTicket()
