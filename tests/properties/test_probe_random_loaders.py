"""Random loaders: whatever slices, transposes, strides, concatenations, pads and replicas they are made of, the map that
the probe finds, applied to a random checkpoint, gives what the loader itself gives, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import ProbeError
from weightbridge.layout import SourceMap, decode_source_map, encode_source_map, expand
from weightbridge.probe import NamedTensors, predict, probe
from weightbridge.probe import fields as fields_module
from weightbridge.probe import observe as observe_module
from weightbridge.probe import reconstruct as reconstruct_module

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Job:
    """A checkpoint, live tensors, and the writes of a loader: (live name, index of the live view, source, view of it)."""

    spec: CheckpointSpec
    live: dict[str, torch.Tensor]
    writes: list[Callable[[dict[str, torch.Tensor]], None]] = field(default_factory=list)

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        state = dict(tensors)
        for write in self.writes:
            write(state)


def random_checkpoint(spec: CheckpointSpec, rng: random.Random) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return {
        t.name: torch.randn(t.shape, generator=generator).to(getattr(torch, t.dtype.torch_name)) for t in spec.tensors
    }


def random_view(shape: tuple[int, ...], rng: random.Random) -> Callable[[torch.Tensor], torch.Tensor]:
    """A view of at most two dims: slices with steps, flips, permuted dims, merged dims, replicas."""
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    for dim, extent in enumerate(shape):
        if extent > 1 and rng.random() < 0.5:
            start = rng.randrange(extent)
            stop, step = rng.randint(start + 1, extent), rng.choice([1, 1, 2, 3])
            index = torch.arange(start, stop, step)
            if rng.random() < 0.15:
                index = index.flip(0)
            steps.append(lambda t, d=dim, i=index: t.index_select(d, i))
    if len(shape) > 1 and rng.random() < 0.4:
        order = list(range(len(shape)))
        rng.shuffle(order)
        steps.append(lambda t, o=order: t.permute(o))
    if rng.random() < 0.2:
        steps.append(lambda t: t.reshape(-1))
    if rng.random() < 0.15:
        steps.append(lambda t: t.reshape(1, -1).repeat(3, 1))
    steps.append(lambda t: t.reshape(t.shape[0] if t.dim() > 1 else 1, -1))

    def view(tensor: torch.Tensor) -> torch.Tensor:
        for step in steps:
            tensor = step(tensor)
        return tensor

    return view


def random_memory(rows: int, cols: int, dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """A [rows, cols] tensor: contiguous, transposed, with gaps between rows, or somewhere inside a larger storage."""
    kind = rng.randrange(4)
    if kind == 1:
        return torch.empty(cols, rows, dtype=dtype).t()
    if kind == 2:
        return torch.empty(rows, cols + 3, dtype=dtype)[:, 1 : cols + 1]
    if kind == 3:
        return torch.empty(rows * cols + 5, dtype=dtype)[5:].view(rows, cols)
    return torch.empty(rows, cols, dtype=dtype)


def random_job(rng: random.Random) -> Job:
    def shape() -> tuple[int, ...]:
        return tuple(rng.choice([1, 2, 3, 4, 5, 7, 8, 12, 17]) for _ in range(rng.randrange(4)))

    spec = CheckpointSpec.from_iterable((f"w{i}", shape(), rng.choice(DTYPES)) for i in range(rng.randint(1, 6)))
    job = Job(spec, {})
    for n in range(rng.randint(1, 4)):
        add_live_tensor(job, f"live{n}", rng)
    return job


def add_live_tensor(job: Job, name: str, rng: random.Random) -> None:
    """A live tensor of stacked blocks, one below or beside the other, with pads and perhaps an unwritten row."""
    blocks = []
    for _ in range(rng.randint(1, 4)):
        source = rng.choice(job.spec.tensors)
        view = random_view(source.shape, rng)
        sample = view(torch.zeros(source.shape))
        blocks.append((source.name, view, tuple(sample.shape)))
    beside = rng.random() < 0.4
    pad, gap = rng.randrange(3), rng.randrange(2)
    if beside:
        rows, cols = max(s[0] for *_, s in blocks), sum(s[1] for *_, s in blocks) + pad
    else:
        rows, cols = sum(s[0] for *_, s in blocks) + gap, max(s[1] for *_, s in blocks) + pad
    # fp16 cannot hold every bf16 value, but it can hold those of ordinary size.
    live = random_memory(rows, cols, rng.choice(DTYPES), rng)
    job.live[name] = live
    fill = rng.choice([0.0, 1.0, float("-inf"), 1e-3])
    at = 0
    for source_name, view, (h, w) in blocks:
        window = live[:h, at : at + w] if beside else live[at : at + h, :w]
        rest = live[h:, at : at + w] if beside else live[at : at + h, w:]

        def write(state: dict[str, torch.Tensor], n: str = source_name, v=view, to=window, pads=rest) -> None:  # type: ignore[no-untyped-def]
            to.copy_(v(state[n]))
            pads.fill_(fill)

        job.writes.append(write)
        at += w if beside else h
    if beside:
        job.writes.append(lambda state: live[:, at:].fill_(fill))  # type: ignore[arg-type,return-value]


def bits_of(tensor: torch.Tensor, span: int) -> np.ndarray:
    """Raw bits of the storage from the tensor's first element on."""
    raw = tensor.view(SIGNED[tensor.element_size()])
    flat = torch.as_strided(raw, (span,), (1,), raw.storage_offset())
    return flat.numpy().view(f"<u{tensor.element_size()}")


