"""Ports for tests and demos: free now, and not among those the kernel gives to whoever dials out next."""

from __future__ import annotations

import random
import socket
from pathlib import Path

__all__ = ["free_port"]

_LOWEST = 15000
_TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` for a listener that starts later, in another process perhaps. Raises OSError when all are taken.

    A port the kernel chooses is one of its ephemeral ports, so that any connection dialled on this machine before the
    listener starts may be given the same one.
    """
    try:
        ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux, or a restricted container: the kernel's usual range
        ephemeral = 32768
    ports = range(_LOWEST, ephemeral) if ephemeral > _LOWEST + 1000 else range(61000, 65536)
    for port in random.SystemRandom().sample(ports, _TRIES):
        with socket.socket() as s:
            try:
                s.bind((host, port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {_TRIES} ports tried from {ports.start} to {ports.stop - 1} is free on {host}")
