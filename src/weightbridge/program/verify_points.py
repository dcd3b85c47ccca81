"""Part of the program's verifier: elements of descriptors one by one, for small jobs and for what axes cannot prove."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightbridge.program.verify_places import Places
from weightbridge.program.verify_tables import AtomIndex

__all__ = ["Moves", "first_wrong_point"]

Int64Array = npt.NDArray[np.int64]
_POINTS_AT_ONCE = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Descriptors as walks over elements of an atom on one side and over live bytes on the other.

    count, turns, stride: [m, A], turns in elements of the atom, stride in live bytes. element, offset: [m] of the first
    one. live: [m] position in SourceMap.live. atom, place: [m] which atom, and the place in `Places` it should be at.
    """

    count: Int64Array
    turns: Int64Array
    stride: Int64Array
    element: Int64Array
    offset: Int64Array
    live: Int64Array
    atom: Int64Array
    place: Int64Array


def first_wrong_point(
    moves: Moves, index: AtomIndex, places: Places, *, limit: int
) -> tuple[int, int, tuple[int, ...], int] | None:
    """(descriptor, element within its atom, its checkpoint coordinates, live byte) of an element that is not where its
    place has it; None if all are. Of each descriptor the first `limit` elements are looked at.
    """
    numel = np.minimum(moves.count.prod(axis=1), limit)
    begin = 0
    while begin < len(numel):
        ends = np.cumsum(numel[begin:])
        stop = begin + max(1, int(np.searchsorted(ends, _POINTS_AT_ONCE, side="right")))
        lengths = numel[begin:stop]
        row = np.repeat(np.arange(begin, stop), lengths)
        rest = np.arange(len(row)) - np.repeat(ends[: stop - begin] - lengths, lengths)
        x, address = moves.element[row], moves.offset[row]
        for axis in range(moves.count.shape[1] - 1, -1, -1):
            rest, at = np.divmod(rest, moves.count[row, axis])
            x, address = x + at * moves.turns[row, axis], address + at * moves.stride[row, axis]
        coordinates = _coordinates(index, moves.atom[row], x)
        place = moves.place[row]
        good = (address == _address(places, place, coordinates)) & (moves.live[row] == places.live[place])
        if not good.all():
            j = int(np.argmin(good))
            return int(row[j]), int(x[j]), tuple(coordinates[j].tolist()), int(address[j])
        begin = stop
    return None


def _coordinates(index: AtomIndex, atom: Int64Array, number: Int64Array) -> Int64Array:
    """[n, D] checkpoint coordinates of elements of atoms, by their row-major numbers."""
    rest, found = number, np.empty((len(number), index.count.shape[1]), dtype=np.int64)
    for dim in range(found.shape[1] - 1, -1, -1):
        rest, digit = np.divmod(rest, index.count[atom, dim])
        found[:, dim] = index.start[atom, dim] + digit * index.step[atom, dim]
    return found


def _address(places: Places, place: Int64Array, coordinates: Int64Array) -> Int64Array:
    """[n] live bytes at which a place's box has these coordinates, -1 where it does not have them."""
    boxes, box = places.boxes, places.box[place]
    steps, odd = np.divmod(coordinates - boxes.start[box], boxes.step[box])
    inside = ((odd == 0) & (steps >= 0) & (steps < boxes.count[box])).all(axis=1)
    at = boxes.live_start[box] + (boxes.live_stride[box] * steps).sum(axis=1)
    return np.where(inside, at * places.live_itemsize[places.live[place]], -1)
