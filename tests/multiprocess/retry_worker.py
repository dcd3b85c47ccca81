"""One worker of the toy job; when its session fails it takes part in a second one. Run by test_stopped_sender.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.multiprocess import toy_job as toy
from tests.multiprocess.death_worker import ENGINES, die_during

from weightbridge.coordinator import Options, ReceiverAdapter, SenderAdapter
from weightbridge.errors import WeightBridgeError

FIRST, SECOND, STALE = 1, 7, 2  # versions: before the stop, of the second session, and the one that was stopped


def main(config: dict[str, Any]) -> None:
    """config: worker, endpoints (of the two sessions), sessions (which of them it takes part in), scale, victim, result,
    resumed (a file that appears when the stopped one has been let go on and has ended)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    side, rank = config["worker"].split("/")
    spec = toy.checkpoint_spec(scale=config["scale"])
    worker = toy.TrainerShard(spec, int(rank), 2) if side == "trainer" else toy.engine_worker(spec, side, int(rank))
    errors = []
    for session in config["sessions"]:
        try:
            take_part(config, session, side, int(rank), spec, worker)
        except WeightBridgeError as error:
            errors.append(str(error))
    if side != "trainer":
        with contextlib.suppress(TimeoutError):
            wait_for(Path(config["resumed"]), 40)
    expected = toy.engine_worker(spec, side, int(rank)) if side != "trainer" else None
    wrong: list[str] = []
    if expected is not None:
        expected.load_weights(iter(toy.rounded(spec, SECOND).items()))
        wrong = toy.same_bytes(expected.tensors(), worker.tensors())
    Path(config["result"]).write_text(json.dumps({"errors": errors, "wrong": wrong}))
    os._exit(0)


def take_part(config: dict[str, Any], session: int, side: str, rank: int, spec: Any, worker: Any) -> None:
    options = Options(
        slot_bytes=65536, connect_timeout_seconds=60, update_timeout_seconds=60, heartbeat_seconds=0.5,
        heartbeat_timeout_seconds=3,
    )  # fmt: skip
    common = {
        "endpoint": config["endpoints"][session], "checkpoint": spec, "load_weights": worker.load_weights,
        "tensors": worker.tensors, "options": options,
    }  # fmt: skip
    adapter: Any
    if side == "trainer":
        adapter = SenderAdapter(group=(rank, 2), engines=tuple(ENGINES), **common)
        if config["victim"]:
            die_during(adapter, STALE, signal.SIGSTOP)
        with contextlib.closing(adapter):
            adapter.connect()
            for version in (FIRST, STALE) if session == 0 else (SECOND,):
                worker.load_weights(iter(toy.weights(spec, version).items()))
                adapter.send_weights(version).wait()
        return
    adapter = ReceiverAdapter(group=(rank, ENGINES[side]), engine=side, **common)
    with contextlib.closing(adapter):
        give_up = time.monotonic() + 90
        while time.monotonic() < give_up and adapter.version != (STALE if session == 0 else SECOND):
            adapter.poll_requests()
            time.sleep(0.001)


def wait_for(path: Path, seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(path)
        time.sleep(0.05)
