"""`weightbridge top`: the status on the wire and on the screen."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from weightbridge.cli.main import app
from weightbridge.cli.top import show
from weightbridge.errors import TransportError
from weightbridge.machine import messages as w
from weightbridge.machine.status import (
    MAX_UPDATES,
    EngineStatus,
    Status,
    UpdateStatus,
    WaitingFor,
    decode_for_observer,
)
from weightbridge.observability.status_page import status_document, status_page

UPDATES = (
    UpdateStatus(version=6, failed="b/0: its process died"),
    UpdateStatus(
        version=7, ewtt_seconds=1.5, agst_seconds=0.875, ideal_seconds=1.25, network_bytes=123_456_789,
        slowest_worker="tp/2", slowest_stage="exchange", attempts=2, superseded=True,
    ),
)  # fmt: skip
STATUS = Status(
    session=0xABC, phase="updating", phase_seconds=1.25, epoch=2, attempt=3, version=8, in_flight=8, in_flight_seconds=2.5,
    in_flight_done=2, in_flight_of=6, num_trainers=2, size_trainers=2, updates=UPDATES,
    engines=(
        EngineStatus(name="tp", state="updating", version=7, num_workers=3, size=3, since_seconds=1.25),
        EngineStatus(name="new", state="joining", version=-1, num_workers=1, size=2, since_seconds=4.0),
    ),
    waiting_for=(WaitingFor(worker="tp/1", what="did not finish its part of the transfer"),), num_waiting_for=3,
)  # fmt: skip


def drawn(status: Status) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=120, force_terminal=True, color_system=None).print(status_page(status))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_status_travels_and_nothing_but_what_an_observer_may_hear_is_accepted() -> None:
    assert decode_for_observer(w.encode(STATUS)) == STATUS
    assert decode_for_observer(w.encode(w.Welcome(session=3))) == w.Welcome(session=3)
    for refused in (w.RunProbe(request=1, dtypes=()), w.PlanReady(epoch=1, attempt=1, plan=b"x")):
        with pytest.raises(TransportError, match="not understood"):
            decode_for_observer(w.encode(refused))
    with pytest.raises(TransportError):  # a worker does not take it
        w.decode(w.encode(STATUS))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2**63}, {"phase": "x" * 257}, {"in_flight_seconds": -1.0}, {"epoch": -1}, {"session": "3"}, {"more": 1},
        {"updates": (msgspec.to_builtins(UPDATES[0]),) * (MAX_UPDATES + 1)}, {"engines": 3},
        {"waiting_for": ({"worker": "x"},)},
    ],
)  # fmt: skip
def test_values_out_of_bounds_are_refused(change: dict[str, object]) -> None:
    data = msgspec.msgpack.encode({**msgspec.to_builtins(STATUS), **change})
    with pytest.raises(TransportError, match="not understood"):
        decode_for_observer(data)


def test_the_page_shows_what_the_status_says() -> None:
    lines = drawn(STATUS)
    assert lines[0] == (
        "session abc  updating for 1.25 s  epoch 2  attempt 3  newest version 8  trainers 2  engines 2 with 4 workers"
    )
    assert lines[1] == f"version 8 in flight for 2.50 s  {'━' * 8}{'┄' * 16}  2 of 6 workers have done their part"
    assert [line.split() for line in lines[2:5]] == [
        ["engine", "state", "for", "version", "workers"],
        ["tp", "updating", "1.25", "s", "7", "3"],
        ["new", "joining", "4.00", "s", "none", "1", "of", "2"],
    ]
    assert lines[5].split() == ["version", "EWTT", "AGST", "achieved/ideal", "bytes", "slowest"]
    assert lines[6].split("  ")[-2:] == ["tp/2 in exchange", "2 attempts, superseded"]
    assert lines[6].split()[:8] == ["7", "1.50", "s", "875.0", "ms", "1.20", "123.46", "MB"]
    assert lines[7].split(maxsplit=1) == ["6", "given up: b/0: its process died"]
    assert lines[8:] == ["waiting for tp/1: did not finish its part of the transfer", "and for 2 more"]


def test_a_name_is_neither_markup_nor_a_command_to_the_terminal() -> None:
    engine = EngineStatus(name="[red]a\x1b[2J\n[/]", state="re\x07ady", version=1, num_workers=1)
    text = "\n".join(drawn(Status(session=1, phase="ready", engines=(engine,))))
    assert "[red]a?[2J?[/]" in text
    assert "re?ady" in text
    assert "\x1b" not in text


def test_hundreds_of_engines_fit_on_a_page() -> None:
    many = tuple(EngineStatus(name=f"e{n}", state="ready", version=1, num_workers=8) for n in range(43))
    lines = drawn(Status(session=1, phase="ready", engines=many))
    assert len(lines) == 1 + 1 + 40 + 1
    assert lines[-1] == "and 3 more"
    assert "engines 43 with 344 workers" in lines[0]


def test_the_document_has_every_field_and_the_ratio() -> None:
    document = json.loads(json.dumps(status_document(STATUS)))
    assert set(document) == set(Status.__struct_fields__)
    assert [row["ratio"] for row in document["updates"]] == [None, 1.2]
    assert document["engines"][1] == msgspec.to_builtins(STATUS.engines[1])


def states(*values: Status, interrupt: bool = False) -> Iterator[Status]:
    yield from values
    if interrupt:
        raise KeyboardInterrupt


def test_json_is_one_document_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Console(file=io.StringIO())
    later = msgspec.structs.replace(STATUS, phase="ready")
    assert show(states(STATUS, later), quiet, once=False, as_json=True) == 0
    assert [json.loads(x)["phase"] for x in capsys.readouterr().out.splitlines()] == ["updating", "ready"]
    assert show(states(STATUS, later), quiet, once=True, as_json=True) == 0
    assert [json.loads(x)["phase"] for x in capsys.readouterr().out.splitlines()] == ["updating"]
    assert show(states(), quiet, once=True, as_json=True) == 1  # there was nothing to show


@pytest.mark.parametrize("terminal", [False, True])
def test_leaving_with_ctrl_c_is_no_failure(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=terminal, color_system=None)
    assert show(states(STATUS, STATUS, interrupt=True), console, once=False, as_json=False) == 0
    assert out.getvalue().count("session abc") >= 1
    assert "good order" not in out.getvalue()
    assert show(states(STATUS), console, once=False, as_json=False) == 0
    assert "ended in good order" in out.getvalue()


def test_a_token_file_that_is_not_there_and_an_endpoint_that_is_none_are_usage_errors() -> None:
    missing = CliRunner().invoke(app, ["top", "tcp://127.0.0.1:29700", "--token-file", "/nowhere/token"])
    assert missing.exit_code == 2
    assert "/nowhere/token" in missing.stderr
    wrong = CliRunner().invoke(app, ["top", "127.0.0.1:29700", "--json"])
    assert wrong.exit_code == 2
    assert json.loads(wrong.stdout)["error"]["kind"] == "UsageError"
