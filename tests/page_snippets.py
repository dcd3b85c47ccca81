"""Python snippets of the pages: found by the heading they stand under, marked or run.

A snippet that cannot run in a test is marked by a comment on the line before it: <!-- not run: why -->.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENDPOINT = "tcp://127.0.0.1:29700"  # what the pages write, and no test may listen at

_MARK = re.compile(r"<!-- not run: (.+?) -->\n\s*\Z", flags=re.DOTALL)
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", flags=re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """One ```python block. place: page and number of the snippet there, from 1. not_run: why, or empty."""

    place: str
    heading: str
    code: str
    not_run: str

    def at(self, endpoint: str) -> str:
        """The code with the page's endpoint replaced."""
        return self.code.replace(ENDPOINT, endpoint)


def snippets(page: str) -> list[Snippet]:
    """All Python snippets of a page, in order. page: path within the repository."""
    text = (ROOT / page).read_text()
    return list(_snippets(page, text))


def _snippets(page: str, text: str) -> Iterator[Snippet]:
    number, heading, seen = 0, "", 0
    for fence in _FENCE.finditer(text):
        # Headings are looked for between fences only: a comment in a shell block looks like one.
        headings = _HEADING.findall(text[seen : fence.start()])
        heading = headings[-1] if headings else heading
        mark = _MARK.search(text[seen : fence.start()])
        seen = fence.end()
        if fence.group(1) != "python":
            continue
        number += 1
        why = mark.group(1) if mark else ""
        yield Snippet(place=f"{page} {number}", heading=heading, code=fence.group(2), not_run=why)


def run(code: str, place: str, **names: Any) -> dict[str, Any]:
    """Execute a snippet that finds `names` already there, as a user's own code would have them; its namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(code, place, "exec"), namespace)
    return namespace


def values_of(code: str, place: str, variable: str, **names: Any) -> list[Any]:
    """Execute a snippet of alternatives statement by statement; what `variable` was bound to, one after the other."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    found: list[Any] = []
    for statement in ast.parse(code).body:
        exec(compile(ast.Module([statement], []), place, "exec"), namespace)
        if variable in namespace and not any(namespace[variable] is f for f in found):
            found.append(namespace[variable])
    return found
