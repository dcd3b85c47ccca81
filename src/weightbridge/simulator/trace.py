"""A simulated update as a trace for Perfetto or chrome://tracing: a process per node, threads per worker and lane.

The JSON object format of trace events: complete events ("X") with `ts` and `dur` in microseconds of virtual time, named by
their round; metadata events ("M") that name and order processes and threads. Spans of one lane that overlap, as two rounds on
their way at once do, are put on further threads: events of one thread must not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UsageError
from weightbridge.plan import Topology
from weightbridge.simulator.result import LANES

__all__ = ["trace_events", "write_trace"]

_MICROSECONDS = 1e6


def write_trace(path: Path, topology: Topology, spans: npt.NDArray[np.void]) -> int:
    """Write the trace of `spans` (array of SPAN) to `path`; returns the number of spans in it.

    Streams: a job of hundreds of workers has hundreds of thousands of spans. Raises UsageError when the file cannot be
    written.
    """
    written = 0
    try:
        with path.open("w", encoding="utf-8") as out:
            out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for i, event in enumerate(trace_events(topology, spans)):
                out.write((",\n" if i else "") + json.dumps(event, separators=(",", ":")))
                written += event["ph"] == "X"
            out.write("\n]}\n")
    except OSError as error:
        raise UsageError(f"the trace could not be written to {str(path)!r}: {error.strerror or error}") from error
    return written


def trace_events(topology: Topology, spans: npt.NDArray[np.void]) -> Iterator[dict[str, object]]:
    """The trace's events: names of nodes and threads first, then the spans by worker, lane and start."""
    nodes = {name: i + 1 for i, name in enumerate(topology.nodes)}
    for name, pid in nodes.items():
        yield _named("process_name", pid, 0, {"name": name})
        yield _named("process_sort_index", pid, 0, {"sort_index": pid})
    order = np.lexsort((spans["start"], spans["lane"], spans["worker"]))
    ordered = spans[order]
    threads: dict[int, int] = {}  # node -> threads named so far
    edges = np.flatnonzero(np.diff(ordered["worker"].astype(np.int64) * len(LANES) + ordered["lane"])) + 1
    for group in np.split(ordered, edges):
        if len(group):
            worker = topology.workers[int(group["worker"][0])]
            pid, lane = nodes[worker.node], LANES[int(group["lane"][0])]
            tracks = _tracks(group)
            first = threads.get(pid, 0) + 1
            threads[pid] = first + max(tracks)
            for track in range(max(tracks) + 1):
                name = f"{worker.name} {lane}" + (f" {track + 1}" if track else "")
                yield _named("thread_name", pid, first + track, {"name": name})
                yield _named("thread_sort_index", pid, first + track, {"sort_index": first + track})
            for (_, _, round_, start, end, nbytes), track in zip(group.tolist(), tracks, strict=True):
                yield {
                    "ph": "X",
                    "name": f"round {round_}" if round_ >= 0 else lane,
                    "cat": lane,
                    "pid": pid,
                    "tid": first + track,
                    "ts": round(start * _MICROSECONDS, 3),
                    "dur": round((end - start) * _MICROSECONDS, 3),
                    "args": {"bytes": nbytes},
                }


def _tracks(spans: npt.NDArray[np.void]) -> list[int]:
    """For each of `spans`, sorted by start, the first track that is free by then."""
    free_at: list[float] = []
    tracks = []
    for start, end in zip(spans["start"].tolist(), spans["end"].tolist(), strict=True):
        track = next((i for i, free in enumerate(free_at) if free <= start), len(free_at))
        if track == len(free_at):
            free_at.append(end)
        free_at[track] = end
        tracks.append(track)
    return tracks


def _named(what: str, pid: int, tid: int, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}
