"""Tensors that repeat an earlier one are explained by a shift: as if each were looked at alone, and only where that holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.errors import ProbeError
from weightbridge.layout import SourceMap
from weightbridge.probe import ProbeOptions, probe
from weightbridge.probe import run as probe_run
from weightbridge.probe.codes import CodeTable, CodeTables, code_table
from weightbridge.probe.difference import PositionPool, SparseEntries
from weightbridge.probe.explained import Explanation, TensorRecord

BF16 = dtype_named("BF16")
NUM_LAYERS = 7
ROWS = {"q": 12, "k": 5, "v": 5, "o": 9, "norm": 1}
WIDTH = 26


def layered(
    *, rows_of_k: int = 5, dtype_of_v: str = "bfloat16", shape_of_q: tuple[int, int] = (12, WIDTH), odd_one: int = 3
) -> CheckpointSpec:
    """rows_of_k, dtype_of_v, shape_of_q: of layer `odd_one`; all the others are alike."""
    forms: list[tuple[str, tuple[int, ...], str]] = [
        ("embed", (31, WIDTH), "bfloat16"),
        ("nothing", (0, 3), "bfloat16"),
    ]
    for i in range(NUM_LAYERS):
        forms += [(f"{i}.{n}", (ROWS[n], WIDTH) if n != "norm" else (WIDTH,), "bfloat16") for n in ROWS]
        forms += [(f"{i}.scale", (3,), "int32")]  # another family of dtypes, with numbers of its own
    changed: dict[str, tuple[tuple[int, ...], str]] = {
        f"{odd_one}.q": (shape_of_q, "bfloat16"),
        f"{odd_one}.k": ((rows_of_k, WIDTH), "bfloat16"),
        f"{odd_one}.v": ((5, WIDTH), dtype_of_v),
    }
    return CheckpointSpec.from_iterable([(n, *changed.get(n, (shape, dtype))) for n, shape, dtype in forms])


class Engine:
    """Fused qkv in one tensor, every other column of o, one tensor across the end of v and the beginning of o, and one of two
    fields with gaps, whose second half is another one in layer 5, one row of k, the next one in layer 4, and a padded norm."""

    def __init__(self, spec: CheckpointSpec) -> None:
        self.live: dict[str, torch.Tensor] = {"embed": torch.zeros(33, WIDTH, dtype=torch.bfloat16)}
        for i in range(NUM_LAYERS):
            rows = sum(spec.tensors[spec.index[f"{i}.{n}"]].numel // WIDTH for n in "qkv")
            self.live[f"{i}.qkv"] = torch.zeros(rows, WIDTH, dtype=torch.bfloat16)
            self.live[f"{i}.o"] = torch.zeros(9, WIDTH // 2, dtype=torch.bfloat16)
            self.live[f"{i}.norm"] = torch.zeros(WIDTH, dtype=torch.float32)
            self.live[f"{i}.seam"] = torch.zeros(3, WIDTH, dtype=torch.bfloat16)
            self.live[f"{i}.scale"] = torch.zeros(3, dtype=torch.int32)
            self.live[f"{i}.gaps"] = torch.zeros(2, 6, WIDTH + 4, dtype=torch.bfloat16)[:, :4, :WIDTH]
            self.live[f"{i}.row"] = torch.zeros(1, WIDTH, dtype=torch.bfloat16)
            self.live[f"{i}.padded"] = torch.zeros(WIDTH + 2, dtype=torch.bfloat16)

    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        given = dict(stream)
        self.live["embed"][:31], self.live["embed"][31:] = given["embed"], 0
        for i in range(NUM_LAYERS):
            given[f"{i}.q"] = given[f"{i}.q"].reshape(12, WIDTH)
            self.live[f"{i}.qkv"].copy_(torch.cat([given[f"{i}.{n}"].to(torch.bfloat16) for n in "qkv"]))
            self.live[f"{i}.o"].copy_(given[f"{i}.o"][:, ::2])
            self.live[f"{i}.norm"].copy_(given[f"{i}.norm"])
            self.live[f"{i}.seam"].copy_(torch.cat([given[f"{i}.v"][3:].to(torch.bfloat16), given[f"{i}.o"][:1]]))
            self.live[f"{i}.scale"].copy_(given[f"{i}.scale"].flip(0))
            self.live[f"{i}.row"].copy_(given[f"{i}.k"][1:2] if i == 4 else given[f"{i}.k"][:1])
            self.live[f"{i}.padded"][:WIDTH], self.live[f"{i}.padded"][WIDTH:] = given[f"{i}.norm"], 0
            begin = 4 if i == 5 else 0
            self.live[f"{i}.gaps"].copy_(torch.stack([given[f"{i}.q"][:4], given[f"{i}.o"][begin : begin + 4]]))

    def map(self, spec: CheckpointSpec) -> SourceMap:
        return probe(
            spec=spec, load_weights=self.load_weights, tensors=lambda: self.live, options=ProbeOptions(backup=False)
        )


class Alone:
    """Stands in for Explainer: every tensor on its own."""

    def __init__(self, spec: CheckpointSpec, tables: CodeTables) -> None:
        self._arguments = (spec, tables)

    def explain(self, record: TensorRecord) -> Explanation:
        return record.explain(*self._arguments)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the live tensors that were explained the long way."""
    names: list[str] = []
    plain = TensorRecord.explain

    def explain(record: TensorRecord, *arguments: object) -> Explanation:
        names.append(record.live.name)
        return plain(record, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TensorRecord, "explain", explain)
    return names


