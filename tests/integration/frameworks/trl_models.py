"""A tiny model and tokenizer on disk, engines that take its updates, and rollouts for TRL's trainers, all without a hub."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from weightbridge import CheckpointSpec, Options, ReceiverAdapter, spec_from_folder
from weightbridge.integrations import transformers as wb_transformers

WORDS = [f"w{i}" for i in range(60)]
FAST = Options(slot_bytes=1 << 16, connect_timeout_seconds=60, update_timeout_seconds=30, idle_install=True)


def make_checkpoint(folder: Path) -> CheckpointSpec:
    """A Qwen3 with uneven sizes (vocabulary 67, hidden 20), tied embeddings, bf16 on disk."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=67, hidden_size=20, intermediate_size=36, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    vocabulary = {w: i for i, w in enumerate(["<s>", "</s>", "<pad>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return spec_from_folder(str(folder))


class WholeEngine:
    """An engine of one worker: the model itself, as transformers loads it, with other weights than the trainer's."""

    def __init__(self, folder: Path, spec: CheckpointSpec, endpoint: str, name: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.receiver = ReceiverAdapter(
            group=(0, 1), endpoint=endpoint, checkpoint=spec, engine=name, node=name, options=FAST,
            load_weights=wb_transformers.load_weights_fn(self.model), tensors=wb_transformers.tensors_fn(self.model),
        )  # fmt: skip

    def held(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}


class RowsEngine:
    """An engine of `size` workers that hold rows of everything: as torch.chunk cuts them, the last has fewer."""

    def __init__(self, spec: CheckpointSpec, endpoint: str, name: str, size: int) -> None:
        self.size = size
        self.workers = [
            {t.name: self._rows(torch.zeros(t.shape, dtype=torch.bfloat16), r).clone() for t in spec.tensors}
            for r in range(size)
        ]
        self.receivers = [
            ReceiverAdapter(
                group=(r, size), endpoint=endpoint, checkpoint=spec, engine=name, node=name, options=FAST,
                load_weights=lambda tensors, r=r: self._load(tensors, r), tensors=lambda r=r: self.workers[r],
            )
            for r in range(size)
        ]  # fmt: skip

    def _rows(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        per_rank = -(-full.shape[0] // self.size)
        return full[rank * per_rank : (rank + 1) * per_rank]

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]], rank: int) -> None:
        for name, full in tensors:
            self.workers[rank][name].copy_(self._rows(full, rank))

    def held(self) -> dict[str, torch.Tensor]:
        return {n: torch.cat([worker[n] for worker in self.workers]) for n in self.workers[0]}


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """The bytes of each tensor as bf16."""
    return {
        n: t.detach().to(torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes() for n, t in tensors.items()
    }


class Rollouts:
    """TRL's RolloutWorkerProtocol with samples made in advance; remembers which versions it was told of."""

    def __init__(self, sample: type, num_samples: int) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.versions: list[int] = []
        self.started = False
        rng = np.random.default_rng(0)
        for i in range(num_samples):
            self.rollout_buffer.put(
                sample(
                    prompt=[{"role": "user", "content": "w1 w2"}],
                    completion=[{"role": "assistant", "content": "w3"}],
                    input_ids=rng.integers(4, 64, size=9),
                    completion_mask=np.array([0] * 3 + [1] * 6),
                    old_log_probs=np.full(9, -4.0, dtype=np.float32),
                    advantage=1.0 if i % 2 else -1.0,
                    model_version=1,
                    group_id=i // 2,
                    metrics={"reward": float(i % 2)},
                )
            )

    def start(self) -> None:
        self.started = True

    def stop(self) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)

    def check_health(self, stale_after_s: float) -> None: ...
