"""Looking on at a live job from outside: an observer's line to the hub."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator

from weightbridge.coordinator.line import GONE_SECONDS, Line
from weightbridge.coordinator.options import check_endpoint
from weightbridge.coordinator.standstill import Standstill
from weightbridge.errors import ConnectError, WorkerError
from weightbridge.machine import messages as w
from weightbridge.machine.session import Phase
from weightbridge.machine.status import OBSERVER, Status, decode_for_observer

__all__ = ["watch"]

_POLL_SECONDS = 0.25
_HEARTBEAT_SECONDS = 1.0


def watch(
    endpoint: str, *, token: bytes = b"", connect_timeout_seconds: float = 10.0, silence_timeout_seconds: float = 15.0
) -> Iterator[Status]:
    """The states of the job whose hub listens there, as it tells them, about one a second, until it ends in good order.

    The caller may stop at any time; the line is closed then. Looking on changes nothing in the job. Raises UsageError
    (endpoint), ConnectError (nobody answers, wrong token, not let in, silence) and WorkerError when the session fails,
    with its causes.
    """
    check_endpoint(endpoint, token)
    watcher = _Watcher(endpoint, token, connect_timeout_seconds, silence_timeout_seconds)
    try:
        yield from watcher.states()
    finally:
        watcher.close()


class _Watcher:
    def __init__(self, endpoint: str, token: bytes, connect_timeout: float, silence_timeout: float) -> None:
        self._endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._silence_timeout = silence_timeout
        self._over = False
        self._has_failed = False  # the session, by its own Status; who and how comes with a Failure
        self._line = Line(endpoint, token)
        self._wake_read, self._wake_write = os.pipe()  # the line's poll wants one; nobody wakes this loop
        self._join = w.Join(
            protocol=w.PROTOCOL_VERSION, worker=f"{OBSERVER}/{secrets.token_hex(8)}", role=OBSERVER, engine="", rank=0,
            size=1, node=socket.gethostname()[:256], bandwidth=0.0, spec_digest="", dtypes=(),
        )  # fmt: skip

    def states(self) -> Iterator[Status]:
        standstill = Standstill()
        while not self._over:
            now, stood_still = standstill.look()
            self._line.stood_still(stood_still, now)
            self._line.speak(self._join, now, heartbeat_seconds=_HEARTBEAT_SECONDS)
            self._check(now)
            self._line.socket.poll(_POLL_SECONDS, self._wake_read)
            for data in self._line.socket.receive():
                self._line.last_heard = time.monotonic()
                message = self._understood(data)
                if isinstance(message, Status):
                    yield message

    def close(self) -> None:
        if self._line.joined and not self._over:
            self._line.socket.send(w.encode(w.Goodbye()))
        self._line.socket.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _understood(self, data: bytes) -> w.Message:
        message = decode_for_observer(data)
        match message:
            case w.Welcome():
                self._line.joined = True
            case Status(phase=phase):
                self._line.joined = True
                self._over |= phase == Phase.CLOSED.value
                self._has_failed |= phase == Phase.FAILED.value
            case w.Rejected(reason=reason):
                raise ConnectError(
                    f"the session at {self._endpoint} does not let observers in: {reason}",
                    causes={self._join.worker: reason},
                )
            case w.Failure(kind=kind, causes=causes):
                self._over = True
                what = "; ".join(f"{worker}: {cause}" for worker, cause in causes.items())
                raise WorkerError(f"the session failed, {kind}: {what}", causes=dict(causes))
            case w.Closed():
                self._over = True
        return message

    def _check(self, now: float) -> None:
        if self._line.socket.is_refused and not self._line.joined:
            raise ConnectError(
                f"not let in at {self._endpoint}: the token is not the session's; give the one the workers have "
                "(--token-file)"
            )
        if not self._line.joined and now - self._line.begun > self._connect_timeout:
            raise ConnectError(
                f"nobody answered at {self._endpoint} within {self._connect_timeout:g} s; is that where the trainers' rank 0 "
                "listens, and does its job run?"
            )
        if self._line.joined:
            self._check_hub(now)

    def _check_hub(self, now: float) -> None:
        gone = self._line.gone_seconds(now, self._silence_timeout) > 0
        if self._has_failed and (gone or now - self._line.last_heard > GONE_SECONDS):
            raise WorkerError(
                f"the session at {self._endpoint} has failed; its workers' errors and logs say who and how", causes={}
            )
        if gone:
            raise ConnectError(f"the hub at {self._endpoint} has closed its connection: it has ended, or died")
        silent = now - self._line.last_heard
        if silent > self._silence_timeout:
            raise ConnectError(
                f"the hub at {self._endpoint} has said nothing for {silent:.0f} s: it has died, or cannot be "
                "reached any more"
            )
