"""What transports over stream sockets share: listening, dialling, the meeting of both ends, posting, fencing, closing.

Of a pair, the worker whose name sorts lower dials; the other waits in `connect` for the dial. After the handshake the
acceptor, once its owner has called `connect`, sends JOIN (size of its memory, and its descriptor where memory is mapped),
and the dialler answers with its own JOIN. That answer proves that the dialler is in `connect` *now*: a dial left over from an
earlier attempt never answers, and a newer dial takes its place.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import select
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from weightbridge.errors import ConnectError, RegistrationError, TransferTimeout, UsageError, WeightBridgeError
from weightbridge.kernels.base import Buffer
from weightbridge.transports.base import (
    MAX_PAYLOAD_BYTES,
    MAX_TAG_BYTES,
    Identity,
    KernelBytes,
    Memory,
    Transport,
)  # fmt: skip
from weightbridge.transports.handshake import accept_handshake, check_identity, dial_handshake
from weightbridge.transports.link import Link, Post
from weightbridge.transports.refusals import Refusals
from weightbridge.transports.wire import merge_writes

__all__ = ["Join", "SocketTransport"]

_JOIN = struct.Struct("<4sB3xQ")
_JOIN_MAGIC = b"WBJ1"
_MAX_GREETINGS = 512
_MAX_WAITING = 4096
_LINGER_SECONDS = 0.5
_POLL_SECONDS = 0.02
_LOG = logging.getLogger(__name__)


class Join:
    """What one end tells the other when both are ready: its memory's size, and the descriptor behind it (-1 for none)."""

    __slots__ = ("fd", "nbytes")

    def __init__(self, nbytes: int, fd: int) -> None:
        self.nbytes = nbytes
        self.fd = fd


