"""Kernels for wherever the weights lie: the CPU's, and beside them Triton's for each CUDA device that is asked for."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UsageError
from weightbridge.kernels.base import Buffer, Kernels, Ticket

__all__ = ["KernelsByDevice", "triton_module"]


class KernelsByDevice(Kernels):
    """What `on` hands out is made once and kept, so that its stream goes on from one attempt to the next. Used as they are,
    they are those of the CPU."""

    def __init__(self, host: Kernels) -> None:
        self._host = host
        self.name = host.name
        self._made: dict[int, Kernels] = {}
        self._lock = threading.Lock()

    def on(self, device: int | None) -> Kernels:
        """See `Kernels.on`. The first time for a device takes as long as `TritonKernels`."""
        if device is None:
            return self._host
        with self._lock:
            if device not in self._made:
                self._made[device] = _device_kernels(device)
            return self._made[device]

    def follow_caller(self) -> None:
        """See `Kernels.follow_caller`; on every device asked for so far."""
        for kernels in tuple(self._made.values()):
            kernels.follow_caller()

    def prepare(self, table: npt.NDArray[np.void], sources: Sequence[Buffer], destinations: Sequence[Buffer]) -> Any:
        """See `Kernels.prepare`: memory of the CPU."""
        return self._host.prepare(table, sources, destinations)

    def launch(self, prepared: Any) -> Ticket:
        """See `Kernels.launch`."""
        return self._host.launch(prepared)


def triton_module(otherwise: str) -> Any:
    """The module of the Triton kernels, imported when first asked for.

    Raises UsageError where it cannot be. otherwise: what to do if not install it.
    """
    try:
        return importlib.import_module("weightbridge.kernels.triton_kernels")
    except ImportError as error:
        raise UsageError(
            f"the Triton kernels cannot be used: {error}; install weightbridge-rl[gpu], or {otherwise}"
        ) from error


def _device_kernels(device: int) -> Kernels:
    module = triton_module("keep the weights in host memory")
    if module.INTERPRETED:
        raise UsageError(
            "TRITON_INTERPRET=1 keeps the Triton kernels in the interpreter, on memory of the CPU; start without it"
        )
    kernels: Kernels = module.TritonKernels(device)
    return kernels
