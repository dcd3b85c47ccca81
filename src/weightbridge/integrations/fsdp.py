"""FSDP2 (`torch.distributed.fsdp.fully_shard`): a trainer's sharded parameters as load target and as source.

FSDP2 swaps a module's parameters between their sharded and their gathered form. Only the sharded form is the
training state, and after a forward without backward the root stays gathered: so everything here reshards first.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weightbridge.errors import UsageError
from weightbridge.integrations import dtensor
from weightbridge.integrations.dtensor import LoadWeights, Tensors
from weightbridge.probe import NamedTensors

__all__ = ["load_weights_fn", "reshard", "tensors_fn"]


def load_weights_fn(module: nn.Module) -> LoadWeights:
    """A loader for a module wrapped by `fully_shard`; see `weightbridge.integrations.dtensor.load_weights_fn`.

    Each rank copies its own shard out of the full tensors it is given, with no collective. The storage of the shards
    stays where it is, so an optimizer built on them goes on. Raises UsageError for a module that is not wrapped.
    """
    _require_fsdp(module)
    load = dtensor.load_weights_fn(module)

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        reshard(module)
        load(tensors)

    return load_weights


def tensors_fn(module: nn.Module) -> Tensors:
    """A callable that names this rank's shards (uneven ones without their padding) and buffers, aliases folded."""
    _require_fsdp(module)
    tensors = dtensor.tensors_fn(module)

    def sharded() -> NamedTensors:
        reshard(module)
        return tensors()

    return sharded


def reshard(module: nn.Module) -> None:
    """Put every FSDP2 module within `module` into its sharded form. No collective; a no-op when it is so already."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _require_fsdp(module: nn.Module) -> None:
    if not any(isinstance(part, FSDPModule) for part in module.modules()):
        raise UsageError(
            f"{type(module).__name__} holds no module wrapped by fully_shard; wrap it first, or use "
            f"weightbridge.integrations.dtensor for a plain module"
        )
