"""Measuring: a cluster, a crew for each method on it, updates, figures. Leaves nothing behind.

WeightBridge is measured without a trace and then run once more with one, by a crew of its own, so that tracing costs nothing
where it counts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cluster.crew import Crew, Message
from benchmarks.cluster.netns import WORK_DIR_PREFIX, Counters, Testbed, address_of
from benchmarks.cluster.peers import PEERS, settings
from benchmarks.cluster.predict import machine_costs, plan_of, predict
from benchmarks.cluster.report import Update, node_bytes, parse_cpu, result
from benchmarks.cluster.scenarios import Case, CaseKey, build
from benchmarks.cluster.session import PLAN_FILE
from benchmarks.cluster.tracing import LinkSampler
from weightbridge.plan import Plan, decode_plan
from weightbridge.testing.ports import free_port

__all__ = ["METHODS", "Measured", "Session", "Settings", "measure_case"]

METHODS = ("weightbridge", "broadcast", "p2p", "file", *PEERS)
_PORT = 29700
_LOOPBACK = "127.0.0.1"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """repeats: measured updates, after `warmups` others. trace: one more update of WeightBridge, traced. update_seconds:
    longest one; connect_seconds: to get ready."""

    methods: Sequence[str] = METHODS
    repeats: int = 5
    warmups: int = 1
    shaped: bool = True
    trace: bool = True
    connect_seconds: float = 300.0
    update_seconds: float = 120.0


class Measured(NamedTuple):
    """One method on one case. entry: of `results`. traced: an update with spans and samples."""

    case: Case
    entry: dict[str, Any]
    traced: Update | None


def measure_case(key: CaseKey, settings: Settings) -> Iterator[Measured]:
    """Every method on one cluster, one after the other. Raises TestbedError, CrewError."""
    case = build(key)
    plan: Plan | None = None
    costs = machine_costs()
    with contextlib.ExitStack() as stack:
        testbed = stack.enter_context(Testbed(case.rates_bits)) if settings.shaped else None
        for method in settings.methods:
            found = _measure(case, method, replace(settings, trace=False), testbed)
            traced = None
            if method == "weightbridge" and settings.trace:
                traced = _measure(case, method, replace(settings, warmups=1, repeats=1), testbed).updates[0]
            if settings.shaped and plan is None:
                plan = decode_plan(found.plan) if found.plan else plan_of(case)
            predicted = None if plan is None else predict(case, method, plan, costs)
            entry = result(
                case, method, found.updates, found.memory, found.told, predicted=predicted, traced=traced
            )  # fmt: skip
            yield Measured(case, entry, traced)


class _Found(NamedTuple):
    """plan: WeightBridge's, encoded; empty for others."""

    updates: list[Update]
    memory: dict[str, Message]
    told: Message
    plan: bytes


def _measure(case: Case, method: str, settings: Settings, testbed: Testbed | None) -> _Found:
    prefix = "weightbridge-unshaped-" if testbed is None else WORK_DIR_PREFIX
    work_dir = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        with Crew(work_dir) as crew:
            updates, memory, told = Session(case, method, settings, testbed, crew, work_dir).all()
        plan = work_dir / PLAN_FILE
        return _Found(updates, memory, told, plan.read_bytes() if plan.exists() else b"")
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


