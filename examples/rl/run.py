"""One run from start to verdict: `python -m examples.rl [options]`. Starts the processes, watches them, judges, draws."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from examples.rl import report
from examples.rl.config import METHODS, RunConfig
from examples.rl.lifetime import clean_up_when_terminated
from weightbridge.cli.demo.prepare import cache_dir, prepare_checkpoint
from weightbridge.testing.ports import free_port

__all__ = ["RunFailed", "add_options", "config_of", "main", "run"]

ROOT = Path(__file__).parents[2]
ENGINE_PYTHON = ROOT / ".venvs" / "vllm" / "bin" / "python"
_CLOSE_SECONDS = 30.0


class RunFailed(RuntimeError):
    """A process of the run ended badly, or fell silent. The message ends with the last lines of its log."""


def main(arguments: Sequence[str] | None = None) -> int:
    clean_up_when_terminated()
    parser = argparse.ArgumentParser(prog="python -m examples.rl", description=__doc__)
    add_options(parser)
    parser.add_argument("--name", default="rl", help="of the files written: NAME.json and NAME.svg")
    parser.add_argument("--json", action="store_true", help="the document on stdout as well")
    options = parser.parse_args(arguments)
    try:
        document = run(config_of(options), engine_python=options.engine_python, on_record=_tell)
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(document), indent=1)
    (options.out / f"{options.name}.json").write_bytes(text + b"\n")
    report.draw({options.name: document}, options.out / f"{options.name}.svg")
    print(report.summary(document), file=sys.stderr)
    print(f"written: {options.out / options.name}.json and .svg", file=sys.stderr)
    if options.json:
        print(text.decode())
    return 0 if document["verdict"]["passed"] else 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of a run, named as the fields of RunConfig."""
    add = parser.add_argument
    add("--steps", type=int, default=50)
    add("--stage-send", action="store_true", help="the trainer goes on once its weights are copied to host memory")
    add("--stage-receive", action="store_true", help="the engine goes on until all of a version has arrived")
    add(
        "--same-node",
        action="store_true",
        help="shared memory between trainers and engine; default: as on two machines",
    )
    add("--method", choices=METHODS, default="weightbridge", help="how weights travel")
    add("--ahead", type=int, choices=(0, 1), default=0, help="batches sampled ahead, while trainers train")
    add("--trainers", type=int, default=2, dest="num_trainers", help="FSDP2 ranks")
    add("--completions", type=int, default=8, help="of one prompt; must divide by the number of trainers")
    add("--prompts-per-step", type=int, default=1)
    add("--max-tokens", type=int, default=16)
    add("--learning-rate", type=float, default=1e-4, help="0 is the control: nothing is learnt")
    add("--skip-updates", type=int, nargs="*", default=(), metavar="STEP", help="send no weights after these steps")
    add("--evaluate-every", type=int, default=10)
    add("--evaluate-completions", type=int, default=8)
    add("--seed", type=int, default=0)
    add("--checkpoint", type=Path, help="a Hugging Face folder; default: SmolLM2-135M-Instruct, fetched once")
    add("--engine-python", type=Path, default=ENGINE_PYTHON, help="the interpreter of vLLM's environment")
    add("--out", type=Path, default=Path("build/rl"), help="folder for the document and the plot")


def config_of(options: argparse.Namespace) -> RunConfig:
    """The configuration of one run, with a scratch folder of its own. Raises RunFailed for options that cannot be."""
    if options.completions % options.num_trainers:
        raise RunFailed(f"--completions {options.completions} does not divide by --trainers {options.num_trainers}")
    checkpoint = options.checkpoint or prepare_checkpoint(cache_dir(), lambda p: print(p.text, file=sys.stderr))
    own = {"checkpoint", "work_dir", "launcher", "endpoint", "broadcast_port", "skip_updates"}
    taken = {f: getattr(options, f) for f in RunConfig.__struct_fields__ if f not in own and hasattr(options, f)}
    return RunConfig(
        checkpoint=str(checkpoint.resolve()), work_dir=tempfile.mkdtemp(prefix="weightbridge-rl-"),
        launcher=os.getpid(), endpoint=f"tcp://127.0.0.1:{free_port()}", broadcast_port=free_port(),
        skip_updates=tuple(options.skip_updates), **taken,
    )  # fmt: skip


