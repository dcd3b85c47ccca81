"""`weightbridge explain MAP [NAME]`: a saved map in words."""

from __future__ import annotations

import difflib
from pathlib import Path

import numpy as np

from weightbridge.errors import UsageError
from weightbridge.layout import explain
from weightbridge.layout.saved import SavedMap
from weightbridge.probe.map_files import load_map

__all__ = ["explanation"]


def explanation(path: Path, name: str | None) -> str:
    """The text about one live tensor of a saved map, or about all. Reads the file.

    Raises UsageError for a file or a name that is not there, LayoutError for a file that is no sound map.
    """
    saved = load_map(path)
    names = [t.name for t in saved.source_map.live]
    if name is not None and name not in names:
        raise UsageError(f"{path}: the map has no live tensor {name!r}{_hint(saved, names, name)}")
    head = f"layout {saved.source_map.fingerprint} of checkpoint {saved.spec.digest}, {len(names)} live tensors\n"
    return head + explain(saved.source_map, saved.spec, name)


def _hint(saved: SavedMap, names: list[str], name: str) -> str:
    if name in saved.spec.index:
        copies = saved.source_map.copies
        takers = np.unique(copies.live[copies.tensor == saved.spec.index[name]]).tolist()
        listed = ", ".join(names[i] for i in takers[:5]) or "no live tensor"
        return f"; it is a checkpoint tensor, and {listed} draw{'s' if len(takers) < 2 else ''} on it"
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    near += [n for n in names if name in n and n not in near][: 3 - len(near)]
    return f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(names[:5])}"
