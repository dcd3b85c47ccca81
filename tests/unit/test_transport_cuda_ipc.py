"""CUDA IPC's bookkeeping against a driver that keeps books only. What a real one does with it is in tests/gpu."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from weightbridge.errors import RegistrationError, UnsupportedError, UsageError
from weightbridge.kernels import Buffer
from weightbridge.transports import cuda_ipc
from weightbridge.transports.cuda_ipc import DeviceHandle, DeviceMemory, MappedDeviceMemory, PinnedMemory

UUIDS = [bytes([i + 1] * 16) for i in range(2)]


class BookkeepingDriver:
    """The calls that `cuda_ipc` makes, on two GPUs. `fails` is the call that refuses; `log` all calls that made or undid."""

    def __init__(self, fails: str = "", peer_access: bool = True) -> None:
        self.fails, self.peer_access = fails, peer_access
        self.contexts, self.current = 0, 0
        self.log: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name == self.fails:
                return 2
            return getattr(self, "do_" + name, self.note)(*arguments, name=name) or 0

        return call

    def note(self, *arguments: Any, name: str) -> None:
        if name not in ("cuInit", "cuCtxSynchronize"):
            assert self.current == 1, f"{name} without a context"
            self.log.append(name)

    def do_cuGetErrorString(self, code: int, text: Any, name: str) -> None:
        text._obj.value = b"out of memory"

    def do_cuDeviceGetCount(self, count: Any, name: str) -> None:
        count._obj.value = 2

    def do_cuDeviceGet(self, number: Any, i: int, name: str) -> None:
        number._obj.value = i

    def do_cuDeviceGetUuid(self, out: Any, number: Any, name: str) -> None:
        out._obj[:] = UUIDS[number.value]

    def do_cuDeviceCanAccessPeer(self, can: Any, own: Any, other: Any, name: str) -> None:
        can._obj.value = self.peer_access and own.value != other.value

    def do_cuDevicePrimaryCtxRetain(self, context: Any, number: Any, name: str) -> None:
        self.contexts += 1
        context._obj.value = 77

    def do_cuDevicePrimaryCtxRelease_v2(self, number: Any, name: str) -> None:
        self.contexts -= 1

    def do_cuCtxPushCurrent_v2(self, context: Any, name: str) -> None:
        assert context.value == 77
        self.current += 1

    def do_cuCtxPopCurrent_v2(self, context: Any, name: str) -> None:
        self.current -= 1

    def do_cuMemAlloc_v2(self, pointer: Any, nbytes: Any, name: str) -> None:
        self.note(name=name)
        pointer._obj.value = 0x7000_0000_0000

    def do_cuIpcGetMemHandle(self, handle: Any, pointer: Any, name: str) -> None:
        self.note(name=name)
        assert pointer.value == 0x7000_0000_0000
        handle._obj.bytes[:] = bytes(range(64))

    def do_cuIpcOpenMemHandle_v2(self, pointer: Any, handle: Any, flags: int, name: str) -> None:
        self.note(name=name)
        assert bytes(handle.bytes) == bytes(range(64))
        pointer._obj.value = 0x7100_0000_0000

    def do_cuMemHostGetDevicePointer_v2(self, seen: Any, host: Any, flags: int, name: str) -> None:
        self.note(name=name)
        seen._obj.value = host.value + 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> BookkeepingDriver:
    fake = BookkeepingDriver()
    monkeypatch.setattr(cuda_ipc, "_load", lambda: fake)
    return fake


def test_memory_is_made_mapped_and_given_back_in_turn(driver):
    owner = DeviceMemory(100, 0)
    assert owner.buffer == Buffer(0x7000_0000_0000, 100, 0)
    assert owner.handle == DeviceHandle(bytes(range(64)), 100, UUIDS[0])
    neighbour = MappedDeviceMemory(owner.handle, 1)
    assert neighbour.buffer == Buffer(0x7100_0000_0000, 100, 1)
    for held in (neighbour, neighbour, owner, owner):
        held.close()
    assert driver.log == [
        "cuMemAlloc_v2", "cuMemsetD8_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle", "cuMemFree_v2",
    ]  # fmt: skip
    assert (driver.contexts, driver.current) == (0, 0)
    with pytest.raises(UsageError, match="DeviceMemory is closed"):
        _ = owner.buffer


def test_pinned_memory_is_seen_by_the_gpu_until_it_is_closed(driver):
    memory = ctypes.create_string_buffer(64)
    pinned = PinnedMemory(Buffer(ctypes.addressof(memory), 64), 1)
    assert pinned.buffer == Buffer(ctypes.addressof(memory) + 1, 64, 1)
    pinned.close()
    assert driver.log == ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2", "cuMemHostUnregister"]
    assert driver.contexts == 0


@pytest.mark.parametrize(
    ("fails", "undone"),
    [("cuMemAlloc_v2", []), ("cuMemsetD8_v2", ["cuMemFree_v2"]), ("cuIpcGetMemHandle", ["cuMemFree_v2"]),
     ("cuIpcOpenMemHandle_v2", []), ("cuMemHostRegister_v2", []), ("cuMemHostGetDevicePointer_v2", ["cuMemHostUnregister"])],
)  # fmt: skip
def test_what_fails_half_way_is_undone_and_says_what_the_driver_said(driver, fails, undone):
    driver.fails = fails
    make = lambda: DeviceMemory(8, 0)  # noqa: E731 (three short ways to begin)
    if "Host" in fails:
        make = lambda: PinnedMemory(Buffer(4096, 64), 0)  # noqa: E731
    elif "Open" in fails:
        make = lambda: MappedDeviceMemory(DeviceHandle(bytes(range(64)), 8, UUIDS[0]), 0)  # noqa: E731
    with pytest.raises(RegistrationError, match=rf"{fails} on GPU 0 failed with CUDA error 2, out of memory"):
        make()
    made = {"cuMemFree_v2", "cuMemHostUnregister", "cuIpcCloseMemHandle"}
    assert [name for name in driver.log if name in made] == undone
    assert (driver.contexts, driver.current) == (0, 0)


def test_a_gpu_without_peer_access_is_refused(driver):
    driver.peer_access = False
    MappedDeviceMemory(DeviceHandle(bytes(range(64)), 8, UUIDS[0]), 0).close()
    MappedDeviceMemory(DeviceHandle(bytes(range(64)), 8, bytes(16)), 0).close()  # not visible here: the driver decides
    with pytest.raises(RegistrationError, match=f"GPU 1 cannot read the memory of GPU {UUIDS[0].hex()}"):
        MappedDeviceMemory(DeviceHandle(bytes(range(64)), 8, UUIDS[0]), 1)
    assert driver.contexts == 0


def test_a_damaged_handle_and_no_bytes_are_refused_before_the_driver_is_asked(driver):
    with pytest.raises(RegistrationError, match="a handle of 3 bytes"):
        MappedDeviceMemory(DeviceHandle(b"abc", 8, UUIDS[0]), 0)
    with pytest.raises(UsageError, match="nbytes is 0"):
        DeviceMemory(0, 0)
    assert driver.log == []


def test_without_a_driver_the_reason_is_plain(monkeypatch):
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(UnsupportedError, match=r"no CUDA driver: libcuda.so.1.*need an NVIDIA GPU"):
        DeviceMemory(8, 0)
