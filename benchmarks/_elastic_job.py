"""The supervisor of `benchmarks.elastic`: sends versions, lets engines come and go, and holds what all say against it."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from benchmarks._elastic_workers import NUM_TRAINERS, Role, live
from weightbridge.testing.ports import free_port

MAX_GUESTS = 3
CALM_VERSIONS = 5
"""Sent to those who stay alone, before each look at them: their EWTT and growth are compared under the same conditions."""
LOOKS = 10
JOIN, LEAVE, KILL = 0.2, 0.06, 0.09  # chances at each version
VERSION_SECONDS = 90.0  # beyond the deadlines of Options: whoever is awaited for longer hangs
PARTING_SECONDS = 45.0

_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["benchmarks._elastic_workers"])


class HangError(Exception):
    """Somebody did not do in time what it must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    versions: int
    seed: int
    stage_send: bool = False
    when_engine_fails: str = "drop"


@dataclass(slots=True, eq=False)
class Member:
    """One process. ending: its last word."""

    role: Role
    process: Any
    connection: Connection
    joined: bool = False
    installed: int = -1
    ending: tuple[Any, ...] | None = None
    looks: list[dict[str, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Engine:
    """since: the first version it took; None before. victim: who of it was killed. told: what the hub has said of its going."""

    name: str
    members: list[Member]
    since: int | None = None
    leaving: bool = False
    victim: Member | None = None
    must_be_named: bool = False
    told: tuple[str, str] | None = None

    @property
    def stays(self) -> bool:
        return not self.leaving and self.victim is None


class Job:
    """The supervisor. Every method that waits has a deadline and raises HangError at it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.dice = random.Random(
            settings.seed
        )  # thrown three times a version, whatever happens: who comes and goes when
        self.random = random.Random(settings.seed)  # everything else
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.sent: list[dict[str, Any]] = []  # each version: version, ewtt_seconds (None: given up), attempts, calm
        self.answers: dict[Member, tuple[Any, ...]] = {}  # of the trainers, to the version in flight
        self.again: dict[int, str] = {}  # versions that somebody has installed twice: they must have been sent twice
        self.engines: dict[str, Engine] = {}
        self.members: list[Member] = []  # all whose process has not been joined
        self.gone_names: set[str] = set()  # whose workers may be named as the cause of a failure
        self.began = self._told_at = time.monotonic()
        stayers = {"stays": (2, False), "keeps": (1, True)}
        common = {"endpoint": self.endpoint, "when_engine_fails": settings.when_engine_fails}
        self.trainers = [
            self._start(
                Role(
                    side="trainer", rank=rank, size=NUM_TRAINERS, node="trainers", staged=settings.stage_send,
                    engines=tuple(stayers), **common,
                )
            )
            for rank in range(NUM_TRAINERS)
        ]  # fmt: skip
        for name, (size, staged) in stayers.items():
            self._add(name, size, staged=staged, node=name)
        self.stayers = [member for name in stayers for member in self.engines[name].members]

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, role: Role) -> Member:
        ours, theirs = Pipe()
        process = _CONTEXT.Process(target=live, args=(role, theirs), daemon=True)
        process.start()
        theirs.close()
        member = Member(role, process, ours)
        self.members.append(member)
        return member

    def _add(self, name: str, size: int, *, staged: bool, node: str) -> None:
        roles = [
            Role(side=name, rank=rank, size=size, endpoint=self.endpoint, staged=staged, node=node)
            for rank in range(size)
        ]
        self.gone_names.difference_update(role.name for role in roles)
        self.engines[name] = Engine(name, [self._start(role) for role in roles])

    @property
    def guests(self) -> list[Engine]:
        return [e for e in self.engines.values() if e.members[0] not in self.stayers]

    def join(self) -> None:
        self.counts["joins"] += 1
        name = f"guest{self.counts['joins'] % 40}"  # names come back, long after
        node = self.random.choice(["trainers", name])
        self._add(name, self.random.choice([1, 2]), staged=self.random.random() < 0.5, node=node)

    def leave(self, engine: Engine | None = None) -> None:
        """Tell an engine that nobody has told yet."""
        engine = engine or self._one_of([e for e in self.guests if e.stays])
        if engine is not None and engine.stays:
            self.counts["leaves"] += 1
            self._tell_to_leave(engine, engine.members)

    def kill(self) -> None:
        """SIGKILL one worker of an engine, whatever it is doing. The others of it must hear who it was, from the hub."""
        engine = self._one_of([e for e in self.guests if e.stays])
        if engine is None:
            return
        self.counts["kills"] += 1
        engine.victim = victim = self.random.choice(engine.members)
        os.kill(victim.process.pid, signal.SIGKILL)
        self.gone_names.update(m.role.name for m in engine.members)
        engine.must_be_named = all(m.joined for m in engine.members)
        if not engine.must_be_named:  # nobody knows of it yet: the others would wait for it
            self._tell_to_leave(engine, [m for m in engine.members if m is not victim])

    def _one_of(self, engines: Sequence[Engine]) -> Engine | None:
        return self.random.choice(engines) if engines else None

    def _tell_to_leave(self, engine: Engine, members: Sequence[Member]) -> None:
        engine.leaving = True
        self.gone_names.update(m.role.name for m in engine.members)
        for member in members:
            self._order(member, "leave")

    def _order(self, member: Member, *order: Any) -> None:
        with suppress(OSError):  # its end is closed: what it said last, or its exit code, will show why
            member.connection.send(order)

    # --- what they say --------------------------------------------------------------------------------------------------

    def wait_for(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        give_up = time.monotonic() + seconds
        while not done():
            if time.monotonic() > give_up:
                raise HangError(f"waited {seconds:.0f} s for {what}")
            self.listen(0.1)

    def listen(self, seconds: float) -> None:
        """Take in what has been said, for at most so long; see who is gone."""
        of = {m.connection: m for m in self.members if not m.connection.closed}
        for connection in wait(list(of), seconds):
            member = of[connection]  # type: ignore[index]
            try:
                while member.connection.poll():
                    self._heard(member, member.connection.recv())
            except (EOFError, OSError):
                member.connection.close()
        for member in [m for m in self.members if m.connection.closed]:
            member.process.join(PARTING_SECONDS)
            self._ended(member)
        self._progress()

    def _heard(self, member: Member, said: tuple[Any, ...]) -> None:
        name = member.role.name
        match said:
            case ("joined",):
                member.joined = True
            case ("connected",):
                self.counts["connected"] += 1
            case ("installed", version, right, step):
                member.installed = version
                self.counts["installed"] += 1
                self._check(right, f"{name} installed version {version} with wrong values", "wrong values")
                self._check(step >= 0, f"{name} installed version {version} after a newer one")
                if step == 0:
                    self.again[version] = name
            case ("kept", version, right):
                self._check(right, f"{name} held something else than version {version} when it left", "wrong values")
            case ("poisoned", causes):
                self.counts["poisoned"] += 1
                self._check(self.gone_names.issuperset(causes), f"{name} is poisoned by {causes}, who did not go")
            case ("looked", look):
                member.looks.append(look)
            case ("sent" | "given up", *_):
                self.answers[member] = said
            case ("engine", engine, state, reason):
                self._hub_said(engine, state, reason)
            case ("left",) | ("ended", *_) | ("broken", *_):
                member.ending = said

    def _check(self, holds: bool, problem: str, count: str = "") -> None:
        if not holds:
            self.problems.append(problem)
            if count:
                self.counts[count] += 1

    def _hub_said(self, name: str, state: str, reason: str) -> None:
        engine = self.engines.get(name)
        if engine is None or state == "joining":
            return
        engine.told = (state, reason)
        self._check(not engine.stays, f"the hub says that {name} is {state}, but nobody told or killed it: {reason}")
        if engine.must_be_named and engine.victim is not None:
            named = engine.victim.role.name in reason
            self._check(
                named and state == "lost", f"{engine.victim.role.name} was killed, the hub says {state}: {reason}"
            )

    def _ended(self, member: Member) -> None:
        """A process is gone: as it was to be?"""
        self.members.remove(member)
        name, code, last = member.role.name, member.process.exitcode, member.ending
        engine = self.engines.get(member.role.side)
        member.process.close()
        if engine is not None and engine.victim is member:
            return
        what = f"{name} ended with {code} and said {last} at last"
        match last:
            case ("ended", _, causes) if engine is not None:
                own = set(causes) <= {m.role.name for m in engine.members}
                named = not engine.must_be_named or (engine.victim is not None and engine.victim.role.name in causes)
                self._check(code == 0 and own and named and not engine.stays, what)
            case ("left",):
                self._check(code == 0 and (engine is None or engine.leaving), what)
            case _:
                self._check(False, what)

    def _progress(self) -> None:
        if time.monotonic() - self._told_at > 0.5:
            self._told_at = time.monotonic()
            c = self.counts
            print(
                f"\r{len(self.sent)} of {self.settings.versions} versions, {c['joins']} joined, {c['leaves']} left, "
                f"{c['kills']} killed, {c['retries']} retries, {c['given up']} given up, {len(self.problems)} problems  ",
                end="", file=sys.stderr, flush=True,
            )  # fmt: skip

    # --- versions -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All versions, and the end of the session."""
        self.wait_for(lambda: self.counts["connected"] == NUM_TRAINERS, "the trainers to connect", VERSION_SECONDS)
        every = max(self.settings.versions // LOOKS, 4 * CALM_VERSIONS)
        for version in range(1, self.settings.versions + 1):
            left = every - 1 - (version - 1) % every  # until the next look
            if left == CALM_VERSIONS - 1:
                self._retire()
            self._send(version, calm=left < CALM_VERSIONS)
            if left == 0:
                self._look()
        self._retire()
        for engine in self.engines.values():
            engine.leaving = True
        for trainer in self.trainers:
            self._order(trainer, "close")
        self.wait_for(lambda: not self.members, "the end of the session", PARTING_SECONDS)

    def _send(self, version: int, *, calm: bool) -> None:
        due = {e.name for e in self.engines.values() if e.stays and e.since is not None}
        acts: list[Callable[[], None]] = [] if calm else self._acts()
        begin = time.monotonic()
        span = 2 * (self.sent[-1]["ewtt_seconds"] or 0.02) if self.sent else 0.02
        moments = sorted((begin + self.random.uniform(-0.2, 1) * span, i) for i in range(len(acts)))
        if moments and moments[0][0] < begin:
            acts[moments.pop(0)[1]]()
        self.answers = {}
        for trainer in self.trainers:
            self._order(trainer, "send", version)
        while len(self.answers) < NUM_TRAINERS or moments:
            if time.monotonic() > begin + VERSION_SECONDS:
                raise HangError(f"waited {VERSION_SECONDS:.0f} s for the end of version {version}")
            self._check_alive()
            now = time.monotonic()
            if moments and moments[0][0] <= now:
                acts[moments.pop(0)[1]]()
            else:
                self.listen(moments[0][0] - now if moments else 0.1)
        self._judge(version, due, calm=calm)

    def _check_alive(self) -> None:
        for member in (*self.trainers, *self.stayers):
            if member not in self.members:
                raise HangError(f"{member.role.name} is gone")

    def _acts(self) -> list[Callable[[], None]]:
        joins, leaves, kills = (self.dice.random() < chance for chance in (JOIN, LEAVE, KILL))
        chosen = [(joins and len(self.guests) < MAX_GUESTS, self.join), (leaves, self.leave), (kills, self.kill)]
        return [act for wanted, act in chosen if wanted]

    def _judge(self, version: int, due: set[str], *, calm: bool) -> None:
        """What the trainers say of a version, and whether every engine that had to take it has."""
        self._check_alive()
        said = list(self.answers.values())
        kinds = {answer[0] for answer in said}
        self._check(len(kinds) == 1, f"trainers disagree about version {version}: {said}")
        entry: dict[str, Any] = {"version": version, "ewtt_seconds": None, "attempts": 1, "calm": calm}
        self.sent.append(entry)
        if "given up" in kinds:
            self.counts["given up"] += 1
            causes = next(answer[3] for answer in said if answer[0] == "given up")
            self._check(bool(causes) and self.gone_names.issuperset(causes), f"version {version} was given up: {said}")
            return
        _, _, engines, entry["attempts"], entry["ewtt_seconds"] = said[0]
        self.counts["retries"] += entry["attempts"] - 1
        twice = self.again.pop(version, "")
        self._check(not twice or entry["attempts"] > 1, f"{twice} installed version {version} twice, it was sent once")
        for name in (name for name, how in engines.items() if how == "ready" and name in self.engines):
            engine = self.engines[name]
            if engine.stays:
                engine.since = version if engine.since is None else engine.since
        for engine in [e for e in self.engines.values() if e.stays]:
            if engine.name in due:
                how = engines.get(engine.name)
                self._check(how == "ready", f"{engine.name} was ready and is {how} at version {version}")
            if engines.get(engine.name) == "ready":
                what = f"{engine.name} to serve version {version}, as the trainers were told"
                self.wait_for(
                    lambda e=engine: not e.stays or all(m.installed >= version for m in e.members), what, 10.0
                )  # type: ignore[misc]
        self._forget_the_gone()

    def _forget_the_gone(self) -> None:
        """Engines all of whose processes have ended; a killed one when the hub has said so too."""
        for engine in self.guests:
            if not any(m in self.members for m in engine.members) and (engine.told or not engine.must_be_named):
                del self.engines[engine.name]

    def _retire(self) -> None:
        """All guests leave; those that were killed must have been missed."""
        for engine in self.guests:
            self.leave(engine)

        def gone() -> bool:
            self._forget_the_gone()
            return not self.guests

        self.wait_for(gone, "all guests to be gone", PARTING_SECONDS)

    def _look(self) -> None:
        watched = (*self.trainers, *self.stayers)
        num = len(watched[0].looks) + 1
        for member in watched:
            self._order(member, "look")
        self.wait_for(lambda: all(len(m.looks) == num for m in watched), "a look at those who stay", PARTING_SECONDS)

    def stop(self) -> None:
        """After a hang: every process says on stderr what it is doing, then it is killed."""
        for member in self.members:
            if member.process.is_alive():
                print(f"== {member.role.name}", file=sys.stderr, flush=True)
                os.kill(member.process.pid, signal.SIGUSR1)
                member.process.join(0.3)
        for member in self.members:
            member.process.kill()
            member.process.join(10)
