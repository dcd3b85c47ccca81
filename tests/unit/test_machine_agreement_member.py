"""One worker's side of the agreement, event by event."""

from __future__ import annotations

import pytest

from weightbridge.errors import InternalError, UsageError
from weightbridge.machine import agreement as a


def proposed(window: int = 2, count: int = 5, request: int = 1) -> a.AgreementMember:
    member = a.AgreementMember(window)
    assert member.handle(a.Proposed(request)) == (a.ReadCount(),)
    assert member.handle(a.CountRead(count)) == (a.WriteGate(count + window), a.ReadCount())
    assert member.handle(a.CountRead(count)) == (a.SendPromise(request, count + window),)
    return member


def parked(target: int = 9) -> a.AgreementMember:
    member = proposed()
    assert member.handle(a.Committed(1, target)) == (a.WriteGate(target),)
    assert member.handle(a.Reached(target)) == (a.SendParked(1),)
    return member


def holding(count: int = 6) -> a.AgreementMember:
    member = proposed()
    assert member.handle(a.IdleAsked(1, 1)) == (a.TryLock(),)
    assert member.handle(a.LockTried(True, count)) == (a.SendIdle(1, 1, True, count),)
    return member


def test_window_must_be_positive() -> None:
    with pytest.raises(UsageError, match="window is 0, expected at least 1"):
        a.AgreementMember(0)


def test_promise_is_the_gate_when_the_count_stays_below_it() -> None:
    member = a.AgreementMember(3)
    assert member.request == 0
    assert member.handle(a.Proposed(7)) == (a.ReadCount(),)
    assert member.handle(a.CountRead(10)) == (a.WriteGate(13), a.ReadCount())
    assert member.handle(a.CountRead(12)) == (a.SendPromise(7, 13),)
    assert member.request == 7


def test_gate_is_raised_until_the_count_has_not_passed_it() -> None:
    member = a.AgreementMember(1)
    member.handle(a.Proposed(1))
    assert member.handle(a.CountRead(10)) == (a.WriteGate(11), a.ReadCount())
    assert member.handle(a.CountRead(11)) == (a.WriteGate(12), a.ReadCount())
    assert member.handle(a.CountRead(30)) == (a.WriteGate(31), a.ReadCount())
    assert member.handle(a.CountRead(30)) == (a.SendPromise(1, 31),)


def test_repeated_proposal_repeats_the_promise() -> None:
    member = proposed()
    assert member.handle(a.Proposed(1)) == (a.SendPromise(1, 7),)
    member.handle(a.Committed(1, 9))
    assert member.handle(a.Proposed(1)) == (a.SendPromise(1, 7),)


def test_waiting_at_the_bound_is_not_parked_until_the_commit_says_so() -> None:
    member = proposed()
    assert member.handle(a.Reached(7)) == ()
    assert member.handle(a.InstallAllowed(1)) == ()
    assert member.handle(a.Committed(1, 7)) == (a.WriteGate(7), a.SendParked(1))


def test_commit_lets_a_worker_at_its_bound_go_on_to_the_target() -> None:
    member = proposed()
    assert member.handle(a.Reached(7)) == ()
    assert member.handle(a.Committed(1, 9)) == (a.WriteGate(9),)
    assert member.handle(a.Reached(9)) == (a.SendParked(1),)


def test_parked_worker_installs_only_when_allowed_and_once() -> None:
    member = parked()
    assert member.handle(a.Committed(1, 9)) == (a.SendParked(1),)
    assert member.handle(a.InstallAllowed(1)) == (a.Install(1, False),)
    assert member.handle(a.InstallAllowed(1)) == ()
    assert member.handle(a.Committed(1, 9)) == ()
    assert member.handle(a.InstallDone(1)) == (a.WriteGate(a.NO_GATE), a.SendInstalled(1))
    assert member.handle(a.InstallAllowed(1)) == (a.SendInstalled(1),)
    assert member.handle(a.InstallDone(1)) == ()
    assert member.request == 0


def test_idle_worker_installs_under_its_lock() -> None:
    member = holding()
    assert member.handle(a.IdleInstall(1, 1)) == (a.Install(1, True),)
    assert member.handle(a.IdleInstall(1, 1)) == ()
    assert member.handle(a.InstallDone(1)) == (a.WriteGate(a.NO_GATE), a.ReleaseLock(), a.SendInstalled(1))
    assert member.handle(a.IdleInstall(1, 1)) == (a.SendInstalled(1),)


def test_a_hub_may_allow_the_idle_install_too() -> None:
    assert holding().handle(a.InstallAllowed(1)) == (a.Install(1, True),)


def test_repeated_ask_keeps_the_lock_and_the_answer() -> None:
    member = holding(count=6)
    assert member.handle(a.IdleAsked(1, 1)) == (a.SendIdle(1, 1, True, 6),)


def test_busy_worker_is_not_held_and_its_answer_stands() -> None:
    member = proposed()
    member.handle(a.IdleAsked(1, 1))
    assert member.handle(a.LockTried(False, 6)) == (a.SendIdle(1, 1, False, 0),)
    assert member.handle(a.IdleAsked(1, 1)) == (a.SendIdle(1, 1, False, 0),)
    assert member.handle(a.IdleInstall(1, 1)) == ()
    assert member.handle(a.IdleAsked(1, 2)) == (a.TryLock(),)


