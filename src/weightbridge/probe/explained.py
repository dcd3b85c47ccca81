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
from weightbridge.probe.codes import CodeTable
from weightbridge.probe.constants import Conflict, Runs, settle
from weightbridge.probe.difference import SparseEntries
from weightbridge.probe.fields import Field, fields_of
from weightbridge.probe.lattice import Axis, Lattice, Runs1D, collapse, copies_of_tensor, place_rectangles
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
    entries: list[list[SparseEntries]] = field(default_factory=list)
    runs: list[list[Runs]] = field(default_factory=list)

    @classmethod
    def of(cls, live: LiveTensor) -> TensorRecord:
        fields = fields_of(live)
        return cls(live, fields, [[] for _ in fields], [[] for _ in fields])

    def read(self, local: torch.Tensor, table: CodeTable, pass_: int) -> None:
        """Observe the tensor after a coded load. Raises ProbeError when it is too irregular to be copies."""
        for part, entries, runs in zip(self.fields, self.entries, self.runs, strict=True):
            seen = observe(local, self.live.name, self.live.dtype, part, table, pass_)
            entries.append(seen.entries)
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
        index = live_index(self.live, part.start + row * part.row_stride + col * part.col_stride)
        return ProbeError(
            f"live tensor {self.live.name!r}, element {list(index)}: the loader computes it rather than copying it from the "
            f"checkpoint: it held {what}. Only copies and constants can be followed; reloading computed tensors through the "
            "loader itself is not available yet. Turn the transformation off, or leave the tensor out of `tensors`",
            tensor=self.live.name,
            index=index,
        )

    def explain(self, spec: CheckpointSpec, table: CodeTable) -> Explanation:
        """After the last coded pass: every element accounted for once. Raises ProbeError for computed elements."""
        placed: list[Runs1D] = []
        fixed: list[Lattice] = []
        for part, entries, all_runs in zip(self.fields, self.entries, self.runs, strict=True):
            settled = settle(entries, all_runs, table, self.live.dtype, part.rows, part.cols)
            if isinstance(settled, Conflict):
                seen = [self._seen(all_runs[k], settled.position) for k in sorted((settled.before, settled.after))]
                raise self._computed(part, settled.position, f"{seen[0]} in one load and {seen[1]} in another")
            runs = settled.runs
            try:
                rects = rectangles(settled.entries, table.moduli, part.rows, part.cols)
                runs1d, stray = place_rectangles(rects, part, spec.numel, table.product)
            except ProbeError as error:
                raise ProbeError(f"live tensor {self.live.name!r}: {error.message}", tensor=self.live.name) from None
            if stray or runs1d.numel + int(runs.length.sum()) != part.numel:
                raise self._computed(
                    part, _first_unexplained(part, runs1d, runs), "codes that name no one checkpoint element"
                )
            placed.append(runs1d)
            fixed.extend(_run_lattices(part, runs))
        copies = copies_of_tensor(placed, spec.numel_offsets, [t.shape for t in spec.tensors])
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
