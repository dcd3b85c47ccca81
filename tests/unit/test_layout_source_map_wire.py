"""Source maps as bytes and as text, and coverage over the maps of a side."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from weightbridge.checkpoint import CheckpointSpec, dtype_named
from weightbridge.errors import LayoutError, UsageError
from weightbridge.layout import (
    Constant,
    CopyTable,
    LiveTensor,
    SourceMap,
    decode_source_map,
    encode_source_map,
    explain,
    missing_elements,
    unused_tensors,
)

BF16, F32 = dtype_named("BF16"), dtype_named("F32")
SPEC = CheckpointSpec.from_iterable(
    [("q", (12, 4), BF16), ("k", (6, 4), BF16), ("scale", (), F32), ("skip", (3,), F32), ("none", (0, 2), F32)],
    constants={"scale": 1.0},
)
# Rows of q and k by turns, six and three, then a row of zeros; the other tensor is a transposed slice of k.
QKV = LiveTensor(name="qkv", shape=(19, 4), strides=(4, 1), dtype=BF16)
KT = LiveTensor(name="kt", shape=(4, 3), strides=(5, 1), dtype=F32, parameter=False)
MAP = SourceMap(
    spec_digest=SPEC.digest,
    live=(QKV, KT),
    copies=CopyTable.from_rows(
        [
            (0, 0, 0, 0, ((2, 24, 36), (6, 4, 4), (4, 1, 1))),
            (1, 0, 0, 24, ((2, 12, 36), (3, 4, 4), (4, 1, 1))),
            (1, 1, 8, 0, ((4, 1, 5), (2, 8, 1))),
        ]
    ),
    constants=(Constant(live=0, live_start=72, axes=((4, 1),), bits=0),),
    untouched={"kt": 4},
)


def test_a_map_survives_the_wire() -> None:
    data = encode_source_map(MAP)
    again = decode_source_map(data, spec=SPEC)
    assert again.fingerprint == MAP.fingerprint
    assert again.live == MAP.live
    assert again.constants == MAP.constants
    assert dict(again.untouched) == {"kt": 4}
    np.testing.assert_array_equal(again.copies.live_stride, MAP.copies.live_stride)
    assert encode_source_map(again) == data
    assert decode_source_map(memoryview(data)).fingerprint == MAP.fingerprint


def test_an_empty_map_survives_the_wire() -> None:
    empty = SourceMap(spec_digest=SPEC.digest, live=(), copies=CopyTable.empty())
    assert decode_source_map(encode_source_map(empty), spec=SPEC).fingerprint == empty.fingerprint


def changed(**fields: object) -> SourceMap:
    return replace(MAP, copies=replace(MAP.copies, **fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        (changed(live=np.array([0, 0, 2])), "live tensor"),
        (changed(live=np.array([0, 0, -1])), "live tensor"),
        (changed(tensor=np.array([0, 1, 9])), "checkpoint tensor"),
        (changed(live_start=np.array([0, 24, 2])), "live offset"),
        (changed(live_start=np.array([-1, 24, 0])), "live offset"),
        (changed(src_start=np.array([0, 0, 13])), "checkpoint offset"),
        (changed(src_start=np.array([1, 0, 8])), "checkpoint offset"),
        (changed(src_stride=MAP.copies.src_stride * (1 << 40)), "checkpoint offset"),
        (changed(src_stride=MAP.copies.src_stride * (1 << 58)), "beyond any tensor"),
        (replace(MAP, spec_digest="0" * 32), "probe again"),
        (replace(MAP, constants=(Constant(live=0, live_start=73, axes=((4, 1),), bits=0),)), "constant"),
        (replace(MAP, constants=(Constant(live=0, live_start=72, axes=((4, 1),), bits=1 << 16),)), "constant"),
        (replace(MAP, constants=(Constant(live=3, live_start=0, axes=(), bits=0),)), "constant"),
        (replace(MAP, constants=(Constant(live=0, live_start=72, axes=((0, 1),), bits=0),)), "constant"),
        (replace(MAP, untouched={"nobody": 3}), "nobody"),
        (replace(MAP, untouched={"kt": -3}), "kt"),
    ],
)
def test_a_map_that_refers_to_what_is_not_there_is_refused(bad: SourceMap, part: str) -> None:
    with pytest.raises(LayoutError, match=part):
        decode_source_map(encode_source_map(bad), spec=SPEC)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x93\x01\x02\x03", b"\xff" * 40, msgspec.msgpack.encode({"a": 1})])
def test_bytes_that_are_no_map_are_refused(data: bytes) -> None:
    with pytest.raises(LayoutError, match="no source map"):
        decode_source_map(data)


def test_every_truncation_and_many_bit_flips_are_refused_or_harmless() -> None:
    data = encode_source_map(MAP)
    for cut in range(0, len(data), 3):
        with pytest.raises(LayoutError):
            decode_source_map(data[:cut], spec=SPEC)
    refused = 0
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 0x80
        try:
            decode_source_map(bytes(flipped), spec=SPEC)
        except LayoutError:
            refused += 1
    assert refused > len(data) // 2


def fields_of_wire() -> list[object]:
    decoded = msgspec.msgpack.decode(encode_source_map(MAP))
    assert isinstance(decoded, list)
    return decoded


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        (0, 99, "format 99"),
        (3, 4, "damaged"),
        (3, -1, "declares"),
        (4, 0, "declares"),
        (4, 1000, "declares"),
        (5, b"", "damaged"),
        (2, [["t", [2, -1], [1, 1], "BF16", True, False]], "sizes"),
        (2, [["t", [2], [1, 1], "BF16", True, False]], "differ"),
        (2, [["t", [2], [1], "F99", True, False]], "F99"),
        (2, [["t", [1 << 61, 1 << 61], [1 << 61, 1], "BF16", True, False]], "spans"),
    ],
)
def test_a_wire_form_that_contradicts_itself_is_refused(place: int, value: object, part: str) -> None:
    parts = fields_of_wire()
    parts[place] = value
    with pytest.raises(LayoutError, match=part):
        decode_source_map(msgspec.msgpack.encode(parts))


def test_explain_says_where_each_part_comes_from() -> None:
    assert explain(MAP, SPEC).splitlines() == [
        "qkv [19, 4] BF16, parameter",
        "  [0:18:9 + 0:6, :] <- q[0:12:6 + 0:6, :]  (48 elements)",
        "  [6:24:9 + 0:3, :] <- k[0:6:3 + 0:3, :]  (24 elements)",
        "  [18, :] <- constant bits 0x0",
        "kt [4, 3] F32, buffer",
        "  [:, 0:2] <- k[2:6:2, :] cast BF16 -> F32  (8 elements)",
        "  4 elements are never written by the loader",
    ]
    assert explain(MAP, SPEC, "kt").startswith("kt [4, 3]")
    with pytest.raises(UsageError, match="'nobody'"):
        explain(MAP, SPEC, "nobody")


def test_coverage_over_a_side() -> None:
    assert unused_tensors(SPEC, [MAP]) == ("skip",)  # a constant and an empty tensor need no taker
    assert unused_tensors(SPEC, []) == ("q", "k", "skip")
    assert missing_elements(SPEC, [MAP]) == {"skip": 3}
    part = replace(MAP, copies=CopyTable.from_rows([(1, 0, 4, 0, ((2, 8, 4), (4, 1, 1)))]))
    rest = replace(MAP, copies=CopyTable.from_rows([(1, 0, 19, 0, ((20, -1, 1),))]))
    assert missing_elements(SPEC, [part]) == {"q": 48, "k": 16, "skip": 3}
    assert missing_elements(SPEC, [part, rest]) == {"q": 48, "k": 4, "skip": 3}
