"""Part of the plan's verifier: the bounds, proven from the certificate by weak duality (rows in `plan/bound.py`)."""

from __future__ import annotations

from itertools import pairwise
from math import isfinite

import numpy as np

from weightbridge.plan.plan import Plan
from weightbridge.plan.topology import Role
from weightbridge.plan.verify_ownership import refuse

__all__ = ["check_bounds"]

_RELATIVE = 1e-6


def check_bounds(plan: Plan, ingress: dict[str, int], egress_bytes: int) -> None:
    """T_min is recomputed, the busiest link recounted, and the LP bound proven from its multipliers (see plan/bound.py)."""
    b, topology = plan.bounds, plan.topology
    terms = [ingress[v] / topology.bandwidth_of_node(v, Role.ROLLOUT) for v in ingress]
    homes = {topology.workers[t].node for t in topology.trainers}
    terms.append(egress_bytes / sum(topology.bandwidth_of_node(v, Role.TRAINER) for v in homes))
    _compare("t_min_seconds", b.t_min_seconds, max(terms))
    _compare("busiest_link_seconds", b.busiest_link_seconds, _busiest(plan))
    value = _dual_value(plan, ingress)
    if b.link_bound_seconds > value * (1 + _RELATIVE):
        refuse(f"link_bound_seconds is {b.link_bound_seconds}, but its certificate proves {value} only")
    if b.link_bound_seconds > b.busiest_link_seconds * (1 + _RELATIVE):
        refuse(f"busiest_link_seconds {b.busiest_link_seconds} is below link_bound_seconds {b.link_bound_seconds}")
    if b.t_min_seconds > b.busiest_link_seconds * (1 + _RELATIVE):
        refuse(f"busiest_link_seconds {b.busiest_link_seconds} is below t_min_seconds {b.t_min_seconds}")


def _compare(what: str, said: float, found: float) -> None:
    if abs(said - found) > _RELATIVE * max(abs(said), abs(found)):
        refuse(f"{what} is {said}, counted {found}")


def _busiest(plan: Plan) -> float:
    size = plan.routes["hi"] - plan.routes["lo"]
    node = [w.node for w in plan.topology.workers]
    flows = [
        (s, e, n)
        for s, e, n in zip(plan.routes["sender"].tolist(), plan.routes["entry"].tolist(), size.tolist(), strict=True)
    ]
    flows += [(src, dst, int(size[route])) for route, _, src, dst in plan.hops.tolist()]
    limits = dict(plan.topology.node_bandwidth)
    load: dict[tuple[str, int | str], int] = {}
    for src, dst, nbytes in flows:
        if node[src] != node[dst]:
            for way, w in (("out", src), ("in", dst)):
                for link in (w, node[w]):
                    load[way, link] = load.get((way, link), 0) + nbytes
    worst = 0.0
    for (_, link), nbytes in load.items():
        rate = plan.topology.workers[link].bandwidth if isinstance(link, int) else limits.get(link, float("inf"))
        worst = max(worst, nbytes / rate)
    return worst


def _dual_value(plan: Plan, ingress: dict[str, int]) -> float:
    """Check that the multipliers are feasible and return the bound they prove, in seconds."""
    topology, workers = plan.topology, plan.topology.workers
    trainers, nodes = topology.trainers, list(ingress)
    limits = {v: rate for v, rate in topology.node_bandwidth if v in topology.nodes}
    capped = [v for v in topology.nodes if v in limits]
    sizes = [len(plan.classes), len(trainers), len(nodes), len(nodes), len(capped)]
    dual = plan.bounds.dual
    if len(dual) != sum(sizes) or not all(isfinite(d) for d in dual):
        refuse(f"the certificate has {len(dual)} multipliers, expected {sum(sizes)} finite ones")
    ends = np.cumsum([0, *sizes]).tolist()
    y, u, f, g, h = (dual[lo:hi] for lo, hi in pairwise(ends))
    if min((*u, *f, *g, *h), default=0.0) < 0:
        refuse("the certificate has a negative multiplier")
    rates = [topology.bandwidth_of_node(v, Role.ROLLOUT) for v in nodes]
    weight = sum(workers[t].bandwidth * m for t, m in zip(trainers, u, strict=True))
    weight += sum(rate * (a + b) for rate, a, b in zip(rates, f, g, strict=True))
    weight += sum(limits[v] * m for v, m in zip(capped, h, strict=True))
    if weight > 1 + _RELATIVE:
        refuse(f"the certificate's link multipliers weigh {weight}, expected at most 1")
    cap = dict(zip(capped, h, strict=True))
    out = {t: m + cap.get(workers[t].node, 0.0) for t, m in zip(trainers, u, strict=True)}
    on = {v: m + cap.get(v, 0.0) for v, m in zip(nodes, f, strict=True)}
    value = sum(ingress[v] * m for v, m in zip(nodes, g, strict=True))
    for i, (c, multiplier) in enumerate(zip(plan.classes, y, strict=True)):
        homes = {workers[t].node for t in c.holders}
        targets = {workers[w].node for w in c.needers} - homes
        if not targets:
            continue
        allowed = min(out[t] for t in c.holders) + (len(targets) - 1) * min(on[v] for v in targets)
        if multiplier > allowed * (1 + _RELATIVE):
            refuse(f"the certificate's multiplier of class {i} is {multiplier}, its links allow {allowed}")
        value += c.nbytes * multiplier
    return value
