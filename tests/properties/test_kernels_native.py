"""The native kernels' own paths (tiles and their edges, stages, streaming stores, cuts, threads) against NumPy indexing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from weightbridge.kernels import Buffer, NativeKernels, ReferenceKernels, native
from weightbridge.kernels.native import load_native
from weightbridge.program.program import DESCRIPTOR, MAX_AXES, Op

pytestmark = pytest.mark.skipif(load_native() is None, reason="the native kernels were not built")

GUARD = 0xA5


@pytest.fixture(params=["cached", "streaming"])
def stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables go the way of big ones in the second case: past the cache, and with threads."""
    if request.param == "streaming":
        monkeypatch.setattr(native, "STREAMING_TABLE_BYTES", 0)
        monkeypatch.setattr(native, "THREADED_TABLE_BYTES", 0)


def buffer_of(array: np.ndarray) -> Buffer:
    return Buffer(array.ctypes.data, array.nbytes)


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def launch(
    kernels: NativeKernels | ReferenceKernels, table: np.ndarray, source: np.ndarray, target: np.ndarray
) -> None:
    assert kernels.launch(kernels.prepare(table, [buffer_of(source)], [buffer_of(target)])).done()


def table_of(
    rows: list[tuple[int, int, list[int], list[int], list[int]]], itemsize: int, op: int = Op.COPY
) -> np.ndarray:
    """Rows of (source offset, destination offset, counts, source strides, destination strides), all in bytes."""
    table = np.zeros(len(rows), DESCRIPTOR)
    table["count"], table["op"], table["itemsize"] = 1, op, itemsize
    for row, (src_offset, dst_offset, count, src_stride, dst_stride) in zip(table, rows, strict=True):
        row["src_offset"], row["dst_offset"] = src_offset, dst_offset
        at = MAX_AXES - len(count)
        row["count"][at:], row["src_stride"][at:], row["dst_stride"][at:] = count, src_stride, dst_stride
    return table


# --- transposes -----------------------------------------------------------------------------------------------------

LENGTHS = [*range(2, 10), 15, 16, 17, 31, 33, 64, 65, 129, 257, 300]


def shapes(size: int) -> Iterator[tuple[int, int]]:
    """(rows, columns) around every edge of tiles, stages and blocks; not both very long."""
    for rows in LENGTHS:
        for columns in LENGTHS:
            if rows * columns * size <= 1 << 16:
                yield rows, columns


@pytest.mark.parametrize("gaps", [(0, 0), (1, 0), (0, 1), (3, 5)], ids=["dense", "source gaps", "target gaps", "both"])
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_transpose_of_any_shape_is_whole_and_touches_nothing_else(size, flipped, gaps, stores):
    """All shapes lie one after the other in one table, each with guard bytes behind it."""
    source = random_bytes(1 << 20, size)
    rows, expected, end = [], [], 7  # an odd start: nothing is aligned
    for height, width in shapes(size):
        pitch, line = (width + gaps[0]) * size, (height + gaps[1]) * size
        view = np.ndarray((height, width, size), np.uint8, source, offset=3, strides=(pitch, size, 1))
        first, step = (3 + (height - 1) * pitch, -pitch) if flipped else (3, pitch)
        image = np.full((width, line), GUARD, np.uint8)
        turned = (view[::-1] if flipped else view).transpose(1, 0, 2).reshape(width, height * size)
        image[:, : height * size] = turned
        rows.append((first, end, [height, width], [step, size], [size, line]))
        expected += [image.reshape(-1), np.full(5, GUARD, np.uint8)]
        end += image.size + 5
    target = np.full(end, GUARD, np.uint8)
    launch(NativeKernels(2), table_of(rows, size), source, target)
    np.testing.assert_array_equal(target[7:], np.concatenate(expected))
    assert (target[:7] == GUARD).all()


@pytest.mark.parametrize(
    "shape", [(3, 700_001), (700_001, 3), (2, 1_500_001), (1_500_001, 2), (9, 300_007), (300_007, 9)]
)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_skinny_transpose_is_cut_along_its_long_side(shape, num_threads):
    """Its short side comes first or last; either way it is more than one piece, and nothing is lost where pieces meet."""
    height, width = shape
    source = random_bytes(height * width * 2)
    target = np.full(height * width * 2 + 64, GUARD, np.uint8)
    table = table_of([(0, 0, [height, width], [width * 2, 2], [2, height * 2])], 2)
    kernels = NativeKernels(num_threads)
    prepared = kernels.prepare(table, [buffer_of(source)], [buffer_of(target)])
    assert prepared.table.num_copies > 1
    kernels.launch(prepared)
    np.testing.assert_array_equal(
        target[:-64].view(np.uint16).reshape(width, height), source.view(np.uint16).reshape(height, width).T
    )
    assert (target[-64:] == GUARD).all()


