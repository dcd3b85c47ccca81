"""Reports: what is counted of a plan, what stands in documents, pages and traces. The traffic is worked out by hand."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.unit.plan_cases import spec_of, topology, trainer
from tests.unit.planning_cases import NAMES, SPANS, M, result, small_deployment

from weightbridge.errors import UnsupportedError, UsageError
from weightbridge.plan import HOP, ROUTE, AtomTable, Bounds, Plan, ReplicaClass, Role, Topology, Worker
from weightbridge.plan.topology import NodeGroup
from weightbridge.simulator.costs import Costs, list_costs
from weightbridge.simulator.planned import STAGES, Planned, peak_rss_bytes, plan_deployment
from weightbridge.simulator.plots import (
    need_matplotlib,
)
from weightbridge.simulator.quality import quality_of
from weightbridge.simulator.report import bytes_text, methods_document, plan_document, plan_facts, seconds_text
from weightbridge.simulator.result import LANES, SPAN, MethodResult
from weightbridge.simulator.trace import trace_events, write_trace
from weightbridge.simulator.traffic import Traffic


def hand_made(*, routes, hops, workers, node_bandwidth=(), groups=(), rounds=1, bound=1e-6) -> Plan:
    """A plan of one class of 1,000 bytes whose routes and hops are given; nobody verifies it."""
    z = np.zeros((0, 1), dtype=np.int64)
    flat = np.zeros(0, dtype=np.int64)
    return Plan(
        epoch=0,
        spec_digest=spec_of((500,)).digest,
        topology=Topology(workers=workers, node_bandwidth=node_bandwidth, groups=groups),
        atoms=AtomTable(tensor=flat, start=z, step=z, count=z, class_id=flat, stream_offset=flat),
        classes=(ReplicaClass(holders=(0,), needers=(2, 3), nbytes=1000),),
        routes=np.array([(*r, -(-(r[2] - r[1]) // 64), 0) for r in routes], dtype=ROUTE),  # in all rounds
        hops=np.array(hops, dtype=HOP),
        rounds=rounds,
        alignment=64,
        unit_bytes=64,
        slot_bytes=1 << 20,
        bounds=Bounds(t_min_seconds=bound, link_bound_seconds=bound, busiest_link_seconds=bound),
    )


def worker(name: str, node: str, bandwidth: float = 1e9) -> Worker:
    engine, _, rank = name.partition("/")
    role = Role.TRAINER if engine == "trainer" else Role.ROLLOUT
    return Worker(
        name=name,
        role=role,
        node=node,
        rank=int(rank),
        engine="" if role is Role.TRAINER else engine,
        bandwidth=bandwidth,
    )


MIXED = (worker("trainer/0", "n0"), worker("a/0", "n0"), worker("a/1", "n1", 2e9), worker("b/0", "n2"))
# trainer/0 -> a/0 inside n0 (200), -> a/1 (700); a/1 passes all 700 on to b/0; trainer/0 -> b/0 (100)
ROUTES = [(0, 0, 200, 0, 1), (0, 200, 900, 0, 2), (0, 900, 1000, 0, 3)]
HOPS = [(1, 1, 2, 3)]


def test_traffic_is_counted_by_class_worker_and_node() -> None:
    traffic = Traffic(plan=hand_made(routes=ROUTES, hops=HOPS, workers=MIXED))
    assert traffic.by_class() == {"first copies": 800, "further copies": 700, "inside nodes": 200}
    assert traffic.worker_bytes(outgoing=True).tolist() == [800, 0, 700, 0]
    assert traffic.worker_bytes(outgoing=False).tolist() == [0, 0, 700, 800]
    assert traffic.between_nodes().tolist() == [[200, 700, 100], [0, 0, 700], [0, 0, 0]]
    assert traffic.between_workers()[0].tolist() == [0, 200, 700, 100]
    into = traffic.rollout_nodes(outgoing=False)
    assert [(x.name, x.nbytes, x.bandwidth) for x in into] == [("n0", 0, 1e9), ("n1", 700, 2e9), ("n2", 800, 1e9)]
    out = {x.name: x.nbytes for x in traffic.rollout_nodes(outgoing=True)}
    assert out == {"n0": 0, "n1": 700, "n2": 0}


def test_limited_nodes_and_uplinks_are_links_of_their_own() -> None:
    groups = (NodeGroup(name="west", nodes=("n0", "n1"), bandwidth=5e8),)
    plan = hand_made(routes=ROUTES, hops=HOPS, workers=MIXED, node_bandwidth=(("n1", 4e8),), groups=groups)
    links = {(x.kind, x.name, x.outgoing): x for x in Traffic(plan=plan).links()}
    assert links["node", "n1", True].nbytes == links["node", "n1", False].nbytes == 700
    assert links["group", "west", True].nbytes == 800  # 100 of the trainer and 700 of a/1; 700 stay in the group
    assert links["group", "west", False].nbytes == 0
    assert links["group", "west", True].busy_seconds == 800 / 5e8
    assert links["worker", "trainer/0", True].nbytes == 800
    quality = quality_of(plan)
    assert (quality.busiest.kind, quality.busiest.name) == ("node", "n1")
    assert quality.why == "node 'n1' has a link narrower than its workers' together"


@pytest.mark.parametrize(
    ("change", "name", "why"),
    [
        ({}, "trainer/0", "the trainers send every byte once"),
        ({"trainer/0": 9e9}, "b/0", "node 'n2' takes in once what its workers need"),
        ({"trainer/0": 9e9, "b/0": 9e9}, "a/1", "workers of node 'n1' pass bytes on"),
    ],
)
def test_the_busiest_link_comes_with_a_reason(change: dict[str, float], name: str, why: str) -> None:
    speeds = {"a/1": 1e9 if len(change) < 2 else 5e8} | change
    workers = tuple(worker(w.name, w.node, speeds.get(w.name, w.bandwidth)) for w in MIXED)
    if len(change) == 2:
        routes = [(0, 0, 300, 0, 1), (0, 300, 1000, 0, 2)]
        hops = [(1, 1, 2, 3), (1, 1, 2, 1)]  # 1,400 out of a/1
    else:
        routes, hops = ROUTES, HOPS
    quality = quality_of(hand_made(routes=routes, hops=hops, workers=workers))
    assert quality.busiest.name == name
    assert quality.why.startswith(why)


def test_a_round_with_more_than_its_share_shows() -> None:
    # one route of 1,000 bytes is 16 units of 64 bytes; in three rounds 320, 320 and the rest: 360 bytes
    plan = hand_made(routes=[(0, 0, 1000, 0, 2)], hops=[], workers=MIXED, rounds=3)
    cuts = plan.cuts(range(4))[:, 0].tolist()
    worst = max(b - a for a, b in pairwise(cuts))
    assert worst == 360
    quality = quality_of(plan)  # the bound is 1 us: 1,000 bytes at 1 GB/s
    assert quality.ratio_to_bound == pytest.approx(1.0)
    assert quality.worst_round_ratio_to_bound == pytest.approx(360 * 3 / 1000)
    assert quality.rollout_egress_worst_over_mean == 1.0  # nobody passes anything on


def test_rollout_egress_is_the_worst_over_the_mean_of_all_rollouts() -> None:
    quality = quality_of(hand_made(routes=ROUTES, hops=HOPS, workers=MIXED))
    assert quality.rollout_egress_worst_over_mean == pytest.approx(700 / (700 / 3))


@pytest.fixture(scope="module")
def planned() -> Planned:
    seen: list[tuple[str, int, int]] = []
    found = plan_deployment(small_deployment(), progress=lambda *what: seen.append(what))
    assert [stage for stage, done, total in seen if done == total] == list(STAGES)
    assert next(done for stage, done, total in seen if stage == STAGES[-1]) == 0
    return found


def test_a_planned_deployment_is_counted_as_by_hand(planned: Planned) -> None:
    assert planned.facts.model_bytes == planned.facts.trainer_egress_bytes == M
    assert planned.traffic.by_class() == {"first copies": M, "further copies": M, "inside nodes": 0}
    assert len(planned.arena_bytes) == 4
    assert 0 < max(planned.arena_bytes) <= 2 * 2 * 2048
    assert set(planned.stages) == set(STAGES)
    assert planned.planning_seconds == sum(s.seconds for s in planned.stages.values())
    assert planned.peak_rss_bytes > 10 << 20


def test_peak_memory_never_shrinks() -> None:
    before = peak_rss_bytes()
    np.ones(1 << 22).sum()
    assert peak_rss_bytes() >= before > 0


def test_the_document_of_a_plan_has_the_pinned_keys(planned: Planned) -> None:
    document = plan_document(planned)
    assert list(document)[:20] == [
        "preset", "num_workers", "model_bytes", "num_tensors", "num_boxes", "num_classes", "num_pairs", "max_out_pairs",
        "rounds", "t_min_seconds", "bound_seconds", "busiest_link_seconds", "ratio_to_bound", "worst_round_ratio_to_bound",
        "rollout_egress_worst_over_mean", "trainer_egress_bytes", "max_rollout_node_ingress_bytes", "planning_seconds",
        "peak_rss_bytes", "verified",
    ]  # fmt: skip
    values = json.loads(json.dumps(document))
    assert values == document
    assert (values["preset"], values["num_workers"], values["num_tensors"], values["num_boxes"]) == ("small", 4, 2, 8)
    assert (values["model_bytes"], values["max_rollout_node_ingress_bytes"]) == (M, M)
    assert values["t_min_seconds"] == M / 1e9
    assert values["bound_seconds"] == pytest.approx(M / 1e9)
    assert values["ratio_to_bound"] == pytest.approx(values["busiest_link_seconds"] / values["bound_seconds"])
    assert values["verified"] is True


def test_the_facts_say_the_same_in_words(planned: Planned) -> None:
    facts = {f.what: f for f in plan_facts(planned)}
    assert facts["workers"].remark == "2 trainers on 2 nodes and 2 rollouts on 2 nodes, 2 engines"
    assert facts["model"] == ("model", "4.992 kB", "2 tensors")
    assert facts["T_min"].value == "4.99 us"
    assert facts["bytes"].remark == "first copies 4.992 kB, further copies 4.992 kB, inside nodes 0 B"
    assert "x the bound: " in facts["busiest link"].remark


def test_texts_of_numbers() -> None:
    assert [bytes_text(n) for n in (7, 61.1e9, 2.05e12)] == ["7 B", "61.1 GB", "2.05 TB"]
    assert [seconds_text(s) for s in (1.5, 0.0764, 3e-6, float("inf"))] == ["1.5 s", "76.4 ms", "3 us", "never"]
    assert [seconds_text(1e-3 - 1e-12), seconds_text(1 - 1e-9), bytes_text(1e9 - 1)] == ["1 ms", "1 s", "1 GB"]


# --- results and traces------------------------------------------------------------------------------------------


def test_without_matplotlib_a_page_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'weightbridge-rl\[report\]'"):
        need_matplotlib()


def test_parts_of_a_result_add_up_to_its_time() -> None:
    with pytest.raises(UsageError, match=r"add up to 2\.0 s, the EWTT is 3\.0 s"):
        MethodResult(
            name="p2p", ewtt_seconds=3.0, agst_seconds=1.0, control_seconds=0.5, conversion_seconds=0.5,
            communication_seconds=1.0,
        )  # fmt: skip


def test_the_document_of_methods(planned: Planned) -> None:
    document = methods_document([result(), result("pull", 4.0)], 1.6, list_costs(Costs()))
    assert list(document) == ["t_min_seconds", "weightbridge", "pull", "costs"]
    assert document["pull"]["ewtt_seconds"] == 4.0
    assert document["weightbridge"]["ratio"] == pytest.approx(1.25)
    parts = {"control_seconds": 0.25, "conversion_seconds": 0.5, "communication_seconds": 1.25}
    assert document["weightbridge"]["breakdown"] == parts
    assert document["weightbridge"]["bytes_by_link_kind"] == {"node": 17}
    assert document["costs"]["latency_seconds"]["value"] == 3e-6
    assert all(c["source"] for c in document["costs"].values())


def test_a_trace_has_a_process_per_node_and_durations_in_microseconds(tmp_path: Path) -> None:
    workers = tuple(worker(name, f"n{i // 2}") for i, name in enumerate(NAMES))
    path = tmp_path / "trace.json"
    assert write_trace(path, Topology(workers=workers), SPANS) == 5
    events = json.loads(path.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "n0", 2: "n1"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(threads.values()) == ["a/0 assemble", "trainer/0 pack", "trainer/0 send", "trainer/0 send 2"]
    found = [
        (processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"], e["args"]["bytes"])
        for e in events
        if e["ph"] == "X"
    ]
    assert found == [
        ("n0", "trainer/0 pack", "round 0", 0.0, 5e5, 100),
        ("n0", "trainer/0 send", "round 0", 5e5, 1e6, 100),
        ("n0", "trainer/0 send 2", "round 1", 1e6, 1e6, 50),
        ("n0", "trainer/0 send", "round 2", 1.5e6, 1e6, 50),
        ("n1", "a/0 assemble", "round 0", 1.5e6, 2.5e5, 100),
    ]


def test_events_of_one_thread_never_overlap() -> None:
    rng = np.random.default_rng(5)
    start = rng.uniform(0, 1, 200)
    table = np.zeros(200, dtype=SPAN)
    table["start"], table["end"] = start, start + rng.uniform(0, 0.1, 200)
    table["worker"], table["lane"] = rng.integers(0, 2, 200), rng.integers(0, len(LANES), 200)
    events = [e for e in trace_events(topology(trainer(0), trainer(1)), table) if e["ph"] == "X"]
    assert len(events) == 200
    by_thread: dict[object, list[tuple[float, float]]] = {}
    for e in events:
        by_thread.setdefault(e["tid"], []).append((float(e["ts"]), float(e["dur"])))  # type: ignore[arg-type]
    for times in by_thread.values():
        times.sort()
        assert all(a + d <= b + 0.002 for (a, d), (b, _) in pairwise(times))
    assert sum(d for times in by_thread.values() for _, d in times) == pytest.approx(
        float((table["end"] - table["start"]).sum()) * 1e6, abs=0.2
    )


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the trace could not be written to"):
        write_trace(tmp_path / "absent" / "t.json", topology(trainer(0)), SPANS[:1])
