"""One rank of the loaders that come with torch and transformers: FSDP2, FSDP1, tensor parallel, fused experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
from tests.integration.engines import models
from tests.integration.engines.side import (
    Seat,
    finish,
    join_gloo,
    memory_of,
    record,
    rng_weights,
    seat_from_argv,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.modeling_utils import LoadStateDictConfig

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import ProbeError, SpecError
from weightbridge.integrations import fsdp, transformers
from weightbridge.probe import discover_tensors, probe


def dense_model(dtype: torch.dtype) -> nn.Module:
    return Qwen3ForCausalLM(Qwen3Config(**models.DENSE)).to(dtype)


def load_full_state_dict(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """A collective: rank 0 and the others hold the whole checkpoint and keep their parts of it."""
    # A dict of its own: the call replaces the values by DTensors.
    set_model_state_dict(model, dict(tensors), options=StateDictOptions(full_state_dict=True))


def run_fsdp2(seat: Seat) -> None:
    model = dense_model(torch.float32)
    mesh = init_device_mesh("cpu", (seat.world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tensors, spec = fsdp.tensors_fn(model), models.dense_spec()
    record(seat, spec, fsdp.load_weights_fn(model), tensors, label="own-")
    record(seat, spec, lambda stream: load_full_state_dict(model, stream), tensors, label="torch-")


def run_fsdp1(seat: Seat) -> None:
    model = dense_model(torch.bfloat16)
    options = {
        "use_orig_params": True,
        "sharding_strategy": ShardingStrategy.FULL_SHARD,
        "device_id": torch.device("cpu"),
    }
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = FullyShardedDataParallel(layer, **options)
    model = FullyShardedDataParallel(model, **options)
    record(
        seat, models.dense_spec(), lambda stream: load_full_state_dict(model, stream), lambda: discover_tensors(model)
    )


def run_tensor_parallel(seat: Seat) -> None:
    load_tensor_parallel(seat, dense_model(torch.bfloat16), models.dense_spec())


def load_tensor_parallel(seat: Seat, whole: nn.Module, spec: CheckpointSpec) -> None:
    folder = seat.folder / "model"
    if seat.rank == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    distributed = DistributedConfig(tp_size=seat.world_size, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=distributed)
    model = model.eval().requires_grad_(False)
    record(seat, spec, transformers.load_weights_fn(model), transformers.tensors_fn(model))


def moe_model(numbers: dict = models.MOE) -> nn.Module:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**numbers)).to(torch.bfloat16)


def run_moe(seat: Seat) -> None:
    model = moe_model()
    record(seat, models.moe_spec(), transformers.load_weights_fn(model), transformers.tensors_fn(model))


def run_moe_refusals(seat: Seat) -> None:
    """What is refused, each with its reason in a file; the weights stay as they were."""
    model, spec = moe_model(), models.moe_spec()
    config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))
    load, tensors = transformers.load_weights_fn(model), transformers.tensors_fn(model)
    up = "model.layers.2.mlp.experts.3.up_proj.weight"
    before = {name: memory_of(t) for name, t in tensors().items()}
    incomplete = {name: t for name, t in rng_weights(spec, 1) if name.startswith("model.layers.2.mlp.experts")}
    short = {name: t[:5] if name == up else t for name, t in incomplete.items()}
    del incomplete[up]
    attempts: dict[str, Callable[[], object]] = {
        "incomplete": lambda: load(incomplete.items()),
        "short": lambda: load(short.items()),
        "unknown": lambda: load([("model.layers.2.mlp.experts.3.bias", torch.zeros(3))]),
        # transformers' own loading puts new parameters in the place of the old.
        "rebound": lambda: probe(
            spec=spec,
            load_weights=lambda stream: convert_and_load_state_dict_in_model(model, dict(stream), config),
            tensors=tensors,
        ),
    }
    for name, attempt in attempts.items():
        refused = ""
        try:
            attempt()
        except (SpecError, ProbeError) as error:
            refused = str(error)
        (seat.folder / f"refused-{name}").write_text(refused)
        changed = {n for n, t in tensors().items() if not np.array_equal(before[n], memory_of(t))}
        # Of an incomplete group, what is complete has been loaded: the down projections.
        if changed - {"model.layers.2.mlp.experts.down_proj"}:
            raise SystemExit(f"wrong: {changed} changed in the attempt {name!r}")


def run_moe_tensor_parallel(seat: Seat) -> None:
    load_tensor_parallel(seat, moe_model(), models.moe_spec())


def run_sparse_moe_tensor_parallel(seat: Seat) -> None:
    load_tensor_parallel(seat, moe_model(models.SPARSE_MOE), models.moe_spec(models.SPARSE_MOE))


CASES = {
    "fsdp2": run_fsdp2,
    "fsdp1": run_fsdp1,
    "tensor-parallel": run_tensor_parallel,
    "moe": run_moe,
    "moe-refusals": run_moe_refusals,
    "moe-tensor-parallel": run_moe_tensor_parallel,
    "sparse-moe-tensor-parallel": run_sparse_moe_tensor_parallel,
}

if __name__ == "__main__":
    seat = seat_from_argv()
    join_gloo(seat)
    CASES[seat.case](seat)
    dist.barrier()
    finish()
