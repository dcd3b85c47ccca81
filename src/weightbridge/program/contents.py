"""What the descriptors of a program move, checked against plan, spec and source map by counting and by points.

Shares nothing with the lowering: coverage is counted in memory, one live tensor or slot at a time, and truth is asked
point by point (which checkpoint element is this byte of the stream, and does the map put it at this live element?).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InternalError
from weightbridge.layout.boxes import BoxTable, expand
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import STAGES, Plan
from weightbridge.plan.topology import Role
from weightbridge.program.program import MAX_AXES, Op, Round, WorkerProgram

__all__ = ["check_contents"]

Int64Array = npt.NDArray[np.int64]
_POINTS = 1 << 19  # points looked at together
_PAIRS = 1 << 21  # point-box pairs looked at together
_NUM_INNER = 8  # points inside each descriptor besides its corners
_TARGET_SIZE = np.array(
    [0, 2, 4, 2, 4, 2, 2, 4, 8, 2, 8, 2, 8], dtype=np.int64
)  # bytes of an element after each Op; a copy keeps its size


def check_contents(
    program: WorkerProgram, plan: Plan, spec: CheckpointSpec, source_map: SourceMap, *, exhaustive: bool
) -> None:
    """Raise InternalError unless pack and assemble tables move exactly the right elements. See `verify_program`."""
    name = plan.topology.workers[program.worker].name
    trainer = plan.topology.workers[program.worker].role is Role.TRAINER
    truth = _Truth(plan=plan, spec=spec, source_map=source_map)
    written = [np.zeros(t.span_numel, dtype=np.uint8) for t in source_map.live] if not trainer else []
    for k, round_ in enumerate(program.rounds):
        where = f"program of {name!r}, round {k}"
        table = round_.pack if trainer else round_.assemble.table
        if len(round_.assemble.table if trainer else round_.pack):
            raise InternalError(f"{where}: a trainer packs and a rollout assembles, nothing else")
        if not len(table) and not round_.posts:
            continue
        slots = [(program.worker, -1)] if trainer else [(w, STAGES.index(s)) for w, s in round_.assemble.sources]
        _check_bounds(table, source_map, truth.used_bytes(slots, k), where, to_live=not trainer)
        for rows, slot, live in _points(table, to_live=not trainer, exhaustive=exhaustive):
            truth.check(table[rows], slots, k, slot, live, where, to_live=not trainer)
        if trainer:
            _check_packed(program, round_, table, where)
        else:
            _count_live(written, table, source_map)
    if not trainer:
        _check_written(written, spec, source_map, name)


# --- bounds and coverage ----------------------------------------------------------------------------------------------


def _sides(table: npt.NDArray[np.void], *, to_live: bool) -> tuple[tuple[str, Int64Array], tuple[str, Int64Array]]:
    """((slot's side, its item sizes), (live side, its item sizes)); a cast may change the size."""
    size = table["itemsize"].astype(np.int64)
    target = np.where(table["op"] == Op.COPY, size, _TARGET_SIZE[np.clip(table["op"], 0, len(_TARGET_SIZE) - 1)])
    return (("src", size), ("dst", target)) if to_live else (("dst", target), ("src", size))


def _check_bounds(
    table: npt.NDArray[np.void], source_map: SourceMap, used_bytes: list[int], where: str, *, to_live: bool
) -> None:
    if not len(table):
        return
    if (table["count"] < 1).any():
        raise InternalError(f"{where}: a descriptor has a count below 1")
    live_bytes = [t.span_numel * t.dtype.itemsize for t in source_map.live]
    for (side, size), sizes, what in zip(
        _sides(table, to_live=to_live), (used_bytes, live_bytes), ("slot", "live tensor"), strict=True
    ):
        buffer = table[f"{side}_buffer"]
        if int(buffer.min()) < 0 or int(buffer.max()) >= len(sizes):
            raise InternalError(f"{where}: a descriptor names {what} {int(buffer.max())} of {len(sizes)}")
        reach = (table["count"] - 1) * table[f"{side}_stride"]
        low = table[f"{side}_offset"] + np.minimum(reach, 0).sum(axis=1)
        high = table[f"{side}_offset"] + np.maximum(reach, 0).sum(axis=1) + size
        capacity = np.array(sizes, dtype=np.int64)[buffer]
        bad = (low < 0) | (high > capacity)
        if bad.any():
            i = int(np.argmax(bad))
            raise InternalError(
                f"{where}: descriptor {i} touches bytes [{low[i]}, {high[i]}) of {what} {buffer[i]}, which has {capacity[i]}"
            )


def _strided(memory: npt.NDArray[np.uint8], offset: int, count: list[int], stride: list[int]) -> npt.NDArray[np.uint8]:
    view: npt.NDArray[np.uint8] = np.ndarray(count, dtype=np.uint8, buffer=memory, offset=offset, strides=stride)
    return view


def _check_packed(program: WorkerProgram, round_: Round, table: npt.NDArray[np.void], where: str) -> None:
    """Each byte of the outgoing segments is packed exactly once, and no other byte of the slot."""
    packed = np.zeros(program.slot("send").capacity_bytes, dtype=np.uint8)
    wanted = np.zeros_like(packed)
    for post in round_.posts:
        for segment in post.segments:
            at = int(segment["local_offset"])
            wanted[at : at + int(segment["capacity_bytes"])] += 1
    (_, size), _ = _sides(table, to_live=False)
    moved = int((table["count"].prod(axis=1) * size).sum())
    for row, itemsize in zip(table, size.tolist(), strict=True):
        count, stride = row["count"].tolist(), row["dst_stride"].tolist()
        if stride[-1] == itemsize or count[-1] == 1:
            count[-1], stride[-1] = count[-1] * itemsize, 1
        else:
            count, stride = [*count, itemsize], [*stride, 1]
        _strided(packed, int(row["dst_offset"]), count, stride)[...] += 1
    if moved != int(wanted.sum()) or (packed != wanted).any() or wanted.max(initial=0) > 1:
        at = int(np.argmax(packed != wanted))
        raise InternalError(
            f"{where}: {moved} bytes are packed for segments of {int(wanted.sum())}; byte {at} of the send slot is packed "
            f"{packed[at] if len(packed) else 0} times"
        )


def _count_live(written: list[npt.NDArray[np.uint8]], table: npt.NDArray[np.void], source_map: SourceMap) -> None:
    for row in table:
        live = int(row["dst_buffer"])
        size = source_map.live[live].dtype.itemsize
        if int(row["dst_offset"]) % size or any(s % size for s in row["dst_stride"].tolist()):
            raise InternalError(
                f"a descriptor writes between the elements of live tensor {source_map.live[live].name!r}"
            )
        view = _strided(
            written[live], int(row["dst_offset"]) // size, row["count"].tolist(), (row["dst_stride"] // size).tolist()
        )
        before = int(view.max())
        view[...] += 1
        if before or int(view.max()) > 1:  # an overlap within the row adds once, an overlap between rows shows here
            raise InternalError(f"an element of live tensor {source_map.live[live].name!r} is assembled twice")


def _check_written(
    written: list[npt.NDArray[np.uint8]], spec: CheckpointSpec, source_map: SourceMap, name: str
) -> None:
    """Exactly the elements that the map's copies fill have been written; constants of the spec never travel."""
    copies = source_map.copies
    constant = np.array([t.name in spec.constants for t in spec.tensors], dtype=bool)
    num_wanted = np.zeros(len(source_map.live), dtype=np.int64)
    for i in np.flatnonzero(~constant[copies.tensor]).tolist():
        live = int(copies.live[i])
        num_wanted[live] += int(copies.numel[i])
        view = _strided(
            written[live], int(copies.live_start[i]), copies.count[i].tolist(), copies.live_stride[i].tolist()
        )
        view |= 2
    for live, marks in enumerate(written):
        bad = (marks != 0) & (marks != 3)
        if bad.any() or int((marks == 3).sum()) != num_wanted[live]:
            at = int(np.argmax(bad))
            state = "assembled but not in the source map" if marks[at] == 1 else "never assembled"
            raise InternalError(
                f"program of {name!r}: element {at} of live tensor {source_map.live[live].name!r} is {state}"
            )


# --- truth, point by point --------------------------------------------------------------------------------------------


def _points(
    table: npt.NDArray[np.void], *, to_live: bool, exhaustive: bool
) -> Iterator[tuple[Int64Array, Int64Array, Int64Array]]:
    """(row, slot byte, live byte) of points of each descriptor: corners and some inner ones, or all of them."""
    (slot, _), (live, _) = _sides(table, to_live=to_live)
    corners = (np.arange(1 << MAX_AXES)[:, None] >> np.arange(MAX_AXES)) & 1  # [64, MAX_AXES]
    inner = np.random.default_rng(0).random((_NUM_INNER, MAX_AXES))
    numel = table["count"].prod(axis=1) if exhaustive else np.full(len(table), 1 << MAX_AXES)
    begin = 0
    while begin < len(table):
        num_before = np.cumsum(numel[begin:]) - numel[begin:]
        stop = begin + int(np.searchsorted(num_before, _POINTS, side="left"))
        count = table["count"][begin:stop]
        if exhaustive:
            rows = np.repeat(np.arange(stop - begin), numel[begin:stop])
            rest = np.arange(len(rows)) - num_before[rows]
            index = np.empty((len(rows), MAX_AXES), dtype=np.int64)
            for axis in range(MAX_AXES - 1, -1, -1):
                rest, index[:, axis] = np.divmod(rest, count[rows, axis])
        else:
            used = ~((corners[None] == 1) & (count[:, None] == 1)).any(axis=2)  # one point per distinct corner
            rows, corner = np.nonzero(used)
            more = (inner[None] * count[:, None]).astype(np.int64).reshape(-1, MAX_AXES)
            index = np.concatenate([corners[corner] * (count[rows] - 1), more])
            rows = np.concatenate([rows, np.repeat(np.arange(stop - begin), _NUM_INNER)])
        rows += begin
        at = [table[f"{s}_offset"][rows] + (index * table[f"{s}_stride"][rows]).sum(axis=1) for s in (slot, live)]
        yield rows, at[0], at[1]
        begin = stop


@dataclass(kw_only=True)
class _Truth:
    """Answers which checkpoint element a slot byte holds, and whether the map puts that element at a live byte.

    cuts: [2, num_routes] where the parts of round `cut_round` begin and end.
    """

    plan: Plan
    spec: CheckpointSpec
    source_map: SourceMap
    cut_round: int = -1
    cuts: Int64Array = field(default_factory=lambda: np.zeros((2, 0), dtype=np.int64))

    @cached_property
    def boxes(self) -> BoxTable:
        """The map's boxes, sorted by (tensor, live)."""
        boxes = expand(self.source_map, self.spec)
        order = np.argsort(boxes.tensor * len(self.source_map.live) + boxes.live, kind="stable")
        columns = ("tensor", "live", "start", "step", "count", "live_start", "live_stride")
        return BoxTable(**{c: getattr(boxes, c)[order] for c in columns})

    @cached_property
    def tensor_itemsize(self) -> Int64Array:
        return np.array([t.dtype.itemsize for t in self.spec.tensors], dtype=np.int64)

    def segments(self, slot: tuple[int, int], k: int) -> Int64Array:
        """[m, 3] (slot byte, class, first stream byte) and a last row (end, -1, 0) of a slot's content in round k."""
        worker, stage = slot
        plan = self.plan
        if stage < 0:
            routes = np.flatnonzero(plan.routes["sender"] == worker)
        else:
            routes = plan.hops["route"][(plan.hops["dst"] == worker) & (plan.hops["stage"] == stage)]
            if stage == 0:
                routes = np.concatenate([routes, np.flatnonzero(plan.routes["entry"] == worker)])
        rows: list[tuple[int, int, int]] = []
        at = 0
        if self.cut_round != k:
            self.cut_round, self.cuts = k, plan.cuts(range(k, k + 2))
        for route in sorted(routes.tolist()):
            lo, hi = self.cuts[:, route].tolist()
            if hi > lo:
                rows.append((at, int(plan.routes["class_id"][route]), lo))
                at += (hi - lo + 63) // 64 * 64
        return np.array([*rows, (at, -1, 0)], dtype=np.int64)

    def used_bytes(self, slots: list[tuple[int, int]], k: int) -> list[int]:
        return [int(self.segments(s, k)[-1, 0]) for s in slots]

    def check(
        self, table: npt.NDArray[np.void], slots: list[tuple[int, int]], k: int, slot_at: Int64Array, live_at: Int64Array,
        where: str, *, to_live: bool,
    ) -> None:  # fmt: skip
        """table: [n] the descriptor of each point. slot_at, live_at: [n] bytes. Raises InternalError at the first lie."""
        (slot_side, _), (live_side, _) = _sides(table, to_live=to_live)
        buffer = table[f"{slot_side}_buffer"]
        tensor = np.full(len(table), -1, dtype=np.int64)
        coordinate = np.zeros((len(table), self.plan.atoms.count.shape[1]), dtype=np.int64)
        for b, slot in enumerate(slots):
            mine = np.flatnonzero(buffer == b)
            if len(mine):
                tensor[mine], coordinate[mine] = self._element(self.segments(slot, k), slot_at[mine], where)
        live = table[f"{live_side}_buffer"].astype(np.int64)
        self._check_ops(table, tensor, live, where, to_live=to_live)
        itemsize = np.array([t.dtype.itemsize for t in self.source_map.live], dtype=np.int64)[live]
        good = (live_at % itemsize == 0) & self._is_at(tensor, coordinate, live, live_at // itemsize)
        if not good.all():
            i = int(np.argmin(good))
            name, target = self.spec.tensors[int(tensor[i])].name, self.source_map.live[int(live[i])].name
            raise InternalError(
                f"{where}: byte {slot_at[i]} of slot {slots[buffer[i]]} holds {name!r}{coordinate[i].tolist()}, which the "
                f"source map does not have at byte {live_at[i]} of {target!r}"
            )

    def _element(self, segments: Int64Array, at: Int64Array, where: str) -> tuple[Int64Array, Int64Array]:
        """[n] tensor and [n, D] coordinates of the checkpoint elements at these slot bytes."""
        atoms = self.plan.atoms
        row = segments[np.searchsorted(segments[:, 0], at, side="right") - 1]
        stream = row[:, 2] + at - row[:, 0]
        key = np.lexsort((atoms.stream_offset, atoms.class_id))  # sorted by contract; cheap to make sure
        base = int(atoms.stream_offset.max(initial=0)) + int(at.max(initial=0)) + int(segments[:, 2].max(initial=0)) + 1
        atom = key[
            np.searchsorted((atoms.class_id * base + atoms.stream_offset)[key], row[:, 1] * base + stream, side="right")
            - 1
        ]
        size = self.tensor_itemsize[atoms.tensor[atom]]
        rest, odd = np.divmod(stream - atoms.stream_offset[atom], size)
        bad = (
            (row[:, 1] < 0)
            | (atoms.class_id[atom] != row[:, 1])
            | (odd != 0)
            | (rest >= atoms.count[atom].prod(axis=1))
        )
        if bad.any():
            raise InternalError(
                f"{where}: a descriptor touches slot byte {int(at[np.argmax(bad)])}, where no element begins"
            )
        coordinate = np.zeros((len(at), atoms.count.shape[1]), dtype=np.int64)
        for dim in range(atoms.count.shape[1] - 1, -1, -1):
            rest, digit = np.divmod(rest, atoms.count[atom, dim])
            coordinate[:, dim] = atoms.start[atom, dim] + digit * atoms.step[atom, dim]
        return atoms.tensor[atom], coordinate

    def _check_ops(
        self, table: npt.NDArray[np.void], tensor: Int64Array, live: Int64Array, where: str, *, to_live: bool
    ) -> None:
        keys = np.stack([tensor, live, table["op"], table["itemsize"]], axis=1)
        for t, v, op, itemsize in np.unique(keys, axis=0).tolist():
            ends = self.spec.tensors[t].dtype, self.source_map.live[v].dtype
            src, dst = ends if to_live else ends[::-1]
            expected = Op.COPY if src.name == dst.name else Op.BY_DTYPES.get((src.name, dst.name), -1)
            if op != expected or itemsize != src.itemsize:
                raise InternalError(
                    f"{where}: {self.spec.tensors[t].name!r} goes from {src.name} to {dst.name} with op {op} and itemsize "
                    f"{itemsize}, expected {expected} and {src.itemsize}"
                )

    def _is_at(
        self, tensor: Int64Array, coordinate: Int64Array, live: Int64Array, at: Int64Array
    ) -> npt.NDArray[np.bool_]:
        """[n] whether some box of the map has the element at live element `at`."""
        boxes, num_live = self.boxes, len(self.source_map.live)
        keys = boxes.tensor * num_live + boxes.live
        first = np.searchsorted(keys, tensor * num_live + live, side="left")
        lengths = np.searchsorted(keys, tensor * num_live + live, side="right") - first
        good = np.zeros(len(tensor), dtype=bool)
        ends = np.cumsum(lengths)
        begin = 0
        while begin < len(tensor):
            done = int(ends[begin - 1]) if begin else 0
            stop = max(begin + 1, int(np.searchsorted(ends, done + _PAIRS, side="right")))
            point = np.repeat(np.arange(begin, stop), lengths[begin:stop])
            nth = np.arange(len(point)) - np.repeat(ends[begin:stop] - lengths[begin:stop] - done, lengths[begin:stop])
            box = first[point] + nth
            inside, place = np.ones(len(point), dtype=bool), boxes.live_start[box].copy()
            for dim in range(min(coordinate.shape[1], boxes.num_dims)):
                digit, off = np.divmod(coordinate[point, dim] - boxes.start[box, dim], boxes.step[box, dim])
                inside &= (off == 0) & (digit >= 0) & (digit < boxes.count[box, dim])
                place += digit * boxes.live_stride[box, dim]
            good[point[inside & (place == at[point])]] = True
            begin = stop
        return good
