"""SenderAdapter: what a trainer worker holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator.hub import Hub
from weightbridge.coordinator.options import Group, Options, check_endpoint, rank_and_size
from weightbridge.coordinator.seat import LoadWeights, OnProgress, Seat, Tensors, seconds_since_epoch
from weightbridge.errors import UsageError
from weightbridge.machine import messages as w
from weightbridge.machine.worker import WorkerMachine
from weightbridge.plan import Plan, PlanFacts

__all__ = ["SenderAdapter", "UpdateHandle", "UpdateReport"]

_GRACE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """How one version went, the same on every trainer.

    ewtt_seconds: from the first worker that stopped computing to the last that resumed. agst_seconds: total stall of all
    workers over their number. network_bytes: worker -> (sent, received) between nodes, counted by the kernel.
    engines: engine -> "ready", "superseded" (it left the version out for a newer one) or "lost". attempts: how often it
    was sent. slowest_worker: the last one to go on. slowest_stage: what took most of its stall: "capture" or "send" for a
    trainer, "agreement", "transfer" or "install" for an engine's worker.
    """

    version: int
    ewtt_seconds: float
    agst_seconds: float
    network_bytes: Mapping[str, tuple[int, int]]
    engines: Mapping[str, str]
    attempts: int = 1
    slowest_worker: str = ""
    slowest_stage: str = ""
    ideal_seconds: float = 0.0


class UpdateHandle:
    """A version under way."""

    def __init__(self, seat: Seat, version: int) -> None:
        self._seat = seat
        self.version = version

    def wait(self, timeout_seconds: float | None = None) -> UpdateReport:
        """Block until every engine serves the version. Default time-out: Options.update_timeout_seconds.

        Raises WorkerError, IncompleteUpdateError or TransferTimeout when the version was given up or the session is over; each
        names who failed in `.causes`. After a version that was given up the next one may be sent.
        """
        limit = (
            self._seat.options.update_timeout_seconds + _GRACE_SECONDS if timeout_seconds is None else timeout_seconds
        )
        seat, version = self._seat, self.version
        seat.wait_for(lambda m: version in m.endings or _newest(m) > version, f"the end of version {version}", limit)
        ending = seat.machine.endings.get(version)
        if ending is None:
            raise UsageError(
                f"the report of version {version} is gone: later versions have been sent since; wait sooner"
            )
        if isinstance(ending, w.UpdateFailed):
            raise seat.error_of(ending)
        return UpdateReport(
            version=version,
            ewtt_seconds=ending.ewtt_seconds,
            agst_seconds=ending.agst_seconds,
            network_bytes=MappingProxyType(dict(ending.network_bytes)),
            engines=MappingProxyType(dict(ending.engines)),
            attempts=ending.attempts,
            slowest_worker=ending.slowest_worker,
            slowest_stage=ending.slowest_stage,
            ideal_seconds=ending.ideal_seconds,
        )

    @property
    def ended(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        machine = self._seat.machine
        return self.version in machine.endings or _newest(machine) > self.version or machine.over


def _newest(machine: WorkerMachine) -> int:
    """The newest version whose end is known."""
    return max(machine.endings, default=-1)


class SenderAdapter:
    """One trainer worker's end. All methods are collective over the trainer workers; rank 0 hosts the session."""

    def __init__(
        self, *, group: Group | tuple[int, int] | None, endpoint: str, checkpoint: CheckpointSpec, load_weights: LoadWeights,
        tensors: Tensors, engines: Sequence[str], node: str = "trainers", options: Options | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:  # fmt: skip
        """group: a torch process group of the trainers (any backend), or (rank, size); asked for nothing else.

        endpoint: "tcp://HOST:PORT" where rank 0 listens; the same on every worker of the job. load_weights: takes an
        iterable of (checkpoint name, full tensor) and puts the values where this worker keeps them; used at connect
        only, to learn the layout. tensors: the live tensors by name, asked again for each update. engines: names of the
        engines that have to join. node: name of this machine; workers that give the same name share memory.
        on_progress: told of each load while this worker is probed.
        """
        self._options = options or Options()
        check_endpoint(endpoint, self._options.token)
        if not engines or len(set(engines)) != len(engines):
            raise UsageError(f"engines must name each rollout engine once, got {list(engines)}")
        self._rank, self._size = rank_and_size(group)
        self._endpoint = endpoint
        self._engines = tuple(engines)
        self._checkpoint = checkpoint
        self._load_weights = load_weights
        self._tensors = tensors
        self._node = node
        self._on_progress = on_progress
        self._hub: Hub | None = None
        self._seat: Seat | None = None
        self._connected = False
        self._sent = -1
        self._closed = False

    def connect(self) -> None:
        """Find the engines, learn every layout, plan, connect. Blocks; call it once, on every trainer worker.

        Raises ConnectError (port in use, wrong token), TransferTimeout (an engine never came; it is named), ProbeError,
        CoverageError, InfeasibleError; the adapter is closed then.
        """
        if self._seat is not None or self._hub is not None or self._closed:
            raise UsageError("connect() was called before; one adapter serves one session: make a new one")
        try:
            self._connect()
        except BaseException:
            self.close()  # nothing of a session that did not come about stays behind: no thread, no port
            raise

    def _connect(self) -> None:
        if self._rank == 0:
            self._hub = Hub(
                endpoint=self._endpoint, spec=self._checkpoint, num_trainers=self._size, engines=self._engines,
                options=self._options,
            )  # fmt: skip
        self._seat = Seat(
            role="trainer", engine="", rank=self._rank, size=self._size, node=self._node, endpoint=self._endpoint,
            checkpoint=self._checkpoint, load_weights=self._load_weights, tensors=self._tensors, options=self._options,
            on_progress=self._on_progress,
        )  # fmt: skip
        self._seat.start()
        self._seat.run_probe(self._seat.machine)
        limit = (
            5 * self._options.connect_timeout_seconds + _GRACE_SECONDS
        )  # one for each phase; the hub's deadlines come first
        self._seat.wait_for(lambda m: m.ever_ready, "the session to be ready", limit)
        self._connected = True

    def send_weights(self, version: int, *, blocking: bool = True) -> UpdateHandle:
        """Send the weights as they are now to every engine. Collective over the trainer workers.

        With Options.stage_send it returns when the weights have been copied. Else, with `blocking`, when this worker's weights
        have left and may change; without, at once, and the weights must not change before `handle.wait()` has returned.
        Versions only grow, also over a restart of the trainers. What becomes of a version still in flight, Options.when_newer
        says; nothing queues up. Raises as UpdateHandle.wait, for this version, or for the session.
        """
        seat = self._connected_seat()
        floor = max(self._sent, seat.machine.floor)
        if version <= floor:
            raise UsageError(
                f"send_weights({version}): versions only grow, and {floor} was sent before or is held by an engine; "
                f"send at least {floor + 1}"
            )
        seat.check()
        self._let_go_of_last(seat)
        stalled_at = seconds_since_epoch()
        seat.bind_live()
        seat.capture(version)
        self._sent = version
        seat.announce(version, stalled_at)
        handle = UpdateHandle(seat, version)
        if blocking and not seat.staged:
            limit = 2 * self._options.update_timeout_seconds + _GRACE_SECONDS
            seat.wait_for(lambda m: m.released >= version or version in m.endings, f"version {version} to leave", limit)
            if isinstance(seat.machine.endings.get(version), w.UpdateFailed):
                handle.wait()
        return handle

    def _let_go_of_last(self, seat: Seat) -> None:
        """Before a new version: what becomes of the last one, by Options.when_newer."""
        last, limit = self._sent, self._options.update_timeout_seconds + _GRACE_SECONDS
        if last < 0:
            return
        policy = self._options.when_newer or ("supersede" if seat.machine.staged_engines else "finish")
        if policy == "error" and last not in seat.machine.endings:
            raise UsageError(
                f"version {last} is still in flight; wait for its handle before the next send_weights, or choose another "
                "Options(when_newer=...)"
            )
        if policy == "supersede":  # its bytes have left; whether it is installed is for the hub to decide
            what = f"version {last} to leave"
            seat.wait_for(lambda m: m.released >= last or last in m.endings, what, limit)
        else:
            seat.wait_for(lambda m: last in m.endings, f"the end of version {last}", limit)

    @property
    def plan(self) -> Plan | None:
        """The plan in force, on every trainer; None before connect."""
        return self._seat.progress.plan if self._seat is not None else None

    @property
    def plan_facts(self) -> PlanFacts | None:
        """What the verifier counted in the plan; on rank 0 only, None elsewhere and before connect."""
        return self._hub.planned.facts if self._hub is not None and self._hub.planned is not None else None

    def close(self) -> None:
        """Leave the session. Engines keep the weights they have. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._seat is not None:
            self._seat.close()
        if self._hub is not None:
            self._hub.close()

    def _connected_seat(self) -> Seat:
        if self._seat is None or not self._connected or self._closed:
            raise UsageError("send_weights() needs a connected adapter: call connect() on every trainer worker first")
        return self._seat
