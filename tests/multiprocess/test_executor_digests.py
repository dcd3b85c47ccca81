"""Bytes that change between two workers: found by whoever receives them, before anything is made of them, naming the sender.

Real executors in threads of this process, over tcp between nodes and shared memory inside. Bytes are damaged in three places:
by a proxy in the middle of a connection, in the receiver's slot before it looks, and in a forwarder's slot after it has
looked.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests import toy_programs as toy

from weightbridge.coordinator.failures import kind_of
from weightbridge.errors import CorruptionError, WorkerError
from weightbridge.executor import Aborted, Codec, Endpoint, Executor, register_codec
from weightbridge.executor import executor as module
from weightbridge.kernels import Buffer, ReferenceKernels
from weightbridge.machine.events import Arrived, Assemble, Kind, PostWrites
from weightbridge.plan import PlanOptions, make_plan
from weightbridge.plan.plan import with_rounds
from weightbridge.program import lower
from weightbridge.transports import Identity

Key = tuple[int, str, int]  # round, stage, sender
VALUE = 0x40F5  # of every element of the tensor `embed`, as bf16
SECONDS = 20


@cache
def job_of(codec: str):
    job = toy.house_job()
    plan = make_plan(job.spec, job.topology, job.maps, options=PlanOptions(slot_bytes=1 << 20, alignment=64))
    plan = with_rounds(plan, 4, unit_bytes=64)
    programs = [lower(plan, job.spec, m, w, codec=codec) for w, m in enumerate(job.maps)]
    checkpoint = job.checkpoint(5)
    checkpoint[0][:] = VALUE
    return job, programs, checkpoint


class Fleet:
    """All workers of the house job, one update. The first to fail ends the others', as a coordinator would."""

    def __init__(self, *, codec: str = "identity", without_digests: frozenset[int] = frozenset()) -> None:
        self.job, self.programs, self.checkpoint = job_of(codec)
        self.workers = self.job.topology.workers
        trainers = self.job.topology.trainers
        self.live = [self.job.live(w, self.checkpoint if w in trainers else None) for w in range(len(self.workers))]
        self.untouched = [[a.copy() for a in arrays] for arrays in self.live]
        self.seen: list[list[object]] = [[] for _ in self.workers]
        self.errors: dict[int, BaseException] = {}
        self.without_digests = without_digests

    def run(self, reach: Callable[[int, dict[int, Endpoint]], dict[int, Endpoint]] | None = None) -> None:
        """reach: what a worker is told of where its peers are, instead of the truth."""
        with ExitStack() as stack:
            executors = [
                Executor(
                    workers=self.workers, program=program, kernels=ReferenceKernels(), deadline_seconds=SECONDS,
                    identity=Identity(worker=self.workers[w].name, session="digests"),
                    digests=w not in self.without_digests, observe=lambda seen, w=w: self.seen[w].append(seen.what),
                )
                for w, program in enumerate(self.programs)
            ]  # fmt: skip
            for executor in executors:
                stack.enter_context(closing(executor))
            endpoints = {w: e.endpoint for w, e in enumerate(executors)}
            joined, through = threading.Barrier(len(executors)), threading.Barrier(len(executors))

            def run(w: int) -> None:
                try:
                    executors[w].connect(reach(w, dict(endpoints)) if reach else endpoints)
                    executors[w].bind([Buffer(a.ctypes.data, a.nbytes) for a in self.live[w]])
                    joined.wait(SECONDS)
                    executors[w].run(
                        session=1, epoch=0, version=3, attempt=1, assemble_allowed=True, timeout_seconds=SECONDS
                    )
                except BaseException as error:
                    self.errors[w] = error
                    for other in executors:
                        other.abort(WorkerError("another worker failed", causes={}))
                through.wait(SECONDS)  # nobody's memory goes away before all are through
                executors[w].close()  # here too, since each takes a moment

            threads = [threading.Thread(target=run, args=(w,)) for w in range(len(executors))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * SECONDS)

    def culprit(self, finder: int) -> str:
        """Checks that `finder` alone found damage, and says whom it names."""
        own = {w: e for w, e in self.errors.items() if not isinstance(e, Aborted)}
        assert own.keys() == {finder}, own
        error = own[finder]
        assert type(error) is CorruptionError
        (name,) = error.causes
        assert name in str(error)
        assert self.workers[finder].name in str(error)
        return name

    def was_told(self, worker: int, key: Key) -> bool:
        """Whether that worker's machine has heard of the post."""
        told = [x for x in self.seen[worker] if isinstance(x, Arrived) and x.tag.kind is Kind.DATA]
        return key in {(x.tag.round, module.STAGES[x.tag.stage], x.peer) for x in told}

    def check_whole(self) -> None:
        assert self.errors == {}
        for w, arrays in enumerate(self.live):
            assert all((a == b).all() for a, b in zip(arrays, self.job.live(w, self.checkpoint), strict=True)), w


