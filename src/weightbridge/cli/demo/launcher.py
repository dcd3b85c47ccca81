"""The demo from its options to its verdict: prepare, start, gather, judge."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from weightbridge.cli.demo.config import DemoConfig, EngineConfig, Fault
from weightbridge.cli.demo.folder import CheckpointFolder, choose_tensor_parallel, inspect_folder
from weightbridge.cli.demo.messages import Compare, Failed, Progress, Stop
from weightbridge.cli.demo.prepare import MODEL_NAME, cache_dir, cached_checkpoint, prepare_checkpoint
from weightbridge.cli.demo.record import DemoRecord
from weightbridge.cli.demo.supervisor import Event, Exited, Supervisor, how_it_ended
from weightbridge.cli.demo.verdict import Verdict, judge
from weightbridge.errors import InternalError, UsageError, WeightBridgeError, WorkerError
from weightbridge.testing.ports import free_port

__all__ = [
    "DEFAULT_ANSWER",
    "DEFAULT_LEARNING_RATE",
    "DEFAULT_PROMPT",
    "DemoOptions",
    "DemoResult",
    "Observer",
    "WorkersFailed",
    "run_demo",
]

DEFAULT_PROMPT = "What is the capital of France?"
DEFAULT_ANSWER = "The capital of France is Lyon."
DEFAULT_LEARNING_RATE = 1e-4
"""Changes the answer in two steps. At 3e-5 most of an fp32 update is lost when the weights are rounded to bf16."""

_HOST = "127.0.0.1"
_GRACE_SECONDS = 30.0
"""After a first failure, for the others to come to know of it: the library promises no more than this."""
_CLOSE_SECONDS = 30.0
_NUM_TRAINERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the command line says. Fields after `debug` are for tests of the demo's own failures."""

    checkpoint: Path | None = None
    steps: int = 3
    learning_rate: float = DEFAULT_LEARNING_RATE
    prompt: str = DEFAULT_PROMPT
    answer: str = DEFAULT_ANSWER
    max_new_tokens: int = 12
    bandwidth_gbit: float = 10.0
    tensor_parallel: int | None = None
    port: int | None = None
    slot_mib: int = 32
    connect_timeout_seconds: float = 120.0
    update_timeout_seconds: float = 120.0
    debug: bool = False
    fault: Fault | None = None
    engine_missing: str = ""
    loader_wants: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """seconds: wall clock by phase, in order."""

    name: str
    folder: CheckpointFolder
    record: DemoRecord
    verdict: Verdict
    seconds: dict[str, float]


class Observer:
    """What the launcher tells of a run as it goes; the display overrides what it shows."""

    def progress(self, progress: Progress) -> None:
        """Preparation goes on."""

    def started(self, name: str, folder: CheckpointFolder, config: DemoConfig) -> None:
        """The workers are about to start."""

    def changed(self, record: DemoRecord, worker: str, message: object) -> None:
        """A message of a worker is in the record."""

    def finished(self, result: DemoResult) -> None:
        """The verdict is there."""


class WorkersFailed(WorkerError):
    """The run failed. Fields: `causes` (worker -> what it said or how it ended), `dead` (workers that ended by
    themselves), `log_dir`, `usage` (the first failure is the caller's), `tracebacks` (worker -> text).
    """

    dead: tuple[str, ...]
    log_dir: str
    usage: bool
    tracebacks: dict[str, str]


def run_demo(options: DemoOptions, observer: Observer) -> DemoResult:
    """Run the whole demo. Blocks; leaves no process behind, and its scratch folder only when it failed.

    Raises UsageError (an option is wrong), SpecError (the checkpoint is damaged), PreparationError, WorkersFailed.
    """
    clock = _Clock()
    _check_options(options)
    checkpoint = options.checkpoint or _own_checkpoint(observer)
    name = MODEL_NAME if options.checkpoint is None else checkpoint.resolve().name
    folder = inspect_folder(checkpoint)
    degree = choose_tensor_parallel(folder.dims, options.tensor_parallel)
    port = _port(options.port)
    _require_packages("transformers")
    work_dir = Path(tempfile.mkdtemp(prefix="weightbridge-demo-"))
    try:
        config = _config(options, folder, degree, port, work_dir)
        clock.mark("prepare")
        observer.started(name, folder, config)
        record = _run_workers(config, observer, clock)
        result = DemoResult(name=name, folder=folder, record=record, verdict=judge(record), seconds=clock.seconds)
        observer.finished(result)
    except WorkersFailed:
        raise  # its message names the logs
    except BaseException:
        shutil.rmtree(work_dir, ignore_errors=True)
        raise
    shutil.rmtree(work_dir, ignore_errors=True)
    return result


