"""The executor's own pieces: merged writes, live memory, the kernel lane, codecs of a damaged peer."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest
import torch

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.errors import LayoutError, UnsupportedError
from weightbridge.executor import live_buffers
from weightbridge.executor.executor import _merged
from weightbridge.executor.lane import KernelLane, LaneDone, LaneFailed
from weightbridge.layout import LiveTensor


@pytest.mark.parametrize("seed", range(20))
def test_merged_writes_move_the_same_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, size=rng.integers(0, 12))
    gaps = rng.integers(0, 2, size=(2, len(sizes))) * rng.integers(1, 9, size=(2, len(sizes)))
    local = np.cumsum(np.concatenate([[0], sizes])[: len(sizes)] + gaps[0])
    remote = np.cumsum(np.concatenate([[0], sizes])[: len(sizes)] + gaps[1])
    writes = np.stack([local, remote, sizes], axis=1).astype(np.int64)
    source = rng.integers(0, 256, 2000, dtype=np.uint8)
    wanted, got = np.zeros(2000, np.uint8), np.zeros(2000, np.uint8)
    merged = _merged(writes)
    for target, rows in ((wanted, writes), (got, merged)):
        for a, b, n in rows.tolist():
            target[b : b + n] = source[a : a + n]
    assert (wanted == got).all()
    assert merged[:, 2].sum() == writes[:, 2].sum()
    joints = (gaps[:, 1:] != 0).any(axis=0).sum() if len(sizes) else 0
    assert len(merged) == (1 + joints if len(sizes) else 0)


def live(name: str, tensor: torch.Tensor) -> LiveTensor:
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
    return LiveTensor(name=name, shape=tuple(tensor.shape), strides=tensor.stride(), dtype=dtype_named(dtype))


def test_live_buffers_follow_a_rebound_storage_and_span_gaps() -> None:
    base = torch.zeros(6, 10)
    view = base[1:4, 2:7]
    expected = live("w", view)
    (buffer,) = live_buffers({"w": view}, [expected])
    assert buffer == (base.data_ptr() + 4 * 12, 4 * (2 * 10 + 4 + 1))
    moved = torch.zeros(6, 10)[1:4, 2:7]
    assert live_buffers({"w": moved}, [expected])[0].address == moved.data_ptr()


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({}, "gone"),
        ({"w": torch.zeros(3, 5)}, "probed as"),
        ({"w": torch.zeros(5, 3).t()}, "probed as"),
        ({"w": torch.zeros(3, 4, dtype=torch.bfloat16)}, "probed as"),
    ],
)
def test_live_tensors_that_changed_are_refused(tensors: dict[str, torch.Tensor], word: str) -> None:
    with pytest.raises(LayoutError, match=word) as caught:
        live_buffers(tensors, [live("w", torch.zeros(3, 4))])
    assert "connect again" in str(caught.value)


def test_memory_that_is_not_the_cpus_is_refused() -> None:
    meta = torch.zeros(3, 4, device="meta")
    with pytest.raises(UnsupportedError, match="meta"):
        live_buffers({"w": meta}, [live("w", torch.zeros(3, 4))])


def test_the_lane_works_in_order_and_reports_what_failed() -> None:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    lane = KernelLane(events, "lane under test")
    order: list[int] = []
    boom = RuntimeError("kernel failed")

    def fail() -> None:
        raise boom

    lane.submit(lambda: order.append(1), "one")
    lane.submit(fail, "two")
    lane.submit(lambda: order.append(3), "three")
    assert [events.get(timeout=5) for _ in range(3)] == [LaneDone("one"), LaneFailed(boom), LaneDone("three")]
    lane.close(5)
    assert order == [1, 3]
    assert "lane under test" not in {t.name for t in threading.enumerate()}
