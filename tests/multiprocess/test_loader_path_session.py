"""Engines whose loaders compute, through the whole session: real transports and threads, all workers in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import pytest
import torch
from tests import computing_loaders as toy
from tests.multiprocess.test_session_in_process import Worker

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import Options, ReceiverAdapter, SenderAdapter, UpdateReport
from weightbridge.errors import IncompleteUpdateError, InfeasibleError, ProbeError, WeightBridgeError
from weightbridge.testing.ports import free_port

ROWS = (*toy.Together.rows(), *toy.TensorParallelPart.ROWS)
SIZE = toy.TensorParallelPart.SIZE


def options(**more: object) -> Options:
    common: dict[str, object] = {
        "slot_bytes": 24576, "connect_timeout_seconds": 30, "update_timeout_seconds": 15, "heartbeat_seconds": 0.2,
        "heartbeat_timeout_seconds": 8,
    }  # fmt: skip
    return Options(**{**common, **more})  # type: ignore[arg-type]


class Trainer:
    """Every second tensor; masters of bf16 tensors are fp32."""

    def __init__(self, spec: CheckpointSpec, rank: int) -> None:
        mine = spec.tensors[rank::2]
        self.live = {
            t.name: torch.zeros(
                t.shape, dtype=toy.F32 if t.dtype.name == "BF16" else getattr(torch, t.dtype.torch_name)
            )
            for t in mine
        }

    def load_weights(self, tensors: toy.Stream) -> None:
        for name, tensor in tensors:
            if name in self.live:
                self.live[name].copy_(tensor)


class EngineWorker:
    """Everything that is computed anywhere, on every rank, and a tensor-parallel part whose loads are collective."""

    def __init__(self, rank: int, together: toy.Collective) -> None:
        self.single, self.parallel = toy.Together(), toy.TensorParallelPart(rank, together)
        self.live: Mapping[str, torch.Tensor] = {**self.single.live, **self.parallel.live}

    def load_weights(self, tensors: toy.Stream) -> None:
        given = dict(tensors)
        parallel = {n: t for n, t in given.items() if "." not in n}
        self.single.load_weights((n, t) for n, t in given.items() if "." in n)
        if parallel:
            self.parallel.load_weights(iter(parallel.items()))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return toy.NamedTensors(self.live, buffers=self.single.buffers)


class Job:
    def __init__(self, chosen: Options, *, versions: int = 2) -> None:
        self.spec = toy.spec_of(ROWS)
        self.endpoint, self.options, self.versions = f"tcp://127.0.0.1:{free_port()}", chosen, versions
        self.together = toy.Collective(SIZE)
        self.stop = threading.Event()
        self.wrong: list[str] = []
        self.installed: dict[int, list[int]] = {r: [] for r in range(SIZE)}
        self.reports: list[UpdateReport] = []
        self.states: dict[int, str] = {}
        self.wrap: Callable[[int, EngineWorker], Callable[[toy.Stream], None]] = lambda rank, worker: (
            worker.load_weights
        )

    def trainer(self, rank: int) -> None:
        holder = Trainer(self.spec, rank)
        sender = SenderAdapter(
            group=(rank, 2), endpoint=self.endpoint, checkpoint=self.spec, load_weights=holder.load_weights,
            tensors=lambda: holder.live, engines=("tp",), options=self.options,
        )  # fmt: skip
        try:
            sender.connect()
            for version in range(1, self.versions + 1):
                holder.load_weights(iter(toy.weights(self.spec, version).items()))
                report = sender.send_weights(version).wait()
                if rank == 0:
                    self.reports.append(report)
        finally:
            sender.close()

    def receiver(self, rank: int) -> None:
        worker = EngineWorker(rank, self.together)
        receiver = ReceiverAdapter(
            group=(rank, SIZE), endpoint=self.endpoint, checkpoint=self.spec, load_weights=self.wrap(rank, worker),
            tensors=worker.tensors, engine="tp", node=f"node-{rank}", options=self.options,
        )  # fmt: skip
        try:
            while not self.stop.is_set():
                if self.options.idle_install:
                    time.sleep(0.002)  # never polls
                    receiver._seat.check()
                else:
                    receiver.poll_requests()
                with receiver._agreement.step_lock:
                    if receiver.version != (self.installed[rank] or [-1])[-1]:
                        self.installed[rank].append(receiver.version)
                        self._compare(rank, worker, receiver.version)
                time.sleep(0.001)
        finally:
            self.states[rank] = receiver.state
            receiver.close()

    def _compare(self, rank: int, worker: EngineWorker, version: int) -> None:
        expected = EngineWorker(rank, self.together)
        expected.parallel.together = type("Alone", (), {"meet": lambda *_: None})()
        expected.load_weights(iter(toy.weights(self.spec, version).items()))
        self.wrong += [
            f"{rank} v{version} {name}"
            for name, tensor in worker.live.items()
            if not torch.equal(tensor.reshape(-1).view(torch.uint8), expected.live[name].reshape(-1).view(torch.uint8))
        ]

    def run(self) -> dict[str, BaseException | None]:
        engine = {f"tp/{r}": Worker(lambda r=r: self.receiver(r), f"tp/{r}") for r in range(SIZE)}  # type: ignore[misc]
        trainers = {f"trainer/{r}": Worker(lambda r=r: self.trainer(r), f"trainer/{r}") for r in range(2)}  # type: ignore[misc]
        try:
            for worker in trainers.values():
                worker.join(90)
            give_up = time.monotonic() + 20
            while self.options.idle_install and time.monotonic() < give_up:
                seen = [versions[-1:] for versions in self.installed.values()]
                if seen == [[self.versions]] * SIZE or not all(w.thread.is_alive() for w in engine.values()):
                    break
                time.sleep(0.002)  # until the loops have looked at the last version
        finally:
            self.stop.set()
            for worker in engine.values():
                worker.join(60)
        return {name: worker.error for name, worker in {**engine, **trainers}.items()}


@pytest.mark.parametrize("idle", [False, True])
def test_what_loaders_compute_arrives_bit_for_bit(idle: bool) -> None:
    job = Job(options(idle_install=idle))
    errors = job.run()
    assert set(errors.values()) == {None}, errors
    assert job.wrong == []
    assert [versions[-1] for versions in job.installed.values()] == [2, 2, 2]
    # All ranks have loaded the same names in every call; the last two are the two versions.
    carried = set(toy.Together.needed) | toy.TensorParallelPart.NEEDED
    for calls in job.together.calls:
        assert calls[-2:] == [("normed", "norm")] * 2
    nbytes = {t.name: t.nbytes for t in job.spec.tensors}
    needed = sum(nbytes.values()) - 2 * (9 - 3) * 4 * 2  # a third of `first` and of `last`, all else whole
    assert sum(nbytes[n] for n in carried) < needed
    for report in job.reports:
        for rank in range(SIZE):
            assert needed <= report.network_bytes[f"tp/{rank}"][1] < 8 * needed  # a small job is mostly headers
        assert report.engines == {"tp": "ready"}


def test_a_loader_that_fails_at_install_poisons_its_engine() -> None:
    """The engine has all bytes and is not whole: what it computes is of the version before."""
    job = Job(options(), versions=3)
    done = threading.Event()

    def wrap(rank: int, worker: EngineWorker) -> Callable[[toy.Stream], None]:
        def load(tensors: toy.Stream) -> None:
            if job.installed[rank] == [1]:  # the second version
                done.wait(5 if rank else 0)  # the other ranks have not done their part either
                done.set()
                raise ValueError("kernel repack failed")
            worker.load_weights(tensors)

        return load

    job.wrap = wrap
    errors = job.run()
    assert all(isinstance(errors[f"tp/{r}"], ValueError) for r in range(SIZE)), errors
    for rank in range(2):
        error = errors[f"trainer/{rank}"]
        assert isinstance(error, IncompleteUpdateError), error
        assert error.poisoned == ("tp",)  # type: ignore[attr-defined]
        assert "kernel repack failed" in str(error)
        assert next(iter(error.causes)).startswith("tp/")
    assert job.installed == {r: [1] for r in range(SIZE)}  # no worker says that it serves the second version
    assert "ready" not in job.states.values()


def test_a_carried_set_beyond_the_budget_is_infeasible_everywhere() -> None:
    errors = Job(options(loader_path_bytes=100)).run()
    assert all(isinstance(e, InfeasibleError) for e in errors.values()), errors
    assert all("loader_path_bytes" in str(e) for e in errors.values())


def test_a_failure_of_one_rank_while_probing_is_reported_under_its_name() -> None:
    job = Job(options())

    def wrap(rank: int, worker: EngineWorker) -> Callable[[toy.Stream], None]:
        calls = 0

        def load(tensors: toy.Stream) -> None:
            nonlocal calls
            calls += 1
            worker.load_weights(tensors)
            if rank == 2 and calls == 12:
                raise MemoryError("no more")

        return load

    job.wrap = wrap
    errors = job.run()
    for error in errors.values():
        assert isinstance(error, WeightBridgeError)
        assert "MemoryError: no more" in str(error)
    for rank in range(2):
        error = errors[f"trainer/{rank}"]
        assert isinstance(error, ProbeError)
        assert set(error.causes) == {"tp/2"}  # type: ignore[attr-defined]


def test_a_trainer_whose_loader_computes_is_refused() -> None:
    job = Job(options())
    job.together.meet = lambda *_: None  # type: ignore[method-assign]  # the session may end before all ranks have begun
    original = Trainer.load_weights

    def shifted(self: Trainer, tensors: toy.Stream) -> None:
        original(self, tensors)
        if "norm" in self.live:
            self.live["norm"].sub_(1)

    Trainer.load_weights = shifted  # type: ignore[method-assign]
    try:
        errors = job.run()
    finally:
        Trainer.load_weights = original  # type: ignore[method-assign]
    assert all(isinstance(e, ProbeError) and "'norm'" in str(e) for e in errors.values()), errors
