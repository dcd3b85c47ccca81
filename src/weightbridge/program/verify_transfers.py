"""Part of the program's verifier: slots, writes, arrivals and neighbours of one worker against the plan's tables.

Everything is compared whole: the writes that a program has are the writes that the plan has, segment by segment and in
one order. So two programs that pass agree on every write between them, and nothing of one need be kept to check the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InfeasibleError, InternalError
from weightbridge.plan.plan import STAGES
from weightbridge.program.program import SEGMENT, Await, Post, WorkerProgram
from weightbridge.program.verify_tables import SEND, Lines, PlanTables, joined

__all__ = ["check_neighbours", "check_slots", "check_transfers"]

Int64Array = npt.NDArray[np.int64]
_STAGE_OF = {"send": SEND, **{name: i for i, name in enumerate(STAGES)}}


def _refuse(tables: PlanTables, worker: int, round_: int, what: str) -> NoReturn:
    raise InternalError(f"program of {tables.name(worker)!r}, round {round_}: {what}")


def check_slots(program: WorkerProgram, tables: PlanTables) -> None:
    """The arena: the right slots, apart from each other, aligned, of equally many copies, within the plan's budget."""
    name, budget = tables.name(program.worker), tables.plan.slot_bytes
    expected = ("send",) if tables.trainer[program.worker] else STAGES
    if tuple(s.stage for s in program.slots) != expected:
        raise InternalError(
            f"program of {name!r} has slots {[s.stage for s in program.slots]}, expected {list(expected)}"
        )
    end = 0
    for slot in program.slots:
        if slot.arena_offset < end or slot.num_slots < 1 or slot.capacity_bytes % 64 or slot.arena_offset % 64:
            raise InternalError(f"slot {slot.stage!r} of {name!r} overlaps another or is not 64-byte aligned: {slot}")
        end = slot.arena_offset + slot.capacity_bytes * slot.num_slots
        if slot.num_slots != program.slots[0].num_slots:
            raise InternalError(
                f"slots of {name!r} have {program.slots[0].num_slots} and {slot.num_slots} copies; credits count in one number"
            )
        if slot.capacity_bytes > budget:
            raise InfeasibleError(
                f"slot {slot.stage!r} of {name!r} takes {slot.capacity_bytes} bytes, the plan allows {budget}; "
                "plan more rounds or raise the budget",
                needed_bytes=slot.capacity_bytes,
                budget_bytes=budget,
            )


# --- writes and arrivals ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Found:
    """All posts or all awaits of a program, sorted by (round, stage, peer).

    order: [t] the position of each among all as they come. round, stage, peer: [t]. transfer: [n] of each segment.
    segments: [n].
    """

    order: Int64Array
    round: Int64Array
    stage: Int64Array
    peer: Int64Array
    transfer: Int64Array
    segments: npt.NDArray[np.void]


def check_transfers(program: WorkerProgram, tables: PlanTables) -> tuple[int, Int64Array]:
    """Posts and awaits, segment by segment, against the plan; every forward waits for whoever brings its bytes.

    Returns the number of posts and [num_classes] the bytes posted.
    """
    worker = program.worker
    all_posts = [p for r in program.rounds for p in r.posts]
    found = _find(program, tables, [r.posts for r in program.rounds])
    posts = [all_posts[i] for i in found.order.tolist()]
    out = tables.lines(worker, outgoing=True)
    sources = np.array([_STAGE_OF.get(p.source, len(STAGES)) for p in posts], dtype=np.int64)
    _check_room(program, tables, found, sources, "local_offset")
    _compare(program, tables, found, out, outgoing=True)
    _check_sources(program, tables, posts, found, sources, out)
    awaits = _find(program, tables, [r.awaits for r in program.rounds])
    _check_room(program, tables, awaits, awaits.stage, "remote_offset")
    _compare(program, tables, awaits, tables.lines(worker, outgoing=False), outgoing=False)
    classes = tables.route_class[out.route]
    by_class = np.bincount(classes, weights=out.nbytes, minlength=len(tables.plan.classes)).astype(np.int64)
    return len(posts), by_class


