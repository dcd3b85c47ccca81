"""Runs one cell with real processes, and judges what its workers wrote down.

Six processes, forked from one that has imported torch: two trainers, an engine of three, an engine of one. They send versions
1 to 4, with the fault in the second. Where that ends the session, new trainers start, find the engines that are left, and
send two more. A stopped process goes on after three times the deadline, memory comes back after a while, a cut link stays cut
unless a trainer sits behind it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.faults import cell_worker
from tests.faults.cells import ENGINES, WORKERS, Cell, Outcome

from weightbridge.testing.ports import free_port

__all__ = ["DEADLINE_SECONDS", "STOPPED_SECONDS", "Lane", "run_cell"]

DEADLINE_SECONDS = cell_worker.HEARTBEAT_TIMEOUT_SECONDS
STOPPED_SECONDS = 3 * DEADLINE_SECONDS
TOLD_SECONDS = cell_worker.UPDATE_TIMEOUT_SECONDS + 2 * DEADLINE_SECONDS
"""Within which every survivor must have been told: the update's deadline, and silence noticed twice."""
_MEMORY_SECONDS = 4.0
_SETTLING_SECONDS = 2.0  # for the victim to say whether it can go on
_CELL_SECONDS = 90.0
_FIRST, _SECOND = (1, 2, 3, 4), (5, 6)
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.faults.cell_worker"])
_TRAINERS = ("trainer/0", "trainer/1")


class Lane:
    """Where a cell runs: on loopback, or with each worker in a network namespace of its own.

    nodes: numbers of the emulated cluster's nodes, one for each of WORKERS; empty for loopback.
    """

    def __init__(self, nodes: tuple[int, ...] = (), addresses: tuple[str, ...] = ()) -> None:
        self._nodes = nodes
        self._addresses = addresses

    def place(self, worker: str) -> dict[str, str]:
        """netns, data_host and node of a worker."""
        i = WORKERS.index(worker)
        if not self._nodes:
            return {"netns": "", "data_host": "127.0.0.1", "node": worker.split("/")[0]}
        return {"netns": f"wb-n{self._nodes[i]}", "data_host": self._addresses[i], "node": f"node-{i}"}

    def link(self, worker: str, state: str) -> None:
        """Take a worker's link down or up, at the switch: its own end sees nothing but silence."""
        port = f"p{self._nodes[WORKERS.index(worker)]}"
        subprocess.run(["ip", "-n", "wb-sw", "link", "set", port, state], check=True, timeout=10, capture_output=True)

    def restore(self) -> None:
        for worker in WORKERS if self._nodes else ():
            self.link(worker, "up")


