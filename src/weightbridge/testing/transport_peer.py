"""A worker in a process of its own that does with a transport what it is told: one JSON command a line, one answer a line.

The fault suite stops and kills it. `PeerProcess` is the side that gives the commands.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np

from weightbridge.errors import TransferTimeout, TransportError, WeightBridgeError
from weightbridge.transports import Arrived, Identity, PeerLost, SharedMemory, Transport, WriteDone

__all__ = ["PeerProcess", "pattern"]


def pattern(nbytes: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that tell seeds and positions apart, none of them 0; made at memory speed."""
    base = np.random.default_rng(seed).integers(1, 256, min(nbytes, 65_521), dtype=np.uint8)
    return np.resize(base, nbytes)


class PeerProcess:
    """Starts the process and talks to it. Every call has a deadline; leaving the context kills it."""

    def __init__(
        self,
        transport_class: type[Transport],
        worker: str,
        *,
        nbytes: int,
        deadline_seconds: float,
        launcher: Sequence[str] = (),
        **identity: str,
    ):
        """launcher: a command that runs the command after it in its own place, such as `ip netns exec NAME`."""
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        kind = f"{transport_class.__module__}:{transport_class.__qualname__}"
        self._process = subprocess.Popen(
            [*launcher, sys.executable, "-m", "weightbridge.testing.transport_peer", kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self.worker = worker
        self.tell("open", worker=worker, nbytes=nbytes, deadline_seconds=deadline_seconds, **identity)

    @cached_property
    def address(self) -> str:
        """Of the peer's transport. Waits until the process is up: ask before the first command."""
        return str(self.answer(30.0))

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def call(self, command: str, *, limit: float = 20.0, **arguments: Any) -> Any:
        """Give a command and wait for its answer. Raises TransferTimeout after `limit` seconds, TransportError on failure."""
        self.tell(command, **arguments)
        return self.answer(limit)

    def tell(self, command: str, **arguments: Any) -> None:
        """Give a command without waiting for its answer."""
        stream = self._process.stdin
        if stream is not None:
            stream.write(json.dumps({"command": command, **arguments}) + "\n")
            stream.flush()

    def answer(self, limit: float = 20.0) -> Any:
        """The answer to the oldest command that has none yet."""
        stream = self._process.stdout
        ready = stream is not None and select.select([stream], [], [], limit)[0]
        if stream is None or not ready:
            raise TransferTimeout(
                f"peer process {self.worker} gave no answer", waiting_for=(self.worker,), seconds=limit
            )
        line = stream.readline()
        if not line:
            raise TransportError(f"peer process {self.worker} ended")
        answer = json.loads(line)
        if "error" in answer:
            raise TransportError(f"peer process {self.worker}: {answer['error']}")
        return answer["result"]

    def stop(self) -> None:
        """SIGSTOP, and wait until the process really stands still."""
        self._process.send_signal(signal.SIGSTOP)
        limit = time.monotonic() + 10
        while time.monotonic() < limit:
            with open(f"/proc/{self._process.pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "T":
                    return
            time.sleep(0.001)
        raise TransferTimeout(f"process of {self.worker} does not stop", waiting_for=(self.worker,), seconds=10)

    def resume(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait(20)


class _Server:
    """The commands, one method each. Their answers are JSON."""

    def __init__(self, kind: str) -> None:
        module, _, name = kind.partition(":")
        self._kind: type[Transport] = getattr(importlib.import_module(module), name)
        self._events: queue.SimpleQueue[object] = queue.SimpleQueue()

    def open(
        self, worker: str, nbytes: int, deadline_seconds: float, session: str = "suite", token: str = "secret"
    ) -> str:
        identity = Identity(worker=worker, session=session, token=token.encode())
        self._memory = SharedMemory(nbytes, prefault=True)
        self._transport = self._kind(identity, self._events, deadline_seconds=deadline_seconds)
        self._transport.register(self._memory.memory)
        return self._transport.address

    def fill(self, seed: int) -> None:
        self._memory.array[:] = pattern(len(self._memory.array), seed)

    def first_byte(self) -> int:
        return int(self._memory.array[0])

    def digest(self) -> str:
        return hashlib.blake2b(self._memory.array.tobytes()).hexdigest()

    def connect(self, peer: str, address: str) -> None:
        self._transport.connect(peer, address)

    def post(self, peer: str, writes: list[list[int]], tag: str) -> int:
        return self._transport.post(peer, np.array(writes, dtype=np.int64).reshape(-1, 3), tag.encode())

    def event(self, seconds: float) -> list[Any] | None:
        """The next event as [kind, peer, ticket or tag or cause]."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(event, Arrived):
            return ["Arrived", event.peer, event.tag.decode()]
        if isinstance(event, WriteDone):
            return ["WriteDone", event.peer, event.ticket]
        return ["PeerLost", event.peer, event.cause] if isinstance(event, PeerLost) else [repr(event)]

    def close(self) -> list[str]:
        """Names of the threads that are left: the main thread alone, if all is well."""
        self._transport.close()
        self._memory.close()
        return [t.name for t in threading.enumerate()]


def _serve() -> None:
    server = _Server(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(server, request.pop("command"))(**request)}
        except WeightBridgeError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
