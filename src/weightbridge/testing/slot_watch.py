"""Watch every slot copy of a job: no write while somebody may still read it, no read before it is filled.

Ground truth comes from the programs' tables and segments, not from `readers`, `reads` or `after`, so that a wrong list
there shows as a misuse of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weightbridge.errors import InternalError
from weightbridge.machine.events import Assemble, Decode, Pack
from weightbridge.program.program import Post, WorkerProgram

__all__ = ["SlotWatch"]

_Slot = tuple[int, str, int]  # worker, stage, round


@dataclass(slots=True)
class _Copy:
    """State of one slot copy. reads: who has still to finish reading the round, (what, worker). filled: routes in place."""

    round: int = -1
    reads: set[tuple[str, int]] = field(default_factory=set)
    writing: set[int] = field(default_factory=set)
    filled: set[int] = field(default_factory=set)


class SlotWatch:
    """Told of the begin and end of every use. Each method raises InternalError naming slot, round and both workers."""

    def __init__(self, programs: Mapping[int, WorkerProgram]) -> None:
        self._programs = programs
        self._copies: dict[_Slot, _Copy] = {}
        self._reads: dict[_Slot, set[tuple[str, int]]] = {}
        self._content: dict[_Slot, set[int]] = {}
        for worker, program in programs.items():
            for k, round_ in enumerate(program.rounds):
                for source, stage in round_.assemble.sources:
                    self._reads.setdefault((source, stage, k), set()).add(("assembly", worker))
                for post in round_.posts:
                    self._reads.setdefault((worker, post.source, k), set()).add((f"write {post.stage}", post.peer))
                    routes = post.segments["route"].tolist()
                    self._content.setdefault((post.peer, post.stage, k), set()).update(routes)

    def _copy(self, slot: _Slot) -> _Copy:
        worker, stage, k = slot
        spec = self._programs[worker].slot(stage)
        return self._copies.setdefault((worker, stage, k % spec.num_slots), _Copy())

    def _open(self, slot: _Slot, writer: int) -> _Copy:
        """The copy, taken over for a new round if need be."""
        worker, stage, k = slot
        copy = self._copy(slot)
        if copy.round != k:
            if copy.reads or copy.writing or copy.round > k:
                raise InternalError(
                    f"worker {writer} writes round {k} into slot {stage!r} of worker {worker} while round {copy.round} is in "
                    f"use: unread by {sorted(copy.reads)}, being written by {sorted(copy.writing)}"
                )
            copy.round, copy.filled = k, set()
            copy.reads = set(self._reads.get(slot, ()))
        return copy

    def begin_write(self, worker: int, k: int, post: Post) -> None:
        """A post starts: it reads the own slot and writes the peer's."""
        self._check_filled((worker, post.source, k), set(post.segments["route"].tolist()), post.peer)
        self._open((post.peer, post.stage, k), worker).writing.add(worker)

    def end_write(self, worker: int, k: int, post: Post) -> None:
        target = self._copy((post.peer, post.stage, k))
        target.writing.discard(worker)
        target.filled.update(post.segments["route"].tolist())
        self._copy((worker, post.source, k)).reads.discard((f"write {post.stage}", post.peer))

    def begin_kernel(self, worker: int, instruction: Pack | Decode | Assemble) -> None:
        k = instruction.round
        round_ = self._programs[worker].rounds[k]
        if isinstance(instruction, Pack):
            self._open((worker, "send", k), worker).writing.add(worker)
        elif isinstance(instruction, Assemble):
            for source, stage in round_.assemble.sources:
                self._check_filled((source, stage, k), self._content[source, stage, k], worker)
        else:
            for stage in {a.stage for a in round_.awaits}:
                self._check_filled((worker, stage, k), self._content[worker, stage, k], worker)
                if any(what != "assembly" for what, _ in self._copy((worker, stage, k)).reads):
                    raise InternalError(
                        f"worker {worker} decodes round {k} of slot {stage!r} before it has passed it on"
                    )

    def end_kernel(self, worker: int, instruction: Pack | Decode | Assemble) -> None:
        k = instruction.round
        round_ = self._programs[worker].rounds[k]
        if isinstance(instruction, Pack):
            copy = self._copy((worker, "send", k))
            copy.writing.discard(worker)
            copy.filled.update(r for p in round_.posts for r in p.segments["route"].tolist())
        elif isinstance(instruction, Assemble):
            for source, stage in round_.assemble.sources:
                self._copy((source, stage, k)).reads.discard(("assembly", worker))

    def _check_filled(self, slot: _Slot, routes: set[int], reader: int) -> None:
        worker, stage, k = slot
        copy = self._copy(slot)
        if copy.round != k or not routes <= copy.filled:
            raise InternalError(
                f"slot {stage!r} of worker {worker} is read for worker {reader} in round {k}, but it holds round {copy.round} "
                f"with routes {sorted(copy.filled)} of {sorted(routes)}"
            )
