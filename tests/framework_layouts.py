"""What a worker's tensors hold under each framework's rules, said with whole NumPy arrays. Not a test module.

Every function takes the whole checkpoint (name -> array) and returns one worker's live tensors (name -> array), by the way the
framework's own code goes: reshape, concatenate, split, stack. Nothing here knows of source maps. Rank orders are read off
`np.arange(world).reshape(...)`.
"""

from __future__ import annotations

import numpy as np

from weightbridge.deployments.architecture import GroupedAttention


def random_checkpoint(spec):
    """Name -> int64 array of distinct positive values in a random order over the whole checkpoint."""
    values = np.random.default_rng(7).permutation(spec.numel) + 1
    parts = np.split(values, spec.numel_offsets[1:-1])
    return {t.name: part.reshape(t.shape) for t, part in zip(spec.tensors, parts, strict=True)}


def filled(source_map, spec, checkpoint):
    """Name -> array of the live tensors as the map describes them, one element at a time; -1 where it says nothing."""
    live = [np.full(t.span_numel, -1, dtype=np.int64) for t in source_map.live]
    for constant in source_map.constants:
        for at in _lattice(constant.live_start, constant.axes):
            assert live[constant.live][at] == -1
            live[constant.live][at] = constant.bits
    c = source_map.copies
    flat = [checkpoint[t.name].reshape(-1) for t in spec.tensors]
    for row in range(len(c)):
        count = c.count[row].tolist()
        sources = _lattice(int(c.src_start[row]), list(zip(count, c.src_stride[row].tolist(), strict=True)))
        places = _lattice(int(c.live_start[row]), list(zip(count, c.live_stride[row].tolist(), strict=True)))
        target = live[int(c.live[row])]
        assert (target[places] == -1).all(), "an element is written twice"
        target[places] = flat[int(c.tensor[row])][sources]
    return {
        t.name: np.lib.stride_tricks.as_strided(values, t.shape, [s * 8 for s in t.strides])
        for t, values in zip(source_map.live, live, strict=True)
    }


def _lattice(start, axes):
    found = np.array([start])
    for count, stride in axes:
        found = (found[:, None] + np.arange(count) * stride).reshape(-1)
    return found


