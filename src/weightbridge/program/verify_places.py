"""Part of the program's verifier: where the elements of atoms lie in one worker's memory, from its source map.

The two properties that make "each atom's bytes once at each of its places" mean "each live element once" are proven here,
once for each distinct map: the atoms tile the map's boxes, and no two boxes of the map share a live element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InternalError
from weightbridge.geometry import first_overlap, inside
from weightbridge.layout.boxes import BoxTable, expand
from weightbridge.layout.source_map import SourceMap
from weightbridge.program.program import Op
from weightbridge.program.verify_tables import AtomIndex

__all__ = ["Places", "check_disjoint_atoms", "check_disjoint_boxes", "check_tiled", "places_of"]

Int64Array = npt.NDArray[np.int64]
_PAIRS_AT_ONCE = 1 << 20
_FEW = 16  # boxes of one tensor that are simply all compared


@dataclass(frozen=True, kw_only=True)
class Places:
    """Every pair p of an atom and a box of the map that contains it, sorted by (atom, live, lowest byte).

    atom, box, live: [p]. low: [p] lowest live byte. base: [p] live byte of the atom's first element. extent, pitch, step:
    [p, A] the atom's digits, outermost first, neighbours merged where memory is one run across both: the element with
    row-major number x within the atom lies at base + sum over a of (x // pitch_a % extent_a) * step_a bytes.
    op, itemsize: [p] of a descriptor that moves it. first: [num_atoms + 1] pairs of each atom. boxes: of the map.
    """

    atom: Int64Array
    box: Int64Array
    live: Int64Array
    low: Int64Array
    base: Int64Array
    extent: Int64Array
    pitch: Int64Array
    step: Int64Array
    op: Int64Array
    itemsize: Int64Array
    first: Int64Array
    boxes: BoxTable
    live_itemsize: Int64Array


def places_of(
    index: AtomIndex, spec: CheckpointSpec, source_map: SourceMap, atoms: Int64Array, *, to_live: bool
) -> Places:
    """The places of `atoms` (ascending ids) in a map.

    Boxes of tensors that are constants of the spec are none: nothing travels for them.
    """
    boxes = _travelling(expand(source_map, spec, index.count.shape[1]), spec)
    atom, box = _containing(index, atoms, boxes)
    size = np.array([t.dtype.itemsize for t in source_map.live] or [1], dtype=np.int64)
    live = boxes.live[box]
    turns = index.step[atom] // boxes.step[box]  # steps of the box per step of the atom; the digit of a count of 1 is 0
    step = turns * boxes.live_stride[box] * size[live][:, None]
    at = (index.start[atom] - boxes.start[box]) // boxes.step[box]
    base = (boxes.live_start[box] + (at * boxes.live_stride[box]).sum(axis=1)) * size[live]
    low = base + np.minimum((index.count[atom] - 1) * step, 0).sum(axis=1)
    order = np.lexsort((low, live, atom))
    atom, box, live, low, base = (c[order] for c in (atom, box, live, low, base))
    extent, step = _merged(index.count[atom], step[order])
    inner = np.cumprod(extent[:, ::-1], axis=1)[:, ::-1]
    op, itemsize = _ops(index, source_map, atom, live, to_live=to_live)
    return Places(
        atom=atom, box=box, live=live, low=low, base=base, extent=extent, pitch=inner // extent, step=step, op=op,
        itemsize=itemsize, first=np.searchsorted(atom, np.arange(len(index.begin) + 1)), boxes=boxes, live_itemsize=size,
    )  # fmt: skip


def _travelling(boxes: BoxTable, spec: CheckpointSpec) -> BoxTable:
    if not spec.constants:
        return boxes
    moves = np.array([t.name not in spec.constants for t in spec.tensors], dtype=bool)[boxes.tensor]
    columns = ("tensor", "live", "start", "step", "count", "live_start", "live_stride")
    return BoxTable(**{c: getattr(boxes, c)[moves] for c in columns})


def _merged(count: Int64Array, step: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Drop digits of extent 1 and join neighbours that memory runs through; as few columns as the longest row needs."""
    n, dims = count.shape
    extent, stride = np.ones((n, dims), dtype=np.int64), np.zeros((n, dims), dtype=np.int64)
    rows, at = np.arange(n), np.full(n, dims - 1)
    for d in range(dims - 1, -1, -1):
        own, pitch = count[:, d], step[:, d]
        inner, inner_step = extent[rows, at], stride[rows, at]
        used = own > 1
        joins = used & (inner > 1) & (pitch == inner_step * inner)
        apart = used & ~joins
        at = np.where(apart & (inner > 1), at - 1, at)
        extent[rows, at] = np.where(joins, inner * own, np.where(apart, own, inner))
        stride[rows, at] = np.where(apart, pitch, inner_step)
    width = max(1, int((extent > 1).any(axis=0).sum()))
    return extent[:, dims - width :], stride[:, dims - width :]


def _ops(
    index: AtomIndex, source_map: SourceMap, atom: Int64Array, live: Int64Array, *, to_live: bool
) -> tuple[Int64Array, Int64Array]:
    """[n] op and itemsize of a copy between these; op -1 where no kernel has the cast."""
    number: dict[str, int] = {}
    held = np.array([number.setdefault(t.dtype.name, len(number)) for t in source_map.live] or [0], dtype=np.int64)[
        live
    ]
    kept = index.dtype[atom]
    pairs = [[(a.name, b) if to_live else (b, a.name) for b in number] for a in index.dtypes]
    table = [[Op.COPY if src == dst else Op.BY_DTYPES.get((src, dst), -1) for src, dst in row] for row in pairs]
    size = [[dtype_named(src).itemsize for src, _ in row] for row in pairs]
    width = len(index.dtypes), len(number)
    return (
        np.array(table, dtype=np.int64).reshape(width)[kept, held],
        np.array(size, dtype=np.int64).reshape(width)[kept, held],
    )


# --- which boxes contain an atom --------------------------------------------------------------------------------------


def _containing(index: AtomIndex, atoms: Int64Array, boxes: BoxTable) -> tuple[Int64Array, Int64Array]:
    """All (atom, box) with the atom whole in the box. Candidates are the boxes of its tensor that can have its first element.

    Where a tensor has many boxes (an irregular layout), they are kept by where they start in the dim in which most start
    apart, those of one power of two of length together: a box that has an element starts at most that length before it.
    """
    num_boxes = np.bincount(boxes.tensor, minlength=int(index.tensor.max(initial=0)) + 1)
    sweep = _sweep_dims(boxes, len(num_boxes), crowded=bool((num_boxes > _FEW).any()))
    start = boxes.start[np.arange(len(boxes)), sweep[boxes.tensor]]
    length = (boxes.count - 1)[np.arange(len(boxes)), sweep[boxes.tensor]]
    length = length * boxes.step[np.arange(len(boxes)), sweep[boxes.tensor]] + 1
    level = np.where(num_boxes[boxes.tensor] > _FEW, np.frexp(length.astype(np.float64))[1], 62).astype(np.int64)
    span = int(start.max(initial=0)) + int(index.start.max(initial=0)) + 2
    wanted = index.tensor[atoms]
    at = index.start[atoms, sweep[wanted]]
    found = [np.zeros((2, 0), dtype=np.int64)]
    for level_ in np.unique(level).tolist():
        members = np.flatnonzero(level == level_)
        key = boxes.tensor[members] * span + start[members]
        order = np.argsort(key, kind="stable")
        key, members = key[order], members[order]
        reach = span if level_ >= 62 else min(1 << level_, span)
        first = np.searchsorted(key, wanted * span + np.maximum(at - reach + 1, 0), side="left")
        last = np.searchsorted(key, wanted * span + (span - 1 if level_ >= 62 else at), side="right")
        for who, nth in _pairs(first, last - first):
            box = members[nth]
            a = (index.start[atoms[who]], index.step[atoms[who]], index.count[atoms[who]])
            within = inside(a, (boxes.start[box], boxes.step[box], boxes.count[box]))
            found.append(np.stack([atoms[who[within]], box[within]]))
    atom, box = np.concatenate(found, axis=1)
    return atom, box


def _sweep_dims(boxes: BoxTable, num_tensors: int, *, crowded: bool) -> Int64Array:
    """[num_tensors] the dim in which most of a tensor's boxes start apart; dim 0 of all where no tensor is crowded."""
    most, sweep = np.zeros((2, num_tensors), dtype=np.int64)
    for d in range(boxes.num_dims if crowded else 0):
        order = np.lexsort((boxes.start[:, d], boxes.tensor))
        tensor, start = boxes.tensor[order], boxes.start[order, d]
        fresh = np.ones(len(order), dtype=bool)
        fresh[1:] = (np.diff(tensor) != 0) | (np.diff(start) != 0)
        distinct = np.bincount(tensor[fresh], minlength=num_tensors)
        sweep[distinct > most] = d
        most = np.maximum(most, distinct)
    return sweep


def _pairs(first: Int64Array, lengths: Int64Array) -> Iterator[tuple[Int64Array, Int64Array]]:
    """(i, first[i] + j) for all j < lengths[i], some at a time."""
    ends, begin = np.cumsum(lengths), 0
    while begin < len(first):
        done = int(ends[begin - 1]) if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, done + _PAIRS_AT_ONCE, side="right")))
        who = np.repeat(np.arange(begin, stop), lengths[begin:stop])
        yield who, first[who] + np.arange(len(who)) - (ends - lengths)[who] + done
        begin = stop


