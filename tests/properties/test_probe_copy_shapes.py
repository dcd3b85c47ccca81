"""Shapes of copies that loaders make, each with its map, element for element, and updates through it, bit for bit.

Layouts of particular engines are in test_probe_layouts.py and the layout vectors; here are the general kinds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from tests.properties.layout_loaders import (
    BF16,
    CONSTANT,
    F32,
    UNTOUCHED,
    Ints,
    Rank,
    Stream,
    check,
    find,
    live_like,
    num_copies,
    numbers,
    spec_of,
    update,
)

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import IrregularLayoutWarning, ProbeError
from weightbridge.layout import explain
from weightbridge.probe.codes import CodeTable, code_table

State = Mapping[str, torch.Tensor]


def written(
    spec: CheckpointSpec,
    write: Mapping[str, Callable[[State], torch.Tensor]],
    origin: Mapping[str, Ints],
    live: Mapping[str, torch.Tensor] | None = None,
    buffers: Sequence[str] = (),
) -> Rank:
    """A worker whose live tensors are each written whole, by one expression of the checkpoint."""
    held = dict(live) if live is not None else live_like(origin)

    def load(stream: Stream) -> None:
        state = dict(stream)
        for name, make in write.items():
            held[name].copy_(make(state))

    return Rank(live=held, load=load, origin=origin, buffers=frozenset(buffers))


# --- interleaved, permuted, gathered ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 3, 5, 7])
@pytest.mark.parametrize("by", ["rows", "columns"])
def test_interleaving_of_any_step_is_one_copy_a_tensor(step: int, by: str) -> None:
    """`step` tensors of 8 x 90, dealt out one after the other; and the way back from such a tensor."""
    dim = 0 if by == "rows" else 1
    names = [f"t{i}" for i in range(step)]
    spec = spec_of(**dict.fromkeys(names, (8, 90)), dealt=(8 * step, 90) if dim == 0 else (8, 90 * step))
    shape = spec.tensors[-1].shape

    def dealt(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(parts), dim=dim + 1).reshape(shape)

    def gathered(whole: torch.Tensor) -> torch.Tensor:
        return torch.cat([whole[i::step] if dim == 0 else whole[:, i::step] for i in range(step)], dim=dim)

    origin = {
        "dealt": dealt([torch.from_numpy(numbers(spec, n)) for n in names]).numpy(),
        "gathered": gathered(torch.from_numpy(numbers(spec, "dealt"))).numpy(),
    }
    rank = written(
        spec, {"dealt": lambda s: dealt([s[n] for n in names]), "gathered": lambda s: gathered(s["dealt"])}, origin
    )
    maps = check(spec, [rank])
    assert (num_copies(maps[0], "dealt"), num_copies(maps[0], "gathered")) == (step, 1)


def test_rows_in_any_order_are_a_copy_each_at_most_and_repeats_are_allowed() -> None:
    rng = np.random.default_rng(5)
    order, chosen = rng.permutation(60), rng.integers(0, 60, 45)
    spec = spec_of(w=(60, 33))
    index = numbers(spec, "w")
    rank = written(
        spec,
        {"permuted": lambda s: s["w"][order], "gathered": lambda s: s["w"][chosen], "back": lambda s: s["w"].flip(0)},
        {"permuted": index[order], "gathered": index[chosen], "back": index[::-1].copy()},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maps = check(spec, [rank])
    assert num_copies(maps[0], "permuted") <= 60
    assert num_copies(maps[0], "gathered") <= 45
    assert num_copies(maps[0], "back") == 1


def test_fused_split_and_stacked_both_ways() -> None:
    """One checkpoint tensor to three live ones, three to one, and a stack along a new dim in the middle."""
    spec = spec_of(qkv=(30, 8), k=(6, 8), v=(6, 8), q=(18, 8), e0=(5, 9), e1=(5, 9), e2=(5, 9))
    n = {t.name: numbers(spec, t.name) for t in spec.tensors}
    rank = written(
        spec,
        {
            "q_only": lambda s: s["qkv"][:18],
            "kv": lambda s: s["qkv"][18:].view(2, 6, 8).transpose(0, 1),
            "fused": lambda s: torch.cat([s["q"], s["k"], s["v"]]),
            "stacked": lambda s: torch.stack([s["e2"], s["e0"], s["e1"]], dim=1),
        },
        {
            "q_only": n["qkv"][:18],
            "kv": n["qkv"][18:].reshape(2, 6, 8).transpose(1, 0, 2).copy(),
            "fused": np.concatenate([n["q"], n["k"], n["v"]]),
            "stacked": np.stack([n["e2"], n["e0"], n["e1"]], axis=1),
        },
    )
    maps = check(spec, [rank])
    assert [num_copies(maps[0], name) for name in rank.live] == [1, 1, 3, 3]


def test_nested_repeats_collapse_into_one_copy() -> None:
    """Heads of blocks of pairs: the deepest nesting that six dims of a checkpoint tensor give."""
    spec = spec_of(w=(4, 3, 2, 5, 2, 6))
    order = (2, 0, 4, 1, 5, 3)
    index = numbers(spec, "w").transpose(order).reshape(2 * 4 * 2, -1)
    rank = written(spec, {"w": lambda s: s["w"].permute(order).reshape(16, -1)}, {"w": index})
    maps = check(spec, [rank])
    assert num_copies(maps[0], "w") == 1
    assert maps[0].copies.count.shape[1] == 6


def test_128_stacked_experts_are_256_copies() -> None:
    shapes = {f"e{e}.{p}": (5, 12) for e in range(128) for p in ("up", "gate")}
    spec = spec_of(**shapes)
    origin = {
        "w13": np.stack([np.concatenate([numbers(spec, f"e{e}.gate"), numbers(spec, f"e{e}.up")]) for e in range(128)])
    }
    rank = written(
        spec,
        {"w13": lambda s: torch.stack([torch.cat([s[f"e{e}.gate"], s[f"e{e}.up"]]) for e in range(128)])},
        origin,
    )
    assert len(find(spec, rank).copies) == 256


# --- pads, broadcasts, scalars ------------------------------------------------------------------------------------------


def test_padded_with_zeros_with_minus_infinity_and_with_old_bytes() -> None:
    """All around a block: zeros to the right, -inf below, and a corner that the loader leaves as it was."""
    spec = spec_of(w=(7, 11))
    origin = {"w": np.full((10, 16), CONSTANT, dtype=np.int64)}
    origin["w"][:7, :11] = numbers(spec, "w")
    origin["w"][8:, 13:] = UNTOUCHED
    live = {"w": torch.full((10, 16), 5, dtype=BF16)}

    def load(stream: Stream) -> None:
        for _, tensor in stream:
            live["w"][:7, 11:] = 0
            live["w"][7] = float("-inf")
            live["w"][8:, :13] = float("-inf")
            live["w"][:7, :11] = tensor

    rank = Rank(live=live, load=load, origin=origin)
    maps = check(spec, [rank], expected_untouched=["w"])
    assert {c.bits for c in maps[0].constants} == {0, 0xFF80}
    assert dict(maps[0].untouched) == {"w": 6}
    assert (live["w"][8:, 13:] == 5).all()


def test_broadcast_replicated_and_scalar_elements() -> None:
    """A scalar to a vector, a row to a matrix, scalars gathered into one vector, one tensor under three names."""
    scales = {f"s{i}": () for i in range(6)}
    spec = spec_of(F32, w=(4, 6), row=(1, 6), one=(1,), **scales)
    n = {t.name: numbers(spec, t.name) for t in spec.tensors}
    rank = written(
        spec,
        {
            "scale_of_each": lambda s: torch.stack([s[name] for name in scales]),
            "wide": lambda s: s["s3"].expand(9),
            "rows": lambda s: s["row"].expand(5, 6),
            "everywhere": lambda s: s["one"].expand(3, 4),
            "w": lambda s: s["w"],
            "twice": lambda s: s["w"].repeat(2, 1),
            "scalar": lambda s: s["s0"],
        },
        {
            "scale_of_each": np.array([int(n[name]) for name in scales]),
            "wide": np.full(9, int(n["s3"])),
            "rows": np.repeat(n["row"], 5, axis=0),
            "everywhere": np.full((3, 4), int(n["one"][0])),
            "w": n["w"],
            "twice": np.concatenate([n["w"], n["w"]]),
            "scalar": n["s0"],
        },
    )
    maps = check(spec, [rank])
    copies = {name: num_copies(maps[0], name) for name in rank.live}
    assert copies == {
        "scale_of_each": 6, "wide": 1, "rows": 1, "everywhere": 1, "w": 1, "twice": 1, "scalar": 1
    }  # fmt: skip


# --- memory -------------------------------------------------------------------------------------------------------------


def test_several_names_on_one_storage() -> None:
    """A tensor, its transpose, a part of it, and two halves: each name is explained by itself."""
    spec = spec_of(w=(12, 10))
    whole = torch.zeros(12, 10, dtype=BF16)
    live = {"w": whole, "t": whole.t(), "part": whole[3:9, 2:7], "top": whole[:6], "column": whole[:, 4]}
    index = numbers(spec, "w")
    origin = {"w": index, "t": index.T, "part": index[3:9, 2:7], "top": index[:6], "column": index[:, 4]}

    def load(stream: Stream) -> None:
        for _, tensor in stream:
            live["w"].copy_(tensor)

    rank = Rank(live=live, load=load, origin=origin)
    maps = check(spec, [rank])
    assert [num_copies(maps[0], name) for name in live] == [1] * 5


def test_live_tensors_with_gaps_and_any_order_of_dims_in_memory() -> None:
    storage = torch.full((4000,), 9, dtype=BF16)
    live = {
        "columns_first": torch.as_strided(storage, (6, 20), (1, 8), 3),  # gaps of two between columns
        "every_third": torch.as_strided(storage, (5, 7), (21, 3), 200),
        "blocked": torch.as_strided(storage, (2, 3, 16, 8), (8, 600, 16, 1), 400),  # 4-D, dims out of order
        "one": torch.as_strided(storage, (1, 1, 4), (999, 7, 2), 3900),
    }
    spec = spec_of(a=(6, 20), b=(5, 7), c=(32, 24), d=(4,))
    n = {t.name: numbers(spec, t.name) for t in spec.tensors}
    blocks = n["c"].reshape(2, 16, 3, 8).transpose(0, 2, 1, 3).copy()
    rank = written(
        spec,
        {
            "columns_first": lambda s: s["a"],
            "every_third": lambda s: s["b"],
            "blocked": lambda s: s["c"].view(2, 16, 3, 8).permute(0, 2, 1, 3),
            "one": lambda s: s["d"].view(1, 1, 4),
        },
        {"columns_first": n["a"], "every_third": n["b"], "blocked": blocks, "one": n["d"].reshape(1, 1, 4)},
        live,
    )
    maps = check(spec, [rank])
    assert [num_copies(maps[0], name) for name in live] == [1] * 4


def test_a_blocked_layout_whose_last_blocks_are_padded() -> None:
    """35 x 50 in blocks of 16 x 8, each transposed; what sticks out is zero."""
    spec = spec_of(w=(35, 50))
    index = np.full((48, 56), CONSTANT, dtype=np.int64)
    index[:35, :50] = numbers(spec, "w")
    origin = {"w": index.reshape(3, 16, 7, 8).transpose(0, 2, 3, 1).copy()}

    def blocked(state: State) -> torch.Tensor:
        padded = torch.zeros(48, 56, dtype=BF16)
        padded[:35, :50] = state["w"]
        return padded.view(3, 16, 7, 8).permute(0, 2, 3, 1)

    maps = check(spec, [written(spec, {"w": blocked}, origin)])
    assert num_copies(maps[0], "w") <= 4


# --- shards -------------------------------------------------------------------------------------------------------------


def test_zero_size_shards_and_a_worker_that_owns_nothing() -> None:
    """Three rows over four ranks, and a fifth one that has no tensors at all."""
    spec = spec_of(w=(3, 14), b=(3,))
    ranks = []
    for r in range(4):
        own = slice(r, r + 1)
        ranks.append(
            written(
                spec,
                {"w": lambda s, own=own: s["w"][own], "b": lambda s, own=own: s["b"][own]},  # type: ignore[misc]
                {"w": numbers(spec, "w")[own], "b": numbers(spec, "b")[own]},
            )
        )
    ranks.append(Rank(live={}, load=lambda stream: list(stream), origin={}))
    maps = check(spec, ranks)
    assert [len(m.copies) for m in maps] == [2, 2, 2, 0, 0]


def test_rows_sharded_in_the_middle_over_three_ranks() -> None:
    """Flat thirds of a matrix whose cuts fall within rows, and columns that no degree divides."""
    spec = spec_of(w=(10, 13), u=(7, 11))
    cuts, columns = [0, 47, 95, 130], [0, 4, 8, 11]
    ranks = []
    for r in range(3):
        flat, wide = slice(cuts[r], cuts[r + 1]), slice(columns[r], columns[r + 1])
        ranks.append(
            written(
                spec,
                {"w": lambda s, f=flat: s["w"].reshape(-1)[f], "u": lambda s, c=wide: s["u"][:, c]},  # type: ignore[misc]
                {"w": numbers(spec, "w").reshape(-1)[flat], "u": numbers(spec, "u")[:, wide]},
            )
        )
    maps = check(spec, ranks)
    assert [num_copies(m, "w") for m in maps] == [2, 3, 2]
    assert [num_copies(m, "u") for m in maps] == [1, 1, 1]


# --- named cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F32, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int32])
def test_a_constant_that_is_a_valid_code(dtype: torch.dtype) -> None:
    """Pads of every kind of code of every pass: those of the first and the last element, and in between."""
    spec = spec_of(dtype, w=(6, 50))
    table = code_table(spec, [spec.tensors[0].dtype.name]).of(spec.tensors[0].dtype)
    assert isinstance(table, CodeTable)
    codes = []
    for pass_ in range(table.num_passes):
        bits = np.zeros(300, dtype=spec.tensors[0].dtype.bits)
        table.encode(spec.tensors[0].dtype, pass_, 0, bits)
        codes += [int(bits[i]) for i in (0, 1, 49, 50, 150, 299)]
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    pads = torch.from_numpy(
        np.array(codes, spec.tensors[0].dtype.bits).view(f"<{'ui'[dtype.itemsize > 1]}{dtype.itemsize}")
    )
    live = {"w": torch.zeros(6, 50 + len(codes), dtype=dtype), "all": torch.zeros(len(codes), dtype=dtype)}
    origin = {
        "w": np.concatenate([numbers(spec, "w"), np.full((6, len(codes)), CONSTANT)], axis=1),
        "all": np.full(len(codes), CONSTANT),
    }

    def load(stream: Stream) -> None:
        for _, tensor in stream:
            live["w"].view(kind)[:, :50] = tensor.view(kind)
            live["w"].view(kind)[:, 50:] = pads
            live["all"].view(kind).copy_(pads)

    maps = check(spec, [Rank(live=live, load=load, origin=origin)])
    assert {c.bits for c in maps[0].constants} == set(codes)
    assert num_copies(maps[0], "w") == 1


def test_an_index_running_on_across_adjacent_tensors() -> None:
    """Neighbours in the checkpoint are neighbours in memory too: one affine run over five tensors, cut between them."""
    spec = spec_of(a=(4, 40), b=(5,), c=(3, 100), d=(400,), e=(2, 2))
    index = np.arange(100, 800)
    rank = written(
        spec,
        {
            "flat": lambda s: torch.cat([t.reshape(-1) for t in s.values()])[100:800],
            "square": lambda s: torch.cat([t.reshape(-1) for t in s.values()])[100:800].view(20, 35),
        },
        {"flat": index, "square": index.reshape(20, 35)},
    )
    maps = check(spec, [rank], unused=["e"])
    assert explain(maps[0], spec, "flat").splitlines()[1:] == [
        "  [0:20] <- a[2, 20:40]  (20 elements)",
        "  [20:60] <- a[3, :]  (40 elements)",
        "  [60:65] <- b[:]  (5 elements)",
        "  [65:365:100 + 0:100] <- c[:, :]  (300 elements)",
        "  [365:700] <- d[0:335]  (335 elements)",
    ]


def test_a_one_dimensional_flat_shard_of_three_tensors() -> None:
    """Two ranks of a flat parameter with padding at its end; both cuts fall within a row."""
    spec = spec_of(a=(13, 9), b=(31,), c=(90, 101))
    index = np.concatenate([numbers(spec, n).reshape(-1) for n in "abc"])
    half = (len(index) + 1) // 2 + 3
    padded = np.concatenate([index, np.full(2 * half - len(index), CONSTANT)])

    def flat(state: State) -> torch.Tensor:
        whole = torch.cat([state[n].reshape(-1) for n in "abc"])
        return torch.nn.functional.pad(whole, (0, 2 * half - len(index)))

    ranks = [
        written(
            spec,
            {"flat": lambda s, r=r: flat(s)[r * half : (r + 1) * half]},  # type: ignore[misc]
            {"flat": padded[r * half : (r + 1) * half]},
        )
        for r in range(2)
    ]
    maps = check(spec, ranks)
    assert sorted({spec.tensors[int(t)].name for t in maps[0].copies.tensor}) == ["a", "b", "c"]
    assert [num_copies(m, "flat") for m in maps] == [4, 2]


def test_a_wrap_around_of_the_residue_inside_a_block() -> None:
    """A block of more elements than any modulus, straight and transposed, beginning just below a multiple of each."""
    first, second = code_table(spec_of(w=(9,)), ["BF16"]).of(spec_of(w=(9,)).tensors[0].dtype).moduli
    before, size = first - 20, 150 * 230
    spec = spec_of(before=(before,), w=(150, 230), between=(-(before + size + 11) % second,), u=(40, 30))
    n = {t.name: numbers(spec, t.name) for t in spec.tensors}
    assert [int(n["w"][0, i] + 1) % first for i in (18, 19, 20)] == [first - 1, 0, 1]
    assert [int(n["u"][0, i] + 1) % second for i in (9, 10, 11)] == [second - 1, 0, 1]
    assert n["w"].size > first > second
    names = ("before", "w", "between", "u")
    rank = written(
        spec,
        {
            **{k: (lambda s, k=k: s[k]) for k in names},
            "t": lambda s: s["w"].t(),
            "part": lambda s: s["w"][3:140, 5:200],
        },  # type: ignore[misc]
        {**{k: n[k] for k in names}, "t": n["w"].T, "part": n["w"][3:140, 5:200]},
    )
    maps = check(spec, [rank])
    assert [num_copies(maps[0], name) for name in rank.live] == [1] * 6


@pytest.mark.parametrize("width", [8200, 12000, 16252, 16253, 16254, 40000])
def test_strides_longer_than_half_a_modulus(width: int) -> None:
    """A few columns of wide rows: the step between rows is above p/2, just beside p, p itself, and beyond it."""
    spec = spec_of(w=(7, width))
    moduli = code_table(spec, ["BF16"]).of(spec.tensors[0].dtype).moduli
    assert width > max(moduli) / 2
    index = numbers(spec, "w")[:, width - 70 : width - 1]
    rank = written(
        spec,
        {"w": lambda s: s["w"][:, width - 70 : width - 1], "t": lambda s: s["w"][:, width - 70 : width - 1].t()},
        {"w": index, "t": index.T},
    )
    found = find(spec, rank)
    assert [num_copies(found, name) for name in rank.live] == [1, 1]
    update(spec, [rank], [found])


# --- irregular ----------------------------------------------------------------------------------------------------------


def test_a_random_permutation_of_elements_is_an_index_table_with_one_warning_that_says_what_it_costs() -> None:
    rng = np.random.default_rng(1)
    order, chosen = rng.permutation(1320), rng.integers(0, 1320, 1200)
    spec = spec_of(w=(22, 60), u=(8, 9))
    index = numbers(spec, "w").reshape(-1)
    rank = written(
        spec,
        {
            "permuted": lambda s: s["w"].reshape(-1)[order].view(60, 22),
            "gathered": lambda s: s["w"].reshape(-1)[chosen],
            "u": lambda s: s["u"],
        },
        {"permuted": index[order].reshape(60, 22), "gathered": index[chosen], "u": numbers(spec, "u")},
    )
    with pytest.warns(IrregularLayoutWarning) as caught:
        found = find(spec, rank)
    told = [str(w.message) for w in caught]
    assert len(told) == 2
    for name, text in zip(("permuted", "gathered"), told, strict=True):
        pieces = num_copies(found, name)
        assert f"'{name}'" in text
        assert f"in {pieces} pieces" in text
        assert pieces > 1000
        assert f"index table of {8 * pieces * (4 + 3 * found.copies.count.shape[1])} bytes" in text
    update(spec, [rank], [found])


def test_what_is_too_irregular_for_a_table_is_refused_with_the_tensor_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightbridge.probe.lattice._MAX_PIECES", 500)
    order = np.random.default_rng(1).permutation(3000)
    spec = spec_of(w=(50, 60))
    rank = written(
        spec,
        {"w": lambda s: s["w"].reshape(-1)[order].view(50, 60)},
        {"w": numbers(spec, "w").reshape(-1)[order].reshape(50, 60)},
    )
    with pytest.raises(ProbeError, match=r"'w'.* more than 500 pieces"):
        find(spec, rank)