class SocketTransport(Transport):
    """Subclasses say how to listen and dial, and make the links."""

    passes_memory = False

    def __init__(
        self,
        identity: Identity,
        events: queue.SimpleQueue[object],
        *,
        host: str = "127.0.0.1",
        deadline_seconds: float = 30.0,
    ) -> None:
        super().__init__(identity, events, host=host, deadline_seconds=deadline_seconds)
        check_identity(identity)
        if not deadline_seconds > 0:
            raise UsageError(f"deadline_seconds is {deadline_seconds}, expected more than 0")
        self._changed = threading.Condition()
        self._closed = False
        self._memory: Memory | None = None
        self._links: dict[str, Link] = {}
        self._joining: dict[str, socket.socket | None] = {}
        self._waiting: dict[str, socket.socket] = {}
        self._greetings: dict[threading.Thread, socket.socket] = {}
        self._refused = ""
        self._refusals = Refusals(_LOG)
        self._counted: dict[str, KernelBytes] = {}
        self._tickets = itertools.count(1)
        self._listener = self._listen()
        self._acceptor = threading.Thread(target=self._accept_loop, name=f"wb-accept-{identity.worker}", daemon=True)
        self._acceptor.start()

    # --- what a kind of transport adds --------------------------------------------------------------------------------

    @abstractmethod
    def _listen(self) -> socket.socket:
        """A listening socket. Raises ConnectError or UsageError."""

    @abstractmethod
    def _dial(self, address: str, deadline: float) -> socket.socket:
        """A connected socket. Raises OSError or UsageError."""

    @abstractmethod
    def _make_link(self, peer: str, sock: socket.socket, memory: Memory, join: Join) -> Link:
        """Wrap a joined socket. Takes over join.fd."""

    def _objection(self, sock: socket.socket) -> str:
        """Why an accepted connection may not even speak; empty when it may."""
        return ""

    def _count(self, link: Link) -> KernelBytes | None:
        """What the operating system counted on a link, if it counts."""
        return None

    def _end_link(self, link: Link) -> None:
        """Called with every link whose threads have ended."""
        link.sock.close()

    # --- the contract -------------------------------------------------------------------------------------------------

    def register(self, memory: Memory) -> None:
        """See `Transport.register`. UsageError while connections exist: they would go on using the old memory."""
        if memory.buffer.nbytes < 0 or (memory.buffer.nbytes and not memory.buffer.address):
            raise RegistrationError(
                f"memory of {memory.buffer.nbytes} bytes at address {memory.buffer.address} is none"
            )
        if self.passes_memory and memory.fd < 0:
            raise RegistrationError(f"{self.name} needs memory that peers can map; make it with SharedMemory")
        with self._changed:
            self._check_open()
            if self._links or self._joining:
                peers = ", ".join(sorted({*self._links, *self._joining}))
                raise UsageError(f"memory cannot change under connections; first fence {peers}")
            self._memory = memory

    def connect(self, peer: str, address: str) -> None:
        """See `Transport.connect`. Raises ConnectError, TransferTimeout naming the peer, or UsageError."""
        deadline = time.monotonic() + self.deadline_seconds
        memory = self._begin_joining(peer)
        try:
            if self.identity.worker < peer:
                sock, join = self._join_by_dialling(peer, address, memory, deadline)
            else:
                sock, join = self._join_by_waiting(peer, memory, deadline)
            try:
                link = self._make_link(peer, sock, memory, join)
            except BaseException:
                sock.close()
                raise
            with self._changed:
                if not self._closed:
                    self._links[peer] = link
                    link.start()
                    return
            self._end_link(link)
            raise ConnectError(f"cannot join worker {peer}: this transport was closed", peer=peer)
        finally:
            with self._changed:
                self._joining.pop(peer, None)

    def post(self, peer: str, writes: npt.NDArray[np.int64], tag: bytes, payload: bytes = b"") -> int:
        """See `Transport.post`. Never blocks; raises UsageError naming the row on offsets outside either memory."""
        link = self._link(peer)
        if len(tag) > MAX_TAG_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
            raise UsageError(
                f"tag has {len(tag)} and payload {len(payload)} bytes; allowed are {MAX_TAG_BYTES} and {MAX_PAYLOAD_BYTES}"
            )
        rows = np.array(writes, dtype=np.int64)  # a copy: the caller may reuse its table at once
        if rows.size == 0:
            rows = rows.reshape(0, 3)
        if rows.ndim != 2 or rows.shape[1] != 3:
            raise UsageError(
                f"writes have shape {list(rows.shape)}, expected [N, 3] of (local offset, remote offset, bytes)"
            )
        _check_writes(rows, link.local.nbytes, link.remote_bytes, peer)
        ticket = next(self._tickets)
        link.post(Post(ticket, merge_writes(rows), bytes(tag), bytes(payload)))
        return ticket

    def map(self, peer: str) -> Buffer:
        """See `Transport.map`."""
        raise UsageError(f"{self.name} does not map a peer's memory; let worker {peer} post what is needed")

    def fence(self, peer: str) -> None:
        """See `Transport.fence`. Without a connection there is nothing to do."""
        with self._changed:
            link = self._links.pop(peer, None)
        if link is not None:
            link.fence()
            self._retire(link)

    def kernel_bytes(self) -> dict[str, KernelBytes]:
        """See `Transport.kernel_bytes`."""
        with self._changed:
            total = dict(self._counted)
            for peer, link in self._links.items():
                _add(total, peer, self._count(link))
        return total

    def close(self) -> None:
        """See `Transport.close`. Peers are told at once; waits half a second at most for them to take our last words.

        Raises TransferTimeout, after all the rest has been closed, when a link's threads do not end: see `Link.fence`.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            links, self._links = list(self._links.values()), {}
            sockets = [self._listener, *self._greetings.values(), *(s for s in self._joining.values() if s is not None)]
            waiting, self._waiting = list(self._waiting.values()), {}
            self._changed.notify_all()
        for sock in (*sockets, *waiting):
            _shut(sock)
        for sock in waiting:
            sock.close()
        for link in links:
            link.begin_close()
        until = time.monotonic() + min(_LINGER_SECONDS, self.deadline_seconds)
        stuck: list[TransferTimeout] = []
        for link in links:
            try:
                link.finish_close(until)
                self._retire(link)
            except TransferTimeout as error:
                stuck.append(error)
        # The sockets that these threads wait for have been shut down: they end at once. Nothing depends on it.
        until = time.monotonic() + self.deadline_seconds
        for thread in (self._acceptor, *list(self._greetings)):
            thread.join(max(until - time.monotonic(), 0))
        self._listener.close()
        self._memory = None
        if stuck:
            raise stuck[0]

    # --- joining ------------------------------------------------------------------------------------------------------

    def _begin_joining(self, peer: str) -> Memory:
        with self._changed:
            self._check_open()
            if self._memory is None:
                raise UsageError("register memory before connecting")
            if peer == self.identity.worker:
                raise UsageError(f"worker {peer} cannot connect to itself")
            if peer in self._links or peer in self._joining:
                raise UsageError(f"worker {peer} is connected, or being connected; fence it before connecting again")
            self._joining[peer] = None
            return self._memory

    def _join_by_dialling(self, peer: str, address: str, memory: Memory, deadline: float) -> tuple[socket.socket, Join]:
        try:
            sock = self._dial(address, deadline)
        except OSError as error:
            raise ConnectError(f"cannot reach worker {peer} at {address}: {error}; is it alive?", peer=peer) from error
        try:
            self._expose(peer, sock)
            dial_handshake(sock, self.identity, peer, deadline)
            # The peer answers when its owner calls connect, which may be much later.
            while not select_readable(sock, _POLL_SECONDS):
                if time.monotonic() > deadline:
                    raise self._timeout(peer, "has not called connect")
            join = self._receive_join(sock, peer, deadline)
            self._send_join(sock, peer, memory, deadline)
        except BaseException:
            sock.close()
            raise
        return sock, join

    def _join_by_waiting(self, peer: str, memory: Memory, deadline: float) -> tuple[socket.socket, Join]:
        while True:
            sock = self._next_dial(peer, deadline)
            try:
                self._expose(peer, sock)
                self._send_join(sock, peer, memory, deadline)
                while not select_readable(sock, _POLL_SECONDS):
                    if peer in self._waiting:
                        raise ConnectError("a newer dial takes its place", peer=peer)
                    if time.monotonic() > deadline:
                        raise self._timeout(peer, "dialled but did not join")
                return sock, self._receive_join(sock, peer, deadline)
            except ConnectError:
                sock.close()  # the dialler has given up: wait for its next dial
            except BaseException:
                sock.close()
                raise

    def _next_dial(self, peer: str, deadline: float) -> socket.socket:
        with self._changed:
            while peer not in self._waiting:
                self._check_open()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise self._timeout(peer, "has not dialled")
                self._changed.wait(remaining)
            return self._waiting.pop(peer)

    def _expose(self, peer: str, sock: socket.socket) -> None:
        """Let `close` end a join in progress."""
        with self._changed:
            self._joining[peer] = sock
            if self._closed:
                raise ConnectError(f"cannot join worker {peer}: this transport was closed", peer=peer)

    def _timeout(self, peer: str, what: str) -> TransferTimeout:
        seen = f"; the last dial here failed: {self._refused}" if self._refused else ""
        return TransferTimeout(
            f"worker {peer} {what} within {self.deadline_seconds:g} s: it is not up, stopped or unreachable{seen}",
            waiting_for=(peer,), seconds=self.deadline_seconds, peer=peer,
        )  # fmt: skip

    def _send_join(self, sock: socket.socket, peer: str, memory: Memory, deadline: float) -> None:
        data = _JOIN.pack(_JOIN_MAGIC, self.passes_memory, memory.buffer.nbytes)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            if self.passes_memory:
                socket.send_fds(sock, [data], [memory.fd])
            else:
                sock.sendall(data)
        except OSError as error:
            raise ConnectError(f"cannot join worker {peer}: {error}", peer=peer) from error

    def _receive_join(self, sock: socket.socket, peer: str, deadline: float) -> Join:
        fds: list[int] = []
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            if self.passes_memory:
                data, fds, _, _ = socket.recv_fds(sock, _JOIN.size, 1)
            else:
                data = sock.recv(_JOIN.size, socket.MSG_WAITALL)
        except OSError as error:
            raise ConnectError(f"cannot join worker {peer}: {error}", peer=peer) from error
        good = len(data) == _JOIN.size and data[:4] == _JOIN_MAGIC and len(fds) == self.passes_memory
        if not good:
            for fd in fds:
                socket.close(fd)
            found = f"sent {data.hex()} with {len(fds)} descriptors" if data else "closed the connection"
            raise ConnectError(f"cannot join worker {peer}: it {found} instead of joining", peer=peer)
        return Join(_JOIN.unpack(data)[2], fds[0] if fds else -1)

    # --- accepting ----------------------------------------------------------------------------------------------------

    def _accept_loop(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(_POLL_SECONDS)  # out of descriptors
                continue
            thread = threading.Thread(target=self._greet, args=(sock,), name="wb-greet", daemon=True)
            objection = self._objection(sock)
            with self._changed:
                if len(self._greetings) >= _MAX_GREETINGS:
                    objection = f"{_MAX_GREETINGS} others have yet to prove who they are"
                admitted = not self._closed and not objection
                if admitted:
                    self._greetings[thread] = sock
                    thread.start()
            if objection:
                self._refuse(sock, objection)
            if not admitted:
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        """Find out who dialled, in a thread of its own so that a silent stranger holds up nobody."""
        old: socket.socket | None = sock
        try:
            peer = accept_handshake(sock, self.identity, time.monotonic() + self.deadline_seconds)
            with self._changed:
                full = len(self._waiting) >= _MAX_WAITING and peer not in self._waiting
                if not self._closed and not full:
                    old = self._waiting.pop(peer, None)
                    self._waiting[peer] = sock
                    self._changed.notify_all()
            if full:
                self._refuse(sock, f"{_MAX_WAITING} others wait already to be connected")
        except WeightBridgeError as error:
            self._refused = error.message
            self._refuse(sock, error.message)
        finally:
            if old is not None:
                old.close()
            with self._changed:
                self._greetings.pop(threading.current_thread(), None)

    def _refuse(self, sock: socket.socket, reason: str) -> None:
        origin = "a closed connection"
        with contextlib.suppress(OSError):
            origin = str(sock.getpeername() or "this machine")
        self._refusals.warn("worker %s let nobody in from %s: %s", self.identity.worker, origin, reason)

    # --- links --------------------------------------------------------------------------------------------------------

    def _link(self, peer: str) -> Link:
        with self._changed:
            self._check_open()
            if peer not in self._links:
                raise UsageError(f"worker {peer} is not connected; connect to it first")
            return self._links[peer]

    def _retire(self, link: Link) -> None:
        count = self._count(link)  # before the socket goes
        with self._changed:
            _add(self._counted, link.peer, count)
        self._end_link(link)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"this {self.name} transport is closed; make a new one")


def select_readable(sock: socket.socket, seconds: float) -> bool:
    """Wait a moment for data or the end of the connection. Any descriptor number, unlike select()."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _check_writes(rows: npt.NDArray[np.int64], local_bytes: int, remote_bytes: int, peer: str) -> None:
    sides: Iterable[tuple[int, str, int]] = (
        (0, "local offset", local_bytes),
        (1, f"remote offset (worker {peer})", remote_bytes),
    )
    nbytes = rows[:, 2]
    for column, what, size in sides:
        start = rows[:, column]
        bad = (start < 0) | (nbytes < 0) | (start > size) | (nbytes > size - np.minimum(start, size))
        if bad.any():
            row = int(np.argmax(bad))
            raise UsageError(
                f"write {row}: {what} {start[row]} and {nbytes[row]} bytes do not lie within the {size} bytes registered",
                row=row,
            )


def _add(total: dict[str, KernelBytes], peer: str, count: KernelBytes | None) -> None:
    if count is not None:
        before = total.get(peer, KernelBytes(0, 0))
        total[peer] = KernelBytes(before.sent + count.sent, before.received + count.received)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
