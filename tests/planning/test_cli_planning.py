"""`plan`, `simulate` and `study`: what they print for people and for programs, and what is asked wrongly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.unit.planning_cases import M, small_deployment
from tests.unit.test_cli_check_and_explain import invoke, one_message

import weightbridge.deployments
from weightbridge.cli.simulate import parse_fault
from weightbridge.deployments import PRESETS, Deployment
from weightbridge.errors import UsageError
from weightbridge.plan import PlanOptions
from weightbridge.simulator import planned, studies
from weightbridge.simulator.faults import LateEngine, LostWorker, SlowNode

PLAN_KEYS = {
    "preset", "num_workers", "model_bytes", "num_tensors", "num_boxes", "num_classes", "num_pairs", "max_out_pairs", "rounds",
    "t_min_seconds", "bound_seconds", "busiest_link_seconds", "ratio_to_bound", "worst_round_ratio_to_bound",
    "rollout_egress_worst_over_mean", "trainer_egress_bytes", "max_rollout_node_ingress_bytes", "planning_seconds",
    "peak_rss_bytes", "verified",
}  # fmt: skip
COSTS = (
    "--latency-us", "5", "--post-us", "6", "--signal-us", "7", "--launch-us", "8", "--python-us-per-round", "9",
    "--agreement-ms", "10", "--memory-gbps", "11", "--inside-gbps", "12",
)  # fmt: skip
METHODS = ("weightbridge", "broadcast", "p2p", "pull")

CONFIG = {
    "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4, "intermediate_size": 12, "vocab_size": 101, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
JOB = """
[model]
config = "config.json"
[cluster]
gpus_per_node = 2
slot_mib = 1
[trainer]
nodes = 1
tp = 2
[[engine]]
name = "a"
tp = 2
replicas = 2
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "small.toml").write_text(JOB)
    return str(tmp_path / "small.toml")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None, int | None]]:
    """Presets are the small deployment; which ones were asked for."""
    asked: list[tuple[str, int | None, int | None]] = []

    def preset(name: str, *, engines: int | None = None, trainer_nodes: int | None = None) -> Deployment:
        asked.append((name, engines, trainer_nodes))
        return small_deployment()

    monkeypatch.setattr(weightbridge.deployments, "preset", preset)
    monkeypatch.setattr(studies, "preset", preset)
    return asked


def test_plan_prints_one_document_for_programs(asked: list[object]) -> None:
    result = invoke("plan", "--preset", "kimi-k2", "--json", "--engines", "3", "--trainer-nodes", "2")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert set(document) >= PLAN_KEYS
    assert (document["preset"], document["model_bytes"], document["verified"]) == ("small", M, True)
    assert document["trainer_egress_bytes"] == document["max_rollout_node_ingress_bytes"] == M
    assert document["planning_seconds"] > 0
    assert asked == [("kimi-k2", 3, 2)]
    assert "busiest link" in result.stderr


def test_plan_prints_a_table_for_people(job: str) -> None:
    result = invoke("plan", job)
    assert result.exit_code == 0, result.stderr
    for text in (
        "plan of small",
        "T_min",
        "lower bound",
        "busiest link",
        "rounds",
        "pairs",
        "memory a worker",
        "verified",
    ):
        assert text in result.stdout
    assert "2 trainers on 1 node and 4 rollouts on 2 nodes" in " ".join(result.stdout.split())
    assert result.stderr == ""


def test_slots_of_another_size_make_other_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    big = small_deployment(slot_bytes=1 << 30)
    monkeypatch.setattr(weightbridge.deployments, "preset", lambda *_, **__: big)
    assert json.loads(invoke("plan", "--preset", "x", "--json").stdout)["slot_bytes"] == 1 << 30
    assert json.loads(invoke("plan", "--preset", "x", "--json", "--slot-mib", "3").stdout)["slot_bytes"] == 3 << 20


def test_simulate_prints_one_document_for_programs(asked: list[object]) -> None:
    result = invoke("simulate", "--preset", "kimi-k2", "--baselines", "--json", *COSTS)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["t_min_seconds"] == M / 1e9
    for name in METHODS:
        method = document[name]
        assert method["ewtt_seconds"] >= max(method["agst_seconds"], document["t_min_seconds"])
        assert method["ratio"] == pytest.approx(method["ewtt_seconds"] / document["t_min_seconds"])
        assert sum(method["breakdown"].values()) == pytest.approx(method["ewtt_seconds"])
    assert document["weightbridge"]["bytes_by_link_kind"]["worker"] == 2 * M
    assert {name: cost["value"] for name, cost in document["costs"].items()} == pytest.approx(
        {
            "latency_seconds": 5e-6, "post_seconds": 6e-6, "signal_seconds": 7e-6, "launch_seconds": 8e-6,
            "python_seconds_per_round": 9e-6, "agreement_seconds": 10e-3, "memory_bandwidth": 11e9,
            "inside_bandwidth": 12e9,
        }
    )  # fmt: skip
    assert all(cost["source"] and cost["unit"] for cost in document["costs"].values())
    assert document["simulation"]["completed"] is True
    assert set(document["plan"]) >= PLAN_KEYS


