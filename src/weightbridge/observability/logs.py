"""Events to the standard logging; several observers as one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from weightbridge.coordinator import session_events as e
from weightbridge.observability.words import in_words

__all__ = ["LoggingObserver", "compose", "level_of"]

_T = TypeVar("_T")


class LoggingObserver:
    """Logs every event as one line. It configures nothing: handlers and levels are the application's.

    The record carries the event itself as `record.event`, for structured handlers.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        """logger: by default "weightbridge.events"."""
        self._logger = logger or logging.getLogger("weightbridge.events")

    def __call__(self, event: e.SessionEvent) -> None:
        level = level_of(event)
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s: %s", event.worker, in_words(event), extra={"event": event})


def level_of(event: e.SessionEvent) -> int:
    """DEBUG for what comes many times, WARNING for what a person should look at, INFO for the rest."""
    match event:
        case e.Progress() | e.Probing():
            return logging.DEBUG
        case e.UpdateFailed() | e.EngineChanged(state="lost" | "poisoned"):
            return logging.WARNING
        case e.SessionEnded(kind=kind) if kind:
            return logging.WARNING
        case _:
            return logging.INFO


def compose(*observers: Callable[[_T], None]) -> Callable[[_T], None]:
    """One observer that tells all of them, in this order; for Options(on_event=...) and Options(observe=...) alike.

    Each hears everything whatever the others do: one that raises is logged once.
    """
    guarded = [e.guarded_observer(observer) for observer in observers]

    def tell(what: _T) -> None:
        for observer in guarded:
            observer(what)

    return tell
