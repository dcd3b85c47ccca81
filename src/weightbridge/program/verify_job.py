"""Check the programs of all workers of a job, one at a time, so that a thousand of them need not be in memory together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InternalError
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import Plan
from weightbridge.program.program import WorkerProgram
from weightbridge.program.verify import ProgramVerifier, check_alike

__all__ = ["ProgramFacts", "verify_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """What the programs of a job move in one update, counted by the verifier.

    packed_bytes, assembled_bytes: by descriptors, in checkpoint dtypes. posted_bytes: by writes, forwards included.
    posted_bytes_by_class: the same by replica class of the plan. num_descriptors, num_posts: of all workers and rounds.
    max_descriptors, max_posts, max_arena_bytes: of the worker that has most.
    """

    packed_bytes: int
    posted_bytes: int
    assembled_bytes: int
    posted_bytes_by_class: tuple[int, ...]
    num_descriptors: int
    num_posts: int
    max_descriptors: int
    max_posts: int
    max_arena_bytes: int


def verify_job(
    plan: Plan, spec: CheckpointSpec, maps: Sequence[SourceMap], programs: Iterable[WorkerProgram]
) -> ProgramFacts:
    """Raise unless `programs` has each worker's program once, in any order, and each is the worker's whole part of the plan.

    maps[i] belongs to plan.topology.workers[i]. Programs are taken one at a time and not kept. That the two ends of every
    write agree, and that no slot copy is written while anyone may still read it, follows from what is checked of each
    program alone: `program/ordering.py` has the proof. Raises InternalError naming worker, round and what is wrong;
    InfeasibleError for the budget.
    """
    names = dict(enumerate(w.name for w in plan.topology.workers))
    if len(maps) != len(names):
        raise InternalError(f"{len(maps)} source maps for {len(names)} workers; give one for each, in their order")
    verifier = ProgramVerifier(plan, spec)
    seen = np.zeros(len(names), dtype=bool)
    facts, head = [], None
    for program in programs:
        if not 0 <= program.worker < len(names) or seen[program.worker]:
            raise InternalError(f"there is a second program for worker {program.worker}, or no such worker in the plan")
        if head is None:
            head = _head_of(program)
        check_alike(program, head, names)
        if {s.num_slots for s in program.slots} - {s.num_slots for s in head.slots}:
            raise InternalError(
                f"slots of {names[program.worker]!r} have another number of copies than those of {names[head.worker]!r}; "
                "credits count in one number"
            )
        seen[program.worker] = True
        facts.append((bool(verifier.tables.trainer[program.worker]), verifier.check(program, maps[program.worker])))
    if not seen.all():
        missing = [names[i] for i in np.flatnonzero(~seen)[:8].tolist()]
        raise InternalError(f"expected one program for each of the {len(names)} workers, found none for {missing}")
    posted = sum((f.posted_bytes for _, f in facts), start=np.zeros(len(plan.classes), dtype=np.int64))
    return ProgramFacts(
        packed_bytes=sum(f.moved_bytes for trainer, f in facts if trainer),
        posted_bytes=int(posted.sum()),
        assembled_bytes=sum(f.moved_bytes for trainer, f in facts if not trainer),
        posted_bytes_by_class=tuple(posted.tolist()),
        num_descriptors=sum(f.num_descriptors for _, f in facts),
        num_posts=sum(f.num_posts for _, f in facts),
        max_descriptors=max((f.num_descriptors for _, f in facts), default=0),
        max_posts=max((f.num_posts for _, f in facts), default=0),
        max_arena_bytes=max((f.arena_bytes for _, f in facts), default=0),
    )


def _head_of(program: WorkerProgram) -> WorkerProgram:
    """The program without its rounds: what others are compared with outlives it."""
    return WorkerProgram(
        worker=program.worker, plan_digest=program.plan_digest, slots=program.slots, rounds=(), codec=program.codec,
        base_version=program.base_version, post_order=program.post_order,
    )  # fmt: skip
