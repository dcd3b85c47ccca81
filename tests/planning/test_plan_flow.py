"""The routing LP on jobs worked out by hand, its certificate, and the bounds."""

from __future__ import annotations

import pytest
from tests.unit.plan_cases import rollout, topology, trainer

from weightbridge.plan.bound import certified, t_min_seconds
from weightbridge.plan.flow import solve
from weightbridge.plan.network import Network
from weightbridge.plan.plan import ReplicaClass

MB = 1 << 20


def network(workers, *classes, node_bandwidth=()):
    return Network(
        topology=topology(*workers, node_bandwidth=node_bandwidth),
        classes=tuple(ReplicaClass(holders=h, needers=n, nbytes=b) for h, n, b in classes),
    )


def bound(net):
    flow = solve(net)
    bounds = certified(net, flow, flow.seconds)
    assert bounds.link_bound_seconds == pytest.approx(flow.seconds, rel=1e-6)
    return flow, bounds


def test_one_trainer_one_rollout():
    flow, bounds = bound(network([trainer(0), rollout("e", 0, "b", 2e9)], ((0,), (1,), 8 * MB)))
    assert flow.seconds == pytest.approx(8 * MB / 1e9)
    assert bounds.t_min_seconds == pytest.approx(8 * MB / 1e9)
    assert flow.leave == (((0, pytest.approx(8 * MB)),),)
    assert flow.enter == (((2 - 1, pytest.approx(8 * MB)),),)


def test_two_holders_share_the_load_by_bandwidth():
    # 30 MB from links of 1 and 2 GB/s to a fast receiver: 10 and 20 MB, 10 ms
    net = network([trainer(0, "a"), trainer(1, "b", 2e9), rollout("e", 0, "c", 9e9)], ((0, 1), (2,), 30_000_000))
    flow, bounds = bound(net)
    assert flow.seconds == pytest.approx(0.01)
    assert dict(flow.leave[0]) == pytest.approx({0: 10_000_000, 1: 20_000_000})
    assert bounds.t_min_seconds == pytest.approx(0.01)


def test_replicas_pass_copies_on_so_ingress_is_the_bound():
    # one fast trainer, three replicas on nodes of 1 GB/s: each needs 30 MB, and each sends 20 MB on
    workers = [trainer(0, "a", 9e9), *(rollout(f"e{i}", 0, f"n{i}") for i in range(3))]
    net = network(workers, ((0,), (1, 2, 3), 30_000_000))
    flow, _ = bound(net)
    assert flow.seconds == pytest.approx(0.03)
    assert dict(flow.enter[0]) == pytest.approx(
        {1: 10_000_000, 2: 10_000_000, 3: 10_000_000}
    )  # the balancing LP's doing


def test_the_lp_bound_can_exceed_t_min():
    # a class that only the slow trainer holds: T_min averages over both trainers, the LP does not
    workers = [trainer(0, "a", 1e9), trainer(1, "a", 3e9), rollout("e", 0, "c", 9e9)]
    net = network(workers, ((0,), (2,), 30_000_000), ((1,), (2,), 10_000_000))
    flow, bounds = bound(net)
    assert bounds.t_min_seconds == pytest.approx(0.01)
    assert flow.seconds == pytest.approx(0.03)
    assert bounds.link_bound_seconds == pytest.approx(0.03)


def test_forwarding_on_a_slow_uplink_is_avoided():
    # both replicas need 10 MB in 10 ms; the slow one (ingress 0.01 s at 1 GB/s) would be busy longer if it forwarded
    workers = [trainer(0, "a", 9e9), rollout("slow", 0, "b", 1e9), rollout("fast", 0, "c", 4e9)]
    net = network(workers, ((0,), (1, 2), 10_000_000))
    flow, _ = bound(net)
    assert flow.seconds == pytest.approx(0.01)
    entered = dict(flow.enter[0])
    assert entered[2] / 4 == pytest.approx(entered[1], rel=1e-3)


def test_a_node_limit_counts_for_all_its_workers():
    workers = [trainer(0, "a"), trainer(1, "a"), rollout("e", 0, "c", 9e9)]
    net = network(workers, ((0, 1), (2,), 30_000_000), node_bandwidth=(("a", 1.5e9),))
    flow, bounds = bound(net)
    assert flow.seconds == pytest.approx(0.02)
    assert bounds.t_min_seconds == pytest.approx(0.02)


