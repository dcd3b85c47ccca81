"""vLLM engines as rollout workers, through vLLM's own extension points: no fork, no patch.

    LLM(model, worker_extension_cls="weightbridge.integrations.vllm.WorkerExtension")
    llm.collective_rpc("weightbridge_join", kwargs={"endpoint": ..., "engine": "a", "checkpoint": folder})

From then on each worker polls before every step of the engine, and takes a new version in between two steps. An engine that
has no requests makes no steps: call `llm.collective_rpc("weightbridge_poll")` while it idles. The rest: docs/guides/vllm.md.

`EngineWeights` is what makes it right: vLLM prepares weights for its kernels after loading, and `model.load_weights` alone does
not (see `weightbridge.integrations.vllm_layers`). vLLM is imported when an engine is there, never before.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from importlib import import_module
from typing import Any

import torch
from torch import nn

from weightbridge.checkpoint import spec_from_folder
from weightbridge.coordinator import Options, ReceiverAdapter
from weightbridge.errors import IncompleteUpdateError, UnsupportedError, UsageError, WeightBridgeError
from weightbridge.integrations.vllm_layers import HIDDEN, PreparedLayer, attention_derives, prepared_layers
from weightbridge.probe import NamedTensors, discover_tensors

__all__ = ["EngineWeights", "WorkerExtension"]


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


class WorkerExtension:
    """Mixed into vLLM's worker by `worker_extension_cls`; each method is called by `collective_rpc`, on every worker.

    Every method returns a status and raises nothing: an exception in a worker's RPC leaves stale answers behind. The status
    is a dict: ok, error (text, empty when ok), state and version (of the receiver), updated (a version was installed).
    """

    def weightbridge_join(
        self, endpoint: str, engine: str, checkpoint: str, node: str = "", options: dict[str, Any] | None = None,
        poll_in_steps: bool = True,
    ) -> dict[str, Any]:  # fmt: skip
        """Join a session in the background. Call it while the engine has no requests.

        endpoint, engine, node: as for ReceiverAdapter. checkpoint: a folder with the spec of what trainers send. options:
        fields of Options. poll_in_steps: poll before every step; else only in weightbridge_poll.
        """
        return _status(self, lambda: _join(self, endpoint, engine, checkpoint, node, options or {}, poll_in_steps))

    def weightbridge_poll(self) -> dict[str, Any]:
        """One poll between two steps: what an engine without requests calls, now and then. Blocks while it is updated."""
        return _status(self, lambda: _polled(self))

    def weightbridge_status(self) -> dict[str, Any]:
        """The status alone: no poll, nothing waits."""
        return _status(self, lambda: False)

    def weightbridge_leave(self) -> dict[str, Any]:
        """Leave the session; the engine serves on with the weights it has."""
        return _status(self, lambda: _leave(self))


class _Seat:
    """What a worker keeps between calls; `worker._weightbridge`."""

    def __init__(self, worker: Any) -> None:
        self.weights = EngineWeights(worker.model_runner.get_model(), worker.vllm_config)
        self.receiver: ReceiverAdapter | None = None
        self.polls_in_steps = False
        self.failure: WeightBridgeError | None = None
        checkpoint = self.weights.started_from()
        changed = self.weights.adopt(checkpoint) if checkpoint is not None else ()
        if changed:
            raise UnsupportedError(
                f"loading the engine's own checkpoint again changes {len(changed)} of its tensors, {changed[0]!r} among them: "
                "this engine's weights are not what its loader makes of a checkpoint. Start it anew, and report the model "
                "and the version of vLLM"
            )

    def poll(self, worker: Any) -> bool:
        """Poll, and finish what an update began. A failed session ends here, unless it left this engine's weights mixed."""
        if isinstance(self.failure, IncompleteUpdateError):
            raise self.failure
        if self.receiver is None or self.failure is not None:
            return False
        try:
            if not self.receiver.poll_requests():
                return False
        except WeightBridgeError as error:
            self.failure = error
            if isinstance(error, IncompleteUpdateError):
                raise
            return False
        self.weights.renew()
        for cache in ("reset_mm_cache", "reset_encoder_cache"):
            getattr(worker.model_runner, cache, lambda: None)()
        return True


def _join(
    worker: Any, endpoint: str, engine: str, checkpoint: str, node: str, options: dict[str, Any], poll_in_steps: bool
) -> bool:
    seat: _Seat | None = getattr(worker, "_weightbridge", None)
    if seat is not None and seat.receiver is not None:
        raise UsageError("weightbridge_join was called before; call weightbridge_leave first")
    if seat is not None and isinstance(seat.failure, IncompleteUpdateError):
        raise UsageError("this engine holds the halves of two versions since its last session failed; start it anew")
    chosen = Options(**options)
    if chosen.idle_install:
        raise UsageError(
            "idle_install is not for vLLM: an idle engine is updated by collective_rpc('weightbridge_poll')"
        )
    seat = worker._weightbridge = seat or _Seat(worker)
    seat.failure = None
    group = import_module("vllm.distributed.parallel_state").get_world_group()
    seat.receiver = ReceiverAdapter(
        group=(group.rank_in_group, group.world_size), endpoint=endpoint, checkpoint=spec_from_folder(checkpoint),
        load_weights=seat.weights.load_weights, tensors=seat.weights.tensors, engine=engine, node=node, options=chosen,
    )  # fmt: skip
    if poll_in_steps and not seat.polls_in_steps:
        seat.polls_in_steps = True
        execute_model = worker.execute_model

        def polling(*args: Any, **kwargs: Any) -> Any:
            seat.poll(worker)
            return execute_model(*args, **kwargs)

        worker.execute_model = polling
    return False


def _polled(worker: Any) -> bool:
    seat: _Seat | None = getattr(worker, "_weightbridge", None)
    if seat is None or seat.receiver is None:
        raise UsageError("this worker is in no session; call weightbridge_join first")
    updated = seat.poll(worker)
    if seat.failure is not None:
        raise seat.failure
    return updated


def _leave(worker: Any) -> bool:
    seat: _Seat | None = getattr(worker, "_weightbridge", None)
    if seat is not None and seat.receiver is not None:
        seat.receiver.close()
        seat.receiver = None
    return False


def _status(worker: Any, call: Callable[[], bool]) -> dict[str, Any]:
    error, updated = "", False
    try:
        updated = call()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seat: _Seat | None = getattr(worker, "_weightbridge", None)
    receiver = seat.receiver if seat is not None else None
    return {
        "ok": not error, "error": error, "updated": updated,
        "state": receiver.state if receiver is not None else "none",
        "version": receiver.version if receiver is not None else -1,
    }  # fmt: skip


def _digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest() if flat.numel() else b""
