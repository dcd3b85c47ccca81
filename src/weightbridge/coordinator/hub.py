"""The hub: the I/O shell of the session machine. One thread in the process of trainer rank 0.

Who is heard at all is decided below it (`coordinator/wire.py`): here every connection belongs to the job. What worker it
is, its Join says, once; from then on its words are that worker's and no other's.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import session_events as events
from weightbridge.coordinator.options import Options
from weightbridge.coordinator.planning import Planned, plan_job
from weightbridge.coordinator.session_events import guarded_observer
from weightbridge.coordinator.standstill import Standstill
from weightbridge.coordinator.wire import HubSocket
from weightbridge.errors import TransportError, WeightBridgeError
from weightbridge.machine import messages as w
from weightbridge.machine import session as s
from weightbridge.machine.status import MAX_UPDATES, UpdateStatus
from weightbridge.machine.status_of import status_of
from weightbridge.transports.refusals import Refusals

__all__ = ["Hub"]

_TICK_SECONDS = 0.05
_LAST_WORD_SECONDS = 2.0
_LOG = logging.getLogger(__name__)


class Hub:
    """Gathers the workers of a job and takes them through connect and updates. Started by SenderAdapter on rank 0."""

    def __init__(
        self, *, endpoint: str, spec: CheckpointSpec, num_trainers: int, engines: Sequence[str], options: Options
    ) -> None:
        """Binds the endpoint. Raises ConnectError when it is taken or no address of this machine."""
        self._spec = spec
        self._options = options
        self._socket = HubSocket(endpoint, options.token)
        timeouts = s.SessionTimeouts(
            connect=options.connect_timeout_seconds,
            update=options.update_timeout_seconds,
            heartbeat=options.heartbeat_timeout_seconds,
            suspect=min(options.heartbeat_timeout_seconds, 2.5 * options.heartbeat_seconds),
        )
        policy = s.SessionPolicy(
            when_newer="finish" if options.when_newer in ("finish", "error") else "supersede",
            when_engine_fails=options.when_engine_fails,
            retries=options.retries,
        )
        self._machine = s.SessionMachine(
            session=secrets.randbits(60), spec_digest=spec.digest, num_trainers=num_trainers, engines=engines,
            timeouts=timeouts, policy=policy, now=time.monotonic(),
        )  # fmt: skip
        self._workers: dict[bytes, str] = {}  # connection -> who it is
        self._connections: dict[str, bytes] = {}  # the inverse
        self._welcomes: dict[bytes, w.Message] = {}  # connection -> the answer to its Join
        self._reported: tuple[w.Report, w.Report] | None = None  # the newest, as the machine made it and as it is sent
        self._encoded: tuple[w.Message, bytes] | None = None  # the message sent last
        self._refusals = Refusals(_LOG)
        self._ended: list[UpdateStatus] = []  # versions, the newest last
        self._tell = None if options.on_event is None else guarded_observer(options.on_event)
        self._done: queue.SimpleQueue[s.SessionEvent] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._hears_until = 0.0
        self._next_heartbeat = 0.0
        self.planned: Planned | None = None
        self._observe(events.PhaseChanged, phase=self._machine.phase.value)
        self._thread = threading.Thread(target=self._run, name="wb-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hear the worker of this process out, for two seconds at most, flush what is still to be said, within two more, end
        the thread and give the port back."""
        self._hears_until = time.monotonic() + _LAST_WORD_SECONDS
        self._stopping.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        standstill = Standstill()
        try:
            while not (self._stopping.is_set() and self._has_heard_out()):
                self._socket.poll(_TICK_SECONDS)
                self._take_in()
                with suppress(queue.Empty):
                    while True:
                        self._handle(self._done.get_nowait())
                now, stood_still = standstill.look()
                self._handle(s.Tick(stood_still), now)
                if now >= self._next_heartbeat:
                    self._next_heartbeat = now + self._options.heartbeat_seconds
                    beat = w.Heartbeat()
                    for connection in self._workers:
                        self._send(connection, beat)
                    self._show()
            self._take_in()
        finally:
            self._socket.close()

    def _has_heard_out(self) -> bool:
        """Whether the worker that this hub lives with has nothing more to say. Its Goodbye crosses a socket like any other
        word: a hub that ended before it came would leave the engines to take it for dead."""
        left = self._machine.phase in (s.Phase.FAILED, s.Phase.CLOSED) or s.HUB_WORKER not in self._connections
        return left or time.monotonic() > self._hears_until

    def _take_in(self) -> None:
        """Everything that has come in. A message that is not understood costs its sender the answer and nobody else."""
        for connection, data in self._socket.receive():
            if data is None:
                self._dropped(connection)
                continue
            try:
                message = w.decode(data)
            except TransportError as error:
                self._refusals.warn(
                    "refused a message of %s: %s", self._workers.get(connection, "a guest"), error.message
                )
                continue
            self._message(connection, message)

    def _message(self, connection: bytes, message: w.Message) -> None:
        worker = self._workers.get(connection)
        if isinstance(message, w.Join):
            if worker is None:
                self._handle(s.Joining(connection, message))
            else:  # its connection had dropped before it heard the answer
                self._send(connection, self._welcomes[connection])
        elif worker is not None:
            self._handle(s.Received(worker, message))
        else:  # it was in an earlier session at this address, or is no longer in this one
            self._send(connection, w.Rejected(reason="it is not in the session; join it first"))

    def _dropped(self, connection: bytes) -> None:
        """The connection of a worker has ended. Its process has probably died; if not, it dials again within a second."""
        worker = self._workers.get(connection)
        if worker is not None:
            self._handle(s.Disconnected(worker))

    def _show(self) -> None:
        """Tell those who look on how the job is."""
        if self._machine.onlookers:
            status = status_of(self._machine, self._ended, time.monotonic())
            for name in self._machine.onlookers:
                self._send(self._connections[name], status)

    def _note_ending(self, ending: w.Report | w.UpdateFailed) -> None:
        if self._ended and self._ended[-1].version == ending.version:
            return  # the other trainers are told the same
        if isinstance(ending, w.UpdateFailed):
            why = "; ".join(f"{name}: {cause}" for name, cause in ending.causes.items())
            ended = UpdateStatus(version=ending.version, failed=why[:1000])
        else:
            ended = UpdateStatus(
                version=ending.version, ewtt_seconds=max(0.0, ending.ewtt_seconds), agst_seconds=max(0.0, ending.agst_seconds),
                ideal_seconds=ending.ideal_seconds, network_bytes=sum(r for _, r in ending.network_bytes.values()),
                slowest_worker=ending.slowest_worker, slowest_stage=ending.slowest_stage, attempts=ending.attempts,
                superseded=ending.superseded,
            )  # fmt: skip
        self._ended = [*self._ended[-MAX_UPDATES:], ended]

    def _observe(self, event: type[events.SessionEvent], **fields: Any) -> None:
        """Tell the observer, if there is one. From any thread."""
        if self._tell is not None:
            self._tell(event(at=time.time(), worker=s.HUB_WORKER, **fields))

    def _handle(self, event: s.SessionEvent, now: float | None = None) -> None:
        phase = self._machine.phase
        self._perform(event, time.monotonic() if now is None else now)
        if self._machine.phase is not phase:
            self._observe(events.PhaseChanged, phase=self._machine.phase.value)

    def _perform(self, event: s.SessionEvent, now: float) -> None:
        # The worker in whose process the hub lives hears each word last: it may well exit on the spot, and the hub with it.
        for instruction in sorted(self._machine.handle(event, now), key=_concerns_own_worker):
            match instruction:
                case s.Send(worker=worker, message=message):
                    if isinstance(message, w.Report) and self.planned is not None:
                        message = self._with_ideal(message)
                    if isinstance(message, w.Report | w.UpdateFailed):
                        self._note_ending(message)
                    if worker in self._connections:
                        self._send(self._connections[worker], message)
                case s.Admit(connection=connection, worker=worker, message=welcome):
                    self._forget(worker)
                    self._workers[connection], self._connections[worker] = worker, connection
                    self._welcomes[connection] = welcome
                    self._send(connection, welcome)
                case s.Refuse(connection=connection, message=rejected):
                    self._refusals.warn("did not let a worker in: %s", rejected.reason)
                    self._send(connection, rejected)
                case s.Forget(worker=worker):
                    self._forget(worker)
                case s.EngineNote():
                    self._note_engine(instruction)
                case s.MakePlan():
                    threading.Thread(target=self._plan, args=(instruction,), name="wb-planner", daemon=True).start()

    def _note_engine(self, note: s.EngineNote) -> None:
        level = logging.WARNING if note.state in ("lost", "poisoned") else logging.INFO
        why = f": {note.reason}" if note.reason else ""
        _LOG.log(level, "engine %s is %s at version %d%s", note.engine, note.state, note.version, why)
        self._observe(
            events.EngineChanged, engine=note.engine, state=note.state, version=note.version, reason=note.reason
        )

    def _with_ideal(self, report: w.Report) -> w.Report:
        """The same object for all trainers, so that it is encoded once."""
        if self._reported is None or self._reported[0] is not report:
            ideal = self.planned.plan.bounds.t_min_seconds if self.planned is not None else 0.0
            self._reported = (report, replace(report, ideal_seconds=max(0.0, ideal)))
        return self._reported[1]

    def _plan(self, request: s.MakePlan) -> None:
        """On a thread of its own: heartbeats go on meanwhile."""
        begin = time.monotonic()
        try:
            self.planned = plan_job(self._spec, request, self._options)
            self._observe(events.Planned, **_facts(request.epoch, time.monotonic() - begin, self.planned))
            self._done.put(s.PlanMade(request.epoch, self.planned.wire, self.planned.plan.digest))
        except WeightBridgeError as error:
            self._done.put(s.PlanRefused(request.epoch, type(error).__name__, error.message))
        except Exception as error:  # our defect; the job must still hear of it
            self._done.put(
                s.PlanRefused(request.epoch, "InternalError", f"planning failed: {type(error).__name__}: {error}")
            )

    def _forget(self, worker: str) -> None:
        """From now on nobody is this worker, until somebody is admitted as it."""
        connection = self._connections.pop(worker, None)
        if connection is not None:
            del self._workers[connection], self._welcomes[connection]

    def _send(self, connection: bytes, message: w.Message) -> None:
        if self._encoded is None or self._encoded[0] is not message:  # one plan for a thousand workers is encoded once
            self._encoded = (message, w.encode(message))
        self._socket.send(connection, self._encoded[1])


def _facts(epoch: int, seconds: float, planned: Planned) -> dict[str, Any]:
    """Fields of events.Planned."""
    bounds = planned.plan.bounds
    ratio = bounds.busiest_link_seconds / bounds.link_bound_seconds if bounds.link_bound_seconds > 0 else 1.0
    return {
        "epoch": epoch, "planning_seconds": seconds, "pairs": planned.facts.num_pairs, "rounds": planned.plan.rounds,
        "ratio_to_bound": ratio,
    }  # fmt: skip


def _concerns_own_worker(instruction: s.SessionInstruction) -> bool:
    return isinstance(instruction, s.Send | s.Forget) and instruction.worker == s.HUB_WORKER