def test_a_shared_node_limit_binds_sending_and_forwarding_together():
    # trainer 0 fills node a's link for 10 ms, so that x, on the same node, must not forward class 1: y does it all
    workers = [trainer(0, "a"), rollout("x", 0, "a"), trainer(1, "b"), rollout("y", 0, "c"), rollout("z", 0, "d")]
    classes = ((0,), (4,), 10_000_000), ((2,), (1, 3), 10_000_000)
    free, _ = bound(network(workers, *classes))
    assert dict(free.enter[1]) == pytest.approx({0: 5_000_000, 2: 5_000_000})
    capped, _ = bound(network(workers, *classes, node_bandwidth=(("a", 1e9),)))
    assert free.seconds == capped.seconds == pytest.approx(0.01)
    assert dict(capped.enter[1])[2] == pytest.approx(10_000_000, rel=1e-4)
    slower, bounds = bound(network(workers, *classes, node_bandwidth=(("a", 0.5e9),)))
    assert slower.seconds == bounds.t_min_seconds == pytest.approx(0.02)


def test_forwarding_counts_in_the_bound_when_all_who_could_forward_are_busy():
    # x and y share their nodes' links with a trainer that sends 10 MB; one of them must pass 10 MB on: 15 MB each
    workers = [
        trainer(0, "a"),
        trainer(1, "b"),
        trainer(2, "c"),
        rollout("x", 0, "a"),
        rollout("y", 0, "c"),
        rollout("z", 0, "d", 9e9),
    ]
    classes = [((0,), (5,), 10_000_000), ((1,), (3, 4), 10_000_000), ((2,), (5,), 10_000_000)]
    flow, bounds = bound(network(workers, *classes, node_bandwidth=(("a", 1e9), ("c", 1e9))))
    assert flow.seconds == pytest.approx(0.015)
    assert bounds.t_min_seconds == pytest.approx(0.01)
    assert bounds.dual[-2:] == pytest.approx([0.5e-9, 0.5e-9])


def test_a_node_with_its_own_holder_is_no_network_target():
    workers = [trainer(0, "a"), rollout("near", 0, "a"), rollout("far", 0, "b")]
    net = network(workers, ((0,), (1, 2), 10 * MB), ((0,), (1,), 5 * MB))
    assert net.targets == ((1,), ())
    assert net.local == ((0,), (0,))
    assert net.ingress_bytes == {0: 0, 1: 10 * MB}
    assert net.network_bytes == 10 * MB
    assert t_min_seconds(net) == pytest.approx(10 * MB / 1e9)
    bound(net)


def test_nothing_crosses_the_network():
    net = network([trainer(0, "a"), rollout("near", 0, "a")], ((0,), (1,), 10 * MB))
    flow, bounds = bound(net)
    assert flow.seconds == bounds.t_min_seconds == bounds.link_bound_seconds == 0.0
    assert len(bounds.dual) == 1 + 1 + 2 * 1


def test_data_parallel_trainers_are_balanced_beyond_the_bottleneck():
    # receivers are the bottleneck, so any split is optimal for the first LP; the second one evens it out
    workers = [*(trainer(i, "a", 10e9) for i in range(4)), rollout("e", 0, "b"), rollout("f", 0, "c")]
    net = network(workers, ((0, 1, 2, 3), (4, 5), 40_000_000), ((0, 1), (4,), 8_000_000))
    flow, _ = bound(net)
    sent = [sum(dict(side).get(t, 0.0) for side in flow.leave) for t in range(4)]
    assert sent == pytest.approx([12_000_000] * 4, rel=1e-5)


def test_certificate_rows_are_in_the_documented_order():
    workers = [trainer(0, "a"), trainer(1, "a", 9e9), rollout("e", 0, "b", 9e9), rollout("f", 0, "c", 9e9)]
    net = network(workers, ((0,), (2,), 30_000_000), ((0, 1), (2, 3), 3), node_bandwidth=(("c", 8e9),))
    _, bounds = bound(net)
    assert len(bounds.dual) == 2 + 2 + 2 + 2 + 1
    assert bounds.dual[0] == pytest.approx(1e-9)  # y of class 0: seconds per byte
    assert bounds.dual[2] == pytest.approx(1e-9)  # u of trainer 0
    assert bounds.dual[3:] == pytest.approx([0.0] * 6)
