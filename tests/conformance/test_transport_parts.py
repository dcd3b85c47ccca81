"""The pieces below a transport: shared memory, handshake, frames, and what only TCP or only shared memory promises."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbridge.errors import ConnectError, RegistrationError, TransferTimeout, UsageError
from weightbridge.kernels import Buffer
from weightbridge.testing.transport_suite import Worker, group, join
from weightbridge.transports import (
    Arrived,
    Identity,
    Memory,
    PeerLost,
    SharedMemory,
    ShmTransport,
    TcpTransport,
    WriteDone,
    handshake,
    link,
    tcp,
    wire,
)  # fmt: skip

# --- memory -----------------------------------------------------------------------------------------------------------


def test_shared_memory_is_shared_sealed_and_given_back():
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(SharedMemory(10_001, prefault=True)) as mine:
        assert mine.array.shape == (10_001,)
        assert not mine.array.any()
        theirs = SharedMemory.attach(os.dup(mine.memory.fd), 10_001)
        mine.array[-1] = 7
        assert theirs.array[-1] == 7
        assert theirs.memory.buffer.address != mine.memory.buffer.address
        with pytest.raises(PermissionError):
            os.ftruncate(mine.memory.fd, 100)
        theirs.close()
        theirs.close()
        with pytest.raises(UsageError, match="closed"):
            theirs.memory  # noqa: B018
        with pytest.raises(UsageError, match="closed"):
            theirs.array  # noqa: B018
    assert len(os.listdir("/proc/self/fd")) == before
    with contextlib.closing(SharedMemory(0)) as empty:
        assert empty.memory.buffer.nbytes == 0
    with pytest.raises(UsageError, match="-1"):
        SharedMemory(-1)


def test_a_view_outlives_the_close():
    memory = SharedMemory(100)
    view = memory.array
    memory.close()
    view[:] = 5
    assert view.sum() == 500


@pytest.mark.parametrize("make", [
    lambda: os.memfd_create("short", os.MFD_ALLOW_SEALING),
    lambda: os.open("/dev/null", os.O_RDWR),
])  # fmt: skip
def test_attach_refuses_what_is_too_short_or_no_memory(make):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RegistrationError):
        SharedMemory.attach(make(), 100)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(RegistrationError, match="not sealed"):
        SharedMemory.attach(unsealed, 100)
    assert len(os.listdir("/proc/self/fd")) == before


def test_more_memory_than_there_is_is_an_error():
    with pytest.raises(RegistrationError, match="free some memory"):
        SharedMemory(1 << 60)


# --- handshake --------------------------------------------------------------------------------------------------------


def shake(dialler: Identity, peer: str, acceptor: Identity, seconds: float = 5.0):
    """Both ends of a handshake over a socket pair: (error or None, error or dialler's name)."""
    one, other = socket.socketpair()
    deadline = time.monotonic() + seconds

    def attempt(function, *arguments):
        try:
            return function(*arguments, deadline)
        except ConnectError as error:
            return error

    with one, other, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(attempt, handshake.accept_handshake, other, acceptor)
        dialled = attempt(handshake.dial_handshake, one, dialler, peer)
        one.close()
        return dialled, accepted.result(10)


@pytest.mark.parametrize("token", [b"", b"secret"])
def test_handshake_between_friends(token):
    assert shake(
        Identity(worker="a", session="s", token=token), "b", Identity(worker="b", session="s", token=token)
    ) == (None, "a")


@pytest.mark.parametrize(("acceptor", "peer", "reason"), [
    ({"token": b"other"}, "b", "token"),
    ({"token": b""}, "b", "token"),
    ({"session": "t"}, "b", "session"),
    ({"worker": "c"}, "b", "'c', not 'b'"),
])  # fmt: skip
def test_both_ends_refuse_and_the_dialler_learns_why(acceptor, peer, reason):
    known = {"worker": "b", "session": "s", "token": b"secret"}
    dialled, accepted = shake(
        Identity(worker="a", session="s", token=b"secret"), peer, Identity(**{**known, **acceptor})
    )
    assert reason in str(dialled)
    assert "worker b" in str(dialled)
    assert reason in str(accepted)
    assert "secret" not in str(dialled) + str(accepted)


def replay(*messages: bytes, seconds: float = 0.3) -> ConnectError:
    """An acceptor meets someone who sends fixed messages."""
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"".join(messages))
        with pytest.raises(ConnectError) as caught:
            handshake.accept_handshake(other, Identity(worker="b", session="s", token=b"x"), time.monotonic() + seconds)
        return caught.value


