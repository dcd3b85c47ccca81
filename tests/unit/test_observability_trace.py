"""Traces: they parse, spans of one thread nest, times are microseconds, several files become one on one time axis."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from weightbridge.coordinator import session_events as e
from weightbridge.errors import UsageError
from weightbridge.executor import KernelRan, Observation
from weightbridge.observability import Trace, merge_traces
from weightbridge.observability.trace_format import TraceFile, Tracks, complete, instant, read_trace


def spans(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [x for x in events if x["ph"] == "X"]


def assert_nested(events: list[dict[str, Any]]) -> None:
    """Two spans of one thread are disjoint or one holds the other, looked at pair by pair."""
    for a, b in itertools.combinations(spans(events), 2):
        if (a["pid"], a["tid"]) == (b["pid"], b["tid"]):
            begin_a, end_a, begin_b, end_b = (round(x * 1000) for x in (
                a["ts"], a["ts"] + a["dur"], b["ts"], b["ts"] + b["dur"],
            ))  # fmt: skip
            apart = end_a <= begin_b or end_b <= begin_a
            inside = (begin_a <= begin_b and end_b <= end_a) or (begin_b <= begin_a and end_a <= end_b)
            assert apart or inside, (a, b)


def names(events: list[dict[str, Any]], what: str) -> dict[Any, str]:
    key = (lambda x: x["pid"]) if what == "process_name" else (lambda x: (x["pid"], x["tid"]))
    return {key(x): x["args"]["name"] for x in events if x["name"] == what}


def test_a_version_with_two_attempts_and_what_a_kernel_did(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with Trace(path) as trace:
        now, steady = time.time(), time.monotonic()
        trace(e.PhaseChanged(at=now, worker="trainer/0", phase="probing"))
        trace(e.PhaseChanged(at=now + 2, worker="trainer/0", phase="ready"))
        trace(e.UpdateStarted(at=now + 3, worker="a/0", version=7, attempt=4))
        trace(e.UpdateStarted(at=now + 4, worker="a/0", version=7, attempt=5))
        ran = KernelRan(work="assemble", round=3, began_at=steady + 4.25)
        trace.observe(Observation(worker="a/0", at=steady + 4.5, what=ran))
        trace(e.Progress(at=now + 4.5, worker="a/0", version=7, round=3, rounds=9))
        trace(e.Installed(at=now + 5, worker="a/0", version=7, stall_seconds=1.5))
        trace(e.UpdateFailed(at=now + 6, worker="trainer/0", version=7, causes={"b/0": "died"}))  # was not begun here
    document = json.loads(path.read_text())
    events = document["traceEvents"]
    assert document["otherData"]["origin_seconds"] == pytest.approx(now, abs=1.0)
    assert_nested(events)
    processes, threads = names(events, "process_name"), names(events, "thread_name")
    found = {(processes[x["pid"]], threads[x["pid"], x["tid"]], x["name"]): (x["ts"], x["dur"]) for x in spans(events)}
    origin = found["trainer/0", "phase", "probing"][0]
    lengths = {key: ((ts - origin) / 1e6, dur / 1e6) for key, (ts, dur) in found.items()}
    near = {
        ("trainer/0", "phase", "probing"): (0.0, 2.0),
        ("a/0", "version", "version 7"): (3.0, 2.0),
        ("a/0", "version", "attempt 4"): (3.0, 1.0),
        ("a/0", "version", "attempt 5"): (4.0, 1.0),
        ("a/0", "stood still", "version 7"): (3.5, 1.5),
        ("a/0", "assemble", "round 3"): (4.25, 0.25),
    }
    ready = lengths.pop(("trainer/0", "phase", "ready"))  # the last phase lasts until the trace is closed
    assert ready[0] == pytest.approx(2.0, abs=1e-3)
    assert set(lengths) == set(near)
    for key, times in near.items():
        assert lengths[key] == pytest.approx(times, abs=0.02), key
    assert [x["args"] for x in events if x["ph"] == "C"] == [{"rounds": 3}]
    assert [x["name"] for x in events if x["ph"] == "i"] == ["version 7 given up: b/0: died"]


def test_spans_that_overlap_go_to_threads_of_their_own() -> None:
    tracks = Tracks()
    times = [(0.0, 1.0), (0.5, 1.25), (1.0, 2.0), (0.25, 2.5), (1.25, 3.0), (2.0, 3.5)]
    events = [complete("x", "post", tracks.track("w", "post", b, e_), b, e_, {}) for b, e_ in times]
    assert_nested(events)
    assert [x["tid"] % 1000 for x in events] == [1, 2, 1, 3, 2, 1]
    labels = names(tracks.take_news(), "thread_name")
    assert sorted(labels.values()) == ["post", "post 2", "post 3"]
    assert tracks.take_news() == []


def test_times_are_whole_nanoseconds_in_microseconds() -> None:
    span = complete("x", "l", (1, 2), 1.0000000004, 86400.1234567891, {"bytes": 3})
    assert span["ts"] == 1000000.0
    assert span["ts"] + span["dur"] == pytest.approx(86400123456.789, abs=1e-4)
    assert complete("x", "l", (1, 2), 2.0, 1.0, {})["dur"] == 0.0  # never backwards
    assert instant("x", "l", (1, 2), 0.0000015, {})["ts"] == 1.5


def write(path: Path, origin: float, worker: str, times: list[tuple[float, float]], *, close: bool = True) -> None:
    file, tracks = TraceFile(path, origin), Tracks()
    for number, (begin, end) in enumerate(times):
        span = complete(f"round {number}", "pack", tracks.track(worker, "pack", begin, end), begin, end, {})
        for event in (*tracks.take_news(), span):
            file.write(event)
    if close:
        file.close()
    else:
        file.flush()


def test_traces_of_several_workers_become_one(tmp_path: Path) -> None:
    a, b, c = (tmp_path / f"{x}.json" for x in "abc")
    write(a, 1000.0, "trainer/0", [(0.0, 1.0), (0.5, 1.5)])
    write(b, 998.5, "a/0", [(3.0, 4.0)])
    write(c, 999.0, "a/1", [(1.0, 2.0), (4.0, 4.5), (6.0, 7.0)], close=False)
    killed = tmp_path / "killed.json"
    killed.write_text(c.read_text()[:-9])  # as it lay there when its process was killed in the middle of a line
    merged = tmp_path / "merged.json"
    assert merge_traces(merged, [a, b, killed]) == 2 + 1 + 2
    events = json.loads(merged.read_text())["traceEvents"]
    assert_nested(events)
    processes = names(events, "process_name")
    assert processes == {1: "trainer/0", 2: "a/0", 3: "a/1"}
    found = [(processes[x["pid"]], x["name"], x["ts"], x["dur"]) for x in spans(events)]
    assert found == [
        ("trainer/0", "round 0", 1.5e6, 1e6), ("trainer/0", "round 1", 2.0e6, 1e6),
        ("a/0", "round 0", 3.0e6, 1e6),
        ("a/1", "round 0", 1.5e6, 1e6), ("a/1", "round 1", 4.5e6, 0.5e6),
    ]  # fmt: skip
    threads = [x["tid"] for x in events if x["name"] == "thread_name"]
    assert len(set(threads)) == len(threads) == 4
    assert read_trace(merged)[0] == 998.5


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"a": 1}\n')
    with pytest.raises(UsageError, match=r"other\.json"):
        merge_traces(tmp_path / "out.json", [other])
    with pytest.raises(UsageError, match="at least one"):
        merge_traces(tmp_path / "out.json", [])
    with pytest.raises(UsageError, match="nowhere"):
        Trace(tmp_path / "nowhere" / "trace.json")
