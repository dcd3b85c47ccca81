"""The pure state machines of one worker: events in, instructions out; no clock, no I/O, no threads.

`transfer` moves one version; its vocabulary is in `events`. The same objects serve the executor and the simulator.
"""

from __future__ import annotations

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

__all__ = [
    "Arrived",
    "Assemble",
    "AssembleAllowed",
    "AssembleDone",
    "Decode",
    "DecodeDone",
    "Event",
    "Failed",
    "Finished",
    "Instruction",
    "Kind",
    "Pack",
    "PackDone",
    "PeerLost",
    "PostWrites",
    "Released",
    "Signal",
    "Tag",
    "TransferMachine",
    "WriteDone",
]
