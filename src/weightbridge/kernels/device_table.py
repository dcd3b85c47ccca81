"""A descriptor table as a GPU kernel wants it: absolute addresses, few axes, wide words, equal pieces. NumPy only.

`device_rows` gives int64 [N, ROW_WIDTH], one row per descriptor that moves anything:

    source address, destination address, kind, elements, counts [7], source strides [7], destination strides [7]

Strides are bytes; axes are outermost first and unused ones, of count 1, come first. A kind below FIRST_CAST copies elements
of 2 ** kind bytes; FIRST_CAST + op casts, and UNALIGNED more than that casts elements that do not lie at multiples of their
size, which a GPU has to read and write byte by byte. `pieces_of` gives int64 [P, 2], (row, first element): what one program
of the grid moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightbridge.kernels.base import Buffer
from weightbridge.kernels.bounds import DESTINATION_ITEMSIZE
from weightbridge.program.program import MAX_AXES, Op

__all__ = ["AXES", "FIRST_CAST", "MAX_WORD_KIND", "ROW_WIDTH", "UNALIGNED", "device_rows", "pieces_of"]

AXES = MAX_AXES + 1
"""The axes of a descriptor, and below them the bytes of an element of a copy."""

ROW_WIDTH = 4 + 3 * AXES
MAX_WORD_KIND = 3
FIRST_CAST = 16
UNALIGNED = 32

_Ints = npt.NDArray[np.int64]


def device_rows(table: npt.NDArray[np.void], sources: Sequence[Buffer], destinations: Sequence[Buffer]) -> _Ints:
    """The rows of a table that `bounds.check_table` accepted. Vectorised: no Python per row."""
    table = table[(table["count"] != 0).all(axis=1)]
    rows = np.zeros((len(table), ROW_WIDTH), dtype=np.int64)
    if not len(table):
        return rows
    copies = table["op"] == Op.COPY
    ones = np.ones((len(table), 1), dtype=np.int64)
    count = np.concatenate([table["count"], np.where(copies, table["itemsize"], 1)[:, None]], axis=1)
    source = np.concatenate([table["src_stride"], ones], axis=1)
    target = np.concatenate([table["dst_stride"], ones], axis=1)
    first_source = _addresses(sources)[table["src_buffer"]] + table["src_offset"]
    first_target = _addresses(destinations)[table["dst_buffer"]] + table["dst_offset"]

    backwards = (
        target < 0
    )  # walked from the other end, so that neighbours in the destination are neighbours in the grid
    last = np.where(backwards, count - 1, 0)
    first_source, first_target = first_source + (source * last).sum(axis=1), first_target + (target * last).sum(axis=1)
    source, target = np.where(backwards, -source, source), np.abs(target)

    count, source, target = _merged(*_sorted(count, source, target))
    kind = np.where(copies, 0, FIRST_CAST + table["op"]).astype(np.int64)
    target_size = np.ones(len(table), dtype=np.int64)
    for op, size in DESTINATION_ITEMSIZE.items():
        target_size[table["op"] == op] = size
    unaligned = (
        _bits(first_source, count, source) % table["itemsize"] | _bits(first_target, count, target) % target_size
    )
    kind += np.where(~copies & (unaligned != 0), UNALIGNED, 0)
    _widen(kind, copies, first_source, first_target, count, source, target)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = first_source, first_target, kind, count.prod(axis=1)
    rows[:, 4:] = np.concatenate([count, source, target], axis=1)
    return rows


def pieces_of(rows: _Ints, block_numel: int) -> _Ints:
    """Each row cut into runs of `block_numel` elements, the last one shorter."""
    each = -(-rows[:, 3] // block_numel)
    row = np.repeat(np.arange(len(rows), dtype=np.int64), each)
    before = np.repeat(np.cumsum(each) - each, each)
    return np.stack([row, (np.arange(len(row), dtype=np.int64) - before) * block_numel], axis=1)


def _addresses(buffers: Sequence[Buffer]) -> _Ints:
    # User space ends far below 2 ** 63, so an address fits.
    return np.array([b.address for b in buffers], dtype=np.int64)


def _sorted(count: _Ints, source: _Ints, target: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """Axes of count 1 first, then by destination stride, largest first: the innermost axis is written in order."""
    key = np.where(count == 1, np.iinfo(np.int64).min, -target)
    order = np.argsort(key, axis=1, kind="stable")
    return tuple(np.take_along_axis(a, order, axis=1) for a in (count, source, target))  # type: ignore[return-value]


def _merged(count: _Ints, source: _Ints, target: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """Each axis that continues the one inside it at both ends is joined to it."""
    count, source, target = count.copy(), source.copy(), target.copy()
    for outer in range(AXES - 2, -1, -1):
        inner = outer + 1
        joined = count[:, outer] > 1
        joined &= source[:, outer] == source[:, inner] * count[:, inner]
        joined &= target[:, outer] == target[:, inner] * count[:, inner]
        # The joined axis takes the outer place; the inner one, then of count 1, is sorted away below.
        count[:, outer] = np.where(joined, count[:, outer] * count[:, inner], count[:, outer])
        source[:, outer] = np.where(joined, source[:, inner], source[:, outer])
        target[:, outer] = np.where(joined, target[:, inner], target[:, outer])
        count[:, inner] = np.where(joined, 1, count[:, inner])
    return _sorted(count, source, target)


def _bits(first: _Ints, count: _Ints, stride: _Ints) -> _Ints:
    """A power of two divides this when it divides every place of a row."""
    steps: _Ints = np.bitwise_or.reduce(np.where(count > 1, stride, 0), axis=1)
    return first | steps


def _widen(
    kind: _Ints, copies: npt.NDArray[np.bool_], first_source: _Ints, first_target: _Ints,
    count: _Ints, source: _Ints, target: _Ints,
) -> None:  # fmt: skip
    """Copies whose innermost axis is a run of bytes move the widest words that all their places are multiples of."""
    run = copies & (count[:, -1] > 1) & (source[:, -1] == 1) & (target[:, -1] == 1)
    outer = np.s_[:, :-1]
    bits = count[:, -1] | _bits(first_source, count[outer], source[outer])
    bits |= _bits(first_target, count[outer], target[outer])
    for power in range(1, MAX_WORD_KIND + 1):
        kind[:] = np.where(run & (bits % (1 << power) == 0), power, kind)
    width = np.where(run, 1 << np.where(run, kind, 0), 1)
    count[:, -1] //= width
    source[:, -1], target[:, -1] = np.where(run, width, source[:, -1]), np.where(run, width, target[:, -1])