def run(
    config: RunConfig, *, engine_python: Path = ENGINE_PYTHON, on_record: Any = lambda record: None
) -> dict[str, Any]:
    """The document of one run. Blocks; leaves no process behind, and its scratch folder only when it failed.

    on_record: told of each record of trainer 0 as it comes. Raises RunFailed.
    """
    if not engine_python.exists():
        raise RunFailed(
            f"{engine_python} does not exist; `make rl` makes vLLM's environment, or name one by --engine-python"
        )
    work = Path(config.work_dir)
    config.write(work / "config.json")
    began = time.monotonic()
    commands = {"engine": [str(engine_python), "-m", "examples.rl.engine", str(work / "config.json")]}
    for rank in range(config.num_trainers):
        module = [sys.executable, "-m", "examples.rl.trainer", str(work / "config.json"), str(rank)]
        commands[f"trainer-{rank}"] = module
    load_before, cpu_before = os.getloadavg()[0], _cpu_seconds_of_children()
    with _processes(commands, work, _environ(config)) as processes:
        records = _watch(config, processes, on_record)
    document = report.document(
        config, records, seconds=time.monotonic() - began, load_before=load_before,
        cpu_seconds=_cpu_seconds_of_children() - cpu_before,
    )  # fmt: skip
    shutil.rmtree(work, ignore_errors=True)
    return document


def _environ(config: RunConfig) -> dict[str, str]:
    """Collectives on loopback only, no way out to a model hub, the trainers' threads sharing the CPUs."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    cpus = len(os.sched_getaffinity(0))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(max(1, cpus // config.num_trainers)),
        "GLOO_SOCKET_IFNAME": loopback,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextmanager
def _processes(
    commands: dict[str, list[str]], work: Path, environ: dict[str, str]
) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Children with a log each, ended with their descendants whatever happens."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (work / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    cwd=ROOT,
                    start_new_session=True,
                )
        yield processes
    finally:
        for process in processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_CLOSE_SECONDS)


def _watch(config: RunConfig, processes: dict[str, subprocess.Popen[bytes]], on_record: Any) -> list[dict[str, Any]]:
    """Until all have ended well. Raises RunFailed when one ends badly, or no record comes for too long."""
    records: list[dict[str, Any]] = []
    heard, offset = time.monotonic(), 0
    patience = config.start_seconds + config.answer_seconds + config.update_seconds
    while True:
        ended = {name: process.poll() for name, process in processes.items()}
        if config.records.exists():
            with config.records.open("rb") as file:
                file.seek(offset)
                *lines, _ = file.read().split(b"\n")
            offset += sum(len(line) + 1 for line in lines)
            for line in lines:
                records.append(msgspec.json.decode(line))
                on_record(records[-1])
                heard = time.monotonic()
        for name, status in ended.items():
            if status:
                raise RunFailed(f"{name} ended with status {status}: {_last_words(config, name)}")
        if all(status == 0 for status in ended.values()):
            return records
        if time.monotonic() - heard > patience:
            alive = ", ".join(name for name, status in ended.items() if status is None)
            raise RunFailed(f"nothing came for {patience:.0f} s while {alive} ran; logs are in {config.work_dir}")
        time.sleep(0.1)


def _cpu_seconds_of_children() -> float:
    """Of those that have ended and been waited for: says what a run took on a machine that others use as well."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _last_words(config: RunConfig, name: str) -> str:
    log = Path(config.work_dir) / f"{name}.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    return f"its log {log} ends with\n" + "\n".join(text.splitlines()[-25:])


def _tell(record: dict[str, Any]) -> None:
    print(report.line(record), file=sys.stderr, flush=True)
