"""The Triton kernels on a CUDA device against the reference, and their order among streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import SIZES, copies, random_bytes, row

from weightbridge.kernels import Buffer, Kernels, ReferenceKernels, choose_kernels
from weightbridge.program.program import DESCRIPTOR

pytest.importorskip("triton", reason="the package triton is not installed (the extra 'gpu')")


def on_host(array: np.ndarray) -> Buffer:
    return Buffer(array.ctypes.data, array.nbytes)


def on_device(tensor: torch.Tensor) -> Buffer:
    return Buffer(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.device.index)


def triton_here() -> Kernels:
    return choose_kernels("triton").on(torch.cuda.current_device())


def wait(ticket) -> None:
    while not ticket.done():
        torch.cuda.current_stream().synchronize()


def same_bytes(table: np.ndarray, source: np.ndarray, target_bytes: int) -> None:
    expected = np.full(target_bytes, 0xA5, np.uint8)
    reference, kernels = ReferenceKernels(), triton_here()
    reference.launch(reference.prepare(table, [on_host(source)], [on_host(expected)]))
    there, found = torch.from_numpy(source).cuda(), torch.full((target_bytes,), 0xA5, dtype=torch.uint8, device="cuda")
    kernels.follow_caller()
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
    kernels = triton_here()
    assert kernels.launch(kernels.prepare(np.zeros(0, DESCRIPTOR), [], [])).done()


def busy_stream(work: torch.Tensor) -> torch.Tensor:
    """Some milliseconds of the current stream."""
    for _ in range(20):
        work = work @ work * 1e-3
    return work


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_launch_comes_after_what_the_callers_stream_holds_and_its_ticket_after_the_launch(own_stream):
    """The caller's stream is kept busy, then writes the source: a launch that did not wait would pack the old values.

    It is made by another thread, as the executor does.
    """
    source = torch.zeros(1 << 20, dtype=torch.float32, device="cuda")
    target = torch.zeros_like(source)
    busy = torch.randn(4096, 4096, device="cuda")
    kernels = triton_here()
    prepared = kernels.prepare(row([1 << 20], [4], [4], itemsize=4), [on_device(source)], [on_device(target)])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream), ThreadPoolExecutor(1) as other_thread:
        busy_stream(busy)
        stream.synchronize()  # what the matrices need is loaded by now
        for value in (1.0, 2.0, 3.0):
            busy_stream(busy)
            source.fill_(value)
            kernels.follow_caller()
            ticket = other_thread.submit(kernels.launch, prepared).result()
            early = ticket.done()  # the matrices take milliseconds: the launch returns long before they are through
            assert ticket.wait(60)
            assert not early
            assert (target == value).all().item()


def test_a_launch_does_not_wait_for_what_comes_after_the_mark():
    """A trainer that may go on computing while its weights leave: its later work is none of the kernels' business."""
    source, target = (torch.zeros(1 << 10, dtype=torch.float32, device="cuda") for _ in range(2))
    busy = torch.randn(4096, 4096, device="cuda")
    kernels = triton_here()
    prepared = kernels.prepare(row([1 << 10], [4], [4], itemsize=4), [on_device(source)], [on_device(target)])
    busy_stream(busy)
    torch.cuda.synchronize()
    kernels.follow_caller()
    for _ in range(20):
        busy_stream(busy)
    after = torch.cuda.Event()
    after.record()
    assert kernels.launch(prepared).wait(60)
    assert not after.query()
