"""A CUDA device that is not there: memory at addresses of its own, kernels that run late and in any order, streams of callers.

It stands in three places, and nowhere else: where a tensor lies (`executor.live._place_of`), the kernels of a device
(`kernels.by_device._device_kernels`) and the driver's library (`transports.cuda_ipc._load`). Torch, Triton and CUDA have no
part in it, so nothing is proven of them.

The device finds memory VIEW bytes from where the CPU does. An address of the one in the hands of the other is therefore no
memory at all: the process dies, or `faults` has a line.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from weightbridge.executor import live
from weightbridge.kernels import Buffer, Kernels, ReferenceKernels, Ticket, by_device
from weightbridge.kernels.bounds import check_table
from weightbridge.transports import cuda_ipc

VIEW = 1 << 50  # far beyond what a process can map


class FakeDevice:
    """Number 0, of all workers of this process. faults: what a real one might have answered with anything at all."""

    def __init__(self, seed: int = 1) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.faults: list[str] = []
        self.pinned: dict[int, int] = {}  # address on the host -> bytes
        self.num_pinned = self.num_launched = self.num_early_looks = 0
        self.pinned_by: list[str] = []  # threads
        self._tensors: dict[int, int] = {}
        self._streams: dict[int, list[Callable[[], object]]] = defaultdict(list)  # by the thread that they belong to

    @contextmanager
    def in_place(self) -> Iterator[FakeDevice]:
        """All live tensors of this process lie on it meanwhile."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(live, "_place_of", self.place_of)
            patch.setattr(by_device, "_device_kernels", lambda device: LateKernels(self, device))
            patch.setattr(cuda_ipc, "_load", lambda: _Driver(self))
            yield self

    def place_of(self, tensor: Any) -> tuple[int, int | None]:
        self._tensors[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.data_ptr() + VIEW, 0

    # --- the callers' streams ------------------------------------------------------------------------------------------

    def queue(self, work: Callable[[], object]) -> None:
        """Put it on the calling thread's stream: it is done when a kernel that follows the stream runs, or at `drain`."""
        with self.lock:
            self._streams[threading.get_ident()].append(work)

    def taken(self) -> list[Callable[[], object]]:
        """All that the calling thread's stream holds; it is empty then."""
        with self.lock:
            return self._streams.pop(threading.get_ident(), [])

    def drain(self) -> None:
        for work in self.taken():
            work()

    def drain_all(self) -> None:
        """The streams of all threads."""
        with self.lock:
            taken = [work for stream in self._streams.values() for work in stream]
            self._streams.clear()
            for work in taken:
                work()

    # --- memory --------------------------------------------------------------------------------------------------------

    def on_host(self, buffer: Buffer) -> Buffer:
        """Where the CPU finds what the device does at `buffer`."""
        host = Buffer(buffer.address - VIEW, buffer.nbytes)
        with self.lock:
            known = [*self.pinned.items(), *self._tensors.items()]
        inside = any(a <= host.address and host.address + host.nbytes <= a + n for a, n in known)
        if buffer.nbytes and not inside:
            self.faults.append(f"{buffer} is no memory that the device sees")
        return host


class LateTicket(Ticket):
    def __init__(self, kernels: LateKernels) -> None:
        self.kernels = kernels
        self.run = False

    def done(self) -> bool:
        """Now and then a look finds that one of the kernels has run, not always the one that is looked for."""
        device = self.kernels.of
        with device.lock:
            if not self.run and device.random.random() < 0.5:
                self.kernels.run_one()
            device.num_early_looks += not self.run
            return self.run


class LateKernels(Kernels):
    """One worker's: the reference on the device's addresses, run when somebody looks at a ticket."""

    name = "late"

    def __init__(self, of: FakeDevice, device: int) -> None:
        self.of, self.device = of, device
        self._reference = ReferenceKernels()
        self._before: list[Callable[[], object]] = []
        self._launched: list[tuple[LateTicket, Any]] = []

    def follow_caller(self) -> None:
        self._before += self.of.taken()

    def prepare(self, table: np.ndarray, sources: Sequence[Buffer], destinations: Sequence[Buffer]) -> Any:
        check_table(table, sources, destinations, self.device)
        sides = [[self.of.on_host(b) for b in side] for side in (sources, destinations)]
        return (sources, destinations), self._reference.prepare(table, *sides)

    def launch(self, prepared: Any) -> Ticket:
        with self.of.lock:
            ticket = LateTicket(self)
            self._launched.append((ticket, prepared))
            self.of.num_launched += 1
            return ticket

    def run_one(self) -> None:
        ticket, (sides, table) = self._launched.pop(self.of.random.randrange(len(self._launched)))
        before, self._before = self._before, []
        for work in before:
            work()
        for side in sides:
            for buffer in side:
                self.of.on_host(buffer)
        self._reference.launch(table)
        ticket.run = True


class _Driver:
    """What `cuda_ipc.PinnedMemory` calls."""

    def __init__(self, device: FakeDevice) -> None:
        self._of = device

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: 0

    def cuMemHostRegister_v2(self, host: Any, nbytes: Any, flags: int) -> int:
        with self._of.lock:
            if any(a < host.value + nbytes.value and host.value < a + n for a, n in self._of.pinned.items()):
                return 712  # already registered
            self._of.pinned[host.value] = nbytes.value
            self._of.num_pinned += 1
            self._of.pinned_by.append(threading.current_thread().name)
        return 0

    def cuMemHostUnregister(self, host: Any) -> int:
        with self._of.lock:
            del self._of.pinned[host.value]
        if not _is_mapped(host.value):
            self._of.faults.append(f"{host.value:#x} was unmapped before it was unpinned")
        return 0

    def cuMemHostGetDevicePointer_v2(self, seen: Any, host: Any, flags: int) -> int:
        seen._obj.value = host.value + VIEW
        return 0


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        bounds = [line.split()[0].split("-") for line in maps]
    return any(int(a, 16) <= address < int(b, 16) for a, b in bounds)
