"""The contract of a transport: move bytes into a peer's registered memory, then tell the peer.

One transport object serves one worker and all its peers of that kind. It owns its threads; what happens reaches the
owner through the one queue given at construction, so a worker that uses two transports waits in one place.
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.kernels.base import Buffer

__all__ = [
    "MAX_PAYLOAD_BYTES", "MAX_TAG_BYTES", "Arrived", "Capabilities", "Identity", "KernelBytes", "Memory", "PeerLost",
    "Transport", "TransportEvent", "WriteDone",
]  # fmt: skip

MAX_TAG_BYTES = 64
MAX_PAYLOAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """crosses_nodes: works between machines. maps_memory: `map` gives the peer's memory for reading in place.
    fence_replaces_memory: after a fence the owner must register fresh memory, because a stopped writer may still hold
    the old one."""

    crosses_nodes: bool
    maps_memory: bool
    fence_replaces_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this end is. worker: its name. session: names the job; both ends must agree. token: shared secret, b"" for
    none (then only loopback and same-machine peers are allowed)."""

    worker: str
    session: str
    token: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory that peers may write: its bytes, and the memfd behind it (-1 where there is none)."""

    buffer: Buffer
    fd: int = -1


class WriteDone(NamedTuple):
    """The peer has acknowledged all bytes and the tag of `ticket`."""

    peer: str
    ticket: int


class Arrived(NamedTuple):
    """A tag came in; every byte posted with it is visible in the registered memory."""

    peer: str
    tag: bytes
    payload: bytes


class PeerLost(NamedTuple):
    """The peer died, closed, broke the protocol or made no progress for longer than the deadline. Sent once a peer."""

    peer: str
    cause: str


TransportEvent = WriteDone | Arrived | PeerLost


class KernelBytes(NamedTuple):
    """Bytes the operating system counted on a peer's connections since they were made, headers of ours included."""

    sent: int
    received: int


class Transport(ABC):
    """Methods raise ConnectError, RegistrationError, TransferTimeout or UsageError; all may be called from any thread."""

    name: str
    capabilities: Capabilities

    def __init__(
        self,
        identity: Identity,
        events: queue.SimpleQueue[object],
        *,
        host: str = "127.0.0.1",
        deadline_seconds: float = 30.0,
    ) -> None:
        """events: where TransportEvents go. host: address to listen on, for those that listen.

        deadline_seconds: longest wait for a peer that makes no progress, in every blocking step.
        """
        self.identity = identity
        self.events = events
        self.host = host
        self.deadline_seconds = deadline_seconds

    @classmethod
    def missing(cls) -> str:
        """Why this kind cannot be used on this machine, and what to do; "" where it can."""
        return ""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where peers find this end. Handed to them over the authenticated control plane."""

    @abstractmethod
    def register(self, memory: Memory) -> None:
        """Make `memory` the target of the peers' writes (offsets count from its first byte). Once before connect, and
        again after a fence that replaces memory."""

    @abstractmethod
    def connect(self, peer: str, address: str) -> None:
        """Join with one peer; both ends call it, in any order, and either may dial. Blocks until both are joined and
        authenticated or the deadline has passed. Calling it again after `fence(peer)` makes a fresh connection."""

    @abstractmethod
    def post(self, peer: str, writes: npt.NDArray[np.int64], tag: bytes, payload: bytes = b"") -> int:
        """Start writing and return a ticket at once. writes: [N, 3] of (local offset, remote offset, bytes); N may be 0.

        Local offsets count from the own registered memory. The tag arrives after all bytes are visible. Posts to one
        peer arrive in order. The local bytes must not change before WriteDone(ticket). Offsets are checked at both ends.
        """

    @abstractmethod
    def map(self, peer: str) -> Buffer:
        """The peer's registered memory, readable in place. UsageError where `maps_memory` is False."""

    @abstractmethod
    def fence(self, peer: str) -> None:
        """End the connection so that nothing an old attempt wrote can land any more: not even from a stopped peer that
        runs on later (with fence_replaces_memory: not in the memory registered next). Pending tickets never complete; no
        event of that peer follows."""

    @abstractmethod
    def kernel_bytes(self) -> dict[str, KernelBytes]:
        """Per peer, what the operating system counted, closed connections included. Empty where it does not count."""

    @abstractmethod
    def close(self) -> None:
        """End all connections and threads and forget all memory. Idempotent; returns within the deadline."""
