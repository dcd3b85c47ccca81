"""Whole sessions of workers whose weights lie on a CUDA device: six workers in this process, all on the current device.

    python -m pytest tests/gpu

runs all that there is for a device. The same sessions run without one in tests/multiprocess (Triton's interpreter; a device
that is not there), which is where the order of things is looked at closely.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.multiprocess import toy_job as toy
from tests.multiprocess.test_session_in_process import FAST, Job, Worker
from tests.multiprocess.test_session_modes import Pair

from weightbridge.coordinator import Options, SenderAdapter, UpdateReport
from weightbridge.errors import UnsupportedError

pytest.importorskip("triton", reason="the package triton is not installed (the extra 'gpu')")

PATIENT = replace(FAST, connect_timeout_seconds=120, update_timeout_seconds=60)  # the kernel is compiled meanwhile


def moved(worker: Any) -> Any:
    worker.live = {name: tensor.cuda() for name, tensor in worker.live.items()}
    return worker


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of the toy job keep their weights on the device."""
    shard, engine, solo = toy.TrainerShard, toy.engine_worker, toy.SoloEngine
    monkeypatch.setattr(toy, "TrainerShard", lambda spec, rank, size: moved(shard(spec, rank, size)))
    monkeypatch.setattr(toy, "engine_worker", lambda spec, name, rank: moved(engine(spec, name, rank)))
    monkeypatch.setattr(toy, "SoloEngine", lambda spec: moved(solo(spec)))


class CudaJob(Job):
    """Every worker works on a stream of its own, and trainers write late on theirs."""

    def __init__(self, options: Options) -> None:
        super().__init__(options=options)
        self.nodes = {"tp": "tp", "solo": "trainers"}  # over tcp, from a neighbour's slots, and over shm
        self.busy = torch.randn(2048, 2048, device="cuda")

    def trainer(self, rank: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            super().trainer(rank)

    def receiver(self, engine: str, rank: int, poll: Any = None) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            super().receiver(engine, rank, poll)

    def _send(self, sender: SenderAdapter, version: int, shard: toy.TrainerShard) -> UpdateReport:
        written = {n: t.clone() for n, t in shard.live.items()}
        for tensor in shard.live.values():
            tensor.fill_(-7)
        work = self.busy
        for _ in range(30):
            work = work @ work * 1e-3
        for name, tensor in written.items():
            shard.live[name].copy_(tensor)
        handle = sender.send_weights(version)  # the stream has not come to the copies yet
        for tensor in shard.live.values():
            tensor.fill_(-9)  # and what is sent has left: these may change
        report = handle.wait()
        for name, tensor in written.items():
            shard.live[name].copy_(tensor)
        return report


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("slot_bytes", [4096, 24576])
def test_versions_arrive_bit_for_bit(on_cuda: None, staged: bool, slot_bytes: int) -> None:
    options = replace(PATIENT, slot_bytes=slot_bytes, stage_send=staged, stage_receive=staged)
    job = CudaJob(options)
    job.run_to_end(300)
    assert {name: seen[-1] for name, seen in job.installed.items()} == dict.fromkeys(job.installed, 3)


@pytest.mark.parametrize("staged", [False, True])
def test_an_update_takes_no_memory_of_the_device(on_cuda: None, staged: bool) -> None:
    options = {
        "connect_timeout_seconds": 120,
        "update_timeout_seconds": 60,
        "stage_send": staged,
        "stage_receive": staged,
    }
    with Pair(**options) as pair:
        taken: list[int] = []
        for version in (1, 2, 3):
            pair.set(version)
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            update(pair, version)
            taken.append(torch.cuda.memory_stats()["allocation.all.allocated"] - before)
            assert pair.holds(version)
        assert taken[1:] == [0, 0]  # the first one binds what connecting has not


def update(pair: Pair, version: int) -> None:
    sending = Worker(lambda: pair.sender.send_weights(version).wait(), "send")
    pair.poll_until(lambda: not sending.thread.is_alive(), 120)
    assert sending.error is None


def refused(pair: Pair, words: str) -> None:
    """Connecting ends with the reason, on both sides."""
    connecting = Worker(pair.sender.connect, "connect")
    with pytest.raises(UnsupportedError, match=words):
        pair.poll_until(lambda: False, 150)
    connecting.join(60)
    pair.receiver.close()
    assert isinstance(connecting.error, UnsupportedError)


@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_kernels_of_the_cpu_are_refused_by_name(on_cuda: None, kernels: str) -> None:
    words = rf"'embed' is on cuda:\d+: the kernels '{kernels}' work on memory of the CPU only"
    refused(Pair(connect_timeout_seconds=120, kernels=kernels), words)


def test_weights_on_the_device_and_off_it_are_refused(on_cuda: None) -> None:
    pair = Pair(connect_timeout_seconds=120)
    pair.engine.live["layers.1.up"] = pair.engine.live["layers.1.up"].cpu()
    refused(pair, r"'embed' is on cuda:\d+ and 'layers.1.up' on the CPU; .*move them together")
