"""From sparse second differences to the rectangles of one field on which the index is affine.

Design: join the passes' residues at the union of their positions (an absent entry is residue 0), integrate modulo each
p_k, combine by the Chinese remainder theorem; never lift before the end, so wrap-around, cancellation and long strides do
no harm. Rows between two rows with entries are alike up to a slope, so only rows with entries are looked at, all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.probe.difference import SparseEntries

__all__ = ["Rectangles", "rectangles"]

Int64Array = npt.NDArray[np.int64]

_CHUNK_NUMEL = 1 << 18
"""Rows with entries x columns with entries integrated at once."""


class Rectangles(NamedTuple):
    """Rows [row, row + height) x columns [col, col + width) of a field, on which, with 0 for "no checkpoint element",
    index + 1 == value + (r - row) * row_slope + (c - col) * col_slope modulo the product of the moduli.

    They tile the field except for parts where index + 1 is 0.
    """

    row: Int64Array
    height: Int64Array
    col: Int64Array
    width: Int64Array
    value: Int64Array
    row_slope: Int64Array
    col_slope: Int64Array

    def pick(self, chosen: npt.NDArray[np.bool_] | Int64Array) -> Rectangles:
        return Rectangles(*(column[chosen] for column in self))

    @classmethod
    def join(cls, parts: Sequence[Rectangles]) -> Rectangles:
        if not parts:
            z = np.zeros(0, dtype=np.int64)
            return cls(z, z, z, z, z, z, z)
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def rectangles(passes: Sequence[SparseEntries], moduli: Sequence[int], rows: int, cols: int) -> Rectangles:
    """All rectangles of a field, in no particular order, row pieces merged downwards. Exact for any field. Pure."""
    where, residues = _union(passes, cols)
    if not len(where):
        return Rectangles.join([])
    entry_row, entry_col = where // cols, where % cols
    dirty, row_position = np.unique(entry_row, return_inverse=True)
    knots, knot_position = np.unique(entry_col, return_inverse=True)
    gaps = np.diff(dirty, prepend=dirty[0])
    heights = np.diff(np.append(dirty, rows))
    step = max(1, _CHUNK_NUMEL // len(knots))
    # State carried between chunks of rows: second column differences of the last row, and of its row slope.
    state = [(np.zeros(len(knots), np.int64), np.zeros(len(knots), np.int64)) for _ in moduli]
    found: list[Rectangles] = []
    bounds = np.searchsorted(row_position, np.arange(0, len(dirty) + step, step))
    for chunk, (lo, hi) in enumerate(pairwise(bounds.tolist())):
        here = slice(chunk * step, min((chunk + 1) * step, len(dirty)))
        if here.start >= here.stop:
            break
        levels, slopes = [], []
        for k, p in enumerate(moduli):
            table = np.zeros((here.stop - here.start, len(knots)), dtype=np.int64)
            table[row_position[lo:hi] - here.start, knot_position[lo:hi]] = residues[k][lo:hi]
            level, slope = _integrate_rows(table, gaps[here], p, state[k])
            state[k] = (level[-1], slope[-1])
            levels.append(level)
            slopes.append(slope)
        found.append(_segments(levels, slopes, moduli, dirty[here], heights[here], knots, cols))
    return _merge_downwards(Rectangles.join(found), prod(moduli))


def _union(passes: Sequence[SparseEntries], cols: int) -> tuple[Int64Array, list[Int64Array]]:
    """Sorted flat positions met in any pass, and per pass the residues there."""
    flat = [entries.row * cols + entries.col for entries in passes]
    where = np.unique(np.concatenate(flat))
    residues = []
    for positions, entries in zip(flat, passes, strict=True):
        dense = np.zeros(len(where), dtype=np.int64)
        dense[np.searchsorted(where, positions)] = entries.residue
        residues.append(dense)
    return where, residues


def _integrate_rows(
    table: Int64Array, gaps: Int64Array, p: int, before: tuple[Int64Array, Int64Array]
) -> tuple[Int64Array, Int64Array]:
    """Per row with entries: the row's own column differences ("level") and those of its slope to the next row.

    slope_t = slope_{t-1} + e_t;  level_t = level_{t-1} + gap_t * slope_{t-1} + e_t.
    """
    level_before, slope_before = before
    slope = (np.cumsum(table, axis=0) + slope_before) % p
    earlier = np.concatenate([slope_before[None], slope[:-1]])
    level = (np.cumsum((gaps[:, None] * earlier) % p + table, axis=0) + level_before) % p
    return level, slope


def _integrate_cols(differences: Int64Array, knots: Int64Array, p: int) -> tuple[Int64Array, Int64Array]:
    """Per knot: the value at its column, and the slope that holds from there to the next knot."""
    slope = np.cumsum(differences, axis=1) % p
    earlier = np.concatenate([np.zeros((len(slope), 1), np.int64), slope[:, :-1]], axis=1)
    gaps = np.diff(knots, prepend=knots[0])
    value = np.cumsum((gaps * earlier) % p + differences, axis=1) % p
    return value, slope


def _combine(residues: Sequence[Int64Array], moduli: Sequence[int]) -> Int64Array:
    """Chinese remainder theorem, by mixed radix so that nothing leaves 64 bits."""
    total = residues[0] % moduli[0]
    radix = moduli[0]
    for residue, p in zip(residues[1:], moduli[1:], strict=True):
        digit = ((residue - total) % p) * pow(radix, -1, p) % p
        total = total + digit * radix
        radix *= p
    return total


def _segments(
    levels: list[Int64Array],
    slopes: list[Int64Array],
    moduli: Sequence[int],
    dirty: Int64Array,
    heights: Int64Array,
    knots: Int64Array,
    cols: int,
) -> Rectangles:
    """Rectangles of the bands that begin at rows with entries. Bilinear leftovers are taken apart into rows."""
    used = np.zeros(levels[0].shape, dtype=bool)
    tall = (heights > 1)[:, None]
    for level, slope in zip(levels, slopes, strict=True):
        used |= (level != 0) | (tall & (slope != 0))
    band, knot = np.nonzero(used)
    if not len(band):
        return Rectangles.join([])
    columns: list[list[Int64Array]] = [[], [], [], []]
    for level, slope, p in zip(levels, slopes, moduli, strict=True):
        for place, array in enumerate((*_integrate_cols(level, knots, p), *_integrate_cols(slope, knots, p))):
            columns[place].append(array[band, knot])
    value, col_slope, row_slope, twist = (_combine(column, moduli) for column in columns)
    col = knots[knot]
    same_band = band[1:] == band[:-1]
    width = np.diff(np.append(col, cols))
    width[:-1][~same_band] = cols - col[:-1][~same_band]
    # A change of slope needs one column to get to the new value: a single column before a wider piece is its first one.
    absorbed = np.zeros(len(col), dtype=bool)
    absorbed[:-1] = same_band & (width[:-1] == 1) & (width[1:] > 1)
    first = np.flatnonzero(absorbed)
    value[first + 1], row_slope[first + 1] = value[first], row_slope[first]
    col[first + 1] -= 1
    width[first + 1] += 1
    height = heights[band]
    row_slope[height == 1] = 0
    col_slope[width == 1] = 0
    rects = Rectangles(dirty[band], height, col, width, value, row_slope, col_slope)
    twisted = (twist != 0) & (height > 1) & (width > 1) & ~absorbed
    plain = rects.pick(~absorbed & ~twisted)
    if not twisted.any():
        return plain
    return Rectangles.join([plain, _untwist(rects.pick(twisted), twist[twisted], prod(moduli))])


def _untwist(rects: Rectangles, twist: Int64Array, product: int) -> Rectangles:
    """Rectangles whose column slope changes from row to row, as one rectangle a row."""
    parts = []
    for i in range(len(rects.row)):
        n = int(rects.height[i])
        step = np.arange(n, dtype=np.int64)
        ones = np.ones(n, dtype=np.int64)
        parts.append(
            Rectangles(
                rects.row[i] + step,
                ones,
                rects.col[i] * ones,
                rects.width[i] * ones,
                _progression(int(rects.value[i]), int(rects.row_slope[i]), n, product),
                0 * ones,
                _progression(int(rects.col_slope[i]), int(twist[i]), n, product),
            )
        )
    return Rectangles.join(parts)


def _progression(first: int, step: int, num: int, product: int) -> Int64Array:
    return np.array([(first + step * i) % product for i in range(num)], dtype=np.int64)


def _merge_downwards(rects: Rectangles, product: int) -> Rectangles:
    """Join pieces of equal columns that follow each other downwards on one slope."""
    if len(rects.row) < 2:
        return rects
    order = np.lexsort((rects.row, rects.col_slope, rects.width, rects.col))
    rects = rects.pick(order)
    row, height, col, width, value, row_slope, col_slope = rects
    follows = (
        (col[1:] == col[:-1])
        & (width[1:] == width[:-1])
        & (col_slope[1:] == col_slope[:-1])
        & (row[1:] == row[:-1] + height[:-1])
    )
    # height * slope may pass 2**63: reduce in Python integers only where it can.
    last = (value[:-1] + _mulmod(row_slope[:-1], height[:-1] - 1, product)) % product
    link = chain_links(follows, height, row_slope, (value[1:] - last) % product)
    start = np.flatnonzero(np.concatenate([[True], ~link]))
    end = np.append(start[1:], len(row)) - 1
    step = np.where(height > 1, row_slope, 0)
    between = np.zeros(len(row), dtype=np.int64)
    between[:-1] = (value[1:] - last) % product
    total = row[end] + height[end] - row[start]
    slope = np.where(start == end, step[start], between[start])
    return Rectangles(row[start], total, col[start], width[start], value[start], slope, col_slope[start])


def chain_links(
    follows: npt.NDArray[np.bool_], length: Int64Array, slope: Int64Array, between: Int64Array
) -> npt.NDArray[np.bool_]:
    """Which of n pieces in line join the next one: [n - 1] booleans.

    Piece i has `length[i]` elements of step `slope[i]` (no step when it has one); `between[i]` is the step from its last
    element to the first of piece i + 1, which it can only join where `follows[i]`. Two single elements join only within
    a progression of three, as two points are always in line; and a single element that could go both ways goes one.
    """
    n = len(length)
    single = length == 1
    fits = follows & (single[:-1] | (slope[:-1] == between)) & (single[1:] | (slope[1:] == between))
    wide = ~single[:-1] | ~single[1:]
    if n > 2:
        steady = fits[:-1] & fits[1:] & (between[:-1] == between[1:])
        wide[:-1] |= steady
        wide[1:] |= steady
    link: npt.NDArray[np.bool_] = fits & wide
    if n > 2:
        # A single piece between two links of different steps would bend the chain.
        bend = single[1:-1] & link[:-1] & link[1:] & (between[:-1] != between[1:])
        link[:-1] &= ~bend
    return link


def _mulmod(a: Int64Array, b: Int64Array, product: int) -> Int64Array:
    """a * b mod product for non-negative a < product and b < 2**40, without overflow."""
    if product < 1 << 31:
        # b may exceed the product: reduce it first.
        result: Int64Array = a * (b % product) % product
        return result
    if not len(a) or int(a.max()) * int(b.max()) < 1 << 62:
        return a * b % product
    return np.array([x * y % product for x, y in zip(a.tolist(), b.tolist(), strict=True)], dtype=np.int64)
