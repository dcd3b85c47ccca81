"""What a user may set, with the defaults that suit most jobs."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable
from urllib.parse import urlsplit

from weightbridge.coordinator.session_events import OnEvent
from weightbridge.errors import UsageError
from weightbridge.executor.observation import Observe
from weightbridge.transports.selection import check_kinds

__all__ = ["Group", "Options", "check_endpoint", "rank_and_size"]


@runtime_checkable
class Group(Protocol):
    """What is asked of a communication handle: a torch ProcessGroup of any backend has it."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one adapter. All workers of a job should use the same.

    token: shared secret; needed as soon as anything but loopback is used. Never logged.
    data_host: address this worker's data connections listen on; peers dial it.
    transports: kinds to use between nodes, the preferred one first: "tcp", "nixl", "mooncake". A pair of workers uses the first
        that works at both; inside a node it is always shared memory.
    trusted_network: every machine on the network may be trusted: needed by transports whose ports no token protects.
    bandwidth: bytes per second of this worker's network link, each direction; the planner balances by it.
    slot_bytes: memory of one slot; a worker holds two per direction.
    window: polls an engine worker may still make after it is asked for an update, W of the step agreement.
    idle_install: let the control thread install when the engine is idle; the engine must then hold `ReceiverAdapter.step()`
        whenever it reads its weights.
    kernels: "native" or "reference" for weights in host memory, "triton" to refuse to begin without Triton and a CUDA device;
        None for the best for where the weights lie.
    backup_weights: True puts the live weights back after the probe (kept in host memory meanwhile), a folder keeps them in an
        unnamed file there, False leaves what the probe wrote: for engines that get a version before they serve.
    expected_untouched, expected_unused: live tensors the loader need not write, checkpoint tensors nobody need take.
    map_cache: a folder with the layouts of earlier runs, on this machine or shared: a layout found there is proved by one load
        instead of being probed again, by all workers of a side or by none. None: always probe.
    loader_path_bytes: of the checkpoint tensors that one worker of an engine may need whole, in host memory, because its
        loader computes live tensors of them.
    connect_timeout_seconds: for everybody to join, and again for each phase of connecting. update_timeout_seconds: for one
        version. heartbeat_timeout_seconds: silence after which a worker counts as lost.
    stage_send: a trainer copies its weights to host memory (as much as its live shard), returns from `send_weights` and
    sends from
        there. stage_receive: an engine takes a version into host memory (as much as its live weights) while it goes on, and
        installs it when all of it has arrived and been verified; a failure before that leaves the old version whole.
    when_newer: what becomes of a version in flight when a newer one is sent. "finish": the call waits for its end. "supersede":
        engines with stage_receive that have not begun to install it leave it out. "error": UsageError. None:
        "supersede" when an engine has stage_receive, else "finish".
    when_engine_fails: "fail": the version in flight is given up and the trainers' call raises, naming the culprit.
    "drop": it is
        sent again without that engine, if the trainers still hold it. The session goes on without the engine either way.
    when_trainers_fail: what an engine does when the session is over. "raise": every later call raises. "rejoin": it
    keeps serving
        what it holds and joins the next session at this endpoint.
    retries: further attempts at a version when a connection broke or bytes came in corrupted and nobody is lost.
    digests: bytes that arrive are checked against the sender's digest before they are used.
    codec: how segments travel; "identity" is dense.
    on_event: told what happens to this worker and, on trainer rank 0, to the session: see coordinator.session_events.
    Observers for
        logs, JSON lines, Prometheus, traces and progress bars are in weightbridge.observability.
    observe: told of every step of this worker's data plane, with the time: for traces. See executor.Observe for its duties.
    """

    token: bytes = field(default=b"", repr=False)
    data_host: str = "127.0.0.1"
    transports: tuple[str, ...] = ("tcp",)
    trusted_network: bool = False
    bandwidth: float = 1.25e9
    slot_bytes: int = 32 << 20
    window: int = 2
    idle_install: bool = False
    kernels: str | None = None
    expected_untouched: frozenset[str] = frozenset()
    expected_unused: frozenset[str] = frozenset()
    backup_weights: bool | str = True
    map_cache: str | None = None
    loader_path_bytes: int = 1 << 30
    connect_timeout_seconds: float = 300.0
    update_timeout_seconds: float = 120.0
    heartbeat_seconds: float = 1.0
    heartbeat_timeout_seconds: float = 15.0
    stage_send: bool = False
    stage_receive: bool = False
    when_newer: Literal["finish", "supersede", "error"] | None = None
    when_engine_fails: Literal["drop", "fail"] = "fail"
    when_trainers_fail: Literal["raise", "rejoin"] = "raise"
    retries: int = 1
    digests: bool = True
    codec: str = "identity"
    on_event: OnEvent | None = None
    observe: Observe | None = None

    def __post_init__(self) -> None:
        check_kinds(self.transports)
        positive = ("bandwidth", "slot_bytes", "connect_timeout_seconds", "update_timeout_seconds", "heartbeat_seconds")
        for name in positive:
            if getattr(self, name) <= 0:
                raise UsageError(f"option {name} must be positive, got {getattr(self, name)}")
        self._check_choice("when_newer", (None, "finish", "supersede", "error"))
        self._check_choice("when_engine_fails", ("drop", "fail"))
        self._check_choice("when_trainers_fail", ("raise", "rejoin"))
        if self.retries < 0:
            raise UsageError(f"option retries must not be negative, got {self.retries}")
        if self.loader_path_bytes < 0:
            raise UsageError(f"option loader_path_bytes must not be negative, got {self.loader_path_bytes}")
        if self.window < 1:
            raise UsageError(f"option window must be at least 1, got {self.window}")
        if self.heartbeat_timeout_seconds <= 2 * self.heartbeat_seconds:
            raise UsageError(
                f"option heartbeat_timeout_seconds ({self.heartbeat_timeout_seconds}) must exceed twice heartbeat_seconds "
                f"({self.heartbeat_seconds})"
            )

    def _check_choice(self, name: str, choices: tuple[str | None, ...]) -> None:
        if getattr(self, name) not in choices:
            raise UsageError(
                f"option {name} must be one of {', '.join(map(repr, choices))}, got {getattr(self, name)!r}"
            )


def rank_and_size(group: Group | tuple[int, int] | None) -> tuple[int, int]:
    """Rank and size of a worker among its side: of a torch process group, of a (rank, size) pair, or (0, 1) for None."""
    if group is None:
        return 0, 1
    rank, size = (group.rank(), group.size()) if isinstance(group, Group) else group
    if not 0 <= rank < size:
        raise UsageError(f"group: rank {rank} is not within size {size}; every worker of a side needs its own rank")
    return rank, size


def check_endpoint(endpoint: str, token: bytes) -> None:
    """Refuse an endpoint that is malformed, or that leaves this machine without a token. Raises UsageError."""
    parts = urlsplit(endpoint)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None:
        raise UsageError(f"endpoint {endpoint!r} is not of the form tcp://HOST:PORT, for example tcp://127.0.0.1:29700")
    if not token and not _is_loopback(parts.hostname):
        raise UsageError(
            f"endpoint {endpoint!r} leaves this machine and no token is set; give every worker the same Options(token=...)"
        )


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(info[4][0]).split("%")[0]).is_loopback for info in found)
