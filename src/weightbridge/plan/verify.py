"""Independent check of a Plan. Shares no code with the planner: no overlay, classes, flow, routing, rounds or bound.

It runs over every plan, cached and received ones too. Where the planner refines boxes into atoms, this file counts: per
tensor, the atoms are pairwise disjoint; per worker, each atom said to be its lies in its map, and each of its boxes is
covered by atoms said to be its, element for element. Where
the planner solves an LP, it checks the multipliers. `verify_ownership.py`, `verify_groups.py` and `verify_bounds.py` are
parts of this check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import STAGES, Plan
from weightbridge.plan.topology import Role
from weightbridge.plan.verify_bounds import check_bounds
from weightbridge.plan.verify_groups import check_groups
from weightbridge.plan.verify_ownership import check_ownership, refuse

__all__ = ["PlanFacts", "verify_plan"]

Int64Array = npt.NDArray[np.int64]

_SEGMENT_BYTES = 64  # a segment begins at a multiple of this in its slot
_CELLS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What a plan moves, counted by the verifier. All in bytes of one update; network means between nodes.

    model_bytes: distinct bytes that some rollout needs. trainer_egress_bytes: network bytes leaving the trainers.
    trainer_egress_per_worker: the same per trainer name. rollout_node_ingress_bytes: network bytes into each node with
    rollout workers. needed_bytes: distinct bytes each such node needs, local ones included. num_pairs: (from, to) worker
    pairs with traffic. max_out_pairs: most receivers of one worker.
    """

    model_bytes: int
    trainer_egress_bytes: int
    trainer_egress_per_worker: dict[str, int]
    rollout_node_ingress_bytes: dict[str, int]
    needed_bytes: dict[str, int]
    num_pairs: int
    max_out_pairs: int


def verify_plan(
    plan: Plan, spec: CheckpointSpec, maps: Sequence[SourceMap], *, exact_numel: int = 1 << 14
) -> PlanFacts:
    """Check everything the plan promises, or raise InternalError naming what is wrong and who is concerned.

    maps[i] belongs to plan.topology.workers[i]. exact_numel: tensors up to this many elements are checked on element
    indices. Called by whoever makes, receives or loads a plan; does not block.
    """
    _check_tables(plan, spec, maps)
    _check_atoms(plan, spec)
    check_ownership(plan, spec, maps, exact_numel)
    _check_routes(plan)
    _check_hops(plan)
    _check_delivery(plan)
    check_groups(plan)
    _check_rounds(plan, spec)
    facts = _facts(plan)
    check_bounds(plan, facts.rollout_node_ingress_bytes, facts.trainer_egress_bytes)
    return facts


def _check_tables(plan: Plan, spec: CheckpointSpec, maps: Sequence[SourceMap]) -> None:
    workers = len(plan.topology.workers)
    if plan.spec_digest != spec.digest:
        refuse(f"it was made for checkpoint {plan.spec_digest}, not for {spec.digest}")
    if len(maps) != workers:
        refuse(f"{len(maps)} source maps for {workers} workers")
    if plan.rounds < 1 or plan.alignment < 1 or plan.alignment % 8:
        refuse(f"rounds is {plan.rounds} and alignment {plan.alignment}; expected >= 1 and a multiple of 8")
    trainers, rollouts = set(plan.topology.trainers), set(plan.topology.rollouts)
    for i, c in enumerate(plan.classes):
        if not c.holders or not c.needers or not set(c.holders) <= trainers or not set(c.needers) <= rollouts:
            refuse(
                f"class {i} has holders {c.holders} and needers {c.needers}; expected trainers and rollouts, some of each"
            )
        if list(c.holders) != sorted(set(c.holders)) or list(c.needers) != sorted(set(c.needers)):
            refuse(f"class {i}: its workers are not sorted or not distinct")
    if len({(c.holders, c.needers) for c in plan.classes}) != len(plan.classes):
        refuse("two classes have the same holders and needers")
    _check_ids("atoms.class_id", plan.atoms.class_id, len(plan.classes))
    _check_ids("atoms.tensor", plan.atoms.tensor, len(spec.tensors))
    for field, limit in (("class_id", len(plan.classes)), ("sender", workers), ("entry", workers)):
        _check_ids(f"routes.{field}", plan.routes[field], limit)
    for field, limit in (("route", len(plan.routes)), ("stage", len(STAGES)), ("src", workers), ("dst", workers)):
        _check_ids(f"hops.{field}", plan.hops[field], limit)


def _check_ids(what: str, ids: Int64Array, limit: int) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limit):
        refuse(f"{what} holds {int(ids.min())} to {int(ids.max())}, expected 0 to {limit - 1}")


