"""TCP between machines, with nothing but the standard library: the embedded default.

Blocking sockets in threads, `sendmsg` straight from registered memory, `recv_into` straight into it (measured on a shared
two-core machine: see benchmarks). Stalled connections end by TCP_USER_TIMEOUT and by a deadline of our own, because
TCP_USER_TIMEOUT does not see a peer whose process is stopped while its kernel still answers.
"""

from __future__ import annotations

import ipaddress
import socket
import time

import numpy as np
import numpy.typing as npt

from weightbridge.errors import ConnectError, UsageError
from weightbridge.transports.base import Capabilities, KernelBytes, Memory
from weightbridge.transports.link import Link, Post
from weightbridge.transports.sockets import Join, SocketTransport
from weightbridge.transports.tcp_info import acknowledged_bytes, is_over, kernel_bytes
from weightbridge.transports.wire import FrameKind, Header, ProtocolError, cut_writes

__all__ = ["TcpTransport", "is_loopback"]

_BACKLOG = 1024


class TcpTransport(SocketTransport):
    """One listener on `host` and one connection a pair. Beyond loopback it wants a token (UsageError)."""

    name = "tcp"
    capabilities = Capabilities(crosses_nodes=True, maps_memory=False, fence_replaces_memory=False)

    @property
    def address(self) -> str:
        """tcp://host:port of the listener (with the name of the kind), the host as it was given."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.name}://{host}:{self._port}"

    def _listen(self) -> socket.socket:
        family, where = self._resolve(self.host, 0, "listen on")
        if ipaddress.ip_address(where[0]).is_unspecified:
            raise UsageError(f"host {self.host!r} means every interface; name the one address that the peers dial")
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            _send_at_once(listener)  # what it accepts does as it does
            listener.bind(where)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ConnectError(f"cannot listen on {self.host}: {error}; is it an address of this machine?") from error
        self._port = int(listener.getsockname()[1])
        return listener

    def _dial(self, address: str, deadline: float) -> socket.socket:
        host, port = _parse(address, f"{self.name}://")
        family, where = self._resolve(host, port, "dial")
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            _send_at_once(sock)
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect(where)
        except OSError:
            sock.close()
            raise
        return sock

    def _resolve(self, host: str, port: int, what: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectError(f"cannot resolve host {host!r}: {error}") from error
        family, _, _, _, where = found[0]
        ip = str(where[0])
        if not self.identity.token and not ipaddress.ip_address(ip.partition("%")[0]).is_loopback:
            raise UsageError(
                f"refusing to {what} {host} ({ip}) without a token: set the same token on all workers of the job"
            )
        return family, (ip, port)

    def _make_link(self, peer: str, sock: socket.socket, memory: Memory, join: Join) -> Link:
        self._prepare_socket(sock)
        return TcpLink(peer, sock, memory.buffer, join.nbytes, self.events, self.deadline_seconds)

    def _prepare_socket(self, sock: socket.socket) -> None:
        """An end to connections that stall or whose machine is gone."""
        milliseconds = max(int(self.deadline_seconds * 1000), 1)
        seconds = max(int(self.deadline_seconds), 1)
        for option, value in (
            (socket.TCP_USER_TIMEOUT, milliseconds),
            (socket.TCP_KEEPIDLE, seconds),
            (socket.TCP_KEEPINTVL, max(seconds // 3, 1)),
            (socket.TCP_KEEPCNT, 3),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # an idle peer whose machine is gone

    def _count(self, link: Link) -> KernelBytes | None:
        return kernel_bytes(link.sock)


class TcpLink(Link):
    """The bytes travel inside the frames."""

    def _transmit(self, post: Post) -> None:
        pieces = list(cut_writes(post.writes))
        for piece in pieces[:-1]:
            self._send_piece(Header(FrameKind.PART, post.ticket, num_writes=len(piece)).pack(), piece)
            self._send_between_parts()
        last = pieces[-1] if pieces else post.writes
        self._send_piece(self._last_frame(post, len(last)), last)

    def _send_piece(self, head: bytes, piece: npt.NDArray[np.int64]) -> None:
        table = piece[:, 1:].astype("<i8").tobytes()
        view = self._view
        self._send([memoryview(head + table), *(view[start : start + n] for start, _, n in piece.tolist())])

    def _receive_writes(self, num_writes: int) -> None:
        table = np.frombuffer(self._receive(16 * num_writes), dtype="<i8").reshape(num_writes, 2)
        start, nbytes, size = table[:, 0], table[:, 1], self.local.nbytes
        bad = (start < 0) | (nbytes <= 0) | (start > size) | (nbytes > size - np.clip(start, 0, size))
        if bad.any():
            row = int(np.argmax(bad))
            raise ProtocolError(
                f"a write of {nbytes[row]} bytes at offset {start[row]} does not lie within the {size} bytes registered"
            )
        view = self._view
        self._receive_views([view[offset : offset + n] for offset, n in table.tolist()])

    def _acknowledged_by_wire(self) -> int:
        return acknowledged_bytes(self.sock)

    def _is_over(self) -> bool:
        return is_over(self.sock)


def _send_at_once(sock: socket.socket) -> None:
    """Before the handshake: its words are short and follow on each other, each would wait for the last one's receipt."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def is_loopback(host: str) -> bool:
    """Whether all that `host` stands for is on this machine's loopback. False where it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(info[4][0]).partition("%")[0]).is_loopback for info in found)


def _parse(address: str, scheme: str) -> tuple[str, int]:
    host, colon, port = address.removeprefix(scheme).rpartition(":")
    if not address.startswith(scheme) or not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"address {address!r} is not of the form {scheme}host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)