def _own_checkpoint(observer: Observer) -> Path:
    found = cached_checkpoint(cache_dir())
    if found is None:
        _require_packages("pip", "transformers", "gguf", "accelerate")
        found = prepare_checkpoint(cache_dir(), observer.progress)
    return found


def _require_packages(*names: str) -> None:
    """Raise UsageError for those that this interpreter lacks. Looks for them without importing any."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the demo needs the package{'s' if len(missing) > 1 else ''} {', '.join(missing)}, which {sys.executable} "
            f"lacks; install weightbridge-rl[demo] into it"
        )


class _Clock:
    """Seconds spent by phase."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """The phase ends now, where it has not ended before."""
        if phase not in self.seconds:
            now = time.monotonic()
            self.seconds[phase], self._last = round(now - self._last, 2), now


def _check_options(options: DemoOptions) -> None:
    positive = {
        "--steps": options.steps,
        "--learning-rate": options.learning_rate,
        "--max-new-tokens": options.max_new_tokens,
        "--bandwidth": options.bandwidth_gbit,
        "--slot-mib": options.slot_mib,
        "--connect-timeout": options.connect_timeout_seconds,
        "--update-timeout": options.update_timeout_seconds,
    }
    for name, value in positive.items():
        if not value > 0:
            raise UsageError(f"{name} {value}: expected a number above 0")
    if not options.prompt.strip() or not options.answer.strip():
        raise UsageError("--prompt and --answer: expected some text, found none")


def _port(requested: int | None) -> int:
    """A TCP port of the loopback address that is free now. Raises UsageError when the requested one is not."""
    if requested is not None and not 0 < requested < 65536:
        raise UsageError(f"--port {requested}: expected a number from 1 to 65535")
    if requested is None:
        return free_port(_HOST)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, requested))
        except OSError as error:
            raise UsageError(
                f"--port {requested}: cannot be bound on {_HOST} ({error.strerror}); end the process that holds it, "
                f"name another port or leave the option out"
            ) from None
    return requested


def _config(options: DemoOptions, folder: CheckpointFolder, degree: int, port: int, work_dir: Path) -> DemoConfig:
    engines = (
        EngineConfig(name=f"tp{degree}", num_workers=degree, node="rollout-a"),
        EngineConfig(name="single", num_workers=1, node="rollout-b"),
    )
    names = tuple(engine.name for engine in engines)
    if options.engine_missing and options.engine_missing not in names:
        raise UsageError(f"--engine-missing {options.engine_missing}: expected one of {', '.join(names)}")
    config = DemoConfig(
        checkpoint=str(folder.path.resolve()),
        work_dir=str(work_dir),
        endpoint=f"tcp://{_HOST}:{port}",
        num_trainers=_NUM_TRAINERS,
        engines=tuple(engine for engine in engines if engine.name != options.engine_missing),
        expected_engines=names,
        steps=options.steps,
        learning_rate=options.learning_rate,
        prompt=options.prompt,
        answer=options.answer,
        max_new_tokens=options.max_new_tokens,
        bandwidth=options.bandwidth_gbit * 1e9 / 8,
        slot_bytes=options.slot_mib << 20,
        connect_timeout_seconds=options.connect_timeout_seconds,
        update_timeout_seconds=options.update_timeout_seconds,
        debug=options.debug,
        fault=options.fault,
        loader_wants=options.loader_wants,
    )
    if options.fault is not None and options.fault.worker not in config.workers:
        raise UsageError(f"--fail names worker {options.fault.worker!r}; expected one of {', '.join(config.workers)}")
    return config


def _run_workers(config: DemoConfig, observer: Observer, clock: _Clock) -> DemoRecord:
    work_dir = Path(config.work_dir)
    config_path = work_dir / "config.json"
    config.write(config_path)
    record = DemoRecord(config=config)
    with Supervisor(work_dir / "logs") as supervisor:
        run = _Run(config, record, supervisor, observer, clock)
        for worker in config.workers:
            arguments = [str(config_path), worker]
            supervisor.start(worker, "weightbridge.cli.demo.worker", arguments, _worker_environ(os.environ))
        run.gather()
        run.close()
    return record


def _worker_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """One compute thread each, no way out to a model hub, collectives on loopback only."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {
        **environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


