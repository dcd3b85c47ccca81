"""The session machine: the hub's view of a job, from the first worker that joins to the last update.

Pure: messages and ticks in, messages and requests out; time is an argument. The hub's I/O shell is `coordinator/hub.py`.

    gathering -> probing -> planning -> lowering -> connecting -> ready <-> updating
    lowering, connecting, updating -> aborting -> planning (others than before) or lowering (the same, once more)
    any of them -> failed (terminal: every worker is told who failed and how) or closed

An *epoch* is a set of members with one plan; an *attempt* is one set of connections and slots within it, numbered through the
session. Engines join and leave between updates: a newcomer is probed alone while the others go on, the next epoch is planned
beside the running one, and the switch happens when no version is in flight. A worker that is lost takes its engine with
it, a lost trainer takes the session. Whoever is left stops moving (AbortAttempt, Quiesced) before memory is used again.

One agreement on the step (machine/agreement.py) runs per engine and request: for probing as for an update.
"""

from __future__ import annotations

from collections.abc import Iterable

from weightbridge.machine import agreement as a
from weightbridge.machine import messages as w
from weightbridge.machine.agreement_words import for_leader, of_leader
from weightbridge.machine.roster import TRAINERS, Epoch, Roster, Side, SideState
from weightbridge.machine.session_waits import awaited, late_engines
from weightbridge.machine.session_words import (
    HUB_WORKER,
    Admit,
    Disconnected,
    EngineNote,
    Forget,
    Joining,
    MakePlan,
    Phase,
    PlanMade,
    PlanRefused,
    Received,
    Refuse,
    Send,
    SessionEvent,
    SessionInstruction,
    SessionPolicy,
    SessionTimeouts,
    Tick,
)
from weightbridge.machine.signs_of_life import SignsOfLife, later_by
from weightbridge.machine.status import OBSERVER
from weightbridge.machine.update import Update

__all__ = [
    "HUB_WORKER", "Admit", "Disconnected", "EngineNote", "Forget", "Joining", "MakePlan", "Phase", "PlanMade", "PlanRefused",
    "Received", "Refuse", "Send", "SessionEvent", "SessionInstruction", "SessionMachine", "SessionPolicy", "SessionTimeouts",
    "Tick",
]  # fmt: skip

LEADER_TICK_SECONDS = 0.2
"""How often an agreement sends again what is unanswered, and asks whether its engine is idle."""

HEARD_SECONDS = 1.0
"""How long the hub waits for others to confirm a failure (the dead never will) before it tells its own worker."""


