"""What the hub tells those who look on (`weightbridge top`): the state of a job in one bounded message, about once a second.

An onlooker joins with `Join(role="observer", engine="", rank=0, size=1)`, is welcomed, beats like everybody, and hears `Status`
until it says Goodbye or the session ends. It is no member: it is never waited for, and nothing it says changes anything. What
it accepts is `decode_for_observer`; workers and the hub do not accept a Status.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from weightbridge.errors import TransportError
from weightbridge.machine.messages import (
    Closed,
    Count,
    Failure,
    Heartbeat,
    Message,
    Name,
    Number,
    Rejected,
    Text,
    Welcome,
)

__all__ = [
    "MAX_AWAITED", "MAX_ENGINES", "MAX_STATUS_BYTES", "MAX_UPDATES", "OBSERVER", "EngineStatus", "Status", "UpdateStatus",
    "WaitingFor", "decode_for_observer",
]  # fmt: skip

OBSERVER = "observer"
"""The role in an onlooker's Join. Its worker name is "observer/" and anything that is unique."""

MAX_ENGINES = 4096
MAX_UPDATES = 16
MAX_AWAITED = 64
MAX_STATUS_BYTES = 1 << 24

_Seconds = Annotated[float, Meta(ge=0.0)]


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. state: joining, ready, updating or poisoned. version: what it serves, -1 for nothing yet. since_seconds: age
    of its state. num_workers: that have joined, of `size`."""

    name: Name
    state: Name
    version: Number
    num_workers: Count
    size: Count = 0
    since_seconds: _Seconds = 0.0


class UpdateStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version that has ended. network_bytes: received by all workers together from other nodes. failed: "" or why it was
    given up; then the figures are zeros. Others as in coordinator.session_events.UpdateFinished."""

    version: Number
    ewtt_seconds: _Seconds = 0.0
    agst_seconds: _Seconds = 0.0
    ideal_seconds: _Seconds = 0.0
    network_bytes: Count = 0
    slowest_worker: Name = ""
    slowest_stage: Name = ""
    attempts: Count = 1
    superseded: bool = False
    failed: Text = ""


class WaitingFor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker that the session waits for, and what for, in words."""

    worker: Name
    what: Text


class Status(Message, frozen=True):
    """Hub -> onlookers.

    phase: as in machine.session.Phase, since `phase_seconds`. version: the newest that was ever begun, -1 for none.
    in_flight: the version under way, or -1, since `in_flight_seconds`; `in_flight_done` of `in_flight_of` workers have
    done their part of the transfer. num_trainers: that have joined, of `size_trainers`. updates: the newest
    `MAX_UPDATES`, the newest last. waiting_for: at most `MAX_AWAITED`, of `num_waiting_for`.
    """

    session: Count
    phase: Name
    phase_seconds: _Seconds = 0.0
    epoch: Count = 0
    attempt: Count = 0
    version: Number = -1
    in_flight: Number = -1
    in_flight_seconds: _Seconds = 0.0
    in_flight_done: Count = 0
    in_flight_of: Count = 0
    num_trainers: Count = 0
    size_trainers: Count = 0
    engines: Annotated[tuple[EngineStatus, ...], Meta(max_length=MAX_ENGINES)] = ()
    updates: Annotated[tuple[UpdateStatus, ...], Meta(max_length=MAX_UPDATES)] = ()
    waiting_for: Annotated[tuple[WaitingFor, ...], Meta(max_length=MAX_AWAITED)] = ()
    num_waiting_for: Count = 0


_DECODER = msgspec.msgpack.Decoder(Welcome | Rejected | Heartbeat | Closed | Failure | Status)


def decode_for_observer(data: bytes) -> Message:
    """What an onlooker accepts from the hub. Raises TransportError on anything else."""
    if len(data) > MAX_STATUS_BYTES:
        raise TransportError(f"message of {len(data)} bytes; an observer accepts at most {MAX_STATUS_BYTES}")
    try:
        message: Message = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TransportError(f"message not understood: {error}; both sides must run the same version") from None
    return message
