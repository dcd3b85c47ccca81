"""The loaders of `weightbridge.integrations` on modules that are really sharded over processes."""

from __future__ import annotations

from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from tests.multiprocess import loader_worker
from torch import nn

from weightbridge.errors import SpecError, UsageError
from weightbridge.integrations import dtensor, fsdp

# One process imports torch and the ranks are forked from it. The tests of this folder share it.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.multiprocess.loader_worker"])


def test_each_rank_keeps_its_own_shard(tmp_path: Path) -> None:
    """FSDP2 first, then tensor parallel, in the same three processes."""
    world_size = 3
    ranks = [
        CONTEXT.Process(target=loader_worker.main, args=(rank, world_size, str(tmp_path)), daemon=True)
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        for rank, process in enumerate(ranks):
            process.join(50)
            assert process.exitcode == 0, f"rank {rank}; standard error says why"
            assert (tmp_path / f"rank-{rank}").read_text() == "fsdp holds\ntensor-parallel holds\n"
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join(10)


def test_what_does_not_fit_is_named() -> None:
    module = nn.Linear(5, 7, bias=False)
    load = dtensor.load_weights_fn(module)
    with pytest.raises(SpecError, match=r"'extra' is no parameter or buffer of Linear, which has 1"):
        load([("extra", torch.zeros(1))])
    with pytest.raises(SpecError, match=r"'weight' has shape \(5, 7\) and the module expects \(7, 5\)"):
        load([("weight", torch.zeros(5, 7))])


def test_a_narrower_checkpoint_is_widened_and_a_wider_one_rounded() -> None:
    module = nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    dtensor.load_weights_fn(module)([("weight", torch.tensor([[1.0 + 2**-8, 1.0 + 3 * 2**-8]]))])
    assert module.weight.tolist() == [[1.0, 1.0 + 2**-6]]  # ties go to even


def test_a_module_that_fsdp_never_wrapped_is_refused() -> None:
    for make in (fsdp.load_weights_fn, fsdp.tensors_fn):
        with pytest.raises(UsageError, match=r"Linear holds no module wrapped by fully_shard"):
            make(nn.Linear(2, 2))
