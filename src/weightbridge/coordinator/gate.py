"""The two words that the polling thread and the control thread of an engine worker share.

Plain loads and stores, no lock: this is what makes a poll with nothing to do cost next to nothing. The order of the accesses
is the protocol; machine/agreement.py is model-checked at their grain.
"""

from __future__ import annotations

from weightbridge.machine.agreement import NO_GATE

__all__ = ["Gate"]


class Gate:
    """count: polls made, written by the polling thread only. gate: the first poll that has to stop, written by the control
    thread only."""

    __slots__ = ("count", "gate")

    def __init__(self) -> None:
        self.count = 0
        self.gate = NO_GATE
