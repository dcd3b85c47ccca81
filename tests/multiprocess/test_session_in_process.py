"""The whole path with real transports and threads, all six workers of a small job in one process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.multiprocess import toy_job as toy

from weightbridge.coordinator import Options, ReceiverAdapter, SenderAdapter, UpdateReport
from weightbridge.coordinator.session_events import SessionEnded, SessionEvent
from weightbridge.errors import (
    ConnectError,
    CoverageError,
    IncompleteUpdateError,
    TransferTimeout,
    UsageError,
    WeightBridgeError,
    WorkerError,
)
from weightbridge.testing.ports import free_port

FAST = Options(
    slot_bytes=24576,
    connect_timeout_seconds=20,
    update_timeout_seconds=15,
    heartbeat_seconds=0.2,
    heartbeat_timeout_seconds=5,
)
IMPATIENT = Options(connect_timeout_seconds=3, heartbeat_seconds=0.2, heartbeat_timeout_seconds=5)
ENGINES = {"tp": toy.TP, "solo": 1}


class Worker:
    """A thread that runs one adapter; keeps what it raised."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self.error: BaseException | None = None
        self._work = work
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def join(self, seconds: float = 30) -> None:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), f"{self.thread.name} hangs"


class Job:
    """Two trainers and two engines; every engine polls in a loop until told to stop."""

    def __init__(self, *, options: Options = FAST, versions: int = 3, engines: dict[str, int] | None = None) -> None:
        self.spec = toy.checkpoint_spec()
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.options = options
        self.versions = versions
        self.expected = ENGINES
        self.engines = ENGINES if engines is None else engines
        self.reports: list[UpdateReport] = []
        self.installed: dict[str, list[int]] = {}
        self.installed_at_poll: dict[str, list[int]] = {}
        self.hooked: dict[str, list[int]] = {}
        self.nodes = {"tp": "tp", "solo": "solo"}  # engine -> node
        self.stop = threading.Event()
        self.raise_last = False  # raise what a receiver says of a version that was given up
        self.wrong: list[str] = []

    def trainer(self, rank: int) -> None:
        shard = toy.TrainerShard(self.spec, rank, 2)
        sender = SenderAdapter(
            group=(rank, 2), endpoint=self.endpoint, checkpoint=self.spec, load_weights=shard.load_weights,
            tensors=shard.tensors, engines=tuple(self.expected), options=self.options,
        )  # fmt: skip
        try:
            before = {n: t.clone() for n, t in shard.live.items()}
            sender.connect()
            assert toy.same_bytes(before, shard.live) == []  # probing puts back what it found
            for version in range(1, self.versions + 1):
                shard.load_weights(iter(toy.weights(self.spec, version).items()))
                report = self._send(sender, version, shard)
                if rank == 0:
                    self.reports.append(report)
        finally:
            sender.close()

    def _send(self, sender: SenderAdapter, version: int, shard: toy.TrainerShard) -> UpdateReport:
        kept = {n: t.clone() for n, t in shard.live.items()}
        report = sender.send_weights(version).wait()
        assert toy.same_bytes(kept, shard.live) == []  # the source is only read
        return report

    def receiver(self, engine: str, rank: int, poll: Callable[[ReceiverAdapter], bool] | None = None) -> None:
        worker = toy.engine_worker(self.spec, engine, rank)
        name = f"{engine}/{rank}"
        self.installed[name], self.installed_at_poll[name], self.hooked[name] = [], [], []
        receiver = ReceiverAdapter(
            group=(rank, ENGINES[engine]), endpoint=self.endpoint, checkpoint=self.spec, load_weights=worker.load_weights,
            tensors=worker.tensors, engine=engine, node=self.nodes[engine], options=self.options,
            before_update_hook=lambda version: self._hook(worker, name, version),
        )  # fmt: skip
        polls = 0
        try:
            while not self.stop.is_set():
                updated = receiver.poll_requests() if poll is None else poll(receiver)
                if self.raise_last and receiver.last_failure is not None:
                    raise receiver.last_failure
                polls += 1
                # Who reads weights of an engine that may be updated while idle holds its step lock.
                with receiver._agreement.step_lock if self.options.idle_install else nullcontext():
                    self._look(receiver, worker, name, polls, updated)
                time.sleep(0.001 * (1 + rank))
        finally:
            receiver.close()

    def _hook(self, worker: Any, name: str, version: int) -> None:
        """Before an update: the weights are still wholly those of the version before; time passes in the hook."""
        self.hooked[name].append(version)
        time.sleep(0.02)
        if self.installed[name]:
            self.wrong += [f"{name} {bad} before v{version}" for bad in self._differing(worker, name)]

    def _differing(self, worker: Any, name: str) -> list[str]:
        """Live tensors that differ in any bit from the version that was seen last."""
        engine, rank = name.split("/")
        expected = toy.engine_worker(self.spec, engine, int(rank))
        expected.load_weights(iter(toy.rounded(self.spec, self.installed[name][-1]).items()))
        return toy.same_bytes(expected.live, worker.live)

    def _look(self, receiver: ReceiverAdapter, worker: Any, name: str, polls: int, updated: bool) -> None:
        """After a poll: note a new version, and whether every live byte is that version's."""
        seen = receiver.version
        if seen == (self.installed[name] or [-1])[-1]:
            self.wrong += [f"{name} said it was updated and holds {seen}"] if updated else []
            return
        self.installed[name].append(seen)
        self.installed_at_poll[name].append(polls)
        self.wrong += [f"{name} v{seen} {bad}" for bad in self._differing(worker, name)]

    def wait_until_seen(self, version: int, seconds: float = 20) -> None:
        """Until every engine worker has looked at that version: idle ones are updated without their loops."""
        give_up = time.monotonic() + seconds
        while any(versions[-1:] != [version] for versions in self.installed.values()):
            assert time.monotonic() < give_up, f"version {version} has not been seen everywhere: {self.installed}"
            time.sleep(0.002)

    @contextmanager
    def running(self, **pollers: Callable[[ReceiverAdapter], bool]) -> Iterator[dict[str, Worker]]:
        workers = {
            f"{engine}/{rank}": Worker(lambda e=engine, r=rank: self.receiver(e, r, pollers.get(e)), f"{engine}/{rank}")
            for engine, size in self.engines.items()
            for rank in range(size)
        }
        workers |= {f"trainer/{r}": Worker(lambda r=r: self.trainer(r), f"trainer/{r}") for r in range(2)}
        try:
            yield workers
        finally:
            self.stop.set()
            for worker in workers.values():
                worker.join()

    def run_to_end(self, seconds: float = 60) -> None:
        """Until the trainers have sent all versions, within so many seconds each: nobody fails, and no value is ever wrong."""
        with self.running() as workers:
            for rank in range(2):
                workers[f"trainer/{rank}"].join(seconds)
        assert [worker.error for worker in workers.values()] == [None] * (2 + sum(ENGINES.values()))
        assert self.wrong == []


