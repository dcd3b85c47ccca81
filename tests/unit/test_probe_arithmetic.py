"""The probe's arithmetic without torch: codes, second differences, reconstruction, lattices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from math import gcd, prod

import numpy as np
import pytest

from weightbridge.checkpoint import CheckpointSpec, dtype_named
from weightbridge.errors import ProbeError
from weightbridge.layout import LiveTensor
from weightbridge.probe.bit_words import BitWords, Numbered
from weightbridge.probe.bits import BitTable
from weightbridge.probe.codes import CodeTable, code_table, copyable
from weightbridge.probe.constants import Conflict, RunCollector, Settled, settle
from weightbridge.probe.difference import Differencer, SparseEntries
from weightbridge.probe.fields import Field, fields_of, memory_order
from weightbridge.probe.lattice import Lattice, collapse, copies_of_tensor, dims_of, place_rectangles, split_at_carries
from weightbridge.probe.reconstruct import Rectangles, chain_links, rectangles


def spec_of(*dtypes: str, numel: int = 1000) -> CheckpointSpec:
    return CheckpointSpec.from_iterable((f"w{i}", (numel,), dtype_named(d)) for i, d in enumerate(dtypes))


def differences(field: np.ndarray, p: int, tile_rows: int = 3) -> SparseEntries:
    rows, cols = field.shape
    differencer = Differencer(cols, p, tile_rows)
    for row in range(0, rows, tile_rows):
        part = field[row : row + tile_rows]
        differencer.rows_buffer(len(part))[:] = part % p
        differencer.push(len(part))
    return differencer.finish()


def naive_differences(field: np.ndarray, p: int) -> np.ndarray:
    """Straight from the definition, in wide integers."""
    padded = np.zeros((field.shape[0] + 2, field.shape[1] + 2), dtype=np.int64)
    padded[2:, 2:] = field % p
    rows = padded[2:] - 2 * padded[1:-1] + padded[:-2]
    return (rows[:, 2:] - 2 * rows[:, 1:-1] + rows[:, :-2]) % p


# --- codes -------------------------------------------------------------------------------------------------------------


def table_of(spec: CheckpointSpec, live: Iterable[str] = ()) -> CodeTable:
    """The table of the first tensor's dtype."""
    table = code_table(spec, live).of(spec.tensors[0].dtype)
    assert isinstance(table, CodeTable)
    return table


def test_moduli_for_bf16_and_fp32_follow_from_the_dtypes() -> None:
    table = table_of(spec_of("BF16"), {"BF16", "F32"})
    assert (table.num_codes, table.mantissa_bits, table.min_exponent) == (32512, 7, -126)
    assert table.moduli == (16253, 16249)
    assert table.product > 1001


@pytest.mark.parametrize(
    ("in_checkpoint", "live", "num_codes"),
    [
        (["BF16"], [], 32512),
        (["F32"], ["F32"], 32512),
        (["F64"], ["F32"], 32512),
        (["F16"], ["F16"], 30720),
        (["BF16"], ["F16"], 3840),
        (["F64", "BF16"], ["F16"], 3840),
        (["BF16", "F8_E4M3"], ["F8_E4M3"], 32512),  # one-byte dtypes are numbered on their own
        (["F8_E4M3", "BF16"], ["BF16"], 238),
        (["F8_E5M2"], [], 246),
        (["F8_E5M2", "F8_E4M3"], [], 238),
        (["F8_E4M3FNUZ", "F8_E8M0"], ["U8"], 252),
        (["I64"], ["I64", "F16"], 32512),
        (["I16", "U32"], [], 32512),
        (["I8", "BF16"], [], 252),
        (["U8"], [], 252),
    ],
)
def test_codes_are_those_that_all_dtypes_of_a_family_have(
    in_checkpoint: list[str], live: list[str], num_codes: int
) -> None:
    spec = spec_of(*in_checkpoint)
    table = table_of(spec, live)
    assert table.num_codes == num_codes
    assert len(table.moduli) >= 2
    assert table.product > table.numel + 1
    assert max(table.moduli) <= num_codes // 2
    assert all(gcd(a, b) == 1 for i, a in enumerate(table.moduli) for b in table.moduli[:i])


