"""WeightBridge in vLLM's engine core: it polls all workers between two steps, and does what a new version means there.

The engine core schedules, the workers compute. What a step computes, and which cached prefixes it uses, is settled before the
workers see it, with asynchronous scheduling a whole step earlier. A version that workers put in by themselves just before a
step, or while they idle, would thus meet steps that were scheduled for the old one. So the core decides:

    a worker whose control thread hears that polls are waited for wakes the core (a datagram);
    the core lets steps in flight end, starts no other, and calls `poll` on all workers by RPC: they make the same polls,
    in the same order as their steps, until the session wants no more of them;
    then it stamps what comes next with the new version, puts the prefix cache right, and goes on.

An engine without requests is woken in the same way. While nobody is waited for, a step costs one look at a flag.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from importlib import import_module
from typing import Any

from weightbridge.errors import IncompleteUpdateError, InternalError, UnsupportedError, UsageError
from weightbridge.integrations import vllm_backend
from weightbridge.integrations.vllm_prefixes import Salt, recompute_running
from weightbridge.integrations.vllm_seat import JoinSettings

__all__ = ["CorePolls", "attach"]

_PauseState: Any = import_module("vllm.v1.core.sched.interface").PauseState
_RequestType: Any = import_module("vllm.v1.engine").EngineCoreRequestType
_AGAIN_SECONDS = 1.0  # while workers sleep or must not serve, and where no worker can wake the core
_PULLS = ("start_weight_update", "start_draft_weight_update", "update_weights")
_LOG = logging.getLogger("vllm.weightbridge")


def attach(core: Any) -> CorePolls:
    """Called once in the process of an engine core, when its workers are up and no request has come.

    Joins the session that the environment names, if it names one. Raises UnsupportedError and UsageError: the engine does not
    start then.
    """
    parallel = core.vllm_config.parallel_config
    if parallel.data_parallel_size > 1 or getattr(parallel, "data_parallel_index", 0):
        raise UnsupportedError(
            f"backend weightbridge with data_parallel_size {parallel.data_parallel_size}: replicas of one vLLM engine cannot "
            "be told apart by trainers; start each as an engine of its own, with its own WEIGHTBRIDGE_ENGINE"
        )
    if parallel.distributed_executor_backend == "external_launcher":
        raise UnsupportedError(
            "backend weightbridge with the executor external_launcher: every rank schedules by itself, and no core can poll "
            "for all; use weightbridge.integrations.vllm.WorkerExtension, which polls in every step"
        )
    polls = CorePolls(core)
    settings = JoinSettings.from_environment()
    if settings.endpoint:
        polls.join(settings)
    return polls


def _given(init_info: dict[str, Any]) -> JoinSettings:
    known = {f.name for f in fields(JoinSettings)}
    if unknown := sorted(set(init_info) - known):
        raise UsageError(f"init_info has no field {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return JoinSettings.from_environment(**init_info)


class CorePolls:
    """All but `_listen` and `_wake` runs on the core's own thread."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._wanted = False
        self._version = ""
        self._standing = False  # no step may be scheduled
        self._asked_pause = _PauseState.UNPAUSED  # what everybody else wants of the scheduler
        self._set_pause: Callable[[Any], None] | None = None
        self._poisoned_at: float | None = None
        self._told = ""
        self._salt = Salt()
        self._hook_in()
        name = f"weightbridge-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name)
        reached = core.collective_rpc(vllm_backend.attach_worker, args=(name,))
        if not any(reached):  # workers on other machines
            self._socket.settimeout(_AGAIN_SECONDS)
        threading.Thread(target=self._listen, name="wb-wake", daemon=True).start()

    def join(self, settings: JoinSettings) -> None:
        """Let all workers join, or none. Raises UsageError with what each said that could not."""
        found = self._core.collective_rpc(vllm_backend.join_worker, args=(asdict(settings),))
        bad = [f"worker {rank}: {status['error']}" for rank, status in enumerate(found) if status["error"]]
        if bad:
            if len(bad) < len(found):
                self._core.collective_rpc(vllm_backend.leave_worker)
            raise UsageError("; ".join(bad))

    def _hook_in(self) -> None:
        """On this one object; vLLM binds `step_fn` after this."""
        core = self._core
        steps = core.step, core.step_with_batch_queue
        core.step = lambda: self._step(steps[0])
        core.step_with_batch_queue = lambda: self._step(steps[1])
        preprocess, add = core.preprocess_add_request, core.add_request

        def preprocessed(request: Any) -> Any:  # on the thread that reads requests
            self._salt.on_arrival(request)
            return preprocess(request)

        def added(request: Any, request_wave: int = 0) -> None:
            self._salt.renew(request)
            add(request, request_wave)

        core.preprocess_add_request, core.add_request = preprocessed, added
        rpc = core.collective_rpc

        def checked(method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
            # Here and not on the workers, where an exception leaves answers of other workers behind for the next RPC to read.
            if method in _PULLS:
                raise UsageError(
                    f"{method} has nothing to fetch: with weightbridge trainers send, by SenderAdapter.send_weights(version), "
                    "and the engine takes the version in between two steps"
                )
            if method == "init_weight_transfer_engine":
                self.join(_given(*args, **(kwargs or {})))
                return []
            return rpc(method, timeout, args, kwargs)

        core.collective_rpc = checked

    # --- waking -------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                self._socket.recv(1)
            except TimeoutError:
                pass
            except OSError:
                return
            self._wake()

    def _wake(self) -> None:
        self._wanted = True
        queue = getattr(self._core, "input_queue", None)
        if queue is None:
            return  # an engine without a loop of its own: at its next step
        # The loop of an idle core calls these when it comes round, and something in its queue makes it come round.
        callbacks = getattr(self._core, "_idle_state_callbacks", None)
        if callbacks is None:  # it is still starting
            self._wake_later()
            return
        if self._idle not in callbacks:
            callbacks.append(self._idle)
        queue.put_nowait((_RequestType.WAKEUP, None))

    def _wake_later(self) -> None:
        timer = threading.Timer(_AGAIN_SECONDS, self._wake)
        timer.daemon = True
        timer.start()

    # --- between two steps --------------------------------------------------------------------------------------------

    def _step(self, step: Callable[[], Any]) -> Any:
        if self._wanted:
            if self._core.batch_queue:
                self._stand(True)  # steps in flight belong to the old version: they end first
            else:
                self._serve()
        return step()

    def _idle(self, core: Any) -> None:
        if self._wanted:
            self._serve()

    def _serve(self) -> None:
        """Nothing is in flight: let all workers poll until the session wants no more of them."""
        if self._core.model_executor.is_sleeping:  # there may be no memory where weights belong
            self._wanted = False
            self._wake_later()
            return
        while True:
            self._wanted = False  # before the polls: what is heard during them counts again
            found = self._core.collective_rpc(vllm_backend.poll_worker)
            if any(status["updated"] for status in found):
                self._installed(found)
            self._tell("; ".join(s["error"] for s in found if s["error"]))
            if not any(status["requested"] for status in found):
                break
        self._stand(self._is_poisoned(found))

    def _installed(self, found: list[dict[str, Any]]) -> None:
        versions = sorted({status["version"] for status in found})
        if len(versions) > 1 or not all(status["updated"] for status in found):
            raise InternalError(f"workers of one engine hold versions {versions} after the same poll")
        began = time.monotonic()
        self._version = str(versions[0])
        self._core.set_weight_version(self._version)
        policy = found[0]["prefix_cache"]
        scheduler = self._core.scheduler
        if policy == "reset":
            self._core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        elif policy == "salt":
            self._salt.version = self._version
            recompute_running(scheduler, lambda request: not request.num_output_tokens)
            for request in scheduler.requests.values():
                if not request.num_computed_tokens:
                    self._salt.renew(request)
        if policy != "none":
            scheduler.reset_encoder_cache()
        _LOG.info(
            "serving weights of version %s (prefix cache: %s, %.1f ms)",
            self._version,
            policy,
            1e3 * (time.monotonic() - began),
        )

    def _is_poisoned(self, found: list[dict[str, Any]]) -> bool:
        """Whether no step may be made, since the engine holds the halves of two versions. Raises when that lasts too long."""
        bad = next((s for s in found if s["state"] == "poisoned"), None)
        if bad is None:
            self._poisoned_at = None
            return False
        now = time.monotonic()
        self._poisoned_at = now if self._poisoned_at is None else self._poisoned_at
        if now - self._poisoned_at > bad["patience_seconds"]:
            raise IncompleteUpdateError(
                f"this engine holds the halves of two versions and no other has come in {bad['patience_seconds']:.0f} s; "
                f"start it anew. {bad['error']}"
            )
        self._wake_later()
        return True

    def _tell(self, error: str) -> None:
        if error and error != self._told:
            _LOG.error("weightbridge: %s", error)
        self._told = error

    # --- standing still, whatever others ask of the scheduler ---------------------------------------------------------------

    def _stand(self, standing: bool) -> None:
        if standing == self._standing:
            return
        if self._set_pause is None:
            scheduler = self._core.scheduler
            self._asked_pause, self._set_pause = scheduler.pause_state, scheduler.set_pause_state
            scheduler.set_pause_state = self._others_set_pause
        self._standing = standing
        self._set_pause(_PauseState.PAUSED_ALL if standing else self._asked_pause)

    def _others_set_pause(self, state: Any) -> None:
        self._asked_pause = state
        if not self._standing and self._set_pause is not None:
            self._set_pause(state)
