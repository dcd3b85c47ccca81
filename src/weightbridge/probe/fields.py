"""A live tensor's memory as two-dimensional fields, the form in which the probe takes differences. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from weightbridge.errors import ProbeError
from weightbridge.layout.source_map import LiveTensor

__all__ = ["Field", "fields_of", "memory_order"]

_FLAT_COLS = 4096
_MIN_COLS = 64
_MAX_COLS = 1 << 16


def memory_order(live: LiveTensor) -> list[tuple[int, int]]:
    """(extent, stride) of the tensor's distinct elements, outermost in memory first, adjacent dims merged.

    Dims of extent 1 and of stride 0 (expanded) name no further memory and are dropped. Raises ProbeError when
    elements overlap otherwise.
    """
    dims = sorted(
        ((n, s) for n, s in zip(live.shape, live.strides, strict=True) if n > 1 and s > 0), key=lambda d: (-d[1], -d[0])
    )
    merged: list[tuple[int, int]] = []
    for extent, stride in dims:
        if merged and merged[-1][1] == extent * stride:
            merged[-1] = (merged[-1][0] * extent, stride)
        else:
            merged.append((extent, stride))
    reach = 0
    for extent, stride in reversed(merged):
        if stride <= reach:
            raise ProbeError(
                f"live tensor {live.name!r} of shape {live.shape} and strides {live.strides} has elements that share memory; "
                "give the tensor it is a view of",
                tensor=live.name,
            )
        reach += (extent - 1) * stride
    return merged


@dataclass(frozen=True, slots=True)
class Field:
    """A two-dimensional view of part of a live tensor: element (r, c) lies at storage offset
    start + r * row_stride + c * col_stride, in elements from the tensor's first one."""

    start: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def dense(self) -> bool:
        """Rows follow each other as columns do, so that positions row * cols + col are an affine image of memory."""
        return self.rows == 1 or self.row_stride == self.cols * self.col_stride


def fields_of(live: LiveTensor) -> tuple[Field, ...]:
    """Fields that tile the distinct elements of a live tensor, in memory order.

    The columns follow the innermost live dim where it is long enough, since copies mostly end at its ends.
    """
    if live.numel == 0:
        return ()
    dims = memory_order(live)
    if not dims:
        return (Field(0, 1, 1, 0, 1),)
    if len(dims) == 1:
        return _dense_fields(0, dims[0][0], dims[0][1], _row_length(live))
    (rows, row_stride), (cols, col_stride) = dims[-2:]
    starts = [0]
    for extent, stride in dims[:-2]:
        starts = [start + i * stride for start in starts for i in range(extent)]
    if cols <= _MAX_COLS:
        return tuple(Field(start, rows, cols, row_stride, col_stride) for start in starts)
    return tuple(
        piece
        for start in starts
        for r in range(rows)
        for piece in _dense_fields(start + r * row_stride, cols, col_stride, cols)
    )


def _row_length(live: LiveTensor) -> int:
    """Columns for a tensor without gaps: its innermost dims in memory, merged until a row is worth vectorising."""
    extents = [n for n, s in sorted(zip(live.shape, live.strides, strict=True), key=lambda d: d[1]) if n > 1 and s > 0]
    length = 1
    for extent in extents:
        if length >= _MIN_COLS:
            break
        length *= extent
    return length


def _dense_fields(start: int, numel: int, stride: int, row_length: int) -> tuple[Field, ...]:
    """[n / row_length, row_length], or rows of 4096 with a remainder where that does not suit."""
    if numel <= _FLAT_COLS and row_length == numel:
        return (Field(start, 1, numel, numel * stride, stride),)
    if row_length < numel and row_length <= _MAX_COLS and numel % row_length == 0:
        return (Field(start, numel // row_length, row_length, row_length * stride, stride),)
    rows, rest = divmod(numel, _FLAT_COLS)
    pieces = [Field(start, rows, _FLAT_COLS, _FLAT_COLS * stride, stride)] if rows else []
    if rest:
        pieces.append(Field(start + rows * _FLAT_COLS * stride, 1, rest, rest * stride, stride))
    return tuple(pieces)
