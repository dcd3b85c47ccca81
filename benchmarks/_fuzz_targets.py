"""What the fuzzer aims at on the control plane: every decoder of bytes that come from another process.

A target draws an input and feeds it to one decoder. Fed, it says whether the input was understood, raises the decoder's
documented error (`refusals`), or raises `Violation` when something does not hold that must. Any other exception is a finding.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec

from benchmarks._mutations import Sample, damage_bytes
from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator.wire import PART_BYTES, Assembly, HubSocket, WorkerSocket, cut
from weightbridge.errors import LayoutError, PlanError, TransportError
from weightbridge.layout import CopyTable, LiveTensor, SourceMap, decode_source_map, encode_source_map
from weightbridge.machine import messages as w
from weightbridge.machine import session as s
from weightbridge.machine import status
from weightbridge.machine.events import Kind, Tag
from weightbridge.plan import PlanOptions, Role, Topology, Worker, decode_plan, encode_plan, make_plan
from weightbridge.program import decode_program, encode_program, lower
from weightbridge.testing.ports import free_port

__all__ = ["Parts", "Strangers", "Target", "Violation", "control_targets", "message_kinds", "random_message"]

MESSAGES_PER_SESSION = 20
_OPTIONS_OF_THE_PLAN = PlanOptions(slot_bytes=1 << 20, alignment=64, min_rounds=2, epoch=1)


class Violation(Exception):
    """A decoder did what it must never do."""


class Target(ABC):
    """name: for replay. weight: its share of the cases. inputs_per_case: messages that one case stands for. traced_every: of so
    many cases one is watched for the memory it takes."""

    name: str
    weight: float
    inputs_per_case = 1
    traced_every = 64
    refusals: tuple[type[Exception], ...] = (TransportError,)

    @abstractmethod
    def draw(self, rng: random.Random) -> Any:
        """The input of one case; wholly decided by the generator."""

    @abstractmethod
    def feed(self, data: Any) -> bool:
        """Whether it was understood. Raises one of `refusals` when it was not, or Violation."""

    def finish(self) -> None:  # noqa: B027  (most have nothing to add)
        """After all cases: raise Violation when something has broken on the way."""


# --- connections ------------------------------------------------------------------------------------------------------


class Strangers(Target):
    """Somebody without the token on a real connection to a hub: a recorded worker played again, damaged or not, and the same
    in a mechanism that knows no keys."""

    name, weight = "strangers", 2
    traced_every = 1024
    _TOKEN = b"the token"
    _GREETING_BYTES = 64  # of ZMTP
    _ANSWER_SECONDS = 0.002

    def __init__(self) -> None:
        self._hub: HubSocket | None = None  # from the first case on
        self._address = ("127.0.0.1", 0)
        self._samples: list[bytes] = []

    def draw(self, rng: random.Random) -> tuple[int, int, int | None]:
        """(what is said, what it is mixed with, seed of the damage or None): the recording has other keys each time."""
        return rng.randrange(3), rng.randrange(3), None if rng.random() < 0.1 else rng.getrandbits(32)

    def feed(self, data: tuple[int, int, int | None]) -> bool:
        if self._hub is None:
            self._listen()
        one, other, seed = data
        said = self._samples[one]
        if seed is not None:
            said = damage_bytes(random.Random(seed), said, self._samples[other])
        with socket.create_connection(self._address, timeout=5) as sock, contextlib.suppress(OSError):
            # In step with the hub, as a worker is: the greeting, the first command, the rest.
            first = self._GREETING_BYTES + 2 + (said[self._GREETING_BYTES + 1 :] or b"\0")[0]
            for part in (said[: self._GREETING_BYTES], said[self._GREETING_BYTES : first], said[first:]):
                sock.sendall(part)
                self._look()
                if select.select([sock], [], [], self._ANSWER_SECONDS)[0]:
                    sock.recv(4096)
            sock.shutdown(socket.SHUT_WR)
            self._hear_out(sock)
        self._look()
        return False

    def _listen(self) -> None:
        self._address = ("127.0.0.1", free_port())
        self._hub = HubSocket("tcp://{}:{}".format(*self._address), self._TOKEN)
        recorded = _record(self._hub, self._address, self._TOKEN)
        keyless = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        keyless += bytes([4, len(ready)]) + ready
        for header, part in cut(0, w.encode(w.Heartbeat())):
            keyless += bytes([1, len(header)]) + header + bytes([0, len(part)]) + part.bytes
        self._samples = [recorded, recorded, keyless]

    def _hear_out(self, sock: socket.socket) -> None:
        until = time.monotonic() + 5
        while sock.recv(4096):
            self._look()
            if time.monotonic() > until:
                raise Violation("the hub does not hang up on a stranger that has nothing more to say")

    def _look(self) -> None:
        for _, message in self._hub.receive() if self._hub is not None else ():
            if message is not None:
                raise Violation(f"the hub has heard {message!r} from somebody without the token")

    def finish(self) -> None:
        if self._hub is not None:
            hub, self._hub = self._hub, None
            try:
                _record(hub, self._address, self._TOKEN)
            finally:
                hub.close()


def _record(hub: HubSocket, address: tuple[str, int], token: bytes) -> bytes:
    """What a genuine worker sends to be let in and heard: its bytes up to a first message, taken down on the way."""
    kept: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = WorkerSocket("tcp://{}:{}".format(*listener.getsockname()), token)
        worker.send(w.encode(w.Goodbye()))
        dialler, _ = listener.accept()
        with dialler, socket.create_connection(address) as onward:
            pumps = [
                threading.Thread(target=_pump, args=args, daemon=True)
                for args in ((dialler, onward, kept), (onward, dialler, []))
            ]
            for pump in pumps:
                pump.start()
            _await(hub, lambda message: message == w.encode(w.Goodbye()), "a genuine worker is not heard")
            for sock in (dialler, onward):
                sock.shutdown(socket.SHUT_RDWR)
            for pump in pumps:
                pump.join(10)
        worker.close()
    _await(hub, lambda message: message is None, "the end of a worker's connection is not noticed")
    return b"".join(kept)


def _await(hub: HubSocket, wanted: Callable[[bytes | None], bool], what_if_not: str) -> None:
    until = time.monotonic() + 5
    while not any(map(wanted, [message for _, message in hub.receive()])):
        if time.monotonic() > until:
            raise Violation(what_if_not)
        hub.poll(0.01)


def _pump(source: socket.socket, sink: socket.socket, kept: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            kept.append(data)
            sink.sendall(data)


class Parts(Target):
    """Messages in parts, on a connection that has lost, doubled or reordered some, or whose sender numbers them wildly: what
    comes together is a message that was sent, unless its sender has numbered it so himself."""

    name, weight = "parts", 43

    def __init__(self, payloads: Sequence[bytes]) -> None:
        rng = random.Random("large messages")
        large = [rng.randbytes(n) for n in (3 * PART_BYTES, 2 * PART_BYTES + 1, PART_BYTES + 9)]
        self._sent = [cut(i, p) for i, p in enumerate([*payloads[:5], *large])]
        self._messages = {b"".join(part.bytes for _, part in parts) for parts in self._sent}

    def draw(self, rng: random.Random) -> tuple[bool, list[tuple[bytes, bytes]]]:
        """(whether the headers are as they were sent, headers and parts)."""
        parts = [(h, p.bytes) for parts in rng.sample(self._sent, 3) for h, p in parts]
        wild = rng.random() < 0.5
        for _ in range(rng.randrange(1, 4)):
            at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
            if wild:
                parts[at] = damage_bytes(rng, parts[at][0], parts[other][0]), parts[at][1]
            elif rng.random() < 0.4 and len(parts) > 1:
                del parts[at]
            elif rng.random() < 0.5:
                parts.insert(other, parts[at])
            else:
                parts[at], parts[other] = parts[other], parts[at]
        return not wild, parts

    def feed(self, data: tuple[bool, list[tuple[bytes, bytes]]]) -> bool:
        genuine, parts = data
        assembly, refused = Assembly(), False
        for header, part in parts:
            try:
                message = assembly.add(header, part)
            except TransportError:
                refused = True
                continue
            if genuine and message is not None and message not in self._messages:
                raise Violation("parts of different messages were put together")
        return not refused


# --- typed messages ---------------------------------------------------------------------------------------------------


def message_kinds() -> tuple[type[w.Message], ...]:
    """Every struct that `messages.decode` knows, in the order of their names."""
    return tuple(sorted(typing.get_args(w._DECODER.type), key=lambda kind: kind.__name__))


def random_message(rng: random.Random, kind: type[w.Message]) -> w.Message:
    """A well-formed message with small numbers, so that they often hit what is being waited for."""
    return kind(**{f.name: _random_value(rng, f.type) for f in _fields(kind)})


@cache
def _fields(kind: type[w.Message]) -> tuple[msgspec.inspect.Field, ...]:
    return msgspec.inspect.type_info(kind).fields  # type: ignore[attr-defined, no-any-return]


_NAMES = ("trainer/0", "trainer/1", "e/0", "e/1", "e", "", "a stranger")


def _random_value(rng: random.Random, info: msgspec.inspect.Type) -> Any:
    i = msgspec.inspect
    match info:
        case i.IntType():
            return max(info.ge or 0, rng.randrange(4))
        case i.FloatType():
            return rng.choice((0.0, 1.5, 1e9))
        case i.BoolType():
            return rng.random() < 0.5
        case i.StrType():
            return rng.choice(_NAMES)
        case i.NoneType():
            return None
        case i.LiteralType():
            return rng.choice(info.values)
        case i.EnumType():
            return rng.choice(list(info.cls))
        case i.UnionType():
            return _random_value(rng, rng.choice(info.types))
        case i.BytesType():
            return rng.randbytes(rng.choice((0, 5, 40)))
        case i.VarTupleType():
            return tuple(_random_value(rng, info.item_type) for _ in range(rng.randrange(4)))
        case i.TupleType():
            return tuple(_random_value(rng, t) for t in info.item_types)
        case i.DictType():
            return {rng.choice(_NAMES): _random_value(rng, info.value_type) for _ in range(rng.randrange(3))}
        case i.StructType():
            return info.cls(**{f.name: _random_value(rng, f.type) for f in info.fields})
    raise NotImplementedError(f"no random value of {info}")


class Messages(Target):
    """MessagePack of the control plane, as it comes out of a connection."""

    def __init__(
        self, name: str, weight: float, payloads: Sequence[bytes], decode: Callable[[bytes], w.Message]
    ) -> None:
        self.name, self.weight = name, weight
        self._samples = [Sample(p) for p in payloads]
        self._decode = decode

    def draw(self, rng: random.Random) -> bytes:
        return rng.choice(self._samples).damaged(rng, self._samples)

    def feed(self, data: bytes) -> bool:
        again = w.encode(self._decode(data))
        if w.encode(self._decode(again)) != again:
            raise Violation("a message that was understood does not survive being sent on")
        return True


class Tags(Target):
    """Tags of the data plane."""

    name, weight = "tags", 2

    def __init__(self) -> None:
        self._samples = [
            Sample(
                Tag(session=1 << 59, epoch=e, version=7, attempt=e, round=e, kind=kind, stage=e, digest=e << 61).pack()
            )
            for kind in Kind
            for e in (0, 3)
        ]

    def draw(self, rng: random.Random) -> bytes:
        return damage_bytes(rng, rng.choice(self._samples).data, rng.choice(self._samples).data)

    def feed(self, data: bytes) -> bool:
        if Tag.unpack(data).pack() != data:
            raise Violation("a tag means something else than its bytes")
        return True


# --- documents --------------------------------------------------------------------------------------------------------


class Documents(Target):
    """A document with a digest of its own: damaged, it is refused, or is the same document in another spelling."""

    def __init__(
        self,
        name: str,
        weight: float,
        genuine: Sequence[bytes],
        respell: Callable[[bytes], bytes],
        refusal: type[Exception],
    ) -> None:
        self.name, self.weight, self.refusals = name, weight, (refusal,)
        self._samples = [Sample(g) for g in genuine]
        self._known = set(genuine)
        self._respell = respell

    def draw(self, rng: random.Random) -> bytes:
        return rng.choice(self._samples).damaged(rng, self._samples)

    def feed(self, data: bytes) -> bool:
        if self._respell(data) not in self._known:
            raise Violation("a damaged document was taken for a good one")
        return True


class SourceMaps(Documents):
    """Nothing says what a source map must be, but what is understood must make sense."""

    def __init__(self, weight: float, genuine: Sequence[bytes], spec: CheckpointSpec) -> None:
        super().__init__("maps", weight, genuine, lambda data: data, LayoutError)
        self._spec = spec

    def feed(self, data: bytes) -> bool:
        found = decode_source_map(data, spec=self._spec)
        copies, again = found.copies, encode_source_map(found)
        if encode_source_map(decode_source_map(again, spec=self._spec)) != again:
            raise Violation("a map that was understood does not survive being sent on")
        for side, start, stride, sizes in (
            (copies.tensor, copies.src_start, copies.src_stride, [t.numel for t in self._spec.tensors]),
            (copies.live, copies.live_start, copies.live_stride, [t.span_numel for t in found.live]),
        ):
            for row in range(len(copies)):  # in Python's integers, which do not wrap around
                reach = [(int(n) - 1) * int(step) for n, step in zip(copies.count[row], stride[row], strict=True)]
                lo = int(start[row]) + sum(min(r, 0) for r in reach)
                hi = int(start[row]) + sum(max(r, 0) for r in reach)
                if not 0 <= lo <= hi < sizes[int(side[row])]:
                    raise Violation(
                        f"copy {row} of a map that was understood covers {lo}..{hi} of {sizes[int(side[row])]}"
                    )
        return True


def _rows(spec: CheckpointSpec, begin: float, end: float) -> SourceMap:
    """A worker that holds this part of the rows of every tensor."""
    live: list[LiveTensor] = []
    table: list[Any] = []
    for position, t in enumerate(spec.tensors):
        height, width = t.shape
        first, last = int(height * begin), int(height * end)
        shape = (last - first, width)
        live.append(LiveTensor(name=t.name, shape=shape, strides=(width, 1), dtype=t.dtype))
        table.append((position, position, first * width, 0, ((shape[0], width, width), (width, 1, 1))))
    return SourceMap(spec_digest=spec.digest, live=tuple(live), copies=CopyTable.from_rows(table))


def _documents() -> tuple[CheckpointSpec, list[bytes], bytes, list[bytes]]:
    """(spec, source maps, plan, programs) of two trainers and an engine of two workers, in their wire forms."""
    spec = CheckpointSpec.from_iterable([("a", (37, 8), "bfloat16"), ("b", (12, 5), "float32")])
    maps = [_rows(spec, 0, 0.5), _rows(spec, 0.5, 1), _rows(spec, 0, 0.7), _rows(spec, 0.7, 1)]
    workers = tuple(
        Worker(name=f"{side}/{rank}", role=role, node=side, rank=rank, bandwidth=1e9, engine=engine)
        for side, role, engine in (("trainer", Role.TRAINER, ""), ("e", Role.ROLLOUT, "e"))
        for rank in range(2)
    )
    plan = make_plan(spec, Topology(workers=workers), maps, options=_OPTIONS_OF_THE_PLAN)
    programs = [encode_program(lower(plan, spec, m, i)) for i, m in enumerate(maps)]
    return spec, [encode_source_map(m) for m in maps], encode_plan(plan), programs


# --- the hub's machine ------------------------------------------------------------------------------------------------


class Sessions(Target):
    """Words that are well-formed and senseless, from workers that have been let in: the hub's machine never raises.

    A case takes a job a random number of answers on its way, then says `MESSAGES_PER_SESSION` words.
    """

    name, weight = "sessions", 0.3
    inputs_per_case = MESSAGES_PER_SESSION
    _WORKERS = ("trainer/0", "trainer/1", "e/0", "e/1")
    _MAX_ANSWERS = 60  # enough for two versions

    def __init__(self, payloads: Sequence[bytes]) -> None:
        self._samples = [Sample(p) for p in payloads]
        self._kinds = message_kinds()
        self.phases: set[str] = set()

    def draw(self, rng: random.Random) -> tuple[int, list[s.SessionEvent]]:
        events: list[s.SessionEvent] = []
        while len(events) < MESSAGES_PER_SESSION:
            message = random_message(rng, rng.choice(self._kinds))
            if rng.random() < 0.3:
                try:
                    message = w.decode(rng.choice(self._samples).damaged(rng, self._samples))
                except TransportError:
                    continue
            worker = rng.choice(self._WORKERS)
            if isinstance(message, w.Join):
                events.append(s.Joining(b"c", message))
            else:
                events.append(rng.choice((s.Received(worker, message), s.Tick(), s.Disconnected(worker))))
        return rng.randrange(self._MAX_ANSWERS), events

    def feed(self, data: tuple[int, list[s.SessionEvent]]) -> bool:
        num_answers, events = data
        timeouts = s.SessionTimeouts(connect=60, update=60, heartbeat=60)
        machine = s.SessionMachine(
            session=1, spec_digest="d", num_trainers=2, engines=("e",), timeouts=timeouts, now=0.0
        )
        waiting: list[s.SessionEvent] = [s.Joining(worker.encode(), _join(worker)) for worker in self._WORKERS]
        version = 0
        while num_answers:
            if not waiting:
                version += 1
                waiting += [s.Received(trainer, w.SendReady(version=version)) for trainer in self._WORKERS[:2]]
            num_answers -= 1
            waiting += self._handle(machine, waiting.pop(0))
        self.phases.add(machine.phase.value)
        for event in events:
            self._handle(machine, event)
        return True

    @staticmethod
    def _handle(machine: s.SessionMachine, event: s.SessionEvent) -> list[s.SessionEvent]:
        """What workers that know their part answer."""
        answers: list[s.SessionEvent] = []
        for instruction in machine.handle(event, 1.0):
            if isinstance(instruction, s.Send):
                w.encode(instruction.message)
                answers += [s.Received(instruction.worker, word) for word in _answers(instruction)]
            elif isinstance(instruction, s.MakePlan):
                answers.append(s.PlanMade(instruction.epoch, b"plan", "d"))
        return answers


def _answers(said: s.Send) -> list[w.Message]:
    endpoint = w.PeerEndpoint(addresses={"tcp": "a"}, slots=())
    match said.message:
        case w.RunProbe(request=request):
            return [w.LayoutReady(source_map=b"m"), w.Installed(request=request)]
        case w.PlanReady(attempt=attempt):
            return [w.ProgramReady(attempt=attempt, plan_digest="d", endpoint=endpoint)]
        case w.ConnectPeers(attempt=attempt):
            return [w.Connected(attempt=attempt)]
        case w.Propose(request=request):
            return [w.Promise(request=request, bound=3)]
        case w.Commit(request=request):
            return [w.Parked(request=request)]
        case w.Begin(version=version, attempt=attempt) if said.worker.startswith("trainer"):
            return [w.Transferred(version=version, attempt=attempt), _resumed(version)]
        case w.AllowAssemble(version=version, attempt=attempt):
            return [w.Transferred(version=version, attempt=attempt)]
        case w.Committed(version=version, request=request):
            return [w.Installed(request=request), _resumed(version)]
        case w.AbortAttempt(attempt=attempt):
            return [w.Quiesced(attempt=attempt, touched=False, released=False)]
        case _:
            return []


def _resumed(version: int) -> w.Message:
    return w.Resumed(version=version, stalled_at=1.0, resumed_at=2.0, sent=1, received=1)


def _join(worker: str) -> w.Join:
    side, rank = worker.split("/")
    trains = side == "trainer"
    return w.Join(
        protocol=w.PROTOCOL_VERSION, worker=worker, role="trainer" if trains else "rollout", engine="" if trains else side,
        rank=int(rank), size=2, node=side, bandwidth=1.0, spec_digest="d", dtypes=("F32",),
    )  # fmt: skip


def control_targets() -> list[Target]:
    """All targets of the control plane; the same in every process."""
    rng = random.Random("genuine messages")
    payloads = [w.encode(random_message(rng, kind)) for kind in message_kinds() for _ in range(3)]
    payloads += [w.encode(_join("e/1")), w.encode(w.LayoutReady(source_map=bytes(2000)))]
    spec, maps, plan, programs = _documents()
    bounds = decode_plan(plan).bounds
    return [
        Strangers(),
        Parts(payloads),
        Messages("messages", 38, payloads, w.decode),
        Messages(
            "statuses", 2, [w.encode(random_message(rng, status.Status)) for _ in range(5)], status.decode_for_observer
        ),
        SourceMaps(4, maps, spec),
        # The digest covers what workers act upon; the bounds are a certificate, checked by whoever relies on it.
        Documents("plans", 3, [plan], lambda data: encode_plan(replace(decode_plan(data), bounds=bounds)), PlanError),
        Documents("programs", 3, programs, lambda data: encode_program(decode_program(data)), TransportError),
        Tags(),
        Sessions(payloads),
    ]
