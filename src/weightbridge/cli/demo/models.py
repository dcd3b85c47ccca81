"""The demo's models inside worker processes: how trainers and engines come to theirs, and what they are asked.

Only worker processes import this module; it needs torch and transformers.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig

from weightbridge.checkpoint import CheckpointSpec, TensorSpec, dtype_named, spec_from_folder
from weightbridge.cli.demo.config import DemoConfig
from weightbridge.errors import SpecError, TransferTimeout, UnsupportedError
from weightbridge.integrations.transformers import checkpoint_names

__all__ = ["Chat", "engine_model", "join_group", "trainer_model", "transfer_spec", "undistributed_model"]

GROUP_TIMEOUT_SECONDS = 20.0
"""For collectives among one side's own workers: short, because a killed peer must not hold up the others."""

RENDEZVOUS_SECONDS = 120.0
"""For all workers of one side to have started: importing torch takes its time on a busy machine."""


def join_group(work_dir: str, name: str, rank: int, world_size: int) -> DeviceMesh:
    """Form one side's gloo group over loopback and its one-dimensional mesh. Blocks until all have come.

    Raises TransferTimeout naming the group when not all come in time.
    """
    store: Any = dist.FileStore(str(Path(work_dir) / f"rendezvous-{name}"), world_size)  # type: ignore[attr-defined]
    _await_all(store, name, world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS)
    )
    return init_device_mesh("cpu", (world_size,))


def loopback_interface() -> str:
    """The name of the loopback interface; gloo otherwise picks one by the host's name, which may reach out."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])


def _await_all(store: Any, name: str, world_size: int) -> None:
    """Meet before the group is formed: its own timeout is short, and imports differ by more than that."""
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    store.add("present", 1)
    while (present := store.add("present", 0)) < world_size:
        if time.monotonic() > deadline:
            raise TransferTimeout(
                f"only {present} of {world_size} workers of {name} came within {RENDEZVOUS_SECONDS:.0f} s; "
                f"see the logs of the others",
                waiting_for=(name,),
                seconds=RENDEZVOUS_SECONDS,
            )
        time.sleep(0.02)


def trainer_model(config: DemoConfig, mesh: DeviceMesh) -> nn.Module:
    """The model in fp32, every decoder layer and the root wrapped by FSDP2."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(config.checkpoint, dtype=torch.float32)
    for layers in _layer_lists(model):
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The stacks of decoder layers: what FSDP gathers and frees one at a time."""
    return [module for module in model.modules() if isinstance(module, nn.ModuleList)]


def engine_model(config: DemoConfig, num_workers: int) -> nn.Module:
    """The model in bf16 for generating: whole, or tensor-parallel by the model's own plan over a group of `num_workers`.

    Raises UnsupportedError when this version of transformers leaves the model whole where it was to be sharded.
    """
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    if num_workers > 1:
        options["distributed_config"] = DistributedConfig(tp_size=num_workers, tp_plan="auto")
    model: nn.Module = AutoModelForCausalLM.from_pretrained(config.checkpoint, **options)
    if num_workers > 1 and not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UnsupportedError(
            f"transformers {transformers.__version__} shards no parameter of {type(model).__name__} over {num_workers} "
            f"workers; expected tensor parallelism by its own plan: use a model that has one"
        )
    return model.eval().requires_grad_(False)


def undistributed_model(config: DemoConfig, weights: dict[str, torch.Tensor]) -> nn.Module:
    """A whole bf16 model in this process holding exactly `weights`: the reference the engines are measured against."""
    model = engine_model(config, 1)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        n for n, _ in model.named_parameters()
    }
    if unexpected or set(missing) - tied:
        raise SpecError(
            f"the reference model lacks weights for {sorted(set(missing) - tied)} and knows no {unexpected}"
        )
    return model


def transfer_spec(config: DemoConfig, model: nn.Module) -> CheckpointSpec:
    """What is sent: the folder's tensors that the model holds, floats as bf16, whatever type the files have.

    Tied duplicates and leftovers of older formats (rotary frequencies) are in some folders and in no model.
    """
    names = set(checkpoint_names(model))
    bf16 = dtype_named("BF16")
    tensors = tuple(
        TensorSpec(name=t.name, shape=t.shape, dtype=bf16 if t.dtype.is_float else t.dtype)
        for t in spec_from_folder(config.checkpoint).tensors
        if t.name in names
    )
    if not tensors:
        raise SpecError(
            f"no tensor of {config.checkpoint} has the name of a parameter of {type(model).__name__} "
            f"(it begins with {sorted(names)[:2]}); the demo takes folders whose names are the model's own"
        )
    return CheckpointSpec(tensors=tensors)


class Chat:
    """The question of the demo in a tokenizer's own terms."""

    def __init__(self, config: DemoConfig) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(config.checkpoint)
        self._config = config
        self.prompt_ids: list[int] = self._encode(None)
        self.trained_ids: list[int] = self._encode(config.answer)
        end = self._tokenizer.eos_token_id
        self.end_ids: frozenset[int] = frozenset(end if isinstance(end, list) else [end] if end is not None else [])

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    def _encode(self, answer: str | None) -> list[int]:
        """Prompt tokens, followed by the answer's where there is one."""
        if self._tokenizer.chat_template is None:
            text = f"Question: {self._config.prompt}\nAnswer:" + ("" if answer is None else f" {answer}")
            end = [] if answer is None or self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
            return [*self._tokenizer(text)["input_ids"], *end]
        chat = [{"role": "user", "content": self._config.prompt}]
        if answer is not None:
            chat.append({"role": "assistant", "content": answer})
        encoded: Any = self._tokenizer.apply_chat_template(chat, add_generation_prompt=answer is None, return_dict=True)
        return [int(token) for token in encoded["input_ids"]]
