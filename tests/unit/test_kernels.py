"""Native kernels against the reference, and both against independent oracles (NumPy indexing, Fractions for rounding)."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import threading
import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernel_cases import SIZES, buffer_of, copies, random_bytes, row

from weightbridge import kernels
from weightbridge.errors import UsageError
from weightbridge.kernels import NativeKernels, ReferenceKernels, choose_kernels, copy_writes
from weightbridge.kernels.native import load_native
from weightbridge.program.program import DESCRIPTOR, Op

NATIVE = load_native() is not None
IMPLEMENTATIONS = [
    ReferenceKernels,
    pytest.param(NativeKernels, marks=pytest.mark.skipif(not NATIVE, reason="not built")),
]


def run(implementation, table, sources, destinations):
    if isinstance(implementation, type):
        implementation = implementation()
    prepared = implementation.prepare(table, [buffer_of(s) for s in sources], [buffer_of(d) for d in destinations])
    assert implementation.launch(prepared).done()


# --- copies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 16])
def test_transpose_slice_and_flip_equal_numpy_indexing(implementation, itemsize):
    source = random_bytes(37 * 23 * itemsize).reshape(37, 23, itemsize)
    target = np.zeros((23, 30, itemsize), dtype=np.uint8)
    table = row(
        [30, 23], [23 * itemsize, -itemsize], [itemsize, 30 * itemsize],
        src_offset=(5 * 23 + 22) * itemsize, itemsize=itemsize,
    )  # fmt: skip
    run(implementation, table, [source], [target])
    np.testing.assert_array_equal(target, source[5:35, ::-1].transpose(1, 0, 2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_rotary_halves_are_taken_apart_and_put_together(implementation, itemsize):
    pairs = random_bytes(21 * 37 * 2 * itemsize).reshape(21, 37, 2, itemsize)
    halves, back = np.zeros((21, 2, 37, itemsize), np.uint8), np.zeros_like(pairs)
    line, pair = 74 * itemsize, [2 * itemsize, itemsize]
    apart = row([21, 37, 2], [line, *pair], [line, itemsize, 37 * itemsize], itemsize=itemsize)
    together = row([21, 37, 2], [line, itemsize, 37 * itemsize], [line, *pair], itemsize=itemsize)
    run(implementation, apart, [pairs], [halves])
    np.testing.assert_array_equal(halves, pairs.transpose(0, 2, 1, 3))
    run(implementation, together, [halves], [back])
    np.testing.assert_array_equal(back, pairs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_use_their_own_buffers_and_leave_all_other_bytes_alone(implementation):
    sources = [random_bytes(100, 1), random_bytes(333, 2)]
    targets = [np.full(50, 7, np.uint8), np.full(400, 9, np.uint8)]
    table = np.concatenate(
        [
            row([11], [1], [1], src_offset=3, dst_offset=5, itemsize=1, dst_buffer=1),
            row([10, 3], [33, 2], [3, 1], src_offset=1, dst_offset=13, itemsize=1, src_buffer=1),
            row([0, 3], [33, 2], [3, 1], src_offset=10**9, itemsize=1, src_buffer=1),
        ]
    )
    run(implementation, table, sources, targets)
    expected = np.full(400, 9, np.uint8)
    expected[5:16] = sources[0][3:14]
    np.testing.assert_array_equal(targets[1], expected)
    expected = np.full(50, 7, np.uint8)
    expected[13:43] = np.stack([sources[1][1 + 33 * i :][:6:2] for i in range(10)]).reshape(-1)
    np.testing.assert_array_equal(targets[0], expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_empty_table(implementation):
    run(implementation, np.zeros(0, DESCRIPTOR), [], [])


@pytest.mark.skipif(not NATIVE, reason="not built")
@settings(max_examples=150, deadline=None)
@given(rows=st.lists(copies(), min_size=0, max_size=4), seed=st.integers(0, 99), num_threads=st.integers(1, 2))
def test_native_equals_reference_on_random_tables(rows, seed, num_threads):
    sources = [random_bytes(src_bytes, seed + i) for i, (_, src_bytes, _) in enumerate(rows)]
    results = []
    table = np.concatenate([r for r, _, _ in rows]) if rows else np.zeros(0, DESCRIPTOR)
    table["src_buffer"] = table["dst_buffer"] = np.arange(len(rows))
    for implementation in (ReferenceKernels(), NativeKernels(num_threads)):
        targets = [np.full(dst_bytes, 0xA5, np.uint8) for _, _, dst_bytes in rows]
        run(implementation, table, sources, targets)
        results.append(targets)
    for expected, found in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.skipif(not NATIVE, reason="not built")
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_big_table_is_cut_streamed_and_threaded_without_losing_a_byte(num_threads):
    rows, columns = 2051, 2049
    source = random_bytes(rows * columns * 4 + 3)[3:]
    values = np.frombuffer(source.tobytes(), np.uint32).reshape(rows, columns)
    targets = [np.zeros(rows * columns * 4 + 1, np.uint8)[1:] for _ in range(3)]
    targets.append(np.zeros(rows * columns * 2, np.uint8))
    pitch = columns * 4
    table = np.concatenate(
        [
            row([rows * columns], [4], [4], itemsize=4),
            row([rows, columns], [pitch, 4], [4, rows * 4], itemsize=4, dst_buffer=1),
            row([rows, columns - 1], [-pitch, 4], [pitch, 4], src_offset=(rows - 1) * pitch, itemsize=4, dst_buffer=2),
            row([rows, columns], [pitch, 4], [columns * 2, 2], itemsize=4, op=Op.F32_TO_BF16, dst_buffer=3),
        ]
    )
    run(NativeKernels(num_threads), table, [source], targets)
    np.testing.assert_array_equal(targets[0], source)
    np.testing.assert_array_equal(np.frombuffer(targets[1].tobytes(), np.uint32).reshape(columns, rows), values.T)
    flipped = np.frombuffer(targets[2].tobytes(), np.uint32).reshape(rows, columns)
    np.testing.assert_array_equal(flipped[:, :-1], values[::-1, :-1])
    assert not flipped[:, -1].any()
    nan = (values & 0x7FFFFFFF) > 0x7F800000
    rounded = ((values.astype(np.uint64) + 0x7FFF + ((values >> 16) & 1)) >> 16).astype(np.uint16)
    found = targets[3].view(np.uint16).reshape(rows, columns)
    np.testing.assert_array_equal(found[~nan], rounded[~nan])
    np.testing.assert_array_equal(found[nan], (values[nan] >> 16) | 0x40)


# --- casts ----------------------------------------------------------------------------------------------------------


def f32_specials() -> np.ndarray:
    """All 16-bit upper halves with lower halves at, next to and between ties: every exponent, subnormal, infinity and NaN."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return (upper | lower).reshape(-1)


