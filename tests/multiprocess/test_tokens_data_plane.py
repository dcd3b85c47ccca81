"""Who may write into a worker's memory: peers without the token, with an old one, with recorded bytes, of another job. Real
sockets; each stranger is refused and logged, not a byte is written, and the genuine pair goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from weightbridge.errors import ConnectError
from weightbridge.testing.transport_suite import Worker, join
from weightbridge.transports import ShmTransport, TcpTransport, handshake
from weightbridge.transports.base import Arrived, Identity, PeerLost, WriteDone
from weightbridge.transports.handshake import dial_handshake, receive_exactly
from weightbridge.transports.wire import FrameKind, Header

KINDS = pytest.mark.parametrize("kind", [TcpTransport, ShmTransport], ids=["tcp", "shm"])
NBYTES = 5000
MESSAGE_BYTES = 8 + 1 + 7 + 3 * 128 + 32  # of the handshake
STRANGERS = {
    "no token": ({"token": b""}, "the token differs"),
    "old token": ({"token": b"the token of yesterday"}, "the token differs"),
    "part of the token": ({"token": b"secre"}, "the token differs"),
    "another job": ({"session": "another"}, "another session"),
}


@contextmanager
def pair(kind: type[TcpTransport] | type[ShmTransport]) -> Iterator[tuple[Worker, Worker]]:
    """Two joined workers; b's memory is full of a pattern that a write would disturb."""
    a, b = Worker(kind, "a", NBYTES), Worker(kind, "b", NBYTES)
    try:
        b.content[:] = np.arange(NBYTES) % 251
        a.content[:] = 7
        join(a, b)
        yield a, b
    finally:
        a.close()
        b.close()


def still_works(a: Worker, b: Worker) -> None:
    """a writes 100 bytes to b, nothing else had changed, and nobody lost anybody."""
    expected = np.arange(NBYTES, dtype=np.int64) % 251
    assert (b.content == expected).all()
    a.post("b", [(0, 300, 100)], b"genuine")
    assert b.expect(Arrived).tag == b"genuine"
    a.expect(WriteDone)
    expected[300:400] = 7
    assert (b.content == expected).all()
    b.expect_nothing()


def dial(worker: Worker) -> socket.socket:
    """A stranger's connection to a worker's listener."""
    address = worker.transport.address
    if address.startswith("tcp"):
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=5)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect("\0" + address.removeprefix("shm://"))
    return sock


def attack() -> bytes:
    """A post that overwrites all of the memory, as a joined peer would send it."""
    table = struct.pack("<qq", 0, NBYTES)
    return Header(FrameKind.LAST, 1, 3, 0, 1).pack() + b"tag" + table + b"\xff" * NBYTES


def logged(caplog: pytest.LogCaptureFixture, text: str, seconds: float = 5) -> None:
    """Wait until a warning of the transport says it: the acceptor works in a thread of its own."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if any(r.name == "weightbridge.transports.sockets" and text in r.getMessage() for r in list(caplog.records)):
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{text!r} is not in the log: {[r.getMessage() for r in caplog.records]}")


@KINDS
@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_refused_and_logged_and_nothing_is_written(kind, who, caplog: pytest.LogCaptureFixture) -> None:
    identity, reason = STRANGERS[who]
    caplog.set_level(logging.WARNING)
    with pair(kind) as (a, b), dial(b) as sock:
        stranger = Identity(worker="a", **{"session": "suite", "token": b"secret", **identity})
        with pytest.raises(ConnectError, match=reason):
            dial_handshake(sock, stranger, "b", time.monotonic() + 5)
        with contextlib.suppress(OSError):  # it has hung up
            sock.sendall(attack())
        logged(caplog, reason)
        still_works(a, b)


@KINDS
@pytest.mark.parametrize(
    "first", [attack(), b"", b"GET / HTTP/1.1\r\n" * 40, b"\0" * 4096], ids=["frames", "nothing", "http", "zeros"]
)
def test_whoever_does_not_begin_with_the_handshake_is_not_heard(
    kind, first: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with pair(kind) as (a, b), dial(b) as sock:
        with contextlib.suppress(OSError):  # it may hang up before it has taken all
            sock.sendall(first)
            sock.shutdown(socket.SHUT_WR)
        logged(caplog, "closed the connection" if not first else "another protocol")
        still_works(a, b)


def handshake_without_token(sock: socket.socket, me: str, peer: str) -> bytes:
    """The handshake as far as somebody gets who may guess everything but the token; what came back."""
    stranger = Identity(worker=me, session="suite", token=b"a guess")
    with pytest.raises(ConnectError):
        dial_handshake(sock, stranger, peer, time.monotonic() + 5)
    sock.settimeout(5)
    rest = b""
    with contextlib.suppress(ConnectionError):
        while data := receive(sock):
            rest += data
    return rest


def receive(sock: socket.socket) -> bytes:
    """What comes next, b"" at the end. No descriptor may be with it."""
    if sock.family != socket.AF_UNIX:
        return sock.recv(4096)
    data, fds, _, _ = socket.recv_fds(sock, 4096, 4)
    assert fds == []
    return data


@KINDS
def test_memory_is_not_shown_to_a_stranger(kind) -> None:
    """Neither its size nor, in shared memory, its descriptor leaves before the token is proved."""
    with pair(kind) as (a, b):
        with dial(b) as sock:
            assert handshake_without_token(sock, "a", "b") == b""
        still_works(a, b)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_turned_away_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It does not even come as far as the handshake, with the right token in hand."""
    caplog.set_level(logging.WARNING)
    with pair(ShmTransport) as (a, b):
        child = os.fork()
        if child == 0:  # nothing but system calls from here on: other threads of this process are not there
            outcome = 1
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                with dial(b) as sock:
                    me = Identity(worker="a", session="suite", token=b"secret")
                    with contextlib.suppress(ConnectError):
                        dial_handshake(sock, me, "b", time.monotonic() + 5)
                        outcome = 2
                    outcome = 0 if outcome == 1 else outcome
            finally:
                os._exit(outcome)
        assert os.waitpid(child, 0)[1] == 0
        logged(caplog, f"process {child} is of user 65534, this worker of user 0")
        still_works(a, b)


