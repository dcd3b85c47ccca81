"""`weightbridge top`: what a live job does, seen from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from weightbridge.cli.failures import FAILURE, guarded
from weightbridge.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightbridge.machine.status import Status

__all__ = ["show", "top"]


def top(
    endpoint: Annotated[
        str, typer.Argument(metavar="ENDPOINT", help="Where the trainers' rank 0 listens: tcp://HOST:PORT.")
    ],
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the job's token; the end of its last line is not part of it.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show the state once and end.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds within which the hub has to answer.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document a line on stdout.")] = False,
    debug: Annotated[bool, typer.Option(help="Show stack traces of failures.")] = False,
) -> None:
    """Show a live job: its phase, engines, the version in flight, the last updates and whom it waits for."""

    def run() -> int:
        from weightbridge.observability.watching import watch  # brings torch, which --help does not need

        token = b"" if token_file is None else _token(token_file)
        states = watch(endpoint, token=token, connect_timeout_seconds=timeout)
        return show(states, Console(), once=once, as_json=as_json)

    raise typer.Exit(guarded(run, as_json=as_json, debug=debug))


def show(states: Iterator[Status], console: Console, *, once: bool, as_json: bool) -> int:
    """Draw each state over the one before, on a terminal; print each anywhere else. Ends with the job, by Ctrl-C, or after
    the first with `once`; returns the exit status."""
    from weightbridge.observability.status_page import status_document, status_page

    live = None if once or as_json or not console.is_terminal else Live(console=console, auto_refresh=False)
    shown = False
    try:
        for status in states:
            shown = True
            if as_json:
                typer.echo(json.dumps(status_document(status), ensure_ascii=False))
            elif live is None:
                console.print(status_page(status))
            else:
                if not live.is_started:
                    live.start()
                live.update(status_page(status), refresh=True)
            if once:
                return 0
    except KeyboardInterrupt:
        return 0  # the usual way to leave
    finally:
        if live is not None and live.is_started:
            live.stop()
        if close := getattr(states, "close", None):
            close()  # says Goodbye now and not when the generator is collected
    if not as_json:
        console.print("the session has ended in good order")
    return 0 if shown or not once else FAILURE


def _token(path: Path) -> bytes:
    try:
        return path.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise UsageError(f"the token cannot be read from {str(path)!r}: {error.strerror or error}") from error
