"""The run as text for people: lines on stderr, a spinner and bars where it is a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.status import Status

from weightbridge.cli.demo import messages
from weightbridge.cli.demo.config import DemoConfig
from weightbridge.cli.demo.folder import CheckpointFolder
from weightbridge.cli.demo.launcher import DemoResult, Observer
from weightbridge.cli.demo.record import DemoRecord
from weightbridge.cli.demo.verdict import NETWORK_TOLERANCE, NOISE_BOUND_LOGITS, Verdict, judge_version

__all__ = ["Display", "bytes_text"]

_LABEL_WIDTH = 12


def bytes_text(nbytes: float) -> str:
    """Decimal units, three digits or so: "269.1 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


class Display(Observer):
    """Shows a run as it happens. Use as a context manager, so that the terminal is left in order."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._shown: set[str] = set()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_bars()
        self._end_status()

    def progress(self, progress: messages.Progress) -> None:
        """A bar per task: bytes for the download, steps for the rest."""
        if self._bars is None:
            self._end_status()
            self._bars = Progress(
                TextColumn("[bold]{task.description:<34}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[amount]}"),
                console=self._console,
            )
            self._bars.start()
        kind = "convert" if progress.total < 100 else "download"
        if kind not in self._tasks:
            self._tasks[kind] = self._bars.add_task(progress.text, total=progress.total, amount="")
        amount = f"{bytes_text(progress.done)} of {bytes_text(progress.total)}" if kind == "download" else ""
        self._bars.update(
            self._tasks[kind], description=progress.text, completed=progress.done, total=progress.total, amount=amount
        )

    def started(self, name: str, folder: CheckpointFolder, config: DemoConfig) -> None:
        """The cast: checkpoint, trainers, engines, question."""
        self._end_bars()
        self._line("checkpoint", f"{name}, {folder.spec.numel / 1e6:.1f} M parameters, in {folder.path}")
        self._line("trainers", f"{config.num_trainers} workers, FSDP2 in fp32, on node trainers")
        for engine in config.engines:
            kind = f"tensor-parallel over {engine.num_workers} workers" if engine.num_workers > 1 else "one worker"
            self._line("engine", f"{engine.name}: {kind}, bf16, on node {engine.node}")
        self._line("question", config.prompt)
        self._busy(f"starting {len(config.workers)} processes")

    def changed(self, record: DemoRecord, worker: str, message: object) -> None:
        """Say what this message completes: an answer, the plan, a version."""
        self._show_initial_answers(record)
        if record.plan is not None and self._once("plan"):
            self._show_plan(record.plan, record.config)
        for version in range(1, record.config.steps + 1):
            if record.version_is_reported(version) and self._once(f"version {version}"):
                self._show_version(record, version)
        if isinstance(message, messages.Phase):
            self._busy(f"{worker}: {message.text}")
        elif isinstance(message, messages.Trained):
            self._busy(f"version {message.version}: trained in {message.seconds:.1f} s, loss {message.loss:.3f}")

    def finished(self, result: DemoResult) -> None:
        """Answers and verdict."""
        self._end_status()
        record, verdict = result.record, result.verdict
        for engine in record.config.engines:
            answered = record.answers.get((record.config.steps, engine.name))
            self._line("after", f"{engine.name}: {answered.text if answered else 'no answer'}")
        if record.reference is not None:
            self._line("reference", f"one process with the trainers' weights in bf16: {record.reference.text}")
        self._line("time", ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in result.seconds.items()))
        self._show_verdict(verdict, record)

    def _show_initial_answers(self, record: DemoRecord) -> None:
        for engine in record.config.engines:
            answered = record.answers.get((-1, engine.name))
            if answered is not None and self._once(f"before {engine.name}"):
                self._line("before", f"{engine.name}: {answered.text}")

    def _show_plan(self, plan: messages.PlanMade, config: DemoConfig) -> None:
        senders = ", ".join(f"{name} sends {bytes_text(n)}" for name, n in plan.trainer_egress_bytes.items())
        nodes = ", ".join(f"{name} receives {bytes_text(n)}" for name, n in plan.rollout_node_ingress_bytes.items())
        self._line("connected", f"in {plan.connect_seconds:.1f} s; the model is {bytes_text(plan.model_bytes)} in bf16")
        self._line("plan", senders)
        self._line("", nodes)
        gbit = config.bandwidth * 8 / 1e9
        self._line(
            "",
            f"{plan.rounds} rounds over {plan.num_pairs} pairs of workers; "
            f"T_min {plan.t_min_seconds:.3f} s at {gbit:g} Gbit/s a worker (nominal)",
        )

    def _show_version(self, record: DemoRecord, version: int) -> None:
        judged, updated, trained = judge_version(record, version), record.updated[version], record.trained.get(version)
        moved = ", ".join(
            f"{node} {'sent' if t.counts_sent else 'received'} {bytes_text(t.moved_bytes)}"
            for node, t in judged.network.items()
        )
        loss = f"loss {trained.loss:.3f}, " if trained else ""
        state = "[green]verified[/]" if judged.verified else "[red]NOT verified[/]"
        self._line(
            f"version {version}",
            f"{loss}EWTT {updated.ewtt_seconds:.2f} s, AGST {updated.agst_seconds:.2f} s; {moved}; {state}",
        )
        for differing in judged.differing[:5]:
            self._line("", f"[red]differs: {differing}[/]")

    def _show_verdict(self, verdict: Verdict, record: DemoRecord) -> None:
        workers = len(record.engine_workers)
        self._check(
            verdict.all_verified,
            f"every live element of all {workers} rollout workers is the trainers' weight rounded to bf16, bit for bit, "
            f"in {sum(v.verified for v in verdict.versions)} of {len(verdict.versions)} versions",
        )
        self._check(
            verdict.network_within_tolerance,
            f"the kernel counted within {NETWORK_TOLERANCE:.0%} of one model out of the trainers "
            f"and one into each rollout node, every version",
        )
        self._check(verdict.tokens_agree, "; ".join(self._token_texts(verdict)) or "no answers to compare")
        changed = "differs from before on every engine" if verdict.answer_changed else "is as before: try more --steps"
        self._line("", f"the answer {changed}")
        text = "[bold green]all verified[/]" if verdict.passed else "[bold red]FAILED[/]"
        self._line("verdict", text)

    def _token_texts(self, verdict: Verdict) -> Iterable[str]:
        for name, tokens in verdict.tokens.items():
            total = tokens.agreeing + tokens.inconclusive + tokens.differing
            yield (
                f"{name}: {tokens.agreeing} of {total} tokens are the reference's, {tokens.inconclusive} inconclusive "
                f"(margin under {NOISE_BOUND_LOGITS} logits; noise seen {tokens.noise_logits:.3f})"
            )

    def _check(self, good: bool, text: str) -> None:
        self._line("", f"{'[green]yes[/]' if good else '[red]NO [/]'}  {text}")

    def _line(self, label: str, text: str) -> None:
        self._console.print(f"[bold]{label:<{_LABEL_WIDTH}}[/]{text}", highlight=False, soft_wrap=True)

    def _once(self, key: str) -> bool:
        if key in self._shown:
            return False
        self._shown.add(key)
        return True

    def _busy(self, text: str) -> None:
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _end_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars, self._tasks = None, {}
