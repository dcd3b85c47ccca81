"""Sharding rules, element by element, against the frameworks' own way of cutting, on small uneven models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests import framework_layouts as oracle

from weightbridge.deployments.architecture import Architecture, GroupedAttention, LatentAttention, checkpoint_spec
from weightbridge.deployments.rollout_rules import EngineDegrees, engine_maps
from weightbridge.deployments.sharded_rules import ShardedDegrees, sharded_maps
from weightbridge.deployments.trainer_rules import MegatronDegrees, megatron_maps, split_layers
from weightbridge.errors import LayoutError, UsageError
from weightbridge.layout import expand, missing_elements

DENSE = Architecture(
    num_layers=3, hidden=5, vocab=11, dense_width=8, tied=True,
    attention=GroupedAttention(
        num_heads=8, num_kv_heads=2, head_dim=3, bias=True, output_bias=True, head_norms=True
    ),
)  # fmt: skip
EXPERTS = Architecture(
    num_layers=5, hidden=6, vocab=70, dense_width=12, dense_layers=frozenset({1}), num_experts=12, expert_width=4,
    attention=GroupedAttention(num_heads=4, num_kv_heads=4, head_dim=2, head_norms=True),
)  # fmt: skip
LATENT = Architecture(
    num_layers=4, hidden=6, vocab=19, dense_width=8, dense_layers=frozenset({0}), num_experts=8, expert_width=4,
    shared_width=8, router_correction=True,
    attention=LatentAttention(num_heads=4, q_lora_rank=5, kv_lora_rank=3, nope_dim=4, rope_dim=2, value_dim=3),
)  # fmt: skip
DIRECT = replace(LATENT, attention=replace(LATENT.attention, q_lora_rank=None))
MODELS = {"dense": DENSE, "experts": EXPERTS, "latent": LATENT, "direct": DIRECT}


def _same(maps, spec, expected):
    """maps[rank] holds just what expected(rank) says, tensor by tensor."""
    checkpoint = oracle.random_checkpoint(spec)
    for rank, source_map in enumerate(maps):
        found, wanted = oracle.filled(source_map, spec, checkpoint), expected(checkpoint, rank)
        assert list(found) == [t.name for t in source_map.live]
        assert set(found) == set(wanted), f"rank {rank}"
        for name, value in wanted.items():
            assert found[name].shape == value.shape, f"rank {rank}, {name}"
            np.testing.assert_array_equal(found[name], value, err_msg=f"rank {rank}, {name}")


MEGATRON = [
    ("dense", {"world": 8, "tp": 2, "pp": 2, "cp": 2, "ep": 1, "stages": (2, 1)}),
    ("dense", {"world": 4, "tp": 4, "pp": 1, "cp": 1, "ep": 1, "stages": (3,)}),  # more ranks than key/value heads
    ("experts", {"world": 12, "tp": 2, "pp": 2, "cp": 1, "ep": 6, "stages": (3, 2)}),
    ("experts", {"world": 12, "tp": 1, "pp": 3, "cp": 2, "ep": 2, "stages": (1, 3, 1)}),
    ("latent", {"world": 16, "tp": 2, "pp": 2, "cp": 2, "ep": 8, "stages": (2, 2)}),
    ("direct", {"world": 8, "tp": 4, "pp": 1, "cp": 1, "ep": 4, "stages": (4,)}),
]


@pytest.mark.parametrize(("model", "degrees"), MEGATRON)
def test_megatron_ranks_hold_what_megatron_would_cut(model, degrees):
    a = MODELS[model]
    spec = checkpoint_spec(a)
    given = {k: v for k, v in degrees.items() if k not in ("world", "stages")}
    maps = megatron_maps(
        a,
        spec,
        MegatronDegrees(num_workers=degrees["world"], stage_layers=degrees["stages"], vocab_multiple=4, **given),
    )
    assert len(maps) == degrees["world"]
    _same(maps, spec, lambda ckpt, r: oracle.megatron_worker(a, ckpt, r, **degrees, vocab_multiple=4))
    assert missing_elements(spec, maps) == {}


ENGINES = [
    ("dense", {"tp": 2, "ep": 1, "attention": "tp", "style": "sglang"}),
    ("dense", {"tp": 8, "ep": 1, "attention": "tp", "style": "vllm"}),  # four ranks share a key/value head
    ("dense", {"tp": 3, "ep": 1, "attention": "replicated", "style": "sglang"}),
    ("experts", {"tp": 4, "ep": 2, "attention": "tp", "style": "sglang"}),  # experts cut over two ranks each
    ("experts", {"tp": 4, "ep": 4, "attention": "tp", "style": "vllm"}),
    ("latent", {"tp": 4, "ep": 4, "attention": "tp", "style": "sglang"}),
    ("latent", {"tp": 8, "ep": 8, "attention": "replicated", "style": "vllm"}),
    ("direct", {"tp": 4, "ep": 1, "attention": "replicated", "style": "sglang"}),
]


@pytest.mark.parametrize(("model", "degrees"), ENGINES)
def test_engine_ranks_hold_what_the_engine_would_load(model, degrees):
    a = MODELS[model]
    spec = checkpoint_spec(a)
    maps = engine_maps(a, spec, EngineDegrees(**degrees))
    assert len(maps) == degrees["tp"]
    _same(maps, spec, lambda ckpt, r: oracle.engine_worker(a, ckpt, r, **degrees))
    assert missing_elements(spec, maps) == {}


@pytest.mark.parametrize("sharding", ["rows", "flat"])
@pytest.mark.parametrize(("model", "shard", "world"), [("dense", 3, 6), ("latent", 5, 5), ("experts", 8, 8)])
def test_fsdp_ranks_hold_their_shards(model, shard, world, sharding):
    a = MODELS[model]
    spec = checkpoint_spec(a)
    maps = sharded_maps(a, spec, ShardedDegrees(num_workers=world, shard=shard, sharding=sharding))
    assert len(maps) == world
    _same(maps, spec, lambda ckpt, r: oracle.fsdp_worker(a, ckpt, r, shard=shard, sharding=sharding))
    assert missing_elements(spec, maps) == {}


def test_equal_layouts_share_one_map_and_differing_ones_do_not():
    spec = checkpoint_spec(LATENT)
    maps = megatron_maps(LATENT, spec, MegatronDegrees(num_workers=16, tp=2, pp=2, cp=1, ep=4))
    assert (
        len({id(m) for m in maps}) == len({m.fingerprint for m in maps}) == 8
    )  # 2 stages of 8, ranks 4 apart are alike
    assert maps[1] is maps[5]
    assert maps[1].live is maps[3].live  # the same tensors, other experts in them


def test_boxes_are_as_many_as_copies():
    """A rule gives boxes that `expand` need not split, so that the count of boxes is the count of rows."""
    spec = checkpoint_spec(LATENT)
    for source_map in engine_maps(LATENT, spec, EngineDegrees(tp=4, ep=2)):
        assert len(expand(source_map, spec)) == len(source_map.copies)


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (94, 4, (24, 24, 24, 22)),
        (61, 8, (8,) * 7 + (5,)),
        (64, 2, (32, 32)),
        (5, 4, (2, 1, 1, 1)),  # ceil(5 / 4) = 2 thrice would leave nothing for the last
        (6, 4, (2, 2, 1, 1)),
        (9, 9, (1,) * 9),
    ],
)
def test_layers_are_split_over_stages(layers, stages, expected):
    assert split_layers(layers, stages) == expected


def test_degrees_that_do_not_fit_are_refused_with_both_numbers():
    with pytest.raises(UsageError, match="tp 4 x cp 1 x pp 3 = 12 does not divide its 16 workers"):
        MegatronDegrees(num_workers=16, tp=4, pp=3)
    with pytest.raises(UsageError, match="ep 3 does not divide the 8 workers of a pipeline stage"):
        MegatronDegrees(num_workers=16, tp=4, pp=2, ep=3)
    with pytest.raises(UsageError, match="ep must divide tp"):
        EngineDegrees(tp=8, ep=3)
    with pytest.raises(UsageError, match="shard must divide its 8 workers"):
        ShardedDegrees(num_workers=8, shard=3)
    with pytest.raises(UsageError, match="pp 4 exceeds the model's 3 layers"):
        split_layers(3, 4)
    spec = checkpoint_spec(EXPERTS)
    with pytest.raises(LayoutError, match="experts: 12 is not divisible by 8"):
        engine_maps(EXPERTS, spec, EngineDegrees(tp=8, ep=8, attention="replicated"))
    with pytest.raises(LayoutError, match="attention heads: 4 is not divisible by 8"):
        engine_maps(LATENT, checkpoint_spec(LATENT), EngineDegrees(tp=8, ep=8))
    with pytest.raises(UsageError, match=r"stages of \[2, 2\] layers; expected 2 of them with 5 layers"):
        megatron_maps(EXPERTS, spec, MegatronDegrees(num_workers=4, pp=2, stage_layers=(2, 2)))


def test_a_checkpoint_of_another_model_is_refused():
    with pytest.raises(LayoutError, match=r"q_a_proj.weight' is needed by the layout but absent"):
        engine_maps(LATENT, checkpoint_spec(DIRECT), EngineDegrees(tp=4))
