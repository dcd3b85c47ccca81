"""The control plane's connections: whole messages between one hub and its workers, over ZeroMQ CURVE.

Both ends derive their CURVE keys from the job's token, so that nobody without it gets as far as one message: libzmq ends
his connection inside the handshake, with at most one part of memory spent on him. The keys of a connection itself are
made afresh by both ends and the frames on it are numbered: what was recorded cannot be played again, to anybody.

A message travels in parts of at most `PART_BYTES`, each with a header (message, part, number of parts), because libzmq
bounds frames and not messages. Both classes belong to one thread, which calls `poll` and then goes through `receive`.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from weightbridge.errors import ConnectError, TransportError
from weightbridge.machine.messages import MAX_MESSAGE_BYTES
from weightbridge.transports.refusals import Refusals

__all__ = ["PART_BYTES", "Assembly", "HubSocket", "WorkerSocket", "cut", "is_hub_like"]

PART_BYTES = 1 << 16
MAX_PARTS = -(-MAX_MESSAGE_BYTES // PART_BYTES)
_MAX_FRAME_BYTES = PART_BYTES + 1024  # CURVE adds some to each
_MAX_EVENTS = 1000
_MAX_QUEUED_PARTS = 1000  # of one connection, before its sender has to wait
_MAX_PASS = 4096  # parts taken between two looks at the clock
_HEADER = struct.Struct("<QII")
_LINGER_MS = 2000
_HANDSHAKE_MS = 10_000
_CONNECT_MS = 5_000
_RECONNECT_MS = (50, 500)
_MANY_REFUSALS = 3
_DOMAIN = b"weightbridge"
_UNKNOWN = "an address unknown"
_ZAP = "inproc://zeromq.zap.01"
_LOG = logging.getLogger(__name__)


def _keys(token: bytes, who: bytes) -> tuple[bytes, bytes]:
    """(public, secret) CURVE keys of an end of the job's connections: HKDF-SHA256 of the token."""
    extracted = hmac.digest(b"weightbridge control", token, "sha256")
    secret = z85.encode(hmac.digest(extracted, b"curve key of the " + who + b"\x01", "sha256"))
    return zmq.curve_public(secret), secret


def _prepare(sock: zmq.Socket[bytes], endpoint: str) -> None:
    sock.setsockopt(zmq.LINGER, _LINGER_MS)
    sock.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
    sock.setsockopt(zmq.RCVHWM, _MAX_QUEUED_PARTS)
    sock.setsockopt(zmq.SNDHWM, 0)  # what is sent is bounded by what there is to say; a word must not get lost
    sock.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    sock.setsockopt(zmq.IPV6, int("[" in endpoint))
    if not zmq.has("curve"):
        raise ConnectError(f"cannot use {endpoint}: this ZeroMQ was built without CURVE; install pyzmq from a wheel")


