"""What the descriptors of a program move, proven against plan, spec and source map on their axes.

A descriptor passes when it is one dense interval of one segment on the slot's side, lies in one atom, and its live
addresses are those of one place of that atom. Both sides are affine on its axes as long as no axis carries from one digit
of the atom into the next, so the first element, the strides and the absence of carries prove every element. The intervals
are then sorted: on a trainer they must tile the outgoing segments, on a rollout each needed atom at each of its places.
Cost grows with the number of descriptors, never with bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InternalError
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import STAGES
from weightbridge.program.program import DESCRIPTOR, MAX_AXES, Op, WorkerProgram
from weightbridge.program.verify_places import Places
from weightbridge.program.verify_points import Moves, first_wrong_point
from weightbridge.program.verify_tables import AtomIndex, PlanTables, joined

__all__ = ["Proven", "Segments", "check_contents", "segments_of"]

Int64Array = npt.NDArray[np.int64]

_MOST_ELEMENTS = 1 << 50  # of one descriptor; far above any slot, far below where products of integers wrap around
_POINTS_IN_DOUBT = 1 << 20  # elements of a descriptor that is looked at one by one where its axes prove nothing
_TARGET_SIZE = np.array([0, 2, 4, 2, 4, 2, 2, 4, 8, 2, 8, 2, 8], dtype=np.int64)
"""Bytes of an element after each Op; a copy keeps its size."""


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Where a worker's descriptors may touch slots: the segments that hold bytes it sends or needs, sorted by key.

    slots: (worker, stage) pairs; a slot's number is its position. key: [n] round, slot and offset in one integer, whose
    lowest `shift` bits are the offset. stream: [n] global stream byte of its first byte. nbytes: [n]. begin: [n] bytes of
    all segments before it.
    """

    slots: tuple[tuple[int, str], ...]
    shift: int
    key: Int64Array
    stream: Int64Array
    nbytes: Int64Array
    begin: Int64Array

    def round_of(self, i: int) -> int:
        return (int(self.key[i]) >> self.shift) // len(self.slots)

    def slot_of(self, i: int) -> tuple[int, str]:
        return self.slots[(int(self.key[i]) >> self.shift) % len(self.slots)]


