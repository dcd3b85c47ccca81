"""From "these rows of these checkpoint tensors, one after another" to source maps, in NumPy.

Sharding rules describe a live tensor as a sequence of `Piece`s. A `Block` is a group of live tensors with names relative
to some prefix (one layer's attention, say); it is made once and placed under as many prefixes as there are such layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.dtypes import DType
from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.deployments.architecture import TensorForm
from weightbridge.errors import LayoutError
from weightbridge.layout.source_map import Constant, CopyTable, LiveTensor, SourceMap

__all__ = ["Block", "BlockBuilder", "Mapper", "Piece", "Placed", "cut", "even_share"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """`num_rows` rows of a checkpoint tensor from `row` on. A tensor of one dim has rows of one element."""

    tensor: str
    row: int
    num_rows: int


def cut(pieces: Iterable[Piece], begin: int, end: int) -> list[Piece]:
    """Rows [begin, end) of the pieces laid end to end; what lies beyond their end is left out."""
    found, at = [], 0
    for piece in pieces:
        low, high = max(begin, at), min(end, at + piece.num_rows)
        if low < high:
            found.append(Piece(piece.tensor, piece.row + low - at, high - low))
        at += piece.num_rows
    return found


def even_share(size: int, rank: int, degree: int, what: str) -> tuple[int, int]:
    """[begin, end) of a rank's equal share of `size`. Raises LayoutError when it does not divide."""
    if size % degree:
        raise LayoutError(f"{what}: {size} is not divisible by {degree}; choose a degree that divides it")
    share = size // degree
    return rank * share, (rank + 1) * share


@dataclass(frozen=True, slots=True)
class _Form:
    """A live tensor without its prefix."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    parameter: bool


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Live tensors under one prefix, and which checkpoint rows they hold.

    sources: checkpoint names relative to a prefix of their own. rows: [n, 7], one copy each: position in `sources`,
    position in `live`, src_start, live_start, rows, pitch of the checkpoint tensor, columns.
    padding: (position in `live`, first element, elements) that hold zero.
    """

    live: tuple[_Form, ...]
    sources: tuple[str, ...]
    rows: Int64Array
    padding: tuple[tuple[int, int, int], ...]


class BlockBuilder:
    """Collects live tensors into a Block. forms: checkpoint name (relative) -> form."""

    def __init__(self, forms: Mapping[str, TensorForm]) -> None:
        self._forms = forms
        self._live: list[_Form] = []
        self._sources: dict[str, int] = {}
        self._rows: list[tuple[int, ...]] = []
        self._padding: list[tuple[int, int, int]] = []

    def whole(self, name: str, tensor: str, *, parameter: bool = True) -> None:
        """A live tensor that is the checkpoint tensor."""
        form = self._forms[tensor]
        self.put(name, [Piece(tensor, 0, form.shape[0])], shape=form.shape, parameter=parameter)

    def put(
        self,
        name: str,
        pieces: Sequence[Piece],
        *,
        columns: tuple[int, int] | None = None,
        shape: tuple[int, ...] | None = None,
        parameter: bool = True,
        rows: int | None = None,
        like: str | None = None,
    ) -> None:
        """A dense live tensor of the pieces' rows laid one after another.

        columns: [begin, end) of every row, all by default. shape: of the live tensor where it is not (rows, columns).
        rows: number of rows, zeros following the pieces. like: a checkpoint tensor of the same dtype and columns, needed
        where there are no pieces.
        """
        first = self._forms[like if like is not None else pieces[0].tensor]
        width = prod(first.shape[1:])
        low, high = columns if columns is not None else (0, width)
        live, at = len(self._live), 0
        for piece in pieces:
            source = self._sources.setdefault(piece.tensor, len(self._sources))
            pitch = prod(self._forms[piece.tensor].shape[1:])
            self._rows.append((source, live, piece.row * pitch + low, at, piece.num_rows, pitch, high - low))
            at += piece.num_rows * (high - low)
        numel = at if rows is None else rows * (high - low)
        if numel > at:
            self._padding.append((live, at, numel - at))
        if shape is None:
            shape = (numel // (high - low), *((high - low,) if len(first.shape) > 1 else ()))
        if prod(shape) != numel:
            raise LayoutError(
                f"live tensor {name!r}: its pieces have {numel} elements, shape {shape} has {prod(shape)}"
            )
        self._live.append(_Form(name, shape, first.dtype, parameter))

    def block(self) -> Block:
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 7)
        return Block(tuple(self._live), tuple(self._sources), rows, tuple(self._padding))


@dataclass(frozen=True, slots=True)
class Placed:
    """A block with the prefix of its live tensors and that of its checkpoint tensors."""

    block: Block
    live_prefix: str
    source_prefix: str


class Mapper:
    """Makes SourceMaps of placed blocks; workers that hold the same tensors share the tuple that describes them."""

    def __init__(self, spec: CheckpointSpec) -> None:
        self._spec = spec
        self._live: dict[tuple[tuple[tuple[_Form, ...], str], ...], tuple[LiveTensor, ...]] = {}
        self._positions: dict[tuple[tuple[str, ...], str], Int64Array] = {}

    def source_map(self, parts: Sequence[Placed]) -> SourceMap:
        """The map of a worker that holds `parts`, in this order."""
        live = self._live_tensors(parts)
        offsets = np.cumsum([0, *(len(p.block.live) for p in parts)]).tolist()
        rows = np.concatenate([p.block.rows for p in parts])
        tensor = np.concatenate([self._position(p)[p.block.rows[:, 0]] for p in parts])
        shift = np.repeat(offsets[:-1], [len(p.block.rows) for p in parts])
        num_rows, pitch, width = rows[:, 4], rows[:, 5], rows[:, 6]
        count = np.stack([num_rows, width], axis=1)
        stepped = count > 1
        one = np.ones_like(pitch)
        copies = CopyTable(
            tensor=tensor, live=rows[:, 1] + shift, src_start=rows[:, 2].copy(), live_start=rows[:, 3].copy(), count=count,
            src_stride=np.stack([pitch, one], axis=1) * stepped, live_stride=np.stack([width, one], axis=1) * stepped,
        )  # fmt: skip
        constants = tuple(
            Constant(live=offset + i, live_start=start, axes=((numel, 1),), bits=0)
            for offset, p in zip(offsets, parts, strict=False)
            for i, start, numel in p.block.padding
        )
        return SourceMap(spec_digest=self._spec.digest, live=live, copies=copies, constants=constants)

    def _live_tensors(self, parts: Sequence[Placed]) -> tuple[LiveTensor, ...]:
        key = tuple((p.block.live, p.live_prefix) for p in parts)
        found = self._live.get(key)
        if found is None:
            found = tuple(
                LiveTensor(
                    name=prefix + form.name,
                    shape=form.shape,
                    strides=_dense(form.shape),
                    dtype=form.dtype,
                    parameter=form.parameter,
                )
                for forms, prefix in key
                for form in forms
            )
            self._live[key] = found
        return found

    def _position(self, part: Placed) -> npt.NDArray[Any]:
        key = (part.block.sources, part.source_prefix)
        found = self._positions.get(key)
        if found is None:
            names = [part.source_prefix + name for name in part.block.sources]
            missing = [name for name in names if name not in self._spec.index]
            if missing:
                raise LayoutError(
                    f"tensor {missing[0]!r} is needed by the layout but absent from the checkpoint spec "
                    f"({len(missing)} such); give the config of the model the checkpoint is of",
                    tensor=missing[0],
                )
            found = np.array([self._spec.index[name] for name in names], dtype=np.int64)
            self._positions[key] = found
        return found


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
