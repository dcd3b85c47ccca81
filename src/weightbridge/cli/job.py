"""Which job the planning commands are about: a preset by name, or the user's own file; and how its planning is shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from weightbridge.errors import UsageError

if TYPE_CHECKING:
    from weightbridge.deployments import Deployment
    from weightbridge.simulator.planned import Planned, Progress

__all__ = [
    "Debug",
    "Engines",
    "Html",
    "Job",
    "JobChoice",
    "Json",
    "OneLevel",
    "Preset",
    "SlotMib",
    "TrainerNodes",
    "check_html",
    "check_output",
    "for_results",
    "stages_shown",
    "write_text",
]

_PIPE_WIDTH = 120

Job = Annotated[
    Path | None, typer.Argument(metavar="[JOB.toml]", help="The job: model, layouts, topology. Or give --preset.")
]
Preset = Annotated[str | None, typer.Option(help="A job that comes with the library; a wrong name lists them.")]
Engines = Annotated[int | None, typer.Option(help="With --preset: so many rollout engines instead of its own number.")]
TrainerNodes = Annotated[int | None, typer.Option(help="With --preset: so many trainer nodes.")]
SlotMib = Annotated[int | None, typer.Option(help="Memory of one slot, MiB; two a direction. By default the job's.")]
OneLevel = Annotated[bool, typer.Option("--one-level", help="A control: keep the routes of the first linear program.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; text goes to stderr.")]
Html = Annotated[Path | None, typer.Option(help="Write one self-contained page with plots to this file.")]
Debug = Annotated[bool, typer.Option(help="Show stack traces of failures.")]


@dataclass(frozen=True, kw_only=True)
class JobChoice:
    """What the command line says about the job."""

    job: Path | None
    preset: str | None
    engines: int | None = None
    trainer_nodes: int | None = None
    slot_mib: int | None = None
    one_level: bool = False
    fair_sharing: bool = False

    def deployment(self) -> Deployment:
        """Its spec, topology and source maps. Seconds for a job of hundreds of workers. Raises UsageError."""
        from weightbridge.deployments import PRESETS, preset

        if (self.job is None) == (self.preset is None):
            given = "both" if self.job is not None else "neither"
            raise UsageError(f"give either a job file or --preset, got {given}; presets are {', '.join(PRESETS)}")
        for name, value in (("--engines", self.engines), ("--trainer-nodes", self.trainer_nodes)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
            if value is not None and self.job is not None:
                raise UsageError(f"{name} changes a preset; a job file says it itself")
        if self.slot_mib is not None and self.slot_mib < 1:
            raise UsageError(f"--slot-mib must be at least 1, got {self.slot_mib}")
        if self.job is not None:
            from weightbridge.deployments import load_job

            return load_job(self.job)
        return preset(str(self.preset), engines=self.engines, trainer_nodes=self.trainer_nodes)

    def planned(self, tell: Progress, *, keep_programs: bool = False) -> Planned:
        """The job, planned and verified. tell: how far it is. Raises what planning raises."""
        from weightbridge.plan import PlanOptions
        from weightbridge.program.program import AS_READY, OLDEST_ROUND_FIRST
        from weightbridge.simulator.planned import plan_deployment

        tell("layouts", 0, 1)
        deployment = self.deployment()
        tell("layouts", 1, 1)
        slot_bytes = deployment.slot_bytes if self.slot_mib is None else self.slot_mib << 20
        options = PlanOptions(slot_bytes=slot_bytes, balanced=not self.one_level)
        return plan_deployment(
            deployment,
            options=options,
            keep_programs=keep_programs,
            post_order=AS_READY if self.fair_sharing else OLDEST_ROUND_FIRST,
            progress=tell,
        )


class _Stages:
    """A bar per stage."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)


@contextmanager
def stages_shown(console: Console) -> Iterator[_Stages]:
    """Bars that stay where it is a terminal, and nothing where it is not."""
    bars = Bars(
        TextColumn("{task.description:<26}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, disable=not console.is_terminal,
    )  # fmt: skip
    with bars:
        yield _Stages(bars)


def for_results() -> Console:
    """Standard output; wide enough for tables where it is no terminal and so has no width of its own."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPE_WIDTH)


def check_html(path: Path | None) -> None:
    """Raise now if a page could not be made or written after minutes of work: UsageError or UnsupportedError."""
    if path is not None:
        from weightbridge.simulator.plots import need_matplotlib

        check_output(path, "--html")
        need_matplotlib()


def check_output(path: Path | None, option: str) -> None:
    """Raise UsageError now if the file could not be written after minutes of work."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        found = "a folder" if path.is_dir() else f"no folder {str(path.absolute().parent)!r}"
        raise UsageError(f"{option} {str(path)!r}: expected a file in a folder that exists, found {found}")


def write_text(path: Path, text: str) -> None:
    """Raise UsageError when it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{str(path)!r} could not be written: {error.strerror or error}") from error
