"""What all transports with one-sided writes share, on an engine made for tests whose bytes become visible late."""

from __future__ import annotations

import ctypes
import itertools
import queue
import struct
import threading
from collections import deque
from typing import ClassVar

import numpy as np
import pytest

from weightbridge.errors import ConnectError, UsageError
from weightbridge.kernels.base import Buffer
from weightbridge.testing.transport_suite import TransportSuite, Worker, group, join
from weightbridge.transports import Arrived, Identity, Memory, PeerLost, WriteDone
from weightbridge.transports.one_sided import Engine, EngineError, OneSidedTransport

_ids = itertools.count(1)


class LateEngine(Engine):
    """`finished` says yes when the bytes have left; they can be seen at the peer once its engine has told of the number."""

    max_writes = 700
    notifies = True
    engines: ClassVar[dict[int, LateEngine]] = {}

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.id = next(_ids)
        self.engines[self.id] = self
        self.peer = 0
        self.looks = self.num_flying = 0
        self.closed = False
        self.lock = threading.Lock()
        self.inbox: deque[tuple[list[tuple[int, bytes]], int | None]] = deque()

    def description(self) -> bytes:
        return struct.pack("<Q", self.id)

    def attach(self, description: bytes, nbytes: int, seconds: float) -> None:
        (self.peer,) = struct.unpack("<Q", description)

    def begin(self, piece: np.ndarray, number: int | None) -> list:  # type: ignore[type-arg]
        if self.peer not in self.engines:
            raise EngineError("the other engine is gone")
        if number is not None and self.num_flying:
            raise EngineError("a number may overtake the pieces before it")
        self.num_flying += 1
        return [3, piece, number]

    def finished(self, piece: list) -> bool:  # type: ignore[type-arg]
        piece[0] -= 1
        if piece[0]:
            return False
        self.num_flying -= 1
        target = self.engines.get(self.peer)
        if target is None:
            raise EngineError("the other engine is gone")
        rows = [(r, ctypes.string_at(self.buffer.address + l, n)) for l, r, n in piece[1].tolist()]  # noqa: E741
        with target.lock:
            if target.closed:
                raise EngineError("the other engine is gone")
            target.inbox.append((rows, piece[2]))
        return True

    def notified(self) -> list[int]:
        self.looks += 1
        numbers: list[int] = []
        if self.looks % 3:
            return numbers
        with self.lock:
            while self.inbox and not numbers and not self.closed:
                rows, number = self.inbox.popleft()
                for offset, data in rows:
                    ctypes.memmove(self.buffer.address + offset, data, len(data))
                numbers += [] if number is None else [number]
        return numbers

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.inbox.clear()
        self.engines.pop(self.id, None)


class SilentEngine(LateEngine):
    """Tells nothing: `finished` means landed."""

    notifies = False

    def finished(self, piece: list) -> bool:  # type: ignore[type-arg]
        done = super().finished(piece)
        target = self.engines.get(self.peer)
        while done and target is not None and target.inbox:
            target.notified()
        return done


class LateTransport(OneSidedTransport):
    name = "late"
    engine_class: type[LateEngine] = LateEngine

    def _open_engine(self, peer: str, memory: Memory) -> Engine:
        return self.engine_class(memory.buffer)


class SilentTransport(LateTransport):
    name = "silent"
    engine_class = SilentEngine


class TestLate(TransportSuite):
    transport_class = LateTransport


class TestSilent(TransportSuite):
    transport_class = SilentTransport


class BrokenEngine(LateEngine):
    """Fails after some pieces."""

    left = 2

    def finished(self, piece: list) -> bool:  # type: ignore[type-arg]
        done = super().finished(piece)
        if done:
            self.left -= 1
        if self.left < 0:
            raise EngineError("the card caught fire")
        return done


class BrokenTransport(LateTransport):
    name = "broken"
    engine_class = BrokenEngine


class RefusingTransport(LateTransport):
    name = "refusing"

    def _open_engine(self, peer: str, memory: Memory) -> Engine:
        if self.identity.worker == "b":
            raise EngineError("no card left")
        return super()._open_engine(peer, memory)


def test_an_engine_that_fails_is_a_lost_peer_with_the_cause_and_nothing_is_acknowledged() -> None:
    with group(BrokenTransport, "a", "b") as (a, b):
        tickets = [a.post("b", [[0, 0, 10]], b"%d" % k) for k in range(3)]
        assert [b.expect(Arrived).tag for _ in range(2)] == [b"0", b"1"]
        assert b.expect(PeerLost).peer == "a"
        while not isinstance(event := a.events.get(timeout=10), PeerLost):
            assert isinstance(event, WriteDone)
            assert event.ticket in tickets[:2]
        assert "the card caught fire" in event.cause


def test_an_engine_that_cannot_start_fails_both_ends_and_leaves_nothing() -> None:
    before = set(LateEngine.engines)
    a, b = Worker(RefusingTransport, "a", 100, deadline_seconds=2), Worker(RefusingTransport, "b", 100)
    try:
        with pytest.raises(ConnectError, match=r"worker b over refusing|no card left"):
            join(a, b)
    finally:
        a.close()
        b.close()
    assert set(LateEngine.engines) == before


def test_engines_end_with_their_peer() -> None:
    before = set(LateEngine.engines)
    with group(LateTransport, "a", "b", "c") as (a, b, _):
        assert len(set(LateEngine.engines) - before) == 6
        a.transport.fence("b")
        assert len(set(LateEngine.engines) - before) == 5
        b.transport.close()
        assert len(set(LateEngine.engines) - before) == 3
    assert set(LateEngine.engines) == before


class ExposedTransport(LateTransport):
    name = "exposed"
    always_exposed = True


class MissingTransport(LateTransport):
    name = "absent"

    @classmethod
    def missing(cls) -> str:
        return "no such library"


@pytest.mark.parametrize(
    ("kind", "host", "words"),
    [
        (LateTransport, "192.0.2.7", "on the network of 192.0.2.7.*trusted_network=True"),
        (ExposedTransport, "127.0.0.1", "on every interface.*trusted_network=True"),
        (MissingTransport, "127.0.0.1", "absent transport cannot be used on this machine: no such library"),
    ],
)
def test_unprotected_ports_are_refused_unless_the_network_is_said_to_be_trusted(
    kind: type[LateTransport], host: str, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        kind(Identity(worker="a", session="s", token=b"t"), queue.SimpleQueue(), host=host)
    if kind is ExposedTransport:
        kind(Identity(worker="a", session="s"), queue.SimpleQueue(), host=host, trusted_network=True).close()


def test_trust_does_not_replace_the_token() -> None:
    with pytest.raises(UsageError, match="without a token"):
        LateTransport(Identity(worker="a", session="s"), queue.SimpleQueue(), host="192.0.2.7", trusted_network=True)


def test_an_address_of_another_kind_is_refused() -> None:
    a, b = Worker(LateTransport, "a", 100), Worker(SilentTransport, "b", 100)
    try:
        with pytest.raises(UsageError, match="late://host:port"):
            a.transport.connect("b", b.transport.address)
    finally:
        a.close()
        b.close()