def test_simulate_prints_a_table_and_its_costs_for_people(job: str) -> None:
    result = invoke("simulate", job)
    assert result.exit_code == 0, result.stderr
    assert "weightbridge" in result.stdout
    assert "broadcast" not in result.stdout
    for text in ("EWTT", "AGST", "communication", "latency_seconds", "3 us", "1 TB/s", "450 GB/s"):
        assert text in result.stdout


def test_a_cost_that_is_dearer_makes_the_update_longer(asked: list[object]) -> None:
    def ewtt(*options: str) -> float:
        document = json.loads(invoke("simulate", "--preset", "x", "--json", *options).stdout)
        return float(document["weightbridge"]["ewtt_seconds"])

    before = ewtt()
    assert ewtt("--agreement-ms", "3") == pytest.approx(before + 0.002)
    for option, value in (
        ("--latency-us", "50"), ("--post-us", "99"), ("--launch-us", "99"),
        ("--python-us-per-round", "500"), ("--memory-gbps", "0.01"),
    ):  # fmt: skip
        assert ewtt(option, value) > before, option


def test_the_controls_reach_planner_and_programs(asked: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, str]] = []

    def planning(*_: object, options: PlanOptions, post_order: str, **__: object) -> None:
        seen.append((options.balanced, post_order))
        raise UsageError("enough")

    monkeypatch.setattr(planned, "plan_deployment", planning)
    for controls in ((), ("--one-level",), ("--fair-sharing",)):
        invoke("simulate", "--preset", "x", *controls)
    assert seen == [(True, "oldest_round_first"), (False, "oldest_round_first"), (True, "as_ready")]


def test_a_lost_worker_ends_in_a_document_that_says_so(asked: list[object]) -> None:
    result = invoke("simulate", "--preset", "x", "--json", "--fault", "lost:a/0@0.0011")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["weightbridge"]["ewtt_seconds"] is None
    assert document["simulation"]["completed"] is False
    assert {f["peer"] for f in document["simulation"]["failures"]} == {"a/0"}
    assert "the update did not end" in result.stderr
    assert "never" in result.stderr


