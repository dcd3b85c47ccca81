"""The agreement on the step, model-checked: every interleaving of small engines, and mutants that must be caught.

Each scenario says what it is for. `least` bounds the number of states from below, so that a model that cannot move does
not pass for a right one; `met` are the polls at which some run agrees (of the newest request), so that a model in which
nothing is ever agreed does not either.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from weightbridge.machine import agreement as a
from weightbridge.machine.agreement_member import MemberInstruction
from weightbridge.testing.agreement_model import AgreementModel, Scenario, State
from weightbridge.testing.model_checker import Exploration, explore


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Millions of small tuples and not one cycle: the collector would look at all of them again and again."""
    gc.disable()
    yield
    gc.enable()


@functools.cache
def run(
    scenario: Scenario,
    *,
    member: type[a.AgreementMember] = a.AgreementMember,
    leader: type[a.AgreementLeader] = a.AgreementLeader,
) -> tuple[Exploration[State], set[tuple[tuple[int, int], ...]]]:
    """(what the checker found, every sequence of agreements that some run makes)."""
    model = AgreementModel(scenario, member=member, leader=leader)
    agreements: set[tuple[tuple[int, int], ...]] = set()

    def check(state: State) -> None:
        agreements.add(model.agreed(state))
        model.check(state)

    found = explore(model.initial(), model.successors, check=check, is_goal=model.is_goal, max_states=400_000)
    print(f"{scenario}: {found.num_states:,} states, {found.num_transitions:,} transitions, {found.num_goals:,} goals")
    return found, agreements


TWO = (0, 0)

SCENARIOS = {
    "every single load and store": (
        Scenario(window=1, num_polls=2, starts=TWO, single_steps=True), 40_000, {1, 2},
    ),
    "every single load and store, idle": (
        Scenario(window=1, num_polls=1, starts=TWO, single_steps=True, idle_attempts=1), 40_000, {0, 1},
    ),
    "late leader": (Scenario(window=1, num_polls=2), 25_000, {1, 2}),
    "window 2": (Scenario(window=2, num_polls=3, prompt=True), 20_000, {2, 3}),
    "window 3, skew": (Scenario(window=3, num_polls=4, starts=(0, 0, 1), prompt=True), 35_000, {4}),
    "window 1, skew": (Scenario(window=1, num_polls=3, starts=(0, 1, 2), prompt=True), 9_000, {3}),
    "lock step, window 2, skew": (
        Scenario(window=2, num_polls=3, starts=(0, 0, 1), lock_step=True, prompt=True), 30_000, {3},
    ),
    "lock step, idle between steps": (
        Scenario(window=1, num_polls=1, lock_step=True, idle_attempts=1, prompt=True), 90_000, {0, 1},
    ),
    "idle between steps": (
        Scenario(window=1, num_polls=2, starts=TWO, idle_attempts=1, prompt=True), 15_000, {0, 1, 2},
    ),
    "idle between steps, skew": (
        Scenario(window=2, num_polls=1, starts=(0, 0, 1), idle_attempts=1, prompt=True), 7_000, {1},
    ),
    "no requests at all, by a hub, drops": (Scenario(window=2, num_polls=0, drops=1, by_hub=True), 12_000, {0}),
    "two versions": (Scenario(window=1, num_polls=2, num_requests=2, prompt=True), 30_000, {2}),
    "two versions, room for both": (
        Scenario(window=1, num_polls=3, starts=TWO, num_requests=2, prompt=True), 6_000, {2, 3},
    ),
    "drops in lock step": (Scenario(window=1, num_polls=1, lock_step=True, drops=1, prompt=True), 100_000, {1}),
    "drops": (Scenario(window=1, num_polls=1, starts=TWO, drops=1, prompt=True), 2_000, {1}),
    "drops, often": (Scenario(window=1, num_polls=1, starts=TWO, drops=2, prompt=True), 20_000, {1}),
    "death in lock step": (Scenario(window=1, num_polls=1, lock_step=True, deaths=1, prompt=True), 70_000, {1}),
    "death, idle": (Scenario(window=1, num_polls=1, starts=TWO, idle_attempts=1, deaths=1, prompt=True), 25_000, {0, 1}),
    "given up, then again": (
        Scenario(window=1, num_polls=1, starts=TWO, num_requests=2, aborts=1, prompt=True), 35_000, {1},
    ),
    "given up, then again, idle": (Scenario(window=1, num_polls=0, num_requests=2, aborts=1, prompt=True), 30_000, {0}),
    "given up, drops": (Scenario(window=1, num_polls=0, starts=TWO, aborts=1, drops=1, prompt=True), 3_000, {0}),
    "the leader dies": (Scenario(window=1, num_polls=1, leader_dies=True, prompt=True), 50_000, {1}),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_agreement_holds(name: str) -> None:
    scenario, least, met = SCENARIOS[name]
    found, agreements = run(scenario)
    assert not found.violation, found.explain()
    assert found.complete
    assert found.num_states >= least
    assert found.num_goals > 0
    newest = {made[-1][1] for made in agreements if made and made[-1][0] == scenario.num_requests}
    assert newest >= met
    if scenario.num_requests > 1:
        assert max(len(made) for made in agreements) == scenario.num_requests


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(window=1, num_polls=2, starts=TWO),
        Scenario(window=1, num_polls=1, starts=TWO, lock_step=True),
        Scenario(window=2, num_polls=1, starts=(0, 1), idle_attempts=1),
        Scenario(window=1, num_polls=1, starts=TWO, deaths=1),
    ],
    ids=lambda s: f"{s.num_polls} polls, lock step {s.lock_step}, {s.idle_attempts} attempts, {s.deaths} deaths",
)
def test_moves_in_blocks_show_what_single_moves_show(scenario: Scenario) -> None:
    """The reduction that makes the rest affordable: fewer states, the same agreements, promptly heard or not."""
    single, agreements = run(replace(scenario, single_steps=True))
    blocks, same = run(scenario)
    prompt, same_again = run(replace(scenario, prompt=True))
    assert (single.violation, blocks.violation, prompt.violation) == ("", "", "")
    assert prompt.num_states <= blocks.num_states < single.num_states
    assert agreements == same == same_again
    assert len(agreements) > 1


