"""Group testing of dependencies: codes, refinement, packing of questions, widening."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from weightbridge.probe.dependencies import Refiner, candidates, coded_groups, widened


def answers(n: int, depends: set[int]) -> list[bool]:
    return [bool(depends & set(group)) for group in coded_groups(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13, 100])
def test_a_single_dependency_is_told_by_its_code(n: int) -> None:
    groups = coded_groups(n)
    assert len(groups) == 2 * max(1, (n - 1).bit_length())
    for a, b in zip(groups[::2], groups[1::2], strict=True):  # each bit splits all positions in two
        assert sorted((*a, *b)) == list(range(n))
    for i in range(n):
        assert candidates(n, answers(n, {i})) == (i,)


def test_neighbours_have_few_candidates() -> None:
    """The dependencies of a fused tensor lie side by side, wherever that is."""
    for first in range(200 - 6):
        depends = set(range(first, first + 6))
        found = candidates(200, answers(200, depends))
        assert depends <= set(found)
        assert len(found) <= 32


def test_what_shows_no_dependency_has_no_candidates() -> None:
    assert candidates(9, answers(9, set())) == ()


class Side:
    """Computed tensors with their true dependencies; answers questions as loads do, and counts them."""

    def __init__(self, n: int, depends: Sequence[set[int]]) -> None:
        self.depends = depends
        self.sets = [candidates(n, answers(n, d)) for d in depends]
        self.rounds = 0

    def refine(self, limit: int = 10_000) -> tuple[int, ...]:
        refiner = Refiner(self.sets)
        while self.rounds < limit:
            group = refiner.next_group()
            if not group:
                break
            self.rounds += 1
            moved = {s for s, d in zip(self.sets, self.depends, strict=True) if d & set(group)}
            refiner.learn([s in moved for s in refiner.sets])
        return refiner.found()


def test_single_dependencies_need_no_further_question() -> None:
    side = Side(100, [{3}, {97}, {50}, {3}])
    assert side.refine() == (3, 50, 97)
    assert side.rounds == 0


@pytest.mark.parametrize("seed", range(40))
def test_any_dependencies_are_found_exactly(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.choice([2, 5, 17, 64, 200])
    depends = [set(rng.sample(range(n), min(n, rng.choice([1, 1, 2, 3, 7])))) for _ in range(rng.choice([1, 2, 9]))]
    side = Side(n, depends)
    assert side.refine() == tuple(sorted(set().union(*depends)))


def test_disjoint_tensors_are_asked_about_in_one_load() -> None:
    """Sixty layers whose tensor is made of three neighbours cost hardly more loads than one."""
    one = Side(600, [{30, 31, 32}])
    one.refine()
    all_layers = Side(600, [{10 * i, 10 * i + 1, 10 * i + 2} for i in range(60)])
    assert set(all_layers.refine()) == set().union(*all_layers.depends)
    assert all_layers.rounds <= 4 * max(one.rounds, 4)


def test_what_is_not_asked_to_the_end_is_kept() -> None:
    depends = [{1, 40, 77}, {5, 9, 90}]
    for limit in range(12):
        found = Side(128, depends).refine(limit)
        assert set().union(*depends) <= set(found)


def test_widening_takes_the_same_module_first_and_then_neighbours() -> None:
    names = ["a.w", "b.w", "b.scale", "b.zero", "c.w", "d.w", "e.w"]
    assert widened(names, (2,)) == (1, 2, 3)
    assert widened(names, (4,)) == (3, 4, 5)
    assert widened(names, (1, 2, 3)) == (0, 1, 2, 3, 4, 5)
    assert widened(names, (0, 1, 2, 3, 4, 5)) == tuple(range(7))
    assert widened(["x", "y", "z"], ()) == (0, 1, 2)
    assert widened(["x", "y", "z"], (0,)) == (0, 1)


def test_the_half_that_is_not_tested_is_inferred() -> None:
    """A group that matters, though its first half does not, need not be asked about its second half."""
    side = Side(64, [{3, 50}])
    assert len(side.sets[0]) == 8
    assert side.refine() == (3, 50)
    assert side.rounds == 9