# --- the two properties -----------------------------------------------------------------------------------------------


def check_disjoint_atoms(index: AtomIndex, spec: CheckpointSpec) -> None:
    """No two atoms share an element. Tensors whose atoms look alike are checked once."""
    order = np.argsort(index.tensor, kind="stable")
    columns = np.concatenate([index.start, index.step, index.count], axis=1)[order]
    dims = index.start.shape[1]
    edges = np.searchsorted(index.tensor[order], np.arange(len(spec.tensors) + 1))
    known: set[bytes] = set()
    for t in np.flatnonzero(np.diff(edges) > 1).tolist():
        rows = columns[edges[t] : edges[t + 1]]
        if (key := rows.tobytes()) in known:
            continue
        known.add(key)
        if (pair := first_overlap((rows[:, :dims], rows[:, dims : 2 * dims], rows[:, 2 * dims :]))) is not None:
            a, b = (int(order[edges[t] + i]) for i in pair)
            raise InternalError(f"atoms {a} and {b} of {spec.tensors[t].name!r} share elements; verify the plan first")


def check_tiled(
    index: AtomIndex, places: Places, atoms: Int64Array, spec: CheckpointSpec, source_map: SourceMap, name: str
) -> None:
    """The atoms that the plan gives a worker fill its boxes to the last element. Atoms are disjoint."""
    lost = np.flatnonzero(np.diff(places.first)[atoms] == 0)
    if len(lost):
        raise InternalError(f"program of {name!r}: its source map has no place for atom {atoms[lost[0]]} of the plan")
    boxes = places.boxes
    filled = np.bincount(places.box, weights=index.numel[places.atom], minlength=len(boxes))
    short = np.flatnonzero(filled != boxes.count.prod(axis=1))
    if len(short):
        i = int(short[0])
        raise InternalError(
            f"program of {name!r}: {int(boxes.count[i].prod() - filled[i])} elements of live tensor "
            f"{source_map.live[int(boxes.live[i])].name!r}, which hold {spec.tensors[int(boxes.tensor[i])].name!r}, are never "
            "assembled under this plan"
        )


