"""Field cases about loading a second time: post-processing, derived state, padding, addresses, tensors that load jointly.

Each test is a small module with the fault that was reported, and what must become of it: its layout is followed, or
the loader is refused at connect with the tensor and the reason.
"""

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
    Rank,
    Stream,
    check,
    checkpoint,
    find,
    install,
    live_like,
    numbers,
    spec_of,
    stream,
)
from torch import nn

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import CoverageError, ProbeError, SpecError
from weightbridge.layout import SourceMap, unused_tensors
from weightbridge.probe import NamedTensors, discover_tensors, live_tensors, probe

H = 5


def refused(
    spec: CheckpointSpec, load: Callable[[Stream], object], tensors: Callable[[], NamedTensors], *reasons: str
) -> ProbeError:
    """The loader is refused at connect, and the message says why."""
    with pytest.raises(ProbeError) as caught:
        probe(spec=spec, load_weights=load, tensors=tensors)
    assert all(reason in str(caught.value) for reason in reasons), str(caught.value)
    return caught.value


def found_for(module: nn.Module, spec: CheckpointSpec, load: Callable[[Stream], object]) -> SourceMap:
    return probe(spec=spec, load_weights=load, tensors=lambda: discover_tensors(module))


# --- halves that post-processing swaps -----------------------------------------------------------------------------------


class Experts(nn.Module):
    """w13 in checkpoint order [w1; w3] when it is loaded; post-processing turns it into the kernel's [w3; w1] in place."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(2, 6, H, dtype=BF16), requires_grad=False)
        self.processed = False

    def load_weights(self, tensors: Stream) -> None:
        for name, loaded in tensors:
            self.w13.view(2, 2, 3, H)[:, ("w1", "w3").index(name)] = loaded

    def process_weights_after_loading(self) -> None:
        self.w13.copy_(self.w13.view(2, 2, 3, H).flip(1).view(2, 6, H))
        self.processed = True


EXPERTS = spec_of(w1=(2, 3, H), w3=(2, 3, H))


def test_case_b001_a_reload_through_the_whole_life_cycle_shows_the_layout_of_the_kernel() -> None:
    module = Experts()

    def reload(tensors: Stream) -> None:
        module.load_weights(tensors)
        module.process_weights_after_loading()

    origin = {"w13": np.concatenate([numbers(EXPERTS, "w3"), numbers(EXPERTS, "w1")], axis=1)}
    check(EXPERTS, [Rank(live=dict(discover_tensors(module)), load=reload, origin=origin)])


def test_case_b002_an_identity_update_shows_that_the_raw_loader_writes_another_layout_than_the_kernel_has() -> None:
    """Post-processing came once, before connect, and `load_weights` leaves it out: every load is like the other, so no probe
    can know. Sending the weights that are there already does: the bytes change."""
    module = Experts()
    state = checkpoint(EXPERTS, 1)
    module.load_weights(stream(state))
    module.process_weights_after_loading()
    served = module.w13.clone()
    found = found_for(module, EXPERTS, module.load_weights)
    assert torch.equal(module.w13, served)  # probing alone changes nothing
    install(EXPERTS, found, discover_tensors(module), state)
    assert not torch.equal(module.w13, served)

    def reload(tensors: Stream) -> None:
        module.load_weights(tensors)
        module.process_weights_after_loading()

    reload(stream(state))
    found = found_for(module, EXPERTS, reload)
    for _ in range(3):
        install(EXPERTS, found, discover_tensors(module), state)
        assert torch.equal(module.w13, served)


# --- addresses --------------------------------------------------------------------------------------------------------


class Kernel:
    """What a layer keeps beside its parameters; a captured graph would hold the address of `scale`."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4, H, dtype=BF16), requires_grad=False)
        self.kernel = Kernel(torch.zeros(4))

    def tensors(self) -> NamedTensors:
        """A helper object is none of a module's own tensors: the caller names what it holds."""
        return NamedTensors({**discover_tensors(self), "kernel.scale": self.kernel.scale})


SCALED = CheckpointSpec.from_iterable([("w", (4, H), BF16), ("scale", (4,), F32)])


def test_case_b003_tensors_of_a_helper_object_are_part_of_the_state_when_they_are_named() -> None:
    module = Quantised()
    assert list(discover_tensors(module)) == ["w"]

    def rebuilding(tensors: Stream) -> None:
        state = dict(tensors)
        module.w.copy_(state["w"])
        module.kernel = Kernel(state["scale"].clone())

    refused(SCALED, rebuilding, module.tensors, "does not write in place", "'kernel.scale'", "captured graphs")

    def in_place(tensors: Stream) -> None:
        state = dict(tensors)
        module.w.copy_(state["w"])
        module.kernel.scale.copy_(state["scale"])

    origin = {"w": numbers(SCALED, "w"), "kernel.scale": numbers(SCALED, "scale")}
    check(SCALED, [Rank(live=dict(module.tensors()), load=in_place, origin=origin)])


def _rebuild(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    module.derived = state["w"].t().contiguous()


def _refresh(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    module.derived.copy_(state["w"].t())


def _leave(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    del module, state


def _square(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    module.derived.copy_(state["w"].t() * 2)


@pytest.mark.parametrize(
    ("derive", "becomes"),
    [(_rebuild, "'derived'"), (_refresh, "copies"), (_leave, "untouched"), (_square, "'derived'")],
    ids=["rebuilt", "refreshed", "left stale", "computed"],
)
def test_case_b005_b017_b020_derived_state_outside_the_parameters(
    derive: Callable[[nn.Module, dict[str, torch.Tensor]], None], becomes: str
) -> None:
    """A transposed cache kept as a plain attribute: followed when the loader refreshes it in place, refused when it is made
    anew or computed, and reported when the loader leaves it as it was."""
    spec = spec_of(w=(4, H))
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(4, H, dtype=BF16), requires_grad=False)
    module.derived = torch.zeros(H, 4, dtype=BF16)

    def load(tensors: Stream) -> None:
        state = dict(tensors)
        module.w.copy_(state["w"])
        derive(module, state)

    if becomes.startswith("'"):
        refused(spec, load, lambda: discover_tensors(module), becomes)
        return
    derived = numbers(spec, "w").T if becomes == "copies" else np.full((H, 4), UNTOUCHED)
    rank = Rank(
        live=dict(discover_tensors(module)), load=load, origin={"w": numbers(spec, "w"), "derived": derived},
        buffers=frozenset({"derived"}),
    )  # fmt: skip
    maps = check(spec, [rank])
    assert dict(maps[0].untouched) == ({} if becomes == "copies" else {"derived": 4 * H})


@pytest.mark.parametrize("copy_when_it_fits", [False, True])
def test_case_b026_b029_b030_derived_tensors_are_refreshed_in_place_or_refused(copy_when_it_fits: bool) -> None:
    spec = spec_of(kv_b=(8, H))
    live = live_like({"kv_b": numbers(spec, "kv_b"), "w_kc": np.zeros((2, 2, H)), "w_vc": np.zeros((2, H, 2))})

    def bind(name: str, value: torch.Tensor) -> None:
        if copy_when_it_fits and live[name].shape == value.shape:
            live[name].copy_(value)
        else:
            live[name] = value

    def load(tensors: Stream) -> None:
        live["kv_b"].copy_(dict(tensors)["kv_b"])
        heads = live["kv_b"].view(2, 4, H)
        bind("w_kc", heads[:, :2].clone())
        bind("w_vc", heads[:, 2:].transpose(1, 2).contiguous())

    if not copy_when_it_fits:
        refused(spec, load, lambda: NamedTensors(live), "'w_kc'", "Addresses must stay")
        return
    heads = numbers(spec, "kv_b").reshape(2, 4, H)
    origin = {"kv_b": numbers(spec, "kv_b"), "w_kc": heads[:, :2], "w_vc": heads[:, 2:].transpose(0, 2, 1)}
    check(spec, [Rank(live=live, load=load, origin=origin)])


def test_tensors_that_are_copies_of_the_live_ones_are_refused() -> None:
    spec = spec_of(w=(4, H))
    live = live_like({"w": numbers(spec, "w")})
    kept: list[torch.Tensor] = []

    def tensors() -> NamedTensors:
        kept.append(live["w"].clone())  # a state dict of copies, say
        return NamedTensors({"w": kept[-1]})

    refused(spec, lambda ts: [live[n].copy_(t) for n, t in ts], tensors, "'w'", "does not write in place")


def test_parameters_that_become_empty_are_refused_and_empty_ones_take_nothing() -> None:
    """A back end that packs weights away leaves a parameter of shape [0] behind."""
    spec = spec_of(w=(4, H), b=(4,))
    live = live_like({n: numbers(spec, n) for n in ("w", "b")})
    packed: dict[str, torch.Tensor] = {}

    def packing(tensors: Stream) -> None:
        state = dict(tensors)
        live["b"].copy_(state["b"])
        packed["w"] = state["w"].t().contiguous()
        live["w"] = torch.empty(0, dtype=BF16)

    refused(spec, packing, lambda: NamedTensors(live), "'w'", "is now torch.bfloat16 [0]")
    assert live["w"].numel() == 0
    found = probe(spec=spec, load_weights=packing, tensors=lambda: NamedTensors(live))  # packed away before connect
    assert unused_tensors(spec, [found]) == ("w",)  # which connect refuses, by name


def test_parameters_on_the_meta_device_are_refused_at_connect_and_after_a_load() -> None:
    spec = spec_of(w=(4, H))
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(4, H, dtype=BF16), requires_grad=False)

    def load(tensors: Stream) -> None:
        module.w.copy_(dict(tensors)["w"])
        module.w = nn.Parameter(torch.empty(4, H, dtype=BF16, device="meta"), requires_grad=False)

    refused(spec, load, lambda: discover_tensors(module), "'w'", "meta")
    with pytest.raises(ProbeError, match=r"'w'.*meta.*connect when the model is materialised"):
        live_tensors(discover_tensors(module))


def test_case_b036_a_scale_whose_shape_changed_after_the_first_load_is_refused_with_the_loaders_own_words() -> None:
    live = {"w": torch.zeros(4, H, dtype=BF16), "scale": torch.zeros(2, 3)}
    spec = CheckpointSpec.from_iterable([("w", (4, H), BF16), ("scale", (2, 3), F32)])

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            param = live[name]
            assert param.size() == loaded.size(), f"param.size()={tuple(param.size())}, loaded {tuple(loaded.size())}"
            param.copy_(loaded)

    live["scale"] = live["scale"].t().contiguous()  # post-processing of the load before connect
    refused(spec, load, lambda: NamedTensors(live), "AssertionError", "param.size()=(3, 2), loaded (2, 3)")


def test_case_b011_loaders_that_are_gone_after_post_processing_are_refused_with_the_reason() -> None:
    spec = spec_of(w=(4, H))
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(4, H, dtype=BF16), requires_grad=False)
    module.w.weight_loader = lambda p, t: p.copy_(t)

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            param = getattr(module, name)
            param.weight_loader(param, loaded)

    assert len(found_for(module, spec, load).copies) == 1
    module.w = nn.Parameter(module.w.t().contiguous(), requires_grad=False)
    refused(spec, load, lambda: discover_tensors(module), "AttributeError", "weight_loader")


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0.0, float("nan"), float("-inf"), 1.0])
def test_case_b006_padding_that_the_loader_leaves_alone_stays_as_it_is(pad: float) -> None:
    spec = spec_of(w=(5, H))
    live = {"w": torch.full((8, H), pad, dtype=BF16)}
    before = live["w"].clone()

    def load(tensors: Stream) -> None:
        live["w"][:5] = dict(tensors)["w"]

    with pytest.raises(CoverageError, match=r"'w': the loader never writes 15 of its 40 elements"):
        probe(spec=spec, load_weights=load, tensors=lambda: NamedTensors(live))
    origin = {"w": np.pad(numbers(spec, "w"), ((0, 3), (0, 0)), constant_values=UNTOUCHED)}
    check(spec, [Rank(live=live, load=load, origin=origin)], expected_untouched=["w"])
    assert torch.equal(live["w"][5:].view(torch.int16), before[5:].view(torch.int16))


def test_case_b006_b007_padding_that_holds_whatever_memory_held_is_refused() -> None:
    """A reload that makes the tensor anew, or poisons its tail differently each time, for gated halves."""
    spec = spec_of(gate=(5, H), up=(5, H))
    live = {"w13": torch.zeros(16, H, dtype=BF16)}
    garbage = torch.Generator().manual_seed(1)

    def load(tensors: Stream) -> None:
        live["w13"].copy_(torch.randn(16, H, generator=garbage))
        for name, loaded in tensors:
            live["w13"].view(2, 8, H)[("gate", "up").index(name), :5] = loaded

    error = refused(spec, load, lambda: NamedTensors(live), "'w13'")
    assert getattr(error, "index")[0] in {5, 6, 7, 13, 14, 15}  # noqa: B009

    def clearing(tensors: Stream) -> None:
        live["w13"].view(2, 8, H)[:, 5:] = 0
        for name, loaded in tensors:
            live["w13"].view(2, 8, H)[("gate", "up").index(name), :5] = loaded

    origin = {"w13": np.full((16, H), CONSTANT)}
    origin["w13"][:5], origin["w13"][8:13] = numbers(spec, "gate"), numbers(spec, "up")
    check(spec, [Rank(live=live, load=clearing, origin=origin)])


