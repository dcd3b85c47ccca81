"""Programs of a whole job, one at a time: counted, complete, and agreeing with each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from tests.unit.program_cases import house, twins, with_round

from weightbridge.errors import InternalError
from weightbridge.program import WorkerProgram
from weightbridge.program.program import AS_READY
from weightbridge.program.verify_job import verify_job


def checked(case, programs):
    job, plan, _ = case()
    return verify_job(plan, job.spec, job.maps, programs)


def refused(case, programs, *words: str) -> None:
    with pytest.raises(InternalError) as caught:
        checked(case, programs)
    assert all(w in str(caught.value) for w in words), str(caught.value)


@pytest.mark.parametrize("case", [house, twins])
def test_facts_are_what_routes_and_classes_say(case) -> None:
    job, plan, programs = case()
    size = (plan.routes["hi"] - plan.routes["lo"]).tolist()
    copies = [1 + int((plan.hops["route"] == r).sum()) for r in range(len(size))]
    by_class = [0] * len(plan.classes)
    for route, nbytes, n in zip(plan.routes.tolist(), size, copies, strict=True):
        by_class[route[0]] += nbytes * n
    facts = checked(case, reversed(programs))
    assert facts.posted_bytes_by_class == tuple(by_class)
    assert facts.posted_bytes == sum(by_class)
    assert facts.packed_bytes == sum(size)
    itemsize = np.array([t.dtype.itemsize for t in job.spec.tensors])
    assembled = [int((m.copies.numel * itemsize[m.copies.tensor]).sum()) for m in job.maps]
    assert facts.assembled_bytes == sum(assembled[w] for w in job.topology.rollouts)
    tables = [sum(len(r.pack) + len(r.assemble.table) for r in p.rounds) for p in programs]
    assert (facts.num_descriptors, facts.max_descriptors) == (sum(tables), max(tables))
    posts = [sum(len(r.posts) for r in p.rounds) for p in programs]
    assert (facts.num_posts, facts.max_posts) == (sum(posts), max(posts))
    assert facts.max_arena_bytes == max(p.arena_bytes for p in programs)


def test_programs_are_taken_one_at_a_time() -> None:
    _, _, programs = twins()
    alive: list[int] = []

    def stream():
        for program in programs:
            alive.append(program.worker)
            yield program

    checked(twins, stream())
    assert alive == [p.worker for p in programs]


def test_each_worker_must_come_once() -> None:
    _, _, programs = house()
    refused(house, programs[:-1], "none for ['c/0']")
    refused(house, [*programs, programs[3]], "second program for worker 3")
    refused(house, [*programs[:-1], replace(programs[-1], worker=7)], "worker 7")
    refused(house, [], "'trainer/0'")
    refused(house, [programs[1], replace(programs[0], worker=1)], "second program for worker 1")


def test_all_must_have_one_codec_one_order_of_posts_and_one_number_of_copies() -> None:
    _, _, programs = house()
    *others, last = programs
    refused(house, [*others, replace(last, codec="delta")], "'c/0'", "another codec", "'trainer/0'")
    refused(house, [*others, replace(last, base_version=4)], "another base_version")
    refused(house, [*others, replace(last, post_order=AS_READY)], "another post_order")
    slots, at = [], 0
    for slot in last.slots:
        slots.append(replace(slot, num_slots=3, arena_offset=at))
        at += 3 * slot.capacity_bytes
    refused(house, [*others, replace(last, slots=tuple(slots))], "another number of copies", "'c/0'")
    checked(house, [replace(p, post_order=AS_READY) for p in programs])


def test_a_write_changed_at_both_of_its_ends_is_refused() -> None:
    """Both ends agree then, and no check of one against the other could tell."""
    _, _, programs = house()
    post = programs[2].rounds[0].posts[0]
    changed: list[WorkerProgram] = list(programs)
    for worker, side in ((2, "posts"), (post.peer, "awaits")):
        found = []
        for t in getattr(programs[worker].rounds[0], side):
            segments = t.segments.copy()
            if t.stage == post.stage and t.peer == (post.peer if side == "posts" else 2):
                segments["remote_offset"] += 64
            found.append(structs.replace(t, segments=segments))
        changed[worker] = with_round(programs[worker], 0, **{side: tuple(found)})
    refused(house, changed, "round 0", "'a/0'")


def test_a_reader_and_its_read_that_both_forgot_are_refused() -> None:
    _, _, programs = house()
    k = next(k for k, r in enumerate(programs[5].rounds) if 6 in r.readers)
    changed = list(programs)
    changed[5] = with_round(programs[5], k, readers=tuple(r for r in programs[5].rounds[k].readers if r != 6))
    changed[6] = with_round(programs[6], k, reads=tuple(r for r in programs[6].rounds[k].reads if r != 5))
    refused(house, changed, f"round {k}", "'b/1'")


def test_maps_of_another_number_of_workers_are_refused() -> None:
    job, plan, programs = house()
    with pytest.raises(InternalError, match="6 source maps for 7 workers"):
        verify_job(plan, job.spec, job.maps[:6], programs)
