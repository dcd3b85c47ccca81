"""The Triton kernels in Triton's interpreter against the reference. Some milliseconds a piece: tiny tables only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interpreted_triton import interpreted_triton
from tests.kernel_cases import SIZES, buffer_of, copies, random_bytes, row

from weightbridge.errors import UsageError
from weightbridge.kernels import ReferenceKernels
from weightbridge.program.program import DESCRIPTOR, Op

pytest.importorskip("triton", reason="the package triton is not installed (the extra 'gpu')")
# The interpreter casts with NumPy, which warns of the very infinities and NaN that are wanted here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[ModuleType]:
    with interpreted_triton() as module:
        yield module


def same_bytes(module: ModuleType, rows: list[tuple[np.ndarray, int, int]], seed: int) -> None:
    """Run rows of (table, source bytes, target bytes) with both kernels, each row on buffers of its own."""
    table = np.concatenate([r for r, _, _ in rows]) if rows else np.zeros(0, DESCRIPTOR)
    table["src_buffer"] = table["dst_buffer"] = np.arange(len(rows))
    sources = [random_bytes(nbytes, seed + i) for i, (_, nbytes, _) in enumerate(rows)]
    results = []
    for kernels in (ReferenceKernels(), module.TritonKernels()):
        targets = [np.full(nbytes, 0xA5, np.uint8) for _, _, nbytes in rows]
        prepared = kernels.prepare(table, [buffer_of(s) for s in sources], [buffer_of(t) for t in targets])
        assert kernels.launch(prepared).done()
        results.append(targets)
    for expected, found in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(copies(), min_size=0, max_size=3), seed=st.integers(0, 99))
def test_random_tables_equal_the_reference(interpreted, rows, seed):
    """Uneven and negative strides, broadcasts, gaps, odd element sizes, all casts, rows that move nothing, no rows."""
    same_bytes(interpreted, rows, seed)


def test_a_row_of_several_pieces_and_a_neighbour(interpreted):
    long = row([3, 700], [1500, -2], [1400, 2], src_offset=1400, itemsize=2)
    turned = row([50, 43], [86, 2], [2, 100], itemsize=2)
    same_bytes(interpreted, [(long, 4500, 4200), (turned, 4300, 4300), (row([0], [1], [1]), 1, 1)], 3)


def test_as_many_axes_as_there_can_be(interpreted):
    """Six axes that do not merge, of elements that no word holds: their bytes are a seventh."""
    steps = [4 ** (5 - i) * 4 for i in range(6)]
    table = row([2] * 6, steps, [-s for s in reversed(steps)], dst_offset=sum(steps), itemsize=3)
    same_bytes(interpreted, [(table, sum(steps) + 3, sum(steps) + 3)], 5)


def specials(size: int) -> np.ndarray:
    """Every upper half with lower parts at, next to and between ties; thinned for the wide formats."""
    if size == 2:
        return np.arange(1 << 16, dtype=np.uint16)
    lower = {
        4: [0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF],
        8: [0, 1, 1 << 28, (1 << 28) + 1, (1 << 28) - 1, 3 << 28, 1 << 41, (1 << 44) + 1, (1 << 48) - 1],
    }[size]
    dtype = {4: np.uint32, 8: np.uint64}[size]
    # 31 is odd: all exponents and both signs come, with ever other mantissas; infinities and their neighbours are added.
    edges = np.array([0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0x7FF0, 0xFFF0, 0x7FF8, 0x0000, 0x8000, 0x0080, 0x3800, 0x3380])
    upper = np.concatenate([np.arange(0, 1 << 16, 31), edges]).astype(dtype) << dtype(8 * size - 16)
    return (upper[:, None] | np.array(lower, dtype)).reshape(-1)


@pytest.mark.parametrize("op", list(SIZES))
def test_casts_of_special_values_equal_the_reference(interpreted, op):
    source_size, target_size = SIZES[op]
    values = specials(source_size)
    table = row([len(values)], [source_size], [target_size], op=op, itemsize=source_size)
    results = []
    for kernels in (ReferenceKernels(), interpreted.TritonKernels()):
        target = np.zeros(len(values) * target_size, np.uint8)
        kernels.launch(kernels.prepare(table, [buffer_of(values)], [buffer_of(target)]))
        results.append(target.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[target_size]))
    np.testing.assert_array_equal(results[1], results[0])


def test_a_row_that_leaves_its_memory_is_refused(interpreted):
    memory = np.zeros(10, np.uint8)
    with pytest.raises(UsageError, match=r"descriptor row 0: source ends at byte 12, but buffer 0 has 10 bytes"):
        interpreted.TritonKernels().prepare(row([6], [2], [1], op=Op.COPY), [buffer_of(memory)], [buffer_of(memory)])


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weightbridge.kernels.triton_kernels import BLOCK_NUMEL, INTERPRETED
from weightbridge.kernels.triton_moves import run_piece
assert not INTERPRETED
signature = {"rows": "*i64", "pieces": "*i64", "block_numel": "constexpr"}
source = ASTSource(fn=run_piece, signature=signature, constexprs={"block_numel": BLOCK_NUMEL})
for capability in (80, 90):
    print(capability, len(triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]))
"""


def test_the_device_code_compiles_for_nvidia_gpus():
    """Down to machine code, for which no GPU is needed: what the interpreter accepts the compiler may not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["80", "90"]
