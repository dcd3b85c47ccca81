"""What the passes say about one live tensor: which elements are copies, constants, untouched, computed.

A tensor's fields are observed once a pass. Elements without a code must be without one in every pass and hold the same
bits; elements with codes must name one checkpoint element. Whatever is neither is computed by the loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import ProbeError
from weightbridge.layout.source_map import LiveTensor
from weightbridge.probe.bit_words import BitWords
from weightbridge.probe.bits import BitTable
from weightbridge.probe.codes import CodeTable, CodeTables, copyable
from weightbridge.probe.constants import Conflict, Runs, Settled, settle
from weightbridge.probe.difference import PositionPool, SparseEntries
from weightbridge.probe.fields import Field, fields_of
from weightbridge.probe.lattice import Axis, Lattice, Runs1D, collapse, copies_of_tensor, place_rectangles
from weightbridge.probe.live import raw_bits, to_numpy_bits
from weightbridge.probe.observe import observe
from weightbridge.probe.reconstruct import rectangles
from weightbridge.probe.values import describe_bits
from weightbridge.probe.verify import live_index

__all__ = ["Explanation", "TensorRecord"]

_UNTOUCHED = -1
"""The group of lattices of untouched elements; constants have their bits as group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All elements of one live tensor. copies: group is the checkpoint tensor. constants: group is the raw bits.
    untouched: group and start mean nothing."""

    copies: list[Lattice]
    constants: list[Lattice]
    untouched: list[Lattice]

    @property
    def num_untouched(self) -> int:
        return sum(int(np.prod([n for n, _, _ in x.axes], dtype=np.int64)) for x in self.untouched)


@dataclass(slots=True)
class TensorRecord:
    """Observations of one live tensor, pass by pass."""

    live: LiveTensor
    fields: tuple[Field, ...]
    pool: PositionPool
    entries: list[list[SparseEntries]] = field(default_factory=list)
    runs: list[list[Runs]] = field(default_factory=list)
    words: list[BitWords] = field(default_factory=list)
    """Of the fields of a bool tensor that is followed bit by bit, instead of entries and runs."""

    @classmethod
    def of(cls, live: LiveTensor, pool: PositionPool | None = None) -> TensorRecord:
        """pool: shared by the records of one probe."""
        fields = fields_of(live)
        return cls(live, fields, pool or PositionPool(), [[] for _ in fields], [[] for _ in fields])

    def read(self, local: torch.Tensor, tables: CodeTables, pass_: int) -> None:
        """Observe the tensor after a coded load. Raises ProbeError when it is too irregular to be copies."""
        table = tables.of(self.live.dtype)
        if pass_ >= table.num_passes:
            return  # for the sake of other dtypes
        if isinstance(table, BitTable):
            if pass_ == 0:
                self.words = [BitWords(table, part.rows, part.cols) for part in self.fields]
            for part, words in zip(self.fields, self.words, strict=True):
                window = raw_bits(local, part.start, (part.rows, part.cols), (part.row_stride, part.col_stride))
                words.add(pass_, to_numpy_bits(window, self.live.dtype))
            return
        for part, entries, runs in zip(self.fields, self.entries, self.runs, strict=True):
            seen = observe(local, self.live.name, self.live.dtype, part, table, pass_)
            entries.append(self.pool.packed(seen.entries))
            # Mostly all passes agree; then one of them is kept.
            same = bool(runs) and all(np.array_equal(a, b) for a, b in zip(runs[0], seen.runs, strict=True))
            runs.append(runs[0] if same else seen.runs)

    def _seen(self, runs: Runs, position: int) -> str:
        i = int(np.searchsorted(runs.start, position, side="right")) - 1
        if i < 0 or position >= int(runs.start[i] + runs.length[i]):
            return "the code of a checkpoint element"
        return "no write at all" if runs.untouched[i] else describe_bits(int(runs.bits[i]), self.live.dtype)

    def _computed(self, part: Field, position: int, what: str) -> ProbeError:
        row, col = divmod(position, part.cols)
        return self._computed_at(part.start + row * part.row_stride + col * part.col_stride, what)

    def _computed_at(self, offset: int, what: str) -> ProbeError:
        index = live_index(self.live, offset)
        return ProbeError(
            f"live tensor {self.live.name!r}, element {list(index)}: the loader computes it rather than copying it from the "
            f"checkpoint: it held {what}. Only copies and constants can be followed. Turn the transformation off, or leave the "
            "tensor out of `tensors`",
            tensor=self.live.name,
            index=index,
            seen=f"element {list(index)} held {what}",
        )

    def _settled(self, number: int, table: CodeTable | BitTable) -> Settled:
        """What the passes agree on about one field. Raises ProbeError for computed elements."""
        part = self.fields[number]
        if isinstance(table, BitTable):
            numbered = self.words[number].numbered()
            if numbered.computed is not None:
                raise self._computed(
                    part, numbered.computed, "values over all loads that name no one checkpoint element"
                )
            return Settled(numbered.runs, numbered.entries)
        all_runs = self.runs[number]
        settled = settle(self.entries[number], all_runs, table, self.live.dtype, part.rows, part.cols)
        if isinstance(settled, Conflict):
            seen = [self._seen(all_runs[k], settled.position) for k in sorted((settled.before, settled.after))]
            raise self._computed(part, settled.position, f"{seen[0]} in one load and {seen[1]} in another")
        return settled

    def explain(
        self, spec: CheckpointSpec, tables: CodeTables, shapes: Sequence[tuple[int, ...]] | None = None
    ) -> Explanation:
        """After the last coded pass: every element accounted for once. Raises ProbeError for computed elements.

        shapes: of the spec's tensors, from a caller that explains many records.
        """
        table = tables.of(self.live.dtype)
        placed: list[Runs1D] = []
        fixed: list[Lattice] = []
        for number, part in enumerate(self.fields):
            settled = self._settled(number, table)
            runs = settled.runs
            try:
                rects = rectangles(settled.entries, table.moduli, part.rows, part.cols)
                runs1d, stray = place_rectangles(rects, part, table.numel, table.product)
            except ProbeError as error:
                raise ProbeError(f"live tensor {self.live.name!r}: {error.message}", tensor=self.live.name) from None
            if len(stray) or runs1d.numel + int(runs.length.sum()) != part.numel:
                position = int(stray[0]) if len(stray) else _first_unexplained(part, runs1d, runs)
                raise self._computed(part, position, "codes that name no one checkpoint element")
            placed.append(runs1d)
            fixed.extend(_run_lattices(part, runs))
        try:
            shapes = [t.shape for t in spec.tensors] if shapes is None else shapes
            copies = copies_of_tensor(placed, table.offsets, shapes)
        except ProbeError as error:
            raise ProbeError(f"live tensor {self.live.name!r}: {error.message}", tensor=self.live.name) from None
        for copy in copies:
            source = spec.tensors[copy.group]
            if not copyable(source.dtype, self.live.dtype):
                what = f"an element of {source.name!r} cast from {source.dtype.name} to {self.live.dtype.name}"
                raise self._computed_at(copy.live, what)
        constants_of_spec = {spec.index[name] for name in spec.constants}
        for copy in copies:
            if copy.group in constants_of_spec:
                raise ProbeError(
                    f"live tensor {self.live.name!r}, element {list(live_index(self.live, copy.live))}: its values change from "
                    f"load to load as if they came from {spec.tensors[copy.group].name!r}, which the spec calls a constant",
                    tensor=self.live.name,
                )
        fixed = collapse(fixed, {x.group: () for x in fixed})
        return Explanation(
            copies=copies,
            constants=[x for x in fixed if x.group != _UNTOUCHED],
            untouched=[x for x in fixed if x.group == _UNTOUCHED],
        )


def _first_unexplained(part: Field, placed: Runs1D, runs: Runs) -> int:
    """Position in the field of the first element that is neither a copy nor in a run, or that is both."""
    times = np.zeros(part.numel, dtype=np.int8)
    for start, length in zip(runs.start.tolist(), runs.length.tolist(), strict=True):
        times[start : start + length] += 1
    for i in range(len(placed.source)):
        outer = np.arange(int(placed.outer[0][i])) * int(placed.outer[2][i])
        inner = np.arange(int(placed.inner[0][i])) * int(placed.inner[2][i])
        offset = np.add.outer(outer, inner) + int(placed.live[i]) - part.start
        row = offset // part.row_stride if part.rows > 1 else 0 * offset
        times[row * part.cols + (offset - row * part.row_stride) // part.col_stride] += 1
    wrong = np.flatnonzero(times != 1)
    return int(wrong[0]) if len(wrong) else 0


def _run_lattices(part: Field, runs: Runs) -> Sequence[Lattice]:
    """Runs as lattices in memory; where rows do not follow each other in memory, cut into head, whole rows and tail."""
    found = []
    for start, length, bits, untouched in zip(*(column.tolist() for column in runs), strict=True):
        group = _UNTOUCHED if untouched else bits
        position, left = start, length
        while left:
            row, col = divmod(position, part.cols)
            at = part.start + row * part.row_stride + col * part.col_stride
            if part.dense:
                take = left
                axes: tuple[Axis, ...] = ((left, 0, part.col_stride),)
            elif col == 0 and left >= 2 * part.cols:
                num_rows = left // part.cols
                take = num_rows * part.cols
                axes = ((num_rows, 0, part.row_stride), (part.cols, 0, part.col_stride))
            else:
                take = min(left, part.cols - col)
                axes = ((take, 0, part.col_stride),)
            found.append(Lattice(group, 0, at, tuple(a for a in axes if a[0] > 1)))
            position, left = position + take, left - take
    return found
