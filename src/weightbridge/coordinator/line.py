"""One connection to a hub and what came of it: for a worker's control thread, and for those who look on."""

from __future__ import annotations

import time

from weightbridge.coordinator.wire import WorkerSocket
from weightbridge.machine import messages as w
from weightbridge.machine.signs_of_life import later_by

__all__ = ["GONE_SECONDS", "Line"]

GONE_SECONDS = 2.0
"""A hub whose connection has ended and that cannot be dialled again for so long has died. One that is merely stopped, or
cut off, keeps its connection."""


class Line:
    """Times are of the steady clock. The TCP connection below may drop and come again; the line stays the same.

    begun: when it was dialled, or asked to be let in last. joined: the hub has let this end in; its owner sets it.
    last_heard: when a message came; its owner sets it.
    """

    def __init__(self, endpoint: str, token: bytes) -> None:
        """Begins to dial. Raises ConnectError for an endpoint that is none, or when there are no descriptors left."""
        self.socket = WorkerSocket(endpoint, token)
        self.begun = self.last_heard = time.monotonic()
        self.joined = False
        self._asked_on = 0  # number of the TCP connection that the Join went over
        self._next_beat = 0.0
        self._down_since: float | None = None

    @property
    def has_asked(self) -> bool:
        return self._asked_on > 0

    @property
    def has_changed(self) -> bool:
        """The connection that the Join went over has ended, and another stands: perhaps with another hub."""
        return self.socket.num_connections > self._asked_on

    def speak(self, join: w.Join, now: float, *, heartbeat_seconds: float, beats: bool = True) -> bool:
        """Ask to be let in, once on each connection until it is granted; then beat. Returns whether it has just asked."""
        asks = not self.joined and self.socket.num_connections > self._asked_on
        if asks:
            self._asked_on, self.begun = self.socket.num_connections, now
            self.socket.send(w.encode(join))
        if self.joined and beats and now >= self._next_beat:
            self._next_beat = now + heartbeat_seconds
            self.socket.send(w.encode(w.Heartbeat()))
        return asks

    def stood_still(self, seconds: float, now: float) -> None:
        """Its owner has not run for so long, up to now, and could hear nothing."""
        self.begun = later_by(seconds, self.begun, now)
        self.last_heard = later_by(seconds, self.last_heard, now)
        if self._down_since is not None:
            self._down_since = later_by(seconds, self._down_since, now)

    def gone_seconds(self, now: float, silence_seconds: float) -> float:
        """Since when there is no connection, if that is long enough to take the hub for dead; else 0. To be asked often.

        silence_seconds: after which a hub counts as lost in any case.
        """
        if self.socket.is_connected:
            self._down_since = None
        elif self._down_since is None:
            self._down_since = now
        down = 0.0 if self._down_since is None else now - self._down_since
        return down if down > min(GONE_SECONDS, silence_seconds) else 0.0
