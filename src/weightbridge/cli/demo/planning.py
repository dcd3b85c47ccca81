"""The plan in a few numbers, counted from its routes."""

from __future__ import annotations

from weightbridge.cli.demo.messages import PlanMade
from weightbridge.plan import Plan
from weightbridge.plan.topology import Role

__all__ = ["plan_message"]


def plan_message(plan: Plan, *, model_bytes: int, connect_seconds: float) -> PlanMade:
    """Count what a plan moves between nodes in one update. Only what leaves a node counts as network bytes."""
    workers = plan.topology.workers
    egress = {workers[i].name: 0 for i in plan.topology.trainers}
    ingress = {workers[i].node: 0 for i in plan.topology.rollouts}
    pairs: set[tuple[int, int]] = set()
    for route in plan.routes:
        source, entry, nbytes = int(route["sender"]), int(route["entry"]), int(route["hi"] - route["lo"])
        pairs.add((source, entry))
        if workers[source].node != workers[entry].node:
            egress[workers[source].name] += nbytes
            ingress[workers[entry].node] += nbytes
    for hop in plan.hops:
        source, target = int(hop["src"]), int(hop["dst"])
        route = plan.routes[int(hop["route"])]
        pairs.add((source, target))
        if workers[source].node != workers[target].node:
            ingress[workers[target].node] += int(route["hi"] - route["lo"])
    return PlanMade(
        model_bytes=model_bytes,
        trainer_egress_bytes=egress,
        rollout_node_ingress_bytes=ingress,
        rollout_node_needed_bytes={node: _needed_bytes(plan, node) for node in ingress},
        rounds=plan.rounds,
        num_pairs=len(pairs),
        t_min_seconds=plan.bounds.t_min_seconds,
        connect_seconds=connect_seconds,
    )


def _needed_bytes(plan: Plan, node: str) -> int:
    """Bytes that at least one rollout worker of a node needs, each counted once."""
    there = set(plan.topology.on_node(node, Role.ROLLOUT))
    return sum(c.nbytes for c in plan.classes if there.intersection(c.needers))
