"""The hub: the I/O shell of the session machine. One thread in the process of trainer rank 0.

Wire form on the ZeroMQ ROUTER: one byte says what a frame is, then: b"H" nonce (dialler's hello), b"C" nonce (hub's answer),
b"M" sealed message, b"X" (hub could not authenticate the dialler).
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import zmq

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator.channel import NONCE_BYTES, Channel
from weightbridge.coordinator.options import Options
from weightbridge.coordinator.planning import Planned, plan_job
from weightbridge.errors import ConnectError, TransportError, WeightBridgeError
from weightbridge.machine import messages as w
from weightbridge.machine import session as s

__all__ = ["Hub"]

_TICK_SECONDS = 0.05
_LINGER_MS = 2000
_MAX_GUESTS = 4096  # strangers cost memory: beyond this the oldest is forgotten
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Guest:
    """A connection that has said hello and has not been admitted."""

    dialler_nonce: bytes
    hub_nonce: bytes
    channel: Channel


class Hub:
    """Gathers the workers of a job and takes them through connect and updates. Started by SenderAdapter on rank 0."""

    def __init__(
        self, *, endpoint: str, spec: CheckpointSpec, num_trainers: int, engines: Sequence[str], options: Options
    ) -> None:
        """Binds the endpoint. Raises ConnectError when it is taken or no address of this machine."""
        self._spec = spec
        self._options = options
        # A context of its own: ending it waits until the port is really free, which closing a socket does not.
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, w.MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConnectError(
                f"cannot listen on {endpoint}: {error.strerror or error}; another session may use the port: "
                "choose a free one or end that session",
                endpoint=endpoint,
            ) from None
        timeouts = s.SessionTimeouts(
            connect=options.connect_timeout_seconds,
            update=options.update_timeout_seconds,
            heartbeat=options.heartbeat_timeout_seconds,
        )
        self._machine = s.SessionMachine(
            session=secrets.randbits(60), spec_digest=spec.digest, num_trainers=num_trainers, engines=engines,
            timeouts=timeouts, now=time.monotonic(),
        )  # fmt: skip
        self._channels: dict[bytes, Channel] = {}
        self._guests: dict[bytes, _Guest] = {}  # said hello and have not joined, oldest first
        self._workers: dict[bytes, str] = {}
        self._connections: dict[str, bytes] = {}
        self._done: queue.SimpleQueue[s.SessionEvent] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._next_heartbeat = 0.0
        self.planned: Planned | None = None
        self._thread = threading.Thread(target=self._run, name="wb-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Flush what is still to be said, within two seconds, end the thread and give the port back."""
        self._stopping.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._socket.poll(int(_TICK_SECONDS * 1000)):
                    self._drain()
                with suppress(queue.Empty):
                    while True:
                        self._handle(self._done.get_nowait())
                self._handle(s.Tick())
                if time.monotonic() >= self._next_heartbeat:
                    self._next_heartbeat = time.monotonic() + self._options.heartbeat_seconds
                    for connection in self._workers:
                        self._send(connection, w.Heartbeat())
            self._drain()
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _drain(self) -> None:
        """Everything that has come in. A frame that is not understood costs its sender the answer and nobody else."""
        with suppress(zmq.Again):
            while True:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                if len(parts) == 2:
                    self._frame(parts[0].bytes, parts[1].bytes, parts[1])

    def _frame(self, connection: bytes, frame: bytes, origin: zmq.Frame) -> None:
        kind, body = frame[:1], frame[1:]
        if kind == b"H" and len(body) == NONCE_BYTES:
            self._hello(connection, body)
            return
        channel = self._channel(connection)
        if kind != b"M" or channel is None:
            return
        try:
            message = w.decode(channel.open(body))
        except TransportError as error:
            who = self._workers.get(connection, "a stranger")
            _LOG.warning("refused a frame of %s from %s: %s", who, origin.get("Peer-Address"), error.message)
            if self._guests.pop(connection, None) is not None:
                self._socket.send_multipart([connection, b"X"])
            return
        self._message(connection, message)

    def _hello(self, connection: bytes, dialler_nonce: bytes) -> None:
        """Answer with the hub's nonce. An admitted connection never starts over: its nonces are spent."""
        if connection in self._workers:
            return
        guest = self._guests.get(connection)
        # A dialler that came before the hub has said hello more than once; each gets the same answer, since it has made
        # its keys from the first.
        if guest is None or guest.dialler_nonce != dialler_nonce:
            if len(self._guests) >= _MAX_GUESTS:
                del self._guests[next(iter(self._guests))]
            nonce = Channel.nonce()
            channel = Channel(token=self._options.token, dialler_nonce=dialler_nonce, hub_nonce=nonce, is_hub=True)
            guest = self._guests[connection] = _Guest(dialler_nonce, nonce, channel)
        self._socket.send_multipart([connection, b"C" + guest.hub_nonce])

    def _channel(self, connection: bytes) -> Channel | None:
        guest = self._guests.get(connection)
        return guest.channel if guest is not None else self._channels.get(connection)

    def _message(self, connection: bytes, message: w.Message) -> None:
        worker = self._workers.get(connection)
        if worker is not None:
            self._handle(s.Received(worker, message))
        elif isinstance(message, w.Join):
            self._handle(s.Joining(connection, message))

    def _handle(self, event: s.SessionEvent) -> None:
        for instruction in self._machine.handle(event, time.monotonic()):
            match instruction:
                case s.Send(worker=worker, message=message):
                    self._send(self._connections[worker], message)
                case s.Admit(connection=connection, worker=worker, message=welcome):
                    self._channels[connection] = self._guests.pop(connection).channel
                    self._workers[connection] = worker
                    self._connections[worker] = connection
                    self._send(connection, welcome)
                case s.Refuse(connection=connection, message=rejected):
                    _LOG.warning("did not let a worker in: %s", rejected.reason)
                    self._send(connection, rejected)
                case s.MakePlan():
                    threading.Thread(target=self._plan, args=(instruction,), name="wb-planner", daemon=True).start()

    def _plan(self, request: s.MakePlan) -> None:
        """On a thread of its own: heartbeats go on meanwhile."""
        try:
            self.planned = plan_job(self._spec, request, self._options)
            self._done.put(s.PlanMade(self.planned.wire, self.planned.plan.digest))
        except WeightBridgeError as error:
            self._done.put(s.PlanRefused(type(error).__name__, error.message))
        except Exception as error:  # our defect; the job must still hear of it
            self._done.put(s.PlanRefused("InternalError", f"planning failed: {type(error).__name__}: {error}"))

    def _send(self, connection: bytes, message: w.Message) -> None:
        channel = self._channel(connection)
        if channel is not None:
            with suppress(zmq.Again):
                self._socket.send_multipart([connection, b"M" + channel.seal(w.encode(message))], zmq.NOBLOCK)