def test_release_gives_the_lock_back_and_confirms() -> None:
    member = holding()
    assert member.handle(a.IdleReleased(1, 1)) == (a.ReleaseLock(), a.SendIdle(1, 1, False, 0))
    assert member.handle(a.IdleReleased(1, 1)) == (a.SendIdle(1, 1, False, 0),)
    assert member.handle(a.IdleAsked(1, 1)) == (a.SendIdle(1, 1, False, 0),), "a late ask must not take the lock again"


def test_release_that_overtakes_its_ask_forestalls_it() -> None:
    member = proposed()
    assert member.handle(a.IdleReleased(1, 3)) == (a.SendIdle(1, 3, False, 0),)
    assert member.handle(a.IdleAsked(1, 3)) == (a.SendIdle(1, 3, False, 0),)
    assert member.handle(a.IdleAsked(1, 2)) == ()
    assert member.handle(a.IdleReleased(1, 2)) == ()


def test_late_words_of_an_older_attempt_are_ignored() -> None:
    member = proposed()
    member.handle(a.IdleAsked(1, 2))
    member.handle(a.LockTried(True, 6))
    assert member.handle(a.IdleReleased(1, 1)) == ()
    assert member.handle(a.IdleInstall(1, 1)) == ()
    assert member.handle(a.IdleAsked(1, 1)) == ()
    assert member.handle(a.IdleInstall(1, 2)) == (a.Install(1, True),)


def test_commit_while_the_lock_is_held_moves_the_gate() -> None:
    member = holding()
    assert member.handle(a.Committed(1, 9)) == (a.WriteGate(9),)
    assert member.handle(a.IdleReleased(1, 1)) == (a.ReleaseLock(), a.SendIdle(1, 1, False, 0))
    assert member.handle(a.Reached(9)) == (a.SendParked(1),)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (proposed, (a.WriteGate(a.NO_GATE), a.SendAborted(1))),
        (parked, (a.WriteGate(a.NO_GATE), a.SendAborted(1))),
        (holding, (a.WriteGate(a.NO_GATE), a.ReleaseLock(), a.SendAborted(1))),
        (lambda: a.AgreementMember(1), (a.SendAborted(1),)),
    ],
)
def test_abort_lifts_the_gate_and_everything_later_is_ignored(make: object, expected: tuple[object, ...]) -> None:
    member = make()  # type: ignore[operator]
    assert member.handle(a.Aborted(1)) == expected
    late = (a.Proposed(1), a.Committed(1, 9), a.Reached(9), a.InstallAllowed(1), a.IdleAsked(1, 2), a.IdleInstall(1, 1))
    assert [member.handle(event) for event in late] == [()] * len(late)
    assert member.handle(a.Aborted(1)) == (a.SendAborted(1),)


def test_abort_withdraws_an_install_that_has_not_begun() -> None:
    member = parked()
    member.handle(a.InstallAllowed(1))
    assert member.handle(a.Aborted(1)) == (a.CancelInstall(1), a.WriteGate(a.NO_GATE), a.SendAborted(1))
    assert member.handle(a.InstallDone(1)) == ()
    assert member.handle(a.InstallAllowed(1)) == ()


def test_a_newer_request_takes_the_place_of_one_given_up() -> None:
    member = holding()
    assert member.handle(a.Proposed(2)) == (a.ReleaseLock(), a.ReadCount())
    assert member.handle(a.CountRead(7)) == (a.WriteGate(9), a.ReadCount())
    assert member.handle(a.CountRead(7)) == (a.SendPromise(2, 9),)
    assert member.handle(a.Aborted(1)) == (a.SendAborted(1),)
    assert member.handle(a.Committed(1, 7)) == ()
    assert member.handle(a.Committed(2, 9)) == (a.WriteGate(9),)
    assert member.request == 2


def test_a_newer_request_waits_for_an_install_to_end() -> None:
    member = parked()
    member.handle(a.InstallAllowed(1))
    assert member.handle(a.Proposed(2)) == ()
    member.handle(a.InstallDone(1))
    assert member.handle(a.Proposed(2)) == (a.ReadCount(),)


def test_abort_of_a_request_never_heard_of_closes_it() -> None:
    member = proposed(request=1)
    assert member.handle(a.Aborted(2)) == (a.WriteGate(a.NO_GATE), a.SendAborted(2))
    assert member.handle(a.Proposed(2)) == ()
    assert member.handle(a.Proposed(3)) == (a.ReadCount(),)


def test_gate_of_a_second_request_is_lifted_and_set_anew() -> None:
    member = parked(target=9)
    member.handle(a.InstallAllowed(1))
    member.handle(a.InstallDone(1))
    assert member.handle(a.Reached(10)) == (), "the poll that met the old gate just before it was lifted"
    member.handle(a.Proposed(2))
    assert member.handle(a.CountRead(10)) == (a.WriteGate(12), a.ReadCount())
    member.handle(a.CountRead(11))
    assert member.handle(a.Committed(2, 12)) == (a.WriteGate(12),)


def test_broken_contracts_are_named() -> None:
    with pytest.raises(InternalError, match=r"CountRead\(3\) in phase FREE"):
        a.AgreementMember(1).handle(a.CountRead(3))
    with pytest.raises(InternalError, match="only after TryLock"):
        a.AgreementMember(1).handle(a.LockTried(True, 3))
    member = proposed()
    member.handle(a.Committed(1, 9))
    with pytest.raises(InternalError, match="poll 10 met the gate, past the agreed poll 9"):
        member.handle(a.Reached(10))
    member = holding()
    member.handle(a.Committed(1, 9))
    with pytest.raises(InternalError, match="poll 9 was made without the step lock"):
        member.handle(a.Reached(9))
