"""`weightbridge demo` on its real weights, end to end; downloads them where the cache is empty."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def demo(scratch: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    environ = {**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-m", "weightbridge.cli.main", "demo", "--json", *options],
        capture_output=True,
        text=True,
        timeout=560,
        env=environ,
        check=False,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def test_every_version_is_proven_and_the_answer_changes(tmp_path: Path) -> None:
    status, document, text = demo(tmp_path)
    assert status == 0, text
    assert document["all_verified"]
    assert document["passed"]
    assert document["num_params"] == 134_515_008
    assert [v["version"] for v in document["versions"]] == [1, 2, 3]
    assert all(v["verified"] and 0 < v["agst_seconds"] <= v["ewtt_seconds"] for v in document["versions"])
    nbytes = document["plan"]["model_bytes"]
    assert nbytes == 2 * document["num_params"]
    for version in document["versions"]:
        network = version["network_bytes"]
        assert network["trainers"]["sent"] == pytest.approx(nbytes, rel=0.01)
        assert network["rollout-a"]["received"] == pytest.approx(nbytes, rel=0.01)
        assert network["rollout-b"]["received"] == pytest.approx(nbytes, rel=0.01)
    assert set(document["answer_before"]) == {"tp3", "single"}
    for engine in ("tp3", "single"):
        assert "Paris" in document["answer_before"][engine]
        assert "Lyon" in document["answer_after"][engine]
        assert document["answer_after"][engine] == document["answer_reference"]
        assert document["tokens"][engine]["differing"] == 0
    assert text.rstrip().endswith("all verified")


@pytest.mark.parametrize(("victim", "after"), [("trainer/0", 0.15), ("tp3/1", 0.03)])
def test_a_death_in_the_middle_of_a_transfer(victim: str, after: float, tmp_path: Path) -> None:
    """269 MB take some half a second: a trainer dies that long after its call, an engine's worker after its hook."""
    status, document, text = demo(tmp_path, "--fail", f"kill:{victim}@version=1,after={after}")
    assert status == 1, text
    assert document["error"]["dead"] == [victim], text
    causes = document["error"]["causes"]
    assert len(causes) == 6
    assert all(victim in cause for worker, cause in causes.items() if worker != victim), causes
