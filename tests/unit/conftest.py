"""A clock that a test turns, for what counts the time in which a process stands still."""

from __future__ import annotations

import pytest

from weightbridge.coordinator import standstill


class Clock:
    """A steady clock. now: in seconds; the test adds to it."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(standstill, "time", clock)
    return clock
