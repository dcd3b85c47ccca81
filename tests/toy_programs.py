"""Random jobs with an oracle of their own: NumPy slicing says what every live element must hold.

A placement is one slice of a checkpoint tensor at one place of a live tensor. It is written down twice, as a row of a
CopyTable for the library and as a NumPy assignment for the oracle.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import prod

import numpy as np

from weightbridge.checkpoint.dtypes import DType, dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.layout.source_map import CopyTable, LiveTensor, SourceMap
from weightbridge.plan.topology import NodeGroup, Role, Topology, Worker


@dataclass
class Placement:
    tensor: int
    box: tuple[tuple[int, int, int], ...]  # start, step, count per dim
    live: int
    live_start: int
    live_stride: tuple[int, ...]  # per dim of the box

    def row(self, shape: tuple[int, ...]) -> tuple:
        pitch = [prod(shape[d + 1 :]) for d in range(len(shape))]
        start = sum(b[0] * p for b, p in zip(self.box, pitch, strict=True))
        axes = tuple((n, step * p, s) for (_, step, n), p, s in zip(self.box, pitch, self.live_stride, strict=True))
        return (self.tensor, self.live, start, self.live_start, axes)


@dataclass
class Layout:
    """One worker. spans: elements of each live tensor, gaps included."""

    dtypes: list[DType] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)

    def add(self, dtype: DType, span: int) -> int:
        self.dtypes.append(dtype)
        self.spans.append(span)
        return len(self.spans) - 1

    def place(self, rng, tensor: int, dtype: DType, box) -> None:
        """In a live tensor of its own: random order of dims, random padding of rows, random first offset."""
        counts = [n for _, _, n in box]
        order = list(range(len(box)))
        if rng.random() < 0.4:
            rng.shuffle(order)
        stride = [0] * len(box)
        pitch = 1
        for d in reversed(order):
            stride[d] = pitch
            pitch *= counts[d]
            if rng.random() < 0.2:
                pitch += rng.randrange(1, 4)
        first = rng.choice([0, 0, 3])
        live = self.add(dtype, first + pitch)
        self.placements.append(Placement(tensor, tuple(box), live, first, tuple(stride)))

    def source_map(self, spec: CheckpointSpec) -> SourceMap:
        live = tuple(
            LiveTensor(name=f"live{i}", shape=(n,), strides=(1,), dtype=d)
            for i, (n, d) in enumerate(zip(self.spans, self.dtypes, strict=True))
        )
        rows = [p.row(spec.tensors[p.tensor].shape) for p in self.placements]
        copies = CopyTable.from_rows(rows) if rows else CopyTable.empty()
        return SourceMap(spec_digest=spec.digest, live=live, copies=copies)


@dataclass
class Job:
    spec: CheckpointSpec
    topology: Topology
    layouts: list[Layout]

    @property
    def maps(self) -> list[SourceMap]:
        return [layout.source_map(self.spec) for layout in self.layouts]

    def checkpoint(self, seed: int) -> list[np.ndarray]:
        """Random bits per tensor; floats stay clear of NaN, of subnormal fp16 and of what fp16 cannot hold."""
        rng = np.random.default_rng(seed)
        return [_random(rng, t.shape, t.dtype) for t in self.spec.tensors]

    def live(self, worker: int, checkpoint: list[np.ndarray] | None) -> list[np.ndarray]:
        """The worker's live tensors as bits; elements of no placement (all, without a checkpoint) hold a sentinel."""
        layout = self.layouts[worker]
        live = [np.full(n, 0xEE, dtype=d.bits) for n, d in zip(layout.spans, layout.dtypes, strict=True)]
        for p in layout.placements if checkpoint is not None else ():
            source = checkpoint[p.tensor][tuple(slice(a, a + (n - 1) * s + 1, s) for a, s, n in p.box)]
            dtype = layout.dtypes[p.live]
            strides = tuple(s * dtype.itemsize for s in p.live_stride)
            view = np.ndarray(source.shape, dtype.bits, live[p.live], p.live_start * dtype.itemsize, strides)
            view[...] = cast_bits(source, self.spec.tensors[p.tensor].dtype.name, dtype.name)
        return live


def _random(rng, shape, dtype: DType) -> np.ndarray:
    if dtype.name == "F32":  # exactly representable in bf16, so that trainers of either dtype hold the same values
        return (
            (np.float32(2) ** rng.integers(-8, 8, shape) * (1 + rng.integers(0, 128, shape) / 128))
            .astype("<f4")
            .view("<u4")
        )
    if dtype.name == "BF16":
        values = (
            2.0 ** rng.integers(-8, 8, shape) * (1 + rng.integers(0, 128, shape) / 128) * rng.choice([-1, 1], shape)
        )
        return (np.asarray(values, dtype="<f4").view("<u4") >> 16).astype("<u2")
    return rng.integers(0, 1 << (8 * dtype.itemsize), shape, dtype=dtype.bits)


