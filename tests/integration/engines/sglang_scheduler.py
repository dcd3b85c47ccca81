"""One rank of SGLang's Qwen3-MoE under SGLang's own scheduler class with the plugin's hook, without an engine around it.

SGLang's plugin code puts the hook on `Scheduler.get_next_batch_to_run`. What stands in for the engine is a scheduler object
that has the model and an answer for each thing it is asked, and a loop that goes its rounds until the last version is there.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from tests.integration.engines import models
from tests.integration.engines.sglang_worker import build
from tests.integration.engines.side import finish, memory_of, rng_weights, seat_from_argv

# What was imported last has made the stand-ins without which SGLang cannot be imported.
# isort: split
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry

from weightbridge.integrations import sglang
from weightbridge.probe import discover_tensors

VERSIONS = 3
LIMIT_SECONDS = 120


class Rounds(Scheduler):
    """SGLang's scheduler, with nothing in it but a model; `busy`: requests run, so the cache cannot be flushed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model, device="cpu"))
        self.busy, self.flushed, self.told = False, 0, []

    def is_fully_idle(self) -> bool:
        return not self.busy

    def flush_cache(self) -> bool:
        self.flushed += 1
        return True

    def record_weight_version_change(self, new_version: str) -> None:
        self.told.append(new_version)


if __name__ == "__main__":
    seat = seat_from_argv()
    model, spec = build(seat, models.SPARSE_MOE), models.moe_spec(models.SPARSE_MOE)
    model.load_weights(rng_weights(spec, 1000))
    Scheduler.get_next_batch_to_run = lambda self: None  # there is no batch; the hook comes before it
    sglang.plugin()
    HookRegistry.apply_hooks()
    scheduler, kept, give_up = Rounds(model), {}, time.monotonic() + LIMIT_SECONDS
    serving = torch.tensor([1])
    while serving:
        if time.monotonic() > give_up:
            raise SystemExit(f"rank {seat.rank} is at version {scheduler._weightbridge.receiver.version}")
        before = len(scheduler.told)
        scheduler.busy = before == 1  # while version 2 goes in, requests run
        scheduler.get_next_batch_to_run()
        if len(scheduler.told) > before:
            kept[scheduler.told[-1]] = [memory_of(t) for t in discover_tensors(model).values()]
        serving = torch.tensor([int(len(scheduler.told) < VERSIONS)])
        dist.all_reduce(serving)  # SGLang's ranks receive requests together: they go their rounds in step
    differing = []
    for version in range(1, VERSIONS + 1):  # the oracle: the model's own loader
        model.load_weights(rng_weights(spec, version))
        now = [memory_of(t) for t in discover_tensors(model).values()]
        differing += [version for a, b in zip(now, kept[str(version)], strict=True) if not np.array_equal(a, b)]
    told, flushed = scheduler.told, scheduler.flushed
    (seat.folder / f"seen{seat.rank}").write_text(f"{told} {flushed} {differing}")
    scheduler._weightbridge.receiver.close()
    finish()
