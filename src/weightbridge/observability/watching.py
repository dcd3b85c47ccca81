"""Looking on at a live job from outside: an observer's line to the hub."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator

from weightbridge.coordinator.options import check_endpoint
from weightbridge.coordinator.wire import WorkerSocket
from weightbridge.errors import ConnectError, WorkerError
from weightbridge.machine import messages as w
from weightbridge.machine.session import Phase
from weightbridge.machine.status import OBSERVER, Status, decode_for_observer

__all__ = ["watch"]

_POLL_SECONDS = 0.25
_HEARTBEAT_SECONDS = 1.0
_GONE_SECONDS = 2.0  # how long a hub that has hung up, or whose session has failed, is listened to


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
        self._joined = self._over = False
        self._asked_on = 0  # number of the connection that the Join went over
        self._begun = self._last_heard = time.monotonic()
        self._next_beat = 0.0
        self._down_since: float | None = None  # the connection
        self._has_failed = False  # the session, by its own Status; who and how comes with a Failure
        self._socket = WorkerSocket(endpoint, token)
        self._wake_read, self._wake_write = os.pipe()  # the socket's poll wants one; nobody wakes this loop
        self._join = w.Join(
            protocol=w.PROTOCOL_VERSION, worker=f"{OBSERVER}/{secrets.token_hex(8)}", role=OBSERVER, engine="", rank=0,
            size=1, node=socket.gethostname()[:256], bandwidth=0.0, spec_digest="", dtypes=(),
        )  # fmt: skip

    def states(self) -> Iterator[Status]:
        while not self._over:
            self._speak()
            self._check()
            self._socket.poll(_POLL_SECONDS, self._wake_read)
            for data in self._socket.receive():
                self._last_heard = time.monotonic()
                message = self._understood(data)
                if isinstance(message, Status):
                    yield message

    def close(self) -> None:
        if self._joined and not self._over:
            self._socket.send(w.encode(w.Goodbye()))
        self._socket.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _understood(self, data: bytes) -> w.Message:
        message = decode_for_observer(data)
        match message:
            case w.Welcome():
                self._joined = True
            case Status(phase=phase):
                self._joined = True
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

    def _speak(self) -> None:
        now = time.monotonic()
        if not self._joined and self._socket.num_connections > self._asked_on:
            self._asked_on = self._socket.num_connections
            self._socket.send(w.encode(self._join))
        if self._joined and now >= self._next_beat:
            self._next_beat = now + _HEARTBEAT_SECONDS
            self._socket.send(w.encode(w.Heartbeat()))

    def _check(self) -> None:
        now = time.monotonic()
        if self._socket.is_refused and not self._joined:
            raise ConnectError(
                f"not let in at {self._endpoint}: the token is not the session's; give the one the workers have "
                "(--token-file)"
            )
        if not self._joined and now - self._begun > self._connect_timeout:
            raise ConnectError(
                f"nobody answered at {self._endpoint} within {self._connect_timeout:g} s; is that where the trainers' rank 0 "
                "listens, and does its job run?"
            )
        if self._joined:
            self._check_hub(now)

    def _check_hub(self, now: float) -> None:
        if self._socket.is_connected:
            self._down_since = None
        elif self._down_since is None:
            self._down_since = now
        gone = self._down_since is not None and now - self._down_since > min(_GONE_SECONDS, self._silence_timeout)
        if self._has_failed and (gone or now - self._last_heard > _GONE_SECONDS):
            raise WorkerError(
                f"the session at {self._endpoint} has failed; its workers' errors and logs say who and how", causes={}
            )
        if gone:
            raise ConnectError(f"the hub at {self._endpoint} has closed its connection: it has ended, or died")
        if now - self._last_heard > self._silence_timeout:
            raise ConnectError(
                f"the hub at {self._endpoint} has said nothing for {now - self._last_heard:.0f} s: it has died, or cannot be "
                "reached any more"
            )
