"""Lower bounds of one update, and the certificate that proves the routing LP's.

A *domain* is a group of the topology, or all nodes that are in none. For a class c with network targets V_c let D_c be
their domains and k_v the number of targets in the domain d(v) of v. In its plain form the LP is: minimise T over
x[c,t,v] >= 0 (bytes from holder t to first node v in V_c), w[c,v] >= 0 where |D_c| > 1 (bytes for which v is the gateway of
its domain) and T >= 0, subject to these rows, each with a multiplier; this is the order of `Bounds.dual`:

1. per class of the plan (all of them, in order):        sum_{t,v} x[c,t,v] = n_c               y_c, 0 where V_c is empty
2. per trainer, in the order of `Topology.trainers`:     bw_t T - sum_{c,v} x >= 0              u_t >= 0
3. per rollout node, in the order of `Topology.nodes`:   B_v T - sum_{c,t} (k_v + |D_c| - 2) x
                                                              - sum_c (k_v - 1) w >= 0          f_v >= 0
4. per rollout node, in the same order:                  B_v T >= M_v                           g_v >= 0
5. per node limit, in the order of `Topology.nodes`:     R_n T - (what rows 2 and 3 of n subtract) >= 0   h_n >= 0
6. per group, in the order of `Topology.groups`:         U_d T - sum_{t in d, v not in d} x
                                                              - sum_{v in d} (|D_c| - 1) x >= 0  p_d >= 0
7. per group, in the same order:                         U_d T + sum_{t in d, v in d} x >= N_d  q_d >= 0
8. per class with |D_c| > 1, and per domain d in D_c in
   the order of groups, the nodes in none last:          sum_{v in d} (sum_t x + w) = n_c       r_cd

with B_v = `bandwidth_of_node(v, ROLLOUT)`, M_v the bytes v needs over the network, R_n from `node_bandwidth`, U_d the
group's bandwidth and N_d the sum of n_c over the classes with d in D_c. Without groups there are no rows 6 to 8. With
F_v = f_v + h_v, and p and q 0 for the nodes in no group, the multipliers are feasible when

    sum bw u + sum B (f + g) + sum R h + sum U (p + q) <= 1
    r_cd <= (k_v - 1) F_v                                           for every c with |D_c| > 1 and v
    y_c + r_cd(v) <= u_t + h_node(t) + (k_v + |D_c| - 2) F_v + (|D_c| - 1) p_d(v)
                     + (p_d(t) where d(t) != d(v), else -q_d(v))    for every c, t, v (r is 0 where |D_c| = 1)

and then sum n_c y_c + sum M_v g_v + sum N_d q_d + sum n_c r_cd is a lower bound on T by weak duality.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from weightbridge.plan.flow import Flow
from weightbridge.plan.linear import FloatArray
from weightbridge.plan.network import Network
from weightbridge.plan.plan import Bounds
from weightbridge.plan.topology import Role

__all__ = ["certified", "t_min_seconds"]


def t_min_seconds(net: Network) -> float:
    """T_min of the paper (arXiv 2609.25442): max(M / B_T, max over nodes v of M_v / B_v), in seconds.

    Bytes that can be had inside a node count in neither term. Uplinks of groups do not count: T_min keeps the paper's
    definition, and it is the LP's bound that knows them.
    """
    topology = net.topology
    names = dict.fromkeys(topology.workers[t].node for t in topology.trainers)
    trainers = sum(topology.bandwidth_of_node(name, Role.TRAINER) for name in names)
    terms = [net.ingress_bytes[v] / net.rollout_bandwidth[v] for v in net.rollout_nodes]
    if trainers > 0:
        terms.append(net.network_bytes / trainers)
    return max(terms, default=0.0)


def certified(net: Network, flow: Flow, busiest_link_seconds: float) -> Bounds:
    """The bounds, with the solver's multipliers repaired into exactly feasible ones.

    The solver is right to some 1e-9; scaling the link multipliers to the feasible simplex and taking for each class the
    largest y_c and r_cd they allow turns that into a proof. The bound reported is the value of that proof.
    """
    links = np.array(flow.link_dual, dtype=np.float64)
    speeds = [net.topology.workers[t].bandwidth for t in net.topology.trainers]
    speeds += [*2 * [*net.rollout_bandwidth.values()], *(rate for _, rate in net.caps), *2 * net.uplinks]
    weight = float(links @ np.array(speeds, dtype=np.float64)) if len(links) else 0.0
    links = links / weight if weight > 0 else links * 0.0
    y, inside, value = _class_multipliers(net, links)
    first_ingress = len(net.topology.trainers) + len(net.rollout_nodes)
    value += sum(
        net.ingress_bytes[v] * g for v, g in zip(net.rollout_nodes, links[first_ingress:].tolist(), strict=False)
    )
    q = links[len(links) - len(net.uplinks) :].tolist()
    value += sum(nbytes * m for nbytes, m in zip(net.group_bytes, q, strict=True))
    return Bounds(
        t_min_seconds=t_min_seconds(net),
        link_bound_seconds=value,
        busiest_link_seconds=busiest_link_seconds,
        dual=(*y, *links.tolist(), *inside),
    )


def _class_multipliers(net: Network, links: FloatArray) -> tuple[list[float], list[float], float]:
    """y and r, the largest feasible for these link multipliers, and what they add to the bound.

    A larger r_cd lowers y_c by no more than it is larger, so r_cd is as large as it may be.
    """
    trainers, nodes, num_groups = net.topology.trainers, net.rollout_nodes, len(net.uplinks)
    ends = np.cumsum([len(trainers), len(nodes), len(nodes), len(net.caps), num_groups]).tolist()
    parts = [part.tolist() for part in np.split(links, ends)]
    h = dict(zip((v for v, _ in net.caps), parts[3], strict=True))
    send = {t: m + h.get(net.node_of[t], 0.0) for t, m in zip(trainers, parts[0], strict=True)}
    forward = {v: m + h.get(v, 0.0) for v, m in zip(nodes, parts[1], strict=True)}
    p, q = [*parts[4], 0.0], [*parts[5], 0.0]
    y: list[float] = []
    inside: list[float] = []
    value = 0.0
    for c, domains in zip(net.classes, net.target_domains, strict=True):
        if not domains:
            y.append(0.0)
            continue
        source: dict[int, float] = {}
        for t in c.holders:
            d = net.domain_of[net.node_of[t]]
            source[d] = min(source.get(d, np.inf), send[t])
        on = {d: min(forward[v] for v in there) for d, there in domains.items()}
        others = len(domains) - 1
        r = {d: (len(there) - 1) * on[d] if others else 0.0 for d, there in domains.items()}
        y.append(
            min(
                source[s] + (len(domains[d]) - 1 + others) * on[d] + others * p[d] + (p[s] if s != d else -q[d]) - r[d]
                for s, d in product(source, domains)
            )
        )
        inside += [*r.values()] if others else []
        value += c.nbytes * (y[-1] + sum(r.values()))
    return y, inside, value
