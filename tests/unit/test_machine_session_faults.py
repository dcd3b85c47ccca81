"""The hub's machine alone, when something goes wrong or somebody comes and goes: who is dropped, told, and sent to again."""

from __future__ import annotations

import pytest
from tests.unit.test_machine_session import ENDPOINT, Job, join_of

from weightbridge.machine import messages as w
from weightbridge.machine import session as s

DROP = s.SessionPolicy(when_engine_fails="drop")
SUPERSEDE = s.SessionPolicy(when_newer="supersede")


def in_transfer(
    policy: s.SessionPolicy | None = None, *, slow: str = "a/1", staged: frozenset[str] = frozenset()
) -> Job:
    """Version 1 is under way; every worker has done its part but `slow`."""
    job = Job(policy, staged)
    job.mute = lambda worker, message: worker == slow and isinstance(message, w.AllowAssemble)
    if slow.split("/")[0] in staged:
        job.mute = lambda worker, message: worker == slow and isinstance(message, w.Begin)
    job.join_all()
    job.send(1)
    assert not job.heard_by("trainer/0", w.Report)
    return job


def reports(job: Job) -> list[w.Report]:
    return [m for m in job.heard_by("trainer/0", w.Report) if isinstance(m, w.Report)]


def test_a_broken_connection_is_tried_again_with_fresh_memory_and_the_same_plan() -> None:
    job = in_transfer()
    job.mute = lambda worker, message: False
    job.hear("a/0", w.AttemptFailed(attempt=1, kind="WorkerError", reason="connection reset", lost="b/0"))
    assert job.told(w.AbortAttempt) == {"trainer/0", "trainer/1", "a/0", "a/1", "b/0"}
    assert [(m.attempt, m.plan) for m in job.heard_by("b/0", w.PlanReady)] == [(1, b"plan"), (2, b"")]  # type: ignore[attr-defined]
    (report,) = reports(job)
    assert (report.version, report.attempts, report.engines) == (1, 2, {"a": "ready", "b": "ready"})
    assert not job.told(w.UpdateFailed)
    assert len(job.plans) == 1


def test_nobody_moves_again_before_everybody_has_stopped() -> None:
    job = in_transfer()
    job.mute = lambda worker, message: worker == "b/0" and isinstance(message, w.AbortAttempt)
    job.hear("a/0", w.AttemptFailed(attempt=1, kind="WorkerError", reason="connection reset", lost="b/0"))
    job.pass_time(2)
    assert len(job.heard_by("a/0", w.PlanReady)) == 1
    job.hear("b/0", w.Quiesced(attempt=0, touched=False, released=False))  # of no attempt that runs
    assert len(job.heard_by("a/0", w.PlanReady)) == 1
    job.hear("b/0", w.Quiesced(attempt=1, touched=True, released=False))
    assert len(job.heard_by("a/0", w.PlanReady)) == 2
    assert len(reports(job)) == 1


def test_an_engine_that_stands_still_is_not_asked_to_stop_again_for_another_attempt() -> None:
    job = in_transfer(slow="a/1")
    job.mute = lambda worker, message: False
    proposed = {worker: len(job.heard_by(worker, w.Propose)) for worker in ("a/1", "b/0")}
    job.hear("a/1", w.AttemptFailed(attempt=1, kind="CorruptionError", reason="digest", lost="trainer/1"))
    assert len(job.heard_by("a/1", w.Propose)) == proposed["a/1"]  # it waits in its poll
    assert len(job.heard_by("a/1", w.AllowAssemble)) == 2
    # b had gone on; its live weights are written once more, so it has to stand still once more
    assert len(job.heard_by("b/0", w.Propose)) == proposed["b/0"] + 1
    assert reports(job)[0].attempts == 2


def test_a_version_that_the_trainers_may_have_changed_is_not_sent_again() -> None:
    job = in_transfer()
    job.mute = lambda worker, message: False
    job.released = True
    job.hear("a/0", w.AttemptFailed(attempt=1, kind="WorkerError", reason="connection reset", lost="b/0"))
    assert job.given_up.causes == {"b/0": "connection reset"}
    assert job.given_up.poisoned == ("a",)
    assert reports(job) == []
    job.released = False
    job.send(2)
    assert reports(job)[0].engines == {"a": "ready", "b": "ready"}  # nobody was dead: all are still in


