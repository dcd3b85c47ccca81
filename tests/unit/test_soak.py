"""The soak benchmarks' verdicts: what counts as growth, and of which updates the two EWTTs are."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from benchmarks import elastic
from benchmarks._elastic_job import Settings
from benchmarks._elastic_workers import NUM_TRAINERS, SPEC, Role
from benchmarks._elastic_workers import Shard as ElasticShard
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


# --- engines that come and go -----------------------------------------------------------------------------------------


def verdict(
    *,
    grown: dict[str, int] | None = None,
    wrong: int = 0,
    problems: tuple[str, ...] = (),
    versions: int = 4,
    looks: int = 4,
) -> dict[str, Any]:
    """Of four versions, all but the second calm; the third was given up. One stayer has grown by `grown` since it was warm."""
    first = {"resident_bytes": 1 << 28, "descriptors": 30, "threads": 9, "objects": 70_000}
    last = {k: v + (grown or {}).get(k, 0) for k, v in first.items()}
    cold = {k: v - 100_000_000 for k, v in first.items()}
    sent = [
        {"version": i + 1, "ewtt_seconds": ewtt, "attempts": attempts, "calm": calm}
        for i, (ewtt, attempts, calm) in enumerate([(0.5, 1, True), (9.0, 1, False), (None, 1, True), (0.25, 1, True)])
    ]
    seen = [*[cold] * (looks - 2), first, last][-looks:] if looks else []
    counts = Counter({"joins": 5, "kills": 2, "given up": 1, "wrong values": wrong})
    return elastic.summary(
        Settings(versions=versions, seed=3), sent, {"trainer/0": [first, first], "stays/0": seen}, counts, list(problems),
        wall_seconds=1.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "ok"),
    [
        ({}, True),
        ({"grown": {"resident_bytes": elastic.ALLOWED_GROWTH_BYTES, "threads": -1}}, True),
        ({"grown": {"resident_bytes": elastic.ALLOWED_GROWTH_BYTES + 1}}, False),
        ({"grown": {"descriptors": 1}}, False),
        ({"grown": {"objects": elastic.ALLOWED_GROWTH_OBJECTS + 1}}, False),
        ({"grown": {"threads": 1}}, False),
        ({"wrong": 1}, False),
        ({"problems": ("stays/1 is gone",)}, False),
        ({"versions": 5}, False),  # one was not sent
        ({"looks": 2, "grown": {"threads": 1}}, False),
        ({"looks": 0}, False),  # a worker never looked at itself
    ],
)
def test_one_thing_that_is_not_right_is_enough(changes: dict[str, Any], ok: bool) -> None:
    found = verdict(**changes)
    assert found["ok"] is ok
    assert found["wrong_values"] == changes.get("wrong", 0)
    assert {k: found[k] for k in ("joins", "kills", "versions_given_up")} == {
        "joins": 5,
        "kills": 2,
        "versions_given_up": 1,
    }


def test_ewtts_are_of_calm_versions_that_took_one_attempt() -> None:
    found = verdict()
    assert (found["ewtt_seconds_first"], found["ewtt_seconds_last"]) == (0.5, 0.25)


def test_shards_of_the_elastic_model_hold_every_element_once_and_tell_versions_apart() -> None:
    def shards(side: str, size: int) -> list[ElasticShard]:
        return [
            ElasticShard(Role(side=side, rank=rank, size=size, endpoint="", staged=False, node=""))
            for rank in range(size)
        ]

    trainers, engine = shards("trainer", NUM_TRAINERS), shards("e", 2)
    for tensor in SPEC.tensors:
        rows = [shard.live[tensor.name].shape[0] for shard in trainers]
        columns = [shard.live[tensor.name].shape[-1] for shard in engine]
        assert sum(rows) == tensor.shape[0]
        assert rows[0] != rows[1]
        assert sum(columns) == tensor.shape[-1] * (2 if len(tensor.shape) == 1 else 1)
    for shard in (*engine, *shards("e", 1)):
        shard.fill(2000)
        assert shard.is_version(2000)
        other = {name: live.clone() for name, live in shard.live.items()}
        shard.fill(1999)
        assert not shard.is_version(2000)
        for name, live in shard.live.items():  # hardly an element is the same in two versions
            assert (live != other[name]).float().mean() > 0.99
        shard.fill(2000)
        next(iter(shard.live.values())).view(torch.uint8)[-1, -1] ^= 1
        assert not shard.is_version(2000)
