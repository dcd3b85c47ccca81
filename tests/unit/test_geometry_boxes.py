"""Strided boxes against sets of coordinates."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbridge.geometry import boxes as boxes_module
from weightbridge.geometry import first_overlap, inside, intersection_numel, meeting_pairs, numel

line = st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(1, 4)).map(
    lambda p: (p[0], p[1] if p[2] > 1 else 1, p[2])
)
box = st.tuples(line, line)


def batch(items):
    array = np.array(items, dtype=np.int64).reshape(len(items), 2, 3)
    return array[:, :, 0], array[:, :, 1], array[:, :, 2]


def members(item):
    return set(product(*(range(start, start + step * count, step) for start, step, count in item)))


@given(st.lists(box, min_size=1, max_size=6), st.lists(box, min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_intersection_and_inside_broadcast(left, right):
    a = tuple(column[:, None] for column in batch(left))
    b = tuple(column[None] for column in batch(right))
    common, within = intersection_numel(a, b), inside(a, b)
    for i, x in enumerate(left):
        for j, y in enumerate(right):
            assert common[i, j] == len(members(x) & members(y))
            assert within[i, j] == (members(x) <= members(y))


@given(st.lists(box, max_size=8))
@settings(max_examples=60, deadline=None)
def test_first_overlap_finds_one_exactly_when_there_is_one(items):
    found = first_overlap(batch(items)) if items else None
    overlapping = {
        (i, j) for i in range(len(items)) for j in range(len(items)) if i != j and members(items[i]) & members(items[j])
    }
    assert (found is None) == (not overlapping)
    assert found is None or found in overlapping


@pytest.mark.parametrize("pairs_at_once", [1, 5, 1 << 20])
def test_first_overlap_in_small_batches(monkeypatch, pairs_at_once):
    monkeypatch.setattr(boxes_module, "_PAIRS_AT_ONCE", pairs_at_once)
    rows = [((4 * i, 1, 4), (0, 1, 9)) for i in range(20)]
    assert first_overlap(batch(rows)) is None
    rows.append(((79, 1, 1), (8, 1, 1)))
    assert set(first_overlap(batch(rows))) == {19, 20}


@pytest.mark.parametrize(("few_pairs", "pairs_at_once"), [(0, 1), (0, 1 << 20), (1 << 10, 1 << 20)])
@given(st.lists(box, max_size=7), st.lists(box, max_size=7))
@settings(max_examples=25, deadline=None)
def test_boxes_that_share_an_element_meet_once(few_pairs, pairs_at_once, left, right):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes_module, "_FEW_PAIRS", few_pairs)
        patch.setattr(boxes_module, "_PAIRS_AT_ONCE", pairs_at_once)
        a, b = (batch(items) for items in (left, right))
        found = [pair for i, j in meeting_pairs(a, b) for pair in zip(i.tolist(), j.tolist(), strict=True)]
    assert len(set(found)) == len(found)
    hulls = [[tuple(range(s, s + d * (n - 1) + 1) for s, d, n in item) for item in items] for items in (left, right)]
    assert set(found) == {
        (i, j)
        for i, x in enumerate(hulls[0])
        for j, y in enumerate(hulls[1])
        if all(set(one) & set(other) for one, other in zip(x, y, strict=True))
    }


def test_a_permutation_is_compared_with_itself_row_by_row():
    # 3000 rows in two orders: nine million pairs, of which three thousand meet
    order = np.random.default_rng(7).permutation(3000)
    a, b = (batch([((int(row), 1, 1), (0, 1, 5)) for row in rows]) for rows in (order, range(3000)))
    found = [pair for i, j in meeting_pairs(a, b) for pair in zip(i.tolist(), j.tolist(), strict=True)]
    assert sorted(found) == [(int(at), int(row)) for at, row in enumerate(order)]


def test_numel_of_a_box_without_dims_is_one():
    assert numel(np.zeros((3, 0), dtype=np.int64)).tolist() == [1, 1, 1]
