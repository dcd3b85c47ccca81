"""What the fuzzer aims at on the data plane: the handshake, and the frames of a joined connection over tcp and shm."""

from __future__ import annotations

import queue
import random
import socket
import struct
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks._fuzz_targets import Target, Violation
from benchmarks._mutations import damage_bytes
from weightbridge.errors import UsageError, WeightBridgeError
from weightbridge.kernels.base import Buffer
from weightbridge.transports import handshake
from weightbridge.transports.base import Arrived, Identity, PeerLost, WriteDone
from weightbridge.transports.link import Link, Post
from weightbridge.transports.memory import SharedMemory
from weightbridge.transports.shm import ShmLink
from weightbridge.transports.tcp import TcpLink
from weightbridge.transports.wire import FrameKind, Header

__all__ = ["Handshakes", "ShmFrames", "TcpFrames", "data_targets"]

_REGISTERED_BYTES = 4096
_CANARY = 0xC5
_DEADLINE_SECONDS = 20.0
_MESSAGE_BYTES = 8 + 1 + 7 + 3 * handshake.MAX_NAME_BYTES + 32


# --- the handshake ----------------------------------------------------------------------------------------------------


class _Scripted:
    """A socket whose other end is a function: given what was sent, what comes back (b"" ends the connection)."""

    def __init__(self, first: bytes, answer: Callable[[bytes], bytes]) -> None:
        self._incoming = first
        self._answer = answer

    def settimeout(self, seconds: float) -> None: ...

    def getpeername(self) -> str:
        return "the fuzzer"

    def sendall(self, data: bytes) -> None:
        self._incoming += self._answer(data)

    def recv(self, nbytes: int) -> bytes:
        part, self._incoming = self._incoming[:nbytes], self._incoming[nbytes:]
        return part


class Handshakes(Target):
    """A peer with the token of which one message is damaged on the way, or one without it, at either end."""

    name, weight = "handshakes", 30
    refusals = (WeightBridgeError,)
    traced_every = 1
    _ME = Identity(worker="b", session="77", token=b"the token")

    def draw(self, rng: random.Random) -> tuple[bool, bytes, int, int]:
        """(this end accepts, the peer's token, which of its messages is damaged, seed of the damage)."""
        token = rng.choice((b"the token", b"the token", b"the old token", b""))
        damaged = rng.randrange(2) if token == self._ME.token else rng.randrange(-1, 2)
        return rng.random() < 0.5, token, damaged, rng.getrandbits(32)

    def feed(self, data: tuple[bool, bytes, int, int]) -> bool:
        accepts, token, damaged, seed = data
        rng = random.Random(seed)
        peer = Identity(worker="a", session="77", token=token)
        hello = handshake._hello(peer, "b")
        # What the peer believes it has said stays genuine: the damage happens on the way.
        said = [hello if damaged != 0 else _other(rng, hello)]

        def answer(sent: bytes) -> bytes:
            if len(said) == 2:
                return b""
            role, both = (b"dialler", (hello, sent)) if accepts else (b"acceptor", (sent_hello[0], hello))
            proof = handshake._proof(token, role, *both)
            said.append(proof if damaged != 1 else _other(rng, proof))
            return said[1]

        sent_hello: list[bytes] = []

        def answer_to_dialler(sent: bytes) -> bytes:
            if not sent_hello:
                sent_hello.append(sent)
                return said[0]
            return answer(sent)

        deadline = time.monotonic() + _DEADLINE_SECONDS
        if accepts:
            handshake.accept_handshake(_Scripted(said[0], answer), self._ME, deadline)  # type: ignore[arg-type]
        else:
            handshake.dial_handshake(_Scripted(b"", answer_to_dialler), self._ME, "a", deadline)  # type: ignore[arg-type]
        raise Violation("a peer was let in that has no token, or whose words were altered on the way")


def _other(rng: random.Random, message: bytes) -> bytes:
    """A damaged message that differs from the genuine one within what the other end reads of it."""
    while (damaged := damage_bytes(rng, message, rng.randbytes(len(message))))[:_MESSAGE_BYTES] == message:
        pass
    return damaged


# --- frames of a joined connection ------------------------------------------------------------------------------------


