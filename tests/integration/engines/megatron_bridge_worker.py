"""One rank of a GPTModel, TP2 PP2 EP2, that Megatron-Bridge builds from a transformers config and loads by its own rules."""

from __future__ import annotations

import logging
import sys
import typing
import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
import typing_extensions
from tests.integration.engines import models
from tests.integration.engines.absent import absent_module
from tests.integration.engines.side import finish, join_gloo, record, seat_from_argv
from transformers import Qwen3MoeConfig

from weightbridge.probe import discover_tensors

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

# LoRA layers are made of Transformer Engine's, which exist for GPUs only; the rules for models import them and use none.
sys.modules["megatron.bridge.peft.lora_layers"] = absent_module("megatron.bridge.peft.lora_layers")
if sys.version_info < (3, 12):
    typing.override = typing_extensions.override  # all that it needs of a newer Python
torch.cuda.current_device = lambda: (
    None
)  # asked for once, to compare it with a tensor's device, which has none on a CPU

from megatron.bridge import AutoBridge  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402

TP = PP = EP = 2


def build(bridge: AutoBridge) -> GPTModel:
    """As the bridge does it, but with megatron-core's own layers, on the CPU."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=TP, pipeline_model_parallel_size=PP, expert_model_parallel_size=EP,
        expert_tensor_parallel_size=1,
    )  # fmt: skip
    provider = bridge.to_megatron_provider(load_weights=False)
    settings = {
        "tensor_model_parallel_size": TP,
        "pipeline_model_parallel_size": PP,
        "expert_model_parallel_size": EP,
        "expert_tensor_parallel_size": 1,
        "transformer_layer_spec": lambda config: get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        "use_cpu_initialization": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
    }
    for name, value in settings.items():
        if not hasattr(provider, name):
            raise SystemExit(f"wrong: the bridge's provider has no setting {name}")
        setattr(provider, name, value)
    provider.finalize()
    return provider.provide(
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage()
    )


def loader_of(bridge: AutoBridge, model: GPTModel) -> typing.Callable[[typing.Iterable], None]:
    # [megatron bridge loader]
    from megatron.bridge.models.hf_pretrained.state import StateDict

    def load_weights(tensors):
        """A collective: every rank holds the whole checkpoint meanwhile; the bridge cuts and renames it."""
        checkpoint = SimpleNamespace(state=StateDict(dict(tensors)), model_name_or_path="checkpoint")
        bridge._model_bridge.load_weights_hf_to_megatron(checkpoint, [model])

    # [/megatron bridge loader]
    return load_weights


if __name__ == "__main__":
    seat = seat_from_argv()
    join_gloo(seat)
    config = Qwen3MoeConfig(**models.SPARSE_MOE, architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16")
    bridge = AutoBridge.from_hf_config(config)
    model = build(bridge)
    spec = models.moe_spec(models.SPARSE_MOE)
    record(seat, spec, loader_of(bridge, model), lambda: discover_tensors(model))
    dist.barrier()
    finish()
