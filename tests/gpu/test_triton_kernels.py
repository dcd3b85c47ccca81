"""The Triton kernels on a CUDA device against the reference, and their order among streams."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import SIZES, copies, random_bytes, row

from weightbridge.kernels import Buffer, ReferenceKernels, choose_kernels
from weightbridge.program.program import DESCRIPTOR

pytest.importorskip("triton", reason="the package triton is not installed (the extra 'gpu')")


def on_host(array: np.ndarray) -> Buffer:
    return Buffer(array.ctypes.data, array.nbytes)


def on_device(tensor: torch.Tensor) -> Buffer:
    return Buffer(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def wait(ticket) -> None:
    while not ticket.done():
        torch.cuda.current_stream().synchronize()


def same_bytes(table: np.ndarray, source: np.ndarray, target_bytes: int) -> None:
    expected = np.full(target_bytes, 0xA5, np.uint8)
    reference, kernels = ReferenceKernels(), choose_kernels("triton")
    reference.launch(reference.prepare(table, [on_host(source)], [on_host(expected)]))
    there, found = torch.from_numpy(source).cuda(), torch.full((target_bytes,), 0xA5, dtype=torch.uint8, device="cuda")
    wait(kernels.launch(kernels.prepare(table, [on_device(there)], [on_device(found)])))
    np.testing.assert_array_equal(found.cpu().numpy(), expected)


@settings(max_examples=200, deadline=None)
@given(case=copies(), seed=st.integers(0, 99))
def test_random_tables_equal_the_reference(case, seed):
    table, source_bytes, target_bytes = case
    same_bytes(table, random_bytes(source_bytes, seed), target_bytes)


@pytest.mark.parametrize("op", list(SIZES))
def test_casts_equal_the_reference_on_all_upper_halves(op):
    source_size, target_size = SIZES[op]
    dtype = {2: np.uint16, 4: np.uint32, 8: np.uint64}[source_size]
    upper = np.arange(1 << 16).astype(dtype) << dtype(8 * source_size - 16)
    lower = np.array([0] if source_size == 2 else [0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype)
    values = (upper[:, None] | lower).reshape(-1)
    table = row([len(values)], [source_size], [target_size], op=op, itemsize=source_size)
    same_bytes(table, values.view(np.uint8), len(values) * target_size)


def test_a_big_table_of_runs_and_transposes():
    rows = [row([4096, 1000], [8192, 2], [2000, 2], src_offset=2 * i, dst_offset=i * 8_192_000) for i in range(3)]
    rows.append(row([3000, 1500], [8192, 2], [2, 6000], dst_offset=3 * 8_192_000))
    same_bytes(np.concatenate(rows), random_bytes(4097 * 8192), 3 * 8_192_000 + 9_000_000)


def test_an_empty_table_is_done_at_once():
    kernels = choose_kernels("triton")
    assert kernels.launch(kernels.prepare(np.zeros(0, DESCRIPTOR), [], [])).done()


def test_a_launch_comes_after_what_the_callers_stream_holds_and_its_event_after_the_launch():
    """The caller's stream is kept busy, then writes the source: a launch that did not wait would pack the old values."""
    source = torch.zeros(1 << 20, dtype=torch.float32, device="cuda")
    target = torch.zeros_like(source)
    busy = torch.randn(4096, 4096, device="cuda")
    kernels = choose_kernels("triton")
    table = row([1 << 20], [4], [4], itemsize=4)
    prepared = kernels.prepare(table, [on_device(source)], [on_device(target)])
    wait(kernels.launch(prepared))  # compiled by now
    for value in (1.0, 2.0, 3.0):
        for _ in range(20):
            busy = busy @ busy * 1e-3
        source.fill_(value)
        ticket = kernels.launch(prepared)
        early = ticket.done()  # the matrices take milliseconds: the launch returns long before they are through
        wait(ticket)
        assert not early
        assert (target == value).all().item()
