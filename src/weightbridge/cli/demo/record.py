"""Everything the workers have reported so far, as data. No I/O: the launcher feeds it, the verdict reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightbridge.cli.demo.config import DemoConfig
from weightbridge.cli.demo.messages import (
    Answered,
    Digested,
    Failed,
    Message,
    Phase,
    PlanMade,
    Referenced,
    Step,
    Trained,
    Updated,
)

__all__ = ["DemoRecord"]


@dataclass(slots=True, kw_only=True)
class DemoRecord:
    """What is known of a run. Keys of `digests` are (version, worker), of `answers` (version, engine); version -1 is
    the state before the first update.
    """

    config: DemoConfig
    plan: PlanMade | None = None
    trained: dict[int, Trained] = field(default_factory=dict)
    updated: dict[int, Updated] = field(default_factory=dict)
    digests: dict[tuple[int, str], Digested] = field(default_factory=dict)
    answers: dict[tuple[int, str], Answered] = field(default_factory=dict)
    reference: Referenced | None = None
    phases: dict[str, str] = field(default_factory=dict)
    failures: dict[str, Failed] = field(default_factory=dict)

    def apply(self, worker: str, message: Message) -> None:
        """Take in one message. Of repeated reports of the same thing the first one counts."""
        if isinstance(message, Phase):
            self.phases[worker] = message.text
        elif isinstance(message, PlanMade):
            self.plan = self.plan or message
        elif isinstance(message, Trained):
            self.trained.setdefault(message.version, message)
        elif isinstance(message, Updated):
            self.updated.setdefault(message.version, message)
        elif isinstance(message, Digested):
            self.digests.setdefault((message.version, worker), message)
        elif isinstance(message, Answered):
            self.answers.setdefault((message.version, worker.rpartition("/")[0]), message)
        elif isinstance(message, Referenced):
            self.reference = self.reference or message
        elif isinstance(message, Failed):
            self.failures.setdefault(worker, message)

    def version_is_reported(self, version: int) -> bool:
        """Whether the update's report and every worker's digests of it are in."""
        holders = (self.config.trainers[0], *self.engine_workers)
        return version in self.updated and all((version, worker) in self.digests for worker in holders)

    @property
    def engine_workers(self) -> tuple[str, ...]:
        return tuple(worker for engine in self.config.engines for worker in engine.workers)

    @property
    def final_answers(self) -> dict[str, tuple[Step, ...]] | None:
        """Each engine's answer on the last version; None while one is missing."""
        keys = [(self.config.steps, engine.name) for engine in self.config.engines]
        if any(key not in self.answers for key in keys):
            return None
        return {key[1]: self.answers[key].steps for key in keys}

    @property
    def complete(self) -> bool:
        """Whether nothing is left to wait for."""
        versions = all(self.version_is_reported(version) for version in range(1, self.config.steps + 1))
        return versions and self.reference is not None and self.final_answers is not None
