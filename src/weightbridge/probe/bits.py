"""Following bools: one value has no room for a residue, so the number of an element travels bit by bit over many passes.

Element c is True in the first pass, then shows the bits of c, then those bits inverted. So no constant is such a word, nor
the inverse of one, nor the conjunction or disjunction of two (they have the wrong number of ones). `probe/bit_words.py`
reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.dtypes import DType
from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import ProbeError

__all__ = ["BitTable", "bit_table"]

Int64Array = npt.NDArray[np.int64]

_MAX_NUMEL = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BitTable:
    """num_bits: of an element's number; even, so that the inverse of no word looks like an element that is never written
    (`sentinel_bits`: False in even passes, True in odd ones). moduli, offsets: as in CodeTable."""

    num_bits: int
    moduli: tuple[int, ...]
    offsets: Int64Array = field(compare=False, repr=False)

    @property
    def num_passes(self) -> int:
        return 1 + 2 * self.num_bits

    @property
    def numel(self) -> int:
        return int(self.offsets[-1])

    @property
    def product(self) -> int:
        return int(np.prod(self.moduli, dtype=np.int64))

    def encode(self, dtype: DType, pass_: int, start: int, out: npt.NDArray[np.unsignedinteger]) -> None:
        """Write this pass's values of elements c = start, start + 1, ... of all bools into the flat array `out`."""
        pass_ %= self.num_passes
        if pass_ == 0:
            out[:] = 1
            return
        bit = (pass_ - 1) % self.num_bits
        number = np.arange(start, start + len(out), dtype=np.uint64)
        out[:] = (number >> np.uint64(bit)) & np.uint64(1) ^ np.uint64(pass_ > self.num_bits)


def bit_table(spec: CheckpointSpec, offsets: Int64Array, moduli: tuple[int, ...]) -> BitTable:
    """The table for all bools of a checkpoint. Raises ProbeError when they are more than loads can be asked for."""
    numel = int(offsets[-1])
    if numel > _MAX_NUMEL:
        largest = max((t for t in spec.tensors if t.dtype.name == "BOOL"), key=lambda t: t.numel)
        raise ProbeError(
            f"the checkpoint has {numel} elements of dtype BOOL, {largest.name!r} with {largest.numel} the most; they are "
            f"followed bit by bit, two loads a bit, up to {_MAX_NUMEL} of them. Masks and the like are no weights: name them "
            "in CheckpointSpec(constants=...) or leave them out of the spec",
            tensor=largest.name,
        )
    num_bits = max(1, (numel - 1).bit_length())
    return BitTable(num_bits=num_bits + num_bits % 2, moduli=moduli, offsets=offsets)
