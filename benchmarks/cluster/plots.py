"""Plots of one document: EWTT over T_min against replicas, and what every worker did in one traced update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from benchmarks.cluster.report import Update
from benchmarks.cluster.scenarios import Case

__all__ = ["write_plots"]

_STYLE: Any = {
    "svg.hashsalt": "weightbridge", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False,
}  # fmt: skip
_COLOURS = {
    "weightbridge": "#1b6ca8", "broadcast": "#c0392b", "p2p": "#d98200", "file": "#7d3c98", "peer:mooncake": "#2e8b57",
}  # fmt: skip
_MARKERS = dict(zip(_COLOURS, "osD^v", strict=True))
_LANES = (("pack", "#d98200"), ("post", "#1b6ca8"), ("assemble", "#2e8b57"))


def write_plots(folder: Path, found: Mapping[str, Any], traced: Sequence[tuple[Case, Update]]) -> list[Path]:
    """Write what there is to plot into `folder`, made where it is missing; returns the files.

    found: a document of `report`. traced: updates with spans; the last is drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with plt.rc_context(_STYLE):
        cases = {(r["trainer_nodes"], r["replicas"]) for r in found["results"]}
        if found["t_min_seconds"] is not None and len(cases) > 1:
            written.append(_against_replicas(folder / f"{found['scenario']}-ewtt.svg", found))
        if traced and traced[-1][1].spans:
            written.append(_timeline(folder / f"{found['scenario']}-timeline.png", *traced[-1]))
    return written


def _against_replicas(path: Path, found: Mapping[str, Any]) -> Path:
    """One panel for each number of trainer nodes. A point is a median, its bar reaches from the fastest to the slowest."""
    results = found["results"]
    panels = sorted({r["trainer_nodes"] for r in results})
    figure, axes = plt.subplots(1, len(panels), figsize=(3.6 * len(panels), 3.0), sharey=True, squeeze=False)
    for ax, nodes in zip(axes[0], panels, strict=True):
        for method in dict.fromkeys(r["method"] for r in results):
            mine = sorted(
                (r for r in results if (r["method"], r["trainer_nodes"]) == (method, nodes)),
                key=lambda r: int(r["replicas"]),
            )
            x = [r["replicas"] for r in mine]
            samples = [[s / r["t_min_seconds"] for s in r["ewtt_seconds"]] for r in mine]
            middle = [median(s) for s in samples]
            spread = [
                [m - min(s) for m, s in zip(middle, samples, strict=True)],
                [max(s) - m for m, s in zip(middle, samples, strict=True)],
            ]
            ax.errorbar(
                x, middle, yerr=spread, label=method, color=_COLOURS.get(method), marker=_MARKERS.get(method, "o"),
                markersize=4, linewidth=1.2, capsize=2, alpha=0.9, zorder=4 if method == "weightbridge" else 3,
                linestyle=":" if ":" in method else "-",
            )  # fmt: skip
        ax.axhline(1.0, color="black", linewidth=0.8, linestyle="--", label="T_min")
        ax.set_title(f"{nodes} trainer node{'s' if nodes > 1 else ''}")
        ax.set_xlabel("rollout replicas")
        ax.set_xticks(sorted({r["replicas"] for r in results if r["trainer_nodes"] == nodes}))
        ax.set_ylim(bottom=0)
    axes[0][0].set_ylabel("EWTT / T_min")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return path


def _timeline(path: Path, case: Case, update: Update) -> Path:
    """Three rows a worker, first trainers: packs, writes under way, assemblies; odd rounds are paler."""
    origin = min(begin for begin, _ in update.stalls.values())
    names = [w.name for w in case.topology.workers if w.name in update.spans]
    figure, ax = plt.subplots(figsize=(9.0, 0.42 * len(names) + 1.0))
    for row, name in enumerate(names):
        _worker_rows(ax, row, [s for s in update.spans[name] if s[0] in dict(_LANES)], origin)
        begin, end = update.stalls[name]
        ax.barh(row + 0.5, end - begin, left=begin - origin, height=0.98, color="#eeeeee", zorder=0)
    ax.set_yticks([i + 0.5 for i in range(len(names))], names)
    ax.invert_yaxis()
    ax.set_xlim(0, update.ewtt_seconds * 1.005)
    ax.set_xlabel(f"seconds since the first worker stopped; T_min is {case.t_min_seconds:.3f} s")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for _, colour in _LANES]
    labels = ["pack", "write under way, until acknowledged", "assemble"]
    ax.legend(handles, labels, ncols=3, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(figure)
    return path


def _worker_rows(ax: Axes, row: int, spans: Sequence[Any], origin: float) -> None:
    for i, (lane, colour) in enumerate(_LANES):
        for odd in (0, 1):
            bars = [(s[2] - origin, max(s[3] - s[2], 5e-4)) for s in spans if s[0] == lane and s[1] % 2 == odd]
            ax.broken_barh(bars, (row + 0.05 + i * 0.3, 0.27), facecolors=colour, alpha=0.45 if odd else 0.9)
