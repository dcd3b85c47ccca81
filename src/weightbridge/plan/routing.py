"""From flows to routes: which bytes of which class go from which trainer to which worker, and who passes them on.

The LP decides amounts per trainer and per node. Classes with equal target nodes form a *pool* (`plan/pools.py`). A pool's
entry workers get room, each its link's share of what enters its node, and the pool's classes are laid into it end to end
(`plan/filling.py`): every worker's NIC carries its exact share of each pool, in and out, for one cut per worker. Then each
stream is cut between its senders, and copies go out from the entry worker to a counterpart on every other target.
Deterministic throughout; works on some thousands of routes, not on boxes.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from weightbridge.plan.filling import Crumbs, Item, cut_points, fill
from weightbridge.plan.flow import Flow
from weightbridge.plan.links import link_use
from weightbridge.plan.network import Network
from weightbridge.plan.plan import HOP, ROUTE, STAGES
from weightbridge.plan.pools import Block, Pool, pools

__all__ = ["busiest_link_seconds", "make_routes"]

_TINY_BYTES = 1 << 16
"""A class no longer than this is not cut: it takes any link less time than a message's latency."""

_TINY = 1 / 1024
"""Nor is it long enough to be cut then: share of a worker's traffic, for small models."""

_EXACT = 1e-5
"""Share of a worker's traffic up to which crumbs are left where they are, all of a pool's together."""

_DUST = 1 / 256
"""The same where nothing depends on it: inside a node."""

_EXCHANGE, _RELAY = STAGES.index("exchange"), STAGES.index("relay")

