"""Who sits on which machine: workers, nodes and link speeds of a job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weightbridge.deployments.job_file import ClusterTable
from weightbridge.errors import UsageError
from weightbridge.plan.topology import NodeGroup, Role, Topology, Worker

__all__ = ["Seats", "engine_names", "node_names", "place_workers", "topology_of"]

_GB = 1e9


def node_names(given: int | Sequence[str] | None, num_workers: int, gpus_per_node: int, prefix: str) -> list[str]:
    """Names of the nodes that `num_workers` fill; "prefix-node-0", ... where a number is given. Raises UsageError."""
    needed = -(-num_workers // gpus_per_node)
    names = list(given) if isinstance(given, Sequence) else [f"{prefix}-node-{i}" for i in range(given or needed)]
    if len(names) != needed:
        raise UsageError(
            f"{num_workers} workers at {gpus_per_node} a node fill {needed} nodes, nodes gives {len(names)}; change nodes, "
            "gpus_per_node or the degrees"
        )
    if len(set(names)) != len(names):
        raise UsageError(f"nodes names a node twice: {names}; give each once")
    return names


def engine_names(name: str, replicas: int) -> list[str]:
    """Names of the engines that one table stands for."""
    return [name] if replicas == 1 else [f"{name}-{i}" for i in range(replicas)]


@dataclass(frozen=True, slots=True)
class Seats:
    """The workers of the trainer (engine "") or of one engine. nodes: of each worker, by rank."""

    role: Role
    engine: str
    nodes: tuple[str, ...]

    @classmethod
    def filling(
        cls, role: Role, engine: str, num_workers: int, nodes: Sequence[str], gpus_per_node: int, first: int = 0
    ) -> Seats:
        """Workers on consecutive GPUs of `nodes`, from GPU number `first` of all of them on."""
        return cls(role, engine, tuple(nodes[(first + rank) // gpus_per_node] for rank in range(num_workers)))


def place_workers(sides: Iterable[Seats], cluster: ClusterTable) -> tuple[Worker, ...]:
    """The workers of all sides in order; each has its share of its node's link, in bytes per second.

    Sides that name the same node share it: its GPUs are given out in order to the workers of one role, while a trainer and
    a rollout worker may have the same GPU. Raises UsageError where a node has fewer GPUs than workers of one role.
    """
    workers: list[Worker] = []
    taken: dict[tuple[Role, str], int] = {}
    for side in sides:
        for rank, node in enumerate(side.nodes):
            gpu = taken.get((side.role, node), 0)
            taken[side.role, node] = gpu + 1
            workers.append(
                Worker(
                    name=f"{side.engine or 'trainer'}/{rank}", role=side.role, node=node, rank=rank, engine=side.engine,
                    bandwidth=_gpu_bandwidth(node, gpu, cluster),
                )
            )  # fmt: skip
    for (role, node), num in taken.items():
        if num > cluster.gpus_per_node:
            raise UsageError(
                f"node {node!r} has {num} {role.value} workers and cluster.gpus_per_node is {cluster.gpus_per_node}; name "
                "other nodes, or raise gpus_per_node"
            )
    return tuple(workers)


def _gpu_bandwidth(node: str, gpu: int, cluster: ClusterTable) -> float:
    """Bytes per second of the link of a node's GPU number `gpu`."""
    rate = cluster.node_bandwidth / cluster.gpus_per_node
    for table in cluster.node:
        if not _matches(node, table.names):
            continue
        if table.gpu_bandwidth is not None:
            if len(table.gpu_bandwidth) != cluster.gpus_per_node:
                raise UsageError(
                    f"cluster.node {table.names}: gpu_bandwidth has {len(table.gpu_bandwidth)} entries, expected one for each "
                    f"of {cluster.gpus_per_node} GPUs"
                )
            rate = table.gpu_bandwidth[gpu % cluster.gpus_per_node]
        elif table.bandwidth is not None:
            rate = table.bandwidth / cluster.gpus_per_node
    return rate * _GB


def topology_of(workers: tuple[Worker, ...], cluster: ClusterTable) -> Topology:
    """The topology of these workers. Raises UsageError for a node or group that no worker's node matches."""
    nodes = list(dict.fromkeys(w.node for w in workers))
    narrow: dict[str, float] = {}
    for table in cluster.node:
        found = _matching(nodes, table.names, f"cluster.node {table.names}")
        if table.bandwidth is not None and table.gpu_bandwidth is not None:
            narrow.update((node, table.bandwidth * _GB) for node in found)
    groups = tuple(
        NodeGroup(
            name=table.name,
            nodes=tuple(_matching(nodes, table.nodes, f"cluster.group {table.name!r}")),
            bandwidth=table.bandwidth * _GB,
        )
        for table in cluster.group
    )
    return Topology(workers=workers, node_bandwidth=tuple(narrow.items()), groups=groups)


def _matching(nodes: Sequence[str], patterns: Sequence[str], what: str) -> list[str]:
    for pattern in patterns:
        if not any(fnmatchcase(node, pattern) for node in nodes):
            some = ", ".join(nodes[:6]) + (", ..." if len(nodes) > 6 else "")
            raise UsageError(f"{what}: no node is called {pattern!r}; the job's nodes are {some}")
    return [node for node in nodes if _matches(node, patterns)]


def _matches(node: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(node, pattern) for pattern in patterns)
