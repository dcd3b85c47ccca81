"""Groups of nodes in a topology: what is accepted, what is refused and how, and that the wire and the digest carry them."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from tests.unit.plan_cases import everything, rollout, spec_of, topology, trainer

from weightbridge.errors import PlanError, UsageError
from weightbridge.plan import NodeGroup, PlanOptions, decode_plan, encode_plan, make_plan

WORKERS = (trainer(0, "a"), trainer(1, "b"), rollout("e", 0, "c"), rollout("e", 1, "c"), rollout("f", 0, "d"))


def group(name, *nodes, bandwidth=1e9):
    return NodeGroup(name=name, nodes=nodes, bandwidth=bandwidth)


def test_a_node_knows_its_group():
    topo = topology(*WORKERS, groups=(group("west", "c", "a"), group("east", "d")))
    assert topo.group_of == {"c": 0, "a": 0, "d": 1}
    assert topology(*WORKERS).group_of == {}
    assert topology(*WORKERS, groups=(group("west", "a", bandwidth=3),)).groups[0].bandwidth == 3.0


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([group("west", "a", "nowhere")], "'west' names node 'nowhere', on which no worker is"),
        ([group("west", "a", "c"), group("east", "c")], "'c' is in group 'west' and in 'east'"),
        ([group("west", "a", "a")], "'a' is in group 'west' and in 'west'"),
        ([group("west", "a"), group("west", "c")], "unique, got 'west' twice"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups, match):
    with pytest.raises(UsageError, match=match):
        topology(*WORKERS, groups=tuple(groups))


@pytest.mark.parametrize("bandwidth", [0.0, -1e9, float("inf"), float("nan")])
def test_an_uplink_has_a_speed(bandwidth):
    with pytest.raises(UsageError, match="'west': bandwidth must be positive and finite"):
        group("west", "a", bandwidth=bandwidth)


def test_an_empty_group_is_refused():
    with pytest.raises(UsageError, match="'west' has no nodes"):
        group("west")


# --- the wire -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def plan():
    spec = spec_of((36, 24))
    return make_plan(spec, topology(*WORKERS), [everything(spec)] * 5, options=PlanOptions(alignment=64))


def grouped(plan, *groups):
    return replace(plan, topology=replace(plan.topology, groups=groups))


def test_groups_survive_the_wire_and_change_the_digest(plan):
    plans = [
        plan,
        grouped(plan, group("west", "a", "c")),
        grouped(plan, group("west", "a", "c", bandwidth=2e9)),
        grouped(plan, group("west", "a"), group("east", "c", "d")),
    ]
    for p in plans:
        back = decode_plan(encode_plan(p))
        assert back.topology == p.topology
        assert back.digest == p.digest
    assert len({p.digest for p in plans}) == 4


def test_a_message_without_groups_is_one_of_a_topology_without_groups(plan):
    message = msgspec.msgpack.decode(encode_plan(plan))
    assert message.pop("groups") == []
    back = decode_plan(msgspec.msgpack.encode(message))
    assert back.topology == plan.topology
    message = msgspec.msgpack.decode(encode_plan(grouped(plan, group("west", "a"))))
    assert message.pop("groups") == [["west", ["a"], 1e9]]
    with pytest.raises(PlanError, match="damaged"):
        decode_plan(msgspec.msgpack.encode(message))


@pytest.mark.parametrize(
    "groups", [[["west", ["nowhere"], 1e9]], [["west", ["a"], -1.0]], [["west", [], 1.0]], [["w", ["a"], 1.0]] * 2]
)
def test_damaged_groups_are_refused(plan, groups):
    message = msgspec.msgpack.decode(encode_plan(plan))
    with pytest.raises(PlanError, match="topology makes no sense"):
        decode_plan(msgspec.msgpack.encode({**message, "groups": groups}))
