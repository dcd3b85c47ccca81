"""The leader's side of the agreement, event by event. Member ids are not positions: 4, 2 and 7."""

from __future__ import annotations

import pytest

from weightbridge.errors import UsageError
from weightbridge.machine import agreement as a

MEMBERS = (4, 2, 7)


def started(request: int = 1) -> a.AgreementLeader:
    leader = a.AgreementLeader(MEMBERS)
    assert leader.handle(a.Start(request)) == tuple(a.SendPropose(m, request) for m in MEMBERS)
    return leader


def committed() -> a.AgreementLeader:
    leader = started()
    assert leader.handle(a.PromiseFrom(4, 1, 7)) == ()
    assert leader.handle(a.PromiseFrom(7, 1, 9)) == ()
    assert leader.handle(a.PromiseFrom(2, 1, 8)) == tuple(a.SendCommit(m, 1, 9) for m in MEMBERS)
    return leader


def asking() -> a.AgreementLeader:
    leader = committed()
    asked = leader.handle(a.Tick())
    assert asked == (*(a.SendCommit(m, 1, 9) for m in MEMBERS), *(a.AskIdle(m, 1, 1) for m in MEMBERS))
    return leader


def agreed() -> a.AgreementLeader:
    leader = committed()
    assert leader.handle(a.ParkedFrom(4, 1)) == ()
    assert leader.handle(a.ParkedFrom(2, 1)) == ()
    assert leader.handle(a.ParkedFrom(7, 1)) == (a.Agreed(1, 9), *(a.SendInstall(m, 1) for m in MEMBERS))
    return leader


def test_members_must_be_some_and_different() -> None:
    for members in ((), (1, 2, 1)):
        with pytest.raises(UsageError, match="at least one id and none twice"):
            a.AgreementLeader(members)


def test_target_is_the_largest_bound_and_promises_count_once() -> None:
    leader = started()
    leader.handle(a.PromiseFrom(4, 1, 7))
    assert leader.handle(a.PromiseFrom(4, 1, 7)) == ()
    assert leader.waiting_for() == ((2, "its promise for request 1"), (7, "its promise for request 1"))
    assert leader.handle(a.Tick()) == (a.SendPropose(2, 1), a.SendPropose(7, 1))
    leader.handle(a.PromiseFrom(2, 1, 12))
    assert leader.handle(a.PromiseFrom(7, 1, 9)) == tuple(a.SendCommit(m, 1, 12) for m in MEMBERS)
    assert leader.handle(a.PromiseFrom(7, 1, 9)) == ()


def test_all_parked_is_agreed_and_all_installed_ends_it() -> None:
    leader = agreed()
    assert leader.handle(a.ParkedFrom(7, 1)) == ()
    assert leader.handle(a.InstalledFrom(2, 1)) == ()
    assert leader.waiting_for() == tuple((m, "the end of its install of request 1") for m in (4, 7))
    assert leader.handle(a.Tick()) == (a.SendInstall(4, 1), a.SendInstall(7, 1))
    leader.handle(a.InstalledFrom(7, 1))
    assert leader.handle(a.InstalledFrom(4, 1)) == (a.AllInstalled(1, 9),)
    assert leader.waiting_for() == ()
    assert leader.handle(a.Tick()) == ()
    assert leader.handle(a.Start(2)) == tuple(a.SendPropose(m, 2) for m in MEMBERS)
    assert leader.handle(a.ParkedFrom(4, 1)) == (), "of the request before"


def test_tick_commits_again_to_those_not_parked_and_asks_nothing_once_one_is_parked() -> None:
    leader = committed()
    leader.handle(a.ParkedFrom(2, 1))
    assert leader.handle(a.Tick()) == (a.SendCommit(4, 1, 9), a.SendCommit(7, 1, 9))
    assert leader.waiting_for() == tuple((m, "to reach poll 9 (or to go idle) for request 1") for m in (4, 7))


def test_tick_that_may_not_ask_only_sends_again() -> None:
    assert committed().handle(a.Tick(ask_idle=False)) == tuple(a.SendCommit(m, 1, 9) for m in MEMBERS)


def test_idle_at_one_count_is_agreed_at_that_count() -> None:
    leader = asking()
    assert leader.handle(a.IdleFrom(4, 1, 1, True, 5)) == ()
    assert leader.handle(a.IdleFrom(4, 1, 1, True, 5)) == ()
    commits = tuple(a.SendCommit(m, 1, 9) for m in MEMBERS)
    assert leader.handle(a.Tick()) == (*commits, a.AskIdle(2, 1, 1), a.AskIdle(7, 1, 1))
    leader.handle(a.IdleFrom(2, 1, 1, True, 5))
    installs = tuple(a.SendIdleInstall(m, 1, 1) for m in MEMBERS)
    assert leader.handle(a.IdleFrom(7, 1, 1, True, 5)) == (a.Agreed(1, 5), *installs)
    assert leader.handle(a.Tick()) == installs
    for member in (4, 2):
        leader.handle(a.InstalledFrom(member, 1))
    assert leader.handle(a.InstalledFrom(7, 1)) == (a.AllInstalled(1, 5),)


