"""Atoms and classes of hand-made jobs."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from tests.unit.plan_cases import everything, rollout, rows, spec_of, takes, topology, trainer

from weightbridge.errors import CoverageError, LayoutError
from weightbridge.layout.correspondence import Correspondence
from weightbridge.layout.source_map import CopyTable, SourceMap
from weightbridge.plan.classes import classify
from weightbridge.plan.overlay import overlay


def job_of(spec, holds, *maps):
    return Correspondence(spec=spec, workers=tuple(f"w{i}" for i in range(len(maps))), holds=holds, maps=maps)


def boxes(atoms, rank):
    return [
        (int(t), *(slice(int(s), int(s + d * (n - 1) + 1), int(d)) for s, d, n in zip(ss, dd, nn, strict=True)))[
            : rank + 1
        ]
        for t, ss, dd, nn in zip(atoms.tensor, atoms.start, atoms.step, atoms.count, strict=True)
    ]


def test_rows_against_columns_make_a_grid():
    spec = spec_of((5, 6))
    job = job_of(
        spec, (True, True, False, False),
        takes(spec, (0, slice(0, 3))), takes(spec, (0, slice(3, 5))),
        takes(spec, (0, slice(0, 5), slice(0, 2))), takes(spec, (0, slice(0, 5), slice(2, 6))),
    )  # fmt: skip
    atoms = overlay(job)
    assert boxes(atoms, 2) == [
        (0, slice(0, 3, 1), slice(0, 2, 1)), (0, slice(0, 3, 1), slice(2, 6, 1)),
        (0, slice(3, 5, 1), slice(0, 2, 1)), (0, slice(3, 5, 1), slice(2, 6, 1)),
    ]  # fmt: skip
    table, classes = classify(job, atoms)
    assert [(c.holders, c.needers, c.nbytes) for c in classes] == [
        ((0,), (2,), 12), ((0,), (3,), 24), ((1,), (2,), 8), ((1,), (3,), 16),
    ]  # fmt: skip
    assert table.class_id.tolist() == [0, 1, 2, 3]


def test_a_shard_that_begins_mid_row_does_not_cut_other_rows():
    spec = spec_of((100, 8))
    flat = [(0, 0, 0, 0, ((403, 1, 1),)), (0, 0, 403, 0, ((397, 1, 1),))]
    whole = everything(spec)
    shards = [SourceMap(spec_digest=spec.digest, live=whole.live, copies=CopyTable.from_rows([row])) for row in flat]
    atoms = overlay(job_of(spec, (True, True, False), *shards, whole))
    assert boxes(atoms, 2) == [
        (0, slice(0, 50, 1), slice(0, 8, 1)),
        (0, slice(50, 51, 1), slice(0, 3, 1)),
        (0, slice(50, 51, 1), slice(3, 8, 1)),
        (0, slice(51, 100, 1), slice(0, 8, 1)),
    ]


def test_neighbours_with_the_same_boxes_are_joined():
    # the cuts of worker 1's columns fall on rows of the left half only; the right half stays one atom
    spec = spec_of((8, 6))
    left = takes(spec, (0, slice(0, 2), slice(0, 3)), (0, slice(2, 7), slice(0, 3)))
    atoms = overlay(
        job_of(spec, (True, False, False), everything(spec), left, takes(spec, (0, slice(0, 8), slice(3, 6))))
    )
    assert (0, slice(0, 8, 1), slice(3, 6, 1)) in boxes(atoms, 2)
    assert len(atoms.tensor) == 3


@pytest.mark.parametrize(("top", "left"), [(0, 0), (0, 4), (4, 0), (4, 4)])
def test_the_rest_of_a_corner_is_two_atoms(top, left):
    # the L-shaped rest has one cover, but its two parts have other columns and must not be joined
    spec = spec_of((8, 8))
    corner = takes(spec, (0, slice(top, top + 4), slice(left, left + 4)))
    atoms = overlay(job_of(spec, (True, False, False), everything(spec), everything(spec), corner))
    assert sorted(atoms.count.prod(axis=1).tolist()) == [16, 16, 32]


def test_interleaved_columns_stay_one_atom_each():
    spec = spec_of((4, 2880))
    even, odd = (takes(spec, (0, slice(0, 4), slice(i, 2880, 2))) for i in range(2))
    atoms = overlay(job_of(spec, (True, False, False), everything(spec), even, odd))
    assert [b[2] for b in boxes(atoms, 2)] == [slice(0, 2879, 2), slice(1, 2880, 2)]


def test_equal_tensors_share_one_refinement(monkeypatch):
    from weightbridge.plan import overlay as module

    calls = []
    real = module.refine_signature
    monkeypatch.setattr(module, "refine_signature", lambda *a: calls.append(1) or real(*a))
    spec = spec_of(*[(6, 4)] * 9, (4, 6))
    shards = [takes(spec, *((i, rows(t.shape[0], r, 2)) for i, t in enumerate(spec.tensors))) for r in range(2)]
    atoms = overlay(job_of(spec, (True, True, False), *shards, everything(spec)))
    assert len(calls) == 2
    assert np.bincount(atoms.tensor).tolist() == [2] * 10


def test_elements_nobody_needs_are_left_out():
    spec = spec_of((6, 4), (3,))
    atoms = overlay(job_of(spec, (True, False), everything(spec), takes(spec, (0, slice(2, 4)))))
    assert boxes(atoms, 2) == [(0, slice(2, 4, 1), slice(0, 4, 1))]


def test_nobody_needs_anything():
    spec = spec_of((6, 4))
    job = job_of(spec, (True, False), everything(spec), takes(spec))
    table, classes = classify(job, overlay(job))
    assert (len(table), classes) == (0, ())


def test_an_element_that_lies_in_a_worker_twice_is_one_atom():
    spec = spec_of((6, 4))
    twice = takes(spec, (0, slice(0, 4)), (0, slice(2, 6)))
    atoms = overlay(job_of(spec, (True, False), everything(spec), twice))
    assert sum(int(n.prod()) for n in atoms.count) == 24
    assert len(atoms.tensor) == 3  # the overlap is apart: there the worker's map is affine twice


def test_a_needed_element_without_holder_is_refused_by_name():
    spec = spec_of((6, 4), (5, 3))
    job = job_of(
        spec,
        (True, False, False),
        takes(spec, (0,), (1, slice(0, 4))),
        takes(spec, (0,)),
        takes(spec, (1, slice(2, 5))),
    )
    with pytest.raises(CoverageError, match=r"'t1'.*'w2'.*3 of") as caught:
        overlay(job)
    assert caught.value.tensor == "t1"
    assert caught.value.worker == "w2"
    assert caught.value.box == ((4, 1, 1), (0, 1, 3))


def test_constants_are_not_transferred():
    spec = spec_of((6, 4), (2,), constants={"t1": 1.0})
    wants_both = takes(spec, (0,), (1,))
    atoms = overlay(job_of(spec, (True, False), takes(spec, (0,)), wants_both))
    assert set(atoms.tensor.tolist()) == {0}


def test_wide_elements_come_first_in_a_stream():
    spec = spec_of((3,), (5,), (7,), (2,), dtype=["U8", "F32", "BF16", "F64"])
    job = job_of(spec, (True, False), everything(spec), everything(spec))
    table, classes = classify(job, overlay(job))
    assert table.tensor.tolist() == [3, 1, 2, 0]
    assert table.stream_offset.tolist() == [0, 16, 36, 50]
    assert [c.nbytes for c in classes] == [53]


def test_a_scalar_is_an_atom():
    spec = spec_of((), (3,), dtype="F32")
    atoms = overlay(job_of(spec, (True, False), everything(spec), everything(spec)))
    assert atoms.tensor.tolist() == [0, 1]
    assert atoms.count.tolist() == [[1], [3]]


def test_a_map_of_another_checkpoint_is_refused():
    spec, other = spec_of((6, 4)), spec_of((6, 5))
    with pytest.raises(LayoutError, match="'w1'") as caught:
        job_of(spec, (True, False), everything(spec), everything(other))
    assert caught.value.worker == "w1"


def test_workers_roles_and_maps_must_match():
    spec = spec_of((6, 4))
    with pytest.raises(LayoutError, match="2 roles"):
        job_of(spec, (True, False), everything(spec))


def test_workers_of_equal_layout_and_role_are_one_kind(monkeypatch):
    from weightbridge.layout import correspondence as module

    calls = []
    real = module.expand
    monkeypatch.setattr(module, "expand", lambda *a: calls.append(1) or real(*a))
    spec = spec_of((6, 4))
    half = takes(spec, (0, slice(0, 3)))
    job = job_of(
        spec, (True, False, True, False, True), everything(spec), half, half, everything(spec), everything(spec)
    )
    assert job.kind_of.tolist() == [0, 1, 2, 3, 0]
    assert job.kinds == (0, 1, 2, 3)
    assert job.boxes[0] is job.boxes[3]
    assert len(calls) == 2
    assert job.rows[:, :2].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]


def owners_by_element(job):
    """(holders, needers) -> elements of each tensor, from the copies' flat offsets one by one."""
    having = {}
    for worker, source_map in enumerate(job.maps):
        c = source_map.copies
        for row in range(len(c)):
            for steps in np.ndindex(*c.count[row]):
                flat = int(c.src_start[row]) + int(np.dot(steps, c.src_stride[row]))
                having.setdefault((int(c.tensor[row]), flat), set()).add(worker)
    found = {}
    for element, workers in having.items():
        holders, needers = (tuple(sorted(w for w in workers if job.holds[w] is held)) for held in (True, False))
        if needers:
            found.setdefault((holders, needers), set()).add(element)
    return found


