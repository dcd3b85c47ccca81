"""Check programs against the plan, the spec and the source map, without the code that made them.

`verify_program` is what each worker runs on its own program before the first byte moves; `verify_programs` looks at all
workers of a (small) job together, where the order between them can be proven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InfeasibleError, InternalError
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import STAGES, Plan
from weightbridge.plan.topology import Role
from weightbridge.program.contents import check_contents
from weightbridge.program.ordering import check_order
from weightbridge.program.program import SEGMENT, WorkerProgram

__all__ = ["verify_program", "verify_programs"]

Int64Array = npt.NDArray[np.int64]

_LINE = np.dtype([(name, "<i8") for name in ("round", "stage", "peer", "route", "nbytes", "here", "there")])
"""One segment of a write as both sides must see it. here, there: bytes within the own and the peer's slot copy."""


def verify_program(
    program: WorkerProgram, plan: Plan, spec: CheckpointSpec, source_map: SourceMap, *, exhaustive: bool = False
) -> None:
    """Raise unless `program` is this worker's whole part of `plan`. Local: needs nobody else's program.

    Checked exactly: slots and budget, writes and arrivals with all offsets, who reads whom, every descriptor inside its
    buffers, each outgoing byte packed once, each live element assembled once. That every element comes from its true place
    is checked at all corners and some inner points of each descriptor, or at every element when `exhaustive` (small
    jobs). Raises InternalError naming the worker, the round and both values; InfeasibleError for the budget.
    """
    view = _View(plan=plan, worker=program.worker)
    name = view.name(program.worker)
    if program.plan_digest != plan.digest or len(program.rounds) != plan.rounds:
        raise InternalError(
            f"program of {name!r} is for plan {program.plan_digest} with {len(program.rounds)} rounds, expected plan "
            f"{plan.digest} with {plan.rounds}; lower it again"
        )
    _check_slots(program, plan, view)
    _check_writes(program, view)
    _check_neighbours(program, view)
    check_contents(program, plan, spec, source_map, exhaustive=exhaustive)


def verify_programs(programs: Sequence[WorkerProgram], plan: Plan) -> None:
    """Raise unless the programs of all workers fit together: writes match arrivals on both ends, nobody waits in a circle,
    and no slot copy is written while anyone may still read it, proven by happens-before over the machine's protocol.

    programs: one per worker of the plan's topology, any order. Raises InternalError naming slot, round and workers.
    """
    by_worker = {p.worker: p for p in programs}
    names = {i: w.name for i, w in enumerate(plan.topology.workers)}
    if len(programs) != len(by_worker) or set(by_worker) != set(names):
        raise InternalError(
            f"expected one program for each of the {len(names)} workers, found {sorted(p.worker for p in programs)}"
        )
    view = {w: _View(plan=plan, worker=w) for w in names}
    if len({(s.num_slots) for p in programs for s in p.slots}) > 1:
        raise InternalError("all slots of a job must have the same number of copies; credits count in it")
    for worker, program in by_worker.items():
        if program.plan_digest != plan.digest or len(program.rounds) != plan.rounds:
            raise InternalError(f"program of {names[worker]!r} is for another plan or number of rounds; lower it again")
        if (program.codec, program.base_version) != (programs[0].codec, programs[0].base_version):
            raise InternalError(f"program of {names[worker]!r} has another codec than {names[programs[0].worker]!r}")
        _check_slots(program, plan, view[worker])
    _check_both_ends(by_worker, names)
    check_order(by_worker, names)
    _check_readers(by_worker, names)


