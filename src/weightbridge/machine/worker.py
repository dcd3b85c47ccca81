"""The worker machine: what one worker knows of its session, and what it has to do about each word of the hub.

Pure: words and local events in, things to do out. Its shell is `coordinator/seat.py`; the virtual workers of the fault tests
drive the same object. One worker serves one session at a time, in *attempts*: an attempt is one set of connections and
one piece of slot memory, and what belongs to an older attempt is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from weightbridge.machine import messages as w

__all__ = ["Assemble", "Connect", "Do", "Leave", "Prepare", "Say", "Stop", "Transfer", "WorkerMachine"]

_KEPT_ENDINGS = 16
"""How many versions' endings are remembered for callers that ask late."""


# --- what to do -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Say:
    """Send to the hub."""

    message: w.Message


@dataclass(frozen=True, slots=True)
class Prepare:
    """Lower the plan (empty: the one before), take memory, open transports; then say ProgramReady."""

    epoch: int
    attempt: int
    plan: bytes


@dataclass(frozen=True, slots=True)
class Connect:
    """Join with the peers; then say Connected."""

    attempt: int
    peers: Mapping[str, w.PeerEndpoint]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Carry the version through; then call `transferred`."""

    version: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Assemble:
    """Hub and worker both allow it: live weights may be overwritten by this version."""

    version: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End what the attempt does, close its connections and give its memory back; then call `stopped`."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The session is over for this worker: end the data plane. failed: not in good order."""

    failed: bool


Do = Say | Prepare | Connect | Transfer | Assemble | Stop | Leave


