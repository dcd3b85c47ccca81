"""What a source map says the live tensors must hold, and whether they do, bit for bit.

Shares no code with the reconstruction: it only reads a map. A lossy cast is predicted by torch's own, which rounds to
nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.layout.source_map import Constant, LiveTensor, SourceMap
from weightbridge.probe.live import raw_bits, to_numpy_bits
from weightbridge.probe.values import cast_bits

__all__ = ["Mismatch", "live_index", "mismatches", "predict", "verify_live"]

_TILE_NUMEL = 1 << 20

Values = Callable[[int, int, int], npt.NDArray[Any]]
"""(checkpoint tensor, lo, hi) -> raw bits of its elements [lo, hi), flat."""


class Mismatch(NamedTuple):
    """The first live element found that differs from the map's prediction. element: its index in the live tensor."""

    live: int
    element: tuple[int, ...]
    source: str
    expected: int
    found: int


def predict(
    spec: CheckpointSpec, source_map: SourceMap, live: int, values: Values
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """What live tensor `live` holds after a load of `values`: ([span] raw bits, [span] how often each is accounted for).

    Positions are storage offsets from the tensor's first element; gaps of a strided tensor and untouched elements count 0.
    """
    tensor, copies = source_map.live[live], source_map.copies
    bits = np.zeros(tensor.span_numel, dtype=tensor.dtype.bits)
    times = np.zeros(tensor.span_numel, dtype=np.int64)
    for row in np.flatnonzero(copies.live == live).tolist():
        source = spec.tensors[int(copies.tensor[row])]
        count = copies.count[row]
        take = _offsets(int(copies.src_start[row]), count, copies.src_stride[row])
        put = _offsets(int(copies.live_start[row]), count, copies.live_stride[row])
        bits[put] = cast_bits(values(int(copies.tensor[row]), 0, source.numel)[take], source.dtype, tensor.dtype)
        np.add.at(times, put, 1)
    for constant in source_map.constants:
        if constant.live == live:
            put = _offsets(
                constant.live_start, np.array([n for n, _ in constant.axes]), np.array([s for _, s in constant.axes])
            )
            bits[put] = constant.bits
            np.add.at(times, put, 1)
    return bits, times


def _offsets(start: int, count: npt.NDArray[Any], stride: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    out = np.array([start], dtype=np.int64)
    for n, s in zip(count.tolist(), stride.tolist(), strict=True):
        out = np.add.outer(out, np.arange(n, dtype=np.int64) * s).reshape(-1)
    return out


def verify_live(
    spec: CheckpointSpec,
    source_map: SourceMap,
    tensors: Sequence[torch.Tensor],
    values: Values,
    fixed: Sequence[Constant] = (),
) -> Mismatch | None:
    """Compare live tensors (local, in the order of the map) with the map's prediction; None when every bit agrees.

    fixed: further lattices of known bits, besides the map's constants. One checkpoint tensor and a tile in memory. What the
    loader computes and what is carried for it are not compared.
    """
    return next(_differing(spec, source_map, tensors, values, fixed, set()), None)


def mismatches(
    spec: CheckpointSpec,
    source_map: SourceMap,
    tensors: Sequence[torch.Tensor],
    values: Values,
    fixed: Sequence[Constant] = (),
) -> dict[int, Mismatch]:
    """As verify_live, but the first mismatch of every live tensor that has one, by its position."""
    known: set[int] = set()
    found: dict[int, Mismatch] = {}
    for mismatch in _differing(spec, source_map, tensors, values, fixed, known):
        known.add(mismatch.live)  # the generator looks at no more of it
        found[mismatch.live] = mismatch
    return found


def _differing(
    spec: CheckpointSpec,
    source_map: SourceMap,
    tensors: Sequence[torch.Tensor],
    values: Values,
    fixed: Sequence[Constant],
    known: Collection[int],
) -> Iterator[Mismatch]:
    """Mismatches as they are found, of live tensors that are not in `known`, which may grow meanwhile."""
    for constant in (*source_map.constants, *fixed):
        if constant.live not in known:
            found = _check_constant(source_map, tensors, constant)
            if found is not None:
                yield found
    copies = source_map.copies
    compared = np.array([not t.carried for t in source_map.live], dtype=bool)
    order = np.argsort(copies.tensor, kind="stable")
    order = order[compared[copies.live[order]]] if len(order) else order
    bounds = np.flatnonzero(np.diff(copies.tensor[order], prepend=-1, append=-1))
    for lo, hi in pairwise(bounds.tolist()):
        yield from _check_source(spec, source_map, tensors, values, order[lo:hi], known)


def _check_source(
    spec: CheckpointSpec,
    source_map: SourceMap,
    tensors: Sequence[torch.Tensor],
    values: Values,
    rows: npt.NDArray[np.int64],
    known: Collection[int],
) -> Iterator[Mismatch]:
    """All copies that draw on one checkpoint tensor."""
    copies = source_map.copies
    tensor = int(copies.tensor[rows[0]])
    reach = (copies.count[rows] - 1) * copies.src_stride[rows]
    low = int((copies.src_start[rows] + np.minimum(reach, 0).sum(axis=1)).min())
    high = int((copies.src_start[rows] + np.maximum(reach, 0).sum(axis=1)).max())
    source = spec.tensors[tensor]
    content = values(tensor, low, high + 1)
    for row in rows.tolist():
        live = int(copies.live[row])
        if live in known:
            continue
        target = source_map.live[live]
        axes = [
            (n, s, step)
            for n, s, step in zip(
                copies.count[row].tolist(),
                copies.src_stride[row].tolist(),
                copies.live_stride[row].tolist(),
                strict=True,
            )
            if n > 1
        ]
        for src_offset, live_offset, part in _tiles(
            int(copies.src_start[row]) - low, int(copies.live_start[row]), axes
        ):
            shape = tuple(n for n, _, _ in part)
            item = source.dtype.itemsize
            given = np.ndarray(
                shape, source.dtype.bits, content, src_offset * item, tuple(s * item for _, s, _ in part)
            )  # strides may be negative: the buffer is the whole range, so bounds are checked
            expected = cast_bits(given, source.dtype, target.dtype)
            strides = tuple(step for _, _, step in part)
            held = to_numpy_bits(raw_bits(tensors[live], live_offset, shape, strides), target.dtype)
            unequal = held != expected
            if unequal.any():
                at = tuple(int(i) for i in np.argwhere(unequal)[0])
                offset = live_offset + sum(i * s for i, s in zip(at, strides, strict=True))
                origin = src_offset + low + sum(i * s for i, (_, s, _) in zip(at, part, strict=True))
                where = f"element {list(_unravel(origin, source.shape))} of checkpoint tensor {source.name!r}"
                yield Mismatch(live, live_index(target, offset), where, int(expected[at]), int(held[at]))
                break


def _check_constant(source_map: SourceMap, tensors: Sequence[torch.Tensor], constant: Constant) -> Mismatch | None:
    target = source_map.live[constant.live]
    for _, live_offset, part in _tiles(0, constant.live_start, [(n, 0, s) for n, s in constant.axes]):
        strides = tuple(s for _, _, s in part)
        held = to_numpy_bits(
            raw_bits(tensors[constant.live], live_offset, tuple(n for n, _, _ in part), strides), target.dtype
        )
        unequal = held != target.dtype.bits.type(constant.bits)
        if unequal.any():
            at = tuple(int(i) for i in np.argwhere(unequal)[0])
            offset = live_offset + sum(i * s for i, s in zip(at, strides, strict=True))
            return Mismatch(constant.live, live_index(target, offset), "a constant", constant.bits, int(held[at]))
    return None


def _tiles(
    src: int, live: int, axes: list[tuple[int, int, int]]
) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
    """The lattice in pieces of bounded size, cut along its longest axis."""
    numel = prod(n for n, _, _ in axes)
    if numel <= _TILE_NUMEL:
        yield src, live, axes
        return
    longest = max(range(len(axes)), key=lambda a: axes[a][0])
    n, s, step = axes[longest]
    each = max(1, n * _TILE_NUMEL // numel)
    for lo in range(0, n, each):
        part = [*axes[:longest], (min(each, n - lo), s, step), *axes[longest + 1 :]]
        yield from _tiles(src + lo * s, live + lo * step, part)


def live_index(tensor: LiveTensor, offset: int) -> tuple[int, ...]:
    """Index into a live tensor of the element at a storage offset."""
    index = [0] * len(tensor.shape)
    for d in sorted(range(len(tensor.shape)), key=lambda d: -tensor.strides[d]):
        if tensor.strides[d] > 0 and tensor.shape[d] > 1:
            index[d], offset = divmod(offset, tensor.strides[d])
    return tuple(index)


def _unravel(offset: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(offset, shape)) if shape else ()
