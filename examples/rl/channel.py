"""The local channel between trainer 0 and the engine: prompts go one way, samples come back. ZeroMQ and msgspec, no pickle.

A Unix socket in the run's private folder; one peer on either side, and no wait without a deadline.
"""

from __future__ import annotations

import time
from typing import TypeAlias, TypeVar

import msgspec
import zmq

__all__ = [
    "Done", "Failed", "Load", "Receive", "Reply", "Request", "Sample", "Sampled", "Score", "Scored", "ServingEnd", "Stop",
    "TrainerEnd",
]  # fmt: skip


class _Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int = 0


class Sample(_Request, frozen=True, kw_only=True):
    """Sample `completions` answers to each prompt (token ids), at temperature 1."""

    prompts: tuple[tuple[int, ...], ...]
    completions: int
    max_tokens: int
    seed: int


class Score(_Request, frozen=True, kw_only=True):
    """Say what the engine's policy gives each token of these sequences from `prompt_lengths` on."""

    sequences: tuple[tuple[int, ...], ...]
    prompt_lengths: tuple[int, ...]


class Receive(_Request, frozen=True, kw_only=True):
    """Method "broadcast": take this version from the broadcast that follows."""

    version: int


class Load(_Request, frozen=True, kw_only=True):
    """Method "files": load this version from a folder."""

    version: int
    folder: str


class Stop(_Request, frozen=True, kw_only=True):
    """Leave the session and end."""


class _Reply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int = 0


class Sampled(_Reply, frozen=True, kw_only=True):
    """tokens, logprobs: prompt -> completion -> token. The engine held first_version when it began, last_version at the end."""

    tokens: list[list[list[int]]]
    logprobs: list[list[list[float]]]
    first_version: int
    last_version: int
    seconds: float


class Scored(_Reply, frozen=True, kw_only=True):
    """logprobs: sequence -> token."""

    logprobs: list[list[float]]
    version: int


class Done(_Reply, frozen=True, kw_only=True):
    """seconds: for how long the engine stood still for it."""

    seconds: float = 0.0


class Failed(_Reply, frozen=True, kw_only=True):
    """The engine could not; it goes on."""

    error: str


Request: TypeAlias = Sample | Score | Receive | Load | Stop
Reply: TypeAlias = Sampled | Scored | Done | Failed
_T = TypeVar("_T", Sampled, Scored, Done)


class ServingEnd:
    """The engine's end. It binds."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(Request)

    def take(self, timeout_seconds: float) -> Request | None:
        """The next request; None when none came in time."""
        if not self._socket.poll(int(timeout_seconds * 1000)):
            return None
        request: Request = self._decoder.decode(self._socket.recv())
        return request

    def answer(self, request: Request, reply: Reply) -> None:
        self._socket.send(msgspec.msgpack.encode(msgspec.structs.replace(reply, number=request.number)))


class TrainerEnd:
    """Trainer 0's end. Requests are answered in their order; replies may be fetched in any."""

    def __init__(self, address: str, *, timeout_seconds: float) -> None:
        """timeout_seconds: for any one reply."""
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._timeout_seconds = timeout_seconds
        self._replies: dict[int, Reply] = {}
        self._asked = 0

    def ask(self, request: Request) -> int:
        """Send it; the number that `reply` takes. Does not wait."""
        self._asked += 1
        self._socket.send(msgspec.msgpack.encode(msgspec.structs.replace(request, number=self._asked)))
        return self._asked

    def reply(self, number: int, kind: type[_T], timeout_seconds: float | None = None) -> _T:
        """Wait for the reply to a request. Raises TimeoutError, or RuntimeError with what the engine says went wrong."""
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        give_up = time.monotonic() + limit
        while number not in self._replies:
            left = give_up - time.monotonic()
            if left <= 0 or not self._socket.poll(int(left * 1000) + 1):
                raise TimeoutError(f"the engine did not answer request {number} within {limit:.0f} s; see its log")
            came: Reply = self._decoder.decode(self._socket.recv())
            self._replies[came.number] = came
        reply = self._replies.pop(number)
        if isinstance(reply, Failed):
            raise RuntimeError(f"the engine failed at request {number}: {reply.error}")
        if not isinstance(reply, kind):
            raise RuntimeError(f"the engine answered request {number} by {type(reply).__name__}, not {kind.__name__}")
        return reply

    def call(self, request: Request, kind: type[_T], timeout_seconds: float | None = None) -> _T:
        return self.reply(self.ask(request), kind, timeout_seconds)