class Session:
    """One method on one case: its workers, from their start to their end."""

    def __init__(
        self, case: Case, method: str, settings: Settings, testbed: Testbed | None, crew: Crew, work_dir: Path
    ) -> None:
        self._case, self._method, self._settings = case, method, settings
        self._testbed, self._crew = testbed, crew
        workers = case.topology.workers
        self.names = [w.name for w in workers]
        self.trainers = [workers[i].name for i in case.topology.trainers]
        self.rollouts = [workers[i].name for i in case.topology.rollouts]
        self._work_dir = work_dir

    def all(self) -> tuple[list[Update], dict[str, Message], Message]:
        """Start, connect, warm up, measure, take leave."""
        told = self.start()
        updates = [self._update(version + 1) for version in range(self._settings.warmups + self._settings.repeats)]
        memory = self.ask(self.names, {"kind": "memory"}, "memory", 30)
        self.stop()
        return updates[self._settings.warmups :], memory, told

    def stop(self) -> None:
        """A worker that still polled when its neighbour had left would be told, rightly, that its engine is broken."""
        self.ask(self.names, {"kind": "rest"}, "resting", 60)
        self.ask(self.names, {"kind": "stop"}, "stopped", 60)

    def prepare(self, version: int) -> None:
        """Trainers take on the values of a version."""
        order = {"kind": "prepare", "version": version}
        self.ask(self.trainers, order, "prepared", self._settings.update_seconds)

    def wrong(self, version: int) -> list[str]:
        """Worker and tensor of all that rollout workers do not hold as it should be."""
        order = {"kind": "verify", "version": version}
        checked = self.ask(self.rollouts, order, "verified", self._settings.update_seconds)
        return [f"{name}: {tensor}" for name, c in checked.items() for tensor in c["wrong"]]

    def start(self) -> Message:
        """Returns what trainer rank 0 tells of its connect."""
        shaped = self._testbed is not None
        num_nodes = len(self._case.rates_bits)
        config: Message = {
            "case": self._case.key.to_json(), "method": self._method, "shaped": shaped, "trace": self._settings.trace,
            "hosts": [address_of(i) if shaped else _LOOPBACK for i in range(num_nodes)],
            "port": _PORT if shaped else free_port(), "token": secrets.token_hex(16), "work_dir": str(self._work_dir),
            "seconds": self._settings.update_seconds, "connect_seconds": self._settings.connect_seconds,
            "epoch": time.monotonic(),
        }  # fmt: skip
        environ = (
            os.environ
            | (settings() if self._method in PEERS else {})
            | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"}
        )
        for name in self.names:
            prefix = [] if self._testbed is None else self._testbed.command_prefix(self._case.node_of(name))
            self._crew.start(name, prefix, config | {"worker": name}, environ)
        told = self._crew.gather(self.names, "ready", self._settings.connect_seconds)
        self.ask(self.names, {"kind": "settle"}, "settled", self._settings.connect_seconds)
        return {k: v for k, v in told[self.trainers[0]].items() if k != "kind"}

    def _update(self, version: int) -> Update:
        seconds = self._settings.update_seconds
        self.prepare(version)
        links, cpu, own = self._links(), parse_cpu(_stat()), self._own_ticks()
        sampler = LinkSampler(self._links)
        with sampler if self._settings.trace else contextlib.nullcontext():
            done = self.ask(self.names, {"kind": "go", "version": version}, "done", seconds)
        links_after, cpu_after, own_after = self._links(), parse_cpu(_stat()), self._own_ticks()
        load = os.getloadavg()[0]
        wrong = self.wrong(version)
        update = Update(
            stalls={name: (d["begin"], d["end"]) for name, d in done.items()},
            links=None if links is None or links_after is None else node_bytes(links, links_after),
            cpu_busy=(cpu_after.busy - cpu.busy) / max(cpu_after.total - cpu.total, 1),
            own_cpu_seconds=(own_after - own) / os.sysconf("SC_CLK_TCK"),
            load_average=load,
            wrong=tuple(wrong),
            samples=sampler.samples,
            spans={name: d["trace"] for name, d in done.items() if d.get("trace") is not None},
        )
        ratio = update.ewtt_seconds / self._case.t_min_seconds
        print(
            f"  {self._case.key.scenario} {self._case.key.trainer_nodes}x{self._case.key.replicas} {self._method} version "
            f"{version}: EWTT {update.ewtt_seconds:.3f} s" + (f", {ratio:.3f} T_min" if self._testbed is not None else "")
            + (", traced" if self._settings.trace else "") + f", load {load:.1f}"
            + (f", WRONG: {update.wrong[:3]}" if update.wrong else ""),
            file=sys.stderr,
        )  # fmt: skip
        return update

    def ask(self, names: Sequence[str], order: Message, answer: str, seconds: float) -> dict[str, Message]:
        self._crew.tell(names, order)
        return self._crew.gather(names, answer, seconds)

    def _links(self) -> dict[int, Counters] | None:
        if self._testbed is None:
            return None
        first = {self._case.node_of(name): name for name in reversed(self.names)}
        return {node: self._testbed.counters(self._crew.pid(name)) for node, name in sorted(first.items())}

    def _own_ticks(self) -> int:
        """utime and stime of all worker processes."""
        total = 0
        for name in self.names:
            fields = Path(f"/proc/{self._crew.pid(name)}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total


def _stat() -> str:
    return Path("/proc/stat").read_text()
