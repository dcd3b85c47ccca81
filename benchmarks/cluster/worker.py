"""One worker process: `worker CHANNEL_FD`. Its first order says who it is; then it follows orders until told to stop.

settle: all are connected, memory is measured from here on. prepare: a trainer takes on the values of a version. go: carry that
version over. verify: a rollout worker compares every element. memory. rest: poll no more. stop, once all rest. Every time stamp
is CLOCK_MONOTONIC, one clock for the whole machine.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any, NoReturn, Protocol

import torch

from benchmarks.cluster import peers
from benchmarks.cluster.crew import Channel, Message
from benchmarks.cluster.memory import forget_peak, peak_bytes, resident_bytes
from benchmarks.cluster.model import WorkerModel
from benchmarks.cluster.scenarios import Case, CaseKey, build
from weightbridge.plan import Role

__all__ = ["Context", "Method", "main"]


class Context:
    """What a method is given. hosts: address of each node, by number. me: position in the topology's workers."""

    def __init__(self, config: Message, channel: Channel) -> None:
        self.case: Case = build(CaseKey(**config["case"]))
        self.name: str = config["worker"]
        self.me: int = self.case.topology.index[self.name]
        self.hosts: list[str] = config["hosts"]
        self.port: int = config["port"]
        self.token: bytes = config["token"].encode()
        self.work_dir: str = config["work_dir"]
        self.trace: bool = config["trace"]
        self.shaped: bool = config["shaped"]
        self.seconds: float = config["seconds"]
        self.connect_seconds: float = config["connect_seconds"]
        self.epoch: float = config["epoch"]  # time.monotonic when this crew began
        self.channel = channel
        self.model = WorkerModel(self.case.spec, self.case.maps[self.me])

    @property
    def host(self) -> str:
        return self.hosts[self.case.node_of(self.name)]

    @property
    def is_trainer(self) -> bool:
        return self.case.topology.workers[self.me].role is Role.TRAINER

    def engines_in_turn(self) -> tuple[str, ...]:
        """In the order in which this trainer serves them one after the other: each node begins with another one, so that no
        two of them crowd the link of one engine while the others' are idle."""
        engines = self.case.engines
        shift = self.case.node_of(self.name) % len(engines)
        return (*engines[shift:], *engines[:shift])

    def done(self, version: int, begin: float, end: float, **more: Any) -> None:
        """Tell that this worker computes again: it stood still from `begin` to `end` (time.monotonic)."""
        self.channel.say("done", version=version, begin=begin, end=end, **more)


class Method(Protocol):
    """A way to move weights, at one worker. All of it is called on the main thread."""

    def connect(self) -> dict[str, Any]:
        """Get ready; returns what is worth telling."""

    def go(self, version: int) -> None:
        """Move a version and call `Context.done`."""

    def idle(self) -> None:
        """Called again and again between orders."""

    def window(self, order: Message) -> dict[str, Any]:
        """Work for a while, if this is a method that works (benchmarks/modes.py)."""
        raise NotImplementedError(type(self).__name__)

    def close(self) -> None: ...


def _method(name: str, context: Context) -> Method:
    if name == "weightbridge":
        from benchmarks.cluster.session import Session

        return Session(context)
    if name.startswith("working:"):
        from benchmarks.cluster.working import Working

        return Working(context, stage_send="send" in name, stage_receive="receive" in name)
    if name == "broadcast":
        from benchmarks.cluster.broadcast import Broadcast

        return Broadcast(context)
    if name == "p2p":
        from benchmarks.cluster.p2p import PointToPoint

        return PointToPoint(context)
    if name == "peer:mooncake":
        peers.use(name)
        from benchmarks.cluster.peer_mooncake import MooncakePeer

        return MooncakePeer(context)
    from benchmarks.cluster.files import Files

    return Files(context)


def main() -> NoReturn:
    """Run one worker. Ends without the interpreter's own shutdown, which would wait for threads of a failed session."""
    channel = Channel(int(sys.argv[1]))
    try:
        _run(channel)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        channel.say("failed", text=f"{type(error).__name__}: {error}")
        time.sleep(5)  # so that the peers' own words are not lost behind this worker's end
        os._exit(1)
    os._exit(0)


def _run(channel: Channel) -> None:
    config = channel.orders.get(timeout=30)
    torch.set_num_threads(1)
    context = Context(config, channel)
    if context.is_trainer:
        context.model.fill(0)
    method = _method(config["method"], context)
    before = resident_bytes()
    connect_peak, resting = 0, False
    channel.say("ready", **method.connect())
    while True:
        if not resting:
            method.idle()
        if channel.orders.empty():
            time.sleep(0.001)
            continue
        order = channel.orders.get()
        match order["kind"]:
            case "prepare":
                context.model.fill(order["version"])
                channel.say("prepared")
            case "go":
                method.go(order["version"])
            case "window":
                channel.say("windowed", **method.window(order))
            case "verify":
                channel.say("verified", wrong=context.model.wrong(order["version"]))
            case "settle":
                connect_peak = peak_bytes() - before
                forget_peak()
                channel.say("settled")
            case "memory":
                channel.say(
                    "memory", model_bytes=context.model.nbytes, peak_extra_bytes=peak_bytes() - before,
                    connect_peak_extra_bytes=connect_peak,
                )  # fmt: skip
            case "rest":
                resting = True
                channel.say("resting")
            case _:
                method.close()
                channel.say("stopped")
                return


if __name__ == "__main__":
    main()
