"""The contract of pack/assemble kernels: strided copies over a descriptor table (`program.DESCRIPTOR`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Buffer", "DoneTicket", "Kernels", "Ticket"]


class Buffer(NamedTuple):
    """A piece of memory: address of its first byte, length in bytes. Its owner keeps it alive while a kernel is bound."""

    address: int
    nbytes: int


class Ticket(ABC):
    """An asynchronous launch. On a CPU it is done at once; on a GPU it stands for an event on a side stream."""

    @abstractmethod
    def done(self) -> bool:
        """True when all bytes are in place. Never blocks."""


class DoneTicket(Ticket):
    def done(self) -> bool:
        return True


class Kernels(ABC):
    """One implementation. Instances hold no state that outlives a call but their thread pool, if any."""

    name: str

    @abstractmethod
    def prepare(self, table: npt.NDArray[np.void], sources: Sequence[Buffer], destinations: Sequence[Buffer]) -> Any:
        """Bind a descriptor table to memory, once, at connect. Returns an opaque value for `launch`.

        Raises UsageError naming the row and both numbers when a descriptor leaves its buffer, on an unknown op, or when
        an itemsize does not fit its op.
        """

    @abstractmethod
    def launch(self, prepared: Any) -> Ticket:
        """Run a prepared table. May be called from any thread; releases the GIL where the implementation can."""
