"""The words of the control plane: typed, bounded, one struct each. The coordinator moves them; the machines speak them.

Every worker talks to the hub (trainer rank 0) and to nobody else, so messages grow with the number of workers. Nothing
is pickled; decoding rejects unknown types, missing fields and values out of range.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from weightbridge.errors import TransportError

__all__ = [
    "MAX_MESSAGE_BYTES", "PROTOCOL_VERSION", "AbortAttempt", "AllowAssemble", "AskIdle", "AttemptFailed", "Begin", "Closed",
    "Commit", "Committed", "ConnectPeers", "Connected", "Failure", "Goodbye", "Heard", "Heartbeat", "IdleAnswer",
    "IdleInstall", "IdleRelease", "InstallNow", "Installed", "Join", "LayoutReady", "Message", "Parked", "PeerEndpoint",
    "PlanReady", "ProgramReady", "Promise", "Propose", "Quiesced", "Ready", "Rejected", "Report", "Resumed", "RunProbe",
    "SendReady", "SideHeard", "SideSay", "Slot", "StopRequest", "Stopped", "Transferred", "UpdateFailed", "Welcome",
    "WorkerFailed", "decode", "encode",
]  # fmt: skip

PROTOCOL_VERSION = 3
MAX_MESSAGE_BYTES = 1 << 30  # a source map or a plan of a very large job; all else is tiny

MAX_WORD_BYTES = 1 << 24  # of what a worker says to its side while it probes

Name = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=65536)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Number = Annotated[int, Meta(ge=-(2**62), le=2**63 - 1)]


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all."""


# --- life of a worker -------------------------------------------------------------------------------------------------


class Join(Message, frozen=True):
    """Worker -> hub, first. size: workers of its side (trainer group or engine). dtypes: of its live tensors.

    version: what this worker holds from an earlier session, -1 for nothing. staged: it receives into host memory and installs
    later (rollout), or sends from a host copy (trainer).
    """

    protocol: Count
    worker: Name
    role: Name
    engine: Name
    rank: Count
    size: Count
    node: Name
    bandwidth: float
    spec_digest: Name
    dtypes: Annotated[tuple[Name, ...], Meta(max_length=64)]
    version: Number = -1
    staged: bool = False


class Welcome(Message, frozen=True):
    """Hub -> worker: joined."""

    session: Count


class Rejected(Message, frozen=True):
    """Hub -> worker: not joined, and why. again: the reason may pass (its place is still taken); ask later."""

    reason: Text
    again: bool = False


class Heartbeat(Message, frozen=True):
    """Both ways, each `heartbeat_seconds`."""


class Goodbye(Message, frozen=True):
    """Worker -> hub: leaves in good order."""


class Closed(Message, frozen=True):
    """Hub -> rollout workers: the trainers have left in good order; go on with the weights you have."""


class WorkerFailed(Message, frozen=True):
    """Worker -> hub: this worker cannot go on (its own code raised, its memory is gone), or a worker of its own side cannot,
    which `lost` names ("" for none). kind: error class name."""

    kind: Name
    reason: Text
    lost: Name = ""


class Failure(Message, frozen=True):
    """Hub -> worker: the session is over for you. causes: worker -> what happened; poisoned: engines that hold mixed
    versions."""

    kind: Name
    causes: dict[Name, Text]
    poisoned: tuple[Name, ...] = ()
    version: Number = -1


class Heard(Message, frozen=True):
    """Worker -> hub: the failure has arrived here."""


# --- connect ----------------------------------------------------------------------------------------------------------


class RunProbe(Message, frozen=True):
    """Hub -> worker: every worker of its side is parked; probe now. dtypes: union over the side."""

    request: Count
    dtypes: tuple[Name, ...]


class LayoutReady(Message, frozen=True):
    """Worker -> hub: source map in its wire form."""

    source_map: bytes


class SideSay(Message, frozen=True):
    """Worker -> hub, while it probes: its word to all workers of its side. step: 0, 1, 2 ... within one probe."""

    step: Count
    data: Annotated[bytes, Meta(max_length=MAX_WORD_BYTES)]


class SideHeard(Message, frozen=True):
    """Hub -> all workers of a side: what each of them said at this step, by rank."""

    step: Count
    data: Annotated[tuple[Annotated[bytes, Meta(max_length=MAX_WORD_BYTES)], ...], Meta(max_length=65536)]


class PlanReady(Message, frozen=True):
    """Hub -> members of an epoch: lower your own program of this plan (wire form), take fresh memory for this attempt.

    An empty plan means the one before: only memory and connections are made anew.
    """

    epoch: Count
    attempt: Count
    plan: bytes


class Slot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wire form of program.SlotSpec."""

    stage: Name
    capacity_bytes: Count
    num_slots: Annotated[int, Meta(ge=1, le=64)]
    arena_offset: Count


class PeerEndpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Wire form of executor.Endpoint."""

    addresses: dict[Name, Name]
    slots: tuple[Slot, ...]


class ProgramReady(Message, frozen=True):
    """Worker -> hub: program lowered and verified, memory registered."""

    attempt: Count
    plan_digest: Name
    endpoint: PeerEndpoint


