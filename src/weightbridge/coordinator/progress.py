"""The progress thread of a worker: lowers its program, connects to its peers, carries each version through.

It works whether or not the worker's own code is computing, so an engine that another one waits for is never in the way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Literal

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator.failures import kind_of
from weightbridge.coordinator.options import Options
from weightbridge.errors import InternalError, TransferTimeout, WeightBridgeError, WorkerError
from weightbridge.executor import Aborted, Endpoint, Executor, NetworkBytes
from weightbridge.kernels import Buffer, choose_kernels
from weightbridge.layout import SourceMap
from weightbridge.machine import messages as w
from weightbridge.plan import Plan, decode_plan
from weightbridge.program import SlotSpec, lower, verify_program
from weightbridge.transports import Identity

__all__ = ["ProgressThread"]

_GRACE_SECONDS = 5.0  # beyond the hub's deadline, so that the hub's word, which names more, comes first


class ProgressThread:
    """One per worker. `submit` from any thread; the rest runs here unless a docstring says otherwise."""

    def __init__(
        self, *, worker: str, spec: CheckpointSpec, options: Options,
        post: Callable[[w.Message], None], failed: Callable[[WeightBridgeError], None],
    ) -> None:  # fmt: skip
        """post: sends a message to the hub. failed: told once, when this worker's part has failed; the hub is told too."""
        self._worker = worker
        self._spec = spec
        self._options = options
        self._post = post
        self._failed = failed
        self._session = 0
        self._source_map: SourceMap | None = None
        self._live: tuple[Buffer, ...] = ()
        self._plan: Plan | None = None
        self._executor: Executor | None = None
        self._counted = NetworkBytes(0, 0)
        self._allowed_by: dict[tuple[int, int], set[str]] = {}  # (version, attempt) -> who has said so
        self._allow_lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"wb-progress-{worker}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def abort(self, error: WeightBridgeError) -> None:
        """From any thread: end a transfer that runs, with that error."""
        executor = self._executor
        if executor is not None:
            executor.abort(error)

    def close(self) -> None:
        """Finish, tear the data plane down and end the thread. Bounded by the transports' deadline. Idempotent."""
        self._work.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(self._options.heartbeat_timeout_seconds + _GRACE_SECONDS)

    @property
    def plan(self) -> Plan | None:
        return self._plan

    def welcome(self, session: int, source_map: SourceMap, live: tuple[Buffer, ...]) -> None:
        """Called by the thread that probed, before the map is handed in. live: where the live tensors lay then."""
        self._session = session
        self._source_map = source_map
        self._live = live

    # --- connect ----------------------------------------------------------------------------------------------------------

    def lower(self, plan_wire: bytes) -> None:
        """Lower and verify the own program, take memory, open the transports, tell the hub where they are."""
        if self._source_map is None:
            raise InternalError(f"{self._worker} was handed a plan before it reported its layout")
        plan = decode_plan(plan_wire)
        me = plan.topology.index[self._worker]
        program = lower(plan, self._spec, self._source_map, me, codec=self._options.codec)
        verify_program(program, plan, self._spec, self._source_map)
        self._plan = plan
        self._executor = Executor(
            workers=plan.topology.workers,
            program=program,
            kernels=choose_kernels(self._options.kernels),
            identity=Identity(worker=self._worker, session=str(self._session), token=self._options.token),
            host=self._options.data_host,
            transports=self._options.transports,
            trusted_network=self._options.trusted_network,
            deadline_seconds=self._options.heartbeat_timeout_seconds,
            observe=self._options.observe,
        )
        self._post(w.ProgramReady(plan_digest=plan.digest, endpoint=_to_wire(self._executor.endpoint)))

    def connect(self, attempt: int, peers: Mapping[str, w.PeerEndpoint]) -> None:
        """Join with all peers and bind the kernels, which touches no tensor: an update finds them bound if none moved."""
        executor, plan = self._ready()
        executor.connect({plan.topology.index[name]: _from_wire(e) for name, e in peers.items()})
        executor.bind(self._live)
        self._counted = executor.network_bytes()
        self._post(w.Connected(attempt=attempt))

    # --- one version ------------------------------------------------------------------------------------------------------

    def bind(self, live: tuple[Buffer, ...]) -> None:
        """From the worker's own thread, while it stands still: the memory that this version is read from or written to."""
        self._ready()[0].bind(live)

    def allow_assemble(self, version: int, attempt: int, *, by: Literal["hub", "worker"]) -> None:
        """From any thread. Live weights are overwritten only when both have said so: the hub (every engine has parked) and
        this worker (its hook has run, its memory is bound)."""
        with self._allow_lock:
            said = self._allowed_by.setdefault((version, attempt), set())
            said.add(by)
            both = len(said) == 2
        if both:
            self._ready()[0].allow_assemble(version, attempt)

    def transfer(
        self,
        *,
        version: int,
        attempt: int,
        is_trainer: bool,
        released: Callable[[], None],
        done: Callable[[NetworkBytes], None],
    ) -> None:
        """Carry one version through; `done` gets the network bytes of this version."""
        executor, plan = self._ready()
        executor.run(
            session=self._session, epoch=plan.epoch, version=version, attempt=attempt, assemble_allowed=is_trainer,
            timeout_seconds=self._options.update_timeout_seconds + _GRACE_SECONDS, released=released,
        )  # fmt: skip
        with self._allow_lock:
            self._allowed_by.pop((version, attempt), None)
        counted = executor.network_bytes()
        moved = NetworkBytes(counted.sent - self._counted.sent, counted.received - self._counted.received)
        self._counted = counted
        done(moved)
        self._post(w.Transferred(version=version, attempt=attempt))

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _ready(self) -> tuple[Executor, Plan]:
        if self._executor is None or self._plan is None:
            raise InternalError(f"{self._worker} was asked to move weights before it had a plan")
        return self._executor, self._plan

    def _run(self) -> None:
        broken = False
        while (work := self._work.get()) is not None:
            if broken:
                continue  # the session is over; only the end is still awaited
            try:
                work()
            except Aborted:
                broken = True  # the hub said so: everybody knows
            except WeightBridgeError as error:
                broken = True
                self._report(error)
            except Exception as error:  # our defect; everybody must still hear of it
                broken = True
                self._report(InternalError(f"{self._worker}: {type(error).__name__}: {error}"))
        if self._executor is not None:
            self._executor.close()

    def _report(self, error: WeightBridgeError) -> None:
        """To the hub, naming the lost peer where there is one, and to the own session."""
        lost, reason = "", error.message
        if isinstance(error, WorkerError) and error.causes:
            lost, reason = next(iter(error.causes.items()))
        elif isinstance(error, TransferTimeout):
            lost = next(iter(getattr(error, "waiting_for", ())), "")
        self._post(w.WorkerFailed(kind=kind_of(error), reason=reason, lost=lost))
        self._failed(error)


def _to_wire(endpoint: Endpoint) -> w.PeerEndpoint:
    return w.PeerEndpoint(
        addresses=dict(endpoint.addresses),
        slots=tuple(
            w.Slot(stage=s.stage, capacity_bytes=s.capacity_bytes, num_slots=s.num_slots, arena_offset=s.arena_offset)
            for s in endpoint.slots
        ),
    )


def _from_wire(endpoint: w.PeerEndpoint) -> Endpoint:
    return Endpoint(
        addresses=endpoint.addresses,
        slots=tuple(
            SlotSpec(stage=s.stage, capacity_bytes=s.capacity_bytes, num_slots=s.num_slots, arena_offset=s.arena_offset)
            for s in endpoint.slots
        ),
    )
