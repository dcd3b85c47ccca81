"""Host memory in a worker's own layout: what a trainer sends from while it trains on, and what an engine takes a version into
while it generates.

The copy has a buffer for each live tensor, of the same length and with every element at the same offset, so descriptor
tables that are bound to live tensors can be bound to it instead. Between the two only the elements that the worker's
source map names are copied: what lies between the rows of a strided tensor belongs to somebody else.

On a GPU the copy between device and pinned host memory takes the place of the kernel launch in `_copy`; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InternalError, UnsupportedError
from weightbridge.kernels.base import Buffer, Kernels
from weightbridge.layout import SourceMap
from weightbridge.program.program import DESCRIPTOR, MAX_AXES, Op
from weightbridge.transports.memory import SharedMemory

__all__ = ["HostCopy"]

_ALIGNMENT = 4096


class HostCopy:
    """The host copy of one worker's live tensors. Not thread-safe: its owner sees to it that nobody reads what is written."""

    def __init__(self, source_map: SourceMap, kernels: Kernels) -> None:
        """Takes the memory at once: as much as the spans of the live tensors that the map names elements of."""
        self._kernels = kernels
        self._table = _rows(source_map)
        used = np.zeros(len(source_map.live), dtype=bool)
        used[source_map.copies.live] = True
        sizes = [t.span_numel * t.dtype.itemsize if u else 0 for t, u in zip(source_map.live, used, strict=True)]
        offsets = np.concatenate([[0], np.cumsum([-(-n // _ALIGNMENT) * _ALIGNMENT for n in sizes])]).astype(np.int64)
        self.nbytes = int(offsets[-1])
        self._memory = SharedMemory(max(self.nbytes, _ALIGNMENT), prefault=True)
        base = self._memory.memory.buffer.address
        self._buffers = tuple(Buffer(base + int(at), n) for at, n in zip(offsets[:-1], sizes, strict=True))
        self._bound: dict[str, tuple[tuple[Buffer, ...], Any]] = {}  # direction -> (live buffers, prepared table)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """In the order of SourceMap.live; a live tensor that the map names nothing of has no bytes."""
        return self._buffers

    def capture(self, live: tuple[Buffer, ...]) -> None:
        """Live tensors to host. live: in the order of SourceMap.live."""
        self._copy("capture", live, live, self._buffers)

    def install(self, live: tuple[Buffer, ...]) -> None:
        """Host to live tensors."""
        self._copy("install", live, self._buffers, live)

    def close(self) -> None:
        """Give the memory back. Nothing may be bound to it any more."""
        self._bound.clear()
        self._memory.close()

    def _copy(self, way: str, live: tuple[Buffer, ...], sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
        """A table is bound once, and again only when a live tensor has moved."""
        bound = self._bound.get(way)
        if bound is None or (bound[0] is not live and bound[0] != live):
            bound = self._bound[way] = (live, self._kernels.prepare(self._table, sources, targets))
        ticket = self._kernels.launch(bound[1])
        if not ticket.done():
            raise InternalError(
                "a copy between host and live memory is not done; wait for its ticket before it is used"
            )


def _rows(source_map: SourceMap) -> npt.NDArray[np.void]:
    """One descriptor for each live tensor of which every element comes from the checkpoint and that has no gaps, one
    for each copy of the map otherwise; offsets are the same on both sides."""
    copies = source_map.copies
    itemsize = np.array([t.dtype.itemsize for t in source_map.live], dtype=np.int64)
    mapped = np.bincount(copies.live, weights=copies.numel, minlength=len(source_map.live)).astype(np.int64)
    numel = np.array([t.numel for t in source_map.live], dtype=np.int64)
    dense = np.array([t.numel == t.span_numel for t in source_map.live], dtype=bool)
    whole = dense & (mapped >= numel) & (numel > 0)
    rest = np.flatnonzero(~whole[copies.live])
    outer = max(0, copies.count.shape[1] - MAX_AXES)
    if (copies.count[rest, :outer] > 1).any():
        raise UnsupportedError(f"a copy of the layout needs more than {MAX_AXES} axes; none is supported")
    count, stride = copies.count[rest, outer:], copies.live_stride[rest, outer:]
    wholes = np.flatnonzero(whole)
    table = np.zeros(len(wholes) + len(count), dtype=DESCRIPTOR)
    table["count"] = 1
    table["op"] = Op.COPY
    head, tail = table[: len(wholes)], table[len(wholes) :]
    head["src_buffer"] = wholes
    head["itemsize"] = itemsize[wholes]
    head["count"][:, -1] = numel[wholes]
    head["src_stride"][:, -1] = itemsize[wholes]
    size = itemsize[copies.live[rest]]
    tail["src_buffer"] = copies.live[rest]
    tail["itemsize"] = size
    tail["src_offset"] = copies.live_start[rest] * size
    axes = count.shape[1]
    tail["count"][:, MAX_AXES - axes :] = count
    tail["src_stride"][:, MAX_AXES - axes :] = stride * size[:, None]
    table["dst_buffer"], table["dst_offset"], table["dst_stride"] = (
        table["src_buffer"],
        table["src_offset"],
        table["src_stride"],
    )
    return table
