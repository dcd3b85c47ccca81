"""The fault matrix in virtual time: every fault at every worker in every phase, in both modes, over random schedules.

`WEIGHTBRIDGE_SCHEDULES` sets how many schedules each cell gets (`make faults`: 10,000 in all). A failure names fault,
victim, phase, mode and seed; `VirtualJob(seed, fault, stage_receive=...)` makes the same schedule again.
"""

from __future__ import annotations

import itertools
import os

import pytest

from weightbridge.machine.session import SessionPolicy
from weightbridge.testing.virtual_job import FAULTS, PHASES, Fault, Outcome, VirtualJob

SCHEDULES = int(os.environ.get("WEIGHTBRIDGE_SCHEDULES", "1"))
VICTIMS = ("trainer/0", "trainer/1", "a/0", "a/1", "b/0")
ENDS_SECONDS = 120.0
LASTING = ("kill", "stop", "cut")
DROP = SessionPolicy(when_engine_fails="drop")


def run(fault: Fault | None, seed: int, staged: bool, policy: SessionPolicy | None = None) -> Outcome:
    return VirtualJob(seed, fault, stage_send=seed % 2 == 1, stage_receive=staged, policy=policy).run()


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("phase", PHASES)
def test_every_cell_ends_names_the_culprit_and_serves_no_mixture(
    kind: str, victim: str, phase: str, staged: bool
) -> None:
    fault = Fault(kind=kind, victim=victim, phase=phase)
    for seed in range(SCHEDULES):
        outcome = run(fault, seed, staged)  # raises when an engine serves a mixture or somebody waits for ever
        where = f"{fault} staged={staged} seed={seed}: {outcome}"
        assert outcome.seconds < ENDS_SECONDS, where
        if not outcome.struck or kind == "duplicated messages":
            _assert_unharmed(outcome, where)
        elif (kind in LASTING and victim.startswith("trainer")) or (kind in LASTING and phase == "connect"):
            _assert_session_over(outcome, victim, where)
        elif kind in LASTING:
            _assert_engine_left_out(outcome, victim, staged and phase != "install", where)
        elif phase != "connect":
            _assert_recovered(outcome, where)


def _assert_unharmed(outcome: Outcome, where: str) -> None:
    assert sorted(outcome.reports) == [1, 2, 3, 4], where
    assert not outcome.given_up, where
    assert not outcome.failures, where
    assert not outcome.poisoned, where


def _assert_session_over(outcome: Outcome, victim: str, where: str) -> None:
    """Without a trainer there is no session: every survivor is told whom it lost; nobody is left in between."""
    for name in VICTIMS:
        if name != victim and victim != "trainer/0":
            assert victim in outcome.told[name], where
        elif name != victim:  # the hub went with it: what survivors see themselves is that trainer/0 does not answer
            assert outcome.failures[name].causes.keys() & {"trainer/0"}, where


def _assert_engine_left_out(outcome: Outcome, victim: str, whole: bool, where: str) -> None:
    """The version is given up, every survivor can name the victim, and the next one goes to the others."""
    engine = victim.split("/")[0]
    other = "b" if engine == "a" else "a"
    named = {c for failed in outcome.given_up.values() for c in failed.causes} | set().union(*outcome.told.values())
    assert victim in named or outcome.reports.keys() >= {2}, where
    assert outcome.reports[4].engines == {other: "ready"}, where
    if whole:  # host memory was filling: no live weight had been touched
        assert all(not failed.poisoned for v, failed in outcome.given_up.items()), where
    for name in VICTIMS[2:]:
        if name.startswith(other):
            assert outcome.versions[name] >= 3, where
            assert name not in outcome.poisoned, where


def _assert_recovered(outcome: Outcome, where: str) -> None:
    """Nobody is dead: the version is sent again if the trainers still hold it, and later ones arrive everywhere."""
    assert not outcome.failures, where
    assert 2 in outcome.reports or 2 in outcome.given_up, where
    assert outcome.reports[4].engines == {"a": "ready", "b": "ready"}, where
    assert not outcome.poisoned, where


@pytest.mark.parametrize(("kind", "victim"), list(itertools.product(("kill", "cut"), VICTIMS[2:])))
def test_with_drop_a_version_goes_to_the_engines_that_are_left(kind: str, victim: str) -> None:
    engine = victim.split("/")[0]
    other = "b" if engine == "a" else "a"
    for seed in range(SCHEDULES):
        outcome = run(Fault(kind=kind, victim=victim, phase="receive"), seed, True, DROP)
        if outcome.struck:
            assert outcome.reports[4].engines == {other: "ready"}, (kind, victim, seed, outcome)


def test_the_matrix_strikes() -> None:
    """A matrix whose faults do not happen shows nothing."""
    struck = {
        (kind, phase): any(
            run(Fault(kind=kind, victim=victim, phase=phase), seed, False).struck
            for victim, seed in (("a/0", 0), ("a/0", 1), ("b/0", 1), ("trainer/1", 1), ("a/0", 2), ("b/0", 3))
        )
        for kind, phase in itertools.product(FAULTS, PHASES)
    }
    never = {cell for cell, did in struck.items() if not did}
    # What a worker does alone cannot be corrupted on the way, and takes no memory.
    assert never <= {("corrupted byte", "connect"), ("corrupted byte", "install"), ("full memory", "install")}
