"""What every worker of a real-loader test does: learn its layout, load known checkpoints, leave both in a folder.

Runs in the interpreter of the engine under test, which may lack everything but torch, NumPy and msgspec. A worker is
started as `WORKER CASE RANK WORLD_SIZE FOLDER` by `job.run_workers`; `job.read_side` reads what it leaves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.layout import encode_source_map
from weightbridge.probe import local_tensor, probe

__all__ = ["DTYPES", "Seat", "finish", "join_gloo", "memory_of", "record", "rng_weights", "seat_from_argv"]

DTYPES = frozenset({"BF16", "F32"})
"""Live dtypes of any worker here; given whole to each, so that collective loads agree."""

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Tensors = Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Seat:
    case: str
    rank: int
    world_size: int
    folder: Path


def seat_from_argv() -> Seat:
    torch.set_num_threads(1)
    case, rank, world_size, folder = sys.argv[1:]
    return Seat(case, int(rank), int(world_size), Path(folder))


def join_gloo(seat: Seat) -> None:
    store = dist.FileStore(str(seat.folder / "rendezvous"), seat.world_size)
    dist.init_process_group(
        "gloo", store=store, rank=seat.rank, world_size=seat.world_size, timeout=timedelta(seconds=200)
    )


def rng_weights(spec: CheckpointSpec, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint of ordinary random values, the same in every process; each tensor the caller's own."""
    for position, tensor in enumerate(spec.tensors):
        values = np.random.default_rng([seed, position]).standard_normal(tensor.numel, dtype=np.float32)
        yield tensor.name, torch.from_numpy(values).reshape(tensor.shape).to(getattr(torch, tensor.dtype.torch_name))


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """A copy of the bytes from a live tensor's first element to its last, gaps included."""
    local = local_tensor(tensor)
    if not local.numel():
        return np.zeros(0, dtype=np.uint8)
    span = 1 + sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True))
    return torch.as_strided(local, (span,), (1,), local.storage_offset()).clone().view(torch.uint8).numpy()


def record(
    seat: Seat, spec: CheckpointSpec, load_weights: LoadWeights, tensors: Tensors, *, versions: int = 2, label: str = ""
) -> None:
    """Probe, then load versions 1, 2, ... and keep the live bytes of each; load version 1 again at the end.

    Stops the worker when probing does not put back what it found, or when a second load of version 1 gives other bytes
    than the first.
    """
    load_weights(rng_weights(spec, 1000))
    before = {name: memory_of(t) for name, t in tensors().items()}
    source_map = probe(spec=spec, load_weights=load_weights, tensors=tensors, dtypes=DTYPES)
    check_same(before, tensors(), "after the probe has put the weights back")
    target = seat.folder / f"{label}{seat.rank}"
    target.mkdir()
    (target / "map").write_bytes(encode_source_map(source_map))
    kept: dict[str, np.ndarray] = {}
    for version in range(1, versions + 1):
        load_weights(rng_weights(spec, version))
        bytes_now = {name: memory_of(t) for name, t in tensors().items()}
        np.savez(target / f"version{version}.npz", **{str(i): b for i, b in enumerate(bytes_now.values())})
        kept = kept or bytes_now
    load_weights(rng_weights(spec, 1))
    check_same(kept, tensors(), "after version 1 was loaded a second time")


def check_same(expected: Mapping[str, np.ndarray], tensors: Mapping[str, torch.Tensor], when: str) -> None:
    differing = [n for n, t in tensors.items() if not np.array_equal(expected[n], memory_of(t))]
    if differing or set(expected) != set(tensors):
        raise SystemExit(f"wrong: {differing} differ {when}")


def finish() -> None:
    """End at once: torch's threads can abort an interpreter that winds down, long after the work is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
