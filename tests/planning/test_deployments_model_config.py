"""config.json -> architecture, with the public configs of the presets' models and with configs that are wrong."""

from __future__ import annotations

import pytest

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.deployments.architecture import GroupedAttention, LatentAttention, checkpoint_spec
from weightbridge.deployments.model_config import SUPPORTED_FAMILIES, architecture_from_config
from weightbridge.errors import SpecError, UnsupportedError, UsageError

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 25_600, "vocab_size": 151_936, "torch_dtype": "bfloat16", "attention_bias": False,
    "tie_word_embeddings": False, "rope_scaling": None, "use_sliding_window": False,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "vocab_size": 151_936, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
MOONLIGHT = {
    "model_type": "deepseek_v3", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 11_264, "moe_intermediate_size": 1408, "n_routed_experts": 64,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_method": "noaux_tc", "vocab_size": 163_840,
    "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
SMALL_V2 = {
    **MOONLIGHT, "model_type": "deepseek_v2", "num_hidden_layers": 5, "n_routed_experts": 3, "topk_method": "greedy",
    "first_k_dense_replace": 2, "q_lora_rank": 24, "moe_layer_freq": 2,
}  # fmt: skip


def test_public_configs_give_the_public_sizes():
    """GB (1e9): 65.5, 61.1 and 31.9; Moonlight's first layer is dense, its routers have fp32 biases, q has no rank."""
    assert checkpoint_spec(architecture_from_config(QWEN3)).nbytes == 65_524_246_528
    assert checkpoint_spec(architecture_from_config(QWEN3_MOE)).nbytes == 61_064_245_248
    moonlight = checkpoint_spec(architecture_from_config(MOONLIGHT))
    assert moonlight.nbytes == 31_920_223_744
    bias = moonlight.tensors[moonlight.index["model.layers.26.mlp.gate.e_score_correction_bias"]]
    assert (bias.shape, bias.dtype.name) == ((64,), "F32")
    assert "model.layers.0.mlp.gate_proj.weight" in moonlight.index
    assert "model.layers.1.mlp.experts.63.up_proj.weight" in moonlight.index
    assert "model.layers.0.self_attn.q_a_proj.weight" not in moonlight.index


def test_names_and_shapes_of_a_latent_layer():
    spec = checkpoint_spec(architecture_from_config(SMALL_V2))
    layer = {
        t.name.removeprefix("model.layers.4."): t.shape for t in spec.tensors if t.name.startswith("model.layers.4.")
    }
    experts = {name: layer.pop(name) for name in list(layer) if ".experts." in name}
    assert len(experts) == 9
    assert experts["mlp.experts.2.down_proj.weight"] == (2048, 1408)
    assert layer == {
        "input_layernorm.weight": (2048,),
        "self_attn.q_a_proj.weight": (24, 2048),
        "self_attn.q_a_layernorm.weight": (24,),
        "self_attn.q_b_proj.weight": (16 * 192, 24),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 2048),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (16 * 256, 512),
        "self_attn.o_proj.weight": (2048, 16 * 128),
        "post_attention_layernorm.weight": (2048,),
        "mlp.gate.weight": (3, 2048),
        "mlp.shared_experts.gate_proj.weight": (2816, 2048),
        "mlp.shared_experts.up_proj.weight": (2816, 2048),
        "mlp.shared_experts.down_proj.weight": (2048, 2816),
    }


def test_which_layers_are_dense():
    """V2 with first_k_dense_replace 2 and frequency 2: 0 and 1 by the first, 3 by the second. Qwen: (layer + 1) % step, and
    those named."""
    assert architecture_from_config(SMALL_V2).dense_layers == {0, 1, 3}
    qwen = {**QWEN3_MOE, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [5]}
    assert architecture_from_config(qwen).dense_layers == {0, 2, 4, 5}


