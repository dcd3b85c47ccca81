"""One self-contained HTML page: headings, prose, plots as inline SVG, and every plot's numbers as a table beside it.

No script, no font and no picture is fetched from anywhere: a page can be mailed, archived and opened offline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Grid", "Section", "page"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table. head: column titles. rows: cells as text, of len(head) each; the first column names the row."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """heading and text: plain text. plot: one <svg> element, or "". grid: numbers; behind a fold where there is a plot."""

    heading: str
    text: str = ""
    plot: str = ""
    grid: Grid | None = None


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole document. title, lead: plain text."""
    body = "\n".join(_section(s) for s in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n{body}\n</main>\n</body>\n</html>\n'
    )


def _section(section: Section) -> str:
    parts = [f"<section>\n<h2>{escape(section.heading)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.plot:
        label = escape(section.heading, quote=True)
        plot = section.plot.replace('<svg role="img"', f'<svg role="img" aria-label="{label}"', 1)
        parts.append(f"<figure>\n{plot}\n</figure>")
    if section.grid is not None:
        table = _table(section.grid)
        parts.append(f"<details>\n<summary>The numbers</summary>\n{table}\n</details>" if section.plot else table)
    parts.append("</section>")
    return "\n".join(parts)


def _table(grid: Grid) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in grid.head)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in grid.rows
    )
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'


_STYLE = """
:root { color-scheme: light dark; --ink: #1d2126; --ground: #fdfdfc; --soft: #626a73; --line: #d8dbdf; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e6e9; --ground: #16191c; --soft: #99a1aa; --line: #363c43; }
}
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; border-top: 1px solid var(--line); padding-top: 1.25rem; }
p { max-width: 46rem; }
.lead, summary { color: var(--soft); }
summary { cursor: pointer; }
figure { margin: 1rem 0; }
svg { width: 100%; height: auto; max-height: 90vh; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right; }
thead th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 400; }
th:first-child, td:first-child { text-align: left; }
"""
