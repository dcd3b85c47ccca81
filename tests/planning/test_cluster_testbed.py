"""The emulated cluster's parts that need no root: options, names, addresses, counters, figures."""

from __future__ import annotations

import json

import pytest
from benchmarks.cluster.__main__ import parse
from benchmarks.cluster.netns import Counters, TestbedError, address_of, parse_counters, stale_names
from benchmarks.cluster.report import Update, document, node_bytes, parse_cpu, result, table
from benchmarks.cluster.scenarios import SCENARIOS, CaseKey, build, cases_of
from benchmarks.cluster.tracing import link_losses, summary

KEY = CaseKey(scenario="huge-tensor", replicas=1, trainer_nodes=1, rate_bits=1e9, slot_bytes=1 << 20, layers=2)
NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    7       1    0    0    0     0          0         0        7       1    0    0    0     0       0          0
 eth01:    5       1    0    0    0     0          0         0        6       1    0    0    0     0       0          0
  eth0: 123456789 4242    0    3    0     0          0         0 987654321    4343    0    0    0     0       0          0
"""


def test_addresses_lie_in_the_range_for_benchmarks_and_end_somewhere() -> None:
    assert [address_of(i) for i in (0, 3, 63)] == ["198.18.2.10", "198.18.2.13", "198.18.2.73"]
    for node in (-1, 64):
        with pytest.raises(TestbedError, match=f"node {node}"):
            address_of(node)


def test_only_our_own_namespaces_are_removed() -> None:
    listing = "wb-n3 (id: 4)\nwb-sw\nwb-nope\nmywb-n1\nwb-n12\nwb-n1x\n\nother (id: 0)\n"
    assert stale_names(listing) == ["wb-n3", "wb-sw", "wb-n12"]


def test_counters_are_read_by_interface_and_direction() -> None:
    assert parse_counters(NET_DEV, "eth0") == Counters(received=123456789, sent=987654321)
    assert parse_counters(NET_DEV, "eth01") == Counters(received=5, sent=6)
    with pytest.raises(TestbedError, match="eth7"):
        parse_counters(NET_DEV, "eth7")


def test_bytes_of_a_node_are_the_difference_of_two_readings() -> None:
    before = {0: Counters(received=10, sent=20), 1: Counters(received=1, sent=2)}
    after = {0: Counters(received=13, sent=27), 1: Counters(received=1, sent=9)}
    assert node_bytes(before, after) == {0: Counters(received=3, sent=7), 1: Counters(received=0, sent=7)}


def test_cpu_time_leaves_out_idle_and_waiting_for_disks() -> None:
    times = parse_cpu("cpu  100 20 30 400 50 6 7 8 9 10\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert (times.busy, times.total) == (100 + 20 + 30 + 6 + 7 + 8, 621)  # guest time is in user time already


def test_stalls_become_the_two_times() -> None:
    update = Update(
        stalls={"trainer/0": (10.0, 12.5), "engine-0/0": (10.25, 13.0)}, links=None, cpu_busy=0.5, own_cpu_seconds=1.0,
        load_average=0.0,
    )  # fmt: skip
    assert update.ewtt_seconds == 3.0
    assert update.agst_seconds == (2.5 + 2.75) / 2


def _update(end: float, sent: int, received: int, wrong: tuple[str, ...] = ()) -> Update:
    links = {0: Counters(received=11, sent=sent), 1: Counters(received=received, sent=13)}
    stalls = {"trainer/0": (0.0, 1.0), "engine-0/1": (0.0, end)}
    return Update(stalls=stalls, links=links, cpu_busy=0.5, own_cpu_seconds=1.5, load_average=2.5, wrong=wrong)


def test_a_result_has_medians_of_bytes_per_node_and_the_ratio_to_the_nominal_bound() -> None:
    case = build(KEY)
    model = case.spec.nbytes
    assert model == 128 * 32768 * 2 + 32768 * 2
    assert case.t_min_seconds == pytest.approx(model / 125e6)
    updates = [
        _update(3.0, model + 5, model + 9),
        _update(1.0, model + 1, model + 2),
        _update(2.0, model + 3, model + 4),
    ]
    memory = {"trainer/0": {"model_bytes": 1, "peak_extra_bytes": 77, "connect_peak_extra_bytes": 99}}
    entry = result(case, "p2p", updates, memory, {"link_bound_seconds": 0.5})
    assert (entry["method"], entry["replicas"], entry["trainer_nodes"]) == ("p2p", 1, 1)
    assert entry["ewtt_seconds"] == [3.0, 1.0, 2.0]
    assert entry["ratio_to_t_min"] == pytest.approx(2.0 / (model / 125e6))
    assert entry["ratio_to_bound"] == 4.0
    assert entry["trainer_egress_bytes"] == model + 3
    assert entry["rollout_ingress_bytes"] == {"n1": model + 4}
    assert entry["peak_extra_bytes"] == {"trainer/0": 77}
    assert entry["verified"] is True
    found = document("huge-tensor", 1e9, [case], [entry])
    assert json.loads(json.dumps(found)) == found
    keys = {"scenario", "rate_bits_per_second", "model_bytes", "t_min_seconds", "results"}
    assert keys <= set(found)
    assert "p2p" in table(found["results"])


def test_a_wrong_value_in_any_update_shows() -> None:
    updates = [_update(1.0, 1, 1), _update(1.0, 1, 1, wrong=("engine-0/1: layers.0.weight",))]
    entry = result(build(KEY), "file", updates, {}, {})
    assert entry["verified"] is False
    assert entry["wrong"] == ["engine-0/1: layers.0.weight"]
    assert entry["ratio_to_bound"] is None


def test_without_shaped_links_there_is_no_bound_and_there_are_no_counted_bytes() -> None:
    bare = Update(stalls={"trainer/0": (0.0, 1.0)}, links=None, cpu_busy=0.1, own_cpu_seconds=0.1, load_average=0.1)
    entry = result(build(KEY), "p2p", [bare], {}, {"link_bound_seconds": 1.0})
    for key in ("t_min_seconds", "ratio_to_t_min", "ratio_to_bound", "trainer_egress_bytes", "rollout_ingress_bytes"):
        assert entry[key] is None
    assert document("huge-tensor", None, [build(KEY)], [entry])["t_min_seconds"] is None


def test_options_choose_cases_methods_and_sizes() -> None:
    parsed = parse(
        ["replicas", "--cases", "1x3,2x2", "--methods", "p2p,weightbridge", "--rate", "0.5", "--slot-mib", "4"]
    )
    assert [(k.trainer_nodes, k.replicas) for k in parsed.keys] == [(1, 3), (2, 2)]
    assert {(k.rate_bits, k.slot_bytes) for k in parsed.keys} == {(0.5e9, 4 << 20)}
    assert parsed.methods == ["p2p", "weightbridge"]
    assert [k.slot_bytes for k in parse(["small-budget"]).keys] == [8 << 20]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replicas", "--methods", "rdma"], "rdma"),
        (["replicas", "--cases", "9x9"], "9x9"),
        (["replicas", "--rate", "0"], "--rate"),
        (["nothing"], "nothing"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_every_scenario_is_described_and_has_cases() -> None:
    assert set(SCENARIOS) == {
        "replicas", "a", "b", "tdp-rdp", "slow-node", "tiny-tensors", "huge-tensor", "small-budget",
    }  # fmt: skip
    for name, text in SCENARIOS.items():
        assert text
        assert cases_of(name, rate_bits=1e9, slot_bytes=1 << 20)


def test_what_a_link_lost_adds_up_to_the_update() -> None:
    """1 Mbit/s, 125 kB/s: nothing for 1 s, full for 2 s, a third for 1 s, full for 1 s, nothing for 1 s."""
    rates = [0.0] * 10 + [1.0] * 20 + [1 / 3] * 10 + [1.0] * 10 + [0.0] * 10
    samples, moved = [(0.0, 0, 0)], 0.0
    for i, rate in enumerate(rates):
        moved += rate * 12500
        samples.append(((i + 1) / 10, 0, round(moved)))
    lost = link_losses(samples, 1e6, 0.0, 6.0)
    assert lost["sent"]["head"] == pytest.approx(1.0)
    assert lost["sent"]["tail"] == pytest.approx(1.0)
    assert lost["sent"]["middle"] == pytest.approx(2 / 3, abs=1e-3)
    assert lost["sent"]["full_seconds"] == pytest.approx(3 + 1 / 3, abs=1e-3)
    assert lost["received"] == {"bytes": 0, "full_seconds": 0.0, "head": 6.0, "tail": 0.0, "middle": 0.0}


def test_a_trace_in_figures_counts_overlapping_posts_once() -> None:
    spans = {
        "trainer/0": [
            ("pack", 0, 5.0, 5.5, 0, ""),
            ("post", 0, 5.5, 7.0, 100, "engine-0/0 (receive)"),
            ("post", 0, 6.0, 8.0, 50, "engine-0/1 (receive)"),
            ("post", 1, 8.5, 9.0, 25, "engine-0/0 (receive)"),
        ]
    }
    row = summary({"trainer/0": (5.0, 9.25), "engine-0/0": (4.0, 9.5)}, spans)["trainer/0"]
    assert (row["stalled"], row["resumed"], row["first_post"], row["last_post"]) == (1.0, 5.25, 1.5, 5.0)
    assert (row["post_busy"], row["idle_posts"], row["post_bytes"], row["num_post"]) == (3.0, 0.5, 175, 3)
