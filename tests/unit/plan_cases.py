"""Small jobs for the plan tests, built from slices. Not a test module."""

from __future__ import annotations

from math import prod

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.layout.source_map import CopyTable, LiveTensor, SourceMap
from weightbridge.plan.topology import Role, Topology, Worker


def spec_of(*shapes, dtype="BF16", constants=None):
    dtypes = [dtype] * len(shapes) if isinstance(dtype, str) else dtype
    return CheckpointSpec(
        tensors=tuple(
            TensorSpec(name=f"t{i}", shape=shape, dtype=dtype_named(d))
            for i, (shape, d) in enumerate(zip(shapes, dtypes, strict=True))
        ),
        constants=constants or {},
    )


def takes(spec, *pieces):
    """The source map of a worker that has these pieces: (tensor position, slice of dim 0, slice of dim 1, ...)."""
    live, table = [], []
    for tensor, *parts in pieces:
        t = spec.tensors[tensor]
        block = [*parts, *(slice(0, n) for n in t.shape[len(parts) :])]
        ranges = [range(*s.indices(n)) for s, n in zip(block, t.shape, strict=True)]
        shape = tuple(map(len, ranges))
        if 0 in shape:
            continue
        pitch = [prod(t.shape[d + 1 :]) for d in range(len(shape))]
        local = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
        start = sum(r.start * p for r, p in zip(ranges, pitch, strict=True))
        steps = [r.step * p for r, p in zip(ranges, pitch, strict=True)]
        table.append((tensor, len(live), start, 0, tuple(zip(shape, steps, local, strict=True))))
        live.append(LiveTensor(name=f"{t.name}.{len(live)}", shape=shape, strides=local, dtype=t.dtype))
    copies = CopyTable.from_rows(table) if table else CopyTable.empty()
    return SourceMap(spec_digest=spec.digest, live=tuple(live), copies=copies)


def everything(spec):
    return takes(spec, *((i,) for i, t in enumerate(spec.tensors) if t.name not in spec.constants))


def trainer(rank, node="a", bandwidth=1e9):
    return Worker(name=f"trainer/{rank}", role=Role.TRAINER, node=node, rank=rank, bandwidth=bandwidth)


def rollout(engine, rank, node, bandwidth=1e9):
    return Worker(name=f"{engine}/{rank}", role=Role.ROLLOUT, node=node, rank=rank, engine=engine, bandwidth=bandwidth)


def topology(*workers, node_bandwidth=(), groups=()):
    return Topology(workers=workers, node_bandwidth=node_bandwidth, groups=groups)


def rows(n, part, parts):
    """Slice `part` of n rows cut in `parts`, the last ones possibly shorter, as torch.chunk cuts."""
    size = -(-n // parts)
    return slice(min(part * size, n), min((part + 1) * size, n))
