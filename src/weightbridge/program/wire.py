"""Wire form of a program: msgpack, arrays as raw little-endian bytes. Nothing in it is executable.

Decoding trusts nothing: sizes, ranges and dtypes are checked, and the digest must come out as it went in.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from weightbridge.errors import TransportError
from weightbridge.program.program import (
    DESCRIPTOR,
    POST_ORDERS,
    SEGMENT,
    Assemble,
    Await,
    Post,
    Round,
    SlotSpec,
    WorkerProgram,
)

__all__ = ["MAX_PROGRAM_BYTES", "decode_program", "encode_program"]

MAX_PROGRAM_BYTES = 1 << 30
_VERSION = 2

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Pair = tuple[_Name, _Id]


class _Slot(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    stage: _Name
    capacity_bytes: _Bytes
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=64)]
    arena_offset: _Bytes


class _Post(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    stage: _Name
    source: _Name
    peer: _Id
    segments: bytes
    after: list[_Pair]


class _Await(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    stage: _Name
    peer: _Id
    segments: bytes


class _Round(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    pack: bytes
    posts: list[_Post]
    awaits: list[_Await]
    sources: list[tuple[_Id, _Name]]
    assemble: bytes
    reads: list[_Id]
    readers: list[_Id]


class _Program(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    wire_version: int
    worker: _Id
    plan_digest: Annotated[str, msgspec.Meta(max_length=128)]
    slots: Annotated[list[_Slot], msgspec.Meta(max_length=17)]
    rounds: Annotated[list[_Round], msgspec.Meta(max_length=1 << 20)]
    codec: _Name
    base_version: Annotated[int, msgspec.Meta(ge=-1)]
    post_order: _Name
    digest: Annotated[str, msgspec.Meta(max_length=128)]


def encode_program(program: WorkerProgram) -> bytes:
    """The program as bytes, its digest included."""
    rounds = [
        _Round(
            r.pack.tobytes(),
            [_Post(p.stage, p.source, p.peer, p.segments.tobytes(), list(p.after)) for p in r.posts],
            [_Await(a.stage, a.peer, a.segments.tobytes()) for a in r.awaits],
            list(r.assemble.sources),
            r.assemble.table.tobytes(),
            list(r.reads),
            list(r.readers),
        )
        for r in program.rounds
    ]
    slots = [_Slot(s.stage, s.capacity_bytes, s.num_slots, s.arena_offset) for s in program.slots]
    return msgspec.msgpack.encode(
        _Program(
            _VERSION,
            program.worker,
            program.plan_digest,
            slots,
            rounds,
            program.codec,
            program.base_version,
            program.post_order,
            program.digest,
        )
    )


def decode_program(data: bytes, *, max_bytes: int = MAX_PROGRAM_BYTES) -> WorkerProgram:
    """Inverse of encode_program. Raises TransportError for bytes that are no valid program of at most `max_bytes`."""
    if len(data) > max_bytes:
        raise TransportError(f"a program of {len(data)} bytes came in; at most {max_bytes} are accepted")
    try:
        wire = msgspec.msgpack.decode(data, type=_Program)
    except msgspec.MsgspecError as error:
        raise TransportError(f"a program came in that cannot be read: {error}") from error
    if wire.wire_version != _VERSION:
        raise TransportError(
            f"a program has wire version {wire.wire_version}, expected {_VERSION}; use one release everywhere"
        )
    if wire.post_order not in POST_ORDERS:
        raise TransportError(
            f"a program came in whose posts are ordered by {wire.post_order!r}, expected one of {', '.join(POST_ORDERS)}; "
            "use one release everywhere"
        )
    program = WorkerProgram(
        worker=wire.worker,
        plan_digest=wire.plan_digest,
        slots=tuple(
            SlotSpec(stage=s.stage, capacity_bytes=s.capacity_bytes, num_slots=s.num_slots, arena_offset=s.arena_offset)
            for s in wire.slots
        ),
        rounds=tuple(_round(r) for r in wire.rounds),
        codec=wire.codec,
        base_version=wire.base_version,
        post_order=wire.post_order,
    )
    if program.digest != wire.digest:
        raise TransportError(f"a program came in damaged: its digest is {program.digest}, expected {wire.digest}")
    return program


def _round(r: _Round) -> Round:
    sources = tuple(r.sources)
    table = _rows(r.assemble, DESCRIPTOR, "assemble table")
    if len(table) and not 0 <= int(table["src_buffer"].min()) <= int(table["src_buffer"].max()) < len(sources):
        raise TransportError(f"a program came in whose assemble table names a slot beyond its {len(sources)} sources")
    return Round(
        pack=_rows(r.pack, DESCRIPTOR, "pack table"),
        posts=tuple(
            Post(
                stage=p.stage,
                source=p.source,
                peer=p.peer,
                segments=_rows(p.segments, SEGMENT, "segments"),
                after=tuple(p.after),
            )
            for p in r.posts
        ),
        awaits=tuple(
            Await(stage=a.stage, peer=a.peer, segments=_rows(a.segments, SEGMENT, "segments")) for a in r.awaits
        ),
        assemble=Assemble(sources=sources, table=table),
        reads=tuple(r.reads),
        readers=tuple(r.readers),
    )


def _rows(data: bytes, dtype: np.dtype[np.void], what: str) -> npt.NDArray[np.void]:
    if len(data) % dtype.itemsize:
        raise TransportError(f"a program came in whose {what} have {len(data)} bytes, no multiple of {dtype.itemsize}")
    rows: npt.NDArray[np.void] = np.frombuffer(data, dtype=dtype).copy()
    return rows
