"""A real session, observed: the trace holds every kernel and every post of every worker once, the events tell its story
in order, and whoever looks on from outside sees the same."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.multiprocess.test_session_memory import Pair

from weightbridge.coordinator import session_events as e
from weightbridge.coordinator.wire import HubSocket
from weightbridge.executor import Observation, Prepared
from weightbridge.machine import messages as w
from weightbridge.observability import JsonLines, Trace, compose, read_events, watch
from weightbridge.program import WorkerProgram


def test_every_kernel_and_post_of_two_updates_is_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    programs: dict[str, WorkerProgram] = {}

    def keep(seen: Observation) -> None:
        if isinstance(seen.what, Prepared):
            programs[seen.worker] = seen.what.program

    begin = time.time()
    pair = Pair()
    with Trace(path) as trace:
        pair.options = replace(pair.options, observe=compose(keep, trace.observe), on_event=trace)
        with pair:
            pair.update(1)
            pair.update(2)
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
            if lane not in ("phase", "layout"):
                found[workers[x["pid"]]][lane, x["name"], x["args"].get("bytes", 0)] += 1
        if "ts" in x:  # the two clocks are read one after the other: a millisecond is theirs
            assert -1e3 <= x["ts"] <= x["ts"] + x.get("dur", 0) <= elapsed * 1e6 + 1e3
    for name, program in programs.items():
        expected: Counter[tuple[str, str, int]] = Counter()
        for k, r in enumerate(program.rounds):
            expected["pack", f"round {k}", 0] += 2 * bool(len(r.pack))
            expected["assemble", f"round {k}", 0] += 2 * bool(len(r.assemble.table))
            for post in r.posts:
                expected["post", f"round {k}", post.nbytes] += 2
        for version in (1, 2):
            expected["version", f"version {version}", 0] += 1
            expected["stood", f"version {version}", 0] += name == "solo/0"
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


def kinds(events: list[e.SessionEvent], worker: str) -> list[str]:
    """What a worker told, in order, without how its layout was learnt and how far it was."""
    told = [x for x in events if x.worker == worker and not isinstance(x, e.Probing | e.Progress)]
    return [type(x).__name__ for x in told]


def test_a_goodbye_that_comes_late_is_heard_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last word of the trainer that the hub lives with crosses a socket as any other: without it the engines would take
    the hub for dead at the end of a good job."""
    receive = HubSocket.receive
    held: list[tuple[bytes, bytes | None]] = []
    due: list[float] = []

    def late(self: HubSocket) -> Iterator[tuple[bytes, bytes | None]]:
        came = [*held, *receive(self)]
        held.clear()
        for connection, data in came:
            if data is not None and isinstance(w.decode(data), w.Goodbye) and not due:
                due.append(time.monotonic() + 0.3)
            if due and time.monotonic() < due[0]:
                held.append((connection, data))
            else:
                yield connection, data

    monkeypatch.setattr(HubSocket, "receive", late)
    told: list[e.SessionEvent] = []
    pair = Pair()
    pair.options = replace(pair.options, on_event=told.append)
    with pair:
        pair.update(1)
    assert due
    assert [x.phase for x in told if isinstance(x, e.PhaseChanged)][-1] == "closed"


def test_the_events_of_a_session_and_what_an_onlooker_sees(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    pair = Pair()
    with JsonLines(path) as lines:
        pair.options = replace(pair.options, on_event=lines, heartbeat_seconds=0.1)
        with pair:
            pair.update(5)
            pair.update(7)
            states = watch(pair.endpoint)
            seen = next(states)
            states.close()  # type: ignore[attr-defined]
            pair.update(9)
    events = list(read_events(path))
    assert kinds(events, "solo/0") == ["Joined", "Connected", *3 * ["UpdateStarted", "Installed"], "SessionEnded"]
    phases = [x.phase for x in events if isinstance(x, e.PhaseChanged)]
    assert [p for p in phases if p not in ("ready", "updating")] == [
        "gathering",
        "probing",
        "planning",
        "lowering",
        "connecting",
        "closed",
    ]
    assert phases[5:-1] == ["ready", *3 * ["updating", "ready"]]
    engine = [(x.state, x.version) for x in events if isinstance(x, e.EngineChanged)]
    changes = [[("updating", old), ("ready", new)] for old, new in ((-1, 5), (5, 7), (7, 9))]
    assert engine == [("joining", -1), *itertools.chain(*changes)]
    for worker in ("trainer/0", "solo/0"):
        rounds = [(x.version, x.round) for x in events if isinstance(x, e.Progress) and x.worker == worker]
        assert rounds[0][0] == 5
        assert all(0 < x.round <= x.rounds for x in events if isinstance(x, e.Progress))
    assert kinds(events, "trainer/0").count("SessionEnded") == 1
    finished = [x for x in events if isinstance(x, e.UpdateFinished)]
    assert [x.version for x in finished] == [5, 7, 9]
    installed = {x.version: x.stall_seconds for x in events if isinstance(x, e.Installed)}
    for x in finished:
        assert (x.worker, x.attempts, x.superseded) == ("trainer/0", 1, False)
        assert x.ewtt_seconds >= installed[x.version]
        assert x.ideal_seconds == pair.sender.plan.bounds.t_min_seconds > 0  # type: ignore[union-attr]
        assert set(x.network_bytes) == {"trainer/0", "solo/0"}
        assert x.network_bytes["trainer/0"][0] == x.network_bytes["solo/0"][1] > 0

    assert (seen.phase, seen.version, seen.in_flight, seen.num_trainers) == ("ready", 7, -1, 1)
    assert [(x.name, x.state, x.version, x.num_workers) for x in seen.engines] == [("solo", "ready", 7, 1)]
    assert [x.version for x in seen.updates] == [5, 7]
    for shown, told in zip(seen.updates, finished, strict=False):
        assert (shown.ewtt_seconds, shown.agst_seconds) == (told.ewtt_seconds, told.agst_seconds)
        assert (shown.ideal_seconds, shown.network_bytes) == (told.ideal_seconds, told.received_bytes)
