"""The reference kernels: NumPy, one row after the other. This file is the specification of every other implementation."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightbridge.kernels.base import Buffer, DoneTicket, Kernels, Ticket
from weightbridge.kernels.bounds import check_table
from weightbridge.program.program import Op

__all__ = ["ReferenceKernels", "cast"]

_Bytes = npt.NDArray[np.uint8]
_Prepared = tuple[npt.NDArray[np.void], list[_Bytes], list[_Bytes]]


class ReferenceKernels(Kernels):
    """Runs a table with strided NumPy views. A row's own destination elements must not overlap each other, nor its source."""

    name = "reference"

    def prepare(
        self, table: npt.NDArray[np.void], sources: Sequence[Buffer], destinations: Sequence[Buffer]
    ) -> _Prepared:
        """Check the table and keep byte views of the buffers. See `Kernels.prepare`."""
        check_table(table, sources, destinations)
        return table.copy(), [_view(b) for b in sources], [_view(b) for b in destinations]

    def launch(self, prepared: _Prepared) -> Ticket:
        """Run all rows in order; everything is in place on return."""
        table, sources, destinations = prepared
        for row in table:
            if (row["count"] == 0).any():
                continue
            op, size = int(row["op"]), int(row["itemsize"])
            source = _strided(sources[row["src_buffer"]], row["src_offset"], row["count"], row["src_stride"], size)
            values = source if op == Op.COPY else cast(op, np.ascontiguousarray(source))
            target = _strided(
                destinations[row["dst_buffer"]], row["dst_offset"], row["count"], row["dst_stride"], values.shape[-1]
            )
            target[...] = values
        return DoneTicket()


def _view(buffer: Buffer) -> _Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * buffer.nbytes).from_address(buffer.address))


def _strided(
    memory: _Bytes, offset: int, count: npt.NDArray[np.int64], stride: npt.NDArray[np.int64], size: int
) -> _Bytes:
    """The elements as [*count, size] bytes; bytes as the last axis make unaligned elements a matter of course."""
    elements: _Bytes = np.ndarray(
        shape=(*count.tolist(), size),
        dtype=np.uint8,
        buffer=memory,
        offset=int(offset),
        strides=(*stride.tolist(), 1),
    )
    return elements


def cast(op: int, values: _Bytes) -> _Bytes:
    """Cast elements given and returned as bytes on the last axis. values must be contiguous.

    Narrowing rounds to nearest, ties to even; beyond the largest finite value it gives infinity; subnormal results are
    kept. NaN stays NaN: sign kept, upper payload bits kept, made quiet (BF16_TO_F32 alone keeps all bits).
    """
    if op == Op.F32_TO_BF16:
        out: npt.NDArray[np.generic] = _f32_to_bf16(values.view(np.uint32))
    elif op == Op.BF16_TO_F32:
        out = values.view(np.uint16).astype(np.uint32) << np.uint32(16)
    elif op == Op.F32_TO_F16:
        out = _f32_to_f16(values.view(np.uint32))
    elif op == Op.F16_TO_F32:
        out = _f16_to_f32(values.view(np.uint16))
    elif op == Op.BF16_TO_F16:
        out = _f32_to_f16(values.view(np.uint16).astype(np.uint32) << np.uint32(16))
    elif op == Op.F16_TO_BF16:
        out = _f32_to_bf16(_f16_to_f32(values.view(np.uint16)))
    elif op == Op.F64_TO_F32:
        out = _f64_to_f32(values.view(np.uint64))
    elif op == Op.F32_TO_F64:
        out = _f32_to_f64(values.view(np.uint32))
    elif op == Op.F64_TO_BF16:
        out = _f32_to_bf16(_f64_to_f32(values.view(np.uint64)))
    elif op == Op.BF16_TO_F64:
        out = _f32_to_f64(values.view(np.uint16).astype(np.uint32) << np.uint32(16))
    elif op == Op.F64_TO_F16:
        out = _f32_to_f16(_f64_to_f32(values.view(np.uint64)))
    else:
        out = _f32_to_f64(_f16_to_f32(values.view(np.uint16)))
    return out.view(np.uint8)


def _f32_to_bf16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    out: npt.NDArray[np.uint16] = np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)
    return out


def _f32_to_f16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = bits.view(np.float32).astype(np.float16).view(np.uint16)
    quiet = (
        ((bits >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7E00) | ((bits >> np.uint32(13)) & np.uint32(0x1FF))
    )
    return np.where(nan, quiet.astype(np.uint16), rounded)


def _f16_to_f32(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint32]:
    nan = (bits & np.uint16(0x7FFF)) > np.uint16(0x7C00)
    with np.errstate(invalid="ignore"):
        wide = bits.view(np.float16).astype(np.float32).view(np.uint32)
    long = bits.astype(np.uint32)
    quiet = (
        ((long & np.uint32(0x8000)) << np.uint32(16))
        | np.uint32(0x7FC00000)
        | ((long & np.uint32(0x1FF)) << np.uint32(13))
    )
    return np.where(nan, quiet, wide)


def _f64_to_f32(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    nan = (bits & np.uint64(0x7FFFFFFFFFFFFFFF)) > np.uint64(0x7FF0000000000000)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = bits.view(np.float64).astype(np.float32).view(np.uint32)
    quiet = (
        ((bits >> np.uint64(32)) & np.uint64(0x80000000))
        | np.uint64(0x7FC00000)
        | ((bits >> np.uint64(29)) & np.uint64(0x3FFFFF))
    )
    return np.where(nan, quiet.astype(np.uint32), rounded)


def _f32_to_f64(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    with np.errstate(invalid="ignore"):
        wide = bits.view(np.float32).astype(np.float64).view(np.uint64)
    long = bits.astype(np.uint64)
    quiet = (
        ((long & np.uint64(0x80000000)) << np.uint64(32))
        | np.uint64(0x7FF8000000000000)
        | ((long & np.uint64(0x3FFFFF)) << np.uint64(29))
    )
    return np.where(nan, quiet, wide)