def test_three_versions_arrive_bit_for_bit() -> None:
    before = {t.name for t in threading.enumerate()}
    job = Job()
    job.run_to_end()
    assert job.installed == {f"{e}/{r}": [1, 2, 3] for e, n in ENGINES.items() for r in range(n)}
    assert job.hooked == job.installed
    for version in range(3):  # one step for the whole engine
        assert len({job.installed_at_poll[f"tp/{r}"][version] for r in range(toy.TP)}) == 1
    assert [r.version for r in job.reports] == [1, 2, 3]
    for report in job.reports:
        sent = sum(report.network_bytes[f"trainer/{r}"][0] for r in range(2))
        assert sent >= job.spec.nbytes
        assert 0 < report.agst_seconds <= report.ewtt_seconds
    left = {t.name for t in threading.enumerate()} - before
    assert not {name for name in left if name.startswith("wb-")}


def test_an_engine_beside_the_trainers_costs_no_network_bytes() -> None:
    job = Job(versions=2)
    job.nodes["solo"] = "trainers"
    job.run_to_end()
    for report in job.reports:
        assert report.network_bytes["solo/0"] == (0, 0)
        into_tp = sum(report.network_bytes[f"tp/{r}"][1] for r in range(toy.TP))
        assert job.spec.nbytes < into_tp < 2 * job.spec.nbytes  # one copy, and the headers of a very small job


