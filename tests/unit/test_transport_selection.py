"""Which transport a pair uses: both ends come to one answer, in the order asked for, and say why."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator

import pytest

from weightbridge.coordinator.options import Options
from weightbridge.errors import ConnectError, UsageError
from weightbridge.transports import Identity, NixlTransport, ShmTransport, TcpTransport
from weightbridge.transports.selection import KINDS, Opened, choose_transport, open_transports

_BETWEEN = ("tcp", "nixl", "mooncake")


def _has(*names: str, **left_out: str) -> Opened:
    """A worker with these kinds; nothing is opened, only what a kind can do is asked."""
    return Opened({name: KINDS[name] for name in names}, left_out)  # type: ignore[misc]


def _addresses(opened: Opened) -> dict[str, str]:
    return {name: f"{name}://somewhere" for name in opened.transports}


def _choose(mine: Opened, theirs: Opened, node: str = "n0", peer_node: str = "n1") -> tuple[str, str]:
    """What a and b each decide, as (kind, reason); they must agree."""
    one = choose_transport(mine, "a", node, "b", peer_node, _addresses(theirs))
    other = choose_transport(theirs, "b", peer_node, "a", node, _addresses(mine))
    assert one.name == other.name
    return one


def _orders() -> Iterator[tuple[str, ...]]:
    for n in range(1, 4):
        yield from itertools.permutations(_BETWEEN, n)


def test_both_ends_agree_whatever_the_two_orders_are() -> None:
    for mine, theirs in itertools.product(_orders(), _orders()):
        a, b = _has("shm", *mine), _has("shm", *theirs)
        common = [name for name in mine if name in theirs]
        if common:
            assert _choose(a, b)[0] == common[0]
            assert _choose(a, b, "n0", "n0")[0] == "shm"
        else:
            with pytest.raises(ConnectError, match="no transport in common"):
                _choose(a, b)


def test_the_reason_is_said() -> None:
    full, tcp = _has("shm", "nixl", "tcp"), _has("shm", "tcp")
    assert _choose(full, full)[1] == "on nodes n0 and n1; the first choice of a"
    assert _choose(full, tcp)[1] == "on nodes n0 and n1; nixl not at both ends"
    assert _choose(full, full, "n7", "n7")[1] == "both are on node n7"


def test_nothing_in_common_names_both_sides_and_what_is_missing() -> None:
    a = _has("shm", "mooncake", nixl="no such library")
    with pytest.raises(ConnectError) as caught:
        choose_transport(a, "a", "n0", "b", "n1", _addresses(_has("shm", "tcp")))
    for words in ("a and b", "a has shm, mooncake", "nixl: no such library", "b has shm, tcp", "transports=..."):
        assert words in str(caught.value)


def test_a_kind_that_only_a_later_version_has_is_passed_over() -> None:
    choice = choose_transport(_has("shm", "tcp"), "b", "n0", "a", "n1", {"shm": "x", "warp": "y", "tcp": "z"})
    assert choice.name == "tcp"


@pytest.mark.parametrize("names", [(), ("tpc",), ("shm",), ("tcp", "tcp")])
def test_wrong_names_are_refused_in_options(names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match=r"option transports.*tcp, nixl, mooncake"):
        Options(transports=names)


def _open(*names: str, trusted_network: bool = False) -> Opened:
    return open_transports(
        names, Identity(worker="a", session="s"), queue.SimpleQueue(), host="127.0.0.1", deadline_seconds=1,
        trusted_network=trusted_network,
    )  # fmt: skip


def test_what_is_missing_here_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NixlTransport, "missing", classmethod(lambda cls: "no such library"))
    opened = _open("nixl", "tcp")
    try:
        assert {name: type(x) for name, x in opened.transports.items()} == {"shm": ShmTransport, "tcp": TcpTransport}
        assert opened.left_out == {"nixl": "no such library"}
    finally:
        for transport in opened.transports.values():
            transport.close()
    with pytest.raises(UsageError, match=r"none of the transports nixl.*no such library.*'tcp' too"):
        _open("nixl")
