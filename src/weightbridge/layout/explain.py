"""A source map in words: per live tensor, which index range of it holds which index range of the checkpoint.

Ranges are half-open and Python-like. A dim that several axes walk is written as a sum, outermost first:
`0:12:6 + 0:3` stands for 0, 1, 2, 6, 7, 8. A negative step
counts down from the first number to just above the second. The text is stable: equal maps give equal text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import UsageError
from weightbridge.layout.source_map import Constant, LiveTensor, SourceMap

__all__ = ["explain"]


def explain(source_map: SourceMap, spec: CheckpointSpec, name: str | None = None) -> str:
    """Text about one live tensor, or about all of them when `name` is None. Pure; called by people and the CLI.

    Raises UsageError when the map has no live tensor of that name.
    """
    chosen = [i for i, t in enumerate(source_map.live) if name is None or t.name == name]
    if not chosen:
        some = ", ".join(t.name for t in source_map.live[:5])
        raise UsageError(f"the map has no live tensor {name!r}; it has {len(source_map.live)}, among them {some}")
    return "\n".join(line for i in chosen for line in _lines(source_map, spec, i)) + "\n"


def _lines(source_map: SourceMap, spec: CheckpointSpec, live: int) -> list[str]:
    tensor, copies = source_map.live[live], source_map.copies
    kind = "carried whole for the loader" if tensor.carried else "parameter" if tensor.parameter else "buffer"
    lines = [f"{tensor.name} {list(tensor.shape)} {tensor.dtype.name}, {kind}"]
    for group in source_map.loader_groups:
        if live in group.live:
            names = [spec.tensors[t].name for t in group.tensors]
            lines.append(
                f"  computed by the loader, called at install with {len(names)} checkpoint tensors: {', '.join(names[:8])}"
                + (" ..." if len(names) > 8 else "")
            )
    rows = np.flatnonzero(copies.live == live)
    for row in rows[np.argsort(copies.live_start[rows], kind="stable")].tolist():
        source = spec.tensors[int(copies.tensor[row])]
        if tensor.carried:
            lines.append(f"  <- {source.name}, whole  ({int(copies.numel[row])} elements)")
            continue
        count = copies.count[row].tolist()
        here = _ranges(
            int(copies.live_start[row]),
            list(zip(count, copies.live_stride[row].tolist(), strict=True)),
            tensor.shape,
            tensor.strides,
        )
        there = _ranges(
            int(copies.src_start[row]),
            list(zip(count, copies.src_stride[row].tolist(), strict=True)),
            source.shape,
            _row_major(source.shape),
        )
        cast = "" if source.dtype.name == tensor.dtype.name else f" cast {source.dtype.name} -> {tensor.dtype.name}"
        lines.append(f"  {here} <- {source.name}{there}{cast}  ({int(copies.numel[row])} elements)")
    for constant in source_map.constants:
        if constant.live == live:
            lines.append(f"  {_constant_ranges(constant, tensor)} <- constant bits {constant.bits:#x}")
    if tensor.name in source_map.untouched:
        lines.append(f"  {source_map.untouched[tensor.name]} elements are never written by the loader")
    return lines


def _constant_ranges(constant: Constant, tensor: LiveTensor) -> str:
    return _ranges(constant.live_start, list(constant.axes), tensor.shape, tensor.strides)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


def _ranges(start: int, axes: list[tuple[int, int]], shape: Sequence[int], strides: Sequence[int]) -> str:
    """The lattice as `[range, range]` over the dims; as flat offsets where an axis does not follow one dim."""
    dims = sorted((d for d in range(len(shape)) if shape[d] > 1 and strides[d] > 0), key=lambda d: -strides[d])
    per_dim: dict[int, list[tuple[int, int]]] = {d: [] for d in dims}
    for n, s in axes:
        if n == 1:
            continue
        home = next((d for d in dims if s and s % strides[d] == 0 and abs(s // strides[d]) * (n - 1) < shape[d]), None)
        if home is None and s != 0:
            return _flat(start, axes)
        if home is not None:
            per_dim[home].append((n, s // strides[home]))
    coords, left = dict.fromkeys(range(len(shape)), 0), start
    for d in dims:
        coords[d], left = divmod(left, strides[d])
    parts = []
    for d in range(len(shape)):
        moves = per_dim.get(d, [])
        low = coords[d] + sum(min((n - 1) * s, 0) for n, s in moves)
        high = coords[d] + sum(max((n - 1) * s, 0) for n, s in moves)
        if left or low < 0 or high >= max(shape[d], 1):
            return _flat(start, axes)
        parts.append(_dim_range(coords[d], moves, shape[d]))
    text = f"[{', '.join(parts)}]"
    repeats = [n for n, s in axes if n > 1 and s == 0]
    return text + "".join(f" repeated {n} times" for n in repeats)


def _dim_range(first: int, moves: list[tuple[int, int]], extent: int) -> str:
    if not moves:
        return ":" if extent == 1 else str(first)
    if len(moves) == 1 and moves[0][1] == 1:
        return ":" if (first, moves[0][0]) == (0, extent) else f"{first}:{first + moves[0][0]}"
    terms = []
    for position, (n, s) in enumerate(sorted(moves, key=lambda m: -abs(m[1]))):
        base = first if position == 0 else 0
        end = base + n * s
        terms.append(f"{base}:{end}" + (f":{s}" if s != 1 else ""))
    return " + ".join(terms)


def _flat(start: int, axes: list[tuple[int, int]]) -> str:
    text = "".join(f" + {s}*[0:{n}]" for n, s in axes if n > 1)
    return f"[flat {start}{text}]"
