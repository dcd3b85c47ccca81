"""The device code of the Triton kernels: one program moves one piece of one row of `device_table`.

Functions here carry no annotations: Triton reads their text and looks up every name in it. Each cast is written as the
reference writes it, on bits, so that NaN keeps what it has to; only rounding is left to the hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weightbridge.kernels.device_table import AXES, FIRST_CAST, ROW_WIDTH, UNALIGNED

__all__ = ["run_piece"]

_AXES = tl.constexpr(AXES)
_ROW_WIDTH = tl.constexpr(ROW_WIDTH)
_FIRST_CAST = tl.constexpr(FIRST_CAST)
_UNALIGNED = tl.constexpr(UNALIGNED)


@triton.jit
def _f32_to_bf16(bits):
    """uint32 to uint16, to nearest, ties to even; a NaN keeps sign and upper payload and is made quiet."""
    upper = bits >> 16
    rounded = (bits + 0x7FFF + (upper & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, upper | 0x40, rounded).to(tl.uint16)


@triton.jit
def _f32_to_f16(bits):
    rounded = bits.to(tl.float32, bitcast=True).to(tl.float16).to(tl.uint16, bitcast=True)
    quiet = ((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x1FF)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet.to(tl.uint16), rounded)


@triton.jit
def _f16_to_f32(bits):
    wide = bits.to(tl.float16, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True)
    long = bits.to(tl.uint32)
    quiet = ((long & 0x8000) << 16) | 0x7FC00000 | ((long & 0x1FF) << 13)
    return tl.where((long & 0x7FFF) > 0x7C00, quiet, wide)


@triton.jit
def _f64_to_f32(bits):
    rounded = bits.to(tl.float64, bitcast=True).to(tl.float32).to(tl.uint32, bitcast=True)
    quiet = ((bits >> 32) & 0x80000000) | 0x7FC00000 | ((bits >> 29) & 0x3FFFFF)
    return tl.where((bits & 0x7FFFFFFFFFFFFFFF) > 0x7FF0000000000000, quiet.to(tl.uint32), rounded)


@triton.jit
def _f32_to_f64(bits):
    wide = bits.to(tl.float32, bitcast=True).to(tl.float64).to(tl.uint64, bitcast=True)
    long = bits.to(tl.uint64)
    quiet = ((long & 0x80000000) << 32) | 0x7FF8000000000000 | ((long & 0x3FFFFF) << 29)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet, wide)


@triton.jit
def _bf16_to_f32(bits):
    return bits.to(tl.uint32) << 16


# Elements at any address: whole where they lie at multiples of their size, else byte by byte, lowest first.


@triton.jit
def _load_16(source, whole, inside):
    if whole:
        bits = tl.load(source.to(tl.pointer_type(tl.uint16)), mask=inside, other=0)
    else:
        bits = tl.load(source.to(tl.pointer_type(tl.uint8)), mask=inside, other=0).to(tl.uint16)
        for i in tl.static_range(1, 2):
            byte = tl.load((source + i).to(tl.pointer_type(tl.uint8)), mask=inside, other=0)
            bits |= byte.to(tl.uint16) << (8 * i)
    return bits


@triton.jit
def _store_16(target, bits, whole, inside):
    if whole:
        tl.store(target.to(tl.pointer_type(tl.uint16)), bits, mask=inside)
    else:
        for i in tl.static_range(2):
            tl.store((target + i).to(tl.pointer_type(tl.uint8)), (bits >> (8 * i)).to(tl.uint8), mask=inside)


@triton.jit
def _load_32(source, whole, inside):
    if whole:
        bits = tl.load(source.to(tl.pointer_type(tl.uint32)), mask=inside, other=0)
    else:
        bits = tl.load(source.to(tl.pointer_type(tl.uint8)), mask=inside, other=0).to(tl.uint32)
        for i in tl.static_range(1, 4):
            byte = tl.load((source + i).to(tl.pointer_type(tl.uint8)), mask=inside, other=0)
            bits |= byte.to(tl.uint32) << (8 * i)
    return bits


@triton.jit
def _store_32(target, bits, whole, inside):
    if whole:
        tl.store(target.to(tl.pointer_type(tl.uint32)), bits, mask=inside)
    else:
        for i in tl.static_range(4):
            tl.store((target + i).to(tl.pointer_type(tl.uint8)), (bits >> (8 * i)).to(tl.uint8), mask=inside)


@triton.jit
def _load_64(source, whole, inside):
    if whole:
        bits = tl.load(source.to(tl.pointer_type(tl.uint64)), mask=inside, other=0)
    else:
        bits = tl.load(source.to(tl.pointer_type(tl.uint8)), mask=inside, other=0).to(tl.uint64)
        for i in tl.static_range(1, 8):
            byte = tl.load((source + i).to(tl.pointer_type(tl.uint8)), mask=inside, other=0)
            bits |= byte.to(tl.uint64) << (8 * i)
    return bits


@triton.jit
def _store_64(target, bits, whole, inside):
    if whole:
        tl.store(target.to(tl.pointer_type(tl.uint64)), bits, mask=inside)
    else:
        for i in tl.static_range(8):
            tl.store((target + i).to(tl.pointer_type(tl.uint8)), (bits >> (8 * i)).to(tl.uint8), mask=inside)


@triton.jit
def _cast_from_16(kind, source, target, whole, inside):
    bits = _load_16(source, whole, inside)
    if kind == _FIRST_CAST + 2:
        _store_32(target, _bf16_to_f32(bits), whole, inside)
    elif kind == _FIRST_CAST + 4:
        _store_32(target, _f16_to_f32(bits), whole, inside)
    elif kind == _FIRST_CAST + 5:
        _store_16(target, _f32_to_f16(_bf16_to_f32(bits)), whole, inside)
    elif kind == _FIRST_CAST + 6:
        _store_16(target, _f32_to_bf16(_f16_to_f32(bits)), whole, inside)
    elif kind == _FIRST_CAST + 10:
        _store_64(target, _f32_to_f64(_bf16_to_f32(bits)), whole, inside)
    else:
        _store_64(target, _f32_to_f64(_f16_to_f32(bits)), whole, inside)


@triton.jit
def _cast_from_32(kind, source, target, whole, inside):
    bits = _load_32(source, whole, inside)
    if kind == _FIRST_CAST + 1:
        _store_16(target, _f32_to_bf16(bits), whole, inside)
    elif kind == _FIRST_CAST + 3:
        _store_16(target, _f32_to_f16(bits), whole, inside)
    else:
        _store_64(target, _f32_to_f64(bits), whole, inside)


@triton.jit
def _cast_from_64(kind, source, target, whole, inside):
    bits = _f64_to_f32(_load_64(source, whole, inside))
    if kind == _FIRST_CAST + 7:
        _store_32(target, bits, whole, inside)
    elif kind == _FIRST_CAST + 9:
        _store_16(target, _f32_to_bf16(bits), whole, inside)
    else:
        _store_16(target, _f32_to_f16(bits), whole, inside)


@triton.jit
def _copy(kind, source, target, inside):
    if kind == 0:
        byte = tl.load(source.to(tl.pointer_type(tl.uint8)), mask=inside, other=0)
        tl.store(target.to(tl.pointer_type(tl.uint8)), byte, mask=inside)
    elif kind == 1:
        half = tl.load(source.to(tl.pointer_type(tl.uint16)), mask=inside, other=0)
        tl.store(target.to(tl.pointer_type(tl.uint16)), half, mask=inside)
    elif kind == 2:
        word = tl.load(source.to(tl.pointer_type(tl.uint32)), mask=inside, other=0)
        tl.store(target.to(tl.pointer_type(tl.uint32)), word, mask=inside)
    else:
        long = tl.load(source.to(tl.pointer_type(tl.uint64)), mask=inside, other=0)
        tl.store(target.to(tl.pointer_type(tl.uint64)), long, mask=inside)


@triton.jit
def run_piece(rows, pieces, block_numel: tl.constexpr):
    """One piece: unravel its element numbers over the row's axes, innermost first, then move them."""
    piece = pieces + 2 * tl.program_id(0).to(tl.int64)
    row = rows + tl.load(piece) * _ROW_WIDTH
    element = tl.load(piece + 1) + tl.arange(0, block_numel).to(tl.int64)
    inside = element < tl.load(row + 3)
    source = tl.load(row) + tl.full([block_numel], 0, tl.int64)
    target = tl.load(row + 1) + tl.full([block_numel], 0, tl.int64)
    for axis in tl.static_range(_AXES - 1, -1, -1):
        count = tl.load(row + 4 + axis)
        if count > 1:
            index = element % count
            source += index * tl.load(row + 4 + _AXES + axis)
            target += index * tl.load(row + 4 + 2 * _AXES + axis)
            element = element // count
    kind = tl.load(row + 2)
    whole = kind < _UNALIGNED
    kind = kind % _UNALIGNED
    if kind < _FIRST_CAST:
        _copy(kind, source, target, inside)
    elif (kind == _FIRST_CAST + 1) | (kind == _FIRST_CAST + 3) | (kind == _FIRST_CAST + 8):
        _cast_from_32(kind, source, target, whole, inside)
    elif (kind == _FIRST_CAST + 7) | (kind == _FIRST_CAST + 9) | (kind == _FIRST_CAST + 11):
        _cast_from_64(kind, source, target, whole, inside)
    else:
        _cast_from_16(kind, source, target, whole, inside)