def element_offsets(tensor: torch.Tensor) -> np.ndarray:
    """Storage offsets of all elements, sorted, from the tensor's first one."""
    offsets = np.zeros((), dtype=np.int64)
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = np.add.outer(offsets, np.arange(extent) * stride)
    return np.sort(offsets.reshape(-1))


def assert_map_reproduces_loader(job: Job, source_map: SourceMap, rng: random.Random) -> None:
    state = random_checkpoint(job.spec, rng)
    for live in job.live.values():
        live.fill_(7.0)
    job.load((n, t.clone()) for n, t in state.items())
    values = {
        i: state[t.name].view(SIGNED[state[t.name].element_size()]).numpy().reshape(-1).view(t.dtype.bits)
        for i, t in enumerate(job.spec.tensors)
    }
    for position, described in enumerate(source_map.live):
        tensor = job.live[described.name]
        if not tensor.numel():
            continue
        expected, times = predict(job.spec, source_map, position, lambda i, lo, hi: values[i][lo:hi])
        elements = element_offsets(tensor)
        assert times.max(initial=0) <= 1
        assert times.sum() + source_map.untouched.get(described.name, 0) == tensor.numel()
        written = elements[times[elements] == 1]
        assert len(written) == times.sum(), "the map accounts for elements in the gaps of the tensor"
        found = bits_of(tensor, described.span_numel)
        np.testing.assert_array_equal(found[written], expected[written])


def run_probe(job: Job, **kwargs: object) -> SourceMap:
    return probe(
        spec=job.spec, load_weights=job.load, tensors=lambda: NamedTensors(job.live, buffers=job.live), **kwargs
    )  # type: ignore[arg-type]


@pytest.fixture(params=["as shipped", "tiny tiles"], autouse=True, scope="module")
def tile_sizes(request: pytest.FixtureRequest) -> Iterable[None]:
    """Tiny tiles make small tensors cross tile, chunk and flat-row borders."""
    patch = pytest.MonkeyPatch()
    if request.param == "tiny tiles":
        patch.setattr(observe_module, "TILE_NUMEL", 40)
        patch.setattr(reconstruct_module, "_CHUNK_NUMEL", 16)
        patch.setattr(fields_module, "_FLAT_COLS", 32)
        patch.setattr(fields_module, "_MIN_COLS", 4)
        patch.setattr(fields_module, "_MAX_COLS", 64)
    yield
    patch.undo()


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_the_map_of_a_random_loader_reproduces_it(seed: int) -> None:
    rng = random.Random(seed)
    job = random_job(rng)
    before = {n: bits_of(t, int(element_offsets(t)[-1]) + 1).copy() for n, t in job.live.items() if t.numel()}
    source_map = run_probe(job)
    for name, kept in before.items():
        tensor = job.live[name]
        at = element_offsets(tensor)
        np.testing.assert_array_equal(bits_of(tensor, len(kept))[at], kept[at])  # restored
    assert_map_reproduces_loader(job, source_map, rng)
    again = decode_source_map(encode_source_map(source_map), spec=job.spec)
    assert again.fingerprint == source_map.fingerprint
    # As strided boxes the map stands for the same elements.
    assert int(expand(source_map, job.spec).count.prod(axis=1).sum()) == int(source_map.copies.numel.sum())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 40))
def test_probing_twice_gives_the_same_map(seed: int) -> None:
    job = random_job(random.Random(seed))
    assert run_probe(job).fingerprint == run_probe(job).fingerprint


def _flip(job: Job, rng: random.Random) -> None:
    live = job.live[rng.choice(sorted(job.live))]
    raw = live.view(SIGNED[live.element_size()])
    at = tuple(rng.randrange(n) for n in raw.shape)
    raw[at] ^= 1


def _swap_rows(job: Job, rng: random.Random) -> None:
    live = job.live[rng.choice(sorted(job.live))]
    a, b = rng.sample(range(live.shape[0]), 2)
    kept = live[a].clone()
    live[a] = live[b]
    live[b] = kept


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 40), fault=st.sampled_from(["flip", "swap", "drop"]), late=st.booleans())
def test_a_faulty_loader_is_caught_and_its_tensor_named(seed: int, fault: str, late: bool) -> None:
    """late: the fault is in the verification load only; else in every load but the first."""
    rng = random.Random(seed)
    spec = CheckpointSpec.from_iterable([("w", (9, 13), torch.bfloat16), ("u", (5, 13), torch.float32)])
    job = Job(spec, {"a": torch.zeros(14, 13, dtype=torch.bfloat16), "b": torch.zeros(13, 9)})
    job.writes = [
        lambda s: job.live["a"][:9].copy_(s["w"]),  # type: ignore[list-item,return-value]
        lambda s: job.live["a"][9:].copy_(s["u"]),  # type: ignore[list-item,return-value]
        lambda s: job.live["b"].copy_(s["w"].t()),  # type: ignore[list-item,return-value]
    ]
    calls = 0
    before = {n: t.clone() for n, t in job.live.items()}

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal calls
        calls += 1
        faulty = calls == 3 if late else calls > 1
        state = dict(tensors)
        dropped = rng.randrange(len(job.writes)) if faulty and fault == "drop" else None
        for i, write in enumerate(job.writes):
            if i != dropped:
                write(state)
        if faulty and fault == "flip":
            _flip(job, rng)
        if faulty and fault == "swap":
            _swap_rows(job, rng)

    with pytest.raises(ProbeError) as caught:
        probe(spec=spec, load_weights=load, tensors=lambda: job.live)
    assert caught.value.tensor in job.live  # type: ignore[attr-defined]
    assert caught.value.tensor in str(caught.value)  # type: ignore[attr-defined]
    assert calls == 3
    assert all(torch.equal(job.live[n], t) for n, t in before.items())
