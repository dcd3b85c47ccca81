"""On which checkpoint tensors a computed live tensor depends: which to perturb in which load, and what follows. No torch.

Design: adaptive group testing. Everything is by position 0..n-1 among the checkpoint tensors that carry content. First every
position is coded in about log2(n) bits; for each bit the positions with a 1 are perturbed together, then those with a 0. A
tensor with one dependency answers with its code. With several, the positions that agree with all answers are a superset,
which is split in halves until each member is confirmed or dropped. The code is Gray's: neighbours differ in one bit, so
that the dependencies of a fused tensor, mostly neighbours in the checkpoint, have a small superset.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["Refiner", "candidates", "coded_groups", "widened"]


def coded_groups(n: int) -> list[tuple[int, ...]]:
    """For each bit of the code the positions where it is 1, then those where it is 0. Groups may be empty."""
    ones = _code(n)
    return [tuple(np.flatnonzero(row == one).tolist()) for row in ones for one in (True, False)]


def candidates(n: int, changed: Sequence[bool]) -> tuple[int, ...]:
    """Positions that agree with what the `coded_groups(n)` did to one live tensor: a superset of its dependencies, if each
    of these can be seen. Empty when some bit showed nothing either way."""
    ones = _code(n)
    answers = np.array(changed, dtype=bool).reshape(len(ones), 2)
    agree = np.where(ones, answers[:, :1], answers[:, 1:]).all(axis=0)
    return tuple(np.flatnonzero(agree).tolist())


def _code(n: int) -> npt.NDArray[np.bool_]:
    """[num_bits, n] bits of Gray's code of each position, the lowest first."""
    position = np.arange(n, dtype=np.int64)
    bits = np.arange(max(1, (n - 1).bit_length()), dtype=np.int64)
    ones: npt.NDArray[np.bool_] = ((position ^ position >> 1) >> bits[:, None] & 1).astype(bool)
    return ones


@dataclass(slots=True)
class _Group:
    """Positions not yet tested one by one. depends: one of them at least is known to matter. first: the next group on
    the stack is the other half of a group that is known to matter."""

    positions: tuple[int, ...]
    depends: bool
    first: bool = False


@dataclass(slots=True)
class _Class:
    """Live tensors with the same candidates, treated as one."""

    stack: list[_Group]
    confirmed: set[int] = field(default_factory=set)

    def settle(self) -> None:
        """Split what is known to matter until the top of the stack has to be tested."""
        while self.stack and self.stack[-1].depends:
            group = self.stack.pop()
            if len(group.positions) == 1:
                self.confirmed.update(group.positions)
                continue
            half = len(group.positions) // 2
            self.stack.append(_Group(group.positions[half:], depends=False))
            self.stack.append(_Group(group.positions[:half], depends=False, first=True))

    def learn(self, changed: bool) -> None:
        group = self.stack.pop()
        if changed:
            group.depends = True
            self.stack.append(group)
        elif group.first:
            self.stack[-1].depends = True  # it is not this half, so it is the other one
        self.settle()

    @property
    def left(self) -> set[int]:
        """All positions that may still matter."""
        return self.confirmed.union(*(group.positions for group in self.stack))


class Refiner:
    """Splits candidate sets, as many of them in one load as do not disturb each other. Deterministic: ranks that feed
    equal answers ask equal questions."""

    def __init__(self, sets: Iterable[tuple[int, ...]]) -> None:
        """sets: candidates of the computed live tensors of a whole side."""
        self.sets = tuple(sorted({s for s in sets if s}))
        self._classes = [_Class([_Group(s, depends=True)]) for s in self.sets]
        for each in self._classes:
            each.settle()
        self._asked: list[_Class] = []

    def next_group(self) -> tuple[int, ...]:
        """Positions to perturb in the next load; empty when all is settled."""
        self._asked = []
        chosen: set[int] = set()
        reserved: set[int] = set()  # what tensors that are asked about may depend on
        for each in self._classes:
            if not each.stack:
                continue
            group, left = set(each.stack[-1].positions), each.left
            if not group & reserved and not left & chosen:
                chosen |= group
                reserved |= left
                self._asked.append(each)
        return tuple(sorted(chosen))

    def learn(self, changed: Sequence[bool]) -> None:
        """changed: for each of `sets`, whether a live tensor of it changed anywhere on the side."""
        answers = dict(zip(map(id, self._classes), changed, strict=True))
        for each in self._asked:
            each.learn(answers[id(each)])

    def found(self) -> tuple[int, ...]:
        """Dependencies of all live tensors: confirmed ones and those that were not tested to the end."""
        return tuple(sorted(set().union(*(each.left for each in self._classes))))


def widened(names: Sequence[str], chosen: Sequence[int]) -> tuple[int, ...]:
    """A larger set to try when loading `chosen` did not suffice: what has the same prefix as one of them, then neighbours
    in the checkpoint's order, at least twice as many. names: of all positions."""
    wanted = min(len(names), max(2 * len(chosen), 2))
    prefixes = {names[i].rpartition(".")[0] for i in chosen} - {""}
    grown = {*chosen, *(i for i, name in enumerate(names) if name.rpartition(".")[0] in prefixes)}
    while len(grown) < wanted:
        edge = {i + d for i in grown for d in (-1, 1)} & set(range(len(names)))
        grown |= edge or set(range(len(names)))
    return tuple(sorted(grown))
