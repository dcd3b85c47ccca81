"""Layouts of whole models: padded vocabularies, tied weights, drafts, renamed and skipped tensors, pipeline stages; and the
tensors that loaders compute, which are no layout."""

from __future__ import annotations

from collections.abc import Callable

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
    check_computed,
    find,
    live_like,
    num_copies,
    numbers,
    rows,
    spec_of,
    whole_state,
)

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import CoverageError, ProbeError
from weightbridge.layout import explain, missing_elements, unused_tensors

H = 6


def copying(live: dict[str, torch.Tensor]) -> Callable[[Stream], None]:
    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            live[name].copy_(loaded)

    return load


# --- vocabulary -------------------------------------------------------------------------------------------------------


def vocab_rank(spec: CheckpointSpec, r: int, t: int, *, vocab: int | None = None) -> Rank:
    """ceil(V/64)*64 rows split evenly; real rows are clipped to V, the rest is filled with zeros at load."""
    org = vocab or spec.tensors[0].shape[0]
    own = -(-org // 64) * 64 // t
    start, end = min(r * own, org), min((r + 1) * own, org)
    origin: dict[str, Ints] = {}
    for name in [x.name for x in spec.tensors]:
        origin[name] = np.full((own, H), CONSTANT, dtype=np.int64)
        origin[name][: end - start] = numbers(spec, name)[start:end]
    live = live_like(origin)

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            if loaded.shape[0] < org:
                raise AssertionError(f"{name} has {loaded.shape[0]} rows, the vocabulary {org}")
            live[name][: end - start].copy_(loaded[start:end])
            live[name][end - start :].fill_(0)

    return Rank(live=live, load=load, origin=origin)


@pytest.mark.parametrize(
    ("vocab", "t", "real"), [(100, 4, [32, 32, 32, 4]), (10, 4, [10, 0, 0, 0]), (130, 3, [64, 64, 2])]
)
def test_case_b082_a_vocabulary_that_no_degree_divides_is_padded_with_zeros(
    vocab: int, t: int, real: list[int]
) -> None:
    spec = spec_of(embed=(vocab, H), lm_head=(vocab, H))
    ranks = [vocab_rank(spec, r, t) for r in range(t)]
    maps = check(spec, ranks)
    assert [int(m.copies.numel.sum()) // (2 * H) for m in maps] == real
    assert all({c.bits for c in m.constants} <= {0} for m in maps)
    if (vocab, t) == (100, 4):  # rank 3 has rows 96..99, then 28 rows of zeros
        assert f"  [0:4, :] <- embed[96:100, :]  ({4 * H} elements)" in explain(maps[3], spec, "embed")
        assert [np.prod([n for n, _ in c.axes]) for c in maps[3].constants] == [28 * H] * 2


def test_case_b083_a_checkpoint_with_more_rows_than_the_vocabulary() -> None:
    spec = spec_of(embed=(12, H))
    ranks = [vocab_rank(spec, r, 2, vocab=10) for r in range(2)]
    maps = check(spec, ranks)
    assert missing_elements(spec, maps) == {"embed": 2 * H}
    # The other way round the loader refuses, and says so at connect.
    strict = vocab_rank(spec_of(embed=(14, H)), 0, 2)
    with pytest.raises(ProbeError, match=r"load_weights raised AssertionError: embed has 12 rows, the vocabulary 14"):
        find(spec, strict)


def test_a_trainer_with_a_padded_vocabulary_cuts_the_padding_by_where_its_rows_come_from() -> None:
    spec = spec_of(embed=(10, H), lm_head=(10, H))

    def trainer(r: int) -> Rank:
        padded = {n: np.pad(numbers(spec, n), ((0, 6), (0, 0)), constant_values=CONSTANT) for n in ("embed", "lm_head")}
        origin = {n: a[8 * r : 8 * r + 8] for n, a in padded.items()}
        live = live_like(origin, F32)

        def load(tensors: Stream) -> None:
            for name, loaded in tensors:
                live[name].copy_(torch.nn.functional.pad(loaded.float(), (0, 0, 0, 6)).chunk(2)[r])

        return Rank(live=live, load=load, origin=origin)

    check(spec, [vocab_rank(spec, r, 4) for r in range(4)], trainers=[trainer(r) for r in range(2)])


# --- tied weights, buffers --------------------------------------------------------------------------------------------


def test_tied_embeddings_are_one_storage_and_lm_head_is_skipped() -> None:
    spec = spec_of(embed=(9, H))
    origin = {"embed": numbers(spec, "embed"), "lm_head": numbers(spec, "embed")}
    live = live_like({"embed": origin["embed"]})
    live["lm_head"] = live["embed"]
    maps = check(spec, [Rank(live=live, load=copying(live), origin=origin)])
    assert len(maps[0].copies) == 2

    both = spec_of(embed=(9, H), lm_head=(9, H))  # a checkpoint that carries the tied tensor as well

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            if name != "lm_head":
                live[name].copy_(loaded)

    check(both, [Rank(live=live, load=load, origin=origin)], unused=["lm_head"])


def test_a_loader_that_ties_when_values_are_equal_is_probed_with_values_that_differ() -> None:
    spec = spec_of(embed=(9, H), lm_head=(9, H))
    origin = {n: numbers(spec, n) for n in ("embed", "lm_head")}
    live = live_like(origin)

    def load(tensors: Stream) -> None:
        copying(live)(tensors)
        if torch.equal(live["embed"], live["lm_head"]):
            live["lm_head"] = live["embed"]

    check(spec, [Rank(live=live, load=load, origin=origin)])


@pytest.mark.parametrize("tied", [False, True])
def test_case_b078_lm_head_is_followed_to_the_tensor_it_is_really_loaded_from(tied: bool) -> None:
    """A reload that ignores tie_word_embeddings=False puts the embedding into lm_head: then nobody takes lm_head's own."""
    spec = spec_of(embed=(9, H), lm_head=(9, H))
    origin = {"embed": numbers(spec, "embed"), "lm_head": numbers(spec, "embed" if tied else "lm_head")}
    live = live_like(origin)

    def load(tensors: Stream) -> None:
        state = dict(tensors)
        live["embed"].copy_(state["embed"])
        live["lm_head"].copy_(state["embed" if tied else "lm_head"])

    check(spec, [Rank(live=live, load=load, origin=origin)], unused=["lm_head"] if tied else [])


def test_case_b079_an_untied_lm_head_without_a_tensor_in_the_checkpoint_is_refused() -> None:
    """The flag that ties is ignored: the model has an lm_head of its own, the checkpoint has none, nothing loads it."""
    spec = spec_of(embed=(9, H))
    live = live_like({"embed": numbers(spec, "embed"), "lm_head": numbers(spec, "embed")})
    with pytest.raises(CoverageError, match=r"live parameter 'lm_head': the loader never writes 54 of its 54 elements"):
        find(spec, Rank(live=live, load=copying(live), origin={}))


def test_case_b080_tied_embeddings_in_uneven_shards_are_followed_on_every_rank() -> None:
    """10 rows over 4 ranks: 3, 3, 3 and 1, each under two names."""
    spec = spec_of(embed=(10, H))

    def trainer(r: int) -> Rank:
        own = numbers(spec, "embed")[3 * r : 3 * r + 3]
        live = live_like({"embed": own})
        live["lm_head"] = live["embed"]
        load = whole_state(lambda s: live["embed"].copy_(s["embed"].split(3)[r]))
        return Rank(live=live, load=load, origin={"embed": own, "lm_head": own})

    origin = {"embed": numbers(spec, "embed")}
    live = live_like(origin)
    check(spec, [Rank(live=live, load=copying(live), origin=origin)], trainers=[trainer(r) for r in range(4)])


def test_case_b093_computed_buffers_have_no_source_and_keep_their_values() -> None:
    spec = spec_of(w=(5, H))
    live: dict[str, torch.Tensor] = {
        "w": torch.zeros(5, H, dtype=BF16), "normalizer": torch.tensor(H**0.5), "cos_sin_cache": torch.rand(4, 3),
        "ids": torch.arange(3),
    }  # fmt: skip
    kept = {n: live[n].clone() for n in list(live)[1:]}
    origin = {n: np.full(t.shape, UNTOUCHED) for n, t in live.items()} | {"w": numbers(spec, "w")}
    check(spec, [Rank(live=live, load=copying(live), origin=origin, buffers=frozenset(kept))])
    assert all(torch.equal(live[n], t) for n, t in kept.items())


def test_case_b087_a_router_bias_is_followed_whether_it_is_a_parameter_or_a_buffer_and_in_its_own_dtype() -> None:
    spec = CheckpointSpec.from_iterable([("gate", (8, H), BF16), ("e_score_correction_bias", (8,), F32)])
    for name, dtype in (("gate.e_score_correction_bias", F32), ("router.expert_bias", F32), ("bias", BF16)):
        origin = {"gate": numbers(spec, "gate"), name: numbers(spec, "e_score_correction_bias")}
        live = {"gate": torch.zeros(8, H, dtype=BF16), name: torch.zeros(8, dtype=dtype)}

        def load(tensors: Stream, live: dict[str, torch.Tensor] = live, name: str = name) -> None:
            for given, loaded in tensors:
                live["gate" if given == "gate" else name].copy_(loaded)

        maps = [
            find(spec, Rank(live=live, load=load, origin=origin, buffers=frozenset(b)))  # type: ignore[arg-type]
            for b in ((), (name,))
        ]
        assert unused_tensors(spec, maps) == ()
        if dtype is F32:
            check(spec, [Rank(live=live, load=load, origin=origin, buffers=frozenset({name}))])
        else:  # bf16 rounds: followed as a cast
            assert "cast F32 -> BF16" in explain(maps[0], spec, name)


def test_case_b089_every_tensor_keeps_its_own_dtype() -> None:
    spec = CheckpointSpec.from_iterable([("A_log", (5,), F32), ("D", (5,), F32), ("w", (5, H), BF16)])
    origin = {t.name: numbers(spec, t.name) for t in spec.tensors}
    live = {"A_log": torch.zeros(5), "D": torch.zeros(5), "w": torch.zeros(5, H, dtype=BF16)}
    check(spec, [Rank(live=live, load=copying(live), origin=origin)])


# --- names ------------------------------------------------------------------------------------------------------------


def test_norms_of_dense_and_expert_layers_are_two_live_names_for_one_checkpoint_name() -> None:
    """In one trainer the norm belongs to the projection that follows it, whose name depends on the kind of layer."""
    spec = spec_of(**{f"layers.{i}.post_attention_layernorm": (H,) for i in range(4)})
    home = {
        i: f"layers.{i}.mlp.linear_fc1.layer_norm_weight" if i < 1 else f"layers.{i}.pre_mlp_layernorm"
        for i in range(4)
    }
    origin = {home[i]: numbers(spec, f"layers.{i}.post_attention_layernorm") for i in range(4)}
    held = live_like(origin)

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            held[home[int(name.split(".")[1])]].copy_(loaded)

    engine_origin = {t.name: numbers(spec, t.name) for t in spec.tensors}
    live = live_like(engine_origin)
    check(
        spec,
        [Rank(live=live, load=copying(live), origin=engine_origin)],
        trainers=[Rank(live=held, load=load, origin=origin)],
    )


def test_sandwich_norms_and_a_norm_with_two_candidate_homes() -> None:
    home = {
        "post_attention_layernorm": "linear_proj.post_layernorm",
        "pre_feedforward_layernorm": "linear_fc1.layer_norm_weight",
        "post_feedforward_layernorm": "linear_fc2.post_layernorm",
        "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight",
    }
    spec = spec_of(**dict.fromkeys(home, (H,)))
    for kv in ("linear_kv_up_proj.layer_norm_weight", "kv_layernorm.weight"):
        names = home | {"kv_a_layernorm": kv}
        origin = {live: numbers(spec, name) for name, live in names.items()}
        live = live_like(origin)
        load = whole_state(lambda s, live=live, names=names: [live[names[n]].copy_(s[n]) for n in s])  # type: ignore[misc]
        check(spec, [Rank(live=live, load=load, origin=origin)])


def test_case_b119_prefixes_are_matched_by_values() -> None:
    """The trainer holds the text tower under `model.`, the engine under `language_model.model.`; the checkpoint has its own."""
    spec = spec_of(**{"model.language_model.w": (5, H), "model.visual.w": (3, H), "lm_head.w": (5, H)})
    engine = {
        "model.language_model.": "language_model.model.",
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
    }
    trainer = {"model.language_model.": "model.", "model.visual.": "visual.", "lm_head.": "head."}

    def rank(prefixes: dict[str, str]) -> Rank:
        def local(name: str) -> str:
            return next(new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old))

        origin = {local(t.name): numbers(spec, t.name) for t in spec.tensors}
        live = live_like(origin)
        return Rank(live=live, load=lambda ts: [live[local(n)].copy_(t) for n, t in ts], origin=origin)

    check(spec, [rank(engine)], trainers=[rank(trainer)])

    def strict(tensors: Stream) -> None:
        for name, _ in tensors:
            raise ValueError(f"There is no module or parameter named {name.split('.')[0]!r}")

    with pytest.raises(ProbeError, match="There is no module or parameter named 'model'"):
        find(spec, Rank(live=live_like({"w": numbers(spec, "lm_head.w")}), load=strict, origin={}))


def test_case_b112_b113_layers_of_uneven_pipeline_stages_are_global() -> None:
    """Each stage numbers its layers from 0; the loader knows the offset, and the map says which layer really came."""
    num_layers = 7
    spec = spec_of(**{f"layers.{i}.w": (3 + i % 2, H) for i in range(num_layers)})

    def stages(sizes: list[int]) -> list[Rank]:
        found, first = [], 0
        for size in sizes:
            origin = {f"layers.{i}.w": numbers(spec, f"layers.{first + i}.w") for i in range(size)}
            live = live_like(origin)

            def load(
                tensors: Stream, live: dict[str, torch.Tensor] = live, first: int = first, size: int = size
            ) -> None:
                for name, loaded in tensors:
                    layer = int(name.split(".")[1]) - first
                    if 0 <= layer < size:
                        live[f"layers.{layer}.w"].copy_(loaded)

            found.append(Rank(live=live, load=load, origin=origin))
            first += size
        return found

    check(spec, stages([7]), trainers=stages([2, 2, 2, 1]))
    check(spec, stages([3, 4]), trainers=stages([1, 5, 1]))
    short = [find(spec, stage) for stage in stages([2, 2, 2])]  # an offset that loses the last stage's layers
    assert unused_tensors(spec, short) == ("layers.6.w",)


# --- drafts -----------------------------------------------------------------------------------------------------------


def test_case_b115_b116_b117_a_draft_model_is_probed_with_its_target_and_shared_storage_is_written_once() -> None:
    """Layers beyond num_hidden_layers are skipped by the target and taken by the draft, which ignores its own embedding."""
    names = {"embed": (9, H), "layers.0.w": (4, H), "layers.1.w": (4, H), "layers.1.embed": (9, H)}
    spec = spec_of(**names)
    origin = {
        "target.embed": numbers(spec, "embed"), "target.layers.0.w": numbers(spec, "layers.0.w"),
        "draft.w": numbers(spec, "layers.1.w"), "draft.embed": numbers(spec, "embed"),
    }  # fmt: skip
    live = live_like({n: a for n, a in origin.items() if n != "draft.embed"})
    live["draft.embed"] = live["target.embed"]

    def target(tensors: Stream) -> None:
        for name, loaded in tensors:
            if not name.startswith("layers.1."):
                live[f"target.{name}"].copy_(loaded)

    def draft(tensors: Stream) -> None:
        for name, loaded in tensors:
            if name == "layers.1.w":
                live["draft.w"].copy_(loaded)

    def both(tensors: Stream) -> None:
        state = dict(tensors)
        target(state.items())
        draft(state.items())

    maps = check(spec, [Rank(live=live, load=both, origin=origin)], unused=["layers.1.embed"])
    assert not maps[0].untouched
    # A path that updates the target alone leaves the draft's parameters unwritten, which is an error by name.
    with pytest.raises(
        CoverageError, match=r"live parameter 'draft\.w': the loader never writes 24 of its 24 elements"
    ):
        find(spec, Rank(live=live, load=target, origin={}))


@pytest.mark.parametrize("swapped", [False, True])
def test_two_converters_that_disagree_about_halves_make_two_maps(swapped: bool) -> None:
    """eh_proj and mtp.fc: one converter swaps the halves of dim 1, another does not; what each side loads is what counts."""
    spec = spec_of(eh_proj=(4, 2 * H))
    formula = numbers(spec, "eh_proj")
    if swapped:
        formula = np.concatenate([formula[:, H:], formula[:, :H]], axis=1)
    held = live_like({"fc": formula})

    def write(s: dict[str, torch.Tensor]) -> None:
        halves = s["eh_proj"].chunk(2, dim=1)
        held["fc"].copy_(torch.cat(halves[::-1] if swapped else halves, dim=1))

    trainer = Rank(live=held, load=whole_state(write), origin={"fc": formula})
    live = live_like({"eh_proj": formula})
    engine = Rank(live=live, load=copying(live), origin={"eh_proj": numbers(spec, "eh_proj")})
    check(spec, [engine], trainers=[trainer])
    assert num_copies(find(spec, trainer), "fc") == 1


# --- skipped by design ------------------------------------------------------------------------------------------------


def test_names_that_are_skipped_by_design_are_reported_as_taken_by_nobody() -> None:
    skipped = ("rotary.inv_freq", "lm_head", "mtp.0.w", "k_scale", "v_scale")
    spec = spec_of(w=(4, H), **dict.fromkeys(skipped, (3,)))
    origin = {"w": numbers(spec, "w")}
    live = live_like(origin)

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            if name not in skipped:
                live[name].copy_(loaded)

    check(spec, [Rank(live=live, load=load, origin=origin)], unused=skipped)


def test_a_number_that_becomes_no_tensor_is_a_constant_of_the_spec() -> None:
    """A loader that keeps `.item()` of a scalar would be given a code for it; as a constant it gets the value."""
    spec = CheckpointSpec.from_iterable(
        [("w", (4, H), BF16), ("weight_type", (), torch.int32)], constants={"weight_type": 12}
    )
    kept: list[int] = []
    origin = {"w": numbers(spec, "w")}
    live = live_like(origin)

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            if name == "weight_type":
                kept.append(int(loaded.item()))
            else:
                live[name].copy_(loaded)

    check(spec, [Rank(live=live, load=load, origin=origin)])
    assert set(kept) == {12}


# --- computed ---------------------------------------------------------------------------------------------------------


def block_scales(scale: torch.Tensor, shape: torch.Size, block: int = 4) -> torch.Tensor:
    return scale.repeat_interleave(block, 0)[: shape[0]].repeat_interleave(block, 1)[:, : shape[1]]


F8 = torch.float8_e4m3fn
QUANTISED = CheckpointSpec.from_iterable(
    [("wk", (6, 8), F8), ("wk_scale", (2, 2), F32), ("weights_proj", (3, 8), BF16)]
)
Write = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], object]
Case = tuple[CheckpointSpec, dict[str, torch.Tensor], Write, tuple[str, ...], tuple[str, ...]]
"""Checkpoint, live tensors, what the loader does, which live tensors it computes and which checkpoint tensors that takes."""


