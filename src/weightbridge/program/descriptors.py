"""From ranges of class streams to strided descriptors, in bulk: arrays in, arrays out, no Python object per box.

A class stream holds atoms end to end, each row-major in checkpoint coordinates. A range of it (one route's part of one
round) covers whole atoms and, at its ends, parts of atoms. A part of an atom is a row-major range of an N-dim box and
falls into at most 2 N - 1 boxes; each box is one affine copy between the slot and every live place of the atom.
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
from weightbridge.program.program import DESCRIPTOR, MAX_AXES, Op

__all__ = ["Pieces", "StreamIndex", "descriptors", "pieces_of"]

Int64Array = npt.NDArray[np.int64]
_PAIR_CHUNK = 1 << 20


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
class Pieces:
    """Boxes of atoms that lie row-major and dense in a slot. Row i: atom[i], its digits start[i] .. start[i] + count[i].

    start, count: [n, D] in positions within the atom. key: [n] which range it came from. offset: [n] slot bytes.
    """

    key: Int64Array
    atom: Int64Array
    start: Int64Array
    count: Int64Array
    offset: Int64Array


def _repeat(lengths: Int64Array) -> tuple[Int64Array, Int64Array]:
    """For groups of the given lengths: [sum] group of each member, and its position within the group."""
    group = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    first = np.cumsum(lengths) - lengths
    return group, np.arange(len(group), dtype=np.int64) - first[group]


def pieces_of(atoms: AtomTable, index: StreamIndex, lo: Int64Array, hi: Int64Array, offset: Int64Array) -> Pieces:
    """Boxes of the non-empty ranges [lo, hi) of global stream bytes, range i lying at slot byte offset[i].

    Raises InternalError when a range begins or ends inside an element.
    """
    first = np.searchsorted(index.end, lo, side="right")
    last = np.searchsorted(index.start, hi, side="left")
    key, nth = _repeat(np.maximum(last - first, 0))
    atom = first[key] + nth
    begin = np.maximum(lo[key], index.start[atom])
    end = np.minimum(hi[key], index.end[atom])
    size = index.itemsize[atom]
    if ((begin - index.start[atom]) % size).any() or ((end - index.start[atom]) % size).any():
        raise InternalError("the plan cuts a class stream inside an element; its alignment does not fit its dtypes")
    x, y = (begin - index.start[atom]) // size, (end - index.start[atom]) // size
    origin = offset[key] + (begin - lo[key]) - x * size  # where the atom's element 0 would lie
    return _split_ranges(atoms, index, key, atom, x, y, origin)


def _split_ranges(
    atoms: AtomTable,
    index: StreamIndex,
    key: Int64Array,
    atom: Int64Array,
    x: Int64Array,
    y: Int64Array,
    origin: Int64Array,
) -> Pieces:
    """Cut the row-major element ranges [x, y) of atoms into boxes, from the innermost dim outwards.

    At each dim a range either stays within one row, or gives up an incomplete first and last row and goes on in whole rows.
    """
    counts = atoms.count
    num_dims = counts.shape[1]
    out: list[tuple[Int64Array, Int64Array, Int64Array, int]] = []  # (row, first, length, dim)
    row = np.flatnonzero(y > x)
    x, y = x[row], y[row]
    for dim in range(num_dims - 1, -1, -1):
        n = counts[atom[row], dim]
        done = (x // n == (y - 1) // n) if dim else np.ones(len(row), dtype=bool)
        out.append((row[done], x[done], (y - x)[done], dim))
        row, x, y, n = row[~done], x[~done], y[~done], n[~done]
        head = x % n != 0
        out.append((row[head], x[head], (n - x % n)[head], dim))
        tail = y % n != 0
        out.append((row[tail], (y - y % n)[tail], (y % n)[tail], dim))
        x, y = -(-x // n), y // n
        going = y > x
        row, x, y = row[going], x[going], y[going]
    rows = np.concatenate([o[0] for o in out])
    at = np.concatenate([o[1] for o in out])
    length = np.concatenate([o[2] for o in out])
    level = np.concatenate([np.full(len(o[0]), o[3], dtype=np.int64) for o in out])
    start = np.zeros((len(rows), num_dims), dtype=np.int64)
    count = counts[atom[rows]].copy()
    rest = at.copy()
    unit = np.ones(len(rows), dtype=np.int64)  # elements in one step along `level`
    for dim in range(num_dims - 1, -1, -1):
        n = counts[atom[rows], dim]
        above, here = level > dim, level == dim
        unit = np.where(level < dim, unit * n, unit)
        digit = rest % n
        start[:, dim] = np.where(level < dim, 0, digit)
        count[:, dim] = np.where(here, length, np.where(above, 1, n))
        rest = np.where(level < dim, rest, rest // n)
    return Pieces(
        key=key[rows], atom=atom[rows], start=start, count=count,
        offset=origin[rows] + at * unit * index.itemsize[atom[rows]],
    )  # fmt: skip


def _match_boxes(atoms: AtomTable, wanted: Int64Array, boxes: BoxTable) -> tuple[Int64Array, Int64Array]:
    """Pairs (position in `wanted`, box) such that the box contains the atom, sorted by the first."""
    order = np.argsort(boxes.tensor, kind="stable")
    tensors = boxes.tensor[order]
    tensor = atoms.tensor[wanted]
    first = np.searchsorted(tensors, tensor, side="left")
    lengths = np.searchsorted(tensors, tensor, side="right") - first
    ends = np.cumsum(lengths)
    found: list[tuple[Int64Array, Int64Array]] = []
    begin = 0
    while begin < len(wanted):  # a chunk of atoms at a time bounds the memory of the join
        done = ends[begin - 1] if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, done + _PAIR_CHUNK, side="right")))
        group, nth = _repeat(lengths[begin:stop])
        group += begin
        box = order[first[group] + nth]
        inside = _contains(atoms, wanted[group], boxes, box)
        found.append((group[inside], box[inside]))
        begin = stop
    if not found:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found])


def _contains(atoms: AtomTable, atom: Int64Array, boxes: BoxTable, box: Int64Array) -> npt.NDArray[np.bool_]:
    """[n] whether every element of atom[i] is an element of box[i]."""
    inside = np.ones(len(atom), dtype=bool)
    for dim in range(max(atoms.count.shape[1], boxes.count.shape[1])):
        start, step, count = (
            _dim(atoms.start, atom, dim, 0),
            _dim(atoms.step, atom, dim, 1),
            _dim(atoms.count, atom, dim, 1),
        )
        b_start, b_step, b_count = (
            _dim(boxes.start, box, dim, 0),
            _dim(boxes.step, box, dim, 1),
            _dim(boxes.count, box, dim, 1),
        )
        b_step = np.maximum(b_step, 1)
        inside &= (start >= b_start) & (start + (count - 1) * step <= b_start + (b_count - 1) * b_step)
        inside &= ((start - b_start) % b_step == 0) & ((count == 1) | (step % b_step == 0))
    return inside


def _dim(table: Int64Array, rows: Int64Array, dim: int, default: int) -> Int64Array:
    """Column `dim` of the given rows, or `default` where the table has no such dim."""
    if dim < table.shape[1]:
        column: Int64Array = table[rows, dim]
        return column
    return np.full(len(rows), default, dtype=np.int64)


def descriptors(
    pieces: Pieces, atoms: AtomTable, boxes: BoxTable, spec: CheckpointSpec, source_map: SourceMap, *, to_live: bool
) -> tuple[npt.NDArray[np.void], Int64Array]:
    """One descriptor per piece and live place, and [n] the piece's key for each.

    to_live False: one live place of each atom -> slot (pack; a holder may have several, any of them will do).
    to_live True: slot -> every live place (assemble). The buffer on the slot's side is left 0 for the caller.
    Raises CoverageError when the map has no place for an atom, UnsupportedError for a cast that no kernel has.
    """
    wanted, inverse = np.unique(pieces.atom, return_inverse=True)
    group, box = _match_boxes(atoms, wanted, boxes)
    num_places = np.bincount(group, minlength=len(wanted))
    if (num_places == 0).any():
        name = spec.tensors[int(atoms.tensor[wanted[np.argmin(num_places)]])].name
        raise CoverageError(
            f"the worker's map has no place for elements of {name!r} that the plan gives it", tensor=name
        )
    first = np.cumsum(num_places) - num_places
    if to_live:
        piece, nth = _repeat(num_places[inverse])
        box = box[first[inverse[piece]] + nth]
    else:
        piece, box = np.arange(len(inverse), dtype=np.int64), box[first[inverse]]
    return _affine(pieces, piece, atoms, boxes, box, spec, source_map, to_live), pieces.key[piece]


def _affine(
    pieces: Pieces, piece: Int64Array, atoms: AtomTable, boxes: BoxTable, box: Int64Array,
    spec: CheckpointSpec, source_map: SourceMap, to_live: bool,
) -> npt.NDArray[np.void]:  # fmt: skip
    """Offsets and strides in bytes of each (piece, box) pair on both sides."""
    atom = pieces.atom[piece]
    op, slot_size, live_size = _casts(atoms.tensor[atom], boxes.live[box], spec, source_map, to_live)
    num_dims = atoms.count.shape[1]
    count = pieces.count[piece]
    live_at = boxes.live_start[box].copy()
    slot_stride, live_stride = np.zeros_like(count), np.zeros_like(count)
    dense = slot_size.copy()
    for dim in range(num_dims - 1, -1, -1):
        step = np.maximum(_dim(boxes.step, box, dim, 1), 1)
        per_step = _dim(boxes.live_stride, box, dim, 0)
        at = atoms.start[atom, dim] + pieces.start[piece, dim] * atoms.step[atom, dim]
        live_at += (at - _dim(boxes.start, box, dim, 0)) // step * per_step
        live_stride[:, dim] = atoms.step[atom, dim] // step * per_step * live_size
        slot_stride[:, dim] = dense
        dense = dense * atoms.count[atom, dim]
    sides = (pieces.offset[piece], slot_stride), (live_at * live_size, live_stride)
    (src, src_stride), (dst, dst_stride) = sides if to_live else sides[::-1]
    count, src_stride, dst_stride = _merge_axes(count, src_stride, dst_stride)
    table = np.zeros(len(piece), dtype=DESCRIPTOR)
    table["dst_buffer" if to_live else "src_buffer"] = boxes.live[box]
    table["src_offset"], table["dst_offset"], table["op"] = src, dst, op
    table["itemsize"] = slot_size if to_live else live_size
    width = min(MAX_AXES, count.shape[1])
    table["count"] = 1
    table["count"][:, MAX_AXES - width :] = count[:, count.shape[1] - width :]
    table["src_stride"][:, MAX_AXES - width :] = src_stride[:, count.shape[1] - width :]
    table["dst_stride"][:, MAX_AXES - width :] = dst_stride[:, count.shape[1] - width :]
    if (count[:, : count.shape[1] - width] > 1).any():
        raise UnsupportedError(
            f"a copy between slot and live tensor needs more than {MAX_AXES} axes; none is supported"
        )
    return table


def _casts(
    tensor: Int64Array, live: Int64Array, spec: CheckpointSpec, source_map: SourceMap, to_live: bool
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """[n] op, checkpoint item size and live item size; one Python step per distinct pair of dtypes."""
    dtypes = sorted({t.dtype.name for t in spec.tensors} | {t.dtype.name for t in source_map.live})
    number = {name: i for i, name in enumerate(dtypes)}
    slot_code = np.array([number[t.dtype.name] for t in spec.tensors], dtype=np.int64)[tensor]
    live_code = (
        np.array([number[t.dtype.name] for t in source_map.live], dtype=np.int64)[live] if len(live) else slot_code
    )
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
    slot_sizes = np.array([t.dtype.itemsize for t in spec.tensors], dtype=np.int64)
    live_sizes = np.array([t.dtype.itemsize for t in source_map.live], dtype=np.int64)
    return np.array(ops, dtype=np.int64)[inverse], slot_sizes[tensor], live_sizes[live]


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
