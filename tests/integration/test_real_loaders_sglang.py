"""SGLang's own Qwen3-MoE class and its `load_weights` at TP2 with EP2. `make test-sglang` sets it up."""

from __future__ import annotations

from pathlib import Path

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

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

CONFIG = models.SPARSE_MOE
SPEC = models.moe_spec(CONFIG)
TP = EP = 2
VOCABULARY_STEP = 64  # SGLang pads the vocabulary to a multiple of it


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    folder = tmp_path_factory.mktemp("sglang")
    run_workers("sglang_worker.py", "sparse", TP, folder, python=engine_python("sglang"))
    return read_side(folder, TP, SPEC)


def vocabulary(whole: np.ndarray, rank: int) -> np.ndarray:
    rows = -(-len(whole) // VOCABULARY_STEP) * VOCABULARY_STEP
    padded = np.full((rows, whole.shape[1]), CONSTANT)
    padded[: len(whole)] = whole
    return np.split(padded, TP)[rank]


def expected_of(rank: int) -> dict[str, np.ndarray]:
    numbers = indices(SPEC)
    expected = {
        "model.embed_tokens.weight": vocabulary(numbers["model.embed_tokens.weight"], rank),
        "lm_head.weight": vocabulary(numbers["lm_head.weight"], rank),
        "model.norm.weight": numbers["model.norm.weight"],
    }
    experts = np.split(np.arange(CONFIG["num_experts"]), EP)[rank].tolist()
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        q, k, v, o = (numbers[f"{prefix}self_attn.{n}_proj.weight"] for n in "qkvo")
        names = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate")
        expected |= {f"{prefix}{n}.weight": numbers[f"{prefix}{n}.weight"] for n in names}
        expected[f"{prefix}self_attn.qkv_proj.weight"] = np.concatenate(
            [np.split(part, TP)[rank] for part in (q, k, v)]
        )
        expected[f"{prefix}self_attn.o_proj.weight"] = np.split(o, TP, axis=1)[rank]
        gate, up, down = (
            [numbers[f"{prefix}mlp.experts.{e}.{n}_proj.weight"] for e in experts] for n in ("gate", "up", "down")
        )
        expected[f"{prefix}mlp.experts.w13_weight"] = np.concatenate([np.stack(gate), np.stack(up)], axis=1)
        expected[f"{prefix}mlp.experts.w2_weight"] = np.stack(down)
    return expected


def test_sglang_at_tp2_ep2(sglang: list[Rank]) -> None:
    check_coverage(sglang, SPEC)
    here = CONFIG["num_experts"] // EP
    for r, rank in enumerate(sglang):
        expected = expected_of(r)
        check_layout(rank, SPEC, expected)
        for name, pieces in num_copies(rank.source_map).items():
            kind = name.removesuffix(".weight").rpartition(".")[2]
            wanted = {"qkv_proj": 3, "w13_weight": 2 * here, "w2_weight": here}.get(kind, 1) if name in expected else 0
            assert pieces == wanted, name


def test_a_class_that_ignores_part_of_its_config_is_refused(tmp_path: Path) -> None:
    """It builds experts where the checkpoint has a dense layer, and leaves them as they are without a word."""
    run_workers("sglang_worker.py", "partly-dense", TP, tmp_path, python=engine_python("sglang"))
    for rank in range(TP):
        refused = (tmp_path / f"refused{rank}").read_text()
        assert "live parameter 'model.layers.1.mlp.experts.w13_weight': the loader never writes" in refused


def test_an_update_from_fused_experts_of_transformers_and_back(
    sglang: list[Rank], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("moe")
    run_workers("torch_worker.py", "sparse-moe-tensor-parallel", 2, folder)
    trainers = read_side(folder, 2, SPEC)
    check_update(SPEC, trainers, {"sglang": sglang})
    check_update(SPEC, sglang, {"transformers": trainers})


def test_an_update_from_megatron(sglang: list[Rank], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Pipeline stages, interleaved heads and single experts into fused heads and stacked experts."""
    folder = tmp_path_factory.mktemp("megatron")
    run_workers("megatron_worker.py", "sparse", 4, folder, python=engine_python("megatron"))
    check_update(SPEC, read_side(folder, 4, SPEC), {"sglang": sglang})
