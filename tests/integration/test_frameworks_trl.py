"""TRL's own AsyncGRPOTrainer and VLLMGeneration send their weights through the library.

The engines are a transformers model and three workers with rows of it. After every update of TRL's, both hold the trainer's
weights of that moment, rounded to bf16, bit for bit. `make test-frameworks` sets the environment up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("trl") is None:
    pytest.skip("TRL is not installed in this environment: make test-frameworks", allow_module_level=True)

import torch
from accelerate import Accelerator
from datasets import Dataset
from tests.integration.frameworks.importable import python_path
from tests.integration.frameworks.trl_models import Rollouts, RowsEngine, WholeEngine, bits, make_checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo import async_grpo_trainer as trl_trainer
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl.generation import vllm_client, vllm_generation

from weightbridge import CheckpointSpec, SenderAdapter
from weightbridge.errors import SpecError, UnsupportedError, UsageError
from weightbridge.integrations import dtensor
from weightbridge.integrations.trl import GatheredTransfer, ShardedTransfer, route_sync, without_communicator
from weightbridge.testing.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ENGINES = ("whole", "rows")


class Job:
    """A checkpoint, an endpoint, both engines, and what TRL's trainer held at each update."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec: CheckpointSpec = make_checkpoint(folder)
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.whole = WholeEngine(folder, self.spec, self.endpoint, "whole")
        self.rows = RowsEngine(self.spec, self.endpoint, "rows", 3)
        self.model: Any = None
        self.versions: list[int] = []
        self.held: list[dict[str, bytes]] = []

    def check(self, report: Any) -> None:
        """Called by the transfer when an update is done: engines against the trainer's model, now."""
        trained = bits({n.removeprefix("module."): p for n, p in self.model.named_parameters()})
        assert trained == bits(self.whole.held())
        assert trained == bits(self.rows.held())
        assert dict(report.engines) == dict.fromkeys(ENGINES, "ready")
        self.versions.append(report.version)
        self.held.append(trained)

    def close(self) -> None:
        for receiver in (self.whole.receiver, *self.rows.receivers):
            receiver.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path)
    yield found
    found.close()


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL asks which GPU it has, and its attention needs a GPU kernel; rows of one sample do with the plain one."""

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[Any, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    own = trl_trainer.register_tree_attention

    def register() -> None:
        own()
        AttentionInterface.register(trl_trainer.TREE_ATTENTION, attention)

    monkeypatch.setattr(trl_trainer, "register_tree_attention", register)
    monkeypatch.setattr(trl_trainer, "get_peak_flops_per_device", lambda *_: None)


def async_trainer(job: Job, transfer: Any, rollouts: Rollouts) -> AsyncGRPOTrainer:
    arguments = AsyncGRPOConfig(
        output_dir=str(job.folder / "out"), use_cpu=True, bf16=False, dtype="float32", report_to=[], save_strategy="no",
        max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=1, learning_rate=0.05,
        weight_sync_steps=1, token_budget=-1, max_staleness=10, logging_steps=1, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = AsyncGRPOTrainer(
        model=str(job.folder), args=arguments, reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "w1"}]] * 8}),
        rollout_worker=rollouts, weight_transfer=transfer,
    )  # fmt: skip
    job.model = trainer.model
    return trainer


def test_async_grpo_trains_and_every_sync_reaches_the_engines(job: Job, on_a_cpu: None) -> None:
    # [trl async]
    transfer = GatheredTransfer(endpoint=job.endpoint, checkpoint=job.spec, engines=ENGINES, after_update=job.check)
    # [/trl async]
    rollouts = Rollouts(RolloutSample, 20)
    async_trainer(job, transfer, rollouts).train()
    assert rollouts.started
    assert rollouts.versions == [1, 2, 3, 4]  # once before training, then after each step
    assert job.versions == [1, 2, 3, 4]
    assert len({tuple(sorted(h.items())) for h in job.held}) == 4  # it did train
    assert transfer.version == 4


def test_async_grpo_sends_the_live_shards_of_every_rank(job: Job, on_a_cpu: None) -> None:
    # [trl sharded]
    transfer = ShardedTransfer(
        lambda: SenderAdapter(
            group=(0, 1), endpoint=job.endpoint, checkpoint=job.spec, engines=ENGINES,
            load_weights=dtensor.load_weights_fn(trainer.model), tensors=dtensor.tensors_fn(trainer.model),
        ),
        after_update=job.check,
    )  # fmt: skip
    trainer = async_trainer(job, transfer, Rollouts(RolloutSample, 20))
    transfer.attach(trainer)
    # [/trl sharded]
    trainer.train()
    assert job.versions == [1, 2, 3, 4]
    assert len({tuple(sorted(h.items())) for h in job.held}) == 4


@pytest.mark.parametrize("kind", ["gathered", "sharded"])
def test_two_ranks_of_a_model_sharded_by_fsdp2(tmp_path: Path, kind: str) -> None:
    make_checkpoint(tmp_path)
    variables = {
        **os.environ, "PYTHONPATH": python_path(tmp_path), "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    script = Path(__file__).with_name("frameworks") / "trl_ranks.py"
    ended = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
            str(script), kind, str(tmp_path), f"tcp://127.0.0.1:{free_port()}",
        ],
        env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert (tmp_path / "seen").read_text() == "[1, 2, 3]"


def test_a_sharded_transfer_that_is_not_attached_says_so(job: Job, on_a_cpu: None) -> None:
    transfer = ShardedTransfer(lambda: pytest.fail("no sender is wanted"))
    with pytest.raises(UsageError, match="attach"):
        async_trainer(job, transfer, Rollouts(RolloutSample, 20)).train()
    with pytest.raises(UnsupportedError, match="GatheredTransfer"):
        transfer.attach(object())


def test_weights_that_are_frozen_and_so_not_sent_are_an_error(job: Job) -> None:
    transfer = GatheredTransfer(endpoint=job.endpoint, checkpoint=job.spec, engines=ENGINES)
    model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
    try:
        with pytest.raises(SpecError, match=r"not among the weights.*'model.norm.weight'"):
            transfer.send_weights((n, p) for n, p in model.named_parameters() if n != "model.norm.weight")
        with pytest.raises(SpecError, match="no such tensor"):
            transfer.send_weights(iter([("model.surplus", torch.zeros(2))]))
    finally:
        transfer.destroy()


class Server(ThreadingHTTPServer):
    """What TRL's client asks of a vLLM server around a weight sync; it counts what it is asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        body = json.dumps({"data": [{"id": "tiny"}], "success": True}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """TRL's classes ask whether vLLM is installed here; the engines are elsewhere, so it need not be."""
    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda *_, **__: True)
    found = Server()
    yield found
    found.shutdown()
    found.server_close()


@pytest.mark.parametrize("kind", ["gathered", "sharded"])
def test_vllm_generation_syncs_through_a_transfer(job: Job, server: Server, kind: str) -> None:
    job.model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32)
    where: dict[str, Any] = {"endpoint": job.endpoint, "checkpoint": job.spec, "engines": ENGINES}
    # [trl generation]
    with without_communicator():
        # [/trl generation]
        generation = vllm_generation.VLLMGeneration(
            model=job.model, accelerator=Accelerator(cpu=True), mode="server", server_base_url=server.url,
            processing_class=AutoTokenizer.from_pretrained(job.folder),
        )  # fmt: skip
    transfer: GatheredTransfer | ShardedTransfer
    if kind == "gathered":
        # [trl generation]
        transfer = GatheredTransfer(**where, after_update=job.check)
        # [/trl generation]
    else:
        transfer = ShardedTransfer(
            lambda: SenderAdapter(
                group=(0, 1), load_weights=dtensor.load_weights_fn(job.model), tensors=dtensor.tensors_fn(job.model),
                **where,
            ),
            after_update=job.check,
        )  # fmt: skip
    # [trl generation]
    route_sync(generation, transfer)
    # [/trl generation]
    try:
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in job.model.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version)))
            generation.sync_weights()
            assert job.versions == list(range(1, version + 1))
            assert [a for a in server.asked if "reset_prefix_cache" in a] == ["/reset_prefix_cache"] * version
    finally:
        transfer.destroy()
    generation.mode = "colocate"
    with pytest.raises(UnsupportedError, match="colocate"):
        route_sync(generation, transfer)