def test_a_recorded_handshake_cannot_be_replayed():
    sent = []

    class Recorder(socket.socket):
        def sendall(self, data, *flags):
            sent.append(bytes(data))
            return super().sendall(data, *flags)

    one, other = socket.socketpair()
    recorder = Recorder(fileno=one.detach())
    deadline = time.monotonic() + 5
    with recorder, other, ThreadPoolExecutor(1) as pool:
        done = pool.submit(handshake.accept_handshake, other, Identity(worker="b", session="s", token=b"x"), deadline)
        handshake.dial_handshake(recorder, Identity(worker="a", session="s", token=b"x"), "b", deadline)
        assert done.result(5) == "a"
    assert len(sent) == 2
    assert "token differs" in str(replay(*sent))


def test_proofs_cannot_be_reflected():
    """Whoever answers the dialler with the dialler's own proof does not get in."""
    one, other = socket.socketpair()
    deadline = time.monotonic() + 5
    with one, other, ThreadPoolExecutor(1) as pool:
        dialled = pool.submit(
            handshake.dial_handshake, one, Identity(worker="a", session="s", token=b"x"), "b", deadline
        )
        size = handshake._MESSAGE.size
        handshake.receive_exactly(other, size, deadline)
        other.sendall(handshake._hello(Identity(worker="b", session="s"), "a"))
        other.sendall(handshake.receive_exactly(other, size, deadline))
        assert "token" in str(dialled.exception(5))


def test_a_proof_made_without_the_token_is_refused():
    one, other = socket.socketpair()
    identity = Identity(worker="b", session="s", token=b"x")
    with one, other, ThreadPoolExecutor(1) as pool:
        done = pool.submit(handshake.accept_handshake, other, identity, time.monotonic() + 5)
        mine = handshake._hello(Identity(worker="a", session="s"), "b")
        one.sendall(mine)
        theirs = handshake.receive_exactly(one, len(mine), time.monotonic() + 5)
        one.sendall(handshake._proof(b"", b"dialler", mine, theirs))
        assert "token" in str(done.exception(5))


@pytest.mark.parametrize(("data", "reason"), [
    (b"GET / HTTP/1.1\r\n\r\n".ljust(2000), "another protocol"),
    (b"", "in time"),
    (b"WBRIDGE1", "in time"),
    (b"WBRIDGE1\x02".ljust(500, b"\0"), "greeting"),
])  # fmt: skip
def test_what_is_no_handshake_is_refused(data, reason):
    assert reason in str(replay(data))


def test_names_must_fit():
    for identity in (
        Identity(worker="x" * 129, session="s"),
        Identity(worker="", session="s"),
        Identity(worker="a\0b", session="s"),
        Identity(worker="a", session=""),
    ):
        with pytest.raises(UsageError, match="1 to 128"):
            TcpTransport(identity, queue.SimpleQueue())


# --- frames -----------------------------------------------------------------------------------------------------------

