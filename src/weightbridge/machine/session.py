"""The session machine: the hub's view of a job, from the first worker that joins to the last update.

Pure: messages and ticks in, messages and requests out; time is an argument. The hub's I/O shell is `coordinator/hub.py`.

    gathering -> probing -> planning -> lowering -> connecting -> ready <-> updating
    any of them -> failed (terminal: every worker is told who failed and how) or closed

One agreement on the step (machine/agreement.py) runs per engine and request: for probing at connect as for an update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from weightbridge.machine import agreement as a
from weightbridge.machine import messages as w

__all__ = [
    "HUB_WORKER", "Admit", "Joining", "MakePlan", "Phase", "PlanMade", "PlanRefused", "Received", "Refuse", "Send",
    "SessionEvent", "SessionInstruction", "SessionMachine", "SessionTimeouts", "Tick",
]  # fmt: skip

LEADER_TICK_SECONDS = 0.2
"""How often an agreement sends again what is unanswered, and asks whether its engine is idle."""

HUB_WORKER = "trainer/0"
"""The worker whose process the hub lives in."""

HEARD_SECONDS = 1.0
"""How long the hub waits for others to confirm a failure (the dead never will) before it tells its own worker."""


class Phase(str, Enum):
    GATHERING = "gathering"
    PROBING = "probing"
    PLANNING = "planning"
    LOWERING = "lowering"
    CONNECTING = "connecting"
    READY = "ready"
    UPDATING = "updating"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTimeouts:
    """All in seconds. connect: for all to join, and again for each phase up to ready. update: one version, and the time
    between the first and the last trainer's call. heartbeat: silence after which a worker counts as lost."""

    connect: float
    update: float
    heartbeat: float


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
class PlanMade:
    plan: bytes
    digest: str