def _events(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """(event, value) of all that has happened to a socket's connections and was not told yet."""
    with suppress(zmq.Again):
        for _ in range(_MAX_EVENTS):
            event: Any = recv_monitor_message(monitor, zmq.NOBLOCK)
            yield int(event["event"]), int(event["value"])


# --- messages in parts ------------------------------------------------------------------------------------------------


def cut(number: int, message: bytes) -> list[tuple[bytes, zmq.Frame]]:
    """(header, part) of all parts. number: of the message among those of its sender. Large parts are views, no copies."""
    view = memoryview(message)
    num_parts = max(1, -(-len(view) // PART_BYTES))
    return [
        (_HEADER.pack(number, i, num_parts), zmq.Frame(view[i * PART_BYTES : (i + 1) * PART_BYTES]))
        for i in range(num_parts)
    ]


class Assembly:
    """The message of one connection of which some parts have come: at most `MAX_MESSAGE_BYTES` and a little."""

    __slots__ = ("_num_parts", "_number", "_parts")

    def __init__(self) -> None:
        self._number = self._num_parts = -1
        self._parts: list[bytes] = []

    def add(self, header: bytes, part: bytes) -> bytes | None:
        """The message, if this was its last part. Raises TransportError when the part does not follow the one before: some
        were lost with a connection, say; that message will not come."""
        if len(header) != _HEADER.size:
            raise TransportError(f"a part's header has {len(header)} bytes, expected {_HEADER.size}")
        number, index, num_parts = _HEADER.unpack(header)
        if not index < num_parts <= MAX_PARTS:
            raise TransportError(f"part {index} of {num_parts} is none; a message has at most {MAX_PARTS}")
        if index == 0:
            self._number, self._num_parts, self._parts = number, num_parts, []
        expected = self._number, len(self._parts), self._num_parts
        if (number, index, num_parts) != expected:
            self._parts = []
            raise TransportError(
                f"part {index} of {num_parts} of message {number} came, expected part {expected[1]} of {expected[2]} of "
                f"message {expected[0]}: some were lost"
            )
        self._parts.append(part)
        if len(self._parts) < num_parts:
            return None
        parts, self._parts = self._parts, []
        return b"".join(parts)


# --- the hub's end ----------------------------------------------------------------------------------------------------


class HubSocket:
    """Listens for the workers of a job. A connection's name is chosen by its worker, at random, and known to it and the hub
    alone; a worker whose connection has dropped dials again and keeps its name, as long as it lives."""

    def __init__(self, endpoint: str, token: bytes) -> None:
        """Binds. Raises ConnectError when the endpoint is taken or no address of this machine."""
        # A context of its own: ending it waits until the port is really free, which closing a socket does not.
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._gate: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._worker_key = z85.decode(_keys(token, b"worker")[0])
        self._poller = zmq.Poller()
        self._numbers = itertools.count()
        self._last: tuple[bytes, list[tuple[bytes, zmq.Frame]]] | None = None  # the message sent last, and its parts
        self._assemblies: dict[bytes, Assembly] = {}
        self._fds: dict[bytes, int] = {}  # connection -> descriptor, from its first part until it has dropped
        self._addresses: dict[int, str] = {}  # of all that were accepted
        self._dropped: list[tuple[bytes, int]] = []  # name and descriptor of connections that have ended
        self._unheard: dict[int, str] = {}  # the same of those that have no name: descriptor -> address
        self._refusals = Refusals(_LOG)
        try:
            self._listen(endpoint, token)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConnectError(
                f"cannot listen on {endpoint}: {error.strerror or error}; another session may use the port: "
                "choose a free one or end that session",
                endpoint=endpoint,
            ) from None
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _listen(self, endpoint: str, token: bytes) -> None:
        sock = self._socket
        _prepare(sock, endpoint)
        sock.setsockopt(zmq.CURVE_SERVER, 1)
        sock.setsockopt(zmq.CURVE_SECRETKEY, _keys(token, b"hub")[1])
        sock.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        sock.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody is let in while nobody looks at keys
        sock.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a worker that dials again need not wait for its old connection's end
        self._gate.bind(_ZAP)
        # Not EVENT_HANDSHAKE_FAILED_PROTOCOL: while libzmq 4.3 tells of it, it forgets to end the connection (errno is lost).
        self._monitor = sock.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        for each in (sock, self._gate, self._monitor):
            self._poller.register(each, zmq.POLLIN)
        sock.bind(endpoint)

    def poll(self, seconds: float) -> None:
        """Wait until there may be something to receive."""
        self._poller.poll(int(seconds * 1000))

    def receive(self) -> Iterator[tuple[bytes, bytes | None]]:
        """(connection, message), or (connection, None) once its TCP connection has ended, after all that came over it.

        The latter is a hint: a worker that lives dials again within half a second, under the same name. It comes at once when
        a worker's process has died, and not at all when it is stopped or the network is cut.
        """
        self._look_at_keys()
        self._follow()
        for _ in range(_MAX_PASS):
            try:
                name, *rest = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            message = self._take(name.bytes, rest)
            if message is not None:
                yield name.bytes, message
        else:
            return  # more has come, perhaps of those who are gone: that first
        for connection in self._gone():
            yield connection, None

    def send(self, connection: bytes, message: bytes) -> None:
        """Never blocks; goes nowhere when the connection is gone. One message to many is cut once and copied never."""
        if self._last is None or self._last[0] is not message:
            self._last = (message, cut(next(self._numbers), message))
        for header, part in self._last[1]:
            with suppress(zmq.Again):
                self._socket.send_multipart([connection, header, part], zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """Flush what was sent, within two seconds, and give the port back. Idempotent."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._gate.close(0)
        self._context.destroy(linger=_LINGER_MS)

    def _take(self, name: bytes, rest: list[zmq.Frame]) -> bytes | None:
        if len(rest) != 2:
            self._refusals.warn("refused a frame from %s: it is no part of a message", rest[0].get("Peer-Address"))
            return None
        fd = int(rest[1].get(zmq.SRCFD))
        if self._fds.get(name) != fd:
            self._follow()  # the end of the connection that had this descriptor before, if there was one
            self._fds[name] = fd
        assembly = self._assemblies.setdefault(name, Assembly())
        try:
            return assembly.add(rest[0].bytes, rest[1].bytes)
        except TransportError as error:
            self._refusals.warn("refused a part from %s: %s", rest[1].get("Peer-Address"), error.message)
            return None

    def _gone(self) -> list[bytes]:
        """Connections that have ended and not come back, now that their last words have been taken."""
        for fd, address in self._unheard.items():
            names = self._names(fd)
            self._dropped += names
            if not names:
                self._refused(address)
        gone = [name for name, fd in dict(self._dropped).items() if self._fds.get(name) == fd]
        for name in gone:
            del self._fds[name]
            self._assemblies.pop(name, None)
        self._dropped, self._unheard = [], {}
        return gone

    def _refused(self, address: str) -> None:
        self._refusals.warn(
            "refused a stranger from %s: the connection ended before it had proved the session's token", address
        )

    def _names(self, fd: int) -> list[tuple[bytes, int]]:
        return [item for item in self._fds.items() if item[1] == fd]

    def _look_at_keys(self) -> None:
        """Answer libzmq, which asks about everyone who knows the hub's key whether he has the workers' key too (ZAP)."""
        with suppress(zmq.Again):
            while True:
                version, request, _, _, _, mechanism, *credentials = self._gate.recv_multipart(zmq.NOBLOCK)
                good = mechanism == b"CURVE" and hmac.compare_digest(b"".join(credentials), self._worker_key)
                verdict = [b"200", b"OK"] if good else [b"400", b"not a worker of this job"]
                self._gate.send_multipart([version, request, *verdict, b"", b""])

    def _follow(self) -> None:
        """Learn of connections: who comes, who ends, and who was refused."""
        events = list(_events(self._monitor))
        for event, value in events:
            if event == zmq.EVENT_ACCEPTED:
                over = (zmq.EVENT_DISCONNECTED, value) in events  # the descriptor may be another connection's by now
                self._addresses[value] = _UNKNOWN if over else _peer_of(value)
                if value in self._unheard:
                    self._refused(self._unheard.pop(value))
            elif event == zmq.EVENT_DISCONNECTED:
                address, names = self._addresses.pop(value, _UNKNOWN), self._names(value)
                self._dropped += names
                if not names:  # perhaps its first words have yet to be taken
                    self._unheard[value] = address


def _peer_of(fd: int) -> str:
    """Where an accepted connection comes from. It may have ended meanwhile: good for a log only."""
    with suppress(OSError, ValueError), socket.socket(fileno=os.dup(fd)) as sock:
        host, port, *_ = sock.getpeername()
        return f"{host}:{port}"
    return _UNKNOWN


# --- a worker's end ---------------------------------------------------------------------------------------------------


class WorkerSocket:
    """One worker's line to the hub. libzmq dials until it succeeds, and again when the connection drops.

    is_connected: a connection stands, and its other end is the job's hub. num_connections: that have stood so far.
    """

    def __init__(self, endpoint: str, token: bytes) -> None:
        """Begins to dial. Raises ConnectError for an endpoint that is none."""
        self.is_connected = False
        self.num_connections = 0
        self._num_refusals = 0  # connections in a row that ended inside the handshake
        self._has_failed = False  # the handshake of the connection whose end is told next
        self._has_given_up = False
        self._numbers = itertools.count()
        self._assembly = Assembly()
        self._refusals = Refusals(_LOG)
        self._endpoint = endpoint
        sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket = sock
        self._poller = zmq.Poller()
        try:
            _prepare(sock, endpoint)
            sock.setsockopt(zmq.ROUTING_ID, b"w" + secrets.token_bytes(16))
            sock.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS[0])
            sock.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS[1])
            sock.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
            sock.setsockopt(zmq.CURVE_SERVERKEY, _keys(token, b"hub")[0])
            public, secret = _keys(token, b"worker")
            sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
            sock.setsockopt(zmq.CURVE_SECRETKEY, secret)
            self._monitor = sock.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED
                | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                | zmq.EVENT_DISCONNECTED
                | zmq.EVENT_CLOSED
            )
            sock.connect(endpoint)
        except zmq.ZMQError as error:
            sock.close(0)
            raise ConnectError(f"cannot dial {endpoint}: {error.strerror or error}", endpoint=endpoint) from None
        self._poller.register(sock, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    @property
    def is_refused(self) -> bool:
        """Whoever listens there hangs up on this worker's key time after time, or speaks another language."""
        return self._has_given_up or self._num_refusals >= _MANY_REFUSALS

    def poll(self, seconds: float, wake: int) -> None:
        """Wait until there may be something to receive, the connection has changed, or descriptor `wake` is readable."""
        self._poller.register(wake, zmq.POLLIN)
        self._poller.poll(int(seconds * 1000))

    def receive(self) -> Iterator[bytes]:
        """The messages that have come. Brings the attributes up to date first."""
        self._follow()
        for _ in range(_MAX_PASS):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._assembly.add(*frames) if len(frames) == 2 else None
            except TransportError as error:
                self._refusals.warn("ignores a part from %s: %s", self._endpoint, error.message)
                continue
            if message is not None:
                yield message

    def send(self, message: bytes) -> None:
        """Never blocks. Waits for the next connection when there is none."""
        for header, part in cut(next(self._numbers), message):
            with suppress(zmq.Again):
                self._socket.send_multipart([header, part], zmq.NOBLOCK, copy=False)

    def close(self, *, flush: bool = True) -> None:
        """flush: what was sent still goes out, within two seconds, in the background. Idempotent."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(_LINGER_MS if flush else 0)

    def _follow(self) -> None:
        for event, _ in _events(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected, self._num_refusals = True, 0
                self.num_connections += 1
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._num_refusals += 1
                self._has_failed = True
            elif event == zmq.EVENT_DISCONNECTED:
                # libzmq does not dial again whoever does not speak its protocol, or not CURVE.
                self._has_given_up |= not self.is_connected and not self._has_failed
                self.is_connected = self._has_failed = False
            elif event == zmq.EVENT_CLOSED:  # nobody listens there
                self._num_refusals = 0


def is_hub_like(endpoint: str, seconds: float = 1.0) -> bool:
    """Whether a ZeroMQ socket listens there: it begins its greeting unasked. For telling a hub that does not take this
    worker's key from a proxy whose hub is not up yet; both hang up."""
    parts = urlsplit(endpoint)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=seconds) as sock:
            return sock.recv(1) == b"\xff"
    except OSError:
        return False
