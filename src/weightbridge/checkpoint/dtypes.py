"""The element types a checkpoint can hold, without torch.

Names follow safetensors headers ("BF16"); every layer below `probe/` speaks of dtypes by these names.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightbridge.errors import SpecError

__all__ = ["DType", "dtype_named", "dtype_of_torch_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One element type.

    name: safetensors name. itemsize: bytes per element. torch_name: attribute of the torch module.
    bits: unsigned NumPy type of the same size, in which raw values are handled.
    mantissa_bits, min_exponent, max_exponent: of its *normal* values, unbiased, for floats; 0 for others.
    """

    name: str
    itemsize: int
    torch_name: str
    is_float: bool
    mantissa_bits: int = 0
    min_exponent: int = 0
    max_exponent: int = 0

    @property
    def bits(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(f"<u{self.itemsize}")

    @property
    def largest_bits(self) -> int:
        """Raw bits of a positive value up to which all of 1, 2, 3, ... stand for finite values."""
        if not self.is_float:
            return (1 << (8 * self.itemsize - 1)) - 1
        return ((self.max_exponent - self.min_exponent + 2) << self.mantissa_bits) - 1

    def is_nan(self, bits: int) -> bool:
        """Whether raw bits are a NaN, for floats of two bytes and more; narrower ones and integers are never said to be."""
        if not self.is_float or self.itemsize < 2:
            return False
        return bits & ((1 << (8 * self.itemsize - 1)) - 1) > self.largest_bits + 1


_TABLE = (
    DType(
        name="F64",
        itemsize=8,
        torch_name="float64",
        is_float=True,
        mantissa_bits=52,
        min_exponent=-1022,
        max_exponent=1023,
    ),
    DType(
        name="F32",
        itemsize=4,
        torch_name="float32",
        is_float=True,
        mantissa_bits=23,
        min_exponent=-126,
        max_exponent=127,
    ),
    DType(
        name="BF16",
        itemsize=2,
        torch_name="bfloat16",
        is_float=True,
        mantissa_bits=7,
        min_exponent=-126,
        max_exponent=127,
    ),
    DType(
        name="F16", itemsize=2, torch_name="float16", is_float=True, mantissa_bits=10, min_exponent=-14, max_exponent=15
    ),
    DType(
        name="F8_E4M3",
        itemsize=1,
        torch_name="float8_e4m3fn",
        is_float=True,
        mantissa_bits=3,
        min_exponent=-6,
        max_exponent=7,
    ),
    DType(
        name="F8_E5M2",
        itemsize=1,
        torch_name="float8_e5m2",
        is_float=True,
        mantissa_bits=2,
        min_exponent=-14,
        max_exponent=15,
    ),
    DType(
        name="F8_E4M3FNUZ",
        itemsize=1,
        torch_name="float8_e4m3fnuz",
        is_float=True,
        mantissa_bits=3,
        min_exponent=-7,
        max_exponent=7,
    ),
    DType(
        name="F8_E5M2FNUZ",
        itemsize=1,
        torch_name="float8_e5m2fnuz",
        is_float=True,
        mantissa_bits=2,
        min_exponent=-15,
        max_exponent=15,
    ),
    # Powers of two without a sign, the scales of microscaling formats.
    DType(name="F8_E8M0", itemsize=1, torch_name="float8_e8m0fnu", is_float=True, min_exponent=-126, max_exponent=127),
    DType(name="I64", itemsize=8, torch_name="int64", is_float=False),
    DType(name="I32", itemsize=4, torch_name="int32", is_float=False),
    DType(name="I16", itemsize=2, torch_name="int16", is_float=False),
    DType(name="I8", itemsize=1, torch_name="int8", is_float=False),
    DType(name="U64", itemsize=8, torch_name="uint64", is_float=False),
    DType(name="U32", itemsize=4, torch_name="uint32", is_float=False),
    DType(name="U16", itemsize=2, torch_name="uint16", is_float=False),
    DType(name="U8", itemsize=1, torch_name="uint8", is_float=False),
    DType(name="BOOL", itemsize=1, torch_name="bool", is_float=False),
)
_BY_NAME = {d.name: d for d in _TABLE}
_BY_TORCH_NAME = {d.torch_name: d for d in _TABLE}


def dtype_named(name: str) -> DType:
    """The dtype with this safetensors name. Raises SpecError naming the known ones."""
    found = _BY_NAME.get(name)
    if found is None:
        raise SpecError(f"dtype {name!r} is not known; known are {', '.join(sorted(_BY_NAME))}", dtype=name)
    return found


def dtype_of_torch_name(name: str) -> DType:
    """The dtype of `str(tensor.dtype)`, with or without the "torch." prefix. Raises SpecError."""
    found = _BY_TORCH_NAME.get(name.removeprefix("torch."))
    if found is None:
        raise SpecError(f"torch dtype {name!r} is not known; known are {', '.join(sorted(_BY_TORCH_NAME))}", dtype=name)
    return found
