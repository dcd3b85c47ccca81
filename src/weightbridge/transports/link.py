"""One joined connection to one peer: a sender thread with an ordered queue, and a receiver thread.

The receiver thread never waits for the application or for the sender thread, so two ends that write to each other at once
cannot block each other: it puts acknowledgements into the sender's queue, ahead of posts. It alone reports that the peer is
lost, after everything that came before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import queue
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.errors import TransferTimeout, UsageError
from weightbridge.kernels.base import Buffer
from weightbridge.transports.base import Arrived, PeerLost, TransportEvent, WriteDone
from weightbridge.transports.wire import (
    HEADER_BYTES,
    FrameKind,
    Header,
    ProtocolError,
    read_header,
    receive_into,
    send_buffers,
)  # fmt: skip

__all__ = ["Closed", "Link", "Post", "Stalled", "view_of"]

MAX_PENDING_POSTS = 65_536
_MAX_REASON_BYTES = 1024
_FENCE_SECONDS = 5.0
_REASON_SECONDS = 1.0
_KERNEL_GAVE_UP = (
    "no progress for the deadline, so the kernel gave the connection up: it is stopped or the network is cut"
)


class Post(NamedTuple):
    """writes: [N, 3] (local offset, remote offset, bytes), checked, none empty."""

    ticket: int
    writes: npt.NDArray[np.int64]
    tag: bytes
    payload: bytes


class Stalled(Exception):
    """No progress for the deadline; the text is the cause."""


class Closed(Exception):
    """The peer closed; the text is the cause."""


def view_of(buffer: Buffer) -> memoryview:
    """The bytes of a buffer, writable. Nothing keeps the memory alive."""
    return memoryview((ctypes.c_char * buffer.nbytes).from_address(buffer.address)).cast("B")


class Link(ABC):
    """sock: blocking, authenticated, owned from now on. local: the memory registered when the link was made.

    remote_bytes: size of the peer's memory.
    """

    def __init__(
        self,
        peer: str,
        sock: socket.socket,
        local: Buffer,
        remote_bytes: int,
        events: queue.SimpleQueue[object],
        deadline: float,
    ) -> None:
        self.peer = peer
        self.sock = sock
        self.local = local
        self.remote_bytes = remote_bytes
        self._view = view_of(local)
        self._events = events
        self._event_lock = threading.Lock()
        self._silent = False
        self._deadline_seconds = deadline
        self._changed = threading.Condition()
        self._urgent: deque[bytes] = deque()
        self._posts: deque[Post] = deque()
        self._pending: deque[int] = deque()
        self._ending = False  # no further post is begun
        self._stopping = False  # not even the one begun is finished
        self._inside_frame = self._inside_post = False  # what the peer has begun and not finished
        self._stall = ""
        self._progress = time.monotonic()
        self._wire_mark = 0
        # Kernel time-outs instead of Python's: the socket stays truly blocking, without a poll before each call.
        seconds = min(1.0, deadline / 4)
        timeout = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._threads = [
            threading.Thread(target=target, name=f"wb-{what}-{peer}", daemon=True)
            for what, target in (("send", self._send_loop), ("receive", self._receive_loop))
        ]

    # --- what a kind of transport adds --------------------------------------------------------------------------------

    @abstractmethod
    def _transmit(self, post: Post) -> None:
        """Move the post's bytes, then send its LAST frame. Runs in the sender thread."""

    @abstractmethod
    def _receive_writes(self, num_writes: int) -> None:
        """Check and receive the bytes of one frame. Raises ProtocolError before a byte lands outside the memory."""

    def _acknowledged_by_wire(self) -> int:
        """A figure that changes while anything gets through to the peer's machine."""
        return 0

    def _is_over(self) -> bool:
        """Whether the operating system has ended the connection in both directions, for whatever reason."""
        return False

    # --- the owner's side ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def post(self, post: Post) -> None:
        """Queue a post. On a lost link it is dropped: PeerLost has been or is being reported."""
        with self._changed:
            if len(self._pending) >= MAX_PENDING_POSTS:
                raise UsageError(
                    f"{MAX_PENDING_POSTS} posts to worker {self.peer} await acknowledgement; wait for WriteDone"
                )
            if self._ending:
                return
            if not self._pending:
                self._moved()
            self._pending.append(post.ticket)
            self._posts.append(post)
            self._changed.notify_all()

    def fence(self) -> None:
        """Silence the link and end its threads; on return nothing of the peer can land here and no event will follow.

        Raises TransferTimeout when a thread does not end within the deadline, or five seconds if that is shorter: whoever
        called must then keep the memory from other use. It does not happen but to a machine that hardly runs.
        """
        self._silence()
        with self._changed:
            self._ending = self._stopping = True
            self._posts.clear()
            self._urgent.clear()
            self._changed.notify_all()
        self._shutdown(socket.SHUT_RDWR)
        # The shutdown ends whatever they block on, and to return before they have ended would break the promise.
        limit = max(self._deadline_seconds, _FENCE_SECONDS)
        until = time.monotonic() + limit
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(until - time.monotonic(), 0))
                if thread.is_alive():
                    raise TransferTimeout(
                        f"the connection to worker {self.peer} was shut down and thread {thread.name} still moves its "
                        f"bytes after {limit:g} s: its memory must not be used again; end this process",
                        waiting_for=(self.peer,), seconds=limit, peer=self.peer,
                    )  # fmt: skip

    def begin_close(self) -> None:
        """Silence the link, let queued acknowledgements out and tell the peer that no more will come. Does not wait."""
        self._silence()
        with self._changed:
            self._ending = True
            self._posts.clear()
            self._changed.notify_all()

    def finish_close(self, until: float) -> None:
        """Wait until the peer has closed too, `until` (time.monotonic) at the latest, so that it gets our last words."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(until - time.monotonic(), 0))
        self.fence()

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send_loop(self) -> None:
        try:
            while (post := self._next_post()) is not None:
                self._transmit(post)
            self._shutdown(socket.SHUT_WR)
        except Stalled as error:
            self._stall = str(error)
            self._shutdown(socket.SHUT_RDWR)
        except (Closed, OSError) as error:
            if (
                isinstance(error, OSError) and error.errno == errno.ETIMEDOUT
            ):  # the kernel tells only one of both threads
                self._stall = _KERNEL_GAVE_UP
            self._shutdown(socket.SHUT_RDWR)  # the receiver thread finds out why and says so

    def _next_post(self) -> Post | None:
        """Send what may overtake posts, then wait for something to do. None when the thread should end."""
        while True:
            self._send_urgent()
            with self._changed:
                while not (self._urgent or self._posts or self._ending):
                    self._changed.wait()
                if self._ending and (self._stopping or not self._urgent):
                    return None
                if not self._urgent:
                    return self._posts.popleft()

    def _send_urgent(self) -> None:
        with self._changed:
            frames = [memoryview(frame) for frame in self._urgent]
            self._urgent.clear()
        self._send(frames)

    def _send_between_parts(self) -> None:
        """Called by `_transmit` between the parts of a large post. Ends the sender thread when the link ends."""
        if self._urgent:
            self._send_urgent()
        if self._ending:
            raise Closed("the link is being closed")

    def _send(self, buffers: list[memoryview]) -> None:
        send_buffers(self.sock, buffers, self._waited, self._moved)

    def _last_frame(self, post: Post, num_writes: int = 0) -> bytes:
        header = Header(FrameKind.LAST, post.ticket, len(post.tag), len(post.payload), num_writes)
        return header.pack() + post.tag + post.payload

    def _queue_urgent(self, header: Header, payload: bytes = b"") -> None:
        with self._changed:
            self._urgent.append(header.pack() + payload)
            self._changed.notify_all()

    # --- receiving ----------------------------------------------------------------------------------------------------

    def _receive_loop(self) -> None:
        refusal = ""
        try:
            while True:
                self._receive_frame()
        except ProtocolError as error:
            cause = refusal = str(error)
        except (Closed, Stalled) as error:
            cause = str(error)
        except OSError as error:
            cause = _KERNEL_GAVE_UP if error.errno == errno.ETIMEDOUT else f"the connection broke: {error}"
        if not self._stall and self._is_over():
            self._await_sender()
        self._emit(PeerLost(self.peer, self._stall or cause))
        if refusal:
            reason = refusal.encode()[:_MAX_REASON_BYTES]
            self._queue_urgent(Header(FrameKind.REFUSED, 0, 0, len(reason)), reason)
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if not refusal:
            self._shutdown(socket.SHUT_RDWR)

    def _await_sender(self) -> None:
        """Called by the receiver thread on a connection that is over. The kernel says to only one of both threads that it
        gave the connection up, to the other that it ended; the sender, which finds out now, has perhaps been told why."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._threads[0].join(_REASON_SECONDS)

    def _receive_frame(self) -> None:
        head = bytearray(HEADER_BYTES)
        self._inside_frame = False
        if not receive_into(self.sock, [memoryview(head)], self._waited_idle, self._begun):
            raise Closed(
                "it closed the connection: the worker has ended, or has closed its transport or fenced this worker off"
            )
        header = read_header(head)
        rest = memoryview(self._receive(header.tag_bytes + header.payload_bytes))
        tag, payload = bytes(rest[: header.tag_bytes]), bytes(rest[header.tag_bytes :])
        if header.kind == FrameKind.ACK:
            self._take_ack(header.ticket)
        elif header.kind == FrameKind.REFUSED:
            raise Closed(f"it refused what this worker sent: {payload.decode(errors='replace')}")
        else:
            if header.num_writes:
                self._receive_writes(header.num_writes)
            self._inside_post = header.kind == FrameKind.PART
            if header.kind == FrameKind.LAST:
                self._deliver(Arrived(self.peer, tag, payload), header.ticket)

    def _take_ack(self, ticket: int) -> None:
        with self._changed:
            expected = self._pending.popleft() if self._pending else None
        if ticket != expected:
            raise ProtocolError(f"it acknowledged post {ticket}, expected {expected}")
        self._emit(WriteDone(self.peer, ticket))

    def _deliver(self, event: Arrived, ticket: int) -> None:
        # An acknowledgement says that the owner has been told; a silenced link tells nobody.
        if self._emit(event):
            self._queue_urgent(Header(FrameKind.ACK, ticket))

    def _receive(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        self._receive_views([memoryview(data)] if nbytes else [])
        return data

    def _receive_views(self, views: list[memoryview]) -> None:
        if not receive_into(self.sock, views, self._waited, self._moved):
            raise Closed(
                "the connection ended in the middle of a write: the worker has died, or has fenced this worker off"
            )
        if self._stopping:
            raise Closed("fenced")

    # --- progress and events ------------------------------------------------------------------------------------------

    def _moved(self) -> None:
        self._progress = time.monotonic()

    def _begun(self) -> None:
        self._inside_frame = True
        self._moved()

    def _waited(self) -> None:
        if self._stopping:
            raise Closed("fenced")
        mark = self._acknowledged_by_wire()
        if mark != self._wire_mark:
            self._wire_mark = mark
            self._moved()
        silent_seconds = time.monotonic() - self._progress
        if silent_seconds > self._deadline_seconds:
            raise Stalled(
                f"no progress for {silent_seconds:.1f} s (deadline {self._deadline_seconds:g} s) with "
                f"{len(self._pending)} posts unacknowledged or a write half received: it is stopped or the network is cut"
            )

    def _waited_idle(self) -> None:
        """Between frames silence is suspicious only while an own post is unanswered or one of the peer's is half received."""
        if self._pending or self._inside_frame or self._inside_post:
            self._waited()
        elif self._stopping:
            raise Closed("fenced")

    def _emit(self, event: TransportEvent) -> bool:
        with self._event_lock:
            if not self._silent:
                self._events.put(event)
            return not self._silent

    def _silence(self) -> None:
        with self._event_lock:
            self._silent = True

    def _shutdown(self, how: int) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(how)
