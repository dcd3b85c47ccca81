"""Run all workers of a job in one process, on NumPy memory, in a random but repeatable order of events.

Part of the published test kit: the machines are the real ones, the transport and the kernels' lanes are stand-ins that
finish when a seeded random choice says so. Writes and assemblies happen in halves, so that they overlap with everything
that the protocol allows. A watch over every slot copy raises when one is written while somebody may still read it, or
read before it is filled; credited copies are filled with 0xFF at once, so that a late read shows in the values too. Posts
carry digests that are checked before the receiver's machine hears of them, as the executor does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InternalError
from weightbridge.kernels.base import Buffer, Kernels
from weightbridge.kernels.digests import fastest_digest
from weightbridge.kernels.reference import ReferenceKernels
from weightbridge.machine.events import (
    Arrived,
    Assemble,
    AssembleAllowed,
    AssembleDone,
    Decode,
    DecodeDone,
    Event,
    Failed,
    Finished,
    Instruction,
    Kind,
    Pack,
    PackDone,
    PeerLost,
    PostWrites,
    Released,
    Signal,
    Tag,
    WriteDone,
)
from weightbridge.machine.transfer import TransferMachine
from weightbridge.plan.plan import STAGES
from weightbridge.program.program import Post, WorkerProgram
from weightbridge.testing.slot_watch import SlotWatch

__all__ = ["Faults", "MemoryDriver", "Outcome", "SegmentCodec"]

Bytes = npt.NDArray[np.uint8]
POISON = 0xFF


class SegmentCodec(Protocol):
    """What the executor's codecs do, in place on one segment's slot bytes."""

    def encode(self, segment: Bytes) -> int:
        """Replace dense bytes by encoded ones; return their length, at most the segment's."""

    def decode(self, segment: Bytes, length: int) -> None:
        """Inverse of encode: afterwards the whole segment is dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """death: (worker, n): it stops instead of carrying out its n-th instruction (from 0). announce: all others are told of
    a death, and when one of them fails of it the whole attempt is called off, each at some later moment; without it they
    stay with what they wait for.

    drop_signals, duplicate_signals: which signals, counted from 0 over all workers in the order they are sent, get lost or
    arrive twice. corrupt_posts: which posts, counted likewise, arrive with one flipped bit; whoever finds it gives up naming
    the sender.
    """

    death: tuple[int, int] | None = None
    announce: bool = True
    drop_signals: frozenset[int] = frozenset()
    duplicate_signals: frozenset[int] = frozenset()
    corrupt_posts: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of each worker. stuck: worker -> what it waits for, when nothing could happen any more.

    moved_bytes: (source, target) -> bytes of slots that travelled. trace: (worker, instruction) in the order carried out.
    """

    finished: frozenset[int]
    failed: Mapping[int, Failed]
    stuck: Mapping[int, tuple[tuple[int, str], ...]]
    moved_bytes: Mapping[tuple[int, int], int]
    trace: tuple[tuple[int, Instruction], ...]


@dataclass(slots=True)
class _Write:
    """A post under way. number: counts all posts of the run. lengths: actual bytes of each segment; they ride with the tag."""

    number: int
    source: int
    round: int
    post: Post
    lengths: list[int]
    tag: Tag
    half_done: bool = False


@dataclass(slots=True)
class _Kernel:
    """An instruction under way in a worker's kernel lane."""

    instruction: Pack | Decode | Assemble
    half_done: bool = False


@dataclass(kw_only=True)
class _Seat:
    """One worker of one run."""

    machine: TransferMachine
    lane: deque[_Kernel] = field(default_factory=deque)
    inbox: deque[Event | Failed] = field(default_factory=deque)  # completions and news whose time of delivery is chance
    num_instructions: int = 0
    dead: bool = False
    failure: Failed | None = None


