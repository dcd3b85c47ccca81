"""`weightbridge simulate`: one update of a job in virtual time, by this library and by the usual methods."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    check_output,
    for_results,
    stages_shown,
    write_text,
)
from weightbridge.errors import UsageError

if TYPE_CHECKING:
    from weightbridge.simulator.costs import Cost, Costs
    from weightbridge.simulator.faults import Fault
    from weightbridge.simulator.studies import Comparison

__all__ = ["CostOptions", "costs_table", "methods_table", "parse_fault", "simulate"]

FAULT_FORMS = "slow:NODE@SECONDS=FRACTION, lost:WORKER@SECONDS or late:ENGINE=SECONDS"

LatencyUs = Annotated[float, typer.Option(help="Latency of a message, microseconds.")]
PostUs = Annotated[float, typer.Option(help="CPU of one post, microseconds.")]
SignalUs = Annotated[float, typer.Option(help="CPU of a message without bytes, microseconds.")]
LaunchUs = Annotated[float, typer.Option(help="Until a kernel runs, microseconds.")]
PythonUs = Annotated[float, typer.Option("--python-us-per-round", help="Python a worker and round, microseconds.")]
AgreementMs = Annotated[float, typer.Option(help="Until engines have agreed to stand still, milliseconds.")]
MemoryGbps = Annotated[float, typer.Option(help="Pack and assemble kernels, GB/s.")]
InsideGbps = Annotated[float, typer.Option(help="A worker's link inside its node, GB/s.")]


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """The model's costs in the units of the command line."""

    latency_us: float
    post_us: float
    signal_us: float
    launch_us: float
    python_us_per_round: float
    agreement_ms: float
    memory_gbps: float
    inside_gbps: float

    def costs(self) -> Costs:
        """Raises UsageError for what is no cost."""
        from weightbridge.simulator.costs import Costs

        return Costs(
            latency_seconds=self.latency_us / 1e6,
            post_seconds=self.post_us / 1e6,
            signal_seconds=self.signal_us / 1e6,
            launch_seconds=self.launch_us / 1e6,
            python_seconds_per_round=self.python_us_per_round / 1e6,
            agreement_seconds=self.agreement_ms / 1e3,
            memory_bandwidth=self.memory_gbps * 1e9,
            inside_bandwidth=self.inside_gbps * 1e9,
        )


@dataclass(frozen=True, kw_only=True)
class _Request:
    choice: JobChoice
    costs: CostOptions
    baselines: bool
    faults: tuple[str, ...]
    extrapolate: int | None
    rounds_full: bool
    replicas: str | None
    as_json: bool
    html: Path | None
    trace: Path | None


