"""The contract of pack/assemble kernels: strided copies over a descriptor table (`program.DESCRIPTOR`)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UsageError

__all__ = ["LOOK_SECONDS", "Buffer", "DoneTicket", "Kernels", "Ticket"]

LOOK_SECONDS = 50e-6  # between two looks at a ticket


class Buffer(NamedTuple):
    """A piece of memory: address of its first byte, length in bytes. Its owner keeps it alive while a kernel is bound.

    device: number of the CUDA device whose kernels find it at that address; None: those of the CPU do.
    """

    address: int
    nbytes: int
    device: int | None = None


class Ticket(ABC):
    """An asynchronous launch. On a CPU it is done at once; on a GPU it stands for an event on a side stream."""

    @abstractmethod
    def done(self) -> bool:
        """True when all bytes are in place, for the CPU and for whatever is launched from now on. Never blocks."""

    def wait(self, timeout_seconds: float) -> bool:
        """Block until it is done; False when the time was up before."""
        give_up = time.monotonic() + timeout_seconds
        while not self.done():
            if time.monotonic() >= give_up:
                return False
            time.sleep(LOOK_SECONDS)
        return True


class DoneTicket(Ticket):
    def done(self) -> bool:
        return True


class Kernels(ABC):
    """One implementation. Instances hold no state that outlives a call but their thread pool, if any."""

    name: str
    device: int | None = None
    """Number of the CUDA device that they work on, and whose memory buffers must be; None: the CPU's."""

    def on(self, device: int | None) -> Kernels:
        """Those for the memory of that device; the same object each time.

        Raises UsageError, with what to do about it, when there are none.
        """
        if device == self.device:
            return self
        where = "memory of the CPU" if self.device is None else f"cuda:{self.device}"
        raise UsageError(f"the kernels {self.name!r} work on {where} only; leave Options(kernels=...) at None")

    def follow_caller(self) -> None:
        """Launches from here on come after all that the calling thread's current stream holds now.

        Called by the thread that writes or reads the live tensors, while it stands still. Does not block. On a CPU what a
        thread has done is done.
        """
        return

    @abstractmethod
    def prepare(self, table: npt.NDArray[np.void], sources: Sequence[Buffer], destinations: Sequence[Buffer]) -> Any:
        """Bind a descriptor table to memory, once, at connect. Returns an opaque value for `launch`.

        Raises UsageError naming the row and both numbers when a descriptor leaves its buffer, on an unknown op, when
        an itemsize does not fit its op, or when a buffer is memory of another device.
        """

    @abstractmethod
    def launch(self, prepared: Any) -> Ticket:
        """Run a prepared table, after those launched before. A table is launched again only when its last ticket is done.

        May be called from any thread; releases the GIL where the implementation can.
        """
