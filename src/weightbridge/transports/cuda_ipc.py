"""Device memory that the other GPU workers of a node map and read in place (CUDA IPC), and host memory pinned for GPU kernels.

Reviewed by reading and tested against a driver that only keeps books; it has not been run on a device yet. The executor uses
`PinnedMemory` for workers whose weights lie on a GPU; nothing uses memory shared by handles so far.

The owner makes `DeviceMemory` and hands its `DeviceHandle` over the authenticated control plane; a neighbour makes
`MappedDeviceMemory` of it and binds the buffer into its assemble tables, which then read over NVLink or PCIe.

Who may touch what, and when: kernels of two processes share no stream, so whoever writes must have seen the event of its last
kernel done (`Ticket.done`) before it sends the tag, and whoever reads starts its kernels after the tag. The owner closes last:
memory freed under a neighbour's mapping is undefined behaviour in CUDA, so close after the fence.

Only the driver (libcuda.so.1) is needed, through ctypes: its calls are the stable interface, and torch's own way to share
storages keeps reference counters in files that a killed worker leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

from weightbridge.errors import RegistrationError, UnsupportedError, UsageError
from weightbridge.kernels.base import Buffer

__all__ = ["DeviceHandle", "DeviceMemory", "MappedDeviceMemory", "PinnedMemory"]

_HANDLE_BYTES = 64
_UUID_BYTES = 16
_LAZY_PEER_ACCESS = 1
_PINNED_FOR_ALL_CONTEXTS, _PINNED_WITH_DEVICE_ADDRESS = 1, 2


class _Opaque(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * _HANDLE_BYTES)]


class DeviceHandle(NamedTuple):
    """What a neighbour needs to map memory: CUDA's handle, its length in bytes, and the UUID of the GPU it lies on.

    The UUID, because two processes may number the same GPUs differently.
    """

    handle: bytes
    nbytes: int
    gpu: bytes


class _Driver:
    """Calls of the CUDA driver by name, on one GPU's primary context: the one that torch uses too."""

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        self.device = device
        self._context = ctypes.c_void_p()
        self.call("cuInit", 0)
        number = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(number), device)
        self._number = number
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises RegistrationError with the driver's own words when it refuses."""
        code = getattr(self._library, name)(*arguments)
        if code == 0:
            return
        text = ctypes.c_char_p()
        words = ""
        if self._library.cuGetErrorString(code, ctypes.byref(text)) == 0 and text.value is not None:
            words = f", {text.value.decode(errors='replace')}"
        raise RegistrationError(f"{name} on GPU {self.device} failed with CUDA error {code}{words}")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The context is current on this thread inside, and what was current before is so again after."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def uuid(self) -> bytes:
        out = (ctypes.c_ubyte * _UUID_BYTES)()
        self.call("cuDeviceGetUuid", ctypes.byref(out), self._number)
        return bytes(out)

    def reaches(self, gpu: bytes) -> bool:
        """True when the GPU of that UUID is this one, or one of this process whose memory this one can read."""
        if gpu == self.uuid():
            return True
        count, other, can = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        for i in range(count.value):
            self.call("cuDeviceGet", ctypes.byref(other), i)
            out = (ctypes.c_ubyte * _UUID_BYTES)()
            self.call("cuDeviceGetUuid", ctypes.byref(out), other)
            if bytes(out) == gpu:
                self.call("cuDeviceCanAccessPeer", ctypes.byref(can), self._number, other)
                return bool(can.value)
        return True  # not visible to this process: only the driver knows, and it refuses if it must

    def release(self) -> None:
        self.call("cuDevicePrimaryCtxRelease_v2", self._number)


