"""One worker of a cell as a process. It writes down, with the time, all that it was told and all that it found.

A trainer sends its versions and ruins its weights as soon as it may. An engine worker serves: between polls it compares
every element of its live weights with those of the version it says it holds.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.faults.cells import ENGINES, Cell
from tests.faults.inflict import Inflicter
from tests.multiprocess import toy_job as toy

from weightbridge.coordinator import Options, ReceiverAdapter, SenderAdapter
from weightbridge.errors import IncompleteUpdateError, WeightBridgeError

HEARTBEAT_TIMEOUT_SECONDS = 4.0
UPDATE_TIMEOUT_SECONDS = 10.0
SCALE = 160  # of the vocabulary: 0.7 MB of weights, 10 rounds and more
_CLONE_NEWNET = 0x40000000
_LOOK_SECONDS = 0.02


class Diary:
    """A line of JSON for everything that happens."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115 (as long as the process)

    def write(self, what: str, **fields: Any) -> None:
        self._file.write(json.dumps({"what": what, "at": time.time(), **fields}) + "\n")

    def write_error(self, what: str, error: WeightBridgeError, **fields: Any) -> None:
        causes = dict(getattr(error, "causes", None) or {})
        self.write(what, kind=type(error).__name__, causes=causes, message=str(error), **fields)


def main(config: dict[str, Any]) -> None:
    """config: worker, cell, endpoint, diary, folder, netns, data_host, node, engines (that the trainers name), versions (that
    they send)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if config["netns"]:
        _enter(config["netns"])
    diary = Diary(config["diary"])
    cell = Cell(**config["cell"])
    inflicter = (
        Inflicter(cell, Path(config["folder"])) if config["worker"] == cell.victim and config["strikes"] else None
    )
    staged = cell.mode == "staged"
    options = Options(
        token=b"a token of the fault matrix", data_host=config["data_host"], slot_bytes=128 << 10,
        connect_timeout_seconds=20, update_timeout_seconds=UPDATE_TIMEOUT_SECONDS, heartbeat_seconds=0.5,
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS, stage_send=staged, stage_receive=staged,
        when_trainers_fail="rejoin",
        on_event=None if inflicter is None else inflicter.on_event,
        observe=None if inflicter is None else inflicter.observe,
    )  # fmt: skip
    side, rank = config["worker"].split("/")
    try:
        if side == "trainer":
            _train(config, int(rank), options, diary, inflicter)
        else:
            _serve(config, side, int(rank), options, diary, inflicter)
    except WeightBridgeError as error:
        diary.write_error("out", error)
    except BaseException as error:  # noqa: BLE001 (whatever it is, it must be seen)
        diary.write("crashed", error=f"{type(error).__name__}: {error}")
    diary.write("ended")
    os._exit(0)


def _train(
    config: dict[str, Any], rank: int, options: Options, diary: Diary, inflicter: Inflicter | None
) -> None:  # fmt: skip
    spec = toy.checkpoint_spec(scale=SCALE)
    shard = toy.TrainerShard(spec, rank, 2)
    sender = SenderAdapter(
        group=(rank, 2), endpoint=config["endpoint"], checkpoint=spec, load_weights=shard.load_weights,
        tensors=shard.tensors, engines=tuple(config["engines"]), node=config["node"], options=options,
    )  # fmt: skip
    try:
        sender.connect()
        diary.write("connected")
        last: WeightBridgeError | None = None
        for version in config["versions"]:
            shard.load_weights(iter(toy.weights(spec, version).items()))
            try:
                handle = sender.send_weights(version)
                for tensor in shard.live.values():
                    tensor.fill_(-7.0)  # it trains on
                if inflicter is not None:
                    inflicter.released(version)
                report = handle.wait()
                diary.write("reported", version=version, engines=dict(report.engines), attempts=report.attempts)
            except WeightBridgeError as error:
                if error is last:
                    raise  # the session is over
                last = error
                diary.write_error("failed", error, version=version)
    finally:
        sender.close()


def _serve(
    config: dict[str, Any], engine: str, rank: int, options: Options, diary: Diary, inflicter: Inflicter | None
) -> None:  # fmt: skip
    spec = toy.checkpoint_spec(scale=SCALE)
    worker = toy.engine_worker(spec, engine, rank)
    expected = {v: _expected(spec, engine, rank, v) for v in config["versions"]}
    receiver = ReceiverAdapter(
        group=(rank, ENGINES[engine]), endpoint=config["endpoint"], checkpoint=spec, load_weights=worker.load_weights,
        tensors=worker.tensors, engine=engine, node=config["node"], options=options,
        before_update_hook=None if inflicter is None else inflicter.installing,
    )  # fmt: skip
    stop = Path(config["folder"]) / "stop"
    told: WeightBridgeError | None = None
    served, num_polls, next_look = -1, 0, 0.0
    try:
        while time.monotonic() < next_look or not stop.exists():
            num_polls += 1
            poisoned = False
            try:
                receiver.poll_requests()
            except IncompleteUpdateError as error:
                poisoned = True
                if error is not told:
                    told = error
                    diary.write_error("poisoned", error)
            if receiver.version != served and not poisoned:
                served = receiver.version
                diary.write("installed", version=served, polls=num_polls)
                _compare(expected, worker, served, diary)
            if receiver.last_failure is not None and receiver.last_failure is not told and not poisoned:
                told = receiver.last_failure
                diary.write_error("told", told)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                if not poisoned:
                    _compare(expected, worker, receiver.version, diary)
            time.sleep(0.002)
    except WeightBridgeError:
        if receiver.state != "poisoned":
            _compare(expected, worker, receiver.version, diary)
        raise
    finally:
        diary.write("holds", version=receiver.version, state=receiver.state)
        receiver.close()


def _expected(spec: Any, engine: str, rank: int, version: int) -> dict[str, Any]:
    fresh = toy.engine_worker(spec, engine, rank)
    fresh.load_weights(iter(toy.rounded(spec, version).items()))
    return dict(fresh.tensors())


def _compare(expected: dict[int, dict[str, Any]], worker: Any, version: int, diary: Diary) -> None:
    if version < 0:
        return
    wrong = toy.same_bytes(expected[version], worker.tensors())
    if wrong:
        diary.write("mixture", version=version, tensors=wrong)


def _enter(netns: str) -> None:
    """This process, before it has any other thread, moves into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{netns}") as space:
        if libc.setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {netns}")
