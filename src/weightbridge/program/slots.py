"""Where every route's bytes lie in every slot: a pure function of the plan, so that both ends of a write agree.

The rule: in round k, the slot of a worker's stage holds one segment for each route that passes through it and whose
part of round k is not empty, in route order, each starting at the next multiple of 64 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InternalError
from weightbridge.plan.plan import STAGES, Plan
from weightbridge.plan.topology import Role
from weightbridge.program.program import SlotSpec

__all__ = ["NUM_SLOTS", "SEND", "SlotLayout", "arena_of", "route_cuts", "routes_through", "slot_layout", "slot_specs"]

Int64Array = npt.NDArray[np.int64]

SEND = "send"
NUM_SLOTS = 2
"""Copies of each slot: round k + 1 is received while round k is assembled."""

_ALIGN = 64


def _aligned(nbytes: Int64Array) -> Int64Array:
    return (nbytes + (_ALIGN - 1)) // _ALIGN * _ALIGN


def route_cuts(plan: Plan) -> Int64Array:
    """[num_routes, rounds + 1] bytes of the class stream at which each route is cut: part k is [k] to [k + 1]."""
    cuts: Int64Array = plan.cuts(range(plan.rounds + 1)).T
    return cuts


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    """One slot over all rounds. routes: [m] ascending. lo, hi: [m, rounds] bytes of the class stream that lie there.

    offset: [m, rounds] bytes within the slot copy. used_bytes: [rounds]. A part with lo == hi has no segment.
    """

    routes: Int64Array
    lo: Int64Array
    hi: Int64Array
    offset: Int64Array
    used_bytes: Int64Array

    def rows(self, routes: Int64Array) -> Int64Array:
        """Positions of `routes` in `self.routes`. InternalError when one does not pass through this slot."""
        at = np.searchsorted(self.routes, routes)
        if len(routes) and (
            not len(self.routes) or (self.routes[np.minimum(at, len(self.routes) - 1)] != routes).any()
        ):
            raise InternalError(
                f"routes {routes.tolist()} should pass through a slot that holds {self.routes.tolist()}"
            )
        return at


def routes_through(plan: Plan, worker: int, stage: str) -> Int64Array:
    """[m] ascending: the routes whose bytes lie in that slot at some time."""
    if stage == SEND:
        mine: Int64Array = np.flatnonzero(plan.routes["sender"] == worker).astype(np.int64)
        return mine.astype(np.int64)
    index = STAGES.index(stage)
    found = plan.hops["route"][(plan.hops["stage"] == index) & (plan.hops["dst"] == worker)]
    if index == 0:
        found = np.concatenate([found, np.flatnonzero(plan.routes["entry"] == worker)])
    found = np.sort(found).astype(np.int64)
    if (found[1:] == found[:-1]).any():
        raise InternalError(f"a route reaches stage {stage!r} of worker {worker} twice; the plan is wrong")
    return found


def slot_layout(plan: Plan, worker: int, stage: str, cuts: Int64Array) -> SlotLayout:
    """The layout of slot `stage` ("send" or one of STAGES) of `worker` in every round. cuts: of `route_cuts(plan)`."""
    routes = routes_through(plan, worker, stage)
    cuts = cuts[routes]
    sizes = _aligned(cuts[:, 1:] - cuts[:, :-1])
    ends = np.cumsum(sizes, axis=0)
    used = ends[-1] if len(routes) else np.zeros(plan.rounds, dtype=np.int64)
    return SlotLayout(routes=routes, lo=cuts[:, :-1], hi=cuts[:, 1:], offset=ends - sizes, used_bytes=used)


def slot_specs(plan: Plan, worker: int) -> tuple[SlotSpec, ...]:
    """The slots of a worker's arena: "send" for a trainer, one per stage for a rollout; all 64-byte aligned."""
    return arena_of(plan, worker, route_cuts(plan))


def arena_of(plan: Plan, worker: int, cuts: Int64Array) -> tuple[SlotSpec, ...]:
    """`slot_specs` for a caller that has the cuts at hand."""
    stages = (SEND,) if plan.topology.workers[worker].role is Role.TRAINER else STAGES
    specs: list[SlotSpec] = []
    at = 0
    for stage in stages:
        capacity = int(slot_layout(plan, worker, stage, cuts).used_bytes.max(initial=0))
        specs.append(SlotSpec(stage=stage, capacity_bytes=capacity, num_slots=NUM_SLOTS, arena_offset=at))
        at += capacity * NUM_SLOTS
    return tuple(specs)
