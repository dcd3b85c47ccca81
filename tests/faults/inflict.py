"""How a fault is inflicted, inside the victim's own process: at its phase, once.

The process kills or stops itself, or asks the supervisor to cut its link; its connections are made half-open by putting dead
descriptors in their place, the old ones staying open and unread; its address space is limited to what it has; a byte that
it sends or receives over TCP is changed between the digest and the look at it; its control messages are said and heard
twice, or said in another order.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

from tests.faults.cells import STRUCK_VERSION, Cell

from weightbridge.coordinator import session_events as events
from weightbridge.coordinator.wire import WorkerSocket
from weightbridge.executor.observation import Observation, Prepared
from weightbridge.machine.events import Arrived, AssembleDone, PackDone, WriteDone
from weightbridge.transports.tcp import TcpLink

__all__ = ["Inflicter"]

_SLACK_BYTES = 1 << 20  # small things still find memory, slots and host copies do not
_WAIT_SECONDS = 10.0


class Inflicter:
    """Observes the victim (`on_event`, `observe`) and strikes when it comes to the phase.

    folder: where "struck" appears, with the time and the peer that was at the other end, and where "cut" is awaited.
    """

    def __init__(self, cell: Cell, folder: Path) -> None:
        self._cell = cell
        self._folder = folder
        self._version = 0
        self._num_rounds = 1
        self._num_seen = 0
        self._done = False
        self._lock = threading.Lock()
        self._links: list[TcpLink] = []
        self._armed = False
        self._random = random.Random(str(cell))
        self._held: bytes | None = None
        _watch_links(self)
        if cell.kind == "corrupted byte":
            _corrupt(self)
        elif cell.kind in ("duplicated messages", "reordered messages"):
            _disturb_control(self, twice=cell.kind == "duplicated messages")

    # --- when ---------------------------------------------------------------------------------------------------------------

    def on_event(self, event: events.SessionEvent) -> None:
        match event:
            case events.UpdateStarted(version=version):
                self._version = version
            case events.Joined() if self._cell.phase == "connect" and self._cell.kind.endswith("messages"):
                self.strike()
            case events.Probing() if self._cell.phase == "connect" and self._cell.kind == "full memory":
                self.strike()

    def observe(self, seen: Observation) -> None:
        phase = self._cell.phase
        match seen.what:
            case Prepared(program=program):
                self._num_rounds = len(program.rounds)
                if phase == "connect" and self._cell.kind != "half-open":
                    self.strike()
            case Arrived() | PackDone() | AssembleDone() | WriteDone() as what if self._version == STRUCK_VERSION:
                self._num_seen += 1
                k = what.tag.round if isinstance(what, Arrived) else what.round
                is_last = isinstance(what, AssembleDone) and k == self._num_rounds - 1
                due = {
                    "receive": self._num_seen >= 2,
                    "exchange": k >= self._num_rounds // 2,
                    "install": self._cell.mode == "direct" and is_last,
                }
                if due.get(phase, False):
                    self.strike()

    def installing(self, version: int) -> None:
        """An engine worker stands still and is about to install."""
        if version == STRUCK_VERSION and self._cell.phase == "install" and self._cell.mode == "staged":
            self.strike()

    def released(self, version: int) -> None:
        """A trainer's weights have left: engines are about to install them."""
        if version == STRUCK_VERSION and self._cell.phase == "install":
            self.strike()

    # --- what ---------------------------------------------------------------------------------------------------------------

    def strike(self) -> None:
        with self._lock:
            if self._done:
                return
            self._done = True
        match self._cell.kind:
            case "kill":
                self.note("")
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                self.note("")
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut":
                self.note("")
                self._wait_for("cut")
            case "half-open":
                peers = [link.peer for link in self._links if _half_open(link)]
                self.note(" ".join(peers))
            case "full memory":
                self.note("")
                _, hard = resource.getrlimit(resource.RLIMIT_AS)
                resource.setrlimit(resource.RLIMIT_AS, (_address_space_bytes() + _SLACK_BYTES, hard))
            case "corrupted byte":
                self._armed = True
            case _:
                self._armed = True
                self.note("")

    def note(self, peers: str) -> None:
        """The fault strikes now. peers: who is at the other ends, where only some connections are struck."""
        path = self._folder / "struck.part"
        path.write_text(f"{time.time()} {peers}")
        path.rename(self._folder / "struck")

    def _wait_for(self, name: str) -> None:
        give_up = time.monotonic() + _WAIT_SECONDS
        while not (self._folder / name).exists() and time.monotonic() < give_up:
            time.sleep(0.002)

    # --- for the seams below --------------------------------------------------------------------------------------------------

    def linked(self, link: TcpLink) -> None:
        """A connection of the data plane stands, as far as this end knows."""
        self._links.append(link)
        if self._cell.phase == "connect" and self._cell.kind == "half-open":
            self.strike()

    def corrupts(self, peer: str) -> bool:
        """Whether the bytes that go to or come from `peer` now are the ones to be damaged."""
        with self._lock:
            if not self._armed:
                return False
            self._armed = False
        self.note(peer)
        return True

    def to_say(self, data: bytes, twice: bool) -> list[bytes]:
        """What is sent in place of one control message."""
        if not self._armed:
            return [data]
        if twice:
            return [data, data] if self._random.random() < 0.5 else [data]
        held, self._held = self._held, None
        if held is not None:
            return [data, held]
        if self._random.random() < 0.3:
            self._held = data
            return []
        return [data]

    def is_armed(self) -> bool:
        return self._armed


