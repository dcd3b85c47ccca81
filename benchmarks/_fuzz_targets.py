"""What the fuzzer aims at on the control plane: every decoder of bytes that come from another process.

A target draws an input and feeds it to one decoder. Fed, it says whether the input was understood, raises the decoder's
documented error (`refusals`), or raises `Violation` when something does not hold that must. Any other exception is a finding.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import msgspec

from benchmarks._mutations import Sample, damage_bytes
from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator.channel import NONCE_BYTES, Channel
from weightbridge.errors import LayoutError, PlanError, TransportError
from weightbridge.layout import CopyTable, LiveTensor, SourceMap, decode_source_map, encode_source_map
from weightbridge.machine import messages as w
from weightbridge.machine import session as s
from weightbridge.machine.events import Kind, Tag
from weightbridge.plan import PlanOptions, Role, Topology, Worker, decode_plan, encode_plan, make_plan
from weightbridge.program import decode_program, encode_program, lower

__all__ = ["SealedFrames", "Target", "Violation", "control_targets", "message_kinds", "random_message"]

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


# --- the sealed channel -----------------------------------------------------------------------------------------------


def _nonce(number: int) -> bytes:
    return bytes([number]) * NONCE_BYTES


def _ends(token: bytes, first: int, second: int) -> tuple[Channel, Channel]:
    """(dialler's end, hub's end)."""
    common: dict[str, Any] = {"token": token, "dialler_nonce": _nonce(first), "hub_nonce": _nonce(second)}
    return Channel(is_hub=False, **common), Channel(is_hub=True, **common)


class SealedFrames(Target):
    """Frames whose maker lacks the token, or which belong elsewhere: another connection, another direction, the past."""

    name, weight = "sealed", 45

    def __init__(self, payloads: Sequence[bytes]) -> None:
        dialler, self._hub = _ends(b"the token", 1, 2)
        old = dialler.seal(payloads[0])
        self._hub.open(old)
        self._genuine = [Sample(dialler.seal(p)) for p in payloads]  # not yet opened
        elsewhere = [_ends(b"the token", 3, 2)[0], _ends(b"the token", 1, 4)[0], _ends(b"the old token", 1, 2)[0]]
        elsewhere += [_ends(b"", 1, 2)[0], self._hub]
        self._foreign = [Sample(channel.seal(p)) for channel in elsewhere for p in payloads] + [Sample(old)]

    def draw(self, rng: random.Random) -> bytes:
        if rng.random() < 0.2:
            return rng.choice(self._foreign).data
        while True:
            data = damage_bytes(rng, rng.choice(self._genuine).data, rng.choice(self._foreign).data)
            if all(data != g.data for g in self._genuine):
                return data

    def feed(self, data: bytes) -> bool:
        self._hub.open(data)
        raise Violation("a frame was accepted that nobody with the token made for this connection and moment")

    def finish(self) -> None:
        for sample in self._genuine:
            try:
                self._hub.open(sample.data)
            except TransportError as error:
                raise Violation(f"after the forgeries a genuine frame is refused: {error}") from None


# --- typed messages ---------------------------------------------------------------------------------------------------


def message_kinds() -> tuple[type[w.Message], ...]:
    """Every struct that `messages.decode` knows."""
    return tuple(
        value
        for value in vars(w).values()
        if isinstance(value, type) and issubclass(value, w.Message) and value is not w.Message
    )


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
    """MessagePack of the control plane, as it comes out of an opened frame."""

    name, weight = "messages", 40

    def __init__(self, payloads: Sequence[bytes]) -> None:
        self._samples = [Sample(p) for p in payloads]

    def draw(self, rng: random.Random) -> bytes:
        return rng.choice(self._samples).damaged(rng, self._samples)

    def feed(self, data: bytes) -> bool:
        again = w.encode(w.decode(data))
        if w.encode(w.decode(again)) != again:
            raise Violation("a message that was understood does not survive being sent on")
        return True


class Tags(Target):
    """Tags of the data plane."""

    name, weight = "tags", 2

    def __init__(self) -> None:
        self._samples = [
            Sample(Tag(session=1 << 59, epoch=e, version=7, attempt=e, round=e, kind=kind, stage=e).pack())
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

    A case takes a job a random number of steps on its way, then says `MESSAGES_PER_SESSION` words.
    """

    name, weight = "sessions", 0.3
    inputs_per_case = MESSAGES_PER_SESSION
    _WORKERS = ("trainer/0", "trainer/1", "e/0", "e/1")
    _WAY: tuple[Callable[[str], w.Message], ...] = (
        lambda _: w.Promise(request=1, bound=3),
        lambda _: w.Parked(request=1),
        lambda _: w.LayoutReady(source_map=b"m"),
        lambda _: w.ProgramReady(plan_digest="d", endpoint=w.PeerEndpoint(addresses={"tcp": "a"}, slots=())),
        lambda _: w.Connected(attempt=1),
        lambda _: w.SendReady(version=1),
        lambda _: w.Promise(request=2, bound=3),
        lambda _: w.Parked(request=2),
        lambda _: w.Transferred(version=1, attempt=1),
        lambda _: w.Resumed(version=1, stalled_at=1.0, resumed_at=2.0, sent=1, received=1),
    )

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
            if isinstance(message, w.Join):
                events.append(s.Joining(b"c", message))
            else:
                events.append(rng.choice((s.Received(rng.choice(self._WORKERS), message), s.Tick())))
        return rng.randrange(len(self._WAY) + 1), events

    def feed(self, data: tuple[int, list[s.SessionEvent]]) -> bool:
        steps, events = data
        timeouts = s.SessionTimeouts(connect=60, update=60, heartbeat=60)
        machine = s.SessionMachine(
            session=1, spec_digest="d", num_trainers=2, engines=("e",), timeouts=timeouts, now=0.0
        )
        for worker in self._WORKERS:
            self._handle(machine, s.Joining(worker.encode(), _join(worker)))
        for word in self._WAY[:steps]:
            for worker in self._WORKERS:
                trainers_only = isinstance(word(worker), w.SendReady)
                engines_only = isinstance(word(worker), w.Promise | w.Parked)
                if not (trainers_only and worker[0] == "e") and not (engines_only and worker[0] == "t"):
                    self._handle(machine, s.Received(worker, word(worker)))
        self.phases.add(machine.phase.value)
        for event in events:
            self._handle(machine, event)
        return True

    @staticmethod
    def _handle(machine: s.SessionMachine, event: s.SessionEvent) -> None:
        for instruction in machine.handle(event, 1.0):
            if isinstance(instruction, s.Send):
                w.encode(instruction.message)
            elif isinstance(instruction, s.MakePlan):
                machine.handle(s.PlanMade(b"plan", "d"), 1.0)


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
        SealedFrames(payloads),
        Messages(payloads),
        SourceMaps(4, maps, spec),
        # The digest covers what workers act upon; the bounds are a certificate, checked by whoever relies on it.
        Documents("plans", 3, [plan], lambda data: encode_plan(replace(decode_plan(data), bounds=bounds)), PlanError),
        Documents("programs", 3, programs, lambda data: encode_program(decode_program(data)), TransportError),
        Tags(),
        Sessions(payloads),
    ]
