"""Events: as JSON lines and back, as log records, to several observers of which one raises."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from pathlib import Path

import pytest

from weightbridge.coordinator import session_events as e
from weightbridge.errors import UsageError
from weightbridge.observability import JsonLines, LoggingObserver, compose, event_from_json, read_events
from weightbridge.observability.json_lines import event_to_json
from weightbridge.observability.words import bytes_text, in_words, seconds_text

FINISHED = e.UpdateFinished(
    at=1700000000.25, worker="trainer/1", version=41, ewtt_seconds=3.0, agst_seconds=1.25, ideal_seconds=2.5,
    network_bytes={"trainer/1": (1 << 40, 17), "a/0": (0, 1 << 40)}, slowest_worker="a/0", slowest_stage="exchange",
    attempts=2, superseded=True,
)  # fmt: skip
EVENTS: list[e.SessionEvent] = [
    e.Joined(at=1.5, worker="a/0", session=2**60 - 1),
    e.PhaseChanged(at=2.0, worker="trainer/0", phase="probing"),
    e.Probing(at=2.125, worker="a/0", what='load 3 of "embed"\nand more', done=3, total=11),
    e.Planned(at=3.0, worker="trainer/0", epoch=1, planning_seconds=0.1, pairs=7, rounds=13, ratio_to_bound=1.0625),
    e.Connected(at=4.0, worker="a/0", epoch=1, attempt=1),
    e.UpdateStarted(at=5.0, worker="a/0", version=41, attempt=1),
    e.Progress(at=5.5, worker="a/0", version=41, round=6, rounds=13),
    e.Installed(at=6.0, worker="a/0", version=41, stall_seconds=0.75),
    FINISHED,
    e.UpdateFailed(at=7.0, worker="a/0", version=42, causes={"b/3": "gave no sign of life"}, poisoned=("b",)),
    e.Superseded(at=8.0, worker="a/0", version=43, by=45),
    e.EngineChanged(at=9.0, worker="trainer/0", engine="b", state="lost", version=-1, reason="its process died é"),
    e.SessionEnded(at=10.0, worker="a/0", kind="WorkerError", causes={"trainer/0": "has died"}),
]


def test_the_cases_cover_every_kind_of_event() -> None:
    kinds = {v for v in vars(e).values() if isinstance(v, type) and issubclass(v, e.SessionEvent)} - {e.SessionEvent}
    assert {type(event) for event in EVENTS} == kinds
    assert {k.__name__ for k in kinds} <= set(e.__all__)


def test_every_event_is_one_line_that_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with JsonLines(path) as lines:
        for event in EVENTS:
            lines(event)
            assert path.read_bytes().endswith(b"\n")  # there at once, not when the file is closed
    assert list(read_events(path)) == EVENTS
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["event"] for row in rows] == [type(event).__name__ for event in EVENTS]
    assert rows[8]["network_bytes"] == {"trainer/1": [1 << 40, 17], "a/0": [0, 1 << 40]}
    assert rows[8]["ratio"] == 1.2
    lines(EVENTS[0])  # closed: left out
    assert len(path.read_text().splitlines()) == len(EVENTS)


def test_what_a_killed_process_left_unfinished_is_no_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = event_to_json(EVENTS[0]) + b"\n"
    path.write_bytes(whole + event_to_json(EVENTS[1])[:20])
    assert list(read_events(path)) == EVENTS[:1]
    with JsonLines(path) as lines:
        lines(EVENTS[2])
    assert list(read_events(path)) == [EVENTS[0], EVENTS[2]]


@pytest.mark.parametrize("line", ["", "[]", '{"event":"Joined","at":1}', '{"event":"Nothing"}', '{"at":1}', '"Joined"'])
def test_a_line_that_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match="not an event"):
        event_from_json(line)


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with JsonLines(path) as lines:

        def write(worker: int) -> None:
            for version in range(37):
                lines(e.Superseded(at=0.0, worker=f"w/{worker}", version=version, by=version + 1))

        threads = [threading.Thread(target=write, args=(n,)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    found = list(read_events(path))
    assert len(found) == 5 * 37
    for n in range(5):
        mine = [x.version for x in found if x.worker == f"w/{n}" and isinstance(x, e.Superseded)]
        assert mine == list(range(37))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-folder"):
        JsonLines(tmp_path / "no-such-folder" / "events.jsonl")


def test_events_are_logged_at_the_level_they_deserve(caplog: pytest.LogCaptureFixture) -> None:
    observer = LoggingObserver()
    with caplog.at_level(logging.DEBUG, "weightbridge.events"):
        for event in EVENTS:
            observer(event)
    levels = {type(r.event).__name__: r.levelname for r in caplog.records}  # type: ignore[attr-defined]
    assert {k for k, v in levels.items() if v == "WARNING"} == {"UpdateFailed", "EngineChanged", "SessionEnded"}
    assert {k for k, v in levels.items() if v == "DEBUG"} == {"Progress", "Probing"}
    text = caplog.records[8].getMessage()
    assert text == (
        "trainer/1: version 41 done, 2 attempts, left out by an engine for a newer one: EWTT 3.00 s, AGST 1.25 s, "
        "achieved/ideal 1.20, 1.10 TB, slowest a/0 in exchange"
    )


def test_every_event_says_its_facts_in_words() -> None:
    said = [in_words(event) for event in EVENTS]
    assert not any(s == type(event).__name__ for s, event in zip(said, EVENTS, strict=True))
    assert said[9] == "version 42 given up: b/3: gave no sign of life; engines with mixed weights: b"
    assert said[12] == "session failed, WorkerError: trainer/0: has died"
    assert in_words(e.SessionEnded(at=0, worker="a/0", causes={})) == "session closed in good order"


def test_the_ratio_needs_an_ideal() -> None:
    assert FINISHED.ratio == 1.2
    assert FINISHED.received_bytes == (1 << 40) + 17
    assert dataclasses.replace(FINISHED, ideal_seconds=0.0).ratio is None


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (2_345_678, "2.35 MB"), (7e12, "7.00 TB")]
)
def test_bytes_as_people_read_them(nbytes: float, text: str) -> None:
    assert bytes_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 ms"), (0.0123, "12.3 ms"), (0.9996, "1.00 s"), (61.5, "61.50 s"), (600, "10.0 min"), (9000, "2.5 h")],
)
def test_seconds_as_people_read_them(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_one_observer_that_raises_is_logged_once_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    heard: dict[str, list[e.SessionEvent]] = {"first": [], "last": [], "bad": []}

    def bad(event: e.SessionEvent) -> None:
        heard["bad"].append(event)
        raise RuntimeError("observer's own defect")

    tell = compose(heard["first"].append, bad, heard["last"].append)
    for event in EVENTS:
        tell(event)
    assert heard == {"first": EVENTS, "bad": EVENTS, "last": EVENTS}
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "bad" in caplog.records[0].getMessage()
    assert "own defect" in str(caplog.records[0].exc_info)
