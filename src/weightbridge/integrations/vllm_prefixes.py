"""Cached prefixes in vLLM's scheduler when weights change: requests that are salted by version, or computed anew.

Both reach into the scheduler and its requests, on the engine core's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["Salt", "recompute_running"]

_MARK = "\x1fweightbridge:"


class Salt:
    """Makes prefixes of one version be found by requests of that version only. version: empty until there is one."""

    def __init__(self) -> None:
        self.version = ""

    def on_arrival(self, request: Any) -> None:
        """A request as it came from the front end, before its blocks are hashed; on any thread."""
        if self.version:
            request.cache_salt = self._salted(request.cache_salt)

    def renew(self, request: Any) -> None:
        """A request of the scheduler that has computed nothing: it may have been hashed for the version before."""
        salt = self._salted(request.cache_salt)
        if self.version and request.cache_salt != salt:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()

    def _salted(self, salt: str | None) -> str:
        return (salt or "").partition(_MARK)[0] + _MARK + self.version


def recompute_running(scheduler: Any, which: Callable[[Any], bool]) -> None:
    """Put some of the running requests back to waiting: their prompts are computed again, from the first token.

    Nothing may be in flight.
    """
    now = time.monotonic()
    for request in reversed([r for r in scheduler.running if which(r)]):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now, drop_stale_output=True)
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
