"""Transports move bytes into a peer's registered memory and then tell the peer.

`base` is the contract, `tcp` works between machines, `shm` inside one. `SharedMemory` is memory that either can use.
"""

from __future__ import annotations

from weightbridge.transports.base import (
    MAX_PAYLOAD_BYTES,
    MAX_TAG_BYTES,
    Arrived,
    Capabilities,
    Identity,
    KernelBytes,
    Memory,
    PeerLost,
    Transport,
    TransportEvent,
    WriteDone,
)  # fmt: skip
from weightbridge.transports.memory import SharedMemory
from weightbridge.transports.shm import ShmTransport
from weightbridge.transports.tcp import TcpTransport

__all__ = [
    "MAX_PAYLOAD_BYTES", "MAX_TAG_BYTES", "Arrived", "Capabilities", "Identity", "KernelBytes", "Memory", "PeerLost",
    "SharedMemory", "ShmTransport", "TcpTransport", "Transport", "TransportEvent", "WriteDone",
]  # fmt: skip
