"""One worker's part of the agreement on the inference step at which a whole engine installs an update.

Two threads of a worker share two integers, and the protocol rests on the order of single loads and stores of them:

    poll thread, in every poll:       control thread, asked to promise:
        count = count + 1   (store)       gate = count + window   (load, store)
        g = gate            (load)        c = count               (load again)
        go on if count < g                promise the gate if c < gate, else raise the gate and try again

Both store first and load afterwards, so one of them sees the other: either the poll meets the gate, or the second load
meets the count. Stores and loads must therefore not be reordered (the GIL sees to it; elsewhere a fence must).

What the shell around the machine has to guarantee:

- `count` is written by the poll thread alone, `gate` by the control thread alone (WriteGate); the gate starts at NO_GATE.
- A poll that finds count >= gate posts Reached(count) once and waits. It ends its wait when Install(idle=False) reaches
  it (it installs, posts InstallDone, and returns) or when the gate has risen above its count (it returns).
- The engine holds its step lock from before a poll until after the step that follows, so a poll thread that waits at the
  gate holds it. TryLock never blocks, and its answer's count is read after the attempt.
- ReadCount and TryLock, always the last of their tuple, are answered before any other event is handled. All
  instructions of one `handle` are performed in their order.
- Every worker of an engine makes the same polls, counted from a common step; while the engine is at rest all counts
  agree. An engine that has no step lock to offer answers LockTried(held=False): it installs at polls only.

Requests are numbered from 1 and grow; whatever belongs to a closed request is ignored or answered again, so messages may
be lost, doubled, late and out of order. Source: design idea of WeightBridge, "One step for the whole engine".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from weightbridge.errors import InternalError, UsageError

__all__ = [
    "NO_GATE",
    "Aborted",
    "AgreementMember",
    "CancelInstall",
    "Committed",
    "CountRead",
    "IdleAsked",
    "IdleInstall",
    "IdleReleased",
    "Install",
    "InstallAllowed",
    "InstallDone",
    "LockTried",
    "MemberEvent",
    "MemberInstruction",
    "Proposed",
    "Reached",
    "ReadCount",
    "ReleaseLock",
    "SendAborted",
    "SendIdle",
    "SendInstalled",
    "SendParked",
    "SendPromise",
    "TryLock",
    "WriteGate",
]  # fmt: skip

NO_GATE = 2**63 - 1
"""The gate's value at rest: no poll ever reaches it."""


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proposed:
    """The leader asks for a promise."""

    request: int


@dataclass(frozen=True, slots=True)
class CountRead:
    """Answer to ReadCount."""

    count: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The leader's decision: install in poll number `target`, unless the engine turns out to be idle before it."""

    request: int
    target: int


@dataclass(frozen=True, slots=True)
class Reached:
    """From the own poll thread: poll number `count` met the gate and waits."""

    count: int


@dataclass(frozen=True, slots=True)
class InstallAllowed:
    """Every worker of the engine stands still at one count: install, on the thread that this worker's state calls for.

    A worker that holds its lock for an idle attempt when this comes has agreed by that attempt (only a parked worker
    agrees otherwise), so a shell may feed this in both cases and leave IdleInstall out: say when a hub knows that every
    engine has agreed.
    """

    request: int


@dataclass(frozen=True, slots=True)
class IdleAsked:
    """The leader asks whether this worker is idle and can be kept so."""

    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class LockTried:
    """Answer to TryLock. count: the poll count after the attempt (it stands still while the lock is held)."""

    held: bool
    count: int


@dataclass(frozen=True, slots=True)
class IdleInstall:
    """In this attempt every worker of the engine holds its step lock, all at one count: install there."""

    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class IdleReleased:
    """The attempt came to nothing: give the step lock back."""

    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class InstallDone:
    """From the thread that was told to Install: it has finished, well or not (a failure is reported elsewhere)."""

    request: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """The request is over. An install that runs must have been brought to its end before this is handled."""

    request: int


MemberEvent = (
    Proposed
    | CountRead
    | Committed
    | Reached
    | InstallAllowed
    | IdleAsked
    | LockTried
    | IdleInstall
    | IdleReleased
    | InstallDone
    | Aborted
)


# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadCount:
    """Load `count`; answer CountRead."""


@dataclass(frozen=True, slots=True)
class WriteGate:
    """Store `gate` and wake the poll thread if it waits."""

    value: int


