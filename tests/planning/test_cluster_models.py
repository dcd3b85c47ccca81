"""Layouts and values of the benchmarks' workers, and who gives what, against whole tensors cut by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from benchmarks.cluster.model import Rectangle, WorkerModel, rectangles, shared_rectangle
from benchmarks.cluster.scenarios import Case, CaseKey, build, cases_of
from benchmarks.cluster.shards import (
    Copies,
    batches,
    given_rectangles,
    matrix,
    segments_between,
    tensor_buckets,
)

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.layout import Constant, CopyTable, LiveTensor, SourceMap

AnyArray = npt.NDArray[Any]
SPEC = CheckpointSpec.from_iterable(
    [("a", (5, 7), "bfloat16"), ("bias", (3,), "float32"), ("b", (300, 11), "bfloat16"), ("s", (13,), "bfloat16")]
)


def _map() -> SourceMap:
    """Live "x": columns 2 to 5 of rows 1 to 4 of a, then 4 of padding; "y": bias and the last 2 rows of b, transposed never."""
    live = (
        LiveTensor(name="x", shape=(13,), strides=(1,), dtype=SPEC.tensors[0].dtype),
        LiveTensor(name="bias", shape=(3,), strides=(1,), dtype=SPEC.tensors[1].dtype),
        LiveTensor(name="y", shape=(2, 11), strides=(11, 1), dtype=SPEC.tensors[2].dtype),
    )
    copies = CopyTable.from_rows(
        [
            (0, 0, 9, 0, ((3, 7, 3), (3, 1, 1))),
            (1, 1, 0, 0, ((3, 1, 1), (1, 0, 0))),
            (2, 2, 298 * 11, 0, ((2, 11, 11), (11, 1, 1))),
        ]
    )
    return SourceMap(
        spec_digest=SPEC.digest, live=live, copies=copies,
        constants=(Constant(live=0, live_start=9, axes=((4, 1),), bits=0),),
    )  # fmt: skip


def whole_bits(spec: CheckpointSpec, version: int) -> dict[str, AnyArray]:
    """The documented formula, element by element."""
    found = {}
    for t, low in zip(spec.tensors, spec.numel_offsets.tolist(), strict=False):
        bits = (np.arange(low, low + t.numel, dtype=np.int64) % 65521 * 40503 + 977 + version * 7919) % 65536
        bits = bits if t.dtype.itemsize == 2 else bits * 65537
        found[t.name] = bits.astype(f"u{t.dtype.itemsize}").reshape(t.shape)
    return found


def as_tensors(spec: CheckpointSpec, bits: dict[str, AnyArray]) -> list[tuple[str, torch.Tensor]]:
    found = []
    for t in spec.tensors:
        raw = torch.from_numpy(bits[t.name].view(f"i{t.dtype.itemsize}").copy())
        found.append((t.name, raw.view(getattr(torch, t.dtype.torch_name))))
    return found


def live_bits(model: WorkerModel, name: str) -> AnyArray:
    tensor = model.tensors()[name]
    kind = torch.int16 if tensor.element_size() == 2 else torch.int32
    return tensor.view(kind).numpy().view(f"u{tensor.element_size()}")


def test_values_and_the_loader_agree_with_the_formula() -> None:
    whole = whole_bits(SPEC, 9)
    expected = {
        "x": np.concatenate([whole["a"][1:4, 2:5].reshape(-1), np.zeros(4, np.uint16)]),
        "bias": whole["bias"],
        "y": whole["b"][298:],
    }
    filled, loaded = WorkerModel(SPEC, _map()), WorkerModel(SPEC, _map())
    filled.fill(9)
    loaded.tensors()["x"].fill_(3.0)
    loaded.load_weights(as_tensors(SPEC, whole))
    for name, want in expected.items():
        np.testing.assert_array_equal(live_bits(filled, name), want)
        np.testing.assert_array_equal(live_bits(loaded, name), want)
    assert loaded.wrong(9) == []
    assert loaded.wrong(8) == ["a", "bias", "b"]
    live_bits(loaded, "y")[1, 10] ^= 1
    assert loaded.wrong(9) == ["b"]


def test_values_of_a_tensor_that_is_done_in_pieces() -> None:
    """Wider than one piece, with more rows than one piece."""
    spec = CheckpointSpec.from_iterable([("s", (5,), "bfloat16"), ("wide", (9, 70_001), "bfloat16")])
    live = (LiveTensor(name="w", shape=(9, 70_000), strides=(70_000, 1), dtype=spec.tensors[1].dtype),)
    copies = CopyTable.from_rows([(1, 0, 1, 0, ((9, 70_001, 70_000), (70_000, 1, 1)))])
    model = WorkerModel(spec, SourceMap(spec_digest=spec.digest, live=live, copies=copies))
    model.fill(2)
    np.testing.assert_array_equal(live_bits(model, "w"), whole_bits(spec, 2)["wide"][:, 1:])
    live_bits(model, "w")[8, 69_999] ^= 1
    assert model.wrong(2) == ["wide"]


def test_a_copy_that_is_no_rectangle_is_refused() -> None:
    good = _map()
    transposed = CopyTable.from_rows([(0, 0, 0, 0, ((5, 1, 7), (2, 7, 1)))])
    with pytest.raises(ValueError, match="'a'"):
        rectangles(SPEC, SourceMap(spec_digest=SPEC.digest, live=good.live, copies=transposed))


def test_what_two_rectangles_share() -> None:
    a = Rectangle(0, 2, 6, 10, 20, live=0, live_start=100, live_pitch=20)
    b = Rectangle(0, 5, 9, 0, 15, live=1, live_start=7, live_pitch=40)
    shared = shared_rectangle(a, b)
    assert shared == (
        Rectangle(0, 5, 3, 10, 5, live=0, live_start=100 + 3 * 20, live_pitch=20),
        Rectangle(0, 5, 3, 10, 5, live=1, live_start=7 + 10, live_pitch=40),
    )
    assert shared_rectangle(a, b._replace(row=8)) is None
    assert shared_rectangle(a, b._replace(tensor=1)) is None


def small(scenario: str, trainer_nodes: int, replicas: int, layers: int) -> Case:
    return build(
        CaseKey(
            scenario=scenario, replicas=replicas, trainer_nodes=trainer_nodes, rate_bits=1e9, slot_bytes=1 << 20,
            layers=layers,
        )
    )  # fmt: skip


CASES = [("replicas", 2, 2, 1), ("tiny-tensors", 1, 1, 5), ("a", 1, 1, 1), ("tdp-rdp", 2, 1, 1)]


def covered(spec: CheckpointSpec, parts: Iterable[Rectangle]) -> dict[int, AnyArray | int]:
    """Tensor -> how often each element is covered; only their number for vocabularies, which are large."""
    found: dict[int, AnyArray | int] = {}
    for r in parts:
        t = spec.tensors[r.tensor]
        if t.numel > 1 << 20:
            found[r.tensor] = found.get(r.tensor, 0) + r.numel
            continue
        if r.tensor not in found:
            found[r.tensor] = np.zeros((t.shape[0], t.numel // t.shape[0]), np.uint8)
        found[r.tensor][r.row : r.row + r.num_rows, r.col : r.col + r.num_cols] += 1  # type: ignore[index]
    return found


@pytest.mark.parametrize(("scenario", "nodes", "replicas", "layers"), CASES)
def test_every_element_is_given_once_and_every_need_is_met_once(
    scenario: str, nodes: int, replicas: int, layers: int
) -> None:
    case = small(scenario, nodes, replicas, layers)
    given = covered(case.spec, [r for parts in given_rectangles(case).values() for r in parts])
    for i, t in enumerate(case.spec.tensors):
        assert given[i] == t.numel if isinstance(given[i], int) else (given[i] == 1).all()
    for rollout in case.topology.rollouts:
        segments = [s for of_trainer in segments_between(case, rollout).values() for s in of_trainer]
        assert all(have[:5] == need[:5] for have, need in segments)
        met = covered(case.spec, [need for _, need in segments])
        needed = covered(case.spec, rectangles(case.spec, case.maps[rollout]))
        assert met.keys() == needed.keys()
        for i in needed:
            np.testing.assert_array_equal(met[i], needed[i])


def test_engines_draw_on_both_trainer_nodes() -> None:
    case = small("tdp-rdp", 2, 2, 1)
    nodes = []
    for engine in case.engines:
        rollouts = [i for i, w in enumerate(case.topology.workers) if w.engine == engine]
        trainers = {t for i in rollouts for t in segments_between(case, i)}
        nodes.append({case.topology.workers[t].node for t in trainers})
    assert nodes == [{"n0"}, {"n1"}]


def test_batches_carry_segments_whole_from_worker_to_worker() -> None:
    case = small("tiny-tensors", 1, 1, 5)
    rollout = case.topology.rollouts[1]
    taker = WorkerModel(case.spec, case.maps[rollout])
    for trainer, segments in segments_between(case, rollout).items():
        giver = WorkerModel(case.spec, case.maps[trainer])
        giver.fill(4)
        groups = batches(case.spec, segments, 1000)
        assert len(groups) > 5
        for group in groups:
            buffer = np.zeros(1024, np.uint8)
            packed = Copies(giver, buffer, [s[0] for s in group])
            assert packed.nbytes <= 1000 + 16
            packed.pack()
            Copies(taker, buffer, [s[1] for s in group]).unpack()
    assert taker.wrong(4) == []


def test_buckets_hold_whole_tensors_where_the_views_say() -> None:
    assert tensor_buckets(SPEC, 100) == [[0, 1], [2], [3]]
    buffer = np.zeros(80 + 16, np.uint8)
    place = matrix(SPEC, buffer, [0, 1])
    place(Rectangle(0, 4, 1, 6, 1, 0, 0, 0))[...] = 0x1234
    place(Rectangle(1, 2, 1, 0, 1, 0, 0, 0))[...] = 0x89ABCDEF
    assert np.flatnonzero(buffer).tolist() == [68, 69, 88, 89, 90, 91]


@pytest.mark.parametrize("scenario", ["replicas", "a", "b", "tdp-rdp", "slow-node", "small-budget"])
def test_models_are_as_large_as_they_say(scenario: str) -> None:
    """At least 256 MB; (a) and (b) 1/64 of 31.9 and 61.1 GB, within a tenth."""
    key = cases_of(scenario, rate_bits=1e9, slot_bytes=1 << 20)[0]
    nbytes = build(key).spec.nbytes
    full = {"a": 31.9e9, "b": 61.1e9}.get(scenario)
    if full is None:
        assert 256e6 <= nbytes <= 300e6
    else:
        assert nbytes == pytest.approx(full / 64, rel=0.1)


def test_the_slow_node_is_in_the_topology_and_in_the_bound() -> None:
    case = build(cases_of("slow-node", rate_bits=1e9, slot_bytes=1 << 20)[0])
    assert case.rates_bits == (1e9, 1e9, 0.25e9)
    assert [w.bandwidth for w in case.topology.workers] == [62.5e6] * 4 + [15.625e6] * 2
    assert case.t_min_seconds == pytest.approx(case.spec.nbytes * 8 / 0.25e9)
