"""SourceMap <-> bytes: typed MessagePack, arrays as raw little-endian columns, nothing executable.

Decoding believes nothing: sizes, positions and ranges are checked before a map is handed out, because the bytes come
from another process or from a cache on disk.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import LayoutError, SpecError
from weightbridge.layout.source_map import CARRIED_PREFIX, Constant, CopyTable, LiveTensor, LoaderGroup, SourceMap

__all__ = ["MAX_WIRE_BYTES", "decode_source_map", "encode_source_map"]

MAX_WIRE_BYTES = 1 << 30
_FORMAT = 2
_MAX_AXES = 32
_LIMIT = 1 << 62


class _WireLive(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    parameter: bool
    carried: bool


class _WireGroup(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    live: tuple[int, ...]
    tensors: tuple[int, ...]


class _WireConstant(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    live: int
    live_start: int
    axes: tuple[tuple[int, int], ...]
    bits: int


class _WireMap(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    format: int
    spec_digest: str
    live: tuple[_WireLive, ...]
    num_copies: int
    num_axes: int
    heads: bytes  # [4, num_copies]: tensor, live, src_start, live_start
    axes: bytes  # [3, num_copies, num_axes]: count, src_stride, live_stride
    constants: tuple[_WireConstant, ...]
    untouched: dict[str, int]
    loader_groups: tuple[_WireGroup, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_WireMap)


def encode_source_map(source_map: SourceMap) -> bytes:
    """The map as bytes; equal maps give equal bytes. Pure; called by each worker after its probe."""
    c = source_map.copies
    wire = _WireMap(
        format=_FORMAT,
        spec_digest=source_map.spec_digest,
        live=tuple(
            _WireLive(t.name, t.shape, t.strides, t.dtype.name, t.parameter, t.carried) for t in source_map.live
        ),
        num_copies=len(c),
        num_axes=int(c.count.shape[1]),
        heads=np.stack([c.tensor, c.live, c.src_start, c.live_start]).astype("<i8").tobytes(),
        axes=np.stack([c.count, c.src_stride, c.live_stride]).astype("<i8").tobytes(),
        constants=tuple(_WireConstant(k.live, k.live_start, k.axes, k.bits) for k in source_map.constants),
        untouched=dict(sorted(source_map.untouched.items())),
        loader_groups=tuple(_WireGroup(g.live, g.tensors) for g in source_map.loader_groups),
    )
    return _ENCODER.encode(wire)


def decode_source_map(data: bytes | memoryview, *, spec: CheckpointSpec | None = None) -> SourceMap:
    """The map that `encode_source_map` wrote. With `spec`, source ranges are checked against it too. Pure.

    Raises LayoutError, saying what is wrong, for anything that is not a sound map.
    """
    if len(data) > MAX_WIRE_BYTES:
        raise LayoutError(f"a source map of {len(data)} bytes exceeds the {MAX_WIRE_BYTES} allowed")
    try:
        wire = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LayoutError(f"these {len(data)} bytes are no source map: {error}") from None
    if wire.format != _FORMAT:
        raise LayoutError(
            f"source map format {wire.format} is not known, expected {_FORMAT}; use one version of the library"
        )
    if spec is not None and wire.spec_digest != spec.digest:
        raise LayoutError(f"source map was made for checkpoint {wire.spec_digest}, expected {spec.digest}; probe again")
    live = tuple(_live_tensor(t) for t in wire.live)
    copies = _copy_table(wire)
    spans = np.array([t.span_numel for t in live], dtype=np.int64)
    _check_positions(copies.live, len(live), "live tensor")
    _check_spans(copies.live_start, copies.count, copies.live_stride, spans[copies.live], "live offset")
    _check_positions(copies.tensor, _LIMIT if spec is None else len(spec.tensors), "checkpoint tensor")
    if spec is not None:
        numel = np.array([t.numel for t in spec.tensors], dtype=np.int64)
        _check_spans(copies.src_start, copies.count, copies.src_stride, numel[copies.tensor], "checkpoint offset")
    constants = tuple(_constant(k, live) for k in wire.constants)
    names = {t.name for t in live}
    for name, num in wire.untouched.items():
        if name not in names or num < 0:
            raise LayoutError(f"source map counts {num} untouched elements in {name!r}, which it does not describe")
    found = SourceMap(
        spec_digest=wire.spec_digest, live=live, copies=copies, constants=constants, untouched=wire.untouched,
        loader_groups=tuple(LoaderGroup(live=g.live, tensors=g.tensors) for g in wire.loader_groups),
    )  # fmt: skip
    _check_groups(found, spec)
    return found


def _check_groups(source_map: SourceMap, spec: CheckpointSpec | None) -> None:
    """Groups name tensors that there are, computed tensors have no copies, and carried tensors are what groups need."""
    needed: set[int] = set()
    for group in source_map.loader_groups:
        if any(not 0 <= i < len(source_map.live) or source_map.live[i].carried for i in group.live):
            raise LayoutError(
                f"source map has a loader group of live tensors {list(group.live)}; there are {len(source_map.live)}, "
                "and carried ones are not computed"
            )
        limit = _LIMIT if spec is None else len(spec.tensors)
        if (
            not group.tensors
            or any(not 0 <= t < limit for t in group.tensors)
            or sorted({*group.tensors}) != [*group.tensors]
        ):
            raise LayoutError(
                f"source map has a loader group of checkpoint tensors {list(group.tensors[:8])}; expected ascending positions "
                f"below {limit}"
            )
        needed.update(group.tensors)
    both = source_map.computed & set(np.unique(source_map.copies.live).tolist())
    if both:
        raise LayoutError(f"source map both copies and computes live tensor {source_map.live[min(both)].name!r}")
    carried = {t.name for t in source_map.carried}
    wanted = None if spec is None else {CARRIED_PREFIX + spec.tensors[t].name for t in needed}
    if len(carried) != len(needed) or (wanted is not None and carried != wanted):
        raise LayoutError(
            f"source map carries {sorted(carried)[:3]} and {len(carried)} tensors in all, its loader groups need {len(needed)}"
        )


def _live_tensor(wire: _WireLive) -> LiveTensor:
    if any(not 0 <= n < _LIMIT for n in (*wire.shape, *wire.strides)):
        raise LayoutError(
            f"live tensor {wire.name!r} has shape {wire.shape} and strides {wire.strides}; expected sizes"
        )
    try:
        dtype = dtype_named(wire.dtype)
    except SpecError as error:
        raise LayoutError(f"live tensor {wire.name!r}: {error.message}") from None
    tensor = LiveTensor(
        name=wire.name,
        shape=wire.shape,
        strides=wire.strides,
        dtype=dtype,
        parameter=wire.parameter,
        carried=wire.carried,
    )
    if tensor.span_numel >= _LIMIT:
        raise LayoutError(f"live tensor {wire.name!r} spans {tensor.span_numel} elements; expected a size")
    return tensor


def _copy_table(wire: _WireMap) -> CopyTable:
    n, a = wire.num_copies, wire.num_axes
    if n < 0 or not 1 <= a <= _MAX_AXES:
        raise LayoutError(f"source map declares {n} copies of {a} axes; expected at most {_MAX_AXES} axes")
    if len(wire.heads) != 32 * n or len(wire.axes) != 24 * n * a:
        raise LayoutError(
            f"source map declares {n} copies of {a} axes, {32 * n} and {24 * n * a} bytes, and carries "
            f"{len(wire.heads)} and {len(wire.axes)}; it is damaged"
        )
    heads = np.frombuffer(wire.heads, dtype="<i8").astype(np.int64).reshape(4, n)
    axes = np.frombuffer(wire.axes, dtype="<i8").astype(np.int64).reshape(3, n, a)
    if bool((np.abs(axes[1:].astype(np.float64)) >= 2.0**62).any()):
        raise LayoutError("source map has a stride beyond any tensor; it is damaged")
    return CopyTable(
        tensor=heads[0], live=heads[1], src_start=heads[2], live_start=heads[3],
        count=axes[0], src_stride=axes[1], live_stride=axes[2],
    )  # fmt: skip


def _check_positions(values: npt.NDArray[np.int64], limit: int, what: str) -> None:
    if len(values) and not (int(values.min()) >= 0 and int(values.max()) < limit):
        raise LayoutError(f"source map refers to {what} {int(values.min())}..{int(values.max())}; there are {limit}")


def _check_spans(
    start: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    stride: npt.NDArray[np.int64],
    size: npt.NDArray[np.int64],
    what: str,
) -> None:
    """Every lattice stays in [0, size). In float64 first, so that absurd values cannot wrap around."""
    if not len(start):
        return
    reach = (count.astype(np.float64) - 1) * stride
    lo = start + np.minimum(reach, 0).sum(axis=1)
    hi = start + np.maximum(reach, 0).sum(axis=1)
    bad = ~((lo > -0.5) & (hi < size.astype(np.float64) - 0.5))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise LayoutError(
            f"source map: copy {row} covers {what} {lo[row]:.0f}..{hi[row]:.0f}, expected it within {int(size[row])} elements"
        )


def _constant(wire: _WireConstant, live: tuple[LiveTensor, ...]) -> Constant:
    if not 0 <= wire.live < len(live):
        raise LayoutError(f"source map has a constant in live tensor {wire.live}; there are {len(live)}")
    tensor = live[wire.live]
    lo = wire.live_start + sum(min((n - 1) * s, 0) for n, s in wire.axes)
    hi = wire.live_start + sum(max((n - 1) * s, 0) for n, s in wire.axes)
    if (
        any(n < 1 for n, _ in wire.axes)
        or lo < 0
        or hi >= tensor.span_numel
        or not 0 <= wire.bits < 1 << 8 * tensor.dtype.itemsize
    ):
        raise LayoutError(
            f"source map: a constant of {tensor.name!r} covers live offset {lo}..{hi} with bits {wire.bits:#x}; expected it "
            f"within {tensor.span_numel} elements of {tensor.dtype.name}"
        )
    return Constant(live=wire.live, live_start=wire.live_start, axes=wire.axes, bits=wire.bits)
