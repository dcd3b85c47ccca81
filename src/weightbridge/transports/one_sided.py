"""What back ends with one-sided writes share: a data engine a peer beside the authenticated connection of `tcp`.

The connection carries no bytes of the model. Over it both ends prove who they are, hand each other the addresses and keys of
their engines, and then send tags, acknowledgements and signs of life: order, back pressure, deadlines and the noticing of
dead, stopped or unreachable peers are those of every other transport, whatever the engine itself can tell (the two known
ones wait for ever on a stopped peer).

Every peer has an engine of its own, because that is what makes `fence` true: with the engine go its sockets, queue pairs and
keys, so that nothing that peer still sends can land, and no other peer is disturbed. The price is paid at connect: the memory
is registered once a peer.
"""

from __future__ import annotations

import itertools
import queue
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from weightbridge.errors import ConnectError, UsageError
from weightbridge.kernels.base import Buffer
from weightbridge.transports.base import Capabilities, Identity, KernelBytes, Memory
from weightbridge.transports.handshake import receive_exactly
from weightbridge.transports.link import Link, Post, Stalled
from weightbridge.transports.sockets import Join
from weightbridge.transports.tcp import TcpTransport, is_loopback
from weightbridge.transports.wire import FrameKind, Header, ProtocolError, cut_writes

__all__ = ["Engine", "EngineError", "OneSidedLink", "OneSidedTransport"]

_LENGTH = struct.Struct("<4sI")
_MAGIC = b"WBE1"
_MAX_DESCRIPTION_BYTES = 1 << 20
_READY = b"WBEREADY"
_PIECES_IN_FLIGHT = 3
_FIRST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 20e-6, 1e-3


class EngineError(Exception):
    """The engine failed or refused; the text says how."""


class Engine(ABC):
    """One peer's data path. Made with the own memory; `begin` and `finished` are called from one thread, `notified` from
    another, `close` when both have ended. Nothing here may block for longer than a moment, `attach` and `close` apart."""

    max_writes: int
    """Rows of one piece."""
    notifies: bool
    """Whether `begin` can send a number along that the peer's engine tells only when the bytes are visible there."""

    @abstractmethod
    def description(self) -> bytes:
        """What the peer's engine must know of this one."""

    @abstractmethod
    def attach(self, description: bytes, nbytes: int, seconds: float) -> None:
        """Get ready to write to the peer, whose memory has `nbytes`. Raises EngineError."""

    @abstractmethod
    def begin(self, piece: npt.NDArray[np.int64], number: int | None) -> Any:
        """Start writing [N, 3] (local offset, remote offset, bytes), none empty; with a number to tell the peer, or None.

        Returns what `finished` is asked with. Raises EngineError."""

    @abstractmethod
    def finished(self, piece: Any) -> bool:
        """Whether all its bytes have landed at the peer. Raises EngineError when they never will."""

    @abstractmethod
    def notified(self) -> list[int]:
        """Numbers that the peer's pieces have brought since the last call, in order. Raises EngineError."""

    @abstractmethod
    def close(self) -> None:
        """Forget the peer and the memory: on return nothing of it can land here. Idempotent; bounded."""


class OneSidedTransport(TcpTransport):
    """Subclasses make the engines. Beyond loopback they want a token, for the connection, and `trusted_network`, because the
    engines' own ports are not protected by it."""

    capabilities = Capabilities(crosses_nodes=True, maps_memory=False, fence_replaces_memory=False)
    always_exposed = False
    """Whether the engine listens beyond the host it was given, whatever that is."""

    def __init__(
        self,
        identity: Identity,
        events: queue.SimpleQueue[object],
        *,
        host: str = "127.0.0.1",
        deadline_seconds: float = 30.0,
        trusted_network: bool = False,
    ) -> None:
        why = self.missing()
        if why:
            raise UsageError(f"the {self.name} transport cannot be used on this machine: {why}")
        if not trusted_network and (self.always_exposed or not is_loopback(host)):
            exposed = "on every interface" if self.always_exposed else f"on the network of {host}"
            raise UsageError(
                f"the {self.name} transport opens ports {exposed} that no token protects: whoever reaches them can write into "
                "this worker's memory. Use it on a network where you trust every machine, and say so with trusted_network=True"
            )
        self._ends: list[threading.Thread] = []
        super().__init__(identity, events, host=host, deadline_seconds=deadline_seconds)

    def close(self) -> None:
        """See `Transport.close`. The engines end side by side: one may take a second."""
        super().close()
        for thread in self._ends:
            thread.join()
        self._ends.clear()

    @abstractmethod
    def _open_engine(self, peer: str, memory: Memory) -> Engine:
        """A new engine with the memory registered. Raises EngineError."""

    def _make_link(self, peer: str, sock: socket.socket, memory: Memory, join: Join) -> Link:
        self._prepare_socket(sock)
        deadline = time.monotonic() + self.deadline_seconds
        engine: Engine | None = None
        try:
            engine = self._open_engine(peer, memory)
            _send_description(sock, engine.description(), deadline)
            theirs = _receive_description(sock, deadline)
            engine.attach(theirs, join.nbytes, max(deadline - time.monotonic(), 0.001))
            sock.sendall(_READY)
            if receive_exactly(sock, len(_READY), deadline) != _READY:
                raise EngineError("its engine did not get ready")
            return OneSidedLink(peer, sock, memory.buffer, join.nbytes, self.events, self.deadline_seconds, engine)
        except (EngineError, OSError) as error:
            if engine is not None:
                engine.close()
            raise ConnectError(f"cannot join worker {peer} over {self.name}: {error}", peer=peer) from None

    def _count(self, link: Link) -> KernelBytes | None:
        return None  # the bytes go through sockets or cards of the engine's own

    def _end_link(self, link: Link) -> None:
        super()._end_link(link)
        if not isinstance(link, OneSidedLink):
            return
        if self._closed:
            thread = threading.Thread(target=link.engine.close, name=f"wb-end-{link.peer}")
            self._ends.append(thread)
            thread.start()
        else:
            link.engine.close()


