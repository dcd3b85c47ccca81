"""The `weightbridge` command. `main.main` is its entry point; each command's work lies in a package of its own."""

from __future__ import annotations

__all__: list[str] = []