def test_what_the_families_differ_in():
    base = {
        k: QWEN3[k]
        for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
    }

    def attention(**keys):
        return architecture_from_config({**base, **keys}).attention

    assert attention(model_type="llama") == GroupedAttention(num_heads=64, num_kv_heads=64, head_dim=80)
    biased = attention(model_type="llama", attention_bias=True, num_key_value_heads=4)
    assert biased == GroupedAttention(num_heads=64, num_kv_heads=4, head_dim=80, bias=True, output_bias=True)
    qwen2 = attention(model_type="qwen2", num_key_value_heads=2)
    assert qwen2 == GroupedAttention(num_heads=64, num_kv_heads=2, head_dim=80, bias=True)
    assert attention(model_type="qwen3", head_dim=128).head_norms
    assert architecture_from_config({**base, "model_type": "llama", "tie_word_embeddings": True}).tied
    assert isinstance(architecture_from_config({**MOONLIGHT, "model_type": "kimi_k2"}).attention, LatentAttention)
    assert not architecture_from_config(SMALL_V2).router_correction
    assert architecture_from_config({k: v for k, v in MOONLIGHT.items() if k != "topk_method"}).router_correction
    assert not architecture_from_config({k: v for k, v in SMALL_V2.items() if k != "topk_method"}).router_correction


def test_the_number_of_experts_has_two_names():
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in QWEN3_MOE.items()}
    assert architecture_from_config(renamed) == architecture_from_config(QWEN3_MOE)


def test_dtypes():
    assert architecture_from_config({**QWEN3, "torch_dtype": "float16"}).dtype.name == "F16"
    assert architecture_from_config({**QWEN3, "dtype": "float32"}).dtype.name == "F32"
    assert architecture_from_config(QWEN3, dtype=dtype_named("F16")).dtype.name == "F16"
    with pytest.raises(SpecError, match="torch dtype 'bfloat17' is not known"):
        architecture_from_config({**QWEN3, "torch_dtype": "bfloat17"})
    with pytest.raises(UsageError, match="dtype is 16; expected the name of a torch dtype"):
        architecture_from_config({**QWEN3, "torch_dtype": 16})


@pytest.mark.parametrize("model_type", ["gpt_oss", None, 3, ["qwen3"]])
def test_an_unknown_family_names_itself_the_known_ones_and_the_way_out(model_type):
    with pytest.raises(UnsupportedError) as caught:
        architecture_from_config({**QWEN3, "model_type": model_type}, where="x/config.json")
    message = caught.value.message
    assert message.startswith(f"x/config.json: model_type {model_type!r} has no sharding rules here")
    assert all(family in message for family in SUPPORTED_FAMILIES)
    assert "--save-map" in message


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        ({**QWEN3, "hidden_size": "5120"}, UsageError, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({**QWEN3, "num_attention_heads": 0}, UsageError, r"Expected `int` >= 1 - at `\$.num_attention_heads`"),
        ({k: v for k, v in QWEN3.items() if k != "vocab_size"}, UsageError, "missing required field `vocab_size`"),
        ({**QWEN3, "num_key_value_heads": 7}, UsageError, "64 attention heads do not form 7 groups"),
        ({**MOONLIGHT, "kv_lora_rank": 0}, UsageError, r"Expected `int` >= 1 - at `\$.kv_lora_rank`"),
        (
            {k: v for k, v in MOONLIGHT.items() if k != "q_lora_rank"},
            UsageError,
            "missing required field `q_lora_rank`",
        ),
        ({k: v for k, v in QWEN3_MOE.items() if k != "num_experts"}, UsageError, "num_experts is missing"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, UsageError, "decoder_sparse_step"),
        ({**QWEN3_MOE, "moe_intermediate_size": 0}, UsageError, "expert_width must be at least 1"),
        ({**QWEN3, "mlp_bias": True}, UnsupportedError, "mlp_bias is set"),
        ({**MOONLIGHT, "attention_bias": True}, UnsupportedError, "attention_bias is set"),
        ({**MOONLIGHT, "quantization_config": {"quant_method": "fp8"}}, UnsupportedError, "set the model's dtype"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(config, error, match):
    with pytest.raises(error, match=match):
        architecture_from_config(config)


def test_a_quantised_model_can_be_planned_for_its_plain_weights():
    plain = architecture_from_config({**MOONLIGHT, "quantization_config": {}}, dtype=dtype_named("BF16"))
    assert checkpoint_spec(plain).digest == checkpoint_spec(architecture_from_config(MOONLIGHT)).digest
