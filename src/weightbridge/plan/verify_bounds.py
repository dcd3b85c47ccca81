"""Part of the plan's verifier: the bounds, proven from the certificate by weak duality (rows in `plan/bound.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite

import numpy as np

from weightbridge.plan.plan import Plan
from weightbridge.plan.topology import Role
from weightbridge.plan.verify_ownership import refuse

__all__ = ["check_bounds", "proven_seconds"]

_RELATIVE = 1e-6


def check_bounds(plan: Plan, ingress: dict[str, int], egress_bytes: int) -> None:
    """T_min is recomputed, the busiest link recounted, and the LP bound proven from its multipliers (see plan/bound.py)."""
    b, topology = plan.bounds, plan.topology
    terms = [ingress[v] / topology.bandwidth_of_node(v, Role.ROLLOUT) for v in ingress]
    homes = {topology.workers[t].node for t in topology.trainers}
    terms.append(egress_bytes / sum(topology.bandwidth_of_node(v, Role.TRAINER) for v in homes))
    _compare("t_min_seconds", b.t_min_seconds, max(terms))
    _compare("busiest_link_seconds", b.busiest_link_seconds, _busiest(plan))
    value = proven_seconds(plan, ingress)
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
    """Seconds the busiest link takes, out or in: of a worker, of a limited node, or of a group to all others."""
    topology, workers = plan.topology, plan.topology.workers
    size = plan.routes["hi"] - plan.routes["lo"]
    ends = (
        np.concatenate([plan.routes["sender"], plan.hops["src"]]),
        np.concatenate([plan.routes["entry"], plan.hops["dst"]]),
    )
    nbytes = np.concatenate([size, size[plan.hops["route"]]]).astype(np.float64)
    names = {name: i for i, name in enumerate(topology.nodes)}
    node = np.array([names[w.node] for w in workers], dtype=np.int64)
    group = np.array([topology.group_of.get(w.node, len(topology.groups)) for w in workers], dtype=np.int64)
    limits = dict(topology.node_bandwidth)
    worst = 0.0
    for place, region, rates in (
        (np.arange(len(workers)), node, [w.bandwidth for w in workers]),
        (node, node, [limits.get(name, inf) for name in names]),
        (group, group, [*(g.bandwidth for g in topology.groups), inf]),
    ):
        crossing = region[ends[0]] != region[ends[1]]
        for end in ends:
            load = np.bincount(place[end[crossing]], weights=nbytes[crossing], minlength=len(rates))
            worst = max(worst, float((load / np.array(rates)).max()))
    return worst


@dataclass(frozen=True, slots=True)
class _Multipliers:
    """One name a row of the LP in plan/bound.py; u by trainer, f, g and h by node, p and q by group, r by (class, domain).

    A domain is the position of a group, -1 for the nodes in none.
    """

    y: tuple[float, ...]
    u: dict[int, float]
    f: dict[str, float]
    g: dict[str, float]
    h: dict[str, float]
    p: dict[int, float]
    q: dict[int, float]
    r: dict[tuple[int, int], float]


def _needing(plan: Plan) -> list[dict[int, list[str]]]:
    """Per class, the nodes that need it from elsewhere, by domain: groups in their order, then (-1) the nodes in none."""
    group_of, workers = plan.topology.group_of, plan.topology.workers
    found = []
    for c in plan.classes:
        nodes = {workers[w].node for w in c.needers} - {workers[t].node for t in c.holders}
        domains: dict[int, list[str]] = {}
        for v in sorted(nodes, key=lambda v: group_of.get(v, len(group_of))):
            domains.setdefault(group_of.get(v, -1), []).append(v)
        found.append(domains)
    return found


def _multipliers(plan: Plan, nodes: list[str], needing: list[dict[int, list[str]]]) -> _Multipliers:
    """The certificate taken apart; refused unless it has a finite number for every row, not negative for a link's."""
    topology, dual = plan.topology, plan.bounds.dual
    limited = dict(topology.node_bandwidth)
    capped = [v for v in topology.nodes if v in limited]
    groups = range(len(topology.groups))
    wide = [(i, d) for i, domains in enumerate(needing) if len(domains) > 1 for d in domains]
    keys = (range(len(plan.classes)), topology.trainers, nodes, nodes, capped, groups, groups, wide)
    sizes = [len(k) for k in keys]
    if len(dual) != sum(sizes) or not all(isfinite(d) for d in dual):
        refuse(f"the certificate has {len(dual)} multipliers, expected {sum(sizes)} finite ones")
    ends = np.cumsum([0, *sizes]).tolist()
    y, *links, r = (dual[lo:hi] for lo, hi in pairwise(ends))
    if min((m for part in links for m in part), default=0.0) < 0:
        refuse("the certificate has a negative multiplier")
    u, f, g, h, p, q = (dict(zip(k, part, strict=True)) for k, part in zip(keys[1:-1], links, strict=True))
    return _Multipliers(y, u, f, g, h, p, q, dict(zip(wide, r, strict=True)))  # type: ignore[arg-type]


