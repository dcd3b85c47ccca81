"""The RL example (examples/rl): its algorithm against sums done by hand, and a very short run with real trainers and a real
vLLM engine, judged by figures that are worked out again here.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.rl import grpo, report

from weightbridge.cli.demo.prepare import cache_dir, cached_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ENGINE_PYTHON = ROOT / ".venvs" / "vllm" / "bin" / "python"
LIMIT_SECONDS = 540


@pytest.mark.parametrize(
    ("text", "worth"),
    [("", 0.0), ("The cat.", 0.25), ("the other theme, then THE end", 0.5), ("the " * 4, 1.0), ("the " * 9, 1.0)],
)
def test_reward_counts_the_word(text: str, worth: float) -> None:
    assert grpo.reward(text) == worth


def test_advantages_are_deviations_within_the_group() -> None:
    found = grpo.advantages([0.0, 0.5, 1.0, 0.5])
    assert sum(found) == pytest.approx(0)
    assert found[2] == pytest.approx(0.5 / (0.125**0.5 + 1e-4))
    assert grpo.advantages([0.25] * 3) == [0.0] * 3


def test_groups_are_padded_on_the_right_and_shared_by_rows() -> None:
    group = grpo.make_group(
        (7, 8), [[1, 2, 3], [4], [5, 6]], [[-1.0, -2.0, -3.0], [-4.0], [-5.0, -6.0]], [1.0, 0.0, -1.0]
    )
    assert group.ids.tolist() == [[7, 8, 1, 2, 3], [7, 8, 4, 0, 0], [7, 8, 5, 6, 0]]
    assert group.mask.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert group.engine_logprobs.tolist() == [[-1, -2, -3], [-4, 0, 0], [-5, -6, 0]]
    own = group.rows(0, 2)
    assert own.ids.tolist() == [[7, 8, 1, 2, 3], [7, 8, 5, 6, 0]]
    assert own.mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert own.engine_logprobs.tolist() == [[-1, -2, -3], [-5, -6, 0]]
    assert own.advantages.tolist() == [1.0, -1.0]
    assert group.rows(1, 2).ids.tolist() == [[7, 8, 4, 0, 0]]


def test_loss_is_the_clipped_objective_token_by_token() -> None:
    """Ratios below, within and above the clip, for either sign of the advantage; padding counts for nothing."""
    theirs = [[-1.0, -2.0, -0.5], [-1.5, -3.0]]
    group = grpo.make_group((9,), [[1, 2, 3], [4, 5]], theirs, [2.0, -1.0])
    ours = torch.tensor([[-0.4, -2.9, -0.45], [-1.0, -3.9, -7.0]], requires_grad=True)
    expected = 0.0
    for row, advantage in ((0, 2.0), (1, -1.0)):
        for place, logprob in enumerate(theirs[row]):
            ratio = math.exp(ours[row, place].item() - logprob)
            expected -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    loss = grpo.clipped_loss(ours, group, clip=0.2)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert ours.grad is not None
    # No gradient where the clip binds: (0, 0) above with a gain, (1, 1) below with a loss; nor on padding.
    assert [[bool(g) for g in row] for row in ours.grad.tolist()] == [[False, True, True], [True, False, False]]


def test_difference_is_of_real_tokens() -> None:
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    found = grpo.difference(torch.zeros(2, 3), torch.tensor([[0.1, -0.3, 9.0], [0.2, 9.0, 9.0]]), mask)
    assert found["mean"] == pytest.approx(0.2)
    assert found["max"] == pytest.approx(0.3)


def step(number: int, **facts: Any) -> dict[str, Any]:
    apart = {"mean": 0.03, "max": 0.2}
    return {
        "step": number, "version": number, "engine_version": number, "skipped": False, "staleness": 0,
        "update": {"total": 1.0, "trainer_stall": 0.5, "ewtt": 0.9, "agst": 0.8}, "apart_as_sampled": apart,
        "apart_before": {"mean": 0.4, "max": 3.0}, "apart_after": apart, **facts,
    }  # fmt: skip


EVALUATIONS = [{"reward": 0.3, "standard_error": 0.03}, {"reward": 0.9, "standard_error": 0.02}]


def judged(
    steps: list[dict[str, Any]], evaluations: list[dict[str, Any]] = EVALUATIONS, **settings: Any
) -> dict[str, Any]:
    return report.verdict({"learning_rate": 1e-5, "steps": 50, **settings}, evaluations, steps)


def test_verdict_passes_a_good_run_and_no_other() -> None:
    far = {"mean": 0.4, "max": 3.0}
    good = [step(1), step(2), step(3)]
    flat = [EVALUATIONS[0], {"reward": 0.32, "standard_error": 0.03}]
    assert judged(good)["passed"]
    assert not judged(good, flat)["passed"]  # nothing learnt
    assert judged(good, flat, learning_rate=0.0)["passed"]
    assert not judged(good, learning_rate=0.0)["passed"]  # learnt from nothing: the measure is wrong
    assert not judged([step(1), step(2, apart_after=far)])["passed"]
    assert not judged([step(1), step(2, engine_version=1)])["passed"]
    left_out: dict[str, Any] = {"skipped": True, "engine_version": 1, "update": None}
    assert judged([step(1), step(2, apart_after=far, **left_out)])["passed"]
    assert not judged([step(1), step(2, **left_out)])["passed"]  # a missing update that does not show


def test_three_steps_of_the_real_thing(tmp_path: Path) -> None:
    """Update 2 is left out: the engine is then told apart from the trainer, and right again after the third."""
    if not (ENGINE_PYTHON.parent.parent / ".installed").exists():
        pytest.skip("vLLM's environment is not here: make test-vllm, or make rl, makes it")
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed in this environment")
    if cached_checkpoint(cache_dir()) is None:
        pytest.skip("the real weights are not here; `make demo` prepares them")
    command = [
        sys.executable, "-m", "examples.rl", "--steps", "3", "--skip-updates", "2", "--completions", "4", "--max-tokens", "8",
        "--evaluate-completions", "1", "--out", str(tmp_path), "--json",
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    ran = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    found = json.loads(ran.stdout)
    assert json.loads((tmp_path / "rl.json").read_text()) == found
    assert "<svg" in (tmp_path / "rl.svg").read_text()
    steps = found["steps"]
    assert [(s["engine_version"], s["skipped"], s["first_version"], s["staleness"]) for s in steps] == [
        (1, False, 0, 0), (1, True, 1, 0), (3, False, 1, 1),
    ]  # fmt: skip
    for s in steps:
        assert s["rewards"] == [
            min(4, sum(w.strip(".,!?\"'").lower() == "the" for w in t.split())) / 4 for t in s["texts"]
        ]
        assert s["reward"] == pytest.approx(sum(s["rewards"]) / 4)
    # Same weights on both sides but for rounding, against one AdamW step of difference.
    noise = steps[0]["apart_as_sampled"]["mean"]
    assert steps[0]["apart_after"]["mean"] < 2 * noise < steps[1]["apart_after"]["mean"]
    assert steps[2]["apart_after"]["mean"] < 2 * noise < steps[2]["apart_before"]["mean"]
    assert steps[1]["update"] is None
    for s in (steps[0], steps[2]):
        assert 0 < s["update"]["agst"] <= s["update"]["ewtt"]
        assert s["update"]["network_bytes"] == pytest.approx(269_030_016, rel=0.01)
