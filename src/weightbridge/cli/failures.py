"""How a command ends: its exit status, and one message when it fails."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from weightbridge.errors import UsageError, WeightBridgeError

__all__ = ["FAILURE", "INTERRUPTED", "USAGE", "error_document", "guarded", "report_failure"]

FAILURE, USAGE, INTERRUPTED = 1, 2, 130

Document = Callable[[WeightBridgeError, int], dict[str, Any]]


def guarded(run: Callable[[], int], *, as_json: bool, debug: bool, document: Document | None = None) -> int:
    """The exit status of a command; a failure is one message. document: what --json prints then."""
    console = Console(stderr=True)
    try:
        return run()
    except WeightBridgeError as error:
        return report_failure(console, error, as_json=as_json, debug=debug, document=document or error_document)
    except KeyboardInterrupt:
        console.print("interrupted")
        return INTERRUPTED


def report_failure(
    console: Console, error: WeightBridgeError, *, as_json: bool, debug: bool, document: Document
) -> int:
    """One message on stderr, with --json a document on stdout; returns the exit status.

    An error may bring `causes` (worker -> words), `log_dir` and `tracebacks` (worker -> text).
    """
    status = USAGE if isinstance(error, UsageError) or getattr(error, "usage", False) else FAILURE
    lines = [f"[bold red]error:[/] {escape(error.message)}"]
    if hasattr(error, "log_dir"):
        lines += [f"  {escape(f'{worker}: {cause}')}" for worker, cause in getattr(error, "causes", {}).items()]
        lines.append(f"  the workers' logs are in {escape(str(error.log_dir))}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    if debug:
        for worker, text in getattr(error, "tracebacks", {}).items():
            console.print(f"{worker}:\n{text}", markup=False, highlight=False, soft_wrap=True)
        console.print("".join(traceback.format_exception(error)), markup=False, highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(document(error, status), indent=2, ensure_ascii=False))
    return status


def error_document(error: WeightBridgeError, exit_status: int) -> dict[str, Any]:
    """Why a command has no result."""
    return {"error": {"kind": type(error).__name__, "message": error.message, "exit_status": exit_status}}