def random_slice(rng, extent):
    low, high = sorted(rng.choice(extent + 1, 2, replace=False).tolist())
    return slice(low, high, int(rng.integers(1, 4)))


@pytest.mark.parametrize("seed", range(12))
def test_classes_are_what_the_elements_say(seed):
    """More kinds than bits in a byte; strided boxes, replicas of whole and partial maps, one map on both sides."""
    rng = np.random.default_rng(seed)
    spec = spec_of((5, 6), (7,), (5, 6), (2, 3, 4))
    pool = [
        takes(spec, *((i, *(random_slice(rng, n) for n in spec.tensors[i].shape)) for i in (0, 1, 2, 3, 3)))
        for _ in range(11)
    ]
    maps = [everything(spec), *(pool[i] for i in (*range(11), *rng.integers(0, 11, 6).tolist()))]
    job = job_of(spec, (True, *(rng.integers(0, 2, 17) == 1).tolist()), *maps)
    assert len(job.kinds) > 8
    table, classes = classify(job, overlay(job))
    found = {(c.holders, c.needers): set() for c in classes}
    pitch = [np.cumprod([1, *t.shape[:0:-1]])[::-1].tolist() for t in spec.tensors]
    for i, class_id in enumerate(table.class_id.tolist()):
        tensor = int(table.tensor[i])
        own = found[classes[class_id].holders, classes[class_id].needers]
        for steps in np.ndindex(*table.count[i]):
            at = (table.start[i] + np.array(steps) * table.step[i]).tolist()
            element = (tensor, sum(a * p for a, p in zip(at, pitch[tensor], strict=False)))
            assert element not in own
            own.add(element)
    assert found == owners_by_element(job)
    assert [c.nbytes for c in classes] == [2 * len(found[c.holders, c.needers]) for c in classes]


def test_elements_in_any_order_need_no_table_of_all_pairs():
    # 1500 elements, each a box of its own: a table of boxes by cells would hold more than two million entries
    spec = spec_of((1500,))
    order = np.random.default_rng(1).permutation(1500).tolist()
    whole = everything(spec)
    copies = CopyTable.from_rows([(0, 0, element, at, ()) for at, element in enumerate(order)])
    job = job_of(spec, (True, False), SourceMap(spec_digest=spec.digest, live=whole.live, copies=copies), whole)
    assert len(job.rows) == 1501
    tracemalloc.start()
    atoms = overlay(job)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert atoms.start[:, 0].tolist() == list(range(1500))
    assert peak < 2 << 20


def test_the_case_helpers_build_what_they_say():
    spec = spec_of((5, 2))
    assert topology(trainer(0), rollout("e", 0, "b")).nodes == ("a", "b")
    assert takes(spec, (0, rows(5, 2, 3))).copies.numel.sum() == 2
