"""`weightbridge check MODULE:FACTORY`: the contract of a loader, run against the user's own.

MODULE:FACTORY is imported, FACTORY() called; what it returns is checked, and the report is a table for people or one JSON
document for programs. Exit status 0: everything holds; 1: something does not; 2: there was nothing to check.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import UsageError, WeightBridgeError
from weightbridge.probe.map_files import save_map
from weightbridge.testing.contract_report import ContractReport, Finding, LoaderUnderTest, Status

__all__ = ["as_loader", "error_document", "factory_named", "render", "report_document", "run_check"]

_COLOURS = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.SKIP: "dim"}
_EXAMPLE = "weightbridge.testing.example_loaders:good"


def run_check(target: str, *, as_json: bool, save_to: Path | None) -> int:
    """Check the loader that `target` names, print the report; returns the exit status. Blocks for some twenty loads.

    With `as_json` stdout has the document and nothing else, whatever the user's code prints. Raises UsageError when there
    is nothing to check, or the map cannot be saved.
    """
    noise: AbstractContextManager[Any] = redirect_stdout(sys.stderr) if as_json else nullcontext()
    console = Console(stderr=True) if as_json else Console()
    with noise, Console(stderr=True).status(f"{target}: importing") as status:
        loader = as_loader(factory_named(target), target)
        from weightbridge.testing.loader_contract import (
            check_loader,  # imports torch: a usage error should not wait for it
        )

        report = check_loader(loader, progress=lambda what: status.update(f"{target}: {what}"))
        if save_to is not None and report.source_map is not None:
            save_map(save_to, report.source_map, loader.spec)
    saved = save_to if report.source_map is not None else None
    render(report, console, target, saved)
    if save_to is not None and saved is None:
        console.print(f"no map was saved to {escape(str(save_to))}: the layout could not be told", soft_wrap=True)
    if as_json:
        print(json.dumps(report_document(report, target, saved), indent=2, ensure_ascii=False))
    return 0 if report.passed else 1


def factory_named(target: str) -> Callable[[], object]:
    """The callable that MODULE:FACTORY names; FACTORY may be dotted. Imports the module, the working directory first.

    Raises UsageError saying which part is wrong.
    """
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise UsageError(f"{target!r} is not of the form MODULE:FACTORY, for example {_EXAMPLE}")
    if module_name.endswith(".py") or "/" in module_name:
        raise UsageError(
            f"{module_name!r} is a file; name the module as an import would, for example "
            f"{Path(module_name).stem}:{path} from the folder it lies in"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"module {module_name!r} needs module {error.name!r}, which is not installed") from error
        raise UsageError(
            f"there is no module {error.name!r}; install it, or run from the folder it lies in (now {os.getcwd()})"
        ) from error
    except Exception as error:
        raise UsageError(f"importing {module_name!r} raised {type(error).__name__}: {error}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            near = difflib.get_close_matches(name, dir(found), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UsageError(f"{target!r}: {getattr(found, '__name__', module_name)!r} has no {name!r}{hint}")
        found = getattr(found, name)
    if not callable(found):
        raise UsageError(
            f"{target!r} is a {type(found).__name__}; expected a function without arguments that makes a loader"
        )
    factory: Callable[[], object] = found
    return factory


def as_loader(factory: Callable[[], object], target: str) -> LoaderUnderTest:
    """What the factory returns: a LoaderUnderTest, anything with its three first attributes, or a tuple of the three.

    Raises UsageError for anything else, and when the factory raises.
    """
    try:
        made: Any = factory()
    except Exception as error:
        raise UsageError(f"{target!r} raised {type(error).__name__}: {error}") from error
    if isinstance(made, tuple) and len(made) == 3:
        parts = dict(zip(("spec", "load_weights", "tensors"), made, strict=True))
    else:
        parts = {name: getattr(made, name, None) for name in ("spec", "load_weights", "tensors")}
    spec, load_weights, tensors = parts.values()
    expected = "expected a LoaderUnderTest, or (spec, load_weights, tensors)"
    if not isinstance(spec, CheckpointSpec):
        raise UsageError(
            f"{target!r} returned a {type(made).__name__} whose spec is a {type(spec).__name__}; {expected}"
        )
    for name, part in (("load_weights", load_weights), ("tensors", tensors)):
        if not callable(part):
            hint = "; make it `lambda: tensors`" if isinstance(part, Mapping) else ""
            raise UsageError(f"{target!r}: {name} is a {type(part).__name__}, expected a callable{hint}")
    try:
        live = tensors()
    except Exception as error:
        raise UsageError(f"{target!r}: tensors() raised {type(error).__name__}: {error}") from error
    if not isinstance(live, Mapping):
        raise UsageError(f"{target!r}: tensors() returned a {type(live).__name__}, expected name -> tensor")
    return LoaderUnderTest(
        spec=spec,
        load_weights=load_weights,
        tensors=tensors,
        expected_untouched=frozenset(getattr(made, "expected_untouched", ())),
        expected_unused=frozenset(getattr(made, "expected_unused", ())),
    )


def render(report: ContractReport, console: Console, target: str, saved: Path | None = None) -> None:
    """The report for people: a table, then what is wrong in full and what to do about it."""
    table = Table(title=escape(target), title_justify="left")
    for heading in ("check", "result", "seen"):
        table.add_column(heading)
    for finding in report.findings:
        colour = _COLOURS[finding.status]
        table.add_row(finding.check, f"[{colour}]{finding.status.value}[/]", escape(_in_short(finding)))
    console.print(table)
    for finding in report.findings:
        if finding.status in {Status.FAIL, Status.WARN}:
            _line(
                console,
                f"[{_COLOURS[finding.status]}]{finding.status.value}:[/] {finding.check}: {escape(finding.found)}",
            )
            _line(console, f"  to do: {escape(finding.remedy)}")
    if report.source_map is not None:
        where = f", saved to {saved}" if saved is not None else ""
        _line(console, f"layout {report.source_map.fingerprint}{escape(where)}")
    num_failed = sum(f.status is Status.FAIL for f in report.findings)
    failed = f"{num_failed} check{'s' if num_failed != 1 else ''} failed"
    verdict = "[green]the loader keeps the contract[/]" if report.passed else f"[bold red]{failed}[/]"
    _line(console, f"{verdict} ({report.num_calls} calls of load_weights)")


def _line(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)


def _in_short(finding: Finding) -> str:
    if finding.status is Status.FAIL and finding.tensor is not None:
        where = "" if finding.element is None else f", element {list(finding.element)}"
        return f"{finding.tensor}{where}"
    return finding.found if finding.status in {Status.PASS, Status.SKIP} else "see below"


def report_document(report: ContractReport, target: str, saved: Path | None = None) -> dict[str, Any]:
    """The report for programs. Keys are stable."""
    found = report.source_map
    return {
        "loader": target,
        "passed": report.passed,
        "num_calls": report.num_calls,
        "checks": [
            {
                "check": f.check,
                "status": f.status.value,
                "found": f.found,
                "to_do": f.remedy,
                "tensor": f.tensor,
                "element": None if f.element is None else list(f.element),
            }
            for f in report.findings
        ],
        "fingerprint": None if found is None else found.fingerprint,
        "computed": None if found is None else [found.live[i].name for i in sorted(found.computed)],
        "saved_map": None if saved is None else str(saved),
    }


def error_document(error: WeightBridgeError, exit_status: int) -> dict[str, Any]:
    """Why nothing was checked."""
    return {
        "passed": False,
        "error": {"kind": type(error).__name__, "message": error.message, "exit_status": exit_status},
    }