def test_retries_are_counted() -> None:
    job = in_transfer(s.SessionPolicy(retries=2))
    for attempt in (1, 2, 3):
        job.hear("a/0", w.AttemptFailed(attempt=attempt, kind="CorruptionError", reason="digest", lost="trainer/1"))
    assert job.given_up.kind == "CorruptionError"
    assert job.given_up.causes == {
        "a/0": "digest"
    }  # of the two ends, the engine's is named: a trainer cannot be left out
    assert len(job.heard_by("a/0", w.PlanReady)) == 4


@pytest.mark.parametrize("policy", [None, DROP])
def test_a_dead_engine_is_left_out_and_the_version_sent_again_or_given_up(policy: s.SessionPolicy | None) -> None:
    job = in_transfer(policy)
    job.dead.add("a/1")
    job.hear("b/0", w.AttemptFailed(attempt=1, kind="WorkerError", reason="connection closed", lost="a/1"))
    job.pass_time(8)
    assert job.told(w.Failure) == {"a/0"}  # a/1 has been silent: nobody listens there
    assert ("a", "lost") in job.notes
    assert job.plans[-1] == ("trainer/0", "trainer/1", "b/0")
    if policy is DROP:
        (report,) = reports(job)
        assert report.engines == {"a": "lost", "b": "ready"}
        assert not job.told(w.UpdateFailed)
    else:
        assert set(job.given_up.causes) == {"a/1"}
        assert reports(job) == []
        job.send(2)
        assert reports(job)[0].engines == {"b": "ready"}


def test_a_version_waits_for_the_plan_without_an_engine_that_went_when_it_had_all_it_needed() -> None:
    job = Job(DROP)
    slow = {"a/1": w.AllowAssemble, "b/0": w.Committed}
    job.mute = lambda worker, message: worker in slow and isinstance(message, slow[worker])
    job.join_all()
    job.send(1)
    (planning,) = [m for m in job.machine.handle(s.Received("b/0", w.Goodbye()), job.now) if isinstance(m, s.MakePlan)]
    job.mute = lambda worker, message: False
    job.hear("a/1", w.Transferred(version=1, attempt=1))
    assert reports(job)[0].engines == {"a": "ready", "b": "lost"}
    job.send(2)
    assert [m.version for m in job.heard_by("a/0", w.Begin)] == [1]  # type: ignore[attr-defined]
    job.tell(s.PlanMade(planning.epoch, b"plan", "digest"))
    assert (reports(job)[1].engines, reports(job)[1].attempts) == ({"a": "ready"}, 1)


def connecting(*silent: str) -> Job:
    """Nobody has been ready yet; these do not connect."""
    job = Job()
    job.mute = lambda worker, message: worker in silent and isinstance(message, w.ConnectPeers)
    return job.join_all()


def cannot_join(peer: str, attempt: int = 1) -> w.AttemptFailed:
    return w.AttemptFailed(attempt=attempt, kind="ConnectError", reason=f"cannot join {peer}", lost=peer)


@pytest.mark.parametrize(("reporter", "lost"), [("a/1", "trainer/1"), ("b/0", "a/1"), ("trainer/0", "trainer/1")])
def test_whoever_does_not_answer_is_the_culprit_and_not_who_was_first_to_complain_of_somebody(
    reporter: str, lost: str
) -> None:
    """trainer/1 has stopped. a/1 waits for it, so that b/0 waits for a/1; either may be the first whose deadline passes."""
    job = connecting("trainer/1", "a/1", "b/0")
    job.dead, job.mute = {"trainer/1"}, lambda worker, message: False
    job.hear(reporter, cannot_join(lost))
    assert job.machine.phase is s.Phase.ABORTING
    job.pass_time(12)
    assert set(job.failure.causes) == {"trainer/1"}


def test_a_first_connection_that_breaks_is_tried_again() -> None:
    job = connecting("a/1")
    job.mute = lambda worker, message: False
    job.hear("a/1", cannot_join("trainer/1"))
    assert [(m.attempt, m.plan) for m in job.heard_by("b/0", w.PlanReady)] == [(1, b"plan"), (2, b"")]  # type: ignore[attr-defined]
    assert job.machine.phase is s.Phase.READY
    assert not job.told(w.Failure)


