"""Which kind of transport a pair of workers uses, and why. Decided by what both ends offer, so both come to the same answer."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weightbridge.errors import ConnectError, UsageError
from weightbridge.transports.base import Identity, Transport
from weightbridge.transports.mooncake import MooncakeTransport
from weightbridge.transports.nixl import NixlTransport
from weightbridge.transports.one_sided import OneSidedTransport
from weightbridge.transports.shm import ShmTransport
from weightbridge.transports.tcp import TcpTransport

__all__ = ["KINDS", "Choice", "Opened", "check_kinds", "choose_transport", "open_transports"]

KINDS: Mapping[str, type[Transport]] = {
    kind.name: kind for kind in (ShmTransport, TcpTransport, NixlTransport, MooncakeTransport)
}


class Choice(NamedTuple):
    """The kind for one pair, and the reason in words."""

    name: str
    reason: str


class Opened(NamedTuple):
    """The transports of one worker by name, those of one machine first, then in the order of preference; and why each other
    one that was asked for is not among them."""

    transports: Mapping[str, Transport]
    left_out: Mapping[str, str]


def check_kinds(names: Sequence[str]) -> None:
    """Raise UsageError unless these name transports between machines, at least one and none twice."""
    between = [name for name, kind in KINDS.items() if kind.capabilities.crosses_nodes]
    wrong = [name for name in names if name not in between]
    if wrong or not names or len(set(names)) < len(names):
        raise UsageError(
            f"option transports is {tuple(names)!r}; expected one or more of {', '.join(between)}, each once, the preferred "
            "one first (inside a machine shm is used without being named)"
        )


def open_transports(
    names: Sequence[str], identity: Identity, events: queue.SimpleQueue[object], *, host: str, deadline_seconds: float,
    trusted_network: bool,
) -> Opened:  # fmt: skip
    """Open the one inside the machine and, of `names`, those that work here. Raises UsageError when none of them does."""
    check_kinds(names)
    opened: dict[str, Transport] = {}
    left_out: dict[str, str] = {}
    try:
        for name, kind in KINDS.items():
            if not kind.capabilities.crosses_nodes:
                opened[name] = kind(identity, events, host=host, deadline_seconds=deadline_seconds)
        for name in names:
            kind = KINDS[name]
            left_out[name] = kind.missing()
            if left_out[name]:
                continue
            del left_out[name]
            if issubclass(kind, OneSidedTransport):
                opened[name] = kind(
                    identity, events, host=host, deadline_seconds=deadline_seconds, trusted_network=trusted_network
                )
            else:
                opened[name] = kind(identity, events, host=host, deadline_seconds=deadline_seconds)
        if len(left_out) == len(names):
            raise UsageError(
                f"none of the transports {', '.join(names)} can be used on this machine: {_in_words(left_out)}; name 'tcp' too "
                "to have something to fall back to"
            )
    except BaseException:
        for transport in opened.values():
            transport.close()
        raise
    return Opened(opened, left_out)


def choose_transport(
    mine: Opened, me: str, my_node: str, peer: str, peer_node: str, addresses: Mapping[str, str]
) -> Choice:
    """The kind that workers `me` and `peer` use. addresses: of the peer's transports by name, in its order of preference.

    Raises ConnectError where they have none in common.
    """
    if my_node == peer_node:
        for name, transport in mine.transports.items():
            if not transport.capabilities.crosses_nodes and name in addresses:
                return Choice(name, f"both are on node {my_node}")
    # Of two orders that differ, the one of the worker whose name sorts lower goes before: at both ends.
    first, second = (mine.transports, addresses) if me < peer else (addresses, mine.transports)
    order = [name for name in first if name in KINDS and KINDS[name].capabilities.crosses_nodes]
    passed: list[str] = []
    for name in order:
        if name in second:
            preferred = f"{' and '.join(passed)} not at both ends" if passed else f"the first choice of {min(me, peer)}"
            return Choice(name, f"on nodes {my_node} and {peer_node}; {preferred}")
        passed.append(name)
    why = f" ({me}: {_in_words(mine.left_out)})" if mine.left_out else ""
    raise ConnectError(
        f"workers {me} and {peer} have no transport in common: {me} has {_names(mine.transports)}{why}, {peer} has "
        f"{_names(addresses)}; give all workers the same Options(transports=...), with 'tcp' last to fall back to",
        peer=peer,
    )


def _names(transports: Mapping[str, object]) -> str:
    return ", ".join(transports) or "none"


def _in_words(left_out: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in left_out.items())
