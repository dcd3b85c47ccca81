"""What the kernel counted on a TCP connection: struct tcp_info of linux/tcp.h."""

from __future__ import annotations

import socket
import struct

from weightbridge.transports.base import KernelBytes

__all__ = ["acknowledged_bytes", "is_over", "kernel_bytes"]

# Offsets in struct tcp_info, which only ever grows at its end.
_BYTES_ACKED = 120  # followed by bytes_received
_BYTES_SENT = 200  # followed by bytes_retrans; Linux 4.19
_SIZE = 216
_CLOSED = 7  # of the states, which the first byte tells


def _read(sock: socket.socket) -> bytes:
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    except OSError:  # closed already
        return b""


def kernel_bytes(sock: socket.socket) -> KernelBytes:
    """Payload bytes sent (first transmissions only) and received in order. Zeros once the socket is closed."""
    info = _read(sock)
    if len(info) < _BYTES_ACKED + 16:
        return KernelBytes(0, 0)
    acked, received = struct.unpack_from("=QQ", info, _BYTES_ACKED)
    sent = acked
    if len(info) >= _SIZE:
        total, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
        sent = total - again
    return KernelBytes(int(sent), int(received))


def acknowledged_bytes(sock: socket.socket) -> int:
    """Bytes that the peer's kernel has confirmed: grows while anything gets through, however slow the link."""
    info = _read(sock)
    return int(struct.unpack_from("=Q", info, _BYTES_ACKED)[0]) if len(info) >= _BYTES_ACKED + 8 else 0


def is_over(sock: socket.socket) -> bool:
    """Nothing goes either way any more: both ends have closed, or the kernel has given the connection up."""
    return _read(sock)[:1] in (b"", bytes([_CLOSED]))
