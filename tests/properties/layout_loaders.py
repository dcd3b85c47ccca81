"""One side of a job as the loaders of its ranks, with the layout they are known to make, and the checks both must pass.

A `Rank` states its layout twice: `load` moves tensors about as an engine or a trainer does, `origin` says by index formula
which checkpoint element each live element must hold. `check` probes the loader, compares the map element for element with
the formula, and then sends random weights through a real plan and real programs: every byte must be what the loader itself
would have written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import ProbeError
from weightbridge.layout import CopyTable, SourceMap, expand, unused_tensors
from weightbridge.plan import Plan, PlanOptions, make_plan
from weightbridge.plan.topology import Role, Topology, Worker
from weightbridge.probe import NamedTensors, ProbeOptions, live_tensors, probe
from weightbridge.probe.carried import carried_tensors, staging_tensors
from weightbridge.program import lower, verify_program, verify_programs
from weightbridge.testing.memory_driver import MemoryDriver

BF16, F32 = torch.bfloat16, torch.float32
CONSTANT, UNTOUCHED = -1, -2
"""In `Rank.origin`: an element that the loader sets to a fixed value, and one that it never writes."""

Ints = npt.NDArray[np.int64]
Stream = Iterable[tuple[str, torch.Tensor]]
Load = Callable[[Stream], object]
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One worker: its live tensors, its loader, and what each live element must hold, as an array of the live shape of
    element numbers of the checkpoint (`numbers`), CONSTANT or UNTOUCHED. buffers: live names that are no parameters."""

    live: Mapping[str, torch.Tensor]
    load: Load
    origin: Mapping[str, Ints]
    buffers: frozenset[str] = frozenset()

    def tensors(self) -> NamedTensors:
        return NamedTensors(self.live, buffers=self.buffers)


def spec_of(dtype: torch.dtype = BF16, /, **shapes: tuple[int, ...]) -> CheckpointSpec:
    return CheckpointSpec.from_iterable((name, shape, dtype) for name, shape in shapes.items())


def live_like(origin: Mapping[str, Ints], dtype: torch.dtype = BF16) -> dict[str, torch.Tensor]:
    """Live tensors with the shapes of an origin, full of something that is not a weight."""
    return {name: torch.full(array.shape, 7, dtype=dtype) for name, array in origin.items()}


def numbers(spec: CheckpointSpec, name: str) -> Ints:
    """The number of every element of a checkpoint tensor, in its shape."""
    at = spec.index[name]
    lo, hi = (int(n) for n in spec.numel_offsets[at : at + 2])
    return np.arange(lo, hi, dtype=np.int64).reshape(spec.tensors[at].shape)


def rows(numbered: Ints, chosen: Iterable[int]) -> Ints:
    return numbered[list(chosen)]


def whole_state(write: Callable[[dict[str, torch.Tensor]], object]) -> Load:
    """A loader that wants the whole checkpoint as a dict."""
    return lambda stream: write(dict(stream))


# --- what a map says --------------------------------------------------------------------------------------------------


def origins(found: SourceMap, spec: CheckpointSpec) -> dict[str, Ints]:
    """Live name -> the element number each live element holds, read off the boxes the planner works with."""
    boxes = expand(found, spec)
    flat = [np.full(t.span_numel, UNTOUCHED, dtype=np.int64) for t in found.live]
    for i in range(len(boxes)):
        tensor = int(boxes.tensor[i])
        shape = spec.tensors[tensor].shape
        number, live = np.array(int(spec.numel_offsets[tensor])), np.array(int(boxes.live_start[i]))
        for d in range(len(shape)):
            index = np.arange(int(boxes.count[i, d]))
            pitch = int(np.prod(shape[d + 1 :], dtype=np.int64))
            number = np.add.outer(number, (int(boxes.start[i, d]) + index * int(boxes.step[i, d])) * pitch)
            live = np.add.outer(live, index * int(boxes.live_stride[i, d]))
        target = flat[int(boxes.live[i])]
        assert (target[live] == UNTOUCHED).all(), "an element has two sources"
        target[live] = number
    for constant in found.constants:
        at = np.array(constant.live_start)
        for n, s in constant.axes:
            at = np.add.outer(at, np.arange(n) * s)
        assert (flat[constant.live][at] == UNTOUCHED).all(), "an element is a copy and a constant"
        flat[constant.live][at] = CONSTANT
    shaped = {
        t.name: np.lib.stride_tricks.as_strided(a, t.shape, [8 * s for s in t.strides])
        if t.numel
        else a.reshape(t.shape)
        for t, a in zip(found.live, flat, strict=True)
    }
    left = {name: int(np.count_nonzero(a == UNTOUCHED)) for name, a in shaped.items()}
    for name in {found.live[i].name for group in found.loader_groups for i in group.live}:
        assert left.pop(name) == shaped.pop(name).size, "a computed tensor is in no other class"
    assert {n: k for n, k in left.items() if k} == dict(found.untouched)
    return shaped


