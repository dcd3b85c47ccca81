"""The pages say what the code says: links lead somewhere, snippets compile, tables list what there is."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

import weightbridge
from weightbridge import errors
from weightbridge.machine import messages

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md")) + sorted(ROOT.glob("*.md"))


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [
        t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t and not t.startswith("#")
    ]
    assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_snippets_compile_and_use_names_that_exist(page: Path) -> None:
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("weightbridge"):
                module = import_module(str(node.module))
                assert [a.name for a in node.names if a.name not in module.__all__] == []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                _check_keywords(node, node.func.id)


def _check_keywords(call: ast.Call, name: str) -> None:
    """Keyword arguments of a call of one of our classes exist, and the required ones are given."""
    if name not in weightbridge.__all__:
        return
    parameters = inspect.signature(getattr(weightbridge, name)).parameters
    given = {k.arg for k in call.keywords if k.arg is not None}
    assert given <= set(parameters)
    if all(k.arg is not None for k in call.keywords):  # no **rest
        required = {n for n, p in parameters.items() if p.default is p.empty and p.kind is p.KEYWORD_ONLY}
        assert required <= given


def test_the_options_table_lists_every_option_with_its_default() -> None:
    table = _page("reference/api.md").split("<!-- options -->")[1].split("<!-- /options -->")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", table, flags=re.MULTILINE))
    fields = {f.name: f.default for f in dataclasses.fields(weightbridge.Options)}
    assert set(rows) == set(fields)
    for name, default in fields.items():
        shown = rows[name].strip("`")
        if shown == "none":
            assert default == frozenset()
        elif shown.endswith(" MiB"):
            assert default == int(shown.removesuffix(" MiB")) << 20
        else:
            assert default == ast.literal_eval(shown)


def test_the_error_page_names_every_error_under_its_parent() -> None:
    rows = re.findall(r"^\| ([├└]?) ?`(\w+)` \|", _page("reference/errors.md"), flags=re.MULTILINE)
    assert {name for _, name in rows} | {"WeightBridgeError"} == {
        n for n in errors.__all__ if not n.endswith("Warning")
    }
    assert "`IrregularLayoutWarning`" in _page("reference/errors.md")
    parent = ""
    for branch, name in rows:
        expected = parent if branch else "WeightBridgeError"
        assert getattr(errors, name).__mro__[1].__name__ == expected
        parent = parent if branch else name


def test_the_wire_page_names_every_control_message() -> None:
    section = _page("reference/wire.md").split("**Messages**")[1].split("## Data plane")[0]
    rows = re.findall(r"^\| [a-z]+ \| (.+) \|$", section, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    declared = {
        name
        for name, value in vars(messages).items()
        if isinstance(value, type) and issubclass(value, messages.Message) and value is not messages.Message
    }
    assert named == declared


def test_the_metrics_page_lists_the_fields_of_a_report() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", _page("reference/metrics.md"), flags=re.MULTILINE)
    assert rows == [f.name for f in dataclasses.fields(weightbridge.UpdateReport)]


def test_the_benchmark_page_lists_every_benchmark() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", _page("benchmarks.md"), flags=re.MULTILINE)
    files = [f.stem for f in (ROOT / "benchmarks").glob("[!_]*.py")]
    packages = [f.parent.name for f in (ROOT / "benchmarks").glob("*/__main__.py")]
    assert sorted(rows) == sorted([*files, *packages])