def test_an_idle_engine_is_probed_and_updated_without_a_poll() -> None:
    """No engine ever polls: the control thread takes the step lock."""
    options = Options(
        slot_bytes=24576, connect_timeout_seconds=20, update_timeout_seconds=15, idle_install=True,
        heartbeat_seconds=0.2, heartbeat_timeout_seconds=5,
    )  # fmt: skip
    job = Job(options=options)

    def idle(receiver: ReceiverAdapter) -> bool:
        time.sleep(0.002)
        return False

    with job.running(tp=idle, solo=idle) as workers:
        for rank in range(2):
            workers[f"trainer/{rank}"].join(60)
        job.wait_until_seen(3)
    assert [w.error for w in workers.values()] == [None] * 6
    assert job.wrong == []
    assert {name: versions[-1] for name, versions in job.installed.items()} == dict.fromkeys(job.installed, 3)


def test_an_engine_that_steps_only_after_another_one_has_stepped() -> None:
    """Decode waits for prefill: the second engine must not be needed for the first to go on."""
    options = Options(
        slot_bytes=24576, connect_timeout_seconds=20, update_timeout_seconds=15, idle_install=True,
        heartbeat_seconds=0.2, heartbeat_timeout_seconds=5,
    )  # fmt: skip
    job = Job(options=options)
    prefilled = [threading.Semaphore(0) for _ in range(1)]

    def prefill(receiver: ReceiverAdapter) -> bool:
        with receiver.step() as updated:
            time.sleep(0.001)
        prefilled[0].release()
        return updated

    def decode(receiver: ReceiverAdapter) -> bool:
        if not prefilled[0].acquire(timeout=0.5):
            return False
        with receiver.step() as updated:
            time.sleep(0.001)
        return updated

    with job.running(tp=prefill, solo=decode) as workers:
        for rank in range(2):
            workers[f"trainer/{rank}"].join(60)
        job.wait_until_seen(3)
    assert [w.error for w in workers.values()] == [None] * 6
    assert job.wrong == []


@pytest.fixture(scope="module")
def in_vain() -> dict[str, Worker]:
    """A job waits until its patience ends for the engine "solo", as which two others would like to join meanwhile: one with
    another token, one with another checkpoint."""
    job = Job(options=IMPATIENT, engines={"tp": toy.TP})
    strangers = {
        "another token": Job(options=replace(IMPATIENT, token=b"another", connect_timeout_seconds=20)),
        "another checkpoint": Job(options=replace(IMPATIENT, connect_timeout_seconds=20)),
    }
    strangers["another checkpoint"].spec = toy.checkpoint_spec(scale=2)
    with job.running() as workers:
        for name, stranger in strangers.items():
            stranger.endpoint = job.endpoint
            workers[name] = Worker(lambda s=stranger: s.receiver("solo", 0), name)
        for worker in workers.values():
            worker.join()
    return workers


def test_an_engine_that_never_comes_is_named(in_vain: dict[str, Worker]) -> None:
    awaited = {name: worker.error for name, worker in in_vain.items() if not name.startswith("another")}
    assert len(awaited) == toy.TP + 2
    for error in awaited.values():
        assert isinstance(error, TransferTimeout)
        assert "solo" in str(error)
        assert "endpoint" in str(error)


@pytest.mark.parametrize("what", ["token", "checkpoint"])
def test_who_has_another_token_or_checkpoint_is_refused(what: str, in_vain: dict[str, Worker]) -> None:
    error = in_vain[f"another {what}"].error
    assert isinstance(error, ConnectError)
    assert what in str(error)


def test_trainers_that_never_come_are_reported_to_engines() -> None:
    told: list[SessionEvent] = []
    job = Job(
        options=Options(
            connect_timeout_seconds=1.0, heartbeat_seconds=0.2, heartbeat_timeout_seconds=5, on_event=told.append
        )
    )
    worker = Worker(lambda: job.receiver("solo", 0), "solo/0")
    worker.join()
    assert isinstance(worker.error, ConnectError)
    assert job.endpoint in str(worker.error)
    assert [x.kind for x in told if isinstance(x, SessionEnded)] == ["ConnectError"]


def test_a_taken_port_is_named() -> None:
    job = Job()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(job.endpoint.rpartition(":")[2])))
        taken.listen()
        with pytest.raises(ConnectError, match=job.endpoint):
            job.trainer(0)


def test_a_connect_that_fails_leaves_no_thread_and_no_port_behind() -> None:
    before = {t.name for t in threading.enumerate()}
    spec = toy.checkpoint_spec()
    shard = toy.TrainerShard(spec, 0, 1)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(2):
        sender = SenderAdapter(
            group=None, endpoint=endpoint, checkpoint=spec, load_weights=shard.load_weights, tensors=shard.tensors,
            engines=("solo",), options=Options(connect_timeout_seconds=0.5, heartbeat_seconds=0.1),
        )  # fmt: skip
        with pytest.raises(TransferTimeout, match="solo"):
            sender.connect()
        with pytest.raises(UsageError, match="make a new one"):
            sender.connect()
    assert not {t.name for t in threading.enumerate()} - before