def test_passes_grow_with_the_checkpoint_and_narrow_dtypes_ask_for_few_more() -> None:
    def passes(*tensors: tuple[str, int]) -> int:
        spec = CheckpointSpec.from_iterable((f"w{i}", (n,), dtype_named(d)) for i, (d, n) in enumerate(tensors))
        return code_table(spec, ["BF16"]).num_passes

    assert passes(("BF16", 10**8)) == 2
    assert passes(("BF16", 1 << 40)) == 3
    assert passes(("BF16", 10**8), ("F8_E4M3", 10_000)) == 2
    assert passes(("BF16", 10**8), ("U8", 10**6), ("I64", 7)) == 3
    assert passes(("F8_E4M3", 10**8)) == 4
    assert passes(("F8_E4M3", 671 * 10**9), ("BF16", 10**9), ("F32", 10**8)) == 6
    assert passes(("BF16", 10**8), ("BOOL", 1)) == 5
    assert passes(("BF16", 10**8), ("BOOL", 1000)) == 21


def test_elements_are_numbered_within_their_family() -> None:
    spec = CheckpointSpec.from_iterable(
        (n, (k,), dtype_named(d))
        for n, k, d in [("a", 5, "BF16"), ("b", 7, "I8"), ("c", 3, "F32"), ("d", 2, "F8_E5M2"), ("e", 4, "I32")]
    )
    tables = code_table(spec, [])
    offsets = [t.offsets.tolist() for t in (tables.of(dtype_named(d)) for d in ("F16", "U8", "I64", "BOOL"))]
    assert offsets == [[0, 5, 5, 8, 8, 8], [0, 0, 7, 7, 9, 9], [0, 0, 0, 0, 0, 4], [0, 0, 7, 7, 9, 9]]


def test_more_elements_than_codes_can_number_are_refused() -> None:
    spec = CheckpointSpec.from_iterable([("w", (1 << 31, 1 << 31), dtype_named("BF16"))])
    with pytest.raises(ProbeError, match="too few values in common"):
        code_table(spec, [])
    with pytest.raises(ProbeError, match=r"'mask' with 66000 the most.*leave them out of the spec"):
        code_table(
            CheckpointSpec.from_iterable([("b", (3,), dtype_named("BOOL")), ("mask", (660, 100), dtype_named("BOOL"))]),
            [],
        )
    named = CheckpointSpec.from_iterable(
        [("w0", (9,), dtype_named("BF16")), ("b", (1000, 1000), dtype_named("BOOL"))], constants={"b": 1.0}
    )
    assert code_table(named, []).num_passes == 2


