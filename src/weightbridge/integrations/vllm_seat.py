"""One vLLM worker's place in a session: joining, polling, leaving, and what it says of itself.

Used by both ways into an engine, the worker extension (`weightbridge.integrations.vllm`) and the weight transfer backend
(`weightbridge.integrations.vllm_backend`). Everything here runs on the worker's own thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from weightbridge.checkpoint import spec_from_folder
from weightbridge.coordinator import Options, ReceiverAdapter
from weightbridge.errors import IncompleteUpdateError, UnsupportedError, UsageError, WeightBridgeError
from weightbridge.integrations.vllm_weights import EngineWeights

__all__ = ["PREFIX_CACHE", "JoinSettings", "WorkerSeat", "join", "joined", "leave", "poll", "seat_of", "status"]

PREFIX_CACHE = ("reset", "salt", "none")
"""What may become of cached prefixes when a version is installed; the first is what happens unless told otherwise."""

_PREFIX = "WEIGHTBRIDGE_"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """What an engine needs to join. Each field can come from the environment: WEIGHTBRIDGE_ENDPOINT and so on.

    endpoint: the trainers', tcp://HOST:PORT; empty: do not join. engine: this engine's name in the job. node: name of this
    machine, default the engine's name. checkpoint: a folder with the spec of what trainers send, default the folder the engine
    was started from. token: the job's shared secret, as text. prefix_cache: one of PREFIX_CACHE. options: fields of Options;
    in the environment a JSON object.
    """

    endpoint: str = ""
    engine: str = "engine"
    node: str = ""
    checkpoint: str = ""
    token: str = field(default="", repr=False)
    prefix_cache: str = PREFIX_CACHE[0]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prefix_cache not in PREFIX_CACHE:
            raise UsageError(
                f"prefix_cache (or {_PREFIX}PREFIX_CACHE) must be one of {', '.join(PREFIX_CACHE)}, "
                f"got {self.prefix_cache!r}"
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, **given: Any) -> JoinSettings:
        """The environment's, overruled by what is given and not empty. Raises UsageError for what cannot be read."""
        found: dict[str, Any] = {}
        for name in (f.name for f in fields(cls)):
            value = environ.get(_PREFIX + name.upper(), "")
            if value:
                found[name] = _options(value) if name == "options" else value
        return cls(**found | {name: value for name, value in given.items() if value})

    def session_options(self) -> Options:
        """Options with the token in it. Raises UsageError for a field that there is not, or that vLLM cannot have."""
        try:
            chosen = Options(**self.options)
        except TypeError as error:
            raise UsageError(f"options of the engine {self.engine!r}: {error}; see weightbridge.Options") from None
        if chosen.idle_install:
            raise UsageError(
                "idle_install is not for vLLM: what a step computes is decided before the worker's step lock would be taken. "
                "An idle engine is woken (backend), or updated by collective_rpc('weightbridge_poll') (worker extension)"
            )
        return replace(chosen, token=self.token.encode()) if self.token else chosen