def check_disjoint_boxes(boxes: BoxTable, source_map: SourceMap, name: str) -> None:
    """No live element lies in two boxes, or twice in one, or outside its tensor.

    Boxes whose spans do not meet are disjoint. Those that interleave are looked at as boxes in the digits of their strides,
    or, where strides are no such digits, marked in a map of the elements they span.
    """
    reach = (boxes.count - 1) * boxes.live_stride
    low = boxes.live_start + np.minimum(reach, 0).sum(axis=1)
    high = boxes.live_start + np.maximum(reach, 0).sum(axis=1)
    spans = np.array([t.span_numel for t in source_map.live] or [0], dtype=np.int64)
    out = np.flatnonzero((low < 0) | (high >= spans[boxes.live])) if len(boxes) else np.zeros(0, dtype=np.int64)
    if len(out):
        live = source_map.live[int(boxes.live[out[0]])].name
        raise InternalError(f"program of {name!r}: its source map leaves live tensor {live!r}; probe again")
    base = np.cumsum(spans) - spans
    order = np.lexsort((low, boxes.live))
    begin, end = (base[boxes.live] + low)[order], (base[boxes.live] + high)[order]
    apart = np.ones(len(order), dtype=bool)
    apart[1:] = begin[1:] > np.maximum.accumulate(end)[:-1]
    groups = np.flatnonzero(np.append(apart, True))
    alone = np.diff(groups) == 1
    sure = _nested(boxes.count, boxes.live_stride)[order[groups[:-1]]] & alone
    known: set[bytes] = set()
    for i in np.flatnonzero(~sure).tolist():
        rows = order[groups[i] : groups[i + 1]]
        shape = np.concatenate(
            [(low[rows] - low[rows[0]])[:, None], boxes.count[rows], boxes.live_stride[rows]], axis=1
        )
        if (key := shape.tobytes()) in known:
            continue
        known.add(key)
        if _share_elements(low[rows] - low[rows[0]], boxes.count[rows], np.abs(boxes.live_stride[rows])):
            live = source_map.live[int(boxes.live[rows[0]])].name
            raise InternalError(f"program of {name!r}: an element of live tensor {live!r} is assembled twice")


