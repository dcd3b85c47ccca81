"""Field cases about a whole side: who takes and who holds what, empty shards, sharded state, names, buffers of other owners."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.properties.layout_loaders import (
    BF16,
    F32,
    UNTOUCHED,
    Ints,
    Rank,
    Stream,
    check,
    checkpoint,
    find,
    live_like,
    numbers,
    rows,
    spec_of,
    stream,
    update,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import Options
from weightbridge.coordinator.planning import plan_job
from weightbridge.errors import CoverageError, ProbeError
from weightbridge.layout import SourceMap, encode_source_map, missing_elements, unused_tensors
from weightbridge.machine import messages
from weightbridge.machine.session import MakePlan
from weightbridge.plan import Plan
from weightbridge.probe import NamedTensors, discover_tensors, probe

H = 5


def sharded(spec: CheckpointSpec, r: int, t: int) -> Rank:
    """Rows as torch.chunk gives them: the last ranks may have fewer or none."""
    origin: dict[str, Ints] = {}
    for tensor in spec.tensors:
        per_rank = -(-tensor.shape[0] // t)
        origin[tensor.name] = numbers(spec, tensor.name)[r * per_rank : (r + 1) * per_rank]
    live = live_like(origin)

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            chunks = loaded.chunk(t)
            if r < len(chunks):
                live[name].copy_(chunks[r])

    return Rank(live=live, load=load, origin=origin)


def plain(spec: CheckpointSpec) -> Rank:
    return sharded(spec, 0, 1)


def connect(spec: CheckpointSpec, trainers: list[SourceMap], engine: list[SourceMap], **options: object) -> Plan:
    """What the hub does with the maps that came in at connect."""
    joins = [
        messages.Join(
            worker=f"{engine_name or 'trainer'}/{rank}", role="rollout" if engine_name else "trainer", node=engine_name or "t",
            rank=rank, size=len(maps), engine=engine_name, bandwidth=1e9, protocol=1, spec_digest=spec.digest, dtypes=(),
        )
        for engine_name, maps in (("", trainers), ("e", engine))
        for rank in range(len(maps))
    ]  # fmt: skip
    request = MakePlan(epoch=0, joins=tuple(joins), maps=tuple(encode_source_map(m) for m in (*trainers, *engine)))
    return plan_job(spec, request, Options(**options)).plan  # type: ignore[arg-type]


# --- empty shards and ranks without a tensor ------------------------------------------------------------------------------


def test_case_b105_b106_empty_shards_take_part_on_both_sides() -> None:
    spec = spec_of(a=(2, H), b=(5, H), c=(1,))
    trainers = [sharded(spec, r, 4) for r in range(4)]
    assert [t.live["b"].shape[0] for t in trainers] == [2, 2, 1, 0]  # torch.chunk leaves the last one empty
    check(spec, [sharded(spec, r, 3) for r in range(3)], trainers=trainers)


def test_case_b062_a_rank_whose_module_is_absent_takes_part() -> None:
    spec = spec_of(**{"experts.0.w": (3, H), "experts.1.w": (3, H)})

    def rank(names: list[str]) -> Rank:
        origin = {n: numbers(spec, n) for n in names}
        live = live_like(origin)
        return Rank(live=live, load=lambda ts: [live[n].copy_(t) for n, t in ts if n in live], origin=origin)

    ranks = [rank(["experts.0.w"]), rank([]), rank(["experts.1.w"])]
    check(spec, ranks, trainers=[rank([]), rank(["experts.1.w", "experts.0.w"])])


@pytest.mark.parametrize("held", ["nothing", "an empty stand-in"])
def test_case_b101_b102_b103_what_no_trainer_holds_is_refused_by_name_before_anything_moves(held: str) -> None:
    """Sizes come from the checkpoint spec: a partitioned parameter that shows no elements here holds none of them."""
    spec = spec_of(w=(4, H), lm_head=(6, H))
    origin = {"w": numbers(spec, "w")} | ({"lm_head": np.zeros(0, dtype=np.int64)} if held != "nothing" else {})
    live = live_like(origin)
    trainer = Rank(live=live, load=lambda ts: [live[n].copy_(t) for n, t in ts if n == "w"], origin=origin)
    maps = [find(spec, trainer)]
    assert missing_elements(spec, maps) == {"lm_head": 30}
    with pytest.raises(CoverageError, match=r"'lm_head'"):
        connect(spec, maps, [find(spec, plain(spec))])


def test_case_b061_a_shard_that_says_it_is_whole_is_known_by_its_values() -> None:
    spec = spec_of(w=(8, H))
    trainers = [sharded(spec, r, 2) for r in range(2)]
    for trainer in trainers:
        trainer.live["w"].tensor_model_parallel = False  # type: ignore[attr-defined]
    check(spec, [plain(spec)], trainers=trainers)
    with pytest.raises(CoverageError, match=r"'w'"):  # the second trainer is not there: refused before anything is sent
        connect(spec, [find(spec, trainers[0])], [find(spec, plain(spec))])


def test_case_b086_a_tensor_that_is_held_only_with_an_option_is_missed_without_it() -> None:
    spec = spec_of(w=(4, H), expert_bias=(7,))

    def trainer(with_bias: bool) -> Rank:
        origin = {n: numbers(spec, n) for n in (("w", "expert_bias") if with_bias else ("w",))}
        live = live_like(origin)
        return Rank(live=live, load=lambda ts: [live[n].copy_(t) for n, t in ts if n in live], origin=origin)

    check(spec, [plain(spec)], trainers=[trainer(True)])
    with pytest.raises(CoverageError, match="'expert_bias'"):
        connect(spec, [find(spec, trainer(False))], [find(spec, plain(spec))])


# --- what an engine takes -----------------------------------------------------------------------------------------------


def test_case_b072_ranks_that_all_load_the_first_shard_leave_the_others_to_nobody() -> None:
    """Shapes are all right; only what the ranks take together shows it."""
    spec = spec_of(w=(8, H), norm=(H,))

    def rank(tp_rank: int) -> Rank:
        origin = {"w": numbers(spec, "w")[4 * tp_rank : 4 * tp_rank + 4], "norm": numbers(spec, "norm")}
        live = live_like(origin)

        def load(tensors: Stream) -> None:
            for name, loaded in tensors:
                live[name].copy_(loaded.chunk(2)[tp_rank] if name == "w" else loaded)

        return Rank(live=live, load=load, origin=origin)

    right = [find(spec, rank(0)), find(spec, rank(1))]
    wrong = [find(spec, rank(0)), find(spec, rank(0))]
    assert missing_elements(spec, right) == {}
    assert missing_elements(spec, wrong) == {"w": 4 * H}
    connect(spec, [find(spec, plain(spec))], right)
    with pytest.raises(CoverageError, match=r"engine 'e' takes 20 of the 40 elements of checkpoint tensor 'w'"):
        connect(spec, [find(spec, plain(spec))], wrong)
    connect(spec, [find(spec, plain(spec))], wrong, expected_unused=frozenset({"w"}))


def test_case_b071_rows_that_split_a_head_are_followed_as_rows() -> None:
    """Whether a model can compute with half a head is the model's affair; its loader's rows are copied faithfully."""
    spec = spec_of(k=(4 * 6, H))
    check(spec, [sharded(spec, r, 8) for r in range(8)])


def test_case_b074_an_unknown_name_is_loud_or_uncovered() -> None:
    spec = spec_of(q=(4, H), linear_qgkv=(12, H))
    live = live_like({"q": numbers(spec, "q")})

    def strict(tensors: Stream) -> None:
        for name, loaded in tensors:
            live[name].copy_(loaded)

    with pytest.raises(ProbeError, match=r"load_weights raised KeyError: 'linear_qgkv'"):
        probe(spec=spec, load_weights=strict, tensors=lambda: NamedTensors(live))

    def lenient(tensors: Stream) -> None:
        for name, loaded in tensors:
            if name in live:
                live[name].copy_(loaded)

    found = probe(spec=spec, load_weights=lenient, tensors=lambda: NamedTensors(live))
    assert unused_tensors(spec, [found]) == ("linear_qgkv",)

    # A loader that knows it: gate, query, key and value of each group side by side.
    origin = {"q": numbers(spec, "q"), "qg": rows(numbers(spec, "linear_qgkv"), [0, 1, 2, 3, 6, 7, 8, 9]),
              "kv": rows(numbers(spec, "linear_qgkv"), [4, 5, 10, 11])}  # fmt: skip
    apart = live_like(origin)

    def splitting(tensors: Stream) -> None:
        state = dict(tensors)
        groups = state["linear_qgkv"].view(2, 6, H)
        apart["q"].copy_(state["q"])
        apart["qg"].copy_(groups[:, :4].reshape(8, H))
        apart["kv"].copy_(groups[:, 4:].reshape(4, H))

    check(spec, [Rank(live=apart, load=splitting, origin=origin)])


# --- sharded and mixed state ----------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_case_b107_b108_plain_and_sharded_tensors_side_by_side(one_rank_group: None) -> None:
    module = torch.nn.Module()
    mesh = init_device_mesh("cpu", (1,))
    module.w = torch.nn.Parameter(distribute_tensor(torch.zeros(4, H), mesh, [Shard(0)]), requires_grad=False)
    module.ignored = torch.nn.Parameter(torch.zeros(3, H), requires_grad=False)
    spec = spec_of(F32, w=(4, H), ignored=(3, H))

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            parameter = getattr(module, name)
            target = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            target.copy_(loaded)

    origin = {n: numbers(spec, n) for n in ("w", "ignored")}
    check(spec, [Rank(live=dict(discover_tensors(module)), load=load, origin=origin)])


def test_case_b088_masters_in_another_dtype_than_the_checkpoint() -> None:
    """The plan and the wire speak of the checkpoint's dtype on both sides; the cast is the trainer's own."""
    spec = spec_of(BF16, w=(6, H), norm=(H,))
    origin = {n: numbers(spec, n) for n in ("w", "norm")}
    masters = live_like(origin, F32)
    trainer = Rank(live=masters, load=lambda ts: [masters[n].copy_(t) for n, t in ts], origin=origin)
    check(spec, [plain(spec)], trainers=[trainer])


# --- loaders and the memory they are given ----------------------------------------------------------------------------------


def test_case_b165_threads_that_copy_from_what_was_handed_out() -> None:
    """Copies are made by a pool while the next tensors are asked for, and waited for at the end."""
    spec = spec_of(**{f"layers.{i}.w": (3 + i, H) for i in range(9)})
    origin = {t.name: numbers(spec, t.name) for t in spec.tensors}
    live = live_like(origin)
    names: set[str] = set()

    def copy(name: str, loaded: torch.Tensor) -> None:
        names.add(threading.current_thread().name)
        live[name].copy_(loaded)

    def load(tensors: Stream) -> None:
        with ThreadPoolExecutor(2, thread_name_prefix="loader") as pool:
            for pending in [pool.submit(copy, name, loaded) for name, loaded in tensors]:
                pending.result()

    check(spec, [Rank(live=live, load=load, origin=origin)])
    assert all(n.startswith("loader") for n in names)


def test_an_error_in_a_loaders_thread_is_the_reason_given() -> None:
    spec = spec_of(w=(4, H))

    def fail() -> None:
        raise MemoryError("no room for w")

    def load(tensors: Stream) -> None:
        list(tensors)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(fail).result()

    live = live_like({"w": numbers(spec, "w")})
    with pytest.raises(ProbeError, match="load_weights raised MemoryError: no room for w"):
        probe(spec=spec, load_weights=load, tensors=lambda: NamedTensors(live))


def test_case_b166_a_loader_that_collects_everything_before_it_loads_anything() -> None:
    spec = spec_of(**{f"layers.{i}.w": (3, H) for i in range(5)})
    origin = {t.name: numbers(spec, t.name) for t in spec.tensors}
    live = live_like(origin)

    def load(tensors: Stream) -> None:
        weights = list(tensors)
        for name, loaded in sorted(weights, key=lambda w: w[0], reverse=True):
            live[name].copy_(loaded)

    check(spec, [Rank(live=live, load=load, origin=origin)])


def test_case_b099_a_loader_that_changes_and_keeps_what_it_is_given_changes_nobody_elses_tensors() -> None:
    spec = spec_of(w=(4, H))
    origin = {"w": numbers(spec, "w")}
    live = live_like(origin)
    kept: list[torch.Tensor] = []

    def load(tensors: Stream) -> None:
        for name, loaded in tensors:
            live[name].copy_(loaded)
            loaded.zero_()
            kept.append(loaded)

    given = checkpoint(spec, 5)
    before = given["w"].clone()
    load(stream(given))
    check(spec, [Rank(live=live, load=load, origin=origin)])  # sources are compared before and after each version
    assert torch.equal(given["w"], before)
    for tensor in kept:
        tensor.fill_(float("nan"))  # long after the loads, whoever kept them may write
    find(spec, Rank(live=live, load=load, origin=origin))


def test_case_b167_b168_b169_a_tensor_larger_than_any_slot_is_cut_over_rounds() -> None:
    spec = spec_of(gate_up=(64, 40), small=(3,))
    ranks = [sharded(spec, r, 2) for r in range(2)]
    plan = update(spec, ranks, [find(spec, rank) for rank in ranks], slot_bytes=1024)
    assert plan.slot_bytes == 1024
    assert plan.rounds >= 64 * 40 * 2 / 2 / 1024


def test_case_b054_keys_of_another_schema_match_nothing_and_are_refused() -> None:
    """Stacked keys for a loader that knows per-expert ones, which ignores what it does not know."""
    spec = spec_of(**{"experts.w1": (2, 3, H)})
    origin = {f"experts.{e}.w1": np.full((3, H), UNTOUCHED) for e in range(2)}
    live = live_like(origin)
    rank = Rank(live=live, load=lambda ts: [live[n].copy_(t) for n, t in ts if n in live], origin=origin)
    with pytest.raises(CoverageError, match=r"'experts\.0\.w1': the loader never writes 15 of its 15 elements"):
        find(spec, rank)
