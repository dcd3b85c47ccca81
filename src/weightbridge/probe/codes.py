"""The code table: values that carry an index residue through a loader, exact in every dtype on the way.

Design: pass k gives element g the residue c = (g + 1) mod p_k, written as the c-th code of a window of codes. Codes are
the positive normal numbers of a float format that every float dtype met contains, in order, or small positive integers;
so decoding is a shift and a subtraction. 0, NaN, infinities, negatives and values with further mantissa bits are no codes.

Even passes use the lower half of the codes and odd passes the upper half. A value that does not change between two passes
therefore cannot be a code in both: no constant, whatever it is, can pass for a copied element.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.dtypes import DType, dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import ProbeError

__all__ = ["CodeTable", "Residues", "code_table"]

Residues = npt.NDArray[np.int16]

_MAX_CODES = 32512
"""With half of them below 2**14, differences of residues fit 16-bit lanes: |a - 2b + c| < 2 * 2**14."""

_MAX_PRODUCT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTable:
    """What is written and read in each coded pass.

    moduli: p_k, pairwise coprime; their product exceeds the number of elements + 1. num_codes: K.
    mantissa_bits, min_exponent: of the common float format.
    """

    moduli: tuple[int, ...]
    num_codes: int
    mantissa_bits: int
    min_exponent: int

    @property
    def num_passes(self) -> int:
        return len(self.moduli)

    @property
    def product(self) -> int:
        return prod(self.moduli)

    def first_bits(self, dtype: DType, pass_: int) -> int:
        """Raw bits, before scaling by `bit_step`, of residue 0 in this pass."""
        window = self.num_codes // 2 if pass_ % 2 else 0
        if not dtype.is_float:
            return 1 + window
        # Biased exponent 1 stands for dtype.min_exponent, since codes are normal numbers.
        return ((self.min_exponent - dtype.min_exponent + 1) << self.mantissa_bits) + window

    def bit_step(self, dtype: DType) -> int:
        """Low bits of the dtype that every code leaves zero."""
        return dtype.mantissa_bits - self.mantissa_bits if dtype.is_float else 0

    def encode(self, dtype: DType, pass_: int, start: int, out: npt.NDArray[np.unsignedinteger]) -> None:
        """Write the codes of elements g = start, start + 1, ... as raw bits into the flat array `out`."""
        p = self.moduli[pass_]
        period = _period(self, dtype, pass_)
        phase = (start + 1) % p
        head = min(len(out), (p - phase) % p)
        out[:head] = period[phase : phase + head]
        whole = (len(out) - head) // p
        out[head : head + whole * p].reshape(whole, p)[:] = period
        tail = head + whole * p
        out[tail:] = period[: len(out) - tail]

    def decode(
        self, dtype: DType, pass_: int, raw: npt.NDArray[np.unsignedinteger], out: Residues
    ) -> npt.NDArray[np.bool_] | None:
        """Residues of raw bits into `out` (same shape); elements that hold no code of this pass get residue 0.

        Returns None when every element was a code, else the mask of those that were not. `raw` is of the dtype's own size.
        """
        codes = out.view(np.uint16)
        p, first, shift = self.moduli[pass_], self.first_bits(dtype, pass_), self.bit_step(dtype)
        if shift == 0 and raw.dtype.itemsize == 2:
            np.subtract(raw, np.uint16(first), out=codes)
            if int(codes.max(initial=0)) < p:
                return None
            invalid = codes >= p
        else:
            invalid_or_none = self._decode_wide(raw, codes, p, first, shift)
            if invalid_or_none is None:
                return None
            invalid = invalid_or_none
        out[invalid] = 0
        return invalid

    @staticmethod
    def _decode_wide(
        raw: npt.NDArray[np.unsignedinteger], codes: npt.NDArray[np.uint16], p: int, first: int, shift: int
    ) -> npt.NDArray[np.bool_] | None:
        """The general case: any item size, low bits that must be zero."""
        kind = raw.dtype.type
        if shift and raw.flags.c_contiguous and raw.dtype.itemsize == 4 and shift == 16:
            halves = raw.view(np.uint16).reshape(*raw.shape, 2)
            np.subtract(halves[..., 1], np.uint16(first), out=codes)
            low_bits = int(np.bitwise_or.reduce(raw, axis=None)) & 0xFFFF
            if not low_bits and int(codes.max(initial=0)) < p:
                return None
            mask: npt.NDArray[np.bool_] = (codes >= p) | (halves[..., 0] != 0)
            return mask
        # A one-byte dtype wraps within its own width: 0 - first must not fall into the window, so widen first.
        wide = (raw >> kind(shift)).astype(np.int64) - first
        invalid = (wide < 0) | (wide >= p)
        if shift:
            invalid |= (raw & kind((1 << shift) - 1)) != 0
        np.copyto(codes, wide, casting="unsafe")
        return invalid if bool(invalid.any()) else None


@lru_cache(maxsize=16)
def _period(table: CodeTable, dtype: DType, pass_: int) -> npt.NDArray[Any]:
    """[p] raw bits of all residues of a pass."""
    window = np.arange(table.moduli[pass_], dtype=np.uint64) + np.uint64(table.first_bits(dtype, pass_))
    period: npt.NDArray[Any] = (window << np.uint64(table.bit_step(dtype))).astype(dtype.bits)
    return period


def code_table(spec: CheckpointSpec, dtypes: Iterable[str]) -> CodeTable:
    """The table for a checkpoint and the live dtypes (safetensors names) of a whole side. Pure, deterministic.

    Equal on all workers that are given equal arguments, so that collective loads agree. Raises ProbeError for a
    checkpoint dtype that cannot carry codes and when too few codes exist.
    """
    probed = [t for t in spec.tensors if t.name not in spec.constants and t.numel]
    for tensor in probed:
        if tensor.dtype.name == "BOOL":
            raise ProbeError(
                f"checkpoint tensor {tensor.name!r} is BOOL, which has too few values to carry an index; name it in "
                "CheckpointSpec(constants=...) or leave it out of the spec",
                tensor=tensor.name,
            )
    in_checkpoint = {t.dtype.name: t.dtype for t in probed}
    floats = [d for d in in_checkpoint.values() if d.is_float]
    num_codes, mantissa_bits, min_exponent = _MAX_CODES, 0, 0
    if floats:
        floats += [d for d in map(dtype_named, sorted(set(dtypes))) if d.is_float]
        num_codes, mantissa_bits, min_exponent = _common_format(floats)
    for dtype in in_checkpoint.values():
        if not dtype.is_float:
            num_codes = min(num_codes, (1 << (8 * dtype.itemsize - 1)) - 1)
    moduli = _moduli(num_codes // 2, spec.numel + 2)
    return CodeTable(moduli=moduli, num_codes=num_codes, mantissa_bits=mantissa_bits, min_exponent=min_exponent)


def _common_format(floats: list[DType]) -> tuple[int, int, int]:
    """(number of codes, mantissa bits, smallest exponent) of the normals that all these dtypes have."""
    low = max(d.min_exponent for d in floats)
    high = min(d.max_exponent for d in floats)
    mantissa_bits = min(d.mantissa_bits for d in floats)
    while mantissa_bits and (high - low + 1) << mantissa_bits > _MAX_CODES:
        mantissa_bits -= 1
    num_codes = (high - low + 1) << mantissa_bits
    return min(num_codes, _MAX_CODES), mantissa_bits, low


def _moduli(limit: int, product: int) -> tuple[int, ...]:
    """Distinct primes up to `limit`, largest first, at least two, until their product reaches `product`."""
    chosen: list[int] = []
    candidate = limit
    while len(chosen) < 2 or prod(chosen) < product:
        while candidate >= 2 and any(candidate % d == 0 for d in range(2, int(candidate**0.5) + 1)):
            candidate -= 1
        if candidate < 2:
            raise ProbeError(
                f"the dtypes of checkpoint and live tensors have too few values in common ({2 * limit} codes) to number "
                f"{product - 2} elements; probe the narrow tensors as a checkpoint of their own"
            )
        chosen.append(candidate)
        candidate -= 1
    if prod(chosen) >= _MAX_PRODUCT:
        raise ProbeError(f"{product - 2} checkpoint elements are more than 64-bit indices can tell apart")
    return tuple(chosen)
