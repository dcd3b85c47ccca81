"""Carried tensors: checkpoint tensors that travel whole because the loader makes live tensors of them.

How they are handed to the loader is in one place, so that what the probe tries is what an install does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy.typing as npt
import torch

from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.layout.source_map import CARRIED_PREFIX, CopyTable, LiveTensor, LoaderGroup, SourceMap
from weightbridge.probe.values import VerificationValues, torch_dtype, verification_tensors

__all__ = ["carried_tensors", "staging_tensors", "subset_tensors", "with_loader_group"]

Row = tuple[int, int, int, int, tuple[tuple[int, int, int], ...]]


def with_loader_group(
    source_map: SourceMap, spec: CheckpointSpec, computed: tuple[int, ...], needed: tuple[int, ...]
) -> SourceMap:
    """The map with the checkpoint tensors `needed` carried whole, for the live tensors that are `computed` of them."""
    tensors = [spec.tensors[i] for i in needed]
    carried = tuple(
        LiveTensor(
            name=CARRIED_PREFIX + t.name,
            shape=t.shape,
            strides=_row_major(t.shape),
            dtype=t.dtype,
            parameter=False,
            carried=True,
        )
        for t in tensors
    )
    first = len(source_map.live)
    whole: list[Row] = [
        (i, first + k, 0, 0, ((t.numel, 1, 1),)) for k, (i, t) in enumerate(zip(needed, tensors, strict=True))
    ]
    return replace(
        source_map,
        live=(*source_map.live, *carried),
        copies=CopyTable.concatenate(source_map.copies, CopyTable.from_rows(whole)),
        loader_groups=(LoaderGroup(live=computed, tensors=needed),),
    )


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def staging_tensors(source_map: SourceMap) -> dict[str, torch.Tensor]:
    """Host memory for the carried tensors of a map, by live name; not yet written."""
    return {t.name: torch.empty(t.shape, dtype=torch_dtype(t.dtype)) for t in source_map.carried}


def subset_tensors(
    spec: CheckpointSpec, values: VerificationValues, positions: Sequence[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of some checkpoint tensors, in spec order, as a loader is given them at install."""

    def make(position: int) -> torch.Tensor:
        alone = CheckpointSpec(tensors=(spec.tensors[position],))
        return next(iter(verification_tensors(alone, _At(alone, values, position))))[1]

    return _in_order(spec, positions, make)


def carried_tensors(
    spec: CheckpointSpec, group: LoaderGroup, staging: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of what a group's loader is given, in spec order; each is a private copy of its staging memory."""
    return _in_order(spec, group.tensors, lambda i: staging[CARRIED_PREFIX + spec.tensors[i].name].clone())


def _in_order(
    spec: CheckpointSpec, positions: Sequence[int], make: Callable[[int], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors at `positions` and, since no content travels for them, all constants and empty tensors."""
    wanted = set(positions)
    for position, tensor in enumerate(spec.tensors):
        if position in wanted:
            yield tensor.name, make(position)
        elif tensor.name in spec.constants or not tensor.numel:
            yield tensor.name, _without_content(spec, tensor)


def _without_content(spec: CheckpointSpec, tensor: TensorSpec) -> torch.Tensor:
    value = spec.constants.get(tensor.name, 0.0)
    return torch.full(tensor.shape, value, dtype=torch.float64).to(torch_dtype(tensor.dtype))


class _At(VerificationValues):
    """Values of one tensor of a larger checkpoint, as those of a checkpoint of its own."""

    def __init__(self, alone: CheckpointSpec, values: VerificationValues, position: int) -> None:
        super().__init__(alone, 0)
        self._of, self._position = values, position

    def bits(self, tensor: int, lo: int, hi: int) -> npt.NDArray[Any]:
        return self._of.bits(self._position, lo, hi)
