"""SourceMap: for one worker, which checkpoint element every live element holds.

Produced by the probe, consumed by the planner (`expand`) and by the lowering of programs. Bulk data are NumPy arrays:
a large job has hundreds of thousands of copies and one Python object each would break it.

A *slice copy* is a lattice: checkpoint element `src_start + sum(i_a * src_stride_a)` of tensor `tensor` lies at live
element `live_start + sum(i_a * live_stride_a)` of live tensor `live`, for all 0 <= i_a < count_a. Checkpoint offsets are
flat, row-major, in elements, within the tensor. Live offsets are flat *storage* offsets in elements, from the first
element of the live tensor. Transposes, fused QKV by head group, gate/up halves, stacked experts, row permutations and
flat shards that begin mid-row are all of this one kind.

What a loader computes is no copy. A *loader group* says which live tensors the worker's own `load_weights` makes of which
checkpoint tensors; those travel whole into *carried* live tensors, which are memory of this library, and are loaded from
there when a version is installed. To everything between the probe and the executor a carried tensor is one more copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.dtypes import DType
from weightbridge.errors import LayoutError

__all__ = ["CARRIED_PREFIX", "Constant", "CopyTable", "LiveTensor", "LoaderGroup", "SourceMap"]

CARRIED_PREFIX = "carried:"
"""Name of a carried live tensor: this, then the checkpoint tensor's name."""

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """One tensor of a worker as it lies in memory.

    shape, strides: local, in elements. strides may be any non-negative values (transposed, padded, blocked).
    parameter: True for a model parameter, whose every element must come from the checkpoint; False for a buffer.
    carried: no tensor of the model but memory for a whole checkpoint tensor that the loader is given at install.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    parameter: bool = True
    carried: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides):
            raise LayoutError(
                f"live tensor {self.name!r}: shape {self.shape} and strides {self.strides} differ in length"
            )

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def span_numel(self) -> int:
        """Elements from the first to the last one, gaps included; 0 for an empty tensor."""
        if self.numel == 0:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, kw_only=True)
class CopyTable:
    """Slice copies as parallel arrays; row i is one copy. Axes are outermost first, unused ones have count 1, stride 0.

    tensor, live: [n] positions in CheckpointSpec.tensors and SourceMap.live. src_start, live_start: [n] elements.
    count, src_stride, live_stride: [n, num_axes]; strides may be negative.
    """

    tensor: Int64Array
    live: Int64Array
    src_start: Int64Array
    live_start: Int64Array
    count: Int64Array
    src_stride: Int64Array
    live_stride: Int64Array

    def __post_init__(self) -> None:
        n = len(self.tensor)
        for name in ("live", "src_start", "live_start", "count", "src_stride", "live_stride"):
            if len(getattr(self, name)) != n:
                raise LayoutError(f"copy table: column {name!r} has {len(getattr(self, name))} rows, expected {n}")
        if self.count.shape != self.src_stride.shape or self.count.shape != self.live_stride.shape:
            raise LayoutError("copy table: count, src_stride and live_stride must have the same shape")
        if n and int(self.count.min(initial=1)) < 1:
            raise LayoutError("copy table: every count must be at least 1")

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def numel(self) -> Int64Array:
        """[n] elements of each copy."""
        return self.count.prod(axis=1) if len(self) else np.zeros(0, dtype=np.int64)

    @classmethod
    def empty(cls, num_axes: int = 1) -> CopyTable:
        z = np.zeros(0, dtype=np.int64)
        zz = np.zeros((0, num_axes), dtype=np.int64)
        return cls(tensor=z, live=z, src_start=z, live_start=z, count=zz, src_stride=zz, live_stride=zz)

    @classmethod
    def concatenate(cls, first: CopyTable, second: CopyTable) -> CopyTable:
        """The copies of one table after those of the other; the narrower one gets axes of count 1."""
        num_axes = max(first.count.shape[1], second.count.shape[1])

        def wide(table: CopyTable, column: str, fill: int) -> Int64Array:
            found: Int64Array = getattr(table, column)
            missing = num_axes - found.shape[1]
            return np.pad(found, ((0, 0), (missing, 0)), constant_values=fill)

        flat = {
            name: np.concatenate([getattr(first, name), getattr(second, name)])
            for name in ("tensor", "live", "src_start", "live_start")
        }
        axes = {
            name: np.concatenate([wide(first, name, fill), wide(second, name, fill)])
            for name, fill in (("count", 1), ("src_stride", 0), ("live_stride", 0))
        }
        return cls(**flat, **axes)

    @classmethod
    def from_rows(cls, rows: list[tuple[int, int, int, int, tuple[tuple[int, int, int], ...]]]) -> CopyTable:
        """From (tensor, live, src_start, live_start, ((count, src_stride, live_stride), ...)) tuples."""
        num_axes = max((len(r[4]) for r in rows), default=1) or 1
        n = len(rows)
        heads = np.array([r[:4] for r in rows], dtype=np.int64).reshape(n, 4)
        axes = np.zeros((n, num_axes, 3), dtype=np.int64)
        axes[:, :, 0] = 1
        for i, r in enumerate(rows):
            if r[4]:
                axes[i, num_axes - len(r[4]) :] = r[4]
        return cls(
            tensor=heads[:, 0].copy(), live=heads[:, 1].copy(), src_start=heads[:, 2].copy(), live_start=heads[:, 3].copy(),
            count=axes[:, :, 0].copy(), src_stride=axes[:, :, 1].copy(), live_stride=axes[:, :, 2].copy(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Live elements that hold the same bits whatever is loaded: padding is state.

    A lattice as in CopyTable without a source. bits: the raw bits of the value, as an unsigned integer.
    """

    live: int
    live_start: int
    axes: tuple[tuple[int, int], ...]  # (count, live_stride)
    bits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderGroup:
    """Live tensors that are what the worker's own load_weights makes of some checkpoint tensors, given in one call.

    live: positions in SourceMap.live; may be empty, because all workers of an engine make the same calls.
    tensors: positions in CheckpointSpec.tensors, ascending. The map has a carried live tensor for each.
    """

    live: tuple[int, ...]
    tensors: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class SourceMap:
    """All that is known of one worker's layout. Equal layouts have equal fingerprints.

    spec_digest: of the CheckpointSpec it was probed against.
    copies: together with `constants` and `untouched` they account for each live element of the tensors that are in no
        loader group exactly once. Each carried tensor is one copy of its checkpoint tensor, element by element.
    untouched: live tensor name -> elements the loader never wrote.
    loader_groups: what the worker's own loader computes, and from what.
    """

    spec_digest: str
    live: tuple[LiveTensor, ...]
    copies: CopyTable
    constants: tuple[Constant, ...] = ()
    untouched: Mapping[str, int] = field(default_factory=dict)
    loader_groups: tuple[LoaderGroup, ...] = ()

    @cached_property
    def computed(self) -> frozenset[int]:
        """Positions in `live` of the tensors that the worker's own loader computes."""
        return frozenset(i for group in self.loader_groups for i in group.live)

    @property
    def carried(self) -> tuple[LiveTensor, ...]:
        """The live tensors that are memory for whole checkpoint tensors."""
        return tuple(t for t in self.live if t.carried)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest that changes when any live byte comes from elsewhere."""
        h = hashlib.blake2b(digest_size=16)
        h.update(self.spec_digest.encode())
        for t in self.live:
            h.update(repr((t.name, t.shape, t.strides, t.dtype.name, t.parameter, t.carried)).encode())
        c = self.copies
        for column in (c.tensor, c.live, c.src_start, c.live_start, c.count, c.src_stride, c.live_stride):
            h.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        h.update(repr((self.constants, sorted(self.untouched.items()), self.loader_groups)).encode())
        return h.hexdigest()

    def copied_nbytes(self, spec_itemsizes: npt.NDArray[Any]) -> int:
        """Checkpoint bytes the copies draw on; `spec_itemsizes` is [num_tensors], bytes per checkpoint element."""
        return int((self.copies.numel * spec_itemsizes[self.copies.tensor]).sum())
