"""The demo's configuration: what crosses to the workers, and the form of a fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.demo_cases import config

from weightbridge.cli.demo.config import DemoConfig, Fault, parse_fault
from weightbridge.errors import UsageError


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    one = config(fault=Fault(worker="tp3/1", version=2, delay_seconds=0.25), loader_wants="x")
    one.write(tmp_path / "config.json")
    assert DemoConfig.read(tmp_path / "config.json") == one


def test_workers_and_their_nodes() -> None:
    one = config()
    assert one.workers == ("trainer/0", "trainer/1", "tp3/0", "tp3/1", "tp3/2", "single/0")
    assert [one.node_of(w) for w in one.workers] == ["trainers"] * 2 + ["rollout-a"] * 3 + ["rollout-b"]
    with pytest.raises(UsageError, match=r"'tp4' is not part .* tp3, single"):
        one.node_of("tp4/0")


def test_faults_are_read() -> None:
    assert parse_fault("kill:tp3/1@version=2") == Fault(worker="tp3/1", version=2, delay_seconds=0.05)
    assert parse_fault("kill:trainer/0@version=1,after=1.5") == Fault(worker="trainer/0", version=1, delay_seconds=1.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill",
        "stop:tp3/1@version=2",
        "kill:@version=2",
        "kill:tp3/1",
        "kill:tp3/1@after=2",
        "kill:tp3/1@version=two",
        "kill:tp3/1@version=2,before=3",
    ],
)
def test_a_malformed_fault_shows_the_form(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected kill:WORKER@version=N"):
        parse_fault(text)


def test_the_command_starts_without_torch() -> None:
    """The launcher waits for six processes that import torch; it must not be a seventh."""
    code = "import sys, weightbridge.cli.main; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"
