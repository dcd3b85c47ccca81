"""The kernel lane: one thread that launches pack, assemble and codec work in order, beside the executor's event loop, and waits
for it there.

On a GPU a launch returns before the kernel has run; the lane looks at its ticket, and launches what comes after meanwhile. On a
CPU the ticket is done when the launch returns: the lane is then what a side stream is on a GPU.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from weightbridge.kernels.base import LOOK_SECONDS, Ticket

__all__ = ["KernelLane", "LaneDone", "LaneFailed"]


class LaneDone(NamedTuple):
    """A piece of work has ended; `event` is what its submitter asked to be told."""

    event: object


class LaneFailed(NamedTuple):
    """A piece of work raised."""

    error: BaseException


class _Work(NamedTuple):
    launch: Callable[[], Ticket | None]
    then: Callable[[], object]
    event: object


class KernelLane:
    """Runs submitted work in order and reports each to `events`, in order too."""

    def __init__(self, events: queue.SimpleQueue[object], name: str) -> None:
        self._events = events
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, launch: Callable[[], Ticket | None], then: Callable[[], object], event: object) -> None:
        """Queue `launch`, and `then` for when the ticket that it returns is done (None: at once). Never blocks.

        After that LaneDone(event) is put on the events queue, or LaneFailed. Later work may be launched before `then`.
        """
        self._work.put(_Work(launch, then, event))

    def close(self, timeout_seconds: float) -> bool:
        """Finish what is queued and end the thread, waiting no longer than the time-out. False: a kernel still runs."""
        self._work.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        launched: deque[tuple[_Work, Ticket | None]] = deque()
        closing = False
        while launched or not closing:
            if launched and self._ended(*launched[0]):
                launched.popleft()
                continue
            try:
                work = self._work.get(timeout=LOOK_SECONDS if launched else None)
            except queue.Empty:
                continue
            if work is None:
                closing = True
                continue
            try:
                launched.append((work, work.launch()))
            except BaseException as error:  # noqa: BLE001 (handed to the executor, which raises it)
                self._events.put(LaneFailed(error))

    def _ended(self, work: _Work, ticket: Ticket | None) -> bool:
        """Whether the kernel is done; what comes after it is then done and reported too."""
        try:
            if ticket is not None and not ticket.done():
                return False
            work.then()
        except BaseException as error:  # noqa: BLE001 (handed to the executor, which raises it)
            self._events.put(LaneFailed(error))
        else:
            self._events.put(LaneDone(work.event))
        return True
