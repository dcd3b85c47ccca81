"""A small explicit-state model checker: every interleaving of a pure model, breadth first, each state once.

A model gives its initial states and, for a state, what can happen next; states are hashable. `explore` looks at every
reachable state and checks three things: no step breaks a property (`PropertyViolated`), no reached state does (`check`),
and from every state the model can still come to a good end (`is_goal`), which rules out deadlock and hopeless loops
under fair scheduling. The first violation is reported with a shortest trace to it.

Machines of this library (fixed `__slots__`, immutable values in them) become part of a state by `freeze` and come back
by `thaw`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

__all__ = ["Exploration", "PropertyViolated", "explore", "freeze", "slot_names", "thaw"]

State = TypeVar("State", bound=Hashable)
Machine = TypeVar("Machine")


class PropertyViolated(Exception):  # noqa: N818 - it is the outcome of a check, not an error of the checker
    """Raised by a model's steps or by `check` when a property does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration(Generic[State]):
    """What was found. violation: the broken property, "" if none, with `trace`, the labels of the steps that lead to it.

    num_goals: reached states that are good ends. num_stuck: states from which none can be reached; then `violation` says
    so and `trace` leads to one of the nearest. complete: false if max_states ended the search, and then stuck states were
    not looked for.
    """

    num_states: int
    num_transitions: int
    num_goals: int
    num_stuck: int
    complete: bool
    violation: str
    trace: tuple[str, ...]
    last: State

    def explain(self) -> str:
        """The violation and its trace, a step a line; for a test's message."""
        size = f"{self.num_states:,} states, {self.num_transitions:,} transitions, {self.num_goals:,} goals"
        return "\n".join([self.violation or "no violation", size, *self.trace])


def freeze(machine: Any) -> tuple[Any, ...]:
    """The values of all slots, in a fixed order: hashable if the machine keeps only immutable values."""
    return tuple(getattr(machine, name) for name in slot_names(type(machine)))


def thaw(kind: type[Machine], values: tuple[Any, ...]) -> Machine:
    """A machine of class `kind` in the state that `freeze` returned."""
    machine = kind.__new__(kind)
    for name, value in zip(slot_names(kind), values, strict=True):
        setattr(machine, name, value)
    return machine


def slot_names(kind: type) -> tuple[str, ...]:
    """The slots of a class and its bases, bases first: what `freeze` returns the values of."""
    found: tuple[str, ...] = ()
    for base in reversed(kind.__mro__):
        own = base.__dict__.get("__slots__", ())
        found += (own,) if isinstance(own, str) else tuple(own)
    return found


_NEXT = "the next step"


class _Search(Generic[State]):
    """The growing graph: states in the order they were found, who found them, and every edge."""

    def __init__(self) -> None:
        self.index: dict[State, int] = {}
        self.states: list[State] = []
        self.found_by: list[tuple[int, str]] = []
        self.sources = array("i")
        self.targets = array("i")
        self.goals = array("i")

    def add(self, state: State, parent: int, label: str) -> bool:
        at = self.index.get(state)
        new = at is None
        if at is None:
            at = self.index[state] = len(self.states)
            self.states.append(state)
            self.found_by.append((parent, label))
        if parent >= 0:
            self.sources.append(parent)
            self.targets.append(at)
        return new

    def trace(self, at: int) -> tuple[str, ...]:
        labels: list[str] = []
        while at >= 0:
            at, label = self.found_by[at]
            labels.append(label)
        return tuple(reversed(labels))

    def stuck(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Indices of the states from which no goal can be reached."""
        reaches = np.zeros(len(self.states), dtype=bool)
        reaches[np.array(self.goals, dtype=np.int64)] = True
        sources, targets = np.array(self.sources, dtype=np.int64), np.array(self.targets, dtype=np.int64)
        while True:
            grown = sources[reaches[targets]]
            if not grown.size:
                return np.flatnonzero(~reaches)
            reaches[grown] = True
            left = ~reaches[sources]
            sources, targets = sources[left], targets[left]

    def result(
        self, violation: str = "", trace: tuple[str, ...] = (), at: int = -1, **facts: Any
    ) -> Exploration[State]:
        return Exploration(
            num_states=len(self.states),
            num_transitions=len(self.sources),
            num_goals=len(self.goals),
            num_stuck=facts.get("num_stuck", 0),
            complete=facts.get("complete", False),
            violation=violation,
            trace=trace,
            last=self.states[at],
        )


def explore(
    initial: Iterable[State],
    successors: Callable[[State], Iterable[tuple[str, State]]],
    *,
    check: Callable[[State], None] | None = None,
    is_goal: Callable[[State], bool] | None = None,
    max_states: int = 5_000_000,
) -> Exploration[State]:
    """Visit every state that can be reached from `initial`.

    successors: (label, next state) for everything that can happen; may raise PropertyViolated, as may `check`, which
    sees every state once. is_goal: the good ends; when given, a state from which none can be reached is a violation.
    max_states: the search ends there, incomplete. Blocks until done; raises nothing of its own.
    """
    search: _Search[State] = _Search()
    at = -1
    trying = "initial state"
    try:
        for state in initial:
            if search.add(state, -1, "start") and check is not None:
                check(state)
        while at + 1 < len(search.states):
            at += 1
            state = search.states[at]
            if is_goal is not None and is_goal(state):
                search.goals.append(at)
            trying = _NEXT
            for label, following in successors(state):
                trying = label
                if search.add(following, at, label) and check is not None:
                    check(following)
                trying = _NEXT
            if len(search.states) > max_states:
                return search.result(complete=False)
    except PropertyViolated as violated:
        return search.result(str(violated), (*search.trace(at), trying), at)
    if is_goal is not None:
        stuck = search.stuck()
        if stuck.size:
            first = int(stuck[0])
            text = f"{stuck.size} of {len(search.states)} states cannot come to a good end"
            return search.result(text, search.trace(first), first, num_stuck=int(stuck.size), complete=True)
    return search.result(complete=True)
