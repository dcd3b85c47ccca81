"""Loaders that compute, rebind, fail, mutate or skip: each is followed rightly or refused by name, never guessed at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import CoverageError, ProbeError
from weightbridge.layout import SourceMap
from weightbridge.probe import NamedTensors, ProbeOptions, discover_tensors, live_tensors, num_loads, probe

BF16 = torch.bfloat16
SPEC = CheckpointSpec.from_iterable([("w", (9, 13), BF16), ("u", (5, 13), BF16)])
Tensors = Iterable[tuple[str, torch.Tensor]]


def fresh() -> dict[str, torch.Tensor]:
    return {"w": torch.randn(9, 13).to(BF16), "u": torch.randn(5, 13).to(BF16)}


def copying(live: dict[str, torch.Tensor]) -> Callable[[Tensors], None]:
    def load(tensors: Tensors) -> None:
        for name, tensor in tensors:
            live[name].copy_(tensor)

    return load


def run(
    load: Callable[[Tensors], object], live: dict[str, torch.Tensor], spec: CheckpointSpec = SPEC, **options: object
) -> SourceMap:
    return probe(spec=spec, load_weights=load, tensors=lambda: live, options=ProbeOptions(**options))  # type: ignore[arg-type]


def refused(
    load: Callable[[Tensors], object], live: dict[str, torch.Tensor], *parts: str, spec: CheckpointSpec = SPEC
) -> ProbeError:
    before = {n: t.clone() for n, t in live.items()}
    with pytest.raises(ProbeError) as caught:
        run(load, live, spec)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert all(torch.equal(live[n], t) for n, t in before.items()), "weights were not put back"
    return caught.value


# --- computed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compute",
    [
        lambda w: w + 1,
        lambda w: w - 1,
        lambda w: -w,
        lambda w: w * 2,
        lambda w: w.abs(),
        lambda w: -torch.exp(w.float()),
        lambda w: torch.maximum(w, w.flip(0)),
        lambda w: w / w.abs().max(),
        lambda w: w * (w.float().abs() < 3),
        lambda w: torch.nan_to_num(w.float() ** 2),
        lambda w: w.to(torch.float8_e4m3fn),
    ],
)
def test_computed_tensors_are_refused_with_tensor_and_element(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    live = fresh()

    def load(tensors: Tensors) -> None:
        state = dict(tensors)
        live["w"].copy_(compute(state["w"]))
        live["u"].copy_(state["u"])

    error = refused(load, live, "'w'", "element [")
    assert error.tensor == "w"  # type: ignore[attr-defined]
    assert all(0 <= i < n for i, n in zip(error.index, (9, 13), strict=True))  # type: ignore[attr-defined]


def test_a_sum_of_two_tensors_is_refused() -> None:
    live = fresh()

    def load(tensors: Tensors) -> None:
        state = dict(tensors)
        live["w"].copy_(state["w"])
        live["w"][:5] += state["u"]
        live["u"].copy_(state["u"])

    refused(load, live, "'w'")


def test_a_narrowing_cast_that_truncates_is_refused_and_one_to_nearest_even_is_a_copy() -> None:
    spec = CheckpointSpec.from_iterable([("w", (9, 13), torch.float32)])
    live = {"w": torch.randn(9, 13).to(BF16)}

    def truncate(tensors: Tensors) -> None:
        for _, tensor in tensors:
            live["w"].copy_((tensor.view(torch.int32) & -65536).view(torch.float32))

    refused(truncate, live, "'w'", spec=spec)
    assert len(run(copying(live), live, spec).copies) == 1


def test_a_constant_that_is_a_valid_code_is_a_constant() -> None:
    live = {
        "w": torch.empty(9, 16, dtype=BF16),
        "u": torch.empty(5, 13, dtype=BF16),
        "ones": torch.empty(40, dtype=BF16),
    }

    def load(tensors: Tensors) -> None:
        state = dict(tensors)
        live["w"][:, :13] = state["w"]
        live["w"][:, 13:] = 1.0
        live["u"].copy_(state["u"])
        live["ones"].fill_(0.5)

    found = run(load, live)
    assert [(c.live, c.live_start, c.axes, c.bits) for c in found.constants] == [
        (0, 13, ((9, 16), (3, 1)), 0x3F80),
        (2, 0, ((40, 1),), 0x3F00),
    ]


# --- what loaders do to what they are given ------------------------------------------------------------------------------


def test_case_b028_a_loader_that_writes_into_its_input() -> None:
    live = fresh()

    def load(tensors: Tensors) -> None:
        for name, tensor in tensors:
            live[name].copy_(tensor)
            tensor.zero_()

    assert len(run(load, live).copies) == 2


def test_case_b165_b166_loaders_that_drain_the_iterator_keep_references_or_use_threads() -> None:
    live = fresh()
    kept: list[torch.Tensor] = []

    def load(tensors: Tensors) -> None:
        drained = list(tensors)
        kept.extend(t for _, t in drained)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda item: live[item[0]].copy_(item[1]), reversed(drained)))

    assert len(run(load, live).copies) == 2
    assert len({t.data_ptr() for t in kept}) == len(kept)


def test_the_checkpoint_is_handed_out_one_tensor_at_a_time_and_the_same_on_every_rank() -> None:
    seen: list[list[torch.Tensor]] = []
    for rank in range(2):
        live = {"w": torch.empty(9 - 4 * rank, 13, dtype=BF16 if rank else torch.float32)}
        mine: list[torch.Tensor] = []

        def load(
            tensors: Tensors, rank: int = rank, live: dict[str, torch.Tensor] = live, mine: list[torch.Tensor] = mine
        ) -> None:
            assert isinstance(tensors, Iterator)
            for name, tensor in tensors:
                mine.append(tensor.clone())
                if name == "w":
                    live["w"].copy_(tensor[4 * rank :])

        dtypes = frozenset({"BF16", "F32"})
        probe(spec=SPEC, load_weights=load, tensors=lambda live=live: live, dtypes=dtypes)  # type: ignore[misc]
        assert len(mine) == 2 * num_loads(SPEC, dtypes) == 6
        seen.append(mine)
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_a_value_that_a_loader_insists_on_is_a_constant_of_the_spec() -> None:
    spec = CheckpointSpec.from_iterable(
        [("w", (9, 13), BF16), ("scale", (3,), torch.float32)], constants={"scale": 1.0}
    )
    live = {"w": torch.empty(9, 13, dtype=BF16), "scale": torch.empty(3)}

    def load(tensors: Tensors) -> None:
        for name, tensor in tensors:
            if name == "scale" and not torch.equal(tensor, torch.ones(3)):
                raise AssertionError("scale must be 1.0")
            live[name].copy_(tensor)

    found = run(load, live, spec)
    assert len(found.copies) == 1
    assert [(c.live, c.bits) for c in found.constants] == [(1, 0x3F800000)]


# --- faults --------------------------------------------------------------------------------------------------------------


def test_a_loader_that_fails_is_called_for_every_load_all_the_same() -> None:
    live, calls = fresh(), 0

    def load(tensors: Tensors) -> None:
        nonlocal calls
        calls += 1
        raise KeyError("model.layers.3.missing")

    error = refused(load, live, "KeyError", "model.layers.3.missing", "checkpoint")
    assert calls == num_loads(SPEC, {"BF16"})
    assert isinstance(error.__cause__, KeyError)


def test_a_rank_that_finds_a_fault_takes_part_in_every_load_all_the_same() -> None:
    live, calls = fresh(), 0

    def load(tensors: Tensors) -> None:
        nonlocal calls
        calls += 1
        for name, tensor in tensors:
            live[name].copy_(tensor * (calls if name == "w" else 1))

    refused(load, live, "'w'")
    assert calls == num_loads(SPEC, {"BF16"})


def test_case_b004_b020_a_loader_that_rebinds_storage_is_refused_and_weights_are_put_back() -> None:
    live = fresh()
    original, before = live["w"], live["w"].clone()

    def load(tensors: Tensors) -> None:
        for name, tensor in tensors:
            live[name] = tensor

    with pytest.raises(ProbeError, match="does not write in place: live tensor 'w'"):
        run(load, live)
    assert torch.equal(original, before)
    assert torch.equal(live["w"], before)


@pytest.mark.parametrize("change", ["shape", "gone", "new"])
def test_case_b014_a_loader_that_changes_the_set_or_shape_of_tensors_is_refused(change: str) -> None:
    live = fresh()

    def load(tensors: Tensors) -> None:
        copying(live)(tensors)
        if change == "shape":
            live["u"] = live["u"].t()
        elif change == "gone":
            live.pop("u")
        else:
            live["new"] = torch.zeros(2)

    with pytest.raises(ProbeError, match=r"'u'|'new'"):
        run(load, live)


def test_case_b001_a_loader_that_is_not_re_entrant_is_refused() -> None:
    """Post-processing swaps the halves once, at the first load only."""
    live, loads = fresh(), 0

    def load(tensors: Tensors) -> None:
        nonlocal loads
        copying(live)(tensors)
        if loads == 0:
            live["w"].copy_(live["w"].roll(4, 0))
        loads += 1

    refused(load, live, "'w'")


def test_case_b054_a_parameter_that_the_loader_never_writes_is_a_coverage_error() -> None:
    live = {**fresh(), "expert": torch.randn(4, 3)}

    def load(tensors: Tensors) -> None:
        for name, tensor in tensors:
            live[name][: 7 if name == "w" else 5].copy_(tensor[: 7 if name == "w" else 5])

    before = {n: t.clone() for n, t in live.items()}
    with pytest.raises(CoverageError) as caught:
        run(load, live)
    assert "never writes 26 of its 117 elements" in str(caught.value)
    assert caught.value.tensors == ("w", "expert")  # type: ignore[attr-defined]
    assert all(torch.equal(live[n], t) for n, t in before.items())
    found = run(load, live, expected_untouched=frozenset({"w", "expert"}))
    assert dict(found.untouched) == {"w": 26, "expert": 12}
    # The same gaps in buffers are reported, not refused.
    marked = NamedTensors(live, buffers=["w", "expert"])
    assert dict(probe(spec=SPEC, load_weights=load, tensors=lambda: marked).untouched) == {"w": 26, "expert": 12}


def test_buffers_of_other_dtypes_are_told_apart() -> None:
    live: dict[str, torch.Tensor] = {
        **fresh(),
        "ids": torch.arange(7),
        "flags": torch.tensor([True, False, True]),
        "step": torch.tensor(3),
        "limits": torch.zeros(4, dtype=torch.int32),
    }

    def load(tensors: Tensors) -> None:
        for name, tensor in tensors:
            live[name].copy_(tensor)
        live["flags"].fill_(True)
        live["limits"].copy_(torch.tensor([0x7FFFFFFF, -1, 5, 5]))  # what elements are filled with before a load

    marked = NamedTensors(live, buffers=["ids", "flags", "step", "limits"])
    found = probe(spec=SPEC, load_weights=load, tensors=lambda: marked)
    assert dict(found.untouched) == {"ids": 7, "step": 1}
    assert [(found.live[c.live].name, c.bits) for c in found.constants] == [
        ("flags", 1),
        ("limits", 0x7FFFFFFF),
        ("limits", 0xFFFFFFFF),
        ("limits", 5),
    ]
    assert live["ids"].tolist() == list(range(7))
    assert live["flags"].tolist() == [True, False, True]


def test_without_backup_the_weights_are_left_overwritten() -> None:
    live = fresh()
    before = {n: t.clone() for n, t in live.items()}
    run(copying(live), live, backup=False)
    assert not torch.equal(live["w"], before["w"])


def test_progress_counts_loads() -> None:
    live, seen = fresh(), []
    probe(spec=SPEC, load_weights=copying(live), tensors=lambda: live, progress=lambda *a: seen.append(a))
    assert seen == [("coded load 1", 1, 3), ("coded load 2", 2, 3), ("verification load", 3, 3)]


def test_an_interrupt_puts_the_weights_back() -> None:
    live = fresh()
    before = {n: t.clone() for n, t in live.items()}

    def load(tensors: Tensors) -> None:
        copying(live)(tensors)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(load, live)
    assert all(torch.equal(live[n], t) for n, t in before.items())


# --- naming live tensors -------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(4)
        self.register_buffer("freq", torch.ones(3), persistent=False)
        self.scale_fp32 = torch.zeros(2)
        self.caches = [torch.zeros(1), self.norm.weight.data, "no tensor"]
        self.by_name = {"k": torch.zeros(3), "n": 1}
        self.pending = torch.empty(3, device="meta")


def test_discovery_walks_parameters_buffers_and_attributes_and_folds_aliases() -> None:
    found = discover_tensors(Model())
    assert list(found) == ["embed.weight", "norm.weight", "norm.bias", "freq", "scale_fp32", "caches.0", "by_name.k"]
    assert found.buffers == {"freq", "scale_fp32", "caches.0", "by_name.k"}
    described = {t.name: t for t in live_tensors(found)}
    assert described["embed.weight"].parameter
    assert not described["freq"].parameter
    assert described["embed.weight"].shape == (6, 4)
    assert not any(t.requires_grad for t in found.values())


def test_a_module_with_tied_weights_is_probed_through_its_state_dict() -> None:
    model = Model()
    names = ["embed.weight", "norm.weight", "norm.bias"]
    state = model.state_dict()
    spec = CheckpointSpec.from_iterable((n, state[n].shape, BF16) for n in names)

    def load(tensors: Tensors) -> None:
        model.load_state_dict(dict(tensors), strict=False)

    found = probe(spec=spec, load_weights=load, tensors=lambda: discover_tensors(model))
    assert len(found.copies) == 3
    assert dict(found.untouched) == {"freq": 3, "scale_fp32": 2, "caches.0": 1, "by_name.k": 3}


def test_tensors_without_memory_or_with_shared_elements_are_refused() -> None:
    with pytest.raises(ProbeError, match=r"'m'.*meta"):
        live_tensors({"m": torch.empty(3, device="meta")})
    with pytest.raises(ProbeError, match="'s'"):
        live_tensors({"s": torch.eye(3).to_sparse()})
    with pytest.raises(ProbeError, match=r"'c'.*complex"):
        live_tensors({"c": torch.zeros(3, dtype=torch.complex64)})
    with pytest.raises(ProbeError, match="share memory"):
        live_tensors({"o": torch.zeros(9).as_strided((3, 4), (2, 1))})


def test_a_loader_that_adds_to_what_it_finds_is_refused() -> None:
    """It makes NaN of the probe's fill in every load, which is no padding: the element would stay behind at each update."""
    live = {"w": torch.randn(10, 13).to(BF16), "u": torch.randn(5, 13).to(BF16)}

    def load(tensors: Tensors) -> None:
        for name, tensor in tensors:
            live[name][: len(tensor)] = tensor
        live["w"][9] += 1

    assert refused(load, live, "'w'", "NaN", "what it finds").tensor == "w"
    padded = {"w": torch.full((10, 13), float("-inf")).to(BF16), "u": torch.randn(5, 13).to(BF16)}

    def load_padded(tensors: Tensors) -> None:
        for name, tensor in tensors:
            padded[name][: len(tensor)] = tensor
        padded["w"][9] = float("-inf")

    assert len(run(load_padded, padded).constants) == 1
