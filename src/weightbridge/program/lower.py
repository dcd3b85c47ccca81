"""Lower a plan to workers' programs. Pure: every worker computes its own, and each end of a write computes the same.

A `Lowering` has what all workers of the plan have in common: which parts the routes are cut into, which runs of atoms the
parts hold, where the parts lie in the slots. Workers with equal maps that need the same routes share their descriptors
as well; only buffer numbers and slot offsets are then filled in for each.

Cost grows with the number of parts and of (round, peer) pairs, not with elements: all is done on arrays, and Python takes
one step per (round, peer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InternalError, UsageError
from weightbridge.layout.boxes import BoxTable, expand
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import Plan
from weightbridge.plan.topology import Role
from weightbridge.program.descriptors import Elements, Live, Runs, StreamIndex, descriptors
from weightbridge.program.program import DESCRIPTOR, OLDEST_ROUND_FIRST, Assemble, Round, WorkerProgram
from weightbridge.program.slots import SEND, Parts, SlotTable, consecutive
from weightbridge.program.writes import Writes

__all__ = ["Lowering", "lower"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
T = TypeVar("T")


def lower(
    plan: Plan,
    spec: CheckpointSpec,
    source_map: SourceMap,
    worker: int,
    *,
    codec: str = "identity",
    base_version: int = -1,
    post_order: str = OLDEST_ROUND_FIRST,
) -> WorkerProgram:
    """The program of `worker` (position in plan.topology.workers) under `plan`.

    source_map: the worker's own. codec, base_version, post_order: recorded in the program; they change nothing else.
    Raises UsageError when spec, map and plan do not belong together, CoverageError when the map lacks what the plan
    gives the worker, UnsupportedError for a cast without a kernel.
    """
    lowering = Lowering.of(plan, spec, codec=codec, base_version=base_version, post_order=post_order)
    return lowering.program(source_map, worker)


_EMPTY = np.zeros(0, dtype=DESCRIPTOR)
_NOTHING = Assemble(sources=(), table=_EMPTY)


@dataclass(frozen=True, kw_only=True)
class _Copies:
    """The descriptors of some routes in one map, as far as they are the same for every worker.

    parts: [p] parts of the routes, by round, then route. route: [p] position of each among the routes. table: by part;
    the slot's side has buffer 0 and the offset within the part. part: [n] position in `parts` of each row. rows: [rounds
    + 1] where the rows of each round begin.
    """

    parts: Int64Array
    route: Int64Array
    table: npt.NDArray[np.void]
    part: Int64Array
    rows: list[int]


@dataclass(kw_only=True)
class Lowering:
    """One plan, being lowered for some or all of its workers.

    num_dims: of the atoms. needs: [num_classes, num_workers]. codec, base_version, post_order: recorded in every program.
    latest: what was made for the map of the last program, so that workers with equal maps, asked for one after the other,
    share it and nothing piles up.
    """

    plan: Plan
    spec: CheckpointSpec
    elements: Elements
    parts: Parts
    runs: Runs
    slots: SlotTable
    writes: Writes
    needs: BoolArray
    num_dims: int
    codec: str
    base_version: int
    post_order: str
    latest: dict[str, tuple[object, object]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        plan: Plan,
        spec: CheckpointSpec,
        *,
        codec: str = "identity",
        base_version: int = -1,
        post_order: str = OLDEST_ROUND_FIRST,
    ) -> Lowering:
        """Raises UsageError when spec and plan do not belong together, InternalError when the plan contradicts itself."""
        if spec.digest != plan.spec_digest:
            raise _mismatch(plan, spec, None)
        elements, parts = Elements.of(spec), Parts.of(plan)
        nbytes = np.array([c.nbytes for c in plan.classes], dtype=np.int64)
        index = StreamIndex.of(plan.atoms, nbytes, elements.itemsize)
        base = index.class_base[plan.routes["class_id"]][parts.route]
        slots = SlotTable.of(plan, parts)
        needs = np.zeros((len(plan.classes), len(plan.topology.workers)), dtype=bool)
        for class_id, replica_class in enumerate(plan.classes):
            needs[class_id, list(replica_class.needers)] = True
        return cls(
            plan=plan, spec=spec, elements=elements, parts=parts, runs=Runs.of(index, base + parts.lo, base + parts.hi),
            slots=slots, writes=Writes.of(plan, slots), needs=needs,
            num_dims=max(1, *(len(t.shape) for t in spec.tensors)), codec=codec, base_version=base_version,
            post_order=post_order,
        )  # fmt: skip

    def program(self, source_map: SourceMap, worker: int) -> WorkerProgram:
        """The program of one worker; as `lower`."""
        plan = self.plan
        if source_map.spec_digest != plan.spec_digest:
            raise _mismatch(plan, self.spec, source_map)
        trainer = plan.topology.workers[worker].role is Role.TRAINER
        packs = self._packs(source_map, worker) if trainer else [_EMPTY] * plan.rounds
        assembles = self._assembles(source_map, worker) if not trainer else [_NOTHING] * plan.rounds
        posts, awaits, readers = self.writes.posts(worker), self.writes.awaits(worker), self._readers(worker)
        reads = {s: tuple(sorted({w for w, _ in s} - {worker})) for s in {a.sources for a in assembles}}
        rounds = tuple(
            Round(pack=p, posts=o, awaits=i, assemble=a, reads=reads[a.sources], readers=r)
            for p, o, i, a, r in zip(packs, posts, awaits, assembles, readers, strict=True)
        )
        return WorkerProgram(
            worker=worker, plan_digest=plan.digest, slots=self.slots.specs(worker), rounds=rounds, codec=self.codec,
            base_version=self.base_version, post_order=self.post_order,
        )  # fmt: skip

    # --- descriptors --------------------------------------------------------------------------------------------------

    def _packs(self, source_map: SourceMap, worker: int) -> list[npt.NDArray[np.void]]:
        slot = int(SlotTable.slot(worker, SEND))
        stops = self.slots.stops(slot)
        copies = self._copies(source_map, self.slots.route[stops], to_live=False)
        offset = self._offsets(copies, stops, [slot])
        table = copies.table.copy()
        table["dst_offset"] += offset[copies.part]
        return [table[a:b] for a, b in zip(copies.rows, copies.rows[1:], strict=False)]

    def _assembles(self, source_map: SourceMap, worker: int) -> list[Assemble]:
        stops = self._taken(worker)
        copies = self._copies(source_map, self.slots.route[stops], to_live=True)
        slots, slot_of_route = np.unique(self.slots.slot_of_stop[stops], return_inverse=True)
        offset = self._offsets(copies, stops, slots.tolist())
        # A round counts through the slots that hold bytes in it: [rounds, num_slots].
        slot, round_ = slot_of_route[copies.route], self.parts.round[copies.parts]
        used = np.zeros((self.plan.rounds, len(slots)), dtype=bool)
        used[round_, slot] = True
        number = np.cumsum(used, axis=1, dtype=np.int64) - 1
        table = copies.table.copy()
        table["src_buffer"] = number[round_, slot][copies.part]
        table["src_offset"] += offset[copies.part]
        sources = _chosen(used, SlotTable.names(slots))
        return [
            Assemble(sources=s, table=table[a:b])
            for s, a, b in zip(sources, copies.rows, copies.rows[1:], strict=False)
        ]

    def _offsets(self, copies: _Copies, stops: Int64Array, slots: list[int]) -> Int64Array:
        """[p] slot offset of each of `copies.parts`. stops: one for each route of `copies`, in these slots."""
        shift = self.slots.first_cell[stops] - self.parts.first[self.slots.route[stops]]
        return self.slots.offsets(copies.parts + shift[copies.route], slots)

    def _copies(self, source_map: SourceMap, routes: Int64Array, *, to_live: bool) -> _Copies:
        """routes: ascending."""
        key = (source_map.fingerprint, to_live, routes.tobytes())
        return self._shared("copies", key, lambda: self._make_copies(source_map, routes, to_live))

    def _make_copies(self, source_map: SourceMap, routes: Int64Array, to_live: bool) -> _Copies:
        num_parts = self.parts.num_of_route[routes]
        parts = consecutive(self.parts.first[routes], num_parts)
        order = self.parts.by_round(parts)
        parts, route = parts[order], np.repeat(np.arange(len(routes), dtype=np.int64), num_parts)[order]
        num_runs = self.runs.first[parts + 1] - self.runs.first[parts]
        runs = consecutive(self.runs.first[parts], num_runs)
        atom = self.runs.atom[runs]
        is_wanted = np.zeros(len(self.plan.atoms), dtype=bool)
        is_wanted[atom] = True
        position = np.cumsum(is_wanted) - 1
        live = Live.of(
            self.plan.atoms, np.flatnonzero(is_wanted), self._boxes(source_map), self.spec, self.elements, source_map,
            to_live=to_live,
        )  # fmt: skip
        table, run = descriptors(
            live, position[atom], self.runs.begin[runs], self.runs.end[runs], self.runs.offset[runs]
        )
        part = np.repeat(np.arange(len(parts), dtype=np.int64), num_runs)[run]
        round_ = self.parts.round[parts]
        rows = np.searchsorted(part, np.searchsorted(round_, np.arange(self.plan.rounds + 1)))
        return _Copies(parts=parts, route=route, table=table, part=part, rows=rows.tolist())

    def _boxes(self, source_map: SourceMap) -> BoxTable:
        return self._shared("boxes", source_map.fingerprint, lambda: expand(source_map, self.spec, self.num_dims))

    def _shared(self, name: str, key: object, make: Callable[[], T]) -> T:
        """What was made last under this name if its key was the same, else something new."""
        if name not in self.latest or self.latest[name][0] != key:
            self.latest.pop(name, None)  # two of them at a time would be twice the memory
            self.latest[name] = (key, make())
        found: T = self.latest[name][1]  # type: ignore[assignment]
        return found

    # --- the node -----------------------------------------------------------------------------------------------------

    def _neighbours(self, worker: int) -> tuple[int, ...]:
        """Rollout workers of this worker's node, itself included."""
        return self.plan.topology.on_node(self.plan.topology.workers[worker].node, Role.ROLLOUT)

    def _taken(self, worker: int) -> Int64Array:
        """Stops on this worker's node of all routes whose bytes it needs, by route.

        Each byte enters a node once, so the routes that lie on this node hold each needed class exactly once.
        """
        routes, needs = self.plan.routes, self.needs[:, worker]
        stops: Int64Array = np.concatenate([self.slots.stops_of_worker(n) for n in self._neighbours(worker)])
        stops = stops[needs[routes["class_id"][self.slots.route[stops]]]]
        stops = stops[np.argsort(self.slots.route[stops], kind="stable")]
        taken = routes[self.slots.route[stops]]
        missing = np.array([c.nbytes for c in self.plan.classes], dtype=np.int64) * needs
        np.subtract.at(missing, taken["class_id"], taken["hi"] - taken["lo"])
        for class_id in np.flatnonzero(missing).tolist():
            me, nbytes = self.plan.topology.workers[worker], int(missing[class_id])
            problem = f"{nbytes} bytes never reach" if nbytes > 0 else f"{-nbytes} bytes reach more than once"
            raise InternalError(
                f"worker {me.name!r} needs class {class_id}, of which {problem} node {me.node!r}; the plan is wrong"
            )
        return stops

    def _readers(self, worker: int) -> list[tuple[int, ...]]:
        """Per round, the neighbours that read this worker's slots: the mirror image of their `_taken`."""
        if self.plan.topology.workers[worker].role is Role.TRAINER:
            return [()] * self.plan.rounds
        stops = self.slots.stops_of_worker(worker)
        full = np.zeros((self.plan.rounds, len(stops)), dtype=bool)
        num_parts = self.parts.num_of_route[self.slots.route[stops]]
        stop = np.repeat(np.arange(len(stops), dtype=np.int64), num_parts)
        full[self.parts.round[self.slots.parts_of(stops)], stop] = True
        classes = self.plan.routes["class_id"][self.slots.route[stops]]
        others = [n for n in self._neighbours(worker) if n != worker]
        reads = np.zeros((self.plan.rounds, len(others)), dtype=bool)
        for i, other in enumerate(others):
            reads[:, i] = full[:, self.needs[classes, other]].any(axis=1)
        return _chosen(reads, others)


def _chosen(mask: BoolArray, items: Sequence[T]) -> list[tuple[T, ...]]:
    """For each row of the mask [n, len(items)] the items it chooses. Equal rows share one tuple."""
    known: dict[bytes, tuple[T, ...]] = {}
    found = []
    for row in mask:
        key = row.tobytes()
        if key not in known:
            known[key] = tuple(items[i] for i in np.flatnonzero(row).tolist())
        found.append(known[key])
    return found


def _mismatch(plan: Plan, spec: CheckpointSpec, source_map: SourceMap | None) -> UsageError:
    own = "" if source_map is None else f", map {source_map.spec_digest}"
    return UsageError(
        f"plan, checkpoint spec and source map belong to different checkpoints: spec {spec.digest}, "
        f"plan {plan.spec_digest}{own}; make all three from one spec"
    )