class WorkerMachine:
    """One worker in one session. Attributes are for reading; whoever waits for one of them looks again after each event."""

    def __init__(self, *, worker: str, engine: str, staged: bool, version: int = -1) -> None:
        """engine: "" for a trainer. staged: assembles into host memory (rollout) or sends from a host copy (trainer).

        version: what the worker holds from an earlier session.
        """
        self.worker = worker
        self.engine = engine
        self.staged = staged
        self.session = 0
        self.probe_with: frozenset[str] | None = None
        self.probe_request = 0
        self.heard: tuple[int, tuple[bytes, ...]] = (-1, ())  # (step, what each worker of the side said at it)
        self.attempt = 0  # newest one that this worker was told of
        self._joined = 0  # newest attempt whose peers it was told of
        self.stopped_attempt = 0  # every attempt up to this one is over here
        self.ready = False  # the attempt's connections stand everywhere
        self.ever_ready = False
        self.floor = -1  # the largest version any engine of the session has held
        self.begun: tuple[int, int] = (-1, -1)  # (version, attempt) in flight or done
        self._allowed_by: set[tuple[str, int, int]] = set()
        self.staged_engines = False  # some engine receives into host memory
        self.captured = -1  # trainer with a host copy: the version that lies in it
        self.released = -1  # trainer: newest version whose weights are free to change
        self.committed = -1  # newest version that is whole on all workers of the engine
        self.version = version  # what the worker serves
        self.mixed = -1  # version that live weights are being overwritten with, -1 when they are of one version
        self.endings: dict[int, w.Report | w.UpdateFailed] = {}  # by version, newest last
        self.given_up: w.UpdateFailed | None = None  # the newest
        self.poisoned_by: w.UpdateFailed | w.Failure | None = None
        self.failure: w.Failure | None = None  # terminal
        self.closed = False

    @property
    def is_trainer(self) -> bool:
        return not self.engine

    @property
    def failed_version(self) -> int:
        """The newest version that was given up, -1 for none."""
        return -1 if self.given_up is None else self.given_up.version

    @property
    def over(self) -> bool:
        """Nothing more happens in this session."""
        return self.closed or self.failure is not None

    # --- words of the hub ---------------------------------------------------------------------------------------------------

    def hear(self, message: w.Message) -> tuple[Do, ...]:
        """One word of the hub. The step agreement's words are not for this machine and change nothing."""
        if self.over:
            return (Say(w.Heard()),) if isinstance(message, w.Failure) else ()
        match message:
            case w.Welcome(session=session):
                self.session = session
            case w.RunProbe(request=request, dtypes=dtypes):
                self.probe_request, self.probe_with = request, frozenset(dtypes)
                self.heard = (-1, ())
            case w.SideHeard(step=step, data=data):
                self.heard = (step, data)
            case w.PlanReady(epoch=epoch, attempt=attempt, plan=plan) if attempt > self.attempt:
                self.attempt, self.ready = attempt, False
                return (Prepare(epoch, attempt, plan),)
            case w.ConnectPeers(attempt=attempt, peers=peers) if self._runs(attempt) and attempt > self._joined:
                self._joined = attempt
                return (Connect(attempt, peers),)
            case w.Ready(attempt=attempt, version=version, staged=staged) if self._runs(attempt):
                self.ready = self.ever_ready = True
                self.staged_engines = staged
                self.floor = max(self.floor, version)
            case w.Begin(version=version, attempt=attempt) if self._runs(attempt) and self.begun != (version, attempt):
                self.begun = (version, attempt)
                self.committed = min(self.committed, version - 1)  # sent again: it is whole when this attempt says so
                return (Transfer(version, attempt),)
            case w.AllowAssemble(version=version, attempt=attempt):
                return self._allowed("hub", version, attempt)
            case w.Committed(version=version):
                self.committed = max(self.committed, version)
            case w.AbortAttempt(attempt=attempt):
                self.ready = False
                return (Stop(attempt),)
            case w.Report(version=version):
                self.floor = max(self.floor, version)
                self._end(version, message)
            case w.UpdateFailed(version=version):
                self.given_up = message
                self._end(version, message)
                if self.engine in message.poisoned:
                    self.poisoned_by = message
            case w.Closed():
                self.closed = True
                return (Leave(failed=False),)
            case w.Failure():
                self.fail(message)
                return (Say(w.Heard()), Leave(failed=True))
        return ()

    def fail(self, failure: w.Failure) -> None:
        """The session is over for this worker, by the hub's word or because the hub is gone. First word wins."""
        if self.failure is None:
            if self.mixed >= 0 and self.engine not in failure.poisoned:
                failure = replace(failure, poisoned=(*failure.poisoned, self.engine), version=self.mixed)
            self.failure = failure
            if self.engine and self.engine in failure.poisoned:
                self.poisoned_by = self.poisoned_by or failure

    # --- what happened here -------------------------------------------------------------------------------------------------

    def standing(self, version: int, attempt: int) -> tuple[Do, ...]:
        """Direct rollout: this worker stands still, its hook has run and its kernels are bound."""
        return self._allowed("worker", version, attempt)

    def installing(self, version: int) -> None:
        """Staged rollout: from now on live weights are overwritten by this version, from host memory."""
        self.mixed = version

    def release(self, version: int, attempt: int) -> bool:
        """Trainer: the weights of this version may change. False when the attempt is over: they may be needed again."""
        if self.begun != (version, attempt) or not self._runs(attempt):
            return False
        self.released = version
        return True

    def capture(self, version: int) -> None:
        """Trainer with a host copy: the version lies in it from now on, and no earlier one."""
        self.captured = version

    def transferred(self, version: int, attempt: int) -> tuple[Do, ...]:
        """This worker has done its part of the transfer."""
        return (Say(w.Transferred(version=version, attempt=attempt)),) if self._runs(attempt) else ()

    def attempt_failed(self, attempt: int, *, kind: str, reason: str, lost: str) -> tuple[Do, ...]:
        """The data plane failed here; the hub decides what becomes of the attempt."""
        if self.over or not self._runs(attempt):
            return ()
        return (Say(w.AttemptFailed(attempt=attempt, kind=kind, reason=reason, lost=lost)),)

    def stopped(self, attempt: int) -> tuple[Do, ...]:
        """Nothing of the attempt moves here any more."""
        self.stopped_attempt = max(self.stopped_attempt, attempt)
        if self.over:
            return ()
        touched = self.mixed >= 0
        version = self.begun[0]
        lies_here = self.captured == version if self.staged else self.released < version
        released = self.is_trainer and version >= 0 and not lies_here
        return (Say(w.Quiesced(attempt=attempt, touched=touched, released=released)),)

    def installed(self, version: int) -> None:
        """The worker serves this version from now on."""
        self.version = version
        self.mixed = -1
        self.poisoned_by = None

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _allowed(self, by: str, version: int, attempt: int) -> tuple[Do, ...]:
        """Two have to say so: the hub (every engine stands still) and this worker."""
        if self.over or self.begun != (version, attempt) or not self._runs(attempt):
            return ()
        self._allowed_by = {who for who in self._allowed_by if who[1:] == (version, attempt)}
        if (by, version, attempt) in self._allowed_by:
            return ()
        self._allowed_by.add((by, version, attempt))
        if len(self._allowed_by) < 2:
            return ()
        self.mixed = version
        return (Assemble(version, attempt),)

    def _runs(self, attempt: int) -> bool:
        return attempt == self.attempt and attempt > self.stopped_attempt

    def _end(self, version: int, ending: w.Report | w.UpdateFailed) -> None:
        self.endings[version] = ending
        while len(self.endings) > _KEPT_ENDINGS:
            del self.endings[next(iter(self.endings))]
