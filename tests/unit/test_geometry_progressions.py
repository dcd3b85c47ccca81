"""Arithmetic progressions against plain Python sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbridge.geometry import contains, cut_into_progressions, intersection, inverse_modulo, refine

progressions = st.tuples(st.integers(0, 30), st.integers(1, 7), st.integers(1, 9))


def members(start: int, step: int, count: int) -> set[int]:
    return set(range(start, start + step * count, step))


def columns(rows: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tuple(np.array(rows, dtype=np.int64).reshape(-1, 3).T)


@given(st.lists(st.tuples(progressions, progressions), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_intersection_is_the_common_set(pairs):
    start, step, count = intersection(columns([a for a, _ in pairs]), columns([b for _, b in pairs]))
    for i, (a, b) in enumerate(pairs):
        expected = members(*a) & members(*b)
        assert count[i] == len(expected)
        if expected:
            assert members(start[i], step[i], count[i]) == expected


def test_intersection_of_wide_steps_does_not_overflow():
    huge = 1 << 30
    a = columns([(5, huge - 1, 1000)])
    b = columns([(5, huge, 1000)])
    start, step, count = intersection(a, b)
    assert (start[0], step[0], count[0]) == (5, 1, 1)


@pytest.mark.parametrize(("value", "modulus"), [(3, 7), (10, 9), (1, 1), (4, 9), (163839, 163840)])
def test_inverse_modulo(value, modulus):
    found = int(inverse_modulo(np.array([value]), np.array([modulus]))[0])
    assert value * found % modulus == 1 % modulus


@given(progressions, st.integers(0, 90))
def test_contains(progression, index):
    assert bool(contains(*columns([progression]), np.array([index]))[0]) == (index in members(*progression))


@given(st.sets(st.integers(0, 40), max_size=25))
def test_cut_into_progressions_partitions_the_indices(indices):
    start, step, count = cut_into_progressions(np.array(sorted(indices), dtype=np.int64))
    parts = [members(*row) for row in zip(start, step, count, strict=True)]
    assert sum(map(len, parts)) == len(indices)
    assert set().union(*parts) == indices


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        ([0, 2, 4, 6], [(0, 2, 4)]),
        ([3], [(3, 1, 1)]),
        ([0, 1, 10, 11, 20, 21], [(0, 1, 2), (10, 1, 2), (20, 1, 2)]),
        ([0, 5, 6, 7], [(0, 1, 1), (5, 1, 3)]),
        ([0, 2, 4, 5, 6, 7], [(0, 2, 3), (5, 1, 3)]),
        ([], []),
    ],
)
def test_cut_into_progressions_prefers_few(indices, expected):
    found = cut_into_progressions(np.array(indices, dtype=np.int64))
    assert list(zip(*(column.tolist() for column in found), strict=True)) == expected


@given(st.lists(progressions, min_size=1, max_size=6))
@settings(max_examples=80, deadline=None)
def test_refine_gives_cells_of_one_membership(rows):
    normal = [(start, step if count > 1 else 1, count) for start, step, count in rows]
    cells = [members(*cell) for cell in zip(*refine(*columns(normal)), strict=True)]
    given_sets = [members(*row) for row in normal]
    assert set().union(*cells) == set().union(*given_sets)
    assert sum(map(len, cells)) == len(set().union(*cells))
    for cell in cells:
        for one in given_sets:
            assert cell <= one or not cell & one


def test_refine_of_plain_ranges_makes_no_array_of_the_extent():
    far = 1 << 40
    start, step, count = refine(*columns([(0, 1, far), (far // 2, 1, far)]))
    assert list(zip(start.tolist(), step.tolist(), count.tolist(), strict=True)) == [
        (0, 1, far // 2),
        (far // 2, 1, far // 2),
        (far, 1, far // 2),
    ]


def test_refine_keeps_an_interleave_as_two_progressions():
    start, step, count = refine(*columns([(0, 2, 50), (1, 2, 50), (0, 1, 100)]))
    assert list(zip(start.tolist(), step.tolist(), count.tolist(), strict=True)) == [(0, 2, 50), (1, 2, 50)]


def test_refine_of_strided_progressions_leaves_out_what_nobody_has():
    # 40 is in none, though it lies between a range and the second progression
    start, step, count = refine(*columns([(10, 1, 20), (12, 3, 9), (41, 2, 5)]))
    cells = [members(*cell) for cell in zip(start.tolist(), step.tolist(), count.tolist(), strict=True)]
    assert set().union(*cells) == {*range(10, 30), *range(12, 39, 3), *range(41, 50, 2)}
    assert {12, 15, 18, 21, 24, 27} in cells
    assert {30, 33, 36} in cells


def test_refine_gives_a_cell_to_each_of_many_short_ranges():
    order = np.random.default_rng(3).permutation(2000)
    found = refine(np.append(order, 0), np.ones(2001, dtype=np.int64), np.append(np.ones(2000, dtype=np.int64), 2001))
    assert found[0].tolist() == list(range(2001))
    assert set(found[2].tolist()) == {1}


@given(st.lists(st.tuples(st.integers(0, 30), st.just(1), st.integers(1, 9)), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_refine_of_ranges_leaves_out_what_nobody_has(rows):
    cells = [members(*cell) for cell in zip(*refine(*columns(rows)), strict=True)]
    given_sets = [members(*row) for row in rows]
    assert set().union(*cells) == set().union(*given_sets)
    assert all(cell <= one or not cell & one for cell in cells for one in given_sets)