def test_two_who_can_never_connect_end_the_session_before_it_is_ready() -> None:
    job = connecting("a/1")
    job.hear("a/1", cannot_join("trainer/1"))
    job.hear("a/1", cannot_join("trainer/1", attempt=2))
    assert job.failure.causes == {"a/1": "cannot join trainer/1"}


def test_who_cannot_even_get_memory_is_not_asked_twice() -> None:
    job = connecting("a/1")
    job.hear("a/1", w.AttemptFailed(attempt=1, kind="RegistrationError", reason="cannot take 64 MiB"))
    assert job.failure.causes == {"a/1": "cannot take 64 MiB"}


def test_a_worker_whose_connection_closed_and_that_comes_back_is_not_lost() -> None:
    job = Job().join_all()
    job.tell(s.Disconnected("a/1"))
    job.pass_time(9)
    assert not job.told(w.Failure)
    job.dead.add("a/1")
    job.tell(s.Disconnected("a/1"))
    job.pass_time(4)
    assert set(job.failure.causes) == {"a/1"}


def test_a_dead_trainer_ends_the_session_by_name() -> None:
    job = in_transfer(DROP)
    job.dead.add("trainer/1")
    job.hear("b/0", w.AttemptFailed(attempt=1, kind="WorkerError", reason="connection closed", lost="trainer/1"))
    job.pass_time(8)
    assert set(job.failure.causes) == {"trainer/1"}
    assert job.failure.poisoned == ("a",)
    assert job.machine.phase is s.Phase.FAILED


def test_a_trainer_that_does_not_stop_moving_ends_the_session() -> None:
    job = in_transfer()
    job.mute = lambda worker, message: worker == "trainer/1" and isinstance(message, w.AbortAttempt)
    job.hear("b/0", w.AttemptFailed(attempt=1, kind="WorkerError", reason="reset", lost="trainer/1"))
    job.pass_time(21)
    assert set(job.failure.causes) == {"trainer/1"}
    assert "did not end the attempt" in job.failure.causes["trainer/1"]


def newcomer(job: Job, engine: str, size: int) -> None:
    for rank in range(size):
        job.tell(s.Joining(f"{engine}{rank}".encode(), join_of(f"{engine}/{rank}", size=size)))


def test_an_engine_joins_between_updates_and_the_others_are_not_probed_again() -> None:
    job = Job().join_all()
    job.send(1)
    newcomer(job, "c", 2)
    assert len(job.heard_by("a/0", w.RunProbe)) == 1
    assert job.plans[-1] == ("trainer/0", "trainer/1", "a/0", "a/1", "b/0", "c/0", "c/1")
    job.send(2)
    assert reports(job)[-1].engines == {"a": "ready", "b": "ready", "c": "ready"}
    assert [m.version for m in job.heard_by("c/1", w.Ready)] == [1]  # type: ignore[attr-defined]


def test_an_engine_that_joins_during_an_update_waits_for_its_end() -> None:
    job = in_transfer()
    newcomer(job, "c", 1)
    assert job.plans[-1][-1] == "c/0"  # planned beside the update
    assert not job.heard_by("c/0", w.PlanReady)
    job.mute = lambda worker, message: False
    job.hear("a/1", w.Transferred(version=1, attempt=1))
    assert reports(job)[0].engines == {"a": "ready", "b": "ready"}
    assert len(job.heard_by("c/0", w.PlanReady)) == 1
    job.send(2)
    assert reports(job)[1].engines == {"a": "ready", "b": "ready", "c": "ready"}


def test_a_newcomer_that_never_reports_its_layout_is_lost_alone() -> None:
    job = Job().join_all()
    job.mute = lambda worker, message: worker == "c/1" and isinstance(message, w.RunProbe)
    newcomer(job, "c", 2)
    job.pass_time(31)
    assert job.told(w.Failure) == {"c/0", "c/1"}
    job.send(1)
    assert reports(job)[0].engines == {"a": "ready", "b": "ready"}