# --- the plan as one worker sees it -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _View:
    """The plan's writes to and from one worker, derived anew from routes and hops."""

    plan: Plan
    worker: int

    def name(self, worker: int) -> str:
        return self.plan.topology.workers[worker].name

    @cached_property
    def is_trainer(self) -> bool:
        return self.plan.topology.workers[self.worker].role is Role.TRAINER

    @cached_property
    def steps(self) -> Int64Array:
        """[num_edges, 4] (route, stage, source, target) of every write of the plan, stage counting in STAGES."""
        routes, hops = self.plan.routes, self.plan.hops
        first = np.stack([np.arange(len(routes)), np.zeros(len(routes)), routes["sender"], routes["entry"]], axis=1)
        later = np.stack([hops["route"], hops["stage"], hops["src"], hops["dst"]], axis=1)
        return np.concatenate([first, later]).astype(np.int64)

    @cached_property
    def cuts(self) -> Int64Array:
        """[num_routes, rounds + 1] stream bytes at which each route is cut."""
        cuts: Int64Array = self.plan.cuts(range(self.plan.rounds + 1)).T
        return cuts

    def held(self, worker: int) -> dict[int, int]:
        """Route -> stage in which `worker` has it; -1 for what a trainer sends."""
        if self.plan.topology.workers[worker].role is Role.TRAINER:
            return dict.fromkeys(np.flatnonzero(self.plan.routes["sender"] == worker).tolist(), -1)
        mine = self.steps[self.steps[:, 3] == worker]
        return dict(zip(mine[:, 0].tolist(), mine[:, 1].tolist(), strict=True))

    def places(self, worker: int) -> dict[tuple[int, int], int]:
        """(route, round) -> byte within the slot copy, of all non-empty parts that lie in any slot of `worker`."""
        found: dict[tuple[int, int], int] = {}
        held = self.held(worker)
        for stage in range(-1, len(STAGES)):
            routes = sorted(r for r, s in held.items() if s == stage)
            for k in range(self.plan.rounds):
                at = 0
                for route in routes:
                    nbytes = int(self.cuts[route, k + 1] - self.cuts[route, k])
                    if nbytes:
                        found[route, k] = at
                        at += nbytes + -nbytes % 64
        return found

    def lines(self, *, outgoing: bool) -> npt.NDArray[np.void]:
        """All segments this worker writes, or all that it awaits, sorted."""
        own, peer = (2, 3) if outgoing else (3, 2)
        mine = self.steps[self.steps[:, own] == self.worker]
        here = self.places(self.worker)
        rows: list[tuple[int, ...]] = []
        for other in np.unique(mine[:, peer]).tolist():
            there = self.places(other)
            for route, stage in mine[mine[:, peer] == other][:, :2].tolist():
                for k in np.flatnonzero(self.cuts[route, 1:] > self.cuts[route, :-1]).tolist():
                    nbytes = int(self.cuts[route, k + 1] - self.cuts[route, k])
                    rows.append((k, stage, other, route, nbytes, here[route, k], there[route, k]))
        return np.sort(np.array(rows, dtype=_LINE))


# --- one program ------------------------------------------------------------------------------------------------------


def _check_slots(program: WorkerProgram, plan: Plan, view: _View) -> None:
    name = view.name(program.worker)
    expected = ("send",) if view.is_trainer else STAGES
    if tuple(s.stage for s in program.slots) != expected:
        raise InternalError(
            f"program of {name!r} has slots {[s.stage for s in program.slots]}, expected {list(expected)}"
        )
    end = 0
    for slot in program.slots:
        if slot.arena_offset < end or slot.num_slots < 1 or slot.capacity_bytes % 64 or slot.arena_offset % 64:
            raise InternalError(f"slot {slot.stage!r} of {name!r} overlaps another or is not 64-byte aligned: {slot}")
        end = slot.arena_offset + slot.capacity_bytes * slot.num_slots
        if slot.capacity_bytes > plan.slot_bytes:
            raise InfeasibleError(
                f"slot {slot.stage!r} of {name!r} takes {slot.capacity_bytes} bytes, the plan allows {plan.slot_bytes}; plan "
                "more rounds or raise the budget",
                needed_bytes=slot.capacity_bytes,
                budget_bytes=plan.slot_bytes,
            )