def damage(monkeypatch: pytest.MonkeyPatch, worker: int, key: Key, *, checked: bool, at: int = -1) -> None:
    """Flip a bit of what came in with `key`, before this worker looks at it or after. at: which byte of its rows."""
    original = module._Transfer._check

    def check(self: module._Transfer, peer: int, tag: module.m.Tag) -> None:
        hit = self._x._program.worker == worker and (tag.round, module.STAGES[tag.stage], peer) == key
        if checked:
            original(self, peer, tag)
        if hit:
            rows = self._x._due[key]
            places = np.concatenate([np.arange(o, o + n) for o, n in rows.tolist()])
            self._x._memory.array[places[at]] ^= 0x10
        if not checked:
            original(self, peer, tag)

    monkeypatch.setattr(module._Transfer, "_check", check)


def awaits() -> list[tuple[int, Key]]:
    """(worker, key) of posts of each stage in odd and in even rounds, of different workers."""
    keys = [
        (w, (k, a.stage, a.peer))
        for w, program in enumerate(job_of("identity")[1])
        for k, round_ in enumerate(program.rounds)
        for a in round_.awaits
    ]
    first: dict[tuple[int, str], tuple[int, Key]] = {}
    for w, key in sorted(keys, key=lambda x: (x[0] + x[1][0]) % 5):
        first.setdefault((key[0] % 2, key[1]), (w, key))
    return list(first.values())


# --- damage is found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("worker", "key"), awaits(), ids=str)
def test_a_flipped_bit_in_a_slot_names_the_sender_and_goes_nowhere(monkeypatch, worker: int, key: Key) -> None:
    fleet = Fleet()
    damage(monkeypatch, worker, key, checked=False)
    fleet.run()
    round_, stage, sender = key
    assert fleet.culprit(worker) == fleet.workers[sender].name
    error = fleet.errors[worker]
    assert (error.version, error.round, error.stage) == (3, round_, stage)
    assert f"{error.sent_digest:016x}" in str(error)
    assert f"{error.found_digest:016x}" in str(error) != f"{error.sent_digest:016x}"
    assert not fleet.was_told(worker, key)
    posts = fleet.programs[worker].rounds[round_].posts
    passed_on = {i for i, p in enumerate(posts) if key[1:] in p.after}
    assert not any(i.round == round_ and i.index in passed_on for i in fleet.seen[worker] if isinstance(i, PostWrites))
    for w, seen in enumerate(fleet.seen):  # whoever needs the bytes, here or beside it, has made nothing of the round
        sources = fleet.programs[w].rounds[round_].assemble.sources
        if (worker, stage) in sources:
            assert Assemble(round_) not in seen


class Proxy:
    """Passes everything on between a dialler and `address`; one bit of the first run of VALUE that comes back is flipped."""

    def __init__(self, address: str) -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_flipped = 0
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        dialled, _ = self._listener.accept()
        onward = socket.create_connection(self._target, timeout=SECONDS)
        self._sockets += [dialled, onward]
        for source, target in ((dialled, onward), (onward, dialled)):
            self._threads.append(threading.Thread(target=self._pump, args=(source, target, source is onward)))
            self._threads[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, flips: bool) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(65536)):
                at = data.find(VALUE.to_bytes(2, "little") * 20) if flips and not self.num_flipped else -1
                if at >= 0:
                    data[at + 21] ^= 0x04
                    self.num_flipped += 1
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(SECONDS)


def test_a_bit_flipped_on_the_wire_is_found_where_it_arrives() -> None:
    fleet = Fleet()
    names = [w.name for w in fleet.workers]
    sender, receiver = next(
        (p.peer, w)
        for w, program in enumerate(fleet.programs)
        for r in program.rounds
        for p in r.awaits
        if names[w] < names[p.peer] and fleet.workers[p.peer].node != fleet.workers[w].node  # so the receiver dials
    )
    proxies: list[Proxy] = []

    def reach(worker: int, endpoints: dict[int, Endpoint]) -> dict[int, Endpoint]:
        if worker == receiver:
            true = endpoints[sender]
            proxies.append(Proxy(true.addresses["tcp"]))
            endpoints[sender] = replace(true, addresses={**true.addresses, "tcp": proxies[0].address})
        return endpoints

    try:
        fleet.run(reach)
    finally:
        proxies[0].close()
    assert proxies[0].num_flipped == 1
    assert fleet.culprit(receiver) == names[sender]
    values = np.concatenate([a.view(np.uint8) for a in fleet.live[receiver]])
    wrong = VALUE ^ 0x0400  # the flipped bit lies in the upper byte of an element
    assert wrong.to_bytes(2, "little") not in values.tobytes()


def forward_of_one_post() -> tuple[int, Key, int]:
    """(forwarder, what it received, next worker) of a forward of just that."""
    for w, program in enumerate(job_of("identity")[1]):
        for (k, i), key in module._passed_on(program).items():
            return w, key, program.rounds[k].posts[i].peer
    raise AssertionError("the job has no forward of just one post")


