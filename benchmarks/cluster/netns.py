"""A cluster of network namespaces on one bridge, every link shaped by a token bucket at both ends.

    node wb-n0 [eth0, tbf] ---- [p0, tbf] br0 of wb-sw [p1, tbf] ---- [eth0, tbf] node wb-n1

Root only. Whatever is left of an earlier run is removed first, so nothing has to be cleaned up by hand, ever.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

__all__ = ["WORK_DIR_PREFIX", "Counters", "Testbed", "TestbedError", "address_of", "parse_counters", "stale_names"]

_SWITCH = "wb-sw"
_OWN = re.compile(r"wb-(sw|n\d+)")
_SUBNET, _FIRST_HOST = "198.18.2", 10
_MTU = 9000
_BURST_BYTES = 256 << 10  # 64 KiB and less do not reach the rate
_LATENCY_MS = 20
_MAX_NODES = 64
WORK_DIR_PREFIX = "weightbridge-testbed-"
"""Of folders for one measurement, in the folder for temporary files: whoever holds the cluster may remove all of them."""
_LOCK = "\0weightbridge-testbed"  # an abstract socket: gone with the process, leaves no file
_COMMAND_SECONDS = 20


class TestbedError(Exception):
    """The cluster cannot be made here; the text says why and what to do."""

    __test__ = False  # not a test, whatever its name begins with


class Counters(NamedTuple):
    """Bytes an interface has taken in and sent out, as the kernel counts them: all headers included."""

    received: int
    sent: int


def address_of(node: int) -> str:
    """Address of node number `node`. Raises TestbedError beyond 64 nodes."""
    if not 0 <= node < _MAX_NODES:
        raise TestbedError(f"node {node}: the cluster has addresses for nodes 0 to {_MAX_NODES - 1}")
    return f"{_SUBNET}.{_FIRST_HOST + node}"


def stale_names(listing: str) -> list[str]:
    """Our namespaces among those of `ip netns list`: nobody else's, however similar the name."""
    names = [line.split()[0] for line in listing.splitlines() if line.strip()]
    return [name for name in names if _OWN.fullmatch(name)]


def parse_counters(table: str, interface: str) -> Counters:
    """One interface's row of /proc/net/dev. Raises TestbedError where it is not listed."""
    for line in table.splitlines():
        name, colon, figures = line.partition(":")
        if colon and name.strip() == interface:
            fields = figures.split()
            return Counters(received=int(fields[0]), sent=int(fields[8]))
    raise TestbedError(f"/proc/net/dev lists no interface {interface!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    node: int
    rate_bits: float


class Testbed:
    """Nodes 0 to n - 1, node i linked at `rates_bits[i]` bits per second in each direction. A context manager.

    Raises TestbedError when it is not root, when the kernel or the tools lack something, or when another run has the cluster.
    Removes everything when left, and before it begins.
    """

    __test__ = False

    def __init__(self, rates_bits: Sequence[float]) -> None:
        self._links = [_Link(node=i, rate_bits=rate) for i, rate in enumerate(rates_bits)]
        self._lock: socket.socket | None = None

    def __enter__(self) -> Testbed:
        _check_here()
        self._lock = _locked()
        try:
            self._remove()
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            try:
                self._remove()
            finally:
                lock.close()

    def command_prefix(self, node: int) -> list[str]:
        """What to put before a command so that it runs on a node: same process id, no shell."""
        return ["ip", "netns", "exec", f"wb-n{node}"]

    def counters(self, pid: int) -> Counters:
        """Of the link of the node that process `pid` runs on."""
        return parse_counters(Path(f"/proc/{pid}/net/dev").read_text(), "eth0")

    def set_rate(self, node: int, rate_bits: float) -> None:
        """Shape both ends of a node's link anew."""
        _shape(f"wb-n{node}", "eth0", rate_bits)
        _shape(_SWITCH, f"p{node}", rate_bits)

    def _make(self) -> None:
        _ip("netns", "add", _SWITCH)
        _ip("-n", _SWITCH, "link", "add", "br0", "mtu", str(_MTU), "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", "br0", "up")
        for link in self._links:
            space, port = f"wb-n{link.node}", f"p{link.node}"
            _ip("netns", "add", space)
            ends = ("eth0", "mtu", str(_MTU), "netns", space, "type", "veth", "peer", "name", port)
            _ip("link", "add", *ends, "mtu", str(_MTU), "netns", _SWITCH)
            _ip("-n", space, "addr", "add", f"{address_of(link.node)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", _SWITCH, "link", "set", port, "master", "br0")
            _ip("-n", _SWITCH, "link", "set", port, "up")
            self.set_rate(link.node, link.rate_bits)

    def _remove(self) -> None:
        for name in stale_names(_call(["ip", "netns", "list"])):
            _ip("netns", "del", name)
        for folder in Path(tempfile.gettempdir()).glob(f"{WORK_DIR_PREFIX}*"):
            shutil.rmtree(folder, ignore_errors=True)


def _locked() -> socket.socket:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(_LOCK)
    except OSError:
        lock.close()
        raise TestbedError(
            "another run of benchmarks.cluster has the emulated cluster on this machine; wait for its end, or use --unshaped"
        ) from None
    return lock


def _check_here() -> None:
    if os.geteuid() != 0:
        raise TestbedError("network namespaces and shaped links need root; run it as root, or use --unshaped")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise TestbedError(
                f"the command {tool!r} is missing (Debian package iproute2); install it, or use --unshaped"
            )


def _shape(space: str, device: str, rate_bits: float) -> None:
    bucket = ["rate", f"{round(rate_bits)}bit", "burst", str(_BURST_BYTES), "latency", f"{_LATENCY_MS}ms"]
    _call(["tc", "-n", space, "qdisc", "replace", "dev", device, "root", "tbf", *bucket])


def _ip(*arguments: str) -> str:
    return _call(["ip", *arguments])


def _call(command: Sequence[str]) -> str:
    """Raises TestbedError with what the tool said: it is what the kernel lacks."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise TestbedError(f"`{' '.join(command)}` did not end within {_COMMAND_SECONDS} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise TestbedError(
            f"this machine cannot make the emulated cluster: `{' '.join(command)}` said: {said}. It takes a kernel with "
            "network namespaces, veth, bridge and the tbf queueing discipline; use --unshaped without them"
        )
    return done.stdout
