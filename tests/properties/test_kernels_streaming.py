"""What the native kernels do past the cache, with vectors of every width: whole lines, runs apart, columns, dense short rows.

Places in a cache line are chosen here, guard bytes lie between and around, and the bytes expected come from NumPy indexing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.kernel_cases import buffer_of, random_bytes, row

from weightbridge.kernels import NativeKernels, copy_writes, native
from weightbridge.kernels.native import load_native

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels were not built")

GUARD = 0xA5


@pytest.fixture(params=[16, 32, 64], ids=lambda width: f"{width}-byte vectors", autouse=True)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Every table streams, in one thread; the processor passes for one with vectors no wider than this."""
    monkeypatch.setattr(native, "STREAMING_TABLE_BYTES", 0)
    limit = load_native().lib.wb_limit_vectors
    limit(request.param)
    yield request.param
    limit(64)


def aligned(nbytes: int, offset: int, fill: int = GUARD) -> np.ndarray:
    """nbytes of `fill` that begin `offset` bytes after a multiple of 64."""
    memory = np.full(nbytes + 128, fill, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + nbytes]


def launch(table: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
    kernels = NativeKernels(1)
    assert kernels.launch(kernels.prepare(table, [buffer_of(source)], [buffer_of(target)])).done()


# --- runs -----------------------------------------------------------------------------------------------------------

LINES = [64 * n for n in (*range(1, 34), 47, 48, 63, 64, 65, 127, 128, 129, 160)]
ODD = [*range(500, 2200, 37), 8191, 8193, 8257]


@pytest.mark.parametrize("gap", [0, 1, 256, 257, 1024, -3000])
@pytest.mark.parametrize(
    ("lengths", "offset"), [(LINES, 0), (LINES, 8), (ODD, 0), (ODD, 61)], ids=["lines", "lines-8", "odd", "odd-61"]
)
def test_runs_of_one_length_after_another_read_at_a_distance(lengths, offset, gap):
    """Seven runs of each length; each begins `gap` bytes behind the end of the last one, a negative gap before it."""
    source = random_bytes(1 << 18, 3)
    reads, writes, table, at = [], [], [], 0
    for length in lengths:
        begin = 5 if gap >= 0 else 1 << 17
        for _ in range(7):
            reads.append((begin, length))
            writes.append(at)
            table.append(row([length], [1], [1], src_offset=begin, dst_offset=at, itemsize=1))
            begin = (begin + length + gap) % (1 << 17)
            at += length
        at += -at % 64 + 64
    target = aligned(at, offset)
    launch(np.concatenate(table), source, target)
    expected = np.full(at, GUARD, np.uint8)
    for (begin, length), write in zip(reads, writes, strict=True):
        expected[write : write + length] = source[begin : begin + length]
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("gap", [0, 256, 320, 3000])
@pytest.mark.parametrize(
    ("length", "offset"), [(64, 0), (256, 0), (832, 0), (1026, 7), (1984, 0), (2047, 1), (2048, 0), (4160, 32)]
)
def test_rows_at_a_pitch_become_dense(length, gap, offset):
    source = random_bytes(23 * (length + gap) + 9, 4)
    target = aligned(23 * length + 64, offset)
    launch(row([23, length], [length + gap, 1], [length, 1], src_offset=9, itemsize=1), source, target)
    pitched = np.lib.stride_tricks.as_strided(source[9:], (23, length), (length + gap, 1))
    np.testing.assert_array_equal(target[:-64].reshape(23, length), pitched)
    assert (target[-64:] == GUARD).all()


def test_writes_at_irregular_places():
    lengths = np.array([4096, 1 << 20, 640, 1500, 1 << 21, 64, 1, 1984, 1 << 20, 300, 0, 2048])
    reads = np.cumsum(lengths + np.arange(12) * 100)[::-1]
    starts = np.cumsum(lengths + np.arange(12) % 5 * 16) - lengths
    source, target = random_bytes(int(reads.max() + lengths.max()), 5), aligned(int(starts[-1] + 4096), 16)
    copy_writes(buffer_of(source), buffer_of(target), np.stack([reads, starts, lengths], axis=1))
    expected = np.full(len(target), GUARD, np.uint8)
    for read, start, length in zip(reads.tolist(), starts.tolist(), lengths.tolist(), strict=True):
        expected[start : start + length] = source[read : read + length]
    np.testing.assert_array_equal(target, expected)


# --- transposes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0, 3, 64])
@pytest.mark.parametrize("offset", [0, 1, 40, 63])
@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_columns_are_taken_apart(size, columns, offset, gap):
    """Lengths around the ends of vectors, stages and cache lines; each column begins at another place in its line."""
    block = 1024 // size
    for length in (
        2,
        31,
        33,
        511 // size,
        512 // size + 1,
        block - 1,
        block,
        block + 1,
        3 * block + 63 // size,
        5 * block + 7,
    ):
        values = random_bytes(length * columns * size + 5, length)
        pitch = length * size + gap
        target = aligned(columns * pitch + 64, offset)
        table = row([length, columns], [columns * size, size], [size, pitch], src_offset=5, itemsize=size)
        launch(table, values, target)
        expected = np.full((columns, pitch), GUARD, np.uint8)
        turned = values[5:].reshape(length, columns, size).transpose(1, 0, 2)
        expected[:, : length * size] = turned.reshape(columns, -1)
        np.testing.assert_array_equal(target[:-64], expected.reshape(-1))
        assert (target[-64:] == GUARD).all()


@pytest.mark.parametrize("offset", [0, 9, 56])
@pytest.mark.parametrize(
    ("size", "rows"), [(1, 16), (1, 100), (2, 8), (2, 64), (4, 5), (4, 31), (8, 2), (8, 3), (8, 16)]
)
def test_short_rows_become_dense(size, rows, offset):
    """The source is [rows, length], the destination [length, rows]: below, at and beyond what one stage holds."""
    stage = 8192 // (rows * size)
    for length in (stage - 1, stage + 1, 4 * stage - 1, 4 * stage, 5 * stage // 64 * 64 + 5):
        values = random_bytes(rows * (length + 1) * size, length).reshape(rows, length + 1, size)
        target = aligned(rows * length * size + 64, offset)
        table = row([rows, length], [(length + 1) * size, size], [size, rows * size], itemsize=size)
        launch(table, values.reshape(-1), target)
        np.testing.assert_array_equal(target[:-64].reshape(length, rows, size), values[:, :length].transpose(1, 0, 2))
        assert (target[-64:] == GUARD).all()
