"""Posts and awaits of a worker, from the stops of its slots.

Every stop but those of send slots is one write a round: the writer's part of the route, from the slot it has it in. A
message is what one worker writes to one slot of another in one round; its segments are a slice of one array.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InternalError, UnsupportedError
from weightbridge.plan.plan import STAGES, Plan
from weightbridge.program.program import SEGMENT, Await, Post
from weightbridge.program.slots import SEND, SlotTable

__all__ = ["Writes"]

Int64Array = npt.NDArray[np.int64]
_MASK_BITS = 63


@dataclass(frozen=True, kw_only=True)
class Writes:
    """source: [num_stops] the stop that each stop's bytes are written from; -1 for a send slot, -2 where the plan has
    none. by_writer: stops but send slots', by (writer, stage, worker, route); first_of_writer: [num_workers + 1]."""

    plan: Plan
    slots: SlotTable
    source: Int64Array
    by_writer: Int64Array
    first_of_writer: Int64Array

    @classmethod
    def of(cls, plan: Plan, slots: SlotTable) -> Writes:
        stage = slots.stage_of_stop
        written = np.flatnonzero(stage >= 0)
        writer, route = slots.writer[written], slots.route[written]
        found = slots.find(SlotTable.slot(writer, SEND), route)
        for before, name in enumerate(STAGES):
            earlier = slots.find(SlotTable.slot(writer, name), route)
            found = np.where((found < 0) & (stage[written] > before), earlier, found)
        source = np.full(len(stage), -1, dtype=np.int64)
        source[written] = np.where(found < 0, -2, found)
        order = np.lexsort((written, stage[written], writer))
        first = np.searchsorted(writer[order], np.arange(len(plan.topology.workers) + 1))
        return cls(plan=plan, slots=slots, source=source, by_writer=written[order], first_of_writer=first)

    def posts(self, worker: int) -> list[tuple[Post, ...]]:
        """Per round: first the trainer's writes, then forwards, by stage and peer."""
        stops = self.by_writer[self.first_of_writer[worker] : self.first_of_writer[worker + 1]]
        slot = self.slots.slot_of_stop[stops]
        found = self._messages(stops, slot)
        sources = self._source_slots(worker, stops, found.group_of_stop)
        names, origins = SlotTable.names(slot[found.group_stops]), SlotTable.names(sources)
        after = self._after(found, sources)
        posts = [
            Post(stage=names[g][1], source=origins[g][1], peer=names[g][0], segments=found.segments[a:b], after=c)
            for g, a, b, c in zip(found.group, found.ends, found.ends[1:], after, strict=False)
        ]
        return [tuple(posts[a:b]) for a, b in zip(found.rounds, found.rounds[1:], strict=False)]

    def awaits(self, worker: int) -> list[tuple[Await, ...]]:
        """Per round, what arrives, by stage and writer. `local_offset` is the writer's, `remote_offset` this worker's."""
        stops = self.slots.stops_of_worker(worker)
        stops = stops[self.slots.stage_of_stop[stops] >= 0]
        stops = stops[np.lexsort((stops, self.slots.writer[stops], self.slots.stage_of_stop[stops]))]
        writer, stage = self.slots.writer[stops], self.slots.stage_of_stop[stops]
        found = self._messages(stops, stage * len(self.plan.topology.workers) + writer)
        peers, stages = writer[found.group_stops].tolist(), [STAGES[s] for s in stage[found.group_stops].tolist()]
        awaits = [
            Await(stage=stages[g], peer=peers[g], segments=found.segments[a:b])
            for g, a, b in zip(found.group, found.ends, found.ends[1:], strict=False)
        ]
        return [tuple(awaits[a:b]) for a, b in zip(found.rounds, found.rounds[1:], strict=False)]

    def _messages(self, stops: Int64Array, group_key: Int64Array) -> _Messages:
        """Messages of stops that are sorted by group; stops of one key, which are neighbours, share their messages."""
        slots, source = self.slots, self.source[stops]
        if (source < 0).any():
            stop = int(stops[np.argmax(source < 0)])
            name = self.plan.topology.workers[int(slots.writer[stop])].name
            raise InternalError(
                f"worker {name!r} should pass on route {int(slots.route[stop])}, which never reaches it before; the plan is "
                "wrong"
            )
        parts, num_parts = slots.parts_of(stops), slots.parts.num_of_route[slots.route[stops]]
        order = slots.parts.by_round(parts)
        parts = parts[order]
        group_of_stop = np.cumsum(np.diff(group_key, prepend=group_key[:1]) != 0)
        group = np.repeat(group_of_stop, num_parts)[order]
        segments = np.zeros(len(parts), dtype=SEGMENT)
        for column, ends in (("local_offset", source), ("remote_offset", stops)):
            segments[column] = slots.offsets(slots.cells(ends)[order], np.unique(slots.slot_of_stop[ends]).tolist())
        segments["capacity_bytes"] = slots.parts.hi[parts] - slots.parts.lo[parts]
        segments["route"] = slots.parts.route[parts]
        round_ = slots.parts.round[parts]
        begins = np.flatnonzero((np.diff(round_, prepend=-1) != 0) | (np.diff(group, prepend=-1) != 0))
        rounds = np.searchsorted(round_[begins], np.arange(self.plan.rounds + 1))
        return _Messages(
            segments=segments, group=group[begins].tolist(), ends=[*begins.tolist(), len(parts)], rounds=rounds.tolist(),
            source=np.repeat(source, num_parts)[order], group_of_stop=group_of_stop,
            group_stops=np.flatnonzero(np.diff(group_of_stop, prepend=-1)),
        )  # fmt: skip

    def _source_slots(self, worker: int, stops: Int64Array, group: Int64Array) -> Int64Array:
        """[num_groups] the one slot from which each group of stops is written."""
        slot = self.slots.slot_of_stop[self.source[stops]]
        begins = np.flatnonzero(np.diff(group, prepend=-1))
        mixed = np.flatnonzero(slot != slot[begins][group])
        if len(mixed):
            routes = self.slots.route[stops[group == group[mixed[0]]]].tolist()
            stage = STAGES[int(self.slots.stage_of_stop[stops[mixed[0]]])]
            raise UnsupportedError(
                f"worker {worker} forwards routes {routes} to one peer in stage {stage!r} but has them from several stages; "
                "the planner must forward each stage's routes to peers of their own"
            )
        return slot[begins]

    def _after(self, found: _Messages, sources: Int64Array) -> list[tuple[tuple[str, int], ...]]:
        """For each message the (stage, writer) pairs that bring what it passes on; empty for what comes from a send slot.

        The writers of a message are a bit mask, 63 of them at a time; equal sets share one tuple.
        """
        stages = [stage for _, stage in SlotTable.names(sources)]
        if all(stage == SEND for stage in stages):
            return [()] * len(found.group)
        writers, code = np.unique(self.slots.writer[found.source], return_inverse=True)
        masks = [0] * len(found.group)
        for base in range(0, len(writers), _MASK_BITS):
            near = (code >= base) & (code < base + _MASK_BITS)
            bits = np.where(near, 1 << np.where(near, code - base, 0), 0)
            part = np.bitwise_or.reduceat(bits, found.ends[:-1]).tolist()
            masks = [m | p << base for m, p in zip(masks, part, strict=True)]
        named = writers.tolist()
        known: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {}
        result = []
        for g, mask in zip(found.group, masks, strict=True):
            key = (stages[g], mask)
            if key not in known:
                bits_set = [i for i in range(len(named)) if mask >> i & 1]
                known[key] = () if stages[g] == SEND else tuple((stages[g], named[i]) for i in bits_set)
            result.append(known[key])
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Messages:
    """segments, source: [n] by (round, group, route); source: the stop each is written from. Message i has the segments
    ends[i] to ends[i + 1] and belongs to group[i]; round k has messages rounds[k] to rounds[k + 1]. group_of_stop: for
    each stop asked for. group_stops: the first of them in each group."""

    segments: npt.NDArray[np.void]
    source: Int64Array
    group: list[int]
    ends: list[int]
    rounds: list[int]
    group_of_stop: Int64Array
    group_stops: Int64Array
