"""WeightBridge itself as a method: a real session over real sockets."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.cluster.tracing import Recorder
from benchmarks.cluster.worker import Context
from weightbridge.coordinator import Options, ReceiverAdapter, SenderAdapter
from weightbridge.plan import encode_plan

__all__ = ["PLAN_FILE", "Session", "adapters"]

PLAN_FILE = "plan"
"""In the work folder: the session's plan as it was sent to all workers."""

_STEP_SECONDS = 0.001


def adapters(context: Context, **settings: Any) -> tuple[SenderAdapter | None, ReceiverAdapter | None]:
    """A worker's adapter: a trainer's sender or a rollout worker's receiver. settings: of Options, beside the usual ones."""
    case, seat = context.case, context.case.topology.workers[context.me]
    options = Options(
        token=context.token, data_host=context.host, bandwidth=seat.bandwidth, slot_bytes=case.key.slot_bytes,
        backup_weights=False, connect_timeout_seconds=context.connect_seconds, update_timeout_seconds=context.seconds,
        heartbeat_timeout_seconds=30.0, **settings,
    )  # fmt: skip
    common: dict[str, Any] = {
        "endpoint": f"tcp://{context.hosts[0]}:{context.port}", "checkpoint": case.spec, "node": seat.node,
        "load_weights": context.model.load_weights, "tensors": context.model.tensors, "options": options,
    }  # fmt: skip
    if context.is_trainer:
        return SenderAdapter(group=(seat.rank, len(case.topology.trainers)), engines=case.engines, **common), None
    size = sum(w.engine == seat.engine for w in case.topology.workers)
    return None, ReceiverAdapter(group=(seat.rank, size), engine=seat.engine, **common)


class Session:
    """One adapter. A rollout worker polls all the time, as between inference steps of a millisecond.

    The workers of an engine step together, and so poll together: here a common clock says how many polls are due. Were each to
    poll at its own pace, one would have to catch up with the other before they can stop at the same step.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._recorder = Recorder() if context.trace else None
        self._sender, self._receiver = adapters(
            context, observe=None if self._recorder is None else self._recorder.observe
        )
        self._num_polls = 0

    def connect(self) -> dict[str, Any]:
        """A trainer connects; a rollout worker polls until it has been probed and its state says that it is in."""
        begin = time.monotonic()
        if self._sender is not None:
            self._sender.connect()
            self._context.model.fill(0)  # the probe has overwritten it
            plan, facts = self._sender.plan, self._sender.plan_facts
            told: dict[str, Any] = {"connect_seconds": time.monotonic() - begin}
            if plan is not None and facts is not None:
                Path(self._context.work_dir, PLAN_FILE).write_bytes(encode_plan(plan))
                told |= {
                    "rounds": plan.rounds, "link_bound_seconds": plan.bounds.link_bound_seconds,
                    "busiest_link_seconds": plan.bounds.busiest_link_seconds, "num_pairs": facts.num_pairs,
                    "planned_trainer_egress_bytes": sum(facts.trainer_egress_per_worker.values()),
                    "needed_bytes": dict(facts.needed_bytes),
                }  # fmt: skip
            return told
        return {}

    def go(self, version: int) -> None:
        """A trainer sends; a rollout worker has nothing to do: it polls."""
        if self._sender is None:
            return
        if self._recorder is not None:
            self._recorder.begin(version)
        begin = time.monotonic()
        handle = self._sender.send_weights(version)
        end = time.monotonic()
        report = handle.wait()
        own = report.network_bytes.get(self._context.name, (0, 0))
        told = {"reported_ewtt_seconds": report.ewtt_seconds, "tcp_bytes": list(own), "trace": self._spans()}
        self._context.done(version, begin, end, **told)

    def idle(self) -> None:
        if self._receiver is None:
            return
        due = int((time.monotonic() - self._context.epoch) / _STEP_SECONDS)
        while self._num_polls < due:
            self._num_polls += 1
            begin = time.monotonic()
            if self._receiver.poll_requests():
                end = time.monotonic()
                self._context.done(self._receiver.version, begin, end, trace=self._spans())

    def close(self) -> None:
        for adapter in (self._sender, self._receiver):
            if adapter is not None:
                adapter.close()

    def _spans(self) -> list[Any] | None:
        return None if self._recorder is None else self._recorder.take()