def _plus(offset: float) -> Case:
    """Norms stored as w and kept as w + 1 in a buffer, or held zero-centred by a trainer."""

    def write(live: dict[str, torch.Tensor], s: dict[str, torch.Tensor]) -> None:
        live["w"].copy_(s["w"])
        live["derived"].copy_(s["w"] + offset)

    return spec_of(w=(11,)), live_like({"w": np.zeros(11), "derived": np.zeros(11)}), write, ("derived",), ("w",)


def _decay() -> Case:
    return (
        spec_of(F32, A_log=(5,)), {"A": torch.zeros(5)},
        lambda live, s: live["A"].copy_(-torch.exp(s["A_log"].float())), ("A",), ("A_log",),
    )  # fmt: skip


def _dequantised() -> Case:
    """An fp8 tensor and its scales, which must meet in one call, become the first rows of a bf16 tensor."""

    def write(live: dict[str, torch.Tensor], s: dict[str, torch.Tensor]) -> None:
        wk = s["wk"].float()
        live["wk_weights_proj"][:6] = (wk * block_scales(s["wk_scale"], wk.shape)).to(BF16)
        live["wk_weights_proj"][6:] = s["weights_proj"]

    live = {"wk_weights_proj": torch.zeros(9, 8, dtype=BF16)}
    return QUANTISED, live, write, ("wk_weights_proj",), ("wk", "wk_scale", "weights_proj")


