"""The routing LP where groups of nodes hang on slow uplinks: by hand, and against an LP over every way a byte can spread."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import linprog
from tests.unit.plan_cases import rollout, topology, trainer

from weightbridge.errors import InternalError
from weightbridge.plan.bound import certified
from weightbridge.plan.flow import solve
from weightbridge.plan.network import Network
from weightbridge.plan.plan import ReplicaClass
from weightbridge.plan.topology import NodeGroup, Role
from weightbridge.plan.verify_bounds import proven_seconds


def network(workers, *classes, groups=(), node_bandwidth=()):
    groups = tuple(NodeGroup(name=name, nodes=nodes, bandwidth=rate) for name, nodes, rate in groups)
    return Network(
        topology=topology(*workers, node_bandwidth=node_bandwidth, groups=groups),
        classes=tuple(ReplicaClass(holders=h, needers=n, nbytes=b) for h, n, b in classes),
    )


def bound(net):
    flow = solve(net)
    bounds = certified(net, flow, flow.seconds)
    assert bounds.link_bound_seconds == pytest.approx(flow.seconds, rel=1e-6)
    assert bounds.link_bound_seconds <= flow.seconds * (1 + 1e-9)
    return flow, bounds


@pytest.mark.parametrize("groups", [(), [("g", ("n0", "n1"), 1e9)]])
def test_classes_within_the_solvers_tolerance_are_not_lost(groups):
    workers = [trainer(0, "a"), trainer(1, "b"), *(rollout(f"e{i}", 0, f"n{i}") for i in range(4))]
    small = [((0, 1), (2, 3, 4), 2), ((1,), (2, 3, 5), 512), ((0, 1), (4, 5), 3)]
    net = network(workers, ((0, 1), (2, 3, 4, 5), 10**12), *small, groups=groups)
    flow, _ = bound(net)
    for k, nodes, leave, enter in zip(net.classes, net.targets, flow.leave, flow.enter, strict=True):
        assert sum(x for _, x in leave) == pytest.approx(k.nbytes)
        assert sum(x for _, x in enter) == pytest.approx(k.nbytes)
        assert {t for t, _ in leave} <= set(k.holders)
        assert {v for v, _ in enter} <= set(nodes)


# --- every way a byte can spread ----------------------------------------------------------------------------------------


class Spreading:
    """What one byte of each class loads, link by link, for each tree it may take: written from the rules, not the LP.

    A link is ("out" | "in", kind, name); domain: name of a node's group, "" for the nodes in none.
    """

    def __init__(self, net):
        topo = net.topology
        self.topo, self.classes = topo, net.classes
        self.domain = dict.fromkeys(topo.nodes, "") | {n: g.name for g in topo.groups for n in g.nodes}
        self.rate = {}
        for t in topo.trainers:
            self.rate["out", "worker", t] = topo.workers[t].bandwidth
        for node in dict.fromkeys(topo.workers[w].node for w in topo.rollouts):
            for way in ("out", "in"):
                self.rate[way, "rollouts", node] = topo.bandwidth_of_node(node, Role.ROLLOUT)
        for node, rate in topo.node_bandwidth:
            self.rate["out", "node", node] = rate
        for g in topo.groups:
            for way in ("out", "in"):
                self.rate[way, "group", g.name] = g.bandwidth

    def domains(self, c):
        workers = self.topo.workers
        need = {workers[w].node for w in self.classes[c].needers} - {workers[t].node for t in self.classes[c].holders}
        found = {}
        for node in sorted(need):
            found.setdefault(self.domain[node], []).append(node)
        return found

    def trees(self, c):
        """(trainer, first node, {other domain: gateway})"""
        domains = self.domains(c)
        for t, home in product(self.classes[c].holders, domains):
            others = [d for d in domains if d != home]
            for v, *gateways in product(domains[home], *(domains[d] for d in others)):
                yield t, v, dict(zip(others, gateways, strict=True))

    def loads(self, c, t, v, gateways):
        """Link -> copies of the byte that cross it."""
        domains, home = self.domains(c), self.topo.workers[t].node
        edges = [(("worker", t), home, v)]
        edges += [(("rollouts", v), v, g) for g in gateways.values()]
        for root in (v, *gateways.values()):
            edges += [(("rollouts", root), root, leaf) for leaf in domains[self.domain[root]] if leaf != root]
        found = {}
        for (kind, name), src, dst in edges:
            crossed = [("out", kind, name), ("out", "node", src), ("in", "rollouts", dst)]
            if self.domain[src] != self.domain[dst]:
                crossed += [("out", "group", self.domain[src]), ("in", "group", self.domain[dst])]
            for link in crossed:
                if link in self.rate:
                    found[link] = found.get(link, 0) + 1
        return found

    def best_seconds(self):
        """The LP with one variable a tree, dense."""
        links = {link: i for i, link in enumerate(self.rate)}
        active = [c for c in range(len(self.classes)) if self.domains(c)]
        columns = [(c, self.loads(c, *tree)) for c in active for tree in self.trees(c)]
        total = sum(self.classes[c].nbytes for c in active)
        at_most, equal = np.zeros((len(links), len(columns) + 1)), np.zeros((len(active), len(columns) + 1))
        for j, (c, loads) in enumerate(columns):
            equal[active.index(c), j] = 1.0
            for link, copies in loads.items():
                at_most[links[link], j] = copies
        at_most[:, -1] = [-rate / 1e9 for rate in self.rate.values()]
        sizes = [self.classes[c].nbytes / total for c in active]
        found = linprog([0.0] * len(columns) + [1.0], at_most, np.zeros(len(links)), equal, sizes, method="highs")
        return found.fun * total / 1e9

    def seconds_of(self, flow):
        """Time of the busiest link when each byte takes the tree that the flow's streams give its place in the stream."""
        load = dict.fromkeys(self.rate, 0.0)
        for c in range(len(self.classes)):
            nbytes = self.classes[c].nbytes
            places = sorted({0.0, *ends(flow.leave[c]), *ends(flow.enter[c])})
            entered = dict.fromkeys(flow.gateways[c], 0.0)  # by the place in the list of gateways of each domain
            for lo, hi in pairwise(places):
                if hi - lo < 1e-6 * nbytes:
                    continue
                t, v = at(flow.leave[c], lo), at(flow.enter[c], lo)
                self.spread(load, c, t, self.topo.nodes[v], hi - lo, flow.gateways[c], entered)
        return max(nbytes / self.rate[link] for link, nbytes in load.items())

    def spread(self, load, c, t, v, nbytes, gateways, entered):
        others = [d for d in gateways if self.name(d) != self.domain[v]]
        while nbytes > 1e-6:
            step, chosen = nbytes, {}
            for d in others:
                node, left = next_gateway(gateways[d], entered[d])
                step, chosen[self.name(d)] = min(step, left), self.topo.nodes[node]
            for d in others:
                entered[d] += step
            for link, copies in self.loads(c, t, v, chosen).items():
                load[link] += copies * step
            nbytes -= step

    def name(self, d):
        return self.topo.groups[d].name if d < len(self.topo.groups) else ""


