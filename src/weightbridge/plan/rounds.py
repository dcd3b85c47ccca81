"""Rounds: how many, in which units, and which rounds carry one unit more.

K is the smallest number whose parts fit everybody's slots, unless more rounds save time: filling and draining the stages
takes about one round's share of the whole, a round has a fixed cost. Then the unit: the coarser, the fewer segments and
descriptors, so the coarsest is taken that needs no more rounds and keeps every link level in every round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import ceil, sqrt
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InfeasibleError
from weightbridge.plan.leveling import Uses, chains, level
from weightbridge.plan.links import Incidence, incidence, link_use
from weightbridge.plan.plan import STAGES, Plan, with_rounds

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = ["SEGMENT_ALIGNMENT_BYTES", "fit_rounds", "slot_use"]

SEGMENT_ALIGNMENT_BYTES = 64
"""Each segment of a slot begins at a multiple of this: a cache line, and a divisor of every alignment."""

_CELLS_AT_ONCE = 1 << 20
_LEVEL_CELLS = 1 << 22  # (link or slot, round) cells above which phases are spread by rule
_GOLDEN = 2654435769  # 2**32 / golden ratio: its multiples spread most evenly
_EXHAUSTIVE = 64  # so many values of K are tried one by one before the search jumps
_SPARSE = 4  # rounds per alignment unit of the fullest slot at which the search gives up
_UNITS_PER_SLOT = 256  # the coarsest unit is this share of a slot
_EVEN = 1.005  # a link's load in its worst round over the bound's, up to which a coarser unit is taken
_MANY = 64  # routes that a worker assembles from, on average, above which those that go the same way follow each other
_FEW = 1.05  # segments over those of the coarsest unit at which the search is content
_NEARBY = 64  # one in so many rounds more is no loss, where it saves segments


def slot_use(plan: Plan) -> csr_matrix:
    """[num_slots, num_routes] 1 where a slot holds a route's bytes. Slots: "send" of every worker, then those of each stage."""
    workers, routes = len(plan.topology.workers), np.arange(len(plan.routes), dtype=np.int64)
    hops = plan.hops
    rows = [plan.routes["sender"], workers + plan.routes["entry"], workers * (1 + hops["stage"]) + hops["dst"]]
    columns = np.concatenate([routes, routes, hops["route"]])
    return incidence(np.concatenate(rows), columns, (1 + len(STAGES)) * workers, len(routes))


def fit_rounds(plan: Plan, *, min_rounds: int, unit_bytes: int | None, round_seconds: float) -> Plan:
    """`plan` cut into rounds whose parts fit `plan.slot_bytes`.

    min_rounds: no fewer. unit_bytes: as in Plan, None to choose. round_seconds: fixed cost of a round.
    Raises InfeasibleError when parts of one unit each do not fit.
    """
    if not len(plan.routes):
        return with_rounds(plan, min_rounds, unit_bytes=unit_bytes)
    fitter = _Fitter(plan)
    finest = unit_bytes or plan.alignment
    # fill and drain take one round's share, T / K, the rounds themselves K * round_seconds: least at this K, if slots allow
    worthwhile = ceil(sqrt(plan.bounds.busiest_link_seconds / round_seconds))
    first = fitter.fewest(finest, max(min_rounds, worthwhile))
    return first.plan if unit_bytes or first.plan.rounds == 1 else fitter.coarsest(first, _units(plan))


def _units(plan: Plan) -> list[int]:
    """Units to choose from, the coarsest first."""
    found = [plan.alignment]
    while found[-1] * 2 <= plan.slot_bytes // _UNITS_PER_SLOT:
        found.append(found[-1] * 2)
    return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """slot_bytes: the fullest slot of any round. unevenness: the busiest link of any round over the bound's share of one
    round. segments: mean number of segments that a worker assembles from."""

    plan: Plan
    slot_bytes: int
    unevenness: float
    segments: float


