"""Program: what one worker does in each round, with every offset final. Data only.

Lowered from a Plan and the worker's own SourceMap by `program/lower.py`, checked by `program/verify.py`, replayed by the
machine and the executor. Posts and awaits are structs of msgspec, because a large job has millions: these cost a tenth of a
frozen dataclass, and nothing to the garbage collector. It serialises (`program/wire.py`) and has a digest.

Memory of a worker: *slots*. A slot is named by its stage: "send" on a trainer (packed bytes wait there), and one per entry
of `plan.STAGES` on a rollout (bytes arrive there). Each has `num_slots` copies used in turn: round k uses copy
k % num_slots. Offsets below are bytes within one copy. `SlotSpec.arena_offset` places the copies in the worker's arena.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "AS_READY", "DESCRIPTOR", "MAX_AXES", "OLDEST_ROUND_FIRST", "POST_ORDERS", "SEGMENT", "Assemble", "Await", "Op", "Post",
    "Round", "SlotSpec", "WorkerProgram",
]  # fmt: skip

MAX_AXES = 6

OLDEST_ROUND_FIRST = "oldest_round_first"
AS_READY = "as_ready"
POST_ORDERS: tuple[str, ...] = (OLDEST_ROUND_FIRST, AS_READY)
"""How a worker orders its posts. Oldest round first: nothing of round k + 1 leaves while a post of round k is not done.
As ready: whatever is packed (or has arrived, for a forward) and credited leaves at once, so that two rounds may share a link
and both end late; there to be compared with.
"""

DESCRIPTOR = np.dtype(
    [
        ("src_buffer", "<i4"),
        ("dst_buffer", "<i4"),
        ("src_offset", "<i8"),
        ("dst_offset", "<i8"),
        ("count", "<i8", (MAX_AXES,)),
        ("src_stride", "<i8", (MAX_AXES,)),
        ("dst_stride", "<i8", (MAX_AXES,)),
        ("op", "<i4"),
        ("itemsize", "<i4"),
    ]
)
"""One strided N-D copy between two buffers, for pack and assemble kernels alike.

src_buffer, dst_buffer: positions in the lists of buffers the kernel is bound to. Offsets and strides are *bytes*; axes are
outermost first, unused leading axes have count 1. op: an `Op`. itemsize: bytes of a source element (for COPY of both).
Adjacent elements are merged: the innermost axis of a COPY may well be one run of itemsize-sized elements with stride itemsize.
"""


class Op:
    """What a descriptor does to each element. Narrowing casts round to nearest, ties to even; NaN stays NaN.

    From F64 to BF16 and F16 the way is through F32, rounding twice, as torch's casts do.
    """

    COPY = 0
    F32_TO_BF16 = 1
    BF16_TO_F32 = 2
    F32_TO_F16 = 3
    F16_TO_F32 = 4
    BF16_TO_F16 = 5
    F16_TO_BF16 = 6
    F64_TO_F32 = 7
    F32_TO_F64 = 8
    F64_TO_BF16 = 9
    BF16_TO_F64 = 10
    F64_TO_F16 = 11
    F16_TO_F64 = 12

    BY_DTYPES: ClassVar[dict[tuple[str, str], int]] = {
        ("F32", "BF16"): F32_TO_BF16,
        ("BF16", "F32"): BF16_TO_F32,
        ("F32", "F16"): F32_TO_F16,
        ("F16", "F32"): F16_TO_F32,
        ("BF16", "F16"): BF16_TO_F16,
        ("F16", "BF16"): F16_TO_BF16,
        ("F64", "F32"): F64_TO_F32,
        ("F32", "F64"): F32_TO_F64,
        ("F64", "BF16"): F64_TO_BF16,
        ("BF16", "F64"): BF16_TO_F64,
        ("F64", "F16"): F64_TO_F16,
        ("F16", "F64"): F16_TO_F64,
    }


SEGMENT = np.dtype([("local_offset", "<i8"), ("remote_offset", "<i8"), ("capacity_bytes", "<i8"), ("route", "<i8")])
"""A contiguous part of a slot that travels as one: the unit a codec encodes and a forward passes on.

