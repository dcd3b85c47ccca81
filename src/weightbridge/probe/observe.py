"""Reading one field after one coded pass: sparse second differences, and the elements that hold no code.

Only sparse data outlive a pass. Elements without a code (pads, constants, never written, computed) are kept as runs of
equal bits, which is what pads and untouched tensors are made of.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weightbridge.checkpoint.dtypes import DType
from weightbridge.errors import ProbeError
from weightbridge.probe.codes import CodeTable
from weightbridge.probe.constants import RunCollector, Runs
from weightbridge.probe.difference import TILE_NUMEL, Differencer, SparseEntries
from weightbridge.probe.fields import Field
from weightbridge.probe.live import distinct_elements, raw_bits, to_numpy_bits

__all__ = ["Observation", "fill_sentinel", "observe", "sentinel_bits"]

_MAX_RUNS = 1 << 22
_MAX_ENTRIES = 1 << 23
"""Bounds per field on what a pass may leave behind; beyond them the field is no set of slice copies."""


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
    target = distinct_elements(local)
    raw_bits(target, 0, tuple(target.shape), tuple(target.stride())).fill_(signed)


def observe(local: torch.Tensor, name: str, dtype: DType, field: Field, table: CodeTable, pass_: int) -> Observation:
    """Read a field once, tile by tile. Raises ProbeError naming the tensor when it is too irregular to be copies."""
    tile_rows = max(1, min(field.rows, TILE_NUMEL // field.cols))
    differencer = Differencer(field.cols, table.moduli[pass_], tile_rows)
    collector = RunCollector(sentinel_bits(dtype, pass_))
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