def _requantised() -> Case:
    """One scale for a fused tensor: the largest of its shards, by which all of them are requantised."""

    def write(live: dict[str, torch.Tensor], s: dict[str, torch.Tensor]) -> None:
        scale = max(s[n].abs().max() / 448 for n in "qkv")
        live["qkv"].copy_((torch.cat([s[n] for n in "qkv"]) / scale).to(F8))
        live["scale"].fill_(float(scale))

    spec = spec_of(F32, q=(4, H), k=(4, H), v=(4, H))
    return spec, {"qkv": torch.zeros(12, H).to(F8), "scale": torch.zeros(1)}, write, ("qkv", "scale"), ("q", "k", "v")


def _largest_scale() -> Case:
    def write(live: dict[str, torch.Tensor], s: dict[str, torch.Tensor]) -> None:
        live["scales"].copy_(torch.maximum(s["q_scales"], s["k_scales"]))

    return (
        spec_of(F32, q_scales=(24,), k_scales=(24,)),
        {"scales": torch.zeros(24)},
        write,
        ("scales",),
        ("q_scales", "k_scales"),
    )


def _power_of_two_scales() -> Case:
    """Scales rounded to powers of two, and the weights encoded anew to suit them."""

    def write(live: dict[str, torch.Tensor], s: dict[str, torch.Tensor]) -> None:
        rounded = torch.exp2(torch.ceil(torch.log2(s["wk_scale"].abs().clamp_min(1e-30))))
        ratio = block_scales(s["wk_scale"] / rounded, s["wk"].shape)
        live["scale"].copy_(rounded)
        live["wk"].copy_((s["wk"].float() * ratio).to(F8))

    live = {"scale": torch.zeros(2, 2), "wk": torch.zeros(6, 8).to(F8)}
    return QUANTISED, live, write, ("scale", "wk"), ("wk", "wk_scale")


