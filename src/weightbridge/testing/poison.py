"""Memory full of NaN, for the contract of a loader: live tensors, tensors it was given, uninitialised and freed memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from weightbridge.layout.source_map import LiveTensor
from weightbridge.probe.live import local_tensor
from weightbridge.probe.observe import fill_sentinel, sentinel_bits

__all__ = ["is_poison", "poison_live", "poison_tensor", "poisoned_memory"]

_PASS = 1  # the sentinel with all bits set: a NaN in every float format
_SCRATCH_BYTES = 64 << 20  # of freed memory that is poisoned


def poison_live(described: Mapping[str, LiveTensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite every element of the live tensors."""
    for name, tensor in described.items():
        fill_sentinel(local_tensor(tensors[name]), tensor.dtype, _PASS)


def is_poison(bits: torch.Tensor, tensor: LiveTensor) -> torch.Tensor:
    """[shape] bool: which elements hold what `poison_live` wrote. bits: as `Snapshot.bits` gives them."""
    itemsize = tensor.dtype.itemsize
    poison = sentinel_bits(tensor.dtype, _PASS)
    # Wider integers are signed there, single bytes are not.
    return bits == (poison - (1 << 8 * itemsize) if itemsize > 1 else poison)


def poison_tensor(tensor: torch.Tensor) -> None:
    """Every byte of the tensor's storage 0xff."""
    storage: Any = tensor.untyped_storage()
    storage.fill_(0xFF)


@contextmanager
def poisoned_memory(tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """`torch.empty` and its like give NaN inside, and freed blocks of the sizes of these tensors hold it."""
    freed, budget = [], _SCRATCH_BYTES
    for tensor in tensors.values():
        if tensor.numel() and tensor.nbytes <= budget:
            budget -= tensor.nbytes
            freed.append(torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device))
    for block in freed:
        poison_tensor(block)
    freed.clear()
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # algorithms that are not deterministic say so; nobody asked for that here
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled
