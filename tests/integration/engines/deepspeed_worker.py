"""One rank of a DeepSpeed ZeRO-3 engine on a CPU: its layout, and a training that sends each version to an engine."""

from __future__ import annotations

import os
import warnings

import numpy as np
import torch
import torch.distributed as dist
from tests.integration.engines import models
from tests.integration.engines.deepspeed_models import ENGINE, LAST_VERSION, TIED, batch, tied_spec
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
from transformers import Qwen3Config, Qwen3ForCausalLM

# [deepspeed trainer]
from weightbridge import Options, SenderAdapter
from weightbridge.integrations import deepspeed as zero3

# [/deepspeed trainer]
from weightbridge.integrations import dtensor

warnings.filterwarnings("ignore")
import deepspeed  # noqa: E402

# DeepSpeed compiles shared-memory collectives of its own at first use, half a minute; gloo does the same.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

PERSISTENT_NUMEL = 60
"""Norms are smaller and stay gathered between steps; matrices are larger."""


def config_of(dtype: torch.dtype, stage: int = 3) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": PERSISTENT_NUMEL},
        "zero_allow_untested_optimizer": True,
    }


def engine_of(model: nn.Module, config: dict) -> deepspeed.DeepSpeedEngine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def gathered(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """The whole parameters as DeepSpeed puts them together. A collective."""
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


def loss_of(engine: deepspeed.DeepSpeedEngine, step: int) -> torch.Tensor:
    tokens = batch(step, dist.get_rank())
    return engine(input_ids=tokens, labels=tokens).loss


def train(engine: deepspeed.DeepSpeedEngine, step: int) -> None:
    engine.backward(loss_of(engine, step))
    engine.step()


# --- layouts ----------------------------------------------------------------------------------------------------------------


def run_layouts(seat: Seat) -> None:
    spec = models.dense_spec()
    for dtype in (torch.bfloat16, torch.float32):
        engine = engine_of(Qwen3ForCausalLM(Qwen3Config(**models.DENSE)), config_of(dtype))
        loss_of(engine, 0)  # leaves gathered copies behind: what is learnt, and loaded, are the pieces all the same
        load, label = zero3.load_weights_fn(engine), str(dtype).removeprefix("torch.")
        record(seat, spec, load, zero3.tensors_fn(engine), label=f"{label}-")
        loss_of(engine, 0)
        load(rng_weights(spec, 7))
        wanted, found = dict(rng_weights(spec, 7)), gathered(engine)
        differing = [n for n in wanted if not torch.equal(wanted[n].to(dtype), found[n])]
        if differing or set(found) != set(wanted):
            raise SystemExit(f"wrong: DeepSpeed gathers other values than were loaded: {differing}")
    engine = engine_of(Qwen3ForCausalLM(Qwen3Config(**models.DENSE)), config_of(torch.bfloat16, stage=2))
    record(seat, spec, dtensor.load_weights_fn(engine.module), dtensor.tensors_fn(engine.module), label="stage2-")


# --- training ---------------------------------------------------------------------------------------------------------------


def tied_engine() -> deepspeed.DeepSpeedEngine:
    """Partitioned while it is built, as large models are; the same weights at every call."""
    torch.manual_seed(11)
    config = config_of(torch.bfloat16)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Qwen3ForCausalLM(Qwen3Config(**TIED))
    return engine_of(model, config)


def run_train(seat: Seat) -> None:
    """A training by itself, then the same one with an engine to feed: each version's whole weights from both."""
    alone = tied_engine()
    for step in range(LAST_VERSION + 1):
        train(alone, step)
        keep(seat, f"alone{step}", alone)
    engine, spec = tied_engine(), tied_spec()
    train(engine, 0)  # connect amid training: persistent parameters are gathered by now
    # [deepspeed trainer]
    sender = SenderAdapter(
        group=dist.group.WORLD,
        endpoint=os.environ["WB_ENDPOINT"],
        checkpoint=spec,
        load_weights=zero3.load_weights_fn(engine),
        tensors=zero3.tensors_fn(engine),
        engines=(ENGINE,),
        node=os.uname().nodename,
        options=Options(connect_timeout_seconds=150),
    )
    sender.connect()
    # [/deepspeed trainer]
    for version in range(1, LAST_VERSION + 1):
        train(engine, version)
        pieces = {name: memory_of(piece) for name, piece in zero3.tensors_fn(engine)().items()}
        # [deepspeed trainer]
        sender.send_weights(version).wait()  # after engine.step(), on every rank
        # [/deepspeed trainer]
        changed = [n for n, t in zero3.tensors_fn(engine)().items() if not np.array_equal(pieces[n], memory_of(t))]
        if changed:
            raise SystemExit(f"wrong: sending changed {changed}")
        keep(seat, f"sent{version}", engine)
    sender.close()


def keep(seat: Seat, label: str, engine: deepspeed.DeepSpeedEngine) -> None:
    whole = gathered(engine)
    if seat.rank == 0:
        bits = {name: tensor.view(torch.int16).numpy() for name, tensor in whole.items()}
        np.savez(seat.folder / f"{label}.npz", **bits)


if __name__ == "__main__":
    seat = seat_from_argv()
    os.environ |= {"LOCAL_RANK": str(seat.rank), "RANK": str(seat.rank), "WORLD_SIZE": str(seat.world_size)}
    join_gloo(seat)
    {"layouts": run_layouts, "train": run_train}[seat.case](seat)
    dist.barrier()
    finish()