# --- loads that depend on those before ----------------------------------------------------------------------------------


def test_case_b021_scale_grows_with_each_reload() -> None:
    """Post-processing applied to its own output: right after one load, twice too large after two."""
    live = {"w": torch.zeros(4, H, dtype=BF16), "scale": torch.ones(4)}
    factor = 1

    def load(tensors: Stream) -> None:
        nonlocal factor
        for name, loaded in tensors:
            live[name].copy_(loaded * factor if name == "scale" else loaded)
        factor *= 2

    refused(SCALED, load, lambda: NamedTensors(live), "'scale'")


@pytest.mark.parametrize("connect_after", ["no load", "the first load"])
def test_an_alias_that_is_doubled_in_place_at_the_first_load_only(connect_after: str) -> None:
    """A derived scale is an alias of the loaded one and is doubled when it is made. Loads differ if the first is among them;
    if it is not, they are all alike, and only an identity update shows that a reload takes the doubling back."""
    spec = spec_of(F32, weight_scale=(3,))
    live = {"weight_scale": torch.zeros(3)}
    derived: list[torch.Tensor] = []

    def load(tensors: Stream) -> None:
        live["weight_scale"].copy_(dict(tensors)["weight_scale"])
        if not derived:
            derived.append(live["weight_scale"])
            derived[0].mul_(2)

    if connect_after == "no load":
        refused(spec, load, lambda: NamedTensors(live), "'weight_scale'")
        return
    state = checkpoint(spec, 1)
    load(stream(state))
    served = live["weight_scale"].clone()
    found = probe(spec=spec, load_weights=load, tensors=lambda: NamedTensors(live))
    assert torch.equal(live["weight_scale"], served)
    install(spec, found, live, state)
    assert torch.equal(live["weight_scale"] * 2, served)


