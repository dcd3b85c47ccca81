"""The routing LP: how many bytes of each class leave each trainer, and enter each node first.

Let x[c,t,v] be the bytes of class c that trainer t sends to first node v, which forwards them once to each of the other
k_c - 1 nodes that need c over the network. A trainer's link sees only a[c,t] = sum_v x[c,t,v] and a node's links only
b[c,v] = sum_t x[c,t,v]; and any a and b with equal totals per class belong to some x (a transportation problem without
costs). So the LP is solved exactly in these two families: T + V variables a class instead of T times V.

A node that has a holder of a class among its own trainers is served inside the node and is no network node of the class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InternalError
from weightbridge.plan.plan import ReplicaClass
from weightbridge.plan.topology import Role, Topology

__all__ = ["Flow", "Network", "solve"]

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_SLACK = 1e-7  # relative room the second LP leaves around the first optimum, above the solver's tolerances


@dataclass(frozen=True, kw_only=True)
class Network:
    """Classes on a topology, in numbers. Nodes are positions in `Topology.nodes`, workers positions in `.workers`."""

    topology: Topology
    classes: tuple[ReplicaClass, ...]

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Node of each worker."""
        position = {name: i for i, name in enumerate(self.topology.nodes)}
        return tuple(position[w.node] for w in self.topology.workers)

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """Per class the nodes that need it and must get it over the network."""
        return tuple(
            tuple(sorted({self.node_of[w] for w in c.needers} - {self.node_of[w] for w in c.holders}))
            for c in self.classes
        )

    @cached_property
    def local(self) -> tuple[tuple[int, ...], ...]:
        """Per class the nodes that need it and have a holder of it themselves."""
        return tuple(
            tuple(sorted({self.node_of[w] for w in c.needers} & {self.node_of[w] for w in c.holders}))
            for c in self.classes
        )

    @cached_property
    def rollout_nodes(self) -> tuple[int, ...]:
        return tuple(sorted({self.node_of[w] for w in self.topology.rollouts}))

    @cached_property
    def rollouts_on(self) -> dict[int, tuple[int, ...]]:
        """Rollout workers of each rollout node, in their order."""
        return {v: tuple(w for w in self.topology.rollouts if self.node_of[w] == v) for v in self.rollout_nodes}

    @cached_property
    def rollout_bandwidth(self) -> dict[int, float]:
        """Bytes per second of each rollout node's rollout workers together, one direction."""
        return {v: self.topology.bandwidth_of_node(self.topology.nodes[v], Role.ROLLOUT) for v in self.rollout_nodes}

    @cached_property
    def caps(self) -> tuple[tuple[int, float], ...]:
        """(node, bytes per second) of the topology's own node limits, for nodes that exist, by node."""
        position = {name: i for i, name in enumerate(self.topology.nodes)}
        return tuple(sorted((position[name], rate) for name, rate in self.topology.node_bandwidth if name in position))

    @cached_property
    def ingress_bytes(self) -> dict[int, int]:
        """M_v: network bytes each rollout node needs."""
        found = dict.fromkeys(self.rollout_nodes, 0)
        for c, nodes in zip(self.classes, self.targets, strict=True):
            for v in nodes:
                found[v] += c.nbytes
        return found

    @cached_property
    def network_bytes(self) -> int:
        """Bytes that must leave the trainers' nodes, each once."""
        return sum(c.nbytes for c, nodes in zip(self.classes, self.targets, strict=True) if nodes)


