"""The processes of `benchmarks.elastic`: a small model whose every value follows from its version, trainers, engines.

All are forked from one process that has imported torch and this package, which makes a newcomer cheap; they do nothing with
torch but hold tensors and compare them. Each talks with the supervisor over a pipe: orders come in, what happened goes out.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.soak import look
from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import Options, ReceiverAdapter, SenderAdapter
from weightbridge.coordinator.session_events import EngineChanged, Joined, SessionEvent
from weightbridge.errors import IncompleteUpdateError, WeightBridgeError

NUM_LAYERS = 4
NUM_TRAINERS = 2
FORMS = [
    form
    for i in range(NUM_LAYERS)
    for form in (
        (f"layers.{i}.up", (97, 40), "bfloat16"),
        (f"layers.{i}.down", (33, 64), "bfloat16"),
        (f"layers.{i}.norm", (41,), "float32"),
    )
]
SPEC = CheckpointSpec.from_iterable(FORMS)
_ORDER_SECONDS = 300.0  # without an order a worker takes its supervisor for dead
_POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a process is to be. side: "trainer" or an engine's name. node: workers that name the same one share memory."""

    side: str
    rank: int
    size: int
    endpoint: str
    staged: bool
    node: str
    engines: tuple[str, ...] = ()  # trainers only: those that the session waits for
    when_engine_fails: str = "drop"

    @property
    def name(self) -> str:
        return f"{self.side}/{self.rank}"


# --- the model --------------------------------------------------------------------------------------------------------


def full_tensor(index: int, version: int) -> torch.Tensor:
    """fp32, the shape of FORMS[index]: 24 significant bits that change in nearly every element from version to version."""
    shape = FORMS[index][1]
    at = torch.arange(prod(shape), dtype=torch.int64) * 2_654_435 + index * 5_915_587 + version * 7_368_787
    return ((at % (1 << 24) - (1 << 23)).to(torch.float32) / 1024).reshape(shape)


class Shard:
    """A trainer keeps fp32 masters of some rows, an engine's worker some columns in the checkpoint's dtypes; both uneven.

    Vectors are replicated on the workers of an engine.
    """

    def __init__(self, role: Role) -> None:
        self._role = role
        self._trains = role.side == "trainer"
        self.live = {name: self._as_it_should_be(i, 0).zero_() for i, (name, _, _) in enumerate(FORMS)}

    def _part(self, full: torch.Tensor) -> torch.Tensor:
        axis = 0 if self._trains else 1
        if self._role.size == 1 or axis >= full.dim():
            return full
        cut = full.shape[axis] * 5 // 8
        return full.narrow(axis, 0, cut) if self._role.rank == 0 else full.narrow(axis, cut, full.shape[axis] - cut)

    def _as_it_should_be(self, index: int, version: int) -> torch.Tensor:
        part = self._part(full_tensor(index, version))
        return part.to(torch.float32 if self._trains else getattr(torch, FORMS[index][2])).contiguous().clone()

    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in stream:
            self.live[name].copy_(self._part(tensor))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.live

    def fill(self, version: int) -> None:
        for index, tensor in enumerate(self.live.values()):
            tensor.copy_(self._as_it_should_be(index, version))

    def is_version(self, version: int) -> bool:
        """Whether every bit is that of the version, rounded to the checkpoint's dtypes as torch rounds."""
        return all(
            torch.equal(tensor.view(torch.uint8), self._as_it_should_be(index, version).view(torch.uint8))
            for index, tensor in enumerate(self.live.values())
        )


# --- processes --------------------------------------------------------------------------------------------------------


class Line:
    """A worker's end of its pipe. `say` from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def say(self, *what: Any) -> None:
        with self._lock:
            self._connection.send(what)

    def order(self, seconds: float = 0.0) -> tuple[Any, ...] | None:
        """The next one, None when none came in time. Raises EOFError when the supervisor is gone."""
        return tuple(self._connection.recv()) if self._connection.poll(seconds) else None


def live(role: Role, connection: Connection) -> None:
    """The whole life of one process. Its last word is "left", "ended", or "broken" with an error that nobody expected."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks for it when somebody hangs
    logging.getLogger("weightbridge").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    line = Line(connection)
    try:
        (_train if role.side == "trainer" else _serve)(role, line)
    except EOFError:
        raise SystemExit(3) from None
    except Exception as error:
        line.say("broken", f"{type(error).__name__}: {error}")
        raise


def _look() -> dict[str, int]:
    """What `benchmarks.soak` looks at, and how many objects Python's collector knows of: no allocator moves those about."""
    gc.collect()
    return {**look(), "objects": len(gc.get_objects())}


def _options(role: Role, line: Line) -> Options:
    def on_event(event: SessionEvent) -> None:
        match event:
            case EngineChanged(engine=engine, state=state, reason=reason) if state in ("joining", "lost", "left"):
                line.say("engine", engine, state, reason)
            case Joined():
                line.say("joined")

    return Options(
        slot_bytes=16 << 10, connect_timeout_seconds=60, update_timeout_seconds=20, heartbeat_seconds=0.4,
        heartbeat_timeout_seconds=15, when_newer="finish", stage_send=role.staged, stage_receive=role.staged,
        when_engine_fails=role.when_engine_fails, on_event=on_event,
    )  # fmt: skip


def _train(role: Role, line: Line) -> None:
    shard = Shard(role)
    sender = SenderAdapter(
        group=(role.rank, role.size), endpoint=role.endpoint, checkpoint=SPEC, load_weights=shard.load_weights,
        tensors=shard.tensors, engines=role.engines, node=role.node, options=_options(role, line),
    )  # fmt: skip
    sender.connect()
    line.say("connected")
    while True:
        match line.order(_ORDER_SECONDS):
            case ("send", version):
                shard.fill(version)
                try:
                    report = sender.send_weights(version).wait()
                    line.say("sent", version, dict(report.engines), report.attempts, report.ewtt_seconds)
                except WeightBridgeError as error:
                    line.say(
                        "given up", version, f"{type(error).__name__}: {error}", dict(getattr(error, "causes", {}))
                    )
            case ("look",):
                line.say("looked", _look())
            case _:
                break
    sender.close()
    line.say("left")


def _serve(role: Role, line: Line) -> None:
    shard = Shard(role)
    receiver = ReceiverAdapter(
        group=(role.rank, role.size), endpoint=role.endpoint, checkpoint=SPEC, load_weights=shard.load_weights,
        tensors=shard.tensors, engine=role.side, node=role.node, options=_options(role, line),
    )  # fmt: skip
    newest, poisoned_at = -1, -2
    ending: tuple[Any, ...] = ("left",)
    while receiver.state != "closed":
        try:
            if receiver.poll_requests():
                version = receiver.version
                line.say("installed", version, shard.is_version(version), version - newest)
                newest = version
        except WeightBridgeError as error:
            causes = dict(getattr(error, "causes", {}))
            own = any(name.startswith(f"{role.side}/") for name in causes)
            if own or not isinstance(error, IncompleteUpdateError):
                ending = ("ended", f"{type(error).__name__}: {error}", causes)
                break
            if poisoned_at != newest:
                poisoned_at = newest
                line.say("poisoned", causes)
        match line.order():
            case ("look",):
                line.say("looked", _look())
            case ("leave",):
                break
        time.sleep(_POLL_SECONDS)
    mixed = receiver.state == "poisoned" or (ending[0] == "ended" and ending[1].startswith("IncompleteUpdateError"))
    receiver.close()
    line.say("kept", newest, newest < 0 or mixed or shard.is_version(newest))
    line.say(*ending)
