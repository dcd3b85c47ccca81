"""What an observer of the data plane is told: everything that happens in an update, with the worker and the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from weightbridge.machine.events import Event, Instruction
from weightbridge.plan.topology import Worker
from weightbridge.program.program import WorkerProgram

__all__ = ["KernelRan", "Observation", "Observe", "Prepared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The data plane of this worker exists. program, workers: what rounds, posts and peers of later observations mean;
    a peer is a position in `workers`."""

    program: WorkerProgram
    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRan:
    """A kernel of this round has run: from `began_at` (time.monotonic) to the observation's own time.

    The instruction for it came earlier, by the time that it waited for kernels before it; the machine's event for its end comes
    later, by the time that the executor was busy with something else.
    """

    work: Literal["pack", "decode", "assemble"]
    round: int
    began_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One thing that happened at `worker`. at: time.monotonic, in seconds.

    what: an event the transfer machine was told or an instruction it gave, in the order of that worker's machine; KernelRan; or
    Prepared, once, before all others.
    """

    worker: str
    at: float
    what: Event | Instruction | KernelRan | Prepared


Observe = Callable[[Observation], None]
"""Called on the library's own threads, in the middle of an update: it must be quick, must not raise, and must not call an
adapter. KernelRan comes from another thread than the rest."""
