"""Hypothesis strategies for whole jobs: checkpoint, topology, loaders and source maps. Part of the published test kit.

Sizes are uneven by default. Layouts are drawn tensor by tensor: row, column and strided shards, flat shards that begin
mid-row, whole tensors on one pipeline stage, replicas, transposes, reversed rows, padding, flat fused buffers, and
tensors that lie in a worker twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.layout.source_map import LiveTensor, SourceMap
from weightbridge.plan.topology import NodeGroup, Role, Topology, Worker
from weightbridge.testing.numpy_loader import NumpyLoader, Placement, source_map_of

__all__ = ["Job", "jobs", "loaders", "specs", "topologies"]

AnyArray = npt.NDArray[Any]
Cut = tuple[tuple[slice, ...], bool]  # what one worker takes of a tensor, and whether it is a slice of the flat tensor

_DTYPES = ("BF16", "F32", "U8", "F64")
_RATES = (1e9, 2e9, 0.5e9)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A whole job. loaders[i] and maps[i] belong to topology.workers[i]."""

    spec: CheckpointSpec
    topology: Topology
    loaders: tuple[NumpyLoader, ...]
    maps: tuple[SourceMap, ...]

    def checkpoint(self, seed: int) -> dict[str, AnyArray]:
        """Random raw bits for every tensor of the spec, as unsigned integers of its item size."""
        rng = np.random.default_rng(seed)
        found = {}
        for t in self.spec.tensors:
            raw = rng.integers(0, 256, size=t.nbytes, dtype=np.uint8)
            found[t.name] = raw.view(t.dtype.bits).reshape(t.shape)
        return found

    def loaded(self, worker: int, checkpoint: Mapping[str, AnyArray]) -> list[AnyArray]:
        """A worker's storages (flat raw bits, in the order of its map's live tensors) after loading this checkpoint."""
        storages = self.loaders[worker].storages()
        self.loaders[worker].load(storages, checkpoint)
        return storages


@st.composite
def specs(draw: st.DrawFn, max_tensors: int = 4, max_extent: int = 7) -> CheckpointSpec:
    """Checkpoints of a few small tensors of mixed rank and dtype; now and then one is a constant."""
    shapes = draw(
        st.lists(
            st.lists(st.integers(1, max_extent), max_size=3).map(tuple),
            min_size=1,
            max_size=max_tensors,
        )
    )
    tensors = tuple(
        TensorSpec(name=f"t{i}", shape=shape, dtype=dtype_named(draw(st.sampled_from(_DTYPES))))
        for i, shape in enumerate(shapes)
    )
    constants = {}
    if draw(st.integers(0, 9)) == 0:
        tensors += (TensorSpec(name="scale", shape=(3,), dtype=dtype_named("F32")),)
        constants = {"scale": 1.0}
    return CheckpointSpec(tensors=tensors, constants=constants)


@st.composite
def topologies(draw: st.DrawFn) -> tuple[Topology, tuple[tuple[int, ...], ...]]:
    """A topology, and its groups: each trainer replica and each engine, as worker ids. Groups may share nodes."""
    workers: list[Worker] = []
    groups: list[tuple[int, ...]] = []

    def add(role: Role, label: str, nodes: list[str]) -> None:
        size = draw(st.integers(1, 3))
        spread = draw(st.lists(st.sampled_from(nodes), min_size=size, max_size=size))
        if draw(st.booleans()):
            spread = [spread[0]] * size  # usually a group fills one node
        groups.append(tuple(range(len(workers), len(workers) + size)))
        for rank, node in enumerate(spread):
            rate = draw(st.sampled_from(_RATES))
            engine = label if role is Role.ROLLOUT else ""
            workers.append(
                Worker(name=f"{label}/{rank}", role=role, node=node, rank=rank, engine=engine, bandwidth=rate)
            )

    mixed = draw(st.integers(0, 3)) == 0
    for i in range(draw(st.integers(1, 2))):
        add(Role.TRAINER, f"trainer{i}", ["n0", "n1"])
    for i in range(draw(st.integers(1, 3))):
        add(Role.ROLLOUT, f"engine{i}", ["n1", "n2", "n3"] if mixed else ["n2", "n3", "n4"])
    caps = draw(st.lists(st.tuples(st.sampled_from(["n0", "n1", "n2"]), st.sampled_from(_RATES)), max_size=2))
    used = sorted({w.node for w in workers})
    clusters: dict[str, list[str]] = {}
    if draw(st.booleans()):  # else all nodes hang on the core
        for node in used:
            clusters.setdefault(draw(st.sampled_from(["", "west", "east"])), []).append(node)
    uplinks = tuple(
        NodeGroup(name=name, nodes=tuple(nodes), bandwidth=draw(st.sampled_from([2e8, 1e9, 7e9])))
        for name, nodes in clusters.items()
        if name
    )
    return Topology(workers=tuple(workers), node_bandwidth=tuple(dict(caps).items()), groups=uplinks), tuple(groups)


