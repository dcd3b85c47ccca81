"""The usual methods on a cluster small enough to work out by hand.

Two trainers on two nodes and two engines of two workers, each engine on a node; every link 10 bytes a second, nothing else
costs anything. Class 0 (30 bytes) is held by both trainers and needed by rank 0 of both engines; class 1 (50 bytes) is held
by trainer 1 only and needed by rank 1 of both.
"""

from __future__ import annotations

import numpy as np
import pytest

from weightbridge.errors import UsageError
from weightbridge.plan import HOP, ROUTE, AtomTable, Bounds, Plan, ReplicaClass, Role, Topology, Worker
from weightbridge.simulator.baselines import BASELINES, BUCKET_BYTES, baseline
from weightbridge.simulator.costs import Costs

FREE = Costs(
    latency_seconds=0, post_seconds=0, signal_seconds=0, launch_seconds=0, python_seconds_per_round=0, agreement_seconds=0,
    memory_bandwidth=1e30, inside_bandwidth=1e30,
)  # fmt: skip


def job(num_engines: int = 2, *, sizes: tuple[int, int] = (30, 50), bandwidth: float = 10.0) -> Plan:
    workers = [Worker(name=f"t/{i}", role=Role.TRAINER, node=f"t{i}", rank=i, bandwidth=bandwidth) for i in range(2)]
    workers += [
        Worker(name=f"e{e}/{i}", role=Role.ROLLOUT, node=f"e{e}", rank=i, engine=f"e{e}", bandwidth=bandwidth)
        for e in range(num_engines)
        for i in range(2)
    ]
    classes = (
        ReplicaClass(holders=(0, 1), needers=tuple(range(2, 2 + 2 * num_engines, 2)), nbytes=sizes[0]),
        ReplicaClass(holders=(1,), needers=tuple(range(3, 3 + 2 * num_engines, 2)), nbytes=sizes[1]),
    )
    one = np.ones((2, 1), dtype=np.int64)
    atoms = AtomTable(
        tensor=np.arange(2), start=0 * one, step=one, count=np.array(sizes)[:, None], class_id=np.arange(2),
        stream_offset=np.zeros(2, dtype=np.int64),
    )  # fmt: skip
    return Plan(
        epoch=0, spec_digest="", topology=Topology(workers=tuple(workers)), atoms=atoms, classes=classes,
        routes=np.zeros(0, dtype=ROUTE), hops=np.zeros(0, dtype=HOP), rounds=1, alignment=64, unit_bytes=64, slot_bytes=64,
        bounds=Bounds(t_min_seconds=1.0, link_bound_seconds=1.0, busiest_link_seconds=1.0),
    )  # fmt: skip


def into(plan: Plan, name: str, links: tuple[object, ...]) -> int:
    return sum(link.nbytes for link in links if link.name == name and link.kind == "worker" and not link.outgoing)


def test_broadcast_takes_the_model_through_one_link_as_often_as_the_ring_is_long() -> None:
    """Trainer 0 holds 30 bytes and takes in 50 (5 s) while 80 leave it (8 s). All of it is one bucket, gathered first, and
    one chunk, which each of the three workers in the middle of the ring holds before it passes it on. Two workers of one
    node are next to each other in the ring, so two of its edges are inside and take no time; but a chunk is counted at the
    slowest link of the ring: 8 + 8 + 3 * 8 s."""
    plan = job()
    result = baseline("broadcast", plan, FREE)
    assert result.ewtt_seconds == pytest.approx(8 + 8 + 3 * 8)
    assert result.agst_seconds == result.ewtt_seconds  # everybody takes part from beginning to end
    assert [into(plan, w.name, result.links) for w in plan.topology.workers] == [50, 0, 80, 0, 80, 0]


def test_p2p_repeats_itself_for_every_engine() -> None:
    """Rank 0 from trainer 0, which holds it (3 s); rank 1 from trainer 1 (5 s); they run side by side, then the last bucket,
    here all of the larger 50 bytes, at 10 a second: 10 s an engine. An engine is parked for its own turn only."""
    for num_engines in (1, 2, 5):
        plan = job(num_engines)
        result = baseline("p2p", plan, FREE)
        assert result.ewtt_seconds == pytest.approx(10 * num_engines)
        stall = (
            2 * 10 * num_engines + 2 * num_engines * 10
        )  # two trainers throughout, each engine's workers in their turn
        assert result.agst_seconds == pytest.approx(stall / (2 + 2 * num_engines))
        assert [into(plan, w.name, result.links) for w in plan.topology.workers] == [0, 0] + [30, 50] * num_engines


def test_p2p_gathers_what_the_source_lacks() -> None:
    """With the classes' needers exchanged, trainer 0 must have 50 bytes from trainer 1 before rank 0 can."""
    plan = job(1)
    swapped = (
        ReplicaClass(holders=(0, 1), needers=(3,), nbytes=30),
        ReplicaClass(holders=(1,), needers=(2,), nbytes=50),
    )
    plan = Plan(**{**vars(plan), "classes": swapped})
    result = baseline("p2p", plan, FREE)
    # trainer 1 sends 50 to trainer 0 and 30 to rank 1 over one link of 10: 8 s; then the last bucket of 50
    assert result.ewtt_seconds == pytest.approx(8 + 5)
    assert [into(plan, w.name, result.links) for w in plan.topology.workers] == [50, 0, 50, 30]


def test_pull_reads_every_shard_from_one_trainer_once_for_each_reader() -> None:
    """Class 0 always leaves trainer 0 (2 * 30 bytes, 6 s), class 1 trainer 1 (2 * 50, 10 s)."""
    plan = job()
    result = baseline("pull", plan, FREE)
    assert result.ewtt_seconds == pytest.approx(10)
    assert result.agst_seconds == result.ewtt_seconds
    out = {u.name: u.nbytes for u in result.links if u.kind == "worker" and u.outgoing}
    assert (out["t/0"], out["t/1"]) == (60, 100)


@pytest.mark.parametrize("name", BASELINES)
def test_costs_are_counted_and_parts_add_up(name: str) -> None:
    plan = job(sizes=(3 * BUCKET_BYTES + 7, 5 * BUCKET_BYTES + 1), bandwidth=BUCKET_BYTES * 1.0)
    costs = Costs(
        agreement_seconds=0.5, launch_seconds=0.25, memory_bandwidth=BUCKET_BYTES * 4.0, latency_seconds=0,
        inside_bandwidth=1e30,
    )  # fmt: skip
    result, free = baseline(name, plan, costs), baseline(name, plan, FREE)
    kernels = {"broadcast": 2, "p2p": 2 * 2, "pull": 1}[
        name
    ]  # pack and unpack of a last bucket; for each engine; unpack
    assert result.conversion_seconds == pytest.approx(kernels * (0.25 + 0.25))
    assert result.control_seconds == pytest.approx(0.5)
    assert result.communication_seconds == pytest.approx(free.communication_seconds)
    parts = result.control_seconds + result.conversion_seconds + result.communication_seconds
    assert result.ewtt_seconds == pytest.approx(parts)


def test_posts_count_where_they_take_longer_than_the_bytes() -> None:
    """Rank 1 of each engine reads one tensor; 20 s of CPU for its one post against 10 s on the link."""
    costs = Costs(**{**{name: getattr(FREE, name) for name in FREE.__slots__}, "post_seconds": 20.0})
    result = baseline("pull", job(), costs)
    assert (result.control_seconds, result.communication_seconds) == (pytest.approx(10), pytest.approx(10))


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'carrier pigeon'.*broadcast, p2p, pull"):
        baseline("carrier pigeon", job(), FREE)
