"""What a plan has each worker write, await and hold, derived anew from its routes and hops, as arrays for all workers.

The slot rule, told again without the lowering: in round k the slot of a stage holds, in route order, one segment for each
route that passes through it and whose part of round k is not empty, each beginning at the next multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.dtypes import DType, dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InfeasibleError, InternalError
from weightbridge.plan.plan import STAGES, Plan
from weightbridge.plan.topology import Role

__all__ = ["SEND", "AtomIndex", "Holdings", "Lines", "PlanTables", "joined"]

Int64Array = npt.NDArray[np.int64]

SEND = -1
"""The stage number of a trainer's send slot; the others count in `plan.STAGES`."""

_SEGMENT_BYTES = 64


def _refuse(what: str) -> NoReturn:
    raise InternalError(f"no program can be checked against this plan: {what}; verify the plan first")


def joined(arrays: Sequence[npt.NDArray[np.void]], dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    """All rows in one array, read-only; all arrays are [n] of `dtype`. NumPy's own way takes microseconds an array."""
    try:
        data = b"".join(arrays)  # type: ignore[arg-type]  # an array is a buffer
    except (BufferError, TypeError, ValueError):  # some array is not contiguous
        data = b"".join(a.tobytes() for a in arrays)
    found: npt.NDArray[np.void] = np.frombuffer(data, dtype=dtype)
    return found


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Every pair of a slot and a route that lies in it, sorted by (worker, stage, route); h below counts them.

    worker, stage, route: [h] whose slot, which one (SEND or a position in STAGES), what lies there. writer: [h] who writes
    it there, -1 in a send slot. source: [h] the holding of the writer that it is a copy of, -1 in a send slot. offset:
    [h, rounds] bytes within the slot copy, void where the route's part is empty. first: [num_workers + 1] those of a worker.
    """

    worker: Int64Array
    stage: Int64Array
    route: Int64Array
    writer: Int64Array
    source: Int64Array
    offset: npt.NDArray[np.signedinteger]
    first: Int64Array

    def of(self, worker: int) -> slice:
        return slice(int(self.first[worker]), int(self.first[worker + 1]))


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Segments of writes, sorted by (round, stage, peer, route). All [n].

    write: the holding that the segment arrives in, which names the write. here, there: bytes within the slot copies of
    the worker asked about and of its peer.
    """

    round: Int64Array
    stage: Int64Array
    peer: Int64Array
    route: Int64Array
    nbytes: Int64Array
    here: Int64Array
    there: Int64Array
    write: Int64Array


@dataclass(frozen=True, kw_only=True)
class AtomIndex:
    """The plan's atoms in one space of *global stream bytes*: every class stream laid behind the one before.

    class_base: [num_classes + 1]. begin, end: [n] of each atom. tensor, itemsize, numel: [n]. dtype: [n] position in
    `dtypes`. start, step, count: [n, D] as in AtomTable, D at least the rank of every tensor.
    """

    class_base: Int64Array
    begin: Int64Array
    end: Int64Array
    tensor: Int64Array
    dtypes: tuple[DType, ...]
    dtype: Int64Array
    itemsize: Int64Array
    numel: Int64Array
    start: Int64Array
    step: Int64Array
    count: Int64Array

    @classmethod
    def of(cls, plan: Plan, spec: CheckpointSpec) -> AtomIndex:
        atoms, tensors = plan.atoms, spec.tensors
        missing = max([1, *(len(t.shape) for t in tensors)]) - atoms.count.shape[1]
        fills = ((atoms.start, 0), (atoms.step, 1), (atoms.count, 1))
        start, step, count = (np.pad(c, ((0, 0), (0, max(0, missing))), constant_values=fill) for c, fill in fills)
        base = np.cumsum([0, *(c.nbytes for c in plan.classes)], dtype=np.int64)
        number: dict[str, int] = {}
        dtype = np.array([number.setdefault(t.dtype.name, len(number)) for t in tensors], dtype=np.int64)[atoms.tensor]
        itemsize = np.array([t.dtype.itemsize for t in tensors], dtype=np.int64)[atoms.tensor]
        numel = count.prod(axis=1)
        begin = base[atoms.class_id] + atoms.stream_offset
        end = begin + numel * itemsize
        if (begin[1:] < end[:-1]).any() or (end > base[atoms.class_id + 1]).any():
            _refuse("its atoms do not lie one behind the other in their class streams")
        return cls(
            class_base=base, begin=begin, end=end, tensor=atoms.tensor, dtypes=tuple(map(dtype_named, number)), dtype=dtype,
            itemsize=itemsize, numel=numel, start=start, step=step, count=count,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlanTables:
    """names: of the workers. trainer: [num_workers]. cuts: [num_routes, rounds + 1] class stream bytes. full: [num_routes,
    rounds] whether the part has bytes. route_class: [num_routes]. needs: [num_classes, num_workers] who assembles a class.

    outgoing, incoming: the holdings that a worker writes, and those that are written to it, each sorted by (worker, stage,
    peer, route); out_first, in_first: [num_workers + 1] where those of a worker begin.
    """

    plan: Plan
    names: tuple[str, ...]
    trainer: npt.NDArray[np.bool_]
    cuts: Int64Array
    full: npt.NDArray[np.bool_]
    route_class: Int64Array
    owns: npt.NDArray[np.bool_]
    needs: npt.NDArray[np.bool_]
    holdings: Holdings
    outgoing: Int64Array
    out_first: Int64Array
    incoming: Int64Array
    in_first: Int64Array

    @classmethod
    def of(cls, plan: Plan) -> PlanTables:
        workers = plan.topology.workers
        cuts = np.ascontiguousarray(plan.cuts(range(plan.rounds + 1)).T)
        size = np.diff(cuts, axis=1)
        ends = (cuts[:, 0] != plan.routes["lo"]) | (cuts[:, -1] != plan.routes["hi"])
        if (size < 0).any() or ends.any():
            _refuse("the cuts of a route do not ascend from its begin to its end")
        holdings = _holdings(plan, size)
        needs, owns = np.zeros((2, len(plan.classes), len(workers)), dtype=bool)
        for i, c in enumerate(plan.classes):
            needs[i, list(c.needers)] = True
            owns[i, [*c.needers, *c.holders]] = True
        written = np.flatnonzero(holdings.stage != SEND)
        h = [c[written] for c in (holdings.route, holdings.worker, holdings.writer, holdings.stage)]
        ranks = np.arange(len(workers) + 1)
        out, into = np.lexsort((h[0], h[1], h[3], h[2])), np.lexsort((h[0], h[2], h[3], h[1]))
        return cls(
            plan=plan, names=tuple(w.name for w in workers), cuts=cuts, full=size > 0,
            trainer=np.array([w.role is Role.TRAINER for w in workers], dtype=bool),
            route_class=plan.routes["class_id"].astype(np.int64), owns=owns, needs=needs, holdings=holdings,
            outgoing=written[out], out_first=np.searchsorted(h[2][out], ranks),
            incoming=written[into], in_first=np.searchsorted(h[1][into], ranks),
        )  # fmt: skip

    def name(self, worker: int) -> str:
        """For messages; a number that is no worker's is shown as such."""
        return self.names[worker] if 0 <= worker < len(self.names) else f"worker {worker}"

    def lines(self, worker: int, *, outgoing: bool) -> Lines:
        """All segments that `worker` writes, or all that it awaits."""
        h = self.holdings
        order, first = (self.outgoing, self.out_first) if outgoing else (self.incoming, self.in_first)
        writes = order[first[worker] : first[worker + 1]]
        round_, nth = np.nonzero(self.full[h.route[writes]].T)
        write = writes[nth]
        route = h.route[write]
        ends = h.offset[h.source[write], round_], h.offset[write, round_]
        here, there = ends if outgoing else ends[::-1]
        return Lines(
            round=round_, stage=h.stage[write], peer=(h.worker if outgoing else h.writer)[write], route=route,
            nbytes=self.cuts[route, round_ + 1] - self.cuts[route, round_],
            here=here.astype(np.int64), there=there.astype(np.int64), write=write,
        )  # fmt: skip

    def neighbours(self, worker: int) -> tuple[int, ...]:
        """The rollout workers of its node, itself included if it is one, ascending."""
        return self.plan.topology.on_node(self.plan.topology.workers[worker].node, Role.ROLLOUT)


def _holdings(plan: Plan, size: Int64Array) -> Holdings:
    routes, hops = plan.routes, plan.hops
    n, ids = len(routes), np.arange(len(routes), dtype=np.int64)
    worker = np.concatenate([routes["sender"], routes["entry"], hops["dst"]])
    stage = np.concatenate([np.full(n, SEND), np.zeros(n, dtype=np.int64), hops["stage"]])
    route = np.concatenate([ids, ids, hops["route"]])
    writer = np.concatenate([np.full(n, -1), routes["sender"], hops["src"]])
    order = np.lexsort((route, stage, worker))
    worker, stage, route, writer = (c[order] for c in (worker, stage, route, writer))
    key = worker * n + route
    by_key = np.argsort(key, kind="stable")
    if (np.diff(key[by_key]) == 0).any():
        twice = int(by_key[np.argmin(np.diff(key[by_key]))])
        _refuse(f"route {route[twice]} lies in two slots of {plan.topology.workers[int(worker[twice])].name!r}")
    wanted = np.where(writer < 0, key, writer * n + route)
    at = by_key[np.minimum(np.searchsorted(key[by_key], wanted), max(0, len(key) - 1))] if len(key) else key
    lost = (key[at] != wanted) | ((stage[at] >= stage) & (writer >= 0))
    if lost.any():
        i = int(np.argmax(lost))
        _refuse(f"{plan.topology.workers[int(writer[i])].name!r} writes route {route[i]} before it has it")
    source = np.where(writer < 0, -1, at)
    first = np.searchsorted(worker, np.arange(len(plan.topology.workers) + 1))
    offset = _offsets(plan, size, worker, stage, route)
    return Holdings(worker=worker, stage=stage, route=route, writer=writer, source=source, offset=offset, first=first)


def _offsets(
    plan: Plan, size: Int64Array, worker: Int64Array, stage: Int64Array, route: Int64Array
) -> npt.NDArray[np.signedinteger]:
    """[h, rounds] the slot rule. Four bytes each where the budget allows: a large plan has tens of millions."""
    aligned = (size + (_SEGMENT_BYTES - 1)) // _SEGMENT_BYTES * _SEGMENT_BYTES
    small = plan.slot_bytes < 1 << 31
    offset = np.zeros((len(route), plan.rounds), dtype=np.int32 if small else np.int64)
    edges = np.flatnonzero((np.diff(worker) != 0) | (np.diff(stage) != 0)) + 1
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(route)], strict=True):
        ends = np.cumsum(aligned[route[begin:end]], axis=0)
        used = int(ends[-1].max(initial=0)) if end > begin else 0
        if used > plan.slot_bytes:
            name, k = plan.topology.workers[int(worker[begin])].name, int(np.argmax(ends[-1]))
            stage_name = "send" if stage[begin] == SEND else STAGES[int(stage[begin])]
            raise InfeasibleError(
                f"slot {stage_name!r} of {name!r} must hold {used} bytes in round {k}, the plan allows {plan.slot_bytes}; "
                "plan more rounds or raise the budget",
                needed_bytes=used,
                budget_bytes=plan.slot_bytes,
            )
        offset[begin + 1 : end] = ends[:-1]
    return offset