def test_memory_that_changes_at_a_forwarder_is_found_at_the_next_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest travels with the bytes: a forwarder that took a new one of what it holds now would sign the damage."""
    forwarder, key, following = forward_of_one_post()
    fleet = Fleet()
    damage(monkeypatch, forwarder, key, checked=True)
    fleet.run()
    assert fleet.culprit(following) == fleet.workers[forwarder].name
    assert fleet.errors[following].round == key[0]


def test_a_forward_that_is_not_just_one_post_carries_a_digest_of_its_own() -> None:
    _, programs, _ = job_of("identity")
    program = programs[forward_of_one_post()[0]]
    (k, i), key = next(iter(module._passed_on(program).items()))
    round_ = program.rounds[k]
    for change in ("half", "other source", "moved", "shorter"):
        post = round_.posts[i]
        segments = post.segments.copy()
        if change == "moved":
            segments["local_offset"][-1] += 64
        if change == "shorter":
            segments["capacity_bytes"][0] -= 1
        changed = module.Post(
            stage=post.stage, source="exchange" if change == "other source" and key[1] != "exchange" else post.source,
            peer=post.peer, after=post.after, segments=segments[:0] if change == "half" else segments,
        )  # fmt: skip
        posts = (*round_.posts[:i], changed, *round_.posts[i + 1 :])
        rounds = (*program.rounds[:k], replace(round_, posts=posts), *program.rounds[k + 1 :])
        assert (k, i) not in module._passed_on(replace(program, rounds=rounds)), change


# --- nothing else is ------------------------------------------------------------------------------------------------


def test_an_update_without_damage_is_whole_and_every_post_has_a_digest() -> None:
    fleet = Fleet()
    fleet.run()
    fleet.check_whole()
    tags = [x.tag for seen in fleet.seen for x in seen if isinstance(x, Arrived)]
    assert all(tag.digest for tag in tags if tag.kind is Kind.DATA)
    assert not any(tag.digest for tag in tags if tag.kind is not Kind.DATA)


def test_without_digests_nothing_is_checked_and_nothing_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above see the check and nothing else."""
    worker, key = awaits()[0]
    damage(monkeypatch, worker, key, checked=False)
    fleet = Fleet(without_digests=frozenset(range(7)))
    fleet.run()
    assert fleet.errors == {}
    assert not any(x.tag.digest for seen in fleet.seen for x in seen if isinstance(x, Arrived))
    assert any(
        (a != b).any()
        for w, arrays in enumerate(fleet.live)
        for a, b in zip(arrays, fleet.job.live(w, fleet.checkpoint), strict=True)
    )


def test_a_sender_without_digests_is_not_trusted_by_a_receiver_with() -> None:
    fleet = Fleet(without_digests=frozenset(fleet_trainers()))
    fleet.run()
    found = [e for e in fleet.errors.values() if isinstance(e, CorruptionError)]
    assert found
    assert {name for e in found for name in e.causes} <= {fleet.workers[w].name for w in fleet_trainers()}
    assert all(e.sent_digest == 0 for e in found)


def fleet_trainers() -> tuple[int, ...]:
    return tuple(job_of("identity")[0].topology.trainers)


class Halved(Codec):
    """Leaves out the second half of a segment whose bytes all repeat in it, as those of a constant tensor do."""

    name = "halved for digests"

    def encode(self, segment: np.ndarray) -> int:
        half = len(segment) // 2
        if len(segment) % 2 or (segment[:half] != segment[half:]).any():
            return len(segment)
        segment[half:] = 0xA5
        return half

    def decode(self, segment: np.ndarray, length: int) -> None:
        if length < len(segment):
            segment[length:] = segment[:length]


register_codec(Halved())


def encoded_await() -> tuple[int, Key]:
    """A post that came in encoded: its last segment is from the constant tensor, so that its last byte does not travel."""
    _, programs, _ = job_of(Halved.name)
    for w, program in enumerate(programs):
        for k, round_ in enumerate(program.rounds):
            for a in round_.awaits:
                if len(a.segments) == 1 and k == 0:
                    return w, (k, a.stage, a.peer)
    raise AssertionError("no post of one segment")


@pytest.mark.parametrize(("at", "travels"), [(0, True), (-1, False)], ids=["within the length", "beyond it"])
def test_a_digest_of_encoded_segments_covers_what_really_came(monkeypatch, at: int, travels: bool) -> None:
    worker, key = encoded_await()
    fleet = Fleet(codec=Halved.name)
    damage(monkeypatch, worker, key, checked=False, at=at)
    fleet.run()
    if travels:
        assert fleet.culprit(worker) == fleet.workers[key[2]].name
    else:
        fleet.check_whole()


def test_the_error_keeps_its_name_on_its_way_to_the_hub() -> None:
    assert kind_of(CorruptionError("x", causes={"a": "b"})) == "CorruptionError"
    assert issubclass(CorruptionError, WorkerError)