@contextmanager
def recorder(target: Worker) -> Iterator[tuple[str, list[bytes]]]:
    """A listener on the path to a worker, which passes everything on and keeps what the dialler sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[bytes] = []

    def pump(source: socket.socket, sink: socket.socket, keep: bool) -> None:
        while data := source.recv(65536):
            if keep:
                kept.append(data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        dialler, _ = listener.accept()
        with dialler, dial(target) as onward, ThreadPoolExecutor(2) as pool:
            onward.settimeout(None)
            done = [pool.submit(pump, dialler, onward, True), pool.submit(pump, onward, dialler, False)]
            for future in done:
                future.exception()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", kept
    finally:
        listener.close()
        thread.join(10)


def test_a_recorded_connection_cannot_be_played_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    a, b = Worker(TcpTransport, "a", NBYTES), Worker(TcpTransport, "b", NBYTES, deadline_seconds=1.5)
    try:
        b.content[:] = np.arange(NBYTES) % 251
        a.content[:] = 7
        with recorder(b) as (address, kept):
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(b.transport.connect, "a", "unused")
                a.transport.connect("b", address)
                other.result(10)
            a.post("b", [(0, 0, NBYTES)], b"recorded")
            assert b.expect(Arrived).tag == b"recorded"
            a.expect(WriteDone)
            recorded = b"".join(kept)
            assert b"recorded" in recorded
            b.content[:] = np.arange(NBYTES) % 251
            for wait_for_answer in (False, True):  # all at once, or message by message as the protocol has it
                with dial(b) as sock:
                    play(sock, recorded, wait_for_answer)
            logged(caplog, "the token differs")
            still_works(a, b)
            a.transport.fence("b")
            b.expect(PeerLost)
            b.transport.fence("a")
        # The victim now waits for just this peer, and hears only the recording.
        with ThreadPoolExecutor(1) as pool, dial(b) as sock:
            other = pool.submit(b.transport.connect, "a", "unused")
            play(sock, recorded, True)
            assert "the token differs" in str(other.exception(20))
    finally:
        a.close()
        b.close()


def play(sock: socket.socket, recorded: bytes, wait_for_answer: bool) -> None:
    with contextlib.suppress(OSError):  # refused: it hung up
        for part in (
            recorded[:MESSAGE_BYTES],
            recorded[MESSAGE_BYTES : 2 * MESSAGE_BYTES],
            recorded[2 * MESSAGE_BYTES :],
        ):
            sock.sendall(part)
            if wait_for_answer:
                assert receive_exactly(sock, MESSAGE_BYTES, time.monotonic() + 2) is not None


@KINDS
@pytest.mark.parametrize("proof", ["a guess", "the dialler's own"])
def test_an_impostor_at_the_listener_gets_neither_bytes_nor_memory(kind, proof: str) -> None:
    """Somebody listens where the peer is believed to be, asks for no proof and makes one up, and goes on as a peer would."""
    listener = socket.create_server(("127.0.0.1", 0)) if kind is TcpTransport else socket.socket(socket.AF_UNIX)
    if kind is ShmTransport:
        listener.bind("\0weightbridge-impostor")
        listener.listen()
    where = f"tcp://127.0.0.1:{listener.getsockname()[1]}" if kind is TcpTransport else "shm://weightbridge-impostor"

    def impostor() -> bytes:
        sock, _ = listener.accept()
        with sock:
            deadline = time.monotonic() + 5
            theirs = receive_exactly(sock, MESSAGE_BYTES, deadline)
            stranger = Identity(worker="b", session="suite", token=b"a guess")
            mine = handshake._hello(stranger, "a")
            sock.sendall(mine)
            heard = receive_exactly(sock, MESSAGE_BYTES, deadline)
            made_up = handshake._proof(stranger.token, b"acceptor", theirs, mine)
            with contextlib.suppress(OSError):
                sock.sendall(heard if proof == "the dialler's own" else made_up)
                sock.sendall(struct.pack("<4sB3xQ", b"WBJ1", 0, NBYTES))
            with contextlib.suppress(ConnectionError):
                return receive(sock)
            return b""

    a = Worker(kind, "a", NBYTES)
    try:
        with ThreadPoolExecutor(1) as pool, listener:
            heard = pool.submit(impostor)
            with pytest.raises(ConnectError, match="token"):
                a.transport.connect("b", where)
            assert heard.result(10) == b""
    finally:
        a.close()


def test_the_token_is_on_no_wire_and_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    a, b = Worker(TcpTransport, "a", 64, token=b"SESAME-OPEN"), Worker(TcpTransport, "b", 64, token=b"SESAME-OPEN")
    stranger = Worker(TcpTransport, "a", 64, token=b"SESAME-SHUT")
    try:
        with recorder(b) as (address, kept), ThreadPoolExecutor(1) as pool:
            with pytest.raises(ConnectError) as caught:
                stranger.transport.connect("b", b.transport.address)
            other = pool.submit(b.transport.connect, "a", "unused")
            a.transport.connect("b", address)
            other.result(10)
            a.transport.fence("b")
        assert b"SESAME" not in b"".join(kept)
        assert "SESAME" not in str(caught.value)
    finally:
        for worker in (a, b, stranger):
            worker.close()
    assert not re.search("SESAME", caplog.text)
    assert "SESAME" not in repr(a.transport.identity)
