"""The `weightbridge` command: options in, one message and an exit status out.

Exit status 0: done; 1: it failed; 2: it was asked wrongly. A failure is one message that names the thing, what was
expected and found, and what to do; `--debug` adds the stack traces.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from weightbridge import __version__
from weightbridge.cli.check import error_document as check_error_document
from weightbridge.cli.check import run_check
from weightbridge.cli.demo.config import parse_fault
from weightbridge.cli.demo.display import Display
from weightbridge.cli.demo.document import failure_document, result_document
from weightbridge.cli.demo.launcher import (
    DEFAULT_ANSWER,
    DEFAULT_LEARNING_RATE,
    DEFAULT_PROMPT,
    DemoOptions,
    run_demo,
)
from weightbridge.cli.doctor import doctor
from weightbridge.cli.explain import explanation
from weightbridge.cli.failures import FAILURE, INTERRUPTED, guarded, report_failure
from weightbridge.cli.plan import plan
from weightbridge.cli.simulate import simulate
from weightbridge.cli.study import study
from weightbridge.cli.top import top
from weightbridge.errors import WeightBridgeError

__all__ = ["app", "main"]

app = typer.Typer(
    name="weightbridge",
    help="Moves updated model weights from trainer workers to rollout engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def demo(
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="A dense Llama- or Qwen-style model folder. Without it SmolLM2-135M-Instruct is fetched once."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps, each sent as one version.")] = 3,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, full fine-tuning in fp32.")] = DEFAULT_LEARNING_RATE,
    prompt: Annotated[str, typer.Option(help="What the engines are asked.")] = DEFAULT_PROMPT,
    answer: Annotated[str, typer.Option(help="What the trainers teach.")] = DEFAULT_ANSWER,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 12,
    bandwidth: Annotated[float, typer.Option(help="Nominal Gbit/s of each worker's link, for T_min.")] = 10.0,
    tensor_parallel: Annotated[
        int | None, typer.Option(help="Workers of the first engine; by default 3 or 2, whichever divides the model.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Control port on loopback; by default a free one.")] = None,
    slot_mib: Annotated[int, typer.Option(help="Transfer buffer of a worker, MiB per slot.")] = 32,
    connect_timeout: Annotated[float, typer.Option(help="Seconds for all sides to connect.")] = 120.0,
    update_timeout: Annotated[float, typer.Option(help="Seconds for one update.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout; text goes to stderr.")] = False,
    debug: Annotated[bool, typer.Option(help="Show stack traces of failures.")] = False,
    fail: Annotated[
        str | None, typer.Option(hidden=True, help="For tests: kill:WORKER@version=N[,after=SECONDS].")
    ] = None,
    engine_missing: Annotated[str, typer.Option(hidden=True, help="For tests: an engine that never comes.")] = "",
    loader_wants: Annotated[str, typer.Option(hidden=True, help="For tests: a tensor the loader insists on.")] = "",
) -> None:
    """Train real weights, send every version to two rollout engines while they generate, and prove the result."""

    def options() -> DemoOptions:
        return DemoOptions(
            checkpoint=checkpoint,
            steps=steps,
            learning_rate=learning_rate,
            prompt=prompt,
            answer=answer,
            max_new_tokens=max_new_tokens,
            bandwidth_gbit=bandwidth,
            tensor_parallel=tensor_parallel,
            port=port,
            slot_mib=slot_mib,
            connect_timeout_seconds=connect_timeout,
            update_timeout_seconds=update_timeout,
            debug=debug,
            fault=None if fail is None else parse_fault(fail),
            engine_missing=engine_missing,
            loader_wants=loader_wants,
        )

    raise typer.Exit(_run_demo(options, as_json=as_json, debug=debug))


def _run_demo(options: Callable[[], DemoOptions], *, as_json: bool, debug: bool) -> int:
    """Run, show, and say how it ended: the exit status."""
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        with Display(console) as display:
            result = run_demo(options(), display)
    except WeightBridgeError as error:
        return report_failure(console, error, as_json=as_json, debug=debug, document=failure_document)
    except KeyboardInterrupt:
        console.print("interrupted; every process of the demo has ended")
        return INTERRUPTED
    if as_json:
        typer.echo(json.dumps(result_document(result), indent=2, ensure_ascii=False))
    return 0 if result.verdict.passed else FAILURE


@app.command()
def check(
    loader: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="FACTORY() returns a LoaderUnderTest, or (spec, load_weights, tensors).",
        ),
    ],
    save_map: Annotated[Path | None, typer.Option(help="Write the layout that was found to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout; text goes to stderr.")] = False,
    debug: Annotated[bool, typer.Option(help="Show stack traces of failures.")] = False,
) -> None:
    """Run the contract of a load_weights against your own: what holds, what does not, and what to do."""
    raise typer.Exit(
        guarded(
            lambda: run_check(loader, as_json=as_json, save_to=save_map),
            as_json=as_json,
            debug=debug,
            document=check_error_document,
        )
    )


@app.command()
def explain(
    source_map: Annotated[Path, typer.Argument(metavar="MAP", help="A file that `check --save-map` wrote.")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One live tensor; by default all.")] = None,
    debug: Annotated[bool, typer.Option(help="Show stack traces of failures.")] = False,
) -> None:
    """Say in words and index ranges where each part of a live tensor comes from."""

    def run() -> int:
        typer.echo(explanation(source_map, name), nl=False)
        return 0

    raise typer.Exit(guarded(run, as_json=False, debug=debug))


for _command in (plan, simulate, study, doctor, top):
    app.command()(_command)


def _as_interrupt(_signum: int, _frame: FrameType | None) -> None:
    """Make SIGTERM unwind like Ctrl-C, so that the workers end with the launcher."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of the console script."""
    app()
    sys.exit(0)


if __name__ == "__main__":
    main()
