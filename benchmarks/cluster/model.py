"""What a worker of a benchmark holds: live tensors as its source map says, a loader, and values that prove themselves.

The bits of checkpoint element g in version v are PATTERN[g mod 65521] + v * 7919, modulo 2**16 (in both halves of a 32-bit
element): 65521 is prime, so no misplaced row, tensor or shard has the right bits, and neither has an earlier version.
Everything is done on rectangles of checkpoint tensors read as matrices (first dim x the others).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.layout import SourceMap

__all__ = ["Rectangle", "WorkerModel", "rectangles", "shared_rectangle"]

AnyArray = npt.NDArray[Any]

_PERIOD = 65521
_STEP_OF_A_VERSION = 7919
_CHUNK_NUMEL = 1 << 19
_COLUMNS = 1 << 16
_PATTERN = ((np.arange(_PERIOD + _COLUMNS, dtype=np.int64) % _PERIOD) * 40503 + 977).astype(np.uint16)


class Rectangle(NamedTuple):
    """Rows [row, row + num_rows) and columns [col, col + num_cols) of a checkpoint tensor, read as a matrix, and where
    they lie in a live tensor: row i begins at live element live_start + i * live_pitch."""

    tensor: int
    row: int
    num_rows: int
    col: int
    num_cols: int
    live: int
    live_start: int
    live_pitch: int

    @property
    def numel(self) -> int:
        return self.num_rows * self.num_cols


def rectangles(spec: CheckpointSpec, source_map: SourceMap) -> list[Rectangle]:
    """A map's copies, in its order. Every copy must be a rectangle with one axis of rows and one of columns."""
    copies = source_map.copies
    pitch = [max(prod(t.shape[1:]), 1) for t in spec.tensors]
    found = []
    for i, tensor in enumerate(copies.tensor.tolist()):
        num_rows, num_cols = copies.count[i].tolist()
        row, col = divmod(int(copies.src_start[i]), pitch[tensor])
        source, target = copies.src_stride[i].tolist(), copies.live_stride[i].tolist()
        if (num_rows > 1 and source[0] != pitch[tensor]) or (num_cols > 1 and (source[1], target[1]) != (1, 1)):
            raise ValueError(f"copy {i} of tensor {spec.tensors[tensor].name!r} is not a rectangle")
        found.append(
            Rectangle(tensor, row, num_rows, col, num_cols, int(copies.live[i]), int(copies.live_start[i]), target[0])
        )
    return found


def shared_rectangle(a: Rectangle, b: Rectangle) -> tuple[Rectangle, Rectangle] | None:
    """What two rectangles of one tensor have in common, as it lies at either side; None for nothing."""
    row, end = max(a.row, b.row), min(a.row + a.num_rows, b.row + b.num_rows)
    col, stop = max(a.col, b.col), min(a.col + a.num_cols, b.col + b.num_cols)
    if a.tensor != b.tensor or row >= end or col >= stop:
        return None

    def part(r: Rectangle) -> Rectangle:
        start = r.live_start + (row - r.row) * r.live_pitch + col - r.col
        return Rectangle(r.tensor, row, end - row, col, stop - col, r.live, start, r.live_pitch)

    return part(a), part(b)


class WorkerModel:
    """The live tensors of one worker and the loader of its framework: it puts the rectangles of its map in place."""

    def __init__(self, spec: CheckpointSpec, source_map: SourceMap) -> None:
        self.spec = spec
        self.rectangles = rectangles(spec, source_map)
        self._bits: list[AnyArray] = []
        self._live: dict[str, torch.Tensor] = {}
        for t in source_map.live:
            raw = np.zeros(max(t.numel, 1), dtype=f"u{t.dtype.itemsize}")
            raw.fill(0)  # every page is there before memory is measured
            self._bits.append(raw)
            flat = torch.from_numpy(raw.view(f"i{t.dtype.itemsize}")).view(getattr(torch, t.dtype.torch_name))
            self._live[t.name] = flat[: t.numel].view(t.shape)
        self._flat = [t.view(-1) for t in self._live.values()]
        self._of_tensor: dict[int, list[Rectangle]] = {}
        for r in self.rectangles:
            self._of_tensor.setdefault(r.tensor, []).append(r)
        self._padding: dict[int, list[tuple[int, int]]] = {}  # live tensor -> (first element, elements) that hold zero
        for c in source_map.constants:
            self._padding.setdefault(c.live, []).append((c.live_start, prod(count for count, _ in c.axes)))

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self._bits)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._live

    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        """From (checkpoint name, whole tensor) pairs. Padding is zeroed with the tensor it belongs to."""
        for name, tensor in stream:
            matrix = tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)
            for r in self._of_tensor.get(self.spec.index[name], ()):
                flat = self._flat[r.live]
                target = flat.as_strided(
                    (r.num_rows, r.num_cols), (r.live_pitch, 1), flat.storage_offset() + r.live_start
                )
                target.copy_(matrix[r.row : r.row + r.num_rows, r.col : r.col + r.num_cols])
                for start, numel in self._padding.get(r.live, ()):
                    flat[start : start + numel] = 0

    def bits(self, r: Rectangle) -> AnyArray:
        """A rectangle's live elements as raw bits, [num_rows, num_cols], writable."""
        raw = self._bits[r.live]
        strides = (r.live_pitch * raw.itemsize, raw.itemsize)
        return np.lib.stride_tricks.as_strided(raw[r.live_start :], (r.num_rows, r.num_cols), strides)

    def fill(self, version: int) -> None:
        """Give every element its value of `version`."""
        for r in self.rectangles:
            target = self.bits(r)
            for rows, cols, expected in _expected(self.spec, r, version, target.dtype):
                target[rows, cols] = expected

    def wrong(self, version: int) -> list[str]:
        """Checkpoint names of whatever is not bit for bit `version`, each once; [] when all is well."""
        found: dict[str, None] = {}
        for r in self.rectangles:
            have = self.bits(r)
            if any(
                (have[rows, cols] != want).any() for rows, cols, want in _expected(self.spec, r, version, have.dtype)
            ):
                found[self.spec.tensors[r.tensor].name] = None
        return list(found)


def _expected(
    spec: CheckpointSpec, r: Rectangle, version: int, dtype: npt.DTypeLike
) -> Iterator[tuple[slice, slice, AnyArray]]:
    """(rows, columns, bits) of a rectangle, piece by piece."""
    pitch = max(prod(spec.tensors[r.tensor].shape[1:]), 1)
    first = int(spec.numel_offsets[r.tensor]) + r.row * pitch + r.col
    step = np.uint16(version * _STEP_OF_A_VERSION % (1 << 16))
    for col in range(0, r.num_cols, _COLUMNS):
        width = min(_COLUMNS, r.num_cols - col)
        windows = np.lib.stride_tricks.sliding_window_view(_PATTERN, width)
        rows_at_once = max(_CHUNK_NUMEL // width, 1)
        for row in range(0, r.num_rows, rows_at_once):
            end = min(row + rows_at_once, r.num_rows)
            starts = (first + col + np.arange(row, end, dtype=np.int64) * pitch) % _PERIOD
            bits = windows[starts] + step
            if np.dtype(dtype).itemsize == 4:
                bits = bits.astype(np.uint32) * np.uint32(65537)
            yield slice(row, end), slice(col, col + width), bits
