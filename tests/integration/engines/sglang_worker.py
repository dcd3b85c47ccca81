"""One rank of SGLang's own Qwen3-MoE class, tensor and expert parallel, without an engine around it.

SGLang's kernels and its image decoding have no CPU build: stand-ins let them be imported, none is used.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from tests.integration.engines import models
from tests.integration.engines.absent import stand_in_for
from tests.integration.engines.side import Seat, finish, record, seat_from_argv

# Before the stand-ins: transformers looks for torchvision, and must not find one.
from transformers import AutoProcessor, Qwen3MoeConfig  # noqa: F401

from weightbridge.errors import CoverageError
from weightbridge.probe import discover_tensors

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
stand_in_for("sgl_kernel", "torchvision")

from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel  # noqa: E402
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402


def build(seat: Seat, numbers: dict) -> torch.nn.Module:
    config = Qwen3MoeConfig(**numbers, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16")
    config.save_pretrained(seat.folder / f"config{seat.rank}")
    arguments = ServerArgs(
        model_path=str(seat.folder / f"config{seat.rank}"), tp_size=seat.world_size, ep_size=seat.world_size, device="cpu",
        dtype="bfloat16",
    )  # fmt: skip
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=seat.rank))
    init_distributed_environment(
        world_size=seat.world_size, rank=seat.rank, local_rank=seat.rank, backend="gloo",
        distributed_init_method=f"file://{seat.folder}/rendezvous",
    )  # fmt: skip
    initialize_model_parallel(backend="gloo")
    torch.set_default_dtype(torch.bfloat16)
    return Qwen3MoeForCausalLM(config)


if __name__ == "__main__":
    seat = seat_from_argv()
    numbers = {"sparse": models.SPARSE_MOE, "partly-dense": models.MOE}[seat.case]
    model, spec = build(seat, numbers), models.moe_spec(numbers)
    try:
        record(seat, spec, model.load_weights, lambda: discover_tensors(model))
    except CoverageError as error:
        (seat.folder / f"refused{seat.rank}").write_text(str(error))
    dist.barrier()
    finish()