class _Run:
    """The launcher's part while workers run: hear, pass on, notice who is gone."""

    def __init__(
        self, config: DemoConfig, record: DemoRecord, supervisor: Supervisor, observer: Observer, clock: _Clock
    ) -> None:
        self._config, self._record, self._supervisor = config, record, supervisor
        self._observer, self._clock = observer, clock
        self._compared = False
        self._ended: dict[str, int] = {}
        self._leaving: set[str] = set()

    def gather(self) -> None:
        """Until everything is reported. Raises WorkersFailed when a worker fails, ends or all fall silent."""
        self._until(lambda: self._record.complete, self._silence_seconds(), "to report")
        self._clock.mark("reference")

    def close(self) -> None:
        """Stop the engines, then the trainers: nobody is to meet a peer that has left."""
        for side in (self._record.engine_workers, self._config.trainers):
            for worker in side:
                self._supervisor.send(worker, Stop())
            self._leaving |= set(side)
            self._until(self._leavers_are_gone, _CLOSE_SECONDS, "to close")
        self._clock.mark("close")

    def _leavers_are_gone(self) -> bool:
        return self._leaving <= set(self._ended)

    def _until(self, done: Callable[[], bool], silence_seconds: float, what: str) -> None:
        """Take in events until `done`. Only workers that were told to leave may end, and only well."""
        heard = time.monotonic()
        while not done():
            events = self._supervisor.events()
            if events:
                heard = time.monotonic()
            self._take(events)
            if self._record.failures or any(code or w not in self._leaving for w, code in self._ended.items()):
                self._fail()
            if time.monotonic() - heard > silence_seconds:
                raise self._silence(silence_seconds, what)

    def _silence(self, seconds: float, what: str) -> WorkersFailed:
        alive = self._supervisor.alive
        return WorkersFailed(
            f"no worker said anything for {seconds:.0f} s while the demo waited for {', '.join(alive)} {what}",
            causes={worker: f"was last seen {self._record.phases.get(worker, 'starting')}" for worker in alive},
            dead=(),
            log_dir=str(Path(self._config.work_dir) / "logs"),
            usage=False,
            tracebacks={},
        )

    def _take(self, events: list[Event]) -> None:
        for worker, message in events:
            if isinstance(message, Exited):
                self._ended[worker] = message.returncode
                continue
            self._record.apply(worker, message)
            self._observer.changed(self._record, worker, message)
            self._mark_phase()
        answers = self._record.final_answers
        if answers is not None and not self._compared:
            self._compared = True
            self._supervisor.send(self._config.trainers[0], Compare(answers=answers))

    def _mark_phase(self) -> None:
        record = self._record
        if all((-1, engine.name) in record.answers for engine in self._config.engines):
            self._clock.mark("start")
        if record.plan is not None:
            self._clock.mark("connect")
        for version in range(1, self._config.steps + 1):
            if version in record.updated:
                self._clock.mark(f"version {version}")
        if record.final_answers is not None:
            self._clock.mark("answers")

    def _silence_seconds(self) -> float:
        return 60.0 + max(self._config.connect_timeout_seconds, self._config.update_timeout_seconds)

    def _fail(self) -> None:
        """Hear the survivors out, then raise what all of them said. After the work is done there is nothing to hear."""
        deadline = time.monotonic() + (0.0 if self._leaving else _GRACE_SECONDS)
        while time.monotonic() < deadline and set(self._supervisor.alive) - set(self._record.failures):
            self._take(self._supervisor.events())
        raise _failure(self._config, self._record, self._ended)


def _failure(config: DemoConfig, record: DemoRecord, ended: dict[str, int]) -> WeightBridgeError:
    """One error for the whole run: it begins with who died, or else with who failed first."""
    failures: dict[str, Failed] = record.failures
    dead = tuple(name for name in ended if name not in failures)
    causes = {name: how_it_ended(ended[name]) for name in dead}
    causes |= {name: f"{failed.kind}: {failed.text}" for name, failed in failures.items()}
    silent = [worker for worker in config.workers if worker not in causes]
    if not record.complete:
        causes |= {w: f"said nothing of it within {_GRACE_SECONDS:.0f} s ({record.phases.get(w)})" for w in silent}
    if not causes:
        return InternalError("the demo failed and no worker did")
    first = next(iter(causes))
    return WorkersFailed(
        f"{first} {causes[first]}" if first in dead else f"{first} failed: {failures[first].text}",
        causes=causes,
        dead=dead,
        log_dir=str(Path(config.work_dir) / "logs"),
        usage=not dead and failures[first].usage if first in failures else False,
        tracebacks={name: failed.traceback for name, failed in failures.items()},
    )
