"""A codec that changes lengths, through programs, machines and memory: nothing may assume dense segments."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from tests import toy_programs as toy

from weightbridge.errors import InternalError
from weightbridge.machine import Decode, PostWrites, TransferMachine
from weightbridge.plan.planner import PlanOptions, make_plan
from weightbridge.program import lower, verify_programs
from weightbridge.testing.memory_driver import MemoryDriver


class Deflate:
    """zlib where that is shorter; a full-length segment is dense."""

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(self, segment) -> int:
        packed = np.frombuffer(zlib.compress(segment.tobytes()), dtype=np.uint8)
        if len(packed) >= len(segment):
            return len(segment)
        self.num_encoded += 1
        segment[: len(packed)] = packed
        return len(packed)

    def decode(self, segment, length: int) -> None:
        if length < len(segment):
            segment[:] = np.frombuffer(zlib.decompress(segment[:length].tobytes()), dtype=np.uint8)


def run(seed: int, *, compressible: bool, machine_class=TransferMachine):
    job = toy.house_job()
    options = PlanOptions(slot_bytes=1 << 20, alignment=64, min_rounds=4)
    plan = make_plan(job.spec, job.topology, job.maps, options=options)
    programs = [lower(plan, job.spec, m, w, codec="deflate") for w, m in enumerate(job.maps)]
    verify_programs(programs, plan)
    checkpoint = job.checkpoint(seed)
    if compressible:
        checkpoint = [a * (np.arange(a.size).reshape(a.shape) % 40 == 0).astype(a.dtype) for a in checkpoint]
    live = {w: job.live(w, checkpoint if w in job.topology.trainers else None) for w in range(7)}
    codec = Deflate()
    raw = {w: [a.view(np.uint8) for a in arrays] for w, arrays in live.items()}
    outcome = MemoryDriver(programs, raw, codec=codec, machine_class=machine_class).run(seed=seed)
    right = all((a == b).all() for w in live for a, b in zip(live[w], job.live(w, checkpoint), strict=True))
    dense = sum(p.nbytes for program in programs for r in program.rounds for p in r.posts)
    return outcome, right, dense, codec


@pytest.mark.parametrize("seed", range(4))
def test_shorter_segments_arrive_whole_and_are_passed_on_as_they_came(seed: int) -> None:
    outcome, right, dense, codec = run(seed, compressible=True)
    assert not outcome.failed
    assert not outcome.stuck
    assert right
    assert codec.num_encoded > 3
    assert sum(outcome.moved_bytes.values()) < dense
    done = [(w, i) for w, i in outcome.trace if isinstance(i, (Decode, PostWrites))]
    for at, (worker, instruction) in enumerate(done):
        if isinstance(instruction, Decode):  # each forward of the round has gone before
            later = [i for w, i in done[at:] if w == worker and isinstance(i, PostWrites)]
            assert all(i.round > instruction.round for i in later)


def test_segments_that_cannot_be_shortened_fill_their_capacity() -> None:
    outcome, right, dense, _ = run(1, compressible=False)
    assert right
    assert sum(outcome.moved_bytes.values()) <= dense


class DecodesTooSoon(TransferMachine):
    def _advance_ready(self, out, kernels) -> None:
        kept, self._post_round = self._post_round, len(self.program.rounds)
        super()._advance_ready(out, kernels)
        self._post_round = kept


def test_decoding_before_the_forwards_is_caught() -> None:
    def right(seed: int) -> bool:
        try:
            outcome, same, _, _ = run(seed, compressible=True, machine_class=DecodesTooSoon)
        except (InternalError, zlib.error):  # the watch over the slots, or bytes that are encoded no more
            return False
        return same and not outcome.failed and not outcome.stuck

    assert not all(right(seed) for seed in range(4))
