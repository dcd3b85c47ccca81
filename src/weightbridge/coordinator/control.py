"""The control thread of a worker: its one connection to the hub.

It authenticates, joins, beats, notices when the hub falls silent, and hands every word to the worker's session. It never runs
user code and never blocks on anything but its socket.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from weightbridge.coordinator.channel import NONCE_BYTES, Channel
from weightbridge.coordinator.options import Options
from weightbridge.errors import ConnectError, TransportError, WeightBridgeError
from weightbridge.machine import messages as w
from weightbridge.machine.session import HUB_WORKER

__all__ = ["ControlThread"]

_POLL_SECONDS = 0.25
_LINGER_MS = 2000
_HELLO_SECONDS = 1.0
_LOG = logging.getLogger(__name__)


class ControlThread:
    """Owns the socket. `post` and `call` may be used from any thread; callbacks run on the control thread."""

    def __init__(
        self, *, endpoint: str, join: w.Join, options: Options,
        on_message: Callable[[w.Message], None], on_failure: Callable[[WeightBridgeError], None],
        on_tick: Callable[[float], None],
    ) -> None:  # fmt: skip
        """on_message: every message after Welcome but heartbeats. on_failure: the hub cannot be reached, refused, or fell
        silent. on_tick: several times a second, with the steady clock."""
        self._endpoint = endpoint
        self._join = join
        self._options = options
        self._on_message = on_message
        self._on_failure = on_failure
        self._on_tick = on_tick
        self._out: queue.SimpleQueue[w.Message | Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stopping = threading.Event()
        self._channel: Channel | None = None
        self._nonce = Channel.nonce()
        self._joined = False
        self._settled = False  # nothing more is expected of the hub
        self._last_heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"wb-control-{join.worker}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, message: w.Message) -> None:
        """Send a message to the hub. Never blocks."""
        self.call(message)

    def call(self, what: w.Message | Callable[[], None]) -> None:
        """Send a message, or run something on the control thread, in order. Never blocks."""
        self._out.put(what)
        with suppress(BlockingIOError, OSError):  # full: it is awake already; closed: nobody listens any more
            os.write(self._wake_write, b"!")

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
        os.close(self._wake_read)
        os.close(self._wake_write)

    # --- on the control thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, w.MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.ROUTING_ID, b"w" + Channel.nonce())
        socket.connect(self._endpoint)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        begun, next_hello, next_beat = time.monotonic(), 0.0, 0.0
        try:
            while True:
                now = time.monotonic()
                if self._channel is None and now >= next_hello and not self._settled:
                    next_hello = now + _HELLO_SECONDS
                    with suppress(zmq.Again):
                        socket.send(b"H" + self._nonce, zmq.NOBLOCK)
                if self._joined and now >= next_beat:
                    next_beat = now + self._options.heartbeat_seconds
                    self._send(socket, w.Heartbeat())
                self._check_hub(now, begun)
                self._on_tick(now)
                self._take_out(socket)
                if self._stopping.is_set():
                    return
                ready = dict(poller.poll(int(_POLL_SECONDS * 1000)))
                if self._wake_read in ready:
                    with suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                self._take_in(socket)
        finally:
            socket.close(_LINGER_MS)

    def _check_hub(self, now: float, begun: float) -> None:
        if self._settled:
            return
        if not self._joined and now - begun > self._options.connect_timeout_seconds:
            self._fail(
                ConnectError(
                    f"{self._join.worker} could not join a session at {self._endpoint} within "
                    f"{self._options.connect_timeout_seconds:.0f} s: nobody answered; start the trainers with this endpoint "
                    "and the same token, or raise connect_timeout_seconds",
                    causes={HUB_WORKER: "did not answer"},
                )
            )
        elif self._joined and now - self._last_heard > self._options.heartbeat_timeout_seconds:
            reason = f"gave no sign of life for {now - self._last_heard:.0f} s"
            self._fail(ConnectError(f"{HUB_WORKER}, which hosts the session, {reason}", causes={HUB_WORKER: reason}))

    def _fail(self, error: WeightBridgeError) -> None:
        self._settled = True
        self._on_failure(error)

    def _send(self, socket: zmq.Socket[bytes], message: w.Message) -> None:
        if self._channel is not None:
            with suppress(zmq.Again):
                socket.send(b"M" + self._channel.seal(w.encode(message)), zmq.NOBLOCK)

    def _take_out(self, socket: zmq.Socket[bytes]) -> None:
        with suppress(queue.Empty):
            while True:
                item = self._out.get_nowait()
                if isinstance(item, w.Message):
                    self._send(socket, item)
                else:
                    item()

    def _take_in(self, socket: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again):
            while True:
                frame = socket.recv(zmq.NOBLOCK)
                self._frame(socket, frame[:1], frame[1:])

    def _frame(self, socket: zmq.Socket[bytes], kind: bytes, body: bytes) -> None:
        if kind == b"C" and self._channel is None and len(body) == NONCE_BYTES:
            self._channel = Channel(token=self._options.token, dialler_nonce=self._nonce, hub_nonce=body, is_hub=False)
            self._send(socket, self._join)
        elif kind == b"X" and not self._joined and not self._settled:
            self._fail(
                ConnectError(
                    f"{self._join.worker} was not let in at {self._endpoint}: the token is not the session's; "
                    "give every worker the same Options(token=...)",
                    causes={self._join.worker: "wrong token"},
                )
            )
        elif kind == b"M" and self._channel is not None:
            try:
                message = w.decode(self._channel.open(body))
            except TransportError as error:  # not from the hub: as if it had not come
                _LOG.warning("%s ignores a frame from %s: %s", self._join.worker, self._endpoint, error.message)
                return
            self._last_heard = time.monotonic()
            self._message(message)

    def _message(self, message: w.Message) -> None:
        match message:
            case w.Heartbeat():
                pass
            case w.Rejected(reason=reason):
                if not self._settled:
                    who = self._join.worker
                    self._fail(
                        ConnectError(f"{who} was not let in at {self._endpoint}: {reason}", causes={who: reason})
                    )
            case w.Welcome():
                self._joined = True
                self._on_message(message)
            case _:
                self._on_message(message)
