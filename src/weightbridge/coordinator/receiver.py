"""ReceiverAdapter: what a rollout worker holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator.options import Group, Options, check_endpoint, rank_and_size
from weightbridge.coordinator.seat import LoadWeights, OnProgress, Seat, Tensors, seconds_since_epoch
from weightbridge.coordinator.step_agreement import StepAgreement
from weightbridge.errors import IncompleteUpdateError, TransferTimeout, UsageError, WeightBridgeError
from weightbridge.machine.session import HUB_WORKER

__all__ = ["ReceiverAdapter"]

_GRACE_SECONDS = 10.0


class ReceiverAdapter:
    """One rollout worker's end. It joins in the background from construction on; everything else happens in polls."""

    def __init__(
        self, *, group: Group | tuple[int, int] | None, endpoint: str, checkpoint: CheckpointSpec, load_weights: LoadWeights,
        tensors: Tensors, engine: str, node: str = "", options: Options | None = None,
        before_update_hook: Callable[[int], None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:  # fmt: skip
        """group: of the workers of this engine, or (rank, size); asked for rank and size only.

        endpoint: the sender's. load_weights: the engine's own, as a function of an iterable of (checkpoint name, full
        tensor); called at connect to learn the layout, and at install for what it computes. tensors: its live tensors by
        name. engine: this engine's name, unique in the job. node: name of this machine, default the engine's name.
        before_update_hook(version): runs on the worker's thread when the engine stands still, before weights are
        overwritten: the place to drop caches that belong to the old weights.
        on_progress: told of each load while this worker is probed.
        """
        self._options = options or Options()
        check_endpoint(endpoint, self._options.token)
        if not engine or "/" in engine:
            raise UsageError(f"engine must be a name without a slash, got {engine!r}")
        rank, size = rank_and_size(group)
        self._hook = before_update_hook
        self._version = -1
        self._closed = False
        self._seat = Seat(
            role="rollout", engine=engine, rank=rank, size=size, node=node or engine, endpoint=endpoint, checkpoint=checkpoint,
            load_weights=load_weights, tensors=tensors, options=self._options,
            hear=lambda message: self._agreement.hear(message), failed=lambda _: self._agreement.end(),
            on_progress=on_progress,
        )  # fmt: skip
        self._agreement = StepAgreement(
            window=self._options.window, idle_install=self._options.idle_install, changed=self._seat.changed,
            post=self._seat.post, install_idle=self._install_idle,
        )  # fmt: skip
        self._gate = self._agreement.gate
        self._seat.start()

    def poll_requests(self) -> bool:
        """Call between inference steps, on every worker of the engine, the same number of times on each.

        Nearly always returns False at once: no lock, no system call. When the trainers connect or send a version, all
        workers of the engine stop in the same poll; the call then returns when this worker is probed, or holds the new
        version whole (True). Raises WorkerError, IncompleteUpdateError (do not serve from this engine), TransferTimeout,
        ProbeError; the session is over then and every later call raises the same.
        """
        gate = self._gate
        count = gate.count + 1
        gate.count = count
        if count < gate.gate:
            return False
        return self._poll_at_gate(count)

    @contextmanager
    def step(self) -> Iterator[bool]:
        """Poll, then hold the engine's step lock while the engine computes; yields what poll_requests returned.

        With Options.idle_install, run every inference step inside it: whenever the lock is free, the engine is
        idle and its weights can be updated without a poll. Raises as poll_requests.
        """
        lock = self._agreement.step_lock
        if not lock.acquire(timeout=self._options.update_timeout_seconds + _GRACE_SECONDS):
            self._seat.check()
            raise TransferTimeout(
                f"{self._seat.name} waited {self._options.update_timeout_seconds + _GRACE_SECONDS:.0f} s for an update of the "
                "idle engine to end; look at the other workers of the session",
                waiting_for=(HUB_WORKER,), seconds=self._options.update_timeout_seconds,
            )  # fmt: skip
        try:
            yield self.poll_requests()
        finally:
            lock.release()

    @property
    def version(self) -> int:
        """The version that this worker serves; -1 before the first update."""
        return self._version

    @property
    def state(self) -> str:
        """joining, ready, updating, poisoned (do not serve), failed or closed: what a router asks before it sends traffic."""
        state = self._seat.state
        if state.failure is not None:
            return "poisoned" if isinstance(state.failure, IncompleteUpdateError) else "failed"
        if state.closed:
            return "closed"
        if not state.ready or self._version < 0:
            return "joining"
        return "updating" if state.begun[0] > self._version else "ready"

    def close(self) -> None:
        """Leave the session; the weights stay as they are. Idempotent."""
        if not self._closed:
            self._closed = True
            self._seat.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _poll_at_gate(self, count: int) -> bool:
        stopped_at = seconds_since_epoch()
        self._seat.check()
        self._seat.control.call(lambda: self._agreement.reached(count))
        limit = self._options.connect_timeout_seconds + self._options.update_timeout_seconds
        request = self._agreement.wait_at_gate(count, self._seat.check, limit)
        return request is not None and self._serve(request, stopped_at)

    def _install_idle(self, request: int) -> None:
        """On a thread of its own, the step lock held."""
        try:
            self._serve(request, seconds_since_epoch())
        except WeightBridgeError:
            pass  # the session has failed: the engine's next poll raises it
        except Exception as error:
            self._seat.report(error)

    def _serve(self, request: int, stopped_at: float) -> bool:
        """The engine stands still: be probed, or take the version in. True when weights were installed."""
        if self._agreement.is_connect(request):
            self._seat.run_probe()
            self._seat.control.call(lambda: self._agreement.done(request))
            return False
        version, attempt = self._seat.state.begun
        try:
            if self._hook is not None:
                self._hook(version)
            self._seat.bind_live()
        except Exception as error:
            self._seat.report(error)
            raise
        self._seat.progress.allow_assemble(version, attempt, by="worker")
        limit = self._options.update_timeout_seconds + _GRACE_SECONDS
        self._seat.wait_for(lambda s: s.committed >= version, f"version {version} to be whole", limit)
        self._seat.run_loader(version)
        self._version = version
        self._seat.control.call(lambda: self._agreement.done(request))
        self._seat.post_resumed(version, stopped_at, seconds_since_epoch())
        return True
