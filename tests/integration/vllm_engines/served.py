"""The part of a case that goes through `vllm serve`: five versions while completions stream, and one while it is idle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.integration.vllm_engines import checkpoints
from tests.integration.vllm_engines.engine import ENGINE, OPTIONS, Trainer
from tests.integration.vllm_engines.prompts import LONG_PROMPTS, NUM_VERSIONS, STREAMED_TOKENS
from tests.integration.vllm_engines.server import Load, serving

__all__ = ["run"]

_BETWEEN = 90  # tokens that come between two versions, of all clients together


def run(
    first: Path, second: Path, folder: Path, note: Callable[..., None], *, prefix_cache: str, tensor_parallel: int = 1
) -> None:
    """Version 5 is the checkpoint `second`, version 6 is `first` again, those before 5 lie between the two."""
    trainer = Trainer(first)
    folder.mkdir()
    environment = {
        "WEIGHTBRIDGE_ENDPOINT": trainer.endpoint,
        "WEIGHTBRIDGE_ENGINE": ENGINE,
        "WEIGHTBRIDGE_OPTIONS": json.dumps(OPTIONS),
        "WEIGHTBRIDGE_PREFIX_CACHE": prefix_cache,
    }
    try:
        with serving(first, folder, tensor_parallel=tensor_parallel, **environment) as server:
            note("serving", served_first=server.one_by_one(LONG_PROMPTS), served_again=server.one_by_one(LONG_PROMPTS))
            trainer.sender.connect()
            begin, end = checkpoints.read(first), checkpoints.read(second)
            load = Load(server, LONG_PROMPTS, STREAMED_TOKENS)
            try:
                for version in range(1, NUM_VERSIONS + 1):
                    load.let_stream(_BETWEEN)
                    _set_between(trainer.live, begin, end, version / NUM_VERSIONS)
                    trainer.send(version)
                load.let_stream(2 * len(LONG_PROMPTS) * STREAMED_TOKENS)  # some begin and end with the last one
            finally:
                load.stop()
            note("streamed", streamed=load.completions, failures=load.failures)
            note("asked 5", served_second=server.one_by_one(LONG_PROMPTS))
            _set_between(trainer.live, begin, end, 0.0)
            trainer.send(NUM_VERSIONS + 1)  # nobody asks anything: the engine is idle
            note(
                "sent 6", served_status=server.get("/weightbridge/status"), served_back=server.one_by_one(LONG_PROMPTS)
            )
    finally:
        trainer.sender.close()


def _set_between(
    live: dict[str, Any], begin: dict[str, torch.Tensor], end: dict[str, torch.Tensor], share: float
) -> None:
    """At share 0 and 1 the very values of the two checkpoints."""
    for name, tensor in live.items():
        if share in (0.0, 1.0):
            tensor.copy_(end[name] if share else begin[name])
        else:
            tensor.copy_(torch.lerp(begin[name].float(), end[name].float(), share))
