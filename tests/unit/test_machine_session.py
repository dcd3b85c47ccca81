"""The hub's machine alone: fake workers that answer, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from weightbridge.machine import messages as w
from weightbridge.machine import session as s

TIMEOUTS = s.SessionTimeouts(connect=30.0, update=20.0, heartbeat=10.0)
ENGINES = {"a": 2, "b": 1}
ENDPOINT = w.PeerEndpoint(addresses={"tcp": "127.0.0.1:1"}, slots=())


def join_of(worker: str, *, size: int = 2, digest: str = "spec", protocol: int = w.PROTOCOL_VERSION) -> w.Join:
    side, rank = worker.split("/")
    trainer = side == "trainer"
    return w.Join(
        protocol=protocol, worker=worker, role="trainer" if trainer else "rollout", engine="" if trainer else side,
        rank=int(rank), size=size, node=side, bandwidth=1e9, spec_digest=digest,
        dtypes=("BF16",) if trainer else ("F32", "BF16"),
    )  # fmt: skip


class Job:
    """Feeds the machine and keeps what it says. Workers answer as real ones do, unless `mute` says otherwise."""

    def __init__(self, policy: s.SessionPolicy | None = None, staged: frozenset[str] = frozenset()) -> None:
        self.now = 100.0
        self.machine = s.SessionMachine(
            session=7,
            spec_digest="spec",
            num_trainers=2,
            engines=ENGINES,
            timeouts=TIMEOUTS,
            now=self.now,
            policy=policy,
        )
        self.staged = staged  # engines that receive into host memory
        self.dead: set[str] = set()  # workers that say nothing more
        self.mixed: set[str] = set()  # workers whose live weights are being overwritten
        self.notes: list[tuple[str, str]] = []
        self.said: list[tuple[str, w.Message]] = []
        self.refused: list[str] = []
        self.plans: list[tuple[str, ...]] = []
        self.mute: Callable[[str, w.Message], bool] = lambda worker, message: False
        self.parked: set[tuple[str, int]] = set()
        self.released = False  # what workers say when they have stopped: their weights may have changed
        self.version = -1

    def tell(self, event: s.SessionEvent) -> None:
        for instruction in self.machine.handle(event, self.now):
            match instruction:
                case s.Send(worker=worker, message=message):
                    self.said.append((worker, message))
                    if worker not in self.dead and not self.mute(worker, message):
                        self.answer(worker, message)
                case s.Refuse(message=message):
                    self.refused.append(message.reason)
                case s.MakePlan(epoch=epoch, joins=joins, maps=maps):
                    assert maps == tuple(j.worker.encode() for j in joins)
                    self.plans.append(tuple(j.worker for j in joins))
                    self.tell(s.PlanMade(epoch, b"plan", "digest"))
                case s.EngineNote(engine=engine, state=state):
                    self.notes.append((engine, state))

    def hear(self, worker: str, message: w.Message) -> None:
        self.tell(s.Received(worker, message))

    def answer(self, worker: str, message: w.Message) -> None:
        if worker not in self.machine.roster.side_of and not isinstance(message, w.Failure):
            return
        match message:
            case w.RunProbe(request=request):
                self.hear(worker, w.LayoutReady(source_map=worker.encode()))
                self.hear(worker, w.Installed(request=request))
            case w.PlanReady(attempt=attempt):
                self.hear(worker, w.ProgramReady(attempt=attempt, plan_digest="digest", endpoint=ENDPOINT))
            case w.ConnectPeers(attempt=attempt):
                self.hear(worker, w.Connected(attempt=attempt))
            case w.Propose(request=request):
                self.hear(worker, w.Promise(request=request, bound=5 + int(worker[-1])))
            case w.Commit(request=request, target=target):
                assert target == 4 + self.machine.roster.side_of[worker].size  # the largest promise
                if (worker, request) not in self.parked:
                    self.parked.add((worker, request))
                    self.hear(worker, w.Parked(request=request))
            case w.Begin(version=version, attempt=attempt) if worker.startswith("trainer"):
                self.hear(worker, w.Transferred(version=version, attempt=attempt))
                self.resume(worker, version, 1.0, 2.0)
            case w.Begin(version=version, attempt=attempt) if worker.split("/")[0] in self.staged:
                self.hear(worker, w.Transferred(version=version, attempt=attempt))
            case w.AllowAssemble(version=version, attempt=attempt):
                self.mixed.add(worker)
                self.hear(worker, w.Transferred(version=version, attempt=attempt))
            case w.Failure():
                self.hear(worker, w.Heard())
            case w.Committed(version=version, request=request) if worker.split("/")[0] not in self.staged:
                self.install(worker, version, request)
            case w.InstallNow(request=request) if worker.split("/")[0] in self.staged:
                self.install(worker, self.version, request)
            case w.StopRequest(request=request):
                self.hear(worker, w.Stopped(request=request))
            case w.UpdateFailed() if not worker.startswith("trainer"):  # one that stands still goes on
                self.hear(worker, w.Installed(request=self.machine.roster.side_of[worker].request))
            case w.AbortAttempt(attempt=attempt):
                self.hear(worker, w.Quiesced(attempt=attempt, touched=worker in self.mixed, released=self.released))

    def install(self, worker: str, version: int, request: int) -> None:
        self.mixed.discard(worker)
        self.hear(worker, w.Installed(request=request))
        self.resume(worker, version, 1.5, 4.0)

    def resume(self, worker: str, version: int, stalled: float, resumed: float) -> None:
        spent = {"sent": 10, "received": 20, "stage": f"stage of {worker}"}
        self.hear(worker, w.Resumed(version=version, stalled_at=stalled, resumed_at=resumed, **spent))

    def join_all(self) -> Job:
        for side, size in {"trainer": 2, **ENGINES}.items():
            for rank in range(size):
                join = msgspec.structs.replace(join_of(f"{side}/{rank}", size=size), staged=side in self.staged)
                self.tell(s.Joining(f"c{side}{rank}".encode(), join))
        return self

    def send(self, version: int) -> None:
        self.version = version
        for rank in range(2):
            self.hear(f"trainer/{rank}", w.SendReady(version=version))

    def pass_time(self, seconds: float, alive: bool = True) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            if alive:
                for worker in [n for n in self.machine.roster.side_of if n not in self.dead]:
                    self.hear(worker, w.Heartbeat())
            self.tell(s.Tick())

    def heard_by(self, worker: str, kind: type[w.Message]) -> list[w.Message]:
        return [m for name, m in self.said if name == worker and isinstance(m, kind)]

    @property
    def failure(self) -> w.Failure:
        (found,) = {str(m): m for _, m in self.said if isinstance(m, w.Failure)}.values()
        return found

    @property
    def given_up(self) -> w.UpdateFailed:
        (found,) = {str(m): m for _, m in self.said if isinstance(m, w.UpdateFailed)}.values()
        return found

    def told(self, kind: type[w.Message]) -> set[str]:
        return {name for name, m in self.said if isinstance(m, kind)}


def test_a_job_joins_connects_and_updates() -> None:
    job = Job().join_all()
    assert job.machine.phase is s.Phase.READY
    job.send(1)
    (report,) = {str(m): m for _, m in job.said if isinstance(m, w.Report)}.values()
    assert isinstance(report, w.Report)
    assert report.version == 1
    assert report.ewtt_seconds == 3.0  # from 1.0 to 4.0
    assert report.agst_seconds == pytest.approx((2 * 1.0 + 3 * 2.5) / 5)
    assert report.engines == {"a": "ready", "b": "ready"}
    assert report.network_bytes["a/1"] == (10, 20)
    assert report.slowest_worker in {"a/0", "a/1", "b/0"}  # trainers went on at 2.0
    assert report.slowest_stage == f"stage of {report.slowest_worker}"
    assert {name for name, m in job.said if isinstance(m, w.Report)} == {"trainer/0", "trainer/1"}
    assert job.machine.phase is s.Phase.READY
    job.send(2)
    assert len(job.heard_by("b/0", w.Committed)) == 2


def test_each_side_probes_with_the_union_of_its_own_dtypes() -> None:
    job = Job().join_all()
    assert job.heard_by("trainer/1", w.RunProbe)[0].dtypes == ("BF16",)  # type: ignore[attr-defined]
    assert job.heard_by("a/1", w.RunProbe)[0].dtypes == ("BF16", "F32")  # type: ignore[attr-defined]


def test_weights_may_be_overwritten_only_when_every_engine_stands_still() -> None:
    job = Job()
    job.mute = lambda worker, message: (
        worker == "b/0" and isinstance(message, w.Commit) and job.machine.phase is s.Phase.UPDATING
    )
    job.join_all()
    job.send(1)
    assert job.heard_by("a/0", w.Begin)
    assert not job.heard_by("a/0", w.AllowAssemble)
    job.hear("b/0", w.Parked(request=job.machine.roster.sides["b"].request))
    assert job.heard_by("a/0", w.AllowAssemble)


def test_an_engine_is_committed_when_all_its_workers_have_the_version() -> None:
    job = Job()
    job.mute = lambda worker, message: worker == "a/1" and isinstance(message, w.AllowAssemble)
    job.join_all()
    job.send(1)
    assert job.heard_by("b/0", w.Committed)
    assert not job.heard_by("a/0", w.Committed)
    job.hear("a/1", w.Transferred(version=1, attempt=1))
    assert job.heard_by("a/0", w.Committed)
    assert job.heard_by("a/1", w.Committed)


@pytest.mark.parametrize(
    ("join", "word"),
    [
        (msgspec.structs.replace(join_of("a/0"), engine="b"), "name"),
        (msgspec.structs.replace(join_of("a/0"), role="trainer"), "trainer"),
        (join_of("a/0", digest="other"), "checkpoint"),
        (join_of("a/0", protocol=99), "protocol"),
        (join_of("trainer/0", size=3), "3 workers"),
    ],
)
def test_who_does_not_belong_is_refused_with_the_reason(join: w.Join, word: str) -> None:
    job = Job()
    job.tell(s.Joining(b"x", join))
    assert len(job.refused) == 1
    assert word in job.refused[0]


def test_a_name_can_join_once() -> None:
    job = Job()
    job.tell(s.Joining(b"x", join_of("a/0")))
    job.tell(s.Joining(b"y", join_of("a/0")))
    assert len(job.refused) == 1
    assert "a/0" in job.refused[0]


def test_missing_workers_are_named() -> None:
    job = Job()
    for worker in ("trainer/0", "trainer/1", "a/1"):
        job.tell(s.Joining(worker.encode(), join_of(worker)))
    job.pass_time(31)
    assert job.failure.kind == "TransferTimeout"
    assert set(job.failure.causes) == {"a/0", "b/* (no worker of it)"}


@pytest.mark.parametrize("phase", [w.RunProbe, w.PlanReady, w.ConnectPeers])
def test_a_silent_step_of_connecting_names_who_is_late(phase: type[w.Message]) -> None:
    job = Job()
    job.mute = lambda worker, message: worker == "a/1" and isinstance(message, phase)
    job.join_all()
    job.pass_time(31)
    assert set(job.failure.causes) == {"a/1"}
    assert job.failure.kind == "TransferTimeout"


def test_a_worker_without_a_sign_of_life_is_lost_and_its_engine_poisoned_during_an_update() -> None:
    job = Job()
    job.mute = lambda worker, message: worker == "a/1" and isinstance(message, w.AllowAssemble)
    job.join_all()
    job.send(1)
    job.dead.add("a/1")
    job.pass_time(15)
    assert set(job.failure.causes) == {"a/1"}
    assert job.failure.poisoned == ("a",)
    assert job.told(w.Failure) == {"a/0", "a/1"}
    assert job.given_up.poisoned == ("a",)  # b has committed: it is whole
    assert job.given_up.causes == job.failure.causes
    assert job.told(w.UpdateFailed) == {"trainer/0", "trainer/1", "b/0"}
    job.send(2)
    assert [m.engines for m in job.heard_by("trainer/0", w.Report)] == [{"b": "ready"}]  # type: ignore[attr-defined]
    assert job.plans[-1] == ("trainer/0", "trainer/1", "b/0")


def test_no_engine_is_poisoned_before_weights_may_be_overwritten() -> None:
    job = Job()
    job.mute = lambda worker, message: (
        worker == "b/0" and isinstance(message, w.Commit) and job.machine.phase is s.Phase.UPDATING
    )
    job.join_all()
    job.send(1)
    job.hear("a/0", w.WorkerFailed(kind="WorkerError", reason="connection closed", lost="b/0"))
    assert job.given_up.causes == {"b/0": "connection closed"}
    assert job.given_up.poisoned == ()
    assert job.failure.poisoned == ()
    assert ("a", "ready") in job.notes


def test_an_engine_that_does_not_stop_is_named() -> None:
    job = Job()
    job.mute = lambda worker, message: (
        worker == "a/1" and isinstance(message, w.Commit) and job.machine.phase is s.Phase.UPDATING
    )
    job.join_all()
    job.send(1)
    job.pass_time(21)
    assert set(job.failure.causes) == {"a/1"}
    assert job.given_up.kind == "TransferTimeout"
    assert "poll" in job.failure.causes["a/1"]


def test_a_trainer_that_does_not_send_is_named() -> None:
    job = Job().join_all()
    job.pass_time(100)  # waiting for a training step has no deadline
    assert job.machine.phase is s.Phase.READY
    job.hear("trainer/1", w.SendReady(version=1))
    job.pass_time(21)
    assert set(job.failure.causes) == {"trainer/0"}


def test_trainers_must_agree_on_the_version() -> None:
    job = Job().join_all()
    job.hear("trainer/0", w.SendReady(version=1))
    job.hear("trainer/1", w.SendReady(version=2))
    assert job.failure.kind == "UsageError"
    assert "trainer/0 says 1" in next(iter(job.failure.causes.values()))


def test_a_plan_of_another_digest_ends_the_session() -> None:
    job = Job()
    job.mute = lambda worker, message: worker == "b/0" and isinstance(message, w.PlanReady)
    job.join_all()
    job.hear("b/0", w.ProgramReady(attempt=1, plan_digest="other", endpoint=ENDPOINT))
    assert set(job.failure.causes) == {"b/0"}


def test_trainers_that_leave_close_the_session_in_good_order() -> None:
    job = Job().join_all()
    job.hear("trainer/1", w.Goodbye())
    assert job.machine.phase is s.Phase.CLOSED
    assert job.heard_by("a/0", w.Closed)
    job.pass_time(100, alive=False)
    assert not [m for _, m in job.said if isinstance(m, w.Failure)]


def test_an_engine_that_left_is_missing_in_the_next_update() -> None:
    job = Job().join_all()
    job.hear("b/0", w.Goodbye())
    assert ("b", "left") in job.notes
    job.send(1)
    (report,) = job.heard_by("trainer/0", w.Report)
    assert report.engines == {"a": "ready"}  # type: ignore[attr-defined]


def test_a_worker_that_is_done_may_leave_while_the_others_finish() -> None:
    job = Job()
    job.mute = lambda worker, message: worker == "a/1" and isinstance(message, w.AllowAssemble)
    job.join_all()
    job.send(1)
    job.hear("trainer/1", w.Goodbye())
    job.hear("a/1", w.Transferred(version=1, attempt=1))
    assert job.heard_by("trainer/0", w.Report)
    assert job.machine.phase is s.Phase.CLOSED
    assert job.told(w.Closed) >= {"a/0", "a/1", "b/0"}


def test_words_of_an_older_attempt_change_nothing() -> None:
    job = Job().join_all()
    job.send(1)
    before = len(job.said)
    job.hear("a/0", w.Transferred(version=1, attempt=0))
    job.hear("a/0", w.Parked(request=1))
    job.hear("trainer/0", w.Resumed(version=0, stalled_at=0, resumed_at=1, sent=0, received=0))
    assert len(job.said) == before


def test_messages_survive_the_wire_and_strangers_do_not() -> None:
    from weightbridge.errors import TransportError

    message = w.Failure(kind="WorkerError", causes={"a/0": "x"}, poisoned=("a",), version=-1)
    assert w.decode(w.encode(message)) == message
    for bad in (b"", b"\x80", b"\xc1", w.encode(message)[:-1], b'{"type": "Failure"}'):
        with pytest.raises(TransportError):
            w.decode(bad)


def test_the_hubs_own_worker_hears_of_a_failure_last() -> None:
    """It may exit on the spot and take the hub with it: the others must have heard by then."""
    job = Job().join_all()
    job.mute = lambda worker, message: worker == "b/0"
    job.hear("a/0", w.WorkerFailed(kind="WorkerError", reason="connection closed", lost="trainer/1"))
    assert not job.heard_by("trainer/0", w.Failure)
    assert job.heard_by("trainer/1", w.Failure)
    job.pass_time(s.HEARD_SECONDS + 1, alive=False)  # the dead one never confirms
    assert len(job.heard_by("trainer/0", w.Failure)) == 1