def _check_writes(program: WorkerProgram, view: _View) -> None:
    """Posts and awaits, segment by segment, against the plan; every forward waits for whoever brings its bytes."""
    out: list[npt.NDArray[np.void]] = []
    into: list[npt.NDArray[np.void]] = []
    held = view.held(program.worker)
    bringer = {(r, s): src for r, s, src, dst in view.steps.tolist() if dst == program.worker}
    for k, round_ in enumerate(program.rounds):
        for post in round_.posts:
            out.append(_lines(k, post.stage, post.peer, post.segments, swap=False))
            routes = post.segments["route"].tolist()
            source = -1 if post.source == "send" else _stage_index(post.source)
            if any(held.get(r) != source for r in routes):
                raise InternalError(
                    _at(
                        view,
                        k,
                        f"a post to {view.name(post.peer)!r} takes routes from {post.source!r} that lie elsewhere",
                    )
                )
            expected = {(post.source, bringer[r, source]) for r in routes} if source >= 0 else set()
            if set(post.after) != expected or len(post.after) != len(expected):
                raise InternalError(
                    _at(
                        view,
                        k,
                        f"a post to {view.name(post.peer)!r} is after {sorted(post.after)}, expected {sorted(expected)}",
                    )
                )
            slot = program.slot(post.source)
            _check_inside(view, k, post.segments["local_offset"], post.segments["capacity_bytes"], slot.capacity_bytes)
        for await_ in round_.awaits:
            into.append(_lines(k, await_.stage, await_.peer, await_.segments, swap=True))
            slot = program.slot(await_.stage)
            _check_inside(
                view, k, await_.segments["remote_offset"], await_.segments["capacity_bytes"], slot.capacity_bytes
            )
        keys = [(p.stage, p.peer) for p in round_.posts], [(a.stage, a.peer) for a in round_.awaits]
        if any(len(set(k_)) != len(k_) for k_ in keys):
            raise InternalError(
                _at(view, k, "two posts or two awaits have one stage and peer; tags could not tell them apart")
            )
    for found, outgoing in ((out, True), (into, False)):
        _compare(
            view, np.sort(np.concatenate([np.zeros(0, dtype=_LINE), *found])), view.lines(outgoing=outgoing), outgoing
        )


def _lines(k: int, stage: str, peer: int, segments: npt.NDArray[np.void], *, swap: bool) -> npt.NDArray[np.void]:
    if segments.dtype != SEGMENT:
        raise InternalError(f"segments of round {k} have dtype {segments.dtype}, expected SEGMENT")
    lines = np.zeros(len(segments), dtype=_LINE)
    lines["round"], lines["stage"], lines["peer"] = k, _stage_index(stage), peer
    lines["route"], lines["nbytes"] = segments["route"], segments["capacity_bytes"]
    here, there = ("remote_offset", "local_offset") if swap else ("local_offset", "remote_offset")
    lines["here"], lines["there"] = segments[here], segments[there]
    return lines


def _stage_index(stage: str) -> int:
    if stage not in STAGES:
        raise InternalError(f"stage {stage!r} is none of {list(STAGES)}")
    return STAGES.index(stage)


def _check_inside(view: _View, k: int, offset: Int64Array, nbytes: Int64Array, capacity: int) -> None:
    bad = (offset < 0) | (nbytes <= 0) | (offset + nbytes > capacity)
    if bad.any():
        i = int(np.argmax(bad))
        raise InternalError(
            _at(view, k, f"segment of {nbytes[i]} bytes at {offset[i]} leaves its slot of {capacity} bytes")
        )


def _compare(view: _View, found: npt.NDArray[np.void], expected: npt.NDArray[np.void], outgoing: bool) -> None:
    if len(found) == len(expected) and (found == expected).all():
        return
    what = "write" if outgoing else "arrival"
    have, want = {tuple(r) for r in found.tolist()}, {tuple(r) for r in expected.tolist()}
    for verb, line in [("lacks", min(want - have, default=None)), ("has an unplanned", min(have - want, default=None))]:
        if line is not None:
            k, stage, peer, route, nbytes, here, there = line
            raise InternalError(
                _at(view, k, f"the program {verb} {what}: route {route}, {nbytes} bytes, {STAGES[stage]!r}, peer "
                f"{view.name(peer)!r}, own slot byte {here}, peer's {there}")
            )  # fmt: skip
    raise InternalError(f"program of {view.name(view.worker)!r} has the same {what} twice")


