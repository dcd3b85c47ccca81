"""Live tensors as memory: where the bytes of a worker's weights are right now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightbridge.checkpoint.dtypes import dtype_of_torch_name
from weightbridge.errors import LayoutError, UnsupportedError
from weightbridge.kernels.base import Buffer
from weightbridge.layout.source_map import LiveTensor

__all__ = ["live_buffers"]


def live_buffers(tensors: Mapping[str, torch.Tensor], live: Sequence[LiveTensor]) -> tuple[Buffer, ...]:
    """The memory of each live tensor, in the order of `live` (SourceMap.live).

    Read anew for each update, because a trainer may have rebound a storage since. Raises LayoutError when a tensor is
    gone or no longer has the shape, strides and dtype it was probed with; UnsupportedError when it is not in CPU memory.
    """
    found = []
    for expected in live:
        tensor = tensors.get(expected.name)
        if tensor is None:
            raise LayoutError(
                f"live tensor {expected.name!r} was there when the layout was probed and is gone now; "
                "connect again after changing the model",
                tensor=expected.name,
            )
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
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
        found.append(Buffer(local.data_ptr(), expected.span_numel * expected.dtype.itemsize))
    return tuple(found)