ONE_BYTE = ["F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "I8", "U8"]
WIDE = ["BF16", "F32", "F16", "F64", "I16", "U16", "I32", "U32", "I64", "U64"]


@pytest.mark.parametrize("name", [*WIDE, *ONE_BYTE])
def test_decode_undoes_encode_and_values_are_finite(name: str) -> None:
    dtype = dtype_named(name)
    table = table_of(spec_of(name), [name])
    for pass_, p in enumerate(table.moduli):
        raw = np.empty(3 * p + 11, dtype=dtype.bits)
        table.encode(dtype, pass_, 5, raw)
        out = np.full(len(raw), -1, dtype=np.int16)
        assert table.decode(dtype, pass_, raw, out) is None
        np.testing.assert_array_equal(out, (np.arange(len(raw)) + 6) % p)
        again = np.empty_like(raw)
        table.encode(dtype, pass_ + table.num_passes, 5, again)  # what other dtypes' passes carry
        np.testing.assert_array_equal(again, raw)
        if dtype.is_float and dtype.itemsize > 1:
            exponents = (raw >> dtype.bits.type(dtype.mantissa_bits)).astype(np.uint64)
            assert exponents.min() >= 1
            assert exponents.max() <= dtype.max_exponent - dtype.min_exponent + 1
        elif dtype.itemsize == 1:
            # NaN and infinity, by name: 0x7F, 0xFF; 0x7C to 0x7F with either sign; 0x80; 0x80; 0xFF.
            none = {"F8_E4M3": {0x7F, 0xFF}, "F8_E5M2": {*range(0x7C, 0x80), *range(0xFC, 0x100)}, "F8_E8M0": {0xFF}}
            assert not set(raw.tolist()) & none.get(name, set())
            assert not set(raw.tolist()) & {0, 0x80}
            assert not set(raw.tolist()) & {0x7F, 0xFF}, "what live tensors are filled with before a load"


def test_bools_carry_the_bits_of_their_number_and_their_inverse() -> None:
    spec = CheckpointSpec.from_iterable([("a", (3, 2), dtype_named("BOOL")), ("b", (5,), dtype_named("BOOL"))])
    tables = code_table(spec, [])
    table = tables.of(dtype_named("BOOL"))
    assert isinstance(table, BitTable)
    assert (table.num_bits, tables.num_passes) == (4, 9)
    shown = np.empty((9, 5), np.uint8)
    for pass_ in range(9):
        table.encode(dtype_named("BOOL"), pass_, 6, shown[pass_])
    assert shown[0].tolist() == [1] * 5
    assert (shown[1:5].T @ [1, 2, 4, 8]).tolist() == [6, 7, 8, 9, 10]
    np.testing.assert_array_equal(shown[5:], 1 - shown[1:5])


def test_words_of_bools_tell_copies_constants_untouched_and_computed_elements() -> None:
    spec = CheckpointSpec.from_iterable([("a", (30,), dtype_named("BOOL"))])
    table = code_table(spec, []).of(dtype_named("BOOL"))
    assert isinstance(table, BitTable)
    given = np.empty((table.num_passes, 30), np.uint8)
    for pass_ in range(table.num_passes):
        table.encode(dtype_named("BOOL"), pass_, 0, given[pass_])

    def numbered(make: Callable[[int, np.ndarray], Sequence[int]]) -> Numbered:
        rows = [np.array(make(k, given[k])) for k in range(table.num_passes)]
        words = BitWords(table, 2, len(rows[0]) // 2)
        for k, row in enumerate(rows):
            words.add(k, row.reshape(2, -1).astype(np.uint8))
        return words.numbered()

    found = numbered(lambda k, g: [g[29], g[0], 1, 1, k % 2, 0, 0, g[5]])
    assert found.computed is None
    runs = zip(found.runs.start, found.runs.length, found.runs.bits, found.runs.untouched, strict=True)
    assert [tuple(int(x) for x in run) for run in runs] == [(2, 2, 1, 0), (4, 1, 2, 1), (5, 2, 0, 0)]
    rects = rectangles(found.entries, table.moduli, 2, 4)
    assert rebuilt(rects, 2, 4, table.product).tolist() == [[30, 1, 0, 0], [0, 0, 0, 6]]
    computed: list[Callable[[np.ndarray], int]] = [
        lambda g: 1 - g[3], lambda g: g[3] & g[9], lambda g: g[3] | g[9], lambda g: g[3] ^ g[9],
        lambda g: g.max(), lambda g: g.min(), lambda g: g[3] | (1 - g[9]),
    ]  # fmt: skip
    for function in computed[:4]:
        assert numbered(lambda k, g, f=function: [g[0], g[1], f(g), g[2]]).computed == 2
    wrong = [numbered(lambda k, g, f=function: [f(g), g[1]]).computed for function in computed]
    assert wrong == [0] * 7


@pytest.mark.parametrize(("wide", "narrow"), [("F32", "BF16"), ("F32", "F16"), ("F64", "F32"), ("F64", "F16")])
def test_a_cast_keeps_codes(wide: str, narrow: str) -> None:
    table = table_of(spec_of(wide), [narrow])
    kinds = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
    for pass_ in range(2):
        a, b = np.empty(500, dtype=dtype_named(wide).bits), np.empty(500, dtype=dtype_named(narrow).bits)
        table.encode(dtype_named(wide), pass_, 100, a)
        table.encode(dtype_named(narrow), pass_, 100, b)
        if narrow == "BF16":
            np.testing.assert_array_equal(a, b.astype(np.uint32) << 16)
        else:
            np.testing.assert_array_equal(a.view(kinds[wide]), b.view(kinds[narrow]).astype(kinds[wide]))


def test_only_wide_floats_are_cast_on_the_way() -> None:
    names = [*WIDE, *ONE_BYTE, "BOOL"]
    floats = {"F64", "F32", "BF16", "F16"}
    for a in names:
        for b in names:
            assert copyable(dtype_named(a), dtype_named(b)) == (a == b or {a, b} <= floats)


def test_what_is_no_code_is_told() -> None:
    dtype = dtype_named("F32")
    table = table_of(spec_of("BF16"), ["F32"])
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -1.0, 1e-40, 1.0000001, 2.0**-126], np.float32)
    out = np.empty(len(values), np.int16)
    invalid = table.decode(dtype, 0, values.view(np.uint32), out)
    assert invalid is not None
    assert invalid.tolist() == [True] * 8 + [False]
    assert out.tolist() == [0] * 9


@pytest.mark.parametrize("name", ["BF16", "F16", "I32", *ONE_BYTE])
def test_no_bits_are_a_code_in_every_pass(name: str) -> None:
    """So a constant cannot pass for a copy, whatever it is."""
    dtype = dtype_named(name)
    table = table_of(spec_of(name), [name])
    raw = np.arange(1 << 8 * min(dtype.itemsize, 2), dtype=np.uint64).astype(dtype.bits)
    out = np.empty(len(raw), np.int16)
    invalid = [table.decode(dtype, k, raw, out) for k in range(table.num_passes)]
    assert all(mask is not None for mask in invalid)
    assert np.logical_or.reduce([m for m in invalid if m is not None]).all()