# --- mutants: each is wrong in one place, and the checker must say how ------------------------------------------------


class PastTheBounds(a.AgreementLeader):
    """target = max(c) + 1 in place of max(c + W)."""

    __slots__ = ()
    window = 2

    def _decide(self) -> int:
        return super()._decide() - self.window + 1


class SmallestBound(a.AgreementLeader):
    __slots__ = ()

    def _decide(self) -> int:
        return min(view.bound for view in self._views)


class AnyCount(a.AgreementLeader):
    """Installs as soon as all are idle, whatever their counts."""

    __slots__ = ()

    def _may_install_idle(self, counts: set[int]) -> bool:
        return True


class FirstParked(a.AgreementLeader):
    """Does not wait for all to park."""

    __slots__ = ()

    def _parked(self, member: int) -> tuple[a.LeaderInstruction, ...]:
        said = super()._parked(member)
        return self._agree(idle=False) if self._phase.name == "COMMITTED" else said


class NeverAgain(a.AgreementLeader):
    """Sends nothing twice."""

    __slots__ = ()

    def _tick(self, ask_idle: bool) -> tuple[a.LeaderInstruction, ...]:
        return tuple(i for i in super()._tick(ask_idle) if isinstance(i, a.AskIdle))


class ForgetsAborts(a.AgreementLeader):
    """Sends an abort once only."""

    __slots__ = ()

    def _tick(self, ask_idle: bool) -> tuple[a.LeaderInstruction, ...]:
        return tuple(i for i in super()._tick(ask_idle) if not isinstance(i, a.SendAbort))


class NoSecondLoad(a.AgreementMember):
    """Promises the gate without looking whether the count has passed it."""

    __slots__ = ()

    def _count_read(self, count: int) -> tuple[MemberInstruction, ...]:
        written = super()._count_read(count)[:1]
        return (*written, *super()._count_read(count))


class TakesTheLockAnew(a.AgreementMember):
    """Asked twice in one attempt, gives the lock back and tries again."""

    __slots__ = ()

    def _idle_asked(self, attempt: int) -> tuple[MemberInstruction, ...]:
        if attempt != self._attempt or not self._holding:
            return super()._idle_asked(attempt)
        return (*self._drop_lock(), a.TryLock())


class KeepsTheGate(a.AgreementMember):
    """Does not lift its gate when a request is aborted."""

    __slots__ = ()

    def _close(self, request: int) -> tuple[MemberInstruction, ...]:
        return tuple(i for i in super()._close(request) if request == self._installed or not isinstance(i, a.WriteGate))


class InstallsWhenParked(a.AgreementMember):
    """Does not wait until all have parked."""

    __slots__ = ()

    def _poll_reached(self, count: int) -> tuple[MemberInstruction, ...]:
        said = super()._poll_reached(count)
        return (*said, *self._begin_install(idle=False)) if said else said


class HoldsForEver(a.AgreementMember):
    """Does not give the lock back when an attempt is over."""

    __slots__ = ()

    def _idle_released(self, attempt: int) -> tuple[MemberInstruction, ...]:
        return () if attempt == self._attempt and self._holding else super()._idle_released(attempt)


PASSED = "went on from poll|is past poll"
STUCK = "cannot come to a good end"

MUTANTS = {
    PastTheBounds: (Scenario(window=2, num_polls=3, prompt=True), PASSED),
    SmallestBound: (Scenario(window=1, num_polls=2, prompt=True), PASSED),
    NoSecondLoad: (Scenario(window=1, num_polls=2, prompt=True), PASSED),
    AnyCount: (
        Scenario(window=2, num_polls=1, starts=(0, 0, 1), idle_attempts=1, prompt=True), r"moves .* between Agreed\(",
    ),
    FirstParked: (Scenario(window=1, num_polls=1, prompt=True), r"moves .* between Agreed\("),
    TakesTheLockAnew: (Scenario(window=1, num_polls=1, starts=TWO, idle_attempts=1, prompt=True), r"moves .* between Agreed\("),
    InstallsWhenParked: (Scenario(window=1, num_polls=1, prompt=True), "installed request 1 at 1, agreed was nothing"),
    NeverAgain: (Scenario(window=1, num_polls=1, starts=TWO, drops=1, prompt=True), STUCK),
    ForgetsAborts: (Scenario(window=1, num_polls=0, starts=TWO, aborts=1, drops=1, prompt=True), STUCK),
    KeepsTheGate: (Scenario(window=1, num_polls=1, starts=TWO, aborts=1, prompt=True), STUCK),
    HoldsForEver: (Scenario(window=1, num_polls=1, starts=TWO, idle_attempts=1, prompt=True), STUCK),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant: type) -> None:
    scenario, how = MUTANTS[mutant]
    is_leader = issubclass(mutant, a.AgreementLeader)
    found, _ = run(scenario, leader=mutant) if is_leader else run(scenario, member=mutant)
    assert found.violation, "the mutant was not caught"
    assert re.search(how, found.violation), found.explain()
    right, _ = run(scenario)
    assert not right.violation, right.explain()
