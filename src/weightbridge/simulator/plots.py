"""The plots of the report pages, as SVG text that takes its ink from the page around it.

matplotlib is asked for only here (the extra `report`). Text stays text; the foreground is `currentColor`, so that a page reads
on a light and on a dark ground alike; nothing refers to anything outside the picture.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UnsupportedError
from weightbridge.simulator.result import LANES, LinkUse, MethodResult

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "need_matplotlib",
    "plot_groups",
    "plot_links",
    "plot_matrix",
    "plot_methods",
    "plot_series",
    "plot_timeline",
]

_INK = "#010203"  # a colour no plot uses: replaced by currentColor
_METHOD_COLOURS = {"weightbridge": "#2f7fd0", "broadcast": "#d07f28", "p2p": "#2f9a68", "pull": "#b0559a"}
_PART_COLOURS = {"control": "#8a8f98", "conversion": "#d07f28", "communication": "#2f7fd0"}
_LANE_COLOURS = {
    "control": "#8a8f98",
    "pack": "#d07f28",
    "send": "#2f7fd0",
    "forward": "#8a63c9",
    "assemble": "#2f9a68",
}
_SPARE_COLOURS = ("#2f7fd0", "#d07f28", "#2f9a68", "#b0559a", "#8a63c9", "#8a8f98")
_WIDTH = 8.6  # inches; the page scales it
_BARS_LIMIT = 40  # more bars than this blur
_VECTOR_LIMIT = 3000  # more shapes than this are drawn as one picture inside the SVG


def need_matplotlib() -> None:
    """Raise UnsupportedError, with what to install, where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "a page with plots needs matplotlib, which is not installed; run: pip install 'weightbridge-rl[report]'"
        ) from error


def plot_methods(results: Sequence[MethodResult], t_min_seconds: float) -> str:
    """A bar per method that ended, cut into control, conversion and communication, with T_min as a line."""
    results = [r for r in results if isfinite(r.ewtt_seconds)]
    figure, axes = _canvas(0.55 * len(results) + 1.1)
    names = [r.name for r in results]
    left = np.zeros(len(results))
    for part, colour in _PART_COLOURS.items():
        values = np.array([getattr(r, f"{part}_seconds") for r in results])
        axes.barh(names, values, left=left, color=colour, label=part, height=0.62)
        left = left + values
    for row, total in enumerate(left):
        axes.annotate(_seconds(total), (total, row), xytext=(6, 0), textcoords="offset points", va="center", color=_INK)
    axes.axvline(t_min_seconds, color=_INK, linestyle="--", linewidth=1, label="T_min")
    axes.set_xlim(0, max(float(left.max(initial=0.0)), t_min_seconds) * 1.15)
    axes.invert_yaxis()
    axes.set_xlabel("EWTT in seconds")
    _legend(axes)
    return _svg(figure, "methods")


def plot_series(
    series: Mapping[str, Sequence[tuple[float, float]]], *, name: str, x_label: str, y_label: str, log: bool = True
) -> str:
    """A line per entry: (x, y) points. The entry "T_min" is drawn as a dashed line of the page's ink."""
    from matplotlib.ticker import LogLocator

    figure, axes = _canvas(4.2)
    for i, (label, points) in enumerate(series.items()):
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        if label == "T_min":
            axes.plot(xs, ys, linestyle="--", color=_INK, linewidth=1, label=label)
        else:
            colour = _METHOD_COLOURS.get(label, _SPARE_COLOURS[i % len(_SPARE_COLOURS)])
            axes.plot(xs, ys, marker="o", markersize=4, color=colour, linewidth=1.8, label=label)
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _position: "")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xticks(sorted({p[0] for points in series.values() for p in points}))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, which="major", color=_INK, alpha=0.15)
    _legend(axes)
    return _svg(figure, name)


def plot_groups(labels: Sequence[str], series: Mapping[str, Sequence[float]], *, x_label: str, y_label: str) -> str:
    """A group of bars per label, a bar of it per entry of `series`; logarithmic, from 1 on."""
    from matplotlib.ticker import LogLocator

    figure, axes = _canvas(3.8)
    width = 0.84 / max(1, len(series))
    for i, (name, values) in enumerate(series.items()):
        colour = _METHOD_COLOURS.get(name, _SPARE_COLOURS[i % len(_SPARE_COLOURS)])
        places = np.arange(len(labels)) - 0.42 + (i + 0.5) * width
        axes.bar(places, np.asarray(values) - 0.9, bottom=0.9, width=width * 0.92, color=colour, label=name)
    axes.set_yscale("log")
    axes.set_ylim(0.9, max([2.0, *(1.15 * v for values in series.values() for v in values)]))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _position: "")
    axes.axhline(1.0, color=_INK, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(labels)), list(labels))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _legend(axes)
    return _svg(figure, "groups")


