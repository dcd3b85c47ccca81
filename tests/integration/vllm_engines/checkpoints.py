"""Checkpoint folders for the vLLM tests: real weights and tiny models, each in a version to start from and one to send."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

__all__ = ["HIDDEN", "make_tiny", "make_variant", "read"]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTER, LAYERS, VOCAB = 96, 6, 2, 32, 192, 3, 300
EXPERTS, EXPERT_INTER = 5, 64


def read(folder: str | Path) -> dict[str, torch.Tensor]:
    return {n: t for file in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(file).items()}


def make_variant(source: Path, target: Path) -> None:
    """A copy of a real checkpoint whose values all differ by some tenths of their size."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
    generator = torch.Generator().manual_seed(7)
    made = {}
    for name, tensor in read(source).items():
        noise = 1 + 0.3 * torch.rand(tensor.shape, generator=generator)
        made[name] = (tensor.float() * noise).to(tensor.dtype)
    save_file(made, target / "model.safetensors", metadata={"format": "pt"})


def make_tiny(folder: Path, *, experts: bool, dtype: torch.dtype, seed: int) -> None:
    """A Qwen3 or Qwen3-MoE of random weights, written as Hugging Face names them; a token is a word, its number."""
    folder.mkdir(parents=True)
    _write_tokenizer(folder)
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if experts else "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if experts:
        config |= {
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_INTER,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)
    made = {
        name: (1 + 0.3 * torch.randn(shape, generator=generator) if len(shape) == 1 else _matrix(shape, generator)).to(
            dtype
        )
        for name, shape in _shapes(experts)
    }
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    words = {f"<{number}>": number for number in range(VOCAB)}
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<0>"},
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
        "added_tokens": [],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<1>", "eos_token": "<2>", "unk_token": "<0>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


def _matrix(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Large enough for the answers to depend on every matrix."""
    return torch.randn(shape, generator=generator) * (2.0 / shape[-1] ** 0.5)


def _shapes(experts: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{layer}.self_attn.q_norm.weight", (HEAD_DIM,)
        yield f"{layer}.self_attn.k_norm.weight", (HEAD_DIM,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
        parts = [f"{layer}.mlp.experts.{e}" for e in range(EXPERTS)] if experts else [f"{layer}.mlp"]
        inner = EXPERT_INTER if experts else INTER
        if experts:
            yield f"{layer}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for part in parts:
            yield f"{part}.gate_proj.weight", (inner, HIDDEN)
            yield f"{part}.up_proj.weight", (inner, HIDDEN)
            yield f"{part}.down_proj.weight", (HIDDEN, inner)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)
