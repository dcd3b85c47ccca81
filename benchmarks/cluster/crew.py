"""The worker processes of one measurement: started on their nodes, spoken to in lines of JSON, never left behind."""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Channel", "Crew", "CrewError"]

_TERM_SECONDS = 3.0
_MAX_LOG_LINES = 30

Message = dict[str, Any]


class CrewError(Exception):
    """A worker failed or was silent for too long; the text names it and ends with the last lines of its log."""


@dataclass(slots=True, kw_only=True)
class _Member:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    log: Path
    pending: bytes = b""


class Crew:
    """A context manager: leaving it ends every process by its own id, SIGTERM first.

    Each process is a session of its own, so that Ctrl-C reaches the measuring process alone, and ends itself when its channel
    closes, so that it does not outlive one that was killed.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._members: dict[str, _Member] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def start(self, name: str, prefix: Sequence[str], config: Message, environ: Mapping[str, str]) -> None:
        """Start worker `name`; prefix: what puts it on its node."""
        ours, theirs = socket.socketpair()
        log = self._log_dir / f"{name.replace('/', '-')}.log"
        command = [*prefix, sys.executable, "-m", "benchmarks.cluster.worker", str(theirs.fileno())]
        with theirs, log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, pass_fds=(theirs.fileno(),),
                env=dict(environ), start_new_session=True,
            )  # fmt: skip
        self._members[name] = _Member(process=process, channel=ours, log=log)
        self._selector.register(ours, selectors.EVENT_READ, name)
        self.tell([name], config)

    def pid(self, name: str) -> int:
        return self._members[name].process.pid

    def tell(self, names: Iterable[str], order: Message) -> None:
        """Send an order to some workers. One that is gone is found out by `gather`."""
        line = json.dumps(order).encode() + b"\n"
        for name in names:
            try:
                self._members[name].channel.sendall(line)
            except OSError:
                continue

    def gather(self, names: Sequence[str], kind: str, seconds: float) -> dict[str, Message]:
        """One message of this kind from each. Raises CrewError when a worker fails, ends, or is silent until the time is up."""
        found: dict[str, Message] = {}
        give_up = time.monotonic() + seconds
        while len(found) < len(names):
            left = give_up - time.monotonic()
            if left <= 0:
                silent = [name for name in names if name not in found]
                raise CrewError(
                    f"no word {kind!r} from {', '.join(silent)} within {seconds:.0f} s{self._last_lines(silent[0])}"
                )
            for key, _ in self._selector.select(left):
                for message in self._read(str(key.data), may_end=str(key.data) in found):
                    if message["kind"] == "failed":
                        raise CrewError(f"worker {key.data}: {message['text']}{self._last_lines(str(key.data))}")
                    if message["kind"] == kind:
                        found[str(key.data)] = message
        return found

    def _read(self, name: str, *, may_end: bool) -> list[Message]:
        member = self._members[name]
        try:
            data = member.channel.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(member.channel)
            if may_end:  # it has said what it was asked for; if it is needed later, silence will tell
                return []
            try:
                status = member.process.wait(_TERM_SECONDS)
            except subprocess.TimeoutExpired:
                raise CrewError(f"worker {name} closed its channel{self._last_lines(name)}") from None
            raise CrewError(f"worker {name} ended with status {status}{self._last_lines(name)}")
        *lines, member.pending = (member.pending + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def _last_lines(self, name: str) -> str:
        lines = self._members[name].log.read_text(errors="replace").splitlines()[-_MAX_LOG_LINES:]
        return "".join(f"\n  {name}: {line}" for line in lines)

    def _end(self) -> None:
        for member in self._members.values():
            _signal(member.process, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_SECONDS
        while time.monotonic() < deadline and any(m.process.poll() is None for m in self._members.values()):
            time.sleep(0.02)
        for member in self._members.values():
            _signal(member.process, signal.SIGKILL)
            member.process.wait()
            member.channel.close()
        self._selector.close()


def _signal(process: subprocess.Popen[bytes], which: signal.Signals) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, which)  # its own session: the child and whatever it started
        except ProcessLookupError:
            return


class Channel:
    """A worker's end: orders come out of `orders`; the process ends at once when the other end is gone."""

    def __init__(self, fd: int, *, on_lost: Callable[[], None] = lambda: os._exit(70)) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lock = threading.Lock()
        self._on_lost = on_lost
        self.orders: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="channel", daemon=True).start()

    def say(self, kind: str, **fields: Any) -> None:
        with self._lock:
            self._socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def _listen(self) -> None:
        pending = b""
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self._on_lost()
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self.orders.put(json.loads(line))