def _options(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{_PREFIX}OPTIONS is not JSON: {error}; give an object of fields of Options") from None
    if not isinstance(found, dict):
        raise UsageError(f"{_PREFIX}OPTIONS must be a JSON object of fields of Options, got {text!r}")
    for name in ("transports", "expected_untouched", "expected_unused"):
        if name in found:
            found[name] = tuple(found[name]) if name == "transports" else frozenset(found[name])
    return found


class WorkerSeat:
    """What a worker keeps between calls; `worker._weightbridge`.

    failure: why it polls no more, or, an IncompleteUpdateError, why it must not serve; it polls on then, a later version can
    make it whole.
    """

    def __init__(self, worker: Any) -> None:
        """The engine must be idle: what each layer does with its weights is tried out. Raises UnsupportedError."""
        self.weights = EngineWeights(worker.model_runner.get_model(), worker.vllm_config)
        self.settings = JoinSettings()
        self.options = Options()
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
        """Poll, and finish what an update began: True then. A failed session ends here, and the engine serves on.

        Raises IncompleteUpdateError while the engine holds the halves of two versions.
        """
        if self.receiver is None or (self.failure is not None and not isinstance(self.failure, IncompleteUpdateError)):
            return False
        try:
            if not self.receiver.poll_requests():
                return False
        except WeightBridgeError as error:
            self.failure = error
            if isinstance(error, IncompleteUpdateError):
                raise
            return False
        self.failure = None
        self.weights.renew()
        for cache in ("reset_mm_cache", "reset_encoder_cache"):
            getattr(worker.model_runner, cache, lambda: None)()
        return True


def seat_of(worker: Any) -> WorkerSeat | None:
    """The worker's seat, None before it has joined a session."""
    seat: WorkerSeat | None = getattr(worker, "_weightbridge", None)
    return seat


def joined(worker: Any) -> bool:
    """Whether the worker is in a session, or was in one that has failed and has not left it."""
    seat = seat_of(worker)
    return seat is not None and seat.receiver is not None


def join(worker: Any, settings: JoinSettings, on_request: Callable[[], None] | None = None) -> WorkerSeat:
    """Join a session, in the background from here on. The engine must be idle. on_request: as for ReceiverAdapter.

    Raises UsageError, UnsupportedError, SpecError.
    """
    seat = seat_of(worker)
    if joined(worker):
        raise UsageError("this engine has joined a session before; let it leave that one first")
    if seat is not None and isinstance(seat.failure, IncompleteUpdateError):
        raise UsageError("this engine holds the halves of two versions since its last session failed; start it anew")
    if not settings.endpoint:
        raise UsageError(f"no endpoint to join: give endpoint, or set {_PREFIX}ENDPOINT, as tcp://HOST:PORT")
    options = settings.session_options()
    spec = spec_from_folder(settings.checkpoint or _own_folder(worker))
    seat = worker._weightbridge = seat or WorkerSeat(worker)
    seat.failure, seat.settings, seat.options = None, settings, options
    group = import_module("vllm.distributed.parallel_state").get_world_group()
    seat.receiver = ReceiverAdapter(
        group=(group.rank_in_group, group.world_size), endpoint=settings.endpoint, checkpoint=spec,
        load_weights=seat.weights.load_weights, tensors=seat.weights.tensors, engine=settings.engine, node=settings.node,
        options=options, on_request=on_request,
    )  # fmt: skip
    return seat


def poll(worker: Any) -> bool:
    """One poll; True when a version was installed. Raises what has ended the session, and UsageError without one."""
    seat = seat_of(worker)
    if seat is None or seat.receiver is None:
        raise UsageError("this worker is in no session; it has to join one first")
    updated = seat.poll(worker)
    if seat.failure is not None:
        raise seat.failure
    return updated


def leave(worker: Any) -> None:
    """Leave the session; the engine serves on with the weights it has. Nothing happens without a session."""
    seat = seat_of(worker)
    if seat is not None and seat.receiver is not None:
        seat.receiver.close()
        seat.receiver = None


def status(worker: Any, call: Callable[[], Any] = lambda: None) -> dict[str, Any]:
    """Make the call and say how the worker is; raises nothing: an exception in a worker's RPC leaves stale answers behind.

    ok, error (text, empty when ok), updated (a version was installed), state and version (of the receiver), requested (polls
    are waited for).
    """
    error, updated = "", False
    try:
        updated = call() is True
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    seat = seat_of(worker)
    receiver = seat.receiver if seat is not None else None
    over = seat is None or (seat.failure is not None and not isinstance(seat.failure, IncompleteUpdateError))
    return {
        "ok": not error, "error": error, "updated": updated,
        "state": receiver.state if receiver is not None else "none",
        "version": receiver.version if receiver is not None else -1,
        "requested": receiver is not None and not over and receiver.requested,
    }  # fmt: skip


def _own_folder(worker: Any) -> Path:
    """The folder the engine was started from, also where the model was given by name and lies in the local cache."""
    model = worker.vllm_config.model_config
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    try:
        hub = import_module("huggingface_hub")
        return Path(hub.snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception as error:
        raise UsageError(
            f"there is no folder for the model {model.model!r} here ({type(error).__name__}); give checkpoint, or set "
            f"{_PREFIX}CHECKPOINT, to a folder in safetensors format with the names, shapes and dtypes that trainers send"
        ) from error
