"""What a plan puts on each link: bytes per worker and node, by class of link, from whom to whom. Counted, not simulated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightbridge.plan import Plan, Role
from weightbridge.simulator.result import LinkUse

__all__ = ["LINK_CLASSES", "Traffic"]

Int64Array = npt.NDArray[np.int64]

LINK_CLASSES: tuple[str, ...] = ("first copies", "further copies", "inside nodes")
"""first copies: trainer to rollout over the network. further copies: rollout to rollout over the network. inside nodes: a
trainer's bytes that a rollout worker of its own node takes; copies made by reading a neighbour's slot are not transfers."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The transfers of one update under `plan`: one row a route and one a hop, in the plan's order.

    parts: [n] bytes of each transfer, where it is about a part of the update; by default all of it.
    """

    plan: Plan
    parts: Int64Array | None = None

    @cached_property
    def source(self) -> Int64Array:
        """[n] the writing worker."""
        return np.concatenate([self.plan.routes["sender"], self.plan.hops["src"]]).astype(np.int64)

    @cached_property
    def target(self) -> Int64Array:
        """[n] the worker written to."""
        return np.concatenate([self.plan.routes["entry"], self.plan.hops["dst"]]).astype(np.int64)

    @cached_property
    def nbytes(self) -> Int64Array:
        """[n] bytes in one update."""
        if self.parts is not None:
            return self.parts
        sizes = self.plan.routes["hi"] - self.plan.routes["lo"]
        return np.concatenate([sizes, sizes[self.plan.hops["route"]]]).astype(np.int64)

    @cached_property
    def node_of(self) -> Int64Array:
        """[num_workers] position of each worker's node in `Topology.nodes`."""
        position = {name: i for i, name in enumerate(self.plan.topology.nodes)}
        return np.array([position[w.node] for w in self.plan.topology.workers], dtype=np.int64)

    @cached_property
    def over_network(self) -> npt.NDArray[np.bool_]:
        """[n] whether the transfer leaves its node."""
        crosses: npt.NDArray[np.bool_] = self.node_of[self.source] != self.node_of[self.target]
        return crosses

    def by_class(self) -> dict[str, int]:
        """Bytes of one update per entry of LINK_CLASSES."""
        first = np.arange(len(self.nbytes)) < len(self.plan.routes)
        parts = (first & self.over_network, ~first & self.over_network, ~self.over_network)
        return {name: int(self.nbytes[part].sum()) for name, part in zip(LINK_CLASSES, parts, strict=True)}

    def worker_bytes(self, *, outgoing: bool) -> Int64Array:
        """[num_workers] network bytes each worker writes, or is written."""
        return self._sums(self.source if outgoing else self.target, len(self.plan.topology.workers))

    def node_bytes(self, *, outgoing: bool) -> Int64Array:
        """[num_nodes] network bytes out of, or into, each node of `Topology.nodes`."""
        return self._sums(self.node_of[self.source if outgoing else self.target], len(self.plan.topology.nodes))

    def group_bytes(self, *, outgoing: bool) -> Int64Array:
        """[num_groups] bytes that leave, or enter, each of `Topology.groups`."""
        topology = self.plan.topology
        outside = len(topology.groups)
        home = np.array([topology.group_of.get(name, outside) for name in topology.nodes], dtype=np.int64)[self.node_of]
        here, there = home[self.source], home[self.target]
        weights = np.where(here != there, self.nbytes, 0)
        return np.bincount(here if outgoing else there, weights=weights, minlength=outside + 1).astype(np.int64)[
            :outside
        ]

    def between_nodes(self) -> Int64Array:
        """[num_nodes, num_nodes] bytes from the row's node to the column's; what stays inside a node is on the diagonal."""
        n = len(self.plan.topology.nodes)
        cells = self.node_of[self.source] * n + self.node_of[self.target]
        return np.bincount(cells, weights=self.nbytes, minlength=n * n).astype(np.int64).reshape(n, n)

    def between_workers(self) -> Int64Array:
        """[num_workers, num_workers] bytes from the row's worker to the column's."""
        n = len(self.plan.topology.workers)
        return (
            np.bincount(self.source * n + self.target, weights=self.nbytes, minlength=n * n)
            .astype(np.int64)
            .reshape(n, n)
        )

    def _sums(self, ends: Int64Array, length: int) -> Int64Array:
        weights = np.where(self.over_network, self.nbytes, 0)
        return np.bincount(ends, weights=weights, minlength=length).astype(np.int64)

    def links(self) -> tuple[LinkUse, ...]:
        """Both directions of each worker's link, of each node's that has a limit of its own, and of each group's uplink."""
        topology = self.plan.topology
        found = []
        for outgoing in (True, False):
            of_node = dict(zip(topology.nodes, self.node_bytes(outgoing=outgoing).tolist(), strict=True))
            ends = [
                ("worker", w.name, n, w.bandwidth)
                for w, n in zip(topology.workers, self.worker_bytes(outgoing=outgoing).tolist(), strict=True)
            ]
            ends += [("node", name, of_node[name], rate) for name, rate in topology.node_bandwidth if name in of_node]
            ends += [
                ("group", g.name, n, g.bandwidth)
                for g, n in zip(topology.groups, self.group_bytes(outgoing=outgoing).tolist(), strict=True)
            ]
            found += [
                LinkUse(name=name, kind=kind, outgoing=outgoing, nbytes=nbytes, bandwidth=rate)
                for kind, name, nbytes, rate in ends
            ]
        return tuple(found)

    def busiest_seconds(self) -> float:
        """Of all `links`, the longest busy time, without making them."""
        topology = self.plan.topology
        speed = np.array([w.bandwidth for w in topology.workers])
        uplink = np.array([g.bandwidth for g in topology.groups])
        position = {name: i for i, name in enumerate(topology.nodes)}
        limits = [(position[name], rate) for name, rate in topology.node_bandwidth if name in position]
        worst = 0.0
        for outgoing in (True, False):
            worst = max(worst, float((self.worker_bytes(outgoing=outgoing) / speed).max()))
            if limits:
                of_node = self.node_bytes(outgoing=outgoing)
                worst = max(worst, *(float(of_node[node]) / rate for node, rate in limits))
            if len(uplink):
                worst = max(worst, float((self.group_bytes(outgoing=outgoing) / uplink).max()))
        return worst

    def rollout_nodes(self, *, outgoing: bool) -> tuple[LinkUse, ...]:
        """Per node with rollout workers, their links together: what their network bytes need at least. kind "rollouts"."""
        topology = self.plan.topology
        names = [name for name in topology.nodes if topology.on_node(name, Role.ROLLOUT)]
        nbytes = self.worker_bytes(outgoing=outgoing)
        return tuple(
            LinkUse(
                name=name,
                kind="rollouts",
                outgoing=outgoing,
                nbytes=int(nbytes[list(topology.on_node(name, Role.ROLLOUT))].sum()),
                bandwidth=topology.bandwidth_of_node(name, Role.ROLLOUT),
            )
            for name in names
        )
