"""Programs survive the wire; what is no program does not get in."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests import toy_programs as toy

from weightbridge.errors import TransportError
from weightbridge.plan.planner import PlanOptions, make_plan
from weightbridge.program import decode_program, encode_program, lower


@pytest.fixture(scope="module")
def programs():
    job = toy.house_job()
    options = PlanOptions(slot_bytes=1 << 20, alignment=64, min_rounds=3)
    plan = make_plan(job.spec, job.topology, job.maps, options=options)
    return [lower(plan, job.spec, m, w, codec="delta", base_version=7) for w, m in enumerate(job.maps)]


def test_every_field_comes_back(programs) -> None:
    for program in programs:
        found = decode_program(encode_program(program))
        assert found.digest == program.digest
        assert (found.worker, found.plan_digest, found.slots) == (program.worker, program.plan_digest, program.slots)
        assert (found.codec, found.base_version, found.arena_bytes) == ("delta", 7, program.arena_bytes)
        for a, b in zip(found.rounds, program.rounds, strict=True):
            assert (a.reads, a.readers, a.assemble.sources) == (b.reads, b.readers, b.assemble.sources)
            assert (a.pack == b.pack).all()
            assert (a.assemble.table == b.assemble.table).all()
            for p, q in zip((*a.posts, *a.awaits), (*b.posts, *b.awaits), strict=True):
                assert (p.stage, p.peer) == (q.stage, q.peer)
                assert (p.segments == q.segments).all()
            assert [(p.source, p.after) for p in a.posts] == [(p.source, p.after) for p in b.posts]
        found.rounds[0].pack["op"] += 1  # tables are the receiver's own, writable memory


def test_it_is_compact(programs) -> None:
    for program in programs:
        rows = sum(len(r.pack) + len(r.assemble.table) for r in program.rounds)
        assert len(encode_program(program)) < 180 * rows + 400 * len(program.rounds) + 600


def test_any_flipped_byte_is_refused_or_harmless(programs) -> None:
    data = encode_program(programs[5])
    for at in np.random.default_rng(0).integers(0, len(data), 300).tolist():
        broken = bytearray(data)
        broken[at] ^= 0x41
        try:
            found = decode_program(bytes(broken))
        except TransportError:
            continue
        assert found.digest == programs[5].digest


def _repacked(program, change) -> bytes:
    fields = msgspec.msgpack.decode(encode_program(program))
    change(fields)
    return msgspec.msgpack.encode(fields)


def test_the_order_of_posts_travels_with_the_program(programs) -> None:
    other = replace(programs[0], post_order="as_ready")
    assert other.digest != programs[0].digest
    assert decode_program(encode_program(other)).post_order == "as_ready"
    assert decode_program(encode_program(programs[0])).post_order == "oldest_round_first"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.__setitem__(0, 99), "wire version 99"),
        (lambda f: f.__setitem__(1, -1), "cannot be read"),
        (
            lambda f: f.__setitem__(7, "newest_round_first"),
            "ordered by 'newest_round_first', expected one of oldest_round",
        ),
        (lambda f: f.__setitem__(7, "as_ready"), "damaged"),
        (lambda f: f.__setitem__(8, "0" * 32), "damaged"),
        (lambda f: f[3][0].__setitem__(1, -64), "cannot be read"),
        (lambda f: f[3][0].__setitem__(2, 0), "cannot be read"),
        (lambda f: f[4][0].__setitem__(0, b"x" * 5), "no multiple of"),
        (lambda f: f[4][0].__setitem__(3, []), "beyond its 0 sources"),
        (lambda f: f.append(1), "cannot be read"),
        (lambda f: f[4][0].__setitem__(5, ["x"]), "cannot be read"),
    ],
)
def test_invalid_content_is_refused(programs, change, words: str) -> None:
    with pytest.raises(TransportError, match=words):
        decode_program(_repacked(programs[5], change))


def test_size_and_garbage_are_refused(programs) -> None:
    data = encode_program(programs[0])
    with pytest.raises(TransportError, match=rf"{len(data)} bytes came in; at most 10"):
        decode_program(data, max_bytes=10)
    for garbage in (b"", b"\xc1", data[:-1], b"\x80"):
        with pytest.raises(TransportError):
            decode_program(garbage)
