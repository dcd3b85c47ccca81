"""One rank of a megatron-core GPTModel, TP2 PP2 EP2, loaded from checkpoint names as RL frameworks do."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from tests.integration.engines import models
from tests.integration.engines.side import finish, join_gloo, record, seat_from_argv

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.probe import discover_tensors

warnings.filterwarnings("ignore")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

TP = PP = EP = 2


def padded_vocabulary(numbers: dict) -> int:
    """Megatron wants as many rows on each rank; the checkpoint has an odd number."""
    return -(-numbers["vocab_size"] // TP) * TP


def build(numbers: dict) -> GPTModel:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=TP, pipeline_model_parallel_size=PP, expert_model_parallel_size=EP,
        expert_tensor_parallel_size=1,
    )  # fmt: skip
    num_layers = numbers["num_hidden_layers"]
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=numbers["hidden_size"],
        ffn_hidden_size=numbers["intermediate_size"],
        num_attention_heads=numbers["num_attention_heads"],
        num_query_groups=numbers["num_key_value_heads"],
        kv_channels=numbers["head_dim"],
        num_moe_experts=numbers["num_experts"],
        moe_ffn_hidden_size=numbers["moe_intermediate_size"],
        moe_router_topk=numbers["num_experts_per_tok"],
        moe_layer_freq=[int(i not in numbers["mlp_only_layers"]) for i in range(num_layers)],
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        expert_model_parallel_size=EP,
        expert_tensor_parallel_size=1,
        sequence_parallel=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=True,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
    )
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=padded_vocabulary(numbers),
        max_sequence_length=numbers["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=numbers["tie_word_embeddings"],
        position_embedding_type="rope",
    )


class Loader:
    """Checkpoint names to this rank's parameters, in place, one tensor at a time and in any order."""

    def __init__(self, model: GPTModel, numbers: dict) -> None:
        self.numbers = numbers
        self.parameters = dict(model.named_parameters())
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.first_expert = parallel_state.get_expert_model_parallel_rank() * numbers["num_experts"] // EP
        self.experts_here = numbers["num_experts"] // EP
        # A stage numbers its layers from 0; each layer knows its number in the whole model.
        self.local_layer = {layer.layer_number - 1: i for i, layer in enumerate(model.decoder.layers)}
        self.rules: list[tuple[str, Callable[..., None]]] = [
            (r"model\.embed_tokens\.weight", lambda t: self.vocabulary("embedding.word_embeddings.weight", t)),
            (r"lm_head\.weight", lambda t: self.vocabulary("output_layer.weight", t)),
            (r"model\.norm\.weight", lambda t: self.whole("decoder.final_layernorm.weight", t)),
            (r"model\.layers\.(\d+)\.(.*)", self.layer),
        ]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in tensors:
                for pattern, rule in self.rules:
                    if found := re.fullmatch(pattern, name):
                        rule(*found.groups(), tensor)
                        break
                else:
                    raise KeyError(name)

    def whole(self, target: str, tensor: torch.Tensor) -> None:
        if target in self.parameters:
            self.parameters[target].copy_(tensor)

    def vocabulary(self, target: str, tensor: torch.Tensor) -> None:
        if target in self.parameters:
            parameter = self.parameters[target]
            mine = tensor[self.tp_rank * len(parameter) :][: len(parameter)]
            parameter[: len(mine)] = mine
            parameter[len(mine) :] = 0

    def share(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(TP, dim)[self.tp_rank]

    def layer(self, number: str, rest: str, tensor: torch.Tensor) -> None:
        local = self.local_layer.get(int(number))
        if local is None:
            return  # of another pipeline stage
        prefix = f"decoder.layers.{local}."
        if rest in WHOLE:
            self.whole(prefix + WHOLE[rest], tensor)
        elif found := re.fullmatch(r"self_attn\.([qkv])_proj\.weight", rest):
            self.attention(prefix + "self_attention.linear_qkv.weight", found[1], tensor)
        elif rest == "self_attn.o_proj.weight":
            self.whole(prefix + "self_attention.linear_proj.weight", self.share(tensor, 1))
        elif found := re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", rest):
            expert = int(found[1]) - self.first_expert
            if 0 <= expert < self.experts_here:
                self.feed_forward(f"{prefix}mlp.experts.local_experts.{expert}.", found[2], tensor)
        elif found := re.fullmatch(r"mlp\.(gate|up|down)_proj\.weight", rest):
            self.feed_forward(f"{prefix}mlp.", found[1], self.share(tensor, int(found[1] == "down")))
        else:
            raise KeyError(rest)

    def attention(self, target: str, kind: str, tensor: torch.Tensor) -> None:
        """Per group of heads: its queries, its key, its value; a rank has whole groups."""
        head, hidden = self.numbers["head_dim"], tensor.shape[1]
        queries = self.numbers["num_attention_heads"] // self.numbers["num_key_value_heads"]
        groups = self.parameters[target].view(-1, queries + 2, head, hidden)
        part = {"q": slice(queries), "k": slice(queries, queries + 1), "v": slice(queries + 1, None)}[kind]
        groups[:, part] = self.share(tensor, 0).view(len(groups), -1, head, hidden)

    def feed_forward(self, prefix: str, kind: str, tensor: torch.Tensor) -> None:
        """Each rank has its rows of gate above its rows of up."""
        if kind == "down":
            self.whole(prefix + "linear_fc2.weight", tensor)
        else:
            gate, up = self.parameters[prefix + "linear_fc1.weight"].chunk(2)
            (gate if kind == "gate" else up).copy_(tensor)


WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
}


def spec_of(numbers: dict) -> CheckpointSpec:
    return models.moe_spec(numbers)


if __name__ == "__main__":
    seat = seat_from_argv()
    join_gloo(seat)
    numbers = {"sparse": models.SPARSE_MOE, "partly-dense": models.MOE}[seat.case]
    model = build(numbers)
    loader = Loader(model, numbers)
    record(seat, spec_of(numbers), loader.load_weights, lambda: discover_tensors(model))
    dist.barrier()
    finish()
