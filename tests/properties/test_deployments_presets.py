"""The five presets against numbers worked out by hand from the models' public configurations."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from weightbridge.deployments import PRESETS, preset
from weightbridge.errors import LayoutError, UsageError
from weightbridge.plan.topology import Role

MODEL_BYTES = {
    "moonlight-16b": 31_920_223_744,
    "qwen3-30b-a3b": 61_064_245_248,
    "qwen3-235b-a22b": 470_187_269_120,
    "kimi-k2": 2_052_816_510_976,
    "qwen3-32b": 65_524_246_528,
}
NODE_BYTES = {
    "moonlight-16b": MODEL_BYTES["moonlight-16b"],
    "qwen3-30b-a3b": MODEL_BYTES["qwen3-30b-a3b"],
    "qwen3-235b-a22b": 117_621_939_200,
    "kimi-k2": 530_787_475_456,
    "qwen3-32b": MODEL_BYTES["qwen3-32b"],
}
BOXES = {
    "moonlight-16b": 15_184,
    "qwen3-30b-a3b": 87_648,
    "qwen3-235b-a22b": 176_208,
    "kimi-k2": 868_320,
    "qwen3-32b": 16_968,
}

deployment = cache(preset)


def distinct_bytes(job, workers):
    """Bytes of the distinct boxes of some workers; in a preset two boxes of a tensor are equal or have nothing in common."""
    columns = []
    for source_map in {id(job.maps[i]): job.maps[i] for i in workers}.values():
        c = source_map.copies
        columns.append(np.concatenate([c.tensor[:, None], c.src_start[:, None], c.count, c.src_stride], axis=1))
    distinct = np.unique(np.concatenate(columns), axis=0)
    sizes = np.array([t.dtype.itemsize for t in job.spec.tensors])
    return int((distinct[:, 2:4].prod(axis=1) * sizes[distinct[:, 0]]).sum())


@pytest.mark.parametrize("name", PRESETS)
def test_model_bytes_are_those_of_the_public_model(name):
    """In elements, with 2 bytes each and 4 for a correction bias.

    moonlight-16b: attention = q 16x192x2048 + kv_a 576x2048 + norm 512 + kv_b 16x256x512 + o 2048x2048 + norms 2x2048
      = 13,767,168, times 27. Layer 0: 3x2048x11264 = 69,206,016. Each of 26 others: 64 experts of 3x2048x1408 + shared
      3x2048x2816 + router 64x2048 = 571,080,704, and 64 biases. Vocabulary 2x163840x2048 = 671,088,640, norm 2048.
      15,960,108,544 x 2 + 26x64x4 = 31,920,223,744.
    qwen3-30b-a3b: attention = q and o 2x32x128x2048 + k and v 2x4x128x2048 + head norms 256 + norms 4096 = 18,878,720; experts
      128x3x2048x768 + router 128x2048 = 604,241,920; times 48. Vocabulary 2x151936x2048 = 622,329,856, norm 2048.
      30,532,122,624 x 2 = 61,064,245,248.
    qwen3-235b-a22b: attention = 2x64x128x4096 + 2x4x128x4096 + 256 + 8192 = 71,311,616; experts 128x3x4096x1536 + 128x4096
      = 2,416,443,392; times 94. Vocabulary 2x151936x4096 = 1,244,659,712, norm 4096. 235,093,634,560 x 2 = 470,187,269,120.
    kimi-k2: attention = q_a 1536x7168 + 1536 + q_b 64x192x1536 + kv_a 576x7168 + 512 + kv_b 64x256x512 + o 7168x8192
      + 2x7168 = 101,138,432, times 61. Layer 0: 3x7168x18432 = 396,361,728. Each of 60 others: 384 experts of 3x7168x2048
      = 44,040,192 each + a shared one + router 384x7168 = 16,958,226,432, and 384 biases. Vocabulary 2x163840x7168
      = 2,348,810,240, norm 7168. 1,026,408,209,408 x 2 + 60x384x4 = 2,052,816,510,976.
    qwen3-32b: attention = 2x64x128x5120 + 2x8x128x5120 + 256 + 10240 = 94,382,336; mlp 3x5120x25600 = 393,216,000; times 64.
      Vocabulary 2x151936x5120 = 1,555,824,640, norm 5120. 32,762,123,264 x 2 = 65,524,246,528.
    """
    job = deployment(name)
    assert job.spec.nbytes == MODEL_BYTES[name]
    assert distinct_bytes(job, job.topology.trainers) == MODEL_BYTES[name]  # the trainers hold it all


@pytest.mark.parametrize("name", PRESETS)
def test_bytes_a_rollout_node_needs(name):
    """An engine of one node needs the whole model there. The others have 8 of an engine's 32 ranks on a node. In elements:

    qwen3-235b-a22b: a quarter of everything that is cut: experts, q, o and vocabulary by 32 ranks, and one of the 4
      key/value heads, as 8 ranks share each. Whole on every node are head norms, norms and routers, 94x(256 + 8192
      + 128x4096) + 4096 = 50,081,280. (235,093,634,560 - 50,081,280) / 4 + 50,081,280 = 58,810,969,600, x 2 =
      117,621,939,200.
    kimi-k2: a quarter of the experts, 60x384x44,040,192 = 1,014,686,023,680, / 4 = 253,671,505,920, and all the rest whole,
      1,026,408,209,408 - 1,014,686,023,680 = 11,722,185,728. 265,393,691,648 x 2 + biases 60x384x4 = 530,787,475,456.
    """
    job = deployment(name)
    nodes = {w.node for w in job.topology.workers if w.role is Role.ROLLOUT}
    found = {node: distinct_bytes(job, job.topology.on_node(node, Role.ROLLOUT)) for node in nodes}
    assert set(found.values()) == {NODE_BYTES[name]}


@pytest.mark.parametrize("name", PRESETS)
def test_shape_of_the_job(name):
    job = deployment(name)
    assert sum(len(m.copies) for m in job.maps) == BOXES[name]
    nodes = job.topology.nodes
    assert all(len(job.topology.on_node(node)) == 8 for node in nodes)
    assert all(
        job.topology.bandwidth_of_node(node, job.topology.workers[job.topology.on_node(node)[0]].role) == 400e9
        for node in nodes
    )
    assert job.slot_bytes == 256 << 20
    trainers, rollouts, engines = {
        "moonlight-16b": (8, 8, 1),
        "qwen3-30b-a3b": (16, 16, 2),
        "qwen3-235b-a22b": (64, 64, 2),
        "kimi-k2": (256, 256, 8),
        "qwen3-32b": (16, 16, 2),
    }[name]
    assert (len(job.topology.trainers), len(job.topology.rollouts)) == (trainers, rollouts)
    assert len({w.engine for w in job.topology.workers} - {""}) == engines


def test_replicas_of_an_engine_share_their_maps():
    job = deployment("kimi-k2")
    assert len({id(m) for m in job.maps}) == 256 + 32
    first = job.topology.index["engine-0/5"]
    other = job.topology.index["engine-6/5"]
    assert job.maps[first] is job.maps[other]


def test_scaled_presets():
    """Twice the nodes double the data-parallel degree; engines and experts are as many as asked."""
    job = preset("qwen3-30b-a3b", engines=5, trainer_nodes=4, num_experts=256)
    assert len(job.topology.trainers) == 32
    assert len(job.topology.rollouts) == 40
    assert job.maps[0] is job.maps[8] is job.maps[24]  # TP4 and EP8: ranks 8 apart are replicas
    assert sum(t.name.endswith(".down_proj.weight") for t in job.spec.tensors) == 48 * 256
    assert job.description.endswith("; here with 4 trainer nodes, 5 engines, 256 experts")
    slow = preset("moonlight-16b", node_bandwidth=100e9, slot_bytes=1 << 20)
    assert slow.topology.workers[3].bandwidth == 12.5e9
    assert slow.slot_bytes == 1 << 20


def test_requests_that_do_not_fit():
    with pytest.raises(UsageError, match="preset 'kimi' is not known; known are moonlight-16b, "):
        preset("kimi")
    with pytest.raises(UsageError, match="engines must be at least 1, got 0"):
        preset("qwen3-32b", engines=0)
    with pytest.raises(UsageError, match="num_experts is 8, but the model is dense"):
        preset("qwen3-32b", num_experts=8)
    with pytest.raises(UsageError, match="tp 4 x cp 2 x pp 4 = 32 does not divide its 8 workers"):
        preset("qwen3-235b-a22b", trainer_nodes=1)
    with pytest.raises(LayoutError, match="experts: 100 is not divisible by 8"):
        preset("qwen3-30b-a3b", num_experts=100)
