"""A worker's loader written as NumPy slicing, and the source map found by running it on element indices.

The oracle of the planner's and the program's tests: nothing here uses boxes, atoms or plans. Part of the test kit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.layout.source_map import Constant, CopyTable, LiveTensor, SourceMap

__all__ = ["NumpyLoader", "Placement", "source_map_of"]

AnyArray = npt.NDArray[Any]
Row = tuple[int, int, int, int, tuple[tuple[int, int, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`live[dst] = tensor[src]`, the taken block transposed by `order` if given.

    flat: src and dst are then one slice each, of the flattened tensor and the flattened live tensor.
    """

    tensor: str
    src: tuple[slice, ...]
    live: int
    dst: tuple[slice, ...]
    order: tuple[int, ...] | None = None
    flat: bool = False


@dataclass(frozen=True, kw_only=True)
class NumpyLoader:
    """Live tensors and what is loaded into them. Live elements that no placement writes keep 0: padding."""

    live: tuple[LiveTensor, ...]
    placements: tuple[Placement, ...]

    def storages(self) -> list[AnyArray]:
        """One flat zeroed array of raw bits per live tensor, from its first to its last element."""
        return [np.zeros(t.span_numel, dtype=t.dtype.bits) for t in self.live]

    def load(self, storages: Sequence[AnyArray], checkpoint: Mapping[str, AnyArray]) -> None:
        """Fill the storages from a checkpoint, whatever type of element both have."""
        for p in self.placements:
            t = self.live[p.live]
            storage = storages[p.live]
            strides = tuple(s * storage.itemsize for s in t.strides)
            view = np.lib.stride_tricks.as_strided(storage, shape=t.shape, strides=strides)
            if p.flat:
                view.reshape(-1)[p.dst[0]] = checkpoint[p.tensor].reshape(-1)[p.src[0]]
                continue
            block = checkpoint[p.tensor][p.src]
            view[p.dst] = block if p.order is None else block.transpose(p.order)


def source_map_of(loader: NumpyLoader, spec: CheckpointSpec, *, nested: bool = True) -> SourceMap:
    """Run the loader on element indices and read off where each came from, run by run.

    nested: collapse equal runs in arithmetic progression into two-axis lattices; otherwise every run is a row.
    """
    indices = {
        t.name: np.arange(low, low + t.numel, dtype=np.int64).reshape(t.shape)
        for t, low in zip(spec.tensors, spec.numel_offsets.tolist(), strict=False)
    }
    storages: list[AnyArray] = [np.full(t.span_numel, -1, dtype=np.int64) for t in loader.live]
    loader.load(storages, indices)
    rows: list[Row] = []
    constants: list[Constant] = []
    for position, (tensor, storage) in enumerate(zip(loader.live, storages, strict=True)):
        own = np.zeros(len(storage), dtype=bool)
        own[_offsets(tensor)] = True
        for low, high in _runs(own & (storage < 0)):
            constants.append(Constant(live=position, live_start=low, axes=((high - low, 1),), bits=0))
        found = _affine_runs(storage, spec, position)
        rows += _collapsed(found) if nested else found
    return SourceMap(
        spec_digest=spec.digest,
        live=loader.live,
        copies=CopyTable.from_rows(rows) if rows else CopyTable.empty(),
        constants=tuple(constants),
    )


def _offsets(tensor: LiveTensor) -> npt.NDArray[np.int64]:
    offsets = np.zeros(1, dtype=np.int64)
    for n, stride in zip(tensor.shape, tensor.strides, strict=True):
        offsets = (offsets[:, None] + np.arange(n) * stride).reshape(-1)
    return offsets


def _runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _affine_runs(storage: AnyArray, spec: CheckpointSpec, live: int) -> list[Row]:
    """Maximal runs of consecutive live elements whose checkpoint indices step evenly within one tensor."""
    values = storage.tolist()
    bounds = spec.numel_offsets
    owner = (np.searchsorted(bounds, storage, side="right") - 1).tolist()
    rows: list[Row] = []
    i = 0
    while i < len(values):
        if values[i] < 0:
            i += 1
            continue
        j, step = i + 1, 0
        while j < len(values) and owner[j] == owner[i] and values[j] >= 0:
            if j == i + 1:
                step = values[j] - values[i]
            elif values[j] - values[j - 1] != step:
                break
            j += 1
        axes = ((j - i, step, 1),) if j - i > 1 else ()
        rows.append((owner[i], live, values[i] - int(bounds[owner[i]]), i, axes))
        i = j
    return rows


def _collapsed(rows: list[Row]) -> list[Row]:
    """Equal neighbouring runs whose starts step evenly, as one row with an outer axis."""
    found: list[Row] = []
    i = 0
    while i < len(rows):
        tensor, live, src, at, axes = rows[i]
        j = i + 1
        src_step = live_step = 0
        while j < len(rows) and rows[j][0] == tensor and rows[j][4] == axes:
            steps = (rows[j][2] - rows[j - 1][2], rows[j][3] - rows[j - 1][3])
            if j == i + 1:
                src_step, live_step = steps
            elif steps != (src_step, live_step):
                break
            j += 1
        outer = ((j - i, src_step, live_step),) if j - i > 1 else ()
        found.append((tensor, live, src, at, (*outer, *axes)))
        i = j
    return found
