"""Part of the plan's verifier: what crosses between groups of nodes, and who passes it on inside them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightbridge.plan.plan import STAGES, Plan
from weightbridge.plan.verify_ownership import refuse

__all__ = ["check_groups"]

Int64Array = npt.NDArray[np.int64]


def check_groups(plan: Plan) -> None:
    """Each byte comes once to each group with nodes that need it over the network; so to the nodes in no group, as if they
    were one. Where it comes to is where it is passed on from: by the entry worker in the stage after it entered, by a
    gateway in the relay stage, which never leaves a group.
    """
    topology, r, h = plan.topology, plan.routes, plan.hops
    group = np.array([topology.group_of.get(w.node, len(topology.groups)) for w in topology.workers], dtype=np.int64)
    crosses = group[h["src"]] != group[h["dst"]]
    relayed = h["stage"] == STAGES.index("relay")
    _refuse_hop(plan, crosses & relayed, "is relayed out of the group of the worker that has it")
    num_workers = len(topology.workers)
    arrivals = h["route"][crosses] * num_workers + h["dst"][crosses]
    sources = h["route"] * num_workers + h["src"]
    _refuse_hop(plan, relayed & ~np.isin(sources, arrivals), "is relayed by a worker to which no other group sent it")

    names = {name: i for i, name in enumerate(topology.nodes)}
    node = np.array([names[w.node] for w in topology.workers], dtype=np.int64)
    entering = np.flatnonzero(node[r["sender"]] != node[r["entry"]])
    route = np.concatenate([entering, h["route"][crosses]])
    into = np.concatenate([group[r["entry"][entering]], group[h["dst"][crosses]]])
    num_groups = len(topology.groups) + 1
    arrived = r["class_id"][route] * num_groups + into
    order = np.lexsort((r["lo"][route], arrived))
    arrived, lo, hi = arrived[order], r["lo"][route][order], r["hi"][route][order]
    wrong = np.flatnonzero((arrived[1:] == arrived[:-1]) & (lo[1:] < hi[:-1]))
    if len(wrong):
        class_id, d = divmod(int(arrived[wrong[0]]), num_groups)
        who = f"group {topology.groups[d].name!r}" if d < len(topology.groups) else "the nodes in no group"
        refuse(
            f"bytes {int(lo[wrong[0] + 1])} to {int(min(hi[wrong[0]], hi[wrong[0] + 1]))} of class {class_id} come to "
            f"{who} twice"
        )


def _refuse_hop(plan: Plan, wrong: npt.NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        route, _, src, dst = plan.hops[i].tolist()
        names = [plan.topology.workers[w].name for w in (src, dst)]
        refuse(f"hop {i}: route {route} from {names[0]!r} to {names[1]!r} {what}")
