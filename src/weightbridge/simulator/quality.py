"""How good a plan is: its busiest link against the lower bound, in all and within every round. Counted from the plan alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightbridge.plan import Plan, Role
from weightbridge.simulator.result import LinkUse
from weightbridge.simulator.traffic import Traffic

__all__ = ["Quality", "quality_of"]

_CELLS_AT_ONCE = 1 << 21


@dataclass(frozen=True, kw_only=True)
class Quality:
    """busiest: the link that needs longest for its bytes. why: in words, what makes it busy.

    ratio_to_bound: its time over the bound of the routing LP; 1.0 where nothing travels. worst_round_ratio_to_bound: the same
    for the worst link in the worst round, over the bound's equal share of a round. rollout_egress_worst_over_mean: bytes
    that rollout workers pass on over the network, of the worst one over the mean.
    """

    busiest: LinkUse
    why: str
    ratio_to_bound: float
    worst_round_ratio_to_bound: float
    rollout_egress_worst_over_mean: float


def quality_of(plan: Plan) -> Quality:
    """Count it. Does not block; some tenths of a second for a job of hundreds of workers."""
    traffic = Traffic(plan=plan)
    busiest = max(traffic.links(), key=lambda link: link.busy_seconds)
    bound = plan.bounds.link_bound_seconds
    egress = traffic.worker_bytes(outgoing=True)[list(plan.topology.rollouts)]
    return Quality(
        busiest=busiest,
        why=_why(plan, traffic, busiest),
        ratio_to_bound=busiest.busy_seconds / bound if bound > 0 else 1.0,
        worst_round_ratio_to_bound=_worst_round_seconds(traffic) * plan.rounds / bound if bound > 0 else 1.0,
        rollout_egress_worst_over_mean=float(egress.max() / egress.mean()) if egress.any() else 1.0,
    )


def _worst_round_seconds(traffic: Traffic) -> float:
    """Of all links of workers, limited nodes and groups, in any one round."""
    plan = traffic.plan
    if not len(plan.routes):
        return 0.0
    worst = 0.0
    chunk = max(1, _CELLS_AT_ONCE // max(1, len(traffic.nbytes)))
    for first in range(0, plan.rounds, chunk):
        stop = min(first + chunk, plan.rounds)
        parts = np.diff(plan.cuts(range(first, stop + 1)), axis=0)
        for k in range(stop - first):
            sizes = np.concatenate([parts[k], parts[k][plan.hops["route"]]])
            worst = max(worst, Traffic(plan=plan, parts=sizes).busiest_seconds())
    return worst


def _why(plan: Plan, traffic: Traffic, busiest: LinkUse) -> str:
    """Which of the things that no plan can avoid the busiest link is about."""
    topology = plan.topology
    if busiest.kind == "group":
        way = "out of" if busiest.outgoing else "into"
        return f"all that must go {way} group {busiest.name!r} shares its uplink"
    if busiest.kind == "node":
        return f"node {busiest.name!r} has a link narrower than its workers' together"
    worker = topology.workers[topology.index[busiest.name]]
    if worker.role is Role.TRAINER:
        if busiest.outgoing:
            return "the trainers send every byte once, and this is this worker's share"
        return "bytes of other nodes reach it"
    if not busiest.outgoing:
        return f"node {worker.node!r} takes in once what its workers need, and this is this worker's share"
    return f"workers of node {worker.node!r} pass bytes on to other nodes, and this is this worker's share"
