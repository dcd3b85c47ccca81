"""The conformance suite of transports. A test class inherits it, names its transport, and pytest runs it:

    class TestMyTransport(TransportSuite):
        transport_class = MyTransport

`TransportSuite` needs one process; `TransportFaultSuite` stops and kills real ones. Both hold every promise of
`transports/base.py` against the implementation. They need pytest, which the package itself does not depend on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

from weightbridge.errors import ConnectError, TransferTimeout, TransportError, UsageError
from weightbridge.testing.transport_peer import pattern
from weightbridge.transports import (
    MAX_PAYLOAD_BYTES,
    MAX_TAG_BYTES,
    Arrived,
    Identity,
    PeerLost,
    SharedMemory,
    Transport,
    WriteDone,
)

__all__ = ["TransportSuite", "Worker", "group", "join"]

_E = TypeVar("_E")
_LIMIT_SECONDS = 15.0


class Worker:
    """A transport with memory and a queue of its own, for tests."""

    def __init__(
        self,
        transport_class: type[Transport],
        name: str,
        nbytes: int,
        *,
        deadline_seconds: float = 5.0,
        **identity: Any,
    ) -> None:
        self.name = name
        self.events: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.shared = SharedMemory(nbytes)
        known = {"session": "suite", "token": b"secret", **identity}
        self.transport = transport_class(Identity(worker=name, **known), self.events, deadline_seconds=deadline_seconds)
        self.transport.register(self.shared.memory)

    @property
    def content(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.shared.array

    def renew_memory(self) -> None:
        """Register fresh memory; the old one stays readable through arrays taken before."""
        nbytes = len(self.shared.array)
        self.shared.close()
        self.shared = SharedMemory(nbytes)
        self.transport.register(self.shared.memory)

    def expect(self, kind: type[_E], seconds: float = _LIMIT_SECONDS) -> _E:
        """The next event, which must be of this kind."""
        try:
            event = self.events.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"worker {self.name}: no {kind.__name__} within {seconds} s") from None
        assert isinstance(event, kind), f"worker {self.name}: expected {kind.__name__}, got {event}"
        return event

    def expect_nothing(self, seconds: float = 0.0) -> None:
        with contextlib.suppress(queue.Empty):
            event = self.events.get(timeout=seconds) if seconds else self.events.get_nowait()
            raise AssertionError(f"worker {self.name}: unexpected {event}")

    def post(self, peer: str, writes: Any, tag: bytes, payload: bytes = b"") -> int:
        return self.transport.post(peer, np.array(writes, dtype=np.int64).reshape(-1, 3), tag, payload)

    def close(self) -> None:
        self.transport.close()
        self.shared.close()


def join(first: Worker, second: Worker) -> None:
    """Connect two workers; errors of either side are raised here."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(second.transport.connect, first.name, first.transport.address)
        first.transport.connect(second.name, second.transport.address)
        other.result(_LIMIT_SECONDS)


@contextlib.contextmanager
def group(
    transport_class: type[Transport], *names: str, nbytes: int = 1 << 16, deadline_seconds: float = 5.0
) -> Iterator[list[Worker]]:
    """Workers, each joined with each, closed at the end."""
    with contextlib.ExitStack() as stack:
        workers = []
        for name in names:
            workers.append(Worker(transport_class, name, nbytes, deadline_seconds=deadline_seconds))
            stack.callback(workers[-1].close)
        for first, second in itertools.combinations(workers, 2):
            join(first, second)
        yield workers


def _resources() -> tuple[list[str], int]:
    return sorted(t.name for t in threading.enumerate()), len(os.listdir("/proc/self/fd"))


