"""ReceiverAdapter: what a rollout worker holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import session_events as events
from weightbridge.coordinator.options import Group, Options, check_endpoint, rank_and_size
from weightbridge.coordinator.seat import LoadWeights, OnProgress, Outlived, Seat, Tensors, seconds_since_epoch
from weightbridge.coordinator.step_agreement import StepAgreement
from weightbridge.errors import TransferTimeout, UsageError, WeightBridgeError
from weightbridge.executor.device import wait_for_devices
from weightbridge.machine import messages as w
from weightbridge.machine.session import HUB_WORKER
from weightbridge.machine.worker import WorkerMachine

__all__ = ["ReceiverAdapter"]

_GRACE_SECONDS = 10.0


class _GivenUp(Exception):  # noqa: N818 (control flow)
    """The version in flight was given up while this worker stood still for it."""


class ReceiverAdapter:
    """One rollout worker's end. It joins in the background from construction on; everything else happens in polls."""

    def __init__(
        self, *, group: Group | tuple[int, int] | None, endpoint: str, checkpoint: CheckpointSpec, load_weights: LoadWeights,
        tensors: Tensors, engine: str, node: str = "", options: Options | None = None,
        before_update_hook: Callable[[int], None] | None = None,
        on_progress: OnProgress | None = None,
        on_request: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """group: of the workers of this engine, or (rank, size); asked for rank and size only.

        endpoint: the sender's. load_weights: the engine's own, as a function of an iterable of (checkpoint name, full
        tensor); called at connect to learn the layout, and at install for what it computes. tensors: its live tensors by
        name. engine: this engine's name, unique in the job. node: name of this machine, default the engine's name.
        before_update_hook(version): runs on the worker's thread when the engine stands still, before weights are
        overwritten: the place to drop caches that belong to the old weights.
        on_progress: told of each load while this worker is probed.
        on_request: called on a thread of the library whenever polls are waited for: wake an engine that has no requests,
        and let all its workers poll until `requested` is False on each. It must return at once.
        """
        self._options = options or Options()
        check_endpoint(endpoint, self._options.token)
        if not engine or "/" in engine:
            raise UsageError(f"engine must be a name without a slash, got {engine!r}")
        rank, size = rank_and_size(group)
        self._hook = before_update_hook
        self._tensors = tensors
        self._closed = False
        self._seat = Seat(
            role="rollout", engine=engine, rank=rank, size=size, node=node or engine, endpoint=endpoint, checkpoint=checkpoint,
            load_weights=load_weights, tensors=tensors, options=self._options,
            hear=self._hear, ended=self._session_ended,
            on_progress=on_progress,
        )  # fmt: skip
        self._agreement = StepAgreement(
            window=self._options.window, idle_install=self._options.idle_install, changed=self._seat.changed,
            post=self._seat.post, install_idle=self._install_idle, wanted=on_request,
        )  # fmt: skip
        self._gate = self._agreement.gate
        self._seat.start()

    def poll_requests(self) -> bool:
        """Call between inference steps, on every worker of the engine, the same number of times on each.

        Nearly always returns False at once: no lock, no system call. When the trainers connect or send a version, all
        workers of the engine stop in the same poll; the call then returns when this worker is probed, or holds the new
        version whole (True).

        Raises WorkerError, TransferTimeout or ProbeError when the session is over (every later call raises the same), and
        IncompleteUpdateError while this engine holds a mixture of versions: do not serve from it, but go on polling, until a
        later version makes it whole.
        """
        gate = self._gate
        count = gate.count + 1
        gate.count = count
        if count < gate.gate:
            return False
        return self._poll_at_gate(count)

    @contextmanager
    def step(self) -> Iterator[bool]:
        """Poll, then hold the engine's step lock while the engine computes; yields what poll_requests returned.

        With Options.idle_install, run every inference step inside it: whenever the lock is free, the engine is
        idle and its weights can be updated without a poll. Raises as poll_requests.
        """
        lock = self._agreement.step_lock
        if not lock.acquire(timeout=self._options.update_timeout_seconds + _GRACE_SECONDS):
            self._seat.check()
            raise TransferTimeout(
                f"{self._seat.name} waited {self._options.update_timeout_seconds + _GRACE_SECONDS:.0f} s for an update of the "
                "idle engine to end; look at the other workers of the session",
                waiting_for=(HUB_WORKER,), seconds=self._options.update_timeout_seconds,
            )  # fmt: skip
        try:
            yield self.poll_requests()
        finally:
            lock.release()

    @property
    def requested(self) -> bool:
        """Whether the session waits for polls of this worker: for connecting, or to install a version."""
        return self._agreement.requested

    @property
    def version(self) -> int:
        """The version that this worker serves; -1 before the first update."""
        return self._seat.machine.version

    @property
    def state(self) -> str:
        """joining, ready, updating, poisoned (do not serve), failed or closed: what a router asks before it sends traffic.

        An engine whose trainers are gone and that joins the next session (Options.when_trainers_fail="rejoin") is ready as long
        as what it holds is whole.
        """
        machine = self._seat.machine
        if machine.poisoned_by is not None:
            return "poisoned"
        if self._seat.failure is not None:
            return "failed"
        if machine.closed:
            return "closed"
        if machine.version < 0:
            return "joining"
        return "updating" if machine.begun[0] > max(machine.version, machine.failed_version) else "ready"

    @property
    def last_failure(self) -> WeightBridgeError | None:
        """Why the session is over, or the newest version that was given up and who is to blame; None if nothing ever failed.

        An engine that still holds a whole version goes on after a version was given up: its polls do not raise.
        """
        failure = self._seat.newest_failure
        return None if failure is None else self._seat.error_of(failure)

    def wait_ready(self, timeout_seconds: float) -> int:
        """Block until this worker serves a version, for a router or a health check on another thread than the one that polls.

        Returns the version. Raises TransferTimeout, or what has ended the session.
        """
        self._seat.wait_for(lambda m: m.version >= 0 and m.poisoned_by is None, "a first version", timeout_seconds)
        return self.version

    def close(self) -> None:
        """Leave the session; the weights stay as they are. Idempotent."""
        if not self._closed:
            self._closed = True
            self._seat.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _hear(self, message: w.Message) -> None:
        """On the control thread, after the worker's machine has heard it."""
        if self._seat.machine.poisoned_by is not None:
            self._agreement.block(True)
        self._agreement.hear(message)

    def _session_ended(self, again: bool) -> None:
        """On the control thread, with the seat's `changed` held."""
        if again:
            self._agreement.renew()
            self._agreement.block(self._seat.machine.poisoned_by is not None)
        else:
            self._agreement.end()

    def _poll_at_gate(self, count: int) -> bool:
        stopped_at = seconds_since_epoch()
        if self._seat.machine.poisoned_by is None:
            self._seat.check()
        if count < self._agreement.agreed_gate:  # nothing is asked of this poll, but polls are looked at
            return self._served_nothing()
        self._seat.control.call(lambda: self._agreement.reached(count))
        limit = self._options.connect_timeout_seconds + self._options.update_timeout_seconds
        with self._seat.changed:  # the session does not change between the request and the look at its machine
            request = self._agreement.wait_at_gate(count, self._seat.check, limit)
            machine, session = self._seat.machine, self._agreement.session
        return self._served_nothing() if request is None else self._serve(request, session, machine, stopped_at)

    def _served_nothing(self) -> bool:
        """What a poll that installed nothing comes to: the engine goes on with what it has, unless that is a mixture."""
        poisoned = self._seat.machine.poisoned_by
        if poisoned is not None:
            raise self._seat.error_of(poisoned)
        return False

    def _install_idle(self, request: int, session: int) -> None:
        """On a thread of its own, the step lock held."""
        with self._seat.changed:
            machine = self._seat.machine
            if session != self._agreement.session:
                return
        try:
            wait_for_devices(self._tensors)  # the engine's last step is on a stream that this thread knows nothing of
            self._serve(request, session, machine, seconds_since_epoch())
        except WeightBridgeError:
            pass  # the engine's next poll raises it
        except Exception as error:
            self._seat.report(error, machine)

    def _serve(self, request: int, session: int, machine: WorkerMachine, stopped_at: float) -> bool:
        """The engine stands still: be probed, or take the version in. True when weights were installed.

        session, machine: of the session that asks, which may end meanwhile.
        """
        seat = self._seat

        def done() -> None:
            seat.control.call(lambda: self._agreement.done(request, session))

        try:
            if self._agreement.is_connect(request):
                seat.run_probe(machine)
                done()
                return self._served_nothing()
            return self._install(machine, stopped_at, done)
        except Outlived:  # whoever asked for it is gone
            return self._served_nothing()

    def _install(self, machine: WorkerMachine, stopped_at: float, done: Callable[[], None]) -> bool:
        """Take in the version that the session of `machine` has begun. done: tells the agreement that it is over."""
        seat, version = self._seat, machine.begun[0]
        ended_at = {"agreement": seconds_since_epoch()}  # stages of the stall
        try:
            if self._hook is not None:
                self._hook(version)
            if seat.staged:
                seat.install(version)
            else:
                self._take_in(machine, version)
                ended_at = {"agreement": max(seat.allowed_at, stopped_at), "transfer": seconds_since_epoch()}
        except _GivenUp:
            done()
            return self._served_nothing()
        except Outlived:
            raise
        except Exception as error:
            if not machine.over:
                seat.report(error, machine)
                seat.progress.abort(error)  # it would wait for a permission to overwrite that nobody gives any more
            raise
        seat.run_loader(version)
        seat.installed(version)
        seat.control.call(lambda: self._agreement.block(False))
        done()
        now = seconds_since_epoch()
        seat.post_resumed(machine, version, stopped_at, now, stage=_longest(stopped_at, {**ended_at, "install": now}))
        seat.tell(events.Installed, version=version, stall_seconds=now - stopped_at)
        return True

    def _take_in(self, machine: WorkerMachine, version: int) -> None:
        """Direct: let the version's bytes into the live weights, over as many attempts as it takes; until it is whole."""
        seat, attempt = self._seat, -1
        limit = self._options.update_timeout_seconds + self._options.connect_timeout_seconds + _GRACE_SECONDS

        def news(machine: WorkerMachine) -> bool:
            return machine.committed >= version or machine.failed_version >= version or machine.begun[1] != attempt

        while machine.committed < version:
            if machine.failed_version >= version:
                raise _GivenUp
            if machine.begun[1] != attempt:
                attempt = machine.begun[1]
                seat.bind_live()
                seat.standing(machine, version, attempt)
            seat.wait_for(news, f"version {version} to be whole", limit, of=machine)


def _longest(began_at: float, ended_at: Mapping[str, float]) -> str:
    """Of stages that follow on each other, the one that took longest. ended_at: in their order, at least one."""
    begun = (began_at, *ended_at.values())
    return max(zip(ended_at, ended_at.values(), begun, strict=False), key=lambda stage: stage[1] - stage[2])[0]