def test_unequal_counts_are_released_and_confirmed_before_the_next_attempt() -> None:
    leader = asking()
    leader.handle(a.IdleFrom(4, 1, 1, True, 5))
    leader.handle(a.IdleFrom(2, 1, 1, True, 6))
    releases = tuple(a.SendIdleRelease(m, 1, 1) for m in MEMBERS)
    assert leader.handle(a.IdleFrom(7, 1, 1, True, 6)) == releases
    assert leader.handle(a.IdleFrom(7, 1, 1, True, 6)) == (), "a doubled answer confirms nothing"
    assert leader.handle(a.IdleFrom(4, 1, 1, False, 0)) == ()
    commits = tuple(a.SendCommit(m, 1, 9) for m in MEMBERS)
    assert leader.handle(a.Tick()) == (*commits, a.SendIdleRelease(2, 1, 1), a.SendIdleRelease(7, 1, 1))
    leader.handle(a.IdleFrom(2, 1, 1, False, 0))
    leader.handle(a.IdleFrom(7, 1, 1, False, 0))
    assert leader.handle(a.Tick()) == (*commits, *(a.AskIdle(m, 1, 2) for m in MEMBERS))
    assert leader.handle(a.IdleFrom(4, 1, 1, True, 6)) == (), "of the attempt before"


def test_one_busy_member_ends_the_attempt_and_needs_no_release() -> None:
    leader = asking()
    leader.handle(a.IdleFrom(4, 1, 1, True, 5))
    assert leader.handle(a.IdleFrom(2, 1, 1, False, 0)) == (a.SendIdleRelease(4, 1, 1), a.SendIdleRelease(7, 1, 1))


def test_late_yes_after_a_no_does_not_count() -> None:
    leader = asking()
    leader.handle(a.IdleFrom(2, 1, 1, False, 0))
    assert leader.handle(a.IdleFrom(2, 1, 1, True, 5)) == ()
    leader.handle(a.IdleFrom(4, 1, 1, True, 5))
    assert leader.handle(a.IdleFrom(7, 1, 1, True, 5)) == ()


@pytest.mark.parametrize("make", [started, committed, asking, agreed])
def test_lost_member_fails_the_request_and_aborts_the_others(make: object) -> None:
    leader = make()  # type: ignore[operator]
    aborts = (a.SendAbort(4, 1), a.SendAbort(7, 1))
    assert leader.handle(a.MemberLost(2, "killed")) == (a.AgreementFailed(1, 2, "killed"), *aborts)
    assert leader.handle(a.MemberLost(2, "killed")) == ()
    assert leader.handle(a.ParkedFrom(4, 1)) == ()
    assert leader.handle(a.InstalledFrom(4, 1)) == ()
    assert leader.waiting_for() == tuple((m, "its confirmation that request 1 is aborted") for m in (4, 7))
    assert leader.handle(a.AbortedFrom(7, 1)) == ()
    assert leader.handle(a.Tick()) == (a.SendAbort(4, 1),)
    leader.handle(a.AbortedFrom(4, 1))
    assert leader.handle(a.Tick()) == ()
    assert leader.handle(a.Start(2))[0] == a.AgreementFailed(2, 2, "killed")


def test_abort_names_nobody_and_only_its_own_request() -> None:
    leader = committed()
    assert leader.handle(a.Abort(2, "late")) == ()
    failed = leader.handle(a.Abort(1, "60 s are over"))
    assert failed == (a.AgreementFailed(1, None, "60 s are over"), *(a.SendAbort(m, 1) for m in MEMBERS))
    assert leader.handle(a.Abort(1, "again")) == ()
    assert leader.handle(a.Start(2)) == tuple(a.SendPropose(m, 2) for m in MEMBERS)


def test_member_lost_between_requests_fails_the_next_at_once() -> None:
    leader = a.AgreementLeader(MEMBERS)
    assert leader.handle(a.MemberLost(7, "")) == ()
    failed = leader.handle(a.Start(1))
    assert failed == (a.AgreementFailed(1, 7, "lost"), a.SendAbort(4, 1), a.SendAbort(2, 1))


def test_start_out_of_turn_is_refused() -> None:
    leader = started(request=3)
    with pytest.raises(UsageError, match="requests must grow"):
        leader.handle(a.Start(3))
    with pytest.raises(UsageError, match="request 3 is under way"):
        leader.handle(a.Start(4))
    assert agreed().handle(a.Start(2)) != (), "after Agreed the caller knows how the install ends"


def test_unknown_member_is_refused() -> None:
    with pytest.raises(UsageError, match="worker 3 is no member"):
        started().handle(a.PromiseFrom(3, 1, 5))
