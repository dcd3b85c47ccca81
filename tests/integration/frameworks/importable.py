"""PYTHONPATH for processes that import this repository's packages beside wheels that bring a package `tests` of their own."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[3]


def python_path(folder: Path) -> str:
    """Puts this repository's `tests`, which is no regular package and so would be hidden, before others. folder: for a file."""
    (folder / "tests").mkdir()
    (folder / "tests" / "__init__.py").write_text(f"__path__ = [{str(ROOT / 'tests')!r}]\n")
    return os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT)])
