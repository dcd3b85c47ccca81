"""The kernel lane: one thread that runs pack, assemble and codec work in order, beside the executor's event loop.

It is the CPU's stand-in for a side stream: launching returns at once, the end comes back as an event.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["KernelLane", "LaneDone", "LaneFailed"]


class LaneDone(NamedTuple):
    """A piece of work has ended; `event` is what its submitter asked to be told."""

    event: object


class LaneFailed(NamedTuple):
    """A piece of work raised."""

    error: BaseException


class KernelLane:
    """Runs submitted calls one after the other and reports each to `events`."""

    def __init__(self, events: queue.SimpleQueue[object], name: str) -> None:
        self._events = events
        self._work: queue.SimpleQueue[tuple[Callable[[], object], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object], event: object) -> None:
        """Queue `work`; after it LaneDone(event) is put on the events queue, or LaneFailed. Never blocks."""
        self._work.put((work, event))

    def close(self, timeout_seconds: float) -> None:
        """Finish what is queued and end the thread, waiting no longer than the time-out."""
        self._work.put(None)
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, event = item
            try:
                work()
            except BaseException as error:  # noqa: BLE001 (handed to the executor, which raises it)
                self._events.put(LaneFailed(error))
            else:
                self._events.put(LaneDone(event))
