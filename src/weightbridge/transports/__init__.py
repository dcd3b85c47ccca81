"""Transports move bytes into a peer's registered memory and then tell the peer.

`base` is the contract, `shm` works inside a machine, `tcp` between machines with nothing installed, `nixl` and `mooncake` over
RDMA with packages of their own; `selection` says which a pair of workers uses. `SharedMemory` is memory that all can use.
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
from weightbridge.transports.mooncake import MooncakeTransport
from weightbridge.transports.nixl import NixlTransport
from weightbridge.transports.shm import ShmTransport
from weightbridge.transports.tcp import TcpTransport

__all__ = [
    "MAX_PAYLOAD_BYTES", "MAX_TAG_BYTES", "Arrived", "Capabilities", "Identity", "KernelBytes", "Memory", "MooncakeTransport",
    "NixlTransport", "PeerLost", "SharedMemory", "ShmTransport", "TcpTransport", "Transport", "TransportEvent", "WriteDone",
]  # fmt: skip