# --- runs and casts -------------------------------------------------------------------------------------------------


def test_runs_of_any_length_at_any_alignment(stores):
    rng = np.random.default_rng(5)
    lengths = np.concatenate([np.arange(1, 200), [255, 256, 511, 512, 513, 1024, 4095, 4096, 4097, 9000, 70_001]])
    gaps = rng.integers(1, 70, len(lengths))
    starts = np.cumsum(lengths + gaps) - lengths
    source, target = random_bytes(1 << 18), np.full(int(starts[-1] + lengths[-1]) + 70, GUARD, np.uint8)
    reads = rng.integers(0, (1 << 18) - lengths)
    expected = target.copy()
    rows = []
    for length, start, read in zip(lengths.tolist(), starts.tolist(), reads.tolist(), strict=True):
        expected[start : start + length] = source[read : read + length]
        rows.append((read, start, [length], [1], [1]))
    launch(NativeKernels(2), table_of(rows, 1), source, target)
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("width", [64, 192, 250, 512, 1026, 5000])
def test_rows_at_a_pitch_into_rows_at_another(width, stores):
    rows = 37
    source = random_bytes(rows * (width + 130))
    target = np.full(rows * (width + 64), GUARD, np.uint8)
    table = table_of([(66, 0, [rows, width], [width + 130, 1], [width + 64, 1])], 1)
    launch(NativeKernels(2), table, source, target)
    images = target.reshape(rows, width + 64)
    np.testing.assert_array_equal(images[:, :width], source.reshape(rows, width + 130)[:, 66 : 66 + width])
    assert (images[:, width:] == GUARD).all()


@pytest.mark.parametrize("op", list(Op.BY_DTYPES.values()))
def test_casts_of_any_length_at_any_alignment_equal_the_reference(op, stores):
    names = next(pair for pair, code in Op.BY_DTYPES.items() if code == op)
    sizes = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
    source_size, target_size = sizes[names[0]], sizes[names[1]]
    source, rows, at = random_bytes(1 << 17, op), [], 1
    for length in (1, 7, 15, 16, 17, 255, 300, 1023, 1025, 2600):
        for shift, step in ((0, 1), (1, 1), (64 - target_size, 1), (3, 4)):
            rows.append((shift * source_size, at, [3, length], [9 * source_size, step * source_size],
                         [(length + 1) * target_size, target_size]))  # fmt: skip
            at += 3 * (length + 1) * target_size + shift
    table = table_of(rows, source_size, op)
    expected, found = np.full(at + 64, GUARD, np.uint8), np.full(at + 64, GUARD, np.uint8)
    launch(ReferenceKernels(), table, source, expected)
    launch(NativeKernels(2), table, source, found)
    np.testing.assert_array_equal(found, expected)


# --- threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2, 5, 16])
def test_every_batch_is_drawn_by_exactly_one_thread(num_threads, monkeypatch):
    """Runs, strided copies and transposes in one table of many batches: one drawn by none would leave guard bytes."""
    monkeypatch.setattr(native, "STREAMING_TABLE_BYTES", 0)
    monkeypatch.setattr(native, "THREADED_TABLE_BYTES", 0)
    rows, source = [], random_bytes(1 << 20)
    for i in range(48):  # 48 x 3 x 128 KiB
        at = i * 3 * (1 << 17)
        rows.append((i, at, [1 << 16], [2], [2]))
        rows.append((2 * i, at + (1 << 17), [256, 256], [514, 2], [2, 512]))
        rows.append((i, at + 2 * (1 << 17), [128, 512], [1030, 2], [1024, 2]))
    table = table_of(rows, 2)
    expected, found = np.full(48 * 3 << 17, GUARD, np.uint8), np.full(48 * 3 << 17, GUARD, np.uint8)
    launch(ReferenceKernels(), table, source, expected)
    launch(NativeKernels(num_threads), table, source, found)
    assert np.array_equal(found, expected)


def test_one_prepared_table_may_be_launched_by_several_threads_at_once():
    """A launch keeps its state on its own stack: four at a time, each must find its bytes in place when it returns."""
    source = random_bytes(6 << 20)
    table = table_of([(0, 0, [1024, 3072], [6144, 2], [2, 2048])], 2)
    kernels, target = NativeKernels(2), np.zeros(6 << 20, np.uint8)
    prepared = kernels.prepare(table, [buffer_of(source)], [buffer_of(target)])
    expected = source.view(np.uint16).reshape(1024, 3072).T
    barrier, wrong = threading.Barrier(4), []

    def work() -> None:
        for _ in range(3):
            barrier.wait(30)
            kernels.launch(prepared)
            if not np.array_equal(target.view(np.uint16).reshape(3072, 1024), expected):
                wrong.append(threading.get_ident())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert np.array_equal(target.view(np.uint16).reshape(3072, 1024), expected)
