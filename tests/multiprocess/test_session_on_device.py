"""Whole sessions of workers whose weights lie on a device: kernels that end late, pinned slots, streams. See tests.fake_device.

What a real device does with it is in tests/gpu.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.fake_device import FakeDevice
from tests.multiprocess import toy_job as toy
from tests.multiprocess.test_session_in_process import FAST, Job

from weightbridge.coordinator import ReceiverAdapter, SenderAdapter, UpdateReport, receiver
from weightbridge.errors import ConnectError, UnsupportedError
from weightbridge.executor import Executor

VERSIONS = 2


class DeviceJob(Job):
    """Trainers write their weights on a stream, engines read theirs on one, and nobody waits for either."""

    def __init__(self, device: FakeDevice, **options: Any) -> None:
        super().__init__(options=replace(FAST, slot_bytes=4096, **options), versions=VERSIONS)
        self.device = device
        self.nodes = {"tp": "tp", "solo": "trainers"}  # over tcp, from a neighbour's slots, and over shm
        self.pinned_at_connect: list[int] = []

    def _send(self, sender: SenderAdapter, version: int, shard: toy.TrainerShard) -> UpdateReport:
        """`trainer` has written the weights already: they are put back and written again on the stream."""
        if version == 1 and shard.rank == 0:
            self.pinned_at_connect.append(self.device.num_pinned)
            assert sender.plan is not None
            assert sender.plan.rounds > 4  # slots are used again, several times
        written = {n: t.clone() for n, t in shard.live.items()}
        for tensor in shard.live.values():
            tensor.fill_(-7)
        self.device.queue(lambda: [shard.live[n].copy_(t) for n, t in written.items()])
        report = sender.send_weights(version).wait()
        assert toy.same_bytes(written, shard.live) == []  # it was written before it was sent, and only read since
        return report

    def polled(self, engine: str, rank: int) -> Callable[[ReceiverAdapter], bool]:
        """Each poll has a step before it that still reads the weights when the poll begins."""

        def poll(adapter: ReceiverAdapter) -> bool:
            self.device.queue(self.reading(f"{engine}/{rank}", adapter))
            updated = adapter.poll_requests()
            self.device.drain()
            return updated

        return poll

    def reading(self, name: str, adapter: ReceiverAdapter) -> Callable[[], None]:
        """A step's last kernel, when it runs: the weights must be those that the step began with."""
        live = adapter._seat._tensors()
        before = None if adapter.version < 0 else {n: t.clone() for n, t in live.items()}

        def read() -> None:
            if before is not None and toy.same_bytes(before, live):
                self.wrong.append(f"{name}: weights changed while a step read them")

        return read

    def receiver(self, engine: str, rank: int, poll: Any = None) -> None:
        super().receiver(engine, rank, poll or self.polled(engine, rank))


@pytest.mark.parametrize("staged", [False, True])
def test_versions_arrive_bit_for_bit_and_nothing_touches_a_slot_before_its_kernel_is_done(staged: bool) -> None:
    device = FakeDevice(seed=5)
    with device.in_place():
        job = DeviceJob(device, stage_send=staged, stage_receive=staged)
        job.run_to_end()
    assert {name: versions[-1] for name, versions in job.installed.items()} == dict.fromkeys(job.installed, VERSIONS)
    assert device.faults == []
    assert device.num_launched >= 6 * VERSIONS
    assert device.num_early_looks > device.num_launched // 2  # kernels did run after they were launched
    assert device.pinned == {}  # all of it was unpinned
    if not staged:
        # Own slots of six workers, and the slots of two neighbours at each worker of the engine of three: once, at connect.
        assert [device.num_pinned] == job.pinned_at_connect == [6 + 6]
        assert {name.rpartition("-")[0] for name in device.pinned_by} == {"wb-progress"}


def test_another_attempt_still_comes_after_what_the_callers_stream_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trainer's first attempt breaks before a kernel is launched; the version is sent again while the trainer waits."""
    run, broken = Executor.run, set()

    def breaks_once(executor: Executor, **ids: Any) -> None:
        name = executor._me.name
        if name.startswith("trainer/") and name not in broken:
            broken.add(name)
            raise ConnectError(f"the connection of {name} broke")
        run(executor, **ids)

    monkeypatch.setattr(Executor, "run", breaks_once)
    device = FakeDevice(seed=7)
    with device.in_place():
        job = DeviceJob(device)
        job.run_to_end()
    assert {name: versions[-1] for name, versions in job.installed.items()} == dict.fromkeys(job.installed, VERSIONS)
    assert job.reports[0].attempts > 1
    assert (device.faults, device.pinned) == ([], {})


def test_weights_that_the_kernels_asked_for_do_not_reach_end_the_session_with_the_reason() -> None:
    device = FakeDevice()
    with device.in_place():
        job = DeviceJob(device, kernels="reference")
        with job.running() as workers:
            for worker in workers.values():
                worker.join(60)
    for worker in workers.values():
        assert isinstance(worker.error, UnsupportedError)
        assert "live tensor 'embed' is on cuda:0: the kernels 'reference' work on memory of the CPU only" in str(
            worker.error
        )
    assert device.pinned == {}


def test_an_idle_engines_last_step_is_over_before_it_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that installs is not the one whose stream the step is on."""
    device, waited = FakeDevice(seed=2), []

    def wait(tensors: Callable[[], object]) -> None:
        waited.append(threading.current_thread().name)
        device.drain_all()

    monkeypatch.setattr(receiver, "wait_for_devices", wait)
    with device.in_place():
        job = DeviceJob(device, idle_install=True)

        def idle(engine: str, rank: int) -> Callable[[ReceiverAdapter], bool]:
            def poll(adapter: ReceiverAdapter) -> bool:
                with adapter._agreement.step_lock:
                    device.queue(job.reading(f"{engine}/{rank}", adapter))
                time.sleep(0.002)
                return False

            return poll

        job.polled = idle  # type: ignore[method-assign]
        job.run_to_end()
    assert {name for name in waited if name.startswith("wb-idle-install")} == set(waited) != set()
    assert len(waited) >= 4 * VERSIONS
