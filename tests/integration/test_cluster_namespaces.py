"""A real cluster of namespaces: two nodes, 8 MB, every method; the interfaces' counters say what crossed the links."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.cluster.netns import Testbed, TestbedError, stale_names

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def _a_machine_that_can() -> None:
    """Skip, with the sentence the user would see, where there is no root, no namespaces, or another run."""
    try:
        with Testbed([1e9]):
            pass
    except TestbedError as error:
        pytest.skip(str(error))


def _namespaces() -> list[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=20).stdout
    return [line.split()[0] for line in listing.splitlines() if line.strip()]


def test_every_method_moves_the_model_over_the_links_and_leaves_nothing_behind() -> None:
    command = [sys.executable, "-m", "benchmarks.cluster", "huge-tensor", "--layers", "2", "--repeats", "2", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    model = found["model_bytes"]
    assert model == 128 * 32768 * 2 + 32768 * 2
    methods = [r["method"] for r in found["results"]]
    assert methods[:4] == ["weightbridge", "broadcast", "p2p", "file"]
    assert [*methods[4:], *found["skipped"]] == ["peer:mooncake"]  # measured, or left out with the reason
    assert all(found["skipped"].values())
    assert found["results"][0]["unoverlapped_kernel_share"] is not None
    assert found["results"][0]["plan"]["rounds"] > 0
    for r in found["results"]:
        assert r["verified"] is True
        assert r["predicted_ewtt_seconds"] > 0
        assert len(r["ewtt_seconds"]) == 2
        assert set(r["peak_extra_bytes"]) == {"trainer/0", "trainer/1", "engine-0/0", "engine-0/1"}
        # Rollout workers take half of the columns each; whoever reads a file reads whole rows.
        once = 2 if r["method"] == "file" else 1
        assert once * model <= r["rollout_ingress_bytes"]["n1"] <= once * model * 1.05 + 200_000
        assert once * model <= r["trainer_egress_bytes"] <= once * model * 1.05 + 200_000
    assert stale_names("\n".join(_namespaces())) == []


def test_what_an_earlier_run_left_is_removed_and_nothing_else() -> None:
    for name in ("wb-n63", "wb-other"):
        subprocess.run(["ip", "netns", "add", name], check=True, timeout=20)
    try:
        with Testbed([1e9, 2e9]) as testbed:
            inside = _namespaces()
            # Another run has to wait for this one.
            with pytest.raises(TestbedError, match="another run"), Testbed([1e9]):
                pass
            shaped = subprocess.run(
                [*testbed.command_prefix(1), "tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True, check=True,
                timeout=20,
            ).stdout  # fmt: skip
        after = _namespaces()
    finally:
        subprocess.run(["ip", "netns", "del", "wb-other"], check=True, timeout=20)
    assert {"wb-sw", "wb-n0", "wb-n1", "wb-other"} <= set(inside)
    assert "wb-n63" not in inside
    assert "tbf" in shaped
    assert "rate 2Gbit" in shaped
    assert [n for n in after if n.startswith("wb-")] == ["wb-other"]
