"""Trace files for Perfetto and chrome://tracing: the JSON object format, one event a line, times in microseconds.

Complete events ("X") of one thread must be disjoint or nest; `Tracks` gives each its thread. Times go in as seconds and
come out as whole nanoseconds, so that spans that touch do not overlap by rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from weightbridge.errors import UsageError

__all__ = ["TraceEvent", "TraceFile", "Tracks", "complete", "counter", "instant", "merge_traces", "named", "read_trace"]

TraceEvent = dict[str, Any]

_TIDS = 100_000  # of one process


def complete(
    name: str, lane: str, track: tuple[int, int], begin: float, end: float, args: Mapping[str, object]
) -> TraceEvent:
    """A span. track: (pid, tid). begin, end: seconds since the trace's origin."""
    ts, te = _nanoseconds(begin), _nanoseconds(end)
    times = {"ts": ts / 1000, "dur": max(te - ts, 0) / 1000}
    return {"ph": "X", "name": name, "cat": lane, "pid": track[0], "tid": track[1], **times, "args": dict(args)}


def instant(name: str, lane: str, track: tuple[int, int], at: float, args: Mapping[str, object]) -> TraceEvent:
    """Something that has no length."""
    ts = _nanoseconds(at) / 1000
    return {
        "ph": "i", "s": "t", "name": name, "cat": lane, "pid": track[0], "tid": track[1], "ts": ts, "args": dict(args),
    }  # fmt: skip


def counter(name: str, pid: int, at: float, values: Mapping[str, float]) -> TraceEvent:
    """Values at a time, drawn as a curve."""
    return {"ph": "C", "name": name, "pid": pid, "ts": _nanoseconds(at) / 1000, "args": dict(values)}


def named(what: str, pid: int, tid: int, name: str) -> TraceEvent:
    """what: "process_name" or "thread_name"."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class Tracks:
    """The threads of a trace's processes. Spans of one lane that overlap go to further threads of it."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._tids: dict[int, int] = {}  # pid -> threads so far
        self._lanes: dict[tuple[int, str], list[tuple[int, float]]] = {}  # (pid, lane) -> (tid, free from)
        self._news: list[TraceEvent] = []

    def pid(self, process: str) -> int:
        """Of a process by its name, in the order they are first asked for, from 1."""
        if process not in self._pids:
            pid = self._pids[process] = len(self._pids) + 1
            self._news += [named("process_name", pid, 0, process), _sort("process_sort_index", pid, 0, pid)]
        return self._pids[process]

    def track(self, process: str, lane: str, begin: float, end: float) -> tuple[int, int]:
        """(pid, tid) of a thread of this lane that is free from `begin`; it is busy until `end` then. Spans of a lane
        come in the order of their ends."""
        pid = self.pid(process)
        threads = self._lanes.setdefault((pid, lane), [])
        for i, (tid, free_from) in enumerate(threads):
            if free_from <= begin:
                threads[i] = tid, max(end, free_from)
                return pid, tid
        number = self._tids[pid] = self._tids.get(pid, 0) + 1
        tid = pid * _TIDS + number
        name = lane + (f" {len(threads) + 1}" if threads else "")
        threads.append((tid, end))
        self._news += [named("thread_name", pid, tid, name), _sort("thread_sort_index", pid, tid, number)]
        return pid, tid

    def take_news(self) -> list[TraceEvent]:
        """The names of what has been handed out since the last call: they go into the file too."""
        news, self._news = self._news, []
        return news


def _sort(what: str, pid: int, tid: int, index: int) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"sort_index": index}}


class TraceFile:
    """Writes events as they come. Until `close` the file lacks its last line only, which `read_trace` does not need."""

    def __init__(self, path: Path, origin: float) -> None:
        """origin: what the events' times count from, in seconds since the epoch. Raises UsageError when it cannot be
        written."""
        try:
            self._out: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"the trace cannot be written to {str(path)!r}: {error.strerror or error}") from error
        self._num_events = 0
        header = json.dumps({"displayTimeUnit": "ms", "otherData": {"origin_seconds": origin}})
        self._out.write(header[:-1] + ', "traceEvents": [\n')

    def write(self, event: TraceEvent) -> None:
        self._out.write((",\n" if self._num_events else "") + json.dumps(event, separators=(",", ":")))
        self._num_events += 1

    def flush(self) -> None:
        self._out.flush()

    def close(self) -> None:
        """Idempotent."""
        if not self._out.closed:
            self._out.write("\n]}\n")
            self._out.close()


def read_trace(path: Path) -> tuple[float, Iterator[TraceEvent]]:
    """(origin, events) of a file that TraceFile wrote, also one that was not closed. Raises UsageError when it is none."""
    with path.open(encoding="utf-8") as lines:
        try:
            origin = float(json.loads(lines.readline().rstrip() + "]}")["otherData"]["origin_seconds"])
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{str(path)!r} is no trace of this library; give files that Trace wrote") from None
    return origin, _events(path)


def _events(path: Path) -> Iterator[TraceEvent]:
    with path.open(encoding="utf-8") as lines:
        next(lines)
        for line in lines:
            text = line.strip().rstrip(",")
            if text == "]}":
                return
            try:
                event = json.loads(text)
            except ValueError:
                return  # the process died while it wrote this
            yield event


def merge_traces(target: Path | str, sources: list[Path | str]) -> int:
    """One trace of the traces of several workers, on one time axis; returns the number of spans.

    The machines' clocks must be in step (NTP); what they differ by is how far their workers are shifted. Raises UsageError.
    """
    if not sources:
        raise UsageError("merge_traces needs at least one trace to merge")
    read = [read_trace(Path(source)) for source in sources]
    first = min(origin for origin, _ in read)
    out = TraceFile(Path(target), first)
    num_pids = num_spans = 0
    try:
        for origin, events in read:
            before, shift = num_pids, (origin - first) * 1e6
            for event in events:
                pid = event["pid"] + before
                num_pids = max(num_pids, pid)
                event["pid"] = pid
                if event.get("tid"):
                    event["tid"] = pid * _TIDS + event["tid"] % _TIDS
                if "ts" in event:
                    event["ts"] = round(event["ts"] + shift, 3)
                if event["name"] == "process_sort_index":
                    event["args"] = {"sort_index": pid}
                num_spans += event["ph"] == "X"
                out.write(event)
    finally:
        out.close()
    return num_spans
