"""Faults on purpose, for tests of the demo: a worker that dies in a transfer, a loader that asks for too much."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable

import torch

from weightbridge.cli.demo.config import DemoConfig
from weightbridge.errors import SpecError
from weightbridge.integrations.dtensor import LoadWeights

__all__ = ["arm_fault", "insist_on"]


def arm_fault(config: DemoConfig, worker: str, version: int, kill: Callable[[], None] | None = None) -> None:
    """Call when the transfer of `version` begins on `worker`: sets the timer that ends it if the run says so."""
    fault = config.fault
    if fault is not None and fault.worker == worker and fault.version == version:
        timer = threading.Timer(fault.delay_seconds, kill or _kill_self)
        timer.daemon = True
        timer.start()


def insist_on(name: str, load: LoadWeights) -> LoadWeights:
    """A loader that fails when the tensor `name` was not among those it was given."""

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        seen: set[str] = set()

        def watched() -> Iterable[tuple[str, torch.Tensor]]:
            for given, tensor in tensors:
                seen.add(given)
                yield given, tensor

        load(watched())
        if name not in seen:
            raise SpecError(
                f"the engine's loader wants tensor {name!r}, and the trainers offer {len(seen)} others; "
                f"add it to the trainers' checkpoint or take it from the engine's model",
                tensor=name,
            )

    return load_weights


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
