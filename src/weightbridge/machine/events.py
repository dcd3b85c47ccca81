"""What goes into and comes out of the transfer machine, and the tags that tie messages to one attempt.

Events in, instructions out. Peers are worker ids of the plan's topology; `round` counts from 0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from weightbridge.errors import TransportError

__all__ = [
    "Arrived", "Assemble", "AssembleAllowed", "AssembleDone", "Decode", "DecodeDone", "Event", "Failed", "Finished",
    "Instruction", "Kind", "Pack", "PackDone", "PeerLost", "PostWrites", "Released", "Signal", "Tag", "WriteDone",
]  # fmt: skip


class Kind(IntEnum):
    """What a tag says. DATA: the bytes of a post are in place. The others carry no bytes."""

    DATA = 0
    CREDIT = 1  # the peer's slot copy of this round is free again
    READY = 2  # all bytes of this round lie in the sender's slots: its neighbours may read
    ASSEMBLED = 3  # the sender has read the receiver's slots of this round


_TAG = struct.Struct("<QIqIIBBQ")
_MAX_STAGES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """Identifies a message beyond doubt: whatever belongs to another session, epoch, version or attempt is dropped.

    stage: position in plan.STAGES of the slot that the bytes went to (DATA, CREDIT); 0 otherwise. digest: of a DATA post's
    bytes in the order of its segments (`kernels.digests`), [0, 2**64); 0 where none was taken, and without bytes.
    """

    session: int
    epoch: int
    version: int
    attempt: int
    round: int
    kind: Kind
    stage: int = 0
    digest: int = 0

    def pack(self) -> bytes:
        """Fixed-size wire form, little-endian."""
        return _TAG.pack(
            self.session, self.epoch, self.version, self.attempt, self.round, self.kind, self.stage, self.digest
        )

    @classmethod
    def unpack(cls, data: bytes) -> Tag:
        """Inverse of pack. Raises TransportError on a wrong size, an unknown kind or a stage out of range."""
        if len(data) != _TAG.size:
            raise TransportError(f"tag has {len(data)} bytes, expected {_TAG.size}; the peer speaks another protocol")
        session, epoch, version, attempt, round_, kind, stage, digest = _TAG.unpack(data)
        if kind not in Kind._value2member_map_ or stage >= _MAX_STAGES:
            raise TransportError(
                f"tag with kind {kind} and stage {stage} is not known; the peer speaks another protocol"
            )
        return cls(
            session=session, epoch=epoch, version=version, attempt=attempt, round=round_, kind=Kind(kind), stage=stage,
            digest=digest,
        )  # fmt: skip


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackDone:
    """The pack kernel of a round has finished; the live weights of that round are no longer needed."""

    round: int


@dataclass(frozen=True, slots=True)
class WriteDone:
    """All bytes of a post (round, stage, peer) are at the peer; its local slot is free of it."""

    round: int
    stage: str
    peer: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A tag came in from `peer`."""

    peer: int
    tag: Tag


@dataclass(frozen=True, slots=True)
class DecodeDone:
    round: int


@dataclass(frozen=True, slots=True)
class AssembleDone:
    round: int


@dataclass(frozen=True, slots=True)
class AssembleAllowed:
    """Every engine has parked: live weights may be overwritten from now on (direct mode's point of no return)."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer: int
    cause: str


Event = PackDone | WriteDone | Arrived | DecodeDone | AssembleDone | AssembleAllowed | PeerLost


# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pack:
    """Run the round's pack table into its send slot copy (and encode its segments); answer PackDone."""

    round: int


@dataclass(frozen=True, slots=True)
class PostWrites:
    """Perform the round's post to (stage, peer): the index-th of Round.posts; answer WriteDone."""

    round: int
    index: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Turn the round's encoded segments in the own slots into dense ones; answer DecodeDone."""

    round: int


@dataclass(frozen=True, slots=True)
class Assemble:
    """Run the round's assemble table; answer AssembleDone."""

    round: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a tag without bytes to `peer`."""

    peer: int
    tag: Tag


@dataclass(frozen=True, slots=True)
class Released:
    """The worker's weights are free to change (trainer: its last pack is done and its last write has left)."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is left to do and no slot of this worker is in use by anyone."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt is over; peer and cause say who and what. No further instruction follows."""

    peer: int
    cause: str


Instruction = Pack | PostWrites | Decode | Assemble | Signal | Released | Finished | Failed
