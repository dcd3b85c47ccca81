"""The executor's own pieces: merged writes, live memory, the kernel lane, codecs of a damaged peer."""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Literal

import numpy as np
import pytest
import torch

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.errors import LayoutError, UnsupportedError, UsageError
from weightbridge.executor import LiveMemory
from weightbridge.executor.executor import _merged, _only_used
from weightbridge.executor.lane import KernelLane, LaneDone, LaneFailed
from weightbridge.kernels import Buffer, ReferenceKernels
from weightbridge.layout import LiveTensor
from weightbridge.program.program import DESCRIPTOR


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


@pytest.mark.parametrize("column", ["src_buffer", "dst_buffer"])
def test_a_round_is_bound_to_the_tensors_it_needs(column: Literal["src_buffer", "dst_buffer"]) -> None:
    rng = np.random.default_rng(5)
    memory = [Buffer(int(a), int(n)) for a, n in rng.integers(1, 1 << 40, size=(40, 2))]
    table = np.zeros(17, dtype=DESCRIPTOR)
    table[column] = rng.choice([3, 39, 0, 17], size=17)
    table["src_offset"], table["itemsize"] = np.arange(17), 1
    before = table.copy()
    fewer, used = _only_used(table, column, memory)
    assert (table == before).all()  # a program is shared and never written to
    assert len(used) == len(set(table[column].tolist())) < len(memory)
    assert [used[i] for i in fewer[column]] == [memory[i] for i in table[column]]
    assert all((fewer[name] == table[name]).all() for name in DESCRIPTOR.names or () if name != column)
    for damaged in (-1, 40):
        table[column][8] = damaged
        bad, bound = _only_used(table, column, memory)
        sides = (bound, memory[:1]) if column == "src_buffer" else (memory[:1], bound)
        with pytest.raises(UsageError, match=f"is number {damaged}"):
            ReferenceKernels().prepare(bad, *sides)


def live(name: str, tensor: torch.Tensor) -> LiveTensor:
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
    return LiveTensor(name=name, shape=tuple(tensor.shape), strides=tensor.stride(), dtype=dtype_named(dtype))


def test_live_buffers_follow_a_rebound_storage_and_span_gaps() -> None:
    base = torch.zeros(6, 10)
    view = base[1:4, 2:7]
    expected = live("w", view)
    memory = LiveMemory([expected])
    (buffer,) = memory.buffers({"w": view})
    assert buffer == (base.data_ptr() + 4 * 12, 4 * (2 * 10 + 4 + 1), None)
    moved = torch.zeros(6, 10)[1:4, 2:7]
    assert memory.buffers({"w": moved})[0].address == moved.data_ptr()


def test_live_memory_that_has_not_moved_is_the_same_object_and_keeps_no_tensor() -> None:
    tensors = {name: torch.zeros(3, 4) for name in "abcde"}
    memory = LiveMemory([live(name, t) for name, t in tensors.items()])
    first = memory.buffers(tensors)
    assert memory.buffers(dict(tensors)) is first
    tensors["c"] = tensors["c"].view(3, 4)  # another tensor, the same memory
    assert memory.buffers(tensors) is first
    gone = weakref.ref(tensors["d"])
    tensors["d"].data = torch.zeros(3, 4)  # the same tensor, other memory
    second = memory.buffers(tensors)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, True, False, True]
    assert second[3].address == tensors["d"].data_ptr()
    assert memory.buffers(tensors) is second
    del tensors["d"]
    assert gone() is None


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
    probed = torch.zeros(3, 4)
    memory = LiveMemory([live("w", probed)])
    for _ in range(2):  # before it was ever seen well, and after
        for _ in range(2):  # and no second question is answered with what was refused
            with pytest.raises(LayoutError, match=word) as caught:
                memory.buffers(tensors)
            assert "connect again" in str(caught.value)
        memory.buffers({"w": probed})


def test_another_form_of_the_same_memory_is_refused() -> None:
    probed = torch.zeros(4, 4)
    for changed in (probed.t(), probed[:, :2], probed.view(torch.int32)):
        memory = LiveMemory([live("w", probed)])
        memory.buffers({"w": probed})
        assert changed.data_ptr() == probed.data_ptr()
        with pytest.raises(LayoutError, match="probed as"):
            memory.buffers({"w": changed})


def test_memory_that_is_not_the_cpus_is_refused() -> None:
    meta = torch.zeros(3, 4, device="meta")
    with pytest.raises(UnsupportedError, match="meta"):
        LiveMemory([live("w", torch.zeros(3, 4))]).buffers({"w": meta})


def test_the_lane_works_in_order_and_reports_what_failed() -> None:
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    lane = KernelLane(events, "lane under test")
    order: list[int] = []
    boom = RuntimeError("kernel failed")

    def fail() -> None:
        raise boom

    def nothing() -> None: ...

    lane.submit(lambda: order.append(1), nothing, "one")
    lane.submit(fail, nothing, "two")
    lane.submit(lambda: order.append(3), nothing, "three")
    assert [events.get(timeout=5) for _ in range(3)] == [LaneDone("one"), LaneFailed(boom), LaneDone("three")]
    lane.close(5)
    assert order == [1, 3]
    assert "lane under test" not in {t.name for t in threading.enumerate()}