def _find(program: WorkerProgram, tables: PlanTables, by_round: Sequence[Sequence[Post | Await]]) -> _Found:
    given = list(chain.from_iterable(by_round))
    num_workers, num_stages = len(tables.names), len(STAGES)
    round_ = np.repeat(np.arange(len(by_round)), [len(t) for t in by_round])
    stage = np.array([_STAGE_OF.get(t.stage, -1) for t in given], dtype=np.int64)
    peer = np.array([t.peer for t in given], dtype=np.int64)
    length = np.array([len(t.segments) for t in given], dtype=np.int64)
    wrong = (stage < 0) | (peer < 0) | (peer >= num_workers) | (length == 0)
    if wrong.any():
        i = int(np.argmax(wrong))
        t = given[i]
        _refuse(tables, program.worker, int(round_[i]), f"a write of {len(t.segments)} segments in stage {t.stage!r} with "
                f"{tables.name(t.peer)!r}; expected a stage of {list(STAGES)}, a worker of the plan and a segment")  # fmt: skip
    if any(t.segments.dtype is not SEGMENT and t.segments.dtype != SEGMENT for t in given):
        raise InternalError(f"program of {tables.name(program.worker)!r}: segments that are no SEGMENT; lower it again")
    key = (round_ * num_stages + stage) * num_workers + peer
    order = np.arange(len(given))
    segments = joined([t.segments for t in given], SEGMENT)
    if (np.diff(key) < 0).any():
        order = np.argsort(key, kind="stable")
        first = (np.cumsum(length) - length)[order]
        length = length[order]
        segments = segments[np.repeat(first - (np.cumsum(length) - length), length) + np.arange(len(segments))]
        round_, stage, peer, key = round_[order], stage[order], peer[order], key[order]
    if (twice := np.flatnonzero(np.diff(key) == 0)).size:
        _refuse(tables, program.worker, int(round_[twice[0]]),
                f"two posts or two awaits have stage {STAGES[int(stage[twice[0]])]!r} and peer "
                f"{tables.name(int(peer[twice[0]]))!r}; tags could not tell them apart")  # fmt: skip
    return _Found(
        round=round_, stage=stage, peer=peer, order=order, segments=segments,
        transfer=np.repeat(np.arange(len(given)), length),
    )  # fmt: skip


def _check_room(program: WorkerProgram, tables: PlanTables, found: _Found, slot_of: Int64Array, side: str) -> None:
    """Each segment lies inside its own slot copy. slot_of: [t] stage of the slot, one past the last for no slot."""
    capacity = np.full(len(STAGES) + 2, -1, dtype=np.int64)  # SEND is last
    for slot in program.slots:
        capacity[_STAGE_OF[slot.stage]] = slot.capacity_bytes
    room = capacity[slot_of][found.transfer]
    at, nbytes = found.segments[side], found.segments["capacity_bytes"]
    bad = (at < 0) | (nbytes <= 0) | (nbytes > room) | (at > room - nbytes)
    if bad.any():
        i = int(np.argmax(bad))
        t = int(found.transfer[i])
        peer = tables.name(int(found.peer[t]))
        what = f"segment of {nbytes[i]} bytes at {at[i]}, exchanged with {peer!r}, leaves its slot of {room[i]} bytes"
        if room[i] < 0:
            what = f"a write with {peer!r} uses a slot that this worker does not have"
        _refuse(tables, program.worker, int(found.round[t]), what)


def _compare(program: WorkerProgram, tables: PlanTables, found: _Found, expected: Lines, *, outgoing: bool) -> None:
    here, there = ("local_offset", "remote_offset") if outgoing else ("remote_offset", "local_offset")
    t, s = found.transfer, found.segments
    have = [found.round[t], found.stage[t], found.peer[t], s["route"], s["capacity_bytes"], s[here], s[there]]
    want = [
        expected.round,
        expected.stage,
        expected.peer,
        expected.route,
        expected.nbytes,
        expected.here,
        expected.there,
    ]
    if len(t) == len(expected.round) and all((a == b).all() for a, b in zip(have, want, strict=True)):
        return
    what = "write" if outgoing else "arrival"
    have_lines, want_lines = (list(zip(*(c.tolist() for c in side), strict=True)) for side in (have, want))
    lacks = min(set(want_lines) - set(have_lines), default=None)
    extra = min(set(have_lines) - set(want_lines), default=None)
    for verb, line in (("lacks a", lacks), ("has an unplanned", extra)):
        if line is not None:
            k, stage, peer, route, nbytes, at, at_peer = line
            _refuse(tables, program.worker, k,
                    f"the program {verb} {what}: route {route}, {nbytes} bytes, {STAGES[stage]!r}, peer {tables.name(peer)!r}, "
                    f"own slot byte {at}, peer's {at_peer}")  # fmt: skip
    k = next(line[0] for line, other in zip(have_lines, [*want_lines, None], strict=False) if line != other)
    _refuse(
        tables, program.worker, k, f"a {what} has a segment twice, or its segments do not lie in the order of routes"
    )


