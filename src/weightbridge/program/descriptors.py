"""From ranges of class streams to strided descriptors, in bulk: arrays in, arrays out, no Python object per box.

A class stream holds atoms end to end, each row-major in checkpoint coordinates. A part of a route covers whole atoms and,
at its ends, runs of atoms. An atom and one of its places in memory make an affine copy; axes that are one run on both
sides are merged before anything is cut. An atom that is dense in memory has one axis left, and any run of it is one
descriptor; with N axes left a run falls into at most 2 N - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import CoverageError, InternalError, UnsupportedError
from weightbridge.layout.boxes import BoxTable
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import AtomTable
from weightbridge.program.places import column_of, match_boxes
from weightbridge.program.program import DESCRIPTOR, MAX_AXES, Op
from weightbridge.program.slots import consecutive

__all__ = ["Elements", "Live", "Runs", "StreamIndex", "descriptors"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Elements:
    """Dtypes of a checkpoint's tensors, as arrays. names: dtypes that occur. dtype: [num_tensors] position in `names`.

    itemsize: [num_tensors] bytes.
    """

    names: tuple[str, ...]
    dtype: Int64Array
    itemsize: Int64Array

    @classmethod
    def of(cls, spec: CheckpointSpec) -> Elements:
        number: dict[str, int] = {}
        dtype = [number.setdefault(t.dtype.name, len(number)) for t in spec.tensors]
        itemsize = [t.dtype.itemsize for t in spec.tensors]
        return cls(
            names=tuple(number), dtype=np.array(dtype, dtype=np.int64), itemsize=np.array(itemsize, dtype=np.int64)
        )


@dataclass(frozen=True, kw_only=True)
class StreamIndex:
    """Every class stream laid behind the one before, so that one search finds the atoms of any range.

    class_base: [num_classes + 1] first global stream byte of each class. start, end: [n] of each atom. itemsize: [n].
    """

    class_base: Int64Array
    start: Int64Array
    end: Int64Array
    itemsize: Int64Array

    @classmethod
    def of(cls, atoms: AtomTable, class_nbytes: Int64Array, itemsizes: Int64Array) -> StreamIndex:
        """itemsizes: [num_tensors] bytes of a checkpoint element."""
        base = np.concatenate([[0], np.cumsum(class_nbytes)]).astype(np.int64)
        itemsize = itemsizes[atoms.tensor]
        start = base[atoms.class_id] + atoms.stream_offset
        end = start + atoms.count.prod(axis=1) * itemsize
        return cls(class_base=base, start=start, end=end, itemsize=itemsize)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Row-major runs of atoms, by the range they lie in, then by position. Row i: elements begin[i] to end[i] of atom[i].

    key: [n] range. offset: [n] bytes from the range's begin. first: [num_ranges + 1] where the runs of each range begin.
    """

    key: Int64Array
    atom: Int64Array
    begin: Int64Array
    end: Int64Array
    offset: Int64Array
    first: Int64Array

    @classmethod
    def of(cls, index: StreamIndex, lo: Int64Array, hi: Int64Array) -> Runs:
        """The runs in non-empty ranges [lo, hi) of global stream bytes. InternalError when one is cut inside an element."""
        first_atom = np.searchsorted(index.end, lo, side="right")
        lengths = np.maximum(np.searchsorted(index.start, hi, side="left") - first_atom, 0)
        key = np.repeat(np.arange(len(lo), dtype=np.int64), lengths)
        atom = consecutive(first_atom, lengths)
        start, size = index.start[atom], index.itemsize[atom]
        low, high = np.maximum(lo[key], start), np.minimum(hi[key], index.end[atom])
        offset = low - lo[key]
        low -= start
        high -= start
        begin, end = low // size, high // size
        if (begin * size != low).any() or (end * size != high).any():
            raise InternalError("the plan cuts a class stream inside an element; its alignment does not fit its dtypes")
        first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return cls(key=key, atom=atom, begin=begin, end=end, offset=offset, first=first)


