"""Correspondence: the source maps of all workers of a job, and their boxes side by side.

Workers are positions here; names and roles come in plain form, because topology is a matter of planning.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import LayoutError
from weightbridge.layout.boxes import BoxTable, expand
from weightbridge.layout.source_map import SourceMap

__all__ = ["Correspondence"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Correspondence:
    """workers: names, in the job's order. holds: whether the worker is a source (a trainer). maps: one per worker."""

    spec: CheckpointSpec
    workers: tuple[str, ...]
    holds: tuple[bool, ...]
    maps: tuple[SourceMap, ...]

    def __post_init__(self) -> None:
        if not len(self.workers) == len(self.holds) == len(self.maps):
            raise LayoutError(
                f"{len(self.workers)} workers, {len(self.holds)} roles and {len(self.maps)} source maps; "
                "expected one of each a worker"
            )
        for name, source_map in zip(self.workers, self.maps, strict=True):
            if source_map.spec_digest != self.spec.digest:
                raise LayoutError(
                    f"worker {name!r} was probed against checkpoint {source_map.spec_digest}, the job's is {self.spec.digest}; "
                    "give every worker the same checkpoint spec and probe it again",
                    worker=name,
                )

    @cached_property
    def num_dims(self) -> int:
        """D of all box tables of this job: the largest rank in the checkpoint, at least 1."""
        return max(1, *(len(t.shape) for t in self.spec.tensors))

    @cached_property
    def kind_of(self) -> Int64Array:
        """[num_workers] the kind of each worker. Workers of equal map and equal role are of one kind.

        Data-parallel replicas and engines of equal layout are the rule in a large job: what depends on maps alone is
        done once a kind. Kinds are numbered by first appearance.
        """
        numbers: dict[tuple[str, bool], int] = {}
        found = [
            numbers.setdefault((source_map.fingerprint, holds), len(numbers))
            for source_map, holds in zip(self.maps, self.holds, strict=True)
        ]
        return np.array(found, dtype=np.int64)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The first worker of each kind."""
        return tuple(np.unique(self.kind_of, return_index=True)[1].tolist())

    @cached_property
    def boxes(self) -> tuple[BoxTable, ...]:
        """The boxes of each kind. Trainers and rollouts of equal layout share one table."""
        tables: dict[str, BoxTable] = {}
        maps = [self.maps[worker] for worker in self.kinds]
        for source_map in maps:
            if source_map.fingerprint not in tables:
                tables[source_map.fingerprint] = expand(source_map, self.spec, self.num_dims)
        return tuple(tables[source_map.fingerprint] for source_map in maps)

    @cached_property
    def rows(self) -> Int64Array:
        """[n, 2 + 3 D] distinct (tensor, kind, start..., step..., count...), sorted; tensors that are constants left out."""
        parts = []
        for kind, table in enumerate(self.boxes):
            who = np.full((len(table), 1), kind, dtype=np.int64)
            parts.append(np.concatenate([table.tensor[:, None], who, table.start, table.step, table.count], axis=1))
        rows = np.concatenate(parts) if parts else np.zeros((0, 2 + 3 * self.num_dims), dtype=np.int64)
        fixed = [self.spec.index[name] for name in self.spec.constants]
        if fixed:
            rows = rows[~np.isin(rows[:, 0], fixed)]
        rows = rows[np.lexsort(rows.T[::-1])]
        same = np.zeros(len(rows), dtype=bool)
        same[1:] = (rows[1:] == rows[:-1]).all(axis=1)
        distinct: Int64Array = rows[~same]
        return distinct