def proven_seconds(plan: Plan, ingress: dict[str, int]) -> float:
    """Check that the multipliers are feasible and return the bound they prove, in seconds.

    ingress: bytes that each node with rollout workers needs over the network, in the order of `Topology.nodes`.
    """
    topology, workers = plan.topology, plan.topology.workers
    needing = _needing(plan)
    m = _multipliers(plan, [*ingress], needing)
    limits = dict(topology.node_bandwidth)
    weight = sum(workers[t].bandwidth * x for t, x in m.u.items())
    weight += sum(topology.bandwidth_of_node(v, Role.ROLLOUT) * (m.f[v] + m.g[v]) for v in ingress)
    weight += sum(limits[v] * x for v, x in m.h.items())
    weight += sum(group.bandwidth * (m.p[d] + m.q[d]) for d, group in enumerate(topology.groups))
    if weight > 1 + _RELATIVE:
        refuse(f"the certificate's link multipliers weigh {weight}, expected at most 1")
    value = sum(ingress[v] * x for v, x in m.g.items())
    for i, (c, domains) in enumerate(zip(plan.classes, needing, strict=True)):
        if domains:
            _check_class(plan, i, domains, m)
        of_domains = sum(m.q.get(d, 0.0) + m.r.get((i, d), 0.0) for d in domains)
        value += c.nbytes * ((m.y[i] if domains else 0.0) + of_domains)
    return value


def _check_class(plan: Plan, class_id: int, domains: dict[int, list[str]], m: _Multipliers) -> None:
    """The two inequalities of plan/bound.py for one class, each for whoever makes it tightest."""
    topology, workers = plan.topology, plan.topology.workers
    leaving: dict[int, float] = {}  # per domain of holders, the least that a byte leaving there costs
    for t in plan.classes[class_id].holders:
        home = topology.group_of.get(workers[t].node, -1)
        leaving[home] = min(leaving.get(home, inf), m.u[t] + m.h.get(workers[t].node, 0.0))
    for d, nodes in domains.items():
        send_on = min(m.f[v] + m.h.get(v, 0.0) for v in nodes)
        r = m.r.get((class_id, d), 0.0)
        gateway = (len(nodes) - 1) * send_on
        if len(domains) > 1 and r > gateway + _RELATIVE * abs(gateway):
            refuse(f"the certificate's multiplier of class {class_id} in domain {d} is {r}, its links allow {gateway}")
        elsewhere = len(domains) - 1
        for home, cost in leaving.items():
            uplinks = elsewhere * m.p.get(d, 0.0) + (-m.q.get(d, 0.0) if home == d else m.p.get(home, 0.0))
            allowed = cost + gateway + elsewhere * send_on + uplinks
            size = cost + gateway + elsewhere * send_on + abs(uplinks)
            if m.y[class_id] + r > allowed + _RELATIVE * size:
                refuse(
                    f"the certificate's multiplier of class {class_id} is {m.y[class_id]}, its links allow {allowed - r}"
                )
