"""The snippet of docs/integrate.md that needs frameworks: loaders for FSDP2 and for transformers models, as it is written."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.page_snippets import snippets, values_of
from torch.distributed.fsdp import fully_shard


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_the_loaders_of_integrate_fill_a_sharded_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    (snippet,) = [s for s in snippets("docs/integrate.md") if s.heading.startswith("2. ")]
    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=42, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    names_and_shapes = {name: p.shape for name, p in model.named_parameters()}
    fully_shard(model)
    loaders = values_of(snippet.code, snippet.place, "load_weights", model=model)
    tensors = values_of(snippet.code, snippet.place, "tensors", model=model)
    assert len(loaders) == len(tensors) == 2
    for number, (load, live) in enumerate(zip(loaders, tensors, strict=True)):
        generator = torch.Generator().manual_seed(number)
        given = {name: torch.randn(shape, generator=generator) for name, shape in names_and_shapes.items()}
        load(iter(given.items()))
        held = live()
        assert set(given) <= set(held)
        assert [name for name, tensor in given.items() if not torch.equal(held[name], tensor)] == []
