"""job.toml: what it gives, and what it says when something in it is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from weightbridge.deployments import load_job
from weightbridge.deployments.architecture import checkpoint_spec
from weightbridge.deployments.job_file import ClusterTable, EngineTable, ModelTable, TrainerTable
from weightbridge.deployments.model_config import architecture_from_config
from weightbridge.deployments.rollout_rules import EngineDegrees, engine_maps
from weightbridge.deployments.sharded_rules import ShardedDegrees, sharded_maps
from weightbridge.errors import LayoutError, SpecError, UnsupportedError, UsageError
from weightbridge.plan import make_plan, verify_plan
from weightbridge.plan.planner import PlanOptions
from weightbridge.plan.topology import NodeGroup, Role
from weightbridge.probe.map_files import save_map

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4, "intermediate_size": 12, "moe_intermediate_size": 4, "num_experts": 4, "vocab_size": 100,
    "mlp_only_layers": [1], "dtype": "bfloat16",
}  # fmt: skip
SPEC = checkpoint_spec(architecture_from_config(CONFIG))
JOB = """
[model]
config = "config.json"
[cluster]
gpus_per_node = 4
[trainer]
nodes = 2
tp = 2
pp = 2
ep = 4
[[engine]]
name = "a"
tp = 4
ep = 2
replicas = 2
"""


@pytest.fixture
def job_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def write(text=JOB):
        file = tmp_path / "job.toml"
        file.write_text(text)
        return file

    return write


def planned(job):
    """Facts of the job's plan, verified."""
    plan = make_plan(job.spec, job.topology, job.maps, options=PlanOptions(slot_bytes=1 << 12))
    return verify_plan(plan, job.spec, job.maps)


def test_a_job_of_two_sides(job_file):
    job = load_job(job_file())
    assert (job.name, job.slot_bytes, job.spec.digest) == ("job", 256 << 20, SPEC.digest)
    workers = job.topology.workers
    assert [w.name for w in workers[:2]] == ["trainer/0", "trainer/1"]
    assert [(w.name, w.node, w.engine) for w in workers[8::4]] == [
        ("a-0/0", "a-node-0", "a-0"),
        ("a-1/0", "a-node-1", "a-1"),
    ]
    assert [workers[i].node for i in job.topology.trainers] == ["trainer-node-0"] * 4 + ["trainer-node-1"] * 4
    assert {w.bandwidth for w in workers} == {100e9}
    assert job.maps[8] is job.maps[12]
    expected = engine_maps(architecture_from_config(CONFIG), SPEC, EngineDegrees(tp=4, ep=2))
    assert [m.fingerprint for m in job.maps[8:12]] == [m.fingerprint for m in expected]


def test_its_plan_moves_each_byte_once(job_file):
    """Both sides have all of the model, so the trainers send it once and each engine's node takes it all."""
    facts = planned(load_job(job_file()))
    assert facts.model_bytes == facts.trainer_egress_bytes == SPEC.nbytes
    assert facts.needed_bytes == {"a-node-0": SPEC.nbytes, "a-node-1": SPEC.nbytes}


def test_engines_that_differ_and_nodes_that_differ(job_file):
    job = load_job(
        job_file(
            """
            name = "mixed"
            description = "two kinds of engines"
            [model]
            config = "config.json"
            [cluster]
            gpus_per_node = 4
            node_bandwidth = 40
            slot_mib = 3
            [[cluster.node]]
            names = ["slow"]
            bandwidth = 10
            [[cluster.node]]
            names = ["b-node-*"]
            bandwidth = 8
            gpu_bandwidth = [5, 5, 2.5, 2.5]
            [[cluster.group]]
            name = "far"
            nodes = ["b-*"]
            bandwidth = 20
            [trainer]
            nodes = ["fast", "slow"]
            layout = "fsdp"
            shard = 4
            [[engine]]
            name = "a"
            nodes = ["slow"]
            tp = 2
            replicas = 2
            [[engine]]
            name = "b"
            tp = 4
            ep = 4
            attention = "replicated"
            layout = "vllm"
            """
        )
    )
    assert (job.name, job.description, job.slot_bytes) == ("mixed", "two kinds of engines", 3 << 20)
    t = job.topology
    assert {t.workers[i].bandwidth for i in t.on_node("fast")} == {10e9}
    assert {t.workers[i].bandwidth for i in t.on_node("slow")} == {2.5e9}
    assert [w.name for w in (t.workers[i] for i in t.on_node("slow", Role.ROLLOUT))] == [
        "a-0/0",
        "a-0/1",
        "a-1/0",
        "a-1/1",
    ]
    assert [t.workers[i].bandwidth for i in t.on_node("b-node-0")] == [5e9, 5e9, 2.5e9, 2.5e9]
    assert t.node_bandwidth == (("b-node-0", 8e9),)
    assert t.groups == (NodeGroup(name="far", nodes=("b-node-0",), bandwidth=20e9),)
    assert "model.layers.0.self_attn.qkv_proj.weight" in {x.name for x in job.maps[-1].live}
    # The node the trainer shares with engine a holds the whole model: only b's node is fed over the network.
    assert planned(job).rollout_node_ingress_bytes == {"slow": 0, "b-node-0": SPEC.nbytes}