def ends(amounts):
    return np.cumsum([x for _, x in amounts]).tolist()


def at(amounts, place):
    return next(
        (who for (who, _), end in zip(amounts, ends(amounts), strict=True) if place < end - 1e-6), amounts[-1][0]
    )


def next_gateway(amounts, place):
    for (node, _), end in zip(amounts, ends(amounts), strict=True):
        if place < end - 1e-6:
            return node, end - place
    return amounts[-1][0], np.inf


def random_network(seed):
    """Two or three groups of one or two nodes, some nodes in none, trainers anywhere; rates and sizes are uneven."""
    dice = random.Random(seed)
    nodes = [f"n{i}" for i in range(dice.randint(3, 6))]
    num_groups = dice.randint(2, 3)
    home = {n: dice.randrange(num_groups + 1) for n in nodes}
    rates = (0.5e9, 1e9, 2.5e9, 4e9)
    trainers = [trainer(i, dice.choice([*nodes, "t0"]), dice.choice(rates)) for i in range(dice.randint(1, 3))]
    rollouts = [rollout(f"e{i}", 0, n, dice.choice(rates)) for i, n in enumerate(nodes)]
    here = {w.node for w in (*trainers, *rollouts)}
    home |= {"t0": dice.randrange(num_groups + 1)} if "t0" in here else {}
    members = {g: tuple(n for n in home if home[n] == g) for g in range(num_groups)}
    groups = [(f"g{g}", nodes, dice.choice((0.2e9, 0.7e9, 1.5e9))) for g, nodes in members.items() if nodes]
    caps = tuple((n, dice.choice(rates)) for n in sorted(here) if dice.random() < 0.2)
    first = len(trainers)
    classes = [
        (
            tuple(sorted(dice.sample(range(first), dice.randint(1, first)))),
            tuple(sorted(dice.sample(range(first, first + len(nodes)), dice.randint(1, len(nodes))))),
            dice.randrange(1_000_000, 30_000_000),
        )
        for _ in range(dice.randint(1, 4))
    ]
    return network([*trainers, *rollouts], *classes, groups=groups, node_bandwidth=caps)


