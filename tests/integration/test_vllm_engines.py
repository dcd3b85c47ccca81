"""Real vLLM engines on CPU take updates through the map found in them, judged by what they then generate.

Each case runs in a process of its own (vllm_engines/scenario.py): an engine starts on one checkpoint, is probed, gets another
one while idle and the first one back while it generates. A server does the same over HTTP, five versions under load and one
while idle. Both are compared with an engine that started on the other checkpoint. Run by `make test-vllm` in vLLM's own
environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.integration.vllm_engines.prompts import (
    BLOCK_SIZE,
    CROSSING_TOKENS,
    LONG_PROMPTS,
    NUM_TOKENS,
    NUM_VERSIONS,
    STREAMED_TOKENS,
    differing,
    versions_of,
)

from weightbridge.cli.demo.prepare import cache_dir, cached_checkpoint

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed in this environment: make test-vllm"),
]

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 540


def run(case: str, folder: Path, smollm2: Path | None = None) -> dict[str, Any]:
    """What the scenario saw. Ends its whole process group, engines included, whatever happens."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}  # the package itself is installed, with its entry points
    if smollm2 is not None:
        environ["WEIGHTBRIDGE_TEST_SMOLLM2"] = str(smollm2)
    command = [sys.executable, "-m", "tests.integration.vllm_engines.scenario", case, str(folder)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=environ, start_new_session=True
        )
        try:
            status: int | None = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    text = (folder / "log").read_text()
    assert status == 0, f"exit status {status}\n{text[-6000:]}"
    seen: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return seen


def check_map(seen: dict[str, Any], num_tensors: int) -> None:
    """Every parameter comes from the checkpoint, every checkpoint tensor lands whole, the probe left no trace."""
    missing = [set(worker["missing"]) for worker in seen["probe"]]
    for worker in seen["probe"]:
        assert worker["error"] == ""
        assert worker["untouched_parameters"] == worker["uncovered_parameters"] == []
        assert worker["put_back"]
        assert worker["num_copies"] >= num_tensors
    if len(missing) == 1:
        assert missing == [set()]
    assert seen["again"] == seen["first"]
    assert seen["after_probe"] == seen["first"]
    assert seen["after_connect"] == seen["first"]


def check_updates(seen: dict[str, Any]) -> None:
    """The answers are those of an engine that started on the values sent, and the live bits what the map says of them."""
    assert seen["second"] == seen["fresh"]
    assert all(a != b for a, b in zip(seen["second"], seen["first"], strict=True))
    assert seen["back"] == seen["first"]
    for worker in seen["holds_second"] + seen["holds_first"]:
        assert worker["error"] == ""
        assert worker["wrong"] == []
        assert worker["compared"] > 0
    assert seen["same_addresses"]
    # Nobody polled but the engine's own steps while the second update came in.
    assert [(s["state"], s["version"], s["error"]) for s in seen["status"]] == [("ready", 2, "")] * len(seen["status"])
    assert all(s["ok"] for s in seen["left"])


def check_naive(seen: dict[str, Any]) -> None:
    """Where the kernel library has taken weights away, the engine's own loader alone is refused, not half followed."""
    for naive, worker in zip(seen["naive_probe"], seen["probe"], strict=True):
        if worker["raw_empty"]:
            assert naive["error"].startswith("ProbeError: load_weights raised")


