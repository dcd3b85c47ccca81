"""Who the workers are, which of them share a node, which nodes a slower uplink, and how fast all these links are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import inf

from weightbridge.errors import UsageError

__all__ = ["NodeGroup", "Role", "Topology", "Worker"]


class Role(str, Enum):
    TRAINER = "trainer"
    ROLLOUT = "rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One process's seat in the job.

    name: stable for the life of the worker, unique in the job: "trainer/0", "engine-a/2".
    node: name of the machine (or of the part of one that plays a node); workers of one node share memory.
    engine: for a rollout worker, the engine it belongs to; "" for a trainer. rank: within its side (trainer group or engine).
    bandwidth: bytes per second of its network link, each direction.
    """

    name: str
    role: Role
    node: str
    rank: int
    engine: str = ""
    bandwidth: float = 1.25e9

    def __post_init__(self) -> None:
        if (self.role is Role.ROLLOUT) != bool(self.engine):
            raise UsageError(f"worker {self.name!r}: a rollout worker has an engine name and a trainer has none")
        if not 0 < self.bandwidth < inf:
            raise UsageError(f"worker {self.name!r}: bandwidth must be positive and finite, got {self.bandwidth}")
        object.__setattr__(self, "bandwidth", float(self.bandwidth))  # digests print it


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes behind one uplink: a rack, a cluster, a region.

    nodes: their names. bandwidth: bytes per second of the uplink, each direction, which all traffic between these nodes
    and all others shares; what the nodes say to one another does not touch it.
    """

    name: str
    nodes: tuple[str, ...]
    bandwidth: float

    def __post_init__(self) -> None:
        if not self.nodes:
            raise UsageError(f"group {self.name!r} has no nodes; name at least one, or leave the group out")
        if not 0 < self.bandwidth < inf:
            raise UsageError(f"group {self.name!r}: bandwidth must be positive and finite, got {self.bandwidth}")
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "bandwidth", float(self.bandwidth))  # digests print it


@dataclass(frozen=True, kw_only=True)
class Topology:
    """workers: trainers and rollouts, in a fixed order that numbers them.

    node_bandwidth: (node name, bytes per second each direction) where the node's link is narrower than the sum of its
    workers' links. groups: nodes behind slower uplinks, each node in one group at most; the others hang on the core
    directly. The core itself is taken to be as fast as all links into it.
    """

    workers: tuple[Worker, ...]
    node_bandwidth: tuple[tuple[str, float], ...] = ()
    groups: tuple[NodeGroup, ...] = ()

    def __post_init__(self) -> None:
        names = [w.name for w in self.workers]
        if len(set(names)) != len(names):
            raise UsageError(f"worker names must be unique, got {sorted(n for n in names if names.count(n) > 1)} twice")
        for node, bandwidth in self.node_bandwidth:
            if not 0 < bandwidth < inf:
                raise UsageError(f"node {node!r}: bandwidth must be positive and finite, got {bandwidth}")
        object.__setattr__(self, "node_bandwidth", tuple((node, float(rate)) for node, rate in self.node_bandwidth))
        object.__setattr__(self, "groups", tuple(self.groups))
        self._check_groups()

    def _check_groups(self) -> None:
        home: dict[str, str] = {}
        for group in self.groups:
            if sum(g.name == group.name for g in self.groups) > 1:
                raise UsageError(f"group names must be unique, got {group.name!r} twice")
            for node in group.nodes:
                if node not in self.nodes:
                    raise UsageError(f"group {group.name!r} names node {node!r}, on which no worker is")
                if node in home:
                    raise UsageError(
                        f"node {node!r} is in group {home[node]!r} and in {group.name!r}; a node is in one"
                    )
                home[node] = group.name

    @cached_property
    def index(self) -> dict[str, int]:
        return {w.name: i for i, w in enumerate(self.workers)}

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Node names in order of first appearance."""
        return tuple(dict.fromkeys(w.node for w in self.workers))

    @cached_property
    def group_of(self) -> dict[str, int]:
        """Position in `groups` of each node that is in one, by node name."""
        return {node: i for i, group in enumerate(self.groups) for node in group.nodes}

    @cached_property
    def trainers(self) -> tuple[int, ...]:
        return tuple(i for i, w in enumerate(self.workers) if w.role is Role.TRAINER)

    @cached_property
    def rollouts(self) -> tuple[int, ...]:
        return tuple(i for i, w in enumerate(self.workers) if w.role is Role.ROLLOUT)

    def on_node(self, node: str, role: Role | None = None) -> tuple[int, ...]:
        """Workers of a node, of one role or of both."""
        return tuple(i for i, w in enumerate(self.workers) if w.node == node and (role is None or w.role is role))

    def bandwidth_of_node(self, node: str, role: Role) -> float:
        """Network bytes per second of a node in one direction: its workers' links of that role, capped by the node's own."""
        total = sum(self.workers[i].bandwidth for i in self.on_node(node, role))
        return min(total, dict(self.node_bandwidth).get(node, total))
