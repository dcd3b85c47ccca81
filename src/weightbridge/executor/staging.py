"""Host memory in a worker's own layout: what a trainer sends from while it trains on, and what an engine takes a version into
while it generates.

The copy has a buffer for each live tensor, of the same length and with every element at the same offset, so descriptor
tables that are bound to live tensors can be bound to it instead. Between the two only elements that versions consist of
are copied, never what lies between or beside them: that belongs to somebody else. Live tensors that share memory are
copied one by one; every byte that two of them name comes from one checkpoint element, so either copy of it is right.

`_copy` is the one place where bytes pass between live and host memory. For live tensors on a GPU the copy is pinned where it
lies, for that GPU's kernels, and `_copy` waits for their ticket.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.errors import ProbeError, RegistrationError, TransferTimeout, UsageError
from weightbridge.executor.device import HostWindows, kernels_for
from weightbridge.kernels.base import Buffer, Kernels
from weightbridge.kernels.bounds import DESTINATION_ITEMSIZE
from weightbridge.layout.source_map import LiveTensor, SourceMap
from weightbridge.probe.fields import memory_order
from weightbridge.program.program import DESCRIPTOR, MAX_AXES, Op, WorkerProgram

__all__ = ["HostCopy"]

_ALIGNMENT = 64  # of a buffer; a page each would cost a model of many tiny tensors more than its weights do

_Table = npt.NDArray[np.void]
_Way = Literal["capture", "install"]
_DEADLINE_SECONDS = 300.0  # of a copy on a GPU, and of what the caller's stream holds before it


class _Bound(NamedTuple):
    """One direction. live: what it is bound to."""

    live: tuple[Buffer, ...]
    kernels: Kernels
    prepared: Any


class HostCopy:
    """The host copy of one worker's live tensors. Not thread-safe: its owner sees to it that nobody reads what is written,
    and keeps it until no kernel is bound to it: its memory goes with it."""

    def __init__(self, source_map: SourceMap, kernels: Kernels) -> None:
        """Of all elements that the map names: what any program of this worker reads or writes, whatever the plan.

        Takes the memory at once: as much as the spans of the live tensors concerned. RegistrationError when there is not
        as much to be had.
        """
        self._take(source_map.live, _rows_of_map(source_map), kernels)

    @classmethod
    def for_program(cls, program: WorkerProgram, live: Sequence[LiveTensor], kernels: Kernels) -> HostCopy:
        """Of the elements that one program reads (trainer) or writes (rollout) alone. live: SourceMap.live of its map.

        Less than the map's where trainers hold the same tensors. A capture serves this program only: after another plan
        the worker may have to send elements that it did not copy.
        """
        self = cls.__new__(cls)
        self._take(live, _rows_of_program(program), kernels)
        return self

    def _take(self, live: Sequence[LiveTensor], rows: _Table, kernels: Kernels) -> None:
        self._live = tuple(live)
        self._kernels = kernels
        self._table = _both_ways(_merge_runs(_with_whole_tensors(live, rows)))
        self._copied_bytes = int((self._table["count"].prod(axis=1) * self._table["itemsize"]).sum())
        sizes = np.array([t.span_numel * t.dtype.itemsize for t in live], dtype=np.int64)
        used = np.zeros(len(live), dtype=bool)
        used[self._table["src_buffer"]] = True
        self._used = np.flatnonzero(used).tolist()
        sizes[~used] = 0
        ends = np.cumsum(-(-sizes // _ALIGNMENT) * _ALIGNMENT)
        self._memory = _prefaulted(max(int(ends[-1]) if len(ends) else 0, mmap.PAGESIZE))
        base = _address(self._memory)
        starts = base + np.concatenate([[0], ends]).astype(np.int64)[:-1]
        self._buffers = tuple(map(Buffer, starts.tolist(), sizes.tolist()))
        self._windows = HostWindows()
        # Before its memory goes, also when the copy is only let go of.
        self._unpin = weakref.finalize(self, self._windows.close)
        self._unpin.atexit = False
        self._bound: dict[_Way, _Bound] = {}

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """In the order of SourceMap.live; a live tensor that nothing is copied of has no bytes."""
        return self._buffers

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes; 0 once closed."""
        return 0 if self._memory.closed else len(self._memory)

    def capture(self, live: tuple[Buffer, ...]) -> int:
        """Live tensors to host; returns the bytes copied. live: in the order of SourceMap.live."""
        return self._copy("capture", live)

    def install(self, live: tuple[Buffer, ...]) -> int:
        """Host to live tensors; returns the bytes copied. live: in the order of SourceMap.live."""
        return self._copy("install", live)

    def close(self) -> None:
        """Give the memory back; idempotent. Nothing may be bound to it any more."""
        self._bound.clear()
        self._unpin()
        self._memory.close()

    def bind(self, way: _Way, live: tuple[Buffer, ...]) -> None:
        """Make ready for one direction: pin the copy if the live tensors lie on a GPU, bind the kernels. Touches no tensor.

        Called at connect, so that no update has to; costs nothing when it is given the tuple that it is bound to. Raises
        UnsupportedError, naming the tensor, for live tensors that the kernels do not work on; RegistrationError.
        """
        if self._memory.closed:
            raise UsageError(f"cannot {way}: the host copy is closed; make another one")
        bound = self._bound.get(way)
        if bound is not None and (bound.live is live or bound.live == live):
            return
        kernels = kernels_for(self._kernels, self._live, live, self._used)
        host = self._seen_by(kernels)
        sides = (live, host) if way == "capture" else (host, live)
        self._bound[way] = _Bound(live, kernels, kernels.prepare(self._table, *sides))

    def _seen_by(self, kernels: Kernels) -> tuple[Buffer, ...]:
        """The buffers where these kernels find them."""
        if kernels.device is None:
            return self._buffers
        memory = Buffer(_address(self._memory), len(self._memory))
        window = self._windows.of(memory, kernels.device)
        return tuple(
            Buffer(b.address - memory.address + window.address, b.nbytes, window.device) for b in self._buffers
        )

    def _copy(self, way: _Way, live: tuple[Buffer, ...]) -> int:
        """By the thread that works on the live tensors: its stream comes before the copy, and what it does next after it."""
        self.bind(way, live)
        bound = self._bound[way]
        bound.kernels.follow_caller()
        if not bound.kernels.launch(bound.prepared).wait(_DEADLINE_SECONDS):
            self._unpin.detach()  # what still runs may write it
            raise TransferTimeout(
                f"a copy between the live tensors and host memory has not ended within {_DEADLINE_SECONDS:.0f} s; look at what "
                "the caller's stream waits for",
                waiting_for=(), seconds=_DEADLINE_SECONDS,
            )  # fmt: skip
        return self._copied_bytes


