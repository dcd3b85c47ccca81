"""From flows to routes: which bytes of which class go from which trainer to which worker, and who passes them on.

The LP decides amounts per trainer and per node. Here each class stream is cut into contiguous pieces at aligned offsets,
each piece gets an entry worker in its first node (needers first, every link of the node carrying its share), and a
counterpart on each other node that needs it. Deterministic throughout; works on some thousands of routes, not on boxes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from weightbridge.plan.flow import Flow, Network
from weightbridge.plan.plan import HOP, ROUTE, STAGES

__all__ = ["busiest_link_seconds", "make_routes"]

_TINY_BYTES = 1 << 16
"""A class no longer than this is not cut between senders or between nodes: its share of any link is nothing."""

_DUST = 1 / 256
"""A piece shorter than this share of what it is cut from is left where it was: fewer, larger messages."""


@dataclass(frozen=True, slots=True)
class _Route:
    class_id: int
    lo: int
    hi: int
    sender: int
    node: int
    entry: int = -1
    onward: dict[int, int] = field(default_factory=dict)  # node -> worker that gets a copy there

    @property
    def nbytes(self) -> int:
        return self.hi - self.lo

    def cut(self, nbytes: int) -> tuple[_Route, _Route]:
        """The first `nbytes` and the rest."""
        return replace(self, hi=self.lo + nbytes), replace(self, lo=self.lo + nbytes)


def make_routes(net: Network, flow: Flow, alignment: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """ROUTE and HOP tables. Every cut is at a multiple of `alignment` bytes of the class stream."""
    routes = _enter(net, _network_pieces(net, flow, alignment), alignment)
    for node in net.rollout_nodes:
        routes = _forward(net, routes, node, alignment)
    routes += _enter(net, _local_pieces(net, alignment), alignment)
    routes.sort(key=lambda r: (r.class_id, r.node if net.node_of[r.sender] == r.node else -1, r.lo))
    table = np.array([(r.class_id, r.lo, r.hi, r.sender, r.entry) for r in routes], dtype=ROUTE)
    stage = STAGES.index("exchange")
    hops = [(i, stage, r.entry, dst) for i, r in enumerate(routes) for _, dst in sorted(r.onward.items())]
    return table, np.array(hops, dtype=HOP)


def _network_pieces(net: Network, flow: Flow, alignment: int) -> list[_Route]:
    """Pair what leaves the trainers with what enters the nodes, class by class, both in fixed order: few pairs result."""
    pieces = []
    for c, (leave, enter) in enumerate(zip(flow.leave, flow.enter, strict=True)):
        if not enter:
            continue
        nbytes = net.classes[c].nbytes
        if nbytes <= _TINY_BYTES:
            leave, enter = ((max(side, key=lambda pair: (pair[1], -pair[0])),) for side in (leave, enter))
        leave_ends, enter_ends = (_cut_points(side, nbytes, alignment) for side in (leave, enter))
        ends = sorted({*leave_ends, *enter_ends})
        for lo, hi in zip([0, *ends], ends, strict=False):
            sender = leave[int(np.searchsorted(leave_ends, lo, side="right"))][0]
            node = enter[int(np.searchsorted(enter_ends, lo, side="right"))][0]
            pieces.append(_Route(c, lo, hi, sender, node))
    return pieces


def _cut_points(amounts: Iterable[tuple[int, float]], nbytes: int, alignment: int) -> list[int]:
    """Aligned ends of the parts of a stream, in proportion to `amounts`; parts that are dust become empty."""
    sizes = np.array([amount for _, amount in amounts])
    sizes = np.where(sizes < max(alignment, nbytes * _DUST), 0.0, sizes) if sizes.max() > alignment else sizes
    ends = np.rint(np.cumsum(sizes) / sizes.sum() * (nbytes / alignment)).astype(np.int64) * alignment
    ends = np.minimum(ends, nbytes)
    ends[np.flatnonzero(sizes)[-1] :] = nbytes
    found: list[int] = ends.tolist()
    return found


def _local_pieces(net: Network, alignment: int) -> list[_Route]:
    """Streams for nodes that hold the class themselves: each goes once from their own trainers, spread evenly."""
    pieces = []
    load = dict.fromkeys(net.topology.trainers, 0)
    for c in sorted(range(len(net.classes)), key=lambda c: (-net.classes[c].nbytes, c)):
        nbytes = net.classes[c].nbytes
        for node in net.local[c]:
            holders = [t for t in net.classes[c].holders if net.node_of[t] == node]
            if nbytes <= _TINY_BYTES:
                holders = [min(holders, key=lambda t: (load[t], t))]
            ends = _cut_points([(t, float(nbytes)) for t in holders], nbytes, alignment)
            for sender, lo, hi in zip(holders, [0, *ends], ends, strict=False):
                if hi > lo:
                    load[sender] += hi - lo
                    pieces.append(_Route(c, lo, hi, sender, node))
    return pieces


def _enter(net: Network, pieces: list[_Route], alignment: int) -> list[_Route]:
    """Give each piece an entry worker. Pieces with equally many onward copies are spread on their own, so that both what
    enters a worker and what it passes on are in proportion to its link."""
    groups: dict[tuple[int, int], list[_Route]] = {}
    for piece in pieces:
        local = net.node_of[piece.sender] == piece.node
        copies = 0 if local else len(net.targets[piece.class_id]) - 1
        groups.setdefault((piece.node, copies), []).append(piece)
    found = []
    for (node, _), members in sorted(groups.items()):
        total = sum(m.nbytes for m in members)
        spread = _spread(net, members, node, _shares(net, node, total), alignment)
        found += [replace(piece, entry=worker) for piece, worker in spread]
    return found


def _shares(net: Network, node: int, nbytes: int) -> dict[int, float]:
    """`nbytes` divided over the node's rollout workers in proportion to their links."""
    workers = net.rollouts_on[node]
    rates = [net.topology.workers[w].bandwidth for w in workers]
    return {w: nbytes * rate / sum(rates) for w, rate in zip(workers, rates, strict=True)}


