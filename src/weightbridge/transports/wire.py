"""Frames between two joined workers, and moving them whole over a blocking socket.

    header | tag | payload | num_writes x (remote offset, bytes) | the bytes, in that order

Little-endian. A post is one or more frames: PART frames carry bytes only, its LAST frame carries the tag. Every LAST frame
is answered by an ACK with its ticket. REFUSED says why the connection ends. In shared memory the bytes have gone another
way and num_writes is 0.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from weightbridge.transports.base import MAX_PAYLOAD_BYTES, MAX_TAG_BYTES

__all__ = [
    "HEADER_BYTES", "MAX_FRAME_BYTES", "MAX_FRAME_WRITES", "FrameKind", "Header", "ProtocolError", "cut_writes", "merge_writes",
    "read_header", "receive_into", "send_buffers",
]  # fmt: skip

MAX_FRAME_BYTES = 8 << 20
"""Between two frames of a large post acknowledgements may pass: about the delay that one can suffer."""

MAX_FRAME_WRITES = 16384

_HEADER = struct.Struct("<4sBBHIIQ")
_MAGIC = b"WBF1"
HEADER_BYTES = _HEADER.size
_IOV_MAX = max(os.sysconf("SC_IOV_MAX"), 16)


class FrameKind(IntEnum):
    PART = 1
    LAST = 2
    ACK = 3
    REFUSED = 4


class ProtocolError(Exception):
    """The peer sent what no peer may send; the text is the cause."""


class Header:
    """kind, tag_bytes, payload_bytes, num_writes, ticket of one frame."""

    __slots__ = ("kind", "num_writes", "payload_bytes", "tag_bytes", "ticket")

    def __init__(
        self, kind: FrameKind, ticket: int, tag_bytes: int = 0, payload_bytes: int = 0, num_writes: int = 0
    ) -> None:
        self.kind = kind
        self.ticket = ticket
        self.tag_bytes = tag_bytes
        self.payload_bytes = payload_bytes
        self.num_writes = num_writes

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.kind, self.tag_bytes, 0, self.payload_bytes, self.num_writes, self.ticket)


def read_header(data: bytes | bytearray) -> Header:
    """Parse and bound a header. Raises ProtocolError, so that no size of a stranger's choosing is ever allocated."""
    magic, kind, tag_bytes, _, payload_bytes, num_writes, ticket = _HEADER.unpack(data)
    if magic != _MAGIC or kind not in FrameKind._value2member_map_:
        raise ProtocolError(f"it sent a frame that begins with {bytes(data[:8]).hex()}, which is not this protocol")
    if tag_bytes > MAX_TAG_BYTES or payload_bytes > MAX_PAYLOAD_BYTES or num_writes > MAX_FRAME_WRITES:
        raise ProtocolError(
            f"it sent a frame with {tag_bytes} tag bytes, {payload_bytes} payload bytes and {num_writes} writes; allowed are "
            f"{MAX_TAG_BYTES}, {MAX_PAYLOAD_BYTES} and {MAX_FRAME_WRITES}"
        )
    return Header(FrameKind(kind), ticket, tag_bytes, payload_bytes, num_writes)


def merge_writes(writes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Drop empty rows and join rows that continue the one before at both ends. writes: [N, 3] (local, remote, bytes)."""
    writes = writes[writes[:, 2] > 0]
    if len(writes) < 2:
        return writes
    ends = writes[:-1, :2] + writes[:-1, 2:]
    starts = np.flatnonzero(np.concatenate([[True], (writes[1:, :2] != ends).any(axis=1)]))
    merged: npt.NDArray[np.int64] = writes[starts].copy()
    merged[:, 2] = np.add.reduceat(writes[:, 2], starts)
    return merged


def cut_writes(writes: npt.NDArray[np.int64], max_writes: int = MAX_FRAME_WRITES) -> Iterator[npt.NDArray[np.int64]]:
    """Cut [N, 3] writes, none empty, into pieces that fit one frame each, `max_writes` rows at most. Order is kept; nothing
    for N = 0."""
    if (writes[:, 2] > MAX_FRAME_BYTES).any():
        writes = np.concatenate([_cut_one(*row) for row in writes.tolist()])
    ends = np.cumsum(writes[:, 2])
    first, before = 0, 0
    while first < len(writes):
        stop = int(np.searchsorted(ends, before + MAX_FRAME_BYTES, side="right"))
        stop = max(min(stop, first + max_writes), first + 1)
        yield writes[first:stop]
        first, before = stop, int(ends[stop - 1])


def _cut_one(local: int, remote: int, nbytes: int) -> npt.NDArray[np.int64]:
    at = np.arange(0, nbytes, MAX_FRAME_BYTES, dtype=np.int64)
    return np.stack([local + at, remote + at, np.minimum(nbytes - at, MAX_FRAME_BYTES)], axis=1)


def send_buffers(
    sock: socket.socket, buffers: list[memoryview], waited: Callable[[], None], moved: Callable[[], None]
) -> None:
    """Send all buffers in order. waited: called each time the socket's own time-out has passed; raises to give up.

    moved: called whenever bytes have gone out.
    """
    first = 0
    while first < len(buffers):
        try:
            sent = sock.sendmsg(buffers[first : first + _IOV_MAX], (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            waited()
            continue
        moved()
        while first < len(buffers) and sent >= len(buffers[first]):
            sent -= len(buffers[first])
            first += 1
        if sent:
            buffers[first] = buffers[first][sent:]


def receive_into(
    sock: socket.socket, buffers: list[memoryview], waited: Callable[[], None], moved: Callable[[], None]
) -> bool:
    """Fill all buffers (none empty) in order; False when the peer closed before. Callbacks as for `send_buffers`."""
    first = 0
    while first < len(buffers):
        try:
            if first + 1 == len(buffers):
                received = sock.recv_into(buffers[first], 0, socket.MSG_WAITALL)
            else:
                received = sock.recvmsg_into(buffers[first : first + _IOV_MAX], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            waited()
            continue
        if received == 0:
            return False
        moved()
        while first < len(buffers) and received >= len(buffers[first]):
            received -= len(buffers[first])
            first += 1
        if received:
            buffers[first] = buffers[first][received:]
    return True
