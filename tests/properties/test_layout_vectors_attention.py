"""Attention layouts of engines and trainers: fused, replicated, interleaved and cut by raw rows, latent, gated delta nets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
import torch
from tests.properties.layout_loaders import (
    BF16,
    CONSTANT,
    F32,
    Ints,
    Rank,
    Stream,
    check,
    find,
    live_like,
    num_copies,
    numbers,
    rows,
    spec_of,
    whole_state,
)

from weightbridge.checkpoint import CheckpointSpec

HIDDEN = 7


def qkv_spec(heads: int, groups: int, dim: int, value_dim: int) -> CheckpointSpec:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, n in (("q", heads * dim), ("k", groups * dim), ("v", groups * value_dim)):
        shapes |= {name: (n, HIDDEN), f"{name}_bias": (n,)}
    return spec_of(**shapes)


def engine_qkv_rank(spec: CheckpointSpec, r: int, t: int, heads: int, groups: int, dim: int, value_dim: int) -> Rank:
    """[Q_r; K_r; V_r]: key and value heads are replicated when there are fewer of them than ranks."""
    own_q, kv = heads // t * dim, max(1, groups // t)
    replicas = t // groups if t >= groups else 1
    at = r // replicas * kv
    chosen = {
        "q": range(r * own_q, (r + 1) * own_q),
        "k": range(at * dim, (at + kv) * dim),
        "v": range(at * value_dim, (at + kv) * value_dim),
    }
    origin = {
        "qkv.weight": np.concatenate([rows(numbers(spec, n), chosen[n]) for n in "qkv"]),
        "qkv.bias": np.concatenate([rows(numbers(spec, f"{n}_bias"), chosen[n]) for n in "qkv"]),
    }
    live = live_like(origin)
    offsets = {"q": 0, "k": own_q, "v": own_q + kv * dim}
    sizes = {"q": own_q, "k": kv * dim, "v": kv * value_dim}

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            shard = name[0]
            param = live["qkv.bias" if name.endswith("bias") else "qkv.weight"]
            rank = r if shard == "q" else r // replicas
            source = loaded.narrow(0, rank * sizes[shard], sizes[shard])
            param.narrow(0, offsets[shard], sizes[shard]).copy_(source)

    return Rank(live=live, load=load, origin=origin)


def megatron_rows(heads: int, groups: int, dim: int) -> list[tuple[str, int]]:
    """What each row of the interleaved tensor holds, by the three formulas."""
    n = heads // groups
    found: dict[int, tuple[str, int]] = {}
    for d in range(dim):
        for h in range(heads):
            found[(h // n) * (n + 2) * dim + (h % n) * dim + d] = ("q", h * dim + d)
        for g in range(groups):
            found[g * (n + 2) * dim + n * dim + d] = ("k", g * dim + d)
            found[g * (n + 2) * dim + (n + 1) * dim + d] = ("v", g * dim + d)
    return [found[i] for i in range(len(found))]


def megatron_qkv_rank(spec: CheckpointSpec, r: int, t: int, heads: int, groups: int, dim: int) -> Rank:
    """One tensor, interleaved per group, of which each rank has an equal number of raw rows, whatever they hold."""
    held = megatron_rows(heads, groups, dim)
    own = len(held) // t
    mine = held[r * own : (r + 1) * own]
    origin = {
        "qkv.weight": np.stack([numbers(spec, n)[i] for n, i in mine]),
        "qkv.bias": np.stack([numbers(spec, f"{n}_bias")[i] for n, i in mine]),
    }
    live = live_like(origin)

    def write(s: dict[str, torch.Tensor]) -> None:
        for suffix, kind in (("", "weight"), ("_bias", "bias")):
            parts = [s[n + suffix].view(groups, -1, *s[n + suffix].shape[1:]) for n in "qkv"]
            fused = torch.cat(parts, dim=1).flatten(0, 1)
            live[f"qkv.{kind}"].copy_(fused.chunk(t)[r])

    return Rank(live=live, load=whole_state(write), origin=origin)


@pytest.mark.parametrize(
    ("groups", "tp", "kv_heads"),
    [(2, 4, [0, 0, 1, 1]), (1, 4, [0, 0, 0, 0]), (4, 8, [0, 0, 1, 1, 2, 2, 3, 3]), (4, 2, [0, 2])],
)
def test_case_b069_key_value_heads_are_replicated_over_the_ranks_of_an_engine(
    groups: int, tp: int, kv_heads: list[int]
) -> None:
    dim, value_dim = 3, 2  # the size of a value head may differ
    spec = qkv_spec(8, groups, dim, value_dim)
    ranks = [engine_qkv_rank(spec, r, tp, 8, groups, dim, value_dim) for r in range(tp)]
    maps = check(spec, ranks)
    assert [num_copies(m, n) for m in maps for n in ("qkv.weight", "qkv.bias")] == [3] * 2 * tp
    k = spec.index["k"]
    assert [int(m.copies.src_start[m.copies.tensor == k][0]) // (dim * HIDDEN) for m in maps] == kv_heads


def test_case_b068_a_trainer_cuts_interleaved_rows_and_the_engine_replicates() -> None:
    heads, groups, dim, tp = 8, 2, 3, 4
    spec = qkv_spec(heads, groups, dim, dim)
    trainers = [megatron_qkv_rank(spec, r, tp, heads, groups, dim) for r in range(tp)]
    held = megatron_rows(heads, groups, dim)
    as_numbers = [i + {"q": 0, "k": 1000, "v": 2000}[n] for n, i in held]
    assert as_numbers == [
        *range(12), 1000, 1001, 1002, 2000, 2001, 2002, *range(12, 24), 1003, 1004, 1005, 2003, 2004, 2005,
    ]  # fmt: skip
    q, k, v = ([(n, i) for i in range(24)] for n in "qkv")
    assert [held[9 * r : 9 * r + 9] for r in range(tp)] == [
        q[:9],
        q[9:12] + k[:3] + v[:3],
        q[12:21],
        q[21:] + k[3:6] + v[3:6],
    ]
    engines = [engine_qkv_rank(spec, r, tp, heads, groups, dim, dim) for r in range(tp)]
    maps = check(spec, engines, trainers=trainers)
    # Engine rank 1 needs query rows 6..11: of trainer 0 and of trainer 1.
    needed = set(range(6, 12))
    assert all(needed & {i for n, i in held[9 * r : 9 * r + 9] if n == "q"} for r in (0, 1))
    assert int(maps[1].copies.src_start[maps[1].copies.tensor == 0][0]) == 6 * HIDDEN
    whole = find(spec, megatron_qkv_rank(spec, 0, 1, heads, groups, dim))
    assert num_copies(whole, "qkv.weight") == 3


def test_case_b070_layers_with_different_numbers_of_key_value_heads() -> None:
    dim, tp, heads = 2, 4, 4
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, groups in enumerate((1, 4, 2)):
        shapes |= {
            f"{layer}.q": (heads * dim, HIDDEN),
            f"{layer}.k": (groups * dim, HIDDEN),
            f"{layer}.v": (groups * dim, HIDDEN),
        }
    spec = spec_of(**shapes)

    def rank(r: int) -> Rank:
        origin: dict[str, Ints] = {}
        for layer, groups in enumerate((1, 4, 2)):
            head = r * groups // tp
            own = range(head * dim, (head + 1) * dim)
            q = rows(numbers(spec, f"{layer}.q"), range(r * dim, (r + 1) * dim))
            origin[f"{layer}.qkv"] = np.concatenate([q, *(rows(numbers(spec, f"{layer}.{n}"), own) for n in "kv")])
        live = live_like(origin)

        def load(tensors: Stream) -> None:
            for name, loaded in tensors:
                layer, shard = name.split(".")
                num_heads = loaded.shape[0] // dim
                mine = loaded.view(num_heads, dim, HIDDEN)[r // max(tp // num_heads, 1)]
                live[f"{layer}.qkv"].view(3, dim, HIDDEN)["qkv".index(shard)] = mine

        return Rank(live=live, load=load, origin=origin)

    check(spec, [rank(r) for r in range(tp)])


def test_normalisation_weights_are_replicated() -> None:
    spec = spec_of(q_norm=(5,), k_norm=(12,), gate=(6, HIDDEN))
    origin = {n: numbers(spec, n) for n in ("q_norm", "k_norm", "gate")}

    def rank() -> Rank:
        live = live_like(origin)
        return Rank(live=live, load=whole_state(lambda s: [live[n].copy_(s[n]) for n in s]), origin=origin)

    maps = check(spec, [rank() for _ in range(3)])
    assert len({m.fingerprint for m in maps}) == 1


# --- latent attention -------------------------------------------------------------------------------------------------


def latent_rank(spec: CheckpointSpec, r: int, t: int, heads: int, p: int, v: int, latent: int) -> Rank:
    """Fused q_a and kv_a, written only when both have come in one call; kv_b by heads, with the views and the transposed
    copies that are derived from it."""
    own = heads // t
    kv_b = numbers(spec, "kv_b")[r * own * (p + v) : (r + 1) * own * (p + v)]
    by_head = kv_b.reshape(own, p + v, latent)
    origin = {
        "fused_qkv_a": np.concatenate([numbers(spec, "q_a"), numbers(spec, "kv_a")]),
        "kv_b": kv_b,
        "w_uk_t": np.stack([kv_b[h * (p + v) : h * (p + v) + p] for h in range(own)]),
        "w_uv": np.stack([kv_b[h * (p + v) + p : (h + 1) * (p + v)].T for h in range(own)]),
        "w_kc": by_head[:, :p],
        "w_vc": by_head[:, p:].transpose(0, 2, 1),
    }
    live = live_like({n: origin[n] for n in ("fused_qkv_a", "kv_b")})
    heads_of = live["kv_b"].view(own, p + v, latent)
    live["w_uk_t"] = heads_of[:, :p]  # views, for weights that are not quantised
    live["w_uv"] = heads_of[:, p:].transpose(1, 2)
    live["w_kc"] = torch.zeros(own, latent, p, dtype=BF16).transpose(1, 2)  # contiguous in transposed order
    live["w_vc"] = torch.zeros(own, latent, v, dtype=BF16)

    def load(tensors: Stream) -> None:
        cached: dict[str, torch.Tensor] = {}
        for name, loaded in tensors:
            if name == "kv_b":
                live["kv_b"].copy_(loaded.chunk(t)[r])
                w = live["kv_b"].unflatten(0, (-1, p + v))
                live["w_kc"].copy_(w[:, :p])
                live["w_vc"].copy_(w[:, p:].transpose(1, 2))
            else:
                cached[name] = loaded
                if len(cached) == 2:
                    live["fused_qkv_a"].copy_(torch.cat([cached["q_a"], cached["kv_a"]]))

    return Rank(live=live, load=load, origin=origin)


def test_case_b029_b030_latent_attention_with_joint_writes_views_and_derived_copies() -> None:
    heads, p, v, latent = 6, 4, 5, 3
    spec = spec_of(q_a=(7, 8), kv_a=(9, 8), kv_b=(heads * (p + v), latent))
    ranks = [latent_rank(spec, r, 3, heads, p, v, latent) for r in range(3)]
    maps = check(spec, ranks)
    assert [num_copies(maps[1], n) for n in ranks[1].live] == [2, 1, 1, 1, 1, 1]


def test_fused_latent_projections_concatenated_along_columns_and_one_scalar_scale() -> None:
    """Quantised variants: packed words side by side, and of two scalar scales only the first is taken."""
    spec = CheckpointSpec.from_iterable(
        [("q_a", (8, 3), torch.int32), ("kv_a", (8, 5), torch.int32), ("q_scale", (1,), F32), ("kv_scale", (1,), F32)]
    )
    origin = {
        "fused": np.concatenate([numbers(spec, "q_a"), numbers(spec, "kv_a")], axis=1),
        "scale": numbers(spec, "q_scale"),
    }
    live = {"fused": torch.zeros(8, 8, dtype=torch.int32), "scale": torch.zeros(1)}

    def write(s: dict[str, torch.Tensor]) -> None:
        live["fused"].copy_(torch.cat([s["q_a"], s["kv_a"]], dim=1))
        live["scale"].copy_(s["q_scale"])

    check(spec, [Rank(live=live, load=whole_state(write), origin=origin)], unused=["kv_scale"])


# --- gated delta nets -------------------------------------------------------------------------------------------------


def interleaved_delta_rank(spec: CheckpointSpec, r: int, t: int, *, midpoint: bool = False) -> Rank:
    """Interleaved per key head on disk; a rank takes a contiguous slice. midpoint: the mistake of cutting `ba` in two."""
    n_qkvz, n_ba = (spec.tensors[spec.index[n]].shape[0] for n in ("qkvz", "ba"))
    mine = range(r * n_ba // t, (r + 1) * n_ba // t)
    if midpoint:
        half = n_ba // 2
        mine = [*range(r * half // t, (r + 1) * half // t), *range(half + r * half // t, half + (r + 1) * half // t)]  # type: ignore[assignment]
    origin = {
        "qkvz": rows(numbers(spec, "qkvz"), range(r * n_qkvz // t, (r + 1) * n_qkvz // t)),
        "ba": rows(numbers(spec, "ba"), mine),
    }
    live = live_like(origin)

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            if midpoint and name == "ba":
                loaded = torch.cat([half.chunk(t)[r] for half in loaded.chunk(2)])
                live[name].copy_(loaded)
            else:
                live[name].copy_(loaded.chunk(t)[r])

    return Rank(live=live, load=load, origin=origin)


def test_case_b066_gates_interleaved_per_key_head_must_not_be_cut_in_the_middle() -> None:
    key_heads, per_key, dk, dv = 2, 2, 3, 2
    group = 2 * dk + 2 * per_key * dv
    spec = spec_of(qkvz=(key_heads * group, HIDDEN), ba=(key_heads * 2 * per_key, HIDDEN))
    right = check(spec, [interleaved_delta_rank(spec, r, 2) for r in range(2)])
    wrong = check(spec, [interleaved_delta_rank(spec, r, 2, midpoint=True) for r in range(2)])
    assert all(a.fingerprint != b.fingerprint for a, b in zip(right, wrong, strict=True))
    one, other = (find(spec, interleaved_delta_rank(spec, 0, 1, midpoint=m)) for m in (False, True))
    assert one.fingerprint == other.fingerprint  # one rank alone is blind to the mistake


def delta_rank(spec: CheckpointSpec, r: int, t: int, *, sharded_gates: bool = True) -> Rank:
    """[Q_r|K_r|V_r|Z_r] from one fused and one plain tensor, [B_r|A_r], convolution rows, fp32 decay."""
    K, Vh, dk, dv = 2, 4, 2, 3

    def part(start: int, size: int) -> range:
        return range(start + r * size // t, start + (r + 1) * size // t)

    qkv = list(chain(part(0, K * dk), part(K * dk, K * dk), part(2 * K * dk, Vh * dv)))
    if (r, t) == (1, 2):
        assert qkv == [2, 3, 6, 7, *range(14, 20)]
    gates = part(0, Vh) if sharded_gates else range(Vh)
    origin = {
        "qkvz": np.concatenate([rows(numbers(spec, "qkv"), qkv), rows(numbers(spec, "z"), part(0, Vh * dv))]),
        "ba": np.concatenate([rows(numbers(spec, n), gates) for n in "ba"]),
        "conv1d": rows(numbers(spec, "conv1d"), qkv),
        "A_log": rows(numbers(spec, "A_log"), part(0, Vh)),
        "dt_bias": rows(numbers(spec, "dt_bias"), part(0, Vh)),
    }
    live = live_like(origin)
    live["A_log"] = torch.zeros(Vh // t)

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            if name in ("qkv", "conv1d"):
                target = live["conv1d"] if name == "conv1d" else live["qkvz"]
                at = 0
                for size in loaded.split([K * dk, K * dk, Vh * dv]):  # one checkpoint tensor, three shards
                    mine = size.chunk(t)[r]
                    target[at : at + len(mine)] = mine
                    at += len(mine)
            elif name == "z":
                live["qkvz"][-Vh * dv // t :] = loaded.chunk(t)[r]
            elif name in "ba":
                mine = loaded.chunk(t)[r] if sharded_gates else loaded
                live["ba"].view(2, len(mine), -1)["ba".index(name)] = mine
            else:
                live[name].copy_(loaded.chunk(t)[r])

    return Rank(live=live, load=load, origin=origin)


DELTA = CheckpointSpec.from_iterable(
    [
        ("qkv", (20, HIDDEN), BF16), ("z", (12, HIDDEN), BF16), ("b", (4, HIDDEN), BF16), ("a", (4, HIDDEN), BF16),
        ("conv1d", (20, 1, 4), BF16), ("A_log", (4,), BF16), ("dt_bias", (4,), BF16),
    ]
)  # fmt: skip


def test_gated_delta_net_with_a_fused_source_for_three_slices() -> None:
    sharded = check(DELTA, [delta_rank(DELTA, r, 2) for r in range(2)])
    # For some quantised configurations the gates are replicated: placement depends on more than the model.
    replicated = check(DELTA, [delta_rank(DELTA, r, 2, sharded_gates=False) for r in range(2)])
    assert sharded[0].fingerprint != replicated[0].fingerprint


def test_row_views_of_one_buffer_made_after_the_first_load() -> None:
    """Two parameters become views of one storage once; from then on their addresses stay, and that is the state to probe."""
    spec = spec_of(qkvz=(8, HIDDEN), ba=(3, HIDDEN))
    origin = {n: numbers(spec, n) for n in ("qkvz", "ba")}
    live = live_like(origin)
    done = False

    def load(tensors: Stream) -> None:
        nonlocal done
        for name, loaded in tensors:
            live[name].copy_(loaded)
        if not done:
            fused = torch.cat([live["qkvz"], live["ba"]])
            live["qkvz"], live["ba"] = fused[:8], fused[8:]
            done = True

    load([("qkvz", torch.ones(8, HIDDEN)), ("ba", torch.ones(3, HIDDEN))])
    check(spec, [Rank(live=live, load=load, origin=origin)])
    assert live["qkvz"].untyped_storage().data_ptr() == live["ba"].untyped_storage().data_ptr()


# --- sinks and vision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [None, 5])
def test_case_b022_sinks_by_rank_cast_to_fp32_and_padded_with_minus_infinity(padded: int | None) -> None:
    heads, t = 6, 2
    spec = spec_of(sinks=(heads,))

    def rank(r: int) -> Rank:
        own = heads // t
        origin = {"sinks": np.full(padded or own, CONSTANT, dtype=np.int64)}
        origin["sinks"][:own] = numbers(spec, "sinks")[r * own : (r + 1) * own]
        live = live_like(origin, F32)

        def load(tensors: Stream) -> None:
            for _, loaded in tensors:
                live["sinks"].fill_(float("-inf"))
                live["sinks"][:own].copy_(loaded.chunk(t)[r])

        return Rank(live=live, load=load, origin=origin)

    maps = check(spec, [rank(r) for r in range(t)])
    assert {c.bits for m in maps for c in m.constants} == ({0xFF800000} if padded else set())


def vision_spec(names: Sequence[str], width: int) -> CheckpointSpec:
    shapes: dict[str, tuple[int, ...]] = {n: (width * 3 if n == "qkv" else width, HIDDEN) for n in names}
    return spec_of(**shapes, patch=(5, 3, 2, 4, 4), pos=(11, 5))


@pytest.mark.parametrize("names", [("qkv",), ("q", "k", "v")])
def test_vision_attention_takes_heads_from_each_third_and_a_convolution_is_a_matrix(names: tuple[str, ...]) -> None:
    heads, dim, t = 4, 3, 2
    width = heads * dim
    spec = vision_spec(names, width)

    def rank(r: int) -> Rank:
        own = range(r * width // t, (r + 1) * width // t)
        third = (
            [numbers(spec, "qkv")[i * width :][:width] for i in range(3)]
            if len(names) == 1
            else [numbers(spec, n) for n in names]
        )
        origin = {
            "qkv": np.concatenate([rows(x, own) for x in third]),
            "patch": numbers(spec, "patch").reshape(5, -1),  # [out, 3 * 2 * 4 * 4]
            "pos": numbers(spec, "pos"),
        }
        live = live_like(origin)

        def load(tensors: Stream) -> None:
            for name, loaded in tensors:
                if name == "patch":
                    live["patch"].view(5, 3, 2, 4, 4).copy_(loaded)
                elif name == "pos":
                    live["pos"].copy_(loaded)
                else:
                    parts = loaded.chunk(3) if name == "qkv" else [loaded]
                    for i, part in enumerate(parts, start="qkv".index(name[0]) if name != "qkv" else 0):
                        live["qkv"].view(3, -1, HIDDEN)[i] = part.chunk(t)[r]

        return Rank(live=live, load=load, origin=origin)

    check(spec, [rank(r) for r in range(t)])


def test_vision_attention_of_a_trainer_that_interleaves_heads() -> None:
    heads, dim = 4, 3
    spec = spec_of(qkv=(3 * heads * dim, HIDDEN))
    formula = [part * heads * dim + h * dim + d for h in range(heads) for part in range(3) for d in range(dim)]
    trainer_origin = {"linear_qkv": rows(numbers(spec, "qkv"), formula)}
    held = live_like(trainer_origin)
    trainer = Rank(
        live=held,
        load=whole_state(
            lambda s: held["linear_qkv"].copy_(s["qkv"].view(3, heads, dim, HIDDEN).transpose(0, 1).flatten(0, 2))
        ),
        origin=trainer_origin,
    )
    origin = {"qkv": numbers(spec, "qkv")}
    live = live_like(origin)
    engine = Rank(live=live, load=whole_state(lambda s: live["qkv"].copy_(s["qkv"])), origin=origin)
    check(spec, [engine], trainers=[trainer])
    assert num_copies(find(spec, trainer), "linear_qkv") == 1
