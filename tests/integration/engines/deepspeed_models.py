"""What both sides of the DeepSpeed tests know: the model that is trained and served, and which batches it learns from."""

from __future__ import annotations

import torch
from tests.integration.engines import models

from weightbridge.checkpoint import CheckpointSpec

__all__ = ["ENGINE", "LAST_VERSION", "TIED", "batch", "tied_spec"]

TIED = {
    **models.DENSE,
    "intermediate_size": 98,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
"""A Qwen3 whose head is its embedding. Three trainers divide the numel of no parameter, and of a head's norm (four elements)
the third has padding only; two engine workers divide all but the vocabulary."""

ENGINE, LAST_VERSION = "a", 3


def tied_spec() -> CheckpointSpec:
    """The checkpoint of TIED: the head is not in it."""
    return CheckpointSpec(tensors=tuple(t for t in models.dense_spec(TIED).tensors if t.name != "lm_head.weight"))


def batch(step: int, rank: int, *, vocab_size: int = TIED["vocab_size"]) -> torch.Tensor:
    """Tokens, shape [2, 9]: others on each rank and at each step, the same in every run."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, vocab_size, (2, 9), generator=generator)
