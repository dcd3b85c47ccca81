"""What a loader is given: coded checkpoints, and a pseudo-random one of ordinary values to verify with.

Every tensor is made when it is asked for and is the loader's own: it may keep, change or free it. Contents depend on the
spec, the pass and the seed alone, so that a load that is collective agrees on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightbridge.checkpoint.dtypes import DType
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.probe.codes import CodeTables

__all__ = ["VerificationValues", "cast_bits", "coded_tensors", "describe_bits", "torch_dtype", "verification_tensors"]

_POOL_NUMEL = 1 << 20
_CHUNK_NUMEL = 1 << 14
_ZERO_EVERY = 13
_MIN_EXPONENT, _EXPONENT_BITS = -6, 3  # magnitudes from 2**-6 to 2**2: a model's weights, and w + 1 differs from w


def torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.torch_name)
    return found


def coded_tensors(spec: CheckpointSpec, tables: CodeTables, pass_: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of one coded pass, in spec order, one tensor in memory at a time."""
    for position, tensor in enumerate(spec.tensors):
        if tensor.name in spec.constants:
            yield tensor.name, _constant(tensor, spec.constants[tensor.name])
            continue
        bits = np.empty(tensor.numel, dtype=tensor.dtype.bits)
        table = tables.of(tensor.dtype)
        table.encode(tensor.dtype, pass_, int(table.offsets[position]), bits)
        yield tensor.name, _tensor(bits, tensor)


def verification_tensors(spec: CheckpointSpec, values: VerificationValues) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of the verification load, in spec order, one tensor in memory at a time."""
    for position, tensor in enumerate(spec.tensors):
        if tensor.name in spec.constants:
            yield tensor.name, _constant(tensor, spec.constants[tensor.name])
        else:
            yield tensor.name, _tensor(values.bits(position, 0, tensor.numel), tensor)


class VerificationValues:
    """Pseudo-random checkpoint values by index: random sign and full mantissa, exponents of ordinary weights.

    zeros: every so many elements are zero, which no code is; without them "is not zero" looks like a constant.
    Chunks of a pool of random words, each from a place and with a mask that depend on the chunk's number, so that any
    part of a tensor can be had again at the speed of a copy.
    """

    def __init__(self, spec: CheckpointSpec, seed: int, *, zeros: bool = False) -> None:
        self._spec = spec
        self._seed = seed
        self._zeros = zeros
        self._pools: dict[str, npt.NDArray[Any]] = {}
        # Chunks of a large checkpoint begin at distinct places of a large pool; a small one has few chunks.
        self._num_places = _POOL_NUMEL if spec.numel > _CHUNK_NUMEL else 1 << 10

    def bits(self, tensor: int, lo: int, hi: int) -> npt.NDArray[Any]:
        """Raw bits of elements [lo, hi) of a checkpoint tensor, flat, in a fresh array."""
        dtype = self._spec.tensors[tensor].dtype
        pool = self._pool(dtype)
        out = np.empty(hi - lo, dtype=dtype.bits)
        first = int(self._spec.numel_offsets[tensor]) + lo
        chunks = np.arange(first // _CHUNK_NUMEL, (first + hi - lo + _CHUNK_NUMEL - 1) // _CHUNK_NUMEL, dtype=np.uint64)
        mixed = _mix(chunks, self._seed)
        places = (mixed % np.uint64(self._num_places)).tolist()
        masks = ((mixed >> np.uint64(20)) & np.uint64(_free_mask(dtype))).astype(dtype.bits)
        for place, mask, chunk in zip(places, masks, chunks.tolist(), strict=True):
            begin = max(chunk * _CHUNK_NUMEL, first)
            end = min((chunk + 1) * _CHUNK_NUMEL, first + hi - lo)
            shift = place - chunk * _CHUNK_NUMEL
            np.bitwise_xor(pool[begin + shift : end + shift], mask, out=out[begin - first : end - first])
        if self._zeros and dtype.name not in ("BOOL", "F8_E8M0"):  # half of bools are, and no power of two is
            out[(self._seed - first) % _ZERO_EVERY :: _ZERO_EVERY] = 0
        return out

    def _pool(self, dtype: DType) -> npt.NDArray[Any]:
        if dtype.name not in self._pools:
            generator = np.random.Generator(np.random.PCG64([self._seed, dtype.itemsize, dtype.mantissa_bits]))
            words = generator.integers(0, 1 << 64, size=self._num_places + _CHUNK_NUMEL, dtype=np.uint64)
            fields = words & np.uint64(_free_mask(dtype))
            if dtype.is_float and dtype.mantissa_bits:
                exponents = (words >> np.uint64(54)) & np.uint64((1 << _EXPONENT_BITS) - 1)
                biased = exponents + np.uint64(_MIN_EXPONENT - dtype.min_exponent + 1)
                fields |= biased << np.uint64(dtype.mantissa_bits)
            self._pools[dtype.name] = fields.astype(dtype.bits)
        return self._pools[dtype.name]


def _free_mask(dtype: DType) -> int:
    """Bits that any value may have: sign and mantissa of a float, all of an integer, which may be packed."""
    if dtype.name == "BOOL":
        return 1
    if not dtype.is_float:
        return (1 << 8 * dtype.itemsize) - 1
    if not dtype.mantissa_bits:
        return 0x7F  # powers of two and nothing else, up to 1
    return (1 << dtype.mantissa_bits) - 1 | 1 << (8 * dtype.itemsize - 1)


def _mix(numbers: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """A well mixed 64-bit word per number (the finaliser of SplitMix64)."""
    with np.errstate(over="ignore"):
        z = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64((seed * 0xD1342543DE82EF95 + 1) & (1 << 64) - 1)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
        return mixed


def _constant(tensor: TensorSpec, value: float) -> torch.Tensor:
    return torch.full(tensor.shape, value, dtype=torch.float64).to(torch_dtype(tensor.dtype))


def _tensor(bits: npt.NDArray[Any], tensor: TensorSpec) -> torch.Tensor:
    return _from_bits(bits, tensor.dtype).reshape(tensor.shape)


def _from_bits(bits: npt.NDArray[Any], dtype: DType) -> torch.Tensor:
    signed = bits.view(np.uint8 if dtype.itemsize == 1 else np.dtype(f"<i{dtype.itemsize}"))
    return torch.from_numpy(signed).view(torch_dtype(dtype))


def cast_bits(bits: npt.NDArray[Any], source: DType, target: DType) -> npt.NDArray[Any]:
    """Raw bits after a cast to another dtype, rounded to nearest even; the same array when there is none to make."""
    if source.name == target.name:
        return bits
    cast = _from_bits(np.ascontiguousarray(bits).reshape(-1), source).to(torch_dtype(target))
    whole = cast.view(torch.uint8 if target.itemsize == 1 else getattr(torch, f"int{8 * target.itemsize}"))
    result: npt.NDArray[Any] = whole.numpy().view(target.bits).reshape(bits.shape)
    return result


def describe_bits(bits: int, dtype: DType) -> str:
    """A raw value as people read it, with its bits."""
    value = _from_bits(np.array([bits], dtype=dtype.bits), dtype).item()
    return f"{value} (bits {bits:#0{2 + 2 * dtype.itemsize}x})"
