"""Independent check of a Plan. Shares no code with the planner: no overlay, classes, flow, routing, rounds or bound.

It runs over every plan, cached and received ones too. Where the planner refines boxes into atoms, this file counts: per
tensor, the atoms are pairwise disjoint; per worker, each atom said to be its lies in its map, and each of its boxes is
covered by atoms said to be its, element for element. Small tensors are checked on plain element indices taken from the
source map's lattices; large ones by box intersections. Where the planner solves an LP, this file checks the multipliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InternalError
from weightbridge.geometry import first_overlap, inside, intersection_numel, numel
from weightbridge.layout.boxes import BoxTable, expand
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import STAGES, Plan
from weightbridge.plan.topology import Role

__all__ = ["PlanFacts", "verify_plan"]

Int64Array = npt.NDArray[np.int64]

_SEGMENT_BYTES = 64  # a segment begins at a multiple of this in its slot
_CELLS_AT_ONCE = 1 << 21
_RELATIVE = 1e-6


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
    _check_ownership(plan, spec, maps, exact_numel)
    _check_hops(plan)
    _check_delivery(plan)
    _check_rounds(plan, spec)
    facts = _facts(plan)
    _check_bounds(plan, facts)
    return facts


def _refuse(what: str) -> NoReturn:
    raise InternalError(f"the plan is wrong: {what}; please report this with the plan's wire form")


def _check_tables(plan: Plan, spec: CheckpointSpec, maps: Sequence[SourceMap]) -> None:
    workers = len(plan.topology.workers)
    if plan.spec_digest != spec.digest:
        _refuse(f"it was made for checkpoint {plan.spec_digest}, not for {spec.digest}")
    if len(maps) != workers:
        _refuse(f"{len(maps)} source maps for {workers} workers")
    if plan.rounds < 1 or plan.alignment < 1 or plan.alignment % 8:
        _refuse(f"rounds is {plan.rounds} and alignment {plan.alignment}; expected >= 1 and a multiple of 8")
    trainers, rollouts = set(plan.topology.trainers), set(plan.topology.rollouts)
    for i, c in enumerate(plan.classes):
        if not c.holders or not c.needers or not set(c.holders) <= trainers or not set(c.needers) <= rollouts:
            _refuse(f"class {i} has holders {c.holders} and needers {c.needers}; expected trainers and rollouts, some of each")
        if list(c.holders) != sorted(set(c.holders)) or list(c.needers) != sorted(set(c.needers)):
            _refuse(f"class {i}: its workers are not sorted or not distinct")
    if len({(c.holders, c.needers) for c in plan.classes}) != len(plan.classes):
        _refuse("two classes have the same holders and needers")
    _check_ids("atoms.class_id", plan.atoms.class_id, len(plan.classes))
    _check_ids("atoms.tensor", plan.atoms.tensor, len(spec.tensors))
    for field, limit in (("class_id", len(plan.classes)), ("sender", workers), ("entry", workers)):
        _check_ids(f"routes.{field}", plan.routes[field], limit)
    for field, limit in (("route", len(plan.routes)), ("stage", len(STAGES)), ("src", workers), ("dst", workers)):
        _check_ids(f"hops.{field}", plan.hops[field], limit)


def _check_ids(what: str, ids: Int64Array, limit: int) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limit):
        _refuse(f"{what} holds {int(ids.min())} to {int(ids.max())}, expected 0 to {limit - 1}")


def _check_atoms(plan: Plan, spec: CheckpointSpec) -> None:
    """Atoms lie in their tensors and fill each class stream end to end, wide elements first."""
    a = plan.atoms
    n, rank = len(a), max((len(t.shape) for t in spec.tensors), default=0)
    if a.start.shape != a.step.shape or a.start.shape != a.count.shape or a.start.shape[0] != n or a.start.shape[1] < rank:
        _refuse(f"atom columns have shapes {a.start.shape}, {a.step.shape}, {a.count.shape} for {n} atoms of up to {rank} dims")
    shapes = np.ones((len(spec.tensors), a.start.shape[1]), dtype=np.int64)
    for i, t in enumerate(spec.tensors):
        shapes[i, : len(t.shape)] = t.shape
    last = a.start + (a.count - 1) * a.step
    bad = ((a.count < 1) | (a.step < 1) | (a.start < 0) | (last >= shapes[a.tensor])).any(axis=1)
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        _refuse(f"atom {i} lies outside tensor {spec.tensors[int(a.tensor[i])].name!r}")
    constant = [i for i, t in enumerate(spec.tensors) if t.name in spec.constants]
    if np.isin(a.tensor, constant).any():
        _refuse("a tensor that is a constant of the checkpoint spec is transferred")
    itemsize = np.array([t.dtype.itemsize for t in spec.tensors], dtype=np.int64)[a.tensor]
    end = a.stream_offset + numel(a.count) * itemsize
    new = np.ones(n, dtype=bool)
    new[1:] = a.class_id[1:] != a.class_id[:-1]
    before = np.concatenate([[0], end[:-1]])[:n]
    if (a.stream_offset != np.where(new, 0, before)).any() or (np.diff(a.class_id) < 0).any():
        _refuse("atoms are not laid end to end in their class streams")
    if ((itemsize[1:] > itemsize[:-1]) & ~new[1:]).any():
        _refuse("a class stream has narrow elements before wide ones, so aligned cuts may fall inside an element")
    ends = end[np.append(new[1:], True)] if n else end
    if np.unique(a.class_id).tolist() != list(range(len(plan.classes))) or ends.tolist() != [c.nbytes for c in plan.classes]:
        _refuse("the lengths of the class streams differ from the bytes of their atoms")


# --- who has what: atoms against source maps ----------------------------------------------------------------------------


def _check_ownership(plan: Plan, spec: CheckpointSpec, maps: Sequence[SourceMap], exact_numel: int) -> None:
    """Holders hold, needers need, nothing needed is missing and nothing comes twice."""
    owners = np.zeros((len(plan.classes), len(maps)), dtype=bool)
    for i, c in enumerate(plan.classes):
        owners[i, [*c.holders, *c.needers]] = True
    by_tensor = np.argsort(plan.atoms.tensor, kind="stable")
    bounds = np.searchsorted(plan.atoms.tensor[by_tensor], np.arange(len(spec.tensors) + 1))
    dims = plan.atoms.start.shape[1]
    tables: dict[str, BoxTable] = {}
    for m in maps:
        if m.spec_digest != spec.digest:
            _refuse(f"a source map belongs to checkpoint {m.spec_digest}, not to {spec.digest}")
        if m.fingerprint not in tables:
            tables[m.fingerprint] = expand(m, spec, dims)
    boxes = [_BoxIndex(tables[m.fingerprint], len(spec.tensors)) for m in maps]
    copies = [_LatticeIndex(m, len(spec.tensors)) for m in maps]
    checker = _OwnershipChecker(plan, spec, maps, owners)
    for tensor, t in enumerate(spec.tensors):
        if t.name in spec.constants:
            continue
        atoms = by_tensor[bounds[tensor] : bounds[tensor + 1]]
        if t.numel <= exact_numel:
            checker.by_elements(tensor, atoms, copies)
        else:
            checker.by_boxes(tensor, atoms, boxes)


class _BoxIndex:
    """A worker's distinct boxes, found by tensor."""

    def __init__(self, table: BoxTable, num_tensors: int) -> None:
        order = np.argsort(table.tensor, kind="stable")
        self._bounds = np.searchsorted(table.tensor[order], np.arange(num_tensors + 1))
        self._rows = np.concatenate([table.start, table.step, table.count], axis=1)[order]

    def of(self, tensor: int) -> Int64Array:
        """[m, 3 D] start, step, count."""
        return self._rows[self._bounds[tensor] : self._bounds[tensor + 1]]


