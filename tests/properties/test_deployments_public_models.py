"""The checkpoint of a config has the names and shapes that transformers' own model of that config has."""

from __future__ import annotations

from math import prod

import pytest

from weightbridge.deployments.architecture import checkpoint_spec
from weightbridge.deployments.model_config import architecture_from_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

GROUPED = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 130,
}  # fmt: skip
LATENT = {
    **GROUPED, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 12, "n_routed_experts": 8, "n_shared_experts": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS = [
    ("llama", GROUPED),
    ("llama", {**GROUPED, "attention_bias": True, "tie_word_embeddings": True}),
    ("qwen2", GROUPED),
    ("qwen3", {**GROUPED, "head_dim": 20, "attention_bias": True}),
    ("qwen3_moe", {**GROUPED, "head_dim": 20, "num_experts": 6, "moe_intermediate_size": 20, "mlp_only_layers": [1]}),
    ("deepseek_v2", LATENT),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3", LATENT),
]


@pytest.mark.parametrize(("family", "keys"), MODELS)
def test_names_and_shapes_are_those_of_transformers(family, keys):
    """Routed experts, which transformers stacks in memory, are compared by their number of elements per layer."""
    config = transformers.AutoConfig.for_model(family, **keys)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        del theirs["lm_head.weight"]
    ours = {t.name: t.shape for t in checkpoint_spec(architecture_from_config(config.to_dict())).tensors}

    def outside_experts(tensors):
        return {name: shape for name, shape in tensors.items() if ".experts." not in name}

    def expert_numel(tensors):
        found: dict[str, int] = {}
        for name, shape in tensors.items():
            if ".experts." in name:
                layer = name.split(".experts.")[0]
                found[layer] = found.get(layer, 0) + prod(shape)
        return found

    assert outside_experts(ours) == outside_experts(theirs)
    assert expert_numel(ours) == expert_numel(theirs)
