"""Plans survive the wire bit for bit, and damaged bytes are refused."""

from __future__ import annotations

import msgspec
import pytest
from tests.unit.plan_cases import everything, rollout, rows, spec_of, takes, topology, trainer

from weightbridge.errors import PlanError, UsageError
from weightbridge.plan import PlanOptions, decode_plan, encode_plan, make_plan, verify_plan


@pytest.fixture
def job():
    spec = spec_of((36, 24), (7,), dtype=["BF16", "F32"])
    shards = [takes(spec, (0, rows(36, r, 2)), (1, rows(7, r, 2))) for r in range(2)]
    topo = topology(
        trainer(0), trainer(1), rollout("e", 0, "b", 2e9), rollout("f", 0, "c"), node_bandwidth=(("b", 1_000_000_000),)
    )
    maps = [*shards, everything(spec), everything(spec)]
    return spec, maps, make_plan(spec, topo, maps, options=PlanOptions(alignment=64, min_rounds=3, epoch=2))


def test_round_trip(job):
    spec, maps, plan = job
    back = decode_plan(encode_plan(plan))
    assert back.digest == plan.digest
    assert (back.topology, back.classes, back.bounds, back.epoch) == (plan.topology, plan.classes, plan.bounds, 2)
    assert encode_plan(back) == encode_plan(plan)
    assert verify_plan(back, spec, maps) == verify_plan(plan, spec, maps)
    assert back.part(1, 2) == plan.part(1, 2)


def altered(plan, **changes):
    message = msgspec.msgpack.decode(encode_plan(plan))
    return msgspec.msgpack.encode({**message, **changes})


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan"), float("inf")])
def test_bandwidths_must_be_positive_and_finite(bandwidth):
    with pytest.raises(UsageError, match="positive and finite"):
        trainer(0, bandwidth=bandwidth)
    with pytest.raises(UsageError, match="positive and finite"):
        topology(trainer(0), node_bandwidth=(("a", bandwidth),))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": 99}, "wire format 99"),
        ({"epoch": 3}, "damaged"),
        ({"epoch": "x"}, "does not decode"),
        ({"surprise": 1}, "does not decode"),
        ({"tensor": [[3], b"12345678"]}, "column 'tensor'"),
        ({"tensor": [[1], b"12345678"]}, "differ in length"),
        ({"start": [[-1, -2], b"1234567812345678"]}, "column 'start'"),
        ({"routes": [[1, 40], b"1" * 40]}, "column 'routes'"),
        ({"rounds": 0}, "not positive"),
        ({"node_bandwidth": [["b", -1.0]]}, "topology makes no sense"),
        ({"node_bandwidth": [["b", float("nan")]]}, "topology makes no sense"),
        ({"workers": [["w", "trainer", "a", 0, "engine", 1e9]]}, "topology makes no sense"),
    ],
)
def test_damaged_plans_are_refused(job, changes, match):
    with pytest.raises(PlanError, match=match):
        decode_plan(altered(job[2], **changes))


def test_cut_and_oversized_messages_are_refused(job):
    data = encode_plan(job[2])
    for end in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(PlanError, match="does not decode"):
            decode_plan(data[:end])
    with pytest.raises(PlanError, match="more than the 10"):
        decode_plan(data, max_bytes=10)


def test_a_flipped_byte_never_passes(job):
    data = encode_plan(job[2])
    for at in range(0, len(data), max(1, len(data) // 150)):
        broken = bytearray(data)
        broken[at] ^= 0x15
        try:
            back = decode_plan(bytes(broken))
        except PlanError:
            continue
        assert back.digest == job[2].digest  # only what the digest leaves out: the bounds, which verify_plan proves
