"""Loading and naming the live tensors of a module whose parameters may be DTensors.

Every rank is given full checkpoint tensors, one at a time, and keeps its own shard. Nothing is communicated: which
shard is a rank's own is what its DTensor's placements say (`distribute_tensor(..., src_data_rank=None)`), so that ranks
may load at different moments and from different sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from weightbridge.errors import SpecError
from weightbridge.probe import NamedTensors, discover_tensors

__all__ = ["LoadWeights", "Tensors", "load_weights_fn", "tensors_fn"]

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
"""What an adapter calls to load: it drains an iterable of (checkpoint name, full tensor)."""

Tensors = Callable[[], NamedTensors]
"""What an adapter calls to see a worker's memory: name -> local tensor, each storage once, buffers marked."""


def load_weights_fn(module: nn.Module) -> LoadWeights:
    """A loader that copies checkpoint tensors into `module` in place, by parameter or buffer name.

    The loader takes an iterable of (name, full tensor of the global shape), in any order and in any number of calls;
    values are cast by `copy_`. It runs on every rank, is no collective and keeps no reference to what it is given.
    It raises SpecError for a name the module lacks or a shape that differs.
    """

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        targets = _targets(module)
        with torch.no_grad():
            for name, full in tensors:
                _copy_own_shard(_target(targets, name, module), name, full)

    return load_weights


def tensors_fn(module: nn.Module) -> Tensors:
    """A callable that names the module's live tensors as this rank holds them; see `weightbridge.probe.discover_tensors`.

    It is no collective. It reads the module anew each time, so storage that was rebound is seen; two names of one
    storage (tied weights) appear once; buffers are told apart from parameters, whose every element must be loaded.
    """
    return partial(discover_tensors, module)


def _targets(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every name a checkpoint may use for a tensor of the module, tied names included."""
    targets: dict[str, torch.Tensor] = dict(module.named_buffers(remove_duplicate=False))
    targets.update(module.named_parameters(remove_duplicate=False))
    return targets


def _target(targets: dict[str, torch.Tensor], name: str, module: nn.Module) -> torch.Tensor:
    found = targets.get(name)
    if found is None:
        raise SpecError(
            f"checkpoint tensor {name!r} is no parameter or buffer of {type(module).__name__}, which has {len(targets)} "
            f"of them; leave it out of the checkpoint or load it by a loader that knows the name",
            tensor=name,
        )
    return found


def _copy_own_shard(target: torch.Tensor, name: str, full: torch.Tensor) -> None:
    if tuple(full.shape) != tuple(target.shape):
        raise SpecError(
            f"checkpoint tensor {name!r} has shape {tuple(full.shape)} and the module expects {tuple(target.shape)}; "
            f"the checkpoint belongs to another model or is already sharded",
            tensor=name,
        )
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    own = distribute_tensor(full.detach(), target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(own.to_local())
