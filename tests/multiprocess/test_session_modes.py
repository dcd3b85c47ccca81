"""Sessions with host copies: a sender that trains on, an engine that generates on, and what becomes of versions in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.multiprocess import toy_job as toy
from tests.multiprocess.test_session_in_process import FAST, Job, Worker

from weightbridge.coordinator import ReceiverAdapter, SenderAdapter, UpdateReport
from weightbridge.coordinator import session_events as e
from weightbridge.coordinator.receiver import _longest
from weightbridge.errors import UsageError
from weightbridge.testing.ports import free_port

MODES = [(False, False), (True, False), (False, True), (True, True)]


class ScribblingJob(Job):
    """Trainers change their weights as soon as send_weights has returned, whatever the mode."""

    def _send(self, sender: SenderAdapter, version: int, shard: toy.TrainerShard) -> UpdateReport:
        handle = sender.send_weights(version)
        for tensor in shard.live.values():
            tensor.fill_(float("nan"))
        return handle.wait()


@pytest.mark.multiprocess
@pytest.mark.parametrize(("send", "receive"), MODES)
def test_versions_arrive_bit_for_bit_in_every_mode(send: bool, receive: bool) -> None:
    job = ScribblingJob(options=replace(FAST, stage_send=send, stage_receive=receive))
    with job.running() as workers:
        for rank in range(2):
            workers[f"trainer/{rank}"].join(60)
    for worker in workers.values():
        assert worker.error is None, worker.error
    assert job.wrong == []
    assert {name: versions[-1] for name, versions in job.installed.items()} == dict.fromkeys(job.installed, 3)
    assert [r.engines for r in job.reports] == [{"tp": "ready", "solo": "ready"}] * 3
    trainers, engines = {"capture" if send else "send"}, {"agreement", "install", *(() if receive else ("transfer",))}
    for report in job.reports:
        assert report.slowest_stage in (trainers if report.slowest_worker.startswith("trainer/") else engines)
    at_polls = {str(job.installed_at_poll[f"tp/{r}"]) for r in range(toy.TP)}
    assert len(at_polls) == 1  # one step for the whole engine


def test_the_stage_named_is_the_one_that_took_longest() -> None:
    for stage, ended_at in {
        "agreement": (7.0, 9.0, 10.0),
        "transfer": (1.0, 9.0, 10.0),
        "install": (1.0, 3.0, 10.0),
    }.items():
        assert _longest(0.0, dict(zip(("agreement", "transfer", "install"), ended_at, strict=True))) == stage
    assert _longest(5.0, {"agreement": 7.0, "install": 8.0}) == "agreement"


class Pair:
    """One trainer and one engine, polled by the test itself."""

    def __init__(self, **options: Any) -> None:
        self.spec = toy.checkpoint_spec()
        self.options = replace(FAST, **options)
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.shard = toy.TrainerShard(self.spec, 0, 1)
        self.engine = toy.SoloEngine(self.spec)
        self.sender = SenderAdapter(
            group=None, endpoint=self.endpoint, checkpoint=self.spec, load_weights=self.shard.load_weights,
            tensors=self.shard.tensors, engines=("solo",), options=self.options,
        )  # fmt: skip
        self.receiver = ReceiverAdapter(
            group=None, endpoint=self.endpoint, checkpoint=self.spec, load_weights=self.engine.load_weights,
            tensors=self.engine.tensors, engine="solo", options=self.options,
        )  # fmt: skip

    def __enter__(self) -> Pair:
        connecting = Worker(self.sender.connect, "connect")
        while connecting.thread.is_alive():
            self.receiver.poll_requests()
            time.sleep(0.001)
        connecting.join()
        assert connecting.error is None, connecting.error
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self.receiver.close()

    def set(self, version: int) -> None:
        self.shard.load_weights(iter(toy.weights(self.spec, version).items()))

    def holds(self, version: int) -> bool:
        expected = toy.SoloEngine(self.spec)
        expected.load_weights(iter(toy.rounded(self.spec, version).items()))
        return toy.same_bytes(expected.live, self.engine.live) == []

    def poll_until(self, done: Callable[[], bool], seconds: float = 30.0) -> None:
        give_up = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < give_up
            self.receiver.poll_requests()
            time.sleep(0.001)


@pytest.mark.multiprocess
def test_an_engine_with_host_memory_serves_the_old_version_until_it_polls() -> None:
    with Pair(stage_send=True, stage_receive=True) as pair:
        pair.set(1)
        first = pair.sender.send_weights(1)
        pair.poll_until(lambda: first.ended)
        assert pair.holds(1)
        pair.set(2)
        second = pair.sender.send_weights(2)
        pair.set(77)  # the trainer goes on
        machine = pair.receiver._seat.machine
        give_up = time.monotonic() + 30
        while machine.committed < 2:  # all bytes are here and verified; the engine makes no step
            assert time.monotonic() < give_up
            time.sleep(0.001)
        assert pair.holds(1)
        assert pair.receiver.version == 1
        pair.poll_until(lambda: second.ended)
        assert pair.holds(2)
        assert second.wait().engines == {"solo": "ready"}


@pytest.mark.multiprocess
def test_a_newer_version_supersedes_one_that_waits_to_be_installed() -> None:
    told: list[e.SessionEvent] = []
    with Pair(stage_send=True, stage_receive=True, on_event=told.append) as pair:
        handles = []
        for version in (1, 2, 3):
            pair.set(version)
            handles.append(pair.sender.send_weights(version))  # the engine makes no step: nothing is installed
        pair.poll_until(lambda: handles[2].ended)
        assert pair.holds(3)
        assert [h.wait().engines["solo"] for h in handles] == ["superseded", "superseded", "ready"]
    left_out = [(x.worker, x.version, x.by) for x in told if isinstance(x, e.Superseded)]
    assert left_out == [("solo/0", 1, 2), ("solo/0", 2, 3)]


@pytest.mark.multiprocess
def test_a_version_in_flight_may_be_an_error() -> None:
    with Pair(stage_send=True, stage_receive=True, when_newer="error") as pair:
        pair.set(1)
        first = pair.sender.send_weights(1)
        with pytest.raises(UsageError, match="version 1 is still in flight"):
            pair.sender.send_weights(2)
        pair.poll_until(lambda: first.ended)
        pair.set(2)
        second = pair.sender.send_weights(2)
        pair.poll_until(lambda: second.ended)
        assert pair.holds(2)


@pytest.mark.multiprocess
def test_a_version_in_flight_may_be_finished_first() -> None:
    with Pair(stage_send=True, stage_receive=True, when_newer="finish") as pair:
        pair.set(1)
        first = pair.sender.send_weights(1)
        pair.set(2)
        sending = Worker(lambda: pair.sender.send_weights(2).wait(), "send 2")
        pair.poll_until(lambda: not sending.thread.is_alive())
        assert first.wait().engines == {"solo": "ready"}
        assert sending.error is None
        assert pair.holds(2)


@pytest.mark.multiprocess
def test_engines_join_and_leave_between_versions() -> None:
    """The second engine comes when the first has been served; the first leaves; nobody else is disturbed."""
    with Pair() as pair:
        pair.set(1)
        first = pair.sender.send_weights(1, blocking=False)
        pair.poll_until(lambda: first.ended)
        second_engine = toy.TensorParallelEngine
        workers = {r: second_engine(pair.spec, r) for r in range(toy.TP)}
        stop = threading.Event()
        receivers: dict[int, ReceiverAdapter] = {}

        def serve(rank: int) -> None:
            receiver = receivers[rank] = ReceiverAdapter(
                group=(rank, toy.TP), endpoint=pair.endpoint, checkpoint=pair.spec, load_weights=workers[rank].load_weights,
                tensors=workers[rank].tensors, engine="late", options=pair.options,
            )  # fmt: skip
            while not stop.is_set():
                receiver.poll_requests()
                time.sleep(0.001)
            receiver.close()

        threads = [Worker(lambda r=r: serve(r), f"late/{r}") for r in range(toy.TP)]
        pair.poll_until(
            lambda: len(receivers) == toy.TP and all(r._seat.machine.ever_ready for r in receivers.values())
        )
        assert {r.state for r in receivers.values()} == {"joining"}
        pair.set(2)
        handle = pair.sender.send_weights(2, blocking=False)
        pair.poll_until(lambda: handle.ended)
        assert handle.wait().engines == {"solo": "ready", "late": "ready"}
        assert {r.state for r in receivers.values()} == {"ready"}
        for rank, worker in workers.items():
            expected = toy.TensorParallelEngine(pair.spec, rank)
            expected.load_weights(iter(toy.rounded(pair.spec, 2).items()))
            assert toy.same_bytes(expected.live, worker.live) == []
        stop.set()
        for thread in threads:
            thread.join()
            assert thread.error is None, thread.error
        pair.set(3)
        handle = pair.sender.send_weights(3, blocking=False)
        pair.poll_until(lambda: handle.ended)
        assert handle.wait().engines == {"solo": "ready"}
        assert pair.holds(3)


@pytest.mark.multiprocess
def test_engines_outlive_their_trainers_and_join_the_next_ones() -> None:
    """The trainers close; others come to the same endpoint. The engine serves on, is not probed again, and versions go on."""
    with Pair(when_trainers_fail="rejoin") as pair:
        pair.set(3)
        handle = pair.sender.send_weights(3, blocking=False)
        pair.poll_until(lambda: handle.ended)
        pair.sender.close()
        pair.poll_until(lambda: not pair.receiver._seat.machine.ever_ready)
        assert pair.receiver.state == "ready"  # what it holds is whole
        assert pair.holds(3)
        loads = 0
        load_weights = pair.engine.load_weights

        def counted(tensors: Any) -> None:
            nonlocal loads
            loads += 1
            load_weights(tensors)

        pair.receiver._seat._load_weights = counted
        shard = toy.TrainerShard(pair.spec, 0, 1)
        pair.sender = SenderAdapter(
            group=None, endpoint=pair.endpoint, checkpoint=pair.spec, load_weights=shard.load_weights, tensors=shard.tensors,
            engines=("solo",), options=pair.options,
        )  # fmt: skip
        pair.shard = shard
        connecting = Worker(pair.sender.connect, "connect again")
        pair.poll_until(lambda: not connecting.thread.is_alive())
        assert connecting.error is None, connecting.error
        assert loads == 0
        assert pair.holds(3)
        pair.set(4)
        with pytest.raises(UsageError, match="at least 4"):
            pair.sender.send_weights(3)
        handle = pair.sender.send_weights(4, blocking=False)
        pair.poll_until(lambda: handle.ended)
        assert pair.holds(4)
        assert pair.receiver.version == 4
