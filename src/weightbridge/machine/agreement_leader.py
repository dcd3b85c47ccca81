"""The leader of an engine's agreement: gathers promises, decides on the step, learns that everybody stands still there.

    propose -> promises -> target = max of the bounds -> commit -> all parked -> install -> all installed
                                                          \\-> all idle at one count -> install
A request that fails is aborted on every surviving member. Messages may be lost, doubled, late and out of order: every
answer is remembered once, and Tick sends again whatever is unanswered. Pure: no clock, no I/O, never blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

from weightbridge.errors import UsageError

__all__ = [
    "Abort", "AbortedFrom", "Agreed", "AgreementFailed", "AgreementLeader", "AllInstalled", "AskIdle", "IdleFrom",
    "InstalledFrom", "LeaderEvent", "LeaderInstruction", "MemberLost", "ParkedFrom", "PromiseFrom", "SendAbort", "SendCommit",
    "SendIdleInstall", "SendIdleRelease", "SendInstall", "SendPropose", "Start", "Tick",
]  # fmt: skip


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a request; its number is greater than every earlier one."""

    request: int


@dataclass(frozen=True, slots=True)
class PromiseFrom:
    member: int
    request: int
    bound: int


@dataclass(frozen=True, slots=True)
class ParkedFrom:
    member: int
    request: int


@dataclass(frozen=True, slots=True)
class IdleFrom:
    member: int
    request: int
    attempt: int
    held: bool
    count: int


@dataclass(frozen=True, slots=True)
class InstalledFrom:
    member: int
    request: int


