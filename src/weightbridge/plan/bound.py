"""Lower bounds of one update, and the certificate that proves the routing LP's.

The LP in its plain form: minimise T over x[c,t,v] >= 0 and T >= 0, for classes c with network targets V_c, k_c = |V_c|,
holders t and first nodes v in V_c, subject to these rows, each with a multiplier; this is the order of `Bounds.dual`:

1. per class of the plan (all of them, in order):        sum_{t,v} x[c,t,v] = n_c               y_c, 0 where V_c is empty
2. per trainer, in the order of `Topology.trainers`:     bw_t T - sum_{c,v} x[c,t,v] >= 0       u_t >= 0
3. per rollout node, in the order of `Topology.nodes`:   B_v T - sum_{c,t} (k_c - 1) x >= 0     f_v >= 0
4. per rollout node, in the same order:                  B_v T >= M_v                           g_v >= 0
5. per node limit, in the order of `Topology.nodes`:     R_n T - (rows 2 and 3 of n) >= 0       h_n >= 0

with B_v = `bandwidth_of_node(v, ROLLOUT)`, M_v the bytes v needs over the network and R_n from `node_bandwidth`. The
multipliers are feasible when sum bw u + sum B (f + g) + sum R h <= 1 and, for every c, t, v,
y_c <= u_t + h_node(t) + (k_c - 1) (f_v + h_v); then sum n_c y_c + sum M_v g_v is a lower bound on T by weak duality.
"""

from __future__ import annotations

import numpy as np

from weightbridge.plan.flow import Flow, Network
from weightbridge.plan.plan import Bounds
from weightbridge.plan.topology import Role

__all__ = ["certified", "t_min_seconds"]


def t_min_seconds(net: Network) -> float:
    """T_min of the paper (arXiv 2609.25442): max(M / B_T, max over nodes v of M_v / B_v), in seconds.

    Bytes that can be had inside a node count in neither term.
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
    largest y_c they allow turns that into a proof. The bound reported is the value of that proof.
    """
    trainers, nodes = net.topology.trainers, net.rollout_nodes
    speeds = [net.topology.workers[t].bandwidth for t in trainers] + 2 * [net.rollout_bandwidth[v] for v in nodes]
    speeds += [rate for _, rate in net.caps]
    links = np.array(flow.link_dual, dtype=np.float64)
    weight = float(links @ np.array(speeds, dtype=np.float64)) if len(links) else 0.0
    links = links / weight if weight > 0 else links * 0.0
    u = dict(zip(trainers, links.tolist(), strict=False))
    f = dict(zip(nodes, links[len(trainers) :].tolist(), strict=False))
    g = links[len(trainers) + len(nodes) :].tolist()
    h = dict(zip((v for v, _ in net.caps), links[len(trainers) + 2 * len(nodes) :].tolist(), strict=True))
    y, value = [], 0.0
    for c, targets in zip(net.classes, net.targets, strict=True):
        if not targets:
            y.append(0.0)
            continue
        source = min(u[t] + h.get(net.node_of[t], 0.0) for t in c.holders)
        onward = (len(targets) - 1) * min(f[v] + h.get(v, 0.0) for v in targets)
        y.append(source + onward)
        value += c.nbytes * y[-1]
    value += sum(net.ingress_bytes[v] * gv for v, gv in zip(nodes, g, strict=False))
    return Bounds(
        t_min_seconds=t_min_seconds(net),
        link_bound_seconds=value,
        busiest_link_seconds=busiest_link_seconds,
        dual=(*y, *links.tolist()),
    )