def _repacked() -> Case:
    """A vendor's repack: two 4-bit values of different rows share a byte."""

    def write(live: dict[str, torch.Tensor], s: dict[str, torch.Tensor]) -> None:
        packed = s["w"]
        live["w"].copy_((packed[0::2] & 15) | (packed[1::2] & 15) << 4)

    spec = CheckpointSpec.from_iterable([("w", (8, 5), torch.uint8)])
    return spec, {"w": torch.zeros(4, 5, dtype=torch.uint8)}, write, ("w",), ("w",)


def _absorbed() -> Case:
    """A scale per expert that is multiplied into the weights and lost."""
    return (
        spec_of(w=(3, 4, H), s=(3,)), {"w": torch.zeros(3, 4, H, dtype=BF16)},
        lambda live, s: live["w"].copy_(s["w"] * s["s"][:, None, None]), ("w",), ("w", "s"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(lambda: _plus(1), id="w_plus_one"),
        pytest.param(lambda: _plus(-1), id="w_minus_one"),
        pytest.param(_decay, id="decay"),
        pytest.param(_dequantised, id="dequantised"),
        pytest.param(_requantised, id="requantised"),
        pytest.param(_largest_scale, id="largest_scale"),
        pytest.param(_power_of_two_scales, id="case_b038_power_of_two_scales"),
        pytest.param(_repacked, id="repacked"),
        pytest.param(_absorbed, id="case_b051_absorbed"),
    ],
)
def test_case_b038_b051_computed_tensors(case: Callable[[], Case]) -> None:
    spec, live, write, computed, needed = case()
    check_computed(spec, live, whole_state(lambda s: write(live, s)), computed, needed)