def _check_atoms(plan: Plan, spec: CheckpointSpec) -> None:
    """Atoms lie in their tensors and fill each class stream end to end, wide elements first."""
    a = plan.atoms
    n, rank = len(a), max((len(t.shape) for t in spec.tensors), default=0)
    if (
        a.start.shape != a.step.shape
        or a.start.shape != a.count.shape
        or a.start.shape[0] != n
        or a.start.shape[1] < rank
    ):
        refuse(
            f"atom columns have shapes {a.start.shape}, {a.step.shape}, {a.count.shape} for {n} atoms of up to {rank} dims"
        )
    shapes = np.ones((len(spec.tensors), a.start.shape[1]), dtype=np.int64)
    for i, t in enumerate(spec.tensors):
        shapes[i, : len(t.shape)] = t.shape
    last = a.start + (a.count - 1) * a.step
    bad = ((a.count < 1) | (a.step < 1) | (a.start < 0) | (last >= shapes[a.tensor])).any(axis=1)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        refuse(f"atom {i} lies outside tensor {spec.tensors[int(a.tensor[i])].name!r}")
    constant = [i for i, t in enumerate(spec.tensors) if t.name in spec.constants]
    if np.isin(a.tensor, constant).any():
        refuse("a tensor that is a constant of the checkpoint spec is transferred")
    itemsize = np.array([t.dtype.itemsize for t in spec.tensors], dtype=np.int64)[a.tensor]
    end = a.stream_offset + a.count.prod(axis=1) * itemsize
    new = np.ones(n, dtype=bool)
    new[1:] = a.class_id[1:] != a.class_id[:-1]
    before = np.concatenate([[0], end[:-1]])[:n]
    if (a.stream_offset != np.where(new, 0, before)).any() or (np.diff(a.class_id) < 0).any():
        refuse("atoms are not laid end to end in their class streams")
    if ((itemsize[1:] > itemsize[:-1]) & ~new[1:]).any():
        refuse("a class stream has narrow elements before wide ones, so aligned cuts may fall inside an element")
    ends = end[np.append(new[1:], True)] if n else end
    if np.unique(a.class_id).tolist() != list(range(len(plan.classes))) or ends.tolist() != [
        c.nbytes for c in plan.classes
    ]:
        refuse("the lengths of the class streams differ from the bytes of their atoms")


def _node_ids(plan: Plan) -> Int64Array:
    names = {name: i for i, name in enumerate(plan.topology.nodes)}
    return np.array([names[w.node] for w in plan.topology.workers], dtype=np.int64)


def _members(groups: Sequence[tuple[int, ...]]) -> tuple[Int64Array, Int64Array]:
    """(group, member) of all members of all groups, as two arrays."""
    sizes = np.array([len(g) for g in groups], dtype=np.int64)
    return np.repeat(np.arange(len(groups)), sizes), np.fromiter(chain.from_iterable(groups), np.int64)


def _check_routes(plan: Plan) -> None:
    """Senders hold, entries are rollouts, and each route carries some bytes of its class."""
    workers, r = plan.topology.workers, plan.routes
    class_id, holder = _members([c.holders for c in plan.classes])
    nbytes = np.array([c.nbytes for c in plan.classes], dtype=np.int64)[r["class_id"]]
    rollout = np.array([w.role is Role.ROLLOUT for w in workers])
    lacks = ~np.isin(r["class_id"] * len(workers) + r["sender"], class_id * len(workers) + holder)
    astray = ~rollout[r["entry"]]
    outside = (r["lo"] < 0) | (r["lo"] >= r["hi"]) | (r["hi"] > nbytes)
    bad = np.flatnonzero(lacks | astray | outside)
    if not len(bad):
        return
    i, route = int(bad[0]), {name: int(r[name][bad[0]]) for name in ("class_id", "lo", "hi", "sender", "entry")}
    if lacks[i]:
        name = workers[route["sender"]].name
        refuse(f"route {i}: worker {name!r} sends class {route['class_id']} but does not hold it")
    if astray[i]:
        refuse(f"route {i} enters at {workers[route['entry']].name!r}, which is no rollout worker")
    refuse(
        f"route {i} carries bytes {route['lo']} to {route['hi']} of class {route['class_id']}, which has {int(nbytes[i])}"
    )


