"""`weightbridge study`: one parameter of a deployment varied, and what each method makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from weightbridge.cli.failures import guarded
from weightbridge.cli.job import Debug, Html, Json, check_html, for_results, stages_shown, write_text
from weightbridge.cli.simulate import costs_table, methods_table

__all__ = ["study"]

Name = Annotated[str, typer.Argument(metavar="STUDY", help="replicas, trainer-nodes, tdp-rdp or deployments.")]


def study(
    name: Name,
    preset: Annotated[str | None, typer.Option(help="The deployment that is varied.")] = None,
    as_json: Json = False,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Simulate a study of the paper: every method at every value of one parameter, with what its time is spent on."""
    raise typer.Exit(guarded(lambda: _run(name, preset, as_json=as_json, html=html), as_json=as_json, debug=debug))


def _run(name: str, preset: str | None, *, as_json: bool, html: Path | None) -> int:
    from weightbridge.simulator.costs import Costs, list_costs
    from weightbridge.simulator.page import WHAT_IT_SHOWS, study_page
    from weightbridge.simulator.report import study_document, study_head, study_rows
    from weightbridge.simulator.studies import STUDIES, run_case
    from weightbridge.simulator.studies import study as study_named

    chosen = study_named(name, preset)
    check_html(html)
    messages = Console(stderr=True)
    costs = Costs()
    comparisons = []
    for label, make in zip(chosen.labels, chosen.deployments, strict=True):
        messages.print(f"{chosen.parameter}: {label}", highlight=False)
        with stages_shown(messages) as tell:
            comparisons.append(run_case(make, costs=costs, progress=tell))
    console = messages if as_json else for_results()
    console.print(methods_table(STUDIES[name], study_head(chosen), study_rows(chosen, comparisons), left=2))
    console.print(costs_table(list_costs(costs)))
    console.print(WHAT_IT_SHOWS, highlight=False)
    if html is not None:
        write_text(html, study_page(chosen, comparisons, list_costs(costs)))
        messages.print(f"page: {escape(str(html))}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(study_document(chosen, comparisons, list_costs(costs)), indent=2, ensure_ascii=False))
    return 0