class ConnectPeers(Message, frozen=True):
    """Hub -> all: join with your peers. peers: worker name -> endpoint."""

    attempt: Count
    peers: dict[Name, PeerEndpoint]


class Connected(Message, frozen=True):
    """Worker -> hub: joined with all its peers."""

    attempt: Count


class Ready(Message, frozen=True):
    """Hub -> members: every connection of the attempt stands; updates may come.

    version: the largest that any engine holds. staged: some engine receives into host memory.
    """

    attempt: Count
    version: Number = -1
    staged: bool = False


# --- the agreement on one step ----------------------------------------------------------------------------------------


class Propose(Message, frozen=True):
    """Hub -> engine worker: promise a poll you will not pass. connect: the request is for probing, not for an update."""

    request: Count
    connect: bool


class Promise(Message, frozen=True):
    request: Count
    bound: Count


class Commit(Message, frozen=True):
    request: Count
    target: Count


class Parked(Message, frozen=True):
    request: Count


class AskIdle(Message, frozen=True):
    request: Count
    attempt: Count


class IdleAnswer(Message, frozen=True):
    request: Count
    attempt: Count
    held: bool
    count: Count


class IdleInstall(Message, frozen=True):
    request: Count
    attempt: Count


class IdleRelease(Message, frozen=True):
    request: Count
    attempt: Count


class InstallNow(Message, frozen=True):
    """Hub -> engine worker: every worker of the engine waits in the agreed poll."""

    request: Count


class Installed(Message, frozen=True):
    request: Count


class StopRequest(Message, frozen=True):
    """Hub -> engine worker: the request is off; go on."""

    request: Count


class Stopped(Message, frozen=True):
    request: Count


# --- one update -------------------------------------------------------------------------------------------------------


class SendReady(Message, frozen=True):
    """Trainer -> hub: send_weights(version) was called here."""

    version: Count


class Begin(Message, frozen=True):
    """Hub -> all: start the transfer of this version."""

    version: Count
    attempt: Count


class AllowAssemble(Message, frozen=True):
    """Hub -> all: every engine has parked; live weights may be overwritten."""

    version: Count
    attempt: Count


class AttemptFailed(Message, frozen=True):
    """Worker -> hub: the attempt's data plane failed here. lost: the peer it was waiting for or lost, "" for none.

    kind: error class name. The worker itself is well and waits for AbortAttempt.
    """

    attempt: Count
    kind: Name
    reason: Text
    lost: Name = ""


class AbortAttempt(Message, frozen=True):
    """Hub -> members: end this attempt, cut its connections, give its memory back, then say Quiesced."""

    attempt: Count


class Quiesced(Message, frozen=True):
    """Worker -> hub: nothing of the attempt moves here any more.

    touched: live weights of this rollout worker may be a mixture. released: this trainer's weights may have changed since.
    """

    attempt: Count
    touched: bool
    released: bool


class UpdateFailed(Message, frozen=True):
    """Hub -> members: this version is given up; the session goes on. Fields as in Failure."""

    kind: Name
    causes: dict[Name, Text]
    poisoned: tuple[Name, ...] = ()
    version: Number = -1


class Transferred(Message, frozen=True):
    """Worker -> hub: this worker has done its part of the transfer."""

    version: Count
    attempt: Count


class Committed(Message, frozen=True):
    """Hub -> worker: all workers of your side are done; the version is whole here. request: the agreement it ends."""

    version: Count
    attempt: Count
    request: Count = 0


class Resumed(Message, frozen=True):
    """Worker -> hub: computing again. Times are seconds since the epoch by this machine's clock.

    sent, received: network bytes of this version, counted by the kernel. stage: what took most of the stall.
    """

    version: Count
    stalled_at: float
    resumed_at: float
    sent: Count
    received: Count
    stage: Name = ""


class Report(Message, frozen=True):
    """Hub -> trainers: the version has ended. engines: engine -> "ready", "superseded" (it skipped to a newer one) or
    "lost"."""

    version: Count
    ewtt_seconds: float
    agst_seconds: float
    network_bytes: dict[Name, tuple[Count, Count]]
    engines: dict[Name, Name]
    attempts: Count = 1
    slowest_worker: Name = ""
    slowest_stage: Name = ""
    ideal_seconds: float = 0.0

    @property
    def superseded(self) -> bool:
        """Whether an engine left the version out for a newer one."""
        return "superseded" in self.engines.values()


_ALL = (
    Join | Welcome | Rejected | Heartbeat | Goodbye | Closed | Ready | WorkerFailed | Failure | Heard | RunProbe
    | SideSay | SideHeard | LayoutReady | PlanReady | ProgramReady | ConnectPeers | Connected | Propose | Promise | Commit
    | Parked | AskIdle | IdleAnswer | IdleInstall | IdleRelease | InstallNow | Installed | StopRequest | Stopped
    | SendReady | Begin | AllowAssemble | AttemptFailed | AbortAttempt | Quiesced | UpdateFailed | Transferred | Committed
    | Resumed | Report
)  # fmt: skip
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_ALL)


def encode(message: Message) -> bytes:
    """MessagePack bytes of one message."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """Inverse of encode. Raises TransportError on anything that is not exactly a known message."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise TransportError(f"control message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are accepted")
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TransportError(f"control message not understood: {error}; both sides must run the same version") from None
