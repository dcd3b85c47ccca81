"""NIXL: one-sided writes over RDMA, or over whatever network UCX finds (package `nixl-cu12`, which imports without CUDA).

Measured with 1.5.1 over TCP on loopback: an agent takes some 0.1 s, 1 MB, one thread and 13 descriptors, and goes within
0.1 s even with a write to a stopped peer under way; a killed peer is an error at once, a stopped one or a cut link never;
"done" may be reported before the notification has arrived at the other end.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import struct
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.kernels.base import Buffer
from weightbridge.transports.base import Memory
from weightbridge.transports.one_sided import Engine, EngineError, OneSidedTransport
from weightbridge.transports.tcp import is_loopback

__all__ = ["NixlTransport"]

_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
_BACK_END = "UCX"
_ADDRESS = struct.Struct("<Q")
_NUMBER = struct.Struct("<Q")
# Same-machine copies write into a process without its doing: no fence could stop them, and emulated links are bypassed.
_SAME_MACHINE = frozenset({"all", "sm", "shm", "cma", "knem", "xpmem"})
_MAX_IDLE_HANDLES = 4096
_MAX_IDLE_ROWS = 1 << 20
_ABORT_SECONDS = 1.0


class NixlTransport(OneSidedTransport):
    """`host` says where the connection listens that carries the tags, and, where it is loopback, pins NIXL to it too; else
    UCX takes the best network it finds (UCX_NET_DEVICES and UCX_TLS in the environment restrict it)."""

    name = "nixl"

    @classmethod
    def missing(cls) -> str:
        """See `Transport.missing`."""
        try:
            api = _api()
        except ImportError as error:
            return f"{error}; pip install 'weightbridge-rl[nixl]'"
        allowed = {name.strip() for name in os.environ.get("UCX_TLS", "").split(",")} & _SAME_MACHINE
        if allowed:
            named = ", ".join(sorted(allowed))
            return (
                f"UCX_TLS allows {named}, and copies inside a machine cannot be fenced off; let it name networks only"
            )
        try:
            plugins = api.nixl_agent("weightbridge-look", api.nixl_agent_config(backends=[])).get_plugin_list()
        except Exception as error:
            return f"NIXL does not start: {type(error).__name__}: {error}"
        return (
            "" if _BACK_END in plugins else f"NIXL finds no plugin {_BACK_END} (it has {', '.join(plugins) or 'none'})"
        )

    def _open_engine(self, peer: str, memory: Memory) -> Engine:
        name = f"{self.identity.session}/{self.identity.worker}>{peer}/{secrets.token_hex(8)}"
        return NixlEngine(name, memory.buffer, loopback=is_loopback(self.host))


class _Handle(NamedTuple):
    key: tuple[bool, bytes]
    rows: int
    xfer: Any


class NixlEngine(Engine):
    """An agent with one peer. Transfer handles are kept by the table they were made of: an update that posts what the one
    before it posted makes none."""

    max_writes = 1024  # of thousands of small rows, some 10 us each over TCP, the posting call returns at the end only
    notifies = True

    def __init__(self, name: str, buffer: Buffer, *, loopback: bool) -> None:
        self._api = _api()
        self._buffer = buffer
        self._agent: Any = None
        self._peer = ""
        self._remote_address = 0
        self._flying: dict[int, _Handle] = {}
        self._idle: OrderedDict[tuple[bool, bytes], list[_Handle]] = OrderedDict()
        self._num_idle = self._idle_rows = 0
        with _as_engine_error("start"):
            config = self._api.nixl_agent_config(
                backends=[], sync_mode=self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            )
            self._agent = self._api.nixl_agent(name, config)
            # UCX_TLS and UCX_NET_DEVICES in the environment go before what is given here.
            networks = "TLS=tcp,NET_DEVICES=lo" if loopback else "TLS=^sm"
            self._agent.create_backend(_BACK_END, {"engine_config": networks})
            if buffer.nbytes:
                self._agent.register_memory(_table(buffer.address, np.array([[0, buffer.nbytes]])), "DRAM")

    def description(self) -> bytes:
        """Address of the memory, then NIXL's own metadata."""
        with _as_engine_error("describe itself"):
            return _ADDRESS.pack(self._buffer.address) + bytes(self._agent.get_agent_metadata())

    def attach(self, description: bytes, nbytes: int, seconds: float) -> None:
        """See `Engine.attach`."""
        if len(description) <= _ADDRESS.size:
            raise EngineError(f"its NIXL sent a description of {len(description)} bytes")
        (self._remote_address,) = _ADDRESS.unpack_from(description)
        if self._remote_address + nbytes >= 1 << 64:
            raise EngineError(f"its memory of {nbytes} bytes cannot lie at {self._remote_address:#x}")
        with _as_engine_error("take its description"):
            name = self._agent.add_remote_agent(description[_ADDRESS.size :])
            self._peer = name.decode() if isinstance(name, bytes) else str(name)
            self._agent.make_connection(self._peer)

    def begin(self, piece: npt.NDArray[np.int64], number: int | None) -> int:
        """See `Engine.begin`."""
        key = (number is not None, piece.tobytes())
        with _as_engine_error("begin a write"):
            handle = self._take(key, piece)
            # A handle made without a notification sends none; one made with it sends the one given here.
            note = b"" if number is None else _NUMBER.pack(number)
            self._flying[id(handle)] = handle
            if self._agent.transfer(handle.xfer, note) == "ERR":
                raise EngineError("NIXL reports an error")
        return id(handle)

    def finished(self, piece: int) -> bool:
        """See `Engine.finished`."""
        handle = self._flying[piece]
        with _as_engine_error("write"):
            state = self._agent.check_xfer_state(handle.xfer)
        if state == "ERR":
            raise EngineError("NIXL reports an error")
        if state != "DONE":
            return False
        del self._flying[piece]
        self._keep(handle)
        return True

    def notified(self) -> list[int]:
        """See `Engine.notified`."""
        with _as_engine_error("look for notifications"):
            notes = self._agent.get_new_notifs()
        out = []
        for name, messages in notes.items():
            for message in messages:
                if name != self._peer or len(message) != _NUMBER.size:
                    raise EngineError(f"NIXL brought a notification of {len(message)} bytes from {name!r}")
                out.append(_NUMBER.unpack(message)[0])
        return out

    def close(self) -> None:
        """See `Engine.close`."""
        agent, self._agent = self._agent, None
        if agent is None:
            return
        handles = [*self._flying.values(), *(h for many in self._idle.values() for h in many)]
        self._flying.clear()
        self._idle.clear()
        give_up = time.monotonic() + _ABORT_SECONDS
        for handle in handles:
            _release(handle.xfer, give_up)
        if self._peer:
            with contextlib.suppress(Exception):
                agent.remove_remote_agent(self._peer)
        agent.agent = (
            None  # the last reference to the agent itself: its sockets and keys go now, whoever holds this wrapper
        )

    # --- handles ------------------------------------------------------------------------------------------------------

    def _take(self, key: tuple[bool, bytes], piece: npt.NDArray[np.int64]) -> _Handle:
        kept = self._idle.get(key)
        if kept:
            handle = kept.pop()
            if not kept:
                del self._idle[key]
            self._num_idle -= 1
            self._idle_rows -= handle.rows
            return handle
        local = self._agent.get_xfer_descs(_table(self._buffer.address, piece[:, [0, 2]]), "DRAM")
        remote = self._agent.get_xfer_descs(_table(self._remote_address, piece[:, [1, 2]]), "DRAM")
        note = _NUMBER.pack(0) if key[0] else b""
        xfer = self._agent.initialize_xfer("WRITE", local, remote, self._peer, note)
        return _Handle(key, len(piece), xfer)

    def _keep(self, handle: _Handle) -> None:
        self._idle.setdefault(handle.key, []).append(handle)
        self._idle.move_to_end(handle.key)
        self._num_idle += 1
        self._idle_rows += handle.rows
        while self._num_idle > _MAX_IDLE_HANDLES or self._idle_rows > _MAX_IDLE_ROWS:
            for old in self._idle.popitem(last=False)[1]:
                self._num_idle -= 1
                self._idle_rows -= old.rows
                _release(old.xfer, 0.0)


def _table(base: int, ranges: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """NIXL's [N, 3] (address, bytes, device) of [N, 2] (offset, bytes): as an array 0.1 us a row, as a list of tuples 10."""
    out = np.zeros((len(ranges), 3), dtype=np.uint64)
    out[:, :2] = ranges
    out[:, 0] += np.uint64(base)
    return out


def _release(xfer: Any, give_up: float) -> None:
    """Free a transfer handle, aborting the transfer where it is under way; until `give_up` (time.monotonic) at the latest."""
    while True:
        try:
            xfer.release()
            return
        except Exception:  # still aborting
            if time.monotonic() >= give_up:
                return
            time.sleep(1e-3)


@contextlib.contextmanager
def _as_engine_error(what: str) -> Any:
    try:
        yield
    except EngineError:
        raise
    except Exception as error:  # NIXL's exceptions have no common class of their own
        raise EngineError(f"NIXL cannot {what}: {type(error).__name__}: {error}") from None


def _api() -> Any:
    """NIXL's Python API, whichever package brings it. Raises ImportError."""
    # Read once at import; without it NIXL announces every agent on stdout.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in _MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ImportError("the package nixl-cu12 is not installed")
