"""The weights of one vLLM worker: what an adapter loads, sees, and has to do after an update.

vLLM prepares weights for its kernels after loading, and `model.load_weights` alone does not: see
`weightbridge.integrations.vllm_layers`. vLLM is imported when an engine is there, never before.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from typing import Any

import torch
from torch import nn

from weightbridge.errors import UnsupportedError
from weightbridge.integrations.vllm_layers import HIDDEN, PreparedLayer, attention_derives, prepared_layers
from weightbridge.probe import NamedTensors, discover_tensors

__all__ = ["EngineWeights"]


class EngineWeights:
    """The weights of one vLLM worker: what an adapter loads, sees, and has to do after an update.

    `load_weights` and `tensors` are what a ReceiverAdapter takes. After `poll_requests` has returned True, and before the next
    step, call `renew`: layers whose weights lie inside the kernel library are made anew from what arrived.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        """model: the worker's (`worker.model_runner.get_model()`), loaded. vllm_config: `worker.vllm_config`.

        Runs the preparation of each layer once, on random weights, and puts everything back: the engine must be idle. Raises
        UnsupportedError for a model that derives further state from its weights (a model-wide hook, attention that absorbs
        projections), naming it.
        """
        self._model = model
        self._config = vllm_config
        if hasattr(model, "process_weights_after_loading"):
            raise UnsupportedError(
                f"{type(model).__name__} derives state from its weights in a hook of the whole model, which cannot be repeated "
                "in place; this model is not supported on vLLM"
            )
        with self._configured():
            self.layers: list[PreparedLayer] = prepared_layers(model)
            self._refuse_deriving_attention()

    @property
    def kinds(self) -> dict[str, int]:
        """How many layers are plain, packed and hidden."""
        return dict(Counter(layer.kind for layer in self.layers))

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The engine's own loader, to the end: packed layers are packed again, in place, and hidden ones staged.

        All tensors of a packed layer must come in one call. A hidden layer's kernel keeps its old weights until `renew`.
        """
        with self._configured(), torch.no_grad(), ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(layer.loading())
            self._model.load_weights(tensors)  # type: ignore[operator]

    def tensors(self) -> NamedTensors:
        """The live tensors: parameters, buffers and plain attributes, and for hidden weights their stage under their name.

        KV caches are left out, they are no weights.
        """
        staged = {f"{x.name}.{n}": p for x in self.layers if x.kind == HIDDEN for n, p in x.stage.items()}
        found = discover_tensors(self._model)
        caches = tuple(f"{n}." for n, m in self._model.named_modules() if hasattr(m, "get_kv_cache_spec"))
        registered = {n for n, _ in self._model.named_parameters()} | {n for n, _ in self._model.named_buffers()}
        kept = {n: t for n, t in found.items() if n not in staged and (n in registered or not n.startswith(caches))}
        return NamedTensors({**kept, **staged}, buffers=found.buffers & kept.keys())

    def renew(self) -> None:
        """After an update, before the engine steps: bring what kernels hide up to date. Blocks; makes no collective."""
        with self._configured(), torch.no_grad():
            for layer in self.layers:
                layer.renew()

    def adopt(self, checkpoint: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
        """Load the checkpoint the engine already holds; the names of live tensors that this changes, which should be none.

        It fills the stages of hidden layers, and proves that loading here does what the engine's own start did: a layer that
        is silently left in another form shows. Call it once, before any update.
        """
        staged = {f"{x.name}.{n}" for x in self.layers if x.kind == HIDDEN for n in x.stage}
        before = {n: _digest(t) for n, t in self.tensors().items() if n not in staged}
        self.load_weights(checkpoint)
        return tuple(n for n, t in self.tensors().items() if n not in staged and _digest(t) != before[n])

    def started_from(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """The checkpoint this engine was started from, as vLLM reads it; None where its loader has none (dummy weights)."""
        loaders = import_module("vllm.model_executor.model_loader")
        loader = loaders.get_model_loader(self._config.load_config)
        if not hasattr(loader, "get_all_weights"):
            return None
        weights: Iterable[tuple[str, torch.Tensor]] = loader.get_all_weights(self._config.model_config, self._model)
        return weights

    def _configured(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = import_module("vllm.config").set_current_vllm_config(self._config)
        return context

    def _refuse_deriving_attention(self) -> None:
        deferred = import_module("vllm.model_executor.layers.attention").is_deferred_attention_layer
        for name, module in self._model.named_modules():
            if not deferred(module):
                continue
            derived = attention_derives(module, self._config.model_config.dtype)
            if derived is not None:
                raise UnsupportedError(
                    f"attention layer {name!r} keeps {derived!r}, made of weights after loading, which an update would leave "
                    "as it is; this kind of attention is not supported on vLLM"
                )


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest() if flat.numel() else b""
