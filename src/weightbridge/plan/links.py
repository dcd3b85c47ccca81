"""Which links each route's bytes cross, as a sparse table: loads of a whole plan, or of one round, are one product with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightbridge.plan.topology import Topology

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = ["Incidence", "incidence", "link_use"]

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_WAYS = ("out", "in")


@dataclass(frozen=True, kw_only=True)
class Incidence:
    """Links as rows, routes as columns.

    names: (worker, node or group name, "out" or "in") of each link. rates: [num_links] bytes per second. table:
    [num_links, num_routes] how many times each byte of the route crosses the link.
    """

    names: tuple[tuple[str, str], ...]
    rates: FloatArray
    table: csr_matrix

    def seconds(self, sizes: npt.NDArray[np.int64]) -> FloatArray:
        """[num_links] or [num_links, n] time each link takes for routes of `sizes` bytes, [num_routes] or [num_routes, n]."""
        load: FloatArray = self.table @ sizes.astype(np.float64)
        found: FloatArray = (load.T / self.rates).T
        return found


def incidence(rows: Int64Array, routes: Int64Array, num_rows: int, num_routes: int) -> csr_matrix:
    """[num_rows, num_routes] how many of the (row, route) entries there are."""
    from scipy.sparse import csr_matrix  # a second's import that only the one worker that plans needs

    return csr_matrix((np.ones(len(rows)), (rows, routes)), shape=(num_rows, num_routes))


def link_use(topology: Topology, routes: npt.NDArray[np.void], hops: npt.NDArray[np.void]) -> Incidence:
    """All network links: every worker's, every limited node's, every group's uplink, each in both directions."""
    nodes = {name: i for i, name in enumerate(topology.nodes)}
    node = np.array([nodes[w.node] for w in topology.workers], dtype=np.int64)
    limits = [(name, rate) for name, rate in topology.node_bandwidth if name in nodes]
    names = [w.name for w in topology.workers] + [name for name, _ in limits] + [g.name for g in topology.groups]
    rates = (
        [w.bandwidth for w in topology.workers] + [rate for _, rate in limits] + [g.bandwidth for g in topology.groups]
    )
    first_limit = len(topology.workers)
    first_group = first_limit + len(limits)
    row_of_node = np.full(len(nodes), -1, dtype=np.int64)
    row_of_node[[nodes[name] for name, _ in limits]] = range(first_limit, first_group)
    row_of_group = np.full(len(nodes), -1, dtype=np.int64)
    for name, i in topology.group_of.items():
        row_of_group[nodes[name]] = first_group + i
    ends = np.concatenate([routes["sender"], hops["src"]]), np.concatenate([routes["entry"], hops["dst"]])
    route = np.concatenate([np.arange(len(routes), dtype=np.int64), hops["route"]])
    away = node[ends[0]] != node[ends[1]]
    apart = row_of_group[node[ends[0]]] != row_of_group[node[ends[1]]]
    rows, columns = [], []
    for way, end in enumerate(ends):
        for row, crosses in (
            (end, away),
            (row_of_node[node[end]], away & (row_of_node[node[end]] >= 0)),
            (row_of_group[node[end]], apart & (row_of_group[node[end]] >= 0)),
        ):
            rows.append(row[crosses] + way * len(names))
            columns.append(route[crosses])
    return Incidence(
        names=tuple((name, way) for way in _WAYS for name in names),
        rates=np.array(2 * rates, dtype=np.float64),
        table=incidence(np.concatenate(rows), np.concatenate(columns), 2 * len(names), len(routes)),
    )
