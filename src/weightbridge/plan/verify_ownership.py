"""Part of the plan's verifier: who has which elements, atoms against source maps.

Small tensors are checked on plain element indices, taken straight from the source maps' lattices. Large ones by
counting: atoms are pairwise disjoint, each atom said to be a worker's lies inside one of its boxes, and each box of a
worker that needs it is covered by such atoms to the last element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InternalError
from weightbridge.geometry import first_overlap, inside, intersection_numel, numel
from weightbridge.layout.boxes import BoxTable, expand
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import Plan
from weightbridge.plan.topology import Role

__all__ = ["check_ownership", "refuse"]

Int64Array = npt.NDArray[np.int64]


def refuse(what: str) -> NoReturn:
    """Raise InternalError saying what is wrong with the plan."""
    raise InternalError(f"the plan is wrong: {what}; please report this with the plan's wire form")


def check_ownership(plan: Plan, spec: CheckpointSpec, maps: Sequence[SourceMap], exact_numel: int) -> None:
    """Holders hold, needers need, nothing needed is missing and nothing comes twice."""
    for m in maps:
        if m.spec_digest != spec.digest:
            refuse(f"a source map belongs to checkpoint {m.spec_digest}, not to {spec.digest}")
    owners = np.zeros((len(plan.classes), len(maps)), dtype=bool)
    for i, c in enumerate(plan.classes):
        owners[i, [*c.holders, *c.needers]] = True
    # replicas have equal maps, and the plan says the same of them: one of each kind is checked
    kinds: dict[tuple[str, Role, bytes], int] = {}
    for w, (m, worker) in enumerate(zip(maps, plan.topology.workers, strict=True)):
        kinds.setdefault((m.fingerprint, worker.role, owners[:, w].tobytes()), w)
    checker = _OwnershipChecker(plan, spec, owners, tuple(kinds.values()))
    large = np.array([t.numel > exact_numel for t in spec.tensors], dtype=bool)
    moved = np.array([t.name not in spec.constants for t in spec.tensors], dtype=bool)
    checker.by_boxes(large & moved, maps)
    checker.by_elements(~large & moved, maps)


class _LatticeIndex:
    """A worker's copies, found by tensor, as sets of flat element indices."""

    def __init__(self, source_map: SourceMap, num_tensors: int) -> None:
        self._copies = source_map.copies
        self._order = np.argsort(self._copies.tensor, kind="stable")
        self._bounds = np.searchsorted(self._copies.tensor[self._order], np.arange(num_tensors + 1))

    def elements(self, tensor: int, numel_: int) -> npt.NDArray[np.bool_]:
        """[numel] True for each element of the tensor that some copy takes."""
        found = np.zeros(numel_, dtype=bool)
        c = self._copies
        for row in self._order[self._bounds[tensor] : self._bounds[tensor + 1]].tolist():
            index = np.array(c.src_start[row])
            for count, stride in zip(c.count[row].tolist(), c.src_stride[row].tolist(), strict=True):
                index = index[..., None] + np.arange(count) * stride
            found[index.reshape(-1)] = True
        return found