@pytest.mark.parametrize("fault", ["late by one load", "only the first time", "remembers by name"])
def test_loaders_whose_loads_are_not_independent_are_refused(fault: str) -> None:
    spec = spec_of(w=(4, H), u=(3, H))
    live = live_like({n: numbers(spec, n) for n in ("w", "u")})
    last: dict[str, torch.Tensor] = {}

    def load(tensors: Stream) -> None:
        state = dict(tensors)
        live["u"].copy_(state["u"])
        if fault == "late by one load":
            live["w"].copy_(last.get("w", state["w"]))
            last["w"] = state["w"]
        elif fault == "remembers by name":
            live["w"].copy_(last.setdefault("w", state["w"]))
        elif not last:
            live["w"].copy_(state["w"])
            last["w"] = state["w"]

    if fault != "remembers by name":
        refused(spec, load, lambda: NamedTensors(live), "'w'")
        return
    # To all appearances the same constants are written each time; nobody takes w, which connect refuses.
    found = probe(spec=spec, load_weights=load, tensors=lambda: NamedTensors(live))
    assert unused_tensors(spec, [found]) == ("w",)


@pytest.mark.parametrize("where", ["in the call", "on the object"])
def test_case_b033_a_pair_that_waits_by_reference_until_it_is_complete(where: str) -> None:
    """The first of a pair is kept as it was given, not copied, until the second arrives, with other tensors in between."""
    spec = spec_of(wk=(4, H), other=(300, H), wk_bias=(4,))
    origin = {"fused": np.concatenate([numbers(spec, "wk"), numbers(spec, "wk_bias")[:, None]], axis=1)}
    origin["other"] = numbers(spec, "other")
    live = live_like(origin)
    on_object: dict[str, torch.Tensor] = {}

    def load(tensors: Stream) -> None:
        pending = on_object if where == "on the object" else {}
        for name, loaded in tensors:
            if name == "other":
                live["other"].copy_(loaded)
                continue
            pending[name] = loaded
            if len(pending) == 2:
                live["fused"].copy_(torch.cat([pending.pop("wk"), pending.pop("wk_bias")[:, None]], dim=1))

    check(spec, [Rank(live=live, load=load, origin=origin)])


# --- scales -----------------------------------------------------------------------------------------------------------


def test_case_b034_each_engine_gets_the_scales_in_the_layout_that_its_own_loader_makes() -> None:
    """One wants the raw block scales, another packs them column by column with padding; both are fed the same checkpoint."""
    spec = CheckpointSpec.from_iterable([("scale", (6, 3), F32)])
    raw_origin = {"scale": numbers(spec, "scale")}
    raw = {"scale": torch.zeros(6, 3)}
    packed_origin = {"scale": np.full((3, 8), CONSTANT)}
    packed_origin["scale"][:, :6] = numbers(spec, "scale").T
    packed = {"scale": torch.zeros(3, 8)}

    def load_packed(tensors: Stream) -> None:
        packed["scale"].copy_(torch.nn.functional.pad(dict(tensors)["scale"].t(), (0, 2)))

    ranks = [
        Rank(live=raw, load=lambda ts: raw["scale"].copy_(dict(ts)["scale"]), origin=raw_origin),
        Rank(live=packed, load=load_packed, origin=packed_origin),
    ]
    check(spec, ranks)

    def wants_packed(tensors: Stream) -> None:
        if (numel := dict(tensors)["scale"].numel()) != 24:
            raise ValueError(f"scale has {numel} elements, expected 24 of a packed scale")

    refused(spec, wants_packed, lambda: NamedTensors(packed), "ValueError", "expected 24 of a packed scale")


def test_case_b040_a_name_twice_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"'experts\.0\.w' appears twice"):
        CheckpointSpec.from_iterable([("experts.0.w", (2, H), BF16), ("experts.0.w", (2, H), BF16)])