def run_cell(cell: Cell, lane: Lane) -> Outcome:
    """Blocks for 3 to 40 seconds. Never raises for what a worker does: it is in the outcome."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weightbridge-cell-") as folder:
        run = _Run(cell, lane, Path(folder))
        try:
            run.go()
        finally:
            run.end()
            lane.restore()
        outcome = run.judge()
    outcome.took_seconds = time.monotonic() - begun
    return outcome


class _Run:
    def __init__(self, cell: Cell, lane: Lane, folder: Path) -> None:
        self.cell, self.lane, self.folder = cell, lane, folder
        self.processes: dict[str, BaseProcess] = {}
        self.hung: list[str] = []
        self.again = False  # a second session was needed
        self.give_up = time.monotonic() + _CELL_SECONDS
        self.endpoint = f"tcp://{lane.place('trainer/0')['data_host']}:{free_port()}"
        self._struck_at: float | None = None
        self._todo: list[tuple[float, Any]] = []

    # --- the course of it -----------------------------------------------------------------------------------------------------

    def go(self) -> None:
        for worker in WORKERS:
            self._start(worker, worker, tuple(ENGINES), _FIRST)
        self._until(lambda: self._ended(_TRAINERS))
        if self._session_over():
            self.again = True
            if self.cell.kind == "cut" and self.cell.victim in _TRAINERS:
                self.lane.link(self.cell.victim, "up")
            self._until(lambda: not self._todo)
            settled = time.monotonic() + _SETTLING_SECONDS
            self._until(lambda: self.lost_engine() is not None or time.monotonic() > settled)
            left = tuple(e for e in ENGINES if e != self.lost_engine())
            for worker in _TRAINERS:
                self._start(f"{worker} again", worker, left, _SECOND)
            self._until(lambda: self._ended([f"{w} again" for w in _TRAINERS]))
        self._until(lambda: not self._todo)
        (self.folder / "stop").touch()
        self._until(lambda: self._ended(self.processes))

    def lost_engine(self) -> str | None:
        """The engine that cannot take part again: one of its workers is the victim of a fault that lasts."""
        side = self.cell.victim.split("/")[0]
        lasts = self.cell.kind in ("kill", "stop", "cut")
        wrote = any(line["what"] == "out" for line in self.diary(self.cell.victim))
        return side if side in ENGINES and (lasts or wrote) else None

    def end(self) -> None:
        for name, process in self.processes.items():
            if process.is_alive():
                self.hung.append(name)
                process.kill()
            process.join(10)

    def _start(self, name: str, worker: str, engines: tuple[str, ...], versions: tuple[int, ...]) -> None:
        config = {
            "worker": worker, "cell": self.cell.to_json(), "endpoint": self.endpoint, "engines": engines,
            "diary": str(self._path(name)), "folder": str(self.folder), "strikes": name == worker,
            "versions": versions if worker in _TRAINERS else (*_FIRST, *_SECOND), **self.lane.place(worker),
        }  # fmt: skip
        self.processes[name] = _CONTEXT.Process(target=cell_worker.main, args=(config,), daemon=True)
        self.processes[name].start()

    def _until(self, done: Any) -> None:
        """Waits, looking after the fault meanwhile: what has to be done from outside, and what has to be undone."""
        while not done() and time.monotonic() < self.give_up:
            if self._struck_at is None and (self.folder / "struck").exists():
                self._struck_at = float((self.folder / "struck").read_text().split()[0])
                self._struck()
            for item in [x for x in self._todo if time.monotonic() >= x[0]]:
                self._todo.remove(item)
                item[1]()
            time.sleep(0.01)

    def _struck(self) -> None:
        pid = self.processes[self.cell.victim].pid
        match self.cell.kind:
            case "cut":
                self.lane.link(self.cell.victim, "down")
                (self.folder / "cut").touch()
            case "stop":
                pids = [pid, *(self.processes[name].pid for name in self.cell.beside)]
                for other in pids[1:]:
                    _signal(other, signal.SIGSTOP)
                go_on = time.monotonic() + STOPPED_SECONDS
                self._todo += [(go_on, lambda p=p: _signal(p, signal.SIGCONT)) for p in pids]
            case "full memory":
                self._todo.append((time.monotonic() + _MEMORY_SECONDS, lambda: _give_memory(pid)))

    def _ended(self, names: Any) -> bool:
        return all(not self.processes[n].is_alive() for n in names)

    def _session_over(self) -> bool:
        """The trainers did not come to the end of their versions."""
        return any(
            all(line.get("version") != _FIRST[-1] for line in self.diary(w) if line["what"] == "reported")
            for w in _TRAINERS
        )

    @staticmethod
    def _workers_of(engine: str | None) -> list[str]:
        return [] if engine is None else [f"{engine}/{r}" for r in range(ENGINES[engine])]

    def _path(self, name: str) -> Path:
        return self.folder / name.replace("/", "-").replace(" ", "-")

    def diary(self, name: str) -> list[dict[str, Any]]:
        path = self._path(name)
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    # --- what it came to --------------------------------------------------------------------------------------------------

    def judge(self) -> Outcome:
        outcome = Outcome(cell=self.cell, workers={name: self.diary(name) for name in self.processes})
        wrong = outcome.wrong
        wrong += [f"{name} hangs" for name in self.hung]
        if self._struck_at is None:
            outcome.word = "nothing to strike" if self.cell.kind == "corrupted byte" else "not struck"
            if outcome.word == "not struck":
                wrong.append("the fault did not strike: the cell shows nothing")
            return outcome
        self._judge_words(outcome)
        self._judge_weights(outcome)
        outcome.word = self._word(outcome)
        return outcome

    def _judge_words(self, outcome: Outcome) -> None:
        """Who was told what, and when. Nobody but the culprit may be blamed."""
        victim, said = self.cell.victim, (self.folder / "struck").read_text().split()
        culprits = {victim, *said[1:]}
        latest = 0.0
        for name, lines in outcome.workers.items():
            if name == victim or name.endswith("again"):
                continue
            for line in lines:
                if line["what"] in ("out", "failed", "told", "poisoned"):
                    latest = max(latest, line["at"])
                    blamed = set(line["causes"]) - culprits
                    if blamed:
                        outcome.wrong.append(f"{name} blames {', '.join(sorted(blamed))}: {line['message']}")
                    if not line["causes"]:
                        outcome.wrong.append(f"{name} is told of no culprit: {line['message']}")
        outcome.wrong += [
            f"{name} crashed: {line['error']}"
            for name, lines in outcome.workers.items() for line in lines
            if line["what"] == "crashed" and not (name == victim and self.cell.kind == "full memory")
        ]  # fmt: skip
        if latest:
            outcome.seconds = latest - (self._struck_at or 0.0)
            if outcome.seconds > TOLD_SECONDS:
                outcome.wrong.append(
                    f"the last survivor was told after {outcome.seconds:.1f} s, limit {TOLD_SECONDS:.0f} s"
                )

    def _judge_weights(self, outcome: Outcome) -> None:
        final = _SECOND[-1] if self.again else _FIRST[-1]
        lost = self.lost_engine()
        for name, lines in outcome.workers.items():
            for line in lines:
                if line["what"] == "mixture":
                    outcome.wrong.append(f"{name} serves a mixture as version {line['version']}: {line['tensors'][:2]}")
            if name.startswith("trainer") or name.split("/")[0] == lost:
                continue
            holds = next((line for line in lines if line["what"] == "holds"), None)
            if holds is None or (holds["version"], holds["state"]) != (final, "ready"):
                outcome.wrong.append(f"{name} holds {holds}, expected version {final}, ready")
        for engine in ENGINES:
            steps: dict[int, set[int]] = {}
            for worker in self._workers_of(engine):
                for line in outcome.workers[worker]:
                    if line["what"] == "installed" and line["version"] <= _FIRST[-1]:
                        steps.setdefault(line["version"], set()).add(line["polls"])
            for version, polls in steps.items():
                if len(polls) > 1:
                    outcome.wrong.append(f"{engine} installed version {version} at different steps: {sorted(polls)}")

    def _word(self, outcome: Outcome) -> str:
        lines = [line for w in _TRAINERS for line in outcome.workers[w]]
        reports = [line for line in lines if line["what"] == "reported"]
        if self.again:
            return "session over, joined the next"
        if any("lost" in r["engines"].values() or len(r["engines"]) < len(ENGINES) for r in reports):
            return "engine out, the rest goes on"
        if any(line["what"] == "failed" for line in lines):
            return "version given up, next whole"
        return "sent again" if any(r["attempts"] > 1 for r in reports) else "unharmed"


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        os.kill(pid, number)


def _give_memory(pid: int | None) -> None:
    if pid is not None:
        try:
            _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (hard, hard))
        except ProcessLookupError:
            pass  # it has ended meanwhile
