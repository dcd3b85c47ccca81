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
    owners = np.zeros((len(plan.classes), len(maps)), dtype=bool)
    for i, c in enumerate(plan.classes):
        owners[i, [*c.holders, *c.needers]] = True
    by_tensor = np.argsort(plan.atoms.tensor, kind="stable")
    bounds = np.searchsorted(plan.atoms.tensor[by_tensor], np.arange(len(spec.tensors) + 1))
    dims = plan.atoms.start.shape[1]
    tables: dict[str, BoxTable] = {}
    for m in maps:
        if m.spec_digest != spec.digest:
            refuse(f"a source map belongs to checkpoint {m.spec_digest}, not to {spec.digest}")
        if m.fingerprint not in tables:
            tables[m.fingerprint] = expand(m, spec, dims)
    boxes = [_BoxIndex(tables[m.fingerprint], len(spec.tensors)) for m in maps]
    copies = [_LatticeIndex(m, len(spec.tensors)) for m in maps]
    checker = _OwnershipChecker(plan, spec, maps, owners)
    for tensor, t in enumerate(spec.tensors):
        if t.name in spec.constants:
            continue
        atoms = by_tensor[bounds[tensor] : bounds[tensor + 1]]
        if t.numel <= exact_numel:
            checker.by_elements(tensor, atoms, copies)
        else:
            checker.by_boxes(tensor, atoms, boxes)


class _BoxIndex:
    """A worker's distinct boxes, found by tensor."""

    def __init__(self, table: BoxTable, num_tensors: int) -> None:
        order = np.argsort(table.tensor, kind="stable")
        self._bounds = np.searchsorted(table.tensor[order], np.arange(num_tensors + 1))
        self._rows = np.concatenate([table.start, table.step, table.count], axis=1)[order]

    def of(self, tensor: int) -> Int64Array:
        """[m, 3 D] start, step, count."""
        return self._rows[self._bounds[tensor] : self._bounds[tensor + 1]]


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
    def __init__(
        self, plan: Plan, spec: CheckpointSpec, maps: Sequence[SourceMap], owners: npt.NDArray[np.bool_]
    ) -> None:
        self.plan, self.spec, self.owners = plan, spec, owners
        self.names = [w.name for w in plan.topology.workers]
        self.rollout = [w.role is Role.ROLLOUT for w in plan.topology.workers]
        self._passed: set[tuple[tuple[int, ...], bytes]] = set()

    def by_elements(self, tensor: int, atoms: Int64Array, copies: list[_LatticeIndex]) -> None:
        t, a = self.spec.tensors[tensor], self.plan.atoms
        owner = np.full(t.numel, -1, dtype=np.int64)
        pitch = np.cumprod([1, *t.shape[:0:-1]])[::-1] if t.shape else np.zeros(0, dtype=np.int64)
        for i in atoms.tolist():
            index = np.array(0)
            for d in range(len(t.shape)):
                index = index[..., None] + (a.start[i, d] + np.arange(a.count[i, d]) * a.step[i, d]) * pitch[d]
            if (owner[index.reshape(-1)] >= 0).any():
                refuse(f"tensor {t.name!r}: an element lies in two atoms, the second is atom {i}")
            owner[index.reshape(-1)] = a.class_id[i]
        padded = np.concatenate([self.owners, np.zeros((1, self.owners.shape[1]), dtype=bool)])
        for w, name in enumerate(self.names):
            said, has = padded[owner, w], copies[w].elements(tensor, t.numel)
            if (said & ~has).any():
                self._not_there(t.name, name, int((said & ~has).sum()))
            if self.rollout[w] and (has & ~said).any():
                refuse(f"tensor {t.name!r}: worker {name!r} needs {int((has & ~said).sum())} elements it is not given")

    def by_boxes(self, tensor: int, atoms: Int64Array, boxes: list[_BoxIndex]) -> None:
        t, a = self.spec.tensors[tensor], self.plan.atoms
        mine = [np.unique(b.of(tensor), axis=0) for b in boxes]
        what = np.concatenate([a.class_id[atoms, None], a.start[atoms], a.step[atoms], a.count[atoms]], axis=1)
        key = (t.shape, b"".join([what.tobytes(), *(len(m).to_bytes(8, "little") + m.tobytes() for m in mine)]))
        if key in self._passed:
            return  # another tensor with the same atoms and the same boxes has passed
        cells = (a.start[atoms], a.step[atoms], a.count[atoms])
        overlap = first_overlap(cells)
        if overlap is not None:
            refuse(f"tensor {t.name!r}: atoms {[int(atoms[i]) for i in overlap]} share elements")
        dims = a.start.shape[1]
        for w, name in enumerate(self.names):
            given = self.owners[a.class_id[atoms], w]
            box = (mine[w][:, :dims], mine[w][:, dims : 2 * dims], mine[w][:, 2 * dims :])
            said = tuple(column[given] for column in cells)
            within = inside(tuple(c[:, None] for c in said), tuple(c[None] for c in box)).any(axis=1)  # type: ignore[arg-type]
            if not within.all():
                self._not_there(t.name, name, int(numel(said[2][~within]).sum()))
            if self.rollout[w]:
                common = intersection_numel(tuple(c[:, None] for c in said), tuple(c[None] for c in box))  # type: ignore[arg-type]
                short = numel(box[2]) - common.sum(axis=0)
                if (short != 0).any():
                    refuse(
                        f"tensor {t.name!r}: worker {name!r} needs {int(short.max())} elements of a box it is not given"
                    )
        self._passed.add(key)

    def _not_there(self, tensor: str, worker: str, count: int) -> NoReturn:
        refuse(f"tensor {tensor!r}: worker {worker!r} is said to have {count} elements that are not in its source map")
