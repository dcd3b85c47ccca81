"""An engine worker's part in agreeing on a step: the shell around `machine.AgreementMember`.

The machine runs on the control thread. The polling thread only meets it at the gate, in `wait_at_gate`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from weightbridge.coordinator.gate import Gate
from weightbridge.coordinator.standstill import Patience
from weightbridge.errors import TransferTimeout
from weightbridge.machine import agreement as a
from weightbridge.machine import messages as w
from weightbridge.machine.agreement_words import for_member, of_member
from weightbridge.machine.session import HUB_WORKER

__all__ = ["StepAgreement"]


class StepAgreement:
    """Methods say which thread calls them."""

    def __init__(
        self, *, window: int, idle_install: bool, changed: threading.Condition,
        post: Callable[[w.Message], None], install_idle: Callable[[int, int], None],
        wanted: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """changed: guards what the polling thread waits for. install_idle(request, session): called on a thread of its own to
        install under the step lock; it must end with `done` being called on the control thread. wanted: called on the
        control thread whenever a poll to come will have to stop."""
        self.gate = Gate()
        self.step_lock = threading.Lock()
        self._window = window
        self._member = a.AgreementMember(window)
        self._idle_install = idle_install
        self._changed = changed
        self._post = post
        self._install_idle = install_idle
        self._wanted = wanted
        self._install: int | None = None  # request to install on the polling thread; guarded by _changed
        self._connect_requests: set[int] = set()
        self.agreed_gate = a.NO_GATE  # what the agreement wants of the gate; the control thread writes it
        self._blocked = False
        self._ended = False
        self.session = 0  # counts renewals
        self._idle_thread: threading.Thread | None = None

    # --- on the polling thread ----------------------------------------------------------------------------------------------

    def wait_at_gate(self, count: int, check: Callable[[], None], seconds: float) -> int | None:
        """Poll number `count` met the gate and has been reported. The request to install, or None: go on.

        check: raises what has ended the session. Raises TransferTimeout when no decision came.
        """
        patience = Patience(seconds)
        with self._changed:
            while True:
                check()
                if self._install is not None:
                    request, self._install = self._install, None
                    return request
                if count < self.agreed_gate or self._ended:  # in good order: else check() has raised
                    return None
                step_seconds = patience.step_seconds()
                if step_seconds <= 0:
                    raise TransferTimeout(
                        f"an engine worker waited {seconds:.0f} s at poll {count} for the decision on the step to install at; "
                        "look at the process of trainer rank 0, which hosts the session",
                        waiting_for=(HUB_WORKER,), seconds=seconds,
                    )  # fmt: skip
                self._changed.wait(step_seconds)

    @property
    def requested(self) -> bool:
        """Any thread: whether a poll is agreed on, or will be."""
        return self.agreed_gate != a.NO_GATE

    def is_connect(self, request: int) -> bool:
        """Any thread: whether a request is for probing rather than for an update."""
        return request in self._connect_requests

    # --- on the control thread ----------------------------------------------------------------------------------------------

    def hear(self, message: w.Message) -> None:
        """A word of the hub about the agreement; anything else is ignored."""
        if isinstance(message, w.Propose) and message.connect:
            self._connect_requests.add(message.request)
        if (event := for_member(message)) is not None:
            self._feed(event)

    def reached(self, count: int) -> None:
        self._feed(a.Reached(count))

    def done(self, request: int, session: int) -> None:
        """session: what `session` was when the request was taken: requests of two sessions may have the same number."""
        if session == self.session:
            self._feed(a.InstallDone(request))

    def end(self) -> None:
        """The session has failed: every later poll stops and looks; then let go of everything.

        In this order, because an idle install may still be writing when its step lock is released.
        """
        self._ended = True
        self._store_gate()
        if self._member.request:
            self._feed(a.Aborted(self._member.request))

    def renew(self) -> None:
        """The session is over and another one will come, with requests of its own: nobody waits or holds a lock any more."""
        if self._member.request:
            self._feed(a.Aborted(self._member.request))
        self._member = a.AgreementMember(self._window)
        self._connect_requests.clear()
        self.session += 1

    def _feed(self, event: a.MemberEvent) -> None:
        for instruction in self._member.handle(event):
            match instruction:
                case a.ReadCount():
                    self._feed(a.CountRead(self.gate.count))
                case a.WriteGate(value=value):
                    self._write_gate(value)
                case a.TryLock():
                    held = self._idle_install and self.step_lock.acquire(blocking=False)
                    self._feed(a.LockTried(held, self.gate.count))
                case a.ReleaseLock():
                    self.step_lock.release()
                case a.Install(request=request, idle=idle):
                    self._begin_install(request, idle)
                case a.CancelInstall():
                    with self._changed:
                        self._install = None
                case _:
                    if (message := of_member(instruction)) is not None:
                        self._post(message)

    def _begin_install(self, request: int, idle: bool) -> None:
        if idle:
            self._idle_thread = threading.Thread(
                target=self._install_idle, args=(request, self.session), name="wb-idle-install", daemon=True
            )
            self._idle_thread.start()
            return
        with self._changed:
            self._install = request
            self._changed.notify_all()

    def block(self, blocked: bool) -> None:
        """Every poll is looked at, although nothing is agreed on: the engine must not serve what it holds."""
        if blocked != self._blocked:
            self._blocked = blocked
            self._store_gate()

    def _write_gate(self, value: int) -> None:
        self.agreed_gate = value
        self._store_gate()

    def _store_gate(self) -> None:
        self.gate.gate = 0 if self._ended or self._blocked else self.agreed_gate
        with self._changed:
            self._changed.notify_all()
        if self._wanted is not None and self.gate.gate != a.NO_GATE:
            self._wanted()
