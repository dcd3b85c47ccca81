"""A worker's live tensors: naming them, describing them, and looking at their raw bits as two-dimensional fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from weightbridge.checkpoint.dtypes import DType, dtype_of_torch_name
from weightbridge.errors import ProbeError, SpecError
from weightbridge.layout.source_map import LiveTensor
from weightbridge.probe.fields import memory_order

__all__ = [
    "NamedTensors",
    "discover_tensors",
    "distinct_elements",
    "live_tensors",
    "local_tensor",
    "raw_bits",
    "to_numpy_bits",
]

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NamedTensors(dict[str, torch.Tensor]):
    """Live tensors by name, with the names of those that are no parameters. A plain dict otherwise.

    buffers: names whose elements the loader need not write. In any other mapping every tensor counts as a parameter: a
    gap is then an error rather than a guess.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] = (),
        *,
        buffers: Iterable[str] = (),
    ) -> None:
        super().__init__(tensors)
        self.buffers = frozenset(buffers)


def discover_tensors(module: nn.Module) -> NamedTensors:
    """Every tensor a module holds on this worker: parameters, buffers, and tensors kept as plain attributes.

    Plain attributes count one level deep in lists, tuples and dicts too. Names are dotted paths; tensors that are the
    same storage, offset, shape and strides appear once, under the first name (parameters first). DTensors are replaced by
    their local part. Attributes on the meta device are left out. Reads nothing, no collective.
    """
    found, buffers, seen = NamedTensors(), set(), set()
    for kind, name, tensor in _walk(module):
        local = local_tensor(tensor)
        key = (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride())
        if name in found or (local.numel() and key in seen) or (kind == "attribute" and local.device.type == "meta"):
            continue
        seen.add(key)
        found[name] = local
        if kind != "parameter":
            buffers.add(name)
    found.buffers = frozenset(buffers)
    return found


def _walk(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    yield from (("parameter", n, t) for n, t in module.named_parameters())
    yield from (("buffer", n, t) for n, t in module.named_buffers())
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for attribute, value in vars(part).items():
            if attribute in {"_parameters", "_buffers", "_modules"} or attribute.endswith("_hooks"):
                continue
            if isinstance(value, torch.Tensor):
                yield "attribute", prefix + attribute, value
            elif isinstance(value, (list, tuple)):
                yield from (
                    ("attribute", f"{prefix}{attribute}.{i}", t)
                    for i, t in enumerate(value)
                    if isinstance(t, torch.Tensor)
                )
            elif isinstance(value, dict):
                yield from (
                    ("attribute", f"{prefix}{attribute}.{k}", t)
                    for k, t in value.items()
                    if isinstance(t, torch.Tensor)
                )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This worker's part of a tensor, detached: `to_local()` of a DTensor, else the tensor. Shares its storage."""
    detached = tensor.detach()
    to_local: Any = getattr(detached, "to_local", None)
    return to_local().detach() if to_local is not None else detached


def live_tensors(tensors: Mapping[str, torch.Tensor]) -> tuple[LiveTensor, ...]:
    """Descriptions of live tensors, in the mapping's order. Reads no values, no collective.

    A tensor is a parameter unless `tensors` is a `NamedTensors` that lists it in `buffers`. Raises ProbeError for a
    tensor whose elements overlap, that has no memory (meta, sparse), or whose dtype is not known.
    """
    buffers: frozenset[str] = getattr(tensors, "buffers", frozenset())
    described = []
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        if local.layout != torch.strided or local.device.type == "meta":
            raise ProbeError(
                f"live tensor {name!r} has layout {local.layout} on {local.device}; expected a strided tensor in memory. "
                "Leave it out of `tensors`, or connect when the model is materialised",
                tensor=name,
            )
        try:
            dtype = dtype_of_torch_name(str(local.dtype))
        except SpecError as error:
            raise ProbeError(f"live tensor {name!r}: {error.message}; leave it out of `tensors`", tensor=name) from None
        live = LiveTensor(
            name=name,
            shape=tuple(local.shape),
            strides=tuple(local.stride()),
            dtype=dtype,
            parameter=name not in buffers,
        )
        memory_order(live)
        described.append(live)
    return tuple(described)


def distinct_elements(local: torch.Tensor) -> torch.Tensor:
    """The tensor without its expanded dims (stride 0), so that each element in memory occurs once."""
    if 0 not in local.stride():
        return local
    return local[
        tuple(
            slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in zip(local.shape, local.stride(), strict=True)
        )
    ]


def raw_bits(local: torch.Tensor, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """A strided window over a local tensor's storage, as integers of the same size. Offsets from its first element."""
    bits = local.view(_SIGNED[local.element_size()]) if local.dtype != _SIGNED[local.element_size()] else local
    return torch.as_strided(bits, shape, strides, bits.storage_offset() + start)


def to_numpy_bits(window: torch.Tensor, dtype: DType) -> npt.NDArray[Any]:
    """The window's raw bits as unsigned integers; a view of the memory itself where it is host memory."""
    host = window if window.device.type == "cpu" else window.cpu()
    array: npt.NDArray[Any] = (
        host.numpy().view(dtype.bits) if prod(host.shape) else np.zeros(tuple(host.shape), dtype.bits)
    )
    return array
