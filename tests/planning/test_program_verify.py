"""The verifiers refuse every way in which a program can be wrong, and name where."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from tests.unit.program_cases import house, with_round

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.errors import InfeasibleError, InternalError
from weightbridge.layout.source_map import CopyTable, LiveTensor, SourceMap
from weightbridge.plan import HOP, Plan, Role, Topology, Worker, make_plan
from weightbridge.program import Op, WorkerProgram, lower, verify_program, verify_programs
from weightbridge.testing.memory_driver import MemoryDriver

TRAINER, RECEIVER, READER = 0, 5, 6  # b/1 (5) holds what its neighbour c/0 (6) reads


def replaced(program: WorkerProgram) -> list[WorkerProgram]:
    return [program if p.worker == program.worker else p for p in house()[2]]


def refused_alone(
    program: WorkerProgram, *words: str, error: type[Exception] = InternalError, exhaustive: bool = False
):
    job, plan, _ = house()
    with pytest.raises(error) as caught:
        verify_program(program, plan, job.spec, job.maps[program.worker], exhaustive=exhaustive)
    assert all(w in str(caught.value) for w in words), str(caught.value)
    return caught.value


def refused_together(program: WorkerProgram, *words: str) -> None:
    with pytest.raises(InternalError) as caught:
        verify_programs(replaced(program), house()[1])
    assert all(w in str(caught.value) for w in words), str(caught.value)


def without_reader(k: int) -> WorkerProgram:
    program = house()[2][RECEIVER]
    readers = program.rounds[k].readers
    assert READER in readers
    return with_round(program, k, readers=tuple(r for r in readers if r != READER))


def test_right_programs_pass() -> None:
    job, plan, programs = house()
    for program, source_map in zip(programs, job.maps, strict=True):
        verify_program(program, plan, job.spec, source_map)
        verify_program(program, plan, job.spec, source_map, exhaustive=True)
    verify_programs(programs, plan)
    assert any(len(r.readers) == 2 for p in programs for r in p.rounds)
    assert any(p.after for q in programs for r in q.rounds for p in r.posts)


# --- a slot released while a neighbour reads it -----------------------------------------------------------------------


def test_a_slot_released_while_a_neighbour_reads_it_is_refused_with_slot_round_and_neighbour() -> None:
    refused_alone(without_reader(1), "slot 'receive' of 'b/1'", "round 1", "neighbour 'c/0'")
    refused_together(
        without_reader(1), "slot 'receive' of b/1 is released", "neighbour c/0 reads", "round 1", "round 3"
    )


def test_it_is_refused_too_when_reader_and_read_both_forgot() -> None:
    """Nobody waits for anybody then: only the order of steps shows the hazard."""
    _, plan, programs = house()
    reader = programs[READER]
    forgetful = with_round(reader, 1, reads=tuple(r for r in reader.rounds[1].reads if r != RECEIVER))
    both = [forgetful if p.worker == READER else p for p in replaced(without_reader(1))]
    with pytest.raises(InternalError, match=r"slot '(receive|exchange)' of b/1 is .*c/0 in round 1"):
        verify_programs(both, plan)
    refused_alone(forgetful, "round 1", "reads")


def test_in_the_last_rounds_where_nothing_is_written_any_more_the_lists_still_must_agree() -> None:
    program = house()[2][RECEIVER]
    last = max(k for k, r in enumerate(program.rounds) if READER in r.readers)
    assert last >= len(program.rounds) - 2
    refused_together(without_reader(last), "'b/1'", f"round {last}", "neighbour 'c/0'", "missing among the readers")


def test_a_driver_that_runs_it_meets_the_hazard() -> None:
    job, _, _ = house()
    checkpoint = job.checkpoint(1)
    messages = []
    for seed in range(12):
        live = {w: job.live(w, checkpoint if w < 2 else None) for w in range(7)}
        programs = replaced(without_reader(1))
        driver = MemoryDriver(programs, {w: [a.view(np.uint8) for a in arrays] for w, arrays in live.items()})
        try:
            outcome = driver.run(seed=seed)
        except InternalError as error:
            messages.append(str(error))
        else:  # the neighbour's ASSEMBLED comes to someone who does not expect it
            assert {f.peer for f in outcome.failed.values()} >= {READER}
    assert any("is in use: unread by [('assembly', 6)]" in m or "is read for worker 6" in m for m in messages)


def test_a_reader_that_reads_nothing_would_be_waited_for_for_ever() -> None:
    program = house()[2][RECEIVER]
    refused_alone(with_round(program, 2, readers=(2, 4, 6)), "round 2", "[2]")
    refused_together(with_round(program, 2, readers=(2, 4, 6)), "'b/1' waits in round 2 for 'a/0'")


# --- the order of steps -----------------------------------------------------------------------------------------------


def test_a_forward_that_does_not_wait_for_its_bytes_is_refused() -> None:
    program = house()[2][2]
    posts = program.rounds[0].posts
    hasty = with_round(program, 0, posts=(structs.replace(posts[0], after=()), *posts[1:]))
    refused_alone(hasty, "round 0", "is after []")
    refused_together(hasty, "slot 'receive' of a/0 is read", "round 0 before trainer/0 has written it")


def test_programs_that_wait_in_a_circle_are_refused() -> None:
    _, plan, programs = house()
    changed = {}
    for worker, other in ((2, 5), (5, 2)):  # each forward waits for the other one's
        program = programs[worker]
        k, i = next((k, i) for k, r in enumerate(program.rounds) for i, p in enumerate(r.posts) if p.peer == other)
        changed[worker] = k, i
    k2, k5 = changed[2][0], changed[5][0]
    k = next(
        k for k in range(5) if all(any(p.peer == o for p in programs[w].rounds[k].posts) for w, o in ((2, 5), (5, 2)))
    )
    assert k2 <= k
    assert k5 <= k
    looped = []
    for program in programs:
        other = {2: 5, 5: 2}.get(program.worker)
        if other is not None:
            posts = tuple(
                structs.replace(p, after=(("exchange", other),)) if p.peer == other else p
                for p in program.rounds[k].posts
            )
            program = with_round(program, k, posts=posts)
        looped.append(program)
    with pytest.raises(InternalError, match=r"wait for each other in a circle: .* at (a/0|b/1)"):
        verify_programs(looped, plan)


# --- writes and arrivals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["local_offset", "remote_offset", "capacity_bytes", "route"])
@pytest.mark.parametrize(("worker", "side"), [(TRAINER, "posts"), (2, "posts"), (RECEIVER, "awaits")])
def test_a_segment_that_differs_from_the_plan_is_refused(worker: int, side: str, field: str) -> None:
    program = house()[2][worker]
    k = next(k for k, r in enumerate(program.rounds) if getattr(r, side))
    transfers = list(getattr(program.rounds[k], side))
    segments = transfers[0].segments.copy()
    segments[field][-1] += 64 if field != "route" else 1
    wrong = with_round(program, k, **{side: (structs.replace(transfers[0], segments=segments), *transfers[1:])})
    refused_alone(wrong, f"round {k}")
    refused_together(wrong, f"round {k}", "differs at its two ends")


@pytest.mark.parametrize(
    ("worker", "side", "state"), [(TRAINER, "posts", "not sent"), (RECEIVER, "awaits", "not awaited")]
)
def test_a_missing_write_or_arrival_is_refused(worker: int, side: str, state: str) -> None:
    program = house()[2][worker]
    k = next(k for k, r in enumerate(program.rounds) if getattr(r, side))
    wrong = with_round(program, k, **{side: getattr(program.rounds[k], side)[1:]})
    refused_alone(wrong, f"round {k}", "lacks")
    refused_together(wrong, f"round {k}", state)


def test_two_posts_with_one_key_are_refused() -> None:
    program = house()[2][TRAINER]
    posts = program.rounds[0].posts
    refused_alone(with_round(program, 0, posts=(*posts, posts[0])), "round 0", "tags could not tell them apart")


def test_another_plan_codec_or_number_of_copies_is_refused() -> None:
    job, plan, programs = house()
    refused_alone(replace(programs[2], plan_digest="0"), "a/0", "expected plan")
    refused_together(replace(programs[2], plan_digest="0"), "'a/0'", "another plan")
    refused_together(replace(programs[2], codec="delta"), "another codec")
    slots = tuple(replace(s, num_slots=3) for s in programs[0].slots)
    refused_together(replace(programs[0], slots=slots), "same number of copies")
    with pytest.raises(InternalError, match="one program for each of the 7 workers"):
        verify_programs(programs[1:], plan)
    assert job.spec.digest == plan.spec_digest


def test_slots_over_budget_or_overlapping_are_refused() -> None:
    program = house()[2][RECEIVER]
    receive, exchange, *rest = program.slots
    big = replace(exchange, capacity_bytes=(1 << 20) + 64)
    error = refused_alone(replace(program, slots=(receive, big, *rest)), "'exchange'", "'b/1'", error=InfeasibleError)
    assert (error.needed_bytes, error.budget_bytes) == ((1 << 20) + 64, 1 << 20)
    refused_alone(replace(program, slots=(receive, replace(exchange, arena_offset=0), *rest)), "overlaps")
    refused_alone(replace(program, slots=(receive,)), "expected ['receive', 'exchange', 'relay']")
    small = replace(receive, capacity_bytes=64)
    refused_alone(replace(program, slots=(small, exchange, *rest)), "leaves its slot of 64 bytes")


# --- descriptors ------------------------------------------------------------------------------------------------------


def tables() -> list[tuple[int, int]]:
    """(worker, round) with a table of at least two rows: one trainer, one rollout."""
    found = []
    for worker in (TRAINER, READER):
        rounds = house()[2][worker].rounds
        found.append((worker, next(k for k, r in enumerate(rounds) if max(len(r.pack), len(r.assemble.table)) > 1)))
    return found


def changed_table(worker: int, k: int, change) -> WorkerProgram:
    program = house()[2][worker]
    round_ = program.rounds[k]
    table = change((round_.pack if worker == TRAINER else round_.assemble.table).copy())
    if worker == TRAINER:
        return with_round(program, k, pack=table)
    return with_round(program, k, assemble=replace(round_.assemble, table=table))


def _set(field: str, row: int, value):
    def change(table):
        table[field][row] = value(table[field][row]) if callable(value) else value
        return table

    return change


CHANGES = {
    "a row is missing": lambda t: t[1:],
    "a row is there twice": lambda t: np.concatenate([t, t[:1]]),
    "source of another element": _set("src_offset", 0, lambda v: v + 4),
    "target of another element": _set("dst_offset", 0, lambda v: v + 4),
    "source between elements": _set("src_offset", 0, lambda v: v + 1),
    "target between elements": _set("dst_offset", 0, lambda v: v + 1),
    "far source": _set("src_offset", 0, 1 << 40),
    "negative target": _set("dst_offset", 0, -4),
    "no such source buffer": _set("src_buffer", 0, 99),
    "no such target buffer": _set("dst_buffer", 0, 99),
    "another op": _set("op", 0, lambda v: Op.COPY if v else Op.F32_TO_F16),
    "another item size": _set("itemsize", 0, lambda v: v * 2),
    "no count": _set("count", 0, 0),
    "one element too few": _set("count", 0, lambda v: np.where(np.arange(6) == int(np.argmax(v)), v - 1, v)),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("place", [0, 1], ids=["pack", "assemble"])
def test_a_wrong_descriptor_is_refused(what: str, place: int) -> None:
    worker, k = tables()[place]
    for exhaustive in (False, True):
        refused_alone(changed_table(worker, k, CHANGES[what]), exhaustive=exhaustive)


@pytest.mark.parametrize("place", [0, 1], ids=["pack", "assemble"])
def test_two_swapped_targets_of_equal_shape_are_refused(place: int) -> None:
    """Coverage is as before, so only the question of which element lies where can tell."""
    worker = (TRAINER, READER)[place]

    def swap(table):
        sides = ("count", "op", "itemsize", "dst_stride", "src_stride")
        keys = [tuple(row[s].tobytes() for s in sides) for row in table]
        i, j = next((i, j) for j in range(len(keys)) for i in range(j) if keys[i] == keys[j])
        for field in ("dst_offset", "dst_buffer"):
            table[field][[i, j]] = table[field][[j, i]]
        return table

    for k in range(5):
        try:
            program = changed_table(worker, k, swap)
        except StopIteration:
            continue
        refused_alone(program, f"round {k}")
        return
    pytest.fail("no two rows of equal shape")


def test_a_trainer_does_not_assemble_and_a_rollout_does_not_pack() -> None:
    _, _, programs = house()
    pack = programs[TRAINER].rounds[0].pack
    refused_alone(with_round(programs[READER], 0, pack=pack), "round 0", "a trainer packs and a rollout assembles")


# --- what the plan, the map and the verifier itself must be -----------------------------------------------------------


def test_every_element_is_looked_at_when_exhaustive(monkeypatch) -> None:
    """Were the proof on axes blind, the look at each element would still see an element that is not where it should be."""
    monkeypatch.setattr("weightbridge.program.contents._follows", lambda *args: np.ones(len(args[-1]), dtype=bool))
    for worker, k in tables():
        side = "src_offset" if worker == TRAINER else "dst_offset"
        size = 4 if worker == TRAINER else 2
        wrong = changed_table(worker, k, _set(side, 0, lambda v, size=size: v + size))
        refused_alone(wrong, f"round {k}", "which the source map does not have at byte", exhaustive=True)


def test_counts_whose_product_wraps_around_are_refused() -> None:
    one, other = 7, pow(7, -1, 1 << 64)
    assert one * other % (1 << 64) == 1
    assert 0 < other < 1 << 63  # so that it is a count
    for worker, k in tables():
        round_ = house()[2][worker].rounds[k]
        table = round_.pack if worker == TRAINER else round_.assemble.table
        wrapped = np.concatenate([[one, other], table["count"][0][2:]])
        assert table["count"][0][:2].tolist() == [1, 1]
        refused_alone(changed_table(worker, k, _set("count", 0, wrapped)), f"round {k}", "more than any slot holds")


def test_a_program_checked_against_another_map_is_refused() -> None:
    job, plan, programs = house()
    with pytest.raises(InternalError, match=r"'a/0'.*source map"):
        verify_program(programs[2], plan, job.spec, job.maps[3])


def test_elements_that_the_plan_does_not_give_a_worker_are_refused() -> None:
    job, plan, _ = house()
    for i, c in enumerate(plan.classes):
        if 4 in c.needers and len(c.needers) > 1:
            classes = list(plan.classes)
            classes[i] = replace(c, needers=tuple(w for w in c.needers if w != 4))
            poor = replace(plan, classes=tuple(classes))
            program = lower(poor, job.spec, job.maps[4], 4)
            with pytest.raises(InternalError, match=r"'b/0'.*never assembled"):
                verify_program(program, poor, job.spec, job.maps[4])


def small_job(live_rows) -> tuple[CheckpointSpec, Topology, list[SourceMap]]:
    """Two trainers with four rows each of an (8, 6) tensor, and one rollout with these rows of a CopyTable."""
    bf16 = dtype_named("BF16")
    spec = CheckpointSpec(tensors=(TensorSpec(name="w", shape=(8, 6), dtype=bf16),))
    live = (LiveTensor(name="live", shape=(60,), strides=(1,), dtype=bf16),)

    def of(rows) -> SourceMap:
        return SourceMap(spec_digest=spec.digest, live=live, copies=CopyTable.from_rows(rows))

    workers = [Worker(name=f"trainer/{r}", role=Role.TRAINER, node="n0", rank=r) for r in range(2)]
    workers.append(Worker(name="a/0", role=Role.ROLLOUT, node="n1", rank=0, engine="a"))
    halves = [of([(0, 0, 24 * r, 0, ((24, 1, 1),))]) for r in range(2)]
    return spec, Topology(workers=tuple(workers)), [*halves, of(live_rows)]


def test_a_map_that_puts_two_elements_in_one_place_is_refused() -> None:
    spec, topology, maps = small_job([(0, 0, 0, 0, ((24, 1, 1),)), (0, 0, 24, 23, ((24, 1, 1),))])
    plan = make_plan(spec, topology, maps)
    with pytest.raises(InternalError, match=r"'a/0'.*'live' is assembled twice"):
        verify_program(lower(plan, spec, maps[2], 2), plan, spec, maps[2])


def test_atoms_that_share_elements_are_refused() -> None:
    """Both halves are the first one: as many elements as the box has, each of the first half twice."""
    spec, topology, maps = small_job([(0, 0, 0, 0, ((48, 1, 1),))])
    plan = make_plan(spec, topology, maps)
    assert plan.atoms.count[:, 0].tolist() == [4, 4]
    doubled = replace(plan, atoms=replace(plan.atoms, start=plan.atoms.start * 0))
    with pytest.raises(InternalError, match="'w' share elements"):
        verify_program(lower(doubled, spec, maps[2], 2), doubled, spec, maps[2])


def _with_hop(plan: Plan, *hop: int) -> Plan:
    return replace(plan, hops=np.concatenate([plan.hops, np.array([hop], dtype=HOP)]))


def _with_pace(plan: Plan, pace: int) -> Plan:
    routes = plan.routes.copy()
    routes["pace"][0], routes["phase"][0] = pace, 5 * 100
    return replace(plan, routes=routes)


BAD_PLANS = {
    "a route twice in one worker": (lambda p: _with_hop(p, 0, 1, 2, 5), "'b/1'"),
    "passed on by who never has it": (lambda p: _with_hop(p, 0, 1, 3, 4), "'a/1' writes route 0 before it has it"),
    "passed on in the stage it comes in": (lambda p: _with_hop(p, 0, 1, 5, 4), "'b/1' writes route 0 before it has it"),
    "cuts that go back": (lambda p: _with_pace(p, -300), "cuts"),
    "parts that are no whole": (lambda p: _with_pace(p, 0), "cuts"),
    "atoms over one another": (
        lambda p: replace(p, atoms=replace(p.atoms, stream_offset=p.atoms.stream_offset // 2)), "class streams"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_PLANS)
def test_a_plan_that_no_program_can_be_checked_against_is_refused(what: str) -> None:
    job, plan, programs = house()
    change, words = BAD_PLANS[what]
    bad = change(plan)
    program = replace(programs[3], plan_digest=bad.digest)
    with pytest.raises(InternalError) as caught:
        verify_program(program, bad, job.spec, job.maps[3])
    assert words in str(caught.value)
    assert "verify the plan first" in str(caught.value)


def test_a_plan_whose_slots_do_not_hold_their_segments_is_refused() -> None:
    job, plan, programs = house()
    tight = replace(plan, slot_bytes=64)
    program = programs[TRAINER]
    small = replace(program, plan_digest=tight.digest, slots=(replace(program.slots[0], capacity_bytes=64),))
    with pytest.raises(InfeasibleError, match="must hold 192 bytes in round 0") as caught:
        verify_program(small, tight, job.spec, job.maps[TRAINER])
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (192, 64)
