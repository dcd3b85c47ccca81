"""Specs from safetensors headers, and one clear error for everything that can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weightbridge.checkpoint import read_safetensors_spec, spec_from_folder, tensor_locations
from weightbridge.checkpoint import safetensors_reader as reader
from weightbridge.errors import SpecError

HEADER = {
    "b": {"dtype": "BF16", "shape": [3, 5], "data_offsets": [28, 58]},
    "a": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]},
    "s": {"dtype": "I64", "shape": [], "data_offsets": [58, 66]},
    "e": {"dtype": "F16", "shape": [0, 4], "data_offsets": [66, 66]},
}


def write(path: Path, header: dict[str, Any] | bytes, data: bytes = bytes(66), length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_single_file_gives_names_shapes_and_dtypes_in_data_order(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"__metadata__": {"format": "pt"}, **HEADER})
    spec = spec_from_folder(tmp_path)
    assert [(t.name, t.shape, t.dtype.name) for t in spec.tensors] == [
        ("a", (7,), "F32"),
        ("b", (3, 5), "BF16"),
        ("s", (), "I64"),
        ("e", (0, 4), "F16"),
    ]
    assert spec.nbytes == 66
    assert read_safetensors_spec(tmp_path / "model.safetensors").digest == spec.digest


def test_locations_are_absolute_byte_ranges(tmp_path: Path) -> None:
    data = bytes(range(66))
    file = write(tmp_path / "model.safetensors", HEADER, data)
    found = {x.tensor.name: file.read_bytes()[x.begin : x.end] for x in tensor_locations(tmp_path)}
    assert found == {"a": data[:28], "b": data[28:58], "s": data[58:], "e": b""}


def test_shards_are_read_in_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "m-2.safetensors", {"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, bytes(2))
    write(tmp_path / "m-1.safetensors", HEADER)
    write_index(tmp_path, {"x": "m-2.safetensors", **dict.fromkeys(HEADER, "m-1.safetensors")})
    assert [t.name for t in spec_from_folder(tmp_path).tensors] == ["a", "b", "s", "e", "x"]


def test_constants_and_ignored_names(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", HEADER)
    spec = spec_from_folder(tmp_path, constants={"a": 1.0}, ignore=["s"])
    assert dict(spec.constants) == {"a": 1.0}
    assert "s" not in spec.index


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_from_folder(path)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "does not exist")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    refused(tmp_path, "holds no model", "model.safetensors", "it is empty")
    (tmp_path / "notes.txt").write_text("hello")
    refused(tmp_path, "holds no model", "notes.txt")


def test_a_truncated_file_names_both_sizes(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", HEADER)
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    refused(tmp_path, "truncated", "'s'", str(len(whole)), str(len(whole) - 5))
    file.write_bytes(whole[:40])
    refused(tmp_path, "truncated", "header", "40")
    file.write_bytes(whole[:5])
    refused(tmp_path, "truncated", "5 bytes")


def test_a_header_too_large_to_be_one(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", HEADER, length=1 << 60)
    refused(tmp_path, str(1 << 60), str(reader.MAX_HEADER_BYTES))


@pytest.mark.parametrize("raw", [b"not json", b"[1, 2]", b"\xff\xfe{}", b'{"a": 3}', b"{}"])
def test_garbage_in_the_header(tmp_path: Path, raw: bytes) -> None:
    write(tmp_path / "model.safetensors", raw)
    refused(tmp_path, "model.safetensors")


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ({"dtype": "F99", "shape": [7], "data_offsets": [0, 28]}, "F99"),
        ({"dtype": "F32", "shape": [8], "data_offsets": [0, 28]}, "needs 32"),
        ({"dtype": "F32", "shape": [-7], "data_offsets": [0, 28]}, "-7"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "True"),
        ({"dtype": "F32", "shape": [7], "data_offsets": [0]}, "two offsets"),
        ({"dtype": "F32", "shape": [7], "data_offsets": [28, 0]}, "needs 28"),
        ({"shape": [7], "data_offsets": [0, 28]}, "None"),
    ],
)
def test_a_wrong_entry_names_the_tensor(tmp_path: Path, entry: dict[str, Any], part: str) -> None:
    write(tmp_path / "model.safetensors", {"a": entry})
    refused(tmp_path, "'a'", part)


def test_data_that_overlap(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}
    write(tmp_path / "model.safetensors", {"a": entry, "b": {**entry, "data_offsets": [24, 52]}})
    refused(tmp_path, "'b'", "inside", "'a'")


def test_a_name_twice(tmp_path: Path) -> None:
    entry = b'{"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
    write(tmp_path / "model.safetensors", b'{"a": ' + entry + b', "a": ' + entry + b"}", bytes(1))
    refused(tmp_path, "'a'", "twice")


def test_a_shard_file_missing(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "gone.safetensors"})
    refused(tmp_path, "gone.safetensors", "missing", "'a'")


def test_a_tensor_named_in_the_index_but_absent(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", HEADER)
    write_index(tmp_path, dict.fromkeys([*HEADER, "z"], "m.safetensors"))
    refused(tmp_path, "'z'", "m.safetensors", "absent")


def test_a_tensor_in_a_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", HEADER)
    write_index(tmp_path, dict.fromkeys(["a", "b", "e"], "m.safetensors"))
    refused(tmp_path, "'s'", "does not name")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    write(tmp_path / "m-1.safetensors", HEADER)
    write(
        tmp_path / "m-2.safetensors",
        {**HEADER, "z": {"dtype": "U8", "shape": [1], "data_offsets": [66, 67]}},
        bytes(67),
    )
    write_index(tmp_path, {"z": "m-2.safetensors", **dict.fromkeys(HEADER, "m-1.safetensors")})
    refused(tmp_path, "m-2.safetensors", "m-1.safetensors")


@pytest.mark.parametrize("weight_map", [None, {}, [1], {"a": 3}, {"a": "../elsewhere.safetensors"}])
def test_a_wrong_index(tmp_path: Path, weight_map: Any) -> None:
    write_index(tmp_path, weight_map)
    refused(tmp_path, "model.safetensors.index.json")


def test_the_library_of_the_format_reads_the_same(tmp_path: Path) -> None:
    numpy_writer = pytest.importorskip("safetensors.numpy")
    import numpy as np

    numpy_writer.save_file({"w": np.ones((3, 2), np.float32), "v": np.ones(5, np.int8)}, tmp_path / "model.safetensors")
    found = {t.name: (t.shape, t.dtype.name) for t in spec_from_folder(tmp_path).tensors}
    assert found == {"w": ((3, 2), "F32"), "v": ((5,), "I8")}
