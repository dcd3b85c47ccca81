"""Where the time of one update goes: packs, posts, arrivals, assemblies of each worker, as Options(observe=...) tells it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from weightbridge.observability.spans import LANES, Recorder, Span
from weightbridge.observability.trace_format import Tracks, complete, counter
from weightbridge.plan import Topology

__all__ = ["LANES", "LinkSampler", "Recorder", "Sample", "Span", "link_losses", "summary", "write_trace"]

Sample = tuple[float, int, int]
"""time.monotonic, bytes received, bytes sent so far, of one node's link."""

_SAMPLE_SECONDS = 0.005


class LinkSampler:
    """Reads the counters of all links again and again on a thread of its own while entered."""

    def __init__(self, read: Callable[[], Mapping[int, tuple[int, int]] | None]) -> None:
        self._read = read
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link-sampler", daemon=True)
        self.samples: dict[int, list[Sample]] = {}

    def __enter__(self) -> LinkSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            for node, (received, sent) in (self._read() or {}).items():
                self.samples.setdefault(node, []).append((time.monotonic(), received, sent))


def link_losses(samples: Sequence[Sample], rate_bits: float, begin: float, end: float) -> dict[str, dict[str, float]]:
    """Where one link lost time in an update that lasted from `begin` to `end`: "received" and "sent" ->

    bytes; full_seconds: what they take at the full rate; head, tail: before the link first ran at half of its rate or more,
    and after it last did; middle: what was lost in between. The four add up to the length of the update.
    """
    found = {}
    rate = rate_bits / 8
    inside = [s for s in samples if begin - _SAMPLE_SECONDS <= s[0] <= end + _SAMPLE_SECONDS]
    for column, name in ((1, "received"), (2, "sent")):
        fast = [
            (a[0], b[0])
            for a, b in pairwise(inside)
            if b[0] > a[0] and (b[column] - a[column]) / (b[0] - a[0]) >= rate / 2
        ]
        nbytes = inside[-1][column] - inside[0][column] if inside else 0
        full = nbytes / rate
        head = max(fast[0][0] - begin, 0.0) if fast else end - begin
        tail = max(end - fast[-1][1], 0.0) if fast else 0.0
        row = {
            "bytes": nbytes,
            "full_seconds": full,
            "head": head,
            "tail": tail,
            "middle": end - begin - full - head - tail,
        }
        found[name] = {k: round(v, 4) for k, v in row.items()}
    return found


def summary(
    stalls: Mapping[str, tuple[float, float]], spans: Mapping[str, Iterable[Any]]
) -> dict[str, dict[str, float]]:
    """Worker -> where its time went, seconds counted from the moment the first worker stopped.

    stalled, resumed: its own. first_*, last_*: of each lane. *_busy: length of the union of a lane's spans. idle_posts: time
    between its first and its last post in which none was under way: what the link may have lost.
    """
    origin = min(begin for begin, _ in stalls.values())
    found = {}
    for worker, all_spans in spans.items():
        begin, end = stalls[worker]
        row = {"stalled": begin - origin, "resumed": end - origin}
        lanes: dict[str, list[tuple[float, float, int]]] = {}
        for lane, _, start, stop, nbytes, _ in all_spans:
            lanes.setdefault(lane, []).append((start - origin, stop - origin, nbytes))
        for lane, of_lane in lanes.items():
            row[f"first_{lane}"] = min(s for s, _, _ in of_lane)
            row[f"last_{lane}"] = max(e for _, e, _ in of_lane)
            row[f"num_{lane}"] = len(of_lane)
            if lane in ("pack", "post", "assemble"):
                row[f"{lane}_busy"] = _union([(s, e) for s, e, _ in of_lane])
        if "post" in lanes:
            row["post_bytes"] = sum(n for _, _, n in lanes["post"])
            row["idle_posts"] = row["last_post"] - row["first_post"] - row["post_busy"]
        found[worker] = {k: round(v, 4) for k, v in row.items()}
    return found


def _union(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reach = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total


def write_trace(
    path: Path, topology: Topology, spans: Mapping[str, Iterable[Any]], samples: Mapping[int, Sequence[Sample]]
) -> int:
    """Write all workers' spans, and the links' rates in Mbit/s, as a trace for Perfetto or chrome://tracing.

    Returns the number of spans.
    """
    tracks = Tracks()
    nodes = {name: tracks.pid(name) for name in topology.nodes}
    events: list[dict[str, Any]] = []
    starts = [s[2] for of_worker in spans.values() for s in of_worker]
    origin = min(starts, default=0.0)
    written = 0
    for worker, of_worker in spans.items():
        node = topology.workers[topology.index[worker]].node
        for lane, round_, begin, end, nbytes, peer in sorted(of_worker, key=lambda s: s[3]):
            name = f"{worker} {lane} {peer if lane == 'post' else ''}".strip()
            track = tracks.track(node, name, begin - origin, end - origin)
            args = {"bytes": nbytes, "peer": peer}
            events.append(complete(f"round {round_}", lane, track, begin - origin, end - origin, args))
            written += 1
    for number, of_node in samples.items():
        for a, b in pairwise(of_node):
            rates = {name: round((b[c] - a[c]) * 8e-6 / (b[0] - a[0]), 1) for c, name in ((1, "in"), (2, "out"))}
            events.append(counter("link, Mbit/s", nodes[f"n{number}"], a[0] - origin, rates))
    events = [*tracks.take_news(), *events]
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")))
    return written
