"""How an SGLang-style or vLLM-style engine lays out a model: which rows of which checkpoint tensors each rank holds.

`attention="tp"`: everything but the experts is cut by the tensor rank. qkv_proj = [q; k; v] of the rank, where ranks beyond
the number of key/value heads repeat them; gate_up_proj = [gate; up] of the rank's share; embedding and output layer by rows
of a vocabulary padded to a multiple of 64, the padding zero; latent attention keeps its down projections whole, side by side
in fused_qkv_a_proj where queries have one, and cuts the up projections by heads. Shared experts are cut like an MLP.

`attention="replicated"`: what both engines do with data-parallel attention and an all-to-all between experts (SGLang:
DP attention over all ranks, dense layers and output layer data parallel too, DeepEP; vLLM: data parallel with expert
parallel). Everything but the routed experts is whole on every rank, shared experts included.

Routed experts are stacked, w13 [experts, gate and up rows, hidden] and w2 [experts, hidden, width]. With ep < tp each
group of tp/ep ranks cuts the width of its experts among its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.deployments.architecture import (
    Architecture,
    GroupedAttention,
    LatentAttention,
    layer_tensors,
    outer_tensors,
)
from weightbridge.deployments.placement import Block, BlockBuilder, Mapper, Piece, Placed, cut, even_share
from weightbridge.errors import UsageError
from weightbridge.layout.source_map import SourceMap

__all__ = ["EngineDegrees", "engine_maps"]

_VOCAB_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDegrees:
    """tp: ranks of the engine. ep: the experts are spread over so many groups of ranks. style: whose names to use."""

    tp: int
    ep: int = 1
    attention: Literal["tp", "replicated"] = "tp"
    style: Literal["sglang", "vllm"] = "sglang"

    def __post_init__(self) -> None:
        if self.tp < 1 or self.ep < 1 or self.tp % self.ep:
            raise UsageError(f"engine: ep must divide tp and both be at least 1, got tp {self.tp} and ep {self.ep}")


def engine_maps(architecture: Architecture, spec: CheckpointSpec, degrees: EngineDegrees) -> tuple[SourceMap, ...]:
    """One map for each rank of an engine; ranks that hold the same share one object. Raises LayoutError, UsageError."""
    layout = _Layout(architecture, degrees)
    mapper = Mapper(spec)
    made: dict[tuple[int, int, int], SourceMap] = {}
    maps = []
    expert_tp = degrees.tp // degrees.ep
    for rank in range(degrees.tp):
        key = (rank if degrees.attention == "tp" else 0, *divmod(rank, expert_tp))
        if not architecture.num_experts:
            key = (key[0], 0, 0)
        if key not in made:
            made[key] = mapper.source_map(layout.parts(*key))
        maps.append(made[key])
    return tuple(maps)


class _Layout:
    """Blocks of one model under given degrees, each made once."""

    def __init__(self, architecture: Architecture, degrees: EngineDegrees) -> None:
        self._a = architecture
        self._degrees = degrees
        self._tp = degrees.tp if degrees.attention == "tp" else 1
        self._dense = layer_tensors(architecture, dense=True) if architecture.dense_width else {}
        self._moe = layer_tensors(architecture, dense=False) if architecture.num_experts else {}
        self._made: dict[tuple[str, int, int], Block] = {}

    def parts(self, tp: int, ep: int, expert_tp: int) -> list[Placed]:
        """Everything a rank holds."""
        found = [Placed(self._block("embedding", tp, 0), "", "")]
        for layer in range(self._a.num_layers):
            prefix = f"model.layers.{layer}."
            if self._a.is_dense(layer):
                found.append(Placed(self._block("attention_dense", tp, 0), prefix, prefix))
                found.append(Placed(self._block("dense", tp, 0), prefix, prefix))
                continue
            found.append(Placed(self._block("attention_moe", tp, 0), prefix, prefix))
            found.append(Placed(self._block("router", tp, 0), prefix, prefix))
            found.append(Placed(self._block("experts", ep, expert_tp), prefix, prefix))
        found.append(Placed(self._block("final", tp, 0), "", ""))
        return found

    def _block(self, kind: str, first: int, second: int) -> Block:
        key = (kind, first, second)
        if key not in self._made:
            self._made[key] = self._make(kind, first, second)
        return self._made[key]

    def _make(self, kind: str, first: int, second: int) -> Block:
        a = self._a
        if kind == "embedding":
            builder = BlockBuilder(outer_tensors(a))
            self._vocabulary(builder, "model.embed_tokens.weight", first)
        elif kind == "final":
            builder = BlockBuilder(outer_tensors(a))
            builder.whole("model.norm.weight", "model.norm.weight")
            if not a.tied:
                self._vocabulary(builder, "lm_head.weight", first)
        else:
            builder = BlockBuilder(self._dense if kind.endswith("dense") else self._moe)
            if kind.startswith("attention"):
                self._attention(builder, first)
            elif kind == "dense":
                self._mlp(builder, "mlp.", a.dense_width, first)
            elif kind == "router":
                self._router(builder, first)
            else:
                self._experts(builder, first, second)
        return builder.block()

    def _vocabulary(self, builder: BlockBuilder, name: str, tp: int) -> None:
        padded = -(-self._a.vocab // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        begin, end = even_share(padded, tp, self._tp, f"engine: padded rows of {name}")
        builder.put(name, cut([Piece(name, 0, self._a.vocab)], begin, end), rows=end - begin, like=name)

    def _attention(self, builder: BlockBuilder, tp: int) -> None:
        builder.whole("input_layernorm.weight", "input_layernorm.weight")
        if isinstance(self._a.attention, GroupedAttention):
            self._grouped(builder, self._a.attention, tp)
        else:
            self._latent(builder, self._a.attention, tp)
        builder.whole("post_attention_layernorm.weight", "post_attention_layernorm.weight")

    def _grouped(self, builder: BlockBuilder, g: GroupedAttention, tp: int) -> None:
        d, degree = g.head_dim, self._tp
        begin, end = even_share(g.num_heads, tp, degree, "engine: attention heads")
        if degree >= g.num_kv_heads:
            _, repeats = even_share(degree, 0, g.num_kv_heads, "engine: ranks that share the key/value heads")
            first, num = tp // repeats, 1
        else:
            low, high = even_share(g.num_kv_heads, tp, degree, "engine: key/value heads")
            first, num = low, high - low
        for suffix in ("weight", "bias") if g.bias else ("weight",):
            builder.put(
                f"self_attn.qkv_proj.{suffix}",
                [
                    Piece(f"self_attn.q_proj.{suffix}", begin * d, (end - begin) * d),
                    Piece(f"self_attn.k_proj.{suffix}", first * d, num * d),
                    Piece(f"self_attn.v_proj.{suffix}", first * d, num * d),
                ],
            )
        self._columns(builder, "self_attn.o_proj.weight", g.num_heads * d, tp)
        if g.output_bias:
            builder.whole("self_attn.o_proj.bias", "self_attn.o_proj.bias")
        if g.head_norms:
            builder.whole("self_attn.q_norm.weight", "self_attn.q_norm.weight")
            builder.whole("self_attn.k_norm.weight", "self_attn.k_norm.weight")

    def _latent(self, builder: BlockBuilder, m: LatentAttention, tp: int) -> None:
        begin, end = even_share(m.num_heads, tp, self._tp, "engine: attention heads")

        def heads(name: str, width: int) -> None:
            builder.put(name, [Piece(name, begin * width, (end - begin) * width)])

        kv_a = Piece("self_attn.kv_a_proj_with_mqa.weight", 0, m.kv_lora_rank + m.rope_dim)
        if m.q_lora_rank is None:
            heads("self_attn.q_proj.weight", m.nope_dim + m.rope_dim)
            builder.put("self_attn.kv_a_proj_with_mqa.weight", [kv_a])
        else:
            fused = "fused_qkv_a_proj_with_mqa" if self._degrees.style == "sglang" else "fused_qkv_a_proj"
            builder.put(f"self_attn.{fused}.weight", [Piece("self_attn.q_a_proj.weight", 0, m.q_lora_rank), kv_a])
            builder.whole("self_attn.q_a_layernorm.weight", "self_attn.q_a_layernorm.weight")
            heads("self_attn.q_b_proj.weight", m.nope_dim + m.rope_dim)
        builder.whole("self_attn.kv_a_layernorm.weight", "self_attn.kv_a_layernorm.weight")
        heads("self_attn.kv_b_proj.weight", m.nope_dim + m.value_dim)
        self._columns(builder, "self_attn.o_proj.weight", m.num_heads * m.value_dim, tp)

    def _mlp(self, builder: BlockBuilder, prefix: str, width: int, tp: int) -> None:
        begin, end = even_share(width, tp, self._tp, f"engine: width of {prefix}gate_proj")
        halves = [Piece(f"{prefix}{half}_proj.weight", begin, end - begin) for half in ("gate", "up")]
        builder.put(f"{prefix}gate_up_proj.weight", halves)
        self._columns(builder, f"{prefix}down_proj.weight", width, tp)

    def _columns(self, builder: BlockBuilder, name: str, width: int, tp: int) -> None:
        columns = even_share(width, tp, self._tp, f"engine: columns of {name}")
        builder.put(name, [Piece(name, 0, self._a.hidden)], columns=columns)

    def _router(self, builder: BlockBuilder, tp: int) -> None:
        builder.whole("mlp.gate.weight", "mlp.gate.weight")
        if self._a.router_correction:
            name = "mlp.gate.e_score_correction_bias"
            builder.whole(name, name)
        if self._a.shared_width:
            self._mlp(builder, "mlp.shared_experts.", self._a.shared_width, tp)

    def _experts(self, builder: BlockBuilder, ep: int, expert_tp: int) -> None:
        a = self._a
        first, last = even_share(a.num_experts, ep, self._degrees.ep, "engine: experts")
        begin, end = even_share(
            a.expert_width,
            expert_tp,
            self._degrees.tp // self._degrees.ep,
            "engine: width of an expert over tp / ep ranks",
        )
        names = [f"mlp.experts.{expert}." for expert in range(first, last)]
        halves = [Piece(f"{n}{half}_proj.weight", begin, end - begin) for n in names for half in ("gate", "up")]
        builder.put("mlp.experts.w13_weight", halves, shape=(len(names), 2 * (end - begin), a.hidden))
        down = [Piece(f"{n}down_proj.weight", 0, a.hidden) for n in names]
        shape = (len(names), a.hidden, end - begin)
        builder.put("mlp.experts.w2_weight", down, columns=(begin, end), shape=shape)
