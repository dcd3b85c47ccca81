"""Part of the plan's verifier: who has which elements, atoms against source maps.

Small tensors are checked on plain element indices, taken straight from the source maps' lattices. Large ones by
counting: atoms are pairwise disjoint, each atom said to be a worker's lies inside one of its boxes, and each box of a
worker that needs it is covered by such atoms to the last element.

Large jobs repeat themselves: replicas have equal maps, layers equal tensors. What is equal, to the last number, is checked
once; no result is carried over by a name, a digest of boxes or anything else that could be equal by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import InternalError
from weightbridge.geometry import Boxes, first_overlap, inside, intersection_numel, meeting_pairs, numel
from weightbridge.layout.boxes import BoxTable, expand
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import Plan
from weightbridge.plan.topology import Role

__all__ = ["check_ownership", "refuse"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def refuse(what: str) -> NoReturn:
    """Raise InternalError saying what is wrong with the plan."""
    raise InternalError(f"the plan is wrong: {what}; please report this with the plan's wire form")


def check_ownership(plan: Plan, spec: CheckpointSpec, maps: Sequence[SourceMap], exact_numel: int) -> None:
    """Holders hold, needers need, nothing needed is missing and nothing comes twice."""
    for m in maps:
        if m.spec_digest != spec.digest:
            refuse(f"a source map belongs to checkpoint {m.spec_digest}, not to {spec.digest}")
    owners = np.zeros((len(maps), len(plan.classes)), dtype=bool)
    for i, c in enumerate(plan.classes):
        owners[[*c.holders, *c.needers], i] = True
    # replicas have equal maps, and the plan says the same of them: one of each kind is checked
    kinds: dict[tuple[str, Role, bytes], int] = {}
    for w, (m, worker) in enumerate(zip(maps, plan.topology.workers, strict=True)):
        kinds.setdefault((m.fingerprint, worker.role, owners[w].tobytes()), w)
    workers = tuple(kinds.values())
    checker = _OwnershipChecker(plan, spec, owners[list(workers)].T, workers)
    large = np.array([t.numel > exact_numel for t in spec.tensors], dtype=bool)
    moved = np.array([t.name not in spec.constants for t in spec.tensors], dtype=bool)
    checker.by_boxes(large & moved, maps)
    checker.by_elements(~large & moved, maps)


class _Table:
    """Rows of int64 [n, 1 + m], the first column a tensor's position: the rest of a tensor's rows, as array and as bytes."""

    def __init__(self, rows: Int64Array, num_tensors: int) -> None:
        self._bounds = np.searchsorted(rows[:, 0], np.arange(num_tensors + 1)).tolist()
        self._rows = np.ascontiguousarray(rows[:, 1:])
        self._bytes, self._width = self._rows.tobytes(), self._rows.itemsize * self._rows.shape[1]

    def rows(self, tensor: int) -> Int64Array:
        return self._rows[self._bounds[tensor] : self._bounds[tensor + 1]]

    def bytes(self, tensor: int) -> bytes:
        return self._bytes[self._bounds[tensor] * self._width : self._bounds[tensor + 1] * self._width]


def _sorted_distinct(parts: list[Int64Array]) -> Int64Array:
    rows = np.concatenate(parts)
    rows = rows[np.lexsort(rows.T[::-1])]
    fresh = np.ones(len(rows), dtype=bool)
    fresh[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    return rows[fresh]


class _OwnershipChecker:
    """workers: those to check, one of each kind. owners: [num_classes, num_kinds] who has a class, says the plan."""

    def __init__(self, plan: Plan, spec: CheckpointSpec, owners: BoolArray, workers: tuple[int, ...]) -> None:
        self.plan, self.spec, self.owners, self.workers = plan, spec, owners, workers
        self.names = [plan.topology.workers[w].name for w in workers]
        self.rollout = [plan.topology.workers[w].role is Role.ROLLOUT for w in workers]
        a, n = plan.atoms, len(plan.atoms.tensor)
        by_tensor = np.argsort(a.tensor, kind="stable")
        columns = (a.tensor[:, None], a.class_id[:, None], a.start, a.step, a.count)
        self._atoms = _Table(np.concatenate(columns, axis=1)[by_tensor], len(spec.tensors))
        self._ids = _Table(np.stack([a.tensor, np.arange(n)], axis=1)[by_tensor], len(spec.tensors))

    def by_boxes(self, tensors: BoolArray, maps: Sequence[SourceMap]) -> None:
        """Check these tensors (a mask over the spec's) on boxes, those with equal atoms and equal boxes once."""
        boxes = _Table(self._distinct_boxes(tensors, maps), len(self.spec.tensors))
        passed: set[tuple[bytes, bytes]] = set()
        for tensor in np.flatnonzero(tensors).tolist():
            key = self._atoms.bytes(tensor), boxes.bytes(tensor)
            if key not in passed:
                self._check_boxes(tensor, boxes.rows(tensor))
                passed.add(key)

    def by_elements(self, tensors: BoolArray, maps: Sequence[SourceMap]) -> None:
        """Check these tensors on the indices of their elements, those of equal shape, atoms and copies once."""
        copies = _Table(self._distinct_copies(tensors, maps), len(self.spec.tensors))
        passed: set[tuple[tuple[int, ...], bytes, bytes]] = set()
        for tensor in np.flatnonzero(tensors).tolist():
            key = self.spec.tensors[tensor].shape, self._atoms.bytes(tensor), copies.bytes(tensor)
            if key not in passed:
                self._check_elements(tensor, copies.rows(tensor))
                passed.add(key)

    def _distinct_boxes(self, tensors: BoolArray, maps: Sequence[SourceMap]) -> Int64Array:
        """[n, 2 + 3 dims] tensor, kind, start, step, count of the boxes in these tensors, sorted, each once."""
        dims = self.plan.atoms.start.shape[1]
        tables: dict[str, BoxTable] = {}
        parts = [np.zeros((0, 2 + 3 * dims), dtype=np.int64)]
        for kind, w in enumerate(self.workers):
            if maps[w].fingerprint not in tables:
                tables[maps[w].fingerprint] = expand(maps[w], self.spec, dims)
            t = tables[maps[w].fingerprint]
            who = np.full((len(t), 1), kind, dtype=np.int64)
            rows = np.concatenate([t.tensor[:, None], who, t.start, t.step, t.count], axis=1)
            parts.append(rows[tensors[t.tensor]])
        return _sorted_distinct(parts)

    def _distinct_copies(self, tensors: BoolArray, maps: Sequence[SourceMap]) -> Int64Array:
        """[n, 3 + 2 axes] tensor, kind, src_start, count, src_stride of the copies of these tensors, sorted, each once."""
        axes = max((maps[w].copies.count.shape[1] for w in self.workers), default=1)
        parts = [np.zeros((0, 3 + 2 * axes), dtype=np.int64)]
        for kind, w in enumerate(self.workers):
            c = maps[w].copies
            at = np.flatnonzero(tensors[c.tensor])
            rows = np.zeros((len(at), 3 + 2 * axes), dtype=np.int64)
            rows[:, 0], rows[:, 1], rows[:, 2] = c.tensor[at], kind, c.src_start[at]
            used = c.count.shape[1]
            rows[:, 3 : 3 + axes] = 1
            rows[:, 3 : 3 + used], rows[:, 3 + axes : 3 + axes + used] = c.count[at], c.src_stride[at]
            parts.append(rows)
        return _sorted_distinct(parts)

    def _concerned(self, atoms: Int64Array, theirs: Int64Array) -> Iterator[tuple[int, Int64Array]]:
        """Kinds that have rows of a tensor (`theirs`, sorted by kind) or are said to have one of its atoms, ascending; and
        the rest of each one's rows."""
        said = np.flatnonzero(self.owners[np.unique(atoms[:, 0])].any(axis=0))
        kinds = np.union1d(said, theirs[:, 0])
        ends = np.searchsorted(theirs[:, 0], [kinds, kinds + 1]).T.tolist()
        for kind, (low, high) in zip(kinds.tolist(), ends, strict=True):
            yield kind, theirs[low:high, 1:]

    def _check_elements(self, tensor: int, copies: Int64Array) -> None:
        name, numel_ = self.spec.tensors[tensor].name, self.spec.tensors[tensor].numel
        owner = self._class_of_elements(tensor)
        padded = np.concatenate([self.owners, np.zeros((1, self.owners.shape[1]), dtype=bool)])
        passed: set[tuple[bool, bytes, bytes]] = set()
        for kind, mine in self._concerned(self._atoms.rows(tensor), copies):
            said = padded[owner, kind]
            key = self.rollout[kind], said.tobytes(), mine.tobytes()
            if key in passed:
                continue
            passed.add(key)
            has = _elements(mine, numel_)
            if (said & ~has).any():
                self._not_there(name, kind, int((said & ~has).sum()))
            if self.rollout[kind] and (has & ~said).any():
                self._not_given(name, kind, int((has & ~said).sum()))

    def _class_of_elements(self, tensor: int) -> Int64Array:
        """[numel] the class of each element, -1 where no atom has it."""
        t, dims = self.spec.tensors[tensor], self.plan.atoms.start.shape[1]
        owner = np.full(t.numel, -1, dtype=np.int64)
        pitch = np.cumprod([1, *t.shape[:0:-1]])[::-1].tolist() if t.shape else []
        for i, row in enumerate(self._atoms.rows(tensor).tolist()):
            index = np.array(0)
            for d in range(len(t.shape)):
                start, step, count = row[1 + d], row[1 + dims + d], row[1 + 2 * dims + d]
                index = index[..., None] + (start + np.arange(count) * step) * pitch[d]
            if (owner[index.reshape(-1)] >= 0).any():
                atom = int(self._ids.rows(tensor)[i, 0])
                refuse(f"tensor {t.name!r}: an element lies in two atoms, the second is atom {atom}")
            owner[index.reshape(-1)] = row[0]
        return owner

    def _check_boxes(self, tensor: int, boxes: Int64Array) -> None:
        name, dims = self.spec.tensors[tensor].name, self.plan.atoms.start.shape[1]
        atoms = self._atoms.rows(tensor)
        cells = _columns(atoms[:, 1:], dims)
        overlap = first_overlap(cells)
        if overlap is not None:
            ids = self._ids.rows(tensor)[:, 0]
            refuse(f"tensor {name!r}: atoms {[int(ids[i]) for i in overlap]} share elements")
        passed: set[tuple[bool, bytes, bytes]] = set()
        for kind, mine in self._concerned(atoms, boxes):
            given = self.owners[atoms[:, 0], kind]
            key = self.rollout[kind], given.tobytes(), mine.tobytes()
            if key in passed:
                continue
            passed.add(key)
            start, step, count = (column[given] for column in cells)
            lost, short = _compare((start, step, count), _columns(mine, dims))
            if lost:
                self._not_there(name, kind, lost)
            if self.rollout[kind] and short:
                self._not_given(name, kind, short)

    def _not_there(self, tensor: str, kind: int, count: int) -> NoReturn:
        name = self.names[kind]
        refuse(f"tensor {tensor!r}: worker {name!r} is said to have {count} elements that are not in its source map")

    def _not_given(self, tensor: str, kind: int, count: int) -> NoReturn:
        refuse(f"tensor {tensor!r}: worker {self.names[kind]!r} needs {count} elements that it is not given")


def _columns(rows: Int64Array, dims: int) -> Boxes:
    return rows[:, :dims], rows[:, dims : 2 * dims], rows[:, 2 * dims :]


def _compare(given: Boxes, mine: Boxes) -> tuple[int, int]:
    """Elements of the `given` boxes (disjoint) that are in none of `mine` as a whole, and the most that one of `mine` lacks."""
    within, missing = np.zeros(len(given[0]), dtype=bool), numel(mine[2])
    for i, j in meeting_pairs(given, mine):
        a = (given[0][i], given[1][i], given[2][i])
        b = (mine[0][j], mine[1][j], mine[2][j])
        within[i[inside(a, b)]] = True
        np.subtract.at(missing, j, intersection_numel(a, b))
    return int(numel(given[2][~within]).sum()), int(np.abs(missing).max(initial=0))


def _elements(copies: Int64Array, numel_: int) -> BoolArray:
    """[numel] True for each element that some copy takes. copies: [n, 1 + 2 axes] src_start, count, src_stride."""
    found = np.zeros(numel_, dtype=bool)
    axes = copies.shape[1] // 2
    for row in copies.tolist():
        index = np.array(row[0])
        for count, stride in zip(row[1 : 1 + axes], row[1 + axes :], strict=True):
            index = index[..., None] + np.arange(count) * stride
        found[index.reshape(-1)] = True
    return found