class _LatticeIndex:
    """A worker's copies, found by tensor, as sets of flat element indices."""

    def __init__(self, source_map: SourceMap, num_tensors: int) -> None:
        self._copies = source_map.copies
        self._order = np.argsort(self._copies.tensor, kind="stable")
        self._bounds = np.searchsorted(self._copies.tensor[self._order], np.arange(num_tensors + 1))

    def elements(self, tensor: int, numel_: int) -> npt.NDArray[np.bool_]:
        """[numel] True for each element of the tensor that some copy takes."""
        found = np.zeros(numel_, dtype=bool)
        c = self._copies
        for row in self._order[self._bounds[tensor] : self._bounds[tensor + 1]].tolist():
            index = np.array(c.src_start[row])
            for count, stride in zip(c.count[row].tolist(), c.src_stride[row].tolist(), strict=True):
                index = index[..., None] + np.arange(count) * stride
            found[index.reshape(-1)] = True
        return found


class _OwnershipChecker:
    def __init__(
        self, plan: Plan, spec: CheckpointSpec, maps: Sequence[SourceMap], owners: npt.NDArray[np.bool_]
    ) -> None:
        self.plan, self.spec, self.owners = plan, spec, owners
        self.names = [w.name for w in plan.topology.workers]
        self.rollout = [w.role is Role.ROLLOUT for w in plan.topology.workers]
        self._passed: set[tuple[tuple[int, ...], bytes]] = set()

    def by_elements(self, tensor: int, atoms: Int64Array, copies: list[_LatticeIndex]) -> None:
        t, a = self.spec.tensors[tensor], self.plan.atoms
        owner = np.full(t.numel, -1, dtype=np.int64)
        pitch = np.cumprod([1, *t.shape[:0:-1]])[::-1] if t.shape else np.zeros(0, dtype=np.int64)
        for i in atoms.tolist():
            index = np.array(0)
            for d in range(len(t.shape)):
                index = index[..., None] + (a.start[i, d] + np.arange(a.count[i, d]) * a.step[i, d]) * pitch[d]
            if (owner[index.reshape(-1)] >= 0).any():
                _refuse(f"tensor {t.name!r}: an element lies in two atoms, the second is atom {i}")
            owner[index.reshape(-1)] = a.class_id[i]
        padded = np.concatenate([self.owners, np.zeros((1, self.owners.shape[1]), dtype=bool)])
        for w, name in enumerate(self.names):
            said, has = padded[owner, w], copies[w].elements(tensor, t.numel)
            if (said & ~has).any():
                self._not_there(t.name, name, int((said & ~has).sum()))
            if self.rollout[w] and (has & ~said).any():
                _refuse(f"tensor {t.name!r}: worker {name!r} needs {int((has & ~said).sum())} elements it is not given")

    def by_boxes(self, tensor: int, atoms: Int64Array, boxes: list[_BoxIndex]) -> None:
        t, a = self.spec.tensors[tensor], self.plan.atoms
        mine = [np.unique(b.of(tensor), axis=0) for b in boxes]
        what = np.concatenate([a.class_id[atoms, None], a.start[atoms], a.step[atoms], a.count[atoms]], axis=1)
        key = (t.shape, b"".join([what.tobytes(), *(len(m).to_bytes(8, "little") + m.tobytes() for m in mine)]))
        if key in self._passed:
            return  # another tensor with the same atoms and the same boxes has passed
        cells = (a.start[atoms], a.step[atoms], a.count[atoms])
        overlap = first_overlap(cells)
        if overlap is not None:
            _refuse(f"tensor {t.name!r}: atoms {[int(atoms[i]) for i in overlap]} share elements")
        dims = a.start.shape[1]
        for w, name in enumerate(self.names):
            given = self.owners[a.class_id[atoms], w]
            box = (mine[w][:, :dims], mine[w][:, dims : 2 * dims], mine[w][:, 2 * dims :])
            said = tuple(column[given] for column in cells)
            within = inside(tuple(c[:, None] for c in said), tuple(c[None] for c in box)).any(axis=1)  # type: ignore[arg-type]
            if not within.all():
                self._not_there(t.name, name, int(numel(said[2][~within]).sum()))
            if self.rollout[w]:
                common = intersection_numel(tuple(c[:, None] for c in said), tuple(c[None] for c in box))  # type: ignore[arg-type]
                short = numel(box[2]) - common.sum(axis=0)
                if (short != 0).any():
                    _refuse(f"tensor {t.name!r}: worker {name!r} needs {int(short.max())} elements of a box it is not given")
        self._passed.add(key)

    def _not_there(self, tensor: str, worker: str, count: int) -> NoReturn:
        _refuse(f"tensor {tensor!r}: worker {worker!r} is said to have {count} elements that are not in its source map")


