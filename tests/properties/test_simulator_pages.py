"""Pages and plots: whole documents that refer to nothing outside. Drawing takes seconds, so this is no unit test."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tests.unit.planning_cases import NAMES, SPANS, result, small_deployment, spans
from typer.testing import CliRunner

from weightbridge import deployments
from weightbridge.cli import main
from weightbridge.deployments import Deployment
from weightbridge.simulator import studies
from weightbridge.simulator.costs import Costs, list_costs
from weightbridge.simulator.faults import LostWorker
from weightbridge.simulator.html import Grid, Section, page
from weightbridge.simulator.page import plan_page, simulation_page, study_page, study_section
from weightbridge.simulator.planned import plan_deployment
from weightbridge.simulator.plots import plot_links, plot_matrix, plot_methods, plot_series, plot_timeline
from weightbridge.simulator.result import METHODS, no_spans

pytest.importorskip("matplotlib")


class _Checker(HTMLParser):
    """Collects identifiers, references to them and outside addresses; complains about elements closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "br", "img", "link"}:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            text = value or ""
            if name == "id":
                self.ids.append(text)
            if name in {"href", "xlink:href", "src"} and not text.startswith("data:"):
                (self.references if text.startswith("#") else self.outside).append(text.lstrip("#"))
            self.references += re.findall(r"url\(#([^)]*)\)", text)
            self.outside += re.findall(r"url\((?!#)([^)]*)\)", text)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(text: str) -> _Checker:
    checker = _Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    assert checker.outside == []
    assert "<script" not in text
    assert "@import" not in text
    assert len(set(checker.ids)) == len(checker.ids)
    assert set(checker.references) <= set(checker.ids)
    return checker


def test_a_page_of_a_plan_is_whole_and_refers_to_nothing_outside() -> None:
    planned = plan_deployment(small_deployment())
    text = plan_page(planned)
    assert len(check_page(text).ids) > 20
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["The plan", "Use of links", "Traffic between workers"]
    for name in NAMES:
        assert name in text
    assert "currentColor" in text
    assert "#010203" not in text
    assert plan_page(planned) == text


def test_text_on_a_page_is_escaped() -> None:
    text = page("a<b", "x & y", [Section(heading="<h>", text="<p1>", grid=Grid(head=("<c>",), rows=(("<r>", "<v>"),)))])
    check_page(text)
    for raw, escaped in (
        ("a<b", "a&lt;b"), ("x & y", "x &amp; y"), ("<h>", "&lt;h&gt;"), ("<p1>", "&lt;p1&gt;"), ("<c>", "&lt;c&gt;"),
        ("<r>", "&lt;r&gt;"), ("<v>", "&lt;v&gt;"),
    ):  # fmt: skip
        assert escaped in text
        assert raw not in text


def test_every_plot_is_one_svg_that_stands_alone() -> None:
    matrix = np.array([[0, 5_000_000_000, 1], [0, 0, 0], [0, 0, 0]])
    plots = [
        plot_methods([result(), result("p2p", 9.0)], 1.9),
        plot_series({"T_min": [(1, 1.0), (2, 1.0)], "p2p": [(1, 1.0), (2, 2.0)]}, name="r", x_label="x", y_label="y"),
        plot_series({"some": [(1, 0.0), (2, 2.0)]}, name="s", x_label="x", y_label="y", log=False),
        plot_timeline(SPANS, NAMES, (0, 2)),
        plot_timeline(no_spans(), NAMES, (0,)).replace("timeline-", "empty-"),
        plot_matrix(matrix, ("first", "second", "third")),
        plot_links({"in": result().links, "none": []}, 1.0),
    ]
    text = page("t", "l", [Section(heading=f"plot {i}", plot=plot) for i, plot in enumerate(plots)])
    check_page(text)
    assert text.count("<svg") == text.count("</svg>") == len(plots)
    assert text.count('aria-label="plot') == len(plots)
    assert "first" in plots[5]
    assert "second" in plots[5]  # written to; of its row nothing
    assert [name in plots[3] for name in NAMES] == [True, False, True, False]


def test_many_spans_become_a_picture_inside_the_svg() -> None:
    many = spans(*((0, "send", k, k * 1.0, k + 0.9, 1) for k in range(4000)))
    plot = plot_timeline(many, NAMES, (0,))
    assert "data:image/png;base64," in plot
    assert len(plot) < 300_000


@pytest.fixture(scope="module")
def compared() -> studies.Comparison:
    return studies.compare(plan_deployment(small_deployment(), keep_programs=True), costs=Costs())


def test_a_page_of_a_simulation_has_every_plot_and_its_numbers(compared: studies.Comparison) -> None:
    study = studies.replicas_study("any", (1, 2))
    text = simulation_page(compared, list_costs(Costs()), study_section(study, [compared, compared]))
    check_page(text)
    assert re.findall(r"<h2>(.*?)</h2>", text) == [
        "Methods",
        "EWTT against rollout replicas",
        "Rounds of each worker",
        "Links each method uses",
        "The plan",
        "Use of links",
        "Traffic between workers",
        "Costs of the model",
    ]
    assert text.count("<svg") == 5
    assert text.count("<details>") == 5
    for words in (
        "It does not show",
        "python_seconds_per_round",
        "200 us",
        "All rounds were simulated",
        *METHODS,
        *NAMES,
    ):
        assert words in text


@pytest.mark.parametrize("name", studies.STUDIES)
def test_a_page_of_a_study_shows_every_case(compared: studies.Comparison, name: str) -> None:
    study = studies.study(name)
    text = study_page(study, [compared] * len(study.labels), list_costs(Costs()))
    check_page(text)
    assert text.count("<svg") == 1 + len(study.labels)
    for label in study.labels:
        assert f"<h2>{study.parameter}: {label}</h2>" in text
    assert ('<th scope="col">paper</th>' in text) == (name == "deployments")


def test_pages_are_written_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def preset(_name: str, **_varied: int) -> Deployment:
        return small_deployment()

    monkeypatch.setattr(deployments, "preset", preset)
    monkeypatch.setattr(studies, "preset", preset)
    for arguments, headings in (
        (("plan", "--preset", "x"), 3),
        (("simulate", "--preset", "x", "--replicas", "2,1"), 8),
        (("study", "replicas"), 7),
    ):
        path = tmp_path / f"{arguments[0]}.html"
        result = CliRunner().invoke(main.app, [*arguments, "--html", str(path)])
        assert result.exit_code == 0, result.output
        assert f"page: {path}" in result.stderr.replace("\n", "")
        text = path.read_text()
        check_page(text)
        assert text.count("<h2>") == headings


def test_an_update_that_never_ends_has_a_page_too() -> None:
    planned = plan_deployment(small_deployment(), keep_programs=True)
    lost = studies.compare(planned, costs=Costs(), faults=(LostWorker(worker="a/0", at_seconds=0.0011),))
    assert not lost.simulation.completed
    text = simulation_page(lost, list_costs(Costs()))
    check_page(text)
    assert "never" in text
