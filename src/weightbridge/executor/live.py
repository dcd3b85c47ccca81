"""Live tensors as memory: where the bytes of a worker's weights are right now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightbridge.checkpoint.dtypes import dtype_of_torch_name
from weightbridge.errors import LayoutError, UnsupportedError
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

    def buffers(self, tensors: Mapping[str, torch.Tensor]) -> tuple[Buffer, ...]:
        """The memory of each live tensor, in order; the very same tuple as the last time when none has moved.

        Raises LayoutError when a tensor is gone or no longer has the shape, strides and dtype it was probed with;
        UnsupportedError when it is not in CPU memory.
        """
        with torch.no_grad():  # a DTensor hands out its local part without a node of the autograd graph
            local = [_local(t) for t in self._each(tensors)]
        if self._buffers is None or not self._unchanged(local):
            self._buffers = tuple(_buffer(t, expected) for t, expected in zip(local, self._live, strict=True))
            self._addresses = [b.address for b in self._buffers]
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
    if local.device.type != "cpu":
        raise UnsupportedError(
            f"live tensor {expected.name!r} is on {local.device}; this version moves weights in CPU memory only"
        )
    seen = (tuple(local.shape), tuple(local.stride()), dtype_of_torch_name(str(local.dtype)).name)
    wanted = (expected.shape, expected.strides, expected.dtype.name)
    if seen != wanted and expected.numel:
        raise LayoutError(
            f"live tensor {expected.name!r} is (shape, strides, dtype) {seen} and was probed as {wanted}; "
            "connect again after changing the model",
            tensor=expected.name,
        )
    return Buffer(local.data_ptr(), expected.span_numel * expected.dtype.itemsize)
