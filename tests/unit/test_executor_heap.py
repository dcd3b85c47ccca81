"""Freed memory goes back to the system when it is asked for, and not before."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from weightbridge.executor import heap

_BLOCK_BYTES, _NUM_BLOCKS = 40_000, 800  # each below what the allocator maps by itself, 32 MB in all


def resident_bytes() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_pages_between_living_blocks_go_back() -> None:
    blocks = [np.full(_BLOCK_BYTES, 7, dtype=np.uint8) for _ in range(_NUM_BLOCKS)]
    living = blocks[::8]  # and one at the very end, below which the allocator gives nothing back by itself
    living.append(np.full(_BLOCK_BYTES, 7, dtype=np.uint8))
    del blocks
    before = resident_bytes()
    assert heap.give_back_free_memory()
    assert before - resident_bytes() > _BLOCK_BYTES * _NUM_BLOCKS // 2
    assert all((block == 7).all() for block in living)


def test_another_c_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_malloc_trim", lambda: None)
    assert not heap.give_back_free_memory()
