"""Independent check of a Plan. Shares no code with the planner: no overlay, classes, flow, routing, rounds or bound.

It runs over every plan, cached and received ones too. Where the planner refines boxes into atoms, this file counts: per
tensor, the atoms are pairwise disjoint; per worker, each atom said to be its lies in its map, and each of its boxes is
covered by atoms said to be its, element for element. Where
the planner solves an LP, it checks the multipliers. `verify_ownership.py` and `verify_bounds.py` are parts of this check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import STAGES, Plan
from weightbridge.plan.topology import Role
from weightbridge.plan.verify_bounds import check_bounds
from weightbridge.plan.verify_ownership import check_ownership, refuse

__all__ = ["PlanFacts", "verify_plan"]

Int64Array = npt.NDArray[np.int64]

_SEGMENT_BYTES = 64  # a segment begins at a multiple of this in its slot
_CELLS_AT_ONCE = 1 << 21


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
    _check_hops(plan)
    _check_delivery(plan)
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


def _check_hops(plan: Plan) -> None:
    """Senders hold, entries are rollouts, and who passes a route on has it from an earlier stage."""
    workers, node = plan.topology.workers, _node_ids(plan)
    has: list[dict[int, int]] = []  # per route: worker -> stage in which it got the bytes
    for i, r in enumerate(plan.routes.tolist()):
        class_id, lo, hi, sender, entry = r
        c = plan.classes[class_id]
        if sender not in c.holders:
            refuse(f"route {i}: worker {workers[sender].name!r} sends class {class_id} but does not hold it")
        if workers[entry].role is not Role.ROLLOUT:
            refuse(f"route {i} enters at {workers[entry].name!r}, which is no rollout worker")
        if not 0 <= lo < hi <= c.nbytes:
            refuse(f"route {i} carries bytes {lo} to {hi} of class {class_id}, which has {c.nbytes}")
        has.append({entry: 0})
    for i, (route, stage, src, dst) in sorted(enumerate(plan.hops.tolist()), key=lambda hop: hop[1][1]):
        if stage < 1 or has[route].get(src, stage) >= stage:
            refuse(f"hop {i}: worker {workers[src].name!r} passes route {route} on in stage {stage} before it has it")
        if workers[dst].role is not Role.ROLLOUT or dst in has[route] or node[src] == node[dst]:
            refuse(
                f"hop {i}: worker {workers[dst].name!r} gets route {route} twice, on the sender's node, or is no rollout worker"
            )
        has[route][dst] = stage


def _check_delivery(plan: Plan) -> None:
    """Each node that needs a class gets each of its bytes once: from its own trainers where they hold it, else over the
    network; nobody else gets any; and each byte that must leave the trainers' nodes leaves them once."""
    node, names = _node_ids(plan), plan.topology.nodes
    r, h = plan.routes, plan.hops
    local = node[r["sender"]] == node[r["entry"]]
    into = np.concatenate([node[r["entry"]], node[h["dst"]]])
    route = np.concatenate([np.arange(len(r)), h["route"]])
    by_network = np.concatenate([~local, np.ones(len(h), dtype=bool)])
    class_of = r["class_id"][route]
    for i, c in enumerate(plan.classes):
        need = {int(node[w]) for w in c.needers}
        own = need & {int(node[w]) for w in c.holders}
        mine = class_of == i
        extra = set(into[mine].tolist()) - need
        if extra:
            refuse(f"node {names[min(extra)]!r} gets bytes of class {i}, which nobody there needs")
        for v in sorted(need):
            here = mine & (into == v)
            if (by_network[here] == (v in own)).any():
                refuse(
                    f"node {names[v]!r} gets class {i} {'over the network though it holds it' if v in own else 'locally'}"
                )
            _check_tiling(r, route[here], c.nbytes, f"class {i} into node {names[v]!r}")
        if need - own:
            _check_tiling(r, np.flatnonzero((r["class_id"] == i) & ~local), c.nbytes, f"class {i} out of the trainers")


def _check_tiling(routes: npt.NDArray[np.void], ids: Int64Array, nbytes: int, what: str) -> None:
    order = ids[np.argsort(routes["lo"][ids], kind="stable")]
    lo, hi = routes["lo"][order], routes["hi"][order]
    edges = np.concatenate([[0], hi]), np.concatenate([lo, [nbytes]])
    wrong = np.flatnonzero(edges[0] != edges[1])
    if len(wrong):
        end, begin = int(edges[0][wrong[0]]), int(edges[1][wrong[0]])
        kind = "are missing" if end < begin else "come twice"
        refuse(f"bytes {min(end, begin)} to {max(end, begin)} of {what} {kind}")


def _check_rounds(plan: Plan, spec: CheckpointSpec) -> None:
    """Every cut of every round is aligned and between elements, and no slot exceeds the budget."""
    r, h, a = plan.routes, plan.hops, plan.atoms
    itemsize = np.array([t.dtype.itemsize for t in spec.tensors], dtype=np.int64)[a.tensor]
    nbytes = np.array([c.nbytes for c in plan.classes], dtype=np.int64)
    base = np.cumsum(nbytes) - nbytes
    position = base[a.class_id] + a.stream_offset
    workers = len(plan.topology.workers)
    chunk = max(1, _CELLS_AT_ONCE // max(1, len(r)))
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
        for slot, who, size in (
            ("send", r["sender"], parts),
            ("receive", r["entry"], parts),
            ("exchange", h["dst"], parts[:, h["route"]]),
        ):
            cell = np.arange(stop - first)[:, None] * workers + who
            load = np.bincount(cell.reshape(-1), weights=size.reshape(-1), minlength=(stop - first) * workers)
            if load.max() > plan.slot_bytes:
                k, w = divmod(int(load.argmax()), workers)
                name = plan.topology.workers[w].name
                refuse(
                    f"round {first + k} puts {int(load.max())} bytes into slot {slot!r} of {name!r}, over {plan.slot_bytes}"
                )


def _facts(plan: Plan) -> PlanFacts:
    node, names = _node_ids(plan), plan.topology.nodes
    r, h = plan.routes, plan.hops
    size = r["hi"] - r["lo"]
    away = node[r["sender"]] != node[r["entry"]]
    egress = {plan.topology.workers[t].name: int(size[away & (r["sender"] == t)].sum()) for t in plan.topology.trainers}
    ingress, needed = {}, {}
    for v in sorted({int(node[w]) for w in plan.topology.rollouts}):
        hops = size[h["route"][node[h["dst"]] == v]].sum()
        ingress[names[v]] = int(size[away & (node[r["entry"]] == v)].sum() + hops)
        needed[names[v]] = sum(c.nbytes for c in plan.classes if any(node[w] == v for w in c.needers))
    pairs = {
        *zip(r["sender"].tolist(), r["entry"].tolist(), strict=True),
        *zip(h["src"].tolist(), h["dst"].tolist(), strict=True),
    }
    senders = [src for src, _ in pairs]
    return PlanFacts(
        model_bytes=sum(c.nbytes for c in plan.classes),
        trainer_egress_bytes=sum(egress.values()),
        trainer_egress_per_worker=egress,
        rollout_node_ingress_bytes=ingress,
        needed_bytes=needed,
        num_pairs=len(pairs),
        max_out_pairs=max((senders.count(s) for s in set(senders)), default=0),
    )