def test_endpoints_are_checked() -> None:
    spec = toy.checkpoint_spec()
    shard = toy.TrainerShard(spec, 0, 1)
    common = {
        "group": None,
        "checkpoint": spec,
        "load_weights": shard.load_weights,
        "tensors": shard.tensors,
        "engines": ("a",),
    }
    with pytest.raises(UsageError, match="tcp://"):
        SenderAdapter(endpoint="127.0.0.1:1", **common)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="token"):
        SenderAdapter(endpoint="tcp://198.18.0.1:29700", **common)  # type: ignore[arg-type]
    sender = SenderAdapter(endpoint=f"tcp://127.0.0.1:{free_port()}", **common)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="connect"):
        sender.send_weights(1)


def test_an_engine_whose_loader_drops_a_tensor_is_refused() -> None:
    job = Job()
    dropped = "layers.1.up"

    class Dropping(toy.SoloEngine):
        def tensors(self) -> Mapping[str, torch.Tensor]:
            return {n: t for n, t in self.live.items() if n != dropped}

        def load_weights(self, tensors: object) -> None:
            super().load_weights((n, t) for n, t in tensors if n != dropped)  # type: ignore[attr-defined]

    original = toy.engine_worker
    toy.engine_worker = lambda spec, engine, rank: Dropping(spec) if engine == "solo" else original(spec, engine, rank)  # type: ignore[assignment]
    try:
        with job.running() as workers:
            for worker in workers.values():
                worker.join(60)
    finally:
        toy.engine_worker = original
    assert all(isinstance(w.error, CoverageError) for w in workers.values()), [w.error for w in workers.values()]
    assert all(dropped in str(w.error) and "solo" in str(w.error) for w in workers.values())


def test_a_hook_that_raises_fails_the_update_everywhere_and_names_the_worker() -> None:
    job = Job()
    job.hooked = {}

    def receiver_with_bad_hook() -> None:
        worker = toy.engine_worker(job.spec, "solo", 0)

        def hook(version: int) -> None:
            raise RuntimeError("cache is stuck")

        adapter = ReceiverAdapter(
            group=(0, 1), endpoint=job.endpoint, checkpoint=job.spec, load_weights=worker.load_weights, tensors=worker.tensors,
            engine="solo", options=job.options, before_update_hook=hook,
        )  # fmt: skip
        try:
            while not job.stop.is_set():
                adapter.poll_requests()
                time.sleep(0.001)
        finally:
            adapter.close()

    job.engines = {"tp": toy.TP}
    job.raise_last = True
    with job.running() as workers:
        bad = Worker(receiver_with_bad_hook, "solo/0")
        for worker in workers.values():
            worker.join(60)
        bad.join()
        left = {t.name for t in threading.enumerate()}
    assert isinstance(bad.error, RuntimeError)
    assert "wb-progress-solo/0" not in left  # nobody would have allowed its transfer to go on
    for worker in workers.values():
        assert isinstance(worker.error, WorkerError | IncompleteUpdateError)
        assert isinstance(worker.error, WeightBridgeError)
        assert set(worker.error.causes) == {"solo/0"}
        assert "cache is stuck" in str(worker.error)


def test_versions_only_grow() -> None:
    job = Job(versions=1)
    spec = job.spec
    shard = toy.TrainerShard(spec, 0, 1)
    sender = SenderAdapter(
        group=None, endpoint=job.endpoint, checkpoint=spec, load_weights=shard.load_weights, tensors=shard.tensors,
        engines=("solo",), options=FAST,
    )  # fmt: skip
    engine = Worker(lambda: job.receiver("solo", 0), "solo/0")
    try:
        sender.connect()
        shard.load_weights(iter(toy.weights(spec, 5).items()))
        sender.send_weights(5).wait()
        with pytest.raises(UsageError, match="only grow"):
            sender.send_weights(5)
    finally:
        sender.close()
        job.stop.set()
        engine.join()
    assert engine.error is None
    assert torch.equal(shard.live["embed"], toy.weights(spec, 5)["embed"])
    assert job.installed["solo/0"] == [5]
    assert job.wrong == []
