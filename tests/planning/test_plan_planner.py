"""Whole plans of small jobs with layouts as they are in the field: bytes counted, verified, deterministic."""

from __future__ import annotations

import pytest
from tests.unit.plan_cases import everything, rollout, rows, spec_of, takes, topology, trainer

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.errors import CoverageError, InfeasibleError, PlanError, UsageError
from weightbridge.plan import PlanOptions, make_plan, verify_plan

SMALL = PlanOptions(slot_bytes=1 << 20, alignment=64)


def planned(spec, topo, maps, options=SMALL):
    plan = make_plan(spec, topo, maps, options=options)
    facts = verify_plan(plan, spec, maps)
    assert verify_plan(plan, spec, maps, exact_numel=0) == facts
    return plan, facts


def sharded(spec, parts):
    """Row shards as FSDP2 makes them: torch.chunk, so the last ones are shorter or empty."""
    return [takes(spec, *((i, rows(t.shape[0], r, parts)) for i, t in enumerate(spec.tensors))) for r in range(parts)]


def test_one_worker_each():
    spec = spec_of((5, 7), (3,))
    _, facts = planned(spec, topology(trainer(0), rollout("e", 0, "b")), [everything(spec)] * 2)
    assert facts.trainer_egress_bytes == facts.model_bytes == spec.nbytes
    assert facts.rollout_node_ingress_bytes == {"b": spec.nbytes}
    assert facts.num_pairs == 1


def test_a_worker_that_needs_nothing_gets_nothing():
    spec = spec_of((5, 7), (3,))
    topo = topology(trainer(0), rollout("e", 0, "b"), rollout("idle", 0, "c"), rollout("f", 0, "d"))
    plan, facts = planned(spec, topo, [everything(spec), everything(spec), takes(spec), takes(spec, (1,))])
    assert facts.rollout_node_ingress_bytes == {"b": spec.nbytes, "c": 0, "d": 6}
    assert 2 not in plan.routes["entry"]
    assert 2 not in plan.hops["dst"]


def test_nobody_needs_anything():
    spec = spec_of((5, 7))
    plan, facts = planned(spec, topology(trainer(0), rollout("e", 0, "b")), [everything(spec), takes(spec)])
    assert (len(plan.routes), plan.rounds, facts.model_bytes) == (0, 1, 0)


