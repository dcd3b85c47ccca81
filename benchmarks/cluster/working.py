"""WeightBridge under workers that work: trainers take training steps, engines decode in lock step, and both count.

The GPU's own time is stood in for by sleeping, which leaves the CPU to the transfer as a GPU would: this is the one
fake part. The workers of an engine meet in a collective after every step, as tensor-parallel ones do.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.session import adapters
from benchmarks.cluster.worker import Context
from weightbridge.coordinator import UpdateHandle

__all__ = ["DECODE_SECONDS", "TOKENS_PER_STEP", "TRAIN_SECONDS", "Working"]

DECODE_SECONDS = 0.01
TRAIN_SECONDS = 0.05
TOKENS_PER_STEP = 32
_IDLE_SECONDS = 0.001  # between polls outside windows


class Working:
    """One adapter and one loop of work. Orders: `window` runs the loop from `begin` to `end` (time.monotonic), with a
    version sent at `send_at` if there is one, and tells what was done in it."""

    def __init__(self, context: Context, stage_send: bool, stage_receive: bool) -> None:
        self._context = context
        self._moving: list[float] = []  # times of what the data plane did
        self._handle: UpdateHandle | None = None
        self._num_idle_polls = 0
        self._sender, self._receiver = adapters(
            context, stage_send=stage_send, stage_receive=stage_receive,
            observe=(lambda seen: self._moving.append(seen.at)) if context.trace else None,
        )  # fmt: skip
        if self._receiver is not None:
            self._join_engine()

    def _join_engine(self) -> None:
        """The collective that an engine's workers meet in after each step; both are on one node."""
        workers = self._context.case.topology.workers
        seat = workers[self._context.me]
        size = sum(w.engine == seat.engine for w in workers)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(Path(self._context.work_dir, f"step-{seat.engine}")), size)
        limit = timedelta(seconds=120)
        dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=size, timeout=limit)

    def connect(self) -> dict[str, Any]:
        if self._sender is not None:
            self._sender.connect()
            self._context.model.fill(0)
        return {}

    def idle(self) -> None:
        """Between windows an engine polls too, as often as a common clock says: it is asked to be probed then."""
        self._poll_until(time.monotonic())

    def _poll_until(self, now: float) -> None:
        due = self._polls_due(now)
        while self._receiver is not None and self._num_idle_polls < due:
            self._num_idle_polls += 1
            self._receiver.poll_requests()

    def _polls_due(self, now: float) -> int:
        return int((now - self._context.epoch) / _IDLE_SECONDS)

    def go(self, version: int) -> None:
        raise NotImplementedError("the work is done in windows")

    def window(self, order: dict[str, Any]) -> dict[str, Any]:
        begin, end, send_at, version = order["begin"], order["end"], order.get("send_at"), order.get("version")
        self._moving.clear()
        self._poll_until(begin)
        time.sleep(max(0.0, begin - time.monotonic()))
        steps: list[tuple[float, float]] = []
        calls: list[tuple[float, float]] = []
        sent = over = False
        while not over:
            now = time.monotonic()
            if self._sender is not None and version is not None and not sent and now >= send_at:
                self._handle, sent = self._sender.send_weights(version), True
                calls.append((now, time.monotonic()))
            elif self._receiver is not None:
                self._receiver.poll_requests()
                calls.append((now, time.monotonic()))
            over = self._step(steps, end)
        self._num_idle_polls = self._polls_due(end)  # nobody owes the polls that the window's steps took the place of
        told: dict[str, Any] = {"steps": steps, "calls": calls, "moving": self._span_of_moving()}
        if self._handle is not None and sent:
            report = self._handle.wait()
            told |= {"ewtt_seconds": report.ewtt_seconds, "agst_seconds": report.agst_seconds}
        if self._receiver is not None:
            told["version"] = self._receiver.version
        return told

    def close(self) -> None:
        for adapter in (self._sender, self._receiver):
            if adapter is not None:
                adapter.close()

    def _step(self, steps: list[tuple[float, float]], end: float) -> bool:
        """One step; whether it was the window's last, which the workers of an engine decide together."""
        begin = time.monotonic()
        time.sleep(TRAIN_SECONDS if self._sender is not None else DECODE_SECONDS)
        over = torch.tensor([float(time.monotonic() >= end)])
        if self._receiver is not None:
            dist.all_reduce(over, op=dist.ReduceOp.MAX)
        steps.append((begin, time.monotonic()))
        return bool(over)

    def _span_of_moving(self) -> tuple[float, float] | None:
        return (self._moving[0], self._moving[-1]) if self._moving else None
