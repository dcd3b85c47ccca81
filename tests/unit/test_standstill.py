"""Silence and deadlines while the process that counts them does not run."""

from __future__ import annotations

import pytest
from tests.unit.conftest import Clock
from tests.unit.test_machine_session import Job
from tests.unit.test_machine_session_faults import in_transfer, reports

from weightbridge.coordinator.line import Line
from weightbridge.coordinator.standstill import STEP_SECONDS, Patience, Standstill
from weightbridge.machine import messages as w
from weightbridge.machine import session as s
from weightbridge.testing.ports import free_port


def test_only_what_a_step_takes_too_long_is_a_standstill(clock: Clock) -> None:
    loop = Standstill()
    clock.now += 0.4
    assert loop.look() == (50.4, 0.0)
    clock.now += 12.5
    assert loop.look() == (62.9, 12.0)
    clock.now += 0.1
    assert loop.look() == (63.0, 0.0)


def test_a_deadline_does_not_run_while_the_process_stands_still(clock: Clock) -> None:
    patience = Patience(2.0)
    assert patience.step_seconds() == STEP_SECONDS
    clock.now += 100.0
    assert patience.step_seconds() == STEP_SECONDS  # 0.5 of it has gone
    clock.now += 0.45
    patience.step_seconds()
    clock.now += 0.45
    patience.step_seconds()
    clock.now += 0.45
    assert patience.step_seconds() == pytest.approx(0.15)
    clock.now += 0.2
    assert patience.step_seconds() < 0


def test_a_loop_that_is_always_slow_sees_its_deadlines_pass(clock: Clock) -> None:
    patience, steps = Patience(2.0), 0
    while patience.step_seconds() > 0:
        clock.now += 3.0
        steps += 1
    assert steps == 4


def test_a_hub_is_not_silent_while_nobody_listens_to_it() -> None:
    line = Line(f"tcp://127.0.0.1:{free_port()}", b"a token of the job")
    try:
        line.begun, line.last_heard, line._down_since = 10.0, 12.0, 12.5
        line.stood_still(7.0, 20.0)
        assert (line.begun, line.last_heard, line._down_since) == (17.0, 19.0, 19.5)
        line.stood_still(7.0, 20.0)
        assert (line.begun, line.last_heard, line._down_since) == (20.0, 20.0, 20.0)  # never later than now
    finally:
        line.socket.close()


# --- the hub ----------------------------------------------------------------------------------------------------------------

LONG = 12.0  # seconds; in this job a heartbeat may be 10 s late, and a version takes 20 s at most


def freeze(job: Job, seconds: float) -> None:
    """The hub stands still, and wakes up."""
    job.now += seconds
    job.tell(s.Tick(seconds))


def beat(job: Job, *workers: str, seconds: float = 13.0) -> None:
    """These go on for a while, and the others have gone."""
    until = job.now + seconds
    while job.now < until:
        job.now += 0.5
        for worker in workers:
            if worker in job.machine.roster.side_of:
                job.hear(worker, w.Heartbeat())
        job.tell(s.Tick())


def test_a_job_that_stood_still_as_a_whole_goes_on() -> None:
    job = in_transfer()
    for _ in range(5):
        freeze(job, 4 * LONG)
    assert job.machine.phase is s.Phase.UPDATING
    assert not job.told(w.Failure) | job.told(w.UpdateFailed)
    job.mute = lambda worker, message: False
    job.hear("a/1", w.Transferred(version=1, attempt=1))
    assert [r.version for r in reports(job)] == [1]
    beat(job, *job.machine.roster.side_of)
    assert job.machine.phase is s.Phase.READY


@pytest.mark.parametrize("closed", [True, False])
def test_a_hub_that_stood_still_blames_itself_for_those_who_gave_it_up(closed: bool) -> None:
    """a/0 stood still as well, and is the only one that is still there."""
    job = in_transfer()
    freeze(job, LONG)
    gone = [name for name in job.machine.roster.side_of if name not in ("trainer/0", "a/0")]
    for name in gone:
        job.hear(name, w.Heartbeat())  # said before it left, and heard only now
        if closed:
            job.tell(s.Disconnected(name))
    beat(job, "trainer/0", "a/0")
    assert job.failure.causes == {
        "trainer/0": "stood still for 12 s (stopped, or starved of CPU) and was given up by a/1 and 2 more"
    }
    assert "a/0" in job.told(w.Failure)


def test_who_goes_after_the_hub_went_on_is_to_blame_itself() -> None:
    job = in_transfer()
    job.mute = lambda worker, message: False
    freeze(job, LONG)
    beat(job, *job.machine.roster.side_of, seconds=2.0)
    job.dead = {"trainer/1"}
    job.tell(s.Disconnected("trainer/1"))
    job.pass_time(10)
    assert set(job.failure.causes) == {"trainer/1"}


def test_a_short_standstill_is_no_reason_to_give_a_hub_up() -> None:
    job = in_transfer()
    freeze(job, 1.0)
    job.tell(s.Disconnected("trainer/1"))
    beat(job, *(set(job.machine.roster.side_of) - {"trainer/1"}))
    assert set(job.failure.causes) == {"trainer/1"}


def test_an_onlooker_is_not_forgotten_while_the_hub_stands_still() -> None:
    job = in_transfer()
    job.machine.onlookers = {"observer/1": job.now, "observer/2": -1.0}
    freeze(job, LONG)
    assert list(job.machine.onlookers) == ["observer/1"]