def _spread(
    net: Network, pieces: list[_Route], node: int, room: dict[int, float], alignment: int
) -> list[tuple[_Route, int]]:
    """Fill the workers of a node up to their `room`, cutting pieces where they do not fit whole.

    First pieces that only some of the node's workers need, to those who need them (the fewer, the sooner); then
    everything else, laid end to end over the workers by sender, so that a sender meets few workers.
    """
    found: list[tuple[_Route, int]] = []
    rest: list[_Route] = []
    wanted = {p.class_id: [w for w in net.classes[p.class_id].needers if net.node_of[w] == node] for p in pieces}
    picky = [p for p in pieces if len(wanted[p.class_id]) < len(room)]
    for piece in sorted(picky, key=lambda p: (len(wanted[p.class_id]), -p.nbytes, p.class_id, p.lo)):
        left: _Route | None = piece
        while left is not None:
            worker = max(wanted[piece.class_id], key=lambda w: (room[w], -w))
            left = _put(left, worker, room, alignment, found)
            if left is not None and room[worker] <= 0 and all(room[w] <= alignment for w in wanted[piece.class_id]):
                rest.append(left)
                break
    rest += [p for p in pieces if len(wanted[p.class_id]) >= len(room)]
    for piece in sorted(rest, key=lambda p: (p.sender, p.class_id, p.lo)):
        left = piece
        while left is not None:
            worker = next((w for w in room if room[w] > alignment), max(room, key=lambda w: (room[w], -w)))
            left = _put(left, worker, room, alignment, found)
    return found


def _put(
    piece: _Route, worker: int, room: dict[int, float], alignment: int, found: list[tuple[_Route, int]]
) -> _Route | None:
    """Assign as much of the piece as `worker` has room for, all of it if little would be left over; returns the rest."""
    dust = max(alignment, piece.nbytes * _DUST)
    others = any(r > alignment for w, r in room.items() if w != worker)
    if piece.nbytes - room[worker] <= dust or not others:
        found.append((piece, worker))
        room[worker] -= piece.nbytes
        return None
    fits = int(room[worker]) // alignment * alignment
    if fits < dust:
        room[worker] = min(room[worker], 0.0)  # too little to be worth a message
        return piece
    head, tail = piece.cut(fits)
    found.append((head, worker))
    room[worker] = 0.0
    return tail


def _forward(net: Network, routes: list[_Route], node: int, alignment: int) -> list[_Route]:
    """Give each route that must be copied to `node` the worker there that gets it.

    Between nodes with equally many rollout workers the i-th sends to the i-th (rail-aligned: it bounds the number of
    pairs). Between others a rail would crowd the workers that have a counterpart, so the copies are spread by link.
    """
    own = net.rollouts_on[node]
    found, free = [], []
    for r in routes:
        if r.node == node or node not in net.targets[r.class_id]:
            found.append(r)
            continue
        there = net.rollouts_on[r.node]
        if len(there) == len(own):
            found.append(replace(r, onward={**r.onward, node: own[there.index(r.entry)]}))
        else:
            free.append(r)
    spread = _spread(net, free, node, _shares(net, node, sum(r.nbytes for r in free)), alignment)
    return found + [replace(r, onward={**r.onward, node: worker}) for r, worker in spread]


def busiest_link_seconds(net: Network, routes: npt.NDArray[np.void], hops: npt.NDArray[np.void]) -> float:
    """Seconds the busiest network link takes: any worker's link or any limited node's, in either direction."""
    topology = net.topology
    node_of = np.array(net.node_of, dtype=np.int64)
    sizes = (routes["hi"] - routes["lo"]).astype(np.float64)
    src = np.concatenate([routes["sender"], hops["src"]])
    dst = np.concatenate([routes["entry"], hops["dst"]])
    nbytes = np.concatenate([sizes, sizes[hops["route"]]])
    away = node_of[src] != node_of[dst]
    speeds = np.array([w.bandwidth for w in topology.workers])
    worst = 0.0
    for end in (src, dst):
        load = np.bincount(end[away], weights=nbytes[away], minlength=len(speeds))
        worst = max(worst, float((load / speeds).max()))
        by_node = np.bincount(node_of, weights=load)
        worst = max([worst, *(float(by_node[v]) / rate for v, rate in net.caps)])
    return worst