class _Frames(Target):
    """A genuine conversation, damaged: whatever it says, nothing lands outside the registered memory and the link ends."""

    refusals = (UsageError,)
    traced_every = 1

    def __init__(self) -> None:
        self._memory = np.full(3 * _REGISTERED_BYTES, _CANARY, dtype=np.uint8)
        middle = self._memory.ctypes.data + _REGISTERED_BYTES
        self._buffer = Buffer(middle, _REGISTERED_BYTES)

    def _link(self, sock: socket.socket, events: queue.SimpleQueue[object]) -> Link:
        raise NotImplementedError

    def _conversation(self, rng: random.Random) -> list[bytes]:
        raise NotImplementedError

    def draw(self, rng: random.Random) -> bytes:
        frames = self._conversation(rng)
        at = rng.randrange(len(frames))
        genuine = frames[at]
        while (damaged := damage_bytes(rng, genuine, rng.choice(frames))) == genuine:
            pass
        frames[at] = damaged
        return b"".join(frames)

    def feed(self, data: bytes) -> bool:
        """Whether the link took every frame and found nothing wrong until the peer closed between two of them."""
        ours, theirs = socket.socketpair()
        events: queue.SimpleQueue[object] = queue.SimpleQueue()
        link = self._link(ours, events)
        np.copyto(self._memory, _CANARY)
        try:
            link.post(Post(1, np.zeros((0, 3), dtype=np.int64), b"tag", b""))  # so that an ACK can be right
            link.start()
            _send(theirs, data)
            cause = _until_lost(events)
        finally:
            theirs.close()
            link.fence()
            ours.close()
        if (self._memory[:_REGISTERED_BYTES] != _CANARY).any() or (
            self._memory[2 * _REGISTERED_BYTES :] != _CANARY
        ).any():
            raise Violation("a write landed outside the registered memory")
        if not events.empty():
            raise Violation(f"an event followed the loss of the peer: {events.get()}")
        return cause.startswith("it closed the connection")


def _send(sock: socket.socket, data: bytes) -> None:
    """All of it, as far as the other end takes it, and the end of the stream."""
    sock.settimeout(_DEADLINE_SECONDS)
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it has hung up already, which is its right


def _until_lost(events: queue.SimpleQueue[object]) -> str:
    while True:
        try:
            event = events.get(timeout=_DEADLINE_SECONDS + 10)
        except queue.Empty:
            raise Violation("the link neither ended nor said that its peer is lost") from None
        if isinstance(event, PeerLost):
            return event.cause
        if not isinstance(event, Arrived | WriteDone):
            raise Violation(f"the link said {event!r}")


def _frame(
    kind: FrameKind, ticket: int, tag: bytes = b"", payload: bytes = b"", writes: Sequence[tuple[int, bytes]] = ()
) -> bytes:
    table = b"".join(struct.pack("<qq", at, len(data)) for at, data in writes)
    head = Header(kind, ticket, len(tag), len(payload), len(writes)).pack()
    return head + tag + payload + table + b"".join(data for _, data in writes)


class TcpFrames(_Frames):
    name, weight = "tcp", 50

    def _link(self, sock: socket.socket, events: queue.SimpleQueue[object]) -> Link:
        return TcpLink("a", sock, self._buffer, _REGISTERED_BYTES, events, _DEADLINE_SECONDS)

    def _conversation(self, rng: random.Random) -> list[bytes]:
        def writes() -> list[tuple[int, bytes]]:
            return [
                (rng.randrange(_REGISTERED_BYTES - 64), rng.randbytes(rng.randrange(1, 65)))
                for _ in range(rng.randrange(5))
            ]

        return [
            _frame(FrameKind.LAST, 7, b"tag", b"payload", writes()),
            _frame(FrameKind.ACK, 1),
            _frame(FrameKind.PART, 8, writes=writes()),
            _frame(FrameKind.LAST, 8, b"tag" * 10, b"", writes()),
        ]


class ShmFrames(_Frames):
    name, weight = "shm", 20

    def __init__(self) -> None:
        super().__init__()
        self._peer = SharedMemory(_REGISTERED_BYTES)

    def _link(self, sock: socket.socket, events: queue.SimpleQueue[object]) -> Link:
        return ShmLink("a", sock, self._buffer, self._peer, events, _DEADLINE_SECONDS)

    def _conversation(self, rng: random.Random) -> list[bytes]:
        return [
            _frame(FrameKind.LAST, 7, b"tag", rng.randbytes(rng.randrange(9))),
            _frame(FrameKind.ACK, 1),
            _frame(FrameKind.LAST, 8, b"tag" * 10),
        ]

    def feed(self, data: bytes) -> bool:
        understood = super().feed(data)
        if (self._memory != _CANARY).any():
            raise Violation("bytes came in over the socket of a shared-memory connection")
        return understood

    def finish(self) -> None:
        self._peer.close()


def data_targets() -> list[Target]:
    """All targets of the data plane; the same in every process."""
    return [Handshakes(), TcpFrames(), ShmFrames()]
