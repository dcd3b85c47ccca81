"""How much of an update kernels take that no transfer hides, from the spans of all workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["covered", "kernel_seconds"]

_KERNELS = ("pack", "decode", "assemble")


def kernel_seconds(spans: Mapping[str, Iterable[Any]]) -> dict[str, tuple[float, float]]:
    """Worker -> (seconds in which a kernel that it waits for ran, seconds of those without any transfer of its own).

    spans: worker -> `tracing.Span`s, on one clock. Kernels that a worker waits for: its own, and the packs of the workers that
    write to it. Its transfers: what it writes and what is written to it, from the post to the peer's acknowledgement.
    """
    kernels: dict[str, list[tuple[float, float]]] = {name: [] for name in spans}
    packs: dict[str, list[tuple[float, float]]] = {name: [] for name in spans}
    transfers: dict[str, list[tuple[float, float]]] = {name: [] for name in spans}
    sources: dict[str, set[str]] = {name: set() for name in spans}
    for worker, of_worker in spans.items():
        for lane, _, begin, end, _, peer in of_worker:
            if lane in _KERNELS:
                kernels[worker].append((begin, end))
            if lane == "pack":
                packs[worker].append((begin, end))
            if lane == "post":
                target = peer.rpartition(" (")[0]
                sources[target].add(worker)
                for side in (worker, target):
                    transfers[side].append((begin, end))
    found = {}
    for worker in spans:
        waited = kernels[worker] + [span for source in sources[worker] for span in packs[source]]
        bare = covered(transfers[worker] + waited) - covered(transfers[worker])
        found[worker] = (covered(waited), bare)
    return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total
