"""A worker's seat in the session: what both adapters have in common.

Three threads meet here: the worker's own (it calls the adapter), the control thread (words from the hub) and the progress
thread (bytes). All they share is under one condition; whatever the worker's own thread waits for, it waits for here, with a
deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator.control import ControlThread
from weightbridge.coordinator.failures import failure_to_error, kind_of
from weightbridge.coordinator.options import Options
from weightbridge.coordinator.progress import ProgressThread
from weightbridge.errors import TransferTimeout, WeightBridgeError, WorkerError
from weightbridge.executor import LiveMemory, NetworkBytes
from weightbridge.layout import SourceMap, encode_source_map
from weightbridge.machine import messages as w
from weightbridge.machine.session import HUB_WORKER
from weightbridge.probe import ProbeOptions, live_tensors, probe
from weightbridge.probe.cached import probe_with_cache
from weightbridge.probe.carried import carried_tensors, staging_tensors

__all__ = ["LoadWeights", "OnProgress", "Seat", "Tensors", "seconds_since_epoch"]

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Tensors = Callable[[], Mapping[str, torch.Tensor]]
OnProgress = Callable[[str, int, int], None]
"""Called with (what was done, steps done, steps in all) on the worker's own thread."""

_VERDICT_SECONDS = 5.0  # how long a worker that lost a peer waits for the hub to say what happened
_GRACE_SECONDS = 10.0  # beyond the hub's own deadlines


def seconds_since_epoch() -> float:
    """The clock that times of different workers are compared on; machines must keep it in step (NTP)."""
    return time.time()


@dataclass(slots=True)
class _State:
    """Guarded by Seat.changed."""

    failure: WeightBridgeError | None = None
    suspicion: tuple[float, WeightBridgeError] | None = None  # (when to believe it, what this worker saw itself)
    ready: bool = False
    closed: bool = False
    probe_with: frozenset[str] | None = None
    heard: tuple[int, tuple[bytes, ...]] = (-1, ())  # (step, what each worker of the side said at it)
    begun: tuple[int, int] = (-1, -1)  # (version, attempt) in flight or done
    released_at: float = 0.0
    released: bool = False
    moved: dict[int, NetworkBytes] = field(default_factory=dict)
    committed: int = -1
    report: w.Report | None = None