@pytest.mark.parametrize("choose", [torch.maximum, torch.minimum])
def test_the_larger_of_two_scalars_is_computed(choose: Callable[..., torch.Tensor]) -> None:
    """Coded loads always show the later one of the two; only values in either order tell a maximum from a copy."""
    for first in range(1, 9):  # the values that loads use depend on where in the checkpoint they lie
        spec = CheckpointSpec.from_iterable([("other", (first,), F32), ("q_scale", (1,), F32), ("k_scale", (1,), F32)])
        live = {"scale": torch.zeros(1), "other": torch.zeros(first)}

        def load(tensors: Stream, live: dict[str, torch.Tensor] = live) -> None:
            s = dict(tensors)
            if "other" in s:
                live["other"].copy_(s["other"])
            if "q_scale" in s:
                live["scale"].copy_(choose(s["q_scale"], s["k_scale"]))

        check_computed(spec, live, load, ["scale"], ["q_scale", "k_scale"])


def test_a_bf16_tensor_cloned_to_fp32_outside_the_parameters_is_a_copy() -> None:
    spec = spec_of(bias=(8,), w=(3, H))
    origin = {"bias": numbers(spec, "bias"), "w": numbers(spec, "w"), "bias_fp32": numbers(spec, "bias")}
    live = live_like({n: origin[n] for n in ("bias", "w")})
    live["bias_fp32"] = torch.zeros(8)

    def load(tensors: Stream) -> None:
        copying(live)(tensors)
        live["bias_fp32"].copy_(live["bias"].float())

    check(spec, [Rank(live=live, load=load, origin=origin, buffers=frozenset({"bias_fp32"}))])