def f64_specials() -> np.ndarray:
    """All 16-bit upper parts with lower ones at, next to and between the ties of F32, F16 and BF16."""
    upper = np.arange(1 << 16, dtype=np.uint64)[:, None] << np.uint64(48)
    ties = [0, 1, 1 << 28, (1 << 28) + 1, (1 << 28) - 1, 3 << 28, 1 << 41, (1 << 44) + 1, 1 << 44, (1 << 48) - 1]
    return (upper | np.array(ties, np.uint64)).reshape(-1)


def cast_all(implementation, op, values):
    source_size, target_size = SIZES[op]
    target = np.zeros(len(values) * target_size, np.uint8)
    run(
        implementation,
        row([len(values)], [source_size], [target_size], op=op, itemsize=source_size),
        [values],
        [target],
    )
    return target.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[target_size])


@pytest.mark.skipif(not NATIVE, reason="not built")
@pytest.mark.parametrize("op", list(SIZES))
def test_native_casts_equal_reference_on_all_special_values(op):
    values = {2: lambda: np.arange(1 << 16, dtype=np.uint16), 4: f32_specials, 8: f64_specials}[SIZES[op][0]]()
    expected = cast_all(ReferenceKernels, op, values)
    np.testing.assert_array_equal(cast_all(NativeKernels, op, values), expected)
    # The strided path is another piece of code: one element out of every two source elements.
    source_size, target_size = SIZES[op]
    target = np.zeros(len(values) // 2 * target_size, np.uint8)
    table = row([len(values) // 2], [2 * source_size], [target_size], op=op, itemsize=source_size)
    run(NativeKernels, table, [values], [target])
    np.testing.assert_array_equal(target.view(expected.dtype), expected[::2])


def nearest_even(value: Fraction, mantissa_bits: int, smallest_exponent: int) -> Fraction:
    """Round to a binary format without an upper end, from the definition."""
    if value == 0:
        return value
    exponent = max(math.floor(math.log2(abs(value))), smallest_exponent)
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent and exponent > smallest_exponent:
        exponent -= 1
    return round(value / Fraction(2) ** (exponent - mantissa_bits)) * Fraction(2) ** (exponent - mantissa_bits)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("op", "mantissa_bits", "smallest", "largest"), [
    (Op.F32_TO_BF16, 7, -126, (2 - Fraction(1, 128)) * Fraction(2) ** 127),
    (Op.F32_TO_F16, 10, -14, Fraction(65504)),
])  # fmt: skip
def test_narrowing_rounds_to_nearest_even_by_definition(implementation, op, mantissa_bits, smallest, largest):
    edges = np.array([65504, 65519.99, 65520, 2**-24, 2**-25, 3e-8, 1e-45], np.float32).view(np.uint32)
    values = np.concatenate([f32_specials()[::997], edges])
    found = cast_all(implementation, op, values)
    for bits, result in zip(values.tolist(), found.tolist(), strict=True):
        (number,) = struct.unpack("<f", struct.pack("<I", bits))
        wide = struct.pack("<I", result << 16) if op == Op.F32_TO_BF16 else None
        narrow = struct.unpack("<f", wide)[0] if wide else struct.unpack("<e", struct.pack("<H", result))[0]
        if math.isnan(number):
            assert math.isnan(narrow)
            continue
        assert math.copysign(1, narrow) == math.copysign(1, number)
        expected = number if math.isinf(number) else nearest_even(Fraction(number), mantissa_bits, smallest)
        if abs(expected) > largest:
            assert math.isinf(narrow), (number, narrow)
        else:
            assert narrow == expected, (number, narrow)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_widening_is_exact_and_nan_keeps_sign_and_payload(implementation):
    halves = np.arange(1 << 16, dtype=np.uint16)
    nan = (halves & 0x7FFF) > 0x7C00
    wide = cast_all(implementation, Op.F16_TO_F32, halves)
    expected = np.array([struct.unpack("<e", struct.pack("<H", h))[0] for h in halves[~nan].tolist()], np.float32)
    np.testing.assert_array_equal(wide[~nan], expected.view(np.uint32))
    assert cast_all(implementation, Op.F16_TO_F32, np.array([0xFC01, 0x7D55], np.uint16)).tolist() == [
        0xFFC02000,
        0x7FEAA000,
    ]
    assert cast_all(implementation, Op.F32_TO_F16, np.array([0xFF800001, 0x7FEAA000], np.uint32)).tolist() == [
        0xFE00,
        0x7F55,
    ]
    assert cast_all(implementation, Op.F32_TO_BF16, np.array([0xFF800001, 0x7FAB0000], np.uint32)).tolist() == [
        0xFFC0,
        0x7FEB,
    ]
    brain = cast_all(implementation, Op.BF16_TO_F32, halves)
    np.testing.assert_array_equal(brain, halves.astype(np.uint32) << 16)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("bad", "words"), [
    (row([10], [2], [2], src_offset=90), ("row 1", "source ends at byte 110", "100 bytes")),
    (row([10], [-2], [2], src_offset=17), ("row 1", "source begins at byte -1")),
    (row([10], [2], [2], dst_offset=32), ("row 1", "destination ends at byte 52", "50 bytes")),
    (row([10], [2], [4], op=Op.BF16_TO_F32, dst_offset=11), ("row 1", "destination ends at byte 51", "50 bytes")),
    (row([10], [2], [2], op=9), ("row 1", "op 9")),
    (row([10], [2], [2], op=Op.F32_TO_BF16), ("row 1", "needs itemsize 4, found 2")),
    (row([10], [2], [2], itemsize=0), ("row 1", "itemsize is 0")),
    (row([-1], [2], [2]), ("row 1", "-1")),
    (row([3], [1 << 62], [2]), ("row 1", "address space")),
    (row([1], [0], [2], src_offset=(1 << 63) - 1), ("row 1", "address space")),
    (row([1], [0], [2], src_buffer=1), ("row 1", "buffer is number 1", "only 1")),
    (row([1], [0], [2], dst_buffer=-1), ("row 1", "buffer is number -1", "only 1")),
])  # fmt: skip
def test_a_row_that_leaves_its_memory_is_refused(implementation, bad, words):
    source, target = np.zeros(100, np.uint8), np.zeros(50, np.uint8)
    table = np.concatenate([row([25], [2], [2]), bad])
    with pytest.raises(UsageError) as caught:
        implementation().prepare(table, [buffer_of(source)], [buffer_of(target)])
    for word in words:
        assert word in str(caught.value)
    assert caught.value.row == 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_other_arrays_are_no_tables(implementation):
    with pytest.raises(UsageError, match="DESCRIPTOR"):
        implementation().prepare(np.zeros(3, np.int64), [], [])


# --- choosing -------------------------------------------------------------------------------------------------------


def test_choose_by_name():
    assert choose_kernels("reference").name == "reference"
    with pytest.raises(UsageError, match="'cuda' are not known; known are 'native', 'reference' and 'triton'"):
        choose_kernels("cuda")
    if NATIVE:
        assert choose_kernels().name == "native"
        assert choose_kernels("native").name == "native"
        with pytest.raises(UsageError, match="num_threads is 0"):
            NativeKernels(0)


def test_triton_kernels_without_triton_say_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "weightbridge.kernels.triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", None)
    with pytest.raises(UsageError, match=r"Triton kernels cannot be used: .*; install weightbridge-rl\[gpu\]"):
        choose_kernels("triton")