@dataclass(frozen=True, kw_only=True)
class Live:
    """Affine copies between atoms in a slot and their places in one worker's memory, by atom.

    first: [num_wanted + 1] places of each wanted atom; `to_live` False takes one of each only. live: [n] position in
    SourceMap.live. offset: [n] live bytes of the atom's first element. count, slot_stride, live_stride: [n, A] merged
    axes, outermost first, strides in bytes; leading ones may have count 1. op, itemsize: [n] as in DESCRIPTOR.
    slot_itemsize: [n].
    """

    to_live: bool
    first: Int64Array
    live: Int64Array
    offset: Int64Array
    count: Int64Array
    slot_stride: Int64Array
    live_stride: Int64Array
    op: Int64Array
    itemsize: Int64Array
    slot_itemsize: Int64Array

    @classmethod
    def of(
        cls, atoms: AtomTable, wanted: Int64Array, boxes: BoxTable, spec: CheckpointSpec, elements: Elements,
        source_map: SourceMap, *, to_live: bool,
    ) -> Live:  # fmt: skip
        """to_live False: one live place of each atom -> slot (pack; a holder may have several, any of them will do).
        to_live True: slot -> every live place (assemble).

        Raises CoverageError when the map has no place for an atom, UnsupportedError for a cast that no kernel has.
        """
        position, box = match_boxes(atoms, wanted, boxes)
        num_places = np.bincount(position, minlength=len(wanted))
        if (num_places == 0).any():
            name = spec.tensors[int(atoms.tensor[wanted[np.argmin(num_places)]])].name
            raise CoverageError(
                f"the worker's map has no place for elements of {name!r} that the plan gives it", tensor=name
            )
        if not to_live:
            kept = np.flatnonzero(np.diff(position, prepend=-1))
            position, box, num_places = position[kept], box[kept], np.ones_like(num_places)
        atom = wanted[position]
        live = boxes.live[box]
        op, slot_size, live_size = _casts(atoms.tensor[atom], live, spec, elements, source_map, to_live)
        offset, *axes = _axes(atoms, atom, boxes, box, slot_size, live_size)
        count, slot_stride, live_stride = _merge_axes(*axes)
        return cls(
            to_live=to_live, first=np.concatenate([[0], np.cumsum(num_places)]).astype(np.int64), live=live,
            offset=offset, count=count, slot_stride=slot_stride, live_stride=live_stride, op=op,
            itemsize=slot_size if to_live else live_size, slot_itemsize=slot_size,
        )  # fmt: skip