def test_a_value_that_a_loader_insists_on_is_refused_with_the_way_out() -> None:
    live = {"w": torch.zeros(4, H, dtype=BF16)}

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            if name == "scale":
                assert torch.allclose(loaded, torch.ones(4), atol=1e-6), "a skipped scale must be 1.0"
            else:
                live[name].copy_(loaded)

    refused(SCALED, load, lambda: NamedTensors(live), "a skipped scale must be 1.0", "CheckpointSpec(constants=...)")
    constant = CheckpointSpec.from_iterable([("w", (4, H), BF16), ("scale", (4,), F32)], constants={"scale": 1.0})
    check(constant, [Rank(live=live, load=load, origin={"w": numbers(constant, "w")})])


# --- what reloading does not touch --------------------------------------------------------------------------------------

COS_SIN_CACHE = torch.rand(6, 2)
"""A table in a module's globals, as some engines keep their rotary embedding."""


def test_case_b090_b091_b092_state_that_no_checkpoint_tensor_feeds_is_reported_wherever_it_lives() -> None:
    spec = spec_of(w=(4, H))
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(4, H, dtype=BF16), requires_grad=False)
    module.register_buffer("inv_freq", torch.rand(3), persistent=False)

    def tensors() -> NamedTensors:
        own = discover_tensors(module)
        return NamedTensors({**own, "rope.COS_SIN_CACHE": COS_SIN_CACHE}, buffers=own.buffers | {"rope.COS_SIN_CACHE"})

    kept = [module.inv_freq.clone(), COS_SIN_CACHE.clone()]
    found = probe(spec=spec, load_weights=lambda ts: module.w.copy_(dict(ts)["w"]), tensors=tensors)
    assert dict(found.untouched) == {"inv_freq": 3, "rope.COS_SIN_CACHE": 12}
    assert torch.equal(module.inv_freq, kept[0])
    assert torch.equal(COS_SIN_CACHE, kept[1])


def test_case_b118_b120_what_the_loader_does_not_write_must_be_declared_and_keeps_its_bytes() -> None:
    """A frozen tower or draft: no post-processing runs on it, since an update writes copied elements and calls no loader."""
    spec = spec_of(**{"model.w": (4, H)})
    live = live_like({"model.w": numbers(spec, "model.w"), "visual.w": np.zeros((3, H))})
    live["visual.w"].copy_(torch.randn(3, H))
    frozen = live["visual.w"].clone()

    def load(tensors: Stream) -> None:
        live["model.w"].copy_(dict(tensors)["model.w"])

    with pytest.raises(CoverageError, match=r"'visual\.w': the loader never writes 15 of its 15 elements"):
        probe(spec=spec, load_weights=load, tensors=lambda: NamedTensors(live))
    origin = {"model.w": numbers(spec, "model.w"), "visual.w": np.full((3, H), UNTOUCHED)}
    check(spec, [Rank(live=live, load=load, origin=origin)], expected_untouched=["visual.w"])
    assert torch.equal(live["visual.w"], frozen)


def test_restoring_after_a_refusal_puts_back_what_was_served() -> None:
    module = Experts()
    module.load_weights(stream(checkpoint(EXPERTS, 1)))
    served = module.w13.clone()

    def load(tensors: Stream) -> None:
        module.load_weights(tensors)
        module.w13.mul_(2)

    refused(EXPERTS, load, lambda: discover_tensors(module), "'w13'")
    assert torch.equal(module.w13, served)


def test_every_origin_of_this_file_is_checked_against_a_wrong_one() -> None:
    """The oracle can fail: a formula that is off by one row is noticed."""
    spec = spec_of(w=(4, H))
    live = live_like({"w": numbers(spec, "w")})
    wrong = Rank(
        live=live, load=lambda ts: live["w"].copy_(dict(ts)["w"]), origin={"w": np.roll(numbers(spec, "w"), 1, 0)}
    )
    with pytest.raises(AssertionError, match="Mismatched elements: 20 / 20"):
        find(spec, wrong)
