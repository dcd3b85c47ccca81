"""Workers of one machine: each maps the other's memory, a write is a memcpy, a tag is a small message on a Unix socket.

The socket lives in the abstract namespace: no file is left behind whatever happens. Only processes of the same user (or
root) are admitted, and the same handshake as over TCP comes first. Memory travels as a descriptor (SCM_RIGHTS).
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import struct
import time

import numpy as np

from weightbridge.errors import ConnectError, InternalError, RegistrationError, UsageError
from weightbridge.kernels import copy_writes
from weightbridge.kernels.base import Buffer
from weightbridge.transports.base import Capabilities, Identity, Memory
from weightbridge.transports.link import Link, Post
from weightbridge.transports.memory import SharedMemory
from weightbridge.transports.sockets import Join, SocketTransport
from weightbridge.transports.wire import ProtocolError, cut_writes

__all__ = ["ShmTransport"]

_SCHEME = "shm://"
_BACKLOG = 1024


class ShmTransport(SocketTransport):
    """Same machine only. `host` is not used. Memory must come with a descriptor (`SharedMemory`)."""

    name = "shm"
    capabilities = Capabilities(crosses_nodes=False, maps_memory=True, fence_replaces_memory=True)
    passes_memory = True

    def __init__(
        self,
        identity: Identity,
        events: queue.SimpleQueue[object],
        *,
        host: str = "127.0.0.1",
        deadline_seconds: float = 30.0,
    ) -> None:
        self._socket_name = f"weightbridge-{secrets.token_hex(16)}"
        self._retired: dict[str, SharedMemory] = {}
        super().__init__(identity, events, host=host, deadline_seconds=deadline_seconds)

    @property
    def address(self) -> str:
        """shm://name of the socket in the abstract namespace."""
        return _SCHEME + self._socket_name

    def map(self, peer: str) -> Buffer:
        """See `Transport.map`. Good until the peer is connected again after a fence, or the transport is closed: end
        whatever reads it before that."""
        link = self._link(peer)
        if not isinstance(link, ShmLink):
            raise InternalError(f"the shm transport holds a {type(link).__name__} to worker {peer}")
        return link.mapping.memory.buffer

    def close(self) -> None:
        """See `Transport.close`."""
        super().close()
        for mapping in self._retired.values():
            mapping.close()
        self._retired.clear()

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + self._socket_name)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConnectError(f"cannot listen on a Unix socket: {error}") from error
        return listener

    def _dial(self, address: str, deadline: float) -> socket.socket:
        if not address.startswith(_SCHEME):
            raise UsageError(f"address {address!r} is not of the form {_SCHEME}name")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect("\0" + address.removeprefix(_SCHEME))
        except OSError:
            sock.close()
            raise
        return sock

    def _objection(self, sock: socket.socket) -> str:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        me = os.geteuid()
        return (
            "" if uid in (0, me) else f"process {pid} is of user {uid}, this worker of user {me}; run both as one user"
        )

    def _make_link(self, peer: str, sock: socket.socket, memory: Memory, join: Join) -> Link:
        try:
            mapping = SharedMemory.attach(join.fd, join.nbytes)
        except RegistrationError as error:
            raise RegistrationError(
                f"the memory of worker {peer} cannot be used: {error.message}", peer=peer
            ) from error
        old = self._retired.pop(peer, None)
        if old is not None:
            old.close()
        return ShmLink(peer, sock, memory.buffer, mapping, self.events, self.deadline_seconds)

    def _end_link(self, link: Link) -> None:
        super()._end_link(link)
        if not isinstance(link, ShmLink):
            return
        if self._closed:
            link.mapping.close()
        else:  # a kernel of the owner may still be reading it: the mapping goes when the next one comes
            self._retired[link.peer] = link.mapping


class ShmLink(Link):
    """The bytes go straight into `mapping`; frames carry tags only."""

    def __init__(
        self,
        peer: str,
        sock: socket.socket,
        local: Buffer,
        mapping: SharedMemory,
        events: queue.SimpleQueue[object],
        deadline: float,
    ) -> None:
        super().__init__(peer, sock, local, mapping.memory.buffer.nbytes, events, deadline)
        self.mapping = mapping

    def _transmit(self, post: Post) -> None:
        target = self.mapping.memory.buffer
        for piece in cut_writes(post.writes):
            copy_writes(self.local, target, np.ascontiguousarray(piece))
            self._moved()
            self._send_between_parts()
        self._send([memoryview(self._last_frame(post))])

    def _receive_writes(self, num_writes: int) -> None:
        raise ProtocolError(f"it sent {num_writes} writes over the socket, but shm writes go through memory")
