"""Hugging Face transformers models, plain or tensor-parallel (`tp_plan="auto"`), as trainers or rollout workers.

A tensor-parallel model holds DTensors, so each rank keeps its own shard of the full tensors it is given. Some
architectures are fused in memory and not on disk (mixture-of-experts: three tensors an expert in the files, two for all
experts in the model). Their names are converted by transformers' own conversion mapping, one fused parameter at a time,
and the result is copied into the parameter that exists: transformers itself would put new storage in its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from weightbridge.errors import SpecError
from weightbridge.integrations import dtensor
from weightbridge.integrations.dtensor import LoadWeights, Tensors
from weightbridge.probe import local_tensor

__all__ = ["cache_argument", "checkpoint_names", "load_weights_fn", "tensors_fn"]


def load_weights_fn(model: nn.Module) -> LoadWeights:
    """A loader that takes the names of the model's files, or of its parameters, and copies in place.

    Tensors that are parameters under their own or a renamed name are copied one at a time; see
    `weightbridge.integrations.dtensor.load_weights_fn`. Those that are fused in memory are kept until all of one
    parameter have come in the same call, in any order, then converted and copied. It is no collective. It raises SpecError
    for a name the model lacks, a shape that differs, and a fused parameter of which a part is missing.
    """
    return _Loader(model).load


def tensors_fn(model: nn.Module) -> Tensors:
    """A callable that names this rank's live tensors.

    Buffers that no checkpoint holds (rotary frequencies) are among them: the probe reports them as never written,
    which is right, because an update must leave them alone.
    """
    return dtensor.tensors_fn(model)


def checkpoint_names(model: nn.Module) -> tuple[str, ...]:
    """The model's parameters, tied ones once, and its persistent buffers: what a checkpoint holds of a model whose
    parameters are not fused."""
    parameters = [name for name, _ in model.named_parameters()]
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(parameters)
    kept = set(model.state_dict().keys()) - set(parameters) - tied
    return (*parameters, *(name for name, _ in model.named_buffers() if name in kept))


def cache_argument(model: nn.Module) -> str:
    """The name this version's `forward` has for its key-value cache, which is also the name in its output."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class _Loader:
    """One model's loader. Nothing is kept between two calls."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._copy = dtensor.load_weights_fn(model)
        self._mapping: list[Any] = list(get_model_conversion_mapping(model)) if hasattr(model, "config") else []
        self._converters = [m for m in self._mapping if isinstance(m, WeightConverter)]
        self._renamings = [m for m in self._mapping if isinstance(m, WeightRenaming)]

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._copy(self._whole_parameters(tensors))

    def _whole_parameters(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """(parameter, full tensor) of what needs no conversion; the rest is converted and copied on the way."""
        state = self._model.state_dict()
        pending: dict[str, dict[str, torch.Tensor]] = {}
        for name, full in tensors:
            target, is_part = self._target(name, state)
            if not is_part:
                yield target, full
                continue
            parts = pending.setdefault(target, {})
            parts[name] = full
            if sum(part.numel() for part in parts.values()) == state[target].numel():
                self._convert(target, pending.pop(target))
        for target, parts in pending.items():
            self._convert(target, parts)

    def _target(self, name: str, state: dict[str, Any]) -> tuple[str, bool]:
        """(parameter, whether `name` has to be converted together with others to become it)."""
        if name in state:
            return name, False
        prefix = getattr(self._model, "base_model_prefix", None)
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, state)
        return (target, pattern is not None) if target in state else (name, False)

    def _convert(self, target: str, parts: dict[str, torch.Tensor]) -> None:
        """Let transformers make parameters of `parts` (checkpoint names), then copy them into those that were there."""
        with _storage_kept(self._model), _no_progress_bar():
            info, _ = convert_and_load_state_dict_in_model(
                self._model, parts, LoadStateDictConfig(weight_mapping=self._mapping)
            )
        wrong = [*info.mismatched_keys, *info.unexpected_keys, *info.conversion_errors.items(), *info.error_msgs]
        if wrong:
            raise SpecError(
                f"parameter {target!r} of {type(self._model).__name__} cannot be made of {len(parts)} checkpoint tensors "
                f"({min(parts)!r} to {max(parts)!r}): {wrong[0]}; give all tensors it consists of, in one call",
                tensor=target,
            )


@contextmanager
def _storage_kept(model: Any) -> Iterator[None]:
    """Whatever parameters are replaced meanwhile: their values go into the old ones, which take their places again."""
    places = [
        (part, name, parameter)
        for part in model.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
    ]
    conversions = getattr(model, "_weight_conversions", None)  # what a later save_pretrained reverts
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, parameter in places:
                made = getattr(part, name)
                if made is not parameter:
                    local_tensor(parameter).copy_(local_tensor(made))
                    setattr(part, name, parameter)
        model._weight_conversions = conversions


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws one for each call, here for each fused parameter."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