def check_same(seen: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Greedy answers to the long prompts agree wherever a token was sure, and most tokens could be compared."""
    found = differing(seen, expected)
    assert found["wrong"] == []
    assert found["compared"] >= len(seen) * NUM_TOKENS * 2 // 3


def check_versions_offline(seen: dict[str, Any]) -> None:
    """The backend: vLLM's own spans say which tokens are of which version, and its engine which version it serves."""
    assert seen["version"] == "1"
    crossing = [versions_of(spans, CROSSING_TOKENS) for spans in seen["crossing"]]
    assert {tuple(v) for v in crossing} <= {("1",), ("1", "2"), ("2",)}
    assert ["1", "2"] in crossing
    assert [c["spans"] for c in seen["after"]] == [[["2", 0, NUM_TOKENS]]] * len(seen["after"])


def check_served(seen: dict[str, Any]) -> None:
    """Five versions under load and one while idle: none fails, all can be told apart, the answers are those of the version."""
    assert seen["failures"] == []
    order = ["default", *(str(v) for v in range(1, NUM_VERSIONS + 1))]
    for completion in seen["streamed"]:
        versions = completion["versions"]
        assert (len(completion["tokens"]), completion["finish"]) == (STREAMED_TOKENS, "length")
        assert versions == sorted(set(versions), key=order.index)
        assert completion["stamp"] == ", ".join(versions)
        assert completion["mixed"] == (len(versions) > 1)
    assert {v for c in seen["streamed"] for v in c["versions"]} == set(order)
    assert any(c["mixed"] for c in seen["streamed"])
    # What is said to be of one version is that version's answer, although it was asked for while versions changed.
    last = [c for c in seen["streamed"] if c["versions"] == [order[-1]]]
    assert last
    for completion in last:
        check_same([{"margins": [], **completion}], [seen["reference"][completion["prompt"]]])

    check_same(seen["served_again"], seen["served_first"])
    check_same(seen["served_second"], seen["reference"])
    check_same(seen["served_back"], seen["served_first"])
    assert differing(seen["served_first"], seen["reference"])["wrong"]
    for step, version in (("first", "default"), ("again", "default"), ("second", "5"), ("back", "6")):
        assert [a["stamp"] for a in seen[f"served_{step}"]] == [version] * len(LONG_PROMPTS)
    assert seen["served_status"] == {"version": "6"}


def test_the_comparison_of_answers() -> None:
    expected = [{"tokens": list(range(24)), "margins": [1.0] * 10 + [0.01] + [1.0] * 13}]
    assert differing(expected, expected) == {"wrong": [], "unsure": [], "compared": 24}
    for position, kind in ((3, "wrong"), (10, "unsure")):
        other = [{"tokens": [*range(position), 99, *range(position + 1, 24)], "margins": [1.0] * 24}]
        assert differing(other, expected) == {"wrong": [], "unsure": [], "compared": position, kind: [[0, position]]}
    assert min(map(len, LONG_PROMPTS)) > 2 * BLOCK_SIZE
    assert versions_of([["a", 0, 3], ["b", 3, 4]], 4) == ["a", "b"]
    for spans in ([["a", 0, 3]], [["a", 1, 4]], [["a", 0, 2], ["b", 3, 4]]):
        with pytest.raises(ValueError, match="do not cover 4 tokens"):
            versions_of(spans, 4)


def test_smollm2(tmp_path: Path) -> None:
    smollm2 = cached_checkpoint(cache_dir())
    if smollm2 is None:
        pytest.skip("the real weights are not here; `make demo` prepares them")
    seen = run("smollm2", tmp_path, smollm2)
    check_map(seen, 272)
    check_updates(seen)
    check_naive(seen)
    (worker,) = seen["probe"]
    assert worker["num_copies"] == 272  # one slice copy for each checkpoint tensor
    assert worker["shapes"]["model.layers.7.self_attn.qkv_proj.weight"] == [960, 576]
    assert seen["holds_second"][0]["compared"] == 134_515_008
    check_served(seen)


def test_dense_on_two_workers(tmp_path: Path) -> None:
    """Fused and sharded; 300 rows of vocabulary are padded to 320, and the padding is known to be zeros."""
    seen = run("dense-tp2", tmp_path)
    check_map(seen, 36)
    check_updates(seen)
    check_naive(seen)
    lower, upper = seen["probe"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert name not in lower["constants"]
        assert upper["constants"][name] == [140 * 96, [20 * 96], 0]
        assert upper["shapes"][name] == [160, 96]
    assert lower["shapes"]["model.layers.0.mlp.gate_up_proj.weight"] == [192, 96]
    assert not set(lower["missing"]) & {f"model.layers.{i}.input_layernorm.weight" for i in range(3)}  # replicated
    assert "model.layers.0.self_attn.q_proj.weight" in lower["missing"]  # sharded
    folder, pull = seen["refused"]
    assert "worker 0: SpecError: checkpoint folder '/nowhere' does not exist" in folder
    assert "worker 1: SpecError: checkpoint folder '/nowhere' does not exist" in folder
    assert "start_weight_update has nothing to fetch" in pull
    check_versions_offline(seen)
    # The prefix cache was left alone: prompts longer than a block go on from what the old weights made of them.
    assert differing(seen["long_first"], seen["reference"])["wrong"]
    assert differing(seen["stale"], seen["reference"])["wrong"]
    check_same(seen["long_second"], seen["reference"])
    check_served(seen)


def test_experts_packed_for_the_kernel(tmp_path: Path) -> None:
    """The experts keep name and shape and lie packed: the engine's own loader goes wrong silently, the map does not."""
    seen = run("experts", tmp_path)
    check_map(seen, 75)
    check_updates(seen)
    experts = [f"model.layers.{i}.mlp.experts.routed_experts" for i in range(3)]
    (worker,) = seen["probe"]
    assert {n for n, kind in worker["kind_of"].items() if kind == "packed"} == set(experts)
    # Without the integration nothing complains: a plausible map, and another answer from the engine's own weights.
    assert seen["naive_probe"][0]["error"] == ""
    assert seen["naive_probe"][0]["missing"] == {}
    assert seen["naive"][0]["changed"] == [f"{e}.{w}" for e in experts for w in ("w13_weight", "w2_weight")]
    assert all(a != b for a, b in zip(seen["naive_first"], seen["first"], strict=True))
    # With it the loader packs in place, and an update writes straight to where packed elements lie.
    assert seen["loaded_second"] == seen["fresh"]
    assert seen["repaired"] == seen["first"]
    assert seen["again_changed"] == [{"error": "", "changed": []}]
    (rows,) = seen["rows"]
    assert rows["copies"] == 1
    assert sorted(rows["axes"][0]) == [4, 16, 96]  # 64 rows in four blocks of 16, the columns between
    assert "'w13_weight' unwritten" in seen["partial"][0]["error"]
    assert "6144 of 61440" in seen["partial"][0]["error"]
    check_served(seen)


def test_dense_float32_hidden_in_the_kernel_library(tmp_path: Path) -> None:
    """oneDNN takes the weights and leaves parameters of shape [0]: no address to write to, so they are staged."""
    seen = run("dense-fp32", tmp_path)
    check_map(seen, 36)
    check_updates(seen)
    check_naive(seen)
    (worker,) = seen["probe"]
    assert "model.layers.0.self_attn.qkv_proj.weight" in worker["raw_empty"]
    assert worker["kind_of"]["model.layers.0.self_attn.qkv_proj"] == "hidden"
    assert worker["kind_of"]["lm_head"] == "hidden"  # its weight stays, what it multiplies by is a copy
    assert worker["shapes"]["model.layers.0.self_attn.qkv_proj.weight"] == [(6 + 2 + 2) * 32, 96]
    # It has joined by itself, and its cached prefixes went with the weights that they were made by.
    check_versions_offline(seen)
    check_same(seen["stale"], seen["reference"])
