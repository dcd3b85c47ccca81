"""What the workers of a side tell each other while they probe, and which engines are poisoned when a loader fails."""

from __future__ import annotations

import pytest
from tests.unit.test_machine_session import Job

from weightbridge.errors import TransportError
from weightbridge.machine import messages as w
from weightbridge.machine import session as s


def probing() -> Job:
    """All have joined and nobody has reported a layout."""
    job = Job()
    job.mute = lambda worker, message: isinstance(message, w.RunProbe)
    return job.join_all()


def heard(job: Job, worker: str) -> list[tuple[int, tuple[bytes, ...]]]:
    return [(m.step, m.data) for m in job.heard_by(worker, w.SideHeard) if isinstance(m, w.SideHeard)]


def test_a_side_hears_what_each_of_its_workers_said_by_rank_when_all_have() -> None:
    job = probing()
    job.hear("a/1", w.SideSay(step=0, data=b"one"))
    assert heard(job, "a/0") == []
    job.hear("b/0", w.SideSay(step=0, data=b"alone"))
    assert heard(job, "b/0") == [(0, (b"alone",))]
    job.hear("a/0", w.SideSay(step=0, data=b"nought"))
    assert heard(job, "a/0") == heard(job, "a/1") == [(0, (b"nought", b"one"))]
    job.hear("a/0", w.SideSay(step=1, data=b""))
    job.hear("a/1", w.SideSay(step=1, data=b"x"))
    assert heard(job, "a/1")[1:] == [(1, (b"", b"x"))]
    assert heard(job, "trainer/0") == []
    assert job.machine.phase is s.Phase.PROBING


@pytest.mark.parametrize("step", [1, 7])
def test_a_worker_that_speaks_out_of_turn_ends_the_session(step: int) -> None:
    job = probing()
    job.hear("a/1", w.SideSay(step=step, data=b""))
    assert set(job.failure.causes) == {"a/1"}
    assert f"step {step}" in job.failure.causes["a/1"]


def test_a_word_that_is_said_twice_changes_nothing() -> None:
    job = probing()
    job.hear("a/1", w.SideSay(step=0, data=b"one"))
    job.hear("a/1", w.SideSay(step=0, data=b"one"))
    job.hear("a/0", w.SideSay(step=0, data=b"nought"))
    job.hear("a/1", w.SideSay(step=0, data=b"one"))  # late: the side is at step 1
    assert [m.data for m in job.heard_by("a/1", w.SideHeard)] == [(b"nought", b"one")]  # type: ignore[attr-defined]
    assert job.machine.phase is s.Phase.PROBING


def test_a_worker_that_says_another_word_at_the_same_step_ends_the_session() -> None:
    job = probing()
    job.hear("a/1", w.SideSay(step=0, data=b""))
    job.hear("a/1", w.SideSay(step=0, data=b"again"))
    assert set(job.failure.causes) == {"a/1"}


def test_who_does_not_speak_to_its_side_is_named() -> None:
    job = probing()
    job.hear("a/1", w.SideSay(step=0, data=b""))
    job.pass_time(31)
    assert set(job.failure.causes) == {"a/0"}
    assert "step 0" in job.failure.causes["a/0"]


def test_words_to_a_side_after_probing_change_nothing() -> None:
    job = Job().join_all()
    before = len(job.said)
    job.hear("a/0", w.SideSay(step=0, data=b""))
    assert len(job.said) == before


def test_words_to_a_side_are_bounded() -> None:
    with pytest.raises(TransportError):
        w.decode(w.encode(w.SideSay(step=0, data=bytes(w.MAX_WORD_BYTES + 1))))
    message = w.SideHeard(step=3, data=(b"", b"x"))
    assert w.decode(w.encode(message)) == message


def committed_and_not_resumed(worker: str) -> Job:
    """Every engine is committed; all have resumed but `worker`."""
    job = Job()
    job.mute = lambda name, message: name == worker and isinstance(message, w.Committed)
    job.join_all()
    job.send(1)
    assert job.heard_by("a/0", w.Committed)
    assert job.heard_by("b/0", w.Committed)
    assert not job.heard_by("trainer/0", w.Report)
    return job


def test_an_engine_whose_worker_fails_between_commit_and_resuming_is_poisoned() -> None:
    """Its own loader had its part to do with the version, and did not do it."""
    job = committed_and_not_resumed("a/1")
    job.hear("a/1", w.WorkerFailed(kind="WorkerError", reason="load_weights raised ValueError"))
    assert job.failure.poisoned == ("a",)
    assert job.failure.causes == {"a/1": "load_weights raised ValueError"}


def test_an_engine_whose_worker_never_resumes_is_poisoned() -> None:
    job = committed_and_not_resumed("a/1")
    job.pass_time(21)
    assert set(job.failure.causes) == {"a/1"}
    assert job.failure.poisoned == ("a",)


def test_an_engine_that_has_resumed_stays_whole_when_another_one_fails() -> None:
    job = committed_and_not_resumed("a/1")
    job.hear("b/0", w.WorkerFailed(kind="WorkerError", reason="out of memory"))
    assert job.failure.poisoned == ()
    assert job.given_up.poisoned == ()  # a has every byte and goes on as soon as a/1 has done its part
