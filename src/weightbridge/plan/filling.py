"""Laying streams into workers' room: who takes which part, with few cuts and nobody over his share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Crumbs", "Item", "cut_points", "fill"]

_DUST = 1 / 256
"""A part shorter than this share of what it is cut from is left where it was, if `Crumbs.exact_bytes` allows: fewer,
larger messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """nbytes: of a stream. wanted: the workers that should take it; empty where anybody may. liked: those to try first then."""

    nbytes: int
    wanted: tuple[int, ...] = ()
    liked: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crumbs:
    """What is too little to cut off. alignment: bytes, where streams may be cut. whole_bytes: an item no longer than this
    is never cut. exact_bytes: no longer parts are left where they should not be."""

    alignment: int
    whole_bytes: int
    exact_bytes: float

    def of(self, nbytes: int) -> float:
        """Longest part of an item that is not worth a cut."""
        return max(float(self.alignment), min(nbytes * _DUST, self.exact_bytes))


def fill(items: Sequence[Item], room: dict[int, float], crumbs: Crumbs) -> list[list[tuple[int, int]]]:
    """Per item the (worker, bytes) that make it up, in the order of its stream. `room` is used up.

    First the items that only some should take, the choosiest first, into the room of those; then everything else, with those
    who are liked while they have room and end to end over the workers in the order of `room`. All items are laid, also where
    the room is too little.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in items]
    full = dict(room)
    rest: list[tuple[int, int]] = []
    choosy = [i for i, item in enumerate(items) if item.wanted]
    for i in sorted(choosy, key=lambda i: (len(items[i].wanted), -items[i].nbytes, i)):
        item, left = items[i], items[i].nbytes
        if left <= crumbs.whole_bytes:
            _put(found[i], room, max(item.wanted, key=lambda w: (room.get(w, 0.0), -w)), left)
            continue
        while left:
            # a worker that has something already, before a fresh one: few items meet in each
            able = [w for w in item.wanted if room.get(w, 0.0) > crumbs.of(left)]
            if not able and left <= crumbs.of(item.nbytes) * len(item.wanted):  # what was too little to fill them up
                _put(found[i], room, max(item.wanted, key=lambda w: (room.get(w, 0.0), -w)), left)
                break
            if not able:
                rest.append((i, left))
                break
            left -= _lay(found[i], room, min(able, key=lambda w: (room[w] >= full[w], w)), left, crumbs)
    for i, item in enumerate(items):
        if not item.wanted:
            left = item.nbytes
            while left > crumbs.whole_bytes and (able := [w for w in item.liked if room.get(w, 0.0) > crumbs.of(left)]):
                left -= _lay(found[i], room, able[0], left, crumbs)
            rest += [(i, left)] if left else []
    rest.sort()
    order, at = list(room), 0
    for i, left in rest:
        if items[i].nbytes <= crumbs.whole_bytes:
            _put(found[i], room, max(room, key=lambda w: (room[w], -w)), left)
            continue
        while left:
            while at < len(order) and room[order[at]] <= crumbs.of(left):
                _carry(room, order[at : at + 2], crumbs.of(left))
                at += 1
            if at == len(order):  # only crumbs of room are left
                _put(found[i], room, max(room, key=lambda w: (room[w], -w)), left)
                break
            left -= _lay(found[i], room, order[at], left, crumbs)
    return found


def _lay(found: list[tuple[int, int]], room: dict[int, float], worker: int, nbytes: int, crumbs: Crumbs) -> int:
    """Give the worker what it has room for, all of it if only a crumb would be left over. Returns how much."""
    if nbytes - room[worker] > crumbs.of(nbytes):
        nbytes = int(room[worker]) // crumbs.alignment * crumbs.alignment
    _put(found, room, worker, nbytes)
    return nbytes


def _carry(room: dict[int, float], workers: list[int], crumb: float) -> None:
    """What is too little or too much in the first worker by a crumb is made up for in the next, so that crumbs cancel out."""
    if len(workers) > 1 and abs(room[workers[0]]) <= crumb:
        room[workers[1]] += room[workers[0]]
        room[workers[0]] = 0.0


def _put(found: list[tuple[int, int]], room: dict[int, float], worker: int, nbytes: int) -> None:
    room[worker] = room.get(worker, 0.0) - nbytes
    if found and found[-1][0] == worker:
        found[-1] = (worker, found[-1][1] + nbytes)
    else:
        found.append((worker, nbytes))


def cut_points(sizes: Iterable[float], nbytes: int, alignment: int) -> list[int]:
    """Aligned ends of the parts of a stream of `nbytes`, in proportion to `sizes`."""
    sizes = [*sizes]
    ends, at, total = [], 0.0, sum(sizes)
    for size in sizes:
        at += size
        ends.append(min(round(at / total * nbytes / alignment) * alignment, nbytes))
    last = max(i for i, size in enumerate(sizes) if size > 0)
    return [*ends[:last], *[nbytes] * (len(ends) - last)]