# --- memory -----------------------------------------------------------------------------------------------------------


def _prefaulted(nbytes: int) -> mmap.mmap:
    """Zeroed memory of which every page is there. A forked child does not have it, so that no write makes a page anew."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)
    except (OSError, OverflowError) as error:
        raise RegistrationError(
            f"no {nbytes} bytes of host memory for a copy of the weights: {error}; free some memory, or go without "
            "stage_send and stage_receive"
        ) from error
    # NumPy releases the GIL for this, mmap does not with MAP_POPULATE: it may take seconds, and heartbeats must go on.
    np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# --- which elements ---------------------------------------------------------------------------------------------------
# Tables of DESCRIPTOR below have the source's side filled alone; `_both_ways` sets the other side to the same.


def _rows_of_map(source_map: SourceMap) -> _Table:
    """One row for each copy of the map, several for one of more than MAX_AXES axes."""
    copies = source_map.copies
    size = np.array([t.dtype.itemsize for t in source_map.live] or [1], dtype=np.int64)[copies.live]
    order = np.argsort(copies.count > 1, axis=1, kind="stable")  # axes of one element first
    count = np.take_along_axis(copies.count, order, axis=1)
    stride = np.take_along_axis(copies.live_stride, order, axis=1)
    live, start = copies.live, copies.live_start
    while count.shape[1] > MAX_AXES:
        times = count[:, 0]
        row = np.repeat(np.arange(len(count)), times)
        index = np.arange(len(row)) - np.repeat(np.cumsum(times) - times, times)
        live, size, start = live[row], size[row], start[row] + index * stride[row, 0]
        count, stride = count[row, 1:], stride[row, 1:]
    return _table(live, start * size, count, stride * size[:, None], size)


def _rows_of_program(program: WorkerProgram) -> _Table:
    """What its pack tables read and its assemble tables write, each row once."""
    packs = np.concatenate([r.pack for r in program.rounds] or [np.zeros(0, dtype=DESCRIPTOR)])
    puts = np.concatenate([r.assemble.table for r in program.rounds] or [np.zeros(0, dtype=DESCRIPTOR)])
    put_size = puts["itemsize"].astype(np.int64)
    for op, itemsize in DESTINATION_ITEMSIZE.items():
        put_size[puts["op"] == op] = itemsize
    reads = _table(packs["src_buffer"], packs["src_offset"], packs["count"], packs["src_stride"], packs["itemsize"])
    writes = _table(puts["dst_buffer"], puts["dst_offset"], puts["count"], puts["dst_stride"], put_size)
    return np.unique(np.concatenate([reads, writes]))  # one element may be packed for several receivers


def _table(live: Any, offset: Any, count: Any, stride: Any, itemsize: Any) -> _Table:
    """live, offset, itemsize: [n]. count, stride: [n, up to MAX_AXES]. Offsets and strides are bytes."""
    table = np.zeros(len(live), dtype=DESCRIPTOR)
    first = MAX_AXES - count.shape[1]
    table["count"][:, :first] = 1
    table["count"][:, first:] = count
    table["src_stride"][:, first:] = np.where(count > 1, stride, 0)
    table["src_buffer"], table["src_offset"], table["itemsize"], table["op"] = live, offset, itemsize, Op.COPY
    return table


def _with_whole_tensors(live: Sequence[LiveTensor], rows: _Table) -> _Table:
    """The same elements, with one row for each live tensor that the rows cover; they name no element of it twice."""
    named = np.bincount(rows["src_buffer"], weights=rows["count"].prod(axis=1), minlength=len(live)).astype(np.int64)
    numel = np.array([t.numel for t in live], dtype=np.int64)
    axes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    whole = np.zeros(len(live), dtype=bool)
    for i in np.flatnonzero((named == numel) & (numel > 0)).tolist():
        form = (live[i].shape, live[i].strides)
        if form not in axes:
            axes[form] = _nested_axes(live[i])
        whole[i] = len(axes[form]) > 0
    covered = np.flatnonzero(whole)
    count, stride = np.ones((2, len(covered), MAX_AXES), dtype=np.int64)
    for row, i in enumerate(covered.tolist()):
        found = axes[live[i].shape, live[i].strides]
        count[row, MAX_AXES - len(found) :], stride[row, MAX_AXES - len(found) :] = zip(*found, strict=True)
    size = np.array([live[i].dtype.itemsize for i in covered.tolist()], dtype=np.int64)
    merged = _table(covered, np.zeros_like(covered), count, stride * size[:, None], size)
    return np.concatenate([merged, rows[~whole[rows["src_buffer"]]]])


def _nested_axes(tensor: LiveTensor) -> list[tuple[int, int]]:
    """(extent, stride in elements) of a tensor whose elements all have memory of their own; empty when that is not plain
    to see, or takes more than MAX_AXES axes."""
    if any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.strides, strict=True)):
        return []
    try:
        axes = memory_order(tensor) or [(1, 0)]
    except ProbeError:  # elements share memory, or their rows are interlaced
        return []
    return axes if len(axes) <= MAX_AXES else []


def _merge_runs(rows: _Table) -> _Table:
    """The same bytes with rows joined that are contiguous and lie end to end; in order of memory."""
    rows = rows[np.lexsort((rows["src_offset"], rows["src_buffer"]))]
    size = rows["itemsize"].astype(np.int64)
    nbytes, flat = size.copy(), np.ones(len(rows), dtype=bool)
    for axis in range(MAX_AXES - 1, -1, -1):
        count = rows["count"][:, axis]
        flat &= (count == 1) | (rows["src_stride"][:, axis] == nbytes)
        nbytes *= count
    end = rows["src_offset"] + nbytes
    joins = flat[1:] & flat[:-1] & (rows["src_buffer"][1:] == rows["src_buffer"][:-1])
    joins &= (rows["src_offset"][1:] == end[:-1]) & (size[1:] == size[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joins])) if len(rows) else np.zeros(0, dtype=np.int64)
    runs, grown = rows[first], np.diff(np.append(first, len(rows))) > 1
    total = np.add.reduceat(nbytes, first) if len(first) else nbytes
    size = size[first][grown, None]
    runs[grown] = _table(
        runs["src_buffer"][grown], runs["src_offset"][grown], total[grown, None] // size, size, size[:, 0]
    )
    return runs


def _both_ways(rows: _Table) -> _Table:
    rows["dst_buffer"], rows["dst_offset"], rows["dst_stride"] = (
        rows["src_buffer"],
        rows["src_offset"],
        rows["src_stride"],
    )
    return rows