@dataclass(frozen=True, slots=True)
class TryLock:
    """Try to take the step lock without blocking; answer LockTried."""


@dataclass(frozen=True, slots=True)
class ReleaseLock:
    """Give back the step lock that a TryLock took."""


@dataclass(frozen=True, slots=True)
class SendPromise:
    """To the leader: this worker will not return from poll number `bound` before it hears the decision."""

    request: int
    bound: int


@dataclass(frozen=True, slots=True)
class SendIdle:
    """To the leader. held: the step lock is held for this attempt, at `count` polls. Not held: count says nothing."""

    request: int
    attempt: int
    held: bool
    count: int


@dataclass(frozen=True, slots=True)
class SendParked:
    """To the leader: this worker waits in the agreed poll."""

    request: int


@dataclass(frozen=True, slots=True)
class Install:
    """Install now and post InstallDone. idle: on the control thread, which holds the step lock; else on the poll thread
    that waits at the gate."""

    request: int
    idle: bool


@dataclass(frozen=True, slots=True)
class CancelInstall:
    """Withdraw an Install that the poll thread has not begun; it must not begin afterwards."""

    request: int


@dataclass(frozen=True, slots=True)
class SendInstalled:
    """To the leader: InstallDone was handled."""

    request: int


@dataclass(frozen=True, slots=True)
class SendAborted:
    """To the leader: the request is closed here; nothing of it waits, holds or installs any more."""

    request: int


MemberInstruction = (
    ReadCount
    | WriteGate
    | TryLock
    | ReleaseLock
    | SendPromise
    | SendIdle
    | SendParked
    | Install
    | CancelInstall
    | SendInstalled
    | SendAborted
)

_Out = tuple[MemberInstruction, ...]


class _Phase(IntEnum):
    FREE = 0
    READING = 1  # the first load of count is under way
    CHECKING = 2  # the gate is written; the second load is under way
    PROMISED = 3
    COMMITTED = 4
    PARKED = 5
    INSTALLING = 6