def test_replicated_kv_heads_enter_a_node_once():
    # 2 KV heads over tensor parallel 4: heads 0 0 1 1; every engine rank also has its own quarter of the queries
    spec = spec_of((64, 32), (16, 32))
    engine = [
        takes(spec, (0, slice(16 * r, 16 * r + 16)), (1, slice(8 * (r // 2), 8 * (r // 2) + 8))) for r in range(4)
    ]
    topo = topology(trainer(0), trainer(1), *(rollout("e", r, "b") for r in range(4)))
    _, facts = planned(spec, topo, [*sharded(spec, 2), *engine])
    assert facts.rollout_node_ingress_bytes == {"b": spec.nbytes}
    assert facts.trainer_egress_bytes == spec.nbytes


def test_tied_tensors_travel_once():
    # the engine keeps the embedding twice (input and output); the second copy costs no bytes
    spec = spec_of((30, 8), (4, 4))
    engine = takes(spec, (0,), (0,), (1,))
    _, facts = planned(spec, topology(trainer(0), rollout("e", 0, "b")), [everything(spec), engine])
    assert facts.rollout_node_ingress_bytes == {"b": spec.nbytes}


def test_engines_of_different_sizes_on_different_nodes():
    spec = spec_of((36, 24), (24, 36), (7,))

    def tensor_parallel(r, n):
        return takes(
            spec,
            (0, slice(36 // n * r, 36 // n * (r + 1))),
            (1, slice(0, 24), slice(36 // n * r, 36 // n * (r + 1))),
            (2,),
        )

    topo = topology(
        trainer(0), trainer(1), trainer(2), *(rollout("e", r, "b") for r in range(3)),
        *(rollout("f", r, "c") for r in range(2)), rollout("g", 0, "d"),
    )  # fmt: skip
    engines = [*(tensor_parallel(r, 3) for r in range(3)), *(tensor_parallel(r, 2) for r in range(2)), everything(spec)]
    plan, facts = planned(spec, topo, [*sharded(spec, 3), *engines])
    assert facts.trainer_egress_bytes == spec.nbytes
    assert set(facts.rollout_node_ingress_bytes.values()) == {spec.nbytes}
    assert len(plan.hops)


def test_two_engines_on_one_node_share_what_enters():
    spec = spec_of((36, 24))
    topo = topology(trainer(0), rollout("e", 0, "b"), rollout("f", 0, "b"))
    _, facts = planned(spec, topo, [everything(spec)] * 3)
    assert facts.rollout_node_ingress_bytes == {"b": spec.nbytes}


def test_an_engine_over_two_nodes():
    spec = spec_of((36, 24))
    topo = topology(trainer(0), rollout("e", 0, "b"), rollout("e", 1, "c"))
    halves = [takes(spec, (0, rows(36, r, 2))) for r in range(2)]
    _, facts = planned(spec, topo, [everything(spec), *halves])
    assert facts.rollout_node_ingress_bytes == {"b": spec.nbytes // 2, "c": spec.nbytes // 2}


def test_mixed_placement_uses_the_inside_link():
    # trainer 0 shares node a with a rollout: its half reaches that rollout without the network, the other half over it
    spec = spec_of((36, 24))
    topo = topology(trainer(0, "a"), trainer(1, "b"), rollout("near", 0, "a"), rollout("far", 0, "c"))
    plan, facts = planned(spec, topo, [*sharded(spec, 2), everything(spec), everything(spec)])
    assert facts.rollout_node_ingress_bytes == {"a": spec.nbytes // 2, "c": spec.nbytes}
    assert facts.trainer_egress_bytes == spec.nbytes
    assert facts.needed_bytes == {"a": spec.nbytes, "c": spec.nbytes}
    assert plan.bounds.busiest_link_seconds >= plan.bounds.t_min_seconds


def test_everybody_on_one_node_uses_no_network():
    spec = spec_of((36, 24))
    plan, facts = planned(spec, topology(trainer(0), rollout("e", 0, "a")), [everything(spec)] * 2)
    assert facts.trainer_egress_bytes == 0
    assert facts.rollout_node_ingress_bytes == {"a": 0}
    assert plan.bounds.busiest_link_seconds == 0.0
    assert len(plan.routes) == 1


def test_data_parallel_trainers_each_send_a_part():
    spec = spec_of((1000, 512))
    topo = topology(*(trainer(i, f"t{i}") for i in range(4)), rollout("e", 0, "b", 9e9))
    _, facts = planned(spec, topo, [everything(spec)] * 5)
    assert facts.trainer_egress_bytes == spec.nbytes
    assert max(facts.trainer_egress_per_worker.values()) <= spec.nbytes / 4 * 1.01


def test_rails_between_equal_nodes():
    spec = spec_of((4096, 64))
    engines = [takes(spec, (0, rows(4096, r, 4))) for r in range(4)]
    topo = topology(
        *(trainer(i) for i in range(2)), *(rollout(f"e{v}", r, f"n{v}") for v in range(3) for r in range(4))
    )
    plan, facts = planned(spec, topo, [*sharded(spec, 2), *engines * 3])
    rank = [w.rank for w in topo.workers]
    assert all(rank[src] == rank[dst] for _, _, src, dst in plan.hops.tolist())
    assert facts.max_out_pairs <= 6
    assert plan.bounds.busiest_link_seconds <= plan.bounds.link_bound_seconds * 1.02


def test_entries_are_needers_where_only_some_need():
    spec = spec_of((4096, 64))
    engines = [takes(spec, (0, rows(4096, r, 4))) for r in range(4)]
    topo = topology(trainer(0), *(rollout("e", r, "b") for r in range(4)))
    plan, _ = planned(spec, topo, [everything(spec), *engines])
    for class_id, entry in plan.routes[["class_id", "entry"]].tolist():
        assert entry in plan.classes[class_id].needers
    assert plan.bounds.busiest_link_seconds == pytest.approx(plan.bounds.link_bound_seconds, rel=1e-3)


def test_links_of_a_node_carry_what_they_can():
    # a node whose second link is three times as fast takes three quarters of a replicated tensor there
    spec = spec_of((4096, 64))
    topo = topology(trainer(0, "a", 9e9), rollout("e", 0, "b", 1e9), rollout("e", 1, "b", 3e9))
    plan, _ = planned(spec, topo, [everything(spec)] * 3)
    into = {w: int((plan.routes["hi"] - plan.routes["lo"])[plan.routes["entry"] == w].sum()) for w in (1, 2)}
    assert into[2] / into[1] == pytest.approx(3, rel=0.02)
    assert plan.bounds.busiest_link_seconds == pytest.approx(plan.bounds.link_bound_seconds, rel=0.01)


def test_whole_pieces_are_dealt_evenly_too():
    # ten trainers with a tensor each: pieces that go whole to one worker count against its share like parts do
    spec = spec_of(*[(512, 64)] * 10)
    topo = topology(*(trainer(i) for i in range(10)), rollout("e", 0, "b"), rollout("e", 1, "b"))
    plan, _ = planned(spec, topo, [*(takes(spec, (i,)) for i in range(10)), everything(spec), everything(spec)])
    assert [int((plan.routes["entry"] == w).sum()) for w in (10, 11)] == [5, 5]


def test_plans_are_deterministic():
    spec = spec_of((36, 24), (24, 36), (7,))
    topo = topology(trainer(0), trainer(1), rollout("e", 0, "b"), rollout("f", 0, "c"))
    maps = [*sharded(spec, 2), everything(spec), everything(spec)]
    first, second = (make_plan(spec, topo, maps, options=SMALL) for _ in range(2))
    assert first.digest == second.digest
    assert first.digest != make_plan(spec, topo, maps, options=PlanOptions(alignment=64, epoch=1)).digest


def test_a_needed_tensor_without_holder_is_refused():
    spec = spec_of((36, 24), (5,))
    with pytest.raises(CoverageError, match=r"'t1'.*'e/0'"):
        planned(spec, topology(trainer(0), rollout("e", 0, "b")), [takes(spec, (0,)), everything(spec)])


def test_rounds_are_as_few_as_the_slots_allow():
    spec = spec_of((1024, 256))  # 512 KiB
    topo = topology(trainer(0), rollout("e", 0, "b"))
    for slot_bytes, expected in ((512 << 10, 1), (256 << 10, 2), (200 << 10, 3), (1 << 10, 512)):
        plan, _ = planned(spec, topo, [everything(spec)] * 2, PlanOptions(slot_bytes=slot_bytes, alignment=64))
        assert plan.rounds == expected
    assert make_plan(spec, topo, [everything(spec)] * 2, options=PlanOptions(min_rounds=5)).rounds == 5


def test_many_small_routes_do_not_pile_up_in_one_round():
    # 40 classes of 256 bytes from one trainer: each has one unit per route, and four rounds share them out
    spec = spec_of(*[(128,)] * 40)
    topo = topology(trainer(0), *(rollout("e", r, f"n{r}") for r in range(40)))
    maps = [everything(spec), *(takes(spec, (r,)) for r in range(40))]
    plan, _ = planned(spec, topo, maps, PlanOptions(slot_bytes=3072, alignment=256))
    assert plan.rounds == 4
    sent = [sum(hi - lo for lo, hi in (plan.part(r, k) for r in range(40))) for k in range(4)]
    assert sum(sent) == spec.nbytes
    assert max(sent) <= 3072


def test_slots_too_small_for_one_unit_are_refused_with_both_numbers():
    spec = spec_of((1024, 256))
    with pytest.raises(InfeasibleError, match="raise slot_bytes to at least 256") as caught:
        make_plan(
            spec,
            topology(trainer(0), rollout("e", 0, "b")),
            [everything(spec)] * 2,
            options=PlanOptions(slot_bytes=128),
        )
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (256, 128)


def test_a_slot_of_one_unit_is_enough_for_any_number_of_routes():
    spec = spec_of(*[(128,)] * 40)
    maps = [everything(spec), *(takes(spec, (r,)) for r in range(40))]
    topo = topology(trainer(0), *(rollout("e", r, f"n{r}") for r in range(40)))
    plan, _ = planned(spec, topo, maps, PlanOptions(slot_bytes=256))
    cuts = plan.cuts(range(plan.rounds + 1))
    assert (cuts[1:] - cuts[:-1]).sum(axis=1).max() == 256


def test_wrong_calls_are_refused():
    spec = spec_of((4, 4))
    whole = everything(spec)
    with pytest.raises(UsageError, match="1 source maps for 2 workers"):
        make_plan(spec, topology(trainer(0), rollout("e", 0, "b")), [whole])
    with pytest.raises(PlanError, match="no rollout worker"):
        make_plan(spec, topology(trainer(0)), [whole])
    with pytest.raises(PlanError, match="no trainer worker"):
        make_plan(spec, topology(rollout("e", 0, "b")), [whole])
    with pytest.raises(UsageError, match="multiple of 64"):
        PlanOptions(alignment=8)
    with pytest.raises(UsageError, match="slot_bytes"):
        PlanOptions(slot_bytes=0)


# --- the demo's job, at full size ---------------------------------------------------------------------------------------


def smollm2():
    """The 272 tensors of SmolLM2-135M, from its public configuration."""
    bf16 = dtype_named("BF16")
    shapes = {"model.embed_tokens.weight": (49152, 576)}
    for i in range(30):
        for name, shape in (
            ("input_layernorm", (576,)), ("mlp.down_proj", (576, 1536)), ("mlp.gate_proj", (1536, 576)),
            ("mlp.up_proj", (1536, 576)), ("post_attention_layernorm", (576,)), ("self_attn.k_proj", (192, 576)),
            ("self_attn.o_proj", (576, 576)), ("self_attn.q_proj", (576, 576)), ("self_attn.v_proj", (192, 576)),
        ):  # fmt: skip
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    shapes["model.norm.weight"] = (576,)
    return CheckpointSpec(tensors=tuple(TensorSpec(name=n, shape=s, dtype=bf16) for n, s in shapes.items()))


def tensor_parallel_block(t, r):
    whole = [slice(0, n) for n in t.shape]
    dim = 1 if "o_proj" in t.name or "down_proj" in t.name else 0 if "_proj" in t.name else None
    if dim is not None:
        whole[dim] = slice(t.shape[dim] // 3 * r, t.shape[dim] // 3 * (r + 1))
    return tuple(whole)


def test_the_demo_job():
    spec = smollm2()
    assert (len(spec.tensors), spec.nbytes) == (272, 269_030_016)
    uneven = (0, 5 / 9, 1)  # the first trainer holds five ninths of the rows
    trainers = [
        takes(
            spec,
            *((i, slice(*(int(t.shape[0] * x) for x in uneven[r : r + 2]))) for i, t in enumerate(spec.tensors)),
        )
        for r in range(2)
    ]
    engine = [takes(spec, *((i, *tensor_parallel_block(t, r)) for i, t in enumerate(spec.tensors))) for r in range(3)]
    topo = topology(
        trainer(0, "A"), trainer(1, "A"), *(rollout("tp", r, "B") for r in range(3)), rollout("one", 0, "C")
    )
    maps = [*trainers, *engine, everything(spec)]
    plan = make_plan(spec, topo, maps, options=PlanOptions(slot_bytes=8 << 20))
    facts = verify_plan(plan, spec, maps)
    assert facts.trainer_egress_bytes == facts.model_bytes == spec.nbytes
    assert facts.rollout_node_ingress_bytes == {"B": spec.nbytes, "C": spec.nbytes}
    assert plan.bounds.busiest_link_seconds <= plan.bounds.t_min_seconds * 1.001
    assert plan.rounds <= 40
    assert facts.num_pairs <= 16
    assert len(plan.atoms) < 2000
