"""The method "peer:mooncake": buckets written one-sidedly by Mooncake's transfer engine, over TCP.

The way frameworks use it for weights: a trainer packs a bucket into registered memory, writes it into registered memory of the
rollout worker with one transfer and tells it; that one loads from there. Sources, batches and the order of engines are those
of `p2p`; only the bytes go another way. Several buckets of a pair are under way while the next is packed and one is loaded.

Its calls that wait burn a core until all has arrived, on a machine where eight workers share two; so transfers are submitted,
and looked at every fifth of a millisecond.
"""

from __future__ import annotations

import importlib
import socket
import struct
import time
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cluster.p2p import dial, in_threads, listen, receive_exactly
from benchmarks.cluster.shards import Copies, batches, segments_between
from benchmarks.cluster.worker import Context

__all__ = ["BUCKET_BYTES", "MooncakePeer"]

BUCKET_BYTES = 4 << 20
_DEPTH = 4  # buckets of one pair that have memory
_LOOK_SECONDS = 0.0002
_HELLO = struct.Struct("<IQ64s")  # who, where its buckets lie, its engine's name
_DONE, _FAILED = 1, (-1, -2)


class _Pair(NamedTuple):
    """One trainer and one rollout worker. slots: their memory here. there: address of the other's. name: its engine's."""

    sock: socket.socket
    slots: list[np.ndarray[Any, Any]]
    copies: list[Copies]
    there: int
    name: str


class MooncakePeer:
    """An engine, registered memory and connections that stay; copies that are prepared."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._listener = None if context.is_trainer else listen(context)
        self._pairs: dict[int, _Pair] = {}  # by peer
        self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
        if self._engine.initialize(context.host, "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake's engine does not start")
        self._name = f"{context.host}:{self._engine.get_rpc_port()}"

    def connect(self) -> dict[str, Any]:
        """Trainers dial whom they have something for, and write to each once."""
        context, case = self._context, self._context.case
        begin = time.monotonic()
        if self._listener is None:
            for rollout in case.topology.rollouts:
                segments = segments_between(case, rollout).get(context.me)
                if segments:
                    self._add(rollout, dial(context, rollout), segments, side=0)
        else:
            expected = segments_between(case, context.me)
            self._listener.settimeout(context.seconds)
            for _ in expected:
                sock, _ = self._listener.accept()
                sock.settimeout(context.seconds)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                trainer = _HELLO.unpack(sock.recv(_HELLO.size, socket.MSG_PEEK | socket.MSG_WAITALL))[0]
                self._add(trainer, sock, expected[trainer], side=1)
        return {"connect_seconds": time.monotonic() - begin}

    def _add(self, peer: int, sock: socket.socket, segments: list[Any], *, side: int) -> None:
        groups = batches(self._context.case.spec, segments, BUCKET_BYTES)
        parts = [[segment[side] for segment in group] for group in groups]
        itemsizes = [t.dtype.itemsize for t in self._context.case.spec.tensors]
        most = max(sum(r.numel * itemsizes[r.tensor] + 16 for r in group) for group in parts)
        memory = np.zeros(_DEPTH * most, dtype=np.uint8)
        if self._engine.register_memory(memory.ctypes.data, memory.nbytes) != 0:
            raise RuntimeError(f"Mooncake does not register {memory.nbytes} bytes")
        sock.sendall(_HELLO.pack(self._context.me, memory.ctypes.data, self._name.encode()))
        hello = bytearray(_HELLO.size)
        receive_exactly(sock, memoryview(hello))
        _, there, name = _HELLO.unpack(hello)
        slots = [memory[i * most : (i + 1) * most] for i in range(_DEPTH)]
        copies = [Copies(self._context.model, slots[k % _DEPTH], group) for k, group in enumerate(parts)]
        self._pairs[peer] = _Pair(sock, slots, copies, there, name.rstrip(b"\0").decode())

    def go(self, version: int) -> None:
        begin = time.monotonic()
        if self._listener is None:
            workers = self._context.case.topology.workers
            for engine in self._context.engines_in_turn():
                mine = [pair for peer, pair in self._pairs.items() if workers[peer].engine == engine]
                in_threads([partial(self._send, pair) for pair in mine], self._context.seconds)
        else:
            in_threads([partial(_receive, pair) for pair in self._pairs.values()], self._context.seconds)
        self._context.done(version, begin, time.monotonic())

    def _send(self, pair: _Pair) -> None:
        flying: deque[int] = deque()
        slot_bytes = pair.slots[0].nbytes
        for k, copies in enumerate(pair.copies):
            if k >= _DEPTH:  # the other has loaded what was in this slot
                receive_exactly(pair.sock, memoryview(bytearray(1)))
            copies.pack()
            slot = k % _DEPTH
            there = pair.there + slot * slot_bytes
            flying.append(self._submit(pair.name, pair.slots[slot].ctypes.data, there, copies.nbytes))
            if len(flying) > _DEPTH - 2:
                self._finish(pair, flying)
        while flying:
            self._finish(pair, flying)
        receive_exactly(pair.sock, memoryview(bytearray(min(_DEPTH, len(pair.copies)))))

    def _submit(self, name: str, here: int, there: int, nbytes: int) -> int:
        batch: int = self._engine.transfer_submit_write(name, here, there, nbytes)
        if not batch:
            raise RuntimeError(f"Mooncake does not take a write of {nbytes} bytes to {name}")
        return batch

    def _finish(self, pair: _Pair, flying: deque[int]) -> None:
        """Wait for the oldest write and say that it is there: the engine calls it done when the other side has it."""
        while (status := self._engine.transfer_check_status(flying[0])) != _DONE:
            if status in _FAILED:
                raise RuntimeError(f"Mooncake reports that a write to {pair.name} failed (status {status})")
            time.sleep(_LOOK_SECONDS)
        flying.popleft()
        pair.sock.sendall(b"k")

    def idle(self) -> None:
        pass

    def close(self) -> None:
        for pair in self._pairs.values():
            pair.sock.close()


def _receive(pair: _Pair) -> None:
    word = memoryview(bytearray(1))
    for copies in pair.copies:
        receive_exactly(pair.sock, word)
        copies.unpack()
        pair.sock.sendall(b"k")
