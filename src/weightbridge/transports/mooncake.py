"""Mooncake's transfer engine (package `mooncake-transfer-engine` or its `-non-cuda` variant): RDMA, or TCP where there is none.

Measured with 0.3.13.post1 over TCP: an engine takes 10 ms, three threads and five descriptors, and up to a second to go, in
which Python stands still (see `_look_up_often`). A killed peer is an error at once, a stopped one or a cut link never;
waiting for a transfer in its own calls burns a core and knows no deadline under 5 s, so transfers are only submitted and looked
at here. Its own notifications are a message over TCP that follows the write, to a port that asks nobody who he is; the tag goes
the same way over this package's authenticated connection instead, when the peer's side has acknowledged the last byte.

What cannot be protected: it listens on every interface, for its handshake and (over TCP) for data, whatever address it is
given. So it wants `trusted_network` even on loopback.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import struct
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from weightbridge.kernels.base import Buffer
from weightbridge.transports.base import Memory
from weightbridge.transports.one_sided import Engine, EngineError, OneSidedTransport
from weightbridge.transports.tcp import is_loopback

__all__ = ["MooncakeTransport"]

_ADDRESS = struct.Struct("<Q")
_MAX_NAME_BYTES = 512
_DONE, _FAILED = 1, (-1, -2)
_LOOK_UP_MICROSECONDS = 100_000
# Its settings are environment variables alone, the logs' read at import; those that the user has set stay.
_SETTINGS = {"MC_TCP_ENABLE_CONNECTION_POOL": "1", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}


class MooncakeTransport(OneSidedTransport):
    """`host` must be the address that peers reach this machine at. MC_* variables in the environment choose cards and so on;
    on loopback and with MC_FORCE_TCP it stays on TCP."""

    name = "mooncake"
    always_exposed = True

    @classmethod
    def missing(cls) -> str:
        """See `Transport.missing`."""
        try:
            _library()
        except ModuleNotFoundError:
            return "the package mooncake-transfer-engine-non-cuda is not installed; pip install 'weightbridge-rl[mooncake]'"
        except ImportError as error:
            return f"{error}; on Debian: apt-get install libibverbs1 libnl-3-200 libnl-route-3-200"
        return ""

    def _open_engine(self, peer: str, memory: Memory) -> Engine:
        return MooncakeEngine(self.host, memory.buffer)


class MooncakeEngine(Engine):
    """A transfer engine with one peer. Each row is a transfer of its own: only those can be looked at without waiting."""

    max_writes = 256  # its queue for one peer takes 1024; what does not fit fails
    notifies = False

    def __init__(self, host: str, buffer: Buffer) -> None:
        self._buffer = buffer
        self._peer = ""
        self._remote_address = 0
        self._flying: dict[int, list[int]] = {}
        self._num_pieces = 0
        if is_loopback(host):
            os.environ.setdefault("MC_FORCE_TCP", "1")
        self._engine: Any = _library().TransferEngine()
        try:
            self._ok("start", self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""))
            self._name = f"[{host}]" if ":" in host else host
            self._name += f":{self._engine.get_rpc_port()}"
            _look_up_often(self._engine.get_rpc_port())
            if buffer.nbytes:
                self._ok("register memory", self._engine.register_memory(buffer.address, buffer.nbytes))
        except EngineError:
            self.close()
            raise

    def description(self) -> bytes:
        """Address of the memory, then where the engine is found."""
        return _ADDRESS.pack(self._buffer.address) + self._name.encode()

    def attach(self, description: bytes, nbytes: int, seconds: float) -> None:
        """See `Engine.attach`."""
        name = description[_ADDRESS.size :]
        if not 0 < len(name) <= _MAX_NAME_BYTES:
            raise EngineError(f"its Mooncake sent a description of {len(description)} bytes")
        (self._remote_address,) = _ADDRESS.unpack_from(description)
        if self._remote_address + nbytes >= 1 << 64:
            raise EngineError(f"its memory of {nbytes} bytes cannot lie at {self._remote_address:#x}")
        self._peer = name.decode(errors="replace")
        if nbytes and self._look_up(seconds) != self._remote_address:
            raise EngineError(f"its Mooncake at {self._peer} does not have the memory that it announced")

    def begin(self, piece: npt.NDArray[np.int64], number: int | None) -> int:
        """See `Engine.begin`."""
        submit, peer = self._engine.transfer_submit_write, self._peer
        here, there = self._buffer.address, self._remote_address
        batches: list[int] = []
        self._num_pieces += 1
        self._flying[self._num_pieces] = batches
        for local, remote, nbytes in piece.tolist():
            batch = submit(peer, here + local, there + remote, nbytes)
            if not batch:
                raise EngineError("Mooncake does not take a write")
            batches.append(batch)
        return self._num_pieces

    def finished(self, piece: int) -> bool:
        """See `Engine.finished`."""
        batches = self._flying[piece]
        while batches:
            status = self._engine.transfer_check_status(batches[-1])
            if status in _FAILED:
                batches.pop()  # freed by that look
                raise EngineError(f"Mooncake reports that a transfer failed (status {status})")
            if status != _DONE:
                return False
            batches.pop()
        del self._flying[piece]
        return True

    def notified(self) -> list[int]:
        """See `Engine.notified`."""
        return []

    def close(self) -> None:
        """See `Engine.close`. Takes up to a tenth of a second, a whole one in the first second."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        self._flying.clear()
        if self._buffer.nbytes:
            with contextlib.suppress(Exception):
                engine.unregister_memory(self._buffer.address)
        # The engine ends when its last reference goes; there is no call for it, and Python stands still meanwhile.
        del engine

    # --- inside -------------------------------------------------------------------------------------------------------

    def _ok(self, what: str, status: int) -> None:
        if status != 0:
            raise EngineError(
                f"Mooncake cannot {what} (status {status}); MC_LOG_LEVEL=INFO in the environment shows more"
            )

    def _look_up(self, seconds: float) -> int:
        """Where the peer's memory begins, asked of the peer's engine; that call waits up to a minute for a stopped one."""
        found: list[int] = []
        engine, peer = self._engine, self._peer
        thread = threading.Thread(
            target=lambda: found.append(engine.get_first_buffer_address(peer)), name="wb-mooncake-look-up", daemon=True
        )
        thread.start()
        thread.join(seconds)
        if not found:
            raise EngineError(f"its Mooncake at {peer} does not answer within {seconds:.1f} s")
        return found[0]


def _look_up_often(port: int) -> None:
    """Let the engine's listener see sooner that it should end: it waits a second for connections and then looks, while the
    engine's end waits for it. The socket is this process's own; without it all works, and ends take longer."""
    timeout = struct.pack("@ll", 0, _LOOK_UP_MICROSECONDS)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # descriptors come and go
            if _listens(int(name), port):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
                return


def _listens(fd: int, port: int) -> bool:
    """Whether a descriptor of this process is the TCP listener of that port. Raises OSError."""
    if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
        return False
    with socket.socket(fileno=os.dup(fd)) as sock:
        name = sock.getsockname()
        listening = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return listening and isinstance(name, tuple) and len(name) > 1 and name[1] == port


def _library() -> Any:
    """Mooncake's engine module. Raises ImportError; the first call starts some threads of its logging and RPC for good."""
    for variable, value in _SETTINGS.items():
        os.environ.setdefault(variable, value)
    return importlib.import_module("mooncake.engine")