# --- differences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 5, 47, 16253])
@pytest.mark.parametrize("tile_rows", [1, 2, 7, 40])
def test_differences_equal_their_definition(p: int, tile_rows: int) -> None:
    rng = np.random.default_rng(p + tile_rows)
    fields = [rng.integers(0, p, (23, 11)), np.full((23, 11), p - 1), np.arange(23 * 11).reshape(23, 11) * 7 % p]
    fields += [rng.integers(0, p, (1, 9)), rng.integers(0, p, (9, 1)), rng.integers(0, 2, (23, 11)) * (p - 1)]
    for field in fields:
        entries = differences(field, p, tile_rows)
        dense = np.zeros(field.shape, dtype=np.int64)
        dense[entries.row, entries.col] = entries.residue
        np.testing.assert_array_equal(dense, naive_differences(field, p))
        assert (entries.residue > 0).all()
        assert (np.diff(entries.row * field.shape[1] + entries.col) > 0).all()


def block_field(
    rows: int, cols: int, r: int, c: int, h: int, w: int, start: int, row_step: int, col_step: int
) -> np.ndarray:
    field = np.zeros((rows, cols), dtype=np.int64)
    field[r : r + h, c : c + w] = start + 1 + np.arange(h)[:, None] * row_step + np.arange(w) * col_step
    return field


def test_sixteen_is_the_most_entries_of_one_copied_block_and_four_when_it_fills_the_tensor() -> None:
    rng = random.Random(1)
    p, most = 16253, 0
    for _ in range(400):
        rows, cols = rng.randint(1, 40), rng.randint(1, 40)
        r, c = rng.randrange(rows), rng.randrange(cols)
        h, w = rng.randint(1, rows - r), rng.randint(1, cols - c)
        width = rng.randint(w, 5 * w)
        steps = (width, 1) if rng.random() < 0.5 else (1, rng.randint(h, 5 * h))  # straight or transposed
        field = block_field(rows, cols, r, c, h, w, rng.randrange(10**8), *steps)
        num = len(differences(field, p).row)
        most = max(most, num)
        assert num <= 16
        if (r, c, h, w) == (0, 0, rows, cols):
            assert num <= 4
    assert most == 16
    full = block_field(37, 29, 0, 0, 37, 29, 12345, 29, 1)
    assert len(differences(full, p).row) == 4
    assert len(differences(full.T.copy(), p).row) == 4


