"""Plots of a run of the emulated cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster.netns import Counters
from benchmarks.cluster.report import Update, document, result
from benchmarks.cluster.scenarios import CaseKey, build

pytest.importorskip("matplotlib")


def test_plots_are_written_and_a_timeline_has_its_colours(tmp_path: Path) -> None:
    import matplotlib.image
    from benchmarks.cluster.plots import write_plots

    case = build(CaseKey(scenario="replicas", replicas=1, trainer_nodes=1, rate_bits=1e9, slot_bytes=1 << 20, layers=1))
    links = {node: Counters(received=1, sent=1) for node in range(2)}
    spans: dict[str, list[Any]] = {
        "trainer/0": [("pack", 0, 10.0, 12.0, 0, ""), ("post", 0, 12.0, 17.0, 7, "engine-0/0 (receive)")],
        "engine-0/0": [("assemble", 0, 17.0, 19.0, 0, ""), ("signal", 0, 19.0, 19.0, 0, "trainer/0 CREDIT")],
    }
    update = Update(
        stalls={"trainer/0": (9.0, 18.0), "engine-0/0": (9.5, 19.0)}, links=links, cpu_busy=0.5, own_cpu_seconds=1.0,
        load_average=0.0, spans=spans,
    )  # fmt: skip
    entry = result(case, "weightbridge", [update], {}, {})
    found = document("replicas", 1e9, [case], [entry, {**entry, "replicas": 3}, {**entry, "method": "peer:new"}])
    written = write_plots(tmp_path / "new", found, [(case, update)])
    assert [path.name for path in written] == ["replicas-ewtt.svg", "replicas-timeline.png"]
    assert "T_min" in written[0].read_text()
    pixels = (matplotlib.image.imread(written[1])[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    for colour in (0xD98200, 0x1B6CA8, 0x2E8B57):  # the legend alone has some 500 pixels of each
        painted = (abs(pixels - [colour >> 16, colour >> 8 & 255, colour & 255]).max(axis=1) < 30).sum()
        assert painted > 1000, hex(colour)

    only_one = {**found, "results": [entry]}
    assert [path.name for path in write_plots(tmp_path, only_one, [])] == []