def test_a_newcomer_that_cannot_be_planned_for_is_lost_alone() -> None:
    job = Job().join_all()
    job.mute = lambda worker, message: worker == "c/0" and isinstance(message, w.RunProbe)
    newcomer(job, "c", 1)
    refused = [
        i
        for i in job.machine.handle(s.Received("c/0", w.LayoutReady(source_map=b"odd")), job.now)
        if isinstance(i, s.MakePlan)
    ]
    job.tell(s.PlanRefused(refused[0].epoch, "CoverageError", "takes half a tensor"))
    assert job.failure.causes == {"c/0": "takes half a tensor"}
    job.send(1)
    assert reports(job)[0].engines == {"a": "ready", "b": "ready"}


def test_a_plan_refused_when_a_newcomer_has_left_meanwhile_is_made_anew_without_it() -> None:
    job = Job().join_all()
    job.mute = lambda worker, message: worker in ("c/0", "d/0") and isinstance(message, w.RunProbe)
    newcomer(job, "c", 1)
    newcomer(job, "d", 1)
    (refused,) = job.machine.handle(s.Received("c/0", w.LayoutReady(source_map=b"odd")), job.now)
    assert isinstance(refused, s.MakePlan)
    job.hear("c/0", w.Goodbye())
    job.tell(s.PlanRefused(refused.epoch, "CoverageError", "takes half a tensor"))
    assert not job.told(w.Failure)
    job.hear("d/0", w.LayoutReady(source_map=b"d/0"))
    job.hear("d/0", w.Installed(request=job.machine.roster.side_of["d/0"].request))
    job.send(1)
    assert reports(job)[0].engines == {"a": "ready", "b": "ready", "d": "ready"}


def test_an_engine_comes_back_under_its_name() -> None:
    job = Job().join_all()
    job.hear("b/0", w.Goodbye())
    newcomer(job, "b", 1)
    job.send(1)
    assert reports(job)[0].engines == {"a": "ready", "b": "ready"}


def test_when_the_last_engine_is_gone_a_version_waits_for_one_and_is_then_given_up() -> None:
    job = Job().join_all()
    for worker in ("a/0", "b/0"):
        job.hear(worker, w.Goodbye())
    job.send(1)
    job.pass_time(21)
    assert "no engine" in job.given_up.causes["hub"]
    newcomer(job, "c", 1)
    job.send(2)
    assert reports(job)[0].engines == {"c": "ready"}


def test_staged_engines_stop_only_when_all_their_bytes_are_there() -> None:
    job = in_transfer(slow="a/1", staged=frozenset("ab"))
    assert len(job.heard_by("b/0", w.Propose)) == 2  # probed, and asked for a step now that it has everything
    assert len(job.heard_by("a/0", w.Propose)) == 1
    assert not job.told(w.AllowAssemble)
    job.hear("a/1", w.Transferred(version=1, attempt=1))
    assert reports(job)[0].engines == {"a": "ready", "b": "ready"}


def never_installs(job: Job, engine: str) -> None:
    job.mute = lambda worker, message: worker.startswith(engine) and isinstance(message, w.Commit)


def test_a_newer_version_supersedes_one_that_has_arrived_and_is_not_installed() -> None:
    job = Job(SUPERSEDE, frozenset("ab")).join_all()
    never_installs(job, "a")
    job.send(1)
    job.mute = lambda worker, message: False
    job.send(2)
    first, second = reports(job)
    assert first.engines == {"a": "superseded", "b": "ready"}
    assert second.engines == {"a": "ready", "b": "ready"}
    assert [m.version for m in job.heard_by("a/0", w.Begin)] == [1, 2]  # type: ignore[attr-defined]


def test_host_memory_is_not_written_while_an_engine_may_install_from_it() -> None:
    job = Job(SUPERSEDE, frozenset("ab")).join_all()
    job.mute = lambda worker, message: worker == "a/1" and isinstance(message, w.InstallNow)  # agreed, and copying
    job.send(1)
    job.send(2)
    assert [m.version for m in job.heard_by("a/0", w.Begin)] == [1]  # type: ignore[attr-defined]
    job.version = 1
    job.install("a/1", 1, job.machine.roster.sides["a"].request)
    job.mute = lambda worker, message: False
    assert [m.version for m in job.heard_by("a/0", w.Begin)] == [1, 2]  # type: ignore[attr-defined]
    assert reports(job)[0].engines == {"a": "ready", "b": "ready"}


