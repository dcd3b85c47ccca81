"""Check programs against the plan, the spec and the source map, without the code that made them.

`verify_program` is what each worker runs on its own program before the first byte moves. `ProgramVerifier` checks many,
and `verify_job` (`verify_job.py`) those of a whole job, one at a time. `verify_programs` looks at all programs of a small job
together, where the order between their steps can be proven step by step.

All of them suppose a plan that `plan.verify_plan` has passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InternalError
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import Plan
from weightbridge.program.contents import Proven, check_contents, segments_of
from weightbridge.program.ordering import check_order
from weightbridge.program.program import POST_ORDERS, WorkerProgram
from weightbridge.program.verify_places import (
    Places,
    check_disjoint_atoms,
    check_disjoint_boxes,
    check_tiled,
    places_of,
)
from weightbridge.program.verify_tables import AtomIndex, PlanTables
from weightbridge.program.verify_transfers import check_neighbours, check_slots, check_transfers

__all__ = ["ProgramVerifier", "WorkerFacts", "check_alike", "verify_program", "verify_programs"]

Int64Array = npt.NDArray[np.int64]
_Key = tuple[str, bool, bytes]
"""What the live side depends on: the map's fingerprint, whether it is written or read, [num_classes] what the worker owns."""

_PROVEN_BYTES = 64 << 20  # kept of proven tables; whoever checks equal maps one after the other needs one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What one program moves. posted_bytes: [num_classes] by replica class. moved_bytes: what its descriptors pack or assemble,
    counted in the slot. num_descriptors, num_posts: of all rounds. arena_bytes: of its slots.
    """

    posted_bytes: Int64Array
    moved_bytes: int
    num_descriptors: int
    num_posts: int
    arena_bytes: int


class ProgramVerifier:
    """Checks the programs of one plan. What depends on the plan alone, or on a source map alone, is worked out once.

    Keeps four or eight bytes for each (route in a slot, round), where the atoms lie in each distinct map, and the live side
    of the programs last seen, so that programs of workers with equal maps are best checked one after the other.
    """

    def __init__(self, plan: Plan, spec: CheckpointSpec) -> None:
        self._plan = plan
        self._spec = spec
        self._places: dict[_Key, Places] = {}
        self._proven: dict[_Key, Proven] = {}

    @cached_property
    def tables(self) -> PlanTables:
        return PlanTables.of(self._plan)

    @cached_property
    def _index(self) -> AtomIndex:
        index = AtomIndex.of(self._plan, self._spec)
        check_disjoint_atoms(index, self._spec)
        return index

    def check(self, program: WorkerProgram, source_map: SourceMap, *, exhaustive: bool = False) -> WorkerFacts:
        """Raise unless `program` is this worker's whole part of the plan, as `verify_program` says."""
        name = self._check_head(program)
        tables, worker = self.tables, program.worker
        check_slots(program, tables)
        num_posts, posted = check_transfers(program, tables)
        check_neighbours(program, tables)
        to_live = not tables.trainer[worker]
        key = (source_map.fingerprint, to_live, tables.owns[:, worker].tobytes())
        if key not in self._places:
            self._places[key] = self._places_of(source_map, worker, name, to_live=to_live)
        num_descriptors, moved, proven = check_contents(
            program, tables, self._index, segments_of(tables, self._index, worker), self._places[key], self._spec,
            source_map, proven=self._proven.get(key), exhaustive=exhaustive,
        )  # fmt: skip
        if proven is not None:
            self._keep(key, proven)
        return WorkerFacts(
            posted_bytes=posted, moved_bytes=moved, num_descriptors=num_descriptors, num_posts=num_posts,
            arena_bytes=program.arena_bytes,
        )  # fmt: skip

    def _keep(self, key: _Key, proven: Proven) -> None:
        """As the newest; what was used longest ago goes."""
        self._proven.pop(key, None)
        self._proven[key] = proven
        while len(self._proven) > 1 and sum(p.rows.nbytes for p in self._proven.values()) > _PROVEN_BYTES:
            del self._proven[next(iter(self._proven))]

    def _check_head(self, program: WorkerProgram) -> str:
        plan, num_workers = self._plan, len(self._plan.topology.workers)
        if not 0 <= program.worker < num_workers:
            raise InternalError(f"a program is for worker {program.worker}, the plan has {num_workers}; lower it again")
        name = plan.topology.workers[program.worker].name
        if program.plan_digest != plan.digest or len(program.rounds) != plan.rounds:
            raise InternalError(
                f"program of {name!r} is for plan {program.plan_digest} with {len(program.rounds)} rounds, expected plan "
                f"{plan.digest} with {plan.rounds}; lower it again"
            )
        if program.post_order not in POST_ORDERS:
            raise InternalError(
                f"program of {name!r} orders its posts by {program.post_order!r}, expected one of {POST_ORDERS}"
            )
        return name

    def _places_of(self, source_map: SourceMap, worker: int, name: str, *, to_live: bool) -> Places:
        index = self._index
        atoms = np.flatnonzero(self.tables.owns[self._plan.atoms.class_id, worker])
        places = places_of(index, self._spec, source_map, atoms, to_live=to_live)
        if to_live:
            check_tiled(index, places, atoms, self._spec, source_map, name)
            check_disjoint_boxes(places.boxes, source_map, name)
        return places


