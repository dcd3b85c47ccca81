"""Loaders that come with torch and transformers, in real processes: the maps they give, and updates through the maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.integration.engines import models
from tests.integration.engines.job import (
    CONSTANT,
    UNTOUCHED,
    Rank,
    check_coverage,
    check_layout,
    check_update,
    held,
    indices,
    num_copies,
    read_side,
    run_workers,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

WORKER = "torch_worker.py"
DENSE, MOE = models.dense_spec(), models.moe_spec()
RANKS = 3


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Rank]]:
    """Through the integration ("own") and through torch's own collective loading of a full state dict ("torch")."""
    folder = tmp_path_factory.mktemp("fsdp2")
    run_workers(WORKER, "fsdp2", RANKS, folder)
    return {label: read_side(folder, RANKS, DENSE, label=f"{label}-") for label in ("own", "torch")}


def side(tmp_path_factory: pytest.TempPathFactory, case: str, world_size: int, spec=DENSE) -> list[Rank]:
    folder = tmp_path_factory.mktemp(case)
    run_workers(WORKER, case, world_size, folder)
    return read_side(folder, world_size, spec)


@pytest.fixture(scope="module")
def fsdp1(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    return side(tmp_path_factory, "fsdp1", RANKS)


@pytest.fixture(scope="module")
def tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    return side(tmp_path_factory, "tensor-parallel", RANKS)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    return side(tmp_path_factory, "moe", 1, MOE)


@pytest.fixture(scope="module")
def moe_tensor_parallel(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    return side(tmp_path_factory, "moe-tensor-parallel", 2, MOE)


def rows_of(numbers: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Uneven rows as FSDP2 deals them: as many as fit of ceil(n / size) each, in order, the last ranks fewer or none."""
    each = -(-len(numbers) // size)
    return numbers[rank * each : (rank + 1) * each]


# --- FSDP2 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["own", "torch"])
def test_fsdp2_deals_uneven_rows(fsdp2: dict[str, list[Rank]], label: str) -> None:
    ranks = fsdp2[label]
    check_coverage(ranks, DENSE)
    for r, rank in enumerate(ranks):
        check_layout(rank, DENSE, {name: rows_of(whole, r, RANKS) for name, whole in indices(DENSE).items()})
        pieces = num_copies(rank.source_map)
        assert {n: pieces[n] for n in pieces} == {
            t.name: int(t.parameter and t.numel > 0) for t in rank.source_map.live
        }, "one slice copy for each shard"
    shapes = [{t.name: t.shape for t in r.source_map.live} for r in ranks]
    assert [s["lm_head.weight"] for s in shapes] == [(44, 50), (44, 50), (43, 50)]
    assert [s["model.layers.1.self_attn.q_norm.weight"] for s in shapes] == [(2,), (2,), (0,)]


def test_both_ways_to_load_fsdp2_give_one_map(fsdp2: dict[str, list[Rank]]) -> None:
    own, torch_ = ([r.source_map.fingerprint for r in fsdp2[label]] for label in ("own", "torch"))
    assert own == torch_
    assert len(set(own)) == RANKS


# --- FSDP1 --------------------------------------------------------------------------------------------------------------


def flat_parameters() -> dict[str, list[str]]:
    """FSDP1's flat parameters: the name of the unit -> its parameters' names, in the order of the modules."""
    layer = [
        *(f"self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"self_attn.{n}_norm.weight" for n in "qk"),
        *(f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
        *(f"{n}_layernorm.weight" for n in ("input", "post_attention")),
    ]
    layers = [f"model.layers.{i}" for i in range(models.DENSE["num_hidden_layers"])]
    return {"": ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]} | {
        name: [f"{name}.{n}" for n in layer] for name in layers
    }


def shards_of_flat_parameters(rank: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(parameter -> its part in this rank's shard, unit -> the shard): parameters end to end, each padded to 16 bytes."""
    numbers, parts, shards = indices(DENSE), {}, {}
    for unit, names in flat_parameters().items():
        pieces, begins, length = [], {}, 0
        for position, name in enumerate(names):
            begins[name] = length
            flat = numbers[name].reshape(-1)
            pad = -len(flat) % 8 if position + 1 < len(names) else 0
            pieces.append(np.concatenate([flat, np.full(pad, UNTOUCHED)]))
            length += len(flat) + pad
        whole = np.concatenate([*pieces, np.full(-length % RANKS, UNTOUCHED)])
        low, high = rank * len(whole) // RANKS, (rank + 1) * len(whole) // RANKS
        shards[unit] = whole[low:high]
        for name in names:
            begin, end = begins[name], begins[name] + numbers[name].size
            parts[name] = whole[max(begin, low) : max(min(end, high), max(begin, low))]
    return parts, shards


def plain_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def test_fsdp1_splits_parameters_in_the_middle_of_a_row(fsdp1: list[Rank]) -> None:
    check_coverage(fsdp1, DENSE)
    split_rows = 0
    for r, rank in enumerate(fsdp1):
        parts, shards = shards_of_flat_parameters(r)
        names = {plain_name(t.name): t.name for t in rank.source_map.live}
        assert len(names) == len(rank.source_map.live)
        # A unit's flat parameter is the same memory as its parameters; it is found beside them unless one of them fills it.
        flat = {
            n: shards[plain_name(n).removesuffix("params.0").rstrip(".")] for n in names.values() if "params.0" in n
        }
        assert {plain_name(n) for n in flat} >= {"model.layers.0.params.0", "model.layers.1.params.0"}
        check_layout(rank, DENSE, {names[n]: part for n, part in parts.items()}, others=flat)
        pieces = num_copies(rank.source_map)
        for name, part in parts.items():
            width = DENSE.tensors[DENSE.index[name]].shape[-1]
            first = int(DENSE.numel_offsets[DENSE.index[name]])
            assert pieces[names[name]] == pieces_of_flat_range(part, first, width), name
            split_rows += len(part) > 0 and (part[0] - first) % width != 0
    assert split_rows >= 3


def pieces_of_flat_range(part: np.ndarray, first: int, width: int) -> int:
    """A run of a matrix's elements is at most the end of a row, whole rows, and the beginning of one."""
    if not len(part):
        return 0
    low, high = int(part[0]) - first, int(part[-1]) + 1 - first
    if low // width == (high - 1) // width:
        return 1
    return (low % width > 0) + (high // width > -(-low // width)) + (high % width > 0)


# --- tensor parallel --------------------------------------------------------------------------------------------------------


def cut_along(name: str) -> int | None:
    """The dim that transformers' own plan cuts a Qwen3 parameter along; None for those every rank holds whole."""
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
        return 0
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return 1
    return 0 if name in ("lm_head.weight", "model.embed_tokens.weight") else None


def cut(name: str, whole: np.ndarray, rank: int, size: int) -> np.ndarray:
    dim = cut_along(name)
    return whole if dim is None else rows_of(whole.swapaxes(0, dim), rank, size).swapaxes(0, dim)


def test_tensor_parallel_transformers(tensor_parallel: list[Rank]) -> None:
    check_coverage(tensor_parallel, DENSE)
    for r, rank in enumerate(tensor_parallel):
        check_layout(rank, DENSE, {name: cut(name, whole, r, RANKS) for name, whole in indices(DENSE).items()})
        assert set(num_copies(rank.source_map).values()) == {0, 1}  # none for the rotary buffers, else one
    heads = [{t.name: t.shape for t in r.source_map.live}["lm_head.weight"] for r in tensor_parallel]
    assert heads == [(44, 50), (44, 50), (43, 50)]


# --- experts fused in memory ------------------------------------------------------------------------------------------------


def fused(rank: int, size: int) -> dict[str, np.ndarray]:
    """Each rank's [gate; up] rows of all experts one after the other, and the columns of down."""
    numbers = indices(MOE)
    expected = {n: cut(n, whole, rank, size) for n, whole in numbers.items() if ".experts." not in n}
    for layer in (0, 2, 3):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            [
                cut(name, numbers[name], rank, size)
                for e in range(models.MOE["num_experts"])
                for name in [f"{prefix}.{e}.{kind}_proj.weight"]
            ]
            for kind in ("gate", "up", "down")
        )
        expected[f"{prefix}.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gate, up, strict=True)])
        expected[f"{prefix}.down_proj"] = np.stack(down)
    return expected


def check_fused(ranks: list[Rank]) -> None:
    check_coverage(ranks, MOE)
    for r, rank in enumerate(ranks):
        check_layout(rank, MOE, fused(r, len(ranks)))
        for name, pieces in num_copies(rank.source_map).items():
            wanted = {"gate_up_proj": 2 * models.MOE["num_experts"], "down_proj": models.MOE["num_experts"]}
            assert pieces == wanted.get(name.rpartition(".")[2], 0 if "inv_freq" in name else 1), name


def test_experts_fused_in_memory(moe: list[Rank]) -> None:
    check_fused(moe)


def test_experts_fused_in_memory_and_cut_by_tensor_parallelism(moe_tensor_parallel: list[Rank]) -> None:
    check_fused(moe_tensor_parallel)


def test_what_cannot_be_loaded_is_refused_with_the_reason(tmp_path: Path) -> None:
    run_workers(WORKER, "moe-refusals", 1, tmp_path)
    refused = {p.name.removeprefix("refused-"): p.read_text() for p in tmp_path.glob("refused-*")}
    for name in ("incomplete", "short"):
        assert refused[name].startswith(
            "parameter 'model.layers.2.mlp.experts.gate_up_proj' of Qwen3MoeForCausalLM cannot be made of"
        ), refused[name]
        assert refused[name].endswith("give all tensors it consists of, in one call")
    assert "'model.layers.2.mlp.experts.3.bias' is no parameter or buffer of Qwen3MoeForCausalLM" in refused["unknown"]
    assert "load_weights does not write in place: live tensor 'model." in refused["rebound"]
    assert "make the loader copy into the tensors that exist" in refused["rebound"]


# --- updates ----------------------------------------------------------------------------------------------------------------


def test_updates_of_the_dense_model(
    fsdp2: dict[str, list[Rank]], fsdp1: list[Rank], tensor_parallel: list[Rank]
) -> None:
    """Each as a trainer and each as an engine; FSDP2 trains in fp32, the others hold bf16."""
    check_update(DENSE, fsdp2["torch"], {"tp": tensor_parallel, "flat": fsdp1})
    check_update(DENSE, fsdp1, {"tp": tensor_parallel, "rows": fsdp2["own"]})
    check_update(DENSE, tensor_parallel, {"flat": fsdp1, "rows": fsdp2["torch"]})


def test_updates_of_the_experts(moe: list[Rank], moe_tensor_parallel: list[Rank]) -> None:
    check_update(MOE, moe, {"tp": moe_tensor_parallel})
    check_update(MOE, moe_tensor_parallel, {"whole": moe})


def test_no_element_of_a_parameter_is_a_constant(moe: list[Rank], tensor_parallel: list[Rank]) -> None:
    for rank, spec in [(moe[0], MOE), *((r, DENSE) for r in tensor_parallel)]:
        assert all((numbers != CONSTANT).all() for numbers in held(rank.source_map, spec).values())
