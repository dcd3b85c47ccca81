"""Trainers and engines started by torchrun, as the guide on launching shows: every engine ends with the last version's bits."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightbridge.testing.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
SECONDS = 120


def torchrun(size: int, script: str, folder: Path, **environ: str) -> subprocess.Popen[bytes]:
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **environ,
    }
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--master-port", str(free_port()),
        "-m", f"tests.integration.frameworks.{script}", str(folder),
    ]  # fmt: skip
    log = (folder / f"log {script} {environ.get('WB_ENGINE', '')}").open("wb")
    return subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT, cwd=folder)


def test_trainers_and_engines_under_torchrun(tmp_path: Path) -> None:
    where = {
        "WB_ENDPOINT": f"tcp://127.0.0.1:{free_port()}",
        "WB_TOKEN": secrets.token_hex(32),
        "WB_DATA_HOST": "127.0.0.1",
    }
    started = [
        torchrun(3, "torchrun_engine", tmp_path, WB_ENGINE="a", **where),
        torchrun(1, "torchrun_engine", tmp_path, WB_ENGINE="b", **where),
        torchrun(2, "torchrun_trainer", tmp_path, **where),
    ]
    give_up = time.monotonic() + SECONDS
    try:
        for process in started:
            process.wait(max(0.1, give_up - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in started:
            process.terminate()  # torchrun ends its workers with it
        for process in started:
            process.wait(30)
    text = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(tmp_path.glob("log *")))
    assert [p.returncode for p in started] == [0, 0, 0], text
    seen = {f.name: f.read_text() for f in tmp_path.iterdir() if not f.name.startswith("log ")}
    assert seen == {"trainer0": "3", "trainer1": "3", "a0": "3 []", "a1": "3 []", "a2": "3 []", "b0": "3 []"}
