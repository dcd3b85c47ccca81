"""A whole job in virtual time: the real machines of the hub, of every worker and of every engine's agreement, with modelled
messages, bytes and user code, and one fault. A seed makes a schedule; the same seed makes it again.

What is real: `SessionMachine`, `WorkerMachine`, `AgreementLeader`, `AgreementMember`. What is modelled: the network (in
order on each connection, any delay), the data plane (pieces that travel from trainers to engines and on to other
engines; a piece is the version it holds), the polling loop with its gate, and the trainers' loop, which ruins its
weights as soon as it may.

`VirtualJob.run` raises `Wrong` when an engine serves weights of two versions, when workers of an engine serve different
versions at the same step, or when somebody still waits at the end.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from weightbridge.errors import WeightBridgeError
from weightbridge.machine import agreement as a
from weightbridge.machine import messages as w
from weightbridge.machine import session as s
from weightbridge.machine import worker as m
from weightbridge.machine.agreement_words import for_member, of_member
from weightbridge.machine.signs_of_life import later_by

__all__ = ["FAULTS", "PHASES", "Fault", "Outcome", "VirtualJob", "Wrong"]

FAULTS = ("kill", "stop", "cut", "half-open", "full memory", "corrupted byte", "duplicated messages")
PHASES = ("connect", "receive", "exchange", "install")

_PIECES = 4
_TICK, _HEARTBEAT, _HEARTBEAT_TIMEOUT, _DEADLINE = 0.1, 1.0, 5.0, 5.0
_TIMEOUTS = s.SessionTimeouts(connect=30.0, update=20.0, heartbeat=_HEARTBEAT_TIMEOUT, suspect=2.5)
_STOPPED_SECONDS = 3 * _TIMEOUTS.update
_END_SECONDS = 400.0
_RUINED = -100


class Wrong(WeightBridgeError):
    """What must never happen has happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """kind: one of FAULTS. victim: a worker. phase: one of PHASES, of version 2 unless it is "connect"."""

    kind: str
    victim: str
    phase: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What the job came to. Times in virtual seconds.

    reports: version -> the trainers' report. given_up: version -> the failure the trainers were told. failures: worker
    -> the failure that ended the session for it. told: worker -> culprits that it can name. versions: worker -> what it
    serves at the end. poisoned: workers that refuse to serve. seconds: when the last trainer was through.
    """

    reports: dict[int, w.Report] = field(default_factory=dict)
    given_up: dict[int, w.UpdateFailed] = field(default_factory=dict)
    failures: dict[str, w.Failure] = field(default_factory=dict)
    told: dict[str, set[str]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    poisoned: set[str] = field(default_factory=set)
    seconds: float = 0.0
    struck: bool = False


class _Worker:
    """A virtual process. Everything it does is an event of the job's clock, and waits while the process is stopped."""

    def __init__(self, job: VirtualJob, name: str, rank: int, size: int) -> None:
        side = name.split("/")[0]
        self.job, self.name, self.rank = job, name, rank
        self.engine = "" if side == "trainer" else side
        self.staged = job.stage_receive if self.engine else job.stage_send
        self.machine = m.WorkerMachine(worker=name, engine=self.engine, staged=self.staged)
        self.join = w.Join(
            protocol=w.PROTOCOL_VERSION, worker=name, role="rollout" if self.engine else "trainer", engine=self.engine,
            rank=rank, size=size, node=side, bandwidth=1e9, spec_digest="spec", dtypes=("BF16",), staged=self.staged,
        )  # fmt: skip
        self.alive = True
        self.resumes_at = 0.0  # a stopped process goes on then
        self.last_heard = self.beat_at = 0.0
        self.attempt = 0  # of the data plane that runs here; 0: none
        self.got: dict[int, int] = {}  # piece -> value, of this attempt
        self.unsent: set[tuple[str, int]] = set()  # (peer, piece) that this attempt has to get rid of
        self.moving = (-1, 0)  # (version, attempt) of the transfer that runs here
        self.assembling = (-1, 0)  # (version, attempt) that live weights may be overwritten with
        self.done_moving = False
        # rollout
        self.live = [0] * _PIECES
        self.shadow = [0] * _PIECES
        self.member = a.AgreementMember(2)
        self.count, self.gate = 0, a.NO_GATE
        self.connects: set[int] = set()
        self.serving: int | None = None  # the request that this worker stands still for
        self.took = -1  # the attempt it has allowed bytes in for
        self.at_gate = False
        # trainer
        self.weights = _RUINED
        self.copy = _RUINED  # the host copy
        self.version = 0  # sent last

    # --- time -------------------------------------------------------------------------------------------------------------

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something here, unless the process has died; when it goes on, if it is stopped by then."""

        def due() -> None:
            if not self.alive:
                return
            if self.job.now < self.resumes_at:
                self.job.at(self.resumes_at, due)
            else:
                do()

        self.job.at(self.job.now + seconds, due)

    def soon(self, do: Callable[[], None], longest: float = 0.02) -> None:
        self.later(self.job.random.uniform(0.0005, longest), do)

    # --- the control thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.last_heard = self.beat_at = self.job.now
        self.job.to_hub(self, self.join)
        self.later(_HEARTBEAT, self.beat)
        if self.engine:
            self.soon(self.poll)

    def beat(self) -> None:
        if self.machine.over:
            return
        self.job.to_hub(self, w.Heartbeat())
        stood_still, self.beat_at = max(0.0, self.job.now - self.beat_at - _HEARTBEAT), self.job.now
        self.last_heard = later_by(stood_still, self.last_heard, self.job.now)
        if self.job.now - self.last_heard > _HEARTBEAT_TIMEOUT:
            self.lose_hub(f"gave no sign of life for {_HEARTBEAT_TIMEOUT} s")
        else:
            self.later(_HEARTBEAT, self.beat)

    def lose_hub(self, reason: str) -> None:
        if not self.machine.over:
            self.machine.fail(w.Failure(kind="ConnectError", causes={s.HUB_WORKER: reason}))
            self.perform((m.Leave(failed=True),))
            self.changed()

    def hear(self, message: w.Message) -> None:
        self.last_heard = self.job.now
        if isinstance(message, w.Rejected):
            raise Wrong(f"{self.name} was not let in: {message.reason}")
        self.perform(self.machine.hear(message))
        self._hear_agreement(message)
        if isinstance(message, w.RunProbe):
            request = message.request
            if self.engine == "":
                self.soon(lambda: self.job.to_hub(self, w.LayoutReady(source_map=b"map")))
            elif self.serving == request:
                self.soon(lambda: self._probed(request))
        self.changed()

    def _hear_agreement(self, message: w.Message) -> None:
        if isinstance(message, w.Propose) and message.connect:
            self.connects.add(message.request)
        if (event := for_member(message)) is not None:
            self.feed(event)

    def feed(self, event: a.MemberEvent) -> None:
        for do in self.member.handle(event):
            match do:
                case a.ReadCount():
                    self.feed(a.CountRead(self.count))
                case a.WriteGate(value=value):
                    self.gate = value
                case a.TryLock():
                    self.feed(a.LockTried(False, self.count))
                case a.Install(request=r):
                    self.soon(lambda r=r: self.serve(r))  # type: ignore[misc]
                case a.CancelInstall():
                    self.serving = None
                case _:
                    if (message := of_member(do)) is not None:
                        self.job.to_hub(self, message)

    def perform(self, todo: Iterable[m.Do]) -> None:
        for do in todo:
            match do:
                case m.Say(message=message):
                    self.job.to_hub(self, message)
                case m.Prepare(attempt=attempt):
                    self.attempt = 0
                    self.soon(lambda n=attempt: self.prepare(n))  # type: ignore[misc]
                case m.Connect(attempt=attempt):
                    self.soon(lambda n=attempt: self.connect(n))  # type: ignore[misc]
                case m.Transfer(version=version, attempt=attempt):
                    self.soon(lambda v=version, n=attempt: self.job.transfer(self, v, n))  # type: ignore[misc]
                case m.Assemble(version=version, attempt=attempt):
                    self.assembling = (version, attempt)
                    self.soon(self.write)
                case m.Stop(attempt=attempt):
                    self.attempt = 0
                    self.soon(lambda n=attempt: self.stop(n))  # type: ignore[misc]
                case m.Leave():
                    self.attempt = 0

    # --- the data plane -----------------------------------------------------------------------------------------------------

    def prepare(self, attempt: int) -> None:
        if self.job.strikes("connect", self, "full memory"):
            self.fail_attempt(attempt, "WorkerError", "cannot take 64 MiB: out of memory", "")
            return
        endpoint = w.PeerEndpoint(addresses={"tcp": self.name}, slots=())
        self.attempt = attempt
        self.job.to_hub(self, w.ProgramReady(attempt=attempt, plan_digest="digest", endpoint=endpoint))

    def connect(self, attempt: int) -> None:
        if attempt != self.attempt:
            return
        self.job.strike("connect", self)
        unreachable = next((peer for peer in self.job.peers(self) if self.job.severed(self, peer)), None)
        if unreachable is not None:
            self.later(_DEADLINE, lambda: self.fail_attempt(attempt, "TransferTimeout", "no answer", unreachable.name))
        elif self.alive:
            self.job.to_hub(self, w.Connected(attempt=attempt))

    def fail_attempt(self, attempt: int, kind: str, reason: str, lost: str) -> None:
        if self.alive:
            self.perform(self.machine.attempt_failed(attempt, kind=kind, reason=reason, lost=lost))

    def stop(self, attempt: int) -> None:
        self.attempt, self.moving = 0, (-1, 0)
        self.perform(self.machine.stopped(attempt))

    def take(self, piece: int, value: int) -> None:
        self.got[piece] = value
        self.write()

    def write(self) -> None:
        """Assemble one piece that is here; then look for the next one."""
        version, attempt = self.moving
        if not self.engine or attempt != self.attempt or not (self.staged or self.assembling == self.moving):
            return
        target = self.shadow if self.staged else self.live
        for piece, value in self.got.items():
            if target[piece] != value:
                target[piece] = value
                self.soon(self.write)
                return
        self.finish_moving(version, attempt)

    def finish_moving(self, version: int, attempt: int) -> None:
        allowed = self.staged or self.assembling == (version, attempt)
        target = self.shadow if self.staged else self.live
        complete = not self.engine or (allowed and target == [self.got.get(p) for p in range(_PIECES)])
        if complete and not self.unsent and not self.done_moving and attempt == self.attempt:
            self.done_moving = True
            self.perform(self.machine.transferred(version, attempt))
            if not self.engine:
                self.job.to_hub(self, self.job.resumed(version))

    # --- an engine worker's own thread ----------------------------------------------------------------------------------------

    def poll(self) -> None:
        if self.serving is not None or self.at_gate:
            return
        self.count += 1
        if self.machine.failure is not None:
            return  # raised: whoever runs the engine decides what is next
        if self.count < self.gate:
            self.step()
        else:
            self.at_gate = True
            self.soon(lambda count=self.count: self.feed(a.Reached(count)), 0.002)  # type: ignore[misc]

    def step(self) -> None:
        """An inference step with the weights as they are, unless polls say that they are a mixture."""
        if self.machine.poisoned_by is None:
            self.job.serves(self)
        self.soon(self.poll)

    def changed(self) -> None:
        """Wakes whoever waits on this worker's threads."""
        if not self.engine:
            self.job.train(self)
        elif self.serving is not None:
            self.take_in()
        elif self.at_gate and self.count < self.gate and self.machine.failure is None:
            self.at_gate = False
            self.step()

    def serve(self, request: int) -> None:
        self.at_gate, self.serving, self.took = False, request, -1
        self.job.strike("install", self)
        if not self.alive:
            return
        if request in self.connects:
            if self.machine.probe_with is not None and self.machine.probe_request == request:
                self.soon(lambda: self._probed(request))
        elif self.staged:
            self.machine.installing(self.machine.begun[0])
            self.soon(lambda: self.install(0))
        else:
            self.take_in()

    def _probed(self, request: int) -> None:
        if self.serving == request:
            self.job.to_hub(self, w.LayoutReady(source_map=b"map"))
            self.end_serving(request)

    def install(self, piece: int) -> None:
        """Staged: from host memory, piece by piece."""
        if piece < _PIECES:
            self.live[piece] = self.shadow[piece]
            self.soon(lambda: self.install(piece + 1))
        else:
            self.installed(self.machine.begun[0])

    def take_in(self) -> None:
        """Direct: as `ReceiverAdapter._take_in`."""
        request, machine = self.serving, self.machine
        if request is None or request in self.connects or self.staged:
            return
        version, attempt = machine.begun
        if machine.failure is not None:
            self.serving = None
        elif machine.committed >= version:
            self.installed(version)
        elif machine.failed_version >= version:
            self.end_serving(request)
        elif attempt != self.took:
            self.took = attempt
            self.perform(machine.standing(version, attempt))

    def installed(self, version: int) -> None:
        self.machine.installed(version)
        if self.job.random.random() < 0.5:  # the agreement's word and the machine's may come in either order
            self.job.to_hub(self, self.job.resumed(version))
        else:
            self.soon(lambda: self.job.to_hub(self, self.job.resumed(version)), 0.1)
        if self.serving is not None:
            self.end_serving(self.serving)

    def end_serving(self, request: int) -> None:
        self.serving = None
        self.soon(lambda: self.feed(a.InstallDone(request)), 0.002)
        self.step()


