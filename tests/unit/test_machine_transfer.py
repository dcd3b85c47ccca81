"""The transfer machine, step by step: a trainer alone, a rollout alone, and machines that are wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from tests import toy_programs as toy

from weightbridge.errors import InternalError
from weightbridge.machine import (
    Arrived,
    Assemble,
    AssembleAllowed,
    AssembleDone,
    Decode,
    DecodeDone,
    Failed,
    Finished,
    Instruction,
    Kind,
    Pack,
    PackDone,
    PeerLost,
    PostWrites,
    Released,
    Signal,
    Tag,
    TransferMachine,
    WriteDone,
)
from weightbridge.machine.events import Event
from weightbridge.plan.planner import PlanOptions, make_plan
from weightbridge.program import DESCRIPTOR, SEGMENT, Await, Post, Round, SlotSpec, WorkerProgram, lower
from weightbridge.program import Assemble as AssembleTable
from weightbridge.testing.memory_driver import MemoryDriver

ROW = np.ones(1, dtype=DESCRIPTOR)
SEG = np.array([(0, 0, 64, 0)], dtype=SEGMENT)
RUN = {"session": 7, "epoch": 1, "version": 3, "attempt": 0}


def tag(kind: Kind, round_: int, stage: int = 0, **changes: int) -> Tag:
    return Tag(**{**RUN, "round": round_, "kind": kind, "stage": stage, **changes})


def machine_of(
    worker: int, stages: tuple[str, ...], rounds: list[Round], *, codec: str = "identity", allowed: bool = True
):
    slots = tuple(SlotSpec(stage=s, capacity_bytes=64, num_slots=2, arena_offset=128 * i) for i, s in enumerate(stages))
    program = WorkerProgram(worker=worker, plan_digest="", slots=slots, rounds=tuple(rounds), codec=codec)
    return TransferMachine(program, **RUN, assemble_allowed=allowed)


def trainer(*, num_rounds: int = 4, peers: tuple[int, ...] = (10, 11)) -> TransferMachine:
    posts = tuple(Post(stage="receive", source="send", peer=p, segments=SEG) for p in peers)
    return machine_of(0, ("send",), [Round(pack=ROW, posts=posts)] * num_rounds)


def rollout(*, num_rounds: int = 4, codec: str = "identity", allowed: bool = True) -> TransferMachine:
    """Worker 10: from trainer 0, on to 20 in another node; 11 is a neighbour, both read each other."""
    round_ = Round(
        posts=(Post(stage="exchange", source="receive", peer=20, segments=SEG, after=(("receive", 0),)),),
        awaits=(Await(stage="receive", peer=0, segments=SEG), Await(stage="exchange", peer=20, segments=SEG)),
        assemble=AssembleTable(sources=((10, "receive"), (11, "receive")), table=ROW),
        reads=(11,),
        readers=(11,),
    )
    return machine_of(10, ("receive", "exchange"), [round_] * num_rounds, codec=codec, allowed=allowed)


def feed(machine: TransferMachine, *events: Event) -> list[Instruction]:
    return [instruction for event in events for instruction in machine.handle(event)]


def signals(instructions: list[Instruction]) -> list[tuple[int, str, int, int]]:
    return [(i.peer, i.tag.kind.name, i.tag.round, i.tag.stage) for i in instructions if isinstance(i, Signal)]


# --- the trainer ------------------------------------------------------------------------------------------------------


def test_a_trainer_packs_ahead_and_posts_oldest_round_first() -> None:
    m = trainer()
    assert m.start() == (Pack(0),)
    assert m.handle(PackDone(0)) == (PostWrites(0, 0), PostWrites(0, 1), Pack(1))  # the wire before the kernel
    assert m.handle(PackDone(1)) == ()  # round 0 is still leaving
    assert m.waiting_for() == (
        (10, "acknowledgement of the write of round 0 (receive)"),
        (11, "acknowledgement of the write of round 0 (receive)"),
    )
    assert m.handle(WriteDone(0, "receive", 11)) == ()
    assert m.handle(WriteDone(0, "receive", 10)) == (PostWrites(1, 0), PostWrites(1, 1), Pack(2))


def test_a_trainer_posts_a_round_only_to_peers_that_credited_its_slot() -> None:
    m = trainer()
    m.start()
    feed(m, PackDone(0), WriteDone(0, "receive", 10), WriteDone(0, "receive", 11), PackDone(1))
    assert feed(m, WriteDone(1, "receive", 10), WriteDone(1, "receive", 11), PackDone(2)) == [Pack(3)]
    assert m.waiting_for()[1:] == ((10, "credit for round 0 (receive)"), (11, "credit for round 0 (receive)"))
    assert m.handle(Arrived(11, tag(Kind.CREDIT, 1))) == ()  # for round 3: round 2 goes first
    assert m.handle(Arrived(11, tag(Kind.CREDIT, 0))) == (PostWrites(2, 1),)
    assert feed(m, WriteDone(2, "receive", 11), PackDone(3)) == []
    assert m.waiting_for() == ((10, "credit for round 0 (receive)"),)
    assert m.handle(Arrived(10, tag(Kind.CREDIT, 0))) == (PostWrites(2, 0),)
    assert m.handle(WriteDone(2, "receive", 10)) == (PostWrites(3, 1),)
    feed(m, Arrived(10, tag(Kind.CREDIT, 1)), WriteDone(3, "receive", 11))
    assert m.handle(WriteDone(3, "receive", 10)) == (Released(), Finished())
    assert m.finished
    assert m.waiting_for() == ()
    assert m.handle(PeerLost(10, "later")) == ()


def test_a_trainer_with_nothing_to_send_is_released_at_once() -> None:
    m = machine_of(0, ("send",), [Round(), Round()])
    assert m.start() == (Released(), Finished())


def test_an_early_credit_may_come_before_the_acknowledgement() -> None:
    m = trainer(peers=(10,))
    m.start()
    feed(m, PackDone(0))
    assert m.handle(Arrived(10, tag(Kind.CREDIT, 0))) == ()
    assert not m.failed


# --- the rollout ------------------------------------------------------------------------------------------------------


def test_a_rollout_round_from_arrival_to_credit() -> None:
    m = rollout()
    assert m.start() == ()
    assert m.waiting_for() == ((0, "data of round 0 (receive)"), (20, "data of round 0 (exchange)"))
    assert m.handle(Arrived(0, tag(Kind.DATA, 0))) == (PostWrites(0, 0),)
    assert signals(feed(m, Arrived(20, tag(Kind.DATA, 0, 1)))) == [(11, "READY", 0, 0)]
    assert (11, "ready signal of round 0") in m.waiting_for()
    assert m.handle(Arrived(11, tag(Kind.READY, 0))) == (Assemble(0),)
    assert signals(feed(m, AssembleDone(0))) == [(11, "ASSEMBLED", 0, 0)]
    assert feed(m, WriteDone(0, "exchange", 20)) == []
    assert (11, "assembled signal of round 0") in m.waiting_for()
    credits = signals(feed(m, Arrived(11, tag(Kind.ASSEMBLED, 0))))
    assert credits == [(0, "CREDIT", 0, 0), (20, "CREDIT", 0, 1)]


@pytest.mark.parametrize("last", ["forward", "neighbour", "own"])
def test_a_credit_waits_for_the_forward_the_neighbour_and_the_own_assembly(last: str) -> None:
    m = rollout()
    m.start()
    feed(m, Arrived(0, tag(Kind.DATA, 0)), Arrived(20, tag(Kind.DATA, 0, 1)), Arrived(11, tag(Kind.READY, 0)))
    events = {
        "forward": WriteDone(0, "exchange", 20),
        "neighbour": Arrived(11, tag(Kind.ASSEMBLED, 0)),
        "own": AssembleDone(0),
    }
    final = events.pop(last)
    assert "CREDIT" not in {s[1] for s in signals(feed(m, *events.values()))}
    assert [s[1] for s in signals(feed(m, final))][-2:] == ["CREDIT", "CREDIT"]


def run_round(m: TransferMachine, k: int) -> list[Instruction]:
    out = feed(m, Arrived(0, tag(Kind.DATA, k)), Arrived(20, tag(Kind.DATA, k, 1)), Arrived(11, tag(Kind.READY, k)))
    if k >= 2:
        out += feed(m, Arrived(20, tag(Kind.CREDIT, k - 2, 1)))
    return out + feed(m, AssembleDone(k), WriteDone(k, "exchange", 20), Arrived(11, tag(Kind.ASSEMBLED, k)))


def test_a_whole_run_ends_without_credits_that_nobody_would_use() -> None:
    m = rollout()
    m.start()
    out = [i for k in range(4) for i in run_round(m, k)]
    assert [i for i in out if isinstance(i, Finished)] == [Finished()]
    assert Released() not in out  # it has no weights to give away
    assert [s[2] for s in signals(out) if s[1] == "CREDIT"] == [0, 0, 1, 1]


def test_assembly_waits_for_permission_and_for_its_turn() -> None:
    m = rollout(allowed=False)
    m.start()
    data = [Arrived(p, tag(Kind.DATA, k, s)) for k in (0, 1) for p, s in ((0, 0), (20, 1))]
    out = feed(m, *data, Arrived(11, tag(Kind.READY, 1)), Arrived(11, tag(Kind.READY, 0)))
    assert not [i for i in out if isinstance(i, Assemble)]
    assert (10, "permission to assemble") in m.waiting_for()
    assert m.handle(AssembleAllowed()) == (Assemble(0),)
    assert (10, "assembly of round 0") in m.waiting_for()
    assert Assemble(1) in m.handle(AssembleDone(0))


def test_forwards_go_oldest_round_first() -> None:
    m = rollout()
    m.start()
    assert m.handle(Arrived(0, tag(Kind.DATA, 1))) == ()  # round 0 has not even arrived
    assert m.handle(Arrived(0, tag(Kind.DATA, 0))) == (PostWrites(0, 0),)
    assert m.handle(WriteDone(0, "exchange", 20)) == (PostWrites(1, 0),)


def test_a_codec_decodes_after_the_forwards_and_before_ready() -> None:
    m = rollout(codec="toy")
    m.start()
    assert feed(m, Arrived(0, tag(Kind.DATA, 0)), Arrived(20, tag(Kind.DATA, 0, 1))) == [PostWrites(0, 0)]
    assert m.handle(WriteDone(0, "exchange", 20)) == (Decode(0),)
    assert m.waiting_for()[-1] == (10, "decode of round 0")
    assert signals(feed(m, DecodeDone(0))) == [(11, "READY", 0, 0)]


def test_a_bystander_round_passes_and_a_mere_reader_takes_part() -> None:
    """Awaits of round 2 are credited for round 0 although round 0 brought nothing: the copy is shared."""
    reading = Round(assemble=AssembleTable(sources=((11, "receive"),), table=ROW), reads=(11,))
    late = Round(awaits=(Await(stage="receive", peer=0, segments=SEG),))
    m = machine_of(10, ("receive", "exchange"), [reading, Round(), late])
    assert m.start() == ()
    assert m.handle(Arrived(11, tag(Kind.READY, 0))) == (Assemble(0),)
    assert signals(feed(m, AssembleDone(0))) == [(11, "ASSEMBLED", 0, 0), (0, "CREDIT", 0, 0)]
    assert m.handle(Arrived(0, tag(Kind.DATA, 2))) == (Finished(),)


# --- what must not happen ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", sorted(RUN))
def test_stale_tags_are_dropped(field: str) -> None:
    m = rollout()
    m.start()
    assert m.handle(Arrived(0, tag(Kind.DATA, 0, **{field: 99}))) == ()
    assert not m.failed
    assert m.handle(Arrived(0, tag(Kind.DATA, 0))) == (PostWrites(0, 0),)


@pytest.mark.parametrize(
    ("peer", "sent", "words"),
    [
        (0, tag(Kind.DATA, 0), "DATA of round 0 (receive) twice"),
        (5, tag(Kind.DATA, 1), "DATA of round 1 (receive), which was not expected"),
        (0, tag(Kind.DATA, 1, 1), "DATA of round 1 (exchange), which was not expected"),
        (0, tag(Kind.DATA, 2), "DATA of round 2 (receive) without a credit"),
        (0, tag(Kind.DATA, 4), "does not have"),
        (0, tag(Kind.DATA, 1, 9), "does not have"),
        (20, tag(Kind.CREDIT, 1, 1), "CREDIT of round 1 (exchange), which was not expected"),  # nothing written yet
        (20, tag(Kind.CREDIT, 3, 1), "CREDIT of round 3 (exchange), which was not expected"),  # no round 5
        (0, tag(Kind.CREDIT, 0), "CREDIT of round 0 (receive), which was not expected"),
        (20, tag(Kind.READY, 0), "READY of round 0, which was not expected"),
        (11, tag(Kind.ASSEMBLED, 0), "ASSEMBLED of round 0, which was not expected"),  # before READY was sent
    ],
)
def test_impossible_tags_fail_the_attempt_naming_the_sender(peer: int, sent: Tag, words: str) -> None:
    m = rollout()
    m.start()
    feed(m, Arrived(0, tag(Kind.DATA, 0)))
    (failed,) = m.handle(Arrived(peer, sent))
    assert isinstance(failed, Failed)
    assert failed.peer == peer
    assert words in failed.cause
    assert m.failed
    assert m.waiting_for() == ()
    assert m.handle(WriteDone(0, "exchange", 20)) == ()


def test_a_lost_peer_fails_the_attempt_and_nothing_follows() -> None:
    m = rollout()
    m.start()
    assert m.handle(PeerLost(20, "connection reset")) == (Failed(20, "connection reset"),)
    assert m.handle(Arrived(0, tag(Kind.DATA, 0))) == ()
    assert m.handle(PeerLost(0, "too")) == ()


@pytest.mark.parametrize(
    "event",
    [PackDone(0), AssembleDone(0), DecodeDone(0), WriteDone(0, "exchange", 20), WriteDone(9, "receive", 1)],
)
def test_local_events_that_answer_nothing_are_defects(event: Event) -> None:
    m = rollout()
    m.start()
    with pytest.raises(InternalError, match="answers no instruction of worker 10"):
        m.handle(event)


def test_start_comes_once_and_first() -> None:
    m = rollout()
    with pytest.raises(InternalError, match="before start"):
        m.handle(AssembleAllowed())
    m.start()
    with pytest.raises(InternalError, match="twice"):
        m.start()


# --- wrong machines are caught by the driver --------------------------------------------------------------------------


class NoCredits(TransferMachine):
    def _credited(self, key) -> bool:
        return True

    def _take_tag(self, peer, tag) -> None:  # and the receiver does not look either
        self._release_round, kept = max(self._release_round, tag.round - 1), self._release_round
        super()._take_tag(peer, tag)
        self._release_round = kept


class ForgetsNeighbours(TransferMachine):
    def _advance_release(self, out) -> None:
        full, self._assembled = self._assembled, {(k, p) for k, r in enumerate(self.program.rounds) for p in r.readers}
        super()._advance_release(out)
        self._assembled = full


class ForgetsOwnForwards(TransferMachine):
    def _advance_release(self, out) -> None:
        kept, self._post_round = self._post_round, self._assemble_round
        super()._advance_release(out)
        self._post_round = kept


class ReadyTooSoon(TransferMachine):
    def _advance_ready(self, out, kernels) -> None:
        kept, self._unarrived = self._unarrived, [n if k else 0 for k, n in enumerate(self._unarrived)]
        super()._advance_ready(out, kernels)
        self._unarrived = kept


class PacksTooSoon(TransferMachine):
    def _advance_pack(self, kernels) -> None:
        kept, self._num_slots = self._num_slots, self._num_slots + 1
        super()._advance_pack(kernels)
        self._num_slots = kept


@cache
def house_programs():
    job = toy.house_job()
    options = PlanOptions(slot_bytes=1 << 20, alignment=64, min_rounds=6)
    plan = make_plan(job.spec, job.topology, job.maps, options=options)
    return job, [lower(plan, job.spec, m, w) for w, m in enumerate(job.maps)]


def outcome_of(machine_class: type[TransferMachine], seed: int) -> bool:
    """Whether a run was right in every respect."""
    job, programs = house_programs()
    checkpoint = job.checkpoint(seed)
    live = {w: job.live(w, checkpoint if w < 2 else None) for w in range(7)}
    raw = {w: [a.view(np.uint8) for a in arrays] for w, arrays in live.items()}
    try:
        outcome = MemoryDriver(programs, raw, machine_class=machine_class).run(seed=seed)
    except InternalError:  # the watch over the slots
        return False
    if outcome.failed or outcome.stuck:
        return False
    return all((a == b).all() for w in live for a, b in zip(live[w], job.live(w, checkpoint), strict=True))


@pytest.mark.parametrize(
    ("machine_class", "caught"),
    [
        (TransferMachine, lambda n: n == 0),
        (NoCredits, bool),
        (ForgetsNeighbours, bool),
        (ForgetsOwnForwards, bool),
        (ReadyTooSoon, bool),
        (PacksTooSoon, bool),
    ],
)
def test_a_wrong_machine_is_caught(machine_class: type[TransferMachine], caught: Callable[[int], bool]) -> None:
    assert caught(sum(not outcome_of(machine_class, seed) for seed in range(5)))


def test_a_peer_that_has_done_its_part_may_leave() -> None:
    """Peer 11 is through with a trainer's only round while peer 10 is not: losing 11 changes nothing, losing 10 ends it."""
    machine = trainer(num_rounds=1)
    machine.start()
    feed(machine, PackDone(0), WriteDone(0, "receive", 11))
    assert feed(machine, PeerLost(11, "left")) == []
    assert not machine.failed
    assert feed(machine, PeerLost(10, "killed")) == [Failed(10, "killed")]


@pytest.mark.parametrize("lost", [0, 11, 20])
def test_a_rollout_needs_whom_it_awaits_reads_and_forwards_to(lost: int) -> None:
    machine = rollout(num_rounds=1)
    machine.start()
    assert feed(machine, PeerLost(lost, "killed")) == [Failed(lost, "killed")]
