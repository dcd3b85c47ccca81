"""A few versions of `benchmarks.elastic` with real processes: engines come, go and die, and every value is right."""

from __future__ import annotations

import pytest
from benchmarks._elastic_job import Settings
from benchmarks.elastic import measure


@pytest.mark.multiprocess
@pytest.mark.timeout(120)
def test_engines_come_go_and_die_and_every_version_is_right() -> None:
    found = measure(Settings(versions=40, seed=8, stage_send=True))
    assert found["problems"] == []
    assert found["wrong_values"] == 0
    assert found["versions"] == 40
    assert min(found["joins"], found["leaves"], found["kills"]) > 0
    assert found["ok"]
