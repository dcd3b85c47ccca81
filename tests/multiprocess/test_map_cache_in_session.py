"""Options(map_cache=...): a second job takes the layouts of the first; a side one of whose files is bad probes, alone."""

from __future__ import annotations

import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess import toy_job as toy
from tests.multiprocess.test_session_in_process import FAST, Job

from weightbridge.probe import cached
from weightbridge.probe.map_files import load_map, save_map

WORKERS = ["solo/0", "tp/0", "tp/1", "tp/2", "trainer/0", "trainer/1"]


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sides that were probed rather than verified, one entry a worker."""
    found: list[str] = []
    probe, lock = cached.probe, threading.Lock()

    def counted(**arguments: Any) -> Any:
        with lock:
            found.append(type(arguments["load_weights"].__self__).__name__)
        return probe(**arguments)

    monkeypatch.setattr(cached, "probe", counted)
    return found


def run(folder: Path) -> None:
    """A whole job of one version; the job itself looks at every byte."""
    job = Job(options=dataclasses.replace(FAST, map_cache=str(folder)), versions=1)
    job.run_to_end()
    assert job.installed == {name: [1] for name in WORKERS[:4]}


def test_a_second_job_proves_the_layouts_of_the_first_and_moves_the_same_bytes(
    tmp_path: Path, probed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="weightbridge")
    folder = tmp_path / "maps"
    run(folder)
    files = sorted(folder.iterdir())
    assert [f.name.rpartition("-")[0] for f in files] == [name.replace("/", "-") for name in WORKERS]
    assert len(probed) == 6
    assert all(load_map(f).spec.digest == toy.checkpoint_spec().digest for f in files)

    probed.clear()
    run(folder)
    assert probed == []
    assert caplog.records == []

    # Another rank's map under this one's name: the whole engine probes again, the other sides do not.
    good = load_map(files[2])
    save_map(files[2], load_map(files[3]).source_map, good.spec)
    files[4].write_bytes(b"scrap")
    run(folder)
    assert sorted(probed) == ["TensorParallelEngine"] * 3 + ["TrainerShard"] * 2
    said = [record.getMessage() for record in caplog.records]
    assert sum("the cached map does not hold: live tensor" in text for text in said) == 1
    assert sum("no saved map" in text and "trainer-0-" in text for text in said) == 1
    assert load_map(files[2]).source_map.fingerprint == good.source_map.fingerprint  # and is right for the next time
