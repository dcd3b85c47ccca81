"""The loaders of `weightbridge.integrations` on modules that are really sharded over processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from weightbridge.errors import SpecError, UsageError
from weightbridge.integrations import dtensor, fsdp

WORKER = Path(__file__).parent / "loader_worker.py"


@pytest.mark.parametrize(("case", "world_size"), [("fsdp", 3), ("tensor-parallel", 3)])
def test_each_rank_keeps_its_own_shard(case: str, world_size: int, tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), case, str(rank), str(world_size), str(tmp_path)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            output, _ = process.communicate(timeout=150)
            assert process.returncode == 0, output
    finally:
        for process in ranks:
            process.kill()
            process.wait()


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