@dataclass(frozen=True)
class _Fitter:
    plan: Plan

    @cached_property
    def links(self) -> Incidence:
        return link_use(self.plan.topology, self.plan.routes, self.plan.hops)

    @cached_property
    def slots(self) -> csr_matrix:
        return slot_use(self.plan)

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        found: npt.NDArray[np.int64] = self.plan.routes["hi"] - self.plan.routes["lo"]
        return found

    @cached_property
    def readers(self) -> npt.NDArray[np.int64]:
        """[num_routes] workers that assemble from each route."""
        needers = np.array([len(c.needers) for c in self.plan.classes], dtype=np.int64)
        found: npt.NDArray[np.int64] = needers[self.plan.routes["class_id"]]
        return found

    @cached_property
    def alike(self) -> list[npt.NDArray[np.int64]]:
        """Routes with equal entry workers and copies."""
        hops = self.plan.hops[np.argsort(self.plan.hops["route"], kind="stable")]
        ends = np.searchsorted(hops["route"], np.arange(len(self.plan.routes) + 1, dtype=np.int64))
        onward = np.stack([hops["stage"], hops["src"], hops["dst"]], axis=1)
        ways: dict[tuple[int, bytes], list[int]] = {}
        for i, entry in enumerate(self.plan.routes["entry"].tolist()):
            ways.setdefault((entry, onward[ends[i] : ends[i + 1]].tobytes()), []).append(i)
        return [np.array(routes, dtype=np.int64) for routes in ways.values()]

    @cached_property
    def single(self) -> list[npt.NDArray[np.int64]]:
        """Every route by itself."""
        return [*np.arange(len(self.plan.routes), dtype=np.int64)[:, None]]

    @cached_property
    def whole(self) -> int:
        """Bytes of the fullest slot if there were one round."""
        return int((self.slots @ _padded(self.sizes)).max())

    def fewest(self, unit: int, min_rounds: int) -> _Trial:
        """The smallest number of rounds in which all slots hold."""
        budget = self.plan.slot_bytes
        needed = int(_padded(np.minimum(self.sizes, unit)).max())
        if needed <= budget:
            # beyond this every worker has far fewer units than rounds: more rounds do not spread them any further
            most = max(min_rounds, _SPARSE * -(-self.whole // min(unit, needed)))
            rounds = max(min_rounds, -(-self.whole // budget))
            for tried in count():
                trial = self.trial(rounds, unit)
                needed = trial.slot_bytes
                if needed <= budget:
                    return trial
                if rounds >= most:
                    break
                jump = 1 if tried < _EXHAUSTIVE else max(1, rounds * (needed - budget) // budget)
                rounds = min(rounds + jump, most)
        raise InfeasibleError(
            f"a slot must hold {needed} bytes even when every route is cut into parts of {unit} bytes, the budget is "
            f"{budget}; raise slot_bytes to at least {needed}",
            needed_bytes=needed,
            budget_bytes=budget,
        )

    def coarsest(self, finest: _Trial, units: list[int]) -> Plan:
        """The plan with fewest segments in about as many rounds as `finest`: the coarsest unit that fits and is even."""
        rounds, limit, best = finest.plan.rounds, max(_EVEN, finest.unevenness), finest
        for more in range(1 + rounds // _NEARBY):
            trials = (self.trial(rounds + more, unit) for unit in units if unit > best.plan.unit_bytes or not more)
            for i, trial in enumerate(trials):
                if i == 0:
                    fewest = trial.segments
                if trial.slot_bytes <= self.plan.slot_bytes and trial.unevenness <= limit:
                    best = min(best, trial, key=lambda t: t.segments)
                    break
            if best.segments <= fewest * _FEW:
                break
        return best.plan

    def trial(self, rounds: int, unit: int) -> _Trial:
        """The plan cut into so many rounds, its routes levelled."""
        plan = with_rounds(self.plan, rounds, unit_bytes=unit)
        routes = plan.routes
        if rounds > 1 and rounds * (self.links.table.shape[0] + self.slots.shape[0]) <= _LEVEL_CELLS:
            uses = self._uses(rounds)
            alike = self.alike if self.readers.sum() > _MANY * len(plan.topology.rollouts) else self.single
            routes["pace"], routes["phase"] = level(chains(alike, uses, unit), uses, rounds, unit)
        else:
            routes["phase"] = ((np.arange(len(routes), dtype=np.int64) * _GOLDEN & 0xFFFFFFFF) * rounds) >> 32
        return self._measured(replace(plan, routes=routes))

    def _uses(self, rounds: int) -> Uses:
        """All links and slots. Links have the time of the busiest one; of a route whole segments count, as they do in slots."""
        from scipy.sparse import vstack

        sizes = _padded(self.sizes)
        room = np.full(self.slots.shape[0], float(rounds * self.plan.slot_bytes))
        seconds = float(self.links.seconds(sizes).max())
        if seconds <= 0:
            return Uses(self.slots, room, sizes)
        return Uses(
            vstack([self.links.table, self.slots]).tocsr(), np.concatenate([self.links.rates * seconds, room]), sizes
        )

    def _measured(self, plan: Plan) -> _Trial:
        chunk = max(1, _CELLS_AT_ONCE // max(1, len(plan.routes)))
        slot, link, segments = 0, 0.0, 0
        for first in range(0, plan.rounds, chunk):
            parts = np.diff(plan.cuts(range(first, min(first + chunk, plan.rounds) + 1)), axis=0).T
            slot = max(slot, int((self.slots @ _padded(parts)).max()))
            link = max(link, float(self.links.seconds(parts).max()))
            segments += int(((parts > 0).sum(axis=1) * self.readers).sum())
        share = plan.bounds.link_bound_seconds / plan.rounds
        return _Trial(
            plan=plan,
            slot_bytes=slot,
            unevenness=link / share if share > 0 else 1.0,
            segments=segments / max(1, len(plan.topology.rollouts)),
        )


def _padded(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Rounded up to whole segments' alignment."""
    return sizes + -sizes % SEGMENT_ALIGNMENT_BYTES
