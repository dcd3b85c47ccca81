"""Who is still there, as the hub hears it: the session machine's record of silence."""

from __future__ import annotations

from collections.abc import Iterable

from weightbridge.machine.session_words import HUB_WORKER, SessionTimeouts

__all__ = ["SignsOfLife", "later_by"]


def later_by(seconds: float, at: float, now: float) -> float:
    """A moment since when something is counted, moved on by a standstill that has ended now; never beyond now."""
    return min(at + seconds, now)


class SignsOfLife:
    """When each worker was heard last, and whose connection is closed. Times are of the session machine's clock.

    Silence counts only while somebody listens. A hub that itself stood still (its process stopped, starved or frozen) has
    heard nobody, and to the others it was the hub that fell silent: who has gone by the time it wakes up has given it up.
    """

    def __init__(self, timeouts: SessionTimeouts) -> None:
        self._timeouts = timeouts
        self._last_seen: dict[str, float] = {}
        self._doubted: dict[str, float] = {}
        self._stood_still = 0.0  # seconds, when the hub last did for so long that it may have been given up
        self._came_through = float("-inf")  # who has been heard after this has not given it up

    def heard(self, worker: str, now: float) -> None:
        self._last_seen[worker] = now
        self._doubted.pop(worker, None)

    def doubt(self, worker: str, now: float) -> None:
        """Its connection has closed, or a peer has lost it: it has less time left to say something."""
        self._doubted.setdefault(worker, now)

    def is_doubted(self, worker: str) -> bool:
        return worker in self._doubted

    def forget(self, workers: Iterable[str]) -> None:
        """Nothing is expected of them any more."""
        for worker in workers:
            self._last_seen.pop(worker, None)
            self._doubted.pop(worker, None)

    def stood_still(self, seconds: float, now: float) -> None:
        """Nobody has listened for so long, up to now."""
        for since in (self._last_seen, self._doubted):
            for worker, at in since.items():
                since[worker] = later_by(seconds, at, now)
        if seconds > self._timeouts.heartbeat - self._timeouts.suspect:
            # What was said to the hub meanwhile is heard at once; only a word of later shows that its speaker goes on.
            self._stood_still, self._came_through = seconds, now + self._timeouts.suspect / 2

    def silent(self, now: float) -> dict[str, str]:
        """Workers that count as lost, and why; the hub's own if they have given it up."""
        out = {
            name: f"gave no sign of life for {now - at:.0f} s"
            for name, at in self._last_seen.items()
            if now - at > self._timeouts.heartbeat
        }
        for name, since in self._doubted.items():
            if name in self._last_seen and now - since > self._timeouts.suspect and name not in out:
                out[name] = f"its connections closed, and it gave no sign of life for {now - since:.0f} s"
        left = sorted(name for name in out if self._last_seen[name] <= self._came_through)
        if left:
            who = left[0] if len(left) == 1 else f"{left[0]} and {len(left) - 1} more"
            why = f"stood still for {self._stood_still:.0f} s (stopped, or starved of CPU) and was given up by {who}"
            return {HUB_WORKER: why}
        return dict(sorted(out.items()))