@dataclass(frozen=True, slots=True)
class PlanRefused:
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A timer, several times a second."""


SessionEvent = Joining | Received | PlanMade | PlanRefused | Tick


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
class MakePlan:
    """Plan for these workers (in this order) with these source maps; answer PlanMade or PlanRefused."""

    epoch: int
    joins: tuple[w.Join, ...]
    maps: tuple[bytes, ...]


SessionInstruction = Send | Admit | Refuse | MakePlan


@dataclass(slots=True)
class _Update:
    """What is known of the version in flight."""

    version: int
    attempt: int
    request: int
    agreed: set[str] = field(default_factory=set)
    allowed: bool = False
    transferred: set[str] = field(default_factory=set)
    committed: set[str] = field(default_factory=set)
    resumed: dict[str, w.Resumed] = field(default_factory=dict)


class SessionMachine:
    """One job. `handle(event, now)` returns what the shell has to do; `now` is in seconds of any steady clock."""

    def __init__(
        self,
        *,
        session: int,
        spec_digest: str,
        num_trainers: int,
        engines: Iterable[str],
        timeouts: SessionTimeouts,
        now: float,
    ) -> None:
        """engines: names of the engines that have to join before the session is ready."""
        self.session = session
        self.phase = Phase.GATHERING
        self._spec_digest = spec_digest
        self._num_trainers = num_trainers
        self._engines = tuple(engines)
        self._timeouts = timeouts
        self._since = now
        self._joins: dict[str, w.Join] = {}
        self._last_seen: dict[str, float] = {}
        self._leaders: dict[str, a.AgreementLeader] = {}
        self._request = 0
        self._epoch = 0
        self._attempt = 0
        self._plan_digest = ""
        self._probed: set[str] = set()
        self._maps: dict[str, bytes] = {}
        # What the workers of a side ("" for the trainers) tell each other while they probe: the step, and the words at it.
        self._side_steps: dict[str, int] = {}
        self._side_words: dict[str, dict[str, bytes]] = {}  # side -> worker -> its word
        self._endpoints: dict[str, w.PeerEndpoint] = {}
        self._connected: set[str] = set()
        self._send_ready: dict[str, int] = {}
        self._send_since = now
        self._update: _Update | None = None
        self._version = -1
        self._gone: set[str] = set()
        self._next_leader_tick = now
        self._unheard: set[str] = set()  # who has yet to confirm the failure
        self._tell_until: float | None = None
        self._last_word: Send | None = None  # the failure for the hub's own worker, which is told last
        self._out: list[SessionInstruction] = []

    # --- the one entry --------------------------------------------------------------------------------------------------

    def handle(self, event: SessionEvent, now: float) -> tuple[SessionInstruction, ...]:
        """Never blocks, never raises on what a worker sends."""
        self._out = []
        match event:
            case Joining(connection=connection, join=join):
                self._join(connection, join, now)
            case Received(worker=worker, message=message):
                self._last_seen[worker] = now
                self._received(worker, message, now)
            case PlanMade(plan=plan, digest=digest):
                self._plan_digest = digest
                self._enter(Phase.LOWERING, now)
                self._broadcast(w.PlanReady(epoch=self._epoch, plan=plan))
            case PlanRefused(kind=kind, reason=reason):
                self._fail({"planner": reason}, kind)
            case Tick():
                self._tick(now)
        return tuple(self._out)

    # --- joining ----------------------------------------------------------------------------------------------------------

    def _join(self, connection: bytes, join: w.Join, now: float) -> None:
        reason = self._why_not(join)
        if reason:
            self._out.append(Refuse(connection, w.Rejected(reason=reason)))
            return
        self._joins[join.worker] = join
        self._last_seen[join.worker] = now
        self._out.append(Admit(connection, join.worker, w.Welcome(session=self.session)))
        if not self._missing_joins():
            self._begin_probing(now)

    def _why_not(self, join: w.Join) -> str:
        """Empty when the worker may join."""
        if join.protocol != w.PROTOCOL_VERSION:
            return f"speaks control protocol {join.protocol}, this session speaks {w.PROTOCOL_VERSION}; install one version"
        if self.phase is not Phase.GATHERING:
            return f"the session is {self.phase.value} and takes no more workers; close the sender and connect anew"
        if join.spec_digest != self._spec_digest:
            return (
                f"its checkpoint spec has digest {join.spec_digest}, the trainers' has {self._spec_digest}; "
                "give both sides the same checkpoint"
            )
        if join.worker in self._joins:
            return f"a worker named {join.worker!r} has joined already; engine names and ranks must be unique"
        if join.role == "trainer":
            if join.size != self._num_trainers:
                return f"says there are {join.size} trainers, rank 0 says {self._num_trainers}; use one group"
        elif join.engine not in self._engines:
            return f"engine {join.engine!r} is not expected; the sender was given engines={list(self._engines)}"
        elif any(j.engine == join.engine and j.size != join.size for j in self._joins.values()):
            return f"says engine {join.engine!r} has {join.size} workers, another of its workers says otherwise"
        return ""

    def _missing_joins(self) -> list[str]:
        missing = [f"trainer/{r}" for r in range(self._num_trainers) if f"trainer/{r}" not in self._joins]
        for engine in self._engines:
            ranks = {j.rank: j.size for j in self._joins.values() if j.engine == engine}
            size = next(iter(ranks.values()), 0)
            missing += (
                [f"{engine}/{r}" for r in range(size) if r not in ranks] if size else [f"{engine}/* (no worker of it)"]
            )
        return missing

    # --- connect ----------------------------------------------------------------------------------------------------------

    def _begin_probing(self, now: float) -> None:
        self._enter(Phase.PROBING, now)
        self._request += 1
        for engine in self._engines:
            self._leaders[engine] = a.AgreementLeader(tuple(sorted(j.rank for j in self._members(engine))))
            self._lead(engine, a.Start(self._request), now)
        self._send_probe("")

    def _send_probe(self, engine: str) -> None:
        members = self._members(engine)
        dtypes = tuple(sorted({d for j in members for d in j.dtypes}))
        for join in members:
            self._out.append(Send(join.worker, w.RunProbe(request=self._request, dtypes=dtypes)))

    def _side_said(self, worker: str, message: w.SideSay) -> None:
        """An all-gather among the workers of a side, while they probe."""
        if self.phase is not Phase.PROBING:
            return
        side = self._joins[worker].engine
        step, words = self._side_steps.get(side, 0), self._side_words.setdefault(side, {})
        if message.step != step or worker in words:
            reason = f"spoke at step {message.step} of its side's probe, which is at step {step}"
            self._fail({worker: reason}, "InternalError")
            return
        words[worker] = message.data
        members = [j.worker for j in self._members(side)]
        if len(words) == len(members):
            heard = w.SideHeard(step=step, data=tuple(words[name] for name in members))
            self._out += [Send(name, heard) for name in members]
            self._side_steps[side] = step + 1
            self._side_words[side] = {}

    def _layout_ready(self, worker: str, message: w.LayoutReady, now: float) -> None:
        self._maps[worker] = message.source_map
        if self.phase is Phase.PROBING and len(self._maps) == len(self._joins):
            self._enter(Phase.PLANNING, now)
            order = self._order()
            joins = tuple(self._joins[name] for name in order)
            self._out.append(MakePlan(self._epoch, joins, tuple(self._maps[name] for name in order)))
            self._maps = dict.fromkeys(order, b"")  # the bytes are the planner's now

    def _program_ready(self, worker: str, message: w.ProgramReady, now: float) -> None:
        if message.plan_digest != self._plan_digest:
            reason = f"holds plan {message.plan_digest}, the session runs {self._plan_digest}; install one version everywhere"
            self._fail({worker: reason}, "InternalError")
            return
        self._endpoints[worker] = message.endpoint
        if self.phase is Phase.LOWERING and len(self._endpoints) == len(self._joins):
            self._attempt += 1
            self._connected = set()
            self._enter(Phase.CONNECTING, now)
            self._broadcast(w.ConnectPeers(attempt=self._attempt, peers=self._endpoints))

    def _worker_connected(self, worker: str, message: w.Connected, now: float) -> None:
        if message.attempt == self._attempt:
            self._connected.add(worker)
        if self.phase is Phase.CONNECTING and len(self._connected) == len(self._joins):
            self._enter(Phase.READY, now)
            self._broadcast(w.Ready())

    # --- update -----------------------------------------------------------------------------------------------------------

    def _worker_sends(self, worker: str, version: int, now: float) -> None:
        if not self._send_ready:
            self._send_since = now
        self._send_ready[worker] = version
        if len(set(self._send_ready.values())) > 1:
            said = ", ".join(f"{name} says {v}" for name, v in sorted(self._send_ready.items()))
            self._fail({worker: f"trainers disagree on the version to send: {said}"}, "UsageError")
        elif len(self._send_ready) == self._num_trainers:
            self._begin_update(version, now)

    def _begin_update(self, version: int, now: float) -> None:
        if self.phase is not Phase.READY:
            self._fail({"hub": f"send_weights({version}) while the session is {self.phase.value}"}, "UsageError")
            return
        if self._gone:
            self._fail(dict.fromkeys(sorted(self._gone), "had left the session before the update"), "WorkerError")
            return
        self._send_ready = {}
        self._request += 1
        self._update = _Update(version=version, attempt=self._attempt, request=self._request)
        self._enter(Phase.UPDATING, now)
        self._broadcast(w.Begin(version=version, attempt=self._attempt))
        for engine in self._engines:
            self._lead(engine, a.Start(self._request), now)

    def _agreed(self, engine: str, request: int) -> None:
        """All workers of the engine stand still at one step."""
        if self.phase is Phase.PROBING and request == self._request:
            if engine not in self._probed:
                self._probed.add(engine)
                self._send_probe(engine)
        elif self._update is not None and request == self._update.request:
            self._update.agreed.add(engine)
            if len(self._update.agreed) == len(self._engines) and not self._update.allowed:
                self._update.allowed = True
                self._broadcast(w.AllowAssemble(version=self._update.version, attempt=self._update.attempt))

    def _worker_transferred(self, worker: str, message: w.Transferred) -> None:
        update = self._update
        if update is None or (message.version, message.attempt) != (update.version, update.attempt):
            return
        update.transferred.add(worker)
        engine = self._joins[worker].engine
        members = {j.worker for j in self._members(engine)}
        if engine and engine not in update.committed and members <= update.transferred:
            update.committed.add(engine)
            for name in sorted(members):
                done = w.Committed(version=update.version, attempt=update.attempt, request=update.request)
                self._out.append(Send(name, done))

    def _worker_resumed(self, worker: str, message: w.Resumed, now: float) -> None:
        update = self._update
        if update is None or message.version != update.version:
            return
        update.resumed[worker] = message
        if len(update.resumed) < len(self._joins) or len(update.transferred) < len(self._joins):
            return
        spans = update.resumed.values()
        report = w.Report(
            version=update.version,
            ewtt_seconds=max(r.resumed_at for r in spans) - min(r.stalled_at for r in spans),
            agst_seconds=sum(r.resumed_at - r.stalled_at for r in spans) / len(spans),
            network_bytes={name: (r.sent, r.received) for name, r in update.resumed.items()},
            engines=dict.fromkeys(self._engines, "ready"),
        )
        self._version, self._update = update.version, None
        self._enter(Phase.READY, now)
        for join in self._members(""):
            self._out.append(Send(join.worker, report))

    # --- words that come in -----------------------------------------------------------------------------------------------

    def _received(self, worker: str, message: w.Message, now: float) -> None:
        if self.phase is Phase.FAILED or self.phase is Phase.CLOSED:
            if isinstance(message, w.Heard):
                self._unheard.discard(worker)
                self._tell_own_worker(now)
            return
        engine, rank = self._joins[worker].engine, self._joins[worker].rank
        match message:
            case w.SideSay():
                self._side_said(worker, message)
            case w.LayoutReady():
                self._layout_ready(worker, message, now)
            case w.ProgramReady():
                self._program_ready(worker, message, now)
            case w.Connected():
                self._worker_connected(worker, message, now)
            case w.Promise(request=request, bound=bound):
                self._lead(engine, a.PromiseFrom(rank, request, bound), now)
                self._lead(engine, a.Tick(), now)  # an idle engine need not wait for the timer
            case w.Parked(request=request):
                self._lead(engine, a.ParkedFrom(rank, request), now)
            case w.IdleAnswer(request=request, attempt=attempt, held=held, count=count):
                self._lead(engine, a.IdleFrom(rank, request, attempt, held, count), now)
            case w.Installed(request=request):
                self._lead(engine, a.InstalledFrom(rank, request), now)
            case w.Stopped(request=request):
                self._lead(engine, a.AbortedFrom(rank, request), now)
            case w.SendReady(version=version):
                self._worker_sends(worker, version, now)
            case w.Transferred():
                self._worker_transferred(worker, message)
            case w.Resumed():
                self._worker_resumed(worker, message, now)
            case w.WorkerFailed(kind=kind, reason=reason, lost=lost):
                self._fail({lost or worker: reason}, kind)
            case w.Goodbye():
                self._left(worker)
            case _:  # a heartbeat has done its work by arriving; words that a worker does not say are ignored
                pass

    def _left(self, worker: str) -> None:
        self._gone.add(worker)
        if self._update is not None and worker in self._update.resumed:
            return  # it has done its part; the others may finish, and the next update will name it
        if self.phase is not Phase.READY:
            self._fail({worker: f"left while the session was {self.phase.value}"}, "WorkerError")
        elif self._joins[worker].role == "trainer":
            self.phase = Phase.CLOSED
            self._broadcast(w.Closed())

    def _lead(self, engine: str, event: a.LeaderEvent, now: float) -> None:
        """Pass an event to an engine's agreement and say aloud what it answers."""
        leader = self._leaders.get(engine)
        if leader is None:
            return
        names = {j.rank: j.worker for j in self._members(engine)}
        connect = self.phase is Phase.PROBING
        for instruction in leader.handle(event):
            match instruction:
                case a.SendPropose(member=m, request=r):
                    self._out.append(Send(names[m], w.Propose(request=r, connect=connect)))
                case a.SendCommit(member=m, request=r, target=target):
                    self._out.append(Send(names[m], w.Commit(request=r, target=target)))
                case a.SendInstall(member=m, request=r):
                    self._out.append(Send(names[m], w.InstallNow(request=r)))
                case a.AskIdle(member=m, request=r, attempt=n):
                    self._out.append(Send(names[m], w.AskIdle(request=r, attempt=n)))
                case a.SendIdleInstall(member=m, request=r, attempt=n):
                    self._out.append(Send(names[m], w.IdleInstall(request=r, attempt=n)))
                case a.SendIdleRelease(member=m, request=r, attempt=n):
                    self._out.append(Send(names[m], w.IdleRelease(request=r, attempt=n)))
                case a.SendAbort(member=m, request=r):
                    self._out.append(Send(names[m], w.StopRequest(request=r)))
                case a.Agreed(request=r):
                    self._agreed(engine, r)
                case a.AgreementFailed(member=m, cause=cause):
                    self._fail({names[m] if m is not None else engine: cause}, "WorkerError")
                case a.AllInstalled():
                    pass  # what the session waits for is that they have resumed

    # --- time and failure -------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        if self.phase in (Phase.FAILED, Phase.CLOSED):
            self._tell_own_worker(now)
            return
        silent = {
            n: now - t for n, t in self._last_seen.items() if now - t > self._timeouts.heartbeat and n not in self._gone
        }
        if silent:
            self._fail({n: f"gave no sign of life for {s:.0f} s" for n, s in sorted(silent.items())}, "WorkerError")
            return
        if self.phase in (Phase.PROBING, Phase.UPDATING) and now >= self._next_leader_tick:
            self._next_leader_tick = now + LEADER_TICK_SECONDS
            for engine in self._engines:
                self._lead(engine, a.Tick(), now)
        waited, limit = now - self._since, self._timeouts.connect
        if self.phase is Phase.UPDATING:
            limit = self._timeouts.update
        elif self.phase is Phase.READY:
            waited, limit = (now - self._send_since if self._send_ready else 0.0), self._timeouts.update
        if waited > limit:
            self._fail({who: f"{what} (waited {waited:.0f} s)" for who, what in self._waiting_for()}, "TransferTimeout")

    def _waiting_for(self) -> list[tuple[str, str]]:
        """(worker, what is awaited from it), for the message of a deadline."""
        match self.phase:
            case Phase.GATHERING:
                return [
                    (name, "did not join the session; start it with the sender's endpoint")
                    for name in self._missing_joins()
                ]
            case Phase.PROBING:
                quiet = [
                    (j.worker, f"did not speak at step {self._side_steps.get(side, 0)} of its side's probe")
                    for side, words in self._side_words.items()
                    if words
                    for j in self._members(side)
                    if j.worker not in words
                ]
                if quiet:
                    return quiet
                late = [(n, "did not report its layout") for n in self._order() if n not in self._maps]
                return late or [("hub", "is still probing")]
            case Phase.LOWERING:
                return [(n, "did not lower its program") for n in self._order() if n not in self._endpoints]
            case Phase.CONNECTING:
                return [(n, "did not connect to its peers") for n in self._order() if n not in self._connected]
            case Phase.READY:
                return [
                    (j.worker, "did not call send_weights")
                    for j in self._members("")
                    if j.worker not in self._send_ready
                ]
            case Phase.UPDATING if self._update is not None:
                return self._waiting_for_update(self._update)
            case _:
                return [("planner", "did not finish")]

    def _waiting_for_update(self, update: _Update) -> list[tuple[str, str]]:
        parked = []
        for engine in self._engines:
            if engine not in update.agreed:
                names = {j.rank: j.worker for j in self._members(engine)}
                parked += [
                    (names[m], f"engine did not stop at one step: {what}")
                    for m, what in self._leaders[engine].waiting_for()
                ]
        moving = [(n, "did not finish its part of the transfer") for n in self._order() if n not in update.transferred]
        resuming = [(n, "did not resume") for n in self._order() if n not in update.resumed]
        return parked or moving or resuming

    def _fail(self, causes: dict[str, str], kind: str) -> None:
        """Terminal. Tells every worker that may still listen, once.

        The worker in whose process the hub lives hears of it last: it may well exit on the spot, and the hub with it.
        """
        if self.phase is Phase.FAILED:
            return
        self.phase = Phase.FAILED
        poisoned: tuple[str, ...] = ()
        version = self._version
        if self._update is not None:
            version = self._update.version
            if self._update.allowed:
                poisoned = self._poisoned(self._update, causes)
        failure = w.Failure(kind=kind, causes=causes, poisoned=poisoned, version=version)
        self._unheard = {name for name in self._order() if name not in self._gone and name != HUB_WORKER}
        self._out += [Send(name, failure) for name in sorted(self._unheard)]
        self._last_word = Send(HUB_WORKER, failure) if HUB_WORKER in self._joins else None
        self._tell_until = None

    def _poisoned(self, update: _Update, causes: dict[str, str]) -> tuple[str, ...]:
        """Engines that hold mixed versions: those that have not all bytes, and those of which a worker failed before it had
        resumed, since its own loader may have had its part to do."""
        failed = {self._joins[n].engine for n in causes if n in self._joins and n not in update.resumed}
        return tuple(e for e in self._engines if e not in update.committed or e in failed)

    def _tell_own_worker(self, now: float) -> None:
        if self._last_word is None:
            return
        if self._tell_until is None:
            self._tell_until = now + HEARD_SECONDS
        if not self._unheard or now >= self._tell_until:
            self._out.append(self._last_word)
            self._last_word = None

    # --- small things -----------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._since = phase, now

    def _broadcast(self, message: w.Message) -> None:
        self._out += [Send(name, message) for name in self._order() if name not in self._gone]

    def _members(self, engine: str) -> list[w.Join]:
        """Workers of an engine, or of the trainers for "", by rank."""
        return sorted((j for j in self._joins.values() if j.engine == engine), key=lambda j: j.rank)

    def _order(self) -> list[str]:
        """Worker names in the order that numbers them in the plan: trainers by rank, then engines as the sender named them."""
        return [j.worker for side in ("", *self._engines) for j in self._members(side)]
