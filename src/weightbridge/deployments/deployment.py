"""A whole job as data: the checkpoint, who the workers are, and how each of them is laid out."""

from __future__ import annotations

from dataclasses import dataclass

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import UsageError
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.topology import Topology

__all__ = ["DEFAULT_SLOT_BYTES", "Deployment"]

DEFAULT_SLOT_BYTES = 256 << 20
"""Bytes of one slot of one stage. A worker has two slots a direction."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Everything planning and simulating need.

    name: of the preset or the job. description: one line for people.
    maps: maps[i] is the layout of topology.workers[i]; workers of equal layout share one SourceMap object.
    slot_bytes: most bytes one slot holds.
    """

    name: str
    description: str
    spec: CheckpointSpec
    topology: Topology
    maps: tuple[SourceMap, ...]
    slot_bytes: int = DEFAULT_SLOT_BYTES

    def __post_init__(self) -> None:
        if len(self.maps) != len(self.topology.workers):
            raise UsageError(
                f"deployment {self.name!r} has {len(self.maps)} source maps for {len(self.topology.workers)} workers; "
                "give one for each, in their order"
            )
        if self.slot_bytes <= 0:
            raise UsageError(f"deployment {self.name!r}: slot_bytes must be positive, got {self.slot_bytes}")