def alone(spec: CheckpointSpec) -> SourceMap:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_run, "Explainer", Alone)
        return Engine(spec).map(spec)


@pytest.mark.parametrize(
    ("spec", "again"),
    [
        (layered(), []),
        # A layer of another size: what draws on k or spans it is looked at, and everything else in it only moved.
        (layered(rows_of_k=6), ["3.qkv", "3.gaps", "3.row"]),
        # Equal sizes and another dtype: the index leads to a tensor that may not be taken for the same.
        (layered(dtype_of_v="float32"), ["3.qkv", "3.seam"]),
        # Another shape of equal size: no axis may run over the end of a dimension.
        (layered(shape_of_q=(WIDTH, 12)), ["3.qkv", "3.gaps"]),
    ],
)  # fmt: skip
def test_layers_are_explained_once_and_as_if_each_were_alone(
    spec: CheckpointSpec, again: list[str], looked_at: list[str]
) -> None:
    found = Engine(spec).map(spec)
    firsts = [f"0.{n}" for n in ("qkv", "o", "norm", "seam", "scale", "gaps", "row")]
    own = ["embed", "5.gaps", "4.row", *(f"{i}.padded" for i in range(NUM_LAYERS))]
    assert sorted(looked_at) == sorted(firsts + own + again)
    assert found.fingerprint == alone(spec).fingerprint


def test_a_shift_into_a_constant_of_the_spec_is_refused() -> None:
    """A loader that makes up the very codes that the constant's elements would have, were they given any."""
    tensors = layered().tensors
    spec = CheckpointSpec(tensors=tensors, constants={"4.norm": 1.0})
    engine = Engine(spec)
    table = code_table(spec, {t.dtype.name for t in tensors} | {"F32"}).of(BF16)
    assert isinstance(table, CodeTable)
    loads = iter(range(100))

    def load_weights(stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        engine.load_weights(stream)
        bits = np.empty(WIDTH, dtype="<u2")
        table.encode(BF16, next(loads), int(spec.numel_offsets[spec.index["4.norm"]]) - 3 * 4, bits)
        engine.live["4.norm"].copy_(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))

    assert (
        table.offsets[spec.index["4.norm"]] == spec.numel_offsets[spec.index["4.norm"]] - 3 * 4
    )  # without the integers
    with pytest.raises(ProbeError, match=r"4\.norm.*calls a constant"):
        probe(spec=spec, load_weights=load_weights, tensors=lambda: engine.live, options=ProbeOptions(backup=False))


@pytest.mark.parametrize("damage", ["swap", "double", "negate"])
def test_what_only_looks_like_a_repeat_is_found_out(damage: str) -> None:
    """One element of a later layer that is not what its neighbours promise."""
    spec = layered()
    engine = Engine(spec)
    plain = engine.load_weights

    def load_weights(stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        plain(stream)
        at = engine.live["5.o"].view(-1)
        if damage == "swap":
            at[[7, 8]] = at[[8, 7]]
        else:
            at[7] = at[7] * 2 if damage == "double" else -at[7]

    if damage == "swap":
        found = probe(
            spec=spec, load_weights=load_weights, tensors=lambda: engine.live, options=ProbeOptions(backup=False)
        )
        pieces = Counter(found.live[i].name for i in found.copies.live)
        assert pieces["5.o"] > pieces["4.o"] == pieces["6.o"] == 1
        return
    with pytest.raises(ProbeError, match=r"5\.o"):
        probe(spec=spec, load_weights=load_weights, tensors=lambda: engine.live, options=ProbeOptions(backup=False))


def test_a_repeat_that_begins_at_residue_nothing(looked_at: list[str]) -> None:
    """Where the first code of a tensor is that of "no element" in one pass, its corners look different in that pass."""
    forms = [("a", (6, 10)), ("b", (6, 10)), ("c", (6, 10))]
    moduli = code_table(CheckpointSpec.from_iterable([(n, s, "bfloat16") for n, s in forms]), ["BF16"]).of(BF16).moduli
    forms = [("pad", (moduli[0] - 1 - 60,)), *forms]
    spec = CheckpointSpec.from_iterable([(n, s, "bfloat16") for n, s in forms])
    assert (spec.numel_offsets[spec.index["b"]] + 1) % moduli[0] == 0
    live = {n: torch.zeros(s[0], s[-1] // 2, dtype=torch.bfloat16) for n, s in forms[1:]}

    def load_weights(stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in stream:
            if name in live:
                live[name].copy_(tensor[:, 5:])

    def found() -> SourceMap:
        return probe(spec=spec, load_weights=load_weights, tensors=lambda: live, options=ProbeOptions(backup=False))

    shifted = found()
    assert looked_at == ["a"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_run, "Explainer", Alone)
        assert shifted.fingerprint == found().fingerprint


def test_pooled_positions_are_those_of_equal_entries_only() -> None:
    rng = np.random.default_rng(3)
    pool = PositionPool()
    cases = [
        ([0, 0, 0], [1, 5, 9]),
        ([0, 0, 0], [1, 5, 8]),
        ([0, 1, 1], [1, 5, 9]),
        ([1, 5, 9], [0, 0, 0]),
        ([], []),
    ] * 2
    packed = []
    for row, col in cases:
        entries = SparseEntries(np.array(row, np.int64), np.array(col, np.int64), rng.integers(1, 1 << 14, len(row)))
        packed.append(pool.packed(entries))
        for have, want in zip(packed[-1], entries, strict=True):
            assert have.tolist() == want.tolist()
    assert all(a.row is b.row and a.col is b.col for a, b in zip(packed[:5], packed[5:], strict=True))
