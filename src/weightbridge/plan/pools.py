"""Pools: classes with equal target nodes, and how many bytes of each enter at which node first.

For the LP's links it does not matter which class of a pool enters at which node, only how many bytes of the pool do. The LP
leaves open still more than that: bytes that many nodes need may enter at few nodes, if these pass on less of what few nodes
need. Each entry worker of the former sends to one worker of every target, and everybody on all targets reads a segment of
it in every round, so the fewer such workers the better.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from weightbridge.plan.filling import cut_points
from weightbridge.plan.flow import Flow
from weightbridge.plan.linear import Rows, minimise
from weightbridge.plan.network import Network

__all__ = ["Block", "Pool", "pools"]

_MORE = 1 / 16
"""A node may get fewer first copies than the LP's if what it gets from other nodes instead grows by no more than this share:
the slots of that stage fill up sooner, so there are as many more rounds."""

_NOISE = 1e-9


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a class stream that enters one domain: all of it, unless the class is needed in several.

    place: its number among those of the class, in the order of the stream.
    """

    class_id: int
    place: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """targets: nodes of one domain, ascending. members: parts of classes. into: bytes that enter at each node first,
    positive."""

    targets: tuple[int, ...]
    members: tuple[Block, ...]
    into: dict[int, float]


def pools(net: Network, flow: Flow, alignment: int) -> tuple[Pool, ...]:
    """All classes that cross the network, by targets and the domain entered. What a node forwards in all is what the LP says.

    alignment: bytes, where streams may be cut.
    """
    found: dict[tuple[tuple[int, ...], int], tuple[list[Block], dict[int, float]]] = {}
    for c, targets in enumerate(net.targets):
        runs = [(d, [*run]) for d, run in groupby(flow.enter[c], key=lambda pair: net.domain_of[pair[0]])]
        ends = (
            cut_points([sum(n for _, n in run) for _, run in runs], net.classes[c].nbytes, alignment) if targets else []
        )
        for place, ((domain, run), lo, hi) in enumerate(zip(runs, [0, *ends], ends, strict=False)):
            if hi > lo:
                there = dict.fromkeys(net.target_domains[c][domain], 0.0)
                members, into = found.setdefault((targets, domain), ([], there))
                members.append(Block(c, place, hi - lo))
                for v, n in run:
                    into[v] += n
    given = [_pool(tuple(into), tuple(members), into) for _, (members, into) in sorted(found.items())]
    return tuple(given if net.uplinks else _concentrated(net, given))


def _pool(targets: tuple[int, ...], members: tuple[Block, ...], into: dict[int, float]) -> Pool:
    total = sum(block.nbytes for block in members)
    kept = {v: n for v, n in into.items() if n > _NOISE * total}
    scale = total / sum(kept.values())
    return Pool(targets=targets, members=members, into={v: n * scale for v, n in kept.items()})


def _concentrated(net: Network, given: list[Pool]) -> list[Pool]:
    """The same totals per pool and per node's forwarding, with what many nodes need entering at few of them."""
    keys = [(i, v) for i, pool in enumerate(given) for v in pool.targets]
    of, at = np.array(keys, dtype=np.int64).reshape(-1, 2).T
    column, nodes = np.arange(len(keys), dtype=np.int64), sorted(set(at.tolist()))
    if len(given) < 2:
        return given  # then the forwarding says all
    row_of = np.zeros(len(net.topology.nodes), dtype=np.int64)
    row_of[nodes] = range(len(nodes))
    now = np.array([given[i].into.get(v, 0.0) for i, v in keys])
    unit = float(now.mean())
    copies = np.array([len(pool.targets) - 1 for pool in given], dtype=np.float64)[of]
    shape = (len(nodes), len(keys))
    rows, first = row_of[at], np.ones(len(keys))
    equal = Rows.of([(of, column, first)], (len(given), len(keys)))
    forward, enter = Rows.of([(rows, column, copies)], shape), Rows.of([(rows, column, -first)], shape)
    first_copies = np.bincount(rows, weights=now, minlength=len(nodes))
    others = np.array([net.ingress_bytes[v] for v in nodes], dtype=np.float64) - first_copies
    limits = np.concatenate(
        [
            np.bincount(rows, weights=copies * now, minlength=len(nodes)),
            -np.maximum(first_copies - others * _MORE, 0.0),
        ]
    )
    totals = np.bincount(of, weights=now, minlength=len(given))
    cost = copies**2 * rows  # the wider a pool, the more it matters that it enters at the first nodes
    found, _, _ = minimise(
        cost, (forward.above(enter), limits / unit), (equal, totals / unit), np.full(len(keys), np.inf)
    )
    into = [{v: n * unit for (j, v), n in zip(keys, found.tolist(), strict=True) if j == i} for i in range(len(given))]
    return [_pool(pool.targets, pool.members, new) for pool, new in zip(given, into, strict=True)]