def _axes(
    atoms: AtomTable, atom: Int64Array, boxes: BoxTable, box: Int64Array, slot_size: Int64Array, live_size: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Of each (atom, box) pair: live offset of the first element, and [n, D] count, slot and live stride; all in bytes."""
    count = atoms.count[atom]
    live_at = boxes.live_start[box]
    slot_stride, live_stride = np.zeros_like(count), np.zeros_like(count)
    dense = slot_size.copy()
    for dim in range(count.shape[1] - 1, -1, -1):
        start, step = atoms.start[atom, dim], atoms.step[atom, dim]
        box_step, per_step = column_of(boxes.step, box, dim, 1), column_of(boxes.live_stride, box, dim, 0)
        live_at = live_at + (start - column_of(boxes.start, box, dim, 0)) // box_step * per_step
        live_stride[:, dim] = step // box_step * per_step * live_size
        slot_stride[:, dim] = dense
        dense = dense * count[:, dim]
    return live_at * live_size, count, slot_stride, live_stride


def _casts(
    tensor: Int64Array, live: Int64Array, spec: CheckpointSpec, elements: Elements, source_map: SourceMap, to_live: bool
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """[n] op, checkpoint item size and live item size; one Python step per distinct pair of dtypes."""
    dtypes = tuple(dict.fromkeys([*elements.names, *(t.dtype.name for t in source_map.live)]))
    number = {name: i for i, name in enumerate(dtypes)}
    slot_code = elements.dtype[tensor]
    live_code = np.array([number[t.dtype.name] for t in source_map.live] or [0], dtype=np.int64)[live]
    pairs, inverse = np.unique(slot_code * len(dtypes) + live_code, return_inverse=True)
    ops: list[int] = []
    for pair in pairs.tolist():
        names = dtypes[pair // len(dtypes)], dtypes[pair % len(dtypes)]
        src, dst = names if to_live else names[::-1]
        if src != dst and (src, dst) not in Op.BY_DTYPES:
            at = int(np.argmax(inverse == len(ops)))
            raise UnsupportedError(
                f"tensor {spec.tensors[int(tensor[at])].name!r} needs a cast from {src} to {dst}, which no kernel has; "
                f"keep it as {names[0]} in memory, or as one of {sorted(Op.BY_DTYPES)}"
            )
        ops.append(Op.COPY if src == dst else Op.BY_DTYPES[src, dst])
    live_sizes = np.array([t.dtype.itemsize for t in source_map.live] or [0], dtype=np.int64)
    return np.array(ops, dtype=np.int64)[inverse], elements.itemsize[tensor], live_sizes[live]


def _merge_axes(count: Int64Array, src: Int64Array, dst: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Move count-1 axes outwards and merge neighbours that are one run on both sides; all arrays [n, D]."""
    count, src, dst = count.copy(), src.copy(), dst.copy()
    order = np.argsort(count > 1, axis=1, kind="stable")
    count, src, dst = (np.take_along_axis(a, order, axis=1) for a in (count, src, dst))
    for axis in range(count.shape[1] - 1, 0, -1):
        for _ in range(axis):
            inner = count[:, axis]
            run = (count[:, axis - 1] > 1) & (inner > 1)
            run &= (src[:, axis - 1] == src[:, axis] * inner) & (dst[:, axis - 1] == dst[:, axis] * inner)
            if not run.any():
                break
            count[run, axis] *= count[run, axis - 1]
            for outer in range(axis - 1, 0, -1):
                for a in (count, src, dst):
                    a[run, outer] = a[run, outer - 1]
            count[run, 0], src[run, 0], dst[run, 0] = 1, 0, 0
    src[count == 1], dst[count == 1] = 0, 0
    return count, src, dst


def descriptors(
    live: Live, position: Int64Array, begin: Int64Array, end: Int64Array, offset: Int64Array
) -> tuple[npt.NDArray[np.void], Int64Array]:
    """Descriptors of runs, in the order of the runs, and [n] the run of each.

    position: [m] of each run's atom among the wanted ones of `live`. begin, end: [m] elements, begin < end. offset: [m]
    slot bytes of the run's first element. The buffer on the slot's side is left 0 for the caller. UnsupportedError when a
    copy needs more axes than a descriptor has.
    """
    num_places = live.first[position + 1] - live.first[position]
    run = np.repeat(np.arange(len(position), dtype=np.int64), num_places)
    place = consecutive(live.first[position], num_places)
    whole = (live.count[:, :-1] == 1).all(axis=1)[place]  # one axis at most: a run stays a run
    uncut, cut = np.flatnonzero(whole), np.flatnonzero(~whole)
    pieces = _cut(live.count[place[cut]], begin[run[cut]], end[run[cut]])
    num_pieces = whole.astype(np.int64)
    num_pieces[cut] = np.bincount(pieces.row, minlength=len(cut))
    first = np.cumsum(num_pieces) - num_pieces
    table = np.zeros(int(num_pieces.sum()), dtype=DESCRIPTOR)
    table["count"] = 1
    low = begin[run[uncut]]
    _fill(table, first[uncut], live, place[uncut], low[:, None], (end[run[uncut]] - low)[:, None], offset[run[uncut]])
    row = cut[pieces.row]
    inside = (pieces.flat - begin[run[row]]) * live.slot_itemsize[place[row]]
    nth = consecutive(np.zeros(len(cut), dtype=np.int64), num_pieces[cut])
    _fill(table, first[row] + nth, live, place[row], pieces.start, pieces.count, offset[run[row]] + inside)
    return table, np.repeat(run, num_pieces)


def _fill(
    table: npt.NDArray[np.void], at: Int64Array, live: Live, place: Int64Array, start: Int64Array, count: Int64Array,
    slot_offset: Int64Array,
) -> None:  # fmt: skip
    """Write rows `at`. start, count: [n, A'] of the innermost A' axes of each place, the others being at 0 and of count 1."""
    if not len(at):
        return
    slot, memory = ("src", "dst") if live.to_live else ("dst", "src")
    num_axes = count.shape[1]
    if (count[:, : max(0, num_axes - MAX_AXES)] > 1).any():
        raise UnsupportedError(
            f"a copy between slot and live tensor needs more than {MAX_AXES} axes; none is supported"
        )
    offset = live.offset[place]
    for back in range(1, num_axes + 1):
        per_step, length = live.live_stride[place, -back], count[:, -back]
        offset = offset + start[:, -back] * per_step
        if back <= MAX_AXES:
            table["count"][at, -back] = length
            table[f"{slot}_stride"][at, -back] = np.where(length > 1, live.slot_stride[place, -back], 0)
            table[f"{memory}_stride"][at, -back] = np.where(length > 1, per_step, 0)
    table[f"{memory}_buffer"][at] = live.live[place]
    table[f"{slot}_offset"][at], table[f"{memory}_offset"][at] = slot_offset, offset
    table["op"][at], table["itemsize"][at] = live.op[place], live.itemsize[place]


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """Boxes, by the range they are cut from, then by position. row: [n]. flat: [n] row-major index of the first element.

    start, count: [n, A].
    """

    row: Int64Array
    flat: Int64Array
    start: Int64Array
    count: Int64Array


def _cut(counts: Int64Array, begin: Int64Array, end: Int64Array) -> _Pieces:
    """Cut row-major element ranges [begin, end) of boxes of extents counts [n, A] into boxes, from the innermost axis outwards.

    At each axis a range either stays within one row, or gives up an incomplete first and last row and goes on in whole rows.
    Heads of inner axes come before those of outer ones, tails after them: their rank says so.
    """
    num_axes = counts.shape[1]
    found: list[tuple[Int64Array, Int64Array, Int64Array, int, int]] = []  # row, first, length, axis, rank
    row, x, y = np.arange(len(counts), dtype=np.int64), begin, end
    for axis in range(num_axes - 1, -1, -1):
        n = counts[row, axis]
        done = (x // n == (y - 1) // n) if axis else np.ones(len(row), dtype=bool)
        found.append((row[done], x[done], (y - x)[done], axis, 0))
        row, x, y, n = row[~done], x[~done], y[~done], n[~done]
        head, tail = x % n != 0, y % n != 0
        found.append((row[head], x[head], (n - x % n)[head], axis, -1 - axis))
        found.append((row[tail], (y - y % n)[tail], (y % n)[tail], axis, axis + 1))
        x, y = -(-x // n), y // n
        going = y > x
        row, x, y = row[going], x[going], y[going]
    row, at, length = (np.concatenate([f[i] for f in found]) for i in range(3))
    axis_of, rank = (np.repeat([f[i] for f in found], [len(f[0]) for f in found]) for i in (3, 4))
    order = np.lexsort((rank, row))
    row, at, length, axis_of = row[order], at[order], length[order], axis_of[order]
    start, count = np.zeros((2, len(row), num_axes), dtype=np.int64)
    rest, unit = at.copy(), np.ones(len(row), dtype=np.int64)  # unit: elements in one step along the piece's own axis
    for axis in range(num_axes - 1, -1, -1):
        n, inner = counts[row, axis], axis_of < axis
        unit = np.where(inner, unit * n, unit)
        start[:, axis] = np.where(inner, 0, rest % n)
        count[:, axis] = np.where(inner, n, np.where(axis_of == axis, length, 1))
        rest = np.where(inner, rest, rest // n)
    return _Pieces(row=row, flat=at * unit, start=start, count=count)
