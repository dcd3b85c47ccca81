"""Whole sessions with other transports between the nodes: the kind asked for is used, or passed over where it is missing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import tests.conformance.test_transport_one_sided as one_sided
import tests.multiprocess.test_session_in_process as session

from weightbridge.executor import Executor
from weightbridge.transports import NixlTransport
from weightbridge.transports.selection import KINDS, Choice


class LateNixl(one_sided.LateTransport):
    """An engine made for tests under the name of a real one."""

    name = "nixl"


def _run(monkeypatch: pytest.MonkeyPatch, **options: Any) -> set[Choice]:
    """Two versions to two engines, checked bit for bit; the choices that the workers made."""
    choices: set[Choice] = set()
    connect = Executor.connect

    def note(executor: Executor, endpoints: Any) -> None:
        connect(executor, endpoints)
        choices.update(executor.choices.values())

    monkeypatch.setattr(Executor, "connect", note)
    job = session.Job(options=dataclasses.replace(session.FAST, **options), versions=2)
    with job.running() as workers:
        for rank in range(2):
            workers[f"trainer/{rank}"].join()
    assert [w.error for w in workers.values() if w.error is not None] == []
    assert job.wrong == []
    assert set(map(tuple, job.installed.values())) == {(1, 2)}
    return choices


def test_the_first_choice_carries_the_versions_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "nixl", LateNixl)  # type: ignore[arg-type]
    choices = _run(monkeypatch, transports=("nixl", "tcp"))
    assert {c.name for c in choices} == {"shm", "nixl"}


def test_what_is_missing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NixlTransport, "missing", classmethod(lambda cls: "no such library"))
    choices = _run(monkeypatch, transports=("nixl", "tcp"))
    assert {c.name for c in choices} == {"shm", "tcp"}


def test_by_default_it_is_tcp_between_nodes_and_shared_memory_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {c.name for c in _run(monkeypatch)} == {"shm", "tcp"}
