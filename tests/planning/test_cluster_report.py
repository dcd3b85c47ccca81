"""What is said of a run of the emulated cluster beyond its times: kernels that nothing hid, predictions, tables, peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cluster import __main__ as command
from benchmarks.cluster import markdown, peers
from benchmarks.cluster.netns import Counters
from benchmarks.cluster.overlap import covered, kernel_seconds
from benchmarks.cluster.predict import Prediction, plan_of, predict
from benchmarks.cluster.report import Update, document, kernel_shares, result
from benchmarks.cluster.run import METHODS
from benchmarks.cluster.scenarios import Case, CaseKey, build

from weightbridge.simulator.costs import Costs

KEY = CaseKey(scenario="replicas", replicas=2, trainer_nodes=1, rate_bits=1e9, slot_bytes=1 << 20, layers=1)
NO_COSTS = Costs(
    latency_seconds=0, post_seconds=0, signal_seconds=0, launch_seconds=0, python_seconds_per_round=0,
    agreement_seconds=0, memory_bandwidth=1e15, inside_bandwidth=1e15,
)  # fmt: skip

SPANS: dict[str, list[Any]] = {
    # packs 1 s before anything moves, and 1 s of which half is hidden
    "trainer/0": [
        ("pack", 0, 10.0, 11.0, 0, ""),
        ("post", 0, 11.0, 13.0, 7, "engine-0/0 (receive)"),
        ("pack", 1, 12.5, 13.5, 0, ""),
        ("post", 1, 13.5, 14.0, 7, "engine-0/0 (receive)"),
        ("signal", 1, 19.0, 19.0, 0, "engine-0/0 CREDIT"),
    ],
    "engine-0/0": [("assemble", 0, 13.25, 13.75, 0, ""), ("assemble", 1, 14.0, 14.25, 0, "")],
    "engine-0/1": [("decode", 0, 30.0, 30.125, 0, "")],
}


def test_kernels_count_where_a_worker_waits_for_them_and_no_transfer_of_its_own_runs() -> None:
    found = kernel_seconds(SPANS)
    assert found["trainer/0"] == (2.0, 1.0 + 0.5)
    # engine-0/0 waits for the trainer's packs too: 10-11, 12.5-13.75, 14-14.25, hidden 12.5-13 and 13.5-13.75
    assert found["engine-0/0"] == (2.5, 1.0 + 0.5 + 0.25)
    assert found["engine-0/1"] == (0.125, 0.125)
    assert covered([(0.0, 2.0), (1.0, 1.5), (4.0, 5.0), (5.0, 5.5)]) == 3.5


def test_shares_are_of_the_worker_where_they_are_most() -> None:
    traced = Update(
        stalls={"trainer/0": (9.0, 14.0), "engine-0/0": (9.5, 19.0)}, links=None, cpu_busy=0.5, own_cpu_seconds=1.0,
        load_average=0.0, spans=SPANS,
    )  # fmt: skip
    assert kernel_shares(traced) == {"kernel_share": 2.5 / 10, "unoverlapped_kernel_share": 1.75 / 10}
    assert kernel_shares(None) == {"kernel_share": None, "unoverlapped_kernel_share": None}


@pytest.fixture(scope="module")
def case() -> Case:
    return build(KEY)


def test_without_costs_the_simulator_predicts_what_the_links_take(case: Case) -> None:
    plan = plan_of(case)
    once = case.spec.nbytes / 125e6
    assert case.t_min_seconds == pytest.approx(once)
    ours = predict(case, "weightbridge", plan, NO_COSTS)
    assert ours.model == "weightbridge"
    assert once <= ours.ewtt_seconds < 1.2 * once
    for method in ("p2p", "file", "peer:mooncake"):  # every engine's bytes leave the one trainer node again
        there = predict(case, method, plan, NO_COSTS)
        assert there.model == "pull"
        assert there.ewtt_seconds == pytest.approx(2 * once, rel=0.02)
    ring = predict(case, "broadcast", plan, NO_COSTS)
    assert once <= ring.ewtt_seconds < 1.6 * once  # one worker may use its node's whole link


def test_every_method_has_a_model(case: Case) -> None:
    plan = plan_of(case)
    assert all(predict(case, method, plan, NO_COSTS).ewtt_seconds > 0 for method in METHODS)


def _document(case: Case, seconds: float, predicted: Prediction | None) -> dict[str, Any]:
    links = {node: Counters(received=case.spec.nbytes, sent=case.spec.nbytes) for node in range(3)}
    update = Update(
        stalls={"trainer/0": (0.0, seconds)}, links=links, cpu_busy=0.25, own_cpu_seconds=1.0, load_average=1.5
    )  # fmt: skip
    memory = {"trainer/0": {"peak_extra_bytes": 3 << 20, "connect_peak_extra_bytes": 0}}
    entry = result(case, "weightbridge", [update] * 3, memory, {}, predicted=predicted)
    return document("replicas", 1e9, [case], [entry], {"peer:mooncake": "it is not there"})


def test_a_prediction_stands_beside_what_was_measured(case: Case) -> None:
    (entry,) = _document(case, 2.0, Prediction(ewtt_seconds=1.5, model="weightbridge"))["results"]
    keys = ("predicted_ewtt_seconds", "predicted_over_measured", "predicted_as")
    assert [entry[k] for k in keys] == [1.5, 0.75, "weightbridge"]
    (bare,) = _document(case, 2.0, None)["results"]
    assert [bare[k] for k in keys] == [None, None, None]


def test_documents_become_tables_between_the_marks_of_a_page(case: Case, tmp_path: Path) -> None:
    file, page = tmp_path / "replicas.json", tmp_path / "page.md"
    file.write_text(json.dumps(_document(case, 2.0, Prediction(ewtt_seconds=1.5, model="weightbridge"))))
    page.write_text(f"before\n{markdown.BEGIN}\nold\n{markdown.END}\nafter\n")
    assert markdown.main([str(file), "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{markdown.END}\nafter\n")
    assert "old" not in text
    head, rule, row = (line.split("|") for line in text.splitlines() if line.startswith("|"))
    assert len(head) == len(rule) == len(row)
    found = dict(zip((h.strip() for h in head), (c.strip() for c in row), strict=True))
    assert found["EWTT, s"] == "2.000 (2.000 2.000 2.000)"
    assert (found["method"], found["predicted / measured"], found["load"]) == ("weightbridge", "0.750", "1.5")
    assert found["extra MiB"] == "3"
    assert "peer:mooncake was left out: it is not there." in text
    with pytest.raises(ValueError, match="once each"):
        markdown.put("no marks", "text")


def test_a_peer_that_is_not_installed_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "PEERS", {"peer:mooncake": ("no_such_module.engine", ".venvs/none", "make none")})
    why = peers.missing("peer:mooncake")
    assert "no_such_module" in why
    assert why.endswith("; make none")
    monkeypatch.setattr(command, "missing", lambda method: "it is not there")
    monkeypatch.setattr(command, "measure_case", lambda *_: pytest.fail("nothing is left to measure"))
    assert command.main(["replicas", "--methods", "peer:mooncake"]) == 2
    assert "peer:mooncake is left out: it is not there" in capsys.readouterr().err


def test_settings_of_the_user_go_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_ENABLE_CONNECTION_POOL", "0")
    assert peers.settings()["MC_TCP_ENABLE_CONNECTION_POOL"] == "0"
    assert peers.settings()["MC_LOG_LEVEL"] == "ERROR"
