"""Layouts that engines and trainers really have, each as a small loader and the copies it must be found to make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod

import numpy as np
import pytest
import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.layout import SourceMap, explain
from weightbridge.probe import NamedTensors, predict, probe

BF16, F32 = torch.bfloat16, torch.float32
Loader = Callable[[dict[str, torch.Tensor]], None]


def spec_of(dtype: torch.dtype = BF16, /, **shapes: tuple[int, ...]) -> CheckpointSpec:
    return CheckpointSpec.from_iterable((name, shape, dtype) for name, shape in shapes.items())


def run(
    spec: CheckpointSpec, live: Mapping[str, torch.Tensor], write: Loader, buffers: Iterable[str] = ()
) -> SourceMap:
    """Probe, then load distinct values and compare every live element with what the map predicts."""

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        write(dict(tensors))

    found = probe(spec=spec, load_weights=load, tensors=lambda: NamedTensors(live, buffers=buffers))
    generator = torch.Generator().manual_seed(1)
    state = {
        t.name: torch.randn(t.shape, generator=generator).to(getattr(torch, t.dtype.torch_name)) for t in spec.tensors
    }
    for tensor in live.values():
        tensor.fill_(3)
    write({n: t.clone() for n, t in state.items()})
    for position, described in enumerate(found.live):
        tensor = live[described.name]
        flat = [
            state[t.name]
            .reshape(-1)
            .view(torch.int16 if t.dtype.itemsize == 2 else torch.int32)
            .numpy()
            .view(t.dtype.bits)
            for t in spec.tensors
        ]
        bits, times = predict(spec, found, position, lambda i, lo, hi, flat=flat: flat[i][lo:hi])  # type: ignore[misc]
        as_ints = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        expected = np.lib.stride_tricks.as_strided(bits, tensor.shape, [s * bits.itemsize for s in tensor.stride()])
        written = np.lib.stride_tricks.as_strided(times, tensor.shape, [s * 8 for s in tensor.stride()]) == 1
        assert times.sum() + found.untouched.get(described.name, 0) == tensor.numel()
        np.testing.assert_array_equal(as_ints.numpy().view(described.dtype.bits)[written], expected[written])
    return found


def num_copies(found: SourceMap, live: str) -> int:
    position = [t.name for t in found.live].index(live)
    return int(np.count_nonzero(found.copies.live == position))


@pytest.mark.parametrize(("groups", "tp"), [(2, 4), (1, 4), (4, 8), (4, 2)])
def test_qkv_of_an_engine_that_replicates_key_value_heads(groups: int, tp: int) -> None:
    dim, hidden, heads = 3, 10, 8
    spec = spec_of(q=(heads * dim, hidden), k=(groups * dim, hidden), v=(groups * dim, hidden))
    own_q, own_kv = heads // tp * dim, max(1, groups // tp) * dim
    replicas = tp // groups if tp >= groups else 1
    kv_heads = []
    for rank in range(tp):
        live = torch.empty(own_q + 2 * own_kv, hidden, dtype=BF16)

        def write(s: dict[str, torch.Tensor], r: int = rank, to: torch.Tensor = live) -> None:
            to[:own_q] = s["q"][r * own_q : (r + 1) * own_q]
            at = r // replicas * own_kv
            to[own_q : own_q + own_kv] = s["k"][at : at + own_kv]
            to[own_q + own_kv :] = s["v"][at : at + own_kv]

        found = run(spec, {"qkv": live}, write)
        assert num_copies(found, "qkv") == 3
        kv_heads.append(int(found.copies.src_start[found.copies.tensor == 1][0]) // (dim * hidden))
    expected = {(2, 4): [0, 0, 1, 1], (1, 4): [0, 0, 0, 0], (4, 8): [0, 0, 1, 1, 2, 2, 3, 3], (4, 2): [0, 2]}
    assert kv_heads == expected[groups, tp]


def test_qkv_interleaved_per_group_and_cut_by_raw_rows() -> None:
    heads, groups, dim, hidden, tp = 8, 2, 3, 70, 4
    per_group = heads // groups
    spec = spec_of(q=(heads * dim, hidden), k=(groups * dim, hidden), v=(groups * dim, hidden))

    def fused(s: dict[str, torch.Tensor]) -> torch.Tensor:
        q, k, v = (s[n].view(groups, -1, hidden) for n in "qkv")
        return torch.cat([q, k, v], dim=1).reshape(-1, hidden)

    whole = torch.empty((heads + 2 * groups) * dim, hidden, dtype=BF16)
    found = run(spec, {"qkv": whole}, lambda s: whole.copy_(fused(s)))  # type: ignore[arg-type,return-value]
    assert num_copies(found, "qkv") == 3
    assert explain(found, spec).splitlines()[1:] == [
        f"  [0:36:18 + 0:12, :] <- q[0:24:12 + 0:12, :]  ({24 * hidden} elements)".replace(
            "q[0:24:12 + 0:12, :]", "q[0:24:12 + 0:12, :]"
        ),
        f"  [12:48:18 + 0:3, :] <- k[0:6:3 + 0:3, :]  ({6 * hidden} elements)",
        f"  [15:51:18 + 0:3, :] <- v[0:6:3 + 0:3, :]  ({6 * hidden} elements)",
    ]
    rows_of_rank: list[list[tuple[str, int]]] = []
    for rank in range(tp):
        own = torch.empty(9, hidden, dtype=BF16)
        found = run(spec, {"qkv": own}, lambda s, r=rank, to=own: to.copy_(fused(s).chunk(tp)[r]))  # type: ignore[misc]
        rows = {}
        for i in range(len(found.copies)):
            name = spec.tensors[int(found.copies.tensor[i])].name
            for j in range(int(found.copies.numel[i]) // hidden):
                rows[int(found.copies.live_start[i]) // hidden + j] = (
                    name,
                    int(found.copies.src_start[i]) // hidden + j,
                )
        rows_of_rank.append([rows[i] for i in range(9)])
    q, k, v = ([(n, i) for i in range(24)] for n in "qkv")
    assert rows_of_rank == [q[:9], q[9:12] + k[:3] + v[:3], q[12:21], q[21:24] + k[3:6] + v[3:6]]
    del per_group


def test_gate_and_up_halves_and_a_padded_half() -> None:
    inner, hidden, rank, tp = 10, 7, 1, 2
    own, padded = inner // tp, 8
    spec = spec_of(gate=(inner, hidden), up=(inner, hidden))
    live = {"dense": torch.empty(2 * own, hidden, dtype=BF16), "padded": torch.empty(2 * padded, hidden, dtype=BF16)}

    def write(s: dict[str, torch.Tensor]) -> None:
        gate, up = (s[n][rank * own : (rank + 1) * own] for n in ("gate", "up"))
        live["dense"].copy_(torch.cat([gate, up]))
        live["padded"].zero_()
        live["padded"][:own] = gate
        live["padded"][padded : padded + own] = up  # up begins at the padded half, not at F / t

    found = run(spec, live, write)
    assert (num_copies(found, "dense"), num_copies(found, "padded")) == (2, 2)
    pads = [(c.live_start, c.axes, c.bits) for c in found.constants]
    assert sum(prod(n for n, _ in axes) for _, axes, _ in pads) == 2 * (padded - own) * hidden
    assert {bits for *_, bits in pads} == {0}


@pytest.mark.parametrize(("vocab", "tp"), [(100, 4), (10, 4)])
def test_vocabulary_rows_are_padded_with_zeros(vocab: int, tp: int) -> None:
    hidden = 6
    own = -(-vocab // 64) * 64 // tp
    spec = spec_of(embed=(vocab, hidden))
    for rank in range(tp):
        live = torch.empty(own, hidden, dtype=BF16)
        lo, hi = min(rank * own, vocab), min((rank + 1) * own, vocab)

        def write(s: dict[str, torch.Tensor], to: torch.Tensor = live, lo: int = lo, hi: int = hi) -> None:
            to[: hi - lo] = s["embed"][lo:hi]
            to[hi - lo :].fill_(0)

        found = run(spec, {"embed": live}, write)
        assert int(found.copies.numel.sum()) == (hi - lo) * hidden
        assert sum(prod(n for n, _ in c.axes) for c in found.constants) == (own - hi + lo) * hidden
        assert not found.untouched


def test_stacked_experts_of_an_expert_parallel_rank() -> None:
    experts, hidden, inner, ep_rank = 4, 3, 2, 1
    names = {
        f"e{e}_{p}": ((inner, hidden) if p != "down" else (hidden, inner))
        for e in range(experts)
        for p in ("gate", "up", "down")
    }
    spec = spec_of(**names)
    live = {"w13": torch.empty(2, 2 * inner, hidden, dtype=BF16), "w2": torch.empty(2, hidden, inner, dtype=BF16)}

    def write(s: dict[str, torch.Tensor]) -> None:
        for local in range(2):
            e = 2 * ep_rank + local
            live["w13"][local] = torch.cat([s[f"e{e}_gate"], s[f"e{e}_up"]])
            live["w2"][local] = s[f"e{e}_down"]

    found = run(spec, live, write)
    assert (num_copies(found, "w13"), num_copies(found, "w2")) == (4, 2)
    row = int(np.flatnonzero((found.copies.live == 0) & (found.copies.live_start == inner * hidden))[0])
    assert spec.tensors[int(found.copies.tensor[row])].name == "e2_up"  # w13[0, 2 + i, h] = up of expert 2 [i, h]


def test_one_expert_in_several_slots() -> None:
    spec = spec_of(w=(3, 5, 4))
    live = torch.empty(4, 5, 4, dtype=BF16)
    found = run(spec, {"w": live}, lambda s: live.copy_(s["w"][[2, 0, 2, 1]]))  # type: ignore[arg-type,return-value]
    assert int(found.copies.numel.sum()) == 80


def test_columns_interleaved_on_disk_are_sliced_and_transposed() -> None:
    experts, hidden, inner, tp = 2, 5, 8, 2
    spec = spec_of(gate_up=(experts, hidden, 2 * inner), down=(experts, inner, hidden), bias=(experts, 2 * inner))
    start, own = inner // tp, inner // tp  # rank 1
    live = {
        "w13": torch.empty(experts, 2 * own, hidden, dtype=BF16),
        "halves": torch.empty(experts, 2 * inner, hidden, dtype=BF16),
        "w2": torch.empty(experts, hidden, own, dtype=BF16),
        "bias": torch.empty(experts, 2 * own, dtype=BF16),
    }

    def write(s: dict[str, torch.Tensor]) -> None:
        live["w13"].copy_(s["gate_up"][:, :, 2 * start :].transpose(1, 2))
        rows = s["gate_up"].transpose(1, 2)
        live["halves"].copy_(torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1))  # 0, 2, 4, ..., 1, 3, 5, ...
        live["w2"].copy_(s["down"][:, start:].transpose(1, 2))
        live["bias"].copy_(s["bias"][:, 2 * start :])

    found = run(spec, live, write)
    assert [num_copies(found, n) for n in live] == [1, 1, 1, 1]


def test_gated_delta_net_convolution_rows() -> None:
    key_heads, value_heads, dk, dv, tp, rank = 2, 4, 2, 3, 2, 1
    q_rows, k_rows, v_rows = (n // tp for n in (key_heads * dk, key_heads * dk, value_heads * dv))
    spec = spec_of(conv=(2 * key_heads * dk + value_heads * dv, 1, 4))
    live = torch.empty(q_rows + k_rows + v_rows, 1, 4, dtype=BF16)
    rows = [2, 3, 6, 7, *range(14, 20)]
    starts = [rank * q_rows, key_heads * dk + rank * k_rows, 2 * key_heads * dk + rank * v_rows]
    assert rows == [s + i for s, n in zip(starts, (q_rows, k_rows, v_rows), strict=True) for i in range(n)]
    found = run(spec, {"conv": live}, lambda s: live.copy_(s["conv"][rows]))  # type: ignore[arg-type,return-value]
    assert int(found.copies.numel.sum()) == live.numel()


def test_a_fused_source_goes_to_three_slices_and_into_views_of_one_buffer() -> None:
    spec = spec_of(qkv=(12, 6), z=(4, 6), b=(2, 6), a=(2, 6))
    buffer = torch.empty(12, 6, dtype=BF16)  # [q k v z] and [b a] of rank 0 are row views of one storage
    qkvz, ba = buffer[:8], buffer[8:]

    def write(s: dict[str, torch.Tensor]) -> None:
        q, k, v = s["qkv"].chunk(3)
        qkvz.copy_(torch.cat([q[:2], k[:2], v[:2], s["z"][:2]]))
        ba.copy_(torch.cat([s["b"], s["a"]]))

    found = run(spec, {"qkvz": qkvz, "ba": ba, "whole": buffer}, write)
    assert int(found.copies.numel[found.copies.live == 2].sum()) == 72  # a name for the same bytes is explained as well


def test_latent_attention_views_and_a_transposed_derived_tensor() -> None:
    heads, p, v, latent = 3, 4, 5, 6
    spec = spec_of(q_a=(7, 8), kv_a=(9, 8), kv_b=(heads * (p + v), latent))
    live = {
        "fused_a": torch.empty(16, 8, dtype=BF16),
        "kv_b": torch.empty(heads * (p + v), latent, dtype=BF16),
        "w_uv": torch.empty(heads, latent, v, dtype=BF16),
        "w_kc": torch.empty(heads, latent, p, dtype=BF16).transpose(1, 2),
    }

    def write(s: dict[str, torch.Tensor]) -> None:
        live["fused_a"].copy_(torch.cat([s["q_a"], s["kv_a"]]))
        live["kv_b"].copy_(s["kv_b"])
        per_head = s["kv_b"].view(heads, p + v, latent)
        live["w_uv"].copy_(per_head[:, p:].transpose(1, 2))
        live["w_kc"].copy_(per_head[:, :p])

    found = run(spec, live, write)
    assert [num_copies(found, n) for n in live] == [2, 1, 1, 1]


def test_case_b022_padding_of_minus_infinity_is_kept_as_what_it_is() -> None:
    spec = spec_of(sinks=(3,))
    live = torch.empty(8, dtype=F32)

    def write(s: dict[str, torch.Tensor]) -> None:
        live.fill_(float("-inf"))
        live[:3] = s["sinks"]

    found = run(spec, {"sinks": live}, write)
    assert [(c.live_start, c.axes, c.bits) for c in found.constants] == [(3, ((5, 1),), 0xFF800000)]


def test_rows_split_over_ranks_unevenly_and_a_rank_with_none() -> None:
    spec = spec_of(w=(5, 4), b=(5,))
    for rank, rows in enumerate(torch.arange(5).chunk(4)):
        live = {
            "w": torch.empty(len(rows) * 4 + 1, dtype=F32)[: len(rows) * 4].view(-1, 4),
            "b": torch.empty(len(rows)),
        }
        found = run(spec, live, lambda s, r=rows, to=live: [to[n].copy_(s[n][r]) for n in to] and None)  # type: ignore[misc]
        assert int(found.copies.numel.sum()) == 5 * len(rows)
        assert (found.copies.src_start[found.copies.tensor == 0] == 8 * rank).all()
    live = {"w": torch.empty(0, 4), "b": torch.empty(0)}
    found = run(spec, live, lambda s: None)
    assert len(found.copies) == 0
    assert [t.numel for t in found.live] == [0, 0]


def test_case_b106_a_flat_shard_of_three_tensors_that_begins_and_ends_mid_row() -> None:
    spec = spec_of(a=(13, 9), b=(31,), c=(90, 101))
    flat = torch.empty(6000)
    found = run(spec, {"flat": flat}, lambda s: flat.copy_(torch.cat([s[n].reshape(-1) for n in "abc"])[40:6040]))  # type: ignore[arg-type,return-value]
    assert explain(found, spec).splitlines() == [
        "flat [6000] F32, parameter",
        "  [0:5] <- a[4, 4:9] cast BF16 -> F32  (5 elements)",
        "  [5:77:9 + 0:9] <- a[5:13, :] cast BF16 -> F32  (72 elements)",
        "  [77:108] <- b[:] cast BF16 -> F32  (31 elements)",
        "  [108:5966:101 + 0:101] <- c[0:58, :] cast BF16 -> F32  (5858 elements)",
        "  [5966:6000] <- c[58, 0:34] cast BF16 -> F32  (34 elements)",
    ]


def test_square_matrices_do_not_hide_a_transpose() -> None:
    spec = spec_of(w=(4, 4), e=(2, 4, 4))
    live = {"w": torch.empty(4, 4, dtype=BF16), "e": torch.empty(2, 4, 4, dtype=BF16)}

    def write(s: dict[str, torch.Tensor]) -> None:
        live["w"].copy_(s["w"].t())
        live["e"].copy_(s["e"].transpose(1, 2))

    found = run(spec, live, write)
    assert explain(found, spec, "w").splitlines()[1:] == ["  [:, :] <- w[:, :]  (16 elements)"]
    assert found.copies.src_stride[found.copies.live == 0].tolist() == [[0, 1, 4]]


def test_scalars_broadcasts_and_expanded_tensors() -> None:
    spec = spec_of(s=(), w=(1,), v=(6,))
    live = {
        "scalar": torch.empty((), dtype=BF16),
        "wide": torch.empty(5, 3, dtype=BF16),
        "expanded": torch.empty(6, 1, dtype=BF16).expand(6, 4),
    }

    def write(s: dict[str, torch.Tensor]) -> None:
        live["scalar"].copy_(s["s"])
        live["wide"].copy_(s["w"].expand(5, 3))
        live["expanded"][:, 0] = s["v"]

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        write(dict(tensors))

    found = probe(spec=spec, load_weights=load, tensors=lambda: live)
    assert found.copies.numel.tolist() == [1, 15, 6]
    assert (found.copies.src_stride[1] == 0).all()


def test_a_rotary_permutation_and_a_four_dimensional_block_layout_are_one_copy_each() -> None:
    heads, dim, hidden = 3, 16, 80
    spec = spec_of(q=(heads * dim, hidden), w=(32, 48))
    live = {"q": torch.empty(heads * dim, hidden, dtype=BF16), "blocked": torch.empty(2, 3, 16, 16, dtype=BF16)}

    def write(s: dict[str, torch.Tensor]) -> None:
        live["q"].copy_(s["q"].view(heads, 2, dim // 2, hidden).transpose(1, 2).reshape(heads * dim, hidden))
        live["blocked"].copy_(s["w"].view(2, 16, 3, 16).permute(0, 2, 1, 3))

    found = run(spec, live, write)
    assert (num_copies(found, "q"), num_copies(found, "blocked")) == (1, 1)


@pytest.mark.parametrize("source", [F32, BF16, torch.float16])
@pytest.mark.parametrize("target", [F32, BF16, torch.float16])
def test_casts_on_the_way_are_copies(source: torch.dtype, target: torch.dtype) -> None:
    spec = spec_of(source, w=(37, 11))
    live = torch.empty(37, 11, dtype=target)
    found = run(spec, {"w": live}, lambda s: live.copy_(s["w"]))  # type: ignore[arg-type,return-value]
    assert num_copies(found, "w") == 1
    assert found.live[0].dtype.torch_name == str(target).removeprefix("torch.")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_other_dtypes_are_followed_too(dtype: torch.dtype) -> None:
    spec = CheckpointSpec.from_iterable([("w", (13, 40), dtype), ("x", (9, 7), BF16)])
    live = {"w": torch.empty(40, 13, dtype=dtype), "x": torch.empty(9, 7, dtype=BF16)}

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        state = dict(tensors)
        live["w"].copy_(state["w"].t())
        live["x"].copy_(state["x"])

    found = probe(spec=spec, load_weights=load, tensors=lambda: live)
    assert found.copies.numel.tolist() == [520, 63]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_copies_are_followed(dtype: torch.dtype) -> None:
    spec = CheckpointSpec.from_iterable([("w", (130, 70), dtype), ("s", (9, 7), F32)])
    live = {"w": torch.empty(70, 130, dtype=dtype), "s": torch.empty(9, 7)}

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        state = dict(tensors)
        live["w"].view(torch.uint8).copy_(state["w"].view(torch.uint8).t())
        live["s"].copy_(state["s"])

    found = probe(spec=spec, load_weights=load, tensors=lambda: live)
    assert found.copies.numel.tolist() == [9100, 63]
