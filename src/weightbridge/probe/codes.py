"""The code tables: values that carry an index residue through a loader, exact in every dtype on the way.

Dtypes between which a value can be copied unchanged form a *family*: floats of two bytes and more, integers of two bytes and
more, one-byte dtypes (fp8 in all its forms, int8, uint8, whatever is packed in them), and bool. Elements are numbered within
their family, so that a family of few values asks for many passes only as far as it has elements.

Design: pass k gives element g the residue c = (g + 1) mod p_k, written as the c-th code of a window of codes. Codes are
the positive normal numbers of a float format that every float dtype met contains, in order; or small positive integers;
or, one byte wide, raw bits that stand for a finite non-zero value in every dtype met. So decoding is a shift and a
subtraction. 0, NaN, infinities and values with further mantissa bits are no codes. Bool has tables of its own
(`probe/bits.py`).

Even passes use one half of the codes and odd passes the other. A value that does not change between two passes therefore
cannot be a code in both: no constant, whatever it is, can pass for a copied element.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.dtypes import DType, dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import ProbeError
from weightbridge.probe.bits import BitTable, bit_table

__all__ = ["CodeTable", "CodeTables", "Residues", "code_table", "copyable"]

Int64Array = npt.NDArray[np.int64]
Residues = npt.NDArray[np.int16]

_MAX_CODES = 32512
"""With half of them below 2**14, differences of residues fit 16-bit lanes: |a - 2b + c| < 2 * 2**14."""

_MAX_BYTE = 0x7E
"""Codes of one byte are 1 to at most this in even passes, those with the top bit set in odd ones. 0x7F and 0xFF, which fill
live tensors before a load, are no codes."""

_MAX_PRODUCT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTable:
    """What is written and read in each coded pass for the dtypes of one family.

    moduli: p_k, pairwise coprime; their product exceeds the number of elements + 1. num_codes: of both halves.
    mantissa_bits, min_exponent: of the common float format of a family of floats. offsets: [num_tensors + 1] number of
    the first element of each checkpoint tensor, those of other families being empty.
    """

    moduli: tuple[int, ...]
    num_codes: int
    mantissa_bits: int
    min_exponent: int
    offsets: Int64Array = field(compare=False, repr=False)

    @property
    def num_passes(self) -> int:
        """Passes that are read. In later ones, which other families need, the first come again."""
        return len(self.moduli)

    @property
    def numel(self) -> int:
        return int(self.offsets[-1])

    @property
    def product(self) -> int:
        return prod(self.moduli)

    def first_bits(self, dtype: DType, pass_: int) -> int:
        """Raw bits, before scaling by `bit_step`, of residue 0 in this pass."""
        odd = pass_ % 2
        if dtype.itemsize == 1:
            return 0x81 if odd else 1
        window = self.num_codes // 2 if odd else 0
        if not dtype.is_float:
            return 1 + window
        # Biased exponent 1 stands for dtype.min_exponent, since codes are normal numbers.
        return ((self.min_exponent - dtype.min_exponent + 1) << self.mantissa_bits) + window

    def bit_step(self, dtype: DType) -> int:
        """Low bits of the dtype that every code leaves zero."""
        return dtype.mantissa_bits - self.mantissa_bits if dtype.is_float and dtype.itemsize > 1 else 0

    def encode(self, dtype: DType, pass_: int, start: int, out: npt.NDArray[np.unsignedinteger]) -> None:
        """Write the codes of elements g = start, start + 1, ... of the family as raw bits into the flat array `out`."""
        pass_ %= self.num_passes
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTables:
    """The tables of all families that a side meets. tables: by family."""

    tables: Mapping[str, CodeTable | BitTable]

    @property
    def num_passes(self) -> int:
        """Coded passes of the whole: as many as the family that needs most."""
        return max(t.num_passes for t in self.tables.values())

    def of(self, dtype: DType) -> CodeTable | BitTable:
        """The table that elements of this dtype are written and read with."""
        # Without bools in the checkpoint a live one holds constants, which any table tells.
        return self.tables.get(_family(dtype)) or self.tables["bytes"]


def copyable(source: DType, target: DType) -> bool:
    """Whether a checkpoint element of one dtype can be followed into a live tensor of the other: only floats of two bytes
    and more are cast on the way."""
    return source.name == target.name or _family(source) == _family(target) == "floats"


def _family(dtype: DType) -> str:
    if dtype.name == "BOOL":
        return "bools"
    if dtype.itemsize == 1:
        return "bytes"
    return "floats" if dtype.is_float else "integers"


def code_table(spec: CheckpointSpec, dtypes: Iterable[str]) -> CodeTables:
    """The tables for a checkpoint and the live dtypes (safetensors names) of a whole side. Pure, deterministic.

    Equal on all workers that are given equal arguments, so that collective loads agree. Raises ProbeError when the
    dtypes met have too few codes for the checkpoint.
    """
    live = [dtype_named(name) for name in sorted(set(dtypes))]
    met: dict[str, dict[str, DType]] = {"floats": {}, "integers": {}, "bytes": {}, "bools": {}}
    for t in spec.tensors:
        if t.numel and t.name not in spec.constants:
            met[_family(t.dtype)][t.dtype.name] = t.dtype
    tables: dict[str, CodeTable | BitTable] = {}
    for family, found in met.items():
        # A family that only live tensors are of needs a table as well: their buffers hold constants.
        own = list(found.values()) + [d for d in live if _family(d) == family]
        offsets = _offsets(spec, family)
        if family == "bools":
            if found:
                tables[family] = bit_table(spec, offsets, _moduli(_MAX_CODES // 2, int(offsets[-1]) + 2, family))
            continue
        num_codes, mantissa_bits, min_exponent = _codes_of(family, own)
        tables[family] = CodeTable(
            moduli=_moduli(num_codes // 2, int(offsets[-1]) + 2, family),
            num_codes=num_codes,
            mantissa_bits=mantissa_bits,
            min_exponent=min_exponent,
            offsets=offsets,
        )
    return CodeTables(tables=tables)


def _offsets(spec: CheckpointSpec, family: str) -> Int64Array:
    sizes = [t.numel if _family(t.dtype) == family else 0 for t in spec.tensors]
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


def _codes_of(family: str, dtypes: list[DType]) -> tuple[int, int, int]:
    """(number of codes, mantissa bits, smallest exponent) that all these dtypes of a family have."""
    if family == "floats" and dtypes:
        return _common_format(dtypes)
    if family == "bytes":
        return 2 * min([_MAX_BYTE, *(d.largest_bits & 0x7F for d in dtypes)]), 0, 0
    return _MAX_CODES, 0, 0


def _common_format(floats: list[DType]) -> tuple[int, int, int]:
    """The same of the normal numbers of floats of two bytes and more."""
    low = max(d.min_exponent for d in floats)
    high = min(d.max_exponent for d in floats)
    mantissa_bits = min(d.mantissa_bits for d in floats)
    while mantissa_bits and (high - low + 1) << mantissa_bits > _MAX_CODES:
        mantissa_bits -= 1
    num_codes = (high - low + 1) << mantissa_bits
    return min(num_codes, _MAX_CODES), mantissa_bits, low


def _moduli(limit: int, product: int, family: str) -> tuple[int, ...]:
    """Distinct primes up to `limit`, largest first, at least two, until their product reaches `product`."""
    chosen: list[int] = []
    candidate = limit
    while len(chosen) < 2 or prod(chosen) < product:
        while candidate >= 2 and any(candidate % d == 0 for d in range(2, int(candidate**0.5) + 1)):
            candidate -= 1
        if candidate < 2 or prod(chosen) * candidate >= _MAX_PRODUCT:
            raise ProbeError(
                f"the dtypes of checkpoint and live tensors have too few values in common ({2 * limit} codes) to number "
                f"{product - 2} elements ({family}) in 64-bit indices; probe them in several checkpoints"
            )
        chosen.append(candidate)
        candidate -= 1
    return tuple(chosen)