class VirtualJob:
    """Two trainers, engine a of two workers and engine b of one; three versions, a fault in the second."""

    def __init__(
        self, seed: int, fault: Fault | None = None, *, stage_send: bool = False, stage_receive: bool = False,
        policy: s.SessionPolicy | None = None, versions: int = 4,
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.fault = fault
        self.stage_send, self.stage_receive = stage_send, stage_receive
        self.versions = versions
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._last: dict[tuple[str, bool], float] = {}  # (worker, to the hub) -> when its last message arrives
        self.outcome = Outcome()
        self._served: dict[tuple[str, int], tuple[str, int]] = {}  # (engine, step) -> who served it and with what
        sides = {"trainer": 2, "a": 2, "b": 1}
        self.workers = {f"{x}/{r}": _Worker(self, f"{x}/{r}", r, n) for x, n in sides.items() for r in range(n)}
        self.hub = s.SessionMachine(
            session=1,
            spec_digest="spec",
            num_trainers=2,
            engines=("a", "b"),
            timeouts=_TIMEOUTS,
            now=0.0,
            policy=policy,
        )
        self.host = self.workers[s.HUB_WORKER]
        self.ticked_at = 0.0

    # --- the clock ----------------------------------------------------------------------------------------------------------

    def at(self, when: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), do))

    def run(self) -> Outcome:
        for worker in self.workers.values():
            worker.later(self.random.uniform(0, 0.5), worker.start)
        self.host.later(_TICK, self.tick)
        while self._queue and self.now < _END_SECONDS and not self._through():
            self.now, _, do = heapq.heappop(self._queue)
            do()
        self._check_end()
        return self.outcome

    def _through(self) -> bool:
        """Trainers are through with their versions, or everybody who can knows that the session is over."""
        trainers = [x for x in self.workers.values() if not x.engine]
        if all(x.version > self.versions for x in trainers):
            return True
        return all(x.machine.over or not x.alive for x in self.workers.values())

    def _check_end(self) -> None:
        self.outcome.seconds = self.now
        for name, worker in self.workers.items():
            machine = worker.machine
            told = set() if machine.failure is None else set(machine.failure.causes)
            told |= set() if machine.given_up is None else set(machine.given_up.causes)
            self.outcome.told[name] = told
            self.outcome.versions[name] = machine.version
            if machine.failure is not None:
                self.outcome.failures[name] = machine.failure
            if machine.poisoned_by is not None:
                self.outcome.poisoned.add(name)
        if not self._through():
            raise Wrong(f"somebody still waits after {self.now:.0f} s; the hub is {self.hub.phase.value}")

    # --- the hub ------------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        stood_still, self.ticked_at = max(0.0, self.now - self.ticked_at - _TICK), self.now
        self.hub_handles(s.Tick(stood_still))
        for name in list(self.hub.roster.side_of):
            if int(self.now / _HEARTBEAT) != int((self.now - _TICK) / _HEARTBEAT):
                self.to_worker(name, w.Heartbeat())
        self.host.later(_TICK, self.tick)

    def hub_handles(self, event: s.SessionEvent) -> None:
        if not self.host.alive:
            return
        for do in self.hub.handle(event, self.now):
            match do:
                case s.Send(worker=name, message=message):
                    self.to_worker(name, message)
                case s.Admit(worker=name, message=welcome):
                    self.to_worker(name, welcome)
                case s.Refuse(connection=connection, message=rejected):
                    self.to_worker(connection.decode(), rejected)
                case s.MakePlan(epoch=epoch):
                    made = s.PlanMade(epoch, b"plan", "digest")
                    self.host.later(self.random.uniform(0.01, 0.3), lambda made=made: self.hub_handles(made))  # type: ignore[misc]

    def to_hub(self, worker: _Worker, message: w.Message) -> None:
        def arrive() -> None:
            if isinstance(message, w.Join):
                self.hub_handles(s.Joining(worker.name.encode(), message))
            else:
                self.hub_handles(s.Received(worker.name, message))

        self._carry(worker, True, self.host, w.decode(w.encode(message)), arrive)

    def to_worker(self, name: str, message: w.Message) -> None:
        worker = self.workers[name]
        self._carry(worker, False, worker, message, lambda: worker.hear(message))

    def _carry(
        self, worker: _Worker, up: bool, receiver: _Worker, message: w.Message, arrive: Callable[[], None]
    ) -> None:
        """In order on each connection. A cut link holds everything back; a killed end loses it."""
        if self.cut(worker, self.host) and worker is not self.host:
            return
        times = 1
        struck = (
            self.fault is not None and self.fault.kind == "duplicated messages" and self.fault.victim == worker.name
        )
        if struck and not isinstance(message, w.Join | w.SideSay) and self.random.random() < 0.5:
            times, self.outcome.struck = 2, True
        for _ in range(times):
            when = max(self._last.get((worker.name, up), 0.0), self.now + self.random.uniform(0.0002, 0.01))
            self._last[worker.name, up] = when
            receiver.later(when - self.now, arrive)

    def resumed(self, version: int) -> w.Resumed:
        return w.Resumed(version=version, stalled_at=self.now, resumed_at=self.now, sent=0, received=0)

    # --- the data plane -----------------------------------------------------------------------------------------------------

    def peers(self, worker: _Worker) -> list[_Worker]:
        members = self.hub.epoch.order
        others = [self.workers[n] for n in members if n != worker.name]
        return [x for x in others if x.engine or worker.engine]

    def transfer(self, worker: _Worker, version: int, attempt: int) -> None:
        """Trainers send each piece to one worker of each rank, which sends it on to those of other engines."""
        if attempt != worker.attempt:
            return
        worker.got, worker.unsent, worker.moving, worker.done_moving = {}, set(), (version, attempt), False
        for piece in range(_PIECES):
            for rank in range(2):
                group = self.group(rank, attempt)
                if not group:
                    continue
                first, source = group[piece % len(group)], self.workers[f"trainer/{piece % 2}"]
                if worker is source:
                    worker.unsent.add((first.name, piece))
                    worker.soon(lambda to=first, p=piece: self._send(worker, to, version, attempt, p, "receive"))  # type: ignore[misc]
                elif worker is first:
                    worker.unsent |= {(other.name, piece) for other in group if other is not first}
        worker.finish_moving(version, attempt)

    def group(self, rank: int, attempt: int) -> list[_Worker]:
        members = self.hub.epoch.order
        return [self.workers[n] for n in members if self.workers[n].engine and self.workers[n].rank == rank]

    def _send(self, worker: _Worker, to: _Worker, version: int, attempt: int, piece: int, phase: str) -> None:
        if worker.moving != (version, attempt):
            return
        self.strike(phase, worker)
        if not worker.alive:
            return
        if self.now < worker.resumes_at:
            worker.soon(lambda: self._send(worker, to, version, attempt, piece, phase))
            return
        own = worker.copy if worker.staged else worker.weights
        value = worker.got[piece] if worker.engine else own
        corrupted = self.strikes(phase, worker, "corrupted byte")
        if self.strikes(phase, worker, "full memory"):
            worker.fail_attempt(attempt, "WorkerError", "out of memory", "")
            return
        if not to.alive:
            worker.soon(lambda: worker.fail_attempt(attempt, "WorkerError", "connection reset", to.name))
            return
        if self.severed(worker, to):
            worker.later(
                _DEADLINE, lambda: worker.fail_attempt(attempt, "TransferTimeout", "no acknowledgement", to.name)
            )
            return

        def arrive() -> None:
            if to.moving != (version, attempt):
                if to.attempt == attempt:
                    to.soon(arrive)  # it has not begun yet: the bytes wait in its slot
                return
            self.strike(phase, to)
            if not to.alive or self.now < to.resumes_at:
                return
            if corrupted:
                to.fail_attempt(attempt, "CorruptionError", "digest of the bytes is not the sender's", worker.name)
                return
            for other in [x for x in self.group(to.rank, attempt) if (x.name, piece) in to.unsent]:
                to.soon(lambda other=other: self._send(to, other, version, attempt, piece, "exchange"))  # type: ignore[misc]
            to.take(piece, value)
            worker.soon(lambda: self._acknowledged(worker, to, version, attempt, piece))

        to.later(self.random.uniform(0.001, 0.05), arrive)

    def _acknowledged(self, worker: _Worker, to: _Worker, version: int, attempt: int, piece: int) -> None:
        if worker.moving != (version, attempt):
            return
        worker.unsent.discard((to.name, piece))
        if not worker.unsent and not worker.engine:
            worker.machine.release(version, attempt)
            self.train(worker)
        worker.finish_moving(version, attempt)

    # --- the trainers' loop -------------------------------------------------------------------------------------------------

    def train(self, trainer: _Worker) -> None:
        machine, version = trainer.machine, trainer.version
        if machine.failure is not None or not machine.ever_ready:
            return
        ending = machine.endings.get(version)
        if isinstance(ending, w.Report):
            self.outcome.reports[version] = ending
        elif isinstance(ending, w.UpdateFailed):
            self.outcome.given_up[version] = ending
        if version and (trainer.staged or machine.released >= version):
            trainer.weights = _RUINED  # it goes on training
        if version == 0 or ending is not None:
            trainer.version = version = version + 1
            if version <= self.versions:
                trainer.weights = trainer.copy = version
                if trainer.staged:
                    machine.capture(version)
                self.to_hub(trainer, w.SendReady(version=version))

    # --- what engines serve -------------------------------------------------------------------------------------------------

    def serves(self, worker: _Worker) -> None:
        if len(set(worker.live)) > 1 or worker.live[0] != max(worker.machine.version, 0):
            raise Wrong(
                f"{worker.name} serves {worker.live} at step {worker.count}, says it holds {worker.machine.version}"
            )
        engine_failed = any(x.machine.failure is not None or not x.alive for x in self.mates(worker))
        first, version = self._served.setdefault((worker.engine, worker.count), (worker.name, worker.live[0]))
        if version != worker.live[0] and not engine_failed:
            raise Wrong(f"step {worker.count}: {first} serves version {version}, {worker.name} {worker.live[0]}")

    def mates(self, worker: _Worker) -> list[_Worker]:
        return [x for x in self.workers.values() if x.engine == worker.engine]

    # --- the fault ------------------------------------------------------------------------------------------------------------

    def strikes(self, phase: str, worker: _Worker, kind: str) -> bool:
        """Whether the fault, of a kind that strikes once and in passing, strikes here and now."""
        fault = self.fault
        if (
            fault is None
            or self.outcome.struck
            or (fault.kind, fault.victim, fault.phase) != (kind, worker.name, phase)
        ):
            return False
        if kind in ("full memory", "corrupted byte") and phase != "connect" and worker.machine.begun[0] != 2:
            return False
        self.outcome.struck = self.random.random() < 0.4
        return self.outcome.struck

    def strike(self, phase: str, worker: _Worker) -> None:
        """The fault, of a kind that lasts, if it is due: somebody has come to the phase, not always the victim itself."""
        if self.fault is None or worker.machine.begun[0] != (-1 if phase == "connect" else 2):
            return
        worker = self.workers[self.fault.victim]
        for kind in ("kill", "stop", "cut", "half-open"):
            if self.strikes(phase, worker, kind):
                if kind == "kill":
                    worker.alive = False
                    self.at(self.now + 0.01, lambda: self._dead(worker))
                elif kind == "stop":
                    worker.resumes_at = self.now + _STOPPED_SECONDS

    def _dead(self, worker: _Worker) -> None:
        """Its connections close: the hub and its peers see it."""
        if worker is self.host:
            for other in self.workers.values():
                other.later(2.0, lambda x=other: x.lose_hub("closed its connection"))  # type: ignore[misc]
        else:
            self.hub_handles(s.Disconnected(worker.name))
        for peer in self.peers(worker):
            if peer.attempt:
                peer.soon(lambda p=peer: p.fail_attempt(p.attempt, "WorkerError", "connection closed", worker.name))  # type: ignore[misc]

    def cut(self, one: _Worker, other: _Worker) -> bool:
        """No packet passes between the two."""
        fault = self.fault
        return (
            fault is not None and fault.kind == "cut" and self.outcome.struck and one is not other
            and fault.victim in (one.name, other.name)
        )  # fmt: skip

    def severed(self, one: _Worker, other: _Worker) -> bool:
        """No bytes of the data plane pass from one to the other in this attempt."""
        half_open = (
            self.fault is not None and self.fault.kind == "half-open" and self.outcome.struck
            and one.name == self.fault.victim and self.hub.attempt == self._struck_attempt()
        )  # fmt: skip
        return half_open or self.cut(one, other)

    def _struck_attempt(self) -> int:
        """The attempt in which the half-open connection was: another attempt has other connections."""
        if not hasattr(self, "_attempt_struck"):
            self._attempt_struck = self.hub.attempt
        return self._attempt_struck
