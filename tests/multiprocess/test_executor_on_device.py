"""Weights on a device: the lane that waits for kernels, where things lie, and what is refused. Without a device."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.fake_device import VIEW, FakeDevice
from tests.kernel_cases import row

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.errors import LayoutError, RegistrationError, TransferTimeout, UnsupportedError, UsageError
from weightbridge.executor import HostCopy, LiveMemory, device, staging
from weightbridge.executor import live as live_module
from weightbridge.executor.lane import KernelLane, LaneDone, LaneFailed
from weightbridge.kernels import Buffer, NativeKernels, ReferenceKernels, Ticket, by_device, choose_kernels
from weightbridge.kernels.bounds import check_table
from weightbridge.layout.source_map import CopyTable, LiveTensor, SourceMap
from weightbridge.transports import cuda_ipc

F32 = dtype_named("F32")
NAMES = ("first", "second", "third")


# --- the lane ---------------------------------------------------------------------------------------------------------


class Flag(Ticket):
    """Done when it is set; tells of each look."""

    def __init__(self) -> None:
        self.set: bool | str = False
        self.looks: queue.SimpleQueue[None] = queue.SimpleQueue()

    def done(self) -> bool:
        self.looks.put(None)
        if self.set == "broken":
            raise RuntimeError("an illegal address")
        return bool(self.set)


@pytest.fixture
def lane() -> Iterator[tuple[KernelLane, queue.SimpleQueue[object]]]:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    lane = KernelLane(events, "lane under test")
    yield lane, events
    assert lane.close(5)


def test_what_follows_a_kernel_waits_for_its_ticket_and_the_next_is_launched_meanwhile(lane) -> None:
    work, events = lane
    flags, log = [Flag(), Flag(), Flag()], queue.SimpleQueue()

    def launch(i: int) -> Callable[[], Ticket]:
        return lambda: log.put(f"launch {i}") or flags[i]

    for i in range(3):
        work.submit(launch(i), lambda i=i: log.put(f"then {i}"), i)
    assert [log.get(timeout=5) for _ in range(3)] == ["launch 0", "launch 1", "launch 2"]
    flags[2].set = flags[1].set = True  # out of order
    while not flags[0].looks.empty():
        flags[0].looks.get()
    for _ in range(5):
        flags[0].looks.get(timeout=5)
    assert events.empty()
    assert log.empty()
    flags[0].set = True
    assert [events.get(timeout=5) for _ in range(3)] == [LaneDone(0), LaneDone(1), LaneDone(2)]
    assert [log.get(timeout=5) for _ in range(3)] == ["then 0", "then 1", "then 2"]


def test_a_kernel_that_is_done_at_once_is_followed_before_the_next_is_launched(lane) -> None:
    """On a CPU nothing changes: packing does not run ahead of what is told of it."""
    work, events = lane
    log: list[str] = []
    gate = queue.SimpleQueue()
    work.submit(lambda: gate.get(timeout=5), lambda: None, "held")  # so that the next two are queued together
    for i in range(2):
        work.submit(lambda i=i: log.append(f"launch {i}"), lambda i=i: log.append(f"then {i}"), i)
    gate.put(None)
    assert [events.get(timeout=5) for _ in range(3)] == [LaneDone("held"), LaneDone(0), LaneDone(1)]
    assert log == ["launch 0", "then 0", "launch 1", "then 1"]


def test_a_kernel_that_fails_while_it_runs_is_reported_and_the_lane_goes_on(lane) -> None:
    work, events = lane
    flags, after = [Flag(), Flag()], []
    for i in range(2):
        work.submit(lambda i=i: flags[i], lambda i=i: after.append(i), i)
    flags[0].set, flags[1].set = "broken", True
    failed, done = events.get(timeout=5), events.get(timeout=5)
    assert isinstance(failed, LaneFailed)
    assert "an illegal address" in str(failed.error)
    assert (done, after) == (LaneDone(1), [1])


def test_a_lane_with_a_kernel_that_does_not_end_says_so() -> None:
    lane, flag = KernelLane(queue.SimpleQueue(), "lane under test"), Flag()
    lane.submit(lambda: flag, lambda: None, "never")
    assert not lane.close(0.01)
    flag.set = True
    assert lane.close(5)


# --- where tensors lie ------------------------------------------------------------------------------------------------


def live_of(*names: str, carried: str = "") -> tuple[LiveTensor, ...]:
    return tuple(
        LiveTensor(name=n, shape=(5, 3), strides=(3, 1), dtype=F32, carried=n == carried)
        for n in (*names, carried)
        if n
    )


def at(*devices: int | None) -> list[Buffer]:
    return [Buffer(4096 * (i + 1), 60, d) for i, d in enumerate(devices)]


class Nowhere(ReferenceKernels):
    """Kernels of one device, of which nothing is asked."""

    def __init__(self, number: int) -> None:
        self.device = number


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made: list[int] = []

    def make(number: int) -> Nowhere:
        made.append(number)
        return Nowhere(number)

    monkeypatch.setattr(by_device, "_device_kernels", make)
    return made


def test_the_kernels_follow_the_weights(two_devices: list[int]) -> None:
    kernels, live = choose_kernels(), live_of(*NAMES)
    assert device.kernels_for(kernels, live, at(None, None, None), range(3)) is kernels.on(None)
    assert device.kernels_for(kernels, live, at(1, 1, 1), range(3)).device == 1
    assert device.kernels_for(kernels, live, at(1, 1, 1), [2]) is kernels.on(1)  # the same for each attempt
    assert device.kernels_for(kernels, live, at(None, 1, 0), [1]) is kernels.on(
        1
    )  # what no version changes lies anywhere
    assert device.kernels_for(kernels, live, at(1, 1, 1), []) is kernels.on(None)
    assert two_devices == [1]


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (
            (0, 0, 1),
            "live tensor 'first' is on cuda:0 and 'third' on cuda:1; the weights of one worker must be on one device",
        ),
        ((None, 1, None), "live tensor 'first' is on the CPU and 'second' on cuda:1;"),
    ],
)
def test_weights_on_several_devices_are_refused(
    two_devices: list[int], places: tuple[int | None, ...], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        device.kernels_for(choose_kernels(), live_of(*NAMES), at(*places), range(3))
    assert caught.value.tensor in NAMES
    assert "move them together" in str(caught.value)
    assert two_devices == []


def test_the_loader_path_beside_weights_on_a_device_is_refused(two_devices: list[int]) -> None:
    live = live_of("first", carried="whole")
    with pytest.raises(
        UnsupportedError, match=r"'whole' is carried in host memory .* weights are on cuda:0; .* let the loader"
    ):
        device.kernels_for(choose_kernels(), live, at(0, None), range(2))


@pytest.mark.parametrize("name", ["reference", "native"])
def test_kernels_of_the_cpu_by_name_are_refused_for_weights_on_a_device(name: str) -> None:
    if name == "native" and choose_kernels().name != "native":
        pytest.skip("the native kernels were not built")
    with pytest.raises(
        UnsupportedError, match=rf"'first' is on cuda:0: the kernels '{name}' work on memory of the CPU only; leave"
    ):
        device.kernels_for(choose_kernels(name), live_of(*NAMES), at(0, 0, 0), range(3))


def test_without_triton_weights_on_a_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "weightbridge.kernels.triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", None)
    with pytest.raises(
        UnsupportedError, match=r"'second' is on cuda:2: .*install weightbridge-rl\[gpu\], or keep the weights in"
    ):
        device.kernels_for(choose_kernels(), live_of(*NAMES), at(0, 2, 0), [1])


@pytest.mark.parametrize("interpreted", [True, False])
def test_without_a_device_triton_says_so(monkeypatch: pytest.MonkeyPatch, interpreted: bool) -> None:
    def refuse(number: int | None = None) -> None:
        raise UsageError("torch sees none")

    module = SimpleNamespace(INTERPRETED=interpreted, TritonKernels=refuse, require_device=refuse)
    monkeypatch.setattr(by_device, "triton_module", lambda otherwise: module)
    with pytest.raises(
        UnsupportedError, match="'first' is on cuda:0: .*" + ("TRITON_INTERPRET" if interpreted else "sees none")
    ):
        device.kernels_for(choose_kernels(), live_of(*NAMES), at(0, 0, 0), range(3))


def test_without_a_driver_host_memory_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise UnsupportedError("no CUDA driver: libcuda.so.1")

    monkeypatch.setattr(cuda_ipc, "_load", refuse)
    windows = device.HostWindows()
    assert windows.of(Buffer(4096, 60), None) == Buffer(4096, 60)
    with pytest.raises(
        RegistrationError, match=r"60 bytes of host memory cannot be pinned for .* cuda:3: no CUDA driver.*; free"
    ):
        windows.of(Buffer(4096, 60), 3)
    windows.close()


def test_memory_of_another_device_is_no_address_to_the_kernels() -> None:
    here, there = Buffer(4096, 60), Buffer(4096, 60, 1)
    for kernels in (
        (ReferenceKernels(), NativeKernels()) if choose_kernels().name == "native" else (ReferenceKernels(),)
    ):
        with pytest.raises(
            UsageError, match="row 0: destination buffer 0 is memory of cuda:1, the kernels' is the CPU"
        ):
            kernels.prepare(row([3], [2], [2]), [here], [there])
        kernels.prepare(row([3], [2], [2]), [here], [here, there])  # bound and not used
    with pytest.raises(UsageError, match="row 0: source buffer 0 is memory of the CPU, the kernels' is cuda:1"):
        check_table(row([3], [2], [2]), [here], [there], 1)


def test_a_tensor_that_has_gone_to_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {n: torch.zeros(5, 3) for n in NAMES}
    places = dict.fromkeys((t.data_ptr() for t in tensors.values()), 0)
    monkeypatch.setattr(live_module, "_place_of", lambda t: (t.data_ptr() + VIEW, places.get(t.data_ptr())))
    memory = LiveMemory(live_of(*NAMES))
    first = memory.buffers(tensors)
    assert first[1] == Buffer(tensors["second"].data_ptr() + VIEW, 60, 0)
    assert memory.buffers(tensors) is first
    moved = {**tensors, "second": torch.zeros(5, 3)}
    with pytest.raises(
        LayoutError, match="'second' is on the CPU and was on cuda:0 when this worker connected; move it back"
    ):
        memory.buffers(moved)
    assert memory.buffers(tensors) == first


def test_devices_are_waited_for_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    places = ["cuda:1", "cpu", "cuda:1"]
    tensors = lambda: {str(i): SimpleNamespace(device=torch.device(d)) for i, d in enumerate(places)}  # noqa: E731
    device.wait_for_devices(tensors)
    assert waited == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    device.wait_for_devices(tensors)
    assert waited == [torch.device("cuda:1")]


# --- host copies ------------------------------------------------------------------------------------------------------


def map_of(live: tuple[LiveTensor, ...]) -> SourceMap:
    rows = [(i, i, 0, 0, ((5, 3, 3), (3, 1, 1))) for i in range(len(live))]
    return SourceMap(spec_digest="", live=live, copies=CopyTable.from_rows(rows))


def test_a_host_copy_is_pinned_once_and_goes_both_ways() -> None:
    fake = FakeDevice(seed=3)
    tensors = {n: torch.arange(15.0).reshape(5, 3) + i for i, n in enumerate(NAMES)}
    before = {n: t.clone() for n, t in tensors.items()}
    with fake.in_place():
        memory = LiveMemory(live_of(*NAMES))
        copy = HostCopy(map_of(live_of(*NAMES)), choose_kernels())
        for way in ("capture", "install"):
            copy.bind(way, memory.buffers(tensors))
        assert (fake.num_pinned, fake.num_launched) == (1, 0)
        fake.queue(lambda: tensors["third"].fill_(8))
        assert copy.capture(memory.buffers(tensors)) == 3 * 60
        for t in tensors.values():
            t.fill_(-1)
        assert copy.install(memory.buffers(tensors)) == 3 * 60
        before["third"] = torch.full((5, 3), 8.0)
        assert all(torch.equal(t, before[n]) for n, t in tensors.items())
        assert fake.num_pinned == 1
        copy.close()
    assert (fake.pinned, fake.faults) == ({}, [])


def test_a_host_copy_whose_kernel_does_not_end_keeps_its_memory_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_DEADLINE_SECONDS", 0.0)
    fake = FakeDevice()
    fake.random.random = lambda: 1.0  # type: ignore[method-assign] (no look finds anything)
    tensors = {"first": torch.zeros(5, 3)}
    with fake.in_place():
        memory = LiveMemory(live_of("first"))
        copy = HostCopy(map_of(live_of("first")), choose_kernels())
        with pytest.raises(
            TransferTimeout, match="has not ended within 0 s; look at what the caller's stream waits for"
        ):
            copy.capture(memory.buffers(tensors))
        del copy
    assert len(fake.pinned) == 1
