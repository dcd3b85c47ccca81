"""The progress thread of a worker: lowers its program, connects to its peers, carries each version through.

It works whether or not the worker's own code is computing, so an engine that another one waits for is never in the way. An
attempt has an executor of its own, with fresh slots and connections; closing it fences every peer.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping

import numpy as np

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator.options import Options
from weightbridge.errors import InternalError, WeightBridgeError
from weightbridge.executor import Aborted, Endpoint, Executor, NetworkBytes, Observe
from weightbridge.executor.device import kernels_for
from weightbridge.kernels import Buffer, Kernels, choose_kernels
from weightbridge.layout import SourceMap
from weightbridge.machine import messages as w
from weightbridge.plan import Plan, decode_plan
from weightbridge.program import SlotSpec, WorkerProgram, lower, verify_program
from weightbridge.transports import Identity

__all__ = ["ProgressThread"]

_GRACE_SECONDS = 5.0  # beyond the hub's deadline, so that the hub's word, which names more, comes first
_LOG = logging.getLogger(__name__)
Failed = Callable[[WeightBridgeError], None]


class ProgressThread:
    """One per worker. `submit` from any thread; the rest runs here unless a docstring says otherwise."""

    def __init__(
        self, *, worker: str, spec: CheckpointSpec, options: Options, observe: Observe | None,
    ) -> None:  # fmt: skip
        """observe: see Executor."""
        self._worker = worker
        self._spec = spec
        self._options = options
        self._observe = observe
        self._session = 0
        self._source_map: SourceMap | None = None
        self._live: tuple[Buffer, ...] = ()
        self._plan: Plan | None = None
        self._program: WorkerProgram | None = None
        self._executor: Executor | None = None
        self._kernels: Kernels | None = None  # one for all attempts: a GPU's go on from where the caller stood
        self._counted = NetworkBytes(0, 0)
        self._work: queue.SimpleQueue[tuple[Callable[[], None], Failed] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"wb-progress-{worker}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None], failed: Failed) -> None:
        """From any thread: do this here. failed: told on this thread when it fails, and how."""
        self._work.put((work, failed))

    def abort(self, error: BaseException) -> None:
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
    def ended(self) -> bool:
        """Nothing is done here any more."""
        return not self._thread.is_alive()

    @property
    def plan(self) -> Plan | None:
        return self._plan

    def welcome(self, session: int, source_map: SourceMap, live: tuple[Buffer, ...]) -> None:
        """Called by the thread that probed, before the map is handed in. live: the memory that versions are read from
        or written to: the live tensors, or their host copy."""
        self._session = session
        self._source_map = source_map
        self._live = live

    # --- an attempt ---------------------------------------------------------------------------------------------------------

    def prepare(self, plan_wire: bytes) -> tuple[str, w.PeerEndpoint]:
        """Lower and verify the own program (empty plan: keep the last one), take memory, open the transports.

        Returns the plan's digest and where the peers find this worker.
        """
        if self._source_map is None:
            raise InternalError(f"{self._worker} was handed a plan before it reported its layout")
        self.stop()
        if plan_wire:
            plan = decode_plan(plan_wire)
            program = lower(
                plan, self._spec, self._source_map, plan.topology.index[self._worker], codec=self._options.codec
            )
            verify_program(program, plan, self._spec, self._source_map)
            self._plan, self._program = plan, program
        if self._plan is None or self._program is None:
            raise InternalError(f"{self._worker} was asked to use its last plan and has none")
        self._executor = Executor(
            workers=self._plan.topology.workers,
            program=self._program,
            kernels=self._kernels_for(self._source_map),
            identity=Identity(worker=self._worker, session=str(self._session), token=self._options.token),
            host=self._options.data_host,
            transports=self._options.transports,
            trusted_network=self._options.trusted_network,
            deadline_seconds=self._options.heartbeat_timeout_seconds,
            observe=self._observe,
            digests=self._options.digests,
        )
        return self._plan.digest, _to_wire(self._executor.endpoint)

    def _kernels_for(self, source_map: SourceMap) -> Kernels:
        if self._kernels is None:
            self._kernels = choose_kernels(self._options.kernels)
        return kernels_for(self._kernels, source_map.live, self._live, np.unique(source_map.copies.live).tolist())

    def connect(self, peers: Mapping[str, w.PeerEndpoint]) -> None:
        """Join with all peers and bind the kernels, which touches no tensor: an update finds them bound if none moved."""
        executor, plan = self._ready()
        executor.connect({plan.topology.index[name]: _from_wire(e) for name, e in peers.items()})
        executor.bind(self._live)
        self._counted = executor.network_bytes()

    def stop(self) -> None:
        """End the attempt: fence every peer, give the slots back. Idempotent."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close()

    # --- one version ------------------------------------------------------------------------------------------------------

    def bind(self, live: tuple[Buffer, ...]) -> None:
        """From the worker's own thread, while it stands still: the memory that this version is read from or written to."""
        self._live = live
        if self._kernels is not None:
            self._kernels.follow_caller()
        executor = self._executor
        if executor is not None:
            executor.bind(live)

    def allow_assemble(self, version: int, attempt: int) -> None:
        """From any thread, also before the transfer begins: live weights may be overwritten by this version."""
        executor = self._executor
        if executor is not None:
            executor.allow_assemble(version, attempt)

    def transfer(self, *, version: int, attempt: int, may_assemble: bool, released: Callable[[], None]) -> NetworkBytes:
        """Carry one version through; the network bytes of this version. may_assemble: from the start (trainers, host
        copies)."""
        executor, plan = self._ready()
        executor.run(
            session=self._session, epoch=plan.epoch, version=version, attempt=attempt, assemble_allowed=may_assemble,
            timeout_seconds=self._options.update_timeout_seconds + _GRACE_SECONDS, released=released,
        )  # fmt: skip
        counted = executor.network_bytes()
        # Never less than nothing: the kernel forgets what a connection carried when that dies under us.
        moved = NetworkBytes(
            max(0, counted.sent - self._counted.sent), max(0, counted.received - self._counted.received)
        )
        self._counted = counted
        return moved

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _ready(self) -> tuple[Executor, Plan]:
        if self._executor is None or self._plan is None:
            raise InternalError(f"{self._worker} was asked to move weights before it had a plan")
        return self._executor, self._plan

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, failed = item
            try:
                work()
            except Aborted:
                pass  # the hub said so, and asks for the end of the attempt next
            except WeightBridgeError as error:
                failed(error)
            except Exception as error:  # our defect; everybody must still hear of it
                _LOG.exception("%s: an attempt failed", self._worker)
                failed(InternalError(f"{self._worker}: {type(error).__name__}: {error}"))
        self.stop()


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