# --- who moves what -----------------------------------------------------------------------------------------------------


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
            _refuse(f"route {i}: worker {workers[sender].name!r} sends class {class_id} but does not hold it")
        if workers[entry].role is not Role.ROLLOUT:
            _refuse(f"route {i} enters at {workers[entry].name!r}, which is no rollout worker")
        if not 0 <= lo < hi <= c.nbytes:
            _refuse(f"route {i} carries bytes {lo} to {hi} of class {class_id}, which has {c.nbytes}")
        has.append({entry: 0})
    for i, (route, stage, src, dst) in sorted(enumerate(plan.hops.tolist()), key=lambda hop: hop[1][1]):
        if stage < 1 or has[route].get(src, stage) >= stage:
            _refuse(f"hop {i}: worker {workers[src].name!r} passes route {route} on in stage {stage} before it has it")
        if workers[dst].role is not Role.ROLLOUT or dst in has[route] or node[src] == node[dst]:
            _refuse(f"hop {i}: worker {workers[dst].name!r} gets route {route} twice, on the sender's node, or is no rollout worker")
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
            _refuse(f"node {names[min(extra)]!r} gets bytes of class {i}, which nobody there needs")
        for v in sorted(need):
            here = mine & (into == v)
            if (by_network[here] == (v in own)).any():
                _refuse(f"node {names[v]!r} gets class {i} {'over the network though it holds it' if v in own else 'locally'}")
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
        _refuse(f"bytes {min(end, begin)} to {max(end, begin)} of {what} {kind}")


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
        if first == 0 and (cuts[0] != r["lo"]).any() or stop == plan.rounds and (cuts[-1] != r["hi"]).any():
            _refuse("the rounds do not add up to the routes")
        if (np.diff(cuts, axis=0) < 0).any():
            _refuse("a route's rounds overlap")
        inner = cuts < nbytes[r["class_id"]]
        at = np.searchsorted(position, (base[r["class_id"]] + cuts)[inner], side="right") - 1
        offset = (base[r["class_id"]] + cuts)[inner] - position[at]
        if (cuts[inner] % plan.alignment).any() or (offset % itemsize[at]).any():
            _refuse("a stream is cut off alignment or inside an element")
        parts = np.diff(cuts, axis=0)
        parts = -(-parts // _SEGMENT_BYTES) * _SEGMENT_BYTES
        for k, part in enumerate(parts, start=first):
            for slot, who, size in (
                ("send", r["sender"], part),
                ("receive", r["entry"], part),
                ("exchange", h["dst"], part[h["route"]]),
            ):
                load = np.bincount(who, weights=size, minlength=workers)
                if load.max(initial=0) > plan.slot_bytes:
                    name = plan.topology.workers[int(load.argmax())].name
                    _refuse(f"round {k} puts {int(load.max())} bytes into slot {slot!r} of {name!r}, the budget is {plan.slot_bytes}")


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
    pairs = {*zip(r["sender"].tolist(), r["entry"].tolist(), strict=True), *zip(h["src"].tolist(), h["dst"].tolist(), strict=True)}
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


# --- the bounds ---------------------------------------------------------------------------------------------------------


def _check_bounds(plan: Plan, facts: PlanFacts) -> None:
    """T_min is recomputed, the busiest link recounted, and the LP bound proven from its multipliers (see plan/bound.py)."""
    b, topology = plan.bounds, plan.topology
    terms = [facts.rollout_node_ingress_bytes[v] / topology.bandwidth_of_node(v, Role.ROLLOUT) for v in facts.needed_bytes]
    homes = {topology.workers[t].node for t in topology.trainers}
    terms.append(facts.trainer_egress_bytes / sum(topology.bandwidth_of_node(v, Role.TRAINER) for v in homes))
    _compare("t_min_seconds", b.t_min_seconds, max(terms))
    _compare("busiest_link_seconds", b.busiest_link_seconds, _busiest(plan))
    value = _dual_value(plan, facts)
    if b.link_bound_seconds > value * (1 + _RELATIVE) or b.link_bound_seconds > b.busiest_link_seconds * (1 + _RELATIVE):
        _refuse(f"link_bound_seconds is {b.link_bound_seconds}, its certificate proves {value} and the plan takes {b.busiest_link_seconds}")
    if b.t_min_seconds > b.busiest_link_seconds * (1 + _RELATIVE):
        _refuse(f"busiest_link_seconds {b.busiest_link_seconds} is below t_min_seconds {b.t_min_seconds}")


def _compare(what: str, said: float, found: float) -> None:
    if abs(said - found) > _RELATIVE * max(abs(said), abs(found)):
        _refuse(f"{what} is {said}, counted {found}")


def _busiest(plan: Plan) -> float:
    node, size = _node_ids(plan), plan.routes["hi"] - plan.routes["lo"]
    flows = [(s, e, n) for s, e, n in zip(plan.routes["sender"].tolist(), plan.routes["entry"].tolist(), size.tolist(), strict=True)]
    flows += [(src, dst, int(size[route])) for route, _, src, dst in plan.hops.tolist()]
    limits = dict(plan.topology.node_bandwidth)
    load: dict[tuple[str, int | str], int] = {}
    for src, dst, nbytes in flows:
        if node[src] != node[dst]:
            for way, w in (("out", src), ("in", dst)):
                for link in (w, plan.topology.workers[w].node):
                    load[way, link] = load.get((way, link), 0) + nbytes
    worst = 0.0
    for (_, link), nbytes in load.items():
        rate = plan.topology.workers[link].bandwidth if isinstance(link, int) else limits.get(link, float("inf"))
        worst = max(worst, nbytes / rate)
    return worst


def _dual_value(plan: Plan, facts: PlanFacts) -> float:
    """Check that the multipliers are feasible and return the bound they prove, in seconds."""
    topology, workers = plan.topology, plan.topology.workers
    trainers, nodes = topology.trainers, list(facts.needed_bytes)
    limits = {v: rate for v, rate in topology.node_bandwidth if v in topology.nodes}
    capped = [v for v in topology.nodes if v in limits]
    sizes = [len(plan.classes), len(trainers), len(nodes), len(nodes), len(capped)]
    dual = plan.bounds.dual
    if len(dual) != sum(sizes) or not all(isfinite(d) for d in dual):
        _refuse(f"the certificate has {len(dual)} multipliers, expected {sum(sizes)} finite ones")
    ends = np.cumsum([0, *sizes]).tolist()
    y, u, f, g, h = (dual[lo:hi] for lo, hi in zip(ends, ends[1:], strict=False))
    if min((*u, *f, *g, *h), default=0.0) < 0:
        _refuse("the certificate has a negative multiplier")
    rates = [topology.bandwidth_of_node(v, Role.ROLLOUT) for v in nodes]
    weight = sum(workers[t].bandwidth * m for t, m in zip(trainers, u, strict=True))
    weight += sum(rate * (a + b) for rate, a, b in zip(rates, f, g, strict=True))
    weight += sum(limits[v] * m for v, m in zip(capped, h, strict=True))
    if weight > 1 + _RELATIVE:
        _refuse(f"the certificate's link multipliers weigh {weight}, expected at most 1")
    cap = dict(zip(capped, h, strict=True))
    out = {t: m + cap.get(workers[t].node, 0.0) for t, m in zip(trainers, u, strict=True)}
    on = {v: m + cap.get(v, 0.0) for v, m in zip(nodes, f, strict=True)}
    value = sum(facts.rollout_node_ingress_bytes[v] * m for v, m in zip(nodes, g, strict=True))
    for i, (c, multiplier) in enumerate(zip(plan.classes, y, strict=True)):
        homes = {workers[t].node for t in c.holders}
        targets = {workers[w].node for w in c.needers} - homes
        if not targets:
            continue
        allowed = min(out[t] for t in c.holders) + (len(targets) - 1) * min(on[v] for v in targets)
        if multiplier > allowed * (1 + _RELATIVE):
            _refuse(f"the certificate's multiplier of class {i} is {multiplier}, its links allow {allowed}")
        value += c.nbytes * multiplier
    return value