@dataclass(frozen=True, kw_only=True)
class Flow:
    """seconds: the busiest link's time. leave[c]: (trainer, bytes) pairs. enter[c]: (first node, bytes) pairs.

    link_dual: multipliers of the link rows, in the order of `_links`: trainers' egress, rollout nodes' forwarding,
    rollout nodes' ingress, node caps.
    """

    seconds: float
    leave: tuple[tuple[tuple[int, float], ...], ...]
    enter: tuple[tuple[tuple[int, float], ...], ...]
    link_dual: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A sparse matrix as triplets."""

    row: Int64Array
    column: Int64Array
    value: FloatArray
    shape: tuple[int, int]

    @classmethod
    def of(cls, entries: list[tuple[int, int, float]], shape: tuple[int, int]) -> _Rows:
        columns = np.array(entries, dtype=np.float64).reshape(-1, 3)
        return cls(columns[:, 0].astype(np.int64), columns[:, 1].astype(np.int64), columns[:, 2], shape)

    def widened(self, num_columns: int) -> _Rows:
        """With more columns, all zero."""
        return replace(self, shape=(self.shape[0], self.shape[1] + num_columns))

    def above(self, other: _Rows) -> _Rows:
        """Both, one above the other."""
        return _Rows(
            np.concatenate([self.row, other.row + self.shape[0]]),
            np.concatenate([self.column, other.column]),
            np.concatenate([self.value, other.value]),
            (self.shape[0] + other.shape[0], self.shape[1]),
        )


class _Model:
    """Sparse rows over the variables a[c,t], b[c,v] (bytes in units of `unit`) and then T (seconds in units of `time`)."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.active = [c for c, nodes in enumerate(net.targets) if nodes]
        total = float(sum(net.classes[c].nbytes for c in self.active))
        self.unit = total / len(self.active)
        self.rate = float(np.mean([w.bandwidth for w in net.topology.workers]))
        self.time = self.unit / self.rate
        self.leave = [(c, t) for c in self.active for t in net.classes[c].holders]
        self.enter = [(c, v) for c in self.active for v in net.targets[c]]
        self.num_flows = len(self.leave) + len(self.enter)

    def equalities(self) -> tuple[_Rows, FloatArray]:
        row_of = {c: i for i, c in enumerate(self.active)}
        rows = [2 * row_of[c] for c, _ in self.leave] + [2 * row_of[c] + 1 for c, _ in self.enter]
        entries = [(row, column, 1.0) for column, row in enumerate(rows)]
        sizes = np.array([self.net.classes[c].nbytes / self.unit for c in self.active])
        return _Rows.of(entries, (2 * len(self.active), self.num_flows + 1)), np.repeat(sizes, 2)

    def links(self) -> tuple[_Rows, FloatArray]:
        """Rows flow - bandwidth * T <= limit, in the order of `Flow.link_dual`."""
        net = self.net
        entries: list[tuple[int, int, float]] = []
        column_t = self.num_flows
        trainer_row = {t: i for i, t in enumerate(net.topology.trainers)}
        forward_row = {v: len(trainer_row) + i for i, v in enumerate(net.rollout_nodes)}
        ingress_row = {v: len(trainer_row) + len(forward_row) + i for i, v in enumerate(net.rollout_nodes)}
        first_cap = len(trainer_row) + 2 * len(forward_row)
        cap_row = {v: first_cap + i for i, (v, _) in enumerate(net.caps)}
        for j, (_, t) in enumerate(self.leave):
            entries.append((trainer_row[t], j, 1.0))
            if net.node_of[t] in cap_row:
                entries.append((cap_row[net.node_of[t]], j, 1.0))
        for j, (c, v) in enumerate(self.enter, start=len(self.leave)):
            copies = float(len(net.targets[c]) - 1)
            entries.append((forward_row[v], j, copies))
            if v in cap_row:
                entries.append((cap_row[v], j, copies))
        limits = np.zeros(first_cap + len(cap_row))
        for t, row in trainer_row.items():
            entries.append((row, column_t, -net.topology.workers[t].bandwidth / self.rate))
        for v, rate in net.rollout_bandwidth.items():
            entries.append((forward_row[v], column_t, -rate / self.rate))
            entries.append((ingress_row[v], column_t, -rate / self.rate))
            limits[ingress_row[v]] = -net.ingress_bytes[v] / self.unit
        entries += [(cap_row[v], column_t, -rate / self.rate) for v, rate in net.caps]
        return _Rows.of(entries, (len(limits), self.num_flows + 1)), limits

    def balance(self) -> _Rows:
        """Rows over (flows, T, three ratios): load / bandwidth <= ratio * mean, for the second LP.

        Ratios: trainers' egress, rollout nodes' forwarding, rollout nodes' first-copy ingress.
        """
        net, n = self.net, self.num_flows
        trainers = net.topology.trainers
        row_of_node = {v: i for i, v in enumerate(net.rollout_nodes)}
        num_nodes = len(row_of_node)
        speeds = [net.topology.workers[t].bandwidth for t in trainers] + 2 * list(net.rollout_bandwidth.values())
        rows = [list(trainers).index(t) for _, t in self.leave]
        rows += [len(trainers) + row_of_node[v] for _, v in self.enter]
        rows += [len(trainers) + num_nodes + row_of_node[v] for _, v in self.enter]
        columns = [*range(n), *range(len(self.leave), n)]
        weights = np.array(
            [1.0] * len(self.leave) + [float(len(net.targets[c]) - 1) for c, _ in self.enter] + [1.0] * len(self.enter)
        )
        groups = np.repeat([0, 1, 2], [len(trainers), num_nodes, num_nodes])
        sizes = {c: net.classes[c].nbytes / self.unit for c in self.active}
        sent = sum(sizes.values())
        totals = np.array([sent, sum(s * (len(net.targets[c]) - 1) for c, s in sizes.items()), sent])
        speed = np.array(speeds) / self.rate
        means = totals / np.array([speed[groups == g].sum() for g in range(3)])
        used = means[groups] > 0
        scale = np.where(used, 1.0 / np.where(used, means[groups] * speed, 1.0), 0.0)
        flows = zip(rows, columns, (weights * scale[rows]).tolist(), strict=True)
        ratios = zip(range(len(speed)), (n + 1 + groups).tolist(), [-1.0] * len(speed), strict=True)
        return _Rows.of([*flows, *ratios], (len(speed), n + 4))


