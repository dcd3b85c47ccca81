"""Live tensors that repeat one explained before, further on in the checkpoint: layers, experts, thousands of small tensors.

The codes of a tensor determine the index of each of its elements, since an index has one set of residues. Two fields of equal
size whose second differences are equal, but for what the first index alone puts into the four corner entries, hold the same
indices up to one common shift. So where the shift leads from each checkpoint tensor that the first one copies to a whole other
one of equal shape and dtype, the shifted explanation is *the* explanation, and costs a lookup.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.probe.bits import BitTable
from weightbridge.probe.codes import CodeTable, CodeTables
from weightbridge.probe.difference import SparseEntries
from weightbridge.probe.explained import Explanation, TensorRecord

__all__ = ["Explainer"]

_MAX_ENTRIES = 256
"""A field with more breaks than this is looked at on its own: comparing them one by one would cost as much."""

_Entries = tuple[tuple[int, int], ...]
"""(position in the field, residue), sorted."""


class _Known(NamedTuple):
    """base: index + 1 of the first element of the first field, in the numbers of the family."""

    base: int
    explanation: Explanation


class Explainer:
    """Explains the records of one worker, after the last coded pass."""

    def __init__(self, spec: CheckpointSpec, tables: CodeTables) -> None:
        self._spec = spec
        self._tables = tables
        self._shapes = [t.shape for t in spec.tensors]
        self._known: dict[object, _Known] = {}

    def explain(self, record: TensorRecord) -> Explanation:
        """Every element accounted for once. Raises ProbeError for computed elements."""
        table = self._tables.of(record.live.dtype)
        found = None if isinstance(table, BitTable) else _pattern(record, table)
        if found is None or isinstance(table, BitTable):
            return record.explain(self._spec, self._tables, self._shapes)
        base, pattern = found
        known = self._known.get(pattern)
        shifted = None if known is None else self._shifted(known, base - known.base, table)
        if shifted is not None:
            return shifted
        explanation = record.explain(self._spec, self._tables, self._shapes)
        self._known.setdefault(pattern, _Known(base, explanation))
        return explanation

    def _shifted(self, known: _Known, shift: int, table: CodeTable) -> Explanation | None:
        """The explanation with every index moved by `shift`; None where that leads to no tensors of the same form."""
        tensors, moved = self._spec.tensors, {}
        for group in {copy.group for copy in known.explanation.copies}:
            start = int(table.offsets[group]) + shift
            if not 0 <= start < table.numel:
                return None
            # Tensors without elements of this family begin where the next one does: the last of them is meant.
            other = int(table.offsets.searchsorted(start, side="right")) - 1
            alike = tensors[other].shape == tensors[group].shape and tensors[other].dtype == tensors[group].dtype
            if int(table.offsets[other]) != start or not alike or tensors[other].name in self._spec.constants:
                return None
            moved[group] = other
        copies = [copy._replace(group=moved[copy.group]) for copy in known.explanation.copies]
        return Explanation(copies=copies, constants=[], untouched=[])


def _pattern(record: TensorRecord, table: CodeTable) -> tuple[int, object] | None:
    """(index + 1 of the first element, all that the record says beside it); None when an element is no copy, or for a
    tensor that is empty or has many breaks."""
    bases: list[int] = []
    fields: list[tuple[_Entries, ...]] = []
    for part, entries, runs in zip(record.fields, record.entries, record.runs, strict=True):
        if any(len(r.start) for r in runs) or any(len(e.row) > _MAX_ENTRIES for e in entries):
            return None
        seen = [_by_position(e, part.cols) for e in entries]
        firsts = [s.get(0, 0) for s in seen]
        bases.append(_combined(firsts, table.moduli))
        corners = [
            (r * part.cols + c, (-1) ** (r + c)) for r in range(min(part.rows, 2)) for c in range(min(part.cols, 2))
        ]
        for of_pass, first, p in zip(seen, firsts, table.moduli, strict=True):
            for position, sign in corners:  # what a field that holds `first` all over would have there
                rest = (of_pass.pop(position, 0) - sign * first) % p
                if rest:
                    of_pass[position] = rest
        fields.append(tuple(tuple(sorted(s.items())) for s in seen))
    if not bases or not 1 <= bases[0] <= table.numel:
        return None
    live = record.live
    return bases[0], (live.shape, live.strides, live.dtype.name, tuple(b - bases[0] for b in bases), tuple(fields))


def _by_position(entries: SparseEntries, cols: int) -> dict[int, int]:
    return dict(zip((entries.row * cols + entries.col).tolist(), entries.residue.tolist(), strict=True))


def _combined(residues: list[int], moduli: tuple[int, ...]) -> int:
    """The number below the product of the moduli with these residues."""
    return sum(r * w for r, w in zip(residues, _weights(moduli), strict=True)) % prod(moduli)


@lru_cache(maxsize=16)
def _weights(moduli: tuple[int, ...]) -> tuple[int, ...]:
    """For each modulus the number that is 1 modulo it and 0 modulo all others."""
    product = prod(moduli)
    return tuple(product // p * pow(product // p, -1, p) for p in moduli)
