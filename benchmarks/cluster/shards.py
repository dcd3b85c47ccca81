"""What the usual methods have in common: who gives which part of the checkpoint, and copies prepared ahead of an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.cluster.model import Rectangle, WorkerModel, rectangles, shared_rectangle
from benchmarks.cluster.scenarios import WORKERS_PER_NODE, Case
from weightbridge.checkpoint import CheckpointSpec

__all__ = [
    "ALIGNMENT",
    "Copies",
    "Segment",
    "batches",
    "given_rectangles",
    "matrix",
    "segments_between",
    "tensor_buckets",
]

AnyArray = npt.NDArray[Any]
ALIGNMENT = 16

Segment = tuple[Rectangle, Rectangle]
"""The same elements of the checkpoint at the giving and at the taking worker."""


def given_rectangles(case: Case) -> dict[int, list[Rectangle]]:
    """Trainer -> what it gives when every element is given once, by the first trainer that holds it.

    Raises ValueError where trainers' rectangles overlap without being equal: such a layout is not in the scenarios.
    """
    taken: dict[int, set[tuple[int, int, int, int]]] = {}
    found: dict[int, list[Rectangle]] = {}
    for t in case.topology.trainers:
        found[t] = []
        for r in rectangles(case.spec, case.maps[t]):
            place = (r.row, r.num_rows, r.col, r.num_cols)
            if place not in taken.setdefault(r.tensor, set()):
                taken[r.tensor].add(place)
                found[t].append(r)
    for i, tensor in enumerate(case.spec.tensors):
        given = sum(rows * cols for _, rows, _, cols in taken.get(i, ()))
        if given != tensor.numel:
            raise ValueError(f"trainers give {given} elements of tensor {tensor.name!r}, which has {tensor.numel}")
    return found


def segments_between(case: Case, rollout: int) -> dict[int, list[Segment]]:
    """Trainer -> what it gives directly to one rollout worker: every element once, from one of those that hold it.

    Engines begin at different trainer nodes with their search for a holder, so that replicas share the load.
    """
    trainers = case.topology.trainers
    number = case.engines.index(case.topology.workers[rollout].engine)
    shift = number * WORKERS_PER_NODE % len(trainers)
    of_tensor: dict[int, list[tuple[int, Rectangle]]] = {}
    for t in (*trainers[shift:], *trainers[:shift]):
        for r in rectangles(case.spec, case.maps[t]):
            of_tensor.setdefault(r.tensor, []).append((t, r))
    found: dict[int, list[Segment]] = {t: [] for t in trainers}
    for need in rectangles(case.spec, case.maps[rollout]):
        covered: set[tuple[int, int, int, int]] = set()
        numel = 0
        for t, have in of_tensor.get(need.tensor, ()):
            place = (have.row, have.num_rows, have.col, have.num_cols)
            shared = shared_rectangle(have, need)
            if shared is None or place in covered:
                continue
            covered.add(place)
            numel += shared[0].numel
            found[t].append(shared)
        if numel != need.numel:
            raise ValueError(f"trainers have {numel} of {need.numel} elements of a part of tensor {need.tensor}")
    return {t: segments for t, segments in found.items() if segments}


def batches(spec: CheckpointSpec, segments: Sequence[Segment], nbytes: int) -> list[list[Segment]]:
    """Segments in order, in groups of `nbytes` at most; one that is larger is cut by rows."""
    found: list[list[Segment]] = [[]]
    room = nbytes
    for segment in segments:
        for part in _cut(segment, max(nbytes // spec.tensors[segment[0].tensor].dtype.itemsize, 1)):
            size = aligned(part[0].numel * spec.tensors[part[0].tensor].dtype.itemsize)
            if found[-1] and size > room:
                found.append([])
                room = nbytes
            found[-1].append(part)
            room -= size
    return found if found[0] else []


def _cut(segment: Segment, numel: int) -> Iterable[Segment]:
    rows = max(numel // segment[0].num_cols, 1)
    for first in range(0, segment[0].num_rows, rows):
        num = min(rows, segment[0].num_rows - first)
        yield (_rows(segment[0], first, num), _rows(segment[1], first, num))


def _rows(r: Rectangle, first: int, num: int) -> Rectangle:
    return r._replace(row=r.row + first, num_rows=num, live_start=r.live_start + first * r.live_pitch)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Copies:
    """Copies between a buffer and live memory, prepared: nothing but the copying is left for the update.

    rectangles: laid end to end in `buffer` from its start on, each aligned.
    """

    def __init__(self, model: WorkerModel, buffer: AnyArray, parts: Iterable[Rectangle]) -> None:
        self._pairs: list[tuple[AnyArray, AnyArray]] = []
        at = 0
        for r in parts:
            live = model.bits(r)
            self._pairs.append((buffer[at : at + live.nbytes].view(live.dtype).reshape(live.shape), live))
            at += aligned(live.nbytes)
        self.nbytes = at

    def pack(self) -> None:
        for packed, live in self._pairs:
            np.copyto(packed, live)

    def unpack(self) -> None:
        for packed, live in self._pairs:
            np.copyto(live, packed)


def tensor_buckets(spec: CheckpointSpec, nbytes: int) -> list[list[int]]:
    """Whole tensors in checkpoint order, in groups of `nbytes` at most; a larger one has a group of its own."""
    found: list[list[int]] = [[]]
    room = nbytes
    for i, tensor in enumerate(spec.tensors):
        if found[-1] and aligned(tensor.nbytes) > room:
            found.append([])
            room = nbytes
        found[-1].append(i)
        room -= aligned(tensor.nbytes)
    return found


def matrix(spec: CheckpointSpec, buffer: AnyArray, tensors: Sequence[int]) -> Callable[[Rectangle], AnyArray]:
    """`buffer` holds these tensors end to end, each aligned: a function from a rectangle of one of them to its bits there."""
    found: dict[int, AnyArray] = {}
    at = 0
    for i in tensors:
        t = spec.tensors[i]
        pitch = max(prod(t.shape[1:]), 1)
        found[i] = buffer[at : at + t.nbytes].view(f"u{t.dtype.itemsize}").reshape(-1, pitch)
        at += aligned(t.nbytes)
    return lambda r: found[r.tensor][r.row : r.row + r.num_rows, r.col : r.col + r.num_cols]
