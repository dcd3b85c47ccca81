"""Who is in a session: the trainers and each engine as *sides*, from the first worker of a side that joins to its last map.

A side gathers its workers, is probed as a whole, and is then mapped: it can be planned for. Pure; driven by the session
machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from weightbridge.machine import messages as w
from weightbridge.machine.agreement import AgreementLeader

__all__ = ["TRAINERS", "Epoch", "Roster", "Side", "SideState"]

TRAINERS = ""
"""The name of the trainers' side; engines have names."""


class SideState(str, Enum):
    GATHERING = "gathering"
    PROBING = "probing"
    MAPPED = "mapped"


@dataclass(slots=True, eq=False)
class Side:
    """The trainers or one engine. An engine that comes back under its old name is a new Side."""

    name: str
    size: int
    since: float  # when its present state began
    state: SideState = SideState.GATHERING
    joins: dict[int, w.Join] = field(default_factory=dict)  # by rank
    workers: list[str] = field(default_factory=list)  # names, by rank
    maps: dict[str, bytes] = field(default_factory=dict)  # by worker
    step: int = 0  # of what its workers say to each other while they probe
    words: dict[str, bytes] = field(default_factory=dict)  # by worker, at this step
    leader: AgreementLeader | None = None  # of an engine's agreement on a step
    request: int = 0  # the newest one of its leader
    held: dict[str, int] = field(default_factory=dict)  # by worker: the version it has reported
    version: int = -1  # the newest that all of its workers hold
    poisoned: bool = False

    @property
    def is_engine(self) -> bool:
        return self.name != TRAINERS

    @property
    def complete(self) -> bool:
        return len(self.joins) == self.size

    @property
    def staged(self) -> bool:
        return any(j.staged for j in self.joins.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({d for j in self.joins.values() for d in j.dtypes}))

    def rank_of(self, worker: str) -> int:
        return next(rank for rank, join in self.joins.items() if join.worker == worker)

    def missing(self) -> list[str]:
        prefix = self.name or "trainer"
        return [f"{prefix}/{rank}" for rank in range(self.size) if rank not in self.joins]

    def say(self, worker: str, message: w.SideSay) -> str:
        """Note a worker's word to its side. Why it is out of turn, or empty; a word said twice changes nothing."""
        if message.step < self.step or self.words.get(worker) == message.data:
            return ""
        if message.step != self.step or worker in self.words:
            return f"spoke at step {message.step} of its side's probe, which is at step {self.step}"
        self.words[worker] = message.data
        return ""

    def heard(self) -> w.SideHeard | None:
        """What all have said at this step, once they have; the next step begins."""
        if len(self.words) < self.size:
            return None
        heard = w.SideHeard(step=self.step, data=tuple(self.words[name] for name in self.workers))
        self.step += 1
        self.words = {}
        return heard


@dataclass(slots=True)
class Epoch:
    """A set of members and the plan for them. order: worker names as the plan numbers them. digest: of the plan, ""
    before there is one, and again when a member is gone. plan: in its wire form, until the members hold it."""

    number: int
    sides: tuple[Side, ...]
    order: tuple[str, ...]
    digest: str = ""
    plan: bytes = b""

    @classmethod
    def of(cls, number: int, sides: tuple[Side, ...]) -> Epoch:
        return cls(number, sides, tuple(name for side in sides for name in side.workers))

    @property
    def planned(self) -> bool:
        return bool(self.digest)

    @property
    def joins(self) -> tuple[w.Join, ...]:
        """In plan order."""
        return tuple(side.joins[rank] for side in self.sides for rank in sorted(side.joins))

    @property
    def maps(self) -> tuple[bytes, ...]:
        """In plan order."""
        return tuple(side.maps[name] for side in self.sides for name in side.workers)


class Roster:
    """All sides of a session, in the order that numbers their workers in a plan: trainers, then engines as they came."""

    def __init__(self, *, spec_digest: str, num_trainers: int, engines: Iterable[str], now: float) -> None:
        """engines: those that have to come before the first plan is made, in this order."""
        self._spec_digest = spec_digest
        self._required = dict.fromkeys((TRAINERS, *engines))  # ordered, and looked up for each engine
        self.sides: dict[str, Side] = {TRAINERS: Side(name=TRAINERS, size=num_trainers, since=now)}
        self.side_of: dict[str, Side] = {}  # by worker

    def why_not(self, join: w.Join) -> str:
        """Why a worker may not join; empty when it may."""
        if join.protocol != w.PROTOCOL_VERSION:
            return f"speaks control protocol {join.protocol}, this session speaks {w.PROTOCOL_VERSION}; install one version"
        if join.spec_digest != self._spec_digest:
            return (
                f"its checkpoint spec has digest {join.spec_digest}, the trainers' has {self._spec_digest}; "
                "give both sides the same checkpoint"
            )
        if join.worker in self.side_of:
            return f"a worker named {join.worker!r} has joined already; engine names and ranks must be unique"
        side = self.sides.get(join.engine)
        prefix = join.engine or "trainer"
        if join.role not in ("trainer", "rollout") or (join.role == "trainer") != (join.engine == TRAINERS):
            return f"says it is a {join.role!r} of engine {join.engine!r}; a trainer has no engine, a rollout worker has one"
        if join.worker != f"{prefix}/{join.rank}" or not join.rank < join.size:
            return f"calls itself {join.worker!r} with rank {join.rank} of {join.size}; its name must be {prefix}/RANK"
        if side is None:
            return ""
        if join.size != side.size:
            who = (
                "the trainers, of whom rank 0"
                if join.engine == TRAINERS
                else f"engine {join.engine!r}, another of whose workers"
            )
            return f"says there are {join.size} workers in {who} says {side.size}; use one group"
        if any(j.staged != join.staged for j in side.joins.values()):
            return f"has staged={join.staged}, other workers of its side have not; give all of them the same Options"
        return ""

    def add(self, join: w.Join, now: float) -> Side:
        side = self.sides.get(join.engine)
        if side is None:
            side = self.sides[join.engine] = Side(name=join.engine, size=join.size, since=now)
        side.joins[join.rank] = join
        side.workers = [side.joins[rank].worker for rank in sorted(side.joins)]
        side.version = max(side.version, join.version)
        self.side_of[join.worker] = side
        return side

    def remove(self, side: Side) -> None:
        for worker in side.workers:
            del self.side_of[worker]
        del self.sides[side.name]

    @property
    def engines(self) -> list[Side]:
        """Those the sender named first, in its order, then the others as they came."""
        named = [self.sides[name] for name in self._required if name in self.sides]
        others = [side for side in self.sides.values() if side.name not in self._required]
        return [side for side in (*named, *others) if side.is_engine]

    @property
    def trainers(self) -> Side:
        return self.sides[TRAINERS]

    def required(self) -> list[Side | None]:
        """The sides that the first plan waits for; None for one of which no worker has joined."""
        return [self.sides.get(name) for name in self._required]

    def missing(self) -> list[str]:
        """Workers that the first plan waits for and that have not joined."""
        out: list[str] = []
        for name, side in zip(self._required, self.required(), strict=True):
            out += side.missing() if side is not None else [f"{name}/* (no worker of it)"]
        return out
