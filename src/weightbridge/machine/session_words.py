"""What goes into and comes out of the session machine, and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from weightbridge.machine import messages as w

__all__ = [
    "HUB_WORKER", "Admit", "Disconnected", "EngineNote", "Forget", "Joining", "MakePlan", "Phase", "PlanMade",
    "PlanRefused", "Received", "Refuse", "Send", "SessionEvent", "SessionInstruction", "SessionPolicy",
    "SessionTimeouts", "Tick",
]  # fmt: skip

HUB_WORKER = "trainer/0"
"""The worker whose process the hub lives in."""


class Phase(str, Enum):
    GATHERING = "gathering"
    PROBING = "probing"
    PLANNING = "planning"
    LOWERING = "lowering"
    CONNECTING = "connecting"
    READY = "ready"
    UPDATING = "updating"
    ABORTING = "aborting"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTimeouts:
    """All in seconds. connect: for all to join, and again for each phase up to ready. update: one attempt at a version, and the
    time between the first and the last trainer's call. heartbeat: silence after which a worker counts as lost. suspect:
    the same for a worker that a peer has lost or whose connection has closed."""

    connect: float
    update: float
    heartbeat: float
    suspect: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPolicy:
    """when_newer: what becomes of a version in flight when every trainer has sent a newer one: "finish" it first, or let staged
    engines that have not begun to install it skip it ("supersede"). when_engine_fails: "drop" the engine and try again
    without it, or "fail" the update; either way the session goes on without it. retries: further attempts when nobody
    is lost."""

    when_newer: Literal["finish", "supersede"] = "finish"
    when_engine_fails: Literal["drop", "fail"] = "fail"
    retries: int = 1


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joining:
    """A connection asks to be let in. `connection` is the shell's handle for it."""

    connection: bytes
    join: w.Join


@dataclass(frozen=True, slots=True)
class Received:
    worker: str
    message: w.Message


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A hint: the worker's connection has closed. It may come back."""

    worker: str


@dataclass(frozen=True, slots=True)
class PlanMade:
    epoch: int
    plan: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class PlanRefused:
    epoch: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A timer, several times a second. stood_still: seconds up to now in which nobody listened to the workers."""

    stood_still: float = 0.0


SessionEvent = Joining | Received | Disconnected | PlanMade | PlanRefused | Tick


# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    worker: str
    message: w.Message


@dataclass(frozen=True, slots=True)
class Admit:
    """From now on `connection` is this worker; send it the message."""

    connection: bytes
    worker: str
    message: w.Welcome


@dataclass(frozen=True, slots=True)
class Refuse:
    connection: bytes
    message: w.Rejected


@dataclass(frozen=True, slots=True)
class Forget:
    """The worker is no member any more; its name may join again, over another connection."""

    worker: str


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Plan for these workers (in this order) with these source maps; answer PlanMade or PlanRefused with the epoch."""

    epoch: int
    joins: tuple[w.Join, ...]
    maps: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class EngineNote:
    """For observers: what has become of an engine. state: joining, ready, updating, poisoned, lost or left."""

    engine: str
    state: str
    version: int
    reason: str = ""


SessionInstruction = Send | Admit | Refuse | Forget | MakePlan | EngineNote