def test_block_quantised_weights_and_scales_that_are_copied_verbatim() -> None:
    """No arithmetic, no computed class: bytes and scales by rank, the scales of a fused tensor side by side."""
    spec = CheckpointSpec.from_iterable(
        [("gate", (8, 8), F8), ("up", (8, 8), F8), ("gate_scale", (2, 2), F32), ("up_scale", (2, 2), F32)]
    )

    def rank(r: int) -> Rank:
        half, block = slice(4 * r, 4 * r + 4), slice(r, r + 1)
        origin = {
            "w": np.concatenate([rows(numbers(spec, n), range(4 * r, 4 * r + 4)) for n in ("gate", "up")]),
            "scale": np.concatenate([numbers(spec, f"{n}_scale")[block] for n in ("gate", "up")]).T,
        }
        live = {"w": torch.zeros(8, 8).to(F8), "scale": torch.zeros(2, 2)}

        def load(tensors: Stream) -> None:
            s = dict(tensors)
            live["w"].view(torch.uint8).copy_(torch.cat([s[n].view(torch.uint8)[half] for n in ("gate", "up")]))
            live["scale"].copy_(
                torch.cat([s[f"{n}_scale"][block] for n in ("gate", "up")]).t()
            )  # one engine wants them turned

        return Rank(live=live, load=load, origin=origin)

    check(spec, [rank(r) for r in range(2)])
