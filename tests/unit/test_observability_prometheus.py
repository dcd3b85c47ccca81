"""The metrics of a process, as Prometheus would scrape them."""

from __future__ import annotations

import math
import socket
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from weightbridge.coordinator import session_events as e
from weightbridge.errors import UsageError
from weightbridge.observability import PrometheusObserver

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def finished(version: int, worker: str = "trainer/0", **fields: object) -> e.UpdateFinished:
    facts: dict[str, object] = {
        "ewtt_seconds": 3.0, "agst_seconds": 1.5, "ideal_seconds": 2.0, "slowest_worker": "a/0",
        "network_bytes": {"trainer/0": (700, 11), "a/0": (0, 700)}, "slowest_stage": "receive",
    }  # fmt: skip
    return e.UpdateFinished(at=1.0, worker=worker, version=version, **{**facts, **fields})  # type: ignore[arg-type]


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if family.name.startswith("weightbridge_") and not s.name.endswith("_created")
    }


def test_a_scrape_shows_what_the_events_said() -> None:
    with PrometheusObserver() as metrics:
        port = metrics.serve(0)
        for event in (
            e.Joined(at=0.0, worker="trainer/0", session=5),
            e.Planned(
                at=0.5, worker="trainer/0", epoch=2, planning_seconds=0.25, pairs=9, rounds=17, ratio_to_bound=1.5
            ),
            e.Connected(at=0.6, worker="trainer/0", epoch=2, attempt=4),
            e.PhaseChanged(at=0.7, worker="trainer/0", phase="connecting"),
            e.PhaseChanged(at=0.8, worker="trainer/0", phase="ready"),
            e.EngineChanged(at=0.9, worker="trainer/0", engine="a", state="ready", version=-1),
            e.EngineChanged(at=0.9, worker="trainer/0", engine="a", state="updating", version=6),
            e.Progress(at=1.0, worker="a/0", version=7, round=5, rounds=17),
            e.Installed(at=1.0, worker="a/0", version=7, stall_seconds=0.75),
            finished(7),
            finished(7, worker="trainer/1"),  # the other trainer of this process says the same
            finished(8, ewtt_seconds=5.0, superseded=True, attempts=3, slowest_stage="exchange"),
            e.UpdateFailed(at=2.0, worker="trainer/0", version=9, causes={"a/0": "died"}),
            e.UpdateFailed(at=2.0, worker="trainer/1", version=9, causes={"a/0": "died"}),
            e.SessionEnded(at=3.0, worker="trainer/0", kind="WorkerError", causes={"a/0": "died"}),
        ):
            metrics(event)
        found = scrape(port)

    def value(name: str, **labels: str) -> float:
        return found["weightbridge_" + name, tuple(sorted(labels.items()))]

    assert [value("updates_total", result=r) for r in ("finished", "superseded", "failed")] == [1, 1, 1]
    assert value("update_attempts_total") == 4
    assert (value("update_ewtt_seconds_count"), value("update_ewtt_seconds_sum")) == (2, 8.0)
    assert value("update_ewtt_seconds_bucket", le="2.5") == 0
    assert value("update_ewtt_seconds_bucket", le="5.0") == 2
    assert (value("update_last_ewtt_seconds"), value("update_last_agst_seconds")) == (5.0, 1.5)
    assert (value("update_ideal_seconds"), value("update_achieved_over_ideal")) == (2.0, 2.5)
    assert value("network_bytes_total", worker="trainer/0", direction="sent") == 1400
    assert value("network_bytes_total", worker="trainer/0", direction="received") == 22
    assert value("slowest_total", worker="a/0", stage="receive") == 1
    assert value("slowest_total", worker="a/0", stage="exchange") == 1
    assert (value("version"), value("epoch")) == (8, 2)
    assert (value("plan_seconds"), value("plan_rounds"), value("plan_pairs"), value("plan_ratio_to_bound")) == (
        0.25, 17, 9, 1.5,
    )  # fmt: skip
    assert (value("update_round", worker="a/0"), value("update_rounds", worker="a/0")) == (5, 17)
    assert (value("installed_version", worker="a/0"), value("install_stall_seconds_sum", worker="a/0")) == (7, 0.75)
    assert [value("phase", phase=p) for p in ("connecting", "ready", "failed")] == [0, 1, 0]
    assert [value("engine_state", engine="a", state=s) for s in ("ready", "updating", "lost")] == [0, 1, 0]
    assert value("engine_version", engine="a") == 6
    assert (value("session_over", worker="trainer/0"), value("session_ends_total", kind="WorkerError")) == (1, 1)
    with pytest.raises(OSError, match="refused"):  # closed: the port is given back
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_version_of_the_next_session_counts_again() -> None:
    metrics = PrometheusObserver()
    for session, version in ((1, 4), (1, 4), (2, 4)):
        metrics(e.Joined(at=0.0, worker="trainer/0", session=session))
        metrics(finished(version))
    assert metrics.registry.get_sample_value("weightbridge_updates_total", {"result": "finished"}) == 2
    assert metrics.registry.get_sample_value("weightbridge_session_over", {"worker": "trainer/0"}) == 0


def test_without_an_ideal_there_is_no_ratio() -> None:
    metrics = PrometheusObserver()
    metrics(finished(1, ideal_seconds=0.0))
    assert math.isnan(metrics.registry.get_sample_value("weightbridge_update_achieved_over_ideal") or 0.0)


def test_a_port_that_is_taken_and_a_second_serve_are_refused() -> None:
    with PrometheusObserver() as first, PrometheusObserver() as second:
        port = first.serve(0)
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}"):
            second.serve(port)
        with pytest.raises(UsageError, match="called before"):
            first.serve(0)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UsageError, match=r"prometheus-client.*weightbridge-rl\[prometheus\]"):
        PrometheusObserver()