def _minimise(
    cost: FloatArray, at_most: tuple[_Rows, FloatArray], equal: tuple[_Rows, FloatArray], most: FloatArray
) -> tuple[FloatArray, float, FloatArray]:
    """Solution, value and multipliers of the <= rows, by HiGHS's dual simplex: interior points double the pairs.

    most: upper bound of each variable; all are non-negative.
    """
    from scipy.optimize import linprog  # a second's import that only the one worker that plans needs
    from scipy.sparse import csr_matrix

    left, right = (csr_matrix((m.value, (m.row, m.column)), shape=m.shape) for m, _ in (at_most, equal))
    bounds = np.stack([np.zeros_like(most), most], axis=1)
    found = linprog(cost, A_ub=left, b_ub=at_most[1], A_eq=right, b_eq=equal[1], bounds=bounds, method="highs-ds")
    if found.status != 0:
        raise InternalError(f"the routing LP ended with status {found.status}: {found.message}")
    return found.x, float(found.fun), found.ineqlin.marginals


def solve(net: Network) -> Flow:
    """Least time of the busiest link, and among the flows that reach it one that is balanced (design 4, second LP)."""
    num_links = len(net.topology.trainers) + 2 * len(net.rollout_nodes) + len(net.caps)
    if not any(net.targets):
        none: tuple[tuple[tuple[int, float], ...], ...] = tuple(() for _ in net.classes)
        return Flow(seconds=0.0, leave=none, enter=none, link_dual=(0.0,) * num_links)
    model = _Model(net)
    n = model.num_flows
    equal, sizes = model.equalities()
    links, limits = model.links()
    cost = np.repeat([0.0, 1.0], [n, 1])
    _, best, marginals = _minimise(cost, (links, limits), (equal, sizes), np.full(n + 1, np.inf))
    rows = links.widened(3).above(model.balance())
    room = np.concatenate([limits, np.zeros(rows.shape[0] - len(limits))])
    most = np.concatenate([np.full(n, np.inf), [best * (1 + _SLACK) + 1e-9], np.full(3, np.inf)])
    cost = np.repeat([0.0, 1.0], [n + 1, 3])
    balanced, _, _ = _minimise(cost, (rows, room), (equal.widened(3), sizes), most)
    flows = balanced[:n] * model.unit
    return Flow(
        seconds=best * model.time,
        leave=_by_class(net, model.leave, flows[: len(model.leave)]),
        enter=_by_class(net, model.enter, flows[len(model.leave) :]),
        # minimising, SciPy's multipliers of <= rows are negative, and bandwidths were in units of `rate`
        link_dual=tuple((np.maximum(-marginals, 0.0) / model.rate).tolist()),
    )


def _by_class(
    net: Network, pairs: list[tuple[int, int]], flows: FloatArray
) -> tuple[tuple[tuple[int, float], ...], ...]:
    found: list[list[tuple[int, float]]] = [[] for _ in net.classes]
    for (c, where), flow in zip(pairs, flows.tolist(), strict=True):
        if flow > 0:
            found[c].append((where, flow))
    return tuple(tuple(sorted(f)) for f in found)
