"""How a Megatron-style trainer lays out a model: which rows of which checkpoint tensors each rank holds.

Ranks are numbered with tensor parallelism fastest, then context, then data parallelism, and pipeline stages slowest.
Within a stage, dense weights are cut by the tensor rank and repeated over context and data parallelism; experts are cut by
`rank in stage % ep` with an expert tensor degree of 1, so the expert group spans tensor, context and data ranks.

- Attention of grouped heads: one linear_qkv whose rows are interleaved by group (the group's queries, its key, its value)
  and cut evenly by raw rows. Latent attention: down projections repeated, up projections and output cut by heads.
- MLP: linear_fc1 = [gate; up] of the rank's share; linear_fc2 cut by columns. Shared experts likewise.
- Embedding and output layer: cut by rows of a vocabulary padded to a multiple; the padding is zero.
- Norms and routers: repeated on every rank of the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

__all__ = ["MegatronDegrees", "megatron_maps", "split_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronDegrees:
    """Degrees of parallelism of a trainer of `num_workers` ranks; the data-parallel degree is what is left.

    ep: experts are spread over so many ranks of a stage. stage_layers: layers of each stage, by `split_layers` if None.
    vocab_multiple: the vocabulary is padded to a multiple of this times tp.
    """

    num_workers: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    stage_layers: tuple[int, ...] | None = None
    vocab_multiple: int = 128

    def __post_init__(self) -> None:
        for name in ("num_workers", "tp", "pp", "cp", "ep", "vocab_multiple"):
            if getattr(self, name) < 1:
                raise UsageError(f"trainer: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_workers % (self.tp * self.cp * self.pp):
            raise UsageError(
                f"trainer: tp {self.tp} x cp {self.cp} x pp {self.pp} = {self.tp * self.cp * self.pp} does not divide its "
                f"{self.num_workers} workers; change a degree or the number of nodes"
            )
        if self.stage_size % self.ep:
            raise UsageError(
                f"trainer: ep {self.ep} does not divide the {self.stage_size} workers of a pipeline stage "
                f"({self.num_workers} workers / pp {self.pp}); change ep or pp"
            )

    @property
    def stage_size(self) -> int:
        """Workers of one pipeline stage."""
        return self.num_workers // self.pp

    @property
    def dp(self) -> int:
        return self.stage_size // (self.tp * self.cp)


def split_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage: equal where they divide, else ceil(layers / stages) each and the rest on the last stage.

    Where that would leave a stage empty, as evenly as possible with the longer stages first.
    """
    if num_layers < num_stages:
        raise UsageError(f"trainer: pp {num_stages} exceeds the model's {num_layers} layers; choose a smaller pp")
    most = -(-num_layers // num_stages)
    last = num_layers - most * (num_stages - 1)
    if last > 0:
        return (*(most,) * (num_stages - 1), last)
    share, longer = divmod(num_layers, num_stages)
    return tuple(share + (stage < longer) for stage in range(num_stages))


def megatron_maps(architecture: Architecture, spec: CheckpointSpec, degrees: MegatronDegrees) -> tuple[SourceMap, ...]:
    """One map for each trainer rank; ranks that hold the same share one object. Raises LayoutError, UsageError."""
    stages = degrees.stage_layers or split_layers(architecture.num_layers, degrees.pp)
    if len(stages) != degrees.pp or sum(stages) != architecture.num_layers or min(stages) < 1:
        raise UsageError(
            f"trainer: stages of {list(stages)} layers; expected {degrees.pp} of them with {architecture.num_layers} layers "
            "in all, each at least 1"
        )
    layout = _Layout(architecture, degrees)
    mapper = Mapper(spec)
    made: dict[tuple[int, int, int], SourceMap] = {}
    maps = []
    for rank in range(degrees.num_workers):
        stage, within = divmod(rank, degrees.stage_size)
        key = (stage, within % degrees.tp, within % degrees.ep)
        if key not in made:
            made[key] = mapper.source_map(layout.parts(stages, *key))
        maps.append(made[key])
    return tuple(maps)


class _Layout:
    """Blocks of one model under given degrees, each made once."""

    def __init__(self, architecture: Architecture, degrees: MegatronDegrees) -> None:
        self._a = architecture
        self._degrees = degrees
        self._dense = layer_tensors(architecture, dense=True) if architecture.dense_width else {}
        self._moe = layer_tensors(architecture, dense=False) if architecture.num_experts else {}
        self._made: dict[tuple[str, int, int], Block] = {}

    def parts(self, stages: Sequence[int], stage: int, tp: int, ep: int) -> list[Placed]:
        """Everything a rank of a stage holds."""
        found = []
        first = sum(stages[:stage])
        if stage == 0:
            found.append(Placed(self._block("embedding", tp, 0), "embedding.", ""))
        for layer in range(first, first + stages[stage]):
            live, source = f"decoder.layers.{layer - first}.", f"model.layers.{layer}."
            kinds = ("attention_dense", "dense") if self._a.is_dense(layer) else ("attention_moe", "moe")
            found.append(Placed(self._block(kinds[0], tp, 0), live, source))
            if kinds[1] == "dense":
                found.append(Placed(self._block("dense", tp, 0), live, source))
                continue
            found.append(Placed(self._block("router", tp, 0), live, source))
            found.append(Placed(self._block("experts", 0, ep), live, source))
        if stage == len(stages) - 1:
            found.append(Placed(self._block("final", tp, 0), "", ""))
        return found

    def _block(self, kind: str, tp: int, ep: int) -> Block:
        key = (kind, tp, ep)
        if key not in self._made:
            self._made[key] = self._make(kind, tp, ep)
        return self._made[key]

    def _make(self, kind: str, tp: int, ep: int) -> Block:
        if kind in ("embedding", "final"):
            return self._vocabulary(kind, tp, stages=self._degrees.pp)
        builder = BlockBuilder(self._dense if kind.endswith("dense") else self._moe)
        if kind.startswith("attention"):
            self._attention(builder, tp, dense=kind.endswith("dense"))
        elif kind == "dense":
            self._mlp(builder, "mlp.", "mlp.", self._a.dense_width, tp)
        elif kind == "router":
            builder.whole("mlp.router.weight", "mlp.gate.weight")
            if self._a.router_correction:
                builder.whole("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", parameter=False)
            if self._a.shared_width:
                self._mlp(builder, "mlp.shared_experts.", "mlp.shared_experts.", self._a.shared_width, tp)
        else:
            self._experts(builder, ep)
        return builder.block()

    def _vocabulary(self, kind: str, tp: int, *, stages: int) -> Block:
        a, degrees = self._a, self._degrees
        builder = BlockBuilder(outer_tensors(a))
        multiple = degrees.vocab_multiple * degrees.tp
        share = -(-a.vocab // multiple) * multiple // degrees.tp

        def put(name: str, tensor: str) -> None:
            pieces = cut([Piece(tensor, 0, a.vocab)], tp * share, (tp + 1) * share)
            builder.put(name, pieces, rows=share, like=tensor)

        if kind == "embedding":
            put("word_embeddings.weight", "model.embed_tokens.weight")
            return builder.block()
        builder.whole("decoder.final_layernorm.weight", "model.norm.weight")
        if not a.tied:
            put("output_layer.weight", "lm_head.weight")
        elif stages > 1:  # the last stage keeps a copy of the embedding it cannot reach
            put("output_layer.weight", "model.embed_tokens.weight")
        return builder.block()

    def _attention(self, builder: BlockBuilder, tp: int, *, dense: bool) -> None:
        attention = self._a.attention
        if isinstance(attention, GroupedAttention):
            self._grouped(builder, attention, tp)
        else:
            self._latent(builder, attention, tp)
        builder.whole(
            "mlp.linear_fc1.layer_norm_weight" if dense else "pre_mlp_layernorm.weight",
            "post_attention_layernorm.weight",
        )

    def _grouped(self, builder: BlockBuilder, g: GroupedAttention, tp: int) -> None:
        n, d = g.num_heads // g.num_kv_heads, g.head_dim
        begin, end = even_share(
            (g.num_heads + 2 * g.num_kv_heads) * d, tp, self._degrees.tp, "trainer: rows of linear_qkv"
        )
        builder.whole("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
        for suffix in ("weight", "bias") if g.bias else ("weight",):
            pieces = [
                piece
                for group in range(g.num_kv_heads)
                for piece in (
                    Piece(f"self_attn.q_proj.{suffix}", group * n * d, n * d),
                    Piece(f"self_attn.k_proj.{suffix}", group * d, d),
                    Piece(f"self_attn.v_proj.{suffix}", group * d, d),
                )
            ]
            builder.put(f"self_attention.linear_qkv.{suffix}", cut(pieces, begin, end))
        if g.head_norms:
            builder.whole("self_attention.q_layernorm.weight", "self_attn.q_norm.weight")
            builder.whole("self_attention.k_layernorm.weight", "self_attn.k_norm.weight")
        self._columns(builder, "self_attention.linear_proj.weight", "self_attn.o_proj.weight", g.num_heads * d, tp)
        if g.output_bias:
            builder.whole("self_attention.linear_proj.bias", "self_attn.o_proj.bias")

    def _latent(self, builder: BlockBuilder, m: LatentAttention, tp: int) -> None:
        def heads(name: str, tensor: str, width: int) -> None:
            begin, end = even_share(m.num_heads, tp, self._degrees.tp, "trainer: attention heads")
            builder.put(name, [Piece(tensor, begin * width, (end - begin) * width)])

        builder.whole("input_layernorm.weight", "input_layernorm.weight")
        query = m.nope_dim + m.rope_dim
        if m.q_lora_rank is None:
            heads("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight", query)
        else:
            builder.whole("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight")
            builder.whole("self_attention.linear_q_up_proj.layer_norm_weight", "self_attn.q_a_layernorm.weight")
            heads("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight", query)
        builder.whole("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
        builder.whole("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attn.kv_a_layernorm.weight")
        heads("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight", m.nope_dim + m.value_dim)
        self._columns(
            builder, "self_attention.linear_proj.weight", "self_attn.o_proj.weight", m.num_heads * m.value_dim, tp
        )

    def _mlp(self, builder: BlockBuilder, live: str, source: str, width: int, tp: int) -> None:
        begin, end = even_share(width, tp, self._degrees.tp, f"trainer: width of {source}gate_proj")
        halves = [Piece(f"{source}{half}_proj.weight", begin, end - begin) for half in ("gate", "up")]
        builder.put(f"{live}linear_fc1.weight", halves)
        self._columns(builder, f"{live}linear_fc2.weight", f"{source}down_proj.weight", width, tp)

    def _columns(self, builder: BlockBuilder, name: str, tensor: str, width: int, tp: int) -> None:
        columns = even_share(width, tp, self._degrees.tp, f"trainer: columns of {tensor}")
        builder.put(name, [Piece(tensor, 0, self._a.hidden)], columns=columns)

    def _experts(self, builder: BlockBuilder, ep: int) -> None:
        a = self._a
        begin, end = even_share(a.num_experts, ep, self._degrees.ep, "trainer: experts")
        for local, expert in enumerate(range(begin, end)):
            source = f"mlp.experts.{expert}."
            halves = [Piece(f"{source}{half}_proj.weight", 0, a.expert_width) for half in ("gate", "up")]
            builder.put(f"mlp.experts.linear_fc1.weight{local}", halves)
            builder.whole(f"mlp.experts.linear_fc2.weight{local}", f"{source}down_proj.weight")
