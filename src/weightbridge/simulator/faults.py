"""What may go wrong in a simulated update. Times are seconds of virtual time since the update began."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from weightbridge.errors import UsageError

__all__ = ["Fault", "LateEngine", "LostWorker", "SlowNode"]


def _check_seconds(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < inf:
            raise UsageError(f"{name} must be 0 or more and finite, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNode:
    """From `at_seconds` on, all network links of `node` and its workers have `fraction` of their bandwidth."""

    node: str
    fraction: float
    at_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_seconds(at_seconds=self.at_seconds)
        if not 0 < self.fraction < inf:
            raise UsageError(f"fraction must be positive and finite, got {self.fraction}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """`worker` stops at `at_seconds`: its writes stay half done, writes to it too. The others learn of it
    `detection_seconds` later; its memory stays readable for its neighbours until then."""

    worker: str
    at_seconds: float
    detection_seconds: float = 1.0

    def __post_init__(self) -> None:
        _check_seconds(at_seconds=self.at_seconds, detection_seconds=self.detection_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class LateEngine:
    """The workers of `engine` go on computing until `seconds`. They receive and forward meanwhile, but nobody's weights are
    overwritten before they too have agreed to stand still."""

    engine: str
    seconds: float

    def __post_init__(self) -> None:
        _check_seconds(seconds=self.seconds)


Fault = SlowNode | LostWorker | LateEngine