class SessionMachine:
    """One job. `handle(event, now)` returns what the shell has to do; `now` is in seconds of any steady clock."""

    def __init__(
        self, *, session: int, spec_digest: str, num_trainers: int, engines: Iterable[str], timeouts: SessionTimeouts,
        now: float, policy: SessionPolicy | None = None,
    ) -> None:  # fmt: skip
        """engines: names of the engines that have to join before the session is ready; others may join at any time."""
        self.session = session
        self.phase = Phase.GATHERING
        self.version = -1  # the newest that was ever begun here, or that an engine brought along
        self.attempt = 0
        self.roster = Roster(spec_digest=spec_digest, num_trainers=num_trainers, engines=engines, now=now)
        self.epoch = Epoch.of(0, ())  # in force
        self.update: Update | None = None
        self._timeouts = timeouts
        self._policy = policy or SessionPolicy()
        self.since = now
        self._signs = SignsOfLife(timeouts)
        self.onlookers: dict[str, float] = {}  # who looks on (`weightbridge top`), and when it was heard last
        self._requests = 0
        self._epochs = 0
        self._been_ready = False
        self._next_epoch: Epoch | None = None  # being planned, or planned and waiting for its turn
        self._endpoints: dict[str, w.PeerEndpoint] = {}
        self._connected: set[str] = set()
        self._awaited: set[str] = set()  # who has yet to say Quiesced
        self._broken_connects = 0  # attempts in a row that failed while no version was in flight
        self._retry = False  # the version in flight is to be sent again as soon as there are connections
        self._given_up: dict[str, str] | None = None  # causes; the version in flight ends with them once all is quiet
        self._leaving = False  # a trainer has left in good order while the others finish
        self._send_ready: dict[str, int] = {}
        self._send_since = self._next_leader_tick = now
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
                self._received(worker, message, now)
            case Disconnected(worker=worker) if worker in self.roster.side_of:
                self._signs.doubt(worker, now)
            case PlanMade():
                self._plan_made(event)
            case PlanRefused():
                self._plan_refused(event, now)
            case Tick(stood_still=seconds):
                self._tick(seconds, now)
        beat = isinstance(event, Received) and isinstance(event.message, w.Heartbeat)  # most of what comes, and no news
        if not self._over and not beat:
            self._advance(now)
        return tuple(self._out)

    @property
    def _over(self) -> bool:
        return self.phase in (Phase.FAILED, Phase.CLOSED)

    # --- joining and probing ----------------------------------------------------------------------------------------------

    def _join(self, connection: bytes, join: w.Join, now: float) -> None:
        if join.role == OBSERVER and not self._over:
            self.onlookers[join.worker] = now
            self._out.append(Admit(connection, join.worker, w.Welcome(session=self.session)))
            return
        if self._over:
            reason = f"the session is {self.phase.value}"
        elif join.engine == TRAINERS and self.roster.trainers.complete:
            reason = "the session has all its trainers and takes no more workers of their side; use another endpoint"
        else:
            reason = self.roster.why_not(join)
        if reason:
            # What may pass: the end of an old session, and a dead engine that has not been noticed yet.
            again = self._over or (join.engine != TRAINERS and join.worker in self.roster.side_of)
            self._out.append(Refuse(connection, w.Rejected(reason=reason, again=again)))
            return
        side = self.roster.add(join, now)
        self._signs.heard(join.worker, now)
        self._out.append(Admit(connection, join.worker, w.Welcome(session=self.session)))
        if side.is_engine and len(side.joins) == 1:
            self._out.append(EngineNote(side.name, "joining", side.version))

    def _probe(self, side: Side, now: float) -> None:
        """Ask a complete side for its layout; an engine has to stop at one step for it."""
        side.state, side.since = SideState.PROBING, now
        if side.is_engine:
            side.leader = a.AgreementLeader(tuple(sorted(side.joins)))
            self._start(side, now)
        else:
            self._send_probe(side)

    def _send_probe(self, side: Side) -> None:
        self._out += [Send(name, w.RunProbe(request=side.request, dtypes=side.dtypes)) for name in side.workers]

    def _side_said(self, worker: str, message: w.SideSay, now: float) -> None:
        side = self.roster.side_of[worker]
        if side.state is not SideState.PROBING:
            return
        if reason := side.say(worker, message):
            self._lose({worker: reason}, "InternalError", now)
        elif (heard := side.heard()) is not None:
            self._out += [Send(name, heard) for name in side.workers]

    def _layout_ready(self, worker: str, message: w.LayoutReady, now: float) -> None:
        side = self.roster.side_of[worker]
        side.maps[worker] = message.source_map
        if side.state is SideState.PROBING and len(side.maps) == side.size:
            side.state, side.since = SideState.MAPPED, now

    # --- epochs -----------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Whatever can be begun now: probing, planning, a switch to the next epoch, a version."""
        self._advance_probing(now)
        self._advance_planning(now)
        if self.phase in (Phase.PLANNING, Phase.READY) and self._next_epoch is not None and self._next_epoch.planned:
            self.epoch, self._next_epoch = self._next_epoch, None
            self._prepare(self.epoch.plan, now)
        if self.phase is Phase.READY:
            self._advance_update(now)
        elif self.phase is Phase.UPDATING and self.update is not None:
            self._advance_superseding(self.update, now)

    def _advance_probing(self, now: float) -> None:
        if self.phase is Phase.GATHERING and not self._been_ready:
            if self.roster.missing():
                return
            self._enter(Phase.PROBING, now)
        for side in [x for x in self.roster.sides.values() if x.state is SideState.GATHERING and x.complete]:
            self._probe(side, now)

    def _advance_planning(self, now: float) -> None:
        """Plan for all sides that can be planned for, when that is not what is in force or being planned already."""
        required = self.roster.required()
        if not self._been_ready and any(s is None or s.state is not SideState.MAPPED for s in required):
            return
        being_planned = self._next_epoch is not None and not self._next_epoch.planned
        if self.phase in (Phase.LOWERING, Phase.CONNECTING, Phase.ABORTING) or being_planned:
            return
        wanted = tuple(s for s in (self.roster.trainers, *self.roster.engines) if s.state is SideState.MAPPED)
        if len(wanted) < 2:
            if self.phase is Phase.PLANNING:  # no engine is left; the next one that comes makes an epoch
                self._enter(Phase.GATHERING, now)
            return
        in_force = self._next_epoch or self.epoch
        if in_force.planned and in_force.sides == wanted:
            return
        self._epochs += 1
        self._next_epoch = Epoch.of(self._epochs, wanted)
        self._out.append(MakePlan(self._epochs, self._next_epoch.joins, self._next_epoch.maps))
        if self.phase not in (Phase.READY, Phase.UPDATING):
            self._enter(Phase.PLANNING, now)

    def _plan_made(self, made: PlanMade) -> None:
        planned = self._next_epoch
        if planned is None or planned.number != made.epoch:
            return
        if self._all_here(planned):
            planned.digest, planned.plan = made.digest, made.plan
        else:
            self._next_epoch = None  # somebody left meanwhile: plan again

    def _plan_refused(self, refused: PlanRefused, now: float) -> None:
        """The newcomers are to blame if there was a plan without them."""
        planned = self._next_epoch
        if planned is None or planned.number != refused.epoch:
            return
        self._next_epoch = None
        if not self._all_here(planned):
            return  # somebody left meanwhile: plan again
        old = self.epoch.sides
        newcomers = {n: refused.reason for side in planned.sides if side not in old for n in side.workers}
        if not self._been_ready or not newcomers or not old:
            self._fail({"planner": refused.reason}, refused.kind)
        else:
            self._lose(newcomers, refused.kind, now)

    def _all_here(self, epoch: Epoch) -> bool:
        return all(self.roster.sides.get(side.name) is side for side in epoch.sides)

    def _prepare(self, plan: bytes, now: float) -> None:
        """A new attempt of the epoch in force. plan: b"" when its members have it."""
        epoch = self.epoch
        self.attempt += 1
        self._endpoints, self._connected = {}, set()
        self._enter(Phase.LOWERING, now)
        self._to_members(w.PlanReady(epoch=epoch.number, attempt=self.attempt, plan=plan))
        epoch.plan = b""  # the members hold it now

    def _program_ready(self, worker: str, message: w.ProgramReady, now: float) -> None:
        if self.phase is not Phase.LOWERING or message.attempt != self.attempt or worker not in self.epoch.order:
            return
        epoch = self.epoch
        if message.plan_digest != epoch.digest:
            reason = (
                f"holds plan {message.plan_digest}, the session runs {epoch.digest}; install one version everywhere"
            )
            self._lose({worker: reason}, "InternalError", now)
            return
        self._endpoints[worker] = message.endpoint
        if len(self._endpoints) == len(epoch.order):
            self._enter(Phase.CONNECTING, now)
            self._to_members(w.ConnectPeers(attempt=self.attempt, peers=self._endpoints))

    def _worker_connected(self, worker: str, message: w.Connected, now: float) -> None:
        if self.phase is not Phase.CONNECTING or message.attempt != self.attempt or worker not in self.epoch.order:
            return
        self._connected.add(worker)
        if len(self._connected) == len(self.epoch.order):
            self._been_ready, self._broken_connects = True, 0
            self.version = max(self.version, *(side.version for side in self.epoch.sides))
            self._enter(Phase.READY, now)
            staged = any(side.staged for side in self.epoch.sides if side.is_engine)
            self._to_members(w.Ready(attempt=self.attempt, version=self.version, staged=staged))

    # --- update -----------------------------------------------------------------------------------------------------------

    def _worker_sends(self, worker: str, version: int, now: float) -> None:
        if self.roster.side_of[worker].is_engine:
            self._lose({worker: f"is no trainer and sends version {version}"}, "InternalError", now)
            return
        if self._been_ready and version <= self.version:
            return  # it was said before
        if not self._send_ready:
            self._send_since = now
        self._send_ready[worker] = version
        if len(set(self._send_ready.values())) > 1:
            said = ", ".join(f"{name} says {v}" for name, v in sorted(self._send_ready.items()))
            self._fail({worker: f"trainers disagree on the version to send: {said}"}, "UsageError")

    @property
    def _wanted(self) -> int | None:
        """The version that every trainer has sent."""
        if len(self._send_ready) < self.roster.trainers.size:
            return None
        return next(iter(self._send_ready.values()))

    def _advance_update(self, now: float) -> None:
        """In phase READY: begin what is to be sent again or what every trainer wants, once no engine is busy with the
        last one."""
        if self.update is not None:
            if self._retry and all(map(self._may_go_on, self.update.engines.values())):
                self._begin_again(self.update, now)
            return
        version = self._wanted
        epoch = self.epoch
        if version is None or any(s.leader is not None and not s.leader.at_rest for s in epoch.sides if s.is_engine):
            return
        self._send_ready = {}
        self.version = max(self.version, version)
        self.update = Update(
            version=version, attempt=self.attempt, began=now, trainers=self.roster.trainers,
            engines={side.name: side for side in epoch.sides if side.is_engine}, retries_left=self._policy.retries,
        )  # fmt: skip
        self._begin(self.update, now)

    def _may_go_on(self, side: Side) -> bool:
        """Before another attempt: the engine is at rest, or stands still and waits. One that was let go says so first."""
        update = self.update
        if update is not None and not side.staged and not update.done(side) and side.name in update.agreed:
            return side.name not in update.committed
        return side.leader is None or side.leader.at_rest

    def _begin_again(self, update: Update, now: float) -> None:
        self._retry = False
        update.engines = {side.name: side for side in self.epoch.sides if side.is_engine}
        update.again(self.attempt)
        self._begin(update, now)

    def _begin(self, update: Update, now: float) -> None:
        self._enter(Phase.UPDATING, now)
        self._to_members(w.Begin(version=update.version, attempt=update.attempt))
        for side in update.engines.values():
            self._out.append(EngineNote(side.name, "updating", side.version))
            if not side.staged and side.name not in update.agreed:
                self._start(side, now)
        self._allow(update)

    def _agreed(self, side: Side, now: float) -> None:
        """All workers of the engine stand still at one step."""
        if side.state is SideState.PROBING:
            self._send_probe(side)
        elif self.update is not None and side.name in self.update.engines:
            self.update.agreed.add(side.name)
            self._allow(self.update)

    def _allow(self, update: Update) -> None:
        """Live weights may be overwritten as soon as every engine that takes bytes into them stands still."""
        direct = [side for side in update.engines.values() if not side.staged]
        if self.phase is Phase.UPDATING and not update.allowed and all(s.name in update.agreed for s in direct):
            update.allowed = True
            for name in (n for side in direct for n in side.workers):
                self._out.append(Send(name, w.AllowAssemble(version=update.version, attempt=update.attempt)))

    def _worker_transferred(self, worker: str, message: w.Transferred, now: float) -> None:
        update = self.update
        if update is None or (message.version, message.attempt) != (update.version, update.attempt):
            return
        update.transferred.add(worker)
        side = self.roster.side_of[worker]
        if side.is_engine and side.name not in update.committed and update.transferred.issuperset(side.workers):
            update.committed.add(side.name)
            done = w.Committed(version=update.version, attempt=update.attempt, request=side.request)
            self._out += [Send(name, done) for name in side.workers]
            if side.staged and not update.done(side):
                self._start(side, now)
        self._finish_if_done(now)

    def _worker_resumed(self, worker: str, message: w.Resumed, now: float) -> None:
        side, update = self.roster.side_of[worker], self.update
        side.held[worker] = message.version
        if side.is_engine and len(side.held) == side.size and set(side.held.values()) == {message.version}:
            side.version, side.poisoned, side.since = message.version, False, now
            self._out.append(EngineNote(side.name, "ready", side.version))
        if update is not None and message.version == update.version:
            update.resumed[worker] = message
            self._finish_if_done(now)

    def _finish_if_done(self, now: float) -> None:
        update = self.update
        if update is None or self.phase is not Phase.UPDATING or not update.finished:
            return
        report = update.report()
        self.update = None
        self._enter(Phase.READY if self.epoch.planned else Phase.PLANNING, now)  # an engine may have gone at the end
        self._out += [Send(name, report) for name in self.roster.trainers.workers]
        if self._leaving:
            self._enter(Phase.CLOSED, now)

    def _advance_superseding(self, update: Update, now: float) -> None:
        """Every trainer has sent a newer version and every byte of this one has arrived: staged engines that have not
        agreed on a step to install it at leave it out."""
        newer = self._wanted
        if self._policy.when_newer != "supersede" or newer is None or not update.moved:
            return
        if not update.superseding:
            update.superseding = True
            for side in update.engines.values():
                if side.staged and side.name not in update.agreed and not update.done(side):
                    self._stop_agreement(side, f"version {newer} is newer", now)
        for side in update.engines.values():
            stopped = side.leader is not None and side.leader.at_rest
            if side.staged and stopped and side.name not in update.agreed and not update.done(side):
                update.skipped.add(side.name)
        self._finish_if_done(now)
        if self.phase is Phase.READY:
            self._advance_update(now)

    # --- what goes wrong --------------------------------------------------------------------------------------------------

    def _lose(self, causes: dict[str, str], kind: str, now: float) -> None:
        """These workers cannot go on. A trainer takes the session with it, a rollout worker its engine."""
        if self._over:
            return
        sides = {name: self.roster.side_of[name] for name in causes if name in self.roster.side_of}
        first_plan = not self._been_ready and any(s in self.roster.required() for s in sides.values())
        if len(sides) < len(causes) or first_plan or any(not s.is_engine for s in sides.values()):
            self._fail(causes, kind)
            return
        for side in dict.fromkeys(sides.values()):
            self._drop(side, {n: c for n, c in causes.items() if sides[n] is side}, kind, now)

    def _drop(self, side: Side, causes: dict[str, str], kind: str, now: float, *, state: str = "lost") -> None:
        """The engine is out of the session; its workers that may still listen are told why."""
        update = self.update
        poisoned = update is not None and side.name in update.poisoned(causes)
        failure = w.Failure(
            kind=kind, causes=causes, poisoned=(side.name,) if poisoned else (),
            version=update.version if update is not None else side.version,
        )  # fmt: skip
        word = w.Closed() if state == "left" and not poisoned else failure
        self._out += [
            Send(name, word) for name in side.workers if name not in causes or not self._signs.is_doubted(name)
        ]
        self._out.append(EngineNote(side.name, state, side.version, "; ".join(f"{n}: {c}" for n, c in causes.items())))
        workers = side.workers
        self._awaited.difference_update(workers)
        self._signs.forget(workers)
        self._out += map(Forget, workers)
        self.roster.remove(side)
        if self._next_epoch is not None and side in self._next_epoch.sides and self._next_epoch.planned:
            self._next_epoch = None
        if side not in self.epoch.sides:
            return
        through = update is not None and state == "left" and update.resumed.keys() >= causes.keys()
        self._out_of_epoch(side, workers, causes, kind, now, poisoned=poisoned, through=through)

    def _out_of_epoch(
        self, side: Side, workers: list[str], causes: dict[str, str], kind: str, now: float, *, poisoned: bool, through: bool
    ) -> None:  # fmt: skip
        """through: its workers go because they have installed the version in flight."""
        update = self.update
        if update is not None and side.name in update.engines:
            had_all = update.transferred.issuperset(workers)
            del update.engines[side.name]
            if had_all and through:
                update.gone.add(side.name)
            else:
                update.lost_engines[side.name] = poisoned
            if self.phase is Phase.UPDATING and had_all and (through or self._policy.when_engine_fails == "drop"):
                self._break_epoch()
                self._finish_if_done(now)  # nobody needs anything more of it
                if self.update is None and not self._over:
                    self._enter(Phase.PLANNING, now)
                return
            if not update.lost:
                update.kind = kind
            update.lost.update(causes)
        self._break_epoch()
        if self.phase in (Phase.LOWERING, Phase.CONNECTING, Phase.UPDATING):
            self._abort(now)
        elif self.phase is Phase.READY:
            self._enter(Phase.PLANNING, now)
        elif self.phase is Phase.ABORTING and not self._awaited:
            self._recover(now)

    def _break_epoch(self) -> None:
        """The epoch in force has lost a member: it serves no further attempt."""
        left = tuple(s for s in self.epoch.sides if self.roster.sides.get(s.name) is s)
        self.epoch = Epoch.of(self.epoch.number, left)

    def _attempt_failed(self, worker: str, message: w.AttemptFailed, now: float) -> None:
        """Somebody cannot reach somebody. Who is dead shows when all are asked to stop."""
        if message.attempt != self.attempt or self.phase not in (Phase.LOWERING, Phase.CONNECTING, Phase.UPDATING):
            return
        culprit = message.lost or worker
        if not self._been_ready and culprit == worker:
            self._fail({culprit: message.reason}, message.kind)
            return
        if culprit != worker and culprit in self.roster.side_of:
            self._signs.doubt(culprit, now)
        if self.update is None:
            self._broken_connects += 1
            if self._broken_connects > self._policy.retries:
                self._lose({self._to_blame(culprit, worker): message.reason}, message.kind, now)
                return
        else:
            if not self.update.blamed and not self.update.lost:
                self.update.kind = message.kind
            self.update.blamed[self._to_blame(culprit, worker)] = message.reason
        self._abort(now)

    def _to_blame(self, culprit: str, reporter: str) -> str:
        """Of the two ends of a connection that broke: the engine's, since the session cannot go on without a trainer."""
        side = self.roster.side_of.get(culprit)
        return reporter if side is not None and not side.is_engine else culprit

    def _abort(self, now: float) -> None:
        """Everybody stops moving; what comes next is decided when all have said so."""
        self._awaited = set(self.epoch.order)
        self._to_members(w.AbortAttempt(attempt=self.attempt))
        self._enter(Phase.ABORTING, now)
        if not self._awaited:
            self._recover(now)

    def _quiesced(self, worker: str, message: w.Quiesced, now: float) -> None:
        if self.phase is not Phase.ABORTING or message.attempt != self.attempt or worker not in self._awaited:
            return
        self._awaited.discard(worker)
        if self.update is not None:
            if message.touched:
                self.update.touched.add(self.roster.side_of[worker].name)
            if message.released:
                self.update.retries_left = -1  # its weights may have changed: the version cannot be sent again
        if not self._awaited:
            self._recover(now)

    def _recover(self, now: float) -> None:
        """Nothing moves any more, and everybody who is left is alive."""
        update = self.update
        if update is not None and self._given_up is None:
            self._judge(update, now)
            if self._over or self.phase is not Phase.ABORTING:
                return
        if self._given_up is not None and update is not None:
            self._end_update(update, self._given_up, now)
        if self.epoch.planned:
            self._prepare(b"", now)
        else:
            self.epoch = Epoch.of(0, ())
            self._enter(Phase.PLANNING, now)

    def _judge(self, update: Update, now: float) -> None:
        """Try once more, drop whoever cannot be reached, or give the version up."""
        self._retry = False
        may_retry = update.retries_left >= 0
        if update.lost:
            if self._policy.when_engine_fails == "drop" and may_retry and update.engines:
                self._retry = True
            else:
                self._given_up = dict(update.lost)
        elif may_retry and update.retries_left > 0:
            update.retries_left -= 1
            self._retry = True
        else:
            self._given_up = update.blamed or {"hub": "the attempt was aborted"}
            unreachable = {n: c for n, c in update.blamed.items() if n in self.roster.side_of}
            engines = {n: c for n, c in unreachable.items() if self.roster.side_of[n].is_engine}
            if engines and self._policy.when_engine_fails == "drop" and may_retry and update.kind != "CorruptionError":
                self._given_up = None
                update.retries_left = self._policy.retries
                self._lose(engines, update.kind, now)
                return
        if self._retry:
            for side in update.engines.values():
                if side.staged and side.name not in update.agreed and not update.done(side):
                    self._stop_agreement(side, "the version is sent again", now)

    def _end_update(self, update: Update, causes: dict[str, str], now: float) -> None:
        """The version is given up; the session goes on."""
        gone = tuple(name for name, mixed in update.lost_engines.items() if mixed)
        poisoned = (*gone, *update.poisoned(causes))
        failed = w.UpdateFailed(kind=update.kind, causes=causes, poisoned=poisoned, version=update.version)
        self._given_up, self._retry, self.update = None, False, None
        for side in update.engines.values():
            side.poisoned = side.name in poisoned
            state = "poisoned" if side.poisoned else "ready"
            self._out.append(EngineNote(side.name, state, side.version, f"version {update.version} was given up"))
            if side.name not in update.agreed:
                self._stop_agreement(side, "the version was given up", now)
        self._out += [Send(name, failed) for name in update.workers]

    # --- words that come in -----------------------------------------------------------------------------------------------

    def _received(self, worker: str, message: w.Message, now: float) -> None:
        if self._over:
            if isinstance(message, w.Heard):
                self._unheard.discard(worker)
                self._tell_own_worker(now)
            return
        side = self.roster.side_of.get(worker)
        if side is None:
            self._onlooker_said(worker, message, now)
            return
        self._signs.heard(worker, now)
        match message:
            case w.SideSay():
                self._side_said(worker, message, now)
            case w.LayoutReady():
                self._layout_ready(worker, message, now)
            case w.ProgramReady():
                self._program_ready(worker, message, now)
            case w.Connected():
                self._worker_connected(worker, message, now)
            case w.SendReady(version=version):
                self._worker_sends(worker, version, now)
            case w.Transferred():
                self._worker_transferred(worker, message, now)
            case w.Resumed():
                self._worker_resumed(worker, message, now)
            case w.AttemptFailed():
                self._attempt_failed(worker, message, now)
            case w.Quiesced():
                self._quiesced(worker, message, now)
            case w.WorkerFailed(kind=kind, reason=reason, lost=lost):
                self._lose({lost or worker: reason}, kind, now)
            case w.Goodbye():
                self._left(worker, side, now)
            case _:  # a heartbeat has done its work by arriving; words that a worker does not say are ignored
                if (answer := for_leader(side.rank_of(worker), message)) is not None:
                    self._lead(side, answer, now)
                if isinstance(message, w.Promise):
                    self._lead(side, a.Tick(), now)  # an idle engine need not wait for the timer

    def _onlooker_said(self, worker: str, message: w.Message, now: float) -> None:
        """It is no member: never waited for, and nothing it says changes anything."""
        if worker in self.onlookers:
            self.onlookers[worker] = -1.0 if isinstance(message, w.Goodbye) else now

    def _left(self, worker: str, side: Side, now: float) -> None:
        if side.is_engine:
            causes = {worker: f"left while the session was {self.phase.value}"}
            if self._been_ready or side not in self.roster.required():
                self._drop(side, causes, "WorkerError", now, state="left")
            else:
                self._fail(causes, "WorkerError")
        elif self.update is not None and worker in self.update.resumed:
            self._signs.forget((worker,))  # it has done its part; the others may finish
            self.update.retries_left = -1
            self._leaving = True
        elif self.phase in (Phase.READY, Phase.PLANNING, Phase.GATHERING) and self._been_ready and self.update is None:
            self._enter(Phase.CLOSED, now)
        else:
            self._fail({worker: f"left while the session was {self.phase.value}"}, "WorkerError")

    # --- the engines' agreements --------------------------------------------------------------------------------------------

    def _start(self, side: Side, now: float) -> None:
        self._requests += 1
        side.request = self._requests
        self._lead(side, a.Start(side.request), now)

    def _stop_agreement(self, side: Side, cause: str, now: float) -> None:
        self._lead(side, a.Abort(side.request, cause), now)

    def _lead(self, side: Side, event: a.LeaderEvent, now: float) -> None:
        """Pass an event to an engine's agreement and say aloud what it answers."""
        if side.leader is None:
            return
        connect = side.state is SideState.PROBING
        for instruction in side.leader.handle(event):
            if isinstance(instruction, a.Agreed):
                self._agreed(side, now)
            elif (word := of_leader(instruction, connect=connect)) is not None:
                self._out.append(Send(side.joins[word[0]].worker, word[1]))

    # --- time and failure -------------------------------------------------------------------------------------------------

    def _tick(self, stood_still: float, now: float) -> None:
        if self._over:
            self._tell_own_worker(now)
            return
        if stood_still > 0:
            self._stood_still(stood_still, now)
        if silent := self._signs.silent(now):
            self._lose(silent, "WorkerError", now)
        if self._over:
            return
        for name in [n for n, at in self.onlookers.items() if at < 0 or now - at > self._timeouts.heartbeat]:
            del self.onlookers[name]
            self._out.append(Forget(name))
        if now >= self._next_leader_tick:
            self._next_leader_tick = now + LEADER_TICK_SECONDS
            for side in self.roster.engines:
                if side.leader is not None and not side.leader.at_rest:
                    self._lead(side, a.Tick(), now)
        if self._been_ready:  # before, engines that do not get through to their layout are the phases' business
            for late in late_engines(self.roster, now, self._timeouts.connect):
                self._lose(late, "TransferTimeout", now)
        if not self._over:
            self._late_phase(now)

    def _stood_still(self, seconds: float, now: float) -> None:
        """No deadline has run meanwhile."""
        self._signs.stood_still(seconds, now)
        self.since = later_by(seconds, self.since, now)
        self._send_since = later_by(seconds, self._send_since, now)
        for side in self.roster.sides.values():
            side.since = later_by(seconds, side.since, now)
        for name, at in self.onlookers.items():
            self.onlookers[name] = at if at < 0 else later_by(seconds, at, now)

    def _late_phase(self, now: float) -> None:
        waited, limit = now - self.since, self._timeouts.connect
        match self.phase:
            case Phase.UPDATING:
                limit = self._timeouts.update
            case Phase.READY if self.update is not None:
                limit = self._timeouts.update
            case Phase.READY | Phase.GATHERING if self._been_ready:
                waited, limit = (now - self._send_since if self._send_ready else 0.0), self._timeouts.update
            case Phase.ABORTING:
                limit = 2 * self._timeouts.heartbeat
        if waited <= limit:
            return
        late = {who: f"{what} (waited {waited:.0f} s)" for who, what in self.waiting_for()}
        self._too_late(late, now)

    def _too_late(self, late: dict[str, str], now: float) -> None:
        """A phase's deadline. Engines that are late are lost; only if none is does it cost the version, or the session."""
        engines = {n: c for n, c in late.items() if n in self.roster.side_of and self.roster.side_of[n].is_engine}
        if not self._been_ready:
            self._fail(late, "TransferTimeout")
        elif self.phase is Phase.UPDATING and self.update is not None:
            self.update.kind = "TransferTimeout"
            self.update.retries_left = -1
            if engines:
                self._lose(engines, "TransferTimeout", now)
            if self.phase is Phase.UPDATING:
                self._given_up = late
                self._abort(now)
        elif self.phase is Phase.GATHERING and self._wanted is not None:
            causes = {"hub": f"no engine came to take the version within {self._timeouts.update:.0f} s"}
            failed = w.UpdateFailed(kind="TransferTimeout", causes=causes, version=self._wanted)
            self._send_ready = {}
            self._out += [Send(name, failed) for name in self.roster.trainers.workers]
        elif engines:
            self._lose(engines, "TransferTimeout", now)
        else:
            self._fail(late, "TransferTimeout")

    def waiting_for(self) -> list[tuple[str, str]]:
        """(worker, what is awaited from it) now."""
        order, trainers = self.epoch.order, self.roster.trainers.workers
        missing = {
            Phase.LOWERING: [n for n in order if n not in self._endpoints],
            Phase.CONNECTING: [n for n in order if n not in self._connected],
            Phase.READY: [n for n in trainers if n not in self._send_ready],
            Phase.ABORTING: sorted(self._awaited),
        }
        return awaited(self.phase, self.roster, self.update, missing, been_ready=self._been_ready)

    def _fail(self, causes: dict[str, str], kind: str) -> None:
        """Terminal. Tells every worker that may still listen, once.

        The worker in whose process the hub lives hears of it last: it may well exit on the spot, and the hub with it.
        """
        if self._over:
            return
        self.phase = Phase.FAILED
        poisoned: tuple[str, ...] = ()
        version = self.version
        if self.update is not None:
            version, poisoned = self.update.version, self.update.poisoned(causes)
        failure = w.Failure(kind=kind, causes=causes, poisoned=poisoned, version=version)
        self._unheard = {name for name in self.roster.side_of if name != HUB_WORKER}
        self._out += [Send(name, failure) for name in (*sorted(self._unheard), *self.onlookers)]
        self._last_word = Send(HUB_WORKER, failure) if HUB_WORKER in self.roster.side_of else None
        self._tell_until = None

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
        self.phase, self.since = phase, now
        if phase is Phase.CLOSED:  # in good order: engines go on with the weights they have
            self._out += [Send(name, w.Closed()) for name in (*self.roster.side_of, *self.onlookers)]

    def _to_members(self, message: w.Message) -> None:
        self._out += [Send(name, message) for name in self.epoch.order if name in self.roster.side_of]
