"""The loader path: what a loader computes, what it needs for that, and an update through it, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from tests import computing_loaders as toy

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import InfeasibleError, ProbeError
from weightbridge.layout import SourceMap, decode_source_map, encode_source_map
from weightbridge.probe import NamedTensors, ProbeOptions, loader_path, predict, probe
from weightbridge.probe.carried import carried_tensors, staging_tensors


def bits_of(tensor: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw.view(f"<u{tensor.element_size()}")


def update(
    source_map: SourceMap, spec: CheckpointSpec, engine: toy.Part | toy.TensorParallelPart, new: dict[str, torch.Tensor]
) -> int:
    """What an update does, by other means: write the copies one element at a time, then call the loader. Returns the bytes
    that had to travel."""
    staging = staging_tensors(source_map)
    targets = {**engine.tensors(), **staging}
    for i, live in enumerate(source_map.live):
        bits, times = predict(spec, source_map, i, lambda t, lo, hi: bits_of(new[spec.tensors[t].name])[lo:hi])
        memory = targets[live.name]
        assert memory.is_contiguous()
        view = memory.view(-1).view(torch.uint8).numpy().view(live.dtype.bits)
        view[times > 0] = bits[times > 0]
    for group in source_map.loader_groups:
        engine.load_weights(carried_tensors(spec, group, staging))
    for name, tensor in staging.items():  # the loader has overwritten what it was given, and that was a copy
        assert same(tensor, new[name.removeprefix("carried:")])
    return source_map.copied_nbytes(np.array([t.dtype.itemsize for t in spec.tensors]))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((bits_of(a) == bits_of(b)).all())


@pytest.mark.parametrize("kind", [*toy.PARTS, toy.Together])
def test_exactly_what_is_computed_takes_the_loader_path_and_an_update_lands_bit_for_bit(kind: type[toy.Part]) -> None:
    spec, engine = toy.spec_of(kind.rows()), kind()
    engine.load_weights(iter(toy.weights(spec, 1).items()))
    before = {n: t.clone() for n, t in engine.live.items()}
    found = probe(spec=spec, load_weights=engine.load_weights, tensors=engine.tensors, allow_loader_path=True)
    assert all(same(before[n], t) for n, t in engine.live.items())
    assert {found.live[i].name for i in found.computed} == kind.computed
    (group,) = found.loader_groups
    assert {spec.tensors[i].name for i in group.tensors} == kind.needed
    copied = {found.live[i].name for i in found.copies.live.tolist() if not found.live[i].carried}
    assert copied == set(engine.live) - kind.computed
    assert decode_source_map(encode_source_map(found), spec=spec).fingerprint == found.fingerprint

    reference = kind()
    reference.load_weights(iter(toy.weights(spec, 2).items()))
    travelled = update(found, spec, engine, toy.weights(spec, 2))
    assert [n for n, t in engine.live.items() if not same(t, reference.live[n])] == []
    live_bytes = sum(t.numel() * t.element_size() for n, t in engine.live.items() if n not in kind.computed)
    assert travelled == live_bytes + sum(t.nbytes for t in spec.tensors if t.name in kind.needed)


class Side:
    """An all-gather among threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.said: list[bytes] = [b""] * size
        self.rounds = [0] * size

    def agree(self, rank: int) -> Callable[[bytes], Sequence[bytes]]:
        def gather(data: bytes) -> Sequence[bytes]:
            self.said[rank] = data
            self.rounds[rank] += 1
            self.barrier.wait(20)
            heard = tuple(self.said)
            self.barrier.wait(20)
            return heard

        return gather

    def run(self, work: Callable[[int], SourceMap]) -> list[SourceMap | Exception]:
        results: list[SourceMap | Exception] = [ProbeError("nothing yet")] * len(self.said)

        def one(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return results


def test_all_ranks_of_a_side_carry_and_load_the_same_tensors() -> None:
    spec = toy.spec_of(toy.TensorParallelPart.ROWS)
    together, side = toy.Collective(3), Side(3)
    ranks = [toy.TensorParallelPart(r, together) for r in range(3)]
    maps = side.run(
        lambda r: probe(
            spec=spec,
            load_weights=ranks[r].load_weights,
            tensors=ranks[r].tensors,
            allow_loader_path=True,
            agree=side.agree(r),
        )
    )
    assert all(isinstance(m, SourceMap) for m in maps), maps
    assert len(set(side.rounds)) == 1
    for rank, found in zip(ranks, maps, strict=True):
        assert isinstance(found, SourceMap)
        assert {found.live[i].name for i in found.computed} == rank.computed
        (group,) = found.loader_groups
        assert {spec.tensors[i].name for i in group.tensors} == toy.TensorParallelPart.NEEDED
    new = toy.weights(spec, 4)
    reference = [toy.TensorParallelPart(r, toy.Collective(1)) for r in range(3)]
    for rank in reference:
        rank.together.meet = lambda *_: None  # type: ignore[method-assign]
        rank.load_weights(iter(new.items()))
    threads = [
        threading.Thread(target=update, args=(m, spec, r, new), daemon=True) for m, r in zip(maps, ranks, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank, wanted in zip(ranks, reference, strict=True):
        assert [n for n, t in rank.live.items() if not same(t, wanted.live[n])] == []


def test_without_computed_tensors_no_further_load_is_made() -> None:
    spec = toy.spec_of([("a", (5, 3), toy.BF16), ("b", (4,), toy.BF16)])
    live = {"a": torch.zeros(5, 3, dtype=toy.BF16), "b": torch.zeros(4, dtype=toy.BF16)}
    calls = []

    def load(tensors: toy.Stream) -> None:
        calls.append([live[n].copy_(t) for n, t in tensors])

    found = probe(spec=spec, load_weights=load, tensors=lambda: live, allow_loader_path=True)
    assert found.loader_groups == ()
    assert len(calls) == 4  # two coded, two to verify: these tensors are small


# --- what must be refused ----------------------------------------------------------------------------------------------

MANY = [(f"layers.{i}.{kind}", (3,), toy.BF16) for i in range(9) for kind in ("a", "b")]


def refused(load: Callable[[toy.Stream], None], live: dict[str, torch.Tensor], *parts: str) -> ProbeError:
    before = {n: t.clone() for n, t in live.items()}
    with pytest.raises(ProbeError) as caught:
        probe(spec=toy.spec_of(MANY), load_weights=load, tensors=lambda: live, allow_loader_path=True)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert all(torch.equal(live[n], t) for n, t in before.items())
    return caught.value


def copying() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in MANY}


def test_a_loader_that_counts_its_calls_is_refused() -> None:
    live, calls = copying(), 0

    def load(tensors: toy.Stream) -> None:
        nonlocal calls
        calls += 1
        for name, tensor in tensors:
            live[name].copy_(tensor * calls if name == "layers.3.a" else tensor)

    error = refused(load, live, "'layers.3.a'", "two loads of the same checkpoint")
    assert error.tensor == "layers.3.a"  # type: ignore[attr-defined]


def test_a_loader_that_depends_on_the_load_before_is_refused() -> None:
    live = copying()
    kept = [torch.zeros(3, dtype=toy.BF16)]

    def load(tensors: toy.Stream) -> None:
        for name, tensor in tensors:
            live[name].copy_(tensor)
            if name == "layers.5.b":
                live[name].add_(kept[0])
                kept[0] = tensor.clone()

    refused(load, live, "'layers.5.b'", "two loads of the same checkpoint")


def test_a_loader_that_adds_to_what_is_there_is_refused_after_all_sets_were_tried() -> None:
    """Over fresh memory it is a function of the checkpoint; over an older version it is not."""
    live = copying()

    def load(tensors: toy.Stream) -> None:
        for name, tensor in tensors:
            old = live[name].nan_to_num(0)
            live[name].copy_(2 * tensor + old if name == "layers.5.b" else tensor)

    error = refused(load, live, "'layers.5.b'", "loads of 1, 2, 4, 8, 16, 18 of 18 tensors", "did not make live tensor")
    assert error.tensor == "layers.5.b"  # type: ignore[attr-defined]


def test_a_tensor_whose_mere_presence_matters_is_found_by_widening() -> None:
    """Without `b` in the same call the loader quietly makes something else of `a`."""
    live = copying()

    def load(tensors: toy.Stream) -> None:
        given = dict(tensors)
        for name, tensor in given.items():
            shift = 1 if "layers.4.b" in given else 2
            live[name].copy_(tensor + shift if name == "layers.4.a" else tensor)

    spec = toy.spec_of(MANY)
    found = probe(spec=spec, load_weights=load, tensors=lambda: live, allow_loader_path=True)
    assert {spec.tensors[i].name for i in found.loader_groups[0].tensors} == {"layers.4.a", "layers.4.b"}


def test_a_load_of_a_part_that_spoils_a_copied_tensor_is_widened_until_it_does_not() -> None:
    """After each call the loader turns the halves of a fused tensor, whether or not it wrote them."""
    live = copying()

    def load(tensors: toy.Stream) -> None:
        for name, tensor in tensors:
            live[name].copy_(tensor + 1 if name == "layers.7.a" else tensor)
        live["layers.2.b"].copy_(live["layers.2.b"].roll(1))

    spec = toy.spec_of(MANY)
    found = probe(spec=spec, load_weights=load, tensors=lambda: live, allow_loader_path=True)
    assert {found.live[i].name for i in found.computed} == {"layers.7.a"}
    assert {spec.tensors[i].name for i in found.loader_groups[0].tensors} == {"layers.7.a", "layers.2.b"}


def test_tensors_that_a_loader_wants_together_are_found_though_they_change_nothing() -> None:
    """`b` must come with `a`, but only its presence matters."""
    live = copying()

    def load(tensors: toy.Stream) -> None:
        given = dict(tensors)
        if ("layers.4.a" in given) != ("layers.4.b" in given):
            raise KeyError("layers.4.a and layers.4.b belong together")
        for name, tensor in given.items():
            live[name].copy_(tensor * 2 if name == "layers.4.a" else tensor)

    spec = toy.spec_of(MANY)
    found = probe(spec=spec, load_weights=load, tensors=lambda: live, allow_loader_path=True)
    assert {spec.tensors[i].name for i in found.loader_groups[0].tensors} == {"layers.4.a", "layers.4.b"}


class Extreme:
    """One live scalar that is an extreme over scalars of the checkpoint. Of those it is given, if not all are."""

    PARTS = tuple(f"layers.{i}.a" for i in range(6))

    def __init__(self, reduce: str) -> None:
        self.reduce = reduce
        rows = [(n, () if n in self.PARTS else shape, toy.F32) for n, shape, _ in MANY]
        self.spec = toy.spec_of(rows)
        self.live = {n: torch.zeros(shape) for n, shape, _ in rows} | {"extreme": torch.zeros(())}

    def load_weights(self, tensors: toy.Stream) -> None:
        given = dict(tensors)
        for name, tensor in given.items():
            self.live[name].copy_(tensor)
        scalars = torch.stack([given[n] for n in self.PARTS if n in given] or [torch.zeros(())])
        scalars = scalars.abs() if self.reduce.startswith("abs") else scalars
        self.live["extreme"].copy_(scalars.amin() if self.reduce.endswith("min") else scalars.amax())

    def probe(self, seed: int = 0) -> SourceMap:
        return probe(
            spec=self.spec, load_weights=self.load_weights, tensors=lambda: self.live, allow_loader_path=True,
            options=ProbeOptions(seed=seed),
        )  # fmt: skip

    def carried(self, found: SourceMap) -> set[str]:
        assert {found.live[i].name for i in found.computed} == {"extreme"}
        return {self.spec.tensors[i].name for i in found.loader_groups[0].tensors}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("reduce", ["amax", "amin", "absmin", "absmax"])
def test_an_extreme_over_all_tensors_needs_all_of_those_that_take_part(reduce: str, seed: int) -> None:
    """One scalar a tensor: in a random checkpoint most of them are not the extreme."""
    engine = Extreme(reduce)
    assert engine.carried(engine.probe(seed)) == set(engine.PARTS)


@pytest.mark.parametrize("reduce", ["amax", "amin", "absmin", "absmax"])
def test_a_dependency_that_was_overlooked_is_never_accepted(reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the luck of three random checkpoints alone, five of six scalars would do more often than not."""
    found = loader_path.Refiner.found
    monkeypatch.setattr(loader_path.Refiner, "found", lambda self: tuple(i for i in found(self) if i != 4))
    for seed in range(3):
        engine = Extreme(reduce)
        assert engine.carried(engine.probe(seed)) >= set(engine.PARTS)


def test_carried_bytes_beyond_the_budget_are_infeasible() -> None:
    spec, engine = toy.spec_of(toy.FusedScale.rows()), toy.FusedScale()
    with pytest.raises(InfeasibleError, match=r"'qkv'.*_weight'.*57 bytes|'qkv'") as caught:
        probe(
            spec=spec, load_weights=engine.load_weights, tensors=engine.tensors, allow_loader_path=True,
            options=ProbeOptions(loader_path_bytes=56),
        )  # fmt: skip
    assert caught.value.needed_bytes == 3 * 15 + 3 * 4
    assert caught.value.budget_bytes == 56
    assert "'k_weight'" in str(caught.value)


def test_a_side_that_may_not_compute_refuses_as_before() -> None:
    spec, engine = toy.spec_of(toy.PlusOne.rows()), toy.PlusOne()
    with pytest.raises(ProbeError, match="'norm'"):
        probe(spec=spec, load_weights=engine.load_weights, tensors=engine.tensors)


def test_a_failure_of_one_rank_ends_the_search_of_all_and_names_the_rank() -> None:
    spec = toy.spec_of(toy.TensorParallelPart.ROWS)
    together, side = toy.Collective(3), Side(3)
    ranks = [toy.TensorParallelPart(r, together) for r in range(3)]
    calls = 0

    def load(tensors: toy.Stream) -> None:
        nonlocal calls
        ranks[2].load_weights(tensors)
        calls += 1
        if calls == 8:
            raise MemoryError("no more")

    def work(rank: int) -> SourceMap:
        return probe(
            spec=spec, load_weights=load if rank == 2 else ranks[rank].load_weights, tensors=ranks[rank].tensors,
            allow_loader_path=True, agree=side.agree(rank),
        )  # fmt: skip

    results = side.run(work)
    assert all(isinstance(r, ProbeError) and "MemoryError: no more" in str(r) for r in results), results
    assert [getattr(r, "side_rank", None) for r in results] == [2, 2, None]


def test_constants_of_the_spec_come_with_every_load() -> None:
    """A scale the loader insists on is no content, and still has to be there."""
    spec = CheckpointSpec.from_iterable(
        [("w", (4, 3), toy.BF16), ("w.input_scale", (2,), toy.F32), ("u", (5,), toy.BF16)],
        constants={"w.input_scale": 1.0},
    )
    live = NamedTensors(
        {"w": torch.zeros(4, 3), "u": torch.zeros(5, dtype=toy.BF16), "step": torch.zeros(2)}, buffers=["step"]
    )

    def load(tensors: toy.Stream) -> None:
        given = dict(tensors)
        if not torch.equal(given["w.input_scale"], torch.ones(2)):
            raise ValueError("input scale")
        if "w" in given:
            live["w"].copy_(given["w"].float() * 3)
        if "u" in given:
            live["u"].copy_(given["u"])

    found = probe(spec=spec, load_weights=load, tensors=lambda: live, allow_loader_path=True)
    assert found.loader_groups[0].tensors == (0,)
    assert list(dict(carried_tensors(spec, found.loader_groups[0], staging_tensors(found)))) == ["w", "w.input_scale"]
    assert dict(found.untouched) == {"step": 2}