class OneSidedLink(Link):
    """The bytes go through the engine; frames carry tags, and PART frames tell that a large post goes on."""

    def __init__(
        self,
        peer: str,
        sock: socket.socket,
        local: Buffer,
        remote_bytes: int,
        events: queue.SimpleQueue[object],
        deadline: float,
        engine: Engine,
    ) -> None:
        super().__init__(peer, sock, local, remote_bytes, events, deadline)
        self.engine = engine
        self._numbers = itertools.count(1)  # of the own posts that the peer's engine is told of
        self._awaited = itertools.count(1)
        self._told: deque[int] = deque()

    def _transmit(self, post: Post) -> None:
        pieces = list(cut_writes(post.writes, self.engine.max_writes))
        tells = self.engine.notifies and bool(pieces)
        flying: deque[Any] = deque()
        try:
            for piece in pieces[:-1]:
                self._send([memoryview(Header(FrameKind.PART, post.ticket).pack())])
                self._land(flying, _PIECES_IN_FLIGHT - 1)
                flying.append(self.engine.begin(piece, None))
            if pieces:
                # The number must not overtake a piece: it goes with the last one, when all others have landed.
                self._land(flying, 0 if tells else _PIECES_IN_FLIGHT - 1)
                flying.append(self.engine.begin(pieces[-1], next(self._numbers) if tells else None))
                self._land(flying, 0)
        except EngineError as error:
            raise Stalled(f"a write to it failed: {error}") from None
        self._send([memoryview(self._last_frame(post, int(tells)))])

    def _land(self, flying: deque[Any], at_most: int) -> None:
        """Wait until no more than so many pieces are under way."""
        nap = _FIRST_NAP_SECONDS
        while len(flying) > at_most:
            if self.engine.finished(flying[0]):
                flying.popleft()
                self._moved()
                nap = _FIRST_NAP_SECONDS
                continue
            self._send_between_parts()
            self._waited()
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)

    def _receive_writes(self, num_writes: int) -> None:
        """The tag is here; wait until the engine says that the bytes are."""
        if num_writes != 1 or not self.engine.notifies:
            raise ProtocolError(f"it sent {num_writes} writes over the socket, but the bytes go through an engine")
        expected = next(self._awaited)
        nap = _FIRST_NAP_SECONDS
        try:
            while not self._told:
                self._told.extend(self.engine.notified())
                if not self._told:
                    self._waited()
                    time.sleep(nap)
                    nap = min(2 * nap, _LONGEST_NAP_SECONDS)
        except EngineError as error:
            raise Stalled(f"its writes cannot be followed any more: {error}") from None
        number = self._told.popleft()
        if number != expected:
            raise ProtocolError(f"its engine told of post {number}, expected {expected}")


def _send_description(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    sock.sendall(_LENGTH.pack(_MAGIC, len(data)) + data)


def _receive_description(sock: socket.socket, deadline: float) -> bytes:
    head = receive_exactly(sock, _LENGTH.size, deadline)
    if not head:
        raise EngineError("it closed the connection")
    magic, nbytes = _LENGTH.unpack(head)
    if magic != _MAGIC or not 0 < nbytes <= _MAX_DESCRIPTION_BYTES:
        raise EngineError(f"it sent {head.hex()} instead of the description of its engine")
    data = receive_exactly(sock, nbytes, deadline)
    if not data:
        raise EngineError("it closed the connection")
    return data