def busy_network(seed):
    """Random too, but every node has a trainer whose bytes, for a fast node that needs nothing else, compete with what it
    forwards."""
    dice = random.Random(f"busy {seed}")
    nodes = [f"n{i}" for i in range(dice.randint(3, 5))]
    trainers = [trainer(0, "t0", 4e9), *(trainer(1 + i, n, 2e9) for i, n in enumerate(nodes))]
    rollouts = [*(rollout(f"e{i}", 0, n, 2e9) for i, n in enumerate(nodes)), rollout("sink", 0, "sink", 30e9)]
    west, east = nodes[: dice.randint(1, 2)], nodes[2 : 2 + dice.randint(1, 2)]
    dice.choice([west, east, []]).append("t0")
    groups = [
        ("west", tuple(west), dice.choice((2e9, 30e9, 30e9))),
        ("east", tuple(east), dice.choice((2e9, 30e9, 30e9))),
    ]
    caps = tuple((n, dice.choice((0.8e9, 1e9, 1.2e9))) for n in nodes)
    first = len(trainers)
    classes = [((0,), tuple(range(first, first + len(nodes))), dice.randrange(10_000_000, 30_000_000))]
    classes += [((1 + i,), (first + len(nodes),), dice.randrange(10_000_000, 25_000_000)) for i in range(len(nodes))]
    return network([*trainers, *rollouts], *classes, groups=groups, node_bandwidth=caps)


NETWORKS = [*map(random_network, range(40)), *map(busy_network, range(16))]


@pytest.mark.parametrize("first", range(0, len(NETWORKS), 8))
def test_the_lp_equals_one_over_all_trees_and_its_flow_keeps_what_it_promises(first):
    for net in NETWORKS[first : first + 8]:
        spreading = Spreading(net)
        if not any(net.targets):
            continue
        flow, _ = bound(net)
        assert flow.seconds == pytest.approx(spreading.best_seconds(), rel=1e-6)
        assert spreading.seconds_of(flow) <= flow.seconds * (1 + 2e-6)


def links_of(net):
    """The links of the certificate, in its order."""
    topo = net.topology
    nodes = [topo.nodes[v] for v in net.rollout_nodes]
    capped = [n for n in topo.nodes if n in dict(topo.node_bandwidth)]
    found = [("out", "worker", t) for t in topo.trainers] + [("out", "rollouts", n) for n in nodes]
    found += [("in", "rollouts", n) for n in nodes] + [("out", "node", n) for n in capped]
    return found + [(way, "group", g.name) for way in ("out", "in") for g in topo.groups]