def test_fallback_warns_once(monkeypatch):
    monkeypatch.setattr(kernels, "load_native", lambda: None)
    monkeypatch.setattr(kernels, "_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [choose_kernels().name for _ in range(3)] == ["reference"] * 3
    assert [str(w.category.__name__) for w in caught] == ["RuntimeWarning"]
    assert "C compiler" in str(caught[0].message)


def test_a_broken_extension_counts_as_not_built():
    code = (
        "import sys; sys.modules['weightbridge.kernels._native'] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "from weightbridge.kernels import choose_kernels, NativeKernels\n"
        "from weightbridge.errors import UsageError\n"
        "assert choose_kernels().name == 'reference'\n"
        "try: NativeKernels()\n"
        "except UsageError as e: print('refused', e)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.startswith("refused the native kernels were not built")


@pytest.mark.skipif(not NATIVE, reason="not built")
def test_launch_lets_other_threads_run():
    """The GIL is released: a Python thread makes progress during one launch."""
    source, target = random_bytes(64 << 20), np.zeros(64 << 20, np.uint8)
    native = NativeKernels(1)
    table = row([1 << 12, 1 << 13], [2, 1 << 13], [1 << 14, 2])
    prepared = native.prepare(table, [buffer_of(source)], [buffer_of(target)])
    gate, seen = threading.Lock(), []
    gate.acquire()

    def note() -> None:
        with gate:
            seen.append("ran")

    thread = threading.Thread(target=note)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # the other thread gets the GIL only where it is given away
    try:
        gate.release()
        assert seen == []
        native.launch(prepared)
        assert seen == ["ran"]
    finally:
        sys.setswitchinterval(interval)
        thread.join(10)


@pytest.mark.parametrize("built", [True, False])
def test_copy_writes(built, monkeypatch):
    if not built:
        monkeypatch.setattr("weightbridge.kernels.writes.load_native", lambda: None)
    source, target = random_bytes(9 << 20), np.zeros(9 << 20, np.uint8)
    writes = np.array([[0, 5, 7 << 20], [8 << 20, 8 << 20, 1001], [3, 3, 0], [7 << 20, 1, 2]], np.int64)
    copy_writes(buffer_of(source), buffer_of(target), writes)
    expected = np.zeros_like(target)
    for local, remote, nbytes in writes.tolist():
        expected[remote : remote + nbytes] = source[local : local + nbytes]
    np.testing.assert_array_equal(target, expected)
