"""The site's own parts, without MkDocs: links led to where things lie there, docstrings made lists, drawings, reference.

`make docs` builds the site, strictly; these say what its hooks do, and what a build cannot see.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from xml.etree import ElementTree

import pytest
from tests.page_snippets import _snippets

import weightbridge
from weightbridge import deployments, errors, observability

ROOT = Path(__file__).parents[2]
DRAWINGS = sorted((ROOT / "docs" / "drawings").glob("*.svg"))


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = _script("docs_site")


@pytest.mark.parametrize(
    ("source", "link", "there"),
    [
        ("README.md", "docs/concepts.md", "concepts.md"),
        ("README.md", "docs/benchmarks.md#modes", "benchmarks.md#modes"),
        ("README.md", "AGENTS.md", "agents.md"),
        ("docs/concepts.md", "guides/modes.md", "guides/modes.md"),
        ("docs/guides/check.md", "../reference/errors.md#fields", "../reference/errors.md#fields"),
        ("docs/guides/check.md", "../../README.md", "../index.md"),
        ("docs/guides/check.md", "../../tests/unit/plan_cases.py", "../files/tests/unit/plan_cases.py.md"),
        ("docs/reference/python/testing.md", "../../../CONTRIBUTING.md", "../../contributing.md"),
        ("AGENTS.md", "scripts/test.sh", "files/scripts/test.sh.md"),
        ("docs/concepts.md", "drawings/modes.svg", "drawings/modes.svg"),
        ("docs/concepts.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/concepts.md", "#layouts", "#layouts"),
    ],
)
def test_a_link_leads_to_the_same_thing_on_the_site(source: str, link: str, there: str) -> None:
    fence = f"```markdown\n[kept]({link})\n```\n"
    text = f"A [word]({link}) and ![picture]({link}).\n\n{fence}"
    assert SITE.relinked(text, source) == f"A [word]({there}) and ![picture]({there}).\n\n{fence}"


def test_files_of_the_repository_that_pages_link_to_are_found_outside_fences() -> None:
    text = "[a](../src/a.py), [b](security.md#x)\n\n````text\n```\n[c](../c.py)\n```\n````\n[d](http://e.org)"
    assert SITE.linked(text, "docs/page.md") == ["src/a.py", "docs/security.md"]


def test_a_shown_file_is_fenced_by_more_than_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text('"""```` four"""')
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").touch()
    monkeypatch.setattr(SITE, "ROOT", tmp_path)
    assert SITE.shown("a.py") == '# a.py\n\n`````python\n"""```` four"""\n`````\n'
    assert SITE.shown(".") == "# ./\n\n```text\na.py\nb/\n```\n"


def test_a_nav_entry_for_a_folder_stands_for_the_pages_that_are_not_named() -> None:
    nav = [{"Guides": ["g/b.md", "g/*.md"]}, {"Reference": ["r/a.md", {"More": ["r/p/z.md", "r/p/*.md"]}, "r/*.md"]}]
    pages = ["g/a.md", "g/b.md", "g/c.md", "r/a.md", "r/b.md", "r/p/x.md", "r/p/z.md"]
    assert SITE.expanded(nav, pages) == [
        {"Guides": ["g/b.md", "g/a.md", "g/c.md"]},
        {"Reference": ["r/a.md", {"More": ["r/p/z.md", "r/p/x.md"]}, "r/b.md"]},
    ]


def test_names_in_a_docstring_become_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object))
    listed = _script("docs_docstrings").listed
    text = "What it is: this.\n\nepoch: of the\n    plan. width, height: in cells; no depth: at all.\n\nRaises nothing."
    assert listed(text, {"epoch", "width", "height", "depth", "is"}) == (
        "What it is: this.\n\n- **epoch**: of the plan.\n- **width**, **height**: in cells; no depth: at all.\n\n"
        "Raises nothing."
    )
    assert listed("Before.\nepoch: now.", {"epoch"}) == "Before.\n\n- **epoch**: now."
    assert listed("epoch: now. Raises it\nat once.", {"epoch"}) == "- **epoch**: now.\n\nRaises it at once."
    assert listed(text, ()) == text


def test_the_reference_has_every_public_name() -> None:
    def named(page: str) -> set[str]:
        text = (ROOT / "docs" / "reference" / "python" / f"{page}.md").read_text()
        return set(re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE))

    public = set(weightbridge.__all__) - set(errors.__all__) - {"__version__"}
    assert {f"weightbridge.{name}" for name in public} | {"weightbridge.errors"} <= named("weightbridge")
    # These are shown whole, so that a new name is there without being listed.
    assert "weightbridge.deployments" in named("deployments")
    assert "weightbridge.observability" in named("observability")
    assert "weightbridge.integrations" in named("integrations")
    assert "weightbridge.testing" in named("testing")
    values = [(n, getattr(m, n)) for m in (weightbridge, deployments, observability) for n in m.__all__]
    assert [name for name, value in values if callable(value) and not (value.__doc__ or "").strip()] == []


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda d: d.stem)
def test_a_drawing_says_what_it_shows_and_is_drawn_for_light_and_dark(drawing: Path) -> None:
    root = ElementTree.parse(drawing).getroot()
    svg = "{http://www.w3.org/2000/svg}"
    assert all((root.findtext(f"{svg}{tag}") or "").strip() for tag in ("title", "desc"))
    style = root.findtext(f"{svg}style") or ""
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    classes = {c for element in root.iter() for c in element.get("class", "").split()}
    for part in (light, dark):
        assert classes <= set(re.findall(r"\.(\w+) \{", part))
    # It has a ground of its own, so that it can be read on any page.
    assert root.find(f"{svg}rect[@class='card']") is not None
    pages = "".join(p.read_text() for p in (ROOT / "docs").rglob("*.md"))
    assert re.search(rf"!\[[^\]]{{10,}}\]\([^)]*drawings/{drawing.name}\)", pages)


def test_snippets_are_found_by_heading_and_mark() -> None:
    text = """# One

```python
a = 1
```

## Two

```sh
# not a heading
```

<!-- not run: needs a cluster of
     two machines -->
```python
b = 2
```

```python
c = 3
```
"""
    found = [(s.place, s.heading, s.code, s.not_run) for s in _snippets("p", text)]
    assert found == [
        ("p 1", "One", "a = 1\n", ""),
        ("p 2", "Two", "b = 2\n", "needs a cluster of\n     two machines"),
        ("p 3", "Two", "c = 3\n", ""),
    ]
