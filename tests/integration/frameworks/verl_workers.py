"""Workers around verl's own classes: CheckpointEngineWorker beside a toy engine, and an actor that does what verl's does.

verl's actor and rollout need GPUs; what is left here of both are the lines that call a checkpoint engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import ray
import torch
from tests.multiprocess import toy_job as toy
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.rollout import BaseRollout, RolloutReplica

SPEC = toy.checkpoint_spec()


class Actor(Worker):
    """An actor rank: as verl's ActorRolloutRefWorker, it makes the engine and gives it whole tensors, on every rank."""

    def __init__(self, backend: str, module: str, engine_kwargs: dict[str, Any]) -> None:
        super().__init__()
        import_module(module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            backend, is_master=self.rank == 0, bucket_size=1 << 20, **engine_kwargs
        )
        self.version, self.fault = 0, ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, version: int, fault: str = "") -> None:
        """From now on the weights are those of the version; `fault`: what rank 1 does wrong at the next update."""
        self.version, self.fault = version, fault if self.rank == 1 else ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, float]:
        return await self.checkpoint_engine.send_weights(self.per_tensor(), global_steps=global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    def per_tensor(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, full in toy.rounded(SPEC, self.version).items():
            if self.fault == "shape" and name == "embed":
                yield name, full[:-1]
            elif not (self.fault == "missing" and name == "embed"):
                yield name, full


class ToyRollout(BaseRollout):
    """verl's server adapter hands the tensors to the inference engine beside it; here it is that engine's worker."""

    def __init__(self, replica_rank: int, rank: int, size: int) -> None:
        self.replica_rank, self.is_leader_rank = replica_rank, rank == 0
        self.model = toy.engine_worker(SPEC, "tp" if size == toy.TP else "solo", rank)
        self.steps: list[int | None] = []

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **_: Any
    ) -> None:
        assert wire_format == "named_tensors"
        async for name, tensor in weights:
            self.model.load_weights([(name, tensor)])
        self.steps.append(global_steps)


class RolloutWorker(CheckpointEngineWorker):
    """verl's own worker, with the toy engine for server adapter."""

    def __init__(self, replica_rank: int, size: int, config: Any) -> None:
        import os

        super().__init__(config, None, server_adapter=ToyRollout(replica_rank, int(os.environ["RANK"]), size))

    def held(self) -> tuple[dict[str, torch.Tensor], list[int | None]]:
        return {n: t.clone() for n, t in self.server_adapter.model.tensors().items()}, self.server_adapter.steps


class Replica(RolloutReplica):
    """A replica of toy workers; there are no servers, so what verl asks of them is answered at once."""

    def __init__(self, replica_rank: int, size: int, config: Any, pool: list[int]) -> None:
        self.replica_rank, self.world_size, self.servers = replica_rank, size, []
        self.calls: list[str] = []
        self.group = RayWorkerGroup(
            resource_pool=RayResourcePool(process_on_nodes=pool, use_gpu=False, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(
                cls=ray.remote(RolloutWorker), replica_rank=replica_rank, size=size, config=config
            ),
            bin_pack=False,
            device_name="cpu",
        )
        self.workers = self.group.workers

    async def launch_servers(self) -> None: ...
