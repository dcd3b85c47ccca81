"""The pages behind `--html`: of a plan, of a simulation, of a study."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weightbridge.plan import Role
from weightbridge.simulator.costs import Cost
from weightbridge.simulator.html import Grid, Section, page
from weightbridge.simulator.planned import Planned
from weightbridge.simulator.plots import (
    need_matplotlib,
    plot_groups,
    plot_links,
    plot_matrix,
    plot_methods,
    plot_series,
    plot_timeline,
)
from weightbridge.simulator.report import (
    METHODS_HEAD,
    bytes_text,
    cost_text,
    link_text,
    methods_rows,
    plan_facts,
    seconds_text,
    study_head,
    study_rows,
)
from weightbridge.simulator.result import LANES, LinkUse
from weightbridge.simulator.studies import STUDIES, Comparison, Study

__all__ = ["WHAT_IT_SHOWS", "plan_page", "simulation_page", "study_page", "study_section"]

WHAT_IT_SHOWS = (
    "A simulation shows what a method's traffic, order and fixed costs come to on links that share fairly and never "
    "falter. It does not show what else happens on a real cluster: congestion in the switches, paths that hash onto one "
    "another, slow hosts, contention with the job's own traffic. The other methods are simulated at their best: whatever "
    "can overlap does. Where the paper's measured ratios stand beside these, they are of real runs on another cluster."
)
_TIMELINE_TRAINERS, _TIMELINE_ROLLOUTS = 8, 16

_WORKERS_SHOWN = 64
_DIAGONAL = " What stays inside a node is on the diagonal."


def plan_page(planned: Planned) -> str:
    """Raises UnsupportedError where matplotlib is missing."""
    need_matplotlib()
    lead = planned.deployment.description or "A job of the user's own."
    return page(f"Plan: {planned.deployment.name}", lead, plan_sections(planned))


def simulation_page(comparison: Comparison, costs: Sequence[Cost], study: Section | None = None) -> str:
    """study: a further section, of the same deployment varied. Raises UnsupportedError where matplotlib is missing."""
    need_matplotlib()
    planned, simulation = comparison.planned, comparison.simulation
    sections = [
        Section(
            heading="Methods",
            text=WHAT_IT_SHOWS,
            plot=plot_methods(comparison.results, comparison.t_min_seconds),
            grid=Grid(head=METHODS_HEAD, rows=tuple(methods_rows(comparison.results, comparison.t_min_seconds))),
        ),
        *([study] if study is not None else []),
        _timeline(comparison),
        _simulated_links(comparison),
        *plan_sections(planned),
        Section(
            heading="Costs of the model",
            grid=Grid(head=("cost", "value", "source"), rows=tuple((c.name, cost_text(c), c.source) for c in costs)),
        ),
    ]
    lead = f"{planned.deployment.description}. {simulation.extrapolated or 'All rounds were simulated'}."
    return page(f"Simulated update: {planned.deployment.name}", lead, sections)


def study_page(study: Study, comparisons: Sequence[Comparison], costs: Sequence[Cost]) -> str:
    """Raises UnsupportedError where matplotlib is missing."""
    need_matplotlib()
    names = [r.name for r in comparisons[0].results]
    sections = [study_section(study, comparisons)]
    sections += [
        Section(
            heading=f"{study.parameter}: {label}",
            plot=plot_methods(c.results, c.t_min_seconds).replace("methods-", f"methods{i}-"),
            grid=Grid(head=METHODS_HEAD, rows=tuple(methods_rows(c.results, c.t_min_seconds))),
        )
        for i, (label, c) in enumerate(zip(study.labels, comparisons, strict=True))
    ]
    rows = tuple((c.name, cost_text(c), c.source) for c in costs)
    sections.append(Section(heading="Costs of the model", grid=Grid(head=("cost", "value", "source"), rows=rows)))
    return page(f"Study: {STUDIES[study.name]}", f"Simulated: {', '.join(names)}. {WHAT_IT_SHOWS}", sections)


def study_section(study: Study, comparisons: Sequence[Comparison]) -> Section:
    """EWTT of each method against the parameter, or over T_min where it is no number."""
    methods = [r.name for r in comparisons[0].results]
    if study.numbers:
        series = {
            name: [(x, c.results[i].ewtt_seconds) for x, c in zip(study.numbers, comparisons, strict=True)]
            for i, name in enumerate(methods)
        }
        series["T_min"] = [(x, c.t_min_seconds) for x, c in zip(study.numbers, comparisons, strict=True)]
        plot = plot_series(series, name="study", x_label=study.parameter, y_label="EWTT in seconds")
    else:
        ratios = {
            name: [c.results[i].ewtt_seconds / c.t_min_seconds for c in comparisons] for i, name in enumerate(methods)
        }
        plot = plot_groups(study.labels, ratios, x_label=study.parameter, y_label="EWTT / T_min")
    return Section(
        heading=f"EWTT against {study.parameter}",
        plot=plot,
        grid=Grid(head=study_head(study), rows=tuple(study_rows(study, comparisons))),
    )


def _timeline(comparison: Comparison) -> Section:
    topology, steps = comparison.planned.plan.topology, comparison.simulation.steps
    chosen = [*_spread(topology.trainers, _TIMELINE_TRAINERS), *_spread(topology.rollouts, _TIMELINE_ROLLOUTS)]
    shown = f"{len(chosen)} of {len(topology.workers)} workers, " if len(chosen) < len(topology.workers) else ""
    rows = []
    for worker in chosen:
        mine = steps[steps["worker"] == worker]
        busy = [
            seconds_text(float((mine["end"] - mine["start"])[mine["lane"] == lane].sum())) for lane in range(len(LANES))
        ]
        rows.append((topology.workers[worker].name, *busy, seconds_text(float(mine["end"].max(initial=0.0)))))
    return Section(
        heading="Rounds of each worker",
        text=(
            f"By this library; {shown}{comparison.simulation.num_rounds} rounds, strong and pale in turn. send: from a "
            "trainer; forward: from one engine to another. The numbers are seconds of work, which may overlap."
        ),
        plot=plot_timeline(steps, [w.name for w in topology.workers], chosen),
        grid=Grid(head=("worker", *LANES, "last end"), rows=tuple(rows)),
    )


def _spread(workers: Sequence[int], most: int) -> list[int]:
    """At most so many of them, evenly apart, the first and the last included."""
    places = np.linspace(0, len(workers) - 1, min(most, len(workers))).round().astype(int)
    return [workers[i] for i in places.tolist()]


def _simulated_links(comparison: Comparison) -> Section:
    """Bytes by kind of link and method."""
    kinds = list(dict.fromkeys(link.kind for r in comparison.results for link in r.links if link.nbytes))
    rows = []
    for r in comparison.results:
        for kind in kinds:
            used = [link for link in r.links if link.kind == kind and link.nbytes]
            if used:
                most = max(used, key=lambda link: link.busy_seconds)
                sent = bytes_text(sum(link.nbytes for link in used if link.outgoing))
                rows.append((r.name, kind, sent, seconds_text(most.busy_seconds), link_text(most)))
    return Section(
        heading="Links each method uses",
        text="The busiest link of a method is what it cannot be faster than, however well it overlaps.",
        grid=Grid(head=("method", "kind of link", "bytes", "busiest needs", "which"), rows=tuple(rows)),
    )


def plan_sections(planned: Planned) -> list[Section]:
    """The facts, use of links, and traffic."""
    bound = planned.plan.bounds.link_bound_seconds
    groups = _link_groups(planned)
    topology = planned.plan.topology
    by_worker = len(topology.workers) <= _WORKERS_SHOWN
    ends = tuple(w.name for w in topology.workers) if by_worker else topology.nodes
    matrix = planned.traffic.between_workers() if by_worker else planned.traffic.between_nodes()
    return [
        Section(
            heading="The plan",
            grid=Grid(head=("", "", "remark"), rows=tuple((f.what, f.value, f.remark) for f in plan_facts(planned))),
        ),
        Section(
            heading="Use of links",
            text=(
                "The least time each link needs for the bytes that the plan puts on it. The dashed line is the lower bound of "
                f"the linear program, {seconds_text(bound)}: no plan of this kind has a busiest link below it."
            ),
            plot=plot_links(groups, bound),
            grid=_links_grid(groups),
        ),
        Section(
            heading=f"Traffic between {'workers' if by_worker else 'nodes'}",
            text="Who writes how much to whom in one update." + ("" if by_worker else _DIAGONAL),
            plot=plot_matrix(matrix, ends),
            grid=Grid(
                head=("from", "to", "bytes"),
                rows=tuple(
                    (ends[i], ends[j], bytes_text(int(matrix[i, j]))) for i, j in zip(*matrix.nonzero(), strict=True)
                ),
            ),
        ),
    ]


def _link_groups(planned: Planned) -> dict[str, list[LinkUse]]:
    """The links by what their bytes are for; a panel each."""
    topology, links = planned.plan.topology, planned.traffic.links()
    role = {w.name: w.role for w in topology.workers}
    workers = [link for link in links if link.kind == "worker"]
    groups = {
        "out of trainers": [x for x in workers if x.outgoing and role[x.name] is Role.TRAINER],
        "into rollout workers": [x for x in workers if not x.outgoing and role[x.name] is Role.ROLLOUT],
        "out of rollout workers": [x for x in workers if x.outgoing and role[x.name] is Role.ROLLOUT],
        "limited nodes": [x for x in links if x.kind == "node"],
        "uplinks of groups": [x for x in links if x.kind == "group"],
    }
    return {name: found for name, found in groups.items() if found}


def _links_grid(groups: dict[str, list[LinkUse]]) -> Grid:
    rows = []
    for name, links in groups.items():
        busy = sorted(link.busy_seconds for link in links)
        most = max(links, key=lambda link: link.busy_seconds)
        rows.append(
            (
                name, str(len(links)), bytes_text(sum(link.nbytes for link in links)), seconds_text(busy[0]),
                seconds_text(busy[len(busy) // 2]), seconds_text(busy[-1]), most.name,
            )
        )  # fmt: skip
    return Grid(head=("links", "number", "bytes", "least", "median", "most", "busiest"), rows=tuple(rows))