def _nested(count: Int64Array, stride: Int64Array) -> npt.NDArray[np.bool_]:
    """[n] whether each axis steps over all that the narrower ones reach, so that no element comes twice."""
    stride = np.where(count > 1, np.abs(stride), 0)
    order = np.argsort(stride, axis=1)
    stride, count = np.take_along_axis(stride, order, axis=1), np.take_along_axis(count, order, axis=1)
    reach = np.cumsum((count - 1) * stride, axis=1)
    before = reach - (count - 1) * stride
    found: npt.NDArray[np.bool_] = ((stride > before) | (count == 1)).all(axis=1)
    return found


def _share_elements(low: Int64Array, count: Int64Array, stride: Int64Array) -> bool:
    """Whether an element lies in two of these boxes, or twice in one. Strides are positive or of count 1."""
    if ((stride == 0) & (count > 1)).any():
        return True
    pitches = np.unique(np.append(stride[count > 1], 1))[::-1]
    size = pitches[:-1] // pitches[1:]  # of each digit but the first
    if (size * pitches[1:] == pitches[:-1]).all():
        digit = low[:, None] // pitches
        digit[:, 1:] %= size
        length = np.ones_like(digit)
        fits = True
        for d, pitch in enumerate(pitches.tolist()):
            own = (stride == pitch) & (count > 1)
            length[:, d] = np.where(own, count, 1).prod(axis=1)
            fits &= bool((own.sum(axis=1) <= 1).all())
            fits &= d == 0 or bool((digit[:, d] + length[:, d] <= size[d - 1]).all())
        if fits:
            return first_overlap((digit, np.ones_like(digit), length)) is not None
    marks = np.zeros(int((low + ((count - 1) * stride).sum(axis=1)).max()) + 1, dtype=np.uint8)
    for at, shape, strides in zip(low.tolist(), count.tolist(), stride.tolist(), strict=True):
        np.ndarray(shape, dtype=np.uint8, buffer=marks, offset=at, strides=strides)[...] = 1
    return int(np.count_nonzero(marks)) != int(count.prod(axis=1).sum())
