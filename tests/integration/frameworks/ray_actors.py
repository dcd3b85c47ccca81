"""The actors of the Ray test. What a user writes of their own stands between the marks; the guide shows it as it is here."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from tests.multiprocess import toy_job as toy

from weightbridge import ReceiverAdapter, SenderAdapter
from weightbridge.integrations.ray import Session, find_session

SPEC = toy.checkpoint_spec()
FAST: dict[str, Any] = {
    "slot_bytes": 24576,
    "connect_timeout_seconds": 60,
    "update_timeout_seconds": 30,
    "heartbeat_timeout_seconds": 10,
}


class _Trainer:
    """A toy trainer: `rank` of `size` holds the rows torch.chunk gives it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.model = toy.TrainerShard(SPEC, rank, size)

    def train(self, version: int) -> None:
        """What an optimiser would do: from now on these are the weights."""
        self.model.load_weights(toy.weights(SPEC, version).items())


class Trainer(_Trainer):
    # [ray trainer]
    def join(self, session: Session, engines: list[str], **options: Any) -> None:
        self.sender = SenderAdapter(
            group=(self.rank, self.size),
            checkpoint=SPEC,
            load_weights=self.model.load_weights,
            tensors=self.model.tensors,
            engines=engines,
            **session.here(**options),
        )
        self.sender.connect()

    def send(self, version: int) -> Any:
        return self.sender.send_weights(version).wait()

    # [/ray trainer]

    def close(self) -> None:
        self.sender.close()

    def place(self, session: Session) -> tuple[str, str]:
        """Node and data address that this worker would join with."""
        here = session.here()
        return here["node"], here["options"].data_host


class _EngineWorker:
    """Worker `rank` of an engine; `generate` is one inference step."""

    def __init__(self, engine: str, rank: int, size: int) -> None:
        self.engine, self.rank, self.size = engine, rank, size
        self.model = toy.engine_worker(SPEC, engine, rank)

    def held(self) -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in self.model.tensors().items()}


class EngineWorker(_EngineWorker):
    # [ray engine]
    def join(self, session: Session, **options: Any) -> None:
        self.receiver = ReceiverAdapter(
            group=(self.rank, self.size),
            checkpoint=SPEC,
            load_weights=self.model.load_weights,
            tensors=self.model.tensors,
            engine=self.engine,
            **session.here(**options),
        )

    def step(self) -> int:
        with self.receiver.step():  # polls, then keeps updates away until the step is done
            return self.generate()

    # [/ray engine]

    def generate(self) -> int:
        """Stands for inference: which version the step computes with."""
        return self.receiver.version

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self.receiver.close()

    def place(self, session: Session) -> tuple[str, str]:
        here = session.here()
        return here["node"], here["options"].data_host


class LateEngine(EngineWorker):
    """An engine that nobody on the driver knows: it finds the session by its name."""

    def __init__(self, engine: str) -> None:
        super().__init__("solo", 0, 1)
        self.engine = engine
        self.join(find_session("toy", timeout_seconds=60), **FAST, idle_install=True)

    def wait(self, seconds: float) -> int:
        return self.receiver.wait_ready(seconds)
