"""`check` and `explain` as far as they go without a loader: what is asked wrongly, and what a report looks like."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.test_layout_saved import SPEC, source_map
from typer.testing import CliRunner, Result

from weightbridge.cli import main
from weightbridge.cli.check import as_loader, render, report_document
from weightbridge.errors import UsageError
from weightbridge.probe.map_files import save_map
from weightbridge.testing.contract_report import ContractReport, Finding, Status


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.app, list(arguments))


def one_message(result: Result) -> str:
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory, with factories of all kinds of wrong."""
    text = (
        "number = 7\n"
        "def raises(): raise KeyError('layer 3')\n"
        "def nothing(): pass\n"
        "def pair(): return 1, 2\n"
        "class Loader:\n"
        "    spec = load_weights = tensors = None\n"
    )
    (tmp_path / "wb_my_loaders.py").write_text(text)
    (tmp_path / "wb_broken_module.py").write_text("import wb_absent_dependency\n")
    (tmp_path / "wb_raising_module.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "wb_my_loaders"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("wb_my_loaders", "'wb_my_loaders' is not of the form MODULE:FACTORY"),
        ("wb_my_loaders:", "is not of the form MODULE:FACTORY"),
        (
            "some/wb_my_loaders.py:number",
            "is a file; name the module as an import would, for example wb_my_loaders:number",
        ),
        ("wb_no_such:make", "there is no module 'wb_no_such'; install it, or run from the folder it lies in"),
        ("wb_broken_module:make", "'wb_broken_module' needs module 'wb_absent_dependency', which is not installed"),
        ("wb_raising_module:make", "importing 'wb_raising_module' raised ZeroDivisionError: division by zero"),
        ("wb_my_loaders:raise", "'wb_my_loaders' has no 'raise'; did you mean raises?"),
        ("wb_my_loaders:Loader.make", "'Loader' has no 'make'"),
        ("wb_my_loaders:number", "is a int; expected a function without arguments that makes a loader"),
        ("wb_my_loaders:raises", "'wb_my_loaders:raises' raised KeyError: 'layer 3'"),
        ("wb_my_loaders:nothing", "returned a NoneType whose spec is a NoneType; expected a LoaderUnderTest"),
        ("wb_my_loaders:pair", "returned a tuple whose spec is a NoneType"),
        ("wb_my_loaders:Loader", "returned a Loader whose spec is a NoneType"),
    ],
)
def test_there_is_nothing_to_check(module: str, target: str, message: str) -> None:
    result = invoke("check", target)
    assert result.exit_code == 2
    assert message in one_message(result)
    assert result.stdout == ""


def test_debug_adds_the_stack_trace_and_json_the_document(module: str) -> None:
    result = invoke("check", f"{module}:raises", "--debug", "--json")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "KeyError" in result.stderr
    error = json.loads(result.stdout)["error"]
    assert error == {
        "kind": "UsageError",
        "message": f"{module + ':raises'!r} raised KeyError: 'layer 3'",
        "exit_status": 2,
    }


def test_what_a_factory_may_return() -> None:
    class Anything:
        spec, expected_unused = SPEC, {"q"}

        def load_weights(self, _tensors: object) -> None: ...

        def tensors(self) -> dict[str, object]:
            return {}

    made = as_loader(Anything, "m:f")
    assert (made.spec, made.expected_unused, made.expected_untouched) == (SPEC, frozenset({"q"}), frozenset())
    thing = Anything()
    assert as_loader(lambda: (SPEC, thing.load_weights, thing.tensors), "m:f").load_weights == thing.load_weights
    for parts, message in (
        ((SPEC, 3, dict), "load_weights is a int, expected a callable"),
        ((SPEC, print, {}), "tensors is a dict, expected a callable; make it `lambda: tensors`"),
        ((SPEC, print, list), r"tensors\(\) returned a list, expected name -> tensor"),
        ((SPEC, print, lambda: 1 / 0), r"tensors\(\) raised ZeroDivisionError"),
    ):
        with pytest.raises(UsageError, match=message):
            as_loader(lambda parts=parts: parts, "m:f")  # type: ignore[misc]