def cast_bits(bits: np.ndarray, src: str, dst: str) -> np.ndarray:
    if src == dst:
        return bits
    if (src, dst) == ("BF16", "F32"):
        return bits.astype("<u4") << 16
    if (src, dst) == ("F32", "BF16"):
        return (bits >> 16).astype("<u2")  # exact by construction of the values
    raise AssertionError((src, dst))


LIVE_DTYPES = {"BF16": ("BF16", "BF16", "F32"), "F32": ("F32", "F32", "BF16"), "U8": ("U8",), "I64": ("I64",)}


def random_job(seed: int) -> Job:
    """Uneven TP, PP, EP, DP on both sides, random shapes, dtypes, nodes, padding, transposes, strided shards, duplicates."""
    rng = random.Random(seed)
    tensors = []
    for i in range(rng.randrange(1, 6)):
        rank = rng.choice([0, 1, 2, 2, 2, 3, 4])
        shape = tuple(rng.randrange(1, 14 if rank < 3 else 7) for _ in range(rank))
        dtype = dtype_named(rng.choice(["BF16", "BF16", "BF16", "F32", "U8", "I64"]))
        tensors.append(TensorSpec(name=f"t{i}", shape=shape, dtype=dtype))
    spec = CheckpointSpec(tensors=tuple(tensors))
    num_nodes = rng.choice([1, 2, 3, 4, 4])
    mixed = rng.choice([0.0, 0.0, 0.5])  # how often trainers and rollouts share nodes
    workers, layouts = [], []

    def add_group(role: Role, engine: str) -> None:
        size = rng.randrange(1, 4)
        first = 0 if role is Role.TRAINER or rng.random() < mixed else min(1, num_nodes - 1)
        nodes = [rng.randrange(first, num_nodes) for _ in range(size)]
        if role is Role.TRAINER and rng.random() > mixed:
            nodes = [0] * size
        elif rng.random() < 0.5:
            nodes = nodes[:1] * size
        for rank in range(size):
            name = f"{engine or 'trainer'}/{len(workers)}"
            bandwidth = rng.choice([1e9, 1e9, 2e9, 3e8])
            workers.append(
                Worker(name=name, role=role, node=f"n{nodes[rank]}", rank=rank, engine=engine, bandwidth=bandwidth)
            )
        layouts.extend(_group_layouts(rng, spec, size, whole=role is Role.TRAINER or rng.random() < 0.8))

    for _ in range(rng.randrange(1, 3)):
        add_group(Role.TRAINER, "")
    for e in range(rng.randrange(1, 4)):
        add_group(Role.ROLLOUT, f"e{e}")
    return Job(spec, Topology(workers=tuple(workers)), layouts)


def two_cluster_job(seed: int) -> Job:
    """Trainers in two clusters, each with replicas on three nodes, uneven in all; and a node in neither."""
    rng = random.Random(f"two clusters {seed}")
    dtypes = ["BF16", "F32", "U8", "BF16"]
    shapes = [(rng.randrange(20, 60), rng.randrange(5, 30)) for _ in dtypes]
    spec = CheckpointSpec(
        tensors=tuple(
            TensorSpec(name=f"t{i}", shape=shape, dtype=dtype_named(d))
            for i, (shape, d) in enumerate(zip(shapes, dtypes, strict=True))
        )
    )
    workers, layouts = [], []
    for role, nodes in ((Role.TRAINER, ("tw", "te")), (Role.ROLLOUT, ("w0", "w1", "w2", "e0", "e1", "e2", "spare"))):
        for node in nodes:
            size = rng.randrange(1, 3)
            engine = node if role is Role.ROLLOUT else ""
            for rank in range(size):
                speed = rng.choice([1e9, 1e9, 2e9, 3e8])
                name = f"{node}/{rank}"
                workers.append(Worker(name=name, role=role, node=node, rank=rank, engine=engine, bandwidth=speed))
            layouts += _group_layouts(rng, spec, size, whole=role is Role.TRAINER or rng.random() < 0.7)
    groups = tuple(
        NodeGroup(name=name, nodes=nodes, bandwidth=rng.choice([2e8, 8e8]))
        for name, nodes in (("west", ("tw", "w0", "w1", "w2")), ("east", ("te", "e0", "e1", "e2")))
    )
    return Job(spec, Topology(workers=tuple(workers), groups=groups), layouts)