def find(spec: CheckpointSpec, rank: Rank, **options: Any) -> SourceMap:
    """Probe one rank and compare its map, element for element, with the formula."""
    found = probe(spec=spec, load_weights=rank.load, tensors=rank.tensors, options=ProbeOptions(**options))
    seen = origins(found, spec)
    assert list(seen) == list(rank.origin)
    for name, expected in rank.origin.items():
        np.testing.assert_array_equal(seen[name], expected, err_msg=name)
    return found


def num_copies(found: SourceMap, live: str) -> int:
    return int(np.count_nonzero(found.copies.live == [t.name for t in found.live].index(live)))


# --- an update through it ---------------------------------------------------------------------------------------------


def checkpoint(spec: CheckpointSpec, seed: int) -> dict[str, torch.Tensor]:
    """Random values of every dtype; what the spec calls constant is that."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for t in spec.tensors:
        dtype = getattr(torch, t.dtype.torch_name)
        if t.name in spec.constants:
            state[t.name] = torch.full(t.shape, spec.constants[t.name]).to(dtype)
        elif t.dtype.is_float:
            state[t.name] = torch.randn(t.shape, generator=generator).to(dtype)
        else:
            high = 2 if t.dtype.name == "BOOL" else 128
            state[t.name] = torch.randint(0, high, t.shape, generator=generator).to(dtype)
    return state


def stream(state: Mapping[str, torch.Tensor]) -> Stream:
    """As a caller hands it out: private copies, one at a time."""
    return ((name, tensor.clone()) for name, tensor in state.items())


def memory(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A copy of the bytes from a tensor's first to its last element, gaps included."""
    if not tensor.numel():
        return np.zeros(0, dtype=np.uint8)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    bits = tensor.detach().view(_SIGNED[tensor.element_size()])
    flat = torch.as_strided(bits, (span,), (1,), bits.storage_offset())
    return flat.numpy().copy().view(np.uint8)


