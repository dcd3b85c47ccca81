"""Loaders with one small fault: a bit of an element, two rows exchanged, a tensor left out. None may get past connect.

A mutant wraps a good loader and spoils what it wrote, from some load on. It is made so that it does change something: the
element is a copied one, the rows differ, the tensor is written. Two rows exchanged in every load are another layout and no
fault, so that exchange begins with the second load at the earliest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pytest
import torch
from tests.properties.test_probe_dtypes import ALL, mixed, raw
from tests.properties.test_probe_random_loaders import random_job

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import CoverageError, ProbeError
from weightbridge.layout import SourceMap, unused_tensors
from weightbridge.probe import NamedTensors, num_loads, probe

NUM_LAYOUTS, MUTANTS_OF_EACH = 50, 4
Stream = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    spec: CheckpointSpec
    live: Mapping[str, torch.Tensor]
    load: Callable[[Stream], object]
    found: SourceMap

    @property
    def loads(self) -> int:
        return num_loads(self.spec, {t.dtype.name for t in self.found.live})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """kind, from which load on (0: in every load), where: (live tensor, ...) or (checkpoint tensor,)."""

    kind: str
    since: int
    tensor: str
    where: tuple[int, ...] = ()
    bit: int = 0


def random_layout(rng: random.Random) -> Layout:
    """A good loader, with the map that it has: stacked blocks of slices, or a mixture of dtypes."""
    if rng.random() < 0.3:
        spec, rank = mixed(rng.sample(ALL, rng.randint(1, 3)))
        live, load = dict(rank.live), rank.load
    else:
        job = random_job(rng)
        spec, live, load = job.spec, job.live, job.load
    found = probe(spec=spec, load_weights=load, tensors=lambda: NamedTensors(live, buffers=live))
    return Layout(spec=spec, live=live, load=load, found=found)


def random_state(spec: CheckpointSpec, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        t.name: torch.randn(t.shape, generator=generator).to(getattr(torch, t.dtype.torch_name)) for t in spec.tensors
    }


def loaded(layout: Layout, seed: int) -> dict[str, torch.Tensor]:
    """The bits of all live tensors after a load of random values."""
    for tensor in layout.live.values():
        raw(tensor).fill_(1)
    layout.load((n, t.clone()) for n, t in random_state(layout.spec, seed).items())
    return {n: raw(t).clone() for n, t in layout.live.items()}


def copied_elements(layout: Layout) -> dict[str, torch.Tensor]:
    """Indices of the elements that depend on the checkpoint, told by loading it with several values: [n, dims] each."""
    seen = [loaded(layout, seed) for seed in range(6)]
    return {n: torch.nonzero(torch.stack([s[n] != seen[0][n] for s in seen]).any(0)) for n in layout.live}


def mutants(layout: Layout, rng: random.Random) -> list[Mutant]:
    """Some faults of each kind that this layout can have."""
    copied = {n: at for n, at in copied_elements(layout).items() if len(at)}
    values = loaded(layout, 100)
    last = layout.loads - 1
    found = []
    for _ in range(MUTANTS_OF_EACH):
        kind = rng.choice(["flip", "flip", "swap", "drop", "omit"])
        since = rng.choice([0, rng.randint(1, last), last])
        if not copied:
            break
        name = rng.choice(sorted(copied))
        tensor = layout.live[name]
        if kind in {"drop", "omit"} and "BOOL" in {t.dtype.name for t in layout.spec.tensors}:
            since = 0  # later on, what a single bool should become may well be what it is
        if kind == "flip":
            at = tuple(rng.choice(copied[name].tolist())) if tensor.dim() else ()
            bit = rng.randrange(8 * tensor.element_size())
            found.append(Mutant(kind=kind, since=since, tensor=name, where=at, bit=bit))
        elif kind == "swap" and tensor.dim() and tensor.shape[0] > 1:
            a, b = rng.sample(range(tensor.shape[0]), 2)
            if not torch.equal(values[name][a], values[name][b]):
                found.append(Mutant(kind=kind, since=max(1, since), tensor=name, where=(a, b)))
        elif kind == "drop":
            found.append(Mutant(kind=kind, since=since, tensor=name))
        elif kind == "omit":
            used = [t.name for t in layout.spec.tensors if t.name not in unused_tensors(layout.spec, [layout.found])]
            found.append(
                Mutant(
                    kind=kind,
                    since=since,
                    tensor=rng.choice([n for n in used if layout.spec.tensors[layout.spec.index[n]].numel]),
                )
            )
    return found


def spoiled(layout: Layout, mutant: Mutant) -> Callable[[Stream], None]:
    """The loader with the fault in it."""
    calls = 0

    def load(stream: Stream) -> None:
        nonlocal calls
        faulty = calls >= mutant.since
        calls += 1
        if mutant.kind == "omit":
            if faulty:
                without = {n: raw(t).clone() for n, t in layout.live.items()}
                state = dict(stream)
                layout.load((n, t.clone()) for n, t in state.items())
                wrote = {n: raw(t).clone() for n, t in layout.live.items()}
                # What came from the omitted tensor: what changes with its values alone.
                other = dict(state)
                bits = raw(state[mutant.tensor])
                other[mutant.tensor] = (~bits if state[mutant.tensor].dtype != torch.bool else bits ^ 1).view(
                    state[mutant.tensor].dtype
                )
                layout.load((n, t.clone()) for n, t in other.items())
                for name, tensor in layout.live.items():
                    changed = raw(tensor) != wrote[name]
                    raw(tensor).copy_(torch.where(changed, without[name], wrote[name]))
            else:
                layout.load(stream)
            return
        tensor = raw(layout.live[mutant.tensor])
        before = tensor.clone()
        layout.load(stream)
        if not faulty:
            return
        if mutant.kind == "flip":
            bit = 1 << mutant.bit
            top = mutant.bit == 8 * tensor.element_size() - 1 and tensor.element_size() > 1
            tensor[mutant.where] ^= -bit if top else bit
        elif mutant.kind == "swap":
            a, b = mutant.where
            kept = tensor[a].clone()
            tensor[a] = tensor[b]
            tensor[b] = kept
        else:
            tensor.copy_(before)

    return load


def caught(layout: Layout, mutant: Mutant) -> ProbeError | CoverageError | None:
    """What connect says of a mutant. Tensors that even the good loader leaves gaps in count as buffers."""
    gaps = [n for n in layout.found.untouched if n != mutant.tensor]
    try:
        found = probe(
            spec=layout.spec,
            load_weights=spoiled(layout, mutant),
            tensors=lambda: NamedTensors(layout.live, buffers=gaps),
        )
    except (ProbeError, CoverageError) as error:
        return error
    # A tensor that is left out may leave nothing but pads; then the side as a whole lacks it.
    lacking = unused_tensors(layout.spec, [found])
    if mutant.kind == "omit" and mutant.tensor in lacking:
        return CoverageError(f"checkpoint tensor {mutant.tensor!r} lands nowhere", tensor=mutant.tensor)
    return None


def assert_named(layout: Layout, mutant: Mutant, error: ProbeError | CoverageError | None) -> None:
    assert error is not None, f"{mutant} was not caught"
    text, tensor = str(error), error.tensor  # type: ignore[attr-defined]
    if mutant.kind == "omit":
        position = layout.spec.index[mutant.tensor]
        rows = layout.found.copies.tensor == position
        holders = {layout.found.live[int(i)].name for i in layout.found.copies.live[rows]}
        assert tensor in holders | {mutant.tensor}, (mutant, text)
        return
    assert tensor == mutant.tensor, (mutant, text)
    assert f"{mutant.tensor!r}" in text
    if mutant.kind == "drop":
        return
    assert isinstance(error, ProbeError)
    index = tuple(error.index)  # type: ignore[attr-defined]
    assert f"element {list(index)}" in text
    if mutant.kind == "flip":
        assert index == mutant.where, (mutant, text)
    else:
        assert index[0] in mutant.where, (mutant, text)


def test_a_fault_in_every_load_that_looks_like_a_constant_to_some_is_named_where_it_is() -> None:
    """One flipped bit leads out of the codes of one load and within those of another."""
    spec, rank = mixed([torch.int16])
    live = dict(rank.live)
    found = probe(spec=spec, load_weights=rank.load, tensors=lambda: NamedTensors(live, buffers=live))
    layout = Layout(spec=spec, live=live, load=rank.load, found=found)
    for bit in range(16):
        mutant = Mutant(kind="flip", since=0, tensor="int16.matrix", where=(3, 4), bit=bit)
        assert_named(layout, mutant, caught(layout, mutant))


@pytest.mark.parametrize("part", range(5))
def test_every_one_of_200_random_mutants_is_caught_with_tensor_and_element_named(part: int) -> None:
    rng = random.Random(part)
    kinds: dict[str, int] = {}
    total = 0
    while total < NUM_LAYOUTS * MUTANTS_OF_EACH // 5:
        layout = random_layout(rng)
        for mutant in mutants(layout, rng):
            before = {n: raw(t).clone() for n, t in layout.live.items()}
            assert_named(layout, mutant, caught(layout, mutant))
            assert all(torch.equal(raw(layout.live[n]), t) for n, t in before.items()), "weights were not put back"
            kinds[mutant.kind] = kinds.get(mutant.kind, 0) + 1
            total += 1
    assert total >= 40
    assert all(kinds.get(kind, 0) >= 3 for kind in ("flip", "swap", "drop", "omit")), kinds
