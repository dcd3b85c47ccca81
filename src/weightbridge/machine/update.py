"""One version in flight, as the hub sees it: who has done what, over all attempts at it. Pure data and questions about it."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightbridge.machine import messages as w
from weightbridge.machine.roster import Side

__all__ = ["Update"]


@dataclass(slots=True)
class Update:
    """Times are seconds of the hub's steady clock.

    engines: those that still take part, by name; the sender's direct ones (they stop first, bytes go into live weights) and its
    staged ones (bytes go into host memory, they stop when all is there).
    """

    version: int
    attempt: int
    began: float
    engines: dict[str, Side]
    trainers: Side
    retries_left: int
    attempts: int = 1
    allowed: bool = False  # live weights of direct engines may be overwritten
    agreed: set[str] = field(default_factory=set)  # engines whose workers all stand still
    committed: set[str] = field(default_factory=set)  # engines all of whose workers have every byte
    skipped: set[str] = field(default_factory=set)  # staged engines that leave this version out for a newer one
    touched: set[str] = field(default_factory=set)  # engines whose live weights an ended attempt has begun to overwrite
    transferred: set[str] = field(default_factory=set)  # workers
    resumed: dict[str, w.Resumed] = field(default_factory=dict)  # workers
    lost: dict[str, str] = field(default_factory=dict)  # workers that cannot go on, and why
    lost_engines: dict[str, bool] = field(default_factory=dict)  # engine -> whether it was left with a mixture
    gone: set[str] = field(default_factory=set)  # engines that left in good order, after they had installed it
    blamed: dict[str, str] = field(default_factory=dict)  # workers that others could not reach, and what those say
    kind: str = "WorkerError"  # of the first failure
    superseding: bool = False

    @property
    def workers(self) -> list[str]:
        return [name for side in self._sides() for name in side.workers]

    def _sides(self) -> tuple[Side, ...]:
        return (self.trainers, *self.engines.values())

    @property
    def moved(self) -> bool:
        """Everybody has done its part of the transfer."""
        return all(name in self.transferred for side in self._sides() for name in side.workers)

    def done(self, side: Side) -> bool:
        """An engine serves the version, or leaves it out; the trainers go on."""
        return side.name in self.skipped or all(name in self.resumed for name in side.workers)

    @property
    def finished(self) -> bool:
        return self.moved and all(self.done(side) for side in self._sides())

    def again(self, attempt: int) -> None:
        """A new attempt: every byte travels again. Engines that stand still and wait keep standing; direct ones that
        had resumed have to stop once more; staged ones that had installed have nothing more to do than to pass bytes
        on."""
        self.attempt = attempt
        self.attempts += 1
        self.transferred = set()
        again = [self.trainers, *(side for side in self.engines.values() if not side.staged and self.done(side))]
        self.agreed = {name for name in self.agreed if name in self.engines and not self.done(self.engines[name])}
        self.committed = set()
        self.allowed = False
        self.blamed = {}
        for name in (name for side in again for name in side.workers):
            self.resumed.pop(name, None)

    def poisoned(self, causes: dict[str, str]) -> tuple[str, ...]:
        """Direct engines that hold mixed versions if the update ends now: those that may have been written to and have not all
        bytes, and those of which a worker failed before it had resumed, since its own loader may have had its part to do."""
        out = []
        for name, side in self.engines.items():
            failed = any(n in causes and n not in self.resumed for n in side.workers)
            written = (not side.staged and self.allowed) or name in self.touched
            if (written and name not in self.committed) or (
                name in self.agreed and failed and (written or side.staged)
            ):
                out.append(name)
        return tuple(out)

    def report(self) -> w.Report:
        spans = {n: r for n, r in self.resumed.items() if n in set(self.workers)}
        begin = min((r.stalled_at for r in spans.values()), default=0.0)
        stalls = [r.resumed_at - r.stalled_at for r in spans.values()]
        slowest = max(spans, key=lambda n: spans[n].resumed_at, default="")
        names = sorted(self.engines.keys() | self.gone)
        engines = {name: "superseded" if name in self.skipped else "ready" for name in names}
        return w.Report(
            version=self.version,
            ewtt_seconds=max((r.resumed_at for r in spans.values()), default=0.0) - begin,
            agst_seconds=sum(stalls) / max(len(stalls), 1),
            network_bytes={name: (r.sent, r.received) for name, r in spans.items()},
            engines={**engines, **dict.fromkeys(sorted(self.lost_engines), "lost")},
            attempts=self.attempts,
            slowest_worker=slowest,
            slowest_stage=spans[slowest].stage if slowest else "",
        )
