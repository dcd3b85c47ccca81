"""SGLang servers as rollout workers, through SGLang's own plugins: no fork, nothing copied.

SGLang calls every plugin of the entry point group "sglang.srt.plugins" in each process it starts. `plugin` is one: it puts a
poll before each round of the scheduler, on every worker. The scheduler goes its rounds while it has no requests too, so an idle
engine is updated like a busy one. What to join, a server is told by the variables that vLLM engines have too:

    WEIGHTBRIDGE_ENDPOINT=tcp://10.0.0.1:29700 WEIGHTBRIDGE_ENGINE=a python -m sglang.launch_server ...

A server without an endpoint is left alone. Importing this module imports torch and no SGLang. See docs/guides/sglang.md.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from weightbridge.checkpoint import CheckpointSpec, spec_from_folder
from weightbridge.coordinator import Options, ReceiverAdapter
from weightbridge.errors import IncompleteUpdateError, UsageError, WeightBridgeError
from weightbridge.integrations.dtensor import LoadWeights, tensors_fn

__all__ = ["SchedulerSeat", "load_weights_fn", "plugin", "tensors_fn"]

_PREFIX = "WEIGHTBRIDGE_"
_ROUND = "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run"
_LOG = logging.getLogger(__name__)


def plugin() -> None:
    """Entry point of the group sglang.srt.plugins. Hooks the scheduler's rounds when WEIGHTBRIDGE_ENDPOINT is set.

    Also read: WEIGHTBRIDGE_ENGINE, _CHECKPOINT (a folder, default the model's), _NODE, _TOKEN, _OPTIONS (a JSON object of
    fields of Options). Raises UsageError for options that cannot be read.
    """
    told = _told()
    if not told:
        return
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")

    def before_round(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        seat = scheduler.__dict__.get("_weightbridge")
        if seat is None:
            seat = scheduler._weightbridge = SchedulerSeat(scheduler, **told)
        seat.poll()

    hooks.HookRegistry.register(_ROUND, before_round, hooks.HookType.BEFORE)


def load_weights_fn(model: nn.Module) -> LoadWeights:
    """The loader of an SGLang model: its own `load_weights`, of which the result is of no interest here."""

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            model.load_weights(tensors)  # type: ignore[operator]

    return load_weights


class SchedulerSeat:
    """What one scheduler process keeps: its receiver, and prefixes that still have to go."""

    def __init__(
        self, scheduler: Any, *, endpoint: str, engine: str = "engine", checkpoint: str | CheckpointSpec = "", node: str = "",
        token: str = "", options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Join in the background. scheduler: SGLang's, its model loaded; `tp_worker.model_runner` is where the model is.

        The other arguments are ReceiverAdapter's; checkpoint: a spec or a folder, default the folder the model is from. token:
        Options.token as text. Raises UsageError for options that cannot be.
        """
        chosen = Options(**{**(options or {}), **({"token": token.encode()} if token else {})})
        if chosen.idle_install:
            raise UsageError("idle_install is not for SGLang: its scheduler polls while it idles")
        runner = scheduler.tp_worker.model_runner
        group = import_module("sglang.srt.distributed.parallel_state").get_world_group()
        if isinstance(checkpoint, str):
            checkpoint = spec_from_folder(checkpoint or runner.model_config.model_path)
        self._scheduler, self._device = scheduler, str(runner.device)
        self._stale = False
        self.failure: WeightBridgeError | None = None
        self.receiver = ReceiverAdapter(
            group=(group.rank_in_group, group.world_size), endpoint=endpoint, engine=engine, node=node,
            checkpoint=checkpoint,
            load_weights=load_weights_fn(runner.model), tensors=tensors_fn(runner.model), options=chosen,
            before_update_hook=lambda version: self._stand_still(),
        )  # fmt: skip

    def poll(self) -> bool:
        """Before a round of the scheduler, on every worker. True when a new version is in place.

        A session that fails ends here and the engine serves on; the error is logged and kept in `failure`. Raises
        IncompleteUpdateError while the weights are a mixture of two versions: the scheduler must not go on.
        """
        updated = False
        if self.failure is None:
            try:
                updated = self.receiver.poll_requests()
            except IncompleteUpdateError:
                raise
            except WeightBridgeError as error:
                self.failure = error
                _LOG.error("weightbridge: this engine stays at version %d: %s", self.receiver.version, error)
        if updated:
            self._scheduler.record_weight_version_change(str(self.receiver.version))
        self._stale = self._stale or updated
        if self._stale:  # SGLang keeps its cache while requests run: it is asked again in every round until it is idle
            self._stale = not self._flush()
        return updated

    def _flush(self) -> bool:
        scheduler = self._scheduler
        return bool(scheduler.is_fully_idle() and scheduler.flush_cache())

    def _stand_still(self) -> None:
        """With overlapped scheduling the last batch may still be computing on the device: let it end."""
        if self._device != "cpu":
            torch.get_device_module(self._device).synchronize()


def _told() -> dict[str, Any]:
    """The arguments of a seat that the environment has; empty without an endpoint."""
    names = ("endpoint", "engine", "checkpoint", "node", "token", "options")
    told: dict[str, Any] = {n: v for n in names if (v := os.environ.get(_PREFIX + n.upper(), ""))}
    if "endpoint" not in told:
        return {}
    if "options" in told:
        try:
            told["options"] = json.loads(told["options"])
        except ValueError as error:
            raise UsageError(f"{_PREFIX}OPTIONS is no JSON: {error}; give an object of fields of Options") from None
        if not isinstance(told["options"], dict):
            raise UsageError(f"{_PREFIX}OPTIONS must be a JSON object of fields of Options, got {told['options']!r}")
    return told