def verify_program(
    program: WorkerProgram, plan: Plan, spec: CheckpointSpec, source_map: SourceMap, *, exhaustive: bool = False
) -> None:
    """Raise unless `program` is this worker's whole part of `plan`. Local: needs nobody else's program.

    Proven: slots and budget, writes and arrivals with all offsets, who waits for whom, that every descriptor takes each of
    its elements from its true place to its true place, each outgoing byte being packed once and each live element
    assembled once. When `exhaustive` (small jobs) every element of every descriptor is looked at besides, up to a million
    each. Raises InternalError naming the worker, the round and both values; InfeasibleError for the budget.
    """
    ProgramVerifier(plan, spec).check(program, source_map, exhaustive=exhaustive)


def verify_programs(programs: Sequence[WorkerProgram], plan: Plan) -> None:
    """Raise unless the programs of all workers fit together: writes match arrivals on both ends, nobody waits in a circle,
    and no slot copy is written while anyone may still read it, proven by happens-before over the machine's protocol.

    programs: one per worker of the plan's topology, any order. For small jobs: it keeps a bit for each pair of steps. A
    large job takes `verify_job`. Raises InternalError naming slot, round and workers.
    """
    by_worker = {p.worker: p for p in programs}
    names = {i: w.name for i, w in enumerate(plan.topology.workers)}
    if len(programs) != len(by_worker) or set(by_worker) != set(names):
        raise InternalError(
            f"expected one program for each of the {len(names)} workers, found {sorted(p.worker for p in programs)}"
        )
    if len({(s.num_slots) for p in programs for s in p.slots}) > 1:
        raise InternalError("all slots of a job must have the same number of copies; credits count in it")
    tables = PlanTables.of(plan)
    for worker, program in by_worker.items():
        if program.plan_digest != plan.digest or len(program.rounds) != plan.rounds:
            raise InternalError(f"program of {names[worker]!r} is for another plan or number of rounds; lower it again")
        check_alike(program, programs[0], names)
        check_slots(program, tables)
    _check_both_ends(by_worker, names)
    check_order(by_worker, names)
    _check_readers(by_worker, names)


def check_alike(program: WorkerProgram, other: WorkerProgram, names: Mapping[int, str]) -> None:
    """What all programs of a job must have in common. Raises InternalError naming both workers."""
    for what in ("codec", "base_version", "post_order"):
        mine, theirs = getattr(program, what), getattr(other, what)
        if mine != theirs:
            raise InternalError(
                f"program of {names[program.worker]!r} has another {what} than {names[other.worker]!r}: "
                f"{mine!r}, not {theirs!r}"
            )


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
            ends = [names.get(w, f"worker {w}") for w in (source, target)]
            raise InternalError(f"the write of round {k} from {ends[0]!r} to slot {stage!r} of {ends[1]!r} {state}")


def _check_readers(programs: Mapping[int, WorkerProgram], names: Mapping[int, str]) -> None:
    for worker, program in programs.items():
        for k, round_ in enumerate(program.rounds):
            stage = dict(round_.assemble.sources)
            for other in round_.reads:
                if other not in programs or worker not in programs[other].rounds[k].readers:
                    raise InternalError(
                        f"slot {stage.get(other)!r} of {names.get(other, other)!r} is released in round {k} while neighbour "
                        f"{names[worker]!r} reads it: it is missing among the readers"
                    )
            for other in round_.readers:
                if other not in programs or worker not in programs[other].rounds[k].reads:
                    raise InternalError(
                        f"{names[worker]!r} waits in round {k} for {names.get(other, other)!r}, which reads no slot of it"
                    )
