"""The routing LP: how many bytes of each class leave each trainer, and through which nodes they spread.

Let x[c,t,v] be the bytes of class c that trainer t sends to first node v, which forwards them once to each of the other
k - 1 nodes of its domain that need c. A domain is a group of nodes behind an uplink, or all nodes in no group. Where c is
needed in several domains D_c, v also sends one copy to a *gateway* in each of the others, which forwards it inside: so each
byte enters each domain once. A trainer's link sees only a[c,t] = sum_v x[c,t,v], a node's links only f[c,v] = sum_t x[c,t,v]
and the bytes w[c,v] for which it is gateway, an uplink only z[c,d,e], the sum of x over the trainers in d and the first
nodes in e. And any a, f and z that agree in their sums belong to some x: x = z a f / (the a in d) (the f in e) within each
pair of domains. Which bytes a gateway passes on is free as well, as long as they add up to those not first in its domain.
So the LP is solved exactly in these families, T + V variables a class instead of T times V; with one domain neither w nor z
exist.

A node that has a holder of a class among its own trainers is served inside the node and is no network node of the class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightbridge.plan.linear import FloatArray, Int64Array, Rows, minimise
from weightbridge.plan.network import Network

__all__ = ["Flow", "solve"]

_SLACK = 1e-7  # relative room the second LP leaves around the first optimum, above the solver's tolerances
_NOISE = 1e-9  # share of a class below which a flow is rounding of the solver's
_KEPT = 0.9  # a class of whose bytes less than this share is in the solution was too small for the solver

Amounts = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Flow:
    """seconds: the busiest link's time. leave[c]: (trainer, bytes). enter[c]: (first node, bytes).

    Both are in the order of the class stream: what lies at the same place of both is one flow. With several domains a node
    may be there once for each domain of trainers. gateways[c]: domain -> (gateway, bytes), in the order of the stream
    without what is first in that domain; empty for a class needed in one domain.
    link_dual: multipliers of the link rows: trainers' egress, rollout nodes' forwarding, rollout nodes' ingress, node
    caps, uplinks out, uplinks in.
    """

    seconds: float
    leave: tuple[Amounts, ...]
    enter: tuple[Amounts, ...]
    gateways: tuple[dict[int, Amounts], ...]
    link_dual: tuple[float, ...]


def solve(net: Network, *, balanced: bool = True) -> Flow:
    """Least time of the busiest link, and among the flows that reach it one that is balanced: a second linear program, with
    the first optimum held.

    balanced: False leaves out the second LP, for studies of what it is worth.
    """
    if not any(net.targets):
        none: tuple[Amounts, ...] = tuple(() for _ in net.classes)
        num_links = len(net.topology.trainers) + 2 * len(net.rollout_nodes) + len(net.caps) + 2 * len(net.uplinks)
        nowhere: tuple[dict[int, Amounts], ...] = tuple({} for _ in net.classes)
        return Flow(seconds=0.0, leave=none, enter=none, gateways=nowhere, link_dual=(0.0,) * num_links)
    model = _Model(net)
    n = model.num_flows
    equal, sizes = model.equalities()
    links, limits = model.links()
    cost = np.repeat([0.0, 1.0], [n, 1])
    found, best, marginals = minimise(cost, (links, limits), (equal, sizes), np.full(n + 1, np.inf))
    if balanced:
        ratios = model.balance()
        extra = ratios.shape[1] - (n + 1)
        rows = links.widened(extra).above(ratios)
        room = np.concatenate([limits, np.zeros(rows.shape[0] - len(limits))])
        most = np.concatenate([np.full(n, np.inf), [best * (1 + _SLACK) + 1e-9], np.full(extra, np.inf)])
        cost = np.concatenate([model.uplink_use(links, best), [0.0], np.ones(extra)])
        found, _, _ = minimise(cost, (rows, room), (equal.widened(extra), sizes), most)
    leave, enter, gateways = model.streams(found[:n] * model.unit)
    return Flow(
        seconds=best * model.time,
        leave=leave,
        enter=enter,
        gateways=gateways,
        # minimising, SciPy's multipliers of <= rows are negative, and bandwidths were in units of `rate`
        link_dual=tuple((np.maximum(-marginals, 0.0) / model.rate).tolist()),
    )


@dataclass(frozen=True, slots=True)
class _Family:
    """Variables of one kind. column: [n]. of: [n] class. at: [n] worker, node or, for z, domain that sends.

    domain: [n] where `at` is; for z the domain that receives.
    """

    column: Int64Array
    of: Int64Array
    at: Int64Array
    domain: Int64Array


class _Model:
    """Sparse rows over a[c,t], f[c,v], w[c,v], z[c,d,e] (bytes in units of `unit`) and then T (seconds in units of `time`)."""

    def __init__(self, net: Network) -> None:
        self.net = net
        self.active = [c for c, nodes in enumerate(net.targets) if nodes]
        self.nbytes = np.array([c.nbytes for c in net.classes], dtype=np.float64)
        self.unit = float(self.nbytes[self.active].sum()) / len(self.active)
        self.rate = float(np.mean([w.bandwidth for w in net.topology.workers]))
        self.time = self.unit / self.rate
        self.trainer_domain = {t: net.domain_of[net.node_of[t]] for t in net.topology.trainers}
        domains, home = net.target_domains, net.domain_of
        wide = [c for c in self.active if len(domains[c]) > 1]
        senders = {c: sorted({self.trainer_domain[t] for t in net.classes[c].holders}) for c in wide}
        self.num_flows = 0
        self.leave = self._family((c, t, self.trainer_domain[t]) for c in self.active for t in net.classes[c].holders)
        self.enter = self._family((c, v, home[v]) for c in self.active for v in net.targets[c])
        self.gateway = self._family((c, v, home[v]) for c in wide for v in net.targets[c])
        self.couple = self._family((c, d, e) for c in wide for d in senders[c] for e in domains[c])
        shape = (len(net.classes), len(net.uplinks) + 1)
        # per class and domain: targets there, and the domain's place among those that need and those that send the class
        self.num_targets, self.place, self.sender_place = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        for c in self.active:
            for i, (d, nodes) in enumerate(domains[c].items()):
                self.num_targets[c, d], self.place[c, d] = len(nodes), i
            self.sender_place[c, senders.get(c, [])] = range(len(senders.get(c, [])))
        self.num_domains = np.array([len(d) for d in domains], dtype=np.int64)
        self.num_senders = np.array([len(senders.get(c, ())) for c in range(len(domains))], dtype=np.int64)

    def _family(self, keys: Iterable[tuple[int, int, int]]) -> _Family:
        """The next columns, one for each (class, at, domain)."""
        of, at, domain = np.array([*keys], dtype=np.int64).reshape(-1, 3).T
        first = self.num_flows
        self.num_flows += len(of)
        return _Family(np.arange(first, self.num_flows), of, at, domain)

    def _copies(self, family: _Family, *, first: bool) -> Int64Array:
        """Copies that a first node, or a gateway, sends on of each byte of the family's variables."""
        inside = self.num_targets[family.of, family.domain] - 1
        return inside + self.num_domains[family.of] - 1 if first else inside

    def equalities(self) -> tuple[Rows, FloatArray]:
        """Per class: what leaves, then per domain that needs it what enters there, both n_c; and z's sums on both sides."""
        place, domains, senders = self.place, self.num_domains, self.num_senders
        wide = domains > 1
        num_rows = np.where(domains > 0, 1 + domains + np.where(wide, senders + domains, 0), 0)
        base = np.cumsum(num_rows) - num_rows
        right = np.zeros(int(num_rows.sum()))
        for c in self.active:
            right[base[c] : base[c] + 1 + domains[c]] = self.nbytes[c] / self.unit
        a, f, w, z = self.leave, self.enter, self.gateway, self.couple
        entries = [(base[a.of], a.column, 1.0)]
        entries += [(base[g.of] + 1 + place[g.of, g.domain], g.column, 1.0) for g in (f, w)]
        sent, entered = base + 1 + domains, base + 1 + domains + senders
        for g, sign, rows in (
            (a, 1.0, sent[a.of] + self.sender_place[a.of, a.domain]),
            (z, -1.0, sent[z.of] + self.sender_place[z.of, z.at]),
            (f, 1.0, entered[f.of] + place[f.of, f.domain]),
            (z, -1.0, entered[z.of] + place[z.of, z.domain]),
        ):
            keep = wide[g.of]
            entries.append((rows[keep], g.column[keep], sign))
        return Rows.of(entries, (len(right), self.num_flows + 1)), right

    def links(self) -> tuple[Rows, FloatArray]:
        """Rows flow - bandwidth * T <= limit, in the order of `Flow.link_dual`."""
        net = self.net
        trainers, nodes, caps = net.topology.trainers, net.rollout_nodes, net.caps
        trainer_row, forward_row = np.zeros(len(net.topology.workers), dtype=np.int64), np.zeros_like(net.domain_of)
        trainer_row[[*trainers]] = range(len(trainers))
        forward_row[[*nodes]] = range(len(trainers), len(trainers) + len(nodes))
        first_cap = len(trainers) + 2 * len(nodes)
        cap_row = np.full(len(net.domain_of), -1, dtype=np.int64)
        cap_row[[v for v, _ in caps]] = range(first_cap, first_cap + len(caps))
        first_uplink = first_cap + len(caps)
        node_of = np.array(net.node_of, dtype=np.int64)
        loads = [(self.leave, trainer_row[self.leave.at], node_of[self.leave.at], np.ones(len(self.leave.of)))]
        for g, first in ((self.enter, True), (self.gateway, False)):
            loads.append((g, forward_row[g.at], g.at, self._copies(g, first=first).astype(np.float64)))
        entries: list[tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]] = []
        for g, rows, at, copies in loads:
            capped = cap_row[at] >= 0
            entries += [(rows, g.column, copies), (cap_row[at][capped], g.column[capped], copies[capped])]
        entries += self._uplinks(first_uplink)
        num_uplinks = len(net.uplinks)
        speeds = [net.topology.workers[t].bandwidth for t in trainers] + 2 * [net.rollout_bandwidth[v] for v in nodes]
        speeds += [*(rate for _, rate in caps), *2 * net.uplinks]
        entries.append((np.arange(len(speeds)), self.num_flows, -np.array(speeds) / self.rate))
        limits = np.zeros(len(speeds))
        limits[len(trainers) + len(nodes) : first_cap] = [-net.ingress_bytes[v] / self.unit for v in nodes]
        limits[first_uplink + num_uplinks :] = [-nbytes / self.unit for nbytes in net.group_bytes]
        return Rows.of(entries, (len(speeds), self.num_flows + 1)), limits

    def _uplinks(self, first_row: int) -> list[tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]]:
        """Out: what its trainers send to other domains, and the copies its first nodes send there. In: N_d, less what its
        own trainers send to first nodes in it."""
        num_groups = len(self.net.uplinks)
        out, into = np.arange(num_groups + 1) + first_row, np.arange(num_groups + 1) + first_row + num_groups
        a, f, z = self.leave, self.enter, self.couple
        only = np.array([min(d, default=-1) for d in self.net.target_domains], dtype=np.int64)  # where needed in one
        narrow = self.num_domains[a.of] == 1
        entries: list[tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]] = []
        for column, source, target in (
            (a.column[narrow], a.domain[narrow], only[a.of[narrow]]),
            (z.column, z.at, z.domain),
        ):
            away, inside = (source != target) & (source < num_groups), (source == target) & (source < num_groups)
            entries += [(out[source[away]], column[away], 1.0), (into[source[inside]], column[inside], -1.0)]
        onward = (self.num_domains[f.of] > 1) & (f.domain < num_groups)
        entries.append((out[f.domain[onward]], f.column[onward], self.num_domains[f.of[onward]] - 1.0))
        return entries

    def uplink_use(self, links: Rows, best: float) -> FloatArray:
        """[num_flows] cost in the second LP: mean share of the bound's time that uplinks are busy, for no needless crossing."""
        num_rows = 2 * len(self.net.uplinks)
        first_row = links.shape[0] - num_rows
        mine = (links.row >= first_row) & (links.column < self.num_flows)
        full = np.array(2 * self.net.uplinks) / self.rate * best * num_rows
        cost = np.zeros(self.num_flows)
        np.add.at(cost, links.column[mine], links.value[mine] / full[links.row[mine] - first_row])
        return cost

    def balance(self) -> Rows:
        """Rows over (flows, T, ratios): load / bandwidth <= ratio * mean, for the second LP.

        Ratios: trainers' egress, rollout nodes' forwarding, and per domain what enters its rollout nodes from outside it.
        """
        net, n = self.net, self.num_flows
        trainers, nodes = net.topology.trainers, net.rollout_nodes
        domains = sorted({net.domain_of[v] for v in nodes})
        row_of_node = np.zeros(len(net.domain_of), dtype=np.int64)
        row_of_node[[*nodes]] = range(len(nodes))
        row_of_trainer = np.zeros(len(net.topology.workers), dtype=np.int64)
        row_of_trainer[[*trainers]] = range(len(trainers))
        speed = np.array([net.topology.workers[t].bandwidth for t in trainers] + 2 * [*net.rollout_bandwidth.values()])
        speed = speed / self.rate
        ratio = np.repeat([0, 1], [len(trainers), len(nodes)])
        ratio = np.append(ratio, [2 + domains.index(net.domain_of[v]) for v in nodes])
        sizes = {c: net.classes[c].nbytes / self.unit for c in self.active}
        totals = [sum(sizes.values()), sum(s * (len(net.targets[c]) - 1) for c, s in sizes.items())]
        totals += [sum(s for c, s in sizes.items() if d in net.target_domains[c]) for d in domains]
        means = np.array(totals) / np.array([speed[ratio == g].sum() for g in range(len(totals))])
        used = means[ratio] > 0
        scale = np.where(used, 1.0 / np.where(used, means[ratio] * speed, 1.0), 0.0)
        forward, enter = row_of_node + len(trainers), row_of_node + len(trainers) + len(nodes)
        a, f, w = self.leave, self.enter, self.gateway
        loads = [(row_of_trainer[a.at], a, np.ones(len(a.of), dtype=np.int64))]
        loads += [(forward[g.at], g, self._copies(g, first=g is f)) for g in (f, w)]
        loads += [(enter[g.at], g, np.ones(len(g.of), dtype=np.int64)) for g in (f, w)]
        entries = [(rows, g.column, weights * scale[rows]) for rows, g, weights in loads]
        entries.append((np.arange(len(speed)), n + 1 + ratio, np.full(len(speed), -1.0)))
        return Rows.of(entries, (len(speed), n + 1 + len(totals)))

    def streams(
        self, flows: FloatArray
    ) -> tuple[tuple[Amounts, ...], tuple[Amounts, ...], tuple[dict[int, Amounts], ...]]:
        """`Flow.leave`, `.enter` and `.gateways` of a solution, in bytes.

        A class so small that all of it is within the solver's tolerances may be missing there; it goes any one way.
        """
        a, f, w, z = (self._found(family, flows) for family in (self.leave, self.enter, self.gateway, self.couple))
        leave: list[Amounts] = []
        enter: list[Amounts] = []
        gateways: list[dict[int, Amounts]] = []
        for c, (k, domains) in enumerate(zip(self.net.classes, self.net.target_domains, strict=True)):
            leaving: Amounts = tuple((t, x) for _, t, x in a[c])
            entering: Amounts = tuple((v, x) for _, v, x in f[c])
            passing: dict[int, Amounts] = {}
            if len(domains) > 1:
                first = {d: [(v, x) for e, v, x in f[c] if e == d] for d in domains}
                entering = _in_order(sorted((d, e, x) for e, d, x in z[c]), first)
                passing = {d: tuple((v, x) for e, v, x in w[c] if e == d) for d in domains}
            if domains and min(sum(x for _, x in side) for side in (leaving, entering)) < _KEPT * k.nbytes:
                targets = self.net.targets[c]
                leaving = ((k.holders[c % len(k.holders)], float(k.nbytes)),)
                entering = ((targets[c % len(targets)], float(k.nbytes)),)
            leave.append(leaving)
            enter.append(entering)
            gateways.append(passing)
        return tuple(leave), tuple(enter), tuple(gateways)

    def _found(self, family: _Family, flows: FloatArray) -> list[list[tuple[int, int, float]]]:
        """Per class the (domain, at, bytes) that are more than noise, ascending."""
        found: list[list[tuple[int, int, float]]] = [[] for _ in self.net.classes]
        amount = flows[family.column]
        keep = np.flatnonzero(amount > _NOISE * self.nbytes[family.of])
        columns = (x[keep].tolist() for x in (family.of, family.domain, family.at, amount))
        for c, domain, at, nbytes in zip(*columns, strict=True):
            found[c].append((domain, at, nbytes))
        return [sorted(entries) for entries in found]


def _in_order(blocks: list[tuple[int, int, float]], first: dict[int, list[tuple[int, float]]]) -> Amounts:
    """First nodes in the order of the stream: for each (sending domain, receiving domain, bytes) the next ones there."""
    found: list[tuple[int, float]] = []
    for _, domain, nbytes in blocks:
        queue = first[domain]
        while nbytes > 0 and queue:
            v, left = queue.pop(0)
            taken = min(left, nbytes)
            found.append((v, taken))
            nbytes -= taken
            if left > taken:
                queue.insert(0, (v, left - taken))
    return tuple(found)
