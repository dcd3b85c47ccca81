"""Whole sessions with the Triton kernels in Triton's interpreter: packing, assembling and copying by them alone, bit for bit.

The interpreter takes some milliseconds for each program of a grid and one at a time, so the model is tiny. It works on memory
of the CPU: pinning, streams and a real compiler are for tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import tests.multiprocess.test_session_in_process as session
from tests.interpreted_triton import interpreted_triton

from weightbridge.executor import Executor

pytest.importorskip("triton", reason="the package triton is not installed (the extra 'gpu')")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[ModuleType]:
    with interpreted_triton() as module:
        yield module


@pytest.mark.parametrize(("staged", "versions"), [(False, 2), (True, 1)])
def test_versions_arrive_bit_for_bit(
    interpreted: ModuleType, monkeypatch: pytest.MonkeyPatch, staged: bool, versions: int
) -> None:
    launched, choices, connect = [], set(), Executor.connect
    launch = interpreted.TritonKernels.launch

    def counted(self: Any, prepared: Any) -> Any:
        launched.append(prepared)
        return launch(self, prepared)

    def noted(executor: Executor, endpoints: Any) -> None:
        connect(executor, endpoints)
        choices.update(c.name for c in executor.choices.values())

    monkeypatch.setattr(interpreted.TritonKernels, "launch", counted)
    monkeypatch.setattr(Executor, "connect", noted)
    monkeypatch.setattr(session.toy, "LAYERS", 1)
    options = replace(session.FAST, kernels="triton", stage_send=staged, stage_receive=staged)
    job = session.Job(options=options, versions=versions)
    job.nodes["solo"] = "trainers"
    job.run_to_end()
    assert choices == {"tcp", "shm"}
    assert {name: seen[-1] for name, seen in job.installed.items()} == dict.fromkeys(job.installed, versions)
    # Each worker packs or assembles every version, and with host copies captures or installs it too.
    assert len(launched) == 6 * versions * (2 if staged else 1)
