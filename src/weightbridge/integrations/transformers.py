"""Hugging Face transformers models, plain or tensor-parallel (`tp_plan="auto"`), as rollout workers.

A tensor-parallel model holds DTensors, so each rank keeps its own shard of the full tensors it is given. Checkpoint
names are the model's parameter names; architectures whose parameters are fused in memory but not on disk
(mixture-of-experts) need a loader that knows the fusion and are refused by name.
"""

from __future__ import annotations

import inspect

from torch import nn

from weightbridge.integrations import dtensor
from weightbridge.integrations.dtensor import LoadWeights, Tensors

__all__ = ["cache_argument", "checkpoint_names", "load_weights_fn", "tensors_fn"]


def load_weights_fn(model: nn.Module) -> LoadWeights:
    """A loader for a transformers model; see `weightbridge.integrations.dtensor.load_weights_fn`. In place."""
    return dtensor.load_weights_fn(model)


def tensors_fn(model: nn.Module) -> Tensors:
    """A callable that names this rank's live tensors.

    Buffers that no checkpoint holds (rotary frequencies) are among them: the probe reports them as never written,
    which is right, because an update must leave them alone.
    """
    return dtensor.tensors_fn(model)


def checkpoint_names(model: nn.Module) -> tuple[str, ...]:
    """The names a checkpoint of this model holds: its parameters, tied ones once, and its persistent buffers."""
    parameters = [name for name, _ in model.named_parameters()]
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(parameters)
    kept = set(model.state_dict().keys()) - set(parameters) - tied
    return (*parameters, *(name for name, _ in model.named_buffers() if name in kept))


def cache_argument(model: nn.Module) -> str:
    """The name this version's `forward` has for its key-value cache, which is also the name in its output."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
