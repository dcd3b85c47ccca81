"""The tiny models of the real-loader tests as plain numbers, so that any interpreter can read them."""

from __future__ import annotations

from weightbridge.checkpoint import CheckpointSpec, dtype_named
from weightbridge.checkpoint.spec import TensorSpec

__all__ = ["DENSE", "MOE", "SPARSE_MOE", "attention_shapes", "dense_spec", "moe_spec"]

DENSE = {
    "hidden_size": 50,
    "intermediate_size": 99,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "vocab_size": 131,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
}
"""Qwen3: three ranks divide heads and the intermediate size and no other: rows of the rest are uneven, and of a norm of
four elements the third rank of FSDP2 holds none."""

MOE = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "vocab_size": 131,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
"""Qwen3-MoE, its second layer dense; two ranks hold two groups of heads each, and an odd vocabulary."""

SPARSE_MOE = {**MOE, "mlp_only_layers": []}
"""The same with experts in every layer."""


def attention_shapes(config: dict, layer: str) -> dict[str, tuple[int, ...]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (q, hidden),
        f"{layer}.self_attn.k_proj.weight": (kv, hidden),
        f"{layer}.self_attn.v_proj.weight": (kv, hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, q),
        f"{layer}.self_attn.q_norm.weight": (head,),
        f"{layer}.self_attn.k_norm.weight": (head,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _spec(config: dict, layers: list[dict[str, tuple[int, ...]]]) -> CheckpointSpec:
    ends = (config["vocab_size"], config["hidden_size"])
    shapes = {"model.embed_tokens.weight": ends}
    for layer in layers:
        shapes |= layer
    shapes |= {"model.norm.weight": ends[1:], "lm_head.weight": ends}
    bf16 = dtype_named("BF16")
    return CheckpointSpec(tensors=tuple(TensorSpec(name=n, shape=s, dtype=bf16) for n, s in shapes.items()))


def dense_spec(config: dict = DENSE) -> CheckpointSpec:
    """The checkpoint of a Qwen3, names and order as its files have them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    names = [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]
    return _spec(config, [attention_shapes(config, n) | _mlp_shapes(f"{n}.mlp", hidden, inner) for n in names])


def moe_spec(config: dict = MOE) -> CheckpointSpec:
    """The checkpoint of a Qwen3-MoE: three tensors an expert."""
    hidden, experts = config["hidden_size"], config["num_experts"]
    layers = []
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}"
        shapes = attention_shapes(config, name)
        if i in config["mlp_only_layers"]:
            shapes |= _mlp_shapes(f"{name}.mlp", hidden, config["intermediate_size"])
        else:
            shapes[f"{name}.mlp.gate.weight"] = (experts, hidden)
            for e in range(experts):
                shapes |= _mlp_shapes(f"{name}.mlp.experts.{e}", hidden, config["moe_intermediate_size"])
        layers.append(shapes)
    return _spec(config, layers)