local_offset: within the source slot copy. remote_offset: within the destination slot copy. capacity_bytes: dense length;
an encoded segment may be shorter and its actual length rides with the tag.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSpec:
    """stage: "send" or a name from plan.STAGES. capacity_bytes: of one copy, a multiple of 64. arena_offset: of copy 0."""

    stage: str
    capacity_bytes: int
    num_slots: int
    arena_offset: int

    def offset(self, round_: int) -> int:
        """Byte offset in the arena of the copy that round `round_` uses."""
        return self.arena_offset + (round_ % self.num_slots) * self.capacity_bytes


class Post(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Write `segments` from the local slot `source` into slot `stage` of worker `peer`, then tag it.

    For a forward, `after` names the awaits (stage, peer) of the same round whose bytes it passes on.
    """

    stage: str
    source: str
    peer: int
    segments: npt.NDArray[np.void]
    after: tuple[tuple[str, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return int(self.segments["capacity_bytes"].sum())


class Await(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Bytes of slot `stage` that worker `peer` will write and tag in this round. segments: as the writer's Post has them."""

    stage: str
    peer: int
    segments: npt.NDArray[np.void]


@dataclass(frozen=True, kw_only=True)
class Assemble:
    """sources: (worker, stage) whose slot copies the descriptors' src_buffer counts through; own slots included."""

    sources: tuple[tuple[int, str], ...]
    table: npt.NDArray[np.void]


@dataclass(frozen=True, kw_only=True)
class Round:
    """One worker's part in one round.

    pack: descriptors from live tensors (src_buffer = position in SourceMap.live) to the send slot (dst_buffer 0).
    posts: trainer writes, and a rollout's forwards (those have `after`). awaits: what arrives. assemble: descriptors
    from slots to live tensors (dst_buffer = position in SourceMap.live).
    reads: neighbours (same node) whose slots `assemble` reads, without this worker. readers: neighbours that read this
    worker's slots in this round.
    """

    pack: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, dtype=DESCRIPTOR))
    posts: tuple[Post, ...] = ()
    awaits: tuple[Await, ...] = ()
    assemble: Assemble = field(default_factory=lambda: Assemble(sources=(), table=np.zeros(0, dtype=DESCRIPTOR)))
    reads: tuple[int, ...] = ()
    readers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerProgram:
    """worker: this worker's id. slots: its arena. rounds: one Round per round of the plan.

    codec: name of the codec all segments go through; "identity" moves dense bytes. base_version: the version an encoded
    segment is a difference to, -1 for none. post_order: one of POST_ORDERS, the same on all workers of a job;
    `program/verify.py` checks that, and orders the steps of the slots by it.
    """

    worker: int
    plan_digest: str
    slots: tuple[SlotSpec, ...]
    rounds: tuple[Round, ...]
    codec: str = "identity"
    base_version: int = -1
    post_order: str = OLDEST_ROUND_FIRST

    @property
    def arena_bytes(self) -> int:
        return max((s.arena_offset + s.capacity_bytes * s.num_slots for s in self.slots), default=0)

    def slot(self, stage: str) -> SlotSpec:
        for s in self.slots:
            if s.stage == stage:
                return s
        raise KeyError(stage)

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """Workers this one exchanges bytes or signals with, sorted."""
        found: set[int] = set()
        for r in self.rounds:
            found.update(p.peer for p in r.posts)
            found.update(a.peer for a in r.awaits)
            found.update(r.reads)
            found.update(r.readers)
        return tuple(sorted(found))

    @cached_property
    def digest(self) -> str:
        h = hashlib.blake2b(digest_size=16)
        h.update(
            repr((self.worker, self.plan_digest, self.slots, self.codec, self.base_version, self.post_order)).encode()
        )
        for r in self.rounds:
            h.update(r.pack.tobytes())
            for p in r.posts:
                h.update(repr((p.stage, p.source, p.peer, p.after)).encode() + p.segments.tobytes())
            for a in r.awaits:
                h.update(repr((a.stage, a.peer)).encode() + a.segments.tobytes())
            h.update(repr((r.assemble.sources, r.reads, r.readers)).encode() + r.assemble.table.tobytes())
        return h.hexdigest()
