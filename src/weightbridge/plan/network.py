"""Classes on a topology, in numbers: what the LP, its certificate and routing read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from weightbridge.plan.plan import ReplicaClass
from weightbridge.plan.topology import Role, Topology

__all__ = ["Network"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """Nodes are positions in `Topology.nodes`, workers positions in `.workers`, domains as in `domain_of`."""

    topology: Topology
    classes: tuple[ReplicaClass, ...]

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Node of each worker."""
        position = {name: i for i, name in enumerate(self.topology.nodes)}
        return tuple(position[w.node] for w in self.topology.workers)

    @cached_property
    def domain_of(self) -> tuple[int, ...]:
        """Domain of each node: the position of its group in `Topology.groups`, or their number for the nodes in none."""
        rest = len(self.topology.groups)
        return tuple(self.topology.group_of.get(name, rest) for name in self.topology.nodes)

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """Per class the nodes that need it and must get it over the network."""
        return tuple(tuple(sorted(need - have)) for need, have in self._ends)

    @cached_property
    def local(self) -> tuple[tuple[int, ...], ...]:
        """Per class the nodes that need it and have a holder of it themselves."""
        return tuple(tuple(sorted(need & have)) for need, have in self._ends)

    @cached_property
    def _ends(self) -> tuple[tuple[set[int], set[int]], ...]:
        """Per class the nodes of its needers and of its holders."""
        node = self.node_of
        return tuple(({node[w] for w in c.needers}, {node[w] for w in c.holders}) for c in self.classes)

    @cached_property
    def target_domains(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """Per class its targets by domain; domains and nodes ascending."""
        found = []
        for nodes in self.targets:
            domains = sorted({self.domain_of[v] for v in nodes})
            found.append({d: tuple(v for v in nodes if self.domain_of[v] == d) for d in domains})
        return tuple(found)

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
    def uplinks(self) -> tuple[float, ...]:
        """Bytes per second of each group's uplink, one direction."""
        return tuple(group.bandwidth for group in self.topology.groups)

    @cached_property
    def ingress_bytes(self) -> dict[int, int]:
        """M_v: network bytes each rollout node needs."""
        found = dict.fromkeys(self.rollout_nodes, 0)
        for c, nodes in zip(self.classes, self.targets, strict=True):
            for v in nodes:
                found[v] += c.nbytes
        return found

    @cached_property
    def group_bytes(self) -> tuple[int, ...]:
        """N_d: distinct bytes that the target nodes of each group need, from its own trainers or through its uplink."""
        found = [0] * len(self.topology.groups)
        for c, domains in zip(self.classes, self.target_domains, strict=True):
            for d in domains:
                if d < len(found):
                    found[d] += c.nbytes
        return tuple(found)

    @cached_property
    def network_bytes(self) -> int:
        """Bytes that must leave the trainers' nodes, each once."""
        return sum(c.nbytes for c, nodes in zip(self.classes, self.targets, strict=True) if nodes)
