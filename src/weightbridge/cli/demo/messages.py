"""What worker processes tell the launcher and the launcher tells them: one JSON object a line on a socket pair."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from typing import TypeAlias

import msgspec

__all__ = [
    "Answered",
    "Channel",
    "Compare",
    "Digested",
    "Failed",
    "LineBuffer",
    "Message",
    "Order",
    "Phase",
    "PlanMade",
    "Progress",
    "Referenced",
    "Step",
    "Stop",
    "Trained",
    "Updated",
    "encode",
]


class Phase(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    """A worker entered a phase of its life, in words for people."""

    text: str


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Part of a long task is done; `total` units in all."""

    text: str
    done: float
    total: float


class PlanMade(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """The connected trainers' plan (from trainer/0). Bytes of one update; node name or worker name -> bytes.

    Egress and ingress are the planned routes over the network; needed is what the workers of a node need, each byte once.
    """

    model_bytes: int
    trainer_egress_bytes: dict[str, int]
    rollout_node_ingress_bytes: dict[str, int]
    rollout_node_needed_bytes: dict[str, int]
    rounds: int
    num_pairs: int
    t_min_seconds: float
    connect_seconds: float


class Trained(msgspec.Struct, frozen=True, kw_only=True, tag="trained"):
    """One training step is done (from trainer/0); the loss is from before the step."""

    version: int
    loss: float
    seconds: float


class Updated(msgspec.Struct, frozen=True, kw_only=True, tag="updated"):
    """One update is complete (from trainer/0): the library's own report. network_bytes: worker -> (sent, received)."""

    version: int
    ewtt_seconds: float
    agst_seconds: float
    network_bytes: dict[str, tuple[int, int]]
    engines: dict[str, str]


class Digested(msgspec.Struct, frozen=True, kw_only=True, tag="digested"):
    """SHA-256 of what a worker holds now: full parameters rounded to the checkpoint's type; buffers as they are."""

    version: int
    parameters: dict[str, str]
    buffers: dict[str, str]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One generated token with the logits that chose it: the best few, as (token, logit), best first."""

    token: int
    top: tuple[tuple[int, float], ...]


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="answered"):
    """A generation ran from prompt to end on one version (from rank 0 of an engine). version -1: initial weights."""

    version: int
    text: str
    steps: tuple[Step, ...]


class Referenced(msgspec.Struct, frozen=True, kw_only=True, tag="referenced"):
    """What a single-process model holding the trainers' weights answers, and what it says of each engine's answer.

    forced: engine -> for each token of that engine's answer, the reference's logits at that place, given the engine's
    own tokens before it: its best few, and then those the engine named, as (token, logit).
    """

    version: int
    text: str
    forced: dict[str, tuple[tuple[tuple[int, float], ...], ...]]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A worker gives up. kind: the error's class. causes: worker -> what happened to it, where the error knows."""

    kind: str
    text: str
    causes: dict[str, str] = {}
    traceback: str = ""
    usage: bool = False


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """From the launcher: all is reported, close and exit."""


class Compare(msgspec.Struct, frozen=True, kw_only=True, tag="compare"):
    """From the launcher to trainer/0: answer by yourself, and judge these answers (engine -> its tokens)."""

    answers: dict[str, tuple[Step, ...]]


Message: TypeAlias = Phase | Progress | PlanMade | Trained | Updated | Digested | Answered | Referenced | Failed
Order: TypeAlias = Stop | Compare

_message_decoder = msgspec.json.Decoder(Message)
_order_decoder = msgspec.json.Decoder(Order)


def encode(message: Message | Order) -> bytes:
    """One line, newline included."""
    return msgspec.json.encode(message) + b"\n"


class LineBuffer:
    """Cuts a byte stream into messages; a message may arrive in pieces."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages completed by `data`. Raises msgspec.DecodeError on a line that is no message."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [_message_decoder.decode(line) for line in lines if line]


class Channel:
    """A worker's end. Sending is thread-safe; a daemon thread listens, and ends the process when the launcher is gone.

    A worker whose launcher died must not live on, whatever it is waiting for: so the end of the stream exits at once.
    """

    def __init__(self, fd: int, *, on_lost: Callable[[], None] = lambda: os._exit(70)) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._on_lost = on_lost
        self._stop = threading.Event()
        self._compare: Compare | None = None
        self._compare_ready = threading.Event()
        threading.Thread(target=self._listen, name="demo-channel", daemon=True).start()

    def send(self, message: Message) -> None:
        """Hand one message to the launcher; blocks only while the socket's buffer is full."""
        with self._lock:
            self._socket.sendall(encode(message))

    @property
    def stop_requested(self) -> bool:
        return self._stop.is_set()

    def wait_for_stop(self, timeout_seconds: float) -> bool:
        """Block until the launcher says stop; False when it did not in time."""
        return self._stop.wait(timeout_seconds)

    def wait_for_compare(self, timeout_seconds: float) -> Compare | None:
        """Block until the launcher hands over the engines' answers; None when it did not in time."""
        self._compare_ready.wait(timeout_seconds)
        return self._compare

    def _listen(self) -> None:
        pending = b""
        while True:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                self._on_lost()
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._obey(_order_decoder.decode(line))

    def _obey(self, order: Order) -> None:
        if isinstance(order, Compare):
            self._compare = order
            self._compare_ready.set()
        else:
            self._stop.set()
