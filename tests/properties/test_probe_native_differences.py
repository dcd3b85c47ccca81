"""The native kernel of the probe against its specification in NumPy: equal observations of any field whatever."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from weightbridge.checkpoint import CheckpointSpec, dtype_named
from weightbridge.errors import ProbeError, UsageError
from weightbridge.kernels import differences as differences_module
from weightbridge.kernels.differences import NativeDifferencer, native_differences_available
from weightbridge.probe import observe as observe_module
from weightbridge.probe.codes import CodeTable, code_table
from weightbridge.probe.fields import Field
from weightbridge.probe.observe import Observation, observe, observe_native, observe_reference, sentinel_bits
from weightbridge.probe.values import torch_dtype

pytestmark = pytest.mark.skipif(not native_differences_available(), reason="the native kernels were not built")

NAMES = ("BF16", "F32", "F16", "F64", "F8_E4M3", "F8_E5M2", "I8", "U8", "I16", "I32", "I64")
COLS = (1, 2, 3, 63, 64, 65, 200, 1023, 1024, 1025, 1026, 2049)


def table_of(name: str, *live: str, numel: int = 5000) -> CodeTable:
    dtype = dtype_named(name)
    table = code_table(CheckpointSpec.from_iterable([("w", (numel,), dtype)]), [name, *live]).of(dtype)
    assert isinstance(table, CodeTable)
    return table


class Memory:
    """A field in memory with gaps, written by what a loader may do and by what none does."""

    def __init__(self, rng: random.Random, name: str, *, fill: float | None = None) -> None:
        self.dtype = dtype_named(name)
        wide = name in ("F32", "F64", "F16")
        self.table = table_of(name, *rng.choice([(), ("BF16",)] if wide else [()]), numel=rng.choice([100, 200_000]))
        self.pass_ = rng.randrange(self.table.num_passes)
        self.p = self.table.moduli[self.pass_]
        rows, cols = rng.randint(1, 30), rng.choice([*COLS, rng.randint(1, 100)])
        col_stride = rng.choice([1, 1, 2, 3])
        row_stride = cols * col_stride + rng.choice([0, 0, 1, 7])
        self.field = Field(rng.randint(0, 3), rows, cols, row_stride, col_stride)
        item = self.dtype.itemsize
        self.bits = np.zeros(self.field.start + rows * row_stride + 8, dtype=self.dtype.bits)
        self.view = np.lib.stride_tricks.as_strided(
            self.bits[self.field.start :], (rows, cols), (row_stride * item, col_stride * item)
        )
        self._write(rng, rng.random() if fill is None else fill)

    def codes(self, residues: np.ndarray) -> np.ndarray:
        first, shift = self.table.first_bits(self.dtype, self.pass_), self.table.bit_step(self.dtype)
        return ((residues.astype(np.uint64) + np.uint64(first)) << np.uint64(shift)).astype(self.dtype.bits)

    def _write(self, rng: random.Random, fill: float) -> None:
        rows, cols = self.view.shape
        noise = np.random.default_rng(rng.randrange(1 << 30))
        width = 8 * self.dtype.itemsize
        if fill < 0.15:
            self.view[:] = noise.integers(0, 256, (rows, cols * self.dtype.itemsize), dtype=np.uint8).view(
                self.dtype.bits
            )
        elif fill < 0.3:
            self.view[:] = self.codes(noise.integers(0, self.p, (rows, cols)))
        else:
            self.view[:] = self.dtype.bits.type(sentinel_bits(self.dtype, self.pass_))
        first = int(self.codes(np.zeros(1, np.int64))[0])
        for _ in range(rng.randint(0, 8)):
            r, c = rng.randrange(rows), rng.randrange(cols)
            h, w = rng.randint(1, rows - r), rng.randint(1, cols - c)
            if rng.random() < 0.6:
                block = np.arange(h)[:, None] * rng.choice([w, 1, 3 * w, 5000, self.p - 1, 0])
                block = block + np.arange(w) * rng.choice([1, 1, 2, h, self.p - 1, 0]) + rng.randrange(10**6)
                self.view[r : r + h, c : c + w] = self.codes(block % self.p)
            else:
                bits = rng.choice([0, 1, first, (1 << width) - 1, (1 << width - 1) - 1, rng.getrandbits(width)])
                self.view[r : r + h, c : c + w] = self.dtype.bits.type(bits)

    @property
    def tensor(self) -> torch.Tensor:
        item = self.dtype.itemsize
        return torch.from_numpy(self.bits.view(np.uint8 if item == 1 else f"i{item}")).view(torch_dtype(self.dtype))

    def observed(self, how: str, **options: bool) -> Observation:
        arguments = (self.tensor, "w", self.dtype, self.field, self.table, self.pass_)
        return observe_reference(*arguments) if how == "reference" else observe_native(*arguments, **options)


def assert_same(found: Observation, expected: Observation, what: object) -> None:
    for mine, theirs in zip((*found.entries, *found.runs), (*expected.entries, *expected.runs), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs, err_msg=repr(what))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wide", [True, False])
def test_native_observations_equal_the_reference(name: str, wide: bool) -> None:
    rng = random.Random(f"{name} {wide}")
    for _ in range(60):
        memory = Memory(rng, name)
        assert_same(memory.observed("native", wide=wide), memory.observed("reference"), memory.field)


@pytest.mark.parametrize("tile_bytes", [1, 500, 32 << 20])
@pytest.mark.parametrize("room", [0, 5])
def test_neither_tiles_nor_room_for_finds_show(room: int, tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(differences_module, "_MIN_ROOM", room)
    monkeypatch.setattr(observe_module, "_TILE_BYTES", tile_bytes)
    rng = random.Random(room + tile_bytes)
    for _ in range(80):
        memory = Memory(rng, rng.choice(NAMES))
        assert_same(memory.observed("native"), memory.observed("reference"), memory.field)


def test_long_pads_and_rows_that_begin_and_stop_to_differ() -> None:
    """Several blocks of columns a row; groups of rows that are as predicted, then not, then constant, then untouched."""
    dtype, rng = dtype_named("BF16"), np.random.default_rng(1)
    table = table_of("BF16", numel=10**8)
    p, first = table.moduli[1], table.first_bits(dtype, 1)
    field = np.full((60, 3000), sentinel_bits(dtype, 1), dtype=np.uint16)
    rows, cols = np.arange(20)[:, None], np.arange(3000)
    field[:20] = first + (rows * 3000 + cols + 77) % p
    field[20:30] = first + (rng.integers(0, p, (10, 1)) + cols) % p
    field[30:40] = first + (rows[:10] * 4096 + cols) % p
    field[35, 1020:1030] = 0x3F80
    field[40:50, 500:] = 0
    field[45, 1024:2048] = first + np.arange(1024)
    tensor = torch.from_numpy(field.view(np.int16)).view(torch.bfloat16)
    arguments = (tensor, "w", dtype, Field(0, 60, 3000, 3000, 1), table, 1)
    found = observe_native(*arguments)
    assert_same(found, observe_reference(*arguments), "rows")
    assert found.runs.length.max() == 10 * 3000  # the last rows, one run
    assert found.runs.untouched.any()
    assert len(found.entries.row) < 150


@pytest.mark.parametrize("cols", [1025, 1026, 1500, 2049])
def test_a_copy_that_ends_where_a_block_of_columns_does(cols: int) -> None:
    """The columns beyond are as predicted, yet their differences see the last two before them."""
    dtype, table = dtype_named("BF16"), table_of("BF16")
    first = table.first_bits(dtype, 0)
    field = (first + 1 + np.arange(8)[:, None] * 7 + np.arange(cols)).astype(np.uint16)
    field[3:, :1024] += 40
    field[5, 1023] += 2
    tensor = torch.from_numpy(field.view(np.int16)).view(torch.bfloat16)
    arguments = (tensor, "w", dtype, Field(0, 8, cols, cols, 1), table, 0)
    found = observe_native(*arguments)
    assert_same(found, observe_reference(*arguments), "block")
    assert {(3, 1024), (3, 1025)} & set(zip(found.entries.row, found.entries.col, strict=True)) == {
        (3, c) for c in (1024, 1025) if c < cols
    }


def test_a_wrap_around_of_unsigned_bits_is_no_code() -> None:
    """Bits below the first code, which wrap to large numbers, in every item size."""
    for name in NAMES:
        dtype = dtype_named(name)
        table = table_of(name)
        low = np.arange(min(table.first_bits(dtype, 1), 300)).astype(dtype.bits)
        tensor = torch.from_numpy(low.view(np.uint8 if dtype.itemsize == 1 else f"i{dtype.itemsize}"))
        field = Field(0, 1, len(low), len(low), 1)
        found = observe_native(tensor.view(torch_dtype(dtype)), "w", dtype, field, table, 1)
        assert len(found.entries.row) == 0
        np.testing.assert_array_equal(found.runs.bits, low)


def test_rows_may_be_pushed_in_any_portions() -> None:
    memory = Memory(random.Random(4), "BF16", fill=0.2)
    options = {
        "cols": memory.field.cols, "modulus": memory.p, "first_bits": memory.table.first_bits(memory.dtype, memory.pass_),
        "bit_step": 0, "numel": memory.field.numel,
    }  # fmt: skip
    whole = list(NativeDifferencer(**options).push(memory.view))
    portions = NativeDifferencer(**options)
    parts = [f for row in range(len(memory.view)) for f in portions.push(memory.view[row : row + 1])]
    for column in ("position", "residue", "run_start", "run_bits"):
        expected = np.concatenate([getattr(f, column) for f in whole])
        found = np.concatenate([getattr(f, column) for f in parts])
        if column in ("position", "residue"):
            np.testing.assert_array_equal(found, expected)
        else:
            assert set(expected.tolist()) <= set(found.tolist())  # runs are cut where portions end


@pytest.mark.parametrize("limit", ["_MAX_ENTRIES", "_MAX_RUNS"])
def test_a_field_too_irregular_is_refused_by_both(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe_module, limit, 3)
    dtype, table = dtype_named("BF16"), table_of("BF16")
    field, bits = Field(0, 4, 50, 50, 1), np.random.default_rng(0).integers(0, 1 << 16, 200).astype(np.uint16)
    if limit == "_MAX_ENTRIES":
        bits = bits % np.uint16(table.moduli[0]) + np.uint16(table.first_bits(dtype, 0))
    tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    for how in (observe_native, observe_reference):
        with pytest.raises(ProbeError, match="live tensor 'odd'") as error:
            how(tensor, "odd", dtype, field, table, 0)
        assert error.value.tensor == "odd"


def test_without_the_extension_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(random.Random(9), "F32")
    expected = memory.observed("native")
    monkeypatch.setattr(differences_module, "load_native", lambda: None)
    arguments = (memory.tensor, "w", memory.dtype, memory.field, memory.table, memory.pass_)
    assert not native_differences_available()
    assert_same(observe(*arguments), expected, memory.field)
    with pytest.raises(UsageError, match="not built"):
        observe_native(*arguments)


def test_wrong_use_is_refused() -> None:
    def make(modulus: int = 97) -> NativeDifferencer:
        return NativeDifferencer(cols=5, modulus=modulus, first_bits=1, bit_step=0, numel=10)

    for modulus in (0, 1, 1 << 14, 32503):
        with pytest.raises(UsageError, match=f"the modulus is {modulus}"):
            make(modulus)
    for rows in (np.zeros((2, 4), np.uint16), np.zeros(5, np.uint16)):
        with pytest.raises(UsageError, match="expected"):
            list(make().push(rows))
