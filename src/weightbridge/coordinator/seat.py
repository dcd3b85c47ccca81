"""A worker's seat in the session: what both adapters have in common. The shell around `machine.worker.WorkerMachine`.

Three threads meet here: the worker's own (it calls the adapter), the control thread (words from the hub) and the progress
thread (bytes). All they share is the machine, under one condition; whatever the worker's own thread waits for, it waits for
here, with a deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import session_events as events
from weightbridge.coordinator.control import ControlThread
from weightbridge.coordinator.failures import causes_of, error_to_failure, failure_to_error, kind_of
from weightbridge.coordinator.options import Options
from weightbridge.coordinator.progress import ProgressThread
from weightbridge.coordinator.session_events import guarded_observer
from weightbridge.coordinator.standstill import Patience
from weightbridge.errors import TransferTimeout, WeightBridgeError, WorkerError
from weightbridge.executor import HostCopy, LiveMemory, NetworkBytes, Observation, Prepared
from weightbridge.kernels import Buffer, choose_kernels
from weightbridge.layout import SourceMap, encode_source_map
from weightbridge.machine import messages as w
from weightbridge.machine import worker as m
from weightbridge.machine.events import AssembleDone, PackDone
from weightbridge.machine.session import HUB_WORKER
from weightbridge.probe import ProbeOptions, live_tensors, probe
from weightbridge.probe.cached import probe_with_cache
from weightbridge.probe.carried import carried_tensors, staging_tensors

__all__ = ["LoadWeights", "OnProgress", "Outlived", "Seat", "Tensors", "seconds_since_epoch"]

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Tensors = Callable[[], Mapping[str, torch.Tensor]]
OnProgress = Callable[[str, int, int], None]
"""Called with (what was done, steps done, steps in all) on the worker's own thread."""

_VERDICT_SECONDS = 5.0  # a worker whose attempt failed waits so long for the hub before it believes that it is gone too
_GRACE_SECONDS = 10.0  # beyond the hub's own deadlines
_KEPT_ERRORS = 16
_TELL_SECONDS = 0.2  # between two events of progress
_LOG = logging.getLogger(__name__)


def seconds_since_epoch() -> float:
    """The clock that times of different workers are compared on; machines must keep it in step (NTP)."""
    return time.time()


class Outlived(Exception):  # noqa: N818 (control flow between seat and receiver, never shown to users)
    """The session that was waited for has ended in good order, or this worker goes on to the next one."""