def segments_of(tables: PlanTables, index: AtomIndex, worker: int) -> Segments:
    """A trainer's outgoing segments, or all segments on a rollout's node that it needs."""
    h = tables.holdings
    if tables.trainer[worker]:
        mine = np.arange(len(h.route))[h.of(worker)]
        slots: tuple[tuple[int, str], ...] = ((worker, "send"),)
        slot = np.zeros(len(mine), dtype=np.int64)
    else:
        near = tables.neighbours(worker)
        slots = tuple((n, stage) for n in near for stage in STAGES)
        mine = np.concatenate([np.arange(len(h.route))[h.of(n)] for n in near])
        mine = mine[tables.needs[tables.route_class[h.route[mine]], worker]]
        slot = np.searchsorted(near, h.worker[mine]) * len(STAGES) + h.stage[mine]
    round_, nth = np.nonzero(tables.full[h.route[mine]].T)
    holding, route = mine[nth], h.route[mine[nth]]
    lo = tables.cuts[route, round_]
    nbytes, offset = tables.cuts[route, round_ + 1] - lo, h.offset[holding, round_].astype(np.int64)
    shift = int((offset + nbytes).max(initial=0)).bit_length()
    return Segments(
        slots=slots, shift=shift, key=((round_ * len(slots) + slot[nth]) << shift) + offset,
        stream=index.class_base[tables.route_class[route]] + lo, nbytes=nbytes, begin=np.cumsum(nbytes) - nbytes,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Proven:
    """The live side of a table that has passed, for workers of equal map. stream: [n] ascending. rows: [n] without slots."""

    stream: Int64Array
    rows: npt.NDArray[np.void]


@dataclass(kw_only=True)
class _Rows:
    """All descriptors of a program, [n]. round: [n]. first: [rounds] where those of each round begin."""

    name: str
    table: npt.NDArray[np.void]
    round: Int64Array
    first: Int64Array
    to_live: bool

    @property
    def slot_side(self) -> str:
        return "src" if self.to_live else "dst"

    @property
    def live_side(self) -> str:
        return "dst" if self.to_live else "src"

    def refuse(self, row: int, what: str) -> NoReturn:
        k = int(self.round[row])
        raise InternalError(f"program of {self.name!r}, round {k}: descriptor {row - int(self.first[k])} {what}")


def check_contents(
    program: WorkerProgram, tables: PlanTables, index: AtomIndex, segments: Segments, places: Places,
    spec: CheckpointSpec, source_map: SourceMap, *, proven: Proven | None, exhaustive: bool,
) -> tuple[int, int, Proven | None]:  # fmt: skip
    """Raise InternalError unless pack and assemble tables move exactly the right elements.

    proven: of another worker with the same places; where its live side is the same, only the slot side is new. Returns
    the number of descriptors, the bytes they move on the slot's side, and what may be passed as `proven` to others.
    """
    rows = _collect(program, tables)
    if not len(rows.table) and not len(segments.key):
        return 0, 0, None
    numel, nbytes = _check_sizes(rows)
    segment, at = _locate(rows, program, segments, nbytes)
    stream = segments.stream[segment] + at
    moved = int(nbytes.sum())
    if not exhaustive and proven is not None and _same_live(rows, stream, proven):
        return len(stream), moved, proven
    _check_dense(rows)
    atom, element = _atoms_at(rows, index, stream, nbytes, segments, segment)
    place = _check_live(rows, places, index, spec, source_map, atom, element, numel)
    if exhaustive:
        _check_points(rows, places, index, spec, source_map, atom, element, place, np.arange(len(stream)))
    if not rows.to_live:
        _check_tiling(rows, segments.begin[segment] + at, nbytes, segments.begin, segments.nbytes, segments, None)
        return len(stream), moved, None
    size = (index.end - index.begin)[places.atom]
    begin = np.cumsum(size) - size
    position = begin[place] + stream - index.begin[atom]
    _check_tiling(rows, position, nbytes, begin, size, segments, index.begin[places.atom])
    order = _live_order(rows, stream)
    return len(stream), moved, Proven(stream=stream[order], rows=_without_slots(rows.table[order]))


def _collect(program: WorkerProgram, tables: PlanTables) -> _Rows:
    trainer, name = bool(tables.trainer[program.worker]), tables.name(program.worker)
    used = [r.pack if trainer else r.assemble.table for r in program.rounds]
    for k, r in enumerate(program.rounds):
        if len(r.assemble.table if trainer else r.pack):
            raise InternalError(
                f"program of {name!r}, round {k}: a trainer packs and a rollout assembles, nothing else"
            )
        if used[k].dtype is not DESCRIPTOR and used[k].dtype != DESCRIPTOR:
            raise InternalError(f"program of {name!r}, round {k}: its table is of {used[k].dtype}, expected DESCRIPTOR")
    lengths = np.array([len(t) for t in used], dtype=np.int64)
    table = joined(used, DESCRIPTOR)
    return _Rows(
        name=name, table=table, round=np.repeat(np.arange(len(used)), lengths), first=np.cumsum(lengths) - lengths,
        to_live=not trainer,
    )  # fmt: skip


# --- the slot's side --------------------------------------------------------------------------------------------------


def _check_sizes(rows: _Rows) -> tuple[Int64Array, Int64Array]:
    """[n] elements and slot bytes of each descriptor, its counts and op being possible at all."""
    count, op, size = rows.table["count"], rows.table["op"], rows.table["itemsize"].astype(np.int64)
    bad = (count < 1).any(axis=1) | (op < 0) | (op >= len(_TARGET_SIZE)) | (size < 1) | (size > 64)
    if bad.any():
        rows.refuse(int(np.argmax(bad)), "has a count below 1, or an op or itemsize that there is not")
    numel = np.ones(len(count), dtype=np.int64)
    estimate = np.ones(len(count))
    for axis in range(MAX_AXES):
        if (count[:, axis] > 1).any():
            numel *= count[:, axis]
            estimate *= count[:, axis]
    if (estimate > _MOST_ELEMENTS).any():
        rows.refuse(int(np.argmax(estimate)), f"moves {estimate.max():.0f} elements, more than any slot holds")
    slot_size = size if rows.to_live else np.where(op == Op.COPY, size, _TARGET_SIZE[op])
    return numel, numel * slot_size


def _locate(
    rows: _Rows, program: WorkerProgram, segments: Segments, nbytes: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """[n] the segment that each descriptor lies in, and its first byte there."""
    slot, offset = _slot_numbers(rows, program, segments), rows.table[f"{rows.slot_side}_offset"]
    within = np.clip(offset, 0, (1 << segments.shift) - 1)
    key = ((rows.round * len(segments.slots) + slot) << segments.shift) + within
    segment = np.maximum(np.searchsorted(segments.key, key, side="right") - 1, 0)
    if not len(segments.key):
        rows.refuse(0, "moves bytes in a program that has none to move")
    at = key - segments.key[segment]
    bad = (at < 0) | (at + nbytes > segments.nbytes[segment]) | (offset != within)
    if bad.any():
        i = int(np.argmax(bad))
        rows.refuse(i, f"touches bytes [{offset[i]}, {offset[i] + nbytes[i]}) of slot {segments.slots[int(slot[i])]}, which "
                       "are no part of one segment that this worker sends or needs")  # fmt: skip
    return segment, at


def _slot_numbers(rows: _Rows, program: WorkerProgram, segments: Segments) -> Int64Array:
    buffer = rows.table[f"{rows.slot_side}_buffer"].astype(np.int64)
    if not rows.to_live:
        num_slots = np.ones(len(program.rounds), dtype=np.int64)
        numbers = np.zeros(len(program.rounds), dtype=np.int64)
    else:
        number = {slot: i for i, slot in enumerate(segments.slots)}
        num_slots = np.array([len(r.assemble.sources) for r in program.rounds], dtype=np.int64)
        numbers = np.array([number.get(s, -1) for r in program.rounds for s in r.assemble.sources], dtype=np.int64)
    first = np.cumsum(num_slots) - num_slots
    bad = (buffer < 0) | (buffer >= num_slots[rows.round])
    if not bad.any():
        found: Int64Array = numbers[first[rows.round] + buffer]
        bad = found < 0
        if not bad.any():
            return found
    i = int(np.argmax(bad))
    rows.refuse(i, f"names slot {buffer[i]} of {num_slots[rows.round[i]]}, or one that is not on this node")


def _check_dense(rows: _Rows) -> None:
    """On the slot's side every descriptor is one run: each axis steps over all that the inner ones cover."""
    count, stride = rows.table["count"], rows.table[f"{rows.slot_side}_stride"]
    run = _slot_size(rows, np.arange(len(count)))
    good = np.ones(len(run), dtype=bool)
    for axis in range(MAX_AXES - 1, -1, -1):
        if (count[:, axis] > 1).any():
            good &= (count[:, axis] == 1) | (stride[:, axis] == run)
            run = run * count[:, axis]
    if not good.all():
        i = int(np.argmin(good))
        rows.refuse(i, f"does not fill its part of the slot: counts {count[i].tolist()}, strides {stride[i].tolist()}")


def _same_live(rows: _Rows, stream: Int64Array, proven: Proven) -> bool:
    if len(stream) != len(proven.stream):
        return False
    order = _live_order(rows, stream)
    if (stream[order] != proven.stream).any():
        return False
    return bool((_without_slots(rows.table[order]).view(np.int64) == proven.rows.view(np.int64)).all())


def _live_order(rows: _Rows, stream: Int64Array) -> Int64Array:
    order: Int64Array = np.argsort(stream, kind="stable")
    if (np.diff(stream[order]) == 0).any():  # an atom with several places
        order = np.lexsort((rows.table["dst_offset"], rows.table["dst_buffer"], stream))
    return order


def _without_slots(table: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    table["src_buffer"] = 0
    table["src_offset"] = 0
    return table


# --- the live side ----------------------------------------------------------------------------------------------------


def _atoms_at(
    rows: _Rows, index: AtomIndex, stream: Int64Array, nbytes: Int64Array, segments: Segments, segment: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """[n] the atom that each descriptor lies in, and the number of its first element there."""
    atom = np.maximum(np.searchsorted(index.begin, stream, side="right") - 1, 0)
    element, odd = np.divmod(stream - index.begin[atom], index.itemsize[atom])
    bad = (stream + nbytes > index.end[atom]) | (odd != 0) | (nbytes % index.itemsize[atom] != 0)
    if bad.any():
        i = int(np.argmax(bad))
        slot = segments.slot_of(int(segment[i]))
        rows.refuse(i, f"begins between elements or runs past the end of its tensor's part, in slot {slot}")
    return atom, element


def _check_live(
    rows: _Rows, places: Places, index: AtomIndex, spec: CheckpointSpec, source_map: SourceMap, atom: Int64Array,
    element: Int64Array, numel: Int64Array,
) -> Int64Array:  # fmt: skip
    """[n] the place that each descriptor reads or writes, all its elements being there."""
    first, num = places.first[atom], places.first[atom + 1] - places.first[atom]
    if (num == 0).any():
        rows.refuse(int(np.argmin(num)), "moves elements for which the source map has no place")
    place = first
    several = np.flatnonzero(num > 1)
    if len(several):
        place = first.copy()
        place[several] = _nearest(rows, places, several, first[several], num[several])
    wrong = np.flatnonzero(~_follows(rows, places, element, place, np.arange(len(place))))
    for nth in range(int(num[wrong].max(initial=1)) if len(wrong) else 0):
        tried = wrong[(num[wrong] > 1) & (nth < num[wrong])]
        candidate = first[tried] + nth
        good = _follows(rows, places, element[tried], candidate, tried)
        place[tried[good]] = candidate[good]
        wrong = np.setdiff1d(wrong, tried[good])
    if len(wrong):
        _check_points(rows, places, index, spec, source_map, atom, element, place, wrong)
        if (numel[wrong] > _POINTS_IN_DOUBT).any():
            rows.refuse(int(wrong[np.argmax(numel[wrong])]), "has axes that cannot be shown to follow the source map")
    _check_ops(rows, places, place)
    return place


def _nearest(rows: _Rows, places: Places, which: Int64Array, first: Int64Array, num: Int64Array) -> Int64Array:
    """Of several places of an atom, the one in the right live tensor that begins last before the descriptor's lowest byte."""
    t = rows.table[which]
    reach = (t["count"] - 1) * t[f"{rows.live_side}_stride"]
    low = t[f"{rows.live_side}_offset"] + np.minimum(reach, 0).sum(axis=1)
    live = t[f"{rows.live_side}_buffer"].astype(np.int64)
    lo, hi = np.zeros(len(which), dtype=np.int64), num.copy()  # the answer is first + lo - 1: bisect all at once
    while (lo < hi).any():
        middle = np.minimum((lo + hi) // 2, num - 1)
        p = first + middle
        before = (places.live[p] < live) | ((places.live[p] == live) & (places.low[p] <= low))
        lo, hi = np.where((lo < hi) & before, middle + 1, lo), np.where((lo < hi) & ~before, middle, hi)
    return first + np.maximum(lo - 1, 0)


def _follows(
    rows: _Rows, places: Places, element: Int64Array, place: Int64Array, which: Int64Array
) -> npt.NDArray[np.bool_]:
    """[m] whether descriptors `which` address, element by element, what the digits of their atoms say for `place`.

    Its axes are digits of the atom's row-major numbers: an axis of slot stride s (in elements) moves digit a if pitch_a
    divides s and s is less than the next pitch. While the first element's digit plus all that its axes add stays below
    the digit's extent nothing carries, so the live address is affine and its strides must be s / pitch_a * step_a.
    """
    t = rows.table[which]
    used = np.flatnonzero((t["count"] > 1).any(axis=0))
    count, size = t["count"][:, used], _slot_size(rows, which)
    slot = t[f"{rows.slot_side}_stride"][:, used] // size[:, None]
    live = t[f"{rows.live_side}_stride"][:, used]
    expected, taken = np.zeros_like(live), count == 1
    at = places.base[place].copy()
    good = t[f"{rows.live_side}_buffer"] == places.live[place]
    for a in range(places.extent.shape[1]):
        extent, pitch, step = places.extent[place, a], places.pitch[place, a], places.step[place, a]
        digit = element // pitch % extent
        at += digit * step
        own = (count > 1) & (slot >= pitch[:, None]) & (slot < (pitch * extent)[:, None])
        turns = np.where(own, slot // pitch[:, None], 0)
        good &= (turns * pitch[:, None] == np.where(own, slot, 0)).all(axis=1)
        good &= digit + ((count - 1) * turns).sum(axis=1) < extent
        expected += turns * step[:, None]
        taken |= own
    good &= taken.all(axis=1) & ((count == 1) | (live == expected)).all(axis=1)
    found: npt.NDArray[np.bool_] = good & (at == t[f"{rows.live_side}_offset"])
    return found


def _slot_size(rows: _Rows, which: Int64Array) -> Int64Array:
    """[m] bytes of an element in a slot."""
    size, op = rows.table["itemsize"][which].astype(np.int64), rows.table["op"][which]
    return size if rows.to_live else np.where(op == Op.COPY, size, _TARGET_SIZE[op])


def _check_ops(rows: _Rows, places: Places, place: Int64Array) -> None:
    op, itemsize = rows.table["op"], rows.table["itemsize"]
    bad = (op != places.op[place]) | (itemsize != places.itemsize[place])
    if bad.any():
        i = int(np.argmax(bad))
        p = place[i]
        rows.refuse(i, f"has op {op[i]} and itemsize {itemsize[i]}, expected {places.op[p]} and {places.itemsize[p]}")


def _check_points(
    rows: _Rows, places: Places, index: AtomIndex, spec: CheckpointSpec, source_map: SourceMap, atom: Int64Array,
    element: Int64Array, place: Int64Array, which: Int64Array,
) -> None:  # fmt: skip
    """Look at every element of some descriptors; of one too large for that, at the first ones."""
    t = rows.table[which]
    moves = Moves(
        count=t["count"], turns=t[f"{rows.slot_side}_stride"] // _slot_size(rows, which)[:, None],
        stride=t[f"{rows.live_side}_stride"], element=element[which], offset=t[f"{rows.live_side}_offset"],
        live=t[f"{rows.live_side}_buffer"].astype(np.int64), atom=atom[which], place=place[which],
    )  # fmt: skip
    found = first_wrong_point(moves, index, places, limit=_POINTS_IN_DOUBT)
    if found is None:
        return
    i, number, coordinates, address = found
    row = int(which[i])
    box = int(places.box[place[row]])
    buffer = int(moves.live[i])
    live = source_map.live[buffer].name if 0 <= buffer < len(source_map.live) else f"live tensor {buffer}"
    rows.refuse(row, f"moves element {number} of its atom, {spec.tensors[int(places.boxes.tensor[box])].name!r}"
                     f"{list(coordinates)}, which the source map does not have at byte {address} of {live!r}")  # fmt: skip


# --- tiling -----------------------------------------------------------------------------------------------------------


def _check_tiling(
    rows: _Rows, position: Int64Array, nbytes: Int64Array, begin: Int64Array, size: Int64Array, segments: Segments,
    stream: Int64Array | None,
) -> None:  # fmt: skip
    """The intervals [position, position + nbytes) tile [0, total) once; they are known to cross none of the cells.

    begin, size: of the cells, laid end to end. stream: [cells] global stream byte of each; None where cells are segments.
    """
    order = np.argsort(position, kind="stable")
    low = position[order]
    high = low + nbytes[order]
    total = int(begin[-1] + size[-1]) if len(begin) else 0
    gaps = np.flatnonzero(np.append(low, total) != np.append(0, high))
    if not len(gaps):
        return
    i = int(gaps[0])
    if i < len(low) and (i and low[i] < high[i - 1]):
        what = "packs again what another has packed" if stream is None else "assembles again what another has assembled"
        rows.refuse(int(order[i]), f"{what} (bytes from {low[i] - begin[_cell(begin, int(low[i]))]} of its "
                                   f"{'segment' if stream is None else 'atom'})")  # fmt: skip
    at = int(high[i - 1]) if i else 0
    cell = _cell(begin, at)
    if stream is None:
        k, verb = segments.round_of(cell), "packed"
    else:
        byte = int(stream[cell]) + at - int(begin[cell])
        inside = (segments.stream <= byte) & (byte < segments.stream + segments.nbytes)
        k, verb = (segments.round_of(int(np.argmax(inside))) if inside.any() else -1), "assembled"
    what = f"round {k}: {int(np.append(low, total)[i]) - at} bytes of a segment are never {verb}"
    raise InternalError(f"program of {rows.name!r}, {what}; they begin {at - int(begin[cell])} bytes into it")


def _cell(begin: Int64Array, at: int) -> int:
    return int(np.searchsorted(begin, at, side="right")) - 1
