"""One rank of a tensor-parallel transformers model that is fed by DeepSpeed trainers; keeps each version that arrives."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
import torch.distributed as dist
from tests.integration.engines.deepspeed_models import ENGINE, LAST_VERSION, TIED, tied_spec
from tests.integration.engines.side import finish, join_gloo, seat_from_argv
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from weightbridge import Options, ReceiverAdapter
from weightbridge.integrations import transformers

SECONDS = 200


def whole(model: nn.Module) -> dict[str, np.ndarray]:
    """Bits of the whole parameters: this rank's where all have them, else put together by torch. A collective."""
    return {
        name: getattr(p.detach(), "full_tensor", p.detach)().view(torch.int16).numpy()
        for name, p in model.named_parameters()
    }


if __name__ == "__main__":
    seat = seat_from_argv()
    join_gloo(seat)
    folder = seat.folder / "model"
    if seat.rank == 0:
        Qwen3ForCausalLM(Qwen3Config(**TIED)).to(torch.bfloat16).save_pretrained(folder)
    dist.barrier()
    distributed = DistributedConfig(tp_size=seat.world_size, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, distributed_config=distributed)
    model = model.eval().requires_grad_(False)
    receiver = ReceiverAdapter(
        group=dist.group.WORLD,
        endpoint=os.environ["WB_ENDPOINT"],
        checkpoint=tied_spec(),
        load_weights=transformers.load_weights_fn(model),
        tensors=transformers.tensors_fn(model),
        engine=ENGINE,
        node=os.uname().nodename,
        options=Options(connect_timeout_seconds=150),
    )
    give_up = time.monotonic() + SECONDS
    while receiver.version < LAST_VERSION:
        if time.monotonic() > give_up:
            raise SystemExit(f"wrong: version {receiver.version} after {SECONDS} s, expected {LAST_VERSION}")
        if receiver.poll_requests():
            np.savez(seat.folder / f"received{receiver.version}-{seat.rank}.npz", **whole(model))
        dist.barrier()  # stands for an inference step: all workers make the same number of them
    receiver.close()
    dist.barrier()
    finish()