def _cut_points(draw: st.DrawFn, extent: int, parts: int) -> list[int]:
    inner = draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1))
    return [0, *sorted(inner), extent]


def _cuts(draw: st.DrawFn, shape: tuple[int, ...], parts: int, *, source: bool) -> list[list[Cut]]:
    """What each of `parts` workers takes of a tensor. For a source, together all of it."""
    kinds = ["stage", "replica", "flat"]
    if shape:
        kinds += ["dim", "dim", "strided", "strided"]
    if not source:
        kinds += ["some", "swapped"] if shape else ["some"]
    kind = draw(st.sampled_from(kinds))
    whole: Cut = (tuple(slice(0, n) for n in shape), False)
    if kind == "replica":
        return [[whole] for _ in range(parts)]
    if kind in ("stage", "some"):
        owner = draw(st.integers(0 if kind == "stage" else -1, parts - 1))
        return [[whole] if i == owner else [] for i in range(parts)]
    if kind == "flat":
        ends = _cut_points(draw, prod(shape), parts)
        return [[((slice(lo, hi),), True)] if hi > lo else [] for lo, hi in pairwise(ends)]
    dim = draw(st.integers(0, len(shape) - 1))

    def along(part: slice) -> Cut:
        return tuple(part if d == dim else slice(0, n) for d, n in enumerate(shape)), False

    if kind == "strided":
        return [[along(slice(i, shape[dim], parts))] if i < shape[dim] else [] for i in range(parts)]
    ends = _cut_points(draw, shape[dim], parts)
    ranges = [slice(lo, hi) for lo, hi in pairwise(ends)]
    if kind == "swapped":  # halves in the other order, as fused gate and up projections have them
        return [
            [along(slice((r.start + r.stop) // 2, r.stop)), along(slice(r.start, (r.start + r.stop) // 2))]
            for r in ranges
        ]
    return [[along(r)] if r.stop > r.start else [] for r in ranges]


class _Builder:
    """Collects one worker's live tensors and placements."""

    def __init__(self) -> None:
        self.live: list[LiveTensor] = []
        self.placements: list[Placement] = []

    def own(self, tensor: TensorSpec, cut: Cut, *, transpose: bool, reverse: bool, pad: int, gap: bool) -> None:
        """A live tensor for this piece alone. pad: more columns than the piece has; with `gap` they lie between its rows
        and are no part of the live tensor, else they are live elements that keep 0."""
        src, flat = cut
        shape = tuple(len(range(s.start, s.stop, s.step or 1)) for s in src)
        if 0 in shape:
            return
        order = tuple(reversed(range(len(shape)))) if transpose and not flat else None
        shape = shape if order is None else shape[::-1]
        stored = (*shape[:-1], shape[-1] + pad) if shape else shape
        strides = tuple(prod(stored[d + 1 :]) for d in range(len(stored)))
        dst = tuple(slice(0, n) for n in shape)
        if reverse and shape:
            dst = (slice(shape[0] - 1, None, -1), *dst[1:])
        name = f"{tensor.name}.{len(self.live)}"
        self.live.append(LiveTensor(name=name, shape=shape if gap else stored, strides=strides, dtype=tensor.dtype))
        self.placements.append(
            Placement(tensor=tensor.name, src=src, live=len(self.live) - 1, dst=dst, order=order, flat=flat)
        )

    def fused(self, tensor: TensorSpec, cuts: list[Cut]) -> None:
        """All pieces of a tensor back to back in one flat live tensor."""
        at = 0
        position = len(self.live)
        for src, flat in cuts:
            extents = [len(range(s.start, s.stop, s.step or 1)) for s in src]
            n = prod(extents)
            if n == 0:
                continue
            if flat or not extents:
                index: tuple[slice, ...] = src if flat else (slice(0, 1),)
                self.placements.append(
                    Placement(tensor=tensor.name, src=index, live=position, dst=(slice(at, at + n),), flat=True)
                )
                at += n
                continue
            for row in range(src[0].start, src[0].stop, src[0].step or 1):  # row by row: a slice of a slice is flat
                inner = (slice(row, row + 1), *src[1:])
                self._flat_row(tensor, inner, position, at)
                at += n // extents[0]
        if at:
            self.live.append(LiveTensor(name=f"{tensor.name}.flat", shape=(at,), strides=(1,), dtype=tensor.dtype))

    def _flat_row(self, tensor: TensorSpec, src: tuple[slice, ...], live: int, at: int) -> None:
        pitch = [prod(tensor.shape[d + 1 :]) for d in range(len(src))]
        starts = np.zeros(1, dtype=np.int64)
        for s, p in zip(src[:-1], pitch[:-1], strict=True):
            starts = (starts[:, None] + np.arange(s.start, s.stop, s.step or 1) * p).reshape(-1)
        last = src[-1]
        n = len(range(last.start, last.stop, last.step or 1))
        for i, start in enumerate(starts.tolist()):
            part = slice(start + last.start, start + last.stop, last.step)
            dst = (slice(at + i * n, at + i * n + n),)
            self.placements.append(Placement(tensor=tensor.name, src=(part,), live=live, dst=dst, flat=True))


@st.composite
def loaders(draw: st.DrawFn, spec: CheckpointSpec, parts: int, source: bool) -> list[NumpyLoader]:
    """Loaders of one group of workers: a trainer replica (together they hold everything) or an engine."""
    builders = [_Builder() for _ in range(parts)]
    for tensor in spec.tensors:
        for builder, cuts in zip(builders, _cuts(draw, tensor.shape, parts, source=source), strict=True):
            if not cuts:
                continue
            for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
                if draw(st.integers(0, 3)) == 0:
                    builder.fused(tensor, cuts)
                    continue
                for cut in cuts:
                    builder.own(
                        tensor, cut, transpose=draw(st.booleans()), reverse=draw(st.integers(0, 4)) == 0,
                        pad=draw(st.sampled_from([0, 0, 2])), gap=draw(st.booleans()),
                    )  # fmt: skip
    return [NumpyLoader(live=tuple(b.live), placements=tuple(b.placements)) for b in builders]


@st.composite
def jobs(draw: st.DrawFn, max_tensors: int = 4, max_extent: int = 7) -> Job:
    """Jobs whose every needed element has a holder. Draws stay small: some tensors of at most max_extent**3 elements."""
    spec = draw(specs(max_tensors, max_extent))
    topology, groups = draw(topologies())
    found: list[NumpyLoader] = []
    for group in groups:
        source = topology.workers[group[0]].role is Role.TRAINER
        found += draw(loaders(spec, len(group), source))
    nested = draw(st.booleans())
    maps = tuple(source_map_of(loader, spec, nested=nested) for loader in found)
    return Job(spec=spec, topology=topology, loaders=tuple(found), maps=maps)
