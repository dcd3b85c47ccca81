"""One worker of the toy job as a process; writes what its API raised to a file. Run by test_worker_death.py."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tests.multiprocess import toy_job as toy

from weightbridge.coordinator import Options, ReceiverAdapter, SenderAdapter
from weightbridge.errors import WeightBridgeError

ENGINES = {"tp": toy.TP, "solo": 1}


def die_during(adapter: Any, version: int, how: int) -> None:
    """Send this process a signal in the midst of the transfer of `version`: at the 15th step of its machine."""

    def arm() -> None:
        while adapter._seat is None or adapter._seat.progress._executor is None:
            time.sleep(0.0005)
        steps = itertools.count(1)

        def observe(_: object) -> None:
            if adapter._seat.machine.begun[0] >= version and next(steps) == 15:
                os.kill(os.getpid(), how)

        adapter._seat.progress._executor._observe = observe

    threading.Thread(target=arm, daemon=True).start()


def main(config: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    side, rank = config["worker"].split("/")
    rank = int(rank)
    spec = toy.checkpoint_spec(scale=config["scale"])
    options = Options(
        slot_bytes=65536, connect_timeout_seconds=60, update_timeout_seconds=60, heartbeat_seconds=0.5,
        heartbeat_timeout_seconds=config["heartbeat_timeout"],
    )  # fmt: skip
    error: BaseException | None = None
    finished_at = 0.0
    try:
        if side == "trainer":
            shard = toy.TrainerShard(spec, rank, 2)
            sender = SenderAdapter(
                group=(rank, 2), endpoint=config["endpoint"], checkpoint=spec, load_weights=shard.load_weights,
                tensors=shard.tensors, engines=tuple(ENGINES), options=options,
            )  # fmt: skip
            if config["victim"]:
                die_during(sender, 2, config["signal"])
            sender.connect()
            for version in (1, 2, 3):
                shard.load_weights(iter(toy.weights(spec, version).items()))
                sender.send_weights(version).wait()
        else:
            worker = toy.engine_worker(spec, side, rank)
            receiver = ReceiverAdapter(
                group=(rank, ENGINES[side]), endpoint=config["endpoint"], checkpoint=spec, load_weights=worker.load_weights,
                tensors=worker.tensors, engine=side, options=options,
            )  # fmt: skip
            if config["victim"]:
                die_during(receiver, 2, config["signal"])
            while True:
                receiver.poll_requests()
                if receiver.last_failure is not None:  # a version was given up; this engine is whole and could go on
                    raise receiver.last_failure
                time.sleep(0.001)
    except BaseException as raised:  # noqa: BLE001
        error = raised
    finished_at = time.time()
    causes = getattr(error, "causes", {}) if isinstance(error, WeightBridgeError) else {}
    result = {"kind": type(error).__name__, "message": str(error), "causes": causes, "at": finished_at}
    Path(config["result"]).write_text(json.dumps(result))
    os._exit(0)  # threads that wait for the dead one end with the process
