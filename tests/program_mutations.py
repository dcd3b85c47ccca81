"""Every way to corrupt one program, as a stream of mutants, each of which moves or waits for something else than it should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from weightbridge.plan import STAGES
from weightbridge.program import Op, WorkerProgram


@dataclass(frozen=True)
class Mutant:
    """what: the kind of corruption. rounds: a message about it names one of them; empty if it is of no round."""

    what: str
    program: WorkerProgram
    rounds: tuple[int, ...] = ()


def mutants(program: WorkerProgram, num_workers: int) -> Iterator[Mutant]:
    yield from _of_slots(program)
    for k in range(len(program.rounds)):
        yield from _of_transfers(program, k, num_workers)
        yield from _of_neighbours(program, k, num_workers)
        yield from _of_tables(program, k)


def mutants_of_steps(program: WorkerProgram, k: int, num_workers: int) -> Iterator[Mutant]:
    """Those of round k that change what is written, read or waited for."""
    yield from _of_transfers(program, k, num_workers)
    yield from _of_neighbours(program, k, num_workers)


def _changed(what: str, program: WorkerProgram, k: int, other: int | None = None, **changes) -> Mutant:
    rounds = list(program.rounds)
    rounds[k] = replace(rounds[k], **changes)
    return Mutant(what, replace(program, rounds=tuple(rounds)), (k,) if other is None else (k, other))


def _of_slots(program: WorkerProgram) -> Iterator[Mutant]:
    for i, slot in enumerate(program.slots):

        def with_slot(what: str, i: int = i, slot=slot, **changes) -> Mutant:
            return Mutant(what, replace(program, slots=tuple(
                replace(s, **changes) if s is slot else s for s in program.slots
            )))  # fmt: skip

        if slot.capacity_bytes:
            small = with_slot(f"slot {slot.stage} is too small", capacity_bytes=slot.capacity_bytes - 64)
            yield replace(small, rounds=tuple(range(len(program.rounds))))
        yield with_slot("a slot is not aligned", arena_offset=slot.arena_offset + 32)
        yield with_slot("a slot has no copies", num_slots=0)
        if i + 1 == len(program.slots) and i:
            yield with_slot("a slot has another number of copies than the others", num_slots=slot.num_slots + 1)
        if i and program.slots[i - 1].capacity_bytes:
            yield with_slot("two slots overlap", arena_offset=slot.arena_offset - 64)
    yield Mutant("a slot is missing", replace(program, slots=program.slots[:-1]))
    yield Mutant("a round is missing", replace(program, rounds=program.rounds[:-1]))
    yield Mutant("it is for another plan", replace(program, plan_digest="0"))
    yield Mutant("its posts are in no known order", replace(program, post_order="newest_first"))


# --- posts and awaits -------------------------------------------------------------------------------------------------


def _of_transfers(program: WorkerProgram, k: int, num_workers: int) -> Iterator[Mutant]:
    for side, what in (("posts", "post"), ("awaits", "await")):
        transfers = getattr(program.rounds[k], side)
        for i, t in enumerate(transfers):
            others = transfers[:i] + transfers[i + 1 :]

            def put(kind: str, changed, side: str = side, what: str = what, others=others) -> Mutant:
                return _changed(f"{what}: {kind}", program, k, **{side: (*others, changed)})

            yield _changed(f"{what}: dropped", program, k, **{side: others})
            yield put("there twice", t, others=transfers)
            yield put("wrong peer", structs.replace(t, peer=(t.peer + 1) % num_workers))
            yield put("no such peer", structs.replace(t, peer=num_workers))
            yield put("wrong stage", structs.replace(t, stage=STAGES[(STAGES.index(t.stage) + 1) % len(STAGES)]))
            yield put("no such stage", structs.replace(t, stage="send"))
            yield put("empty", structs.replace(t, segments=t.segments[:0]))
            yield put("segment dropped", structs.replace(t, segments=t.segments[:-1]))
            yield put("segment twice", structs.replace(t, segments=np.concatenate([t.segments, t.segments[-1:]])))
            if len(t.segments) > 1:
                yield put("segments in another order", structs.replace(t, segments=t.segments[::-1]))
            for field in t.segments.dtype.names:
                for step in (64, -64) if field != "route" else (1, -1):
                    segments = t.segments.copy()
                    segments[field][0] += step
                    yield put(f"segment {field} off", structs.replace(t, segments=segments))
            if k + 1 < len(program.rounds):
                moved = _changed("", program, k, **{side: others}).program
                later = (*getattr(program.rounds[k + 1], side), t)
                yield _changed(f"{what}: in another round", moved, k + 1, k, **{side: later})
    for i, post in enumerate(program.rounds[k].posts):
        others = program.rounds[k].posts[:i] + program.rounds[k].posts[i + 1 :]
        for kind, after in _wrong_afters(post.after, num_workers):
            yield _changed(f"post: {kind}", program, k, posts=(*others, structs.replace(post, after=after)))
        for source in ("send", *STAGES):
            if source != post.source:
                yield _changed(
                    f"post: from slot {source}", program, k, posts=(*others, structs.replace(post, source=source))
                )
                moved = structs.replace(post, source=source, after=tuple((source, w) for _, w in post.after))
                yield _changed(f"post: from and after slot {source}", program, k, posts=(*others, moved))


def _wrong_afters(after: tuple[tuple[str, int], ...], num_workers: int):
    if after:
        yield "after nobody", ()
        yield "after one less", after[1:]
        yield "after one twice", (*after, after[0])
        yield "after somebody else", (*after[1:], (after[0][0], (after[0][1] + 1) % num_workers))
        yield "after another stage", (*after[1:], (STAGES[-1], after[0][1]))
    yield "after one more", (*after, ("receive", (after[0][1] + 1) % num_workers if after else 0))
    yield "after nobody there is", (*after, ("receive", num_workers + 1))


def _of_neighbours(program: WorkerProgram, k: int, num_workers: int) -> Iterator[Mutant]:
    for side in ("reads", "readers"):
        names = getattr(program.rounds[k], side)
        for i in range(len(names)):
            yield _changed(f"{side}: one missing", program, k, **{side: names[:i] + names[i + 1 :]})
            yield _changed(f"{side}: one twice", program, k, **{side: (*names, names[i])})
        extra = next(w for w in range(num_workers) if w not in names and w != program.worker)
        for more in (extra, program.worker, num_workers):
            yield _changed(f"{side}: one too many", program, k, **{side: (*names, more)})


# --- descriptors ------------------------------------------------------------------------------------------------------


def _of_tables(program: WorkerProgram, k: int) -> Iterator[Mutant]:
    round_ = program.rounds[k]
    packs = len(round_.pack) > 0
    table = round_.pack if packs else round_.assemble.table

    def with_table(what: str, changed, at: int = k, base: WorkerProgram = program, other: int | None = None) -> Mutant:
        if packs:
            return _changed(f"descriptor: {what}", base, at, other, pack=changed)
        assemble = replace(base.rounds[at].assemble, table=changed)
        return _changed(f"descriptor: {what}", base, at, other, assemble=assemble)

    for row in range(len(table)):
        yield with_table("dropped", np.delete(table, row))
        yield with_table("there twice", np.concatenate([table, table[row : row + 1]]))
        for field, value in _wrong_fields(table[row]):
            changed = table.copy()
            changed[field][row] = value
            yield with_table(f"{field} off", changed)
        if k + 1 < len(program.rounds):
            later = program.rounds[k + 1].pack if packs else program.rounds[k + 1].assemble.table
            moved = with_table("", np.delete(table, row)).program
            yield with_table("in another round", np.concatenate([later, table[row : row + 1]]), k + 1, moved, k)
        yield from (with_table(what, changed) for what, changed in _wrong_axes(table, row))
    yield from _swapped(table, with_table)
    if not packs:
        unread = sorted({w for r in program.rounds for w in r.reads} - {w for w, _ in round_.assemble.sources})
        for worker in unread[:1]:
            more = replace(round_.assemble, sources=(*round_.assemble.sources, (worker, "receive")))
            yield _changed("sources: one that nothing is taken from", program, k, assemble=more)
    if not packs and len(round_.assemble.sources) > 1:
        sources = round_.assemble.sources[1:] + round_.assemble.sources[:1]
        yield _changed("sources: in another order", program, k, assemble=replace(round_.assemble, sources=sources))


def _wrong_fields(row):
    size = int(row["itemsize"])
    for side in ("src", "dst"):
        for step in (1, size, -size):
            yield f"{side}_offset", row[f"{side}_offset"] + step
        yield f"{side}_offset", 1 << 40
        for buffer in (row[f"{side}_buffer"] + 1, -1, 99):
            yield f"{side}_buffer", buffer
    for axis in np.flatnonzero(row["count"] > 1).tolist():
        one = np.eye(len(row["count"]), dtype=np.int64)[axis]
        for step in (1, -1, 1 << 40):
            yield "count", row["count"] + step * one
        for side in ("src", "dst"):
            for step in (size, -size, 1):
                yield f"{side}_stride", row[f"{side}_stride"] + step * one
    if row["count"][0] == 1:
        yield "count", np.append([2], row["count"][1:])
    yield "count", row["count"] * 0
    for op in (Op.COPY if row["op"] else Op.F32_TO_F16, -1, 99):
        yield "op", op
    for itemsize in (size * 2, size // 2, 0):
        yield "itemsize", itemsize


def _wrong_axes(table, row: int):
    """Axes that are wrong on both sides alike, so that neither side alone looks odd."""
    axes = np.flatnonzero(table[row]["count"] > 1)
    if len(axes):
        stretched = table.copy()
        for side in ("src", "dst"):
            stretched[f"{side}_stride"][row, axes[-1]] *= 2
        yield "steps over every other element", stretched
    if len(axes) > 1:
        joined = table.copy()
        joined["count"][row, axes[-1]] *= joined["count"][row, axes[-2]]
        joined["count"][row, axes[-2]] = 1
        yield "two axes made one", joined


def _swapped(table, with_table) -> Iterator[Mutant]:
    """Two descriptors of equal shape whose live places are exchanged: each byte is still moved once."""
    keys = [tuple(row[f].tobytes() for f in ("count", "op", "itemsize", "src_stride", "dst_stride")) for row in table]
    for j in range(len(table)):
        for i in range(j):
            if keys[i] == keys[j] and (table[i]["src_offset"], table[i]["src_buffer"]) != (
                table[j]["src_offset"],
                table[j]["src_buffer"],
            ):
                changed = table.copy()
                for field in ("dst_offset", "dst_buffer"):
                    changed[field][[i, j]] = changed[field][[j, i]]
                yield with_table("exchanged with another", changed)