class _OwnershipChecker:
    """workers: those to check, one of each kind. owners: [num_classes, num_workers] who has a class, says the plan."""

    def __init__(
        self, plan: Plan, spec: CheckpointSpec, owners: npt.NDArray[np.bool_], workers: tuple[int, ...]
    ) -> None:
        self.plan, self.spec, self.owners, self.workers = plan, spec, owners, workers
        self.names = [w.name for w in plan.topology.workers]
        self.rollout = [w.role is Role.ROLLOUT for w in plan.topology.workers]
        self._by_tensor = np.argsort(plan.atoms.tensor, kind="stable")
        self._bounds = np.searchsorted(plan.atoms.tensor[self._by_tensor], np.arange(len(spec.tensors) + 1))

    def _atoms_of(self, tensor: int) -> Int64Array:
        return self._by_tensor[self._bounds[tensor] : self._bounds[tensor + 1]]

    def by_elements(self, tensors: npt.NDArray[np.bool_], maps: Sequence[SourceMap]) -> None:
        """Check these tensors (a mask over the spec's) on the indices of their elements."""
        copies = {w: _LatticeIndex(maps[w], len(self.spec.tensors)) for w in self.workers}
        padded = np.concatenate([self.owners, np.zeros((1, self.owners.shape[1]), dtype=bool)])
        for tensor in np.flatnonzero(tensors).tolist():
            t = self.spec.tensors[tensor]
            owner = self._class_of_elements(tensor)
            for w in self.workers:
                said, has = padded[owner, w], copies[w].elements(tensor, t.numel)
                if (said & ~has).any():
                    self._not_there(t.name, w, int((said & ~has).sum()))
                if self.rollout[w] and (has & ~said).any():
                    self._not_given(t.name, w, int((has & ~said).sum()))

    def _class_of_elements(self, tensor: int) -> Int64Array:
        """[numel] the class of each element, -1 where no atom has it."""
        t, a = self.spec.tensors[tensor], self.plan.atoms
        owner = np.full(t.numel, -1, dtype=np.int64)
        pitch = np.cumprod([1, *t.shape[:0:-1]])[::-1] if t.shape else np.zeros(0, dtype=np.int64)
        for i in self._atoms_of(tensor).tolist():
            index = np.array(0)
            for d in range(len(t.shape)):
                index = index[..., None] + (a.start[i, d] + np.arange(a.count[i, d]) * a.step[i, d]) * pitch[d]
            if (owner[index.reshape(-1)] >= 0).any():
                refuse(f"tensor {t.name!r}: an element lies in two atoms, the second is atom {i}")
            owner[index.reshape(-1)] = a.class_id[i]
        return owner

    def by_boxes(self, tensors: npt.NDArray[np.bool_], maps: Sequence[SourceMap]) -> None:
        """Check these tensors on boxes, those with equal atoms and equal boxes once."""
        a, dims = self.plan.atoms, self.plan.atoms.start.shape[1]
        rows = self._distinct_boxes(maps, dims)
        bounds = np.searchsorted(rows[:, 0], np.arange(len(self.spec.tensors) + 1))
        columns = np.concatenate([a.class_id[:, None], a.start, a.step, a.count], axis=1)
        passed: set[tuple[bytes, bytes]] = set()
        for tensor in np.flatnonzero(tensors).tolist():
            atoms = self._atoms_of(tensor)
            boxes = rows[bounds[tensor] : bounds[tensor + 1], 1:]
            key = columns[atoms].tobytes(), boxes.tobytes()
            if key not in passed:
                self._check_boxes(tensor, atoms, boxes)
                passed.add(key)

    def _distinct_boxes(self, maps: Sequence[SourceMap], dims: int) -> Int64Array:
        """[n, 2 + 3 dims] tensor, worker, start, step, count of the checked workers' boxes, sorted, each once."""
        tables: dict[str, BoxTable] = {}
        parts = [np.zeros((0, 2 + 3 * dims), dtype=np.int64)]
        for w in self.workers:
            if maps[w].fingerprint not in tables:
                tables[maps[w].fingerprint] = expand(maps[w], self.spec, dims)
            t = tables[maps[w].fingerprint]
            who = np.full((len(t), 1), w, dtype=np.int64)
            parts.append(np.concatenate([t.tensor[:, None], who, t.start, t.step, t.count], axis=1))
        rows = np.concatenate(parts)
        rows = rows[np.lexsort(rows.T[::-1])]
        fresh = np.ones(len(rows), dtype=bool)
        fresh[1:] = (rows[1:] != rows[:-1]).any(axis=1)
        return rows[fresh]

    def _check_boxes(self, tensor: int, atoms: Int64Array, boxes: Int64Array) -> None:
        name, a = self.spec.tensors[tensor].name, self.plan.atoms
        dims = a.start.shape[1]
        cells = (a.start[atoms], a.step[atoms], a.count[atoms])
        overlap = first_overlap(cells)
        if overlap is not None:
            refuse(f"tensor {name!r}: atoms {[int(atoms[i]) for i in overlap]} share elements")
        for w in self.workers:
            given = self.owners[a.class_id[atoms], w]
            mine = boxes[boxes[:, 0] == w, 1:]
            if not given.any() and not len(mine):
                continue
            start, step, count = (column[given][:, None] for column in cells)
            said = (start, step, count)
            box = (mine[None, :, :dims], mine[None, :, dims : 2 * dims], mine[None, :, 2 * dims :])
            within = inside(said, box).any(axis=1)
            if not within.all():
                self._not_there(name, w, int(numel(cells[2][given][~within]).sum()))
            if self.rollout[w]:
                short = numel(mine[:, 2 * dims :]) - intersection_numel(said, box).sum(axis=0)
                if (short != 0).any():
                    self._not_given(name, w, int(short.max()))

    def _not_there(self, tensor: str, worker: int, count: int) -> NoReturn:
        name = self.names[worker]
        refuse(f"tensor {tensor!r}: worker {name!r} is said to have {count} elements that are not in its source map")

    def _not_given(self, tensor: str, worker: int, count: int) -> NoReturn:
        refuse(f"tensor {tensor!r}: worker {self.names[worker]!r} needs {count} elements that it is not given")
