"""Progress bars on a terminal: for connecting, and for updates that last."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from weightbridge.coordinator import session_events as e

__all__ = ["ProgressBars"]

_CONNECTING = ("gathering", "probing", "planning", "lowering", "connecting", "aborting")
_PHASES = "phases"


class ProgressBars:
    """Draws a bar for each worker of this process that is probed, the session's phase while it connects, and a bar for
    each update that has lasted `after_seconds`. Draws nothing where the console is no terminal. A context manager;
    thread-safe.
    """

    def __init__(self, console: Console | None = None, *, after_seconds: float = 2.0) -> None:
        """console: by default standard error. after_seconds: by the events' own clock, so that quick updates do not flicker."""
        self._console = console or Console(stderr=True)
        self._after_seconds = after_seconds
        self._lock = threading.Lock()
        self._bars: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}  # (worker, what)
        self._begun: dict[str, tuple[int, float]] = {}  # worker -> (version, when its update began)
        self._closed = False

    def __call__(self, event: e.SessionEvent) -> None:
        if not self._console.is_terminal:
            return
        with self._lock:
            if not self._closed:
                self._show(event)
                self._end_if_idle()

    def _show(self, event: e.SessionEvent) -> None:
        me = event.worker
        match event:
            case e.PhaseChanged(phase=phase):
                self._phase(me, phase)
            case e.Probing(what=what, done=done, total=total):
                self._bar(me, "probe", f"{me}: {what}", done, total)
            case e.Connected():
                self._drop(me, "probe")
                self._drop(me, _PHASES)
            case e.UpdateStarted(version=version, at=at):
                if self._begun.get(me, (-1, 0.0))[0] != version:
                    self._begun[me] = (version, at)
            case e.Progress(version=version, at=at, round=round_, rounds=rounds):
                began_at = self._begun.setdefault(me, (version, at))[1]
                if at - began_at >= self._after_seconds:
                    self._bar(me, "update", f"{me}: version {version}", round_, rounds)
            case e.Installed() | e.UpdateFinished() | e.UpdateFailed() | e.Superseded():
                if self._begun.get(me, (event.version, 0.0))[0] <= event.version:
                    self._begun.pop(me, None)
                    self._drop(me, "update")
            case e.SessionEnded():
                self._begun.pop(me, None)
                for what in ("probe", "update", _PHASES):
                    self._drop(me, what)

    def _phase(self, worker: str, phase: str) -> None:
        if phase not in _CONNECTING:
            self._drop(worker, _PHASES)
        else:
            self._bar(worker, _PHASES, f"session: {phase}", 0, None)

    def _bar(self, worker: str, what: str, text: str, done: int, total: int | None) -> None:
        """Show it, at this much; with no total it pulses."""
        if self._bars is None:
            self._bars = Progress(
                SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
                TimeElapsedColumn(), console=self._console, transient=True,
            )  # fmt: skip
            self._bars.start()
        key = (worker, what)
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(text, total=total)
        self._bars.update(self._tasks[key], description=text, completed=done, total=total)
        if what == "probe" and done == total:
            self._drop(worker, what)

    def _drop(self, worker: str, what: str) -> None:
        task = self._tasks.pop((worker, what), None)
        if task is not None and self._bars is not None:
            self._bars.remove_task(task)

    def _end_if_idle(self) -> None:
        """Without a bar there is no thread that draws, and the terminal is the application's."""
        if self._bars is not None and not self._tasks:
            self._bars.stop()
            self._bars = None

    def close(self) -> None:
        """Remove what is drawn. Idempotent; later events draw nothing."""
        with self._lock:
            self._closed = True
            self._tasks.clear()
            self._end_if_idle()

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