tables = st.lists(
    st.tuples(
        st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.sampled_from([0, 1, 5, 100, 3 << 20, 9 << 20, 40 << 20])
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(rows=tables, neighbours=st.integers(0, 5))
def test_merged_and_cut_writes_move_the_same_bytes(rows, neighbours):
    for _ in range(neighbours if rows else 0):  # rows that continue the last one, at both ends or at one
        local, remote, nbytes = rows[-1]
        rows = [*rows, (local + nbytes, remote + nbytes + (neighbours == 3), 7)]
    table = np.array(rows, np.int64).reshape(-1, 3)
    pieces = list(wire.cut_writes(wire.merge_writes(table)))
    for piece in pieces:
        assert 0 < len(piece) <= wire.MAX_FRAME_WRITES
        assert (piece[:, 2] > 0).all()
        assert piece[:, 2].sum() <= wire.MAX_FRAME_BYTES

    def runs(some):
        """Maximal runs (start, shift, length) of bytes that move together, in order."""
        out = []
        for local, remote, nbytes in some:
            if nbytes and out and out[-1][0] + out[-1][2] == local and out[-1][1] == remote - local:
                out[-1][2] += nbytes
            elif nbytes:
                out.append([local, remote - local, nbytes])
        return out

    assert runs([row for piece in pieces for row in piece.tolist()]) == runs(rows)


def test_many_tiny_writes_are_cut_by_number():
    table = np.stack([np.arange(40_000) * 2, np.arange(40_000) * 3, np.ones(40_000)], axis=1).astype(np.int64)
    assert [len(p) for p in wire.cut_writes(table)] == [16384, 16384, 7232]


def test_headers_survive_and_strange_ones_are_refused():
    for kind in wire.FrameKind:
        back = wire.read_header(wire.Header(kind, 1 << 63, 64, 1 << 20, 16384).pack())
        assert (back.kind, back.ticket, back.tag_bytes, back.payload_bytes, back.num_writes) == (
            kind,
            1 << 63,
            64,
            1 << 20,
            16384,
        )
    good = wire.Header(wire.FrameKind.LAST, 1)
    for change in ({"tag_bytes": 65}, {"payload_bytes": (1 << 20) + 1}, {"num_writes": 16385}):
        bad = wire.Header(wire.FrameKind.LAST, 1, **change)
        with pytest.raises(wire.ProtocolError, match="allowed are"):
            wire.read_header(bad.pack())
    for data in (b"HTTP" + good.pack()[4:], good.pack()[:4] + b"\x09" + good.pack()[5:]):
        with pytest.raises(wire.ProtocolError, match="not this protocol"):
            wire.read_header(data)


@pytest.mark.parametrize("num_buffers", [1, 3, 3000])
def test_buffers_go_through_in_small_portions(num_buffers):
    """Partial sends and receives, and more pieces than one system call takes."""
    one, other = socket.socketpair()
    for sock in (one, other):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    data = os.urandom(3000 * 101)
    target = bytearray(len(data))

    def pieces(buffer):
        step = -(-len(data) // num_buffers)
        return [memoryview(buffer)[i : i + step] for i in range(0, len(data), step)]

    def nothing() -> None:
        return None

    with one, other, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(wire.send_buffers, one, pieces(data), nothing, nothing)
        assert wire.receive_into(other, pieces(target), nothing, nothing)
        sent.result(10)
        assert bytes(target) == data
        one.close()
        assert not wire.receive_into(other, [memoryview(target)], nothing, nothing)


# --- tcp --------------------------------------------------------------------------------------------------------------


def test_tcp_stays_on_loopback_without_a_token():
    with pytest.raises(UsageError, match=r"listen on 198\.18\.0\.1.*without a token"):
        TcpTransport(Identity(worker="a", session="s"), queue.SimpleQueue(), host="198.18.0.1")
    with contextlib.closing(Worker(TcpTransport, "a", 100, token=b"")) as worker:
        with pytest.raises(UsageError, match=r"dial 198\.18\.0\.1.*without a token"):
            worker.transport.connect("b", "tcp://198.18.0.1:80")
        with contextlib.closing(Worker(TcpTransport, "b", 100, token=b"")) as other:
            join(worker, other)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_tcp_wants_one_address(host):
    with pytest.raises(UsageError, match="every interface"):
        TcpTransport(Identity(worker="a", session="s", token=b"x"), queue.SimpleQueue(), host=host)


def test_tcp_refuses_strange_addresses_and_hosts():
    with pytest.raises(ConnectError, match="an address of this machine"):
        TcpTransport(Identity(worker="a", session="s", token=b"x"), queue.SimpleQueue(), host="198.18.0.1")
    with contextlib.closing(Worker(TcpTransport, "a", 100)) as worker:
        for address in ("shm://x", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://127.0.0.1:0", "127.0.0.1:80"):
            with pytest.raises(UsageError, match="of the form tcp://host:port"):
                worker.transport.connect("b", address)


@pytest.mark.parametrize("break_", ["offset", "negative", "length"])
def test_tcp_receiver_refuses_writes_outside_its_memory(break_):
    """The poster is made to believe that the peer has more memory than it has."""
    with group(TcpTransport, "a", "b", nbytes=1000) as (a, b):
        guard = b.content.copy()
        link = a.transport._links["b"]
        link.remote_bytes = 1 << 40
        if break_ == "negative":
            real = link._send_piece
            link._send_piece = lambda head, piece: real(head, piece - np.array([0, 5000, 0]))
        a.post("b", [[0, {"offset": 1001, "negative": 0, "length": 500}[break_], 501]], b"bad")
        lost = b.expect(PeerLost)
        assert "does not lie within the 1000 bytes" in lost.cause
        told = a.expect(PeerLost)
        assert told.peer == "b"
        assert "refused" in told.cause
        assert "1000 bytes" in told.cause
        assert (b.content == guard).all()
        a.expect_nothing(0.05)
        b.expect_nothing()


def test_a_peer_that_breaks_the_protocol_is_lost():
    for junk, cause in (
        (b"x" * 100, "not this protocol"),
        (wire.Header(wire.FrameKind.ACK, 77).pack(), "acknowledged post 77"),
    ):
        with group(TcpTransport, "a", "b", nbytes=1000) as (a, b):
            a.transport._links["b"].sock.sendall(junk)
            assert cause in b.expect(PeerLost).cause
            assert cause in a.expect(PeerLost).cause


@pytest.mark.parametrize("sent", [
    wire.Header(wire.FrameKind.PART, 1, 0, 0, 1).pack() + np.array([0, 5], "<i8").tobytes() + b"12345",  # between two parts
    wire.Header(wire.FrameKind.LAST, 1, 0, 0, 1).pack() + np.array([0, 5], "<i8").tobytes() + b"1234",  # inside the bytes
    wire.Header(wire.FrameKind.LAST, 1).pack()[:-1],  # inside a header
])  # fmt: skip
def test_silence_in_the_middle_of_a_post_is_a_loss(sent):
    with group(TcpTransport, "a", "b", nbytes=1000, deadline_seconds=1.2) as (a, b):
        b.transport._links["a"]._deadline_seconds = 0.4  # from now on: they had time to join
        a.transport._links["b"].sock.sendall(sent)
        assert "no progress" in b.expect(PeerLost).cause


def test_what_the_kernel_told_the_sender_alone_is_the_cause(monkeypatch):
    """The kernel gave the connection up; it says so to the sender, late here, and to the receiver only that it is over."""
    with group(TcpTransport, "a", "b", nbytes=1000) as (a, b):
        its, entered = a.transport._links["b"], threading.Event()

        def given_up(post):
            entered.set()
            until = time.monotonic() + 10
            while not its._ending and time.monotonic() < until:
                time.sleep(0.001)
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

        monkeypatch.setattr(its, "_transmit", given_up)
        monkeypatch.setattr(its, "_is_over", lambda: True)
        a.post("b", [], b"never sent")
        assert entered.wait(10)
        b.transport.fence("a")
        assert "the kernel gave the connection up" in a.expect(PeerLost).cause


def test_words_leave_at_once_from_the_first():
    """Those of the handshake are short and follow on each other: the kernel must not hold them back."""
    with group(TcpTransport, "a", "b") as workers:
        for one, other in (workers, workers[::-1]):
            sock = one.transport._links[other.name].sock
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        a, b = workers
        with contextlib.closing(a.transport._dial(b.transport.address, time.monotonic() + 5)) as dialled:
            assert dialled.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert b.transport._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_acknowledgements_overtake_large_posts():
    """A tag is acknowledged while the acknowledging end is in the middle of a write of its own."""
    with group(TcpTransport, "a", "b", nbytes=64 << 20) as (a, b):
        big = b.post("a", [[0, 0, 64 << 20]] * 8, b"big")
        small = a.post("b", [[0, 0, 10]], b"small")
        assert b.expect(Arrived).tag == b"small"
        assert a.expect(WriteDone).ticket == small
        assert a.expect(Arrived).tag == b"big"
        assert b.expect(WriteDone).ticket == big


def test_silent_strangers_hold_up_nobody():
    with contextlib.ExitStack() as stack:
        a, b = (Worker(TcpTransport, n, 100) for n in "ab")
        stack.callback(a.close)
        stack.callback(b.close)
        port = int(b.transport.address.rpartition(":")[2])
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)]
        strangers[0].sendall(b"WBRIDGE1")
        join(a, b)
        a.post("b", [], b"x")
        b.expect(Arrived)


def test_a_stale_dial_gives_way_to_a_newer_one():
    """An authenticated dial whose process stands still (it never answers JOIN) must not hold up its successor."""
    with contextlib.ExitStack() as stack:
        a, b = (Worker(TcpTransport, n, 100) for n in "ab")
        stack.callback(a.close)
        stack.callback(b.close)
        stale = stack.enter_context(contextlib.closing(a.transport._dial(b.transport.address, time.monotonic() + 5)))
        handshake.dial_handshake(stale, a.transport.identity, "b", time.monotonic() + 5)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        waiting = pool.submit(b.transport.connect, "a", a.transport.address)
        until = time.monotonic() + 5
        while b.transport._joining.get("a") is None and time.monotonic() < until:
            time.sleep(0.001)  # until b is in the middle of joining the stale one
        assert not waiting.done()
        a.transport.connect("b", b.transport.address)
        waiting.result(10)
        a.post("b", [[0, 0, 5]], b"x")
        assert b.expect(Arrived).tag == b"x"


# --- shm --------------------------------------------------------------------------------------------------------------


def test_shm_wants_memory_with_a_descriptor():
    transport = ShmTransport(Identity(worker="a", session="s"), queue.SimpleQueue())
    array = np.zeros(100, np.uint8)
    with contextlib.closing(transport), pytest.raises(RegistrationError, match="SharedMemory"):
        transport.register(Memory(buffer=Buffer(array.ctypes.data, 100)))


def test_shm_leaves_no_file_and_counts_nothing():
    with group(ShmTransport, "a", "b") as (a, b):
        assert a.transport.kernel_bytes() == b.transport.kernel_bytes() == {}
        assert not os.path.exists(a.transport.address.removeprefix("shm://"))


def test_shm_peer_cannot_send_bytes_over_the_socket():
    with group(ShmTransport, "a", "b") as (a, b):
        a.transport._links["b"].sock.sendall(wire.Header(wire.FrameKind.LAST, 1, 0, 0, 1).pack() + bytes(17))
        assert "go through memory" in b.expect(PeerLost).cause


def test_mapped_memory_stays_readable_after_a_fence():
    """A kernel that still runs when the owner fences must not die of it."""
    with group(ShmTransport, "a", "b", nbytes=1000) as (a, b):
        b.content[:] = 9
        mapped = a.transport.map("b")
        a.transport.fence("b")
        b.transport.fence("a")
        b.shared.close()
        assert (np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 1000).from_address(mapped.address)) == 9).all()