class MemoryDriver:
    """All workers of one job.

    programs: one per worker. live: worker -> its live tensors' bytes, [num_live] flat uint8 arrays of span_numel *
    itemsize bytes; read by pack, written by assemble. codec: what the programs' codec name stands for. ordered: messages
    of one pair of workers arrive in order, as transports promise; the machines need not rely on it. machine_class: for tests
    that show a wrong machine caught.
    """

    def __init__(
        self,
        programs: Sequence[WorkerProgram],
        live: Mapping[int, Sequence[Bytes]],
        *,
        codec: SegmentCodec | None = None,
        kernels: Kernels | None = None,
        ordered: bool = True,
        machine_class: type[TransferMachine] = TransferMachine,
    ) -> None:
        self.programs = {p.worker: p for p in programs}
        self.live = live
        self._codec = codec
        self._kernels = kernels or ReferenceKernels()
        self.ordered = ordered
        self.machine_class = machine_class
        self._arenas = {w: np.full(p.arena_bytes, POISON, dtype=np.uint8) for w, p in self.programs.items()}

    def run(
        self, *, seed: int = 0, version: int = 1, attempt: int = 0, faults: Faults = Faults(), gated: bool = False
    ) -> Outcome:
        """One update from start to rest. gated: assembly is allowed to each worker only at some later moment.

        Raises InternalError when a slot copy is misused; never blocks.
        """
        for arena in self._arenas.values():
            arena[:] = POISON
        return _Run(self, seed=seed, version=version, attempt=attempt, faults=faults, gated=gated).run()

    def slot(self, worker: int, stage: str, round_: int) -> Bytes:
        """The bytes of the slot copy that `round_` uses."""
        spec = self.programs[worker].slot(stage)
        at = spec.offset(round_)
        return self._arenas[worker][at : at + spec.capacity_bytes]

    def launch(self, table: npt.NDArray[np.void], sources: Sequence[Bytes], destinations: Sequence[Bytes]) -> None:
        bound = self._kernels.prepare(table, [_buffer(s) for s in sources], [_buffer(d) for d in destinations])
        if not self._kernels.launch(bound).done():
            raise InternalError("the memory driver needs kernels that are done at once")

    @property
    def codec(self) -> SegmentCodec:
        if self._codec is None:
            raise InternalError("the programs use a codec, but the driver was given none")
        return self._codec


def _buffer(memory: Bytes) -> Buffer:
    return Buffer(memory.ctypes.data, memory.nbytes)


def _digest(slot: Bytes, post: Post, end: Literal["local_offset", "remote_offset"], lengths: Sequence[int]) -> int:
    """Of a post's bytes in the slot at one of its ends."""
    rows = np.stack([post.segments[end], np.array(lengths, dtype=np.int64)], axis=1)
    return fastest_digest()(slot.ctypes.data, rows)


