"""Plans of the smaller real deployments reach the bound, in all and within every round; counted from their tables alone."""

from __future__ import annotations

import numpy as np
import pytest

from weightbridge.deployments import preset
from weightbridge.plan import PlanOptions, Role, make_plan, verify_plan

SLOT_BYTES = 256 << 20


def loads(plan, sizes):
    """[num_workers, 2] network bytes out of and into each worker. sizes: [num_routes]."""
    found = np.zeros((len(plan.topology.workers), 2), dtype=np.int64)
    node = np.array([plan.topology.nodes.index(w.node) for w in plan.topology.workers])
    for src, dst, n in (
        (plan.routes["sender"], plan.routes["entry"], sizes),
        (plan.hops["src"], plan.hops["dst"], sizes[plan.hops["route"]]),
    ):
        away = node[src] != node[dst]
        np.add.at(found, (src[away], 0), n[away])
        np.add.at(found, (dst[away], 1), n[away])
    return found


@pytest.mark.parametrize(
    ("name", "rounds", "pairs"),
    [("moonlight-16b", 15, 8), ("qwen3-30b-a3b", 15, 60), ("qwen3-32b", 16, 72), ("qwen3-235b-a22b", 29, 700)],
)
def test_a_preset_reaches_its_bound_in_every_round(name, rounds, pairs):
    job = preset(name)
    plan = make_plan(job.spec, job.topology, job.maps, options=PlanOptions(slot_bytes=SLOT_BYTES))
    facts = verify_plan(plan, job.spec, job.maps)
    assert facts.trainer_egress_bytes == facts.model_bytes
    assert plan.rounds <= rounds
    assert facts.num_pairs <= pairs
    bound = plan.bounds.link_bound_seconds
    speed = np.array([w.bandwidth for w in job.topology.workers])[:, None]
    total = loads(plan, plan.routes["hi"] - plan.routes["lo"])
    assert (total / speed).max() <= bound * 1.0001
    forwarded = total[[w.role is Role.ROLLOUT for w in job.topology.workers], 0]
    if forwarded.any():
        assert forwarded.max() <= forwarded.mean() * 1.01
    parts = np.diff(plan.cuts(range(plan.rounds + 1)), axis=0)
    assert max((loads(plan, part) / speed).max() for part in parts) <= bound / plan.rounds * 1.01