@pytest.mark.parametrize("kind", [TcpTransport, ShmTransport])
def test_a_fence_ends_the_threads_of_its_link_before_it_returns(kind):
    with group(kind, "a", "b", nbytes=32 << 20) as (a, b):
        for _ in range(3):
            b.post("a", [[0, 0, 32 << 20]] * 20, b"")
            a.post("b", [[0, 0, 32 << 20]] * 20, b"")
        time.sleep(0.02)
        a.transport.fence("b")
        assert not {"wb-send-b", "wb-receive-b"} & {t.name for t in threading.enumerate()}


@pytest.fixture
def garbage_collected() -> Iterator[None]:
    """What an error's traceback keeps alive, a socket here, goes with the test and not during a later one, which counts."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("wb-"):
            thread.join(10)
    gc.collect()


@pytest.mark.usefixtures("garbage_collected")
@pytest.mark.parametrize("how", ["fence", "close"])
def test_a_thread_that_does_not_end_is_named_and_not_waited_for_without_end(how, monkeypatch):
    """Its memory is not free then, and whoever fences must not believe it is. The other links are closed all the same."""
    monkeypatch.setattr(link, "_FENCE_SECONDS", 0.3)
    entered, release = threading.Event(), threading.Event()

    def stuck(self, num_writes):
        entered.set()
        assert release.wait(60)

    with group(TcpTransport, "a", "b", "c", nbytes=1000) as (a, b, c):
        a.transport._links["b"]._deadline_seconds = 0.3
        monkeypatch.setattr(tcp.TcpLink, "_receive_writes", stuck)
        b.post("a", [[0, 0, 10]], b"")
        assert entered.wait(10)
        with pytest.raises(TransferTimeout, match="wb-receive-b still moves its bytes") as caught:
            a.transport.fence("b") if how == "fence" else a.transport.close()
        assert caught.value.waiting_for == ("b",)
        release.set()
        if how == "close":
            c.expect(PeerLost)


def test_transports_import_no_torch():
    code = "import sys, weightbridge.transports, weightbridge.kernels; sys.exit('torch' in sys.modules)"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)


def test_threads_carry_their_names():
    with group(TcpTransport, "a", "b"):
        names = {t.name for t in threading.enumerate()}
        assert {"wb-accept-a", "wb-send-b", "wb-receive-b", "wb-accept-b", "wb-send-a", "wb-receive-a"} <= names
