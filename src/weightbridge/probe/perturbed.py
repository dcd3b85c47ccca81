"""Checkpoints made to find out what coded and random values cannot show.

Some differ from one another in chosen tensors only, and by more than rounding can hide.
A maximum hides whatever is not the largest, so that a perturbed tensor has to be larger than all others, and smaller, and
nearer to zero, in three loads. Ordinary values lie between 2**-6 and 2**2 in magnitude (`VerificationValues`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.dtypes import DType
from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.probe.codes import CodeTable, CodeTables
from weightbridge.probe.values import VerificationValues

__all__ = ["Level", "OpposedValues", "PerturbedValues", "has_small_tensors"]

_SMALL_NUMEL = 32


Bits = npt.NDArray[Any]


class Level(Enum):
    """What a tensor's elements are like. BASE: ordinary. HIGH: above nearly all ordinary ones. LOW: below them. SMALL:
    nearer to zero. Where a dtype has no negatives, LOW is SMALL."""

    BASE = "base"
    HIGH = "high"
    LOW = "low"
    SMALL = "small"

    @classmethod
    def others(cls) -> tuple[Level, ...]:
        return cls.HIGH, cls.LOW, cls.SMALL


def has_small_tensors(spec: CheckpointSpec) -> bool:
    """Whether a tensor has so few elements that one load of random values may fail to tell a copy from an extreme.

    The larger of two scalars is each of them half of the time. Coded values grow with the element's number, so that the
    coded passes show the last one.
    """
    return any(0 < t.numel <= _SMALL_NUMEL and t.name not in spec.constants for t in spec.tensors)


class OpposedValues(VerificationValues):
    """The codes of the first pass in opposite order: what is largest there is smallest here. So nothing that picks one of
    several elements by their size picks the same one in both, and passes for a copy of it."""

    def __init__(self, spec: CheckpointSpec, tables: CodeTables, seed: int) -> None:
        """seed: for elements that have no such codes."""
        super().__init__(spec, seed)
        self._tables = tables

    def bits(self, tensor: int, lo: int, hi: int) -> Bits:
        dtype = self._spec.tensors[tensor].dtype
        table = self._tables.of(dtype)
        if not isinstance(table, CodeTable):
            return super().bits(tensor, lo, hi)
        modulus = table.moduli[0]
        number = np.arange(lo, hi, dtype=np.int64) + (int(table.offsets[tensor]) + 1)
        codes = (modulus - 1 - number % modulus + table.first_bits(dtype, 0)).astype(dtype.bits)
        found: Bits = codes << dtype.bits.type(table.bit_step(dtype))
        return found


class PerturbedValues(VerificationValues):
    """Values of `base`, and in the tensors that `levels` names (by position) fresh ones of that level."""

    def __init__(self, spec: CheckpointSpec, base: int, fresh: int, levels: Mapping[int, Level]) -> None:
        """base, fresh: seeds."""
        super().__init__(spec, base)
        self._fresh = VerificationValues(spec, fresh)
        self._levels = dict(levels)

    def bits(self, tensor: int, lo: int, hi: int) -> Bits:
        level = self._levels.get(tensor, Level.BASE)
        if level is Level.BASE:
            return super().bits(tensor, lo, hi)
        return _at_level(self._fresh.bits(tensor, lo, hi), self._spec.tensors[tensor].dtype, level)


def _at_level(bits: Bits, dtype: DType, level: Level) -> Bits:
    """Random raw bits moved to a level; sign and mantissa stay random where the level leaves them free."""
    kind, width = dtype.bits.type, 8 * dtype.itemsize
    if dtype.name == "BOOL":
        return np.full_like(bits, 1 if level is Level.HIGH else 0)
    if not dtype.is_float:
        return _integers_at_level(bits, dtype, level)
    if not dtype.mantissa_bits:  # powers of two, ordinary ones up to 1, whose bits are 127
        found: Bits = (bits & kind(1)) | kind(130 if level is Level.HIGH else 0)
        return found
    sign = kind(1 << (width - 1))
    exponent = -9 if level is Level.SMALL else 3
    biased = np.maximum(exponent - dtype.min_exponent + 1 + (bits & kind(1)).astype(np.int64), 0)
    moved: Bits = (bits & kind((1 << dtype.mantissa_bits) - 1)) | (
        biased.astype(dtype.bits) << kind(dtype.mantissa_bits)
    )
    if level is Level.LOW:
        moved |= sign
    elif level is Level.SMALL and exponent >= dtype.min_exponent:  # else it may be zero, and minus zero a NaN
        moved |= bits & sign
    return moved


def _integers_at_level(bits: Bits, dtype: DType, level: Level) -> Bits:
    """Integers are random in all bits; the upper ones tell the level."""
    kind, width = dtype.bits.type, 8 * dtype.itemsize
    top = kind(7 << (width - 4) if dtype.name.startswith("I") else 7 << (width - 3))  # all but the sign
    moved: Bits = bits & kind((1 << (width - 4)) - 1)
    if level is Level.HIGH:
        moved |= top
    elif level is Level.LOW and dtype.name.startswith("I"):
        moved |= kind(1 << (width - 1))
    return moved
