"""Reading one field after one coded pass: sparse second differences, and the elements that hold no code.

Only sparse data outlive a pass. Elements without a code (pads, constants, never written, computed) are kept as runs of
equal bits, which is what pads and untouched tensors are made of.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weightbridge.checkpoint.dtypes import DType
from weightbridge.errors import ProbeError
from weightbridge.probe.codes import CodeTable
from weightbridge.probe.difference import TILE_NUMEL, Differencer, SparseEntries
from weightbridge.probe.live import Field, raw_bits, to_numpy_bits

__all__ = ["Observation", "Runs", "fill_sentinel", "observe", "sentinel_bits"]

_MAX_RUNS = 1 << 22
_MAX_ENTRIES = 1 << 23
"""Bounds per field on what a pass may leave behind; beyond them the field is no set of slice copies."""


class Runs(NamedTuple):
    """Maximal runs of equal elements that hold no code, by position row * cols + col in the field.

    bits: raw bits; 0 where `untouched`. untouched: the element still held the sentinel of its pass.
    """

    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    bits: npt.NDArray[np.uint64]
    untouched: npt.NDArray[np.bool_]


class Observation(NamedTuple):
    """What one pass left in one field."""

    entries: SparseEntries
    runs: Runs


def sentinel_bits(dtype: DType, pass_: int) -> int:
    """What live elements are filled with before a load: a NaN for floats, never a code, and another one each second
    pass, so that what a loader always writes differs from what it never writes, in any dtype."""
    if dtype.name == "BOOL":
        return pass_ % 2
    ones = (1 << 8 * dtype.itemsize) - 1
    return ones if pass_ % 2 else ones >> 1


def fill_sentinel(local: torch.Tensor, dtype: DType, pass_: int) -> None:
    """Overwrite every element of a live tensor with the sentinel of this pass."""
    if not local.numel():
        return
    signed = sentinel_bits(dtype, pass_)
    if dtype.itemsize > 1 and signed >> (8 * dtype.itemsize - 1):
        signed -= 1 << 8 * dtype.itemsize
    raw_bits(local, 0, tuple(local.shape), tuple(local.stride())).fill_(signed)


def observe(local: torch.Tensor, name: str, dtype: DType, field: Field, table: CodeTable, pass_: int) -> Observation:
    """Read a field once, tile by tile. Raises ProbeError naming the tensor when it is too irregular to be copies."""
    tile_rows = max(1, min(field.rows, TILE_NUMEL // field.cols))
    differencer = Differencer(field.cols, table.moduli[pass_], tile_rows)
    collector = _RunCollector(sentinel_bits(dtype, pass_))
    for row in range(0, field.rows, tile_rows):
        num = min(tile_rows, field.rows - row)
        window = raw_bits(
            local, field.start + row * field.row_stride, (num, field.cols), (field.row_stride, field.col_stride)
        )
        raw = to_numpy_bits(window, dtype)
        invalid = table.decode(dtype, pass_, raw, differencer.rows_buffer(num))
        if invalid is not None:
            collector.add(row * field.cols, raw, invalid)
        differencer.push(num)
        if differencer.num_entries > _MAX_ENTRIES or collector.num_runs > _MAX_RUNS:
            raise ProbeError(
                f"live tensor {name!r}: what the loader writes is neither slices of checkpoint tensors nor constants "
                f"(more than {_MAX_ENTRIES} breaks or {_MAX_RUNS} distinct runs by row {row + num}); its layout would need an "
                "explicit index table, which this version does not have",
                tensor=name,
            )
    return Observation(differencer.finish(), collector.finish())


class _RunCollector:
    """Joins the runs of successive tiles."""

    def __init__(self, sentinel: int) -> None:
        self._sentinel = np.uint64(sentinel)
        self._parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint64]]] = []
        self.num_runs = 0

    def add(self, base: int, raw: npt.NDArray[Any], invalid: npt.NDArray[np.bool_]) -> None:
        if bool(invalid.all()) and int(raw.min()) == int(raw.max()):
            self._append(
                np.array([base], np.int64), np.array([raw.size], np.int64), np.array([int(raw.flat[0])], np.uint64)
            )
            return
        position = np.flatnonzero(invalid.reshape(-1))
        values = raw[invalid].astype(np.uint64)
        breaks = np.ones(len(position), dtype=bool)
        breaks[1:] = (np.diff(position) != 1) | (values[1:] != values[:-1])
        first = np.flatnonzero(breaks)
        length = np.diff(np.append(first, len(position)))
        self._append(position[first].astype(np.int64) + base, length.astype(np.int64), values[first])

    def _append(
        self, start: npt.NDArray[np.int64], length: npt.NDArray[np.int64], bits: npt.NDArray[np.uint64]
    ) -> None:
        self._parts.append((start, length, bits))
        self.num_runs += len(start)

    def finish(self) -> Runs:
        if not self._parts:
            z = np.zeros(0, dtype=np.int64)
            return Runs(z, z, np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=bool))
        start, length, bits = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        # Tiles cut runs; positions and values tell where they go on.
        breaks = np.ones(len(start), dtype=bool)
        breaks[1:] = (start[1:] != start[:-1] + length[:-1]) | (bits[1:] != bits[:-1])
        first = np.flatnonzero(breaks)
        untouched = bits[first] == self._sentinel
        return Runs(
            start[first], np.add.reduceat(length, first), np.where(untouched, np.uint64(0), bits[first]), untouched
        )
