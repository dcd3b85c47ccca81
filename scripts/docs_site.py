"""What mkdocs.yml cannot say: hooks of the documentation site, called by MkDocs (`make docs`).

Pages are written to be read in the repository: their relative links lead to other pages and to files of the repository. The
site is made of the same text, so links out of docs/ are led to pages that are made here: README.md is the site's first page,
the other Markdown files of the root are pages of their own, and any other file that a page links to is shown as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the environment that runs the tests has no MkDocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "AGENTS.md": "agents.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
FILES_FOLDER = "files"  # of the site: shown files of the repository

_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FENCE = re.compile(r"^(```+).*?^\1`*$", flags=re.DOTALL | re.MULTILINE)


def site_path(target: str) -> str:
    """Where the site has a file of the repository. target: its path in the repository; result: a path in the docs tree."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return ROOT_PAGES.get(target) or f"{FILES_FOLDER}/{target}.md"


def repository_path(page: str) -> str:
    """Where the repository has a page of the site; the inverse of `site_path`."""
    for source, name in ROOT_PAGES.items():
        if page == name:
            return source
    return f"docs/{page}"


def linked(text: str, source: str) -> list[str]:
    """Paths in the repository that a page's relative links lead to. source: the page's own path in the repository."""
    return [target for match in _links(text) if (target := _target(match.group(2), source)) is not None]


def relinked(text: str, source: str) -> str:
    """A page's text with every relative link leading to the same thing on the site. source: as for `linked`."""
    here = posixpath.dirname(site_path(source))

    def replace(match: re.Match[str]) -> str:
        target = _target(match.group(2), source)
        if target is None:
            return match.group()
        return (
            f"{match.group(1)}{posixpath.relpath(site_path(target), here or '.')}{match.group(3) or ''}{match.group(4)}"
        )

    return _outside_fences(text, lambda part: _LINK.sub(replace, part))


def _links(text: str) -> Iterator[re.Match[str]]:
    return _LINK.finditer(_FENCE.sub("", text))


def _target(link: str, source: str) -> str | None:
    """The path in the repository that a link of the page `source` means; None for an address of its own."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def expanded(nav: Any, pages: list[str]) -> Any:
    """A nav with each entry like "guides/*.md" replaced by the pages of that folder that the nav does not name."""
    named = set(_named(nav))
    if isinstance(nav, dict):
        return {title: expanded(entry, [p for p in pages if p not in named]) for title, entry in nav.items()}
    if not isinstance(nav, list):
        return nav
    rest = [p for p in pages if p not in named]
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and entry.endswith("/*.md"):
            entries += [p for p in rest if posixpath.dirname(p) == posixpath.dirname(entry)]
        else:
            entries.append(expanded(entry, rest))
    return entries


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from _named(entry)
    elif isinstance(nav, list):
        for entry in nav:
            yield from _named(entry)


def shown(target: str) -> str:
    """The page that shows a file or folder of the repository."""
    path = ROOT / target
    if path.is_dir():
        body = "\n".join(
            sorted(f"{f.name}/" if f.is_dir() else f.name for f in path.iterdir() if f.name[0] not in "._")
        )
        return f"# {target}/\n\n```text\n{body}\n```\n"
    body = path.read_text()
    ticks = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", body) or [""]))
    language = {".py": "python", ".sh": "bash", ".toml": "toml", ".c": "c", ".json": "json"}.get(path.suffix, "text")
    return f"# {target}\n\n{ticks}{language}\n{body}\n{ticks}\n"


# --- what MkDocs calls -------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    docs = Path(config.docs_dir)
    config.nav = expanded(config.nav, sorted(p.relative_to(docs).as_posix() for p in docs.rglob("*.md")))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    texts = {repository_path(f.src_uri): f.content_string for f in files.documentation_pages()}
    texts |= {source: (ROOT / source).read_text() for source in ROOT_PAGES}
    targets = {target for source, text in texts.items() for target in linked(text, source)}
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=texts[source]))
    for target in sorted(targets):
        # What does not exist is left alone: MkDocs then says which page links to it.
        if not target.startswith("docs/") and target not in ROOT_PAGES and (ROOT / target).exists():
            files.append(File.generated(config, site_path(target), content=shown(target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.src_uri
    return markdown if source.startswith(f"{FILES_FOLDER}/") else relinked(markdown, repository_path(source))
