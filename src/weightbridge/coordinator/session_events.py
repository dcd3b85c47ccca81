"""What a session tells its observers: one dataclass a kind of event, given to Options(on_event=...).

They are for people and their monitoring. Nothing in the library depends on whether anybody listens, and no decision is taken
by them. The bytes' own story, step by step, is `executor.Observation`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = [
    "Connected", "EngineChanged", "Installed", "Joined", "OnEvent", "PhaseChanged", "Planned", "Probing", "Progress",
    "SessionEnded", "SessionEvent", "Superseded", "UpdateFailed", "UpdateFinished", "UpdateStarted", "guarded_observer",
]  # fmt: skip

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent:
    """Base of all. at: seconds since the epoch by this machine's clock. worker: who tells it, "trainer/0" for the hub."""

    at: float
    worker: str


# --- connect ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(SessionEvent):
    """The hub has let this worker in. session: a random number that all its workers share."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChanged(SessionEvent):
    """Told by the hub. phase: a value of `machine.session.Phase`; each lasts until the next event of this kind."""

    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probing(SessionEvent):
    """This worker's layout is being learnt. what: the step that was just done; done, total: steps."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(SessionEvent):
    """Told by the hub: there is a verified plan.

    pairs: of workers that exchange bytes over the network. rounds: K. ratio_to_bound: the time of the plan's busiest
    link over the least that any plan could need; 1.0 is best.
    """

    epoch: int
    planning_seconds: float
    pairs: int
    rounds: int
    ratio_to_bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected(SessionEvent):
    """This worker is connected to all its peers of this attempt."""

    epoch: int
    attempt: int


# --- updates ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStarted(SessionEvent):
    """This worker begins its part of an attempt at a version; again for each attempt."""

    version: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(SessionEvent):
    """This worker has done `round` of `rounds` rounds of the version; at most some five times a second."""

    version: int
    round: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed(SessionEvent):
    """This rollout worker serves the version. stall_seconds: for how long it has just stood still."""

    version: int
    stall_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFinished(SessionEvent):
    """A version has ended well; told by every trainer, with the same figures.

    ewtt_seconds: from the first worker that stopped computing to the last that resumed. agst_seconds: total stall over
    the number of workers. ideal_seconds: T_min of the plan at the workers' bandwidths, 0.0 where no byte has to cross
    the network. network_bytes: worker -> (sent, received) between nodes. slowest_worker, slowest_stage: who went on
    last, and what took most of its stall: capture or send (a trainer), agreement, transfer or install. attempts: how
    often it was sent. superseded: an engine left it out for a newer one.
    """

    version: int
    ewtt_seconds: float
    agst_seconds: float
    ideal_seconds: float
    network_bytes: Mapping[str, tuple[int, int]]
    slowest_worker: str = ""
    slowest_stage: str = ""
    attempts: int = 1
    superseded: bool = False

    @property
    def ratio(self) -> float | None:
        """Achieved over ideal: EWTT over T_min, at least about 1.0; None where there is no ideal to compare with."""
        return self.ewtt_seconds / self.ideal_seconds if self.ideal_seconds > 0 else None

    @property
    def received_bytes(self) -> int:
        """Bytes that crossed the network, each counted once: what all workers received."""
        return sum(received for _, received in self.network_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFailed(SessionEvent):
    """A version was given up; the session goes on. causes: worker -> what happened. poisoned: engines with mixed weights."""

    version: int
    causes: Mapping[str, str]
    poisoned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded(SessionEvent):
    """This worker's engine leaves `version` out, for the newer version `by`."""

    version: int
    by: int


# --- members ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChanged(SessionEvent):
    """Told by the hub. state: joining, ready, updating, poisoned, lost or left. version: what the engine holds, -1 for none."""

    engine: str
    state: str
    version: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded(SessionEvent):
    """The session is over for this worker; nothing follows, unless it joins the next one.

    kind: class name of the error, "" when it ended in good order. causes: worker -> what happened.
    """

    kind: str = ""
    causes: Mapping[str, str]


OnEvent = Callable[[SessionEvent], None]
"""Called on the library's own threads: it must be quick, must not raise, and must not call an adapter."""

_T = TypeVar("_T")


def guarded_observer(observer: Callable[[_T], None], name: str = "") -> Callable[[_T], None]:
    """The same observer, which never raises: an exception of it is logged, the first one only, and it goes on being told.

    name: what the log calls it; by default its own. For whoever calls observers: a session must not fail by one.
    """
    named = name or getattr(observer, "__qualname__", type(observer).__name__)
    complained = False

    def tell(what: _T) -> None:
        nonlocal complained
        try:
            observer(what)
        except Exception:  # an observer is the user's code
            if not complained:
                complained = True
                _LOG.exception(
                    "observer %s raised on %s; it goes on being told, and this is logged once",
                    named,
                    type(what).__name__,
                )

    return tell