def _check_hops(plan: Plan) -> None:
    """Who passes a route on has it from an earlier stage, to a rollout worker of another node that does not have it yet."""
    workers, node, r, h = plan.topology.workers, _node_ids(plan), plan.routes, plan.hops
    rollout = np.array([w.role is Role.ROLLOUT for w in workers])
    # who gets which route in which stage: the entries, then the hops; the first time counts, the second is an error
    receipt = np.concatenate([np.arange(len(r)) * len(workers) + r["entry"], h["route"] * len(workers) + h["dst"]])
    stage = np.concatenate([np.zeros(len(r), dtype=np.int64), h["stage"]])
    order = np.lexsort((np.arange(len(receipt)), stage, receipt))
    again = np.zeros(len(receipt), dtype=bool)
    again[order[1:]] = receipt[order[1:]] == receipt[order[:-1]]
    known = order[~again[order]]
    source = h["route"] * len(workers) + h["src"]
    at = np.minimum(np.searchsorted(receipt[known], source), max(0, len(known) - 1))
    early = (receipt[known][at] != source) | (stage[known][at] >= h["stage"])
    twice = ~rollout[h["dst"]] | again[len(r) :] | (node[h["src"]] == node[h["dst"]])
    bad = np.flatnonzero(early | twice)
    if not len(bad):
        return
    i = int(bad[np.argmin(h["stage"][bad])])  # of the earliest stage the first: what comes after it follows from it
    src, dst = workers[int(h["src"][i])].name, workers[int(h["dst"][i])].name
    if early[i]:
        refuse(f"hop {i}: worker {src!r} passes route {h['route'][i]} on in stage {h['stage'][i]} before it has it")
    refuse(f"hop {i}: worker {dst!r} gets route {h['route'][i]} twice, on the sender's node, or is no rollout worker")


