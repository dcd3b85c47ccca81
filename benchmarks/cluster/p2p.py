"""The usual method "p2p": every rollout worker is sent its own shards straight from trainers that hold them.

One source a shard; what goes from one trainer to one rollout worker is packed into batches of some MiB and written with large
writes to a plain socket; engines are served one after the other by each trainer, each trainer node beginning with another
one, their workers at the same time. Nothing is forwarded, so every engine's bytes leave the trainers again.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.cluster.shards import Copies, batches, segments_between
from benchmarks.cluster.worker import Context

__all__ = ["BATCH_BYTES", "PointToPoint", "dial", "in_threads", "listen", "receive_exactly"]

BATCH_BYTES = 4 << 20
_WHO = struct.Struct("<I")


class PointToPoint:
    """Connections that stay, copies that are prepared."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._listener = None if context.is_trainer else listen(context)
        self._links: dict[int, tuple[socket.socket, np.ndarray[Any, Any], list[Copies]]] = {}  # by peer

    def connect(self) -> dict[str, Any]:
        """Trainers dial whom they have something for."""
        context, case = self._context, self._context.case
        begin = time.monotonic()
        if self._listener is None:
            for rollout in case.topology.rollouts:
                segments = segments_between(case, rollout).get(context.me)
                if segments:
                    sock = dial(context, rollout)
                    sock.sendall(_WHO.pack(context.me))
                    self._add(rollout, sock, segments, side=0)
        else:
            expected = segments_between(case, context.me)
            self._listener.settimeout(context.seconds)
            for _ in expected:
                sock, _ = self._listener.accept()
                sock.settimeout(context.seconds)
                (trainer,) = _WHO.unpack(sock.recv(_WHO.size, socket.MSG_WAITALL))
                self._add(trainer, sock, expected[trainer], side=1)
        return {"connect_seconds": time.monotonic() - begin}

    def _add(self, peer: int, sock: socket.socket, segments: Iterable[Any], *, side: int) -> None:
        groups = batches(self._context.case.spec, list(segments), BATCH_BYTES)
        parts = [[segment[side] for segment in group] for group in groups]
        itemsizes = [t.dtype.itemsize for t in self._context.case.spec.tensors]
        most = max(sum(r.numel * itemsizes[r.tensor] + 16 for r in group) for group in parts)
        buffer = np.zeros(most, dtype=np.uint8)
        self._links[peer] = (sock, buffer, [Copies(self._context.model, buffer, group) for group in parts])

    def go(self, version: int) -> None:
        begin = time.monotonic()
        if self._listener is None:
            workers = self._context.case.topology.workers
            for engine in self._context.engines_in_turn():
                mine = [link for peer, link in self._links.items() if workers[peer].engine == engine]
                in_threads([partial(_send, *link) for link in mine], self._context.seconds)
        else:
            in_threads([partial(_receive, *link) for link in self._links.values()], self._context.seconds)
        self._context.done(version, begin, time.monotonic())

    def idle(self) -> None:
        pass

    def close(self) -> None:
        for sock, _, _ in self._links.values():
            sock.close()


def _send(sock: socket.socket, buffer: np.ndarray[Any, Any], groups: list[Copies]) -> None:
    view = buffer.data
    for copies in groups:
        copies.pack()
        sock.sendall(view[: copies.nbytes])


def _receive(sock: socket.socket, buffer: np.ndarray[Any, Any], groups: list[Copies]) -> None:
    view = buffer.data
    for copies in groups:
        receive_exactly(sock, view[: copies.nbytes])
        copies.unpack()


def listen(context: Context) -> socket.socket:
    """A listener of this worker, where `dial` finds it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((context.host, context.port + 1 + context.me))
    listener.listen(64)
    return listener


def dial(context: Context, worker: int) -> socket.socket:
    """Connect to another worker's listener; it may not be up yet."""
    node = int(context.case.topology.workers[worker].node[1:])
    give_up = time.monotonic() + context.seconds
    while True:
        try:
            sock = socket.create_connection((context.hosts[node], context.port + 1 + worker), timeout=context.seconds)
        except ConnectionRefusedError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        received = sock.recv_into(view)
        if not received:
            raise ConnectionError("the peer closed the connection in the middle of an update")
        view = view[received:]


def in_threads(works: Sequence[Callable[[], None]], seconds: float) -> None:
    """Run all at the same time, the first on this thread; raises the first error, or TimeoutError."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works[1:]]
    for thread in threads:
        thread.start()
    for work in works[:1]:
        run(work)
    for thread in threads:
        thread.join(seconds)
        if thread.is_alive():
            raise TimeoutError(f"a connection did not finish within {seconds:.0f} s")
    if errors:
        raise errors[0]
