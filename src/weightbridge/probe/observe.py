"""Reading one field after one coded pass: sparse second differences, and the elements that hold no code.

Only sparse data outlive a pass. Elements without a code (pads, constants, never written, computed) are kept as runs of
equal bits, which is what pads and untouched tensors are made of. The native kernel reads the live memory in place at
about the speed of a copy; the NumPy form is the specification, and what runs where the kernel was not built.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from weightbridge.checkpoint.dtypes import DType
from weightbridge.errors import ProbeError
from weightbridge.kernels.differences import MAX_MODULUS, NativeDifferencer, native_differences_available
from weightbridge.probe.codes import CodeTable
from weightbridge.probe.constants import RunCollector, Runs
from weightbridge.probe.difference import TILE_NUMEL, Differencer, SparseEntries
from weightbridge.probe.fields import Field
from weightbridge.probe.live import distinct_elements, raw_bits, to_numpy_bits

__all__ = ["Observation", "fill_sentinel", "observe", "observe_native", "observe_reference", "sentinel_bits"]

_MAX_RUNS = 1 << 22
_MAX_ENTRIES = 1 << 23
"""Bounds per field on what a pass may leave behind; beyond them the field is no set of slice copies."""

_TILE_BYTES = 32 << 20
"""What the native kernel is given at once: host memory it reads in place, other memory is copied to the host first."""


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
    """Read a field once. Raises ProbeError naming the tensor when it is too irregular to be copies."""
    if native_differences_available() and max(table.moduli) < MAX_MODULUS:
        return observe_native(local, name, dtype, field, table, pass_)
    return observe_reference(local, name, dtype, field, table, pass_)


def observe_native(
    local: torch.Tensor, name: str, dtype: DType, field: Field, table: CodeTable, pass_: int, *, wide: bool = True
) -> Observation:
    """`observe` by the C kernel, one thread, without the GIL. wide: see `NativeDifferencer`."""
    differencer = NativeDifferencer(
        cols=field.cols, modulus=table.moduli[pass_], first_bits=table.first_bits(dtype, pass_),
        bit_step=table.bit_step(dtype), numel=field.numel, wide=wide,
    )  # fmt: skip
    collector = RunCollector(sentinel_bits(dtype, pass_))
    positions: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    residues: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    num_entries = 0
    tile_rows = max(1, _TILE_BYTES // (field.cols * dtype.itemsize))
    for row in range(0, field.rows, tile_rows):
        num = min(tile_rows, field.rows - row)
        for found in differencer.push(to_numpy_bits(_window(local, field, row, num), dtype)):
            collector.add_runs(found.run_start, found.run_length, found.run_bits)
            if len(found.position):
                positions.append(found.position)
                residues.append(found.residue)
                num_entries += len(found.position)
            if num_entries > _MAX_ENTRIES or collector.num_runs > _MAX_RUNS:
                raise _too_irregular(name)
    if not positions:
        z = np.zeros(0, dtype=np.int64)
        return Observation(SparseEntries(z, z, z), collector.finish())
    row_of, col_of = np.divmod(np.concatenate(positions), field.cols)
    return Observation(SparseEntries(row_of, col_of, np.concatenate(residues)), collector.finish())


def observe_reference(
    local: torch.Tensor, name: str, dtype: DType, field: Field, table: CodeTable, pass_: int
) -> Observation:
    """`observe` in NumPy, tile by tile."""
    tile_rows = max(1, min(field.rows, TILE_NUMEL // field.cols))
    differencer = Differencer(field.cols, table.moduli[pass_], tile_rows)
    collector = RunCollector(sentinel_bits(dtype, pass_))
    for row in range(0, field.rows, tile_rows):
        num = min(tile_rows, field.rows - row)
        raw = to_numpy_bits(_window(local, field, row, num), dtype)
        invalid = table.decode(dtype, pass_, raw, differencer.rows_buffer(num))
        if invalid is not None:
            collector.add(row * field.cols, raw, invalid)
        differencer.push(num)
        if differencer.num_entries > _MAX_ENTRIES or collector.num_runs > _MAX_RUNS:
            raise _too_irregular(name)
    return Observation(differencer.finish(), collector.finish())


def _window(local: torch.Tensor, field: Field, row: int, num_rows: int) -> torch.Tensor:
    return raw_bits(
        local, field.start + row * field.row_stride, (num_rows, field.cols), (field.row_stride, field.col_stride)
    )


def _too_irregular(name: str) -> ProbeError:
    return ProbeError(
        f"live tensor {name!r}: what the loader writes is neither slices of checkpoint tensors nor constants (more than "
        f"{_MAX_ENTRIES} breaks or {_MAX_RUNS} distinct runs in a field); an explicit index table of that many rows is beyond "
        "what an update could use. Keep the tensor in checkpoint order, or leave it out of `tensors`",
        tensor=name,
    )