@pytest.mark.parametrize("first", range(0, len(NETWORKS), 8))
def test_any_link_multipliers_prove_what_the_cheapest_trees_cost(first):
    """By duality the multipliers of the links prove sum n_c * (the least that a tree of c costs): whatever they are."""
    for number, net in enumerate(NETWORKS[first : first + 8], start=first):
        spreading, dice, links = Spreading(net), random.Random(number), links_of(net)
        price = {link: dice.random() / spreading.rate[link] if dice.random() < 0.4 else 0.0 for link in links}
        weight = sum(spreading.rate[link] * m for link, m in price.items())
        if not any(net.targets) or weight == 0:
            continue
        price = {link: m / weight for link, m in price.items()}
        cheapest = 0.0
        for c in range(len(net.classes)):
            costs = [
                sum(price.get(link, 0.0) * n for link, n in spreading.loads(c, *tree).items())
                for tree in spreading.trees(c)
            ]
            cheapest += net.classes[c].nbytes * min(costs, default=0.0)
        flow = replace(solve(net, balanced=False), link_dual=tuple(price[link] for link in links))
        bounds = certified(net, flow, 1.0)
        assert bounds.link_bound_seconds == pytest.approx(cheapest, rel=1e-9)
        assert proven(net, bounds.dual) == pytest.approx(cheapest, rel=1e-9)
        check_each_counts(net, bounds.dual, len(net.classes), len(links))


def proven(net, dual):
    plan = SimpleNamespace(topology=net.topology, classes=net.classes, bounds=SimpleNamespace(dual=dual))
    return proven_seconds(plan, {net.topology.nodes[v]: n for v, n in net.ingress_bytes.items()})


def check_each_counts(net, dual, num_classes, num_links):
    """The multipliers of classes and domains are the largest feasible, and those of links weigh all they may."""
    step = 1e-3 * max(dual)
    for i in range(len(dual)):
        more = (*dual[:i], dual[i] + step, *dual[i + 1 :])
        if i < num_classes and not net.targets[i]:
            assert proven(net, more) == proven(
                net, dual
            )  # a class that nobody needs over the network counts for nothing
        else:
            with pytest.raises(InternalError, match="weigh" if num_classes <= i < num_classes + num_links else "allow"):
                proven(net, more)


def test_the_random_networks_reach_what_they_are_meant_to_reach():
    """The tests above would prove nothing about uplinks if none was ever busy, or no byte needed in two domains."""
    found = dict.fromkeys(("wide", "uplink binds", "out", "in", "node out", "gateways", "trainers in two domains"), 0)
    for net in NETWORKS:
        if not any(net.targets):
            continue
        flow, topo = solve(net), net.topology
        free = solve(replace(net, topology=topology(*topo.workers, node_bandwidth=topo.node_bandwidth)))
        busy = [link for link, m in zip(links_of(net), flow.link_dual, strict=True) if m > 0]
        found["wide"] += any(len(d) > 1 for d in net.target_domains)
        found["uplink binds"] += flow.seconds > free.seconds * 1.001
        found["out"] += any((way, kind) == ("out", "group") for way, kind, _ in busy)
        found["in"] += any((way, kind) == ("in", "group") for way, kind, _ in busy)
        found["node out"] += any((way, kind) == ("out", "node") for way, kind, _ in busy)
        found["gateways"] += any(len(v) > 1 for g in flow.gateways for v in g.values())
        homes = [{net.domain_of[net.node_of[t]] for t in c.holders} for c in net.classes]
        both = zip(homes, net.target_domains, strict=True)
        found["trainers in two domains"] += any(len(h) > 1 and len(d) > 1 for h, d in both)
    assert all(n >= 6 for n in found.values()), str(found)
