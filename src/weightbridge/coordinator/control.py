"""The control thread of a worker: its line to the hub.

It dials, joins, beats, notices when the hub dies or falls silent, and hands every word to the worker's session; on request it
goes on to the next session at the same address. It never runs user code and never blocks on anything but its socket.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from weightbridge.coordinator.line import Line
from weightbridge.coordinator.options import Options
from weightbridge.coordinator.standstill import STEP_SECONDS, Standstill
from weightbridge.coordinator.wire import is_hub_like
from weightbridge.errors import ConnectError, TransportError, WeightBridgeError
from weightbridge.machine import messages as w
from weightbridge.machine.session import HUB_WORKER

__all__ = ["ControlThread"]

_RETRY_SECONDS = 1.0
_LOG = logging.getLogger(__name__)


class ControlThread:
    """Owns the socket. `post` and `call` may be used from any thread; callbacks run on the control thread."""

    def __init__(
        self, *, endpoint: str, join: w.Join, options: Options,
        on_message: Callable[[w.Message], None], on_failure: Callable[[WeightBridgeError], None],
        on_tick: Callable[[], None],
    ) -> None:  # fmt: skip
        """on_message: every message but heartbeats and Rejected, first of all Welcome, and again after `rejoin`.
        on_failure: the hub cannot be reached, refused, died or fell silent. on_tick: several times a second."""
        self._endpoint = endpoint
        self._join = join
        self._options = options
        self._on_message = on_message
        self._on_failure = on_failure
        self._on_tick = on_tick
        self._out: queue.SimpleQueue[w.Message | Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = threading.Event()
        self._settled = False  # nothing more is expected of the hub
        self._patient = False  # tries again until it is let in
        self._leaving = False  # for the next session: what the old hub still says is for nobody
        self._begun = time.monotonic()  # to join
        self._redial_at = math.inf
        self._why_not = "nobody answered"
        self._line: Line
        self._thread = threading.Thread(target=self._run, name=f"wb-control-{join.worker}", daemon=True)

    def start(self) -> None:
        """Begin to dial. Raises ConnectError when that is not possible at all."""
        self._begun = time.monotonic()
        self._line = Line(self._endpoint, self._options.token)
        self._thread.start()

    def post(self, message: w.Message) -> None:
        """Send a message to the hub. Never blocks."""
        self.call(message)

    def call(self, what: w.Message | Callable[[], None]) -> None:
        """Send a message, or run something on the control thread, in order. Never blocks."""
        self._out.put(what)
        with suppress(BlockingIOError, OSError):  # full: it is awake already; closed: nobody listens any more
            os.write(self._wake_write, b"!")

    def rejoin(self, join: w.Join) -> None:
        """After the session has ended for this worker: join the next one at the same address, over a connection of its own.

        From any thread, callbacks included; what was posted before still goes to the old hub, what is posted later is lost
        until the Join is out. Tries every second, without limit, until the next hub lets this worker in (on_message gets
        Welcome) or `close`: a hub that is not there, still ends its old session, takes no workers yet or has another token
        is no failure meanwhile. Once in, on_failure may be called again.
        """

        def again() -> None:
            self._join, self._patient, self._settled, self._leaving = join, True, False, False
            self._dial()

        self._leaving = True
        self.call(again)

    def stop_watching(self) -> None:
        """On the control thread: the hub has closed in good order; its silence means nothing any more."""
        self._settled = True

    def close(self) -> None:
        """Send what is queued and end the thread, within five seconds. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self.call(lambda: None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        wake, self._wake_write = self._wake_write, -1  # a late word must not go to what has this number next
        os.close(self._wake_read)
        os.close(wake)

    # --- on the control thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        standstill = Standstill()
        try:
            while True:
                now, stood_still = standstill.look()
                self._begun += stood_still
                self._line.stood_still(stood_still, now)
                if now >= self._redial_at:
                    self._dial()
                beat_seconds = self._options.heartbeat_seconds
                if self._line.speak(self._join, now, heartbeat_seconds=beat_seconds, beats=not self._settled):
                    self._redial_at = math.inf  # the old line has found another hub by itself: its answer is awaited
                if not self._settled:
                    self._check_hub(now, self._line)
                self._on_tick()
                self._take_out()
                if self._stopping.is_set():
                    return
                self._line.socket.poll(STEP_SECONDS, self._wake_read)
                with suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                self._take_in(self._line)
        finally:
            self._line.socket.close()

    def _dial(self) -> None:
        """Start over with a new connection; the Join follows when it stands."""
        old = self._line
        was_joined, old.joined, self._redial_at = old.joined, False, math.inf
        try:
            self._line = Line(self._endpoint, self._options.token)
        except ConnectError as error:  # out of descriptors, say
            _LOG.warning("%s cannot dial: %s", self._join.worker, error.message)
            self._redial_at = time.monotonic() + _RETRY_SECONDS
        else:
            # A Join that still waits for a hub must not reach the next one from a connection that ends at once.
            old.socket.close(flush=was_joined)

    def _check_hub(self, now: float, line: Line) -> None:
        if not line.joined:
            self._check_joining(now, line)
            return
        limit = self._options.heartbeat_timeout_seconds
        if gone := line.gone_seconds(now, limit):
            self._lose_hub(f"closed its connection and has not come back for {gone:.0f} s: it has died")
        elif now - line.last_heard > limit:
            self._lose_hub(f"gave no sign of life for {now - line.last_heard:.0f} s")

    def _check_joining(self, now: float, line: Line) -> None:
        if self._redial_at < math.inf:
            return
        if self._patient:
            if line.socket.is_refused or now - line.begun > self._options.heartbeat_timeout_seconds:
                self._redial_at = now + _RETRY_SECONDS
        elif now - self._begun > self._options.connect_timeout_seconds:
            self._fail(
                ConnectError(
                    f"{self._join.worker} could not join a session at {self._endpoint} within "
                    f"{self._options.connect_timeout_seconds:.0f} s: {self._why_not}; start the trainers with this endpoint "
                    "and the same token, or raise connect_timeout_seconds",
                    causes={HUB_WORKER: self._why_not},
                )
            )
        elif line.socket.is_refused and not is_hub_like(self._endpoint):
            self._redial_at = now + _RETRY_SECONDS  # a proxy, say, whose hub is not up yet
        elif line.socket.is_refused:
            self._fail(
                ConnectError(
                    f"{self._join.worker} was not let in at {self._endpoint}: the token is not the session's; "
                    "give every worker the same Options(token=...)",
                    causes={self._join.worker: "wrong token"},
                )
            )

    def _lose_hub(self, reason: str) -> None:
        self._fail(ConnectError(f"{HUB_WORKER}, which hosts the session, {reason}", causes={HUB_WORKER: reason}))

    def _fail(self, error: WeightBridgeError) -> None:
        self._settled = True
        self._on_failure(error)

    def _take_out(self) -> None:
        with suppress(queue.Empty):
            while True:
                item = self._out.get_nowait()
                if not isinstance(item, w.Message):
                    item()
                elif self._line.has_asked:  # nobody listens to a worker before its Join
                    self._line.socket.send(w.encode(item))
                    self._settled |= isinstance(item, w.Goodbye)

    def _take_in(self, line: Line) -> None:
        for data in line.socket.receive():
            if self._leaving:
                return
            line.last_heard = time.monotonic()
            try:
                message = w.decode(data)
            except TransportError as error:
                _LOG.warning("%s ignores a message from %s: %s", self._join.worker, self._endpoint, error.message)
                continue
            self._message(line, message)

    def _message(self, line: Line, message: w.Message) -> None:
        match message:
            case w.Heartbeat():
                pass
            case w.Rejected(reason=reason, again=again):
                self._rejected(line, reason, again)
            case w.Welcome():
                if not line.joined:
                    line.joined, self._patient = True, False
                    self._redial_at = math.inf  # a hub before this one may have said no on the same line
                    self._on_message(message)
            case _:
                self._on_message(message)

    def _rejected(self, line: Line, reason: str, again: bool) -> None:
        """again: the hub says that the reason may pass; that is believed for as long as joining may take."""
        if self._settled:
            return
        in_time = time.monotonic() - self._begun < self._options.connect_timeout_seconds
        if self._patient or (again and in_time and not line.joined):
            _LOG.info("%s is not let in at %s yet: %s", self._join.worker, self._endpoint, reason)
            self._why_not, self._redial_at = reason, time.monotonic() + _RETRY_SECONDS
            return
        if line.joined and line.has_changed:
            self._lose_hub(f"has died: who answers at its address now does not know this worker ({reason})")
            return
        who = self._join.worker
        what = "is out of the session" if line.joined else "was not let in"
        self._fail(ConnectError(f"{who} {what} at {self._endpoint}: {reason}", causes={who: reason}))