def _check_delivery(plan: Plan) -> None:
    """Each node that needs a class gets each of its bytes once: from its own trainers where they hold it, else over the
    network; nobody else gets any; and each byte that must leave the trainers' nodes leaves them once."""
    node, names = _node_ids(plan), plan.topology.nodes
    r, h = plan.routes, plan.hops
    nbytes = np.array([c.nbytes for c in plan.classes], dtype=np.int64)
    need, own = _needs(plan)
    local = node[r["sender"]] == node[r["entry"]]
    route = np.concatenate([np.arange(len(r)), h["route"]])
    into = r["class_id"][route] * len(names) + np.concatenate([node[r["entry"]], node[h["dst"]]])
    extra = into[~np.isin(into, need)]
    if len(extra):
        i, v = divmod(int(extra.min()), len(names))
        refuse(f"node {names[v]!r} gets bytes of class {i}, which nobody there needs")
    by_network = np.concatenate([~local, np.ones(len(h), dtype=bool)])
    wrong = into[by_network == np.isin(into, own)]
    if len(wrong):
        i, v = divmod(int(wrong.min()), len(names))
        how = "over the network though it holds it" if int(wrong.min()) in own else "locally"
        refuse(f"node {names[v]!r} gets class {i} {how}")
    gap = _first_gap(np.searchsorted(need, into), r["lo"][route], r["hi"][route], nbytes[need // len(names)])
    if gap is not None:
        i, v = divmod(int(need[gap[0]]), len(names))
        refuse(f"{gap[1]} of class {i} into node {names[v]!r} {gap[2]}")
    leaving = np.unique(need[~np.isin(need, own)] // len(names))
    out = np.flatnonzero(~local & np.isin(r["class_id"], leaving))
    gap = _first_gap(np.searchsorted(leaving, r["class_id"][out]), r["lo"][out], r["hi"][out], nbytes[leaving])
    if gap is not None:
        refuse(f"{gap[1]} of class {int(leaving[gap[0]])} out of the trainers {gap[2]}")


def _needs(plan: Plan) -> tuple[Int64Array, Int64Array]:
    """Sorted class * num_nodes + node: where somebody on the node needs the class; and those where a trainer there holds it."""
    node, num_nodes = _node_ids(plan), len(plan.topology.nodes)
    class_id, needer = _members([c.needers for c in plan.classes])
    need = np.unique(class_id * num_nodes + node[needer])
    class_id, holder = _members([c.holders for c in plan.classes])
    return need, np.intersect1d(need, class_id * num_nodes + node[holder])


def _first_gap(group: Int64Array, lo: Int64Array, hi: Int64Array, nbytes: Int64Array) -> tuple[int, str, str] | None:
    """None where the pieces [lo, hi) of each group tile [0, nbytes) of that group; else (group, which bytes, what is wrong).

    group, lo, hi: [n]. nbytes: [num_groups]; a group without pieces is a gap.
    """
    ends = np.arange(len(nbytes))
    group, lo, hi = np.concatenate([group, ends]), np.concatenate([lo, nbytes]), np.concatenate([hi, nbytes])
    order = np.lexsort((np.arange(len(group)), lo, group))  # the added piece, of no bytes, is the last of its group
    group, lo, hi = group[order], lo[order], hi[order]
    reached = np.zeros(len(group), dtype=np.int64)
    reached[1:] = np.where(group[1:] == group[:-1], hi[:-1], 0)
    wrong = np.flatnonzero(reached != lo)
    if not len(wrong):
        return None
    end, begin = int(reached[wrong[0]]), int(lo[wrong[0]])
    what = f"bytes {min(end, begin)} to {max(end, begin)}"
    return int(group[wrong[0]]), what, "are missing" if end < begin else "come twice"


def _check_rounds(plan: Plan, spec: CheckpointSpec) -> None:
    """Every cut of every round is aligned and between elements, and no slot exceeds the budget."""
    if plan.unit_bytes < 1 or plan.unit_bytes % plan.alignment:
        refuse(f"unit_bytes is {plan.unit_bytes}; expected a positive multiple of the alignment {plan.alignment}")
    r, h, a = plan.routes, plan.hops, plan.atoms
    itemsize = np.array([t.dtype.itemsize for t in spec.tensors], dtype=np.int64)[a.tensor]
    nbytes = np.array([c.nbytes for c in plan.classes], dtype=np.int64)
    base = np.cumsum(nbytes) - nbytes
    position = base[a.class_id] + a.stream_offset
    workers = len(plan.topology.workers)
    chunk = max(1, _CELLS_AT_ONCE // max(1, len(r), len(h)))
    for first in range(0, plan.rounds, chunk):
        stop = min(first + chunk, plan.rounds)
        cuts = plan.cuts(range(first, stop + 1))
        begins, ends = cuts[0] == r["lo"], cuts[-1] == r["hi"]
        if not ((begins.all() or first > 0) and (ends.all() or stop < plan.rounds)):
            refuse("the rounds do not add up to the routes")
        if (np.diff(cuts, axis=0) < 0).any():
            refuse("a route's rounds overlap")
        inner = cuts < nbytes[r["class_id"]]
        at = np.searchsorted(position, (base[r["class_id"]] + cuts)[inner], side="right") - 1
        offset = (base[r["class_id"]] + cuts)[inner] - position[at]
        if (cuts[inner] % plan.alignment).any() or (offset % itemsize[at]).any():
            refuse("a stream is cut off alignment or inside an element")
        parts = np.diff(cuts, axis=0)
        parts = -(-parts // _SEGMENT_BYTES) * _SEGMENT_BYTES
        writes = [("send", r["sender"], parts), (STAGES[0], r["entry"], parts)]
        for stage in range(1, len(STAGES)):
            hops = h[h["stage"] == stage]
            writes.append((STAGES[stage], hops["dst"], parts[:, hops["route"]]))
        for slot, who, size in writes:
            cell = np.arange(stop - first)[:, None] * workers + who
            load = np.bincount(cell.reshape(-1), weights=size.reshape(-1), minlength=(stop - first) * workers)
            if load.max() > plan.slot_bytes:
                k, w = divmod(int(load.argmax()), workers)
                name = plan.topology.workers[w].name
                refuse(
                    f"round {first + k} puts {int(load.max())} bytes into slot {slot!r} of {name!r}, over {plan.slot_bytes}"
                )


def _facts(plan: Plan) -> PlanFacts:
    node, names, workers = _node_ids(plan), plan.topology.nodes, plan.topology.workers
    r, h = plan.routes, plan.hops
    size = r["hi"] - r["lo"]
    away = node[r["sender"]] != node[r["entry"]]
    egress = _sums(r["sender"][away], size[away], len(workers))
    ingress = _sums(node[r["entry"][away]], size[away], len(names)) + _sums(
        node[h["dst"]], size[h["route"]], len(names)
    )
    need, _ = _needs(plan)
    nbytes = np.array([c.nbytes for c in plan.classes], dtype=np.int64)
    needed = _sums(need % len(names), nbytes[need // len(names)], len(names))
    pairs = np.unique(np.concatenate([r["sender"], h["src"]]) * len(workers) + np.concatenate([r["entry"], h["dst"]]))
    homes = sorted({int(node[w]) for w in plan.topology.rollouts})
    return PlanFacts(
        model_bytes=int(nbytes.sum()),
        trainer_egress_bytes=int(egress.sum()),
        trainer_egress_per_worker={workers[t].name: int(egress[t]) for t in plan.topology.trainers},
        rollout_node_ingress_bytes={names[v]: int(ingress[v]) for v in homes},
        needed_bytes={names[v]: int(needed[v]) for v in homes},
        num_pairs=len(pairs),
        max_out_pairs=int(np.bincount(pairs // len(workers)).max(initial=0)),
    )


def _sums(group: Int64Array, values: Int64Array, num_groups: int) -> Int64Array:
    found = np.zeros(num_groups, dtype=np.int64)
    np.add.at(found, group, values)
    return found
