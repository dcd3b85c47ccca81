"""The cells of the fault matrix with real processes: which fault strikes whom, when, in which mode; what each came to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "ENGINES",
    "KINDS",
    "MODES",
    "PHASES",
    "STRUCK_VERSION",
    "VICTIMS",
    "WORKERS",
    "Cell",
    "Outcome",
    "all_cells",
]

KINDS = (
    "kill", "stop", "cut", "half-open", "full memory", "corrupted byte", "duplicated messages", "reordered messages",
)  # fmt: skip
VICTIMS = ("trainer/0", "trainer/1", "tp/0", "tp/1")
PHASES = ("connect", "receive", "exchange", "install")
MODES = ("direct", "staged")
ENGINES = {"tp": 3, "solo": 1}
WORKERS = ("trainer/0", "trainer/1", *(f"{e}/{r}" for e, n in ENGINES.items() for r in range(n)))
STRUCK_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """mode: "direct", or "staged": trainers send from a host copy, engines receive into one. phase: of version 2, but for
    "connect". beside: who is stopped together with a victim that is stopped, and goes on when it does."""

    kind: str
    victim: str
    phase: str
    mode: str
    beside: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}, {' and '.join((self.victim, *self.beside))}, {self.phase}, {self.mode}"

    @property
    def strikes_nothing(self) -> str:
        """Why the fault has nothing to strike there; empty where it has."""
        if self.kind == "corrupted byte" and self.phase == "connect":
            return "no weights travel while workers connect"
        if self.kind == "corrupted byte" and self.phase == "install":
            return "no weights travel while they are installed"
        return ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a cell came to. word: what happened, for the table. wrong: what must not have happened; empty when all is well.

    seconds: from the strike to the last survivor's word of it; None where nobody was told. workers: what each wrote down.
    """

    cell: Cell
    word: str = ""
    wrong: list[str] = field(default_factory=list)
    seconds: float | None = None
    took_seconds: float = 0.0
    workers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def all_cells() -> Iterator[Cell]:
    for kind, victim, phase, mode in itertools.product(KINDS, VICTIMS, PHASES, MODES):
        yield Cell(kind=kind, victim=victim, phase=phase, mode=mode)
