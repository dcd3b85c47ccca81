"""`weightbridge doctor`: every transport is really tried; what is missing or broken is named with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from weightbridge.cli import doctor as d
from weightbridge.cli.main import app
from weightbridge.errors import ConnectError
from weightbridge.transports import MooncakeTransport, NixlTransport, ShmTransport, TcpTransport
from weightbridge.transports.link import Link
from weightbridge.transports.one_sided import OneSidedTransport


def _missing(why: str) -> Any:
    return classmethod(lambda cls: why)


@pytest.fixture(autouse=True)
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without the optional packages, whatever is installed."""
    monkeypatch.setattr(NixlTransport, "missing", _missing("no package"))
    monkeypatch.setattr(MooncakeTransport, "missing", _missing("libibverbs.so.1 is missing"))


def test_the_json_document_says_what_works_and_why_not() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["healthy"] is True
    assert {t["name"]: (t["works"], t["why"]) for t in found["transports"]} == {
        "shm": (True, ""),
        "tcp": (True, ""),
        "nixl": (False, "no package"),
        "mooncake": (False, "libibverbs.so.1 is missing"),
    }
    assert set(found["versions"]) >= {"weightbridge", "python", "torch", "nixl-cu12", "system"}
    assert found["limits"]["open_files"] > 0
    assert any("token" in hint for hint in found["hints"])


def test_the_table_shows_each_of_them() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for words in ("transport shm       works", "transport nixl      no     no package", "kernels   native", "limit"):
        assert words in result.stdout


def test_a_needed_transport_that_refuses_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise ConnectError("no port left")

    monkeypatch.setattr(TcpTransport, "_listen", refuse)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    by_name = {t["name"]: t for t in json.loads(result.stdout)["transports"]}
    assert by_name["tcp"]["works"] is False
    assert "no port left" in by_name["tcp"]["why"]
    assert by_name["shm"]["works"] is True


def test_a_transport_that_loses_bytes_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_bytes(link: Link, post: Any) -> None:
        link._send([memoryview(link._last_frame(post))])

    monkeypatch.setattr("weightbridge.transports.shm.ShmLink._transmit", without_bytes)
    check = d.check_transport(ShmTransport, expose=False, cards=[])
    assert check.works is False
    assert "did not arrive whole" in check.why


def test_what_would_listen_on_every_interface_is_not_tried_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MooncakeTransport, "missing", _missing(""))
    tried: list[tuple[type, dict[str, Any]]] = []
    monkeypatch.setattr(d, "_try", lambda kind, settings: tried.append((kind, settings)))
    check = d.check_transport(MooncakeTransport, expose=False, cards=[])
    assert (check.works, tried) == (None, [])
    assert "--expose" in check.why
    assert "over TCP" in check.note
    assert d.check_transport(MooncakeTransport, expose=True, cards=["mlx5_0"]).works is True
    assert tried == [(MooncakeTransport, {"trusted_network": True})]
    assert issubclass(MooncakeTransport, OneSidedTransport)
