"""megatron-core's GPTModel on four ranks, TP2 PP2 EP2, loaded from checkpoint names: by rules of the test, and by those of
Megatron-Bridge. `make test-megatron` sets it up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tests.integration.engines import models
from tests.integration.engines.job import (
    CONSTANT,
    Rank,
    check_coverage,
    check_layout,
    check_update,
    engine_python,
    indices,
    num_copies,
    read_side,
    run_workers,
)

from weightbridge.checkpoint import CheckpointSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SPEC, SPARSE_SPEC = models.moe_spec(), models.moe_spec(models.SPARSE_MOE)
TP = PP = EP = 2
HEADS, GROUPS, HEAD = (models.MOE[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
LAYERS, EXPERTS, VOCABULARY = (models.MOE[n] for n in ("num_hidden_layers", "num_experts", "vocab_size"))


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    folder = tmp_path_factory.mktemp("megatron")
    run_workers("megatron_worker.py", "partly-dense", TP * PP, folder, python=engine_python("megatron"))
    return read_side(folder, TP * PP, SPEC)


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    """The same model with experts in every layer, which is what the bridge makes of any Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("bridge")
    run_workers("megatron_bridge_worker.py", "", TP * PP, folder, python=engine_python("megatron"))
    return read_side(folder, TP * PP, SPARSE_SPEC)


def interleaved(q: np.ndarray, k: np.ndarray, v: np.ndarray, tp_rank: int) -> np.ndarray:
    """Rows by the published formula, one by one: per group its query heads, its key head, its value head; cut by rows."""
    n = HEADS // GROUPS
    rows = np.empty(((HEADS + 2 * GROUPS) * HEAD, q.shape[1]), dtype=np.int64)
    for head in range(HEADS):
        for d in range(HEAD):
            rows[head // n * (n + 2) * HEAD + head % n * HEAD + d] = q[head * HEAD + d]
    for group in range(GROUPS):
        for d in range(HEAD):
            rows[group * (n + 2) * HEAD + n * HEAD + d] = k[group * HEAD + d]
            rows[group * (n + 2) * HEAD + (n + 1) * HEAD + d] = v[group * HEAD + d]
    return np.split(rows, TP)[tp_rank]


def vocabulary(whole: np.ndarray, tp_rank: int) -> np.ndarray:
    padded = np.full((-(-VOCABULARY // TP) * TP, whole.shape[1]), CONSTANT)
    padded[:VOCABULARY] = whole
    return np.split(padded, TP)[tp_rank]


def expected_of(
    rank: int, spec: CheckpointSpec = SPEC, dense_layers: Sequence[int] = tuple(models.MOE["mlp_only_layers"])
) -> dict[str, np.ndarray]:
    """Ranks count through tensor parallelism first, then the stages; expert parallelism goes over the former."""
    pp_rank, tp_rank = divmod(rank, TP)
    numbers, expected = indices(spec), {}
    for local, layer in enumerate(np.split(np.arange(LAYERS), PP)[pp_rank].tolist()):
        own = {
            name.removeprefix(f"model.layers.{layer}."): n for name, n in numbers.items() if f"layers.{layer}." in name
        }
        prefix = f"decoder.layers.{local}."
        q, k, v, o = (own[f"self_attn.{name}_proj.weight"] for name in "qkvo")
        expected |= {
            f"{prefix}input_layernorm.weight": own["input_layernorm.weight"],
            f"{prefix}pre_mlp_layernorm.weight": own["post_attention_layernorm.weight"],
            f"{prefix}self_attention.linear_qkv.weight": interleaved(q, k, v, tp_rank),
            f"{prefix}self_attention.linear_proj.weight": np.split(o, TP, axis=1)[tp_rank],
            f"{prefix}self_attention.q_layernorm.weight": own["self_attn.q_norm.weight"],
            f"{prefix}self_attention.k_layernorm.weight": own["self_attn.k_norm.weight"],
        }
        if layer in dense_layers:
            gate, up = (np.split(own[f"mlp.{n}_proj.weight"], TP)[tp_rank] for n in ("gate", "up"))
            expected[f"{prefix}mlp.linear_fc1.weight"] = np.concatenate([gate, up])
            expected[f"{prefix}mlp.linear_fc2.weight"] = np.split(own["mlp.down_proj.weight"], TP, axis=1)[tp_rank]
            continue
        expected[f"{prefix}mlp.router.weight"] = own["mlp.gate.weight"]
        for position, expert in enumerate(np.split(np.arange(EXPERTS), EP)[tp_rank].tolist()):
            gate, up, down = (own[f"mlp.experts.{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            expected[f"{prefix}mlp.experts.local_experts.{position}.linear_fc1.weight"] = np.concatenate([gate, up])
            expected[f"{prefix}mlp.experts.local_experts.{position}.linear_fc2.weight"] = down
    if pp_rank == 0:
        expected["embedding.word_embeddings.weight"] = vocabulary(numbers["model.embed_tokens.weight"], tp_rank)
    else:
        expected["output_layer.weight"] = vocabulary(numbers["lm_head.weight"], tp_rank)
        expected["decoder.final_layernorm.weight"] = numbers["model.norm.weight"]
    return expected


def test_megatron_at_tp2_pp2_ep2(megatron: list[Rank]) -> None:
    check_coverage(megatron, SPEC)
    for r, rank in enumerate(megatron):
        expected = expected_of(r)
        check_layout(rank, SPEC, expected)
        for name, pieces in num_copies(rank.source_map).items():
            kind = name.rpartition(".")[0].rpartition(".")[2]
            wanted = {"linear_qkv": 3, "linear_fc1": 2}.get(kind, 1) if name in expected else 0
            assert pieces == wanted, name
    dtypes = {t.name: t.dtype.name for t in megatron[0].source_map.live}
    assert dtypes["decoder.layers.0.input_layernorm.weight"] == "F32"  # norms are kept wider than the checkpoint
    assert dtypes["decoder.layers.0.self_attention.linear_qkv.weight"] == "BF16"


def test_megatron_bridge_at_tp2_pp2_ep2(bridge: list[Rank]) -> None:
    check_coverage(bridge, SPARSE_SPEC)
    for r, rank in enumerate(bridge):
        check_layout(rank, SPARSE_SPEC, expected_of(r, SPARSE_SPEC, dense_layers=()))


def test_an_update_from_megatron_bridge_to_tensor_parallel_transformers(
    bridge: list[Rank], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("sparse")
    run_workers("torch_worker.py", "sparse-moe-tensor-parallel", 2, folder)
    check_update(SPARSE_SPEC, bridge, {"tp": read_side(folder, 2, SPARSE_SPEC)})


def test_an_update_from_megatron_to_tensor_parallel_transformers_and_back(
    megatron: list[Rank], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("moe")
    run_workers("torch_worker.py", "moe-tensor-parallel", 2, folder)
    engine = read_side(folder, 2, SPEC)
    check_update(SPEC, megatron, {"tp": engine})
    check_update(SPEC, engine, {"megatron": megatron})