def _footprint() -> tuple[int, int, int]:
    """Threads of the process, its open descriptors, its own resident bytes (without shared memory)."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = (int(word) * os.sysconf("SC_PAGESIZE") for word in file.read().split())
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), resident - shared


class TransportSuite:
    """What can be shown inside one process. Set `transport_class`."""

    transport_class: type[Transport]

    @pytest.fixture(autouse=True)
    def nothing_is_left_behind(self) -> Iterator[None]:
        """No thread and no descriptor outlives its transport, in any test."""
        before = _resources()
        yield
        after = _resources()
        assert after == before, f"threads and number of descriptors were {before}, are {after}"

    # --- bytes and tags ---------------------------------------------------------------------------------------------------

    def test_bytes_are_in_place_before_the_tag(self) -> None:
        with group(self.transport_class, "a", "b", nbytes=100_003) as (a, b):
            rng = np.random.default_rng(1)
            for k in range(50):
                a.content[:] = rng.integers(0, 256, len(a.content), dtype=np.uint8)
                b.content[:] = 0
                n = int(rng.integers(1, 40_000))
                ticket = a.post("b", [[k, 60_003 - k, n], [60_000 + k, 3, 1], [5, 5, 0]], b"tag", b"payload%d" % k)
                assert b.expect(Arrived) == Arrived("a", b"tag", b"payload%d" % k)
                expected = np.zeros_like(b.content)
                expected[60_003 - k : 60_003 - k + n] = a.content[k : k + n]
                expected[3] = a.content[60_000 + k]
                assert np.array_equal(b.content, expected)
                assert a.expect(WriteDone) == WriteDone("b", ticket)

    def test_posts_of_all_sizes_arrive_in_order(self) -> None:
        with group(self.transport_class, "a", "b", nbytes=1 << 20) as (a, b):
            sizes = [0, 1, 1 << 20, 7, 300_000, 0, 65_536, 3] * 12
            tickets = [a.post("b", [[0, 0, n]] if n else [], b"%d" % i) for i, n in enumerate(sizes)]
            assert len(set(tickets)) == len(tickets)
            assert [b.expect(Arrived).tag for _ in sizes] == [b"%d" % i for i in range(len(sizes))]
            assert [a.expect(WriteDone).ticket for _ in sizes] == tickets

    def test_a_later_write_to_the_same_place_wins(self) -> None:
        with group(self.transport_class, "a", "b", nbytes=3 << 20) as (a, b):
            a.content[:] = np.repeat(np.array([1, 2, 3], np.uint8), 1 << 20)
            for k in range(3):
                a.post("b", [[k << 20, 11, 1 << 20]], b"%d" % k)
            for _ in range(3):
                b.expect(Arrived)
            assert (b.content[11 : 11 + (1 << 20)] == 3).all()

    def test_tags_and_payloads_of_extreme_sizes(self) -> None:
        with group(self.transport_class, "a", "b") as (a, b):
            longest, payload = bytes(range(MAX_TAG_BYTES)), pattern(MAX_PAYLOAD_BYTES, 5).tobytes()
            for tag, extra in ((b"", b""), (longest, payload), (b"\0", b"\0")):
                a.post("b", [], tag, extra)
                assert b.expect(Arrived) == Arrived("a", tag, extra)
                a.expect(WriteDone)
            for tag, extra in ((longest + b"x", b""), (b"", payload + b"x")):
                with pytest.raises(UsageError, match="allowed are"):
                    a.post("b", [], tag, extra)

    def test_five_thousand_small_writes(self) -> None:
        with group(self.transport_class, "a", "b", nbytes=5000 * 301) as (a, b):
            a.content[:] = pattern(len(a.content), 2)
            order = np.random.default_rng(3).permutation(5000)
            writes = np.stack([np.arange(5000) * 301, order * 301 + 1, 1 + np.arange(5000) % 300], axis=1)
            a.post("b", writes, b"small")
            b.expect(Arrived)
            expected = np.zeros_like(b.content)
            for local, remote, n in writes.tolist():
                expected[remote : remote + n] = a.content[local : local + n]
            assert np.array_equal(b.content, expected)

    def test_one_huge_write(self) -> None:
        nbytes = (64 << 20) + 5
        with group(self.transport_class, "a", "b", nbytes=nbytes) as (a, b):
            a.content[:] = pattern(nbytes, 4)
            a.post("b", [[1, 3, nbytes - 3]], b"huge")
            b.expect(Arrived)
            assert np.array_equal(b.content[3:], a.content[1:-2])
            assert not b.content[:3].any()
            a.expect(WriteDone)

    def test_both_directions_at_once(self) -> None:
        """Each end writes more than any buffer holds before either reads an event."""
        nbytes = 32 << 20
        with group(self.transport_class, "a", "b", nbytes=nbytes) as (a, b):
            half = nbytes // 2
            a.content[:half], b.content[:half] = pattern(half, 5), pattern(half, 6)
            for k in range(4):
                for w, peer in ((a, "b"), (b, "a")):
                    w.post(peer, [[0, half, half]], b"%d" % k)
            for w in (a, b):
                got = [w.events.get(timeout=_LIMIT_SECONDS) for _ in range(8)]
                assert [e.tag for e in got if isinstance(e, Arrived)] == [b"0", b"1", b"2", b"3"]
                assert sum(isinstance(e, WriteDone) for e in got) == 4
            assert np.array_equal(a.content[half:], b.content[:half])
            assert np.array_equal(b.content[half:], a.content[:half])

    def test_the_local_bytes_may_change_after_write_done(self) -> None:
        with group(self.transport_class, "a", "b", nbytes=1 << 20) as (a, b):
            for k in range(1, 20):
                a.content[:] = k
                a.post("b", [[0, 0, len(a.content)]], b"")
                a.expect(WriteDone)
                a.content[:] = 0
                b.expect(Arrived)
                assert (b.content == k).all()

    def test_the_table_of_writes_may_change_at_once(self) -> None:
        with group(self.transport_class, "a", "b", nbytes=1 << 20) as (a, b):
            a.content[:] = pattern(len(a.content), 7)
            table = np.array([[0, 0, 1 << 20]], np.int64)
            a.transport.post("b", table, b"")
            table[:] = 7
            b.expect(Arrived)
            assert np.array_equal(b.content, a.content)

    # --- several peers and threads ----------------------------------------------------------------------------------------

    def test_each_with_each_of_four(self) -> None:
        names = ("a", "b", "c", "d")
        with group(self.transport_class, *names, nbytes=4 * 50_001) as workers:
            for i, w in enumerate(workers):
                w.content[i * 50_001 :][:50_001] = pattern(50_001, i)
            for i, w in enumerate(workers):
                for peer in names:
                    if peer != w.name:
                        w.post(peer, [[i * 50_001, i * 50_001, 50_001]], w.name.encode())
            expected = np.concatenate([pattern(50_001, i) for i in range(4)])
            for w in workers:
                got = [w.events.get(timeout=_LIMIT_SECONDS) for _ in range(6)]
                arrived = sorted((e.peer, e.tag.decode()) for e in got if isinstance(e, Arrived))
                assert arrived == [(n, n) for n in names if n != w.name]
                assert np.array_equal(w.content, expected)

    def test_posts_from_several_threads(self) -> None:
        with group(self.transport_class, "a", "b", nbytes=4 * 40_000) as (a, b):
            a.content[:] = pattern(len(a.content), 8)

            def send(thread: int) -> list[int]:
                return [
                    a.post("b", [[thread * 40_000 + k * 800, thread * 40_000 + k * 800, 800]], b"%d %d" % (thread, k))
                    for k in range(50)
                ]

            with ThreadPoolExecutor(4) as pool:
                tickets = [t for many in pool.map(send, range(4)) for t in many]
            assert len(set(tickets)) == 200
            tags = [tuple(map(int, b.expect(Arrived).tag.split())) for _ in tickets]
            for thread in range(4):
                assert [k for t, k in tags if t == thread] == list(range(50))
            assert {a.expect(WriteDone).ticket for _ in tickets} == set(tickets)
            assert np.array_equal(b.content, a.content)

    def test_a_thousand_updates_leave_nothing_behind(self) -> None:
        """The same tables posted again and again, both ways: no growth in threads (native ones too), descriptors or memory."""
        nbytes = 1 << 20
        with group(self.transport_class, "a", "b", nbytes=nbytes) as (a, b):
            starts = np.arange(0, nbytes, nbytes // 16)
            tables = [np.stack([starts, np.roll(starts, k), np.full(16, 1000 + k)], axis=1) for k in range(5)]

            def update(number: int) -> None:
                for w, peer in ((a, "b"), (b, "a")):
                    w.post(peer, tables[number % 5], b"update", b"lengths")
                for w in (a, b):
                    got = {type(w.events.get(timeout=_LIMIT_SECONDS)) for _ in range(2)}
                    assert got == {Arrived, WriteDone}

            for number in range(200):
                update(number)
            before = _footprint()
            for number in range(1000):
                update(number)
            after = _footprint()
            assert after[:2] == before[:2]
            assert after[2] - before[2] < 4 << 20, f"{after[2] - before[2]} bytes of memory more after 1000 updates"

    # --- refusals ---------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("write", "words"),
        [
            ([0, 90, 11], ("write 1", "remote offset", "90", "11", "100")),
            ([90, 0, 11], ("write 1", "local offset", "90", "11", "100")),
            ([-1, 0, 1], ("local offset -1",)),
            ([0, -1, 1], ("remote offset", "-1")),
            ([0, 0, -1], ("-1 bytes",)),
            ([0, 101, 0], ("remote offset", "101")),
            ([(1 << 63) - 1, 0, 1], ("local offset",)),
            ([0, 2, (1 << 63) - 1], ("offset",)),
        ],
    )
    def test_offsets_outside_the_memory_are_refused_and_nothing_moves(
        self, write: list[int], words: tuple[str, ...]
    ) -> None:
        with group(self.transport_class, "a", "b", nbytes=100) as (a, b):
            a.content[:] = 7
            with pytest.raises(UsageError) as caught:
                a.post("b", [[0, 0, 50], write], b"bad")
            for word in words:
                assert word in str(caught.value)
            a.post("b", [[99, 99, 1]], b"good")
            assert b.expect(Arrived).tag == b"good"
            assert b.content.tolist() == [0] * 99 + [7]

    def test_wrong_calls_are_refused(self) -> None:
        with group(self.transport_class, "a", "b") as (a, b):
            with pytest.raises(UsageError, match=r"\[N, 3\]"):
                a.transport.post("b", np.zeros((2, 2), np.int64), b"")
            for call in (lambda: a.post("c", [], b""), lambda: a.transport.map("c")):
                with pytest.raises(UsageError):
                    call()
            with pytest.raises(UsageError, match="fence it before"):
                a.transport.connect("b", b.transport.address)
            with pytest.raises(UsageError, match="itself"):
                a.transport.connect("a", b.transport.address)
            with pytest.raises(UsageError, match="first fence b"):
                a.transport.register(a.shared.memory)
            a.transport.fence("stranger")
            b.transport.close()
            b.transport.close()
            with pytest.raises(UsageError, match="closed"):
                b.post("a", [], b"")
        with pytest.raises(UsageError, match="closed"):
            a.transport.connect("b", b.transport.address)

    def test_memory_comes_before_connections(self) -> None:
        transport = self.transport_class(
            Identity(worker="a", session="s", token=b"t"), queue.SimpleQueue(), deadline_seconds=1
        )
        with contextlib.closing(transport), pytest.raises(UsageError, match="register memory before"):
            transport.connect("b", transport.address)

    def test_strangers_are_refused(self) -> None:
        """Another token, no token, another session, at the dialling end and at the other: six pairs, each end must fail."""
        identities: list[dict[str, Any]] = [{"token": b"other"}, {"token": b""}, {"session": "other"}]
        with contextlib.ExitStack() as stack:
            pairs = []
            for own, identity in itertools.product("ab", identities):
                a, b = (
                    Worker(self.transport_class, n, 100, deadline_seconds=t, **(identity if n == own else {}))
                    for n, t in (("a", _LIMIT_SECONDS), ("b", 1.0))
                )
                stack.callback(a.close)
                stack.callback(b.close)
                pairs.append((a, b, next(iter(identity))))
            # The dialler is told at once; the other, late here, goes on waiting for a better dial and names the last one.
            for a, b, word in pairs:
                with pytest.raises(ConnectError, match=word):
                    a.transport.connect("b", b.transport.address)
            pool = stack.enter_context(ThreadPoolExecutor(len(pairs)))
            waiting = [pool.submit(b.transport.connect, "a", a.transport.address) for a, b, _ in pairs]
            errors = [w.exception(_LIMIT_SECONDS) for w in waiting]
        assert [type(e) for e in errors] == [TransferTimeout] * 6
        assert all(word in str(error) for (_, _, word), error in zip(pairs, errors, strict=True)), errors

    def test_an_address_of_another_worker_is_refused(self) -> None:
        with contextlib.ExitStack() as stack:
            a, b, c = (Worker(self.transport_class, n, 100, deadline_seconds=1) for n in "abc")
            for w in (a, b, c):
                stack.callback(w.close)
            with pytest.raises(ConnectError, match=r"'b'.*'c'|'c'.*'b'"):
                a.transport.connect("b", c.transport.address)

    def test_a_peer_that_never_comes_is_named(self) -> None:
        for name, peer in (("a", "b"), ("b", "a")):
            with contextlib.ExitStack() as stack:
                w, other = (Worker(self.transport_class, n, 100, deadline_seconds=0.3) for n in (name, peer))
                stack.callback(w.close)
                stack.callback(other.close)
                with pytest.raises(TransferTimeout) as caught:
                    w.transport.connect(peer, other.transport.address)
                assert caught.value.waiting_for == (peer,)  # type: ignore[attr-defined]
                assert peer in str(caught.value)

    def test_a_dead_address_is_an_error_at_once(self) -> None:
        other = Worker(self.transport_class, "b", 100)
        address = other.transport.address
        other.close()
        a = Worker(self.transport_class, "a", 100, deadline_seconds=30)
        with contextlib.closing(a), pytest.raises(ConnectError, match="worker b"):
            a.transport.connect("b", address)

    def test_closing_ends_a_connect_in_progress(self) -> None:
        for name, peer in (("a", "b"), ("b", "a")):
            w, other = (Worker(self.transport_class, n, 100, deadline_seconds=30) for n in (name, peer))
            with ThreadPoolExecutor(1) as pool, contextlib.closing(other):
                waiting = pool.submit(w.transport.connect, peer, other.transport.address)
                time.sleep(0.1)
                w.close()
                assert isinstance(waiting.exception(_LIMIT_SECONDS), TransportError | UsageError)

    # --- ends and new beginnings ------------------------------------------------------------------------------------------

    def test_a_peer_that_closes_is_lost_once_after_all_it_sent(self) -> None:
        with group(self.transport_class, "a", "b") as (a, b):
            for k in range(20):
                a.post("b", [[0, 0, 1000]], b"%d" % k)
            for _ in range(20):
                a.expect(WriteDone)
            a.transport.close()
            assert [b.expect(Arrived).tag for _ in range(20)] == [b"%d" % k for k in range(20)]
            lost = b.expect(PeerLost)
            assert lost.peer == "a"
            assert lost.cause
            b.post("a", [[0, 0, 10]], b"too late")  # not an error: the loss may not have been read yet
            b.expect_nothing(0.1)
            a.expect_nothing()

    def test_closing_right_after_the_last_tag_still_acknowledges_it(self) -> None:
        for _ in range(4):
            with group(self.transport_class, "a", "b", nbytes=1 << 20) as (a, b):
                ticket = a.post("b", [[0, 0, 1 << 20]], b"last")
                b.expect(Arrived)
                b.transport.close()
                assert a.expect(WriteDone).ticket == ticket
                a.expect(PeerLost)

    @pytest.mark.parametrize("fencer", [0, 1])
    def test_fence_silences_and_a_new_connection_works(self, fencer: int) -> None:
        with group(self.transport_class, "a", "b", nbytes=8 << 20) as workers:
            one, other = workers[fencer], workers[1 - fencer]
            for attempt in range(1, 4):
                other.content[:] = attempt
                for _ in range(3):
                    other.post(one.name, [[0, 0, 8 << 20]], b"old")
                one.transport.fence(other.name)
                while not one.events.empty():  # what came before the fence
                    one.events.get()
                if one.transport.capabilities.fence_replaces_memory:
                    one.renew_memory()
                seen = one.content.copy()
                while not isinstance(other.events.get(timeout=_LIMIT_SECONDS), PeerLost):
                    pass
                other.transport.fence(one.name)
                assert np.array_equal(one.content, seen)
                one.expect_nothing(0.02)
                if other.transport.capabilities.fence_replaces_memory:
                    other.renew_memory()
                join(one, other)
                other.content[:100] = 100 + attempt
                other.post(one.name, [[0, 50, 100]], b"new")
                assert one.expect(Arrived).tag == b"new"
                assert (one.content[50:150] == 100 + attempt).all()
                other.expect(WriteDone)

    def test_a_fresh_dial_may_come_before_the_fence(self) -> None:
        """The dialler starts over first; the other end fences and connects later."""
        with group(self.transport_class, "a", "b") as (a, b):
            a.transport.fence("b")
            if a.transport.capabilities.fence_replaces_memory:
                a.renew_memory()
            with ThreadPoolExecutor(1) as pool:
                dial = pool.submit(a.transport.connect, "b", b.transport.address)
                time.sleep(0.1)
                b.expect(PeerLost)
                b.transport.fence("a")
                if b.transport.capabilities.fence_replaces_memory:
                    b.renew_memory()
                b.transport.connect("a", a.transport.address)
                dial.result(_LIMIT_SECONDS)
            a.post("b", [], b"hello")
            assert b.expect(Arrived).tag == b"hello"

    def test_a_dial_given_up_is_not_taken_for_a_new_one(self) -> None:
        with contextlib.ExitStack() as stack:
            hasty, a, b = (
                Worker(self.transport_class, n, 100, deadline_seconds=t) for n, t in (("a", 0.15), ("a", 5), ("b", 5))
            )
            for w in (hasty, a, b):
                stack.callback(w.close)
            for _ in range(3):
                with pytest.raises(TransferTimeout):
                    hasty.transport.connect("b", b.transport.address)
            join(a, b)
            a.post("b", [[0, 0, 10]], b"x")
            b.expect(Arrived)
            a.expect(WriteDone)

    # --- capabilities -----------------------------------------------------------------------------------------------------

    def test_mapped_memory_is_the_peers_own(self) -> None:
        with group(self.transport_class, "a", "b", nbytes=10_000) as (a, b):
            if not a.transport.capabilities.maps_memory:
                with pytest.raises(UsageError, match="does not map"):
                    a.transport.map("b")
                return
            mapped = a.transport.map("b")
            assert mapped.nbytes == 10_000
            view = (np.ctypeslib.ctypes.c_uint8 * 10_000).from_address(mapped.address)  # type: ignore[attr-defined]
            b.content[:] = pattern(10_000, 9)
            assert bytes(view) == b.content.tobytes()

    def test_the_kernels_count_agrees_with_the_bytes_posted(self) -> None:
        nbytes = 16 << 20
        with group(self.transport_class, "a", "b", nbytes=nbytes) as (a, b):
            if not a.transport.kernel_bytes():
                return
            for attempt in (1, 2):
                a.post("b", [[0, 0, nbytes]], b"")
                b.expect(Arrived)
                a.expect(WriteDone)
                for count in (a.transport.kernel_bytes()["b"].sent, b.transport.kernel_bytes()["a"].received):
                    assert attempt * nbytes <= count <= 1.02 * attempt * nbytes
                assert b.transport.kernel_bytes()["a"].sent < 10_000
                for w, peer in ((a, "b"), (b, "a")):
                    w.transport.fence(peer)
                while not b.events.empty():  # the loss, where it came before the own fence
                    b.events.get()
                if attempt == 1:
                    if a.transport.capabilities.fence_replaces_memory:
                        a.renew_memory()
                        b.renew_memory()
                    join(a, b)