def _check_sources(
    program: WorkerProgram, tables: PlanTables, posts: list[Post], found: _Found, source: Int64Array, lines: Lines
) -> None:
    """Each post takes its routes from where they lie, and is after exactly those who bring them there.

    posts, source: [t] in the order of `found`, and the stage number of their source slots. lines: of the posts, found equal.
    """
    h, num_workers = tables.holdings, len(tables.names)
    origin = h.source[lines.write]
    wrong = source[found.transfer] != h.stage[origin]
    if wrong.any():
        i = int(np.argmax(wrong))
        post = posts[int(found.transfer[i])]
        _refuse(tables, program.worker, int(lines.round[i]),
                f"a post to {tables.name(post.peer)!r} takes routes from {post.source!r} that lie elsewhere")  # fmt: skip
    brought = h.writer[origin] >= 0
    expected = np.unique(found.transfer[brought] * num_workers + h.writer[origin[brought]])
    pairs = [pair for post in posts for pair in post.after]
    who = np.repeat(np.arange(len(posts)), [len(post.after) for post in posts])
    stage = np.array([_STAGE_OF.get(name, len(STAGES)) for name, _ in pairs], dtype=np.int64)
    writer = np.array([w for _, w in pairs], dtype=np.int64)
    key = np.sort(who * num_workers + writer)
    known = (writer >= 0) & (writer < num_workers) & (stage == source[who])
    if known.all() and len(key) == len(expected) and (key == expected).all():
        return
    for t, post in enumerate(posts):
        should = sorted((post.source, int(w)) for w in expected[expected // num_workers == t] % num_workers)
        if sorted(post.after) != should:
            _refuse(tables, program.worker, int(found.round[t]),
                    f"a post to {tables.name(post.peer)!r} is after {sorted(post.after)}, expected {should}")  # fmt: skip


# --- neighbours -------------------------------------------------------------------------------------------------------


def check_neighbours(program: WorkerProgram, tables: PlanTables) -> None:
    """`reads` are the slots the table draws on and must; `readers` are the neighbours that must find their bytes here."""
    me = program.worker
    others = [] if tables.trainer[me] else [w for w in tables.neighbours(me) if w != me]
    must_serve = _found_at(tables, me, others)
    must_read = np.zeros_like(must_serve)
    for i, other in enumerate(others):
        must_read[:, i] = _found_at(tables, other, [me])[:, 0]
    sources: dict[tuple[tuple[int, str], ...], set[int]] = {}
    for k, round_ in enumerate(program.rounds):
        named = round_.assemble.sources
        used = sources[named] if named in sources else sources.setdefault(named, {s for s, _ in named} - {me})
        if used != set(round_.reads) or not used <= set(others):
            _refuse(tables, me, k, f"reads {sorted(round_.reads)}, but its table draws on {sorted(used)}")
    serve, served = _marked([r.readers for r in program.rounds], others)
    wrong = (serve != must_serve).any(axis=1) | (served != must_serve.sum(axis=1))
    if wrong.any():
        k = int(np.argmax(wrong))
        _explain_readers(program, tables, k, [w for w, must in zip(others, must_serve[k], strict=True) if must])
    read, num_read = _marked([r.reads for r in program.rounds], others)
    wrong = (read != must_read).any(axis=1) | (num_read != must_read.sum(axis=1))
    if wrong.any():
        k = int(np.argmax(wrong))
        expected = [w for w, must in zip(others, must_read[k], strict=True) if must]
        _refuse(tables, me, k, f"reads the slots of {list(program.rounds[k].reads)}, expected those of {expected}")


def _marked(lists: list[tuple[int, ...]], others: list[int]) -> tuple[npt.NDArray[np.bool_], Int64Array]:
    """[rounds, len(others)] who is in the list of each round, and [rounds] how long the list is."""
    lengths = np.array([len(names) for names in lists], dtype=np.int64)
    who = np.array([w for names in lists for w in names], dtype=np.int64)
    marks = np.zeros((len(lists), len(others)), dtype=bool)
    if len(others):
        at = np.minimum(np.searchsorted(others, who), len(others) - 1)
        known = np.array(others)[at] == who
        marks[np.repeat(np.arange(len(lists)), lengths)[known], at[known]] = True
    return marks, lengths


def _found_at(tables: PlanTables, holder: int, others: list[int]) -> npt.NDArray[np.bool_]:
    """[rounds, len(others)] whether some slot of `holder` has bytes that each of the others needs.

    A byte enters a node once, so those who need it find it there and nowhere else.
    """
    routes = tables.holdings.route[tables.holdings.of(holder)]
    needed = tables.needs[tables.route_class[routes]][:, others]
    found: npt.NDArray[np.bool_] = tables.full[routes].T.astype(np.float32) @ needed.astype(np.float32) > 0
    return found


def _explain_readers(program: WorkerProgram, tables: PlanTables, k: int, expected: list[int]) -> NoReturn:
    me, readers = program.worker, program.rounds[k].readers
    h = tables.holdings
    for other in expected:
        if other not in readers:
            mine = np.arange(len(h.route))[h.of(me)]
            lies = tables.full[h.route[mine], k] & tables.needs[tables.route_class[h.route[mine]], other]
            stage = STAGES[int(h.stage[mine[np.argmax(lies)]])]
            raise InternalError(
                f"slot {stage!r} of {tables.name(me)!r} would be released in round {k} while neighbour "
                f"{tables.name(other)!r} still reads it: it is missing among the readers {list(readers)}"
            )
    extra = sorted(set(readers) - set(expected)) or sorted(readers)
    _refuse(tables, me, k, f"waits for readers {extra} that need nothing of it, or for one of them twice")
