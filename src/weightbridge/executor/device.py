"""Where a worker's live tensors lie, and how the kernels of that device see host memory.

Slots and host copies are always host memory, so that transports need not care. For weights on a CUDA device that memory is
pinned and mapped, and the device's kernels pack into it and assemble from it where it lies. On a CPU there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from weightbridge.errors import RegistrationError, UnsupportedError, UsageError
from weightbridge.kernels.base import Buffer, Kernels
from weightbridge.layout.source_map import LiveTensor
from weightbridge.transports.cuda_ipc import PinnedMemory

__all__ = ["HostWindows", "device_name", "kernels_for", "wait_for_devices"]


def kernels_for(
    kernels: Kernels, live: Sequence[LiveTensor], buffers: Sequence[Buffer], used: Iterable[int]
) -> Kernels:
    """Of `kernels`, those for where the live tensors lie.

    used: positions in `live` that versions write or are made of; the others may lie anywhere. Raises UnsupportedError,
    naming tensors and devices, when they lie on several, or on one that the kernels do not work on.
    """
    numbers = [i for i in used if i < len(buffers)]  # the tables name what lies beyond when they are bound
    if not numbers:
        return kernels.on(None)
    first = numbers[0]
    device = buffers[first].device
    for i in numbers:
        if buffers[i].device != device:
            raise UnsupportedError(_apart(live[first], device, live[i], buffers[i].device), tensor=live[i].name)
    try:
        return kernels.on(device)
    except UsageError as error:
        raise UnsupportedError(
            f"live tensor {live[first].name!r} is on {device_name(device)}: {error.message}", tensor=live[first].name
        ) from error


def _apart(one: LiveTensor, device: int | None, other: LiveTensor, elsewhere: int | None) -> str:
    carried = next((t.name for t in (one, other) if t.carried), None)
    if carried is not None:
        where = device if elsewhere is None else elsewhere
        return (
            f"live tensor {carried!r} is carried in host memory for a loader that computes, and this worker's weights are on "
            f"{device_name(where)}; the loader path is for weights in host memory only: let the loader copy, or keep them there"
        )
    return (
        f"live tensor {one.name!r} is on {device_name(device)} and {other.name!r} on {device_name(elsewhere)}; the weights of "
        "one worker must be on one device: move them together, or leave what no version changes out of `tensors`"
    )


def device_name(device: int | None) -> str:
    """As it is called in messages."""
    return "the CPU" if device is None else f"cuda:{device}"


class HostWindows:
    """Pieces of host memory as the kernels of a device see them: pinned when first asked for, until `close`."""

    def __init__(self) -> None:
        self._pinned: dict[tuple[Buffer, int], PinnedMemory] = {}

    def of(self, host: Buffer, device: int | None) -> Buffer:
        """Where the kernels of that device (`Kernels.device`) find it. Unmap it after `close` only.

        Raises RegistrationError when it cannot be pinned.
        """
        if device is None:
            return host
        if (host, device) not in self._pinned:
            try:
                self._pinned[host, device] = PinnedMemory(host, device)
            except (RegistrationError, UnsupportedError) as error:
                raise RegistrationError(
                    f"{host.nbytes} bytes of host memory cannot be pinned for the kernels of cuda:{device}: "
                    f"{error.message}; free some host memory, lower Options(slot_bytes=...), or keep the weights in host memory"
                ) from error
        return self._pinned[host, device].buffer

    def close(self) -> None:
        """Unpin all of it; no kernel uses it any more. Idempotent."""
        while self._pinned:
            self._pinned.popitem()[1].close()


def wait_for_devices(tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    """Block until the devices of these tensors have done all that any thread has given them: for a thread that is not the
    one whose stream works on them."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device in {t.device for t in tensors().values() if t.device.type == "cuda"}:
            torch.cuda.synchronize(device)