REPORT = ContractReport(
    findings=(
        Finding(check="first load", status=Status.PASS, found="took [all]"),
        Finding(
            check="poison", status=Status.FAIL, found="live tensor 'w', element [3, 1]: NaN", remedy="write it", tensor="w",
            element=(3, 1),
        ),
        Finding(check="inputs unchanged", status=Status.WARN, found="writes into w", remedy="nothing", tensor="w"),
        Finding(check="distinct values", status=Status.SKIP, found="not run"),
    ),
    source_map=source_map(),
    num_calls=19,
)  # fmt: skip


def test_a_report_in_words_says_for_each_failure_what_to_do() -> None:
    out = io.StringIO()
    render(REPORT, Console(file=out, width=80), "m:f")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert rows == [
        ["first load", "pass", "took [all]"],
        ["poison", "fail", "w, element [3, 1]"],
        ["inputs unchanged", "warn", "see below"],
        ["distinct values", "skip", "not run"],
    ]
    assert out.getvalue().splitlines()[-6:] == [
        "fail: poison: live tensor 'w', element [3, 1]: NaN",
        "  to do: write it",
        "warn: inputs unchanged: writes into w",
        "  to do: nothing",
        f"layout {source_map().fingerprint}",
        "1 check failed (19 calls of load_weights)",
    ]


def test_a_report_as_a_document() -> None:
    document = report_document(REPORT, "m:f", Path("x.wbmap"))
    assert json.loads(json.dumps(document)) == document
    assert (document["passed"], document["num_calls"], document["saved_map"]) == (False, 19, "x.wbmap")
    assert document["fingerprint"] == source_map().fingerprint
    assert document["checks"][1] == {
        "check": "poison", "status": "fail", "found": "live tensor 'w', element [3, 1]: NaN", "to_do": "write it",
        "tensor": "w", "element": [3, 1],
    }  # fmt: skip


# --- explain -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> str:
    return str(save_map(tmp_path / "a.wbmap", source_map(), SPEC))


def test_explain_says_where_each_part_comes_from(saved: str) -> None:
    result = invoke("explain", saved, "qk")
    assert result.exit_code == 0
    assert result.stdout == (
        f"layout {source_map().fingerprint} of checkpoint {SPEC.digest}, 2 live tensors\n"
        "qk [7, 4] BF16, parameter\n"
        "  [flat 0 + 1*[0:12]] <- q[flat 8 + 1*[0:12]]  (12 elements)\n"
        "  [flat 12 + 1*[0:12]] <- k[flat 0 + 1*[0:12]]  (12 elements)\n"
        "  [6, :] <- constant bits 0xff80\n"
    )
    whole = invoke("explain", saved)
    assert "table [5] F32, buffer\n  5 elements are never written by the loader\n" in whole.stdout


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("kq", "no live tensor 'kq'; did you mean qk?"),
        ("q", "it is a checkpoint tensor, and qk draws on it"),
        ("scale", "it is a checkpoint tensor, and no live tensor draws on it"),
        ("zzz", "it has qk, table"),
    ],
)
def test_explain_of_a_name_that_is_not_there_helps(saved: str, name: str, hint: str) -> None:
    result = invoke("explain", saved, name)
    assert result.exit_code == 2
    assert hint in one_message(result)
    assert result.stdout == ""


def test_explain_of_a_file_that_is_damaged_or_not_there(saved: str) -> None:
    Path(saved).write_bytes(Path(saved).read_bytes()[:-3])
    result = invoke("explain", saved)
    assert result.exit_code == 1
    assert "it was cut or added to; probe again" in one_message(result)
    result = invoke("explain", f"{saved}.gone")
    assert result.exit_code == 2
    assert "expected a saved map, cannot read it: No such file or directory" in one_message(result)
