"""Triton kernels: the same descriptor tables on a GPU, one launch a table on a side stream.

Checked against the reference in Triton's interpreter (TRITON_INTERPRET=1), whole sessions included, and compiled for NVIDIA
GPUs, but not yet run on one: nothing is known of their speed. Imported only when asked for, because it needs the package
`triton` (the extra `gpu`).

Addresses travel as int64 and become pointers inside the kernel, so a table may read and write any number of buffers: live
tensors, slots, a neighbour's slots mapped over CUDA IPC, pinned host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from triton.runtime.interpreter import InterpretedFunction

from weightbridge.errors import UsageError
from weightbridge.kernels.base import Buffer, DoneTicket, Kernels, Ticket
from weightbridge.kernels.bounds import check_table
from weightbridge.kernels.device_table import ROW_WIDTH, device_rows, pieces_of
from weightbridge.kernels.triton_moves import run_piece
from weightbridge.program.program import Op

__all__ = ["EventTicket", "TritonKernels", "require_device"]

BLOCK_NUMEL = 1024
"""Elements one program of the grid moves. A constant of the compiled kernel."""
INTERPRETED = isinstance(run_piece, InterpretedFunction)
"""True when TRITON_INTERPRET=1 was set as this module was imported: the kernels then run in NumPy, on CPU memory."""

_one_at_a_time = threading.Lock()  # in the interpreter, which keeps its place in the grid in a global


class EventTicket(Ticket):
    """Done when the side stream has passed `event`. Keeps the table's device memory alive until then."""

    def __init__(self, event: Any, keep: object) -> None:
        self._event = event
        self._keep = keep

    def done(self) -> bool:
        return bool(self._event.query())

    @property
    def event(self) -> Any:
        """For a stream that has to come after: `stream.wait_event(ticket.event)`, without stopping the host."""
        return self._event


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """rows, pieces: device_table's, in device memory. event: for the launch in flight; None in the interpreter."""

    rows: torch.Tensor
    pieces: torch.Tensor
    event: Any


def require_device() -> None:
    """Raises UsageError where torch sees no CUDA device."""
    if not torch.cuda.is_available():
        raise UsageError(
            "the Triton kernels need a CUDA device and torch sees none; choose the kernels 'native', or set "
            "TRITON_INTERPRET=1 before the start to try them slowly on a CPU"
        )


class TritonKernels(Kernels):
    """Runs tables on one CUDA device, whose memory the buffers lie in (or is mapped there), in order of their launches.

    device: its number; None means the current one. Raises UsageError where there is no CUDA device, unless Triton's
    interpreter was asked for, which works on memory of the CPU. Compiles and loads the kernel, which takes seconds the
    first time on a machine, and waits until the device has done all it was given so far.
    """

    name = "triton"

    def __init__(self, device: int | None = None) -> None:
        if INTERPRETED:
            self._place, self._stream = torch.device("cpu"), None
            return
        require_device()
        self.device = torch.cuda.current_device() if device is None else device
        self._place = torch.device("cuda", self.device)
        self._stream = torch.cuda.Stream(self._place)  # type: ignore[no-untyped-call]
        nothing = self._on_device(np.zeros((1, ROW_WIDTH), np.int64), np.zeros((1, 2), np.int64))
        self.launch(nothing)  # no element: the first update finds the kernel compiled and loaded
        torch.cuda.synchronize(self._place)

    def follow_caller(self) -> None:
        """See `Kernels.follow_caller`. What other streams of the caller hold is its own to wait for."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._place))

    def prepare(
        self, table: npt.NDArray[np.void], sources: Sequence[Buffer], destinations: Sequence[Buffer]
    ) -> _Prepared:
        """Check the table, resolve addresses, and put rows and pieces into device memory. See `Kernels.prepare`."""
        check_table(table, sources, destinations, self.device)
        rows = device_rows(table, sources, destinations)
        return self._on_device(rows, pieces_of(rows, BLOCK_NUMEL))

    def _on_device(self, rows: npt.NDArray[np.int64], pieces: npt.NDArray[np.int64]) -> _Prepared:
        event = None
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)  # makes it: an update only records it again
        # Copied from memory that is not pinned: there when the call returns.
        there = [torch.from_numpy(array).to(self._place) for array in (rows, pieces)]
        return _Prepared(rows=there[0], pieces=there[1], event=event)

    def launch(self, prepared: _Prepared) -> Ticket:
        """Queue the table behind all launches so far and what `follow_caller` saw; returns at once. See `Kernels.launch`."""
        grid = (len(prepared.pieces),)
        if grid == (0,):
            return DoneTicket()
        if self._stream is None:
            with _one_at_a_time:
                run_piece[grid](prepared.rows, prepared.pieces, BLOCK_NUMEL)
            return DoneTicket()
        with torch.cuda.device(self._place), torch.cuda.stream(self._stream):
            run_piece[grid](prepared.rows, prepared.pieces, BLOCK_NUMEL)
            prepared.event.record(self._stream)
        return EventTicket(prepared.event, prepared)


if {*Op.BY_DTYPES.values()} != {*range(Op.F32_TO_BF16, Op.F16_TO_F64 + 1)}:
    raise UsageError("the casts of program.Op have changed: teach the Triton kernels the new ones")
