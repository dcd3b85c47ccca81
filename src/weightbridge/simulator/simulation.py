"""What a simulated update came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite

import numpy as np
import numpy.typing as npt

from weightbridge.plan.topology import Topology
from weightbridge.simulator.result import LANES, SPAN, LinkUse, MethodResult

__all__ = ["STEP", "Failure", "Simulation"]

STEP = np.dtype([*((name, SPAN.fields[name][0]) for name in SPAN.names or ()), ("peer", "<i4")])  # type: ignore[index]
"""A SPAN, and the worker that a transfer goes to; -1 for work that concerns nobody else."""

Spans = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """worker gave the attempt up at that time, because of `peer`. Workers are positions in `Topology.workers`."""

    worker: int
    at_seconds: float
    peer: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One update of a whole job in virtual time. Seconds since the first worker stopped computing.

    ewtt_seconds, agst_seconds: as docs/reference/metrics.md defines them; infinite if some worker never resumed.
    agst_own_seconds: the same with each rollout worker's stall ending when its own part is done, not its engine's.
    stall_begin_seconds, stall_end_seconds: [num_workers]; infinite ends never came. links: what crossed each link.
    link_busy_seconds: as `links`, for how long each had any transfer. steps: array of STEP. num_events: of the loop.
    extrapolated: in words how, "" for a run of all rounds; then `steps` and `link_busy_seconds` are of the rounds that ran.
    failures: who gave up and when, in order of time. waiting: worker -> what it waited for when nothing could happen any
    more, as (worker, what); without the dead and those that failed.
    """

    topology: Topology
    t_min_seconds: float
    ewtt_seconds: float
    agst_seconds: float
    agst_own_seconds: float
    stall_begin_seconds: tuple[float, ...]
    stall_end_seconds: tuple[float, ...]
    links: tuple[LinkUse, ...]
    link_busy_seconds: tuple[float, ...]
    steps: Spans
    num_rounds: int
    num_events: int
    extrapolated: str = ""
    failures: tuple[Failure, ...] = ()
    waiting: dict[int, tuple[tuple[int, str], ...]] = field(default_factory=dict)

    @property
    def completed(self) -> bool:
        """Whether every worker resumed."""
        return isfinite(self.ewtt_seconds)

    @property
    def ratio_to_t_min(self) -> float:
        return self.ewtt_seconds / self.t_min_seconds

    @property
    def stall_seconds(self) -> tuple[float, ...]:
        """[num_workers]"""
        return tuple(e - b for b, e in zip(self.stall_begin_seconds, self.stall_end_seconds, strict=True))

    def as_result(self, name: str = "weightbridge") -> MethodResult:
        """For tables and pages, with the breakdown of the EWTT as the worker that resumed last sees it.

        Of its time without any transfer of its own, what its kernels took, or the packing of what it was to get, is
        conversion; what then is left to its Python and the agreement is control; all else is communication.
        """
        control, conversion = self._breakdown()
        return MethodResult(
            name=name,
            ewtt_seconds=self.ewtt_seconds,
            agst_seconds=self.agst_seconds,
            control_seconds=control,
            conversion_seconds=conversion,
            communication_seconds=self.ewtt_seconds - control - conversion,
            links=self.links,
            spans=self.steps[list(SPAN.names or ())].astype(SPAN),
            note=self.extrapolated,
        )

    def _breakdown(self) -> tuple[float, float]:
        """(control, conversion) seconds of the worker that resumed last."""
        s = self.steps
        lane = {name: i for i, name in enumerate(LANES)}
        kernels = np.isin(s["lane"], [lane["pack"], lane["assemble"]])
        moves = ~kernels & (s["lane"] != lane["control"])
        finish = [s["end"][kernels & (s["worker"] == w)].max(initial=0.0) for w in range(len(self.topology.workers))]
        last = int(np.argmax(finish))
        mine = s["worker"] == last
        sources = np.unique(s["worker"][moves & (s["peer"] == last)])
        transfers = moves & (mine | (s["peer"] == last))
        converting = kernels & (mine | ((s["lane"] == lane["pack"]) & np.isin(s["worker"], sources)))
        controlling = (s["lane"] == lane["control"]) & mine
        moving = _covered(s[transfers])
        busy = _covered(s[transfers | converting])
        return _covered(s[transfers | converting | controlling]) - busy, busy - moving


def _covered(steps: Spans) -> float:
    """Seconds in which at least one of `steps` is under way."""
    if not len(steps):
        return 0.0
    order = np.argsort(steps["start"], kind="stable")
    start, end = steps["start"][order], np.maximum.accumulate(steps["end"][order])
    gaps = np.maximum(start[1:] - end[:-1], 0).sum()
    return float(end[-1] - start[0] - gaps)
