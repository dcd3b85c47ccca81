"""The soak benchmark's verdict: what counts as growth, and of which updates the two EWTTs are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.soak import ALLOWED_GROWTH_BYTES, Shard, summary


def worker(name: str, *, resident: int = 0, descriptors: int = 0, threads: int = 0, wrong: int = 0) -> dict[str, Any]:
    """Two looks that differ by what is given; EWTTs that fall from 100 to 1."""
    first = {"resident_bytes": 1 << 28, "descriptors": 19, "threads": 8}
    grown = {"resident_bytes": resident, "descriptors": descriptors, "threads": threads}
    last = {k: v + grown[k] for k, v in first.items()}
    return {
        "worker": name, "looks": [first, first, last], "ewtt_seconds": [float(100 - i) for i in range(100)], "wrong": wrong
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"resident": ALLOWED_GROWTH_BYTES, "threads": -4}, True),
        ({"resident": ALLOWED_GROWTH_BYTES + 1}, False),
        ({"descriptors": 1}, False),
        ({"threads": 1}, False),
        ({"wrong": 1}, False),
    ],
)
def test_one_worker_that_grew_or_went_wrong_is_enough(changes: dict[str, int], ok: bool) -> None:
    found = summary(100, [worker("trainer/0"), worker("engine/0", **changes)])
    assert found["ok"] is ok
    assert found["workers"]["engine/0"]["growth"]["resident_bytes"] == changes.get("resident", 0)
    assert found["wrong_versions"] == changes.get("wrong", 0)


def test_first_and_last_are_a_tenth_of_the_updates_without_the_very_first() -> None:
    found = summary(100, [worker("trainer/0")])
    assert (found["ewtt_seconds_first"], found["ewtt_seconds_last"]) == (94.5, 5.5)
    assert found["last_to_first"] == 5.5 / 94.5


def test_every_bit_of_a_version_is_compared() -> None:
    for by_rows in (True, False):
        shard = Shard(1, by_rows=by_rows)
        shard.fill(70_001)
        assert shard.is_version(70_001)
        assert not shard.is_version(70_002)
        list(shard.live.values())[-1].view(torch.int16)[-1, -1] ^= 1
        assert not shard.is_version(70_001)
