"""Docstrings for the site: paragraphs of `name: what it is`, as this code base writes them, become lists.

An extension of griffe, which reads the sources for mkdocstrings without importing them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import griffe

_REST = re.compile(r"(?<=[.;)])\s+(?:Raises|Returns) ")


def listed(text: str, names: Iterable[str]) -> str:
    """A docstring in Markdown where each `name: ...` that begins a line or a sentence is an entry of a list.

    names: the parameters and attributes that are looked for. What stands before the first entry stays a paragraph, and so does
    what is said of results and errors after the last one.
    """
    word = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    if not word:
        return text
    entry = re.compile(rf"(?:^|(?<=[.;)] )|(?<=[.;)]\n))\s*((?:{word})(?:, (?:{word}))*): ", flags=re.MULTILINE)
    return "\n\n".join(_listed(paragraph, entry) for paragraph in re.split(r"\n[ \t]*\n", text))


def _listed(paragraph: str, entry: re.Pattern[str]) -> str:
    found = list(entry.finditer(paragraph))
    if not found or "```" in paragraph:
        return paragraph
    rest = _REST.search(paragraph, found[-1].end())
    ends = [f.start() for f in found[1:]] + [rest.start() if rest else len(paragraph)]
    after = " ".join(paragraph[rest.start() :].split()) if rest else ""
    before = paragraph[: found[0].start()].strip()
    lines = []
    for f, end in zip(found, ends, strict=True):
        what = " ".join(paragraph[f.end() : end].split())
        lines.append(f"- **{'**, **'.join(f.group(1).split(', '))}**: {what}")
    return "\n".join([*([before, ""] if before else []), *lines, *(["", after] if after else [])])


class Docstrings(griffe.Extension):
    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        names = {name for name, member in cls.members.items() if member.is_attribute}
        _change(cls, names)

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        _change(func, {p.name for p in func.parameters} - {"self"})


def _change(found: griffe.Object, names: set[str]) -> None:
    if found.docstring is not None:
        found.docstring.value = listed(found.docstring.value, {n for n in names if not n.startswith("_")})
