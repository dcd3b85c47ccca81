"""What one run of the demo is: written once by the launcher as JSON, read by every worker process."""

from __future__ import annotations

from pathlib import Path

import msgspec

from weightbridge.errors import UsageError

__all__ = ["TRAINERS_NODE", "DemoConfig", "EngineConfig", "Fault", "parse_fault"]

TRAINERS_NODE = "trainers"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout engine: its name, how many tensor-parallel workers it has and the node it plays."""

    name: str
    num_workers: int
    node: str

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(f"{self.name}/{rank}" for rank in range(self.num_workers))


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """For tests: `worker` kills itself with SIGKILL `delay_seconds` after the transfer of `version` began on it."""

    worker: str
    version: int
    delay_seconds: float


class DemoConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the workers of one run agree on.

    checkpoint: an existing folder. work_dir: scratch of this run (rendezvous files, logs). engines: those that are
    started. expected_engines: those the trainers wait for; more than `engines` only in a test of that fault.
    bandwidth: nominal bytes per second of each worker's network link, each direction.
    loader_wants: for tests; a tensor name on which the first engine's loader insists.
    """

    checkpoint: str
    work_dir: str
    endpoint: str
    num_trainers: int
    engines: tuple[EngineConfig, ...]
    expected_engines: tuple[str, ...]
    steps: int
    learning_rate: float
    prompt: str
    answer: str
    max_new_tokens: int
    bandwidth: float
    slot_bytes: int
    connect_timeout_seconds: float
    update_timeout_seconds: float
    debug: bool = False
    fault: Fault | None = None
    loader_wants: str = ""

    @property
    def trainers(self) -> tuple[str, ...]:
        return tuple(f"trainer/{rank}" for rank in range(self.num_trainers))

    @property
    def workers(self) -> tuple[str, ...]:
        """Every worker process of the run, trainers first."""
        return (*self.trainers, *(name for engine in self.engines for name in engine.workers))

    def engine(self, name: str) -> EngineConfig:
        """The engine of this name. Raises UsageError naming the known ones."""
        for engine in self.engines:
            if engine.name == name:
                return engine
        known = ", ".join(engine.name for engine in self.engines)
        raise UsageError(f"engine {name!r} is not part of this demo; its engines are {known}")

    def node_of(self, worker: str) -> str:
        """The node a worker plays on, by its name."""
        side = worker.rpartition("/")[0]
        return TRAINERS_NODE if side == "trainer" else self.engine(side).node

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> DemoConfig:
        return msgspec.json.decode(path.read_bytes(), type=cls)


def parse_fault(text: str) -> Fault:
    """Read "kill:WORKER@version=N" with an optional ",after=SECONDS". Raises UsageError that shows the form."""
    form = "expected kill:WORKER@version=N[,after=SECONDS], for example kill:tp3/1@version=2"
    action, _, rest = text.partition(":")
    worker, _, when = rest.partition("@")
    fields = dict(part.partition("=")[::2] for part in when.split(","))
    if action != "kill" or not worker or set(fields) - {"version", "after"} or "version" not in fields:
        raise UsageError(f"fault {text!r} is not understood; {form}")
    try:
        return Fault(worker=worker, version=int(fields["version"]), delay_seconds=float(fields.get("after", "0.05")))
    except ValueError as error:
        raise UsageError(f"fault {text!r} is not understood ({error}); {form}") from None
