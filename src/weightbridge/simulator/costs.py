"""What each step costs besides moving bytes over links. Every number is an option, has a source, and is printed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf
from typing import NamedTuple

from weightbridge.errors import UsageError

__all__ = ["Cost", "Costs", "list_costs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Bytes are payload: a copy of n bytes costs n / memory_bandwidth, its read and its write together.

    latency_seconds: of one message, on a network and inside a node alike. post_seconds: of the progress thread, for one
    post. signal_seconds: the same for a message without bytes. launch_seconds: until a kernel runs. python_seconds_per_round:
    of the progress thread, for each worker and round. agreement_seconds: until the engines have agreed to stand still.
    memory_bandwidth: payload bytes per second of pack and assemble kernels. inside_bandwidth: bytes per second of each
    worker's link to the others of its node, each direction.
    """

    latency_seconds: float = 3e-6
    post_seconds: float = 10e-6
    signal_seconds: float = 1e-6
    launch_seconds: float = 20e-6
    python_seconds_per_round: float = 200e-6
    agreement_seconds: float = 1e-3
    memory_bandwidth: float = 1e12
    inside_bandwidth: float = 450e9

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            lowest_ok = value > 0 if field.name.endswith("bandwidth") else value >= 0
            if not (lowest_ok and value < inf):
                kind = "positive" if field.name.endswith("bandwidth") else "0 or more"
                raise UsageError(f"{field.name} must be {kind} and finite, got {value}")


class Cost(NamedTuple):
    """One number of the model. source: where it comes from, or why it is a fair choice."""

    name: str
    value: float
    unit: str
    source: str


_SOURCES = {
    "latency_seconds": "one-way RDMA write between hosts through one or two switches takes 2-3 us; inside a node it is less, "
    "and taken as the same",
    "post_seconds": "descriptor list, doorbell and bookkeeping of one batched write by a library such as NIXL: 5-15 us on "
    "one core, 0.1 us of it for each descriptor",
    "signal_seconds": "an inline RDMA write of a few bytes is 0.3-0.5 us of CPU; twice that with its bookkeeping",
    "launch_seconds": "a CUDA launch takes 5-10 us from Python's call to the kernel's first instruction; an event to wait for "
    "its end as much again",
    "python_seconds_per_round": "this library's executor handles an event of its machine in 5-20 us; a round brings a few "
    "tens of them",
    "agreement_seconds": "two round trips between hub and workers over TCP, and the wait for the poll that ends a step",
    "memory_bandwidth": "a strided copy that reads and writes HBM3 (3.3-4.8 TB/s in all) at about half of its speed",
    "inside_bandwidth": "NVLink 4: 900 GB/s a GPU, both directions together",
}


def list_costs(costs: Costs) -> tuple[Cost, ...]:
    """The model's numbers as they are shown to the user, in a fixed order."""
    return tuple(
        Cost(f.name, getattr(costs, f.name), "bytes/s" if f.name.endswith("bandwidth") else "s", _SOURCES[f.name])
        for f in fields(costs)
    )
