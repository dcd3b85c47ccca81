"""The checker itself, on models whose answers are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weightbridge.testing.model_checker import PropertyViolated, explore, freeze, slot_names, thaw

Lock = tuple[int, int, int]  # where threads 0 and 1 are (0 out, 1 has seen the flag down, 2 inside), the flag


def spin_lock(*, atomic: bool) -> Callable[[Lock], Iterator[tuple[str, Lock]]]:
    """Two threads and a flag; looking at it and setting it are one step or two."""

    def successors(state: Lock) -> Iterator[tuple[str, Lock]]:
        for i in (0, 1):
            at, other, flag = state[i], state[1 - i], state[2]
            after: tuple[int, int] | None = None
            if at == 0 and flag == 0:
                after = (2, 1) if atomic else (1, 0)
            elif at > 0:
                after = (2, 1) if at == 1 else (0, 0)
            if after is not None:
                yield f"{i}: {at} to {after[0]}", (after[0], other, after[1]) if i == 0 else (other, after[0], after[1])

    return successors


def alone(state: Lock) -> None:
    if state[:2] == (2, 2):
        raise PropertyViolated("both inside")


def test_a_race_is_found_with_a_shortest_trace() -> None:
    found = explore([(0, 0, 0)], spin_lock(atomic=False), check=alone)
    assert (found.violation, found.complete) == ("both inside", False)
    assert found.trace == ("start", "0: 0 to 1", "1: 0 to 1", "0: 1 to 2", "1: 1 to 2")
    assert found.last == (2, 1, 1)
    assert found.explain().splitlines()[0] == "both inside"
    assert found.explain().splitlines()[2:] == list(found.trace)


def test_a_right_lock_is_gone_through_whole() -> None:
    found = explore([(0, 0, 0)], spin_lock(atomic=True), check=alone, is_goal=lambda state: state == (0, 0, 0))
    assert (found.violation, found.complete) == ("", True)
    assert (found.num_states, found.num_transitions, found.num_goals, found.num_stuck) == (3, 4, 1, 0)


def test_a_dead_end_and_a_hopeless_loop_are_stuck() -> None:
    graph = {0: [1, 2], 1: [3], 2: [4], 3: [], 4: [5], 5: [4]}  # 3 is the goal; 4 and 5 go round for ever

    def successors(at: int) -> Iterator[tuple[str, int]]:
        return ((f"to {following}", following) for following in graph[at])

    found = explore([0], successors, is_goal=lambda at: at == 3)
    assert (found.num_states, found.num_stuck, found.complete) == (6, 3, True)
    assert found.violation == "3 of 6 states cannot come to a good end"
    assert found.trace == ("start", "to 2")
    assert explore([0], successors, is_goal=lambda at: at in (3, 5)).violation == ""
    assert explore([0], successors, is_goal=lambda at: False).num_stuck == 6


def test_a_step_may_raise_and_is_told_from_the_steps_before() -> None:
    def successors(at: int) -> Iterator[tuple[str, int]]:
        yield f"to {at + 1}", at + 1
        if at == 2:
            raise PropertyViolated("two is wrong")

    found = explore([0], successors)
    assert found.violation == "two is wrong"
    assert found.trace == ("start", "to 1", "to 2", "the next step")


def test_the_search_ends_at_its_limit() -> None:
    found = explore([0], lambda at: [("on", at + 1)], is_goal=lambda at: False, max_states=10)
    assert (found.num_states, found.complete, found.violation) == (11, False, "")


class Base:
    __slots__ = ("first",)


class Counter(Base):
    __slots__ = ("second", "third")

    def __init__(self) -> None:
        self.first, self.second, self.third = 1, (2,), "three"


def test_freeze_and_thaw_keep_every_slot_of_class_and_bases() -> None:
    frozen = freeze(Counter())
    assert slot_names(Counter) == ("first", "second", "third")
    assert frozen == (1, (2,), "three")
    copy = thaw(Counter, frozen)
    assert type(copy) is Counter
    copy.second = (5,)
    assert freeze(copy) == (1, (5,), "three")
    assert frozen == (1, (2,), "three")
