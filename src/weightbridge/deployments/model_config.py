"""From a Hugging Face config.json to an Architecture, for the families whose sharding rules are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec

from weightbridge.checkpoint.dtypes import DType, dtype_of_torch_name
from weightbridge.deployments.architecture import Architecture, GroupedAttention, LatentAttention
from weightbridge.errors import UnsupportedError, UsageError

__all__ = ["SUPPORTED_FAMILIES", "architecture_from_config"]

_ALTERNATIVE = (
    "for another model give the source maps that `weightbridge check --save-map` writes, on both sides of the job"
)


_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _Common(msgspec.Struct, kw_only=True):
    """Keys that every family has; keys this library has no use for are ignored."""

    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    vocab_size: _Size
    intermediate_size: _Count
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


class _Grouped(_Common, kw_only=True):
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    num_experts: _Count | None = None
    num_local_experts: _Count | None = None  # the same, as later versions of transformers save it
    moe_intermediate_size: _Count = 0
    decoder_sparse_step: _Size = 1
    mlp_only_layers: list[int] | None = None


class _Latent(_Common, kw_only=True):
    kv_lora_rank: _Size
    qk_nope_head_dim: _Size
    qk_rope_head_dim: _Size
    v_head_dim: _Size
    q_lora_rank: _Size | None  # null and absent do not mean the same
    n_routed_experts: _Count | None
    n_shared_experts: _Count | None
    moe_intermediate_size: _Count
    first_k_dense_replace: _Count
    moe_layer_freq: _Size = 1
    topk_method: str | None = None


_Keys = TypeVar("_Keys", _Grouped, _Latent)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What the family fixes and its config does not say.

    bias: "always" for q, k and v alone, "option" for q, k, v and o if attention_bias is set.
    """

    head_norms: bool = False
    bias: str = "option"
    experts: bool = False


def architecture_from_config(
    config: Mapping[str, Any], *, dtype: DType | None = None, where: str = "config.json"
) -> Architecture:
    """The architecture that a config describes. dtype: of the weights, the config's by default, else bfloat16.

    where: named in errors. Layers for multi-token prediction are left out: they are no part of what is served. Raises
    UnsupportedError for a model type, a quantised checkpoint or an option without sharding rules, UsageError for a config
    that lacks a size or holds something else in its place.
    """
    family = config.get("model_type")
    make = _FAMILIES.get(family) if isinstance(family, str) else None
    if make is None:
        raise UnsupportedError(
            f"{where}: model_type {family!r} has no sharding rules here; supported are {', '.join(SUPPORTED_FAMILIES)}; "
            f"{_ALTERNATIVE}",
            model_type=family,
        )
    if config.get("quantization_config") is not None and dtype is None:
        raise UnsupportedError(
            f"{where}: quantization_config is set, so its checkpoint holds packed weights and scales; set the model's dtype "
            f'("BF16") to plan for the plain weights of the same model; {_ALTERNATIVE}'
        )
    return make(config, dtype or _dtype(config, where), where)


def _dtype(config: Mapping[str, Any], where: str) -> DType:
    named = config.get("dtype", config.get("torch_dtype")) or "bfloat16"
    if not isinstance(named, str):
        raise UsageError(f"{where}: dtype is {named!r}; expected the name of a torch dtype, such as 'bfloat16'")
    return dtype_of_torch_name(named)


def _keys(kind: type[_Keys], config: Mapping[str, Any], where: str) -> _Keys:
    try:
        return msgspec.convert(dict(config), kind)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{where}: {error}; expected the config.json of a {config.get('model_type')} model as its authors published it"
        ) from None


def _grouped(traits: _Traits) -> Callable[[Mapping[str, Any], DType, str], Architecture]:
    def make(config: Mapping[str, Any], dtype: DType, where: str) -> Architecture:
        keys = _keys(_Grouped, config, where)
        _refuse(keys.mlp_bias, where, "mlp_bias")
        num_experts = 0
        if traits.experts:
            given = keys.num_local_experts if keys.num_experts is None else keys.num_experts
            if given is None:
                raise UsageError(f"{where}: num_experts is missing; expected the number of routed experts of a layer")
            num_experts = given
        return Architecture(
            num_layers=keys.num_hidden_layers, hidden=keys.hidden_size, vocab=keys.vocab_size, tied=keys.tie_word_embeddings,
            attention=GroupedAttention(
                num_heads=keys.num_attention_heads, num_kv_heads=keys.num_key_value_heads or keys.num_attention_heads,
                head_dim=keys.head_dim or keys.hidden_size // keys.num_attention_heads,
                bias=traits.bias == "always" or (keys.attention_bias and traits.bias == "option"),
                output_bias=keys.attention_bias and traits.bias == "option", head_norms=traits.head_norms,
            ),
            dense_width=keys.intermediate_size, num_experts=num_experts,
            expert_width=keys.moe_intermediate_size if num_experts else 0,
            dense_layers=frozenset(
                layer
                for layer in range(keys.num_hidden_layers)
                if num_experts and (layer in (keys.mlp_only_layers or ()) or (layer + 1) % keys.decoder_sparse_step)
            ),
            dtype=dtype,
        )  # fmt: skip

    return make


def _latent(correction_by_default: bool) -> Callable[[Mapping[str, Any], DType, str], Architecture]:
    def make(config: Mapping[str, Any], dtype: DType, where: str) -> Architecture:
        keys = _keys(_Latent, config, where)
        _refuse(keys.attention_bias, where, "attention_bias")
        num_experts = keys.n_routed_experts or 0
        method = keys.topk_method or ("noaux_tc" if correction_by_default else "greedy")
        return Architecture(
            num_layers=keys.num_hidden_layers, hidden=keys.hidden_size, vocab=keys.vocab_size, tied=keys.tie_word_embeddings,
            attention=LatentAttention(
                num_heads=keys.num_attention_heads, q_lora_rank=keys.q_lora_rank, kv_lora_rank=keys.kv_lora_rank,
                nope_dim=keys.qk_nope_head_dim, rope_dim=keys.qk_rope_head_dim, value_dim=keys.v_head_dim,
            ),
            dense_width=keys.intermediate_size, num_experts=num_experts, expert_width=keys.moe_intermediate_size,
            shared_width=(keys.n_shared_experts or 0) * keys.moe_intermediate_size,
            dense_layers=frozenset(
                layer
                for layer in range(keys.num_hidden_layers)
                if num_experts and (layer < keys.first_k_dense_replace or layer % keys.moe_layer_freq)
            ),
            router_correction=bool(num_experts) and method == "noaux_tc", dtype=dtype,
        )  # fmt: skip

    return make


def _refuse(is_set: bool, where: str, option: str) -> None:
    if is_set:
        raise UnsupportedError(f"{where}: {option} is set, for which there are no sharding rules here; {_ALTERNATIVE}")


_FAMILIES: Mapping[str, Callable[[Mapping[str, Any], DType, str], Architecture]] = MappingProxyType(
    {
        "llama": _grouped(_Traits()),
        "qwen2": _grouped(_Traits(bias="always")),
        "qwen3": _grouped(_Traits(head_norms=True)),
        "qwen3_moe": _grouped(_Traits(head_norms=True, experts=True)),
        "deepseek_v2": _latent(correction_by_default=False),
        "deepseek_v3": _latent(correction_by_default=True),
        "kimi_k2": _latent(correction_by_default=True),
    }
)

SUPPORTED_FAMILIES = tuple(_FAMILIES)
"""Values of model_type that `architecture_from_config` knows."""
