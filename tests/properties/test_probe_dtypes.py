"""Every dtype a checkpoint has is followed, alone and among others, with the casts that a loader may make on the way."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tests.properties.layout_loaders import (
    BF16,
    CONSTANT,
    F32,
    UNTOUCHED,
    Ints,
    Load,
    Rank,
    Stream,
    check,
    find,
    num_copies,
    numbers,
    update,
    whole_state,
)

from weightbridge.checkpoint import CheckpointSpec, read_safetensors_spec
from weightbridge.errors import ProbeError
from weightbridge.probe import NamedTensors, num_loads, probe

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
SIGNED_INTS = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED_INTS = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float64, F32, BF16, torch.float16)
ALL = (*FLOATS, *FP8, *SIGNED_INTS, *UNSIGNED_INTS, torch.bool)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: torch has no kernels for some strided copies of narrow dtypes."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def refused(spec: CheckpointSpec, live: dict[str, torch.Tensor], load: Load, computed: str) -> None:
    """As trainers are probed: what is computed is refused, with tensor and element, and the weights are put back."""
    before = {name: raw(tensor).clone() for name, tensor in live.items()}
    with pytest.raises(ProbeError, match=f"live tensor {computed!r}") as caught:
        probe(spec=spec, load_weights=load, tensors=lambda: NamedTensors(live))
    assert caught.value.tensor == computed  # type: ignore[attr-defined]
    assert all(0 <= i < n for i, n in zip(caught.value.index, live[computed].shape, strict=True))  # type: ignore[attr-defined]
    assert all(torch.equal(raw(live[n]), t) for n, t in before.items())


def mixed(dtypes: Iterable[torch.dtype]) -> tuple[CheckpointSpec, Rank]:
    """A checkpoint with a matrix, a vector and a scalar of each dtype; live tensors hold columns, transposed, with a pad,
    the vectors backwards, and the scalars as they are."""
    shapes = {"matrix": (9, 14), "vector": (11,), "scalar": ()}
    spec = CheckpointSpec.from_iterable(
        (f"{str(d).removeprefix('torch.')}.{n}", shape, d) for d in dtypes for n, shape in shapes.items()
    )
    live: dict[str, torch.Tensor] = {}
    origin: dict[str, Ints] = {}
    for dtype in dtypes:
        prefix = f"{str(dtype).removeprefix('torch.')}."
        matrix = np.full((9, 9), CONSTANT, dtype=np.int64)
        matrix[:7] = numbers(spec, f"{prefix}matrix")[:, 3:10].T
        origin |= {
            f"{prefix}matrix": matrix,
            f"{prefix}vector": numbers(spec, f"{prefix}vector")[::-1].copy(),
            f"{prefix}scalar": numbers(spec, f"{prefix}scalar"),
        }
    for name, array in origin.items():
        live[name] = torch.zeros(array.shape, dtype=getattr(torch, name.split(".")[0]))

    def load(tensors: Stream) -> None:
        for name, tensor in tensors:
            to = raw(live[name])
            if name.endswith("matrix"):
                to[:7] = raw(tensor)[:, 3:10].t()
                to[7:] = raw(torch.ones(1).to(tensor.dtype)) if tensor.dtype.is_floating_point else 1
            else:
                to.copy_(raw(tensor).flip(0) if tensor.dim() else raw(tensor))

    return spec, Rank(live=live, load=load, origin=origin)


@pytest.mark.parametrize("dtype", ALL)
def test_a_dtype_alone(dtype: torch.dtype) -> None:
    spec, rank = mixed([dtype])
    maps = check(spec, [rank])
    assert [num_copies(maps[0], name) for name in rank.live] == [1, 1, 1]
    assert {c.bits for c in maps[0].constants} == {int(raw(torch.ones(1).to(dtype)))}


def test_all_dtypes_in_one_checkpoint() -> None:
    spec, rank = mixed(ALL)
    maps = check(spec, [rank])
    assert len(maps[0].copies) == 3 * len(ALL)
    assert len(maps[0].constants) == len(ALL)


def test_the_headers_of_files_name_every_dtype(tmp_path: Path) -> None:
    known = {}
    for dtype in ALL:
        try:
            save_file(
                {"w": raw(torch.zeros(3, 5)[:, :2].contiguous().to(dtype)).view(dtype)}, tmp_path / "one.safetensors"
            )
        except (KeyError, SafetensorError):
            assert dtype == torch.float8_e8m0fnu, "only this one is younger than some versions of safetensors"
            continue
        known[str(dtype)] = read_safetensors_spec(tmp_path / "one.safetensors").tensors[0]
    assert len(known) >= len(ALL) - 1
    for name, tensor in known.items():
        assert f"torch.{tensor.dtype.torch_name}" == name
        assert tensor.shape == (3, 2)
        assert tensor.dtype.itemsize == getattr(torch, tensor.dtype.torch_name).itemsize


def test_narrow_dtypes_do_not_ask_for_more_loads_than_they_need() -> None:
    """Each family is numbered on its own: a few million fp8 elements and bytes beside 30 billion of bf16."""
    wide = [("w", (30, 10**9), BF16), ("norm", (4096,), F32)]
    narrow = [("x", (10**3, 10**3), torch.float8_e4m3fn), ("s", (10**5,), torch.uint8), ("g", (10**5,), torch.int32)]
    live = {"BF16", "F32", "F8_E4M3", "U8", "I32"}
    assert num_loads(CheckpointSpec.from_iterable(wide), live) == 4
    assert num_loads(CheckpointSpec.from_iterable([*wide, *narrow]), live) == 4
    assert num_loads(CheckpointSpec.from_iterable([*wide, *narrow]), live) == num_loads(
        CheckpointSpec.from_iterable([*wide, *narrow]), sorted(live)
    )


@pytest.mark.parametrize("live", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_floats_cast_on_the_way_to_an_engine_and_on_the_way_back_from_a_trainer(
    source: torch.dtype, live: torch.dtype
) -> None:
    """A lossy cast is a copy rounded to nearest even; what the trainer holds in more or fewer bits is cast as torch does."""
    spec = CheckpointSpec.from_iterable([("w", (37, 11), source), ("b", (5,), source)])
    origin = {"w": numbers(spec, "w")[10:31], "b": numbers(spec, "b")}
    held = {n: torch.zeros(a.shape, dtype=live) for n, a in origin.items()}

    def load(tensors: Stream) -> None:
        for name, tensor in tensors:
            held[name].copy_(tensor[10:31] if name == "w" else tensor)

    maps = check(spec, [Rank(live=held, load=load, origin=origin)])
    assert [num_copies(maps[0], n) for n in held] == [1, 1]
    # The other way: trained in `live`, sent as `source`, held by the engine as the checkpoint says. fp16 cannot hold what
    # fp64 can, so values go through both before they are compared.
    trained = {t.name: torch.zeros(t.shape, dtype=live) for t in spec.tensors}
    engine = {t.name: torch.zeros(t.shape, dtype=source) for t in spec.tensors}
    whole = {t.name: numbers(spec, t.name) for t in spec.tensors}

    def train(tensors: Stream) -> None:
        for name, tensor in tensors:
            trained[name].copy_(tensor)

    def serve(tensors: Stream) -> None:
        for name, tensor in tensors:
            engine[name].copy_(tensor)

    def serve_rounded(tensors: Stream) -> None:
        serve((name, tensor.to(live).to(source)) for name, tensor in tensors)

    serving, training = (Rank(live=t, load=f, origin=whole) for t, f in ((engine, serve), (trained, train)))
    found = find(spec, serving)
    trainer_map = find(spec, training)
    update(spec, [Rank(live=engine, load=serve_rounded, origin=whole)], [found], [training], [trainer_map])


def test_four_bit_values_packed_in_bytes_and_words_are_followed_as_what_holds_them() -> None:
    """Gate and up projections of a packed checkpoint, stacked; words of eight values with all bits in use, interleaved."""
    spec = CheckpointSpec.from_iterable(
        [
            ("gate", (24, 40), torch.uint8),
            ("up", (24, 40), torch.uint8),
            ("gate_scale", (24, 5), torch.float8_e4m3fn),
            ("words", (12, 30), torch.int32),
            ("norm", (40,), BF16),
        ]
    )
    live = {
        "gate_up": torch.zeros(48, 40, dtype=torch.uint8),
        "scale": torch.zeros(24, 8, dtype=torch.float8_e4m3fn),
        "words": torch.zeros(12, 30, dtype=torch.int32),
        "norm": torch.zeros(40, dtype=F32),
    }
    scale = np.full((24, 8), UNTOUCHED, dtype=np.int64)
    scale[:, :5] = numbers(spec, "gate_scale")
    columns = [c for k in range(3) for c in range(k, 30, 3)]
    origin = {
        "gate_up": np.concatenate([numbers(spec, "gate"), numbers(spec, "up")]),
        "scale": scale,
        "words": numbers(spec, "words")[:, columns],
        "norm": numbers(spec, "norm"),
    }

    def write(state: dict[str, torch.Tensor]) -> None:
        live["gate_up"].copy_(torch.cat([state["gate"], state["up"]]))
        raw(live["scale"])[:, :5] = raw(state["gate_scale"])
        live["words"].copy_(state["words"][:, columns])
        live["norm"].copy_(state["norm"])

    rank = Rank(live=live, load=whole_state(write), origin=origin, buffers=frozenset({"scale"}))
    maps = check(spec, [rank])
    assert [num_copies(maps[0], n) for n in live] == [2, 1, 1, 1]


def test_bools_keep_their_slices_and_are_told_from_what_looks_like_them() -> None:
    spec = CheckpointSpec.from_iterable(
        [("mask", (6, 10), torch.bool), ("w", (5, 3), BF16), ("flags", (4,), torch.bool), ("one", (), torch.bool)]
    )
    live = {
        "mask": torch.zeros(10, 9, dtype=torch.bool),
        "w": torch.zeros(5, 3, dtype=BF16),
        "flags": torch.zeros(4, dtype=torch.bool),
        "one": torch.zeros((), dtype=torch.bool),
        "never": torch.ones(3, dtype=torch.bool),
        "set": torch.zeros(7, dtype=torch.bool),
    }
    mask = np.full((10, 9), CONSTANT, dtype=np.int64)
    mask[:, :6] = numbers(spec, "mask").T
    origin = {
        "mask": mask,
        "w": numbers(spec, "w"),
        "flags": numbers(spec, "flags")[[2, 3, 0, 1]],
        "one": numbers(spec, "one"),
        "never": np.full(3, UNTOUCHED),
        "set": np.full(7, CONSTANT),
    }

    def write(state: dict[str, torch.Tensor]) -> None:
        live["mask"][:, :6] = state["mask"].t()
        live["mask"][:, 6:] = False
        live["w"].copy_(state["w"])
        live["flags"].copy_(state["flags"][[2, 3, 0, 1]])
        live["one"].copy_(state["one"])
        live["set"].fill_(True)

    rank = Rank(live=live, load=whole_state(write), origin=origin, buffers=frozenset({"never", "set"}))
    maps = check(spec, [rank])
    assert [num_copies(maps[0], n) for n in live] == [1, 1, 1, 1, 0, 0]
    assert sorted((maps[0].live[c.live].name, c.bits) for c in maps[0].constants) == [("mask", 0), ("set", 1)]
    assert live["never"].tolist() == [True] * 3


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.int32, torch.int64),
        (torch.int64, torch.int32),
        (torch.int8, torch.uint8),
        (torch.uint8, torch.int8),
        (torch.int16, torch.uint16),
        (torch.float8_e4m3fn, BF16),
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (BF16, torch.float8_e4m3fn),
        (torch.int32, F32),
        (BF16, torch.int32),
        (torch.bool, torch.uint8),
        (torch.uint8, torch.bool),
        (torch.bool, F32),
    ],
)
@pytest.mark.parametrize("crowd", [False, True])
def test_other_casts_are_computed_whether_or_not_the_values_survive(
    source: torch.dtype, target: torch.dtype, crowd: bool
) -> None:
    """No kernel makes them, so they are never found to be copies. crowd: tensors of the live dtype exist as well, so that
    their codes are about."""
    tensors = [("w", (13, 7), source), *([("other", (200, 5), target)] if crowd else [])]
    spec = CheckpointSpec.from_iterable(tensors)
    live = {name: torch.zeros(shape, dtype=target) for name, shape, _ in tensors}

    def load(stream: Stream) -> None:
        for name, tensor in stream:
            live[name].copy_(tensor)

    refused(spec, live, load, "w")


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, b: ~a,
        lambda a, b: a & b,
        lambda a, b: a | b,
        lambda a, b: a ^ b,
        lambda a, b: a & a.flip(0),
        lambda a, b: a.any().expand_as(a),
        lambda a, b: a.cummax(0).values if a.dtype != torch.bool else a.cumsum(0).bool(),
    ],
)
def test_computed_bools_are_refused(compute) -> None:  # type: ignore[no-untyped-def]
    spec = CheckpointSpec.from_iterable([("a", (3,), torch.bool), ("b", (3,), torch.bool)])
    live = {"made": torch.zeros(3, dtype=torch.bool)}
    refused(spec, live, whole_state(lambda s: live["made"].copy_(compute(s["a"], s["b"]))), "made")


def test_a_mask_of_what_is_not_zero_is_no_constant() -> None:
    spec = CheckpointSpec.from_iterable([("w", (13, 7), BF16)])
    live = {"w": torch.zeros(13, 7, dtype=BF16), "pruned": torch.zeros(13, 7, dtype=torch.bool)}

    def write(state: dict[str, torch.Tensor]) -> None:
        live["w"].copy_(state["w"])
        live["pruned"].copy_(state["w"] != 0)

    refused(spec, live, whole_state(write), "pruned")


@pytest.mark.parametrize("dtype", [*FP8[:4], torch.int8, torch.uint8, torch.int32, torch.int64])
def test_computed_narrow_dtypes_and_integers_are_refused(dtype: torch.dtype) -> None:
    """One bit of every value flipped, the upper bits lost (with words also those that no code uses), all bits moved up."""
    spec = CheckpointSpec.from_iterable([("w", (50, 30), dtype)])
    for change in (
        lambda x: x ^ 1,
        lambda x: x & 15,
        lambda x: x << 1,
        lambda x: x & (0x7FFF if dtype.itemsize > 1 else 0x7F),
    ):
        live = {"w": torch.zeros(50, 30, dtype=dtype)}

        def load(tensors: Stream, live: dict[str, torch.Tensor] = live, change=change) -> None:  # type: ignore[no-untyped-def]
            for name, tensor in tensors:
                raw(live[name]).copy_(change(raw(tensor)))

        refused(spec, live, load, "w")
