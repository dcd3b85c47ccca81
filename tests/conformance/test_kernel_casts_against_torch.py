"""Casts of the kernels against torch's, over every exponent, ties and their neighbours, subnormals, infinities and NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightbridge.kernels import Buffer, Kernels, NativeKernels, ReferenceKernels
from weightbridge.kernels.native import load_native
from weightbridge.program.program import DESCRIPTOR, MAX_AXES, Op

IMPLEMENTATIONS = [
    ReferenceKernels,
    pytest.param(NativeKernels, marks=pytest.mark.skipif(load_native() is None, reason="not built")),
]


def run(kernels: Kernels, op: int, source: torch.Tensor, target: torch.Tensor) -> None:
    table = np.zeros(1, DESCRIPTOR)
    table["count"] = 1
    table["count"][0, MAX_AXES - 1] = source.numel()
    table["src_stride"][0, MAX_AXES - 1] = table["itemsize"] = source.element_size()
    table["dst_stride"][0, MAX_AXES - 1] = target.element_size()
    table["op"] = op
    buffers = [Buffer(t.data_ptr(), t.numel() * t.element_size()) for t in (source, target)]
    kernels.launch(kernels.prepare(table, buffers[:1], buffers[1:]))


def specials() -> torch.Tensor:
    upper = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper | lower).reshape(-1)
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


def double_specials() -> torch.Tensor:
    """Every exponent, ties of all three narrower formats and their neighbours, subnormals, infinities and NaN."""
    upper = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 48
    lower = torch.tensor(
        [0, 1, 1 << 28, (1 << 28) + 1, (1 << 28) - 1, 3 << 28, 1 << 41, (1 << 41) + 1, 1 << 44, (1 << 44) + 1,
         (1 << 44) - 1, 3 << 44, (1 << 45) - (1 << 28), (1 << 48) - 1]
    )  # fmt: skip
    return (upper | lower).reshape(-1).view(torch.float64)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("source", "target"), list(Op.BY_DTYPES))
def test_casts_equal_torch(implementation, source, target):
    dtypes = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = {"F64": double_specials, "F32": specials}.get(source, lambda: halves.view(dtypes[source]))()
    found = torch.empty(values.numel(), dtype=dtypes[target])
    run(implementation(), Op.BY_DTYPES[source, target], values, found)
    expected = values.to(dtypes[target])
    nan = values.isnan()
    assert torch.equal(found.isnan(), nan)
    bits = {"F64": torch.int64, "F32": torch.int32}.get(target, torch.int16)
    assert torch.equal(found[~nan].view(bits), expected[~nan].view(bits))