def simulate(
    job: Job = None,
    preset: Preset = None,
    engines: Engines = None,
    trainer_nodes: TrainerNodes = None,
    slot_mib: SlotMib = None,
    one_level: OneLevel = False,
    fair_sharing: Annotated[
        bool, typer.Option("--fair-sharing", help="A control: post a round when it is ready, not the oldest first.")
    ] = False,
    baselines: Annotated[bool, typer.Option("--baselines", help="Also broadcast, p2p and sharded pull.")] = False,
    fault: Annotated[list[str] | None, typer.Option(help=f"May be repeated: {FAULT_FORMS}.")] = None,
    extrapolate: Annotated[
        int | None, typer.Option(help="Simulate so many rounds and add their period for the others.")
    ] = None,
    rounds_full: Annotated[
        bool, typer.Option("--rounds-full", help="Simulate all rounds of a large job too; minutes.")
    ] = False,
    replicas: Annotated[
        str | None, typer.Option(help="With --preset and --html: also plot these numbers of engines, as 1,2,4.")
    ] = None,
    latency_us: LatencyUs = 3.0,
    post_us: PostUs = 10.0,
    signal_us: SignalUs = 1.0,
    launch_us: LaunchUs = 20.0,
    python_us_per_round: PythonUs = 200.0,
    agreement_ms: AgreementMs = 1.0,
    memory_gbps: MemoryGbps = 1000.0,
    inside_gbps: InsideGbps = 450.0,
    as_json: Json = False,
    html: Html = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing to this file.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Simulate one update of a job: how long it takes, who waits for how long, and what the usual methods would take."""
    request = _Request(
        choice=JobChoice(
            job=job, preset=preset, engines=engines, trainer_nodes=trainer_nodes, slot_mib=slot_mib,
            one_level=one_level, fair_sharing=fair_sharing,
        ),
        costs=CostOptions(
            latency_us=latency_us, post_us=post_us, signal_us=signal_us, launch_us=launch_us,
            python_us_per_round=python_us_per_round, agreement_ms=agreement_ms, memory_gbps=memory_gbps,
            inside_gbps=inside_gbps,
        ),
        baselines=baselines, faults=tuple(fault or ()), extrapolate=extrapolate, rounds_full=rounds_full,
        replicas=replicas, as_json=as_json, html=html, trace=trace,
    )  # fmt: skip
    raise typer.Exit(guarded(lambda: _run(request), as_json=as_json, debug=debug))


def _run(request: _Request) -> int:
    from weightbridge.simulator.costs import list_costs
    from weightbridge.simulator.report import simulation_document
    from weightbridge.simulator.trace import write_trace

    check_html(request.html)
    check_output(request.trace, "--trace")
    numbers = _numbers(request)
    costs = request.costs.costs()
    faults = tuple(parse_fault(text) for text in request.faults)
    messages = Console(stderr=True)
    comparison = _compared(request, costs, faults, messages)
    console = messages if request.as_json else for_results()
    _print(console, comparison, list_costs(costs))
    if request.trace is not None:
        count = write_trace(request.trace, comparison.simulation.topology, comparison.results[0].spans)
        messages.print(f"trace: {escape(str(request.trace))}, {count} spans", highlight=False, soft_wrap=True)
    if request.html is not None:
        write_text(request.html, _page(request, comparison, numbers, costs, messages))
        messages.print(f"page: {escape(str(request.html))}", highlight=False, soft_wrap=True)
    if request.as_json:
        print(json.dumps(simulation_document(comparison, list_costs(costs)), indent=2, ensure_ascii=False))
    return 0


def _compared(request: _Request, costs: Costs, faults: Sequence[Fault], messages: Console) -> Comparison:
    from weightbridge.simulator.result import METHODS
    from weightbridge.simulator.studies import compare, rounds_to_simulate

    if request.extrapolate is not None and request.rounds_full:
        raise UsageError("--extrapolate and --rounds-full exclude each other; leave one of them out")
    with stages_shown(messages) as tell:
        planned = request.choice.planned(tell, keep_programs=True)
        rounds = None if request.rounds_full else request.extrapolate or rounds_to_simulate(planned, faults)
        methods = METHODS if request.baselines else METHODS[:1]
        return compare(planned, costs=costs, methods=methods, faults=faults, extrapolate=rounds, progress=tell)


def _page(request: _Request, comparison: Comparison, numbers: Sequence[int], costs: Costs, messages: Console) -> str:
    from weightbridge.simulator.costs import list_costs
    from weightbridge.simulator.page import simulation_page, study_section
    from weightbridge.simulator.studies import replicas_study, run_case

    section = None
    if numbers:
        chosen = replicas_study(str(request.choice.preset), numbers, trainer_nodes=request.choice.trainer_nodes)
        methods = [r.name for r in comparison.results]
        with stages_shown(messages) as tell:
            cases = [run_case(make, costs=costs, methods=methods, progress=tell) for make in chosen.deployments]
        section = study_section(chosen, cases)
    return simulation_page(comparison, list_costs(costs), section)


def _numbers(request: _Request) -> list[int]:
    """Of engines, to plot."""
    if request.replicas is None:
        return []
    if request.choice.preset is None or request.html is None:
        raise UsageError("--replicas goes with --preset and --html: it varies a preset for one plot of the page")
    parts = request.replicas.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--replicas is {request.replicas!r}, expected numbers of engines as in 1,2,4,8")
    return sorted({int(part) for part in parts})


def _print(console: Console, comparison: Comparison, costs: Sequence[Cost]) -> None:
    from weightbridge.simulator.report import METHODS_HEAD, methods_rows, seconds_text

    simulation, workers = comparison.simulation, comparison.planned.plan.topology.workers
    name = comparison.planned.deployment.name
    title = f"one update of {name}, T_min {seconds_text(comparison.t_min_seconds)}"
    console.print(methods_table(title, METHODS_HEAD, methods_rows(comparison.results, comparison.t_min_seconds)))
    for result in comparison.results:
        if result.note:
            _line(console, f"{result.name}: {result.note}")
    for failure in simulation.failures[:8]:
        _line(
            console,
            f"{workers[failure.worker].name} gave up after {seconds_text(failure.at_seconds)} because of "
            f"{workers[failure.peer].name}: {failure.cause}",
        )
    if len(simulation.failures) > 8:
        _line(console, f"... and {len(simulation.failures) - 8} more")
    if not simulation.completed:
        _line(console, "the update did not end: some workers never resumed")
    console.print(costs_table(costs))


def methods_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """left: so many columns are names, the others numbers."""
    table = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def costs_table(costs: Sequence[Cost]) -> Table:
    """What the model charges besides bytes, and why that much."""
    from weightbridge.simulator.report import cost_text

    table = Table(title="costs of the model", title_justify="left", box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for cost in costs:
        table.add_row(cost.name, cost_text(cost), escape(cost.source))
    return table


def _line(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)


def parse_fault(text: str) -> Fault:
    """Raises UsageError showing the forms."""
    from weightbridge.simulator.faults import LateEngine, LostWorker, SlowNode

    kind, _, rest = text.partition(":")
    try:
        if kind == "slow":
            node, moment = rest.rsplit("@", 1)
            at, fraction = moment.split("=")
            found: Fault = SlowNode(node=node, at_seconds=float(at), fraction=float(fraction))
        elif kind == "lost":
            worker, at = rest.rsplit("@", 1)
            found = LostWorker(worker=worker, at_seconds=float(at))
        elif kind == "late":
            engine, seconds = rest.rsplit("=", 1)
            found = LateEngine(engine=engine, seconds=float(seconds))
        else:
            raise ValueError(kind)
    except ValueError as error:
        raise UsageError(f"fault {text!r} is of no known form; expected {FAULT_FORMS}") from error
    return found
