"""The usual method "file": trainers write safetensors files, rollout workers read them over the network.

Every trainer writes its part of the checkpoint (each element once over all of them) and serves the file with sendfile from a
plain TCP server. A rollout worker asks for the byte ranges of the rows it needs as soon as the file is whole, all of them at
once, and loads while more comes in. No fsync: the page cache is as fast as storage gets.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from benchmarks.cluster.model import Rectangle, rectangles, shared_rectangle
from benchmarks.cluster.p2p import dial, in_threads, listen, receive_exactly
from benchmarks.cluster.shards import given_rectangles
from benchmarks.cluster.worker import Context

__all__ = ["Files"]

_REQUEST = struct.Struct("<qq")  # version, number of ranges
_RANGE = np.dtype([("offset", "<i8"), ("nbytes", "<i8")])
_BATCH_BYTES = 4 << 20


class _Read(NamedTuple):
    """offset, nbytes: of whole rows in the file. rows, pitch: how they lie there. col, target: what is taken of each row."""

    offset: int
    nbytes: int
    num_rows: int
    col: int
    target: Any


class Files:
    """A trainer's writer and server, or a rollout worker's reader."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._path = Path(context.work_dir, f"{context.name.replace('/', '-')}.safetensors")
        self._written = -1
        self._changed = threading.Condition()
        self._listener = listen(context) if context.is_trainer else None
        self._links: list[tuple[socket.socket, list[list[_Read]]]] = []

    def connect(self) -> dict[str, Any]:
        """Version 0 is written, so that readers learn the layout of the files from their headers."""
        context, case = self._context, self._context.case
        begin = time.monotonic()
        if self._listener is not None:
            self._mine = given_rectangles(case)[context.me]
            self._write(0)
            threading.Thread(target=self._serve, name="file-server", daemon=True).start()
            return {"connect_seconds": time.monotonic() - begin}
        needs: dict[int, list[Rectangle]] = {}
        for r in rectangles(case.spec, case.maps[context.me]):
            needs.setdefault(r.tensor, []).append(r)
        for trainer in case.topology.trainers:
            sock = dial(context, trainer)
            groups = _grouped(self._reads(sock, needs))
            if groups:
                self._links.append((sock, groups))
            else:
                sock.close()
        return {}

    # --- trainers -----------------------------------------------------------------------------------------------------

    def _write(self, version: int) -> None:
        tensors = {
            f"{r.tensor}:{r.row}:{r.col}:{r.num_rows}:{r.num_cols}": np.ascontiguousarray(self._context.model.bits(r))
            for r in self._mine
        }
        partial = self._path.with_suffix(".part")
        save_file(tensors, partial)
        partial.replace(self._path)
        with self._changed:
            self._written = version
            self._changed.notify_all()

    def _serve(self) -> None:
        while self._listener is not None:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(sock,), name="file-client", daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with sock:
            sock.settimeout(None)
            while head := sock.recv(_REQUEST.size, socket.MSG_WAITALL):
                version, num = _REQUEST.unpack(head)
                ranges = np.zeros(num, dtype=_RANGE)
                receive_exactly(sock, ranges.view(np.uint8).data)
                if not self._wait_written(version):
                    return
                with self._path.open("rb") as file:
                    for offset, nbytes in ranges.tolist():
                        _send_range(sock, file.fileno(), offset, nbytes)

    def _wait_written(self, version: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._written >= version, self._context.seconds)

    # --- rollout workers ----------------------------------------------------------------------------------------------

    def _reads(self, sock: socket.socket, needs: dict[int, list[Rectangle]]) -> list[_Read]:
        """What this worker needs of one trainer's file, in file order."""
        _request(sock, 0, [(0, 8)])
        (size,) = struct.unpack("<Q", _received(sock, 8))
        _request(sock, 0, [(8, size)])
        header = json.loads(_received(sock, size))
        found = []
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            tensor, row, col, num_rows, num_cols = map(int, name.split(":"))
            have = Rectangle(tensor, row, num_rows, col, num_cols, 0, 0, num_cols)
            for need in needs.get(tensor, ()):
                shared = shared_rectangle(have, need)
                if shared is None:
                    continue
                target = self._context.model.bits(shared[1])
                pitch = num_cols * target.itemsize
                offset = 8 + size + entry["data_offsets"][0] + (shared[0].row - row) * pitch
                found += _cut(_Read(offset, pitch * len(target), len(target), shared[0].col - col, target))
        return sorted(found, key=lambda r: r.offset)

    def go(self, version: int) -> None:
        begin = time.monotonic()
        if self._context.is_trainer:
            self._write(version)
        else:
            works = [partial(self._read, version, *link) for link in self._links]
            in_threads(works, self._context.seconds)
        self._context.done(version, begin, time.monotonic())

    def _read(self, version: int, sock: socket.socket, groups: list[list[_Read]]) -> None:
        _request(sock, version, _joined([(r.offset, r.nbytes) for group in groups for r in group]))
        buffer = np.zeros(max(sum(r.nbytes for r in group) for group in groups), dtype=np.uint8)
        for group in groups:
            receive_exactly(sock, buffer.data[: sum(r.nbytes for r in group)])
            at = 0
            for r in group:
                rows = buffer[at : at + r.nbytes].view(r.target.dtype).reshape(r.num_rows, -1)
                np.copyto(r.target, rows[:, r.col : r.col + r.target.shape[1]])
                at += r.nbytes

    def idle(self) -> None:
        pass

    def close(self) -> None:
        for sock, _ in self._links:
            sock.close()
        self._path.unlink(missing_ok=True)


def _cut(read: _Read) -> list[_Read]:
    pitch = read.nbytes // read.num_rows
    rows = max(_BATCH_BYTES // pitch, 1)
    found = []
    for first in range(0, read.num_rows, rows):
        num = min(rows, read.num_rows - first)
        found.append(_Read(read.offset + first * pitch, num * pitch, num, read.col, read.target[first : first + num]))
    return found


def _grouped(reads: list[_Read]) -> list[list[_Read]]:
    groups: list[list[_Read]] = []
    room = 0
    for read in reads:
        if not groups or read.nbytes > room:
            groups.append([])
            room = _BATCH_BYTES
        groups[-1].append(read)
        room -= read.nbytes
    return groups


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same bytes in fewer ranges."""
    found: list[tuple[int, int]] = []
    for offset, nbytes in ranges:
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + nbytes)
        else:
            found.append((offset, nbytes))
    return found


def _request(sock: socket.socket, version: int, ranges: list[tuple[int, int]]) -> None:
    sock.sendall(_REQUEST.pack(version, len(ranges)) + np.array(ranges, dtype=_RANGE).tobytes())


def _received(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    receive_exactly(sock, memoryview(data))
    return bytes(data)


def _send_range(sock: socket.socket, fd: int, offset: int, nbytes: int) -> None:
    while nbytes:
        sent = os.sendfile(sock.fileno(), fd, offset, nbytes)
        if not sent:
            raise ConnectionError("the file is shorter than its header says")
        offset, nbytes = offset + sent, nbytes - sent