Stream = list[tuple[int, int]]
"""A class stream as (worker, bytes) laid end to end."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A further copy of a route: `src` has it from an earlier stage."""

    stage: int
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class _Route:
    """Bytes [lo, hi) of a class stream, from `sender` to `entry`, and from there along a tree of copies."""

    class_id: int
    lo: int
    hi: int
    sender: int
    entry: int
    copies: tuple[_Copy, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.hi - self.lo

    def cut(self, stream: Stream) -> list[tuple[_Route, int]]:
        """The parts of a route, and where each goes, for (where, bytes) that make it up."""
        ends = [*accumulate((nbytes for _, nbytes in stream), initial=self.lo)]
        return [(replace(self, lo=lo, hi=hi), to) for (lo, hi), (to, _) in zip(pairwise(ends), stream, strict=True)]


def make_routes(net: Network, flow: Flow, alignment: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """ROUTE and HOP tables, without pace and phase. Every cut is at a multiple of `alignment` bytes of the class stream."""
    router = _Router(net, flow, alignment)
    routes = router.copied(router.network_routes())
    routes += router.local_routes()
    node = net.node_of
    routes.sort(key=lambda r: (r.class_id, node[r.entry] if node[r.sender] == node[r.entry] else -1, r.lo))
    table = np.array([(r.class_id, r.lo, r.hi, r.sender, r.entry, 0, 0) for r in routes], dtype=ROUTE)
    hops = [(i, copy.stage, copy.src, copy.dst) for i, r in enumerate(routes) for copy in r.copies]
    return table, np.array(hops, dtype=HOP)


@dataclass(frozen=True)
class _Router:
    net: Network
    flow: Flow
    alignment: int

    # --- over the network ---------------------------------------------------------------------------------------------

    def network_routes(self) -> list[_Route]:
        """Routes from trainers to their entry workers, without copies."""
        found = pools(self.net, self.flow, self.alignment)
        blocks: dict[int, list[Block]] = {}
        for pool in found:
            for block in pool.members:
                blocks.setdefault(block.class_id, []).append(block)
        sent = {c: self._sent(c, sorted(of_class, key=lambda block: block.place)) for c, of_class in blocks.items()}
        return [route for pool in found for route in self._pooled(pool, sent)]

    def _pooled(self, pool: Pool, sent: dict[int, dict[int, list[_Route]]]) -> list[_Route]:
        """The routes of a pool with entry workers. sent: class -> place of a block -> its parts by sender.

        A sender's part that any worker may take goes to one that gets from this sender anyhow, if it can: the fewer senders
        share a worker's link, the less their rounds meet there.
        """
        nodes = tuple(pool.into)
        room = {w: n for v in nodes for w, n in self._shares(v, pool.into[v]).items()}
        # laid end to end, classes of one sender together, so that a sender meets few workers
        members = sorted(pool.members, key=lambda block: (self._most(block.class_id), block.class_id, block.place))
        parts = [part for block in members for part in sent[block.class_id][block.place]]
        wanted = [self._wanted(part.class_id, nodes) for part in parts]
        known: dict[int, dict[int, None]] = {}
        for part, workers in zip(parts, wanted, strict=True):
            known.setdefault(part.sender, {}).update(dict.fromkeys(workers))
        items = [
            Item(nbytes=part.nbytes, wanted=workers, liked=tuple(known[part.sender]))
            for part, workers in zip(parts, wanted, strict=True)
        ]
        crumbs = self._crumbs(min(self._ingress[w] for w in room), len(room))
        filled = zip(parts, fill(items, room, crumbs), strict=True)
        return [replace(route, entry=worker) for part, stream in filled for route, worker in part.cut(stream)]

    def _most(self, c: int) -> int:
        """The trainer that sends most of a class."""
        return max(self.flow.leave[c], key=lambda pair: (pair[1], -pair[0]))[0]

    def _senders(self, c: int) -> Stream:
        """The (trainer, bytes) that the class's stream is cut between, in proportion to the flow."""
        leave, nbytes = self.flow.leave[c], self.net.classes[c].nbytes
        most = self._most(c)
        if nbytes <= min(self._leave_crumbs[t].whole_bytes for t, _ in leave):
            return [(most, nbytes)]
        leave = tuple((t, n) for t, n in leave if n >= self._leave_crumbs[t].of(nbytes) or t == most)
        ends = cut_points([amount for _, amount in leave], nbytes, self.alignment)
        return [(t, hi - lo) for (t, _), lo, hi in zip(leave, [0, *ends], ends, strict=False)]

    def _sent(self, c: int, blocks: list[Block]) -> dict[int, list[_Route]]:
        """Per place of a block its parts by sender, without entry workers. A cut moves by a crumb where that saves a part."""
        senders = self._senders(c)
        ends, sends = ([0, *accumulate(sizes)] for sizes in ([b.nbytes for b in blocks], [n for _, n in senders]))
        for i, (t, _) in enumerate(senders[:-1], start=1):
            near = min(ends, key=lambda end: abs(end - sends[i]))
            if abs(near - sends[i]) <= self._leave_crumbs[t].of(self.net.classes[c].nbytes):
                sends[i] = near
        found: dict[int, list[_Route]] = {}
        for lo, hi in pairwise(sorted({*ends, *sends})):
            place = blocks[bisect(ends, lo) - 1].place
            found.setdefault(place, []).append(_Route(c, lo, hi, senders[bisect(sends, lo) - 1][0], -1))
        return found

    # --- onward -------------------------------------------------------------------------------------------------------

    def copied(self, routes: list[_Route]) -> list[_Route]:
        """Network routes with their trees of copies: the entry worker passes each on to one worker of every other target of
        its domain and to the gateway of every other domain, and that to one worker of every other target there.

        Between nodes of equal links a copy goes along the rail, which bounds the number of pairs and keeps shares what they
        are. Elsewhere it goes where there is room, and routes are cut for it.
        """
        for domain in range(len(self.net.uplinks) + 1 if self.net.uplinks else 0):
            routes = self._with_gateways(routes, domain)
        found, elsewhere = [], set()
        for r in routes:
            copies = list(r.copies)
            for copy in self._due(r):
                home = self.net.node_of[copy.src]
                if self._rates[copy.dst] == self._rates[home]:
                    copies.append(replace(copy, dst=self._rails[copy.dst][self._rails[home].index(copy.src)]))
                else:
                    elsewhere.add(copy.dst)
            found.append(replace(r, copies=tuple(copies)))
        for v in sorted(elsewhere):
            found = self._copied_freely(found, v)
        return found

    def _with_gateways(self, routes: list[_Route], domain: int) -> list[_Route]:
        """Routes with a copy to a gateway in the domain, where they enter another and are needed there; cut by the flow.

        The routes of each rail are dealt to the gateways apart, so that all rails relay alike.
        """
        net = self.net
        kept: list[_Route] = []
        pools: dict[tuple[tuple[int, ...], tuple[float, ...], int], list[_Route]] = {}
        for r in routes:
            nodes, home = net.target_domains[r.class_id].get(domain, ()), net.node_of[r.entry]
            if not nodes or net.domain_of[home] == domain:
                kept.append(r)
            elif all(self._rates[v] == self._rates[home] for v in nodes):
                pools.setdefault((nodes, self._rates[home], self._rails[home].index(r.entry)), []).append(r)
            else:
                pools.setdefault((nodes, (), -1), []).append(r)
        for (nodes, _, rail), members in sorted(pools.items()):
            into = self._relayed(domain, nodes)
            scale = sum(r.nbytes for r in members) / sum(into.values())
            if rail < 0:
                room = {w: n for v in into for w, n in self._shares(v, into[v] * scale).items()}
            else:
                room = {self._rails[v][rail]: n * scale for v, n in into.items()}
            wanted = [self._wanted(r.class_id, tuple(into)) if rail < 0 else () for r in members]
            items = [Item(nbytes=r.nbytes, wanted=w) for r, w in zip(members, wanted, strict=True)]
            crumbs = self._crumbs(min(self._ingress[w] for w in room), len(room))
            for r, stream in zip(members, fill(items, room, crumbs), strict=True):
                kept += [replace(part, copies=(*r.copies, _Copy(_EXCHANGE, r.entry, w))) for part, w in r.cut(stream)]
        return kept

    def _relayed(self, domain: int, nodes: tuple[int, ...]) -> dict[int, float]:
        """Bytes of all classes needed by just these nodes of the domain for which each is the gateway."""
        into = dict.fromkeys(nodes, 0.0)
        for domains, gateways in zip(self.net.target_domains, self.flow.gateways, strict=True):
            for v, nbytes in gateways.get(domain, ()) if domains.get(domain) == nodes else ():
                into[v] += nbytes
        return {v: n for v, n in into.items() if n > 0} or dict.fromkeys(nodes, 1.0)

    def _due(self, r: _Route) -> list[_Copy]:
        """The copies still to be made inside domains, by whoever has the bytes first there; `dst` is a node."""
        node, domain = self.net.node_of, self.net.domain_of
        home = domain[node[r.entry]]
        first = {home: (_EXCHANGE, r.entry)}
        for copy in r.copies:
            if copy.stage == _EXCHANGE and domain[node[copy.dst]] != home:
                first[domain[node[copy.dst]]] = (_RELAY, copy.dst)
        got = {node[r.entry], *(node[copy.dst] for copy in r.copies)}
        return [_Copy(*first[domain[v]], v) for v in self.net.targets[r.class_id] if v not in got]

    def _copied_freely(self, routes: list[_Route], v: int) -> list[_Route]:
        """The copies due to node v, to whichever of its workers' links have room left."""
        net = self.net
        got = dict.fromkeys(net.rollouts_on[v], 0)
        kept: list[_Route] = []
        free: list[tuple[_Route, _Copy]] = []
        for r in routes:
            here = [w for w in (r.entry, *(copy.dst for copy in r.copies)) if w in got]
            for w in here:
                got[w] += r.nbytes
            copy = next((copy for copy in self._due(r) if copy.dst == v), None) if not here else None
            if copy is None:
                kept.append(r)
            else:
                free.append((r, copy))
        total = sum(r.nbytes for r, _ in free)
        room = {w: max(self._ingress[w] - got[w], 0.0) for w in got}
        room = {w: n * total / sum(room.values()) for w, n in room.items()}
        items = [Item(nbytes=r.nbytes, wanted=self._wanted(r.class_id, (v,))) for r, _ in free]
        crumbs = self._crumbs(min(self._ingress[w] for w in room), len(room))
        for (r, copy), stream in zip(free, fill(items, room, crumbs), strict=True):
            kept += [replace(part, copies=(*r.copies, replace(copy, dst=w))) for part, w in r.cut(stream)]
        return kept

    @cached_property
    def _rates(self) -> dict[int, tuple[float, ...]]:
        """The links of each node's rollout workers, rail by rail."""
        return {v: tuple(self.net.topology.workers[w].bandwidth for w in rails) for v, rails in self._rails.items()}

    @cached_property
    def _rails(self) -> dict[int, tuple[int, ...]]:
        """Rollout workers of each node, in an order in which counterparts have equal links and need equal classes."""
        net = self.net
        needs: dict[int, list[int]] = {w: [] for w in net.topology.rollouts}
        for c, k in enumerate(net.classes):
            for w in k.needers:
                needs[w].append(c)
        seen: dict[tuple[float, tuple[int, ...], int], int] = {}
        found = {}
        for node, workers in net.rollouts_on.items():
            kinds: list[tuple[float, tuple[int, ...], int]] = []
            for w in workers:
                rate, needed = net.topology.workers[w].bandwidth, tuple(needs[w])
                same = sum(kind[:2] == (rate, needed) for kind in kinds)
                kinds.append((rate, needed, same))
                seen.setdefault(kinds[-1], len(seen))
            found[node] = tuple(w for _, w in sorted(zip((seen[kind] for kind in kinds), workers, strict=True)))
        return found

    # --- inside a node ------------------------------------------------------------------------------------------------

    def local_routes(self) -> list[_Route]:
        """Streams for nodes that hold the class themselves: each goes once from their own trainers, spread evenly."""
        net = self.net
        pieces: dict[int, list[_Route]] = {}
        load = dict.fromkeys(net.topology.trainers, 0)
        for c in sorted(range(len(net.classes)), key=lambda c: (-net.classes[c].nbytes, c)):
            nbytes = net.classes[c].nbytes
            for node in net.local[c]:
                holders = [t for t in net.classes[c].holders if net.node_of[t] == node]
                if nbytes <= _TINY_BYTES:
                    holders = [min(holders, key=lambda t: (load[t], t))]
                ends = cut_points([1.0] * len(holders), nbytes, self.alignment)
                for sender, lo, hi in zip(holders, [0, *ends], ends, strict=False):
                    if hi > lo:
                        load[sender] += hi - lo
                        pieces.setdefault(node, []).append(_Route(c, lo, hi, sender, -1))
        return [r for node, members in sorted(pieces.items()) for r in self._entered(node, members)]

    def _entered(self, node: int, pieces: list[_Route]) -> list[_Route]:
        """Local pieces with entry workers, in proportion to their links as these are all we know of their speed."""
        pieces.sort(key=lambda r: (r.sender, r.class_id, r.lo))
        total = sum(r.nbytes for r in pieces)
        items = [Item(nbytes=r.nbytes, wanted=self._wanted(r.class_id, (node,))) for r in pieces]
        crumbs = Crumbs(alignment=self.alignment, whole_bytes=min(_TINY_BYTES, total >> 10), exact_bytes=total * _DUST)
        found = []
        for r, stream in zip(pieces, fill(items, self._shares(node, total), crumbs), strict=True):
            lo = r.lo
            for worker, nbytes in stream:
                found.append(replace(r, lo=lo, hi=lo + nbytes, entry=worker))
                lo += nbytes
        return found

    # --- shares -------------------------------------------------------------------------------------------------------

    def _wanted(self, c: int, nodes: tuple[int, ...]) -> tuple[int, ...]:
        """Needers of a class on these nodes; empty where all rollout workers there need it."""
        needers = tuple(w for w in self.net.classes[c].needers if self.net.node_of[w] in nodes)
        return needers if len(needers) < sum(len(self.net.rollouts_on[v]) for v in nodes) else ()

    def _shares(self, node: int, nbytes: float) -> dict[int, float]:
        """`nbytes` divided over the node's rollout workers in proportion to their links."""
        workers = self.net.rollouts_on[node]
        rates = [self.net.topology.workers[w].bandwidth for w in workers]
        return {w: nbytes * rate / sum(rates) for w, rate in zip(workers, rates, strict=True)}

    @cached_property
    def _ingress(self) -> dict[int, float]:
        """Each rollout worker's share of what its node needs over the network."""
        return {w: n for v, total in self.net.ingress_bytes.items() for w, n in self._shares(v, total).items()}

    @cached_property
    def _leave_crumbs(self) -> dict[int, Crumbs]:
        """What is too little to be cut between trainers."""
        held = Counter(t for c in self.net.classes for t in c.holders)
        rate = {t: self.net.topology.workers[t].bandwidth for t in self.net.topology.trainers}
        return {t: self._crumbs(r * self.flow.seconds, max(1, held[t])) for t, r in rate.items()}

    def _crumbs(self, traffic: float, parts: int) -> Crumbs:
        """What is too little to be cut from streams that `parts` times make up a worker's `traffic`, in bytes."""
        whole = int(min(_TINY_BYTES, traffic * _TINY))
        return Crumbs(alignment=self.alignment, whole_bytes=whole, exact_bytes=traffic * _EXACT / parts)


def busiest_link_seconds(net: Network, routes: npt.NDArray[np.void], hops: npt.NDArray[np.void]) -> float:
    """Seconds the busiest network link takes: any worker's link, limited node's or group's uplink, in either direction."""
    return float(link_use(net.topology, routes, hops).seconds(routes["hi"] - routes["lo"]).max(initial=0.0))
