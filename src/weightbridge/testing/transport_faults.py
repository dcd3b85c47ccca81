"""The part of the transports' conformance suite that stops and kills real processes.

class TestMyTransport(TransportFaultSuite):
    transport_class = MyTransport
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from weightbridge.errors import ConnectError, TransferTimeout
from weightbridge.testing.transport_peer import PeerProcess, pattern
from weightbridge.testing.transport_suite import Worker
from weightbridge.transports import Arrived, PeerLost, Transport, WriteDone

__all__ = ["TransportFaultSuite"]

_DEADLINE_SECONDS = 1.0
_BIG_BYTES = 40 << 20
_REPEATS = (
    1000  # one post writes the whole memory so many times over: seconds of writing before its tag, on any machine
)
_PATIENCE_SECONDS = 10.0


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)


@contextlib.contextmanager
def _network() -> Iterator[str]:
    """A network namespace with nothing but loopback, up. Skips the test where none can be made."""
    name = f"wb-cut-{os.getpid()}"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"no network namespace can be made here ({why.strip()}); it takes root and iproute2")
    try:
        _ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        _ip("netns", "delete", name)


class TransportFaultSuite:
    """Set `transport_class`. The worker under test lives in the test's process, its peer in one of its own.

    notices_stopped_writer: whether the end that is written to can know of a write that stands still (it cannot where bytes
    go through shared memory).
    """

    transport_class: type[Transport]
    notices_stopped_writer = True

    @contextlib.contextmanager
    def pair(self, name: str, peer: str, nbytes: int = 1 << 20) -> Iterator[tuple[Worker, PeerProcess]]:
        """A worker here and a joined peer process."""
        worker = Worker(self.transport_class, name, nbytes, deadline_seconds=_DEADLINE_SECONDS)
        with contextlib.closing(worker), self.process(peer, nbytes) as process:
            self.join(worker, process)
            yield worker, process

    def process(self, name: str, nbytes: int, launcher: Sequence[str] = ()) -> PeerProcess:
        return PeerProcess(
            self.transport_class, name, nbytes=nbytes, deadline_seconds=_DEADLINE_SECONDS, launcher=launcher
        )

    def join(self, worker: Worker, process: PeerProcess) -> None:
        address = process.address
        process.tell("connect", peer=worker.name, address=worker.transport.address)
        worker.transport.connect(process.worker, address)
        process.answer()

    def begin_big_write(self, worker: Worker, process: PeerProcess) -> None:
        """Let the process write its whole memory again and again, and wait for the first byte: most is still to come then."""
        memory = worker.content
        process.tell("post", peer=worker.name, writes=[[0, 0, len(memory)]] * _REPEATS, tag="old")
        limit = time.monotonic() + _PATIENCE_SECONDS
        while memory[0] == 0:
            assert time.monotonic() < limit, "the write never began"
            time.sleep(0.001)

    def expect_loss(self, worker: Worker, peer: str) -> PeerLost:
        lost = worker.expect(PeerLost, _PATIENCE_SECONDS)
        assert lost.peer == peer
        assert lost.cause
        worker.expect_nothing(0.05)
        return lost

    # --- killed -----------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("name", "peer"), [("a", "b"), ("b", "a")])
    def test_killed_while_idle(self, name: str, peer: str) -> None:
        with self.pair(name, peer) as (worker, process):
            process.kill()
            self.expect_loss(worker, peer)
            worker.transport.fence(peer)
            # Its successor of the same name finds everything usable.
            if worker.transport.capabilities.fence_replaces_memory:
                worker.renew_memory()
            with self.process(peer, 1 << 20) as successor:
                self.join(worker, successor)
                successor.call("fill", seed=3)
                successor.call("post", peer=name, writes=[[0, 0, 1000]], tag="again")
                assert worker.expect(Arrived).tag == b"again"
                assert np.array_equal(worker.content[:1000], pattern(1000, 3))

    def test_killed_while_it_writes(self) -> None:
        with self.pair("a", "b", _BIG_BYTES) as (worker, process):
            process.call("fill", seed=1)
            self.begin_big_write(worker, process)
            process.kill()
            self.expect_loss(worker, "b")

    def test_killed_while_it_is_written_to(self) -> None:
        with self.pair("a", "b", _BIG_BYTES) as (worker, process):
            process.stop()  # so that the write cannot end before the kill
            worker.post("b", [[0, 0, _BIG_BYTES]], b"never read")
            time.sleep(0.05)
            process.kill()
            self.expect_loss(worker, "b")
            worker.post("b", [[0, 0, 1]], b"dropped")
            worker.expect_nothing(0.05)

    @pytest.mark.parametrize(("name", "peer"), [("a", "b"), ("b", "a")])
    def test_killed_while_connecting(self, name: str, peer: str) -> None:
        # Whoever waits for a dial waits for another one until the deadline; who has dialled sees the end at once.
        deadline = _DEADLINE_SECONDS if peer < name else _PATIENCE_SECONDS
        worker = Worker(self.transport_class, name, 100, deadline_seconds=deadline)
        with contextlib.closing(worker), self.process(peer, 100) as process, ThreadPoolExecutor(1) as pool:
            address = process.address
            if peer < name:  # it dials, and dies before this end calls connect
                process.tell("connect", peer=name, address=worker.transport.address)
                time.sleep(0.2)
                process.kill()
                with pytest.raises(TransferTimeout, match=f"worker {peer}"):
                    worker.transport.connect(peer, address)
            else:  # it is dialled, and dies before it calls connect
                waiting = pool.submit(worker.transport.connect, peer, address)
                time.sleep(0.2)
                process.kill()
                error = waiting.exception(_PATIENCE_SECONDS)
                assert isinstance(error, ConnectError)
                assert f"worker {peer}" in str(error)

    # --- stopped ----------------------------------------------------------------------------------------------------------

    def test_stopped_is_lost_by_the_deadline_only_while_something_is_pending(self) -> None:
        with self.pair("a", "b") as (worker, process):
            process.stop()
            worker.expect_nothing(1.5 * _DEADLINE_SECONDS)
            process.resume()
            ticket = worker.post("b", [[0, 0, 100]], b"alive")
            assert worker.expect(WriteDone) == WriteDone("b", ticket)
            process.stop()
            before = time.monotonic()
            worker.post("b", [], b"nobody answers")
            lost = self.expect_loss(worker, "b")
            assert time.monotonic() - before >= _DEADLINE_SECONDS
            assert "no progress" in lost.cause

    def test_stopped_while_it_is_written_to(self) -> None:
        with self.pair("b", "a", _BIG_BYTES) as (worker, process):
            process.stop()
            worker.post("a", [[0, 0, _BIG_BYTES]], b"never read")
            assert "no progress" in self.expect_loss(worker, "a").cause

    def test_stopped_while_it_writes(self) -> None:
        if not self.notices_stopped_writer:
            pytest.skip(
                "a stopped writer into shared memory cannot be told from an idle one; the executor's deadline holds"
            )
        with self.pair("a", "b", _BIG_BYTES) as (worker, process):
            process.call("fill", seed=1)
            self.begin_big_write(worker, process)
            process.stop()
            assert "no progress" in self.expect_loss(worker, "b").cause

    def test_closing_does_not_wait_for_a_stopped_peer(self) -> None:
        with self.pair("a", "b", _BIG_BYTES) as (worker, process):
            process.stop()
            worker.post("b", [[0, 0, _BIG_BYTES]], b"never read")
            before = time.monotonic()
            worker.transport.close()
            assert time.monotonic() - before < 5 * _DEADLINE_SECONDS

    # --- cut off ----------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("idle", [False, True])
    def test_a_cut_link_is_noticed_by_both_ends(self, idle: bool) -> None:
        """Two processes in a network namespace whose only link goes down, with a large write under way or without."""
        if not self.transport_class.capabilities.crosses_nodes:
            pytest.skip("works inside a machine only: there is no link to cut")
        with contextlib.ExitStack() as stack:
            namespace = stack.enter_context(_network())
            a, b = (
                stack.enter_context(self.process(name, _BIG_BYTES, launcher=("ip", "netns", "exec", namespace)))
                for name in "ab"
            )
            addresses = a.address, b.address
            a.tell("connect", peer="b", address=addresses[1])
            b.call("connect", peer="a", address=addresses[0])
            a.answer()
            b.call("fill", seed=1)
            if not idle:
                b.call("post", peer="a", writes=[[0, 0, _BIG_BYTES]] * _REPEATS, tag="old")
                limit = time.monotonic() + _PATIENCE_SECONDS
                while not a.call("first_byte"):
                    assert time.monotonic() < limit, "the write never began"
            _ip("-n", namespace, "link", "set", "lo", "down")
            if idle:  # nobody can know before somebody says something
                a.call("post", peer="b", writes=[[0, 0, 100]], tag="from a")
                b.call("post", peer="a", writes=[[0, 0, 100]], tag="from b")
            for process, peer in ((a, "b"), (b, "a")):
                kind, who, cause = process.call("event", seconds=_PATIENCE_SECONDS)
                assert (kind, who) == ("PeerLost", peer)
                assert cause
                assert process.call("close") == ["MainThread"]

    # --- the fence --------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(("name", "peer", "successor"), [("a", "b", "b"), ("b", "a", "c")])
    def test_nothing_of_a_fenced_writer_lands_when_it_runs_on(self, name: str, peer: str, successor: str) -> None:
        """Stopped in the middle of a large write, fenced off, replaced by a new attempt, then continued."""
        worker = Worker(self.transport_class, name, _BIG_BYTES, deadline_seconds=_DEADLINE_SECONDS)
        with contextlib.closing(worker), contextlib.ExitStack() as stack:
            old = stack.enter_context(self.process(peer, _BIG_BYTES))
            new = stack.enter_context(self.process(successor, _BIG_BYTES))
            for process, seed in ((old, 1), (new, 2)):
                assert process.address  # both are up
                process.call("fill", seed=seed)
            self.join(worker, old)
            self.begin_big_write(worker, old)
            old.stop()
            worker.transport.fence(peer)
            worker.expect_nothing()  # in particular no tag: the write was under way when it was stopped
            if worker.transport.capabilities.fence_replaces_memory:
                worker.renew_memory()
            self.join(worker, new)
            size = _BIG_BYTES - 12_345
            new.call("post", peer=name, writes=[[0, 7, size]], tag="new")
            assert worker.expect(Arrived) == Arrived(successor, b"new", b"")
            expected = self.expected(worker, size)
            assert np.array_equal(worker.content, expected)
            old.resume()
            old.answer()  # its post call, begun before the stop, returns: it runs again
            self.let_it_run_on(old, name)
            assert np.array_equal(worker.content, expected)
            worker.expect_nothing(0.05)
            assert new.call("event", seconds=_PATIENCE_SECONDS)[:2] == ["WriteDone", name]

    def expected(self, worker: Worker, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The new attempt's bytes; around them zeros in fresh memory, else what the old one had written before the fence."""
        out: np.ndarray[Any, np.dtype[np.uint8]] = worker.content.copy()
        out[7 : 7 + size] = pattern(_BIG_BYTES, 2)[:size]
        if worker.transport.capabilities.fence_replaces_memory:
            out[:7] = out[7 + size :] = 0
        return out

    def let_it_run_on(self, old: PeerProcess, name: str) -> None:
        """Until it has noticed that it was cut off and its threads have ended: nothing of it is under way any more."""
        kind, peer, *_ = old.call("event", seconds=_PATIENCE_SECONDS)
        assert (kind, peer) == ("PeerLost", name)
        assert old.call("event", seconds=0.05) is None
        assert old.call("close") == ["MainThread"]
