"""Processes of a run must not outlive the launcher, however that ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

__all__ = ["clean_up_when_terminated", "end_with_parent"]


def end_with_parent(parent: int) -> None:
    """From now on this process exits within a second of its parent's end. parent: its process id, as told by itself: it may be
    gone by now.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(70)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def clean_up_when_terminated() -> None:
    """Let SIGTERM end the launcher as Ctrl-C does: by way of its `finally` clauses, which end its children."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