def test_a_wrap_around_inside_a_block_and_strides_beyond_half_the_modulus_stay_sparse() -> None:
    p = 16253
    for start, row_step in ((p - 20, 30), (5, p // 2 + 100), (5, p - 1), (10**9, 10**6 + 7)):
        assert 12 <= len(differences(block_field(50, 30, 4, 6, 40, 20, start, row_step, 1), p).row) <= 16


# --- reconstruction ----------------------------------------------------------------------------------------------------


def rebuilt(rects: Rectangles, rows: int, cols: int, product: int) -> np.ndarray:
    field = np.full((rows, cols), -1, dtype=object)
    for r, h, c, w, value, row_slope, col_slope in zip(*(column.tolist() for column in rects), strict=True):
        assert (field[r : r + h, c : c + w] == -1).all(), "rectangles overlap"
        for i in range(h):
            for j in range(w):
                field[r + i, c + j] = (value + i * row_slope + j * col_slope) % product
    field[field == -1] = 0
    return field.astype(np.int64)


def random_field(rng: random.Random, rows: int, cols: int, numel: int) -> np.ndarray:
    """Blocks of copies over each other, with noise now and then."""
    field = np.zeros((rows, cols), dtype=np.int64)
    for _ in range(rng.randint(0, 6)):
        r, c = rng.randrange(rows), rng.randrange(cols)
        h, w = rng.randint(1, rows - r), rng.randint(1, cols - c)
        steps = rng.choice([(w, 1), (1, h), (2 * w + 3, 2), (0, 1), (-w, -1), (0, 0), (1000, -3)])
        block = rng.randrange(numel) + np.arange(h)[:, None] * steps[0] + np.arange(w) * steps[1]
        field[r : r + h, c : c + w] = np.clip(block, 0, numel - 1) + 1
    for _ in range(rng.choice([0, 0, 1, 3])):
        field[rng.randrange(rows), rng.randrange(cols)] = rng.randrange(numel + 1)
    return field


@pytest.mark.parametrize("chunk", [1 << 18, 8])
def test_reconstruction_is_exact_for_any_field(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightbridge.probe.reconstruct._CHUNK_NUMEL", chunk)
    rng = random.Random(chunk)
    moduli, numel = (101, 97), 9000
    for _ in range(150):
        rows, cols = rng.randint(1, 14), rng.randint(1, 14)
        field = random_field(rng, rows, cols, numel)
        if rng.random() < 0.1:
            field = np.array([[rng.randrange(numel + 1) for _ in range(cols)] for _ in range(rows)])
        rects = rectangles([differences(field, p) for p in moduli], moduli, rows, cols)
        np.testing.assert_array_equal(rebuilt(rects, rows, cols, prod(moduli)), field)


def test_pieces_link_on_one_slope_only() -> None:
    def links(
        lengths: list[int], slopes: list[int], between: list[int], follows: list[bool] | None = None
    ) -> list[bool]:
        given = [np.array(x) for x in (follows or [True] * len(between), lengths, slopes, between)]
        return chain_links(*given).tolist()

    assert links([5, 1, 1, 4], [2, 0, 0, 2], [2, 2, 2]) == [True, True, True]
    assert links([5, 4], [2, 2], [3]) == [False]
    assert links([5, 4], [2, 2], [2], [False]) == [False]
    assert links([1, 1], [0, 0], [7]) == [False]  # two points are always in line
    assert links([1, 1, 1, 1], [0, 0, 0, 0], [7, 7, 3]) == [True, True, False]
    assert links([5, 1, 4], [2, 0, 3], [2, 3]) == [False, True]  # a single piece cannot bend a chain


def test_one_block_is_one_rectangle() -> None:
    moduli = (16253, 16249)
    field = block_field(60, 50, 7, 9, 31, 17, 123456, 4099, 1)
    rects = rectangles([differences(field, p) for p in moduli], moduli, 60, 50)
    real = rects.pick(rects.value != 0)
    assert [tuple(int(x[0]) for x in real)] == [(7, 31, 9, 17, 123457, 4099, 1)]
    assert len(real.row) == 1


def test_a_bilinear_field_is_taken_apart() -> None:
    moduli = (101, 97)
    field = np.arange(6)[:, None] * np.arange(7) + 1
    rects = rectangles([differences(field, p) for p in moduli], moduli, 6, 7)
    np.testing.assert_array_equal(rebuilt(rects, 6, 7, prod(moduli)), field)


def test_placing_reads_slopes_both_ways_and_counts_what_is_no_element() -> None:
    numel, product = 400, 101 * 97
    field = Field(10, 5, 8, 9, 1)
    backwards = np.arange(40, 0, -1).reshape(5, 8)
    rects = rectangles([differences(backwards, p) for p in (101, 97)], (101, 97), 5, 8)
    placed, stray = place_rectangles(rects, field, numel, product)
    assert (placed.numel, stray.tolist()) == (40, [])
    assert placed.source.tolist() == [39]
    assert (placed.outer[1].tolist(), placed.inner[1].tolist()) == ([-8], [-1])
    assert placed.live.tolist() == [10]
    wild = backwards.copy()
    wild[2, 3] = 5000  # no element of a checkpoint of 400
    rects = rectangles([differences(wild, p) for p in (101, 97)], (101, 97), 5, 8)
    placed, stray = place_rectangles(rects, field, numel, product)
    assert (placed.numel, stray.tolist()) == (39, [2 * 8 + 3])


# --- lattices ----------------------------------------------------------------------------------------------------------


def elements(
    lattices: Sequence[Lattice] | Sequence[tuple[int, int, tuple[tuple[int, int, int], ...]]],
) -> list[tuple[int, int]]:
    """All (source, live) pairs, sorted."""
    found = []
    for lattice in lattices:
        start, live, axes = lattice[-3:]
        pairs = [(start, live)]
        for n, s, step in axes:
            pairs = [(a + i * s, b + i * step) for a, b in pairs for i in range(n)]
        found += pairs
    return sorted(found)


def walks_one_dim_each(start: int, axes: tuple[tuple[int, int, int], ...], shape: tuple[int, ...]) -> bool:
    """Every axis moves one coordinate, and the sum of all stays within every dim."""
    origin = np.array(np.unravel_index(start, shape))
    low, high = origin.copy(), origin.copy()
    for n, s, _ in axes:
        moved = np.array(np.unravel_index(start + s, shape)) - origin
        if np.count_nonzero(moved) > 1:
            return False
        low, high = low + np.minimum(moved * (n - 1), 0), high + np.maximum(moved * (n - 1), 0)
    return bool((low >= 0).all() and (high < np.array(shape)).all())


@pytest.mark.parametrize("shape", [(60,), (7, 9), (5, 1, 12), (3, 4, 5), (2, 3, 4, 5), (1, 64)])
def test_cutting_at_carries_keeps_every_element_and_every_axis_in_its_dim(shape: tuple[int, ...]) -> None:
    rng = random.Random(str(shape))
    numel = prod(shape)
    for _ in range(60):
        axes = []
        start = rng.randrange(numel)
        low = high = start
        for live_step in (1, 100, 10000)[: rng.randint(1, 3)]:
            s = rng.choice([1, 2, 3, shape[-1], -1, -2, 0, 2 * shape[-1], 7])
            n = rng.randint(1, 9)
            while n > 1 and not (low + min((n - 1) * s, 0) >= 0 and high + max((n - 1) * s, 0) < numel):
                n -= 1
            low, high = low + min((n - 1) * s, 0), high + max((n - 1) * s, 0)
            axes.append((n, s, live_step))
        parts = split_at_carries(start, tuple(axes), dims_of(shape))
        assert elements(list(parts)) == elements([(start, 0, tuple(axes))])
        assert all(walks_one_dim_each(s, a, shape) for s, _, a in parts)
        assert all(step >= 0 for _, _, a in parts for _, _, step in a)


def test_a_flat_run_that_begins_mid_row_is_head_whole_rows_and_tail() -> None:
    parts = sorted(split_at_carries(5, ((40, 1, 1),), dims_of((10, 7))))
    assert parts == [(5, 0, ((2, 1, 1),)), (7, 2, ((5, 7, 7), (7, 1, 1))), (42, 37, ((3, 1, 1),))]


def test_collapse_keeps_elements_and_finds_nested_repeats() -> None:
    dims = {0: dims_of((64, 6))}
    # A rotary permutation of 4 heads of 16 rows: live row (h, i, t) holds row (h, t, i).
    rows = [
        Lattice(0, (h * 16 + t * 8 + i) * 6, (h * 16 + i * 2 + t) * 6, ((6, 1, 1),))
        for h in range(4)
        for i in range(8)
        for t in range(2)
    ]
    joined = collapse(rows, dims)
    assert elements(joined) == elements(rows)
    assert [(x.start, x.live, x.axes) for x in joined] == [(0, 0, ((4, 96, 96), (8, 6, 12), (2, 48, 6), (6, 1, 1)))]


def test_collapse_of_random_lattices_loses_nothing() -> None:
    rng = random.Random(3)
    for _ in range(60):
        rows = rng.sample(range(40), rng.randint(1, 40))
        given = [Lattice(rng.randrange(2), row * 5, 5 * i, ((5, 1, 1),)) for i, row in enumerate(rows)]
        joined = collapse(given, {0: dims_of((40, 5)), 1: dims_of((40, 5))})
        assert elements(joined) == elements(given)
        assert len(joined) <= len(given)
        assert all(walks_one_dim_each(x.start, x.axes, (40, 5)) for x in joined)


def test_collapse_never_walks_a_diagonal() -> None:
    dims = {0: dims_of((20, 20))}
    diagonal = [Lattice(0, i * 21, i, ()) for i in range(9)]
    assert collapse(diagonal, dims) == diagonal
    row = [Lattice(0, 200 + i, 9 + i, ()) for i in range(9)]
    joined = collapse(diagonal + row, dims)
    assert elements(joined) == elements(diagonal + row)
    assert all(walks_one_dim_each(x.start, x.axes, (20, 20)) for x in joined)
    assert len(joined) == 10


def lattices_of(field: np.ndarray, shapes: list[tuple[int, ...]]) -> list[Lattice]:
    """From a field of g + 1 to slice copies, along the whole chain."""
    moduli = (16253, 16249)
    rows, cols = field.shape
    offsets = np.concatenate([[0], np.cumsum([prod(s) for s in shapes])])
    rects = rectangles([differences(field, p) for p in moduli], moduli, rows, cols)
    placed, stray = place_rectangles(rects, Field(0, rows, cols, cols, 1), int(offsets[-1]), prod(moduli))
    assert stray.tolist() == []
    return copies_of_tensor([placed], offsets, shapes)


def test_interleaved_query_key_value_is_three_copies() -> None:
    heads, groups, dim, hidden = 8, 2, 3, 70
    per_group = heads // groups
    q, k, v = (np.arange(n * dim * hidden).reshape(n * dim, hidden) for n in (heads, groups, groups))
    k, v = k + q.size, v + q.size + k.size
    rows = [
        np.concatenate(
            [q[g * per_group * dim : (g + 1) * per_group * dim], k[g * dim : (g + 1) * dim], v[g * dim : (g + 1) * dim]]
        )
        for g in range(groups)
    ]
    field = np.concatenate(rows) + 1
    # As known from real trainers: q rows 0..11, k rows 0..2, v rows 0..2, q rows 12..23, ...
    assert (field[:, 0] // hidden).tolist() == [
        *range(12),
        24,
        25,
        26,
        30,
        31,
        32,
        *range(12, 24),
        27,
        28,
        29,
        33,
        34,
        35,
    ]
    copies = lattices_of(field, [(24, hidden), (6, hidden), (6, hidden)])
    assert [(x.group, x.start, x.live) for x in copies] == [(0, 0, 0), (1, 0, 12 * hidden), (2, 0, 15 * hidden)]
    assert copies[1].axes == ((2, 3 * hidden, 18 * hidden), (3, hidden, hidden), (hidden, 1, 1))


def test_an_index_that_runs_on_across_tensors_is_cut_between_them() -> None:
    field = np.arange(100, 100 + 8 * 70).reshape(8, 70) + 1
    copies = lattices_of(field, [(4, 40), (5,), (3, 100), (400,)])
    assert [(x.group, x.start, x.live) for x in copies] == [
        (0, 100, 0), (0, 120, 20), (1, 0, 60), (2, 0, 65), (3, 0, 365)
    ]  # fmt: skip
    assert len(elements(copies)) == 560


def test_a_step_two_interleave_is_one_copy_each() -> None:
    gate, up = np.arange(50 * 64).reshape(50, 64), 3200 + np.arange(50 * 64).reshape(50, 64)
    columns = np.stack([gate, up], axis=2).reshape(50, 128) + 1
    assert len(lattices_of(columns, [(50, 64), (50, 64)])) == 2
    rows = np.stack([gate, up], axis=1).reshape(100, 64) + 1
    assert len(lattices_of(rows, [(50, 64), (50, 64)])) == 2
    back = np.concatenate([columns[:, 0::2], columns[:, 1::2]], axis=1)
    assert len(lattices_of(back, [(50, 64), (50, 64)])) == 2
    assert len(lattices_of(columns.T.copy(), [(50, 64), (50, 64)])) == 2


def test_a_rotary_permutation_is_one_copy() -> None:
    index = np.arange(6 * 16 * 80).reshape(6, 2, 8, 80)
    assert len(lattices_of(index.transpose(0, 2, 1, 3).reshape(96, 80) + 1, [(96, 80)])) == 1


def test_a_blocked_layout_is_one_copy() -> None:
    index = np.arange(64 * 96).reshape(4, 16, 6, 16).transpose(0, 2, 3, 1).reshape(24 * 16, 16)
    assert len(lattices_of(index + 1, [(64, 96)])) == 1


def test_stacked_experts_are_one_copy_for_each_tensor() -> None:
    shapes = [(7, 70), (7, 70)] * 5
    index = np.arange(5 * 2 * 490).reshape(70, 70)
    copies = lattices_of(index + 1, shapes)
    assert [(x.group, x.start, x.live) for x in copies] == [(i, 0, 490 * i) for i in range(10)]


# --- elements without a code -------------------------------------------------------------------------------------------


def observed(raw: np.ndarray, table: CodeTable, pass_: int) -> tuple[SparseEntries, object]:
    dtype = dtype_named("BF16")
    out = np.empty(raw.shape, np.int16)
    invalid = table.decode(dtype, pass_, raw, out)
    collector = RunCollector(0x7FFF if pass_ % 2 == 0 else 0xFFFF)
    if invalid is not None:
        for row in range(len(raw)):
            collector.add(row * raw.shape[1], raw[row : row + 1], invalid[row : row + 1])
    return differences(out.astype(np.int64), table.moduli[pass_]), collector.finish()


@pytest.mark.parametrize("bits", [0x0000, 0x3F80, 0x4000, 0xFF80, 0x0080, 0x7F7F])  # 0, 1, 2, -inf, least and most
def test_a_constant_is_one_even_where_its_bits_are_a_code(bits: int) -> None:
    table = table_of(spec_of("BF16"))
    rng = random.Random(bits)
    for _ in range(20):
        rows, cols = rng.randint(1, 9), rng.randint(1, 9)
        index = np.arange(rows * cols).reshape(rows, cols) + rng.randrange(900)
        mask = np.array([[rng.random() < 0.4 for _ in range(cols)] for _ in range(rows)])
        if rng.random() < 0.5:
            mask = np.arange(cols) >= rng.randrange(cols + 1)
        mask = np.broadcast_to(mask, (rows, cols))
        entries, runs = [], []
        for k in range(table.num_passes):
            codes = np.empty(2000, np.uint16)
            table.encode(dtype_named("BF16"), k, 0, codes)
            found = observed(np.where(mask, np.uint16(bits), codes[index]), table, k)
            entries.append(found[0])
            runs.append(found[1])
        settled = settle(entries, runs, table, dtype_named("BF16"), rows, cols)  # type: ignore[arg-type]
        assert isinstance(settled, Settled)
        assert int(settled.runs.length.sum()) == int(mask.sum())
        assert set(settled.runs.bits.tolist()) <= {bits}
        rects = rectangles(settled.entries, table.moduli, rows, cols)
        np.testing.assert_array_equal(rebuilt(rects, rows, cols, table.product), np.where(mask, 0, index + 1))


def test_an_element_that_changes_without_being_a_code_is_a_conflict() -> None:
    table = table_of(spec_of("BF16"))
    raw = [np.zeros((4, 6), np.uint16), np.zeros((4, 6), np.uint16)]
    raw[1][2, 3] = 0x8001
    found = [observed(r, table, k) for k, r in enumerate(raw)]
    conflict = settle([f[0] for f in found], [f[1] for f in found], table, dtype_named("BF16"), 4, 6)  # type: ignore[misc]
    assert conflict == Conflict(15, 0, 1)


def test_bits_that_are_no_code_conflict_with_a_code() -> None:
    table = table_of(spec_of("BF16"))
    codes = np.empty(24, np.uint16)
    table.encode(dtype_named("BF16"), 0, 0, codes)
    raw = [codes.reshape(4, 6), np.zeros((4, 6), np.uint16)]
    found = [observed(r, table, k) for k, r in enumerate(raw)]
    conflict = settle([f[0] for f in found], [f[1] for f in found], table, dtype_named("BF16"), 4, 6)  # type: ignore[misc]
    assert conflict == Conflict(0, 1, 0)


def test_untouched_elements_are_told_from_constants() -> None:
    table = table_of(spec_of("BF16"))
    raw = [np.full((2, 4), s, np.uint16) for s in (0x7FFF, 0xFFFF)]
    for r in raw:
        r[1] = 0xFFFF  # what the loader writes happens to be a sentinel
    found = [observed(r, table, k) for k, r in enumerate(raw)]
    settled = settle([f[0] for f in found], [f[1] for f in found], table, dtype_named("BF16"), 2, 4)  # type: ignore[misc]
    assert isinstance(settled, Settled)
    assert settled.runs.untouched.tolist() == [True, False]
    assert settled.runs.length.tolist() == [4, 4]
    assert int(settled.runs.bits[1]) == 0xFFFF
    found = [observed(np.full((2, 4), s, np.uint16), table, k) for k, s in enumerate((0x7FFF, 0xFFFF))]
    settled = settle([f[0] for f in found], [f[1] for f in found], table, dtype_named("BF16"), 2, 4)  # type: ignore[misc]
    assert isinstance(settled, Settled)
    assert (settled.runs.length.tolist(), settled.runs.untouched.tolist()) == ([8], [True])


# --- memory ------------------------------------------------------------------------------------------------------------


def live(shape: tuple[int, ...], strides: tuple[int, ...]) -> LiveTensor:
    return LiveTensor(name="t", shape=shape, strides=strides, dtype=dtype_named("BF16"))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((), ()), ((0, 3), (3, 1)), ((7,), (1,)), ((10000,), (1,)), ((10000,), (3,)), ((100, 80), (80, 1)),
        ((80, 100), (1, 80)),
        ((100, 80), (90, 1)), ((4, 5, 6), (100, 10, 1)), ((4, 5, 6), (1, 30, 5)), ((3, 1, 4), (4, 9, 1)), ((5, 4), (1, 0)),
        ((2, 3, 4, 5), (200, 60, 13, 2)), ((3, 70000), (70001, 1)), ((70001, 2), (1, 70001)),
    ],
)  # fmt: skip
def test_fields_tile_the_elements_of_a_tensor(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    tensor = live(shape, strides)
    offsets = np.zeros((), dtype=np.int64)
    for n, s in zip(shape, strides, strict=True):
        offsets = np.add.outer(offsets, np.arange(n) * s)
    covered = [
        f.start + np.add.outer(np.arange(f.rows) * f.row_stride, np.arange(f.cols) * f.col_stride).reshape(-1)
        for f in fields_of(tensor)
    ]
    found = np.concatenate(covered) if covered else np.zeros(0, dtype=np.int64)
    np.testing.assert_array_equal(np.sort(found), np.unique(offsets))
    assert all(f.cols <= 1 << 16 for f in fields_of(tensor))


def test_a_tensor_whose_elements_overlap_is_refused() -> None:
    with pytest.raises(ProbeError, match="share memory"):
        memory_order(live((3, 4), (2, 1)))