def megatron_worker(a, ckpt, rank, *, world, tp, pp, cp, ep, stages, vocab_multiple):
    """One rank of a Megatron trainer with an expert tensor degree of 1."""
    dense = np.arange(world).reshape(pp, -1, cp, tp)
    expert = np.arange(world).reshape(pp, -1, ep)
    (stage, _, _, t), *_ = np.argwhere(dense == rank).tolist()
    (same_stage, _, e), *_ = np.argwhere(expert == rank).tolist()
    assert stage == same_stage
    layers = np.split(np.arange(a.num_layers), np.cumsum(stages)[:-1])[stage].tolist()
    vocab = -(-a.vocab // (vocab_multiple * tp)) * vocab_multiple * tp

    def vocabulary(name):
        return np.split(np.pad(ckpt[name], ((0, vocab - a.vocab), (0, 0))), tp)[t]

    live = {}
    if stage == 0:
        live["embedding.word_embeddings.weight"] = vocabulary("model.embed_tokens.weight")
    for local, layer in enumerate(layers):
        w = _Layer(ckpt, f"model.layers.{layer}.")
        found = _megatron_attention(a, w, t, tp)
        norm = "mlp.linear_fc1.layer_norm_weight" if a.is_dense(layer) else "pre_mlp_layernorm.weight"
        found[norm] = w["post_attention_layernorm.weight"]
        if a.is_dense(layer):
            found |= _megatron_mlp(w, "mlp.", "mlp.", t, tp)
        else:
            found["mlp.router.weight"] = w["mlp.gate.weight"]
            if a.router_correction:
                found["mlp.router.expert_bias"] = w["mlp.gate.e_score_correction_bias"]
            if a.shared_width:
                found |= _megatron_mlp(w, "mlp.shared_experts.", "mlp.shared_experts.", t, tp)
            for i, number in enumerate(np.split(np.arange(a.num_experts), ep)[e].tolist()):
                gate, up, down = (w[f"mlp.experts.{number}.{k}_proj.weight"] for k in ("gate", "up", "down"))
                found[f"mlp.experts.linear_fc1.weight{i}"] = np.concatenate([gate, up])
                found[f"mlp.experts.linear_fc2.weight{i}"] = down
        live |= {f"decoder.layers.{local}.{name}": value for name, value in found.items()}
    if stage == pp - 1:
        live["decoder.final_layernorm.weight"] = ckpt["model.norm.weight"]
        if not a.tied:
            live["output_layer.weight"] = vocabulary("lm_head.weight")
        elif pp > 1:
            live["output_layer.weight"] = vocabulary("model.embed_tokens.weight")
    return live


def _megatron_attention(a, w, t, tp):
    p, out = "self_attention.", {}
    if isinstance(a.attention, GroupedAttention):
        g = a.attention
        out[p + "linear_qkv.layer_norm_weight"] = w["input_layernorm.weight"]
        for suffix in ("weight", "bias") if g.bias else ("weight",):
            q, k, v = (w[f"self_attn.{x}_proj.{suffix}"] for x in "qkv")
            grouped = [x.reshape(g.num_kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
            fused = np.concatenate(grouped, axis=1).reshape(-1, *q.shape[1:])
            out[f"{p}linear_qkv.{suffix}"] = np.split(fused, tp)[t]
        if g.head_norms:
            out[p + "q_layernorm.weight"] = w["self_attn.q_norm.weight"]
            out[p + "k_layernorm.weight"] = w["self_attn.k_norm.weight"]
        if g.output_bias:
            out[p + "linear_proj.bias"] = w["self_attn.o_proj.bias"]
    else:
        out["input_layernorm.weight"] = w["input_layernorm.weight"]
        if a.attention.q_lora_rank is None:
            out[p + "linear_q_proj.weight"] = np.split(w["self_attn.q_proj.weight"], tp)[t]
        else:
            out[p + "linear_q_down_proj.weight"] = w["self_attn.q_a_proj.weight"]
            out[p + "linear_q_up_proj.layer_norm_weight"] = w["self_attn.q_a_layernorm.weight"]
            out[p + "linear_q_up_proj.weight"] = np.split(w["self_attn.q_b_proj.weight"], tp)[t]
        out[p + "linear_kv_down_proj.weight"] = w["self_attn.kv_a_proj_with_mqa.weight"]
        out[p + "linear_kv_up_proj.layer_norm_weight"] = w["self_attn.kv_a_layernorm.weight"]
        out[p + "linear_kv_up_proj.weight"] = np.split(w["self_attn.kv_b_proj.weight"], tp)[t]
    out[p + "linear_proj.weight"] = np.split(w["self_attn.o_proj.weight"], tp, axis=1)[t]
    return out


def _megatron_mlp(w, live, source, t, tp):
    gate, up = (np.split(w[f"{source}{k}_proj.weight"], tp)[t] for k in ("gate", "up"))
    down = np.split(w[f"{source}down_proj.weight"], tp, axis=1)[t]
    return {f"{live}linear_fc1.weight": np.concatenate([gate, up]), f"{live}linear_fc2.weight": down}


def engine_worker(a, ckpt, rank, *, tp, ep, attention, style):
    """One rank of an SGLang or vLLM engine."""
    degree, t = (tp, rank) if attention == "tp" else (1, 0)
    e, inner = np.argwhere(np.arange(tp).reshape(ep, -1) == rank)[0].tolist()
    vocab = -(-a.vocab // 64) * 64

    def vocabulary(name):
        return np.split(np.pad(ckpt[name], ((0, vocab - a.vocab), (0, 0))), degree)[t]

    def mlp(w, prefix):
        gate, up = (np.split(w[f"{prefix}{k}_proj.weight"], degree)[t] for k in ("gate", "up"))
        down = np.split(w[f"{prefix}down_proj.weight"], degree, axis=1)[t]
        return {f"{prefix}gate_up_proj.weight": np.concatenate([gate, up]), f"{prefix}down_proj.weight": down}

    live = {"model.embed_tokens.weight": vocabulary("model.embed_tokens.weight")}
    for layer in range(a.num_layers):
        w = _Layer(ckpt, f"model.layers.{layer}.")
        found = _engine_attention(a, w, t, degree, style)
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            found[norm] = w[norm]
        if a.is_dense(layer):
            found |= mlp(w, "mlp.")
        else:
            for name in ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")[: 1 + a.router_correction]:
                found[name] = w[name]
            if a.shared_width:
                found |= mlp(w, "mlp.shared_experts.")
            w13, w2 = [], []
            for number in np.split(np.arange(a.num_experts), ep)[e].tolist():
                gate, up, down = (w[f"mlp.experts.{number}.{k}_proj.weight"] for k in ("gate", "up", "down"))
                w13.append(np.concatenate([np.split(x, tp // ep)[inner] for x in (gate, up)]))
                w2.append(np.split(down, tp // ep, axis=1)[inner])
            found["mlp.experts.w13_weight"], found["mlp.experts.w2_weight"] = np.stack(w13), np.stack(w2)
        live |= {f"model.layers.{layer}.{name}": value for name, value in found.items()}
    live["model.norm.weight"] = ckpt["model.norm.weight"]
    if not a.tied:
        live["lm_head.weight"] = vocabulary("lm_head.weight")
    return live


def _engine_attention(a, w, t, degree, style):
    p, out = "self_attn.", {}
    if isinstance(a.attention, GroupedAttention):
        g = a.attention
        # Which key/value heads a rank has: its share of them, each repeated until every rank has one.
        heads = np.split(np.repeat(np.arange(g.num_kv_heads), max(1, degree // g.num_kv_heads)), degree)[t]
        for suffix in ("weight", "bias") if g.bias else ("weight",):
            q, k, v = (w[f"{p}{x}_proj.{suffix}"] for x in "qkv")
            by_head = [x.reshape(g.num_kv_heads, g.head_dim, *x.shape[1:])[heads] for x in (k, v)]
            rows = [np.split(q, degree)[t], *(x.reshape(-1, *q.shape[1:]) for x in by_head)]
            out[f"{p}qkv_proj.{suffix}"] = np.concatenate(rows)
        names = ["q_norm.weight", "k_norm.weight"] * g.head_norms + ["o_proj.bias"] * g.output_bias
    else:
        names = ["kv_a_layernorm.weight"]
        kv_a = w[p + "kv_a_proj_with_mqa.weight"]
        if a.attention.q_lora_rank is None:
            out[p + "q_proj.weight"] = np.split(w[p + "q_proj.weight"], degree)[t]
            out[p + "kv_a_proj_with_mqa.weight"] = kv_a
        else:
            fused = {"sglang": "fused_qkv_a_proj_with_mqa", "vllm": "fused_qkv_a_proj"}[style]
            out[f"{p}{fused}.weight"] = np.concatenate([w[p + "q_a_proj.weight"], kv_a])
            out[p + "q_b_proj.weight"] = np.split(w[p + "q_b_proj.weight"], degree)[t]
            names.append("q_a_layernorm.weight")
        out[p + "kv_b_proj.weight"] = np.split(w[p + "kv_b_proj.weight"], degree)[t]
    out |= {p + name: w[p + name] for name in names}
    out[p + "o_proj.weight"] = np.split(w[p + "o_proj.weight"], degree, axis=1)[t]
    return out


def fsdp_worker(a, ckpt, rank, *, shard, sharding):
    """One rank of an FSDP trainer: rows as torch.chunk cuts them, or a flat parameter for each layer and one for the rest."""
    r = rank % shard
    units = {"": [n for n in ckpt if ".layers." not in n]}
    for layer in range(a.num_layers):
        prefix = f"model.layers.{layer}."
        units[prefix] = [n for n in ckpt if n.startswith(prefix)]
    live = {}
    for prefix, names in units.items():
        buffers = [n for n in names if n.endswith("e_score_correction_bias")]
        parameters = [n for n in names if n not in buffers]
        live |= {n: ckpt[n] for n in buffers}
        if sharding == "rows":
            for n in parameters:
                size = -(-len(ckpt[n]) // shard)
                live[n] = ckpt[n][r * size : (r + 1) * size]
        else:
            flat = np.concatenate([ckpt[n].reshape(-1) for n in parameters])
            flat = np.pad(flat, (0, -len(flat) % shard))
            live[prefix + "_flat_param"] = np.split(flat, shard)[r]
    return live


class _Layer:
    """The tensors of one layer."""

    def __init__(self, ckpt, prefix):
        self._ckpt, self._prefix = ckpt, prefix

    def __getitem__(self, name):
        return self._ckpt[self._prefix + name]