def _load() -> Any:
    """libcuda. Raises UnsupportedError where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(
            f"no CUDA driver: {error}; slots in device memory need an NVIDIA GPU, on other machines they lie in host memory"
        ) from error


class _Held:
    """Something of the driver's: what was made is undone in turn by `close`, also when making it failed half way."""

    def __init__(self, device: int) -> None:
        self._driver = _Driver(_load(), device)
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._driver.release)
        self._address = 0
        self._nbytes = 0

    @property
    def buffer(self) -> Buffer:
        """Where kernels of the GPU find it, in this process. UsageError once it is closed."""
        if self._address == 0:
            raise UsageError(f"this {type(self).__name__} is closed")
        return Buffer(self._address, self._nbytes, self._driver.device)

    def close(self) -> None:
        """Give it back; no kernel uses it any more. Idempotent."""
        self._address = 0
        self._undo.close()

    def _call_to_undo(self, name: str, *arguments: Any) -> None:
        with self._driver.current():
            self._driver.call(name, *arguments)


class DeviceMemory(_Held):
    """`nbytes` of a GPU, zeroed, in an allocation of its own, which is what a handle stands for.

    Close it after the neighbours have closed their mappings. Raises UnsupportedError without a driver, RegistrationError when
    the GPU has no such memory to give.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        if nbytes < 1:
            raise UsageError(f"nbytes is {nbytes}, expected 1 or more")
        super().__init__(device)
        pointer, handle, driver = ctypes.c_uint64(), _Opaque(), self._driver
        try:
            with driver.current():
                driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
                self._undo.callback(self._call_to_undo, "cuMemFree_v2", pointer)
                driver.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
                driver.call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
                driver.call("cuCtxSynchronize")
            self.handle = DeviceHandle(bytes(handle.bytes), nbytes, driver.uuid())
        except RegistrationError:
            self.close()
            raise
        self._address, self._nbytes = pointer.value, nbytes


class MappedDeviceMemory(_Held):
    """Another process's `DeviceMemory`, readable and writable here by kernels of GPU `device`.

    Raises RegistrationError when this GPU cannot reach that one, or the owner is gone. CUDA refuses a handle in the process
    that made it: there the owner's own buffer is to be used.
    """

    def __init__(self, handle: DeviceHandle, device: int) -> None:
        if len(handle.handle) != _HANDLE_BYTES or len(handle.gpu) != _UUID_BYTES or handle.nbytes < 1:
            raise RegistrationError(
                f"a handle of {len(handle.handle)} bytes for {handle.nbytes} bytes of GPU memory is damaged; both sides must "
                "run the same version of the library"
            )
        super().__init__(device)
        pointer, opaque = ctypes.c_uint64(), _Opaque((ctypes.c_ubyte * _HANDLE_BYTES)(*handle.handle))
        try:
            if not self._driver.reaches(handle.gpu):
                raise RegistrationError(
                    f"GPU {device} cannot read the memory of GPU {handle.gpu.hex()} (no peer access); keep these workers' "
                    "slots in host memory"
                )
            with self._driver.current():
                self._driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opaque, _LAZY_PEER_ACCESS)
        except RegistrationError:
            self.close()
            raise
        self._undo.callback(self._call_to_undo, "cuIpcCloseMemHandle", pointer)
        self._address, self._nbytes = pointer.value, handle.nbytes


class PinnedMemory(_Held):
    """Host memory (a `SharedMemory`, say) that kernels of GPU `device` read and write, until `close`; unmap it after that.

    `buffer` is where those kernels see it; the host goes on using its own address. Raises as `DeviceMemory` does.
    """

    def __init__(self, host: Buffer, device: int) -> None:
        super().__init__(device)
        seen, address, driver = ctypes.c_uint64(), ctypes.c_void_p(host.address), self._driver
        flags = _PINNED_FOR_ALL_CONTEXTS | _PINNED_WITH_DEVICE_ADDRESS
        try:
            with driver.current():
                driver.call("cuMemHostRegister_v2", address, ctypes.c_size_t(host.nbytes), flags)
                self._undo.callback(self._call_to_undo, "cuMemHostUnregister", address)
                driver.call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), address, 0)
        except RegistrationError:
            self.close()
            raise
        self._address, self._nbytes = seen.value, host.nbytes
