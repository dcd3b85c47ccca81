"""`weightbridge plan`: what an update of a job will move, over which links, and how far that is from the bound."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightbridge.cli.failures import guarded
from weightbridge.cli.job import (
    Debug,
    Engines,
    Html,
    Job,
    JobChoice,
    Json,
    OneLevel,
    Preset,
    SlotMib,
    TrainerNodes,
    check_html,
    for_results,
    stages_shown,
    write_text,
)

__all__ = ["facts_table", "plan"]


def plan(
    job: Job = None,
    preset: Preset = None,
    engines: Engines = None,
    trainer_nodes: TrainerNodes = None,
    slot_mib: SlotMib = None,
    one_level: OneLevel = False,
    as_json: Json = False,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Plan a job that need not exist yet: from layouts to verified programs of all workers, and what they will cost."""
    choice = JobChoice(
        job=job, preset=preset, engines=engines, trainer_nodes=trainer_nodes, slot_mib=slot_mib, one_level=one_level
    )
    raise typer.Exit(guarded(lambda: _run(choice, as_json=as_json, html=html), as_json=as_json, debug=debug))


def _run(choice: JobChoice, *, as_json: bool, html: Path | None) -> int:
    from weightbridge.simulator.report import plan_document, plan_facts

    messages = Console(stderr=True)
    check_html(html)
    with stages_shown(messages) as tell:
        planned = choice.planned(tell)
    console = messages if as_json else for_results()
    console.print(facts_table(f"plan of {planned.deployment.name}", plan_facts(planned)))
    console.print("the plan and the programs of all workers are [green]verified[/]", highlight=False)
    if html is not None:
        from weightbridge.simulator.page import plan_page

        write_text(html, plan_page(planned))
        messages.print(f"page: {escape(str(html))}", highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(plan_document(planned), indent=2, ensure_ascii=False))
    return 0


def facts_table(title: str, facts: Sequence[tuple[str, str, str]]) -> Table:
    """Three columns: what, how much, what there is to say about it."""
    table = Table(title=escape(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for what, value, remark in facts:
        table.add_row(escape(what), escape(value), escape(remark))
    return table
