"""The links of a topology, numbered for the flow model, and which of them a transfer between two workers goes through."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UsageError
from weightbridge.plan.topology import Topology
from weightbridge.simulator.costs import Costs
from weightbridge.simulator.result import LinkUse

__all__ = ["Link", "Links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction of one link. name, kind, outgoing, bandwidth: as in LinkUse."""

    name: str
    kind: str
    outgoing: bool
    bandwidth: float


@dataclass(kw_only=True)
class Links:
    """Every worker's link to the network ("worker") and to the others of its node ("inside"), a node's own where it is
    narrower than its workers' ("node"), and the uplinks of groups of nodes ("group"); each in both directions.

    A transfer between nodes takes the sender's link, node and group outwards, the receiver's inwards; groups only if the two
    nodes are not in one. One inside a node takes the inside links of both. A worker's transfer to itself takes none.
    """

    topology: Topology
    costs: Costs
    links: list[Link] = field(default_factory=list, init=False)
    _number: dict[tuple[str, str, bool], int] = field(default_factory=dict, init=False)
    _paths: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for worker in self.topology.workers:
            self._add("worker", worker.name, worker.bandwidth)
        for worker in self.topology.workers:
            self._add("inside", worker.name, self.costs.inside_bandwidth)
        for node, bandwidth in self.topology.node_bandwidth:
            self._add("node", node, bandwidth)
        for group in self.topology.groups:
            self._add("group", group.name, group.bandwidth)

    def _add(self, kind: str, name: str, bandwidth: float) -> None:
        for outgoing in (True, False):
            self._number[kind, name, outgoing] = len(self.links)
            self.links.append(Link(name=name, kind=kind, outgoing=outgoing, bandwidth=bandwidth))

    def __len__(self) -> int:
        return len(self.links)

    @property
    def bandwidth(self) -> list[float]:
        """[num_links] bytes per second."""
        return [link.bandwidth for link in self.links]

    def number(self, kind: str, name: str, *, outgoing: bool) -> int:
        """UsageError when there is no such link."""
        try:
            return self._number[kind, name, outgoing]
        except KeyError:
            raise UsageError(f"there is no {kind} link of {name!r} in this topology") from None

    def path(self, source: int, target: int) -> tuple[int, ...]:
        """Numbers of the links between two workers (positions in `Topology.workers`)."""
        found = self._paths.get((source, target))
        if found is None:
            found = self._paths[source, target] = self._path(source, target)
        return found

    def _path(self, source: int, target: int) -> tuple[int, ...]:
        if source == target:
            return ()
        a, b = self.topology.workers[source], self.topology.workers[target]
        number = self._number
        if a.node == b.node:
            return (number["inside", a.name, True], number["inside", b.name, False])
        groups = self.topology.group_of
        away = [("worker", a.name, True), ("node", a.node, True)]
        home = [("node", b.node, False), ("worker", b.name, False)]
        if groups.get(a.node) != groups.get(b.node):
            away += [("group", self.topology.groups[groups[n]].name, True) for n in (a.node,) if n in groups]
            home += [("group", self.topology.groups[groups[n]].name, False) for n in (b.node,) if n in groups]
        return tuple(number[key] for key in (*away, *home) if key in number)

    def of_node(self, node: str) -> tuple[int, ...]:
        """Numbers of all links of a node and its workers to the network, both directions."""
        names = [w.name for w in self.topology.workers if w.node == node]
        keys = [("worker", name, way) for name in names for way in (True, False)]
        keys += [("node", node, way) for way in (True, False)]
        return tuple(self._number[key] for key in keys if key in self._number)

    def use(self, nbytes: npt.NDArray[np.int64]) -> tuple[LinkUse, ...]:
        """What crossed each link, from [num_links] bytes."""
        return tuple(
            LinkUse(
                name=link.name, kind=link.kind, outgoing=link.outgoing, nbytes=int(carried), bandwidth=link.bandwidth
            )
            for link, carried in zip(self.links, nbytes.tolist(), strict=True)
        )
