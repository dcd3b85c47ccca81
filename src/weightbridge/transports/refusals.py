"""Warnings about strangers: they decide how often there is cause for one, so not each is written down."""

from __future__ import annotations

import logging

__all__ = ["Refusals"]

_ALL_UP_TO = 100


class Refusals:
    """Counts what was refused and logs the first hundred, then the 128th, the 256th and so on. Any thread may call it; a
    count that two threads miss between them does no harm."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self.count = 0

    def warn(self, text: str, *values: object) -> None:
        """Log a warning, with how many there have been. text: with places for `values`, as in `logging`."""
        self.count += 1
        if self.count <= _ALL_UP_TO or self.count.bit_count() == 1:
            self._log.warning(text + " (%d refused so far)", *values, self.count)