class _Run:
    """One update: what is under way, and the dice."""

    def __init__(
        self, job: MemoryDriver, *, seed: int, version: int, attempt: int, faults: Faults, gated: bool
    ) -> None:
        self.job = job
        self.version, self.attempt = version, attempt
        self.dice = random.Random(seed)
        self.faults = faults
        self.watch = SlotWatch(job.programs)
        self.seats: dict[int, _Seat] = {}
        for worker, program in job.programs.items():
            machine = job.machine_class(
                program, session=1, epoch=1, version=version, attempt=attempt, assemble_allowed=not gated
            )
            self.seats[worker] = _Seat(machine=machine, inbox=deque([AssembleAllowed()] if gated else []))
        self.channels: dict[tuple[int, int], deque[_Write | Tag]] = {}
        self.lengths: dict[tuple[int, str, int, int], int] = {}  # (worker, stage, round, offset) of encoded segments
        self.moved: dict[tuple[int, int], int] = {}
        self.trace: list[tuple[int, Instruction]] = []
        self.num_signals = 0
        self.num_posts = 0
        self.announced: set[int] = set()
        self.called_off = False

    def run(self) -> Outcome:
        for worker, seat in self.seats.items():
            self._carry_out(worker, seat.machine.start())
        while actions := self._possible():
            self.dice.choice(actions)()
        alive = {w: s for w, s in self.seats.items() if not s.dead}
        return Outcome(
            finished=frozenset(w for w, s in alive.items() if s.machine.finished),
            failed={w: s.failure for w, s in alive.items() if s.failure is not None},
            stuck={
                w: s.machine.waiting_for() for w, s in alive.items() if not s.machine.finished and s.failure is None
            },
            moved_bytes=self.moved,
            trace=tuple(self.trace),
        )

    def _possible(self) -> list[Callable[[], None]]:
        """Everything that can happen next."""
        actions: list[Callable[[], None]] = []
        for worker, seat in self.seats.items():
            if seat.dead:
                continue
            if seat.lane:
                actions.append(lambda w=worker: self._step_kernel(w))  # type: ignore[misc]
            if seat.inbox:
                actions.append(lambda w=worker: self._take_inbox(w))  # type: ignore[misc]
        for pair, queue in self.channels.items():
            if queue:
                actions.append(lambda p=pair: self._step_channel(p))  # type: ignore[misc]
        return actions

    def _deliver(self, worker: int, event: Event | Failed) -> None:
        seat = self.seats[worker]
        if seat.dead or seat.failure is not None:
            return
        if isinstance(event, Failed):
            seat.failure = None if seat.machine.finished else event
        else:
            self._carry_out(worker, seat.machine.handle(event))

    def _take_inbox(self, worker: int) -> None:
        inbox = self.seats[worker].inbox
        index = self.dice.randrange(len(inbox))
        event = inbox[index]
        del inbox[index]
        self._deliver(worker, event)

    # --- instructions -------------------------------------------------------------------------------------------------

    def _carry_out(self, worker: int, instructions: Sequence[Instruction]) -> None:
        seat = self.seats[worker]
        for instruction in instructions:
            if self.faults.death == (worker, seat.num_instructions):
                self._die(worker)
                return
            seat.num_instructions += 1
            self.trace.append((worker, instruction))
            if isinstance(instruction, Signal):
                self._signal(worker, instruction)
            elif isinstance(instruction, PostWrites):
                self._post(worker, instruction)
            elif isinstance(instruction, (Pack, Decode, Assemble)):
                if isinstance(instruction, Pack):
                    self.job.slot(worker, "send", instruction.round)[:] = POISON
                self.watch.begin_kernel(worker, instruction)
                seat.lane.append(_Kernel(instruction))
            elif isinstance(instruction, Failed):
                seat.failure = instruction
                self._call_off(worker, instruction)
            elif not isinstance(instruction, (Released, Finished)):
                raise InternalError(f"the driver does not know {instruction}")

    def _die(self, worker: int) -> None:
        """Stop at once: kernels and writes stay half done; what was sent before may or may not arrive."""
        self.seats[worker].dead = True
        for (source, _), queue in self.channels.items():
            if source == worker:
                kept = [m for m in queue if isinstance(m, Tag) and self.dice.random() < 0.5]
                queue.clear()
                queue.extend(kept)
        self._announce(worker, "killed")

    def _announce(self, worker: int, cause: str) -> None:
        """What a coordinator does: everyone learns of the loss, sooner or later, once."""
        if self.faults.announce and worker not in self.announced:
            self.announced.add(worker)
            for other, seat in self.seats.items():
                if other != worker:
                    seat.inbox.append(PeerLost(worker, cause))

    def _call_off(self, worker: int, failed: Failed) -> None:
        """What a coordinator does when a worker fails: everyone who is not through gives up for the same reason, once."""
        if self.faults.announce and not self.called_off:
            self.called_off = True
            for other, seat in self.seats.items():
                if other != worker:
                    seat.inbox.append(failed)

    def _signal(self, worker: int, signal: Signal) -> None:
        if signal.tag.kind is Kind.CREDIT:
            self.job.slot(worker, STAGES[signal.tag.stage], signal.tag.round)[:] = POISON
        copies = (
            1 + (self.num_signals in self.faults.duplicate_signals) - (self.num_signals in self.faults.drop_signals)
        )
        self.num_signals += 1
        self._channel(worker, signal.peer).extend([signal.tag] * copies)

    def _channel(self, source: int, target: int) -> deque[_Write | Tag]:
        return self.channels.setdefault((source, target), deque())

    def _post(self, worker: int, instruction: PostWrites) -> None:
        k = instruction.round
        post = self.job.programs[worker].rounds[k].posts[instruction.index]
        self.watch.begin_write(worker, k, post)
        lengths = [
            self.lengths.get((worker, post.source, k, int(s["local_offset"])), int(s["capacity_bytes"]))
            for s in post.segments
        ]
        stage = STAGES.index(post.stage)
        tag = Tag(
            session=1, epoch=1, version=self.version, attempt=self.attempt, round=k, kind=Kind.DATA, stage=stage,
            digest=_digest(self.job.slot(worker, post.source, k), post, "local_offset", lengths),
        )  # fmt: skip
        self._channel(worker, post.peer).append(_Write(self.num_posts, worker, k, post, lengths, tag))
        self.num_posts += 1

    # --- things under way ---------------------------------------------------------------------------------------------

    def _step_channel(self, pair: tuple[int, int]) -> None:
        source, target = pair
        queue = self.channels[pair]
        index = 0 if self.job.ordered else self.dice.randrange(len(queue))
        message = queue[index]
        if isinstance(message, _Write):
            self._copy(message, target)
            if not message.half_done:
                message.half_done = True
                return
            if self.seats[target].dead:
                del queue[index]
                return
            for segment, length in zip(message.post.segments, message.lengths, strict=True):
                self.lengths[target, message.post.stage, message.round, int(segment["remote_offset"])] = length
            self.moved[pair] = self.moved.get(pair, 0) + sum(message.lengths)
            self.watch.end_write(source, message.round, message.post)
            self.seats[source].inbox.append(WriteDone(message.round, message.post.stage, target))
        tag = message.tag if isinstance(message, _Write) else message
        del queue[index]
        if isinstance(message, _Write) and not self._is_whole(message, target):
            failed = Failed(source, f"{tag.kind.name} of round {tag.round} came in corrupted")
            self._deliver(target, failed)
            self._call_off(target, failed)
            return
        self._deliver(target, Arrived(source, tag))

    def _is_whole(self, write: _Write, target: int) -> bool:
        """Whether what lies in the target's slot is what was posted, after the damage that `faults` asks for."""
        slot = self.job.slot(target, write.post.stage, write.round)
        if write.number in self.faults.corrupt_posts:
            segment, length = self.dice.choice(
                [x for x in zip(write.post.segments, write.lengths, strict=True) if x[1]]
            )
            slot[int(segment["remote_offset"]) + self.dice.randrange(length)] ^= 1 << self.dice.randrange(8)
        return _digest(slot, write.post, "remote_offset", write.lengths) == write.tag.digest

    def _copy(self, write: _Write, target: int) -> None:
        """Every other segment at a time, from what the source slot holds now."""
        local = self.job.slot(write.source, write.post.source, write.round)
        remote = self.job.slot(target, write.post.stage, write.round)
        for i, (segment, length) in enumerate(zip(write.post.segments, write.lengths, strict=True)):
            if i % 2 == write.half_done:
                at, to = int(segment["local_offset"]), int(segment["remote_offset"])
                remote[to : to + length] = local[at : at + length]

    def _step_kernel(self, worker: int) -> None:
        seat = self.seats[worker]
        kernel = seat.lane[0]
        instruction, last = kernel.instruction, kernel.half_done
        kernel.half_done = True
        k = instruction.round
        if isinstance(instruction, Decode):
            self._decode(worker, k)
        else:
            self._run_half(worker, instruction, last)
            if not last:
                return
        seat.lane.popleft()
        self.watch.end_kernel(worker, instruction)
        done = (
            PackDone(k) if isinstance(instruction, Pack) else DecodeDone(k) if isinstance(instruction, Decode) else None
        )
        self._deliver(worker, done or AssembleDone(k))

    def _run_half(self, worker: int, instruction: Pack | Assemble, last: bool) -> None:
        job, round_ = self.job, self.job.programs[worker].rounds[instruction.round]
        k = instruction.round
        if isinstance(instruction, Pack):
            table, sources, targets = round_.pack, job.live[worker], [job.slot(worker, "send", k)]
        else:
            table, targets = round_.assemble.table, list(job.live[worker])
            sources = [job.slot(w, stage, k) for w, stage in round_.assemble.sources]
        middle = len(table) // 2
        job.launch(table[middle:] if last else table[:middle], sources, targets)
        if last and isinstance(instruction, Pack) and job.programs[worker].codec != "identity":
            self._encode(worker, k)

    def _encode(self, worker: int, k: int) -> None:
        slot = self.job.slot(worker, "send", k)
        for post in self.job.programs[worker].rounds[k].posts:
            for segment in post.segments:
                at, capacity = int(segment["local_offset"]), int(segment["capacity_bytes"])
                length = self.job.codec.encode(slot[at : at + capacity])
                slot[at + length : at + capacity] = POISON
                self.lengths[worker, "send", k, at] = length

    def _decode(self, worker: int, k: int) -> None:
        for await_ in self.job.programs[worker].rounds[k].awaits:
            slot = self.job.slot(worker, await_.stage, k)
            for segment in await_.segments:
                at, capacity = int(segment["remote_offset"]), int(segment["capacity_bytes"])
                self.job.codec.decode(slot[at : at + capacity], self.lengths[worker, await_.stage, k, at])
