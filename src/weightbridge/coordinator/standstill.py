"""Time in which this process did not run: nobody else can be blamed for being silent in it."""

from __future__ import annotations

import time

__all__ = ["STEP_SECONDS", "Patience", "Standstill"]

STEP_SECONDS = 0.25
"""Longest that a thread with a deadline sleeps at a stretch."""

_LONGEST_STEP_SECONDS = 0.5
"""What is more between two looks, the thread was kept from running: its process was stopped, its container or machine frozen,
or another thread held the interpreter. No step counts for more than this, so that a loop that is always slow still sees
its deadlines pass, if later."""


class Standstill:
    """For a loop that looks several times a second: how long it was kept from running."""

    def __init__(self) -> None:
        self._looked_at = time.monotonic()

    def look(self) -> tuple[float, float]:
        """Now, on the steady clock, and for how many seconds the loop has stood still since the last look; mostly 0."""
        now = time.monotonic()
        step, self._looked_at = now - self._looked_at, now
        return now, max(0.0, step - _LONGEST_STEP_SECONDS)


class Patience:
    """A deadline that does not run while this process stands still."""

    def __init__(self, seconds: float) -> None:
        self._standstill = Standstill()
        self._give_up = time.monotonic() + seconds

    def step_seconds(self) -> float:
        """How long to sleep before the next look; 0 or less once the time is up."""
        now, stood_still = self._standstill.look()
        self._give_up += stood_still
        return min(self._give_up - now, STEP_SECONDS)
