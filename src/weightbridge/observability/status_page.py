"""A job's state as `weightbridge top` shows it: tables for a terminal, a document for programs."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightbridge.machine.status import EngineStatus, Status, UpdateStatus
from weightbridge.observability.words import bytes_text, ratio_text, seconds_text, slowest_text

__all__ = ["status_document", "status_page"]

_SHOWN_AWAITED = 8
_SHOWN_ENGINES = 40
_BAR_CELLS = 24
_STYLES = {
    "ready": "green", "updating": "cyan", "joining": "yellow", "poisoned": "bold red", "lost": "red", "failed": "bold red",
    "aborting": "yellow",
}  # fmt: skip


def status_document(status: Status) -> dict[str, Any]:
    """Every field under its name, and for each update `ratio`: achieved over ideal, or None."""
    document: dict[str, Any] = msgspec.to_builtins(status)
    del document["type"]
    for row in document["updates"]:
        row["ratio"] = row["ewtt_seconds"] / row["ideal_seconds"] if row["ideal_seconds"] > 0 else None
    return document


def status_page(status: Status) -> RenderableType:
    """What rich draws. Everything in it is plain text: what workers call themselves is not taken for markup."""
    parts: list[RenderableType] = [_head(status)]
    if status.in_flight >= 0:
        parts.append(_flight(status))
    parts.append(_engines(status))
    if status.updates:
        parts.append(_updates(status.updates))
    parts += _awaited(status)
    return Group(*parts)


def _head(status: Status) -> Text:
    head = Text.assemble((f"session {status.session:x}  ", "bold"))
    head.append(_plain(status.phase), style=_STYLES.get(status.phase, "yellow"))
    head.append(f" for {seconds_text(status.phase_seconds)}  epoch {status.epoch}  attempt {status.attempt}")
    head.append(f"  newest version {_version(status.version)}")
    head.append(f"  trainers {_of(status.num_trainers, status.size_trainers)}")
    serving = sum(e.num_workers for e in status.engines)
    head.append(f"  engines {len(status.engines)} with {serving} workers")
    return head


def _flight(status: Status) -> Text:
    done, all_ = status.in_flight_done, status.in_flight_of
    cells = _BAR_CELLS * min(done, all_) // max(all_, 1)
    line = Text(f"version {status.in_flight} in flight for {seconds_text(status.in_flight_seconds)}  ", style="cyan")
    line.append("━" * cells, style="cyan").append("┄" * (_BAR_CELLS - cells), style="bright_black")
    return line.append(f"  {done} of {all_} workers have done their part", style="default")


def _engines(status: Status) -> Table:
    table = _table(("engine", "left"), ("state", "left"), ("for", "right"), ("version", "right"), ("workers", "right"))
    for engine in status.engines[:_SHOWN_ENGINES]:
        table.add_row(*_engine(engine))
    if len(status.engines) > _SHOWN_ENGINES:
        table.add_row(f"and {len(status.engines) - _SHOWN_ENGINES} more")
    return table


def _engine(engine: EngineStatus) -> tuple[Text | str, ...]:
    state = Text(_plain(engine.state), style=_STYLES.get(engine.state, "default"))
    workers = _of(engine.num_workers, engine.size)
    return Text(_plain(engine.name)), state, seconds_text(engine.since_seconds), _version(engine.version), workers


def _updates(updates: tuple[UpdateStatus, ...]) -> Table:
    """The newest first."""
    table = _table(
        ("version", "right"), ("EWTT", "right"), ("AGST", "right"), ("achieved/ideal", "right"), ("bytes", "right"),
        ("slowest", "left"), ("", "left"),
    )  # fmt: skip
    for u in reversed(updates):
        if u.failed:
            table.add_row(str(u.version), "", "", "", "", "", Text(f"given up: {_plain(u.failed)}", style="red"))
            continue
        notes = [f"{u.attempts} attempts"] * (u.attempts > 1) + ["superseded"] * u.superseded
        table.add_row(
            str(u.version), seconds_text(u.ewtt_seconds), seconds_text(u.agst_seconds),
            ratio_text(u.ewtt_seconds, u.ideal_seconds), bytes_text(u.network_bytes),
            Text(_plain(slowest_text(u.slowest_worker, u.slowest_stage))), ", ".join(notes),
        )  # fmt: skip
    return table


def _awaited(status: Status) -> list[Text]:
    shown = status.waiting_for[:_SHOWN_AWAITED]
    lines = [Text(f"waiting for {_plain(x.worker)}: {_plain(x.what)}", style="yellow") for x in shown]
    more = max(status.num_waiting_for, len(status.waiting_for)) - len(shown)
    return lines + [Text(f"and for {more} more", style="yellow")] * (more > 0)


def _table(*columns: tuple[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold")
    return table


def _version(version: int) -> str:
    return str(version) if version >= 0 else "none"


def _of(number: int, size: int) -> str:
    return f"{number} of {size}" if size > number else str(number)


def _plain(text: str) -> str:
    """Nothing that a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)
