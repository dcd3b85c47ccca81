"""Where every route's bytes lie in every slot: a pure function of the plan, so that both ends of a write agree.

The rule: in round k, the slot of a worker's stage holds one segment for each route that passes through it and whose
part of round k is not empty, in route order, each starting at the next multiple of 64 bytes.

A *part* is what one route carries in one round. A *stop* is one route in one slot. A *cell* is one part in one slot: the
unit that has an offset. Parts and cells exist only where there are bytes: a small route is cut into fewer parts than
there are rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InternalError
from weightbridge.plan.plan import STAGES, Plan
from weightbridge.plan.topology import Role
from weightbridge.program.program import SlotSpec

__all__ = ["NUM_SLOTS", "SEND", "Parts", "SlotTable", "consecutive", "slot_specs"]

Int64Array = npt.NDArray[np.int64]

SEND = "send"
NUM_SLOTS = 2
"""Copies of each slot: round k + 1 is received while round k is assembled."""

_ALIGN = 64
_SLOTS = (SEND, *STAGES)
_CELLS_AT_ONCE = 1 << 20


def consecutive(first: Int64Array, lengths: Int64Array) -> Int64Array:
    """[sum(lengths)] first[i], first[i] + 1, ... lengths[i] numbers for each i."""
    shift = first - (np.cumsum(lengths) - lengths)
    found: Int64Array = np.repeat(shift, lengths) + np.arange(int(lengths.sum()), dtype=np.int64)
    return found


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What each route carries in each round, by route, then round; empty parts left out.

    first: [num_routes + 1] where the parts of each route begin. route, round: [n]. lo, hi: [n] bytes of the class stream.
    """

    first: Int64Array
    route: Int64Array
    round: Int64Array
    lo: Int64Array
    hi: Int64Array

    @classmethod
    def of(cls, plan: Plan) -> Parts:
        """All parts of all routes; some routes at a time, because most of (route, round) may be empty."""
        num_routes = len(plan.routes)
        step = max(1, _CELLS_AT_ONCE // (plan.rounds + 1))
        found: list[tuple[Int64Array, ...]] = [(np.zeros(0, dtype=np.int64),) * 4]
        for begin in range(0, num_routes, step):
            cuts = np.ascontiguousarray(plan.cuts(range(plan.rounds + 1), routes=slice(begin, begin + step)).T)
            route, round_ = np.nonzero(cuts[:, 1:] > cuts[:, :-1])
            found.append((route + begin, round_, cuts[route, round_], cuts[route, round_ + 1]))
        route, round_, lo, hi = (np.concatenate(column) for column in zip(*found, strict=True))
        first = np.searchsorted(route, np.arange(num_routes + 1, dtype=np.int64))
        return cls(first=first, route=route, round=round_, lo=lo, hi=hi)

    @cached_property
    def num_of_route(self) -> Int64Array:
        """[num_routes]"""
        return np.diff(self.first)

    def by_round(self, parts: Int64Array) -> Int64Array:
        """[len(parts)] positions that bring `parts` into the order of their rounds, and leave it as it is within one."""
        rounds = self.round[parts]
        narrow = rounds.astype(np.uint16) if len(rounds) and int(rounds.max()) < 1 << 16 else rounds
        found: Int64Array = np.argsort(narrow, kind="stable")  # two bytes are sorted by counting
        return found


@dataclass(frozen=True, kw_only=True)
class SlotTable:
    """All slots of a job: which routes stop in each, who brings them, and where their parts lie.

    A slot has a number: `slot(worker, stage)`. Stops are sorted by (slot, route). route, writer: [num_stops]; the writer
    of a send slot is its own worker. first_of_slot: [num_slots + 1] stops. first_cell: [num_stops + 1] where the cells of
    each stop begin, one for each part of its route. Offsets are worked out slot by slot, when first asked for.
    """

    plan: Plan
    parts: Parts
    route: Int64Array
    writer: Int64Array
    first_of_slot: Int64Array
    first_cell: Int64Array
    _keys: Int64Array
    _offset: Int64Array
    _capacity: Int64Array

    @classmethod
    def of(cls, plan: Plan, parts: Parts) -> SlotTable:
        """Raises InternalError when a route reaches one slot twice."""
        routes, hops = plan.routes, plan.hops
        ids = np.arange(len(routes), dtype=np.int64)
        slot = np.concatenate([cls.slot(routes["sender"], SEND), cls.slot(routes["entry"], STAGES[0]),
                               cls.slot(hops["dst"], STAGES[0]) + hops["stage"]])  # fmt: skip
        writer = np.concatenate([routes["sender"], routes["sender"], hops["src"]])
        key = slot * len(routes) + np.concatenate([ids, ids, hops["route"]])
        order = np.argsort(key, kind="stable")
        keys, writer = key[order], writer[order]
        twice = np.flatnonzero(keys[1:] == keys[:-1])
        if len(twice):
            at, route = divmod(int(keys[twice[0]]), len(routes))
            raise InternalError(
                f"route {route} reaches stage {_SLOTS[at % len(_SLOTS)]!r} of worker {at // len(_SLOTS)} twice; the plan is "
                "wrong"
            )
        stop_route = keys % len(routes) if len(routes) else keys
        num_slots = len(plan.topology.workers) * len(_SLOTS)
        first_of_slot = np.searchsorted(keys, np.arange(num_slots + 1, dtype=np.int64) * len(routes))
        first_cell = np.concatenate([[0], np.cumsum(parts.num_of_route[stop_route])]).astype(np.int64)
        return cls(
            plan=plan, parts=parts, route=stop_route, writer=writer.astype(np.int64), first_of_slot=first_of_slot,
            first_cell=first_cell, _keys=keys, _offset=np.empty(int(first_cell[-1]), dtype=np.int64),
            _capacity=np.full(num_slots, -1, dtype=np.int64),
        )  # fmt: skip

    @staticmethod
    def slot(worker: Int64Array | int, stage: str) -> Int64Array:
        """Number of a worker's slot `stage` ("send" or one of STAGES)."""
        return np.asarray(worker, dtype=np.int64) * len(_SLOTS) + _SLOTS.index(stage)

    @staticmethod
    def names(slots: Int64Array) -> list[tuple[int, str]]:
        """(worker, stage) of each slot number."""
        return [(n // len(_SLOTS), _SLOTS[n % len(_SLOTS)]) for n in slots.tolist()]

    @cached_property
    def slot_of_stop(self) -> Int64Array:
        """[num_stops]"""
        return np.repeat(np.arange(len(self._capacity), dtype=np.int64), np.diff(self.first_of_slot))

    @cached_property
    def stage_of_stop(self) -> Int64Array:
        """[num_stops] position in STAGES, -1 for a send slot."""
        return self.slot_of_stop % len(_SLOTS) - 1

    def stops(self, slot: int) -> Int64Array:
        """The stops of a slot, by ascending route."""
        return np.arange(self.first_of_slot[slot], self.first_of_slot[slot + 1], dtype=np.int64)

    def stops_of_worker(self, worker: int) -> Int64Array:
        """The stops of all slots of a worker, by slot, then route."""
        first, last = self.first_of_slot[worker * len(_SLOTS)], self.first_of_slot[(worker + 1) * len(_SLOTS)]
        return np.arange(first, last, dtype=np.int64)

    def find(self, slot: Int64Array, route: Int64Array) -> Int64Array:
        """[n] the stop of each (slot, route), -1 where the route does not pass through."""
        if not len(self._keys):
            return np.full(len(route), -1, dtype=np.int64)
        key = slot * len(self.plan.routes) + route
        at = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        found: Int64Array = np.where(self._keys[at] == key, at, -1)
        return found

    def cells(self, stops: Int64Array) -> Int64Array:
        """All cells of the stops, stop after stop, each in the order of rounds: `parts_of(stops)` says whose."""
        return consecutive(self.first_cell[stops], self.parts.num_of_route[self.route[stops]])

    def parts_of(self, stops: Int64Array) -> Int64Array:
        route = self.route[stops]
        return consecutive(self.parts.first[route], self.parts.num_of_route[route])

    def offsets(self, cells: Int64Array, slots: Iterable[int]) -> Int64Array:
        """[n] bytes within the slot copy of each cell. slots: numbers of all slots that the cells are in."""
        for slot in slots:
            self.capacity_bytes(slot)
        found: Int64Array = self._offset[cells]
        return found

    def capacity_bytes(self, slot: int) -> int:
        """Bytes of the fullest round of a slot; works out where its parts lie."""
        if self._capacity[slot] < 0:
            begin, end = self.first_of_slot[slot], self.first_of_slot[slot + 1]
            stops = np.arange(begin, end, dtype=np.int64)
            offset, used = _pack(self.parts, self.parts_of(stops))
            self._offset[self.first_cell[begin] : self.first_cell[end]] = offset
            self._capacity[slot] = used
        return int(self._capacity[slot])

    def specs(self, worker: int) -> tuple[SlotSpec, ...]:
        """A worker's arena: "send" for a trainer, one slot per stage for a rollout; all 64-byte aligned."""
        stages = (SEND,) if self.plan.topology.workers[worker].role is Role.TRAINER else STAGES
        specs: list[SlotSpec] = []
        at = 0
        for stage in stages:
            capacity = self.capacity_bytes(int(self.slot(worker, stage)))
            specs.append(SlotSpec(stage=stage, capacity_bytes=capacity, num_slots=NUM_SLOTS, arena_offset=at))
            at += capacity * NUM_SLOTS
        return tuple(specs)


def _pack(parts: Parts, rows: Int64Array) -> tuple[Int64Array, int]:
    """[n] offset of each part in one slot, rows sorted by (route, round), and the bytes of the fullest round."""
    offset = np.zeros(len(rows), dtype=np.int64)
    if not len(rows):
        return offset, 0
    order = parts.by_round(rows)
    rows = rows[order]
    size = parts.hi[rows] - parts.lo[rows]
    end = np.cumsum((size + (_ALIGN - 1)) // _ALIGN * _ALIGN)
    last = np.flatnonzero(np.diff(parts.round[rows], append=-1))  # of each round
    before = np.concatenate([[0], end[last[:-1]]])
    lengths = np.diff(last, prepend=-1)
    offset[order[1:]] = end[:-1]
    offset[order] -= np.repeat(before, lengths)
    return offset, int((end[last] - before).max())


def slot_specs(plan: Plan, worker: int) -> tuple[SlotSpec, ...]:
    """The slots of a worker's arena under `plan`."""
    return SlotTable.of(plan, Parts.of(plan)).specs(worker)
