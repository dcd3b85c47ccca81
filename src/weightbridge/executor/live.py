"""Live tensors as memory: where the bytes of a worker's weights are right now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightbridge.checkpoint.dtypes import dtype_of_torch_name
from weightbridge.errors import LayoutError, UnsupportedError
from weightbridge.executor.device import device_name
from weightbridge.kernels.base import Buffer
from weightbridge.layout.source_map import LiveTensor
from weightbridge.probe.values import torch_dtype

__all__ = ["LiveMemory"]


_Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides, dtype."""


class LiveMemory:
    """The memory of a worker's live tensors, looked up anew for each update: a trainer may have rebound a storage since.

    What was seen last is remembered as addresses, never as tensors: a storage that the worker gave up must go. While nothing
    has changed an update costs one look at each tensor, and nothing is made anew.
    """

    def __init__(self, live: Sequence[LiveTensor]) -> None:
        """live: in the order of SourceMap.live, as they were probed."""
        self._live = tuple(live)
        self._names = [t.name for t in live]
        shared: dict[
            _Form, _Form
        ] = {}  # one for all tensors alike, so that it stays in the cache while they are looked at
        forms = [(t.shape, t.strides, torch_dtype(t.dtype)) for t in live]
        self._forms = [shared.setdefault(form, form) for form in forms]
        self._addresses: list[int] = []
        self._buffers: tuple[Buffer, ...] | None = None
        self._devices: list[int | None] = []  # as they were first seen: what the kernels were chosen for

    def buffers(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Buffer, ...]:
        """The memory of each live tensor, in order; the very same tuple as the last time when none has moved.

        Raises LayoutError when a tensor is gone, no longer has the shape, strides and dtype it was probed with, or has gone to
        another device; UnsupportedError when it is neither in CPU memory nor on a CUDA device.
        """
        with torch.no_grad():  # a DTensor hands out its local part without a node of the autograd graph
            local = [_local(t) for t in self._each(tensors)]
        if self._buffers is None or not self._unchanged(local):
            found = tuple(_buffer(t, expected) for t, expected in zip(local, self._live, strict=True))
            self._check_devices(found)
            self._buffers = found
            self._addresses = [t.data_ptr() for t in local]
        return self._buffers

    def _each(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        try:
            return [tensors[name] for name in self._names]
        except KeyError as error:
            name = str(error.args[0])
            raise LayoutError(
                f"live tensor {name!r} was there when the layout was probed and is gone now; "
                "connect again after changing the model",
                tensor=name,
            ) from None

    def _check_devices(self, found: Sequence[Buffer]) -> None:
        devices = [b.device for b in found]
        self._devices = self._devices or devices
        if devices != self._devices:
            i = next(i for i, (a, b) in enumerate(zip(devices, self._devices, strict=True)) if a != b)
            raise LayoutError(
                f"live tensor {self._names[i]!r} is on {device_name(devices[i])} and was on {device_name(self._devices[i])} "
                "when this worker connected; move it back before versions are sent or polled for, or connect again",
                tensor=self._names[i],
            )

    def _unchanged(self, local: Sequence[torch.Tensor]) -> bool:
        """One pass over all tensors: most of its time goes into fetching each one's header from memory."""
        for t, address, (shape, strides, dtype) in zip(local, self._addresses, self._forms, strict=True):
            if t.data_ptr() != address or t.shape != shape or t.stride() != strides or t.dtype is not dtype:
                return False
        return True


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor:
        return tensor
    to_local: Any = getattr(tensor, "to_local", None)
    local: torch.Tensor = tensor if to_local is None else to_local()
    return local


def _buffer(local: torch.Tensor, expected: LiveTensor) -> Buffer:
    """Where a local tensor lies, if it still is what was probed."""
    if local.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"live tensor {expected.name!r} is on {local.device}; weights are moved in CPU memory and on CUDA devices only, so "
            "keep it there or leave it out of `tensors`",
            tensor=expected.name,
        )
    seen = (tuple(local.shape), tuple(local.stride()), dtype_of_torch_name(str(local.dtype)).name)
    wanted = (expected.shape, expected.strides, expected.dtype.name)
    if seen != wanted and expected.numel:
        raise LayoutError(
            f"live tensor {expected.name!r} is (shape, strides, dtype) {seen} and was probed as {wanted}; "
            "connect again after changing the model",
            tensor=expected.name,
        )
    address, device = _place_of(local)
    return Buffer(address, expected.span_numel * expected.dtype.itemsize, device)


def _place_of(local: torch.Tensor) -> tuple[int, int | None]:
    """Address, and the number of the CUDA device whose kernels find it there; None: the CPU's."""
    return local.data_ptr(), local.device.index if local.device.type == "cuda" else None
