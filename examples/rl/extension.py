"""The two other ways to bring weights into a vLLM worker, to compare with: a broadcast, and checkpoint files.

Both go through the library's `EngineWeights`, because vLLM's `model.load_weights` alone leaves an engine wrong on many CPUs
(docs/guides/vllm.md); what is compared is how the weights travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from weightbridge import spec_from_folder
from weightbridge.integrations.vllm import EngineWeights

__all__ = ["OtherWays", "broadcast_group"]


def broadcast_group(port: int, rank: int, timeout_seconds: float) -> Any:
    """A gloo group of trainer 0 (rank 0) and the engine's worker (rank 1), beside whatever groups each side has."""
    limit = timedelta(seconds=timeout_seconds)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, 2, is_master=rank == 0, timeout=limit
    )
    return dist.ProcessGroupGloo(store, rank, 2, limit)


class OtherWays:
    """Mixed into vLLM's worker. Every method returns a status and raises nothing, as the library's do."""

    def broadcast_join(self, port: int, timeout_seconds: float) -> dict[str, Any]:
        def join() -> None:
            self._other_group = broadcast_group(port, 1, timeout_seconds)

        return _status(join)

    def broadcast_receive(self, checkpoint: str) -> dict[str, Any]:
        """Take a whole version: every tensor of the checkpoint's spec, in its order, in bf16."""

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for spec in spec_from_folder(checkpoint).tensors:
                tensor = torch.empty(spec.shape, dtype=torch.bfloat16)
                self._other_group.broadcast(tensor, 0).wait()
                yield spec.name, tensor

        return _status(lambda: self._load(tensors()))

    def files_load(self, folder: str) -> dict[str, Any]:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            with safe_open(Path(folder) / "model.safetensors", framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (no mapping)
                    yield name, file.get_tensor(name)

        return _status(lambda: self._load(tensors()))

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        worker: Any = self
        if not hasattr(self, "_other_weights"):
            self._other_weights = EngineWeights(worker.model_runner.get_model(), worker.vllm_config)
        self._other_weights.load_weights(tensors)
        self._other_weights.renew()


def _status(call: Callable[[], None]) -> dict[str, Any]:
    try:
        call()
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return {"ok": True, "error": ""}
