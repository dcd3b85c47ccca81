"""A trainer is stopped in mid-transfer; the others give up on it and start again with another in its place; then the old
one runs on. Nothing of its attempt lands."""

from __future__ import annotations

import json
import os
import signal
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from tests.multiprocess import retry_worker

from weightbridge.testing.ports import free_port

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.multiprocess.death_worker", "tests.multiprocess.retry_worker"])
WORKERS = ("trainer/0", "tp/0", "tp/1", "tp/2", "solo/0")


def start(config: dict[str, object]) -> BaseProcess:
    process = CONTEXT.Process(target=retry_worker.main, args=(config,), daemon=True)
    process.start()
    return process


@pytest.mark.multiprocess
@pytest.mark.timeout(170)
def test_nothing_of_a_stopped_attempt_lands(tmp_path: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    common = {
        "endpoints": [f"tcp://127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"],
        "scale": 400,
        "resumed": str(tmp_path / "resumed"),
    }

    def config(worker: str, sessions: list[int], name: str, victim: bool = False) -> dict[str, object]:
        return {**common, "worker": worker, "sessions": sessions, "victim": victim, "result": str(tmp_path / name)}

    processes = {w: start(config(w, [0, 1], w.replace("/", "-"))) for w in WORKERS}
    victim = start(config("trainer/1", [0], "victim", victim=True))  # trainer/0 hosts the sessions: both need it
    try:
        wait_until_stopped(victim, 90)
        processes["trainer/1 again"] = start(config("trainer/1", [1], "trainer-1"))
        for name in ("trainer/0", "trainer/1 again"):
            processes[name].join(60)
            assert processes[name].exitcode == 0, f"{name} hangs"
        os.kill(victim.pid or 0, signal.SIGCONT)
        victim.join(30)  # it hears that it was given up, or that its connections are gone
        assert victim.exitcode == 0
        (tmp_path / "resumed").touch()
        for name, process in processes.items():
            process.join(30)
            assert process.exitcode == 0, f"{name} hangs"
    finally:
        for process in (*processes.values(), victim):
            if process.is_alive():
                process.kill()
            process.join(10)
    for name in ("tp-0", "tp-1", "tp-2", "solo-0"):
        result = json.loads((tmp_path / name).read_text())
        assert len(result["errors"]) == 1, result  # the first session, and only that, failed
        assert "trainer/1" in result["errors"][0]
        assert result["wrong"] == []
    assert json.loads((tmp_path / "victim").read_text())["errors"]


def wait_until_stopped(process: BaseProcess, seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < give_up, "the victim did not reach its second version"
        time.sleep(0.01)
