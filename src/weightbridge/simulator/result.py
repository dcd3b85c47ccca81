"""What one simulated method of bringing the weights over cost, for the tables, the pages and the traces."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UsageError

__all__ = ["LANES", "METHODS", "SPAN", "LinkUse", "MethodResult", "no_spans"]

METHODS: tuple[str, ...] = ("weightbridge", "broadcast", "p2p", "pull")
"""Names of the methods that can be compared, this library's first."""

LANES: tuple[str, ...] = ("control", "pack", "send", "forward", "assemble")
"""What a worker can be busy with at one time, in the order a byte meets them.

control: Python and the agreement. pack, assemble: kernels. send, forward: bytes of the first stage of `plan.STAGES`, or of a
later one, on their way, from the post to the tag, counted on the worker that writes them.
"""

SPAN = np.dtype(
    [("worker", "<i4"), ("lane", "<i2"), ("round", "<i4"), ("start", "<f8"), ("end", "<f8"), ("nbytes", "<i8")]
)
"""One piece of work in virtual time: worker (position in `Topology.workers`), lane (position in `LANES`), round, start and
end in seconds since the update began, and the bytes it handled. Spans of one lane may overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """One direction of one link, and what crossed it in one update.

    name: of the worker, node or group of nodes at the link's end. kind: "worker", "node", "inside" (a worker's to the others
    of its node), "group" (the uplink of a group of nodes) or "rollouts" (the links of a node's rollout workers together).
    outgoing: away from `name`. bandwidth: bytes per second.
    """

    name: str
    kind: str
    outgoing: bool
    nbytes: int
    bandwidth: float

    @property
    def busy_seconds(self) -> float:
        """The least time the bytes can take on this link."""
        return self.nbytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """One update by one method, in virtual time.

    ewtt_seconds: from the first worker that stopped computing to the last that resumed. agst_seconds: the stall of all
    workers divided by their number. control_seconds, conversion_seconds, communication_seconds: what the time was spent on
    as seen by the worker that resumed last, adding up to ewtt_seconds: agreement, messages and Python; packing, gathering
    and assembling that no transfer hid; and the rest, bytes on their way.
    links: what crossed each link. spans: array of SPAN, empty where nobody asked for it. note: what a reader must know of
    the number, for example that it was extrapolated.
    """

    name: str
    ewtt_seconds: float
    agst_seconds: float
    control_seconds: float
    conversion_seconds: float
    communication_seconds: float
    links: tuple[LinkUse, ...] = ()
    spans: npt.NDArray[np.void] = field(default_factory=lambda: no_spans())
    note: str = ""

    def __post_init__(self) -> None:
        parts = self.control_seconds + self.conversion_seconds + self.communication_seconds
        if abs(parts - self.ewtt_seconds) > 1e-6 * max(self.ewtt_seconds, 1e-9):
            raise UsageError(
                f"method {self.name!r}: control, conversion and communication add up to {parts} s, the EWTT is "
                f"{self.ewtt_seconds} s; give parts of the EWTT"
            )


def no_spans() -> npt.NDArray[np.void]:
    """An empty timeline."""
    return np.zeros(0, dtype=SPAN)