class Seat:
    """One worker in one session. The adapters own it; `hear` is the adapter's ear for words only it understands."""

    def __init__(
        self, *, role: str, engine: str, rank: int, size: int, node: str, endpoint: str, checkpoint: CheckpointSpec,
        load_weights: LoadWeights, tensors: Tensors, options: Options,
        hear: Callable[[w.Message], None] | None = None, failed: Callable[[WeightBridgeError], None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:  # fmt: skip
        self.name = f"{engine or role}/{rank}"
        self.options = options
        self.is_trainer = role == "trainer"
        self._spec = checkpoint
        self._load_weights = load_weights
        self._tensors = tensors
        self._hear = hear
        self._on_failed = failed
        self._on_progress = on_progress
        self._source_map: SourceMap | None = None
        self._staging: dict[str, torch.Tensor] = {}  # carried live tensors
        self._live: LiveMemory | None = None
        self._side = engine or role
        self._num_words = 0
        self._session = 0
        self.stalled_at = 0.0  # when this worker last stopped computing for an update; written by its own thread
        self.changed = threading.Condition()
        self.state = _State()
        join = w.Join(
            protocol=w.PROTOCOL_VERSION, worker=self.name, role=role, engine=engine, rank=rank, size=size, node=node,
            bandwidth=options.bandwidth, spec_digest=checkpoint.digest,
            dtypes=tuple(sorted({t.dtype.name for t in live_tensors(tensors())})),
        )  # fmt: skip
        self.progress = ProgressThread(
            worker=self.name, spec=checkpoint, options=options, post=self.post, failed=self._suspect
        )
        self.control = ControlThread(
            endpoint=endpoint,
            join=join,
            options=options,
            on_message=self._on_message,
            on_failure=self.fail,
            on_tick=self._on_tick,
        )

    def start(self) -> None:
        """Begin to join; from here on the callbacks may come."""
        self.control.start()

    def post(self, message: w.Message) -> None:
        self.control.post(message)

    def close(self) -> None:
        """Leave the session and end the threads. Idempotent; bounded by the data plane's deadline."""
        if self.state.failure is None and not self.state.closed:
            self.post(w.Goodbye())
        self._set(closed=True)
        self.progress.close()
        self.control.close()

    # --- for the worker's own thread --------------------------------------------------------------------------------------

    def wait_for(self, done: Callable[[_State], bool], what: str, seconds: float) -> None:
        """Wait until `done`; raises the session's failure, or TransferTimeout saying what was waited for."""
        give_up = time.monotonic() + seconds
        with self.changed:
            while not done(self.state):
                if self.state.failure is not None:
                    raise self.state.failure
                left = give_up - time.monotonic()
                if left <= 0:
                    raise TransferTimeout(
                        f"{self.name} waited {seconds:.0f} s for {what} and heard nothing from {HUB_WORKER}, which hosts the "
                        "session; look at that process, or raise the time-outs in Options",
                        waiting_for=(HUB_WORKER,), seconds=seconds,
                    )  # fmt: skip
                self.changed.wait(left)

    def check(self) -> None:
        """Raise the session's failure if there is one."""
        if self.state.failure is not None:
            raise self.state.failure

    def run_probe(self) -> None:
        """Wait for the hub's word, learn this worker's layout, report it. The whole side does this at the same time."""
        limit = self.options.connect_timeout_seconds + _GRACE_SECONDS
        self.wait_for(lambda s: s.probe_with is not None, "the word to probe", limit)
        dtypes = self.state.probe_with
        try:
            folder = self.options.map_cache
            learn = probe if folder is None else partial(probe_with_cache, folder=folder, worker=self.name)
            source_map = learn(
                spec=self._spec, load_weights=self._load_weights, tensors=self._tensors, dtypes=dtypes,
                progress=self._on_progress, allow_loader_path=not self.is_trainer, agree=self._agree,
                options=ProbeOptions(
                    backup=self.options.backup_weights,
                    expected_untouched=self.options.expected_untouched,
                    loader_path_bytes=self.options.loader_path_bytes,
                ),
            )  # fmt: skip
            self._source_map = source_map
            self._staging = staging_tensors(source_map)
            self._live = LiveMemory(source_map.live)
            buffers = self._live.buffers(self._all_tensors())
        except Exception as error:
            self.report(error, kind="ProbeError")
            raise
        self.progress.welcome(self._session, source_map, buffers)
        self.post(w.LayoutReady(source_map=encode_source_map(source_map)))

    def bind_live(self) -> None:
        """Look again where the live tensors lie and bind the kernels to them anew if any has moved. The worker must stand
        still."""
        if self._live is not None:
            self.progress.bind(self._live.buffers(self._all_tensors()))

    def _all_tensors(self) -> Mapping[str, torch.Tensor]:
        return {**self._tensors(), **self._staging} if self._staging else self._tensors()

    def run_loader(self, version: int) -> None:
        """Let the worker's own loader make what it computes of the checkpoint tensors that were carried here for it.

        On the worker's own thread, while it stands still and after the version has arrived. A failure is told to the hub,
        which counts this worker's engine as poisoned, and raised.
        """
        groups = () if self._source_map is None else self._source_map.loader_groups
        for group in groups:
            try:
                self._load_weights(carried_tensors(self._spec, group, self._staging))
            except Exception as error:
                self.report(
                    WorkerError(
                        f"load_weights raised {type(error).__name__}: {error}, called with {len(group.tensors)} tensors of "
                        f"version {version} to make what it computes of them; the same call had succeeded at connect",
                        causes={},
                    )
                )
                raise

    def report(self, error: Exception, kind: str = "WorkerError") -> None:
        """Tell the hub that this worker failed. kind: under which name an error that is not one of ours travels."""
        ours = isinstance(error, WeightBridgeError)
        reason = str(error) if ours else f"{type(error).__name__}: {error}"
        rank = getattr(error, "side_rank", None)  # another worker of this side met it
        lost = "" if rank is None else f"{self._side}/{rank}"
        self.post(w.WorkerFailed(kind=kind_of(error) if ours else kind, reason=reason, lost=lost))

    def _agree(self, data: bytes) -> tuple[bytes, ...]:
        """What every worker of this side says, by rank; on the worker's own thread, while it probes."""
        step = self._num_words
        self._num_words += 1
        self.post(w.SideSay(step=step, data=data))
        limit = self.options.connect_timeout_seconds + _GRACE_SECONDS
        self.wait_for(
            lambda s: s.heard[0] >= step, f"the other workers of {self._side} at step {step} of the probe", limit
        )
        return self.state.heard[1]

    def announce(self, version: int) -> None:
        """A trainer's weights are ready to go as `version`."""
        self.post(w.SendReady(version=version))

    # --- on the control thread --------------------------------------------------------------------------------------------

    def _on_message(self, message: w.Message) -> None:
        match message:
            case w.Welcome(session=session):
                self._session = session
            case w.RunProbe(dtypes=dtypes):
                self._set(probe_with=frozenset(dtypes))
            case w.SideHeard(step=step, data=data):
                self._set(heard=(step, data))
            case w.PlanReady(plan=plan):
                self.progress.submit(lambda: self.progress.lower(plan))
            case w.ConnectPeers(attempt=attempt, peers=peers):
                self.progress.submit(lambda: self.progress.connect(attempt, peers))
            case w.Ready():
                self._set(ready=True)
            case w.Begin(version=version, attempt=attempt):
                self._set(begun=(version, attempt), released=False)
                self.progress.submit(lambda: self._transfer(version, attempt))
            case w.AllowAssemble(version=version, attempt=attempt):
                self.progress.allow_assemble(version, attempt, by="hub")
            case w.Committed(version=version):
                self._set(committed=version)
            case w.Report():
                self._set(report=message)
            case w.Closed():
                self.control.stop_watching()
                self._set(closed=True)
            case w.Failure():
                self.post(w.Heard())
                self.control.stop_watching()
                self.fail(failure_to_error(message, me=self.name))
            case _:
                if self._hear is not None:
                    self._hear(message)

    def _on_tick(self, now: float) -> None:
        suspicion = self.state.suspicion
        if suspicion is not None and self.state.failure is None and now >= suspicion[0]:
            self.fail(suspicion[1])

    def fail(self, error: WeightBridgeError) -> None:
        """The session is over for this worker: every waiting and every later call raises `error`. First word wins."""
        with self.changed:
            if self.state.failure is not None:
                return
            self.state.failure = error
            self.changed.notify_all()
        self.progress.abort(error)
        if self._on_failed is not None:
            self._on_failed(error)

    # --- on the progress thread -------------------------------------------------------------------------------------------

    def _suspect(self, error: WeightBridgeError) -> None:
        """This worker's own part has failed. The hub sees more than one worker does: its word is awaited for a moment."""
        with self.changed:
            self.state.suspicion = (time.monotonic() + _VERDICT_SECONDS, error)

    def _transfer(self, version: int, attempt: int) -> None:
        def released() -> None:
            self._set(released=True, released_at=seconds_since_epoch())

        def done(moved: NetworkBytes) -> None:
            with self.changed:
                self.state.moved = {version: moved}

        self.progress.transfer(
            version=version, attempt=attempt, is_trainer=self.is_trainer, released=released, done=done
        )
        if self.is_trainer:
            self._trainer_done(version)

    def _trainer_done(self, version: int) -> None:
        """A trainer's stall has ended when its weights had left."""
        if not self.state.released:
            self._set(released=True, released_at=seconds_since_epoch())
        self.post_resumed(version, self.stalled_at, self.state.released_at)

    def post_resumed(self, version: int, stalled_at: float, resumed_at: float) -> None:
        """Tell the hub that this worker computes again, and what the version cost it."""
        moved = self.state.moved.get(version, NetworkBytes(0, 0))
        self.post(
            w.Resumed(
                version=version, stalled_at=stalled_at, resumed_at=resumed_at, sent=moved.sent, received=moved.received
            )
        )

    def _set(self, **changes: Any) -> None:
        with self.changed:
            for name, value in changes.items():
                setattr(self.state, name, value)
            self.changed.notify_all()
