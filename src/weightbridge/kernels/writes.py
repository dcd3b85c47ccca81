"""Contiguous copies between two pieces of memory: what a transport inside a machine does for a post."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from weightbridge.kernels.base import Buffer
from weightbridge.kernels.native import load_native

__all__ = ["copy_writes"]


def copy_writes(source: Buffer, destination: Buffer, writes: npt.NDArray[np.int64]) -> None:
    """Copy each row (source offset, destination offset, bytes) of `writes` [N, 3]; the GIL is released meanwhile.

    The caller has checked the offsets. On return the bytes are visible to other processes that map the destination.
    """
    module = load_native()
    if module is None:
        for local, remote, nbytes in writes.tolist():
            ctypes.memmove(destination.address + remote, source.address + local, nbytes)
        return
    rows = np.ascontiguousarray(writes, dtype=np.int64)
    cast = module.ffi.cast
    module.lib.wb_copy_writes(
        cast("char *", source.address),
        cast("char *", destination.address),
        cast("int64_t *", rows.ctypes.data),
        len(rows),
    )
