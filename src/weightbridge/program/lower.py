"""Lower a plan to one worker's program. Pure: every worker computes its own, and each end of a write computes the same.

Cost grows with the number of distinct boxes and (round, peer) pairs, not with elements: all boxes of a worker are
handled as arrays, and Python takes one step per (round, peer).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InternalError, UnsupportedError, UsageError
from weightbridge.layout.boxes import BoxTable, expand
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import STAGES, Plan
from weightbridge.plan.topology import Role
from weightbridge.program.descriptors import StreamIndex, descriptors, pieces_of
from weightbridge.program.program import DESCRIPTOR, SEGMENT, Assemble, Await, Post, Round, WorkerProgram
from weightbridge.program.slots import SEND, SlotLayout, arena_of, route_cuts, routes_through, slot_layout

__all__ = ["lower"]

Int64Array = npt.NDArray[np.int64]


def lower(
    plan: Plan,
    spec: CheckpointSpec,
    source_map: SourceMap,
    worker: int,
    *,
    codec: str = "identity",
    base_version: int = -1,
) -> WorkerProgram:
    """The program of `worker` (position in plan.topology.workers) under `plan`.

    source_map: the worker's own. codec, base_version: recorded in the program; they change nothing else.
    Raises UsageError when spec, map and plan do not belong together, CoverageError when the map lacks what the plan
    gives the worker, UnsupportedError for a cast without a kernel.
    """
    if not spec.digest == plan.spec_digest == source_map.spec_digest:
        raise UsageError(
            f"plan, checkpoint spec and source map belong to different checkpoints: spec {spec.digest}, "
            f"plan {plan.spec_digest}, map {source_map.spec_digest}; make all three from one spec"
        )
    job = _Job.of(plan, spec, source_map, worker)
    trainer = plan.topology.workers[worker].role is Role.TRAINER
    packs = job.pack_tables() if trainer else [_EMPTY] * plan.rounds
    assembles = job.assembles() if not trainer else [_NOTHING] * plan.rounds
    posts, awaits, readers = job.posts(), job.awaits(), job.readers()
    rounds = tuple(
        Round(
            pack=packs[k], posts=tuple(posts[k]), awaits=tuple(awaits[k]), assemble=assembles[k],
            reads=tuple(sorted({w for w, _ in assembles[k].sources} - {worker})), readers=readers[k],
        )
        for k in range(plan.rounds)
    )  # fmt: skip
    return WorkerProgram(
        worker=worker, plan_digest=plan.digest, slots=arena_of(plan, worker, job.cuts), rounds=rounds, codec=codec,
        base_version=base_version,
    )  # fmt: skip


_EMPTY = np.zeros(0, dtype=DESCRIPTOR)
_NOTHING = Assemble(sources=(), table=_EMPTY)


@dataclass(kw_only=True)
class _Job:
    """What the steps of one lowering share. layouts: cache, (worker, stage) -> SlotLayout."""

    plan: Plan
    spec: CheckpointSpec
    source_map: SourceMap
    worker: int
    boxes: BoxTable
    index: StreamIndex
    cuts: Int64Array
    layouts: dict[tuple[int, str], SlotLayout]

    @classmethod
    def of(cls, plan: Plan, spec: CheckpointSpec, source_map: SourceMap, worker: int) -> _Job:
        nbytes = np.array([c.nbytes for c in plan.classes], dtype=np.int64)
        itemsizes = np.array([t.dtype.itemsize for t in spec.tensors], dtype=np.int64)
        index = StreamIndex.of(plan.atoms, nbytes, itemsizes)
        boxes = expand(source_map, spec)
        return cls(
            plan=plan, spec=spec, source_map=source_map, worker=worker, boxes=boxes, index=index, cuts=route_cuts(plan),
            layouts={},
        )  # fmt: skip

    def layout(self, worker: int, stage: str) -> SlotLayout:
        key = (worker, stage)
        if key not in self.layouts:
            self.layouts[key] = slot_layout(self.plan, worker, stage, self.cuts)
        return self.layouts[key]

    def neighbours(self) -> tuple[int, ...]:
        """Rollout workers of this worker's node, itself included."""
        return self.plan.topology.on_node(self.plan.topology.workers[self.worker].node, Role.ROLLOUT)

    # --- descriptors --------------------------------------------------------------------------------------------------

    def pack_tables(self) -> list[npt.NDArray[np.void]]:
        layout = self.layout(self.worker, SEND)
        table, round_ = self._descriptors([(layout, np.arange(len(layout.routes), dtype=np.int64))], to_live=False)
        return self._by_round(table, round_)

    def assembles(self) -> list[Assemble]:
        sources, taken = self._sources()
        table, round_ = self._descriptors(
            [(self.layout(*s), rows) for s, rows in zip(sources, taken, strict=True)], to_live=True
        )
        result: list[Assemble] = []
        for rows in self._by_round(table, round_):
            used, rows["src_buffer"] = np.unique(rows["src_buffer"], return_inverse=True)
            result.append(Assemble(sources=tuple(sources[i] for i in used.tolist()), table=rows))
        return result

    def _descriptors(
        self, parts: list[tuple[SlotLayout, Int64Array]], *, to_live: bool
    ) -> tuple[npt.NDArray[np.void], Int64Array]:
        """Descriptors for the given rows of some slot layouts, all rounds, and [n] the round of each.

        On the slot's side of an assemble the buffer is the position in `parts`.
        """
        plan = self.plan
        lo, hi, offset, round_, part = [], [], [], [], []
        for i, (layout, rows) in enumerate(parts):
            base = self.index.class_base[plan.routes["class_id"][layout.routes[rows]]][:, None]
            lo.append((base + layout.lo[rows]).ravel())
            hi.append((base + layout.hi[rows]).ravel())
            offset.append(layout.offset[rows].ravel())
            round_.append(np.tile(np.arange(plan.rounds, dtype=np.int64), len(rows)))
            part.append(np.full(len(rows) * plan.rounds, i, dtype=np.int64))
        lo_all, hi_all = _joined(lo), _joined(hi)
        keep = np.flatnonzero(hi_all > lo_all)
        pieces = pieces_of(plan.atoms, self.index, lo_all[keep], hi_all[keep], _joined(offset)[keep])
        table, key = descriptors(pieces, plan.atoms, self.boxes, self.spec, self.source_map, to_live=to_live)
        if to_live:
            table["src_buffer"] = _joined(part)[keep[key]]
        return table, _joined(round_)[keep[key]]

    def _by_round(self, table: npt.NDArray[np.void], round_: Int64Array) -> list[npt.NDArray[np.void]]:
        """One table per round, its rows in the order of the slot so that kernels walk memory forwards."""
        slot_side = "dst_offset" if self.plan.topology.workers[self.worker].role is Role.TRAINER else "src_offset"
        order = np.lexsort((table[slot_side], table["src_buffer"], round_))
        ends = np.searchsorted(round_[order], np.arange(self.plan.rounds + 1, dtype=np.int64))
        return [table[order[ends[k] : ends[k + 1]]] for k in range(self.plan.rounds)]

    def _needs(self, worker: int) -> npt.NDArray[np.bool_]:
        """[num_routes] whether the bytes of each route are among those the worker needs."""
        needed = np.array([worker in c.needers for c in self.plan.classes], dtype=bool)
        return needed[self.plan.routes["class_id"]] if len(needed) else np.zeros(0, dtype=bool)

    def _sources(self) -> tuple[list[tuple[int, str]], list[Int64Array]]:
        """Slots of this node that hold bytes this worker needs, and for each the rows of its layout to take.

        Each byte enters a node once, so the routes that lie on this node hold each needed class exactly once.
        """
        wanted = self._needs(self.worker)
        sources: list[tuple[int, str]] = []
        rows: list[Int64Array] = []
        missing = {c: k.nbytes for c, k in enumerate(self.plan.classes) if self.worker in k.needers}
        for source in ((n, stage) for n in self.neighbours() for stage in STAGES):
            routes = self.layout(*source).routes
            mine = np.flatnonzero(wanted[routes])
            if len(mine):
                sources.append(source)
                rows.append(mine)
                taken = self.plan.routes[routes[mine]]
                for class_id in _distinct(taken["class_id"]):
                    part = taken[taken["class_id"] == class_id]
                    missing[class_id] -= int((part["hi"] - part["lo"]).sum())
        for class_id, nbytes in missing.items():
            if nbytes:
                name, node = self.plan.topology.workers[self.worker].name, self.plan.topology.workers[self.worker].node
                problem = f"{nbytes} bytes never reach" if nbytes > 0 else f"{-nbytes} bytes reach more than once"
                raise InternalError(
                    f"worker {name!r} needs class {class_id}, of which {problem} node {node!r}; the plan is wrong"
                )
        return sources, rows

    def readers(self) -> list[tuple[int, ...]]:
        """Per round, the neighbours that read this worker's slots: the mirror image of their `_sources`."""
        result: list[set[int]] = [set() for _ in range(self.plan.rounds)]
        if self.plan.topology.workers[self.worker].role is Role.ROLLOUT:
            for layout in (self.layout(self.worker, stage) for stage in STAGES):
                full = layout.hi > layout.lo
                for other in self.neighbours():
                    read = self._needs(other)[layout.routes]
                    for k in np.flatnonzero((full & read[:, None]).any(axis=0)).tolist():
                        result[k].add(other)
        return [tuple(sorted(r - {self.worker})) for r in result]

    # --- writes -------------------------------------------------------------------------------------------------------

    def posts(self) -> list[list[Post]]:
        """Per round: first the trainer's writes, then forwards, by stage and peer."""
        plan, worker = self.plan, self.worker
        result: list[list[Post]] = [[] for _ in range(plan.rounds)]
        mine = routes_through(plan, worker, SEND)
        for peer in _distinct(plan.routes["entry"][mine]):
            routes = mine[plan.routes["entry"][mine] == peer]
            self._add_posts(result, STAGES[0], SEND, peer, routes)
        out = plan.hops[plan.hops["src"] == worker]
        for index in _distinct(out["stage"]):
            for peer in _distinct(out["dst"][out["stage"] == index]):
                routes = np.sort(out["route"][(out["stage"] == index) & (out["dst"] == peer)]).astype(np.int64)
                self._add_posts(result, STAGES[index], self._stage_of(routes, index), peer, routes)
        return result

    def _stage_of(self, routes: Int64Array, before: int) -> str:
        """The one stage, earlier than `before`, in which all of these routes reach this worker."""
        for stage in STAGES[:before]:
            if np.isin(routes, self.layout(self.worker, stage).routes).all():
                return stage
        raise UnsupportedError(
            f"worker {self.worker} forwards routes {routes.tolist()} to one peer in stage {STAGES[before]!r} but has them "
            "from several stages; the planner must forward each stage's routes to peers of their own"
        )

    def _add_posts(self, result: list[list[Post]], stage: str, source: str, peer: int, routes: Int64Array) -> None:
        local, remote = self.layout(self.worker, source), self.layout(peer, stage)
        at, there = local.rows(routes), remote.rows(routes)
        before = self._writers(source, routes) if source != SEND else routes
        for k in range(self.plan.rounds):
            full = np.flatnonzero(local.hi[at, k] > local.lo[at, k])
            if not len(full):
                continue
            segments = _segments(local, at[full], remote, there[full], k)
            after = tuple((source, w) for w in _distinct(before[full])) if source != SEND else ()
            result[k].append(Post(stage=stage, source=source, peer=peer, segments=segments, after=after))

    def _writers(self, stage: str, routes: Int64Array) -> Int64Array:
        """[m] who writes each route into this worker's slot `stage`."""
        hops, index = self.plan.hops, STAGES.index(stage)
        writers = np.full(len(self.plan.routes), -1, dtype=np.int64)
        if index == 0:
            entered = self.plan.routes["entry"] == self.worker
            writers[entered] = self.plan.routes["sender"][entered]
        into = hops[(hops["dst"] == self.worker) & (hops["stage"] == index)]
        writers[into["route"]] = into["src"]
        return writers[routes]

    def awaits(self) -> list[list[Await]]:
        """Per round, what arrives, by stage and writer. `local_offset` is the writer's, `remote_offset` this worker's."""
        result: list[list[Await]] = [[] for _ in range(self.plan.rounds)]
        if self.plan.topology.workers[self.worker].role is Role.TRAINER:
            return result
        for index, stage in enumerate(STAGES):
            layout = self.layout(self.worker, stage)
            writers = self._writers(stage, layout.routes)
            for peer in _distinct(writers):
                here = np.flatnonzero(writers == peer)
                theirs = self.layout(peer, self._source_at(peer, index, layout.routes[here]))
                there = theirs.rows(layout.routes[here])
                for k in range(self.plan.rounds):
                    full = layout.hi[here, k] > layout.lo[here, k]
                    if full.any():
                        segments = _segments(theirs, there[full], layout, here[full], k)
                        result[k].append(Await(stage=stage, peer=peer, segments=segments))
        return result

    def _source_at(self, peer: int, before: int, routes: Int64Array) -> str:
        """The slot of `peer` from which it writes these routes in stage `before`."""
        if self.plan.topology.workers[peer].role is Role.TRAINER:
            return SEND
        return next(s for s in STAGES[:before] if np.isin(routes, self.layout(peer, s).routes).all())


def _segments(
    source: SlotLayout, at: Int64Array, target: SlotLayout, there: Int64Array, k: int
) -> npt.NDArray[np.void]:
    segments = np.zeros(len(at), dtype=SEGMENT)
    segments["local_offset"] = source.offset[at, k]
    segments["remote_offset"] = target.offset[there, k]
    segments["capacity_bytes"] = source.hi[at, k] - source.lo[at, k]
    segments["route"] = source.routes[at]
    return segments


def _joined(arrays: Iterable[Int64Array]) -> Int64Array:
    return np.concatenate([np.zeros(0, dtype=np.int64), *arrays])


def _distinct(values: npt.NDArray[np.int64]) -> list[int]:
    return [int(v) for v in np.unique(values)]
