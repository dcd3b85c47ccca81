"""Coverage over the workers of a side: which checkpoint tensors nobody takes, which elements nobody holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.layout.source_map import SourceMap

__all__ = ["lattice_offsets", "missing_elements", "unused_tensors"]


def unused_tensors(spec: CheckpointSpec, maps: Sequence[SourceMap]) -> tuple[str, ...]:
    """Names of checkpoint tensors that no map draws on, in checkpoint order; constants and empty tensors do not count.

    Called by the coordinator with the maps of all workers of one engine (or of all trainers). Pure.
    """
    used = np.zeros(len(spec.tensors), dtype=bool)
    for source_map in maps:
        used[source_map.copies.tensor] = True
    return tuple(
        t.name for t, u in zip(spec.tensors, used, strict=True) if not u and t.numel and t.name not in spec.constants
    )


def missing_elements(spec: CheckpointSpec, maps: Sequence[SourceMap]) -> dict[str, int]:
    """Tensor name -> number of its elements that no map draws on; tensors that are whole are left out.

    Keeps one byte per element of one tensor at a time. Constants do not count. Pure.
    """
    missing: dict[str, int] = {}
    rows_of = [np.argsort(m.copies.tensor, kind="stable") for m in maps]
    sorted_tensor = [m.copies.tensor[order] for m, order in zip(maps, rows_of, strict=True)]
    for position, tensor in enumerate(spec.tensors):
        if not tensor.numel or tensor.name in spec.constants:
            continue
        held = np.zeros(tensor.numel, dtype=bool)
        for source_map, order, tensors in zip(maps, rows_of, sorted_tensor, strict=True):
            lo, hi = np.searchsorted(tensors, [position, position + 1])
            for row in order[lo:hi]:
                held[
                    lattice_offsets(
                        int(source_map.copies.src_start[row]),
                        source_map.copies.count[row],
                        source_map.copies.src_stride[row],
                    )
                ] = True
            if held.all():
                break
        num_missing = tensor.numel - int(np.count_nonzero(held))
        if num_missing:
            missing[tensor.name] = num_missing
    return missing


def lattice_offsets(start: int, count: npt.NDArray[np.int64], stride: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[prod(count)] offsets start + sum(i_a * stride_a), in row-major order of the indices."""
    offsets = np.full(1, start, dtype=np.int64)
    for n, s in zip(count.tolist(), stride.tolist(), strict=True):
        offsets = (offsets[:, None] + np.arange(n, dtype=np.int64) * s).reshape(-1)
    return offsets