def _watch_links(inflicter: Inflicter) -> None:
    start = TcpLink.start

    def watched(link: TcpLink) -> None:
        start(link)
        inflicter.linked(link)

    TcpLink.start = watched  # type: ignore[method-assign]


def _corrupt(inflicter: Inflicter) -> None:
    send, receive_writes = TcpLink._send, TcpLink._receive_writes

    def damaged(link: TcpLink, buffers: list[memoryview]) -> None:
        if len(buffers) > 1 and inflicter.corrupts(link.peer):  # a header, and weights
            copy = bytearray(buffers[1])
            copy[len(copy) // 2] ^= 0x10
            buffers = [buffers[0], memoryview(copy), *buffers[2:]]
        send(link, buffers)

    def damaging(link: TcpLink, num_writes: int) -> None:
        into: list[memoryview] = []
        receive_views = link._receive_views

        def noting(views: list[memoryview]) -> None:
            into.extend(views)
            receive_views(views)

        link._receive_views = noting  # type: ignore[method-assign]
        receive_writes(link, num_writes)
        weights = into[1:]  # after the table of where they go
        if weights and inflicter.corrupts(link.peer):
            weights[0][len(weights[0]) // 2] ^= 0x10

    TcpLink._send = damaged  # type: ignore[method-assign]
    TcpLink._receive_writes = damaging  # type: ignore[method-assign]


def _disturb_control(inflicter: Inflicter, *, twice: bool) -> None:
    send, receive = WorkerSocket.send, WorkerSocket.receive

    def disturbed(self: WorkerSocket, data: bytes) -> None:
        for word in inflicter.to_say(data, twice):
            send(self, word)

    def heard_twice(self: WorkerSocket) -> list[bytes]:
        words: list[bytes] = list(receive(self))
        return [word for word in words for _ in range(2)] if twice and inflicter.is_armed() else words

    WorkerSocket.send = disturbed  # type: ignore[method-assign]
    WorkerSocket.receive = heard_twice  # type: ignore[method-assign,assignment]


_KEPT: list[Any] = []


def _half_open(link: TcpLink) -> bool:
    """This end is gone and does not say so: the connection stays open in the kernel, and nobody reads it."""
    if link._silent or link.sock.fileno() < 0:
        return False
    _KEPT.append(os.dup(link.sock.fileno()))
    ours, theirs = socket.socketpair()
    theirs.close()
    os.dup2(ours.fileno(), link.sock.fileno())
    ours.close()
    return True


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