def _check_neighbours(program: WorkerProgram, view: _View) -> None:
    """`reads` are the slots the table draws on; `readers` are the neighbours that must find their bytes here."""
    plan, me = view.plan, program.worker
    node = plan.topology.workers[me].node
    others = [w for w in plan.topology.on_node(node, Role.ROLLOUT) if w != me]
    held = view.held(me) if not view.is_trainer else {}
    found: list[
        tuple[int, int, int]
    ] = []  # route, stage, who finds it here and, a byte entering a node once, only here
    for route, stage in held.items():
        needers = set(plan.classes[int(plan.routes["class_id"][route])].needers)
        found += [(route, stage, other) for other in others if other in needers]
    for k, round_ in enumerate(program.rounds):
        used = {s for s, _ in round_.assemble.sources}
        if used - {me} != set(round_.reads) or not used <= {me, *others}:
            raise InternalError(_at(view, k, f"reads {sorted(round_.reads)}, but its table draws on {sorted(used)}"))
        must: dict[int, str] = {}
        for route, stage, other in found:
            if view.cuts[route, k + 1] > view.cuts[route, k]:
                must.setdefault(other, STAGES[stage])
        for other, stage_name in must.items():
            if other not in round_.readers:
                raise InternalError(
                    f"slot {stage_name!r} of {view.name(me)!r} would be released in round {k} while neighbour "
                    f"{view.name(other)!r} still reads it: it is missing among the readers {list(round_.readers)}"
                )
        if not must.keys() >= set(round_.readers):
            extra = sorted(set(round_.readers) - must.keys())
            raise InternalError(_at(view, k, f"waits for readers {extra} that need nothing of it"))


def _at(view: _View, k: int, what: str) -> str:
    return f"program of {view.name(view.worker)!r}, round {k}: {what}"


# --- all programs -----------------------------------------------------------------------------------------------------


def _check_both_ends(programs: Mapping[int, WorkerProgram], names: Mapping[int, str]) -> None:
    sent: dict[tuple[int, int, str, int], bytes] = {}
    awaited: dict[tuple[int, int, str, int], bytes] = {}
    for worker, program in programs.items():
        for k, round_ in enumerate(program.rounds):
            for post in round_.posts:
                sent[k, worker, post.stage, post.peer] = post.segments.tobytes()
            for a in round_.awaits:
                awaited[k, a.peer, a.stage, worker] = a.segments.tobytes()
    for key in sorted(sent.keys() | awaited.keys()):
        k, source, stage, target = key
        if sent.get(key) != awaited.get(key):
            state = (
                "is not sent"
                if key not in sent
                else "is not awaited"
                if key not in awaited
                else "differs at its two ends"
            )
            raise InternalError(
                f"the write of round {k} from {names[source]!r} to slot {stage!r} of {names[target]!r} {state}"
            )


def _check_readers(programs: Mapping[int, WorkerProgram], names: Mapping[int, str]) -> None:
    for worker, program in programs.items():
        for k, round_ in enumerate(program.rounds):
            stage = dict(round_.assemble.sources)
            for other in round_.reads:
                if worker not in programs[other].rounds[k].readers:
                    raise InternalError(
                        f"slot {stage.get(other)!r} of {names[other]!r} is released in round {k} while neighbour "
                        f"{names[worker]!r} reads it: it is missing among the readers"
                    )
            for other in round_.readers:
                if worker not in programs[other].rounds[k].reads:
                    raise InternalError(
                        f"{names[worker]!r} waits in round {k} for {names[other]!r}, which reads no slot of it"
                    )
