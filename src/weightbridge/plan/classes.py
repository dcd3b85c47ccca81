"""Replica classes: atoms with equal holders and equal needers, laid end to end as one stream of bytes.

However large the job, it has only hundreds of classes, so everything global is decided on them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightbridge.layout.correspondence import Correspondence
from weightbridge.plan.overlay import Atoms
from weightbridge.plan.plan import AtomTable, ReplicaClass

__all__ = ["classify"]


def classify(job: Correspondence, atoms: Atoms) -> tuple[AtomTable, tuple[ReplicaClass, ...]]:
    """The plan's atom table and its classes, numbered by first appearance in checkpoint order.

    Within a stream atoms lie by falling item size, then in checkpoint order, so that every cut at a multiple of the
    largest item size falls between two elements.
    """
    itemsizes = np.array([t.dtype.itemsize for t in job.spec.tensors], dtype=np.int64)[atoms.tensor]
    nbytes = atoms.count.prod(axis=1) * itemsizes
    used, first = np.unique(atoms.owner_set, return_index=True)  # atoms come in checkpoint order
    number = np.zeros(len(atoms.owner_sets), dtype=np.int64)
    number[used[np.argsort(first, kind="stable")]] = np.arange(len(used))
    class_id = number[atoms.owner_set]
    order = np.lexsort((*atoms.start.T[::-1], atoms.tensor, -itemsizes, class_id))
    class_id, nbytes = class_id[order], nbytes[order]
    totals = np.zeros(len(used), dtype=np.int64)
    np.add.at(totals, class_id, nbytes)
    begin = np.cumsum(totals) - totals
    offsets = np.cumsum(nbytes) - nbytes - begin[class_id]
    table = AtomTable(
        tensor=atoms.tensor[order], start=atoms.start[order], step=atoms.step[order], count=atoms.count[order],
        class_id=class_id, stream_offset=offsets,
    )  # fmt: skip
    return table, _replica_classes(job, atoms, used[np.argsort(first, kind="stable")], totals)


def _replica_classes(
    job: Correspondence, atoms: Atoms, sets: npt.NDArray[np.int64], totals: npt.NDArray[np.int64]
) -> tuple[ReplicaClass, ...]:
    holds = np.array(job.holds, dtype=bool)
    found = []
    for owners, nbytes in zip(atoms.owner_sets[sets], totals.tolist(), strict=True):
        workers = owners[job.kind_of]
        holders, needers = np.flatnonzero(workers & holds), np.flatnonzero(workers & ~holds)
        found.append(ReplicaClass(holders=tuple(holders.tolist()), needers=tuple(needers.tolist()), nbytes=nbytes))
    return tuple(found)
