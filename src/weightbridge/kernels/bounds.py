"""Checks of a descriptor table against the memory it is bound to. Shared by all kernels; vectorised over rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UsageError
from weightbridge.kernels.base import Buffer
from weightbridge.program.program import DESCRIPTOR, Op

__all__ = ["DESTINATION_ITEMSIZE", "check_table"]

_SOURCE_ITEMSIZE = {
    Op.F32_TO_BF16: 4,
    Op.BF16_TO_F32: 2,
    Op.F32_TO_F16: 4,
    Op.F16_TO_F32: 2,
    Op.BF16_TO_F16: 2,
    Op.F16_TO_BF16: 2,
    Op.F64_TO_F32: 8,
    Op.F32_TO_F64: 4,
    Op.F64_TO_BF16: 8,
    Op.BF16_TO_F64: 2,
    Op.F64_TO_F16: 8,
    Op.F16_TO_F64: 2,
}

DESTINATION_ITEMSIZE = {
    Op.F32_TO_BF16: 2,
    Op.BF16_TO_F32: 4,
    Op.F32_TO_F16: 2,
    Op.F16_TO_F32: 4,
    Op.BF16_TO_F16: 2,
    Op.F16_TO_BF16: 2,
    Op.F64_TO_F32: 4,
    Op.F32_TO_F64: 8,
    Op.F64_TO_BF16: 2,
    Op.BF16_TO_F64: 8,
    Op.F64_TO_F16: 2,
    Op.F16_TO_F64: 8,
}
"""Bytes of a destination element of each cast; a COPY keeps the descriptor's itemsize."""

_LIMIT = float(1 << 62)


def check_table(
    table: npt.NDArray[np.void], sources: Sequence[Buffer], destinations: Sequence[Buffer], device: int | None = None
) -> None:
    """Raise UsageError, naming the first bad row and both numbers, unless every row stays inside its two buffers.

    device: whose memory both must be; None: the CPU's. A row with a count of 0 moves nothing: its offsets are not checked,
    everything else is.
    """
    if table.dtype != DESCRIPTOR or table.ndim != 1:
        raise UsageError(f"a descriptor table is a 1-D array of program.DESCRIPTOR, found {table.ndim}-D {table.dtype}")
    if len(table) == 0:
        return
    op, itemsize = table["op"], table["itemsize"]
    last = max(_SOURCE_ITEMSIZE)
    known = (op >= Op.COPY) & (op <= last)
    _refuse(~known, lambda i: f"op {op[i]} is not known; known are {Op.COPY} to {last}")
    source_size, destination_size = itemsize.astype(np.int64), itemsize.astype(np.int64)
    expected = itemsize.copy()
    for code, size in _SOURCE_ITEMSIZE.items():
        expected[op == code] = size
        destination_size[op == code] = DESTINATION_ITEMSIZE[code]
    _refuse(itemsize != expected, lambda i: f"op {op[i]} needs itemsize {expected[i]}, found {itemsize[i]}")
    _refuse(itemsize < 1, lambda i: f"itemsize is {itemsize[i]}, expected at least 1")
    _check_devices("source", table["src_buffer"], sources, device)
    _check_devices("destination", table["dst_buffer"], destinations, device)
    count = table["count"]
    _refuse(np.any(count < 0, axis=1), lambda i: f"counts {count[i].tolist()} must not be negative")
    empty: npt.NDArray[np.bool_] = np.any(count == 0, axis=1)
    _check_side(
        "source", table["src_buffer"], table["src_offset"], table["src_stride"], count, source_size, empty, sources
    )
    _check_side(
        "destination",
        table["dst_buffer"],
        table["dst_offset"],
        table["dst_stride"],
        count,
        destination_size,
        empty,
        destinations,
    )


def _check_devices(side: str, buffer: npt.NDArray[np.int32], buffers: Sequence[Buffer], device: int | None) -> None:
    """What lies on another device is no address at all here. Numbers beyond the buffers are left to `_check_side`."""
    elsewhere = np.array([b.device != device for b in buffers] or [False])
    bad = elsewhere[np.clip(buffer, 0, len(elsewhere) - 1)]

    def describe(i: int) -> str:
        return f"{side} buffer {buffer[i]} is memory of {_place(buffers[buffer[i]].device)}, the kernels' is {_place(device)}"

    _refuse(bad, describe)


def _place(device: int | None) -> str:
    return "the CPU" if device is None else f"cuda:{device}"


def _check_side(
    side: str,
    buffer: npt.NDArray[np.int32],
    offset: npt.NDArray[np.int64],
    stride: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    size: npt.NDArray[np.int64],
    empty: npt.NDArray[np.bool_],
    buffers: Sequence[Buffer],
) -> None:
    outside = (buffer < 0) | (buffer >= len(buffers))
    _refuse(outside, lambda i: f"{side} buffer is number {buffer[i]}, but only {len(buffers)} are bound")
    capacity = np.array([b.nbytes for b in buffers], dtype=np.int64)[buffer]
    # An absurd stride must not wrap around int64 and look harmless: a float copy of the same sum shows it.
    reach = np.abs(stride).astype(np.float64) * np.maximum(count - 1, 0)
    absurd = ~empty & (np.abs(offset).astype(np.float64) + reach.sum(axis=1) + size > _LIMIT)
    _refuse(absurd, lambda i: f"{side} offset {offset[i]} and strides {stride[i].tolist()} leave the address space")
    with np.errstate(over="ignore"):
        span = stride * np.maximum(count - 1, 0)
        first = offset + np.minimum(span, 0).sum(axis=1)
        last = offset + np.maximum(span, 0).sum(axis=1) + size
    _refuse(~empty & (first < 0), lambda i: f"{side} begins at byte {first[i]}, before byte 0 of buffer {buffer[i]}")
    _refuse(
        ~empty & (last > capacity),
        lambda i: f"{side} ends at byte {last[i]}, but buffer {buffer[i]} has {capacity[i]} bytes",
    )


def _refuse(bad: npt.NDArray[np.bool_], describe: Callable[[int], str]) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise UsageError(
            f"descriptor row {row}: {describe(row)}; the table belongs to other memory or is damaged", row=row
        )
