"""The trace of a real session holds every kernel and every post of every worker, once, and spans of a thread nest."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from pathlib import Path

from tests.multiprocess.test_session_memory import Pair

from weightbridge.coordinator import session_events as e
from weightbridge.executor import Observation, Prepared
from weightbridge.observability import Trace, compose
from weightbridge.program import WorkerProgram


def test_every_kernel_and_post_of_two_updates_is_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    programs: dict[str, WorkerProgram] = {}

    def keep(seen: Observation) -> None:
        if isinstance(seen.what, Prepared):
            programs[seen.worker] = seen.what.program

    begin = time.time()
    with Trace(path) as trace, Pair(observe=compose(keep, trace.observe)) as pair:
        for version in (1, 2):
            for worker in programs:
                trace(e.UpdateStarted(at=time.time(), worker=worker, version=version, attempt=1))
            pair.update(version)
            for worker in programs:
                trace(e.Installed(at=time.time(), worker=worker, version=version, stall_seconds=0.001))
    elapsed = time.time() - begin
    assert pair.wrong == []
    assert set(programs) == {"trainer/0", "solo/0"}

    events = json.loads(path.read_text())["traceEvents"]
    workers = {x["pid"]: x["args"]["name"] for x in events if x["name"] == "process_name"}
    lanes = {x["tid"]: x["args"]["name"] for x in events if x["name"] == "thread_name"}
    assert set(workers.values()) == set(programs)
    found: dict[str, Counter[tuple[str, str, int]]] = {name: Counter() for name in programs}
    for x in events:
        if x["ph"] == "X":
            lane = x["cat"].split(" ")[0]
            found[workers[x["pid"]]][lane, x["name"], x["args"].get("bytes", 0)] += 1
            assert x["ts"] + 1e3 >= 0
            assert x["ts"] + x["dur"] <= elapsed * 1e6
    for name, program in programs.items():
        expected: Counter[tuple[str, str, int]] = Counter()
        for k, r in enumerate(program.rounds):
            expected["pack", f"round {k}", 0] += 2 * bool(len(r.pack))
            expected["assemble", f"round {k}", 0] += 2 * bool(len(r.assemble.table))
            for post in r.posts:
                expected["post", f"round {k}", post.nbytes] += 2
        for version in (1, 2):
            expected["version", f"version {version}", 0] += 1
            expected["stood", f"version {version}", 0] += 1
        assert found[name] == +expected
    arrived = Counter(x["name"].split(":")[0] for x in events if x["ph"] == "i" and x["cat"] == "arrive")
    assert arrived == Counter(
        {f"round {k}": 2 * len(r.awaits) for k, r in enumerate(programs["solo/0"].rounds) if r.awaits}
    )

    by_thread: dict[int, list[tuple[int, int]]] = {}
    for x in events:
        if x["ph"] == "X":
            begin_ns = round(x["ts"] * 1000)
            by_thread.setdefault(x["tid"], []).append((begin_ns, begin_ns + round(x["dur"] * 1000)))
    assert set(by_thread) <= set(lanes)
    for spans in by_thread.values():  # no attempts here: on each thread one after the other
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