def test_saved_maps_in_place_of_rules(job_file, tmp_path):
    architecture = architecture_from_config(CONFIG)
    trainer = sharded_maps(architecture, SPEC, ShardedDegrees(num_workers=2, shard=2, sharding="flat"))
    engine = engine_maps(architecture, SPEC, EngineDegrees(tp=1))
    for name, source_map in (("t0", trainer[0]), ("t1", trainer[1]), ("e", engine[0])):
        save_map(tmp_path / f"{name}.wbmap", source_map, SPEC)
    text = """
        [trainer]
        nodes = 1
        gpus_per_node = 2
        maps = ["t0.wbmap", "t1.wbmap"]
        [[engine]]
        name = "e"
        maps = ["e.wbmap"]
        replicas = 3
        [[engine]]
        name = "f"
        tp = 2
        maps = ["e.wbmap"]
        """
    job = load_job(job_file(text))
    assert [m.fingerprint for m in job.maps] == [m.fingerprint for m in (*trainer, *engine * 5)]
    assert job.spec.digest == SPEC.digest
    assert planned(job).trainer_egress_bytes == SPEC.nbytes
    with pytest.raises(UsageError, match=r"\[trainer\]: maps names 2 files for 3 workers"):
        load_job(job_file(text.replace("gpus_per_node = 2", "gpus_per_node = 3")))
    other = checkpoint_spec(architecture_from_config({**CONFIG, "vocab_size": 99}))
    wider = engine_maps(architecture_from_config({**CONFIG, "vocab_size": 99}), other, EngineDegrees(tp=1))[0]
    save_map(tmp_path / "other.wbmap", wider, other)
    with pytest.raises(UsageError, match=r"maps 't0.wbmap' and 'other.wbmap' are of different checkpoints"):
        load_job(job_file(text.replace("t1.wbmap", "other.wbmap")))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 101}))
    mixed = text + '[model]\nconfig = "config.json"\n[[engine]]\nname = "g"\ntp = 1\n'
    with pytest.raises(
        UsageError, match=r"\[\[engine\]\] 'g' speak of different checkpoints \(they differ in 2 tensors, 'lm_h"
    ):
        load_job(job_file(mixed))


def _write_checkpoint(folder: Path, tensors):
    header, at = {}, 0
    for name, shape, dtype, itemsize in tensors:
        nbytes = int(np.prod(shape)) * itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    raw = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(at))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def test_the_spec_of_a_real_checkpoint(job_file, tmp_path):
    """In the checkpoint's own order, without what is ignored; anything else that differs from the config is named."""
    tensors = [(t.name, t.shape, "BF16", 2) for t in reversed(SPEC.tensors)]
    folder = tmp_path / "model"
    text = JOB.replace('config = "config.json"', 'checkpoint = "model"\nignore = ["model.layers.3.*"]')
    _write_checkpoint(folder, [*tensors, ("model.layers.3.norm.weight", (8,), "BF16", 2)])
    job = load_job(job_file(text))
    assert [t.name for t in job.spec.tensors] == [t.name for t in reversed(SPEC.tensors)]
    assert planned(job).trainer_egress_bytes == SPEC.nbytes
    with pytest.raises(SpecError, match=r"\[model\]: .*'model.layers.3.norm.weight' \(1 such\) follows from no key"):
        load_job(job_file(text.replace('ignore = ["model.layers.3.*"]', "")))
    _write_checkpoint(folder, tensors[1:])
    with pytest.raises(SpecError, match=f"tensor '{tensors[0][0]}' of the config is absent from the checkpoint"):
        load_job(job_file(text))
    _write_checkpoint(folder, [(tensors[0][0], (50, 8), "F32", 4), *tensors[1:]])
    with pytest.raises(SpecError, match=r"has shape \[50, 8\] and dtype F32, its config says \[100, 8\] and BF16"):
        load_job(job_file(text))


