"""Worker processes from start to end: started, listened to, told, and never left behind."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from weightbridge.cli.demo.messages import LineBuffer, Message, Order, encode

__all__ = ["Event", "Exited", "Supervisor", "how_it_ended"]

_TERM_SECONDS, _POLL_SECONDS = 3.0, 0.1
_RECV_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A worker process ended. returncode: as of subprocess, negative for a signal."""

    returncode: int


Event: TypeAlias = tuple[str, Message | Exited]


@dataclass(slots=True, kw_only=True)
class _Worker:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    buffer: LineBuffer = field(default_factory=LineBuffer)
    open: bool = True
    exited: bool = False


class Supervisor:
    """A set of named child processes. Use as a context manager: leaving it ends whoever is left, by its own id.

    Each child is a session of its own, so that Ctrl-C in a terminal reaches the launcher alone, and holds one end of a
    socket pair whose closing tells it that the launcher is gone.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._workers: dict[str, _Worker] = {}
        self._selector = selectors.DefaultSelector()
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_all()

    def start(self, name: str, module: str, arguments: Sequence[str], environ: dict[str, str]) -> None:
        """Start `python -m module *arguments FD`; its output goes to its log."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", module, *arguments, str(theirs.fileno())]
        with theirs, self.log_path(name).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=environ,
                start_new_session=True,
            )
        ours.setblocking(True)
        self._workers[name] = _Worker(process=process, channel=ours)
        self._selector.register(ours, selectors.EVENT_READ, name)

    def log_path(self, name: str) -> Path:
        return self._log_dir / f"{name.replace('/', '-')}.log"

    def pid(self, name: str) -> int:
        return self._workers[name].process.pid

    @property
    def alive(self) -> tuple[str, ...]:
        """Names of the workers whose exit has not been reported yet."""
        return tuple(name for name, worker in self._workers.items() if not worker.exited)

    def send(self, name: str, order: Order) -> None:
        """Tell a worker something; one that is gone already is not told."""
        worker = self._workers[name]
        if worker.open:
            try:
                worker.channel.sendall(encode(order))
            except OSError:
                self._close(worker)

    def events(self, timeout_seconds: float = _POLL_SECONDS) -> list[Event]:
        """What came within the timeout: messages, and exits after the last message of who exited."""
        found: list[Event] = []
        if any(worker.open for worker in self._workers.values()):
            ready = self._selector.select(timeout_seconds)
        else:
            time.sleep(min(timeout_seconds, _POLL_SECONDS))
            ready = []
        for key, _ in ready:
            found.extend(self._read(str(key.data)))
        for name, worker in self._workers.items():
            if not worker.exited and worker.process.poll() is not None:
                found.extend(self._drain(name))
                worker.exited = True
                found.append((name, Exited(returncode=worker.process.returncode)))
        return found

    def end_all(self) -> None:
        """SIGTERM, a moment, SIGKILL: to each worker's own session, by its id. Blocks until all are gone."""
        running = [w for w in self._workers.values() if w.process.poll() is None]
        _signal(running, signal.SIGTERM)
        deadline = time.monotonic() + _TERM_SECONDS
        while time.monotonic() < deadline and any(w.process.poll() is None for w in running):
            time.sleep(0.02)
        _signal(running, signal.SIGKILL)
        for worker in self._workers.values():
            worker.process.wait()
            self._close(worker)

    def _read(self, name: str) -> Iterable[Event]:
        worker = self._workers[name]
        try:
            data = worker.channel.recv(_RECV_BYTES)
        except OSError:
            data = b""
        if not data:
            self._close(worker)
            return
        for message in worker.buffer.feed(data):
            yield name, message

    def _drain(self, name: str) -> Iterable[Event]:
        while self._workers[name].open:
            yield from self._read(name)

    def _close(self, worker: _Worker) -> None:
        if worker.open:
            worker.open = False
            self._selector.unregister(worker.channel)
            worker.channel.close()


def how_it_ended(returncode: int) -> str:
    """An exit status in words: "was killed by SIGKILL", "exited with status 1"."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _signal(workers: Iterable[_Worker], which: signal.Signals) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            try:
                os.killpg(worker.process.pid, which)  # its own session: the child and whatever it started
            except ProcessLookupError:
                continue