def _group_layouts(rng, spec: CheckpointSpec, size: int, *, whole: bool) -> list[Layout]:
    """One sharded or replicated copy of the model. whole: every tensor is in it (a trainer group must hold all)."""
    layouts = [Layout() for _ in range(size)]
    for t, tensor in enumerate(spec.tensors):
        if not whole and rng.random() < 0.3:
            continue
        dtype = dtype_named(rng.choice(LIVE_DTYPES[tensor.dtype.name]))
        kind = rng.choice(["replicate", "owner", "shard", "shard", "stride", "flat"])
        full = tuple((0, 1, n) for n in tensor.shape)
        if kind == "flat" and tensor.shape:
            _flat_shards(rng, layouts, t, tensor, dtype)
            continue
        if kind in ("shard", "stride") and tensor.shape:
            dim = rng.randrange(len(tensor.shape))
            extent = tensor.shape[dim]
            cuts = sorted(rng.randrange(extent + 1) for _ in range(size - 1))
            for r, layout in enumerate(layouts):
                lo, hi, step = [0, *cuts][r], [*cuts, extent][r], 1
                if kind == "stride":
                    lo, hi, step = r, extent, size
                count = len(range(lo, hi, step))
                if count:
                    box = tuple((lo, step if count > 1 else 1, count) if d == dim else f for d, f in enumerate(full))
                    layout.place(rng, t, dtype, box)
                    if rng.random() < 0.15:  # a second live copy: a tied or cached tensor
                        layout.place(rng, t, dtype, box)
            continue
        owners = layouts if kind != "owner" else [rng.choice(layouts)]
        for layout in owners:
            layout.place(rng, t, dtype, full)
    return layouts


def _flat_shards(rng, layouts: list[Layout], t: int, tensor: TensorSpec, dtype: DType) -> None:
    """FSDP-like: contiguous runs of the flattened tensor that begin and end mid-row, written as runs per row."""
    cuts = sorted(rng.randrange(tensor.numel + 1) for _ in range(len(layouts) - 1))
    for r, layout in enumerate(layouts):
        lo, hi = [0, *cuts][r], [*cuts, tensor.numel][r]
        if hi == lo:
            continue
        live = layout.add(dtype, hi - lo)
        row = tensor.shape[-1]
        at = lo
        while at < hi:
            n = min(hi, (at // row + 1) * row) - at
            index = np.unravel_index(at, tensor.shape)
            box = (*((int(i), 1, 1) for i in index[:-1]), (int(index[-1]), 1, n))
            layout.placements.append(Placement(t, box, live, at - lo, (0,) * (len(box) - 1) + (1,)))
            at += n


def house_job() -> Job:
    """A fixed job with everything in it: 2 fp32 trainers; on two other nodes a TP-2 engine and a single-worker engine beside
    a TP-2 engine. So rollouts forward to the other node and read their neighbours' slots."""
    bf16, f32 = dtype_named("BF16"), dtype_named("F32")
    spec = CheckpointSpec(
        tensors=(
            TensorSpec(name="embed", shape=(37, 12), dtype=bf16),
            TensorSpec(name="up", shape=(10, 12), dtype=bf16),
            TensorSpec(name="down", shape=(12, 10), dtype=bf16),
            TensorSpec(name="norm", shape=(12,), dtype=f32),
        )
    )
    seats = [("trainer", "", "n0")] * 2 + [("a", "a", "n1")] * 2 + [("b", "b", "n2")] * 2 + [("c", "c", "n2")]
    ranks = [0, 1, 0, 1, 0, 1, 0]
    workers = tuple(
        Worker(
            name=f"{label}/{rank}", role=Role.ROLLOUT if engine else Role.TRAINER, node=node, rank=rank, engine=engine
        )
        for (label, engine, node), rank in zip(seats, ranks, strict=True)
    )
    layouts = []
    plain = random.Random(1)
    for worker, size in zip(workers, [2, 2, 2, 2, 2, 2, 1], strict=True):
        layout = Layout()
        for t, (tensor, dim) in enumerate(zip(spec.tensors, (0, 0, 1, None), strict=True)):
            box = [(0, 1, n) for n in tensor.shape]
            if worker.role is Role.TRAINER:
                dim = 0
            if dim is not None and size > 1:
                extent = tensor.shape[dim]
                half = extent // 2 + 1
                box[dim] = (0, 1, half) if worker.rank == 0 else (half, 1, extent - half)
            dtype = f32 if worker.role is Role.TRAINER else tensor.dtype
            layout.place(plain, t, dtype, box)
        layouts.append(layout)
    return Job(spec, Topology(workers=workers), layouts)