class Seat:
    """One worker in one session at a time. The adapters own it; `hear` is the adapter's ear for words only it understands."""

    def __init__(
        self, *, role: str, engine: str, rank: int, size: int, node: str, endpoint: str, checkpoint: CheckpointSpec,
        load_weights: LoadWeights, tensors: Tensors, options: Options,
        hear: Callable[[w.Message], None] | None = None, ended: Callable[[bool], None] | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:  # fmt: skip
        """ended: told, with `changed` held, that the session is over; True when the worker joins the next one."""
        self.name = f"{engine or role}/{rank}"
        self.options = options
        self.is_trainer = role == "trainer"
        self.staged = options.stage_send if self.is_trainer else options.stage_receive
        self._spec = checkpoint
        self._load_weights = load_weights
        self._tensors = tensors
        self._hear = hear
        self._tell_observer = None if options.on_event is None else guarded_observer(options.on_event)
        self._on_ended = ended
        self._on_progress = on_progress
        self._source_map: SourceMap | None = None
        self._carried: dict[str, torch.Tensor] = {}  # live tensors that the library keeps for the loader path
        self._live: LiveMemory | None = None
        self._host: HostCopy | None = None
        self._side = engine or role
        self._engine = engine
        self._num_words = 0
        self._moved: dict[int, NetworkBytes] = {}
        # Exceptions made of failures, newest last; and what this worker saw itself, with when to believe it.
        self._errors: list[tuple[w.Failure | w.UpdateFailed, WeightBridgeError, TracebackType | None]] = []
        self._suspicion: tuple[Patience, int, WeightBridgeError] | None = None  # until when, of which attempt, what
        self._num_rounds = 0  # of the program in force
        self._next_telling = 0.0  # by the clock of observations
        self._outlived: w.Failure | None = None  # what ended the session before this one
        self.allowed_at = 0.0  # direct rollout: since when bytes may go into the live weights
        self._spans: dict[int, list[float]] = {}  # trainer: version -> [stopped computing, went on]; guarded by changed
        self.changed = threading.Condition()
        self.machine = self._probed_by = m.WorkerMachine(worker=self.name, engine=engine, staged=self.staged)
        self._join = partial(
            w.Join, protocol=w.PROTOCOL_VERSION, worker=self.name, role=role, engine=engine, rank=rank, size=size, node=node,
            bandwidth=options.bandwidth, spec_digest=checkpoint.digest,
            dtypes=tuple(sorted({t.dtype.name for t in live_tensors(tensors())})), staged=self.staged,
        )  # fmt: skip
        self.progress = ProgressThread(
            worker=self.name, spec=checkpoint, options=options,
            observe=options.observe if self._tell_observer is None else self._observe,
        )  # fmt: skip
        self.control = ControlThread(
            endpoint=endpoint,
            join=self._join(),
            options=options,
            on_message=self._on_message,
            on_failure=self._lost_hub,
            on_tick=self._on_tick,
        )

    def tell(self, event: type[events.SessionEvent], **fields: Any) -> None:
        """Tell the observer, if there is one. From any thread."""
        if self._tell_observer is not None:
            self._tell_observer(event(at=seconds_since_epoch(), worker=self.name, **fields))

    def start(self) -> None:
        """Begin to join; from here on the callbacks may come."""
        self.control.start()

    def post(self, message: w.Message, machine: m.WorkerMachine | None = None) -> None:
        """machine: of the session that the message is for; dropped when that has been outlived. None: the one in force."""
        with self.changed:
            if machine is None or machine is self.machine:
                self.control.post(message)

    def close(self) -> None:
        """Leave the session and end the threads. Idempotent; bounded by the data plane's deadline."""
        with self.changed:
            leaving = not self.machine.over
            self.machine.closed = True
            self.changed.notify_all()
        if leaving:
            self.post(w.Goodbye())
            self.tell(events.SessionEnded, causes={})
        self.progress.close()
        self.control.close()
        if self.progress.ended:  # else a kernel may still be bound to it: it stays
            self._host = None

    # --- for the worker's own thread --------------------------------------------------------------------------------------

    def wait_for(
        self, done: Callable[[m.WorkerMachine], bool], what: str, seconds: float, *, of: m.WorkerMachine | None = None
    ) -> None:
        """Wait until `done`; raises the session's failure, or TransferTimeout saying what was waited for.

        of: of the session that the wait belongs to: raises Outlived when that ends in good order, or ends and this worker goes
        on to the next one. None: waits on in the next one; raises WorkerError when none will come.
        """
        patience = Patience(seconds)
        with self.changed:
            while not done(of or self.machine):
                self.check()
                if of is not None and (of is not self.machine or of.over):
                    raise Outlived
                if self.machine.closed and not self._outlives(None):
                    raise WorkerError(f"{self.name} waited for {what}, and the session was closed", causes={})
                step_seconds = patience.step_seconds()
                if step_seconds <= 0:
                    raise TransferTimeout(
                        f"{self.name} waited {seconds:.0f} s for {what} and heard nothing from {HUB_WORKER}, which hosts the "
                        "session; look at that process, or raise the time-outs in Options",
                        waiting_for=(HUB_WORKER,), seconds=seconds,
                    )  # fmt: skip
                self.changed.wait(step_seconds)

    @property
    def failure(self) -> w.Failure | None:
        """What has ended the session, for good as far as this worker is concerned."""
        failure = self.machine.failure
        return None if failure is None or self._outlives(failure) else failure

    @property
    def newest_failure(self) -> w.Failure | w.UpdateFailed | None:
        """The newest thing that went wrong, also what ended a session that this worker has outlived."""
        return self.machine.failure or self.machine.given_up or self._outlived

    def check(self) -> None:
        """Raise the session's failure if there is one that this worker does not outlive."""
        failure = self.failure
        if failure is not None:
            raise self.error_of(failure)

    def _outlives(self, failure: w.Failure | None) -> bool:
        """Whether this worker goes on to the next session: it may, and its own side is not to blame."""
        own_fault = failure is not None and any(name.startswith(f"{self._side}/") for name in failure.causes)
        return self.options.when_trainers_fail == "rejoin" and not self.is_trainer and not own_fault

    def error_of(self, failure: w.Failure | w.UpdateFailed) -> WeightBridgeError:
        """The exception for a failure; the same object each time, with the traceback it had at first: every poll of a poisoned
        engine raises it, and each raise adds to that."""
        with self.changed:
            for known, error, traceback in self._errors:
                if known is failure:
                    return error.with_traceback(traceback)
            return self._remember(failure, failure_to_error(failure, me=self.name))

    def _remember(self, failure: w.Failure | w.UpdateFailed, error: WeightBridgeError) -> WeightBridgeError:
        self._errors = [*self._errors[-_KEPT_ERRORS:], (failure, error, error.__traceback__)]
        return error

    def run_probe(self, machine: m.WorkerMachine) -> None:
        """Wait for the hub's word, learn this worker's layout, report it. The whole side does this at the same time.

        machine: of the session that asks. Raises Outlived when that ends meanwhile.
        """
        limit = self.options.connect_timeout_seconds + _GRACE_SECONDS
        self.wait_for(lambda s: s.probe_with is not None, "the word to probe", limit, of=machine)
        self._probed_by, self._num_words = machine, 0
        try:
            source_map = self._kept_map() or self._learn()
            buffers = self._take_map(source_map)
        except Outlived:
            raise
        except Exception as error:
            self.report(error, machine, kind="ProbeError")
            mate = self._met_by(error)
            if not mate:
                raise
            named = w.Failure(kind=kind_of(error), causes={mate: str(error)}, version=-1)
            raise failure_to_error(named, me=self.name) from error
        self.progress.welcome(machine.session, source_map, buffers)
        self.post(w.LayoutReady(source_map=encode_source_map(source_map)), machine)

    def _met_by(self, error: Exception) -> str:
        """The worker of this side that met an error while all of them probed; "" when this one did."""
        rank = getattr(error, "side_rank", None)
        return "" if rank is None else f"{self._side}/{rank}"

    def _kept_map(self) -> SourceMap | None:
        """The layout learnt for an earlier session, when every worker of the side still has the one it had then."""
        same = False
        if self._source_map is not None and self._live is not None:
            try:
                self._live.buffers(self._all_tensors())
                same = True
            except WeightBridgeError:
                pass  # other tensors than then: to be probed again
        said = self._agree(b"kept" if same else b"new")
        return self._source_map if all(word == b"kept" for word in said) else None

    def _learn(self) -> SourceMap:
        folder = self.options.map_cache
        learn = probe if folder is None else partial(probe_with_cache, folder=folder, worker=self.name)
        return learn(
            spec=self._spec, load_weights=self._load_weights, tensors=self._tensors, dtypes=self._probed_by.probe_with,
            progress=self._probing, allow_loader_path=not self.is_trainer, agree=self._agree,
            options=ProbeOptions(
                backup=self.options.backup_weights,
                expected_untouched=self.options.expected_untouched,
                loader_path_bytes=self.options.loader_path_bytes,
            ),
        )  # fmt: skip

    def _probing(self, what: str, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(what, done, total)
        self.tell(events.Probing, what=what, done=done, total=total)

    def _take_map(self, source_map: SourceMap) -> tuple[Buffer, ...]:
        """Keep the layout; the memory that versions go through: the live tensors, or a host copy of them."""
        if source_map is not self._source_map:
            self._source_map = source_map
            self._carried = staging_tensors(source_map)
            self._live = LiveMemory(source_map.live)
            # Kernels are bound to the old one until the progress thread has stopped the attempt that they belong to.
            self.progress.submit(partial(_let_go, self._host), self._tidying_failed)
            self._host = HostCopy(source_map, choose_kernels(self.options.kernels)) if self.staged else None
            if self._host is not None:  # pinned and bound here, not in the first update
                self._host.bind("capture" if self.is_trainer else "install", self._live_buffers())
        return self._host.buffers if self._host is not None else self._live_buffers()

    def bind_live(self) -> None:
        """Look again where the live tensors lie and bind the kernels to them anew if any has moved. The worker must stand
        still. With a host copy the kernels stay bound to that."""
        if self._host is None:
            self.progress.bind(self._live_buffers())

    def capture(self, version: int) -> None:
        """Trainer with a host copy: copy the weights as they are now. Nothing may still be sent from the copy."""
        if self._host is not None:
            self._host.capture(self._live_buffers())
            with self.changed:
                self.machine.capture(version)

    def install(self, version: int) -> None:
        """Rollout with a host copy, standing still: the version that lies there becomes the live one."""
        if self._host is not None:
            live = self._live_buffers()
            with self.changed:
                self.machine.installing(version)
            self._host.install(live)

    def _live_buffers(self) -> tuple[Buffer, ...]:
        return () if self._live is None else self._live.buffers(self._all_tensors())

    def _all_tensors(self) -> Mapping[str, torch.Tensor]:
        return {**self._tensors(), **self._carried} if self._carried else self._tensors()

    def run_loader(self, version: int) -> None:
        """Let the worker's own loader make what it computes of the checkpoint tensors that were carried here for it.

        On the worker's own thread, while it stands still and after the version has arrived. A failure is told to the hub,
        which counts this worker's engine as poisoned, and raised.
        """
        groups = () if self._source_map is None else self._source_map.loader_groups
        for group in groups:
            try:
                self._load_weights(carried_tensors(self._spec, group, self._carried))
            except Exception as error:
                self.report(
                    WorkerError(
                        f"load_weights raised {type(error).__name__}: {error}, called with {len(group.tensors)} tensors of "
                        f"version {version} to make what it computes of them; the same call had succeeded at connect",
                        causes={},
                    ),
                    self.machine,
                )
                raise

    def standing(self, machine: m.WorkerMachine, version: int, attempt: int) -> None:
        """Direct rollout: stands still and is bound; live weights may be overwritten as soon as the hub says so too."""
        self._perform(machine, lambda: machine.standing(version, attempt))

    def installed(self, version: int) -> None:
        """This worker serves the version."""
        with self.changed:
            self.machine.installed(version)
            self.changed.notify_all()

    def report(self, error: Exception, machine: m.WorkerMachine, kind: str = "WorkerError") -> None:
        """Tell the hub of that session that this worker cannot go on.

        kind: under which name an error that is not one of ours travels.
        """
        ours = isinstance(error, WeightBridgeError)
        reason = str(error) if ours else f"{type(error).__name__}: {error}"
        lost = self._met_by(error)
        self.post(w.WorkerFailed(kind=kind_of(error) if ours else kind, reason=reason, lost=lost), machine)

    def _agree(self, data: bytes) -> tuple[bytes, ...]:
        """What every worker of this side says, by rank; on the worker's own thread, while it probes."""
        step = self._num_words
        self._num_words += 1
        self.post(w.SideSay(step=step, data=data), self._probed_by)
        limit = self.options.connect_timeout_seconds + _GRACE_SECONDS
        self.wait_for(
            lambda s: s.heard[0] >= step, f"the other workers of {self._side} at step {step} of the probe", limit,
            of=self._probed_by,
        )  # fmt: skip
        return self._probed_by.heard[1]

    def announce(self, version: int, stalled_at: float) -> None:
        """A trainer's weights are ready to go as `version`; it stopped computing for that at `stalled_at`."""
        with self.changed:
            self._spans = {v: span for v, span in self._spans.items() if v >= self.machine.begun[0]}
            self._spans[version] = [stalled_at, seconds_since_epoch()]
        self.post(w.SendReady(version=version))

    # --- what the machine asks for ------------------------------------------------------------------------------------------

    def _perform(self, machine: m.WorkerMachine, ask: Callable[[], Iterable[m.Do]]) -> None:
        """Feed the machine and do as it says. From any thread. Nothing, when its session has been outlived meanwhile."""
        leave = False
        with self.changed:  # what is queued here is queued for this session
            if machine is not self.machine:
                return
            for do in ask():
                match do:
                    case m.Say(message=message):
                        self.control.post(message)
                    case m.Prepare(attempt=attempt, plan=plan):
                        self._submit(machine, attempt, partial(self._prepare, machine, attempt, plan))
                    case m.Connect(attempt=attempt, peers=peers):
                        self._submit(machine, attempt, partial(self._connect, machine, attempt, peers))
                    case m.Transfer(version=version, attempt=attempt):
                        self._submit(machine, attempt, partial(self._transfer, machine, version, attempt))
                    case m.Assemble(version=version, attempt=attempt):
                        self.allowed_at = seconds_since_epoch()
                        self.progress.allow_assemble(version, attempt)
                    case m.Stop(attempt=attempt):
                        self.progress.abort(WorkerError("the attempt was ended", causes={}))
                        self._submit(machine, attempt, partial(self._stop, machine, attempt))
                    case m.Leave():
                        leave = True
            self.changed.notify_all()
        if leave:
            self._leave()

    def _submit(self, machine: m.WorkerMachine, attempt: int, work: Callable[[], None]) -> None:
        self.progress.submit(work, partial(self._attempt_failed, machine, attempt))

    def _leave(self) -> None:
        """The session is over for this worker, which may join the next one."""
        failure = self.machine.failure
        causes, kind = ({}, "") if failure is None else (failure.causes, failure.kind)
        self.tell(events.SessionEnded, kind=kind, causes=causes)
        again = self._outlives(failure)
        self.progress.abort(WorkerError("the session is over", causes={}))
        self.progress.submit(self.progress.stop, self._tidying_failed)
        if failure is not None and again:
            _LOG.warning("%s keeps version %d: %s", self.name, self.machine.version, self.error_of(failure).message)
        with self.changed:  # sessions change in one step for whoever waits
            if again:
                old = self.machine
                self.machine = m.WorkerMachine(
                    worker=self.name, engine=self._engine, staged=self.staged, version=old.version
                )
                self.machine.poisoned_by, self.machine.mixed = old.poisoned_by, old.mixed
                self._outlived, self._suspicion = failure, None
            if self._on_ended is not None:
                self._on_ended(again)
            self.changed.notify_all()
        if again:
            self.control.rejoin(self._join(version=self.machine.version))
        else:
            self.control.stop_watching()

    # --- on the control thread --------------------------------------------------------------------------------------------

    def _on_message(self, message: w.Message) -> None:
        machine = self.machine
        self._perform(machine, lambda: machine.hear(message))
        self._tell_of(message)
        if self._hear is not None:
            self._hear(message)

    def _tell_of(self, message: w.Message) -> None:
        match message:
            case w.Welcome(session=session):
                self.tell(events.Joined, session=session)
            case w.Ready(attempt=attempt):
                self.tell(
                    events.Connected, epoch=self.progress.plan.epoch if self.progress.plan else 0, attempt=attempt
                )
            case w.Begin(version=version, attempt=attempt):
                left_out = self.machine.committed
                if self.machine.version < left_out < version and left_out != self.machine.failed_version:
                    self.tell(events.Superseded, version=left_out, by=version)
                self.tell(events.UpdateStarted, version=version, attempt=attempt)
            case w.Report():
                self.tell(
                    events.UpdateFinished, version=message.version, ewtt_seconds=message.ewtt_seconds,
                    agst_seconds=message.agst_seconds, ideal_seconds=message.ideal_seconds,
                    network_bytes=message.network_bytes, slowest_worker=message.slowest_worker,
                    slowest_stage=message.slowest_stage, attempts=message.attempts, superseded=message.superseded,
                )  # fmt: skip
            case w.UpdateFailed():
                self.tell(
                    events.UpdateFailed, version=message.version, causes=message.causes, poisoned=message.poisoned
                )

    def _observe(self, seen: Observation) -> None:
        """On the data plane's threads: pass it on, and tell how far this worker's rounds are, a few times a second."""
        if self.options.observe is not None:
            self.options.observe(seen)
        match seen.what:
            case Prepared(program=program):
                self._num_rounds = len(program.rounds)
            case PackDone(round=k) | AssembleDone(round=k) if seen.at >= self._next_telling:
                self._next_telling = seen.at + _TELL_SECONDS
                self.tell(events.Progress, version=self.machine.begun[0], round=k + 1, rounds=self._num_rounds)

    def _on_tick(self) -> None:
        suspicion = self._suspicion
        if suspicion is not None and suspicion[0].step_seconds() <= 0:
            self._suspicion = None
            _, attempt, error = suspicion
            if not self.machine.over and attempt == self.machine.attempt > self.machine.stopped_attempt:
                self._lost_hub(error)

    def _lost_hub(self, error: WeightBridgeError) -> None:
        """The hub does not answer, or did not let this worker in."""
        machine = self.machine

        def failed() -> tuple[m.Do, ...]:
            if machine.over:
                return ()
            failure = error_to_failure(error, me=self.name, version=machine.begun[0])
            machine.fail(failure)
            if machine.failure is failure:  # not changed to say that the weights are a mixture
                self._remember(failure, error)
            return (m.Leave(failed=True),)

        self._perform(machine, failed)

    # --- on the progress thread -------------------------------------------------------------------------------------------

    def _prepare(self, machine: m.WorkerMachine, attempt: int, plan: bytes) -> None:
        digest, endpoint = self.progress.prepare(plan)
        self.post(w.ProgramReady(attempt=attempt, plan_digest=digest, endpoint=endpoint), machine)

    def _connect(self, machine: m.WorkerMachine, attempt: int, peers: Mapping[str, w.PeerEndpoint]) -> None:
        self.progress.connect(peers)
        self.post(w.Connected(attempt=attempt), machine)

    def _stop(self, machine: m.WorkerMachine, attempt: int) -> None:
        self.progress.stop()
        self._perform(machine, lambda: machine.stopped(attempt))

    def _transfer(self, machine: m.WorkerMachine, version: int, attempt: int) -> None:
        def released() -> None:
            with self.changed:
                if machine.release(version, attempt) and not self.staged:
                    self._spans.setdefault(version, [0.0, 0.0])[1] = seconds_since_epoch()
                self.changed.notify_all()

        direct = not self.is_trainer and not self.staged
        moved = self.progress.transfer(version=version, attempt=attempt, may_assemble=not direct, released=released)
        with self.changed:
            self._moved = {version: moved}
            unreleased = self.is_trainer and machine.released < version
        if unreleased:
            released()
        self._perform(machine, lambda: machine.transferred(version, attempt))
        if self.is_trainer:
            with self.changed:
                stalled_at, resumed_at = self._spans[version]
            self.post_resumed(
                machine, version, stalled_at, max(stalled_at, resumed_at), stage="capture" if self.staged else "send"
            )

    def _attempt_failed(self, machine: m.WorkerMachine, attempt: int, error: WeightBridgeError) -> None:
        """This worker's own part has failed. The hub sees more than one worker does: its word is awaited for a moment."""
        lost, reason = next(iter(causes_of(error).items()), ("", error.message))
        with self.changed:
            if machine is self.machine:
                self._suspicion = (Patience(_VERDICT_SECONDS), attempt, error)
        kind = kind_of(error)
        self._perform(machine, lambda: machine.attempt_failed(attempt, kind=kind, reason=reason, lost=lost))

    def _tidying_failed(self, error: WeightBridgeError) -> None:
        """What was left of a session could not be taken down."""
        _LOG.warning("%s: %s", self.name, error.message)

    def post_resumed(
        self, machine: m.WorkerMachine, version: int, stalled_at: float, resumed_at: float, *, stage: str
    ) -> None:
        """Tell the hub of that session that this worker computes again, and what the version cost it.

        stage: what took most of that.
        """
        moved = self._moved.get(version, NetworkBytes(0, 0))
        self.post(
            w.Resumed(
                version=version, stalled_at=stalled_at, resumed_at=resumed_at, sent=moved.sent, received=moved.received,
                stage=stage,
            ),
            machine,
        )  # fmt: skip


def _let_go(host: HostCopy | None) -> None:
    """Nothing: the last reference to it goes with the call."""