@pytest.mark.parametrize(
    ("old", "new", "error", "match"),
    [
        ("tp = 2\n", "tpp = 2\n", UsageError, "key 'trainer.tpp' = 2 is not known; expected one of .*; did you mean 'tp'?"),
        ("replicas", "replica", UsageError, "key 'engine.replica' = 2 is not known.* did you mean 'replicas'?"),
        ("[cluster]", "[clusters]", UsageError, "key 'clusters' = .* is not known"),
        ("tp = 2\n", 'tp = "2"\n', UsageError, "key 'trainer.tp': Expected `int`, got `str`, it is '2'"),
        ("tp = 2\n", "tp = 0\n", UsageError, "key 'trainer.tp': Expected `int` >= 1, it is 0"),
        ('name = "a"', "name = 1", UsageError, r"key 'engine\[0\].name': Expected `str`, got `int`, it is 1"),
        ('name = "a"\n', "", UsageError, r"missing required field `name`"),
        ("gpus_per_node = 4", "node_bandwidth = -4", UsageError, "key 'cluster.node_bandwidth': Expected `float` > 0"),
        ('name = "a"', 'name = "a"\nlayout = "trt"', UsageError, "layout': expected one of 'sglang', 'vllm', it is 'trt'"),
        ("[[engine]]", "[[motor]]", UsageError, "key 'motor' = "),
        ("[trainer]\n", "[trainer\n", UsageError, "not valid TOML"),
        ("pp = 2", "pp = 3", UsageError, r"\[trainer\]: trainer: tp 2 x cp 1 x pp 3 = 6 does not divide its 8 workers"),
        ("pp = 2", "pipeline_layers = [3, 1]", UsageError, r"stages of \[3, 1\] layers; expected 1 of them with 3"),
        ("tp = 4", "tp = 4\nnodes = 3", UsageError, r"'a': 8 workers at 4 a node fill 2 nodes, nodes gives 3"),
        ("tp = 4", 'tp = 4\nnodes = ["x", "x"]', UsageError, r"names a node twice: \['x', 'x'\]"),
        ("tp = 4", "", UsageError, r"\[\[engine\]\] 'a': tp is missing"),
        ("ep = 2", "ep = 3", UsageError, "'a': engine: ep must divide tp and both be at least 1, got tp 4 and ep 3"),
        ("tp = 4\nep = 2", "tp = 12\nep = 1", LayoutError, "'a': engine: .* is not divisible by 12"),
        ("pp = 2", 'layout = "fsdp"', UsageError, r"\[trainer\]: tp = 2 has no meaning when layout is 'fsdp'"),
        ("pp = 2", "shard = 2", UsageError, "shard = 2 has no meaning when layout is 'megatron'"),
        ('config = "config.json"', "", UsageError, "neither maps nor a model are given"),
        ('config = "config.json"', 'config = "other.json"', UsageError, r"\[model\]: .*other.json: .* cannot read it"),
        ("nodes = 2", 'maps = ["x.wbmap"]\nnodes = 2', UsageError, "tp = 2 has no meaning when maps are given"),
        ("gpus_per_node = 4", 'gpus_per_node = 4\n[[cluster.node]]\nnames = ["q*"]\nbandwidth = 1', UsageError,
         r"no node is called 'q\*'; the job's nodes are trainer-node-0, trainer-node-1, a-node-0, a-node-1"),
        ("gpus_per_node = 4", 'gpus_per_node = 4\n[[cluster.node]]\nnames = ["a*"]\ngpu_bandwidth = [1]', UsageError,
         "gpu_bandwidth has 1 entries, expected one for each of 4 GPUs"),
        ("tp = 4", "tp = 4\ngpus_per_node = 8", UsageError, "node 'a-node-0' has 8 rollout workers and .*gpus_per_node is 4"),
        ("replicas = 2", 'replicas = 2\n[[engine]]\nname = "a-0"\ntp = 4', UsageError, "two engines are called 'a-0'"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_key_and_value(job_file, old, new, error, match):
    assert old in JOB
    with pytest.raises(error, match=match) as caught:
        load_job(job_file(JOB.replace(old, new, 1)))
    assert "job.toml: " in caught.value.message


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "job-file.md").read_text()


def test_the_example_of_the_page_loads(job_file, tmp_path):
    config = {**CONFIG, "num_attention_heads": 8, "num_experts": 16, "intermediate_size": 16}
    file = job_file(re.search(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL).group(1))
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = load_job(file)
    assert [len(job.topology.on_node(node)) for node in job.topology.nodes] == [8] * 6
    assert [group.nodes for group in job.topology.groups] == [("far-node-0", "far-node-1")]


@pytest.mark.parametrize(
    ("heading", "table"),
    [("[model]", ModelTable), ("[trainer]", TrainerTable), ("[[engine]]", EngineTable), ("[cluster]", ClusterTable)],
)
def test_the_page_lists_every_key(heading, table):
    rows = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]*) \|", rows, flags=re.MULTILINE)))
    assert sorted(listed) == sorted(table.__struct_fields__)


def test_an_unsupported_model_keeps_its_facts(job_file, tmp_path):
    file = job_file()
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    with pytest.raises(UnsupportedError, match=r"\[model\]: .*config.json: model_type 'mamba'") as caught:
        load_job(file)
    assert caught.value.model_type == "mamba"
    for text, match in (("[1]", "expected a JSON object, found list"), ("{", "no valid JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UsageError, match=match):
            load_job(file)
    with pytest.raises(UsageError, match="expected a job file in TOML, cannot read it"):
        load_job(tmp_path / "none.toml")
