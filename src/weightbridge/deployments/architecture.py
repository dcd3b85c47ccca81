"""What a transformer's config says about its weights, and the checkpoint tensors that follow from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from weightbridge.checkpoint.dtypes import DType, dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.errors import UsageError

__all__ = [
    "Architecture",
    "GroupedAttention",
    "LatentAttention",
    "TensorForm",
    "checkpoint_spec",
    "layer_tensors",
    "outer_tensors",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Query heads in groups that share a key and a value head.

    bias: q, k and v have biases. output_bias: o has one. head_norms: q and k are normalised per head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    head_norms: bool = False

    def __post_init__(self) -> None:
        _positive("attention", num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        if self.num_heads % self.num_kv_heads:
            raise UsageError(
                f"{self.num_heads} attention heads do not form {self.num_kv_heads} groups; expected a multiple of the "
                "key/value heads"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention. q_lora_rank: None where queries are projected directly."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        _positive(
            "attention", num_heads=self.num_heads, q_lora_rank=1 if self.q_lora_rank is None else self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank, nope_dim=self.nope_dim, rope_dim=self.rope_dim, value_dim=self.value_dim,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer, as far as its weights go. Sizes in elements.

    dense_width: of a dense layer's MLP. num_experts: routed ones of a layer, 0 for a dense model. expert_width: of one
    expert. shared_width: of the shared experts of a layer together, 0 for none. dense_layers: layers without experts.
    tied: the output layer is the embedding. router_correction: routers carry an fp32 correction bias.
    """

    num_layers: int
    hidden: int
    vocab: int
    attention: GroupedAttention | LatentAttention
    dense_width: int
    num_experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    dense_layers: frozenset[int] = frozenset()
    tied: bool = False
    router_correction: bool = False
    dtype: DType = field(default_factory=lambda: dtype_named("BF16"))

    def __post_init__(self) -> None:
        _positive("architecture", num_layers=self.num_layers, hidden=self.hidden, vocab=self.vocab)
        if self.num_experts:
            _positive("architecture", expert_width=self.expert_width)
        if not self.num_experts or self.dense_layers:
            _positive("architecture", dense_width=self.dense_width)

    def is_dense(self, layer: int) -> bool:
        """Whether the layer has one MLP in place of experts."""
        return not self.num_experts or layer in self.dense_layers


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Shape and dtype of a checkpoint tensor."""

    shape: tuple[int, ...]
    dtype: DType


def checkpoint_spec(architecture: Architecture) -> CheckpointSpec:
    """The tensors of the model's Hugging Face checkpoint, with their names there: embedding, layers, norm, output."""
    a = architecture
    first, *last = outer_tensors(a).items()
    found = [first]
    for layer in range(a.num_layers):
        prefix = f"model.layers.{layer}."
        found += [(prefix + name, form) for name, form in layer_tensors(a, dense=a.is_dense(layer)).items()]
    found += last
    return CheckpointSpec(tensors=tuple(TensorSpec(name=n, shape=f.shape, dtype=f.dtype) for n, f in found))


def outer_tensors(architecture: Architecture) -> Mapping[str, TensorForm]:
    """Name -> form of what is in no layer: the embedding first, then the last norm and the output layer if there is one."""
    a = architecture
    vocabulary = TensorForm((a.vocab, a.hidden), a.dtype)
    found = {"model.embed_tokens.weight": vocabulary, "model.norm.weight": TensorForm((a.hidden,), a.dtype)}
    return found if a.tied else {**found, "lm_head.weight": vocabulary}


def layer_tensors(architecture: Architecture, *, dense: bool) -> Mapping[str, TensorForm]:
    """Name within the layer -> form, in checkpoint order, of a layer with a dense MLP or with experts."""
    a = architecture
    found = {"input_layernorm.weight": TensorForm((a.hidden,), a.dtype)}
    attention = a.attention
    pairs = _grouped(a, attention) if isinstance(attention, GroupedAttention) else _latent(a, attention)
    found.update((f"self_attn.{name}", TensorForm(shape, a.dtype)) for name, shape in pairs)
    found["post_attention_layernorm.weight"] = TensorForm((a.hidden,), a.dtype)
    if dense:
        found.update(_mlp(a, "mlp.", a.dense_width))
        return found
    found["mlp.gate.weight"] = TensorForm((a.num_experts, a.hidden), a.dtype)
    if a.router_correction:
        found["mlp.gate.e_score_correction_bias"] = TensorForm((a.num_experts,), dtype_named("F32"))
    for expert in range(a.num_experts):
        found.update(_mlp(a, f"mlp.experts.{expert}.", a.expert_width))
    if a.shared_width:
        found.update(_mlp(a, "mlp.shared_experts.", a.shared_width))
    return found


def _mlp(a: Architecture, prefix: str, width: int) -> Iterator[tuple[str, TensorForm]]:
    yield f"{prefix}gate_proj.weight", TensorForm((width, a.hidden), a.dtype)
    yield f"{prefix}up_proj.weight", TensorForm((width, a.hidden), a.dtype)
    yield f"{prefix}down_proj.weight", TensorForm((a.hidden, width), a.dtype)


def _grouped(a: Architecture, g: GroupedAttention) -> Iterator[tuple[str, tuple[int, ...]]]:
    query, key = g.num_heads * g.head_dim, g.num_kv_heads * g.head_dim
    for name, rows in (("q", query), ("k", key), ("v", key)):
        yield f"{name}_proj.weight", (rows, a.hidden)
        if g.bias:
            yield f"{name}_proj.bias", (rows,)
    yield "o_proj.weight", (a.hidden, query)
    if g.output_bias:
        yield "o_proj.bias", (a.hidden,)
    if g.head_norms:
        yield "q_norm.weight", (g.head_dim,)
        yield "k_norm.weight", (g.head_dim,)


def _latent(a: Architecture, m: LatentAttention) -> Iterator[tuple[str, tuple[int, ...]]]:
    query = m.num_heads * (m.nope_dim + m.rope_dim)
    if m.q_lora_rank is None:
        yield "q_proj.weight", (query, a.hidden)
    else:
        yield "q_a_proj.weight", (m.q_lora_rank, a.hidden)
        yield "q_a_layernorm.weight", (m.q_lora_rank,)
        yield "q_b_proj.weight", (query, m.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", (m.kv_lora_rank + m.rope_dim, a.hidden)
    yield "kv_a_layernorm.weight", (m.kv_lora_rank,)
    yield "kv_b_proj.weight", (m.num_heads * (m.nope_dim + m.value_dim), m.kv_lora_rank)
    yield "o_proj.weight", (a.hidden, m.num_heads * m.value_dim)


def _positive(what: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{what}: {name} must be at least 1, got {size}")