def set_memory(tensor: torch.Tensor, held: npt.NDArray[np.uint8]) -> None:
    """Write back what `memory` gave."""
    if tensor.numel():
        bits = tensor.detach().view(_SIGNED[tensor.element_size()])
        flat = torch.as_strided(bits, (len(held) // tensor.element_size(),), (1,), bits.storage_offset())
        flat.numpy().view(np.uint8)[:] = held


def own_bytes(tensor: torch.Tensor, kept: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Of what `memory` gave for this tensor: its elements alone, without gaps."""
    item = tensor.element_size()
    strides = [s * item for s in tensor.stride()]
    found: npt.NDArray[np.uint8] = np.lib.stride_tricks.as_strided(kept, (*tensor.shape, item), (*strides, 1)).copy()
    return found


def halves(spec: CheckpointSpec) -> list[Rank]:
    """Two trainers that hold the checkpoint as flat shards cut unevenly, mostly mid-row."""
    cuts = {t.name: (0, t.numel // 3 + t.numel % 2, t.numel) for t in spec.tensors}

    def trainer(r: int) -> Rank:
        origin = {n: numbers(spec, n).reshape(-1)[c[r] : c[r + 1]] for n, c in cuts.items()}
        live = {
            t.name: torch.zeros(origin[t.name].shape, dtype=getattr(torch, t.dtype.torch_name)) for t in spec.tensors
        }

        def load(tensors: Stream) -> None:
            for name, tensor in tensors:
                live[name].copy_(tensor.reshape(-1)[cuts[name][r] : cuts[name][r + 1]])

        return Rank(live=live, load=load, origin=origin)

    return [trainer(0), trainer(1)]


def plain_map(spec: CheckpointSpec, rank: Rank) -> SourceMap:
    """The map of one of `halves`, written down rather than probed: it is not what is under test."""
    live = live_tensors(rank.live)
    copies = [
        (i, i, int(rank.origin[t.name][0] - spec.numel_offsets[i]), 0, ((t.numel, 1, 1),))
        for i, t in enumerate(live)
        if t.numel and t.name not in spec.constants
    ]
    return SourceMap(spec_digest=spec.digest, live=live, copies=CopyTable.from_rows(copies))  # type: ignore[arg-type]


def update(
    spec: CheckpointSpec,
    ranks: Sequence[Rank],
    maps: Sequence[SourceMap],
    trainers: Sequence[Rank] = (),
    trainer_maps: Sequence[SourceMap] = (),
    *,
    slot_bytes: int = 1 << 20,
    reload: Callable[[], object] | None = None,
) -> Plan:
    """Two versions from trainers to the ranks, through plan, programs and machines; bytes as the loaders would leave them.

    reload: what a rank does with its carried tensors once the bytes are in its live tensors.
    """
    if not trainers:
        trainers = halves(spec)
        trainer_maps = [plain_map(spec, t) for t in trainers]
    workers = [
        *(Worker(name=f"trainer/{i}", role=Role.TRAINER, node="t", rank=i) for i in range(len(trainers))),
        *(Worker(name=f"e/{i}", role=Role.ROLLOUT, node="e", rank=i, engine="e") for i in range(len(ranks))),
    ]
    all_maps = [*trainer_maps, *maps]
    plan = make_plan(
        spec,
        Topology(workers=tuple(workers)),
        all_maps,
        options=PlanOptions(slot_bytes=slot_bytes, alignment=64, min_rounds=2),
    )
    programs = [lower(plan, spec, m, w) for w, m in enumerate(all_maps)]
    for program, source_map in zip(programs, all_maps, strict=True):
        verify_program(program, plan, spec, source_map)
    verify_programs(programs, plan)
    for rank in ranks:
        rank.load(stream(checkpoint(spec, 1)))
    sides = [*trainers, *ranks]
    bytes_of = {w: [memory(t) for t in rank.live.values()] for w, rank in enumerate(sides)}
    driver = MemoryDriver(programs, bytes_of)
    for version in (2, 3):
        state = checkpoint(spec, version)
        for w, trainer in enumerate(trainers):
            trainer.load(stream(state))
            for held, tensor in zip(bytes_of[w], trainer.live.values(), strict=True):
                held[:] = memory(tensor)
        before = {w: [a.copy() for a in bytes_of[w]] for w in range(len(trainers))}
        outcome = driver.run(seed=version, version=version)
        assert outcome.finished == frozenset(range(len(sides)))
        for w, held in before.items():
            assert all((a == b).all() for a, b in zip(held, bytes_of[w], strict=True)), "a trainer's weights changed"
        for w, rank in enumerate(ranks, start=len(trainers)):
            if reload is not None:
                for tensor, held in zip(rank.live.values(), bytes_of[w], strict=True):
                    set_memory(tensor, held)
                reload()
                bytes_of[w][:] = [memory(t) for t in rank.live.values()]
            rank.load(stream(state))
            for (name, tensor), held in zip(rank.live.items(), bytes_of[w], strict=True):
                # (a carried tensor is none of the loader's: it is compared with itself)
                expected = own_bytes(tensor, memory(tensor))
                np.testing.assert_array_equal(own_bytes(tensor, held), expected, err_msg=f"rank {w}: {name}")
    return plan


def check(
    spec: CheckpointSpec,
    ranks: Sequence[Rank],
    *,
    trainers: Sequence[Rank] = (),
    unused: Sequence[str] = (),
    expected_untouched: Iterable[str] = (),
) -> list[SourceMap]:
    """The maps of all ranks equal their formulas, every checkpoint tensor lands somewhere but `unused`, updates arrive."""
    maps = [find(spec, rank, expected_untouched=frozenset(expected_untouched)) for rank in ranks]
    assert unused_tensors(spec, maps) == tuple(unused)
    trainer_maps = [find(spec, rank) for rank in trainers]
    if trainers:
        assert unused_tensors(spec, trainer_maps) == ()
    update(spec, ranks, maps, trainers, trainer_maps)
    return maps


def install(
    spec: CheckpointSpec, found: SourceMap, live: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> None:
    """What an update does to one rank, element by element: copied elements get the new values, all others stay."""
    for name, seen in origins(found, spec).items():
        for t, first in zip(spec.tensors, spec.numel_offsets.tolist(), strict=False):
            taken = (seen >= first) & (seen < first + t.numel)
            if taken.any():
                values = state[t.name].reshape(-1)[torch.from_numpy(seen[taken] - first)]
                with torch.no_grad():
                    live[name][torch.from_numpy(taken.copy())] = values.to(live[name].dtype)


# --- loaders that compute ---------------------------------------------------------------------------------------------


def check_computed(
    spec: CheckpointSpec,
    live: Mapping[str, torch.Tensor],
    load: Load,
    computed: Sequence[str],
    needed: Sequence[str],
) -> None:
    """The one place that says what becomes of computed live tensors. A side that sends weights is refused by name. A side that
    takes them in gets the checkpoint tensors `needed` whole and loads them itself, and ends bit for bit as after a load."""

    def tensors() -> NamedTensors:
        return NamedTensors(live)

    def zeroing(given: Stream) -> None:
        """The loader, which spoils what it is given when it is done with it."""
        kept = list(given)
        load(iter(kept))
        for _, tensor in kept:
            tensor.view(-1).view(torch.uint8).zero_()

    before = {name: memory(tensor) for name, tensor in live.items()}
    with pytest.raises(ProbeError, match=re.escape(f"live tensor {computed[0]!r}, element [")):
        probe(spec=spec, load_weights=load, tensors=tensors)
    found = probe(spec=spec, load_weights=load, tensors=tensors, allow_loader_path=True)
    again = probe(spec=spec, load_weights=zeroing, tensors=tensors, allow_loader_path=True)
    assert again.fingerprint == found.fingerprint
    assert all((memory(live[n]) == kept).all() for n, kept in before.items()), "weights were not put back"
    (group,) = found.loader_groups
    assert [found.live[i].name for i in group.live] == list(computed)
    assert [spec.tensors[i].name for i in group.tensors] == list(needed)

    staging = staging_tensors(found)
    rank = Rank(live={**live, **staging}, load=zeroing, origin={})
    trainers = halves(spec)

    def reload() -> None:
        for _ in range(2):  # from the same memory, which the loader does not get to see
            zeroing(carried_tensors(spec, group, staging))

    update(spec, [rank], [found], trainers, [plain_map(spec, t) for t in trainers], reload=reload)
