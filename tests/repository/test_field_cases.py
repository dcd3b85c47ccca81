"""docs/field-cases.md: every test it names exists, every row says something, every test named after a case is in its row."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field-cases.md"
PLACES = (ROOT / "tests", ROOT / "src" / "weightbridge" / "testing")


def _rows() -> dict[str, list[str]]:
    """Case -> (reported as, kind, covered by)."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text().splitlines():
        if re.match(r"\| B\d", line):
            case, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            assert case not in found, f"{case} is there twice"
            assert len(cells) == 3, line
            found[case] = cells
    return found


@cache
def _tests() -> dict[str, set[str]]:
    """File name -> the tests in it."""
    files = [f for place in PLACES for f in place.rglob("*.py")]
    names = [f.name for f in files if f.name.startswith("test_")]
    assert len(set(names)) == len(names), "test files need names of their own"
    return {f.name: set(re.findall(r"^ *def (test_\w+)\(", f.read_text(), flags=re.MULTILINE)) for f in files}


def _named(cell: str) -> list[tuple[str, str]]:
    return re.findall(r"`(\w+\.py)::(\w+)`", cell)


def test_every_test_in_the_table_exists() -> None:
    missing = [
        f"{case}: {file}::{name}"
        for case, (*_, cover) in _rows().items()
        for file, name in _named(cover)
        if name not in _tests().get(file, set())
    ]
    assert missing == []


def test_every_row_names_its_source_a_kind_and_a_test_or_a_reason() -> None:
    rows = _rows()
    assert len(rows) == 137
    assert list(rows) == sorted(rows)
    for case, (source, kind, cover) in rows.items():
        assert source, case
        assert kind, case
        assert _named(cover) or "does not apply: " in cover or "not yet: " in cover, case


def test_every_test_named_after_a_case_is_in_its_row() -> None:
    rows = _rows()
    left_out = []
    for file, tests in _tests().items():
        for name in tests:
            for number in re.findall(r"_b(\d{3})(?=_)", name) if name.startswith("test_case_") else []:
                if (file, name) not in _named(rows.get(f"B{number}", ["", "", ""])[2]):
                    left_out.append(f"B{number}: {file}::{name}")
    assert left_out == []
