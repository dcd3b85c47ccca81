"""The GPU kernels' form of a descriptor table, carried out here byte by byte and compared with the reference kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import SIZES, buffer_of, copies, random_bytes, row

from weightbridge.kernels import ReferenceKernels
from weightbridge.kernels.device_table import AXES, FIRST_CAST, ROW_WIDTH, UNALIGNED, device_rows, pieces_of
from weightbridge.kernels.reference import cast
from weightbridge.program.program import DESCRIPTOR, Op


def carry_out(rows: np.ndarray, pieces: np.ndarray, block_numel: int) -> None:
    """What the device code does, one element at a time."""
    for number, first in pieces.tolist():
        source, target, kind, numel, *axes = rows[number].tolist()
        count, src_stride, dst_stride = axes[:AXES], axes[AXES : 2 * AXES], axes[2 * AXES :]
        assert numel == np.prod(count)
        unaligned, kind = kind >= UNALIGNED, kind % UNALIGNED
        size = 1 << kind if kind < FIRST_CAST else SIZES[kind - FIRST_CAST][0]
        for element in range(first, min(first + block_numel, numel)):
            index = np.unravel_index(element, count)
            place = (sum(int(i) * s for i, s in zip(index, stride, strict=True)) for stride in (src_stride, dst_stride))
            read, write = (base + offset for base, offset in zip((source, target), place, strict=True))
            value = ctypes.string_at(read, size)
            assert read % size == 0 or unaligned, "a GPU refuses a wide access to such an address"
            if kind >= FIRST_CAST:
                value = cast(kind - FIRST_CAST, np.frombuffer(value, np.uint8)).tobytes()
            assert write % len(value) == 0 or unaligned
            ctypes.memmove(write, value, len(value))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(copies(), min_size=0, max_size=3), block_numel=st.sampled_from([1, 7, 64]))
def test_device_rows_move_what_the_table_says(rows, block_numel):
    table = np.concatenate([r for r, _, _ in rows]) if rows else np.zeros(0, DESCRIPTOR)
    table["src_buffer"] = table["dst_buffer"] = np.arange(len(rows))
    sources = [random_bytes(nbytes, i) for i, (_, nbytes, _) in enumerate(rows)]
    expected, found = ([np.full(nbytes, 0xA5, np.uint8) for _, _, nbytes in rows] for _ in range(2))
    reference = ReferenceKernels()
    reference.launch(reference.prepare(table, [buffer_of(s) for s in sources], [buffer_of(e) for e in expected]))
    bound = device_rows(table, [buffer_of(s) for s in sources], [buffer_of(f) for f in found])
    pieces = pieces_of(bound, block_numel)
    carry_out(bound, pieces, block_numel)
    for want, have in zip(expected, found, strict=True):
        np.testing.assert_array_equal(have, want)
    covered = np.bincount(pieces[:, 0], minlength=len(bound)) * block_numel
    assert ((covered >= bound[:, 3]) & (covered - block_numel < bound[:, 3])).all()


def bound_row(table: np.ndarray, source: np.ndarray, target: np.ndarray) -> list[list[int]]:
    """kind, then the axes longer than 1 as (count, source stride, destination stride), outermost first."""
    (values,) = device_rows(table, [buffer_of(source)], [buffer_of(target)])
    axes = values[4:].reshape(3, AXES).T
    return [[int(values[2])], *axes[axes[:, 0] > 1].tolist()]


@pytest.mark.parametrize(
    ("offset", "rows", "run_bytes", "pitch", "kind"),
    [
        (0, 40, 80, 200, 3), (4, 40, 80, 200, 2), (2, 40, 80, 200, 1), (1, 40, 80, 200, 0),
        (0, 40, 84, 200, 2), (0, 40, 80, 202, 1), (0, 1, 3998, 0, 1), (0, 1, 4000, 1, 3), (0, 40, 80, 80, 3),
    ],
)  # fmt: skip
def test_runs_move_the_widest_words_that_all_their_places_are_multiples_of(offset, rows, run_bytes, pitch, kind):
    memory = np.zeros(20_064, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :]
    table = row([rows, run_bytes // 2], [pitch, 2], [run_bytes, 2], src_offset=offset, itemsize=2)
    found = bound_row(table, memory[:10_000], memory[10_048 - 64 :])
    dense = rows == 1 or pitch == run_bytes
    words = (rows if dense else 1) * run_bytes >> kind
    outer = [] if dense else [[rows, pitch, run_bytes]]
    assert found == [[kind], *outer, [words, 1 << kind, 1 << kind]]


def test_a_transpose_keeps_its_elements_whole_and_writes_in_order():
    source, target = np.zeros((30, 50), np.uint16), np.zeros((50, 30), np.uint16)
    found = bound_row(row([30, 50], [100, 2], [2, 60]), source, target)
    assert found == [[1], [50, 2, 60], [30, 100, 2]]


def test_rows_that_move_nothing_have_no_device_row():
    memory = np.zeros(64, np.uint8)
    table = np.concatenate([row([0, 4], [2, 2], [2, 2]), row([4], [2], [2]), row([3, 0], [2, 2], [2, 2])])
    bound = device_rows(table, [buffer_of(memory)], [buffer_of(memory)])
    assert bound.shape == (1, ROW_WIDTH)
    assert device_rows(table[:1], [buffer_of(memory)], [buffer_of(memory)]).shape == (0, ROW_WIDTH)
    assert pieces_of(np.zeros((0, ROW_WIDTH), np.int64), 8).shape == (0, 2)


def test_a_cast_stays_a_cast_of_elements():
    source, target = np.zeros(100, np.float32), np.zeros(100, np.uint16)
    found = bound_row(row([10, 10], [40, 4], [20, 2], op=Op.F32_TO_BF16, itemsize=4), source, target)
    assert found == [[FIRST_CAST + Op.F32_TO_BF16], [100, 4, 2]]


@pytest.mark.parametrize(
    ("src_offset", "dst_offset", "pitch", "unaligned"),
    [(0, 0, 40, False), (4, 2, 48, False), (2, 0, 40, True), (0, 1, 40, True), (0, 0, 42, True)],
)
def test_a_cast_of_elements_between_their_multiples_is_marked(src_offset, dst_offset, pitch, unaligned):
    source, target = np.zeros(120, np.float32), np.zeros(120, np.uint64).view(np.uint16)
    table = row(
        [10, 5], [pitch, 4], [10, 2], src_offset=src_offset, dst_offset=dst_offset, op=Op.F32_TO_F16, itemsize=4
    )
    assert bound_row(table, source, target)[0] == [FIRST_CAST + Op.F32_TO_F16 + (UNALIGNED if unaligned else 0)]