class AgreementMember:
    """The machine of one worker, run by its control thread. Events in, instructions out; never blocks.

    window: how many polls ahead a promise reaches (>= 1). A larger window lets the engine run on for longer between
    promise and decision; a smaller one installs sooner.

    A worker whose poll thread waits at the gate is not idle and answers held=False. Nothing is lost by that: one that
    waits at its bound is let go by the commit, which needs no progress of any engine; one that is parked at the target
    has more polls than any idle worker can have, and those that still owe polls will make them.
    """

    __slots__ = (
        "_attempt", "_bound", "_closed", "_gate", "_held_count", "_holding", "_installed", "_phase", "_reached", "_request",
        "_target", "_window",
    )  # fmt: skip

    def __init__(self, window: int) -> None:
        if window < 1:
            raise UsageError(f"window is {window}, expected at least 1 poll")
        self._window = window
        self._phase = _Phase.FREE
        self._request = 0  # the newest request begun here
        self._closed = 0  # every request up to this one is over here
        self._installed = 0  # the newest request whose install ended here
        self._gate = NO_GATE  # what the shared word holds once the instructions given so far are performed
        self._bound = 0
        self._target = 0
        self._reached = -1  # newest poll that met a gate; it still waits if the gate is not above it
        self._attempt = 0  # newest idle attempt of this request that was answered
        self._holding = False
        self._held_count = 0  # the poll count under the held lock; 0 when it is not held

    @property
    def request(self) -> int:
        """The request that is under way here, 0 if none is: what to abort when the leader is lost."""
        return 0 if self._phase is _Phase.FREE else self._request

    def handle(self, event: MemberEvent) -> _Out:
        """Feed one event; returns what the control thread must do, in order. Raises InternalError on a broken contract."""
        match event:
            case CountRead():
                return self._count_read(event.count)
            case LockTried():
                return self._lock_tried(event.held, event.count)
            case Reached():
                return self._poll_reached(event.count)
            case InstallDone():
                return self._install_done(event.request)
            case Proposed():
                return self._proposed(event.request)
            case Aborted():
                return self._aborted(event.request)
        if event.request == self._installed and isinstance(event, InstallAllowed | IdleInstall):
            return (SendInstalled(event.request),)
        if event.request != self._request or self._phase in (_Phase.FREE, _Phase.INSTALLING):
            return ()
        match event:
            case Committed():
                return self._committed(event.target)
            case InstallAllowed():
                stands_still = self._phase is _Phase.PARKED or self._holding
                return self._begin_install(idle=self._holding) if stands_still else ()
            case IdleInstall():
                return self._begin_install(idle=True) if self._holding and event.attempt == self._attempt else ()
            case IdleAsked():
                return self._idle_asked(event.attempt)
            case IdleReleased():
                return self._idle_released(event.attempt)

    # --- promise and commit ---

    def _proposed(self, request: int) -> _Out:
        if request <= self._closed:
            return ()
        if self._phase is not _Phase.FREE:
            if request == self._request and self._phase >= _Phase.PROMISED:
                return (SendPromise(request, self._bound),)
            if request <= self._request or self._phase is _Phase.INSTALLING:
                return ()
        released = self._drop_lock()  # a newer request: the leader has given up the one before
        self._closed = request - 1
        self._request = request
        self._phase = _Phase.READING
        self._attempt = 0
        return (*released, ReadCount())

    def _count_read(self, count: int) -> _Out:
        if self._phase is _Phase.CHECKING and count < self._gate:
            self._phase = _Phase.PROMISED
            self._bound = self._gate
            return (SendPromise(self._request, self._bound),)
        if self._phase not in (_Phase.READING, _Phase.CHECKING):
            raise InternalError(f"CountRead({count}) in phase {self._phase.name}, expected it only after ReadCount")
        self._phase = _Phase.CHECKING
        return (self._write_gate(count + self._window), ReadCount())

    def _committed(self, target: int) -> _Out:
        if self._phase is _Phase.PARKED:
            return (SendParked(self._request),)
        if self._phase is not _Phase.PROMISED:
            return ()
        self._phase = _Phase.COMMITTED
        self._target = target
        return (self._write_gate(target), *self._poll_reached(self._reached))

    def _poll_reached(self, count: int) -> _Out:
        self._reached = count
        if self._phase is not _Phase.COMMITTED or count < self._target:
            return ()
        if count > self._target:
            raise InternalError(
                f"request {self._request}: poll {count} met the gate, past the agreed poll {self._target}"
            )
        if self._holding:
            raise InternalError(
                f"poll {count} was made without the step lock, which this worker's control thread holds"
            )
        self._phase = _Phase.PARKED
        return (SendParked(self._request),)

    # --- idle engines ---

    def _idle_asked(self, attempt: int) -> _Out:
        if attempt < self._attempt:
            return ()
        if attempt == self._attempt:  # asked again: the answer stands, the leader may have counted on it
            return (SendIdle(self._request, attempt, self._holding, self._held_count),)
        released = self._drop_lock()
        self._attempt = attempt
        return (*released, TryLock())

    def _lock_tried(self, held: bool, count: int) -> _Out:
        if self._phase in (_Phase.FREE, _Phase.INSTALLING) or self._holding:
            raise InternalError(f"LockTried({held}) in phase {self._phase.name}, expected it only after TryLock")
        self._holding = held
        self._held_count = count if held else 0
        return (SendIdle(self._request, self._attempt, held, self._held_count),)

    def _idle_released(self, attempt: int) -> _Out:
        if attempt < self._attempt:
            return ()
        self._attempt = attempt
        return (*self._drop_lock(), SendIdle(self._request, attempt, False, 0))

    # --- install and end ---

    def _begin_install(self, *, idle: bool) -> _Out:
        self._phase = _Phase.INSTALLING
        return (Install(self._request, idle),)

    def _install_done(self, request: int) -> _Out:
        if self._phase is not _Phase.INSTALLING or request != self._request:
            return ()
        self._installed = request
        return (*self._close(request), SendInstalled(request))

    def _aborted(self, request: int) -> _Out:
        if request <= self._closed or (self._phase is not _Phase.FREE and request < self._request):
            return (SendAborted(request),)
        cancel = (CancelInstall(self._request),) if self._phase is _Phase.INSTALLING else ()
        return (*cancel, *self._close(request), SendAborted(request))

    def _close(self, request: int) -> _Out:
        self._closed = request
        self._phase = _Phase.FREE
        lifted = (self._write_gate(NO_GATE),) if self._gate != NO_GATE else ()
        return (*lifted, *self._drop_lock())

    def _write_gate(self, value: int) -> WriteGate:
        self._gate = value
        return WriteGate(value)

    def _drop_lock(self) -> _Out:
        held, self._holding, self._held_count = self._holding, False, 0
        return (ReleaseLock(),) if held else ()