def test_without_supersede_a_newer_version_waits() -> None:
    job = Job(s.SessionPolicy(when_newer="finish"), frozenset("ab")).join_all()
    never_installs(job, "a")
    job.send(1)
    job.send(2)
    assert [m.version for m in job.heard_by("a/0", w.Begin)] == [1]  # type: ignore[attr-defined]


def test_a_failure_while_host_memory_fills_poisons_nobody() -> None:
    job = in_transfer(slow="a/1", staged=frozenset("ab"))
    job.dead.add("a/1")
    job.hear("b/0", w.AttemptFailed(attempt=1, kind="WorkerError", reason="closed", lost="a/1"))
    job.pass_time(8)
    assert job.given_up.poisoned == ()
    assert job.failure.poisoned == ()


def test_versions_that_engines_bring_along_are_told_to_the_trainers() -> None:
    from msgspec.structs import replace

    job = Job()
    for side, size in {"trainer": 2, "a": 2, "b": 1}.items():
        for rank in range(size):
            join = replace(join_of(f"{side}/{rank}", size=size), version=41 if side == "b" else -1)
            job.tell(s.Joining(f"c{side}{rank}".encode(), join))
    assert {m.version for m in job.heard_by("trainer/1", w.Ready)} == {41}  # type: ignore[attr-defined]


def test_words_of_an_attempt_that_is_over_change_nothing() -> None:
    job = in_transfer()
    job.mute = lambda worker, message: False
    job.hear("a/0", w.AttemptFailed(attempt=1, kind="WorkerError", reason="reset", lost="b/0"))
    assert len(reports(job)) == 1
    before = len(job.said)
    job.hear("a/0", w.AttemptFailed(attempt=1, kind="WorkerError", reason="reset", lost="b/0"))
    job.hear("a/0", w.Connected(attempt=1))
    job.hear("a/0", w.ProgramReady(attempt=1, plan_digest="digest", endpoint=ENDPOINT))
    job.hear("a/0", w.Quiesced(attempt=1, touched=True, released=True))
    assert len(job.said) == before


def test_an_engine_that_has_installed_and_not_said_so_yet_is_waited_for_before_another_attempt() -> None:
    """Its agreement is at rest, its last word of the version is still on the way: it does not stand still any more."""
    job = Job()
    job.mute = lambda worker, message: (
        (worker == "a/1" and isinstance(message, w.AllowAssemble)) or (worker == "b/0" and isinstance(message, w.Committed))
    )  # fmt: skip
    job.join_all()
    job.send(1)
    committed = job.heard_by("b/0", w.Committed)[0]
    job.mixed.discard("b/0")
    job.hear("b/0", w.Installed(request=committed.request))  # type: ignore[attr-defined]
    proposed = len(job.heard_by("b/0", w.Propose))
    job.mute = lambda worker, message: False
    job.hear("a/1", w.AttemptFailed(attempt=1, kind="WorkerError", reason="connection reset", lost="trainer/1"))
    assert len(job.heard_by("b/0", w.Begin)) == 1
    job.resume("b/0", 1, 1.5, 4.0)
    assert [m.attempt for m in job.heard_by("b/0", w.Begin)] == [1, 2]  # type: ignore[attr-defined]
    assert len(job.heard_by("b/0", w.Propose)) == proposed + 1  # bytes go into live weights once more
    assert reports(job)[0].attempts == 2


def test_an_engine_that_leaves_with_the_version_it_has_installed_gives_nothing_up() -> None:
    job = in_transfer()
    job.hear("b/0", w.Goodbye())
    assert ("b", "left") in job.notes
    assert not job.told(w.AbortAttempt)
    job.hear("a/1", w.Transferred(version=1, attempt=1))
    (report,) = reports(job)
    assert report.engines == {"a": "ready", "b": "ready"}
    job.mute = lambda worker, message: False
    job.send(2)
    assert [r.engines for r in reports(job)][1:] == [{"a": "ready"}]
    assert not job.told(w.UpdateFailed)


def test_an_engine_that_leaves_before_it_has_installed_gives_the_version_up() -> None:
    job = in_transfer()
    job.hear("a/1", w.Goodbye())
    assert job.given_up.causes == {"a/1": "left while the session was updating"}
