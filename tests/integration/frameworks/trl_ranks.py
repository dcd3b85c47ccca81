"""One of several ranks of an AsyncGRPOTrainer whose model is sharded by FSDP2: TRL's own sync, gathered or sharded.

Started by torchrun with: KIND FOLDER ENDPOINT. Rank 0 holds the engines too. TRL's training loop needs GPUs for FSDP2, so what
changes weights between two syncs is this script; `_sync_weight` is the call that TRL makes after a step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tests.integration.frameworks.trl_models import Rollouts, RowsEngine, WholeEngine, bits
from torch.distributed.fsdp import fully_shard
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer as trl_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from weightbridge import SenderAdapter, spec_from_folder
from weightbridge.integrations import fsdp
from weightbridge.integrations.trl import GatheredTransfer, ShardedTransfer

VERSIONS = 3


def change(model: torch.nn.Module, version: int) -> None:
    """Other values in every rank's shards."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            local = parameter.to_local()
            generator = torch.Generator().manual_seed(1000 * version + 10 * i + dist.get_rank())
            local.add_(torch.randn(local.shape, generator=generator))


def main(kind: str, folder: Path, endpoint: str) -> None:
    torch.set_num_threads(1)
    spec = spec_from_folder(str(folder))
    trl_trainer.get_peak_flops_per_device = lambda *_: None
    arguments = AsyncGRPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, dtype="float32", report_to=[], max_steps=1,
        token_budget=-1, gradient_checkpointing=False,
    )  # fmt: skip
    where: dict[str, Any] = {"endpoint": endpoint, "checkpoint": spec, "engines": ["whole", "rows"]}
    transfer: Any = (
        GatheredTransfer(**where)
        if kind == "gathered"
        else ShardedTransfer(
            lambda: SenderAdapter(
                group=dist.group.WORLD, load_weights=fsdp.load_weights_fn(trainer.model),
                tensors=fsdp.tensors_fn(trainer.model), **where,
            )
        )
    )  # fmt: skip
    trainer = AsyncGRPOTrainer(
        model=str(folder), args=arguments, reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "w1"}]] * 8}),
        rollout_worker=Rollouts(RolloutSample, 0), weight_transfer=transfer,
    )  # fmt: skip
    if kind == "sharded":
        transfer.attach(trainer)
    fully_shard(trainer.model)
    is_main = dist.get_rank() == 0
    if is_main:
        whole = WholeEngine(folder, spec, endpoint, "whole")
        rows = RowsEngine(spec, endpoint, "rows", 3)
        trainer.weight_transfer.init_weight_transfer()
    seen = []
    for version in range(1, VERSIONS + 1):
        change(trainer.model, version)
        trainer._sync_weight()
        trained = {n: p.full_tensor() for n, p in trainer.model.named_parameters()}
        if is_main:
            assert bits(trained) == bits(whole.held())
            assert bits(trained) == bits(rows.held())
            seen.append(transfer.version)
    if is_main:
        (folder / "seen").write_text(str(seen))
    transfer.destroy()
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