def test_a_trace_is_written_beside_the_result(asked: list[object], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = invoke("simulate", "--preset", "x", "--json", "--trace", str(path))
    assert result.exit_code == 0, result.stderr
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert f"trace: {path}, {len(events)} spans" in result.stderr
    ends = [e["ts"] + e["dur"] for e in events]
    assert max(ends) == pytest.approx(json.loads(result.stdout)["weightbridge"]["ewtt_seconds"] * 1e6, rel=1e-3)
    sent = sum(e["args"]["bytes"] for e in events if e["cat"] in {"send", "forward"})
    assert 2 * M <= sent <= 2 * M + 64 * len(events)  # segments begin at multiples of 64
    assert sum(e["args"]["bytes"] for e in events if e["cat"] == "pack") == M


def test_a_study_varies_its_parameter(asked: list[object]) -> None:
    result = invoke("study", "replicas", "--preset", "x", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert [case["rollout replicas"] for case in document["cases"]] == ["1", "2", "4", "8", "16"]
    assert asked == [("x", n, None) for n in (1, 2, 4, 8, 16)]
    assert all(set(METHODS) <= set(case) for case in document["cases"])
    assert "costs" in document
    assert "It does not show what else happens on a real cluster" in " ".join(result.stderr.split())


def test_the_four_deployments_stand_beside_the_ratios_of_the_paper(asked: list[object]) -> None:
    result = invoke("study", "deployments", "--json")
    document = json.loads(result.stdout)
    assert {
        case["deployment"]: (case["paper"]["ewtt_ratio"], case["paper"]["agst_ratio"]) for case in document["cases"]
    } == {
        "moonlight-16b": (1.27, 0.90),
        "qwen3-30b-a3b": (1.18, 0.89),
        "qwen3-235b-a22b": (1.69, 1.46),
        "kimi-k2": (2.12, 2.02),
    }
    assert [name for name, _, _ in asked] == list(studies.PAPER)  # type: ignore[misc]
    assert set(studies.PAPER) <= set(PRESETS)


@pytest.mark.parametrize(
    ("name", "labels", "asks"),
    [
        ("trainer-nodes", ["1", "2", "4", "8"], [(4, 1), (4, 2), (4, 4), (4, 8)]),
        (
            "tdp-rdp",
            ["1 x 1", "1 x 2", "1 x 4", "2 x 1", "2 x 2", "2 x 4", "4 x 1", "4 x 2", "4 x 4"],
            [(r, t) for t in (1, 2, 4) for r in (1, 2, 4)],
        ),
    ],
)
def test_what_the_other_studies_vary(
    asked: list[object], name: str, labels: list[str], asks: list[tuple[int, int]]
) -> None:
    chosen = studies.study(name)
    assert list(chosen.labels) == labels
    for make in chosen.deployments:
        make()
    assert asked == [("qwen3-30b-a3b", engines, nodes) for engines, nodes in asks]


def test_small_jobs_run_all_rounds_and_large_ones_some() -> None:
    def rounds(num_workers: int, num_rounds: int, faults: tuple[SlowNode, ...] = ()) -> int | None:
        plan = type("P", (), {"rounds": num_rounds, "topology": type("T", (), {"workers": range(num_workers)})})
        return studies.rounds_to_simulate(type("Q", (), {"plan": plan}), faults)  # type: ignore[arg-type]

    assert rounds(16, 15) is None
    assert rounds(512, 24) is None
    assert rounds(512, 240) == studies.EXTRAPOLATED_ROUNDS
    assert rounds(512, 240, (SlowNode(node="n", fraction=0.5),)) is None


# --- asked wrongly ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a job file or --preset, got neither; presets are moonlight-16b, qwen3-30b-a3b"),
        (["j.toml", "--preset", "kimi-k2"], "give either a job file or --preset, got both"),
        (["--preset", "kimi"], "preset 'kimi' is not known; known are moonlight-16b, qwen3-30b-a3b"),
        (["absent.toml"], "absent.toml"),
        (["--preset", "kimi-k2", "--engines", "0"], "--engines must be at least 1, got 0"),
        (["j.toml", "--trainer-nodes", "2"], "--trainer-nodes changes a preset; a job file says it itself"),
        (["--preset", "kimi-k2", "--slot-mib", "0"], "--slot-mib must be at least 1, got 0"),
        (["--preset", "kimi-k2", "--html", "no/such/folder/x.html"], "a folder that exists, found no folder"),
        (["--preset", "kimi-k2", "--html", "/"], "expected a file in a folder that exists, found a folder"),
    ],
)  # fmt: skip
def test_a_job_that_is_none(command: str, arguments: list[str], message: str) -> None:
    result = invoke(command, *arguments)
    assert result.exit_code == 2
    assert message in one_message(result)
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "slow:n"], "fault 'slow:n' is of no known form; expected slow:NODE@SECONDS=FRACTION"),
        (["--fault", "explode:n@1"], "or late:ENGINE=SECONDS"),
        (["--fault", "lost:a/0@soon"], "fault 'lost:a/0@soon' is of no known form"),
        (["--fault", "slow:n@1=-2"], "fraction must be positive"),
        (["--fault", "slow:nowhere@0=0.5"], "nowhere"),
        (["--fault", "lost:z/0@0"], "there is no worker 'z/0'"),
        (["--latency-us", "-1"], "latency_seconds must be 0 or more"),
        (["--inside-gbps", "0"], "inside_bandwidth must be positive"),
        (["--extrapolate", "8", "--rounds-full"], "exclude each other"),
        (["--replicas", "1,2"], "--replicas goes with --preset and --html"),
        (["--trace", "no/such/folder/x.json"], "--trace 'no/such/folder/x.json': expected a file"),
    ],
)
def test_a_simulation_that_is_none(asked: list[object], arguments: list[str], message: str) -> None:
    result = invoke("simulate", "--preset", "x", *arguments)
    assert result.exit_code == 2
    assert message in one_message(result)
    assert result.stdout == ""


def test_replicas_that_are_no_numbers(asked: list[object], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = invoke("simulate", "--preset", "x", "--html", str(tmp_path / "x.html"), "--replicas", "1,two")
    assert "--replicas is '1,two', expected numbers of engines as in 1,2,4,8" in one_message(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sizes"], "study 'sizes' is not known; known are replicas, trainer-nodes, tdp-rdp, deployments"),
        (["deployments", "--preset", "kimi-k2"], "leave --preset out"),
    ],
)
def test_a_study_that_is_none(arguments: list[str], message: str) -> None:
    result = invoke("study", *arguments)
    assert result.exit_code == 2
    assert message in one_message(result)


def test_an_error_is_a_document_for_programs() -> None:
    result = invoke("plan", "--json")
    error = json.loads(result.stdout)["error"]
    assert (error["kind"], error["exit_status"]) == ("UsageError", 2)
    assert "give either a job file or --preset" in error["message"]


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_page_without_matplotlib(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke(command, "--preset", "kimi-k2", "--html", str(tmp_path / "x.html"))
    assert result.exit_code == 1
    assert "pip install 'weightbridge-rl[report]'" in one_message(result)


def test_faults_are_what_they_say() -> None:
    assert parse_fault("slow:node-1@0.5=0.25") == SlowNode(node="node-1", at_seconds=0.5, fraction=0.25)
    assert parse_fault("lost:engine-0/3@0.2") == LostWorker(worker="engine-0/3", at_seconds=0.2)
    assert parse_fault("late:engine-1=2") == LateEngine(engine="engine-1", seconds=2.0)
    with pytest.raises(UsageError, match="of no known form"):
        parse_fault("late")
