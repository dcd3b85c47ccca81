"""A worker is killed, or stopped, during a transfer: every other one hears whom it lost, within 30 seconds."""

from __future__ import annotations

import json
import os
import signal
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tests.multiprocess import death_worker

from weightbridge.testing.ports import free_port

# One process imports torch, the workers are forked from it: six imports at once would take longer than the test.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.multiprocess.death_worker"])
WORKERS = ("trainer/0", "trainer/1", "tp/0", "tp/1", "tp/2", "solo/0")


def run_job(
    tmp_path: Path, victim: str, how: signal.Signals, heartbeat_timeout: float
) -> tuple[dict[str, dict], float]:
    """Results of the survivors, and when the victim was seen dead or stopped."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    processes: dict[str, BaseProcess] = {}
    try:
        for worker in WORKERS:
            config = {
                "worker": worker, "endpoint": endpoint, "result": str(tmp_path / worker.replace("/", "-")), "scale": 400,
                "victim": worker == victim, "signal": int(how), "heartbeat_timeout": heartbeat_timeout,
            }  # fmt: skip
            processes[worker] = CONTEXT.Process(target=death_worker.main, args=(config,), daemon=True)
            processes[worker].start()
        died_at = _wait_until_gone(processes[victim], how)
        deadline = time.monotonic() + 40
        for worker, process in processes.items():
            if worker != victim:
                process.join(max(0.1, deadline - time.monotonic()))
                assert process.exitcode == 0, f"{worker} hangs"
    finally:
        for process in processes.values():
            if process.is_alive():
                process.kill()
            process.join(10)
    results = {w: json.loads((tmp_path / w.replace("/", "-")).read_text()) for w in WORKERS if w != victim}
    return results, died_at


def _wait_until_gone(process: BaseProcess, how: signal.Signals) -> float:
    give_up = time.monotonic() + 90
    while time.monotonic() < give_up:
        if how is signal.SIGKILL and process.exitcode is not None:
            assert process.exitcode == -signal.SIGKILL
            return time.time()
        if how is signal.SIGSTOP and Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return time.time()
        time.sleep(0.01)
    raise AssertionError("the victim did not reach the second version")


@pytest.mark.multiprocess
@pytest.mark.timeout(150)
@pytest.mark.parametrize("victim", ["trainer/0", "trainer/1", "tp/0", "tp/2"])
def test_a_killed_worker_is_named_on_every_other_one(tmp_path: Path, victim: str) -> None:
    results, died_at = run_job(tmp_path, victim, signal.SIGKILL, heartbeat_timeout=10)
    for worker, result in results.items():
        assert victim in result["causes"], (worker, result)
        assert set(result["causes"]) == {victim}, (worker, result)
        assert victim in result["message"]
        assert result["kind"] in {"WorkerError", "IncompleteUpdateError", "ConnectError"}, (worker, result)
        assert result["at"] - died_at < 30


@pytest.mark.multiprocess
@pytest.mark.timeout(150)
def test_a_stopped_worker_is_named_on_every_other_one(tmp_path: Path) -> None:
    results, stopped_at = run_job(tmp_path, "tp/1", signal.SIGSTOP, heartbeat_timeout=5)
    for worker, result in results.items():
        assert "tp/1" in result["causes"], (worker, result)
        assert result["at"] - stopped_at < 30