def plot_timeline(spans: npt.NDArray[np.void], names: Sequence[str], workers: Sequence[int]) -> str:
    """A row per worker of `workers` (positions in `names`), a strip of it per lane; rounds alternate in strength."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    figure, axes = _canvas(max(2.0, 0.36 * len(workers) + 1.1))
    rows = np.full(len(names), -1)
    rows[list(workers)] = range(len(workers))
    shown = spans[rows[spans["worker"]] >= 0]
    used = sorted(set(shown["lane"].tolist()))
    strip = 0.84 / max(1, len(used))
    for place, lane in enumerate(used):
        for parity, alpha in ((0, 1.0), (1, 0.5)):
            part = shown[(shown["lane"] == lane) & (shown["round"] % 2 == parity)]
            top = rows[part["worker"]] - 0.42 + place * strip
            x = np.stack([part["start"], part["end"], part["end"], part["start"]], axis=1)
            y = np.stack([top, top, top + strip * 0.92, top + strip * 0.92], axis=1)
            bars = PolyCollection(list(np.stack([x, y], axis=2)), facecolors=_LANE_COLOURS[LANES[lane]], alpha=alpha)
            bars.set_rasterized(len(shown) > _VECTOR_LIMIT)
            axes.add_collection(bars)
    axes.set_yticks(range(len(workers)), [names[w] for w in workers])
    axes.set_ylim(len(workers) - 0.5, -0.5)
    axes.set_xlim(0, float(shown["end"].max(initial=0.0)) * 1.01 or 1.0)
    axes.set_xlabel("seconds since the update began")
    _legend(axes, [Patch(facecolor=_LANE_COLOURS[LANES[lane]], label=LANES[lane]) for lane in used])
    return _svg(figure, "timeline")


def plot_matrix(matrix: npt.NDArray[np.int64], names: Sequence[str]) -> str:
    """Who writes how much to whom, in bytes: rows write, columns are written to. Rows and columns of nothing are left out."""
    rows, columns = np.flatnonzero(matrix.any(axis=1)), np.flatnonzero(matrix.any(axis=0))
    height, width = max(1, len(rows)), max(1, len(columns))
    figure, axes = _canvas(min(9.0, 2.0 + min(0.42 * height, 6.4 * height / width)))
    gigabytes = np.ma.masked_equal(matrix[np.ix_(rows, columns)] / 1e9, 0.0)
    picture = axes.imshow(gigabytes, cmap="viridis", vmin=0, interpolation="nearest", aspect="auto")
    bar = figure.colorbar(picture, ax=axes, label="GB", fraction=0.05)
    bar.outline.set_visible(False)
    for axis, ids in ((axes.xaxis, columns), (axes.yaxis, rows)):
        every = max(1, -(-len(ids) // 32))
        axis.set_ticks(range(0, len(ids), every), [names[i] for i in ids[::every]])
    axes.tick_params(axis="x", rotation=90 if width > 8 else 0)
    axes.set_xlabel("written to")
    axes.set_ylabel("writes")
    if max(height, width) <= 12:
        for i, j in zip(*np.nonzero(gigabytes.filled(0.0)), strict=True):
            ink = "#000000" if gigabytes[i, j] > 0.6 * gigabytes.max() else "#ffffff"
            axes.text(float(j), float(i), f"{gigabytes[i, j]:.3g}", ha="center", va="center", color=ink)
    return _svg(figure, "matrix")


def plot_links(groups: Mapping[str, Sequence[LinkUse]], bound_seconds: float) -> str:
    """A panel per group of links: least busy seconds of each link, sorted, with the lower bound as a line."""
    groups = {name: links for name, links in groups.items() if links}
    figure, panels = _canvases(2.6, max(1, len(groups)))
    top = max([bound_seconds, *(link.busy_seconds for links in groups.values() for link in links)])
    for axes, (name, links), colour in zip(panels, groups.items(), _SPARE_COLOURS, strict=False):
        busy = sorted((link.busy_seconds for link in links), reverse=True)
        if len(busy) > _BARS_LIMIT:
            axes.stairs(busy, fill=True, color=colour)
        else:
            axes.bar(range(len(busy)), busy, width=0.8, color=colour)
        axes.axhline(bound_seconds, color=_INK, linestyle="--", linewidth=1)
        axes.set_ylim(0, top * 1.12 or 1.0)
        axes.set_title(name, fontsize=9, color=_INK)
        axes.set_xticks([])
        axes.set_xlabel(f"{len(busy)} links")
    panels[0].set_ylabel("seconds")
    return _svg(figure, "links")


def _canvas(height: float) -> tuple[Figure, Axes]:
    figure, panels = _canvases(height, 1)
    return figure, panels[0]


def _canvases(height: float, columns: int) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # not pyplot: no state, no window

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    grid = figure.subplots(1, columns, squeeze=False, sharey=columns > 1)
    panels: list[Axes] = list(grid[0])
    for axes in panels:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(_INK)
        axes.tick_params(colors=_INK, labelsize=8)
        axes.xaxis.label.set_color(_INK)
        axes.yaxis.label.set_color(_INK)
    return figure, panels


def _legend(axes: Axes, handles: Sequence[Artist] | None = None) -> None:
    """Above the axes. handles: by default what the axes have labels for."""
    axes.legend(
        handles=axes.get_legend_handles_labels()[0] if handles is None else list(handles),
        loc="lower left", bbox_to_anchor=(0, 1), ncols=6, frameon=False, fontsize=8, labelcolor=_INK, borderaxespad=0.2,
    )  # fmt: skip


def _svg(figure: Figure, name: str) -> str:
    """The figure as one <svg> element; identifiers start with `name`, so that several fit on one page."""
    import matplotlib

    for axes in figure.axes:  # colour bars come late
        axes.tick_params(colors=_INK)
        axes.yaxis.label.set_color(_INK)
    out = io.StringIO()
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure.savefig(
            out, format="svg", transparent=True, dpi=150, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"', r'<svg role="img" \1', text, count=1)
    return text.replace(_INK, "currentColor").strip()


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"