@dataclass(frozen=True, slots=True)
class AbortedFrom:
    member: int
    request: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A timer fired. ask_idle: if nothing else is under way, also ask whether the engine is idle (a busy engine loses
    up to a message's round trip by it, so a shell may ask less often than it sends again)."""

    ask_idle: bool = True


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A member died, or is unreachable for good."""

    member: int
    cause: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Give the request up (a deadline ran out, a trainer died, the caller asks)."""

    request: int
    cause: str


LeaderEvent = (
    Start | PromiseFrom | ParkedFrom | IdleFrom | InstalledFrom | AbortedFrom | Tick | MemberLost | Abort
)  # fmt: skip


# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendPropose:
    """Becomes the member's Proposed."""

    member: int
    request: int


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Becomes the member's Committed."""

    member: int
    request: int
    target: int


@dataclass(frozen=True, slots=True)
class SendInstall:
    """Becomes the member's InstallAllowed."""

    member: int
    request: int


@dataclass(frozen=True, slots=True)
class AskIdle:
    """Becomes the member's IdleAsked."""

    member: int
    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class SendIdleInstall:
    """Becomes the member's IdleInstall."""

    member: int
    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class SendIdleRelease:
    """Becomes the member's IdleReleased."""

    member: int
    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Becomes the member's Aborted."""

    member: int
    request: int


@dataclass(frozen=True, slots=True)
class Agreed:
    """Every member stands still at `target` polls, parked or idle, until it has installed: weights may be overwritten."""

    request: int
    target: int


@dataclass(frozen=True, slots=True)
class AllInstalled:
    """Every member has reported the end of its install; the next request may start."""

    request: int
    target: int


@dataclass(frozen=True, slots=True)
class AgreementFailed:
    """The request is over. member: who was lost, None if it was given up. Before Agreed no member has installed or will;
    after it some may have, and the engine holds mixed versions."""

    request: int
    member: int | None
    cause: str


LeaderInstruction = (
    SendPropose
    | SendCommit
    | SendInstall
    | AskIdle
    | SendIdleInstall
    | SendIdleRelease
    | SendAbort
    | Agreed
    | AllInstalled
    | AgreementFailed
)

_Out = tuple[LeaderInstruction, ...]


class _Phase(IntEnum):
    FREE = 0
    PROPOSING = 1
    COMMITTED = 2
    INSTALLING = 3
    DONE = 4
    FAILED = 5


class _Idle(IntEnum):
    """Where the idle attempt stands. A new one starts only when every member has confirmed that the last is released."""

    NONE = 0
    ASKING = 1
    RELEASING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """What the leader knows of one member in this request. bound: -1 before the promise. idle_count: of the current
    attempt; -1 unanswered, -2 not held (final for the attempt), else the count under the held lock."""

    bound: int = -1
    parked: bool = False
    idle_count: int = -1
    installed: bool = False
    aborted: bool = False
    lost: str = ""


_UNANSWERED = -1
_NOT_HELD = -2


class AgreementLeader:
    """The machine of one engine's leader. Events in, instructions out; one request at a time.

    members: the ids of the engine's workers, the leader's own among them. Runs where the engine's rank 0 or the hub is.
    """

    __slots__ = ("_attempt", "_idle", "_idle_install", "_members", "_phase", "_request", "_target", "_views")

    def __init__(self, members: tuple[int, ...]) -> None:
        if not members or len(set(members)) != len(members):
            raise UsageError(f"members are {members}, expected at least one id and none twice")
        self._members = members
        self._views = tuple(_View() for _ in members)
        self._phase = _Phase.FREE
        self._request = 0
        self._target = 0
        self._attempt = 0
        self._idle = _Idle.NONE
        self._idle_install = False

    def handle(self, event: LeaderEvent) -> _Out:
        """Feed one event; returns what to send and to tell, in order. Raises UsageError on a Start out of turn."""
        match event:
            case Start():
                return self._start(event.request)
            case Tick():
                return self._tick(event.ask_idle)
            case MemberLost():
                return self._member_lost(event.member, event.cause)
        if event.request != self._request:
            return ()
        match event:
            case PromiseFrom():
                return self._promise(event.member, event.bound)
            case ParkedFrom():
                return self._parked(event.member)
            case IdleFrom():
                return self._idle_from(event)
            case InstalledFrom():
                return self._installed(event.member)
            case AbortedFrom():
                self._update(event.member, aborted=True)
                return ()
            case Abort():
                return self._fail(None, event.cause)

    @property
    def at_rest(self) -> bool:
        """No member waits, holds a lock or installs for this leader any more: the next request may start, weights may
        change."""
        if self._phase is _Phase.FAILED:
            return all(view.aborted or view.lost for view in self._views)
        return self._phase in (_Phase.FREE, _Phase.DONE)

    def waiting_for(self) -> tuple[tuple[int, str], ...]:
        """The members that owe something, and what, in words; for the messages of deadlines."""
        match self._phase:
            case _Phase.PROPOSING:
                return self._owing(f"its promise for request {self._request}", lambda v: v.bound < 0)
            case _Phase.COMMITTED:
                what = f"to reach poll {self._target} (or to go idle) for request {self._request}"
                return self._owing(what, lambda v: not v.parked)
            case _Phase.INSTALLING:
                return self._owing(f"the end of its install of request {self._request}", lambda v: not v.installed)
            case _Phase.FAILED:
                what = f"its confirmation that request {self._request} is aborted"
                return self._owing(what, lambda v: not v.aborted and not v.lost)
        return ()

    # --- the way to the target ---

    def _start(self, request: int) -> _Out:
        if request <= self._request:
            raise UsageError(f"request {request} cannot start after request {self._request}: requests must grow")
        if self._phase in (_Phase.PROPOSING, _Phase.COMMITTED):
            raise UsageError(
                f"request {request} cannot start while request {self._request} is under way; abort it first"
            )
        self._request = request
        self._views = tuple(_View(lost=view.lost) for view in self._views)
        self._phase = _Phase.PROPOSING
        self._target = self._attempt = 0
        self._idle, self._idle_install = _Idle.NONE, False
        for member, view in zip(self._members, self._views, strict=True):
            if view.lost:
                return self._fail(member, view.lost)
        return self._to_members(lambda _: True, lambda m: SendPropose(m, request))

    def _promise(self, member: int, bound: int) -> _Out:
        if self._phase is not _Phase.PROPOSING or self._view(member).bound >= 0:
            return ()
        self._update(member, bound=bound)
        if any(view.bound < 0 for view in self._views):
            return ()
        self._phase = _Phase.COMMITTED
        self._target = self._decide()
        return self._to_members(lambda _: True, lambda m: SendCommit(m, self._request, self._target))

    def _decide(self) -> int:
        """The largest bound: no worker can have passed its own, so none has passed this one."""
        return max(view.bound for view in self._views)

    def _parked(self, member: int) -> _Out:
        if self._phase is not _Phase.COMMITTED:
            return ()
        self._update(member, parked=True)
        if not all(view.parked for view in self._views):
            return ()
        return self._agree(idle=False)

    def _agree(self, *, idle: bool) -> _Out:
        self._phase = _Phase.INSTALLING
        self._idle_install = idle
        return (Agreed(self._request, self._target), *self._send_installs())

    def _send_installs(self) -> _Out:
        request, attempt = self._request, self._attempt
        if self._idle_install:
            return self._to_members(lambda v: not v.installed, lambda m: SendIdleInstall(m, request, attempt))
        return self._to_members(lambda v: not v.installed, lambda m: SendInstall(m, request))

    def _installed(self, member: int) -> _Out:
        if self._phase is not _Phase.INSTALLING:
            return ()
        self._update(member, installed=True)
        if not all(view.installed for view in self._views):
            return ()
        self._phase = _Phase.DONE
        return (AllInstalled(self._request, self._target),)

    # --- idle engines ---

    def _idle_from(self, answer: IdleFrom) -> _Out:
        current = self._phase is _Phase.COMMITTED and answer.attempt == self._attempt
        if not current or self._view(answer.member).idle_count == _NOT_HELD:
            return ()
        if self._idle is _Idle.RELEASING:
            if not answer.held:
                self._update(answer.member, idle_count=_NOT_HELD)
                if all(view.idle_count == _NOT_HELD for view in self._views):
                    self._idle = _Idle.NONE
            return ()
        self._update(answer.member, idle_count=answer.count if answer.held else _NOT_HELD)
        counts = {view.idle_count for view in self._views}
        if _NOT_HELD not in counts and _UNANSWERED in counts:
            return ()
        if _NOT_HELD not in counts and self._may_install_idle(counts):
            self._target = answer.count
            return self._agree(idle=True)
        self._idle = _Idle.NONE if counts == {_NOT_HELD} else _Idle.RELEASING
        return self._send_releases()

    def _may_install_idle(self, counts: set[int]) -> bool:
        """All locks are held; unequal counts mean that some worker still has a step to make that others have made."""
        return len(counts) == 1

    def _send_releases(self) -> _Out:
        request, attempt = self._request, self._attempt
        return self._to_members(lambda v: v.idle_count != _NOT_HELD, lambda m: SendIdleRelease(m, request, attempt))

    def _ask_idle(self, ask: bool) -> _Out:
        request = self._request
        if self._idle is _Idle.RELEASING:
            return self._send_releases()
        if self._idle is _Idle.NONE:
            # Whoever is parked has more polls than any idle worker: no attempt can succeed from then on.
            if not ask or any(view.parked for view in self._views):
                return ()
            self._attempt += 1
            self._idle = _Idle.ASKING
            self._views = tuple(replace(view, idle_count=_UNANSWERED) for view in self._views)
        attempt = self._attempt
        return self._to_members(lambda v: v.idle_count == _UNANSWERED, lambda m: AskIdle(m, request, attempt))

    # --- time and failure ---

    def _tick(self, ask_idle: bool) -> _Out:
        request, target = self._request, self._target
        match self._phase:
            case _Phase.PROPOSING:
                return self._to_members(lambda v: v.bound < 0, lambda m: SendPropose(m, request))
            case _Phase.COMMITTED:
                commits = self._to_members(lambda v: not v.parked, lambda m: SendCommit(m, request, target))
                return (*commits, *self._ask_idle(ask_idle))
            case _Phase.INSTALLING:
                return self._send_installs()
            case _Phase.FAILED:
                return self._send_aborts()
        return ()

    def _member_lost(self, member: int, cause: str) -> _Out:
        if self._view(member).lost:
            return ()
        self._update(member, lost=cause or "lost")
        return self._fail(member, cause)

    def _fail(self, member: int | None, cause: str) -> _Out:
        if self._phase not in (_Phase.PROPOSING, _Phase.COMMITTED, _Phase.INSTALLING):
            return ()
        self._phase = _Phase.FAILED
        return (AgreementFailed(self._request, member, cause), *self._send_aborts())

    def _send_aborts(self) -> _Out:
        request = self._request
        return self._to_members(lambda v: not v.aborted and not v.lost, lambda m: SendAbort(m, request))

    # --- the members' records ---

    def _view(self, member: int) -> _View:
        if member not in self._members:
            raise UsageError(f"worker {member} is no member of this engine, expected one of {self._members}")
        return self._views[self._members.index(member)]

    def _update(self, member: int, **changes: object) -> None:
        changed = replace(self._view(member), **changes)  # type: ignore[arg-type]
        at = self._members.index(member)
        self._views = (*self._views[:at], changed, *self._views[at + 1 :])

    def _owing(self, what: str, owes: Callable[[_View], bool]) -> tuple[tuple[int, str], ...]:
        return tuple((m, what) for m, view in zip(self._members, self._views, strict=True) if owes(view))

    def _to_members(self, which: Callable[[_View], bool], make: Callable[[int], LeaderInstruction]) -> _Out:
        return tuple(make(m) for m, view in zip(self._members, self._views, strict=True) if which(view))
