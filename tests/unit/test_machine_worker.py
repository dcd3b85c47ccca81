"""The worker machine alone: what belongs to an attempt that is over changes nothing, and live weights are guarded by
two words."""

from __future__ import annotations

import pytest

from weightbridge.machine import messages as w
from weightbridge.machine import worker as m

PEERS = {"a/0": w.PeerEndpoint(addresses={}, slots=())}


def begun(*, engine: str = "a", staged: bool = False, version: int = 5, attempt: int = 1) -> m.WorkerMachine:
    machine = m.WorkerMachine(worker=f"{engine or 'trainer'}/0", engine=engine, staged=staged)
    machine.hear(w.Welcome(session=9))
    assert machine.hear(w.PlanReady(epoch=1, attempt=attempt, plan=b"p")) == (m.Prepare(1, attempt, b"p"),)
    assert machine.hear(w.ConnectPeers(attempt=attempt, peers=PEERS)) == (m.Connect(attempt, PEERS),)
    machine.hear(w.Ready(attempt=attempt, version=4))
    assert machine.hear(w.Begin(version=version, attempt=attempt)) == (m.Transfer(version, attempt),)
    return machine


def test_live_weights_are_overwritten_when_hub_and_worker_have_said_so_in_either_order() -> None:
    first = begun()
    assert first.hear(w.AllowAssemble(version=5, attempt=1)) == ()
    assert first.mixed == -1
    assert first.standing(5, 1) == (m.Assemble(5, 1),)
    assert first.mixed == 5
    second = begun()
    assert second.standing(5, 1) == ()
    assert second.hear(w.AllowAssemble(version=5, attempt=1)) == (m.Assemble(5, 1),)


@pytest.mark.parametrize("who", ["hub", "worker"])
def test_one_word_said_twice_is_not_two(who: str) -> None:
    machine = begun()
    say = (
        (lambda: machine.hear(w.AllowAssemble(version=5, attempt=1)))
        if who == "hub"
        else lambda: machine.standing(5, 1)
    )
    assert say() == say() == ()
    assert machine.mixed == -1


def test_words_for_another_attempt_or_version_do_not_count() -> None:
    machine = begun()
    machine.standing(5, 1)
    assert machine.hear(w.AllowAssemble(version=4, attempt=1)) == ()
    assert machine.hear(w.AllowAssemble(version=5, attempt=2)) == ()
    machine.hear(w.AbortAttempt(attempt=1))
    machine.stopped(1)
    assert machine.hear(w.AllowAssemble(version=5, attempt=1)) == ()


def test_what_is_said_twice_is_done_once() -> None:
    machine = begun()
    assert machine.hear(w.Begin(version=5, attempt=1)) == ()
    assert machine.hear(w.ConnectPeers(attempt=1, peers=PEERS)) == ()
    assert machine.hear(w.PlanReady(epoch=1, attempt=1, plan=b"p")) == ()


def test_a_stopped_attempt_reports_and_moves_nothing() -> None:
    machine = begun()
    assert machine.hear(w.AbortAttempt(attempt=1)) == (m.Stop(1),)
    (said,) = machine.stopped(1)
    assert said == m.Say(w.Quiesced(attempt=1, touched=False, released=False))
    assert machine.transferred(5, 1) == ()
    assert machine.attempt_failed(1, kind="WorkerError", reason="x", lost="b/0") == ()
    assert machine.hear(w.Begin(version=5, attempt=1)) == ()


def test_a_version_that_is_sent_again_is_whole_only_when_that_attempt_says_so() -> None:
    """An engine that had committed and gone on before another one broke the attempt has to take all bytes once more."""
    machine = begun()
    machine.hear(w.Committed(version=5, attempt=1))
    machine.installed(5)
    machine.hear(w.AbortAttempt(attempt=1))
    machine.stopped(1)
    machine.hear(w.PlanReady(epoch=1, attempt=2, plan=b""))
    machine.hear(w.Begin(version=5, attempt=2))
    assert machine.committed < 5
    machine.hear(w.Committed(version=5, attempt=2))
    assert machine.committed == 5


@pytest.mark.parametrize(
    ("staged", "released", "captured", "gone"),
    [(False, False, 0, False), (False, True, 0, True), (True, True, 5, False), (True, True, 6, True)],
)
def test_a_trainer_says_whether_its_weights_may_have_changed(
    staged: bool, released: bool, captured: int, gone: bool
) -> None:
    machine = begun(engine="", staged=staged)
    machine.capture(5)
    if released:
        assert machine.release(5, 1)
    machine.capture(captured)
    (said,) = machine.stopped(1)
    assert said == m.Say(w.Quiesced(attempt=1, touched=False, released=gone))


def test_an_attempt_that_is_over_releases_nothing() -> None:
    machine = begun(engine="")
    machine.stopped(1)
    assert not machine.release(5, 1)
    assert machine.released == -1


def test_an_engine_is_poisoned_by_its_own_mixture_or_by_the_hubs_word_until_it_is_whole() -> None:
    machine = begun()
    machine.hear(w.UpdateFailed(kind="WorkerError", causes={"b/0": "x"}, poisoned=("b",), version=5))
    assert machine.poisoned_by is None
    machine.hear(w.UpdateFailed(kind="WorkerError", causes={"b/0": "x"}, poisoned=("a",), version=5))
    assert machine.poisoned_by is not None
    machine.installed(6)
    assert machine.poisoned_by is None
    machine.installing(7)
    machine.hear(w.Failure(kind="WorkerError", causes={"trainer/1": "died"}))
    assert machine.failure is not None
    assert machine.failure.poisoned == ("a",)
    assert machine.poisoned_by is machine.failure


def test_endings_are_remembered_for_a_while() -> None:
    machine = begun(engine="")
    for version in range(1, 40):
        machine.hear(w.Report(version=version, ewtt_seconds=1, agst_seconds=1, network_bytes={}, engines={}))
    assert sorted(machine.endings) == list(range(24, 40))


def test_after_the_end_only_failures_are_confirmed() -> None:
    machine = begun()
    failure = w.Failure(kind="WorkerError", causes={"trainer/1": "died"})
    assert machine.hear(failure) == (m.Say(w.Heard()), m.Leave(failed=True))
    assert machine.hear(failure) == (m.Say(w.Heard()),)
    assert machine.hear(w.Begin(version=6, attempt=1)) == ()
