"""Checkpoint specs from safetensors files, by their headers alone.

A safetensors file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data_offsets relative
to the end of the header) and the data. A folder holds one `model.safetensors`, or shards listed in
`model.safetensors.index.json`. Every length is checked against the file before it is believed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.errors import SpecError

__all__ = ["TensorLocation", "read_safetensors_spec", "spec_from_folder", "tensor_locations"]

MAX_HEADER_BYTES = 256 << 20
"""Bound on one header. The largest public checkpoints have headers of some 10 MB."""

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLocation:
    """Where one tensor's data lie: bytes [begin, end) of `file`, row-major, little-endian."""

    tensor: TensorSpec
    file: Path
    begin: int
    end: int


def spec_from_folder(
    path: str | Path, *, constants: Mapping[str, float] | None = None, ignore: Iterable[str] = ()
) -> CheckpointSpec:
    """The spec of a Hugging Face style folder (or of one .safetensors file). Reads headers only; blocks on the disk.

    constants: see `CheckpointSpec.constants`. ignore: names to leave out. Tensors are in order of file name, then of
    their data within the file. Raises SpecError for anything missing, truncated or contradictory.
    """
    left_out = frozenset(ignore)
    found = tuple(location.tensor for location in tensor_locations(path) if location.tensor.name not in left_out)
    return CheckpointSpec(tensors=found, constants=MappingProxyType(dict(constants or {})))


def read_safetensors_spec(path: str | Path) -> CheckpointSpec:
    """The spec of one .safetensors file. Raises SpecError."""
    return CheckpointSpec(tensors=tuple(location.tensor for location in _read_file(Path(path))))


def tensor_locations(path: str | Path) -> tuple[TensorLocation, ...]:
    """Every tensor of a folder or file with the place of its bytes, in the order of `spec_from_folder`. SpecError."""
    root = Path(path)
    if root.is_file():
        return _read_file(root)
    if not root.is_dir():
        raise SpecError(
            f"checkpoint folder {str(root)!r} does not exist; give the folder of a model in safetensors format"
        )
    if (root / _INDEX).is_file():
        return _read_sharded(root)
    if (root / _SINGLE).is_file():
        return _read_file(root / _SINGLE)
    seen = sorted(p.name for p in root.iterdir())
    listing = f"it has {', '.join(seen[:6])}{' ...' if len(seen) > 6 else ''}" if seen else "it is empty"
    raise SpecError(
        f"folder {str(root)!r} holds no model: expected {_SINGLE} or {_INDEX}, {listing}; "
        "give a folder written by save_pretrained with safe serialization"
    )


def _read_sharded(root: Path) -> tuple[TensorLocation, ...]:
    weight_map = _read_index(root / _INDEX)
    wanted: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        wanted.setdefault(shard, set()).add(name)
    found: list[TensorLocation] = []
    for shard in sorted(wanted):
        if Path(shard).name != shard:
            raise SpecError(f"index {_INDEX} names shard {shard!r}; expected a plain file name beside the index")
        if not (root / shard).is_file():
            some = min(wanted[shard])
            raise SpecError(
                f"shard {shard!r} is missing from {str(root)!r}; {_INDEX} puts {len(wanted[shard])} tensors in it, "
                f"{some!r} among them; fetch the file again",
                tensor=some,
            )
        in_shard = _read_file(root / shard)
        names = {location.tensor.name for location in in_shard}
        absent = sorted(wanted[shard] - names)
        if absent:
            raise SpecError(
                f"tensor {absent[0]!r} is named in {_INDEX} but absent from its shard {shard!r}"
                f"{f' (and {len(absent) - 1} more)' if len(absent) > 1 else ''}; shard and index do not belong together: "
                "fetch both again",
                tensor=absent[0],
            )
        extra = sorted(names - wanted[shard])
        if extra:
            raise SpecError(
                f"shard {shard!r} holds tensor {extra[0]!r}, which {_INDEX} "
                f"{'puts in ' + repr(weight_map[extra[0]]) if extra[0] in weight_map else 'does not name'}; "
                "shard and index do not belong together: fetch both again",
                tensor=extra[0],
            )
        found.extend(in_shard)
    return tuple(found)


def _read_index(file: Path) -> dict[str, str]:
    size = file.stat().st_size
    if size > MAX_HEADER_BYTES:
        raise SpecError(f"{str(file)!r} has {size} bytes, more than the {MAX_HEADER_BYTES} an index may have")
    parsed = _parse_json(file.read_bytes(), f"{str(file)!r}")
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SpecError(f"{str(file)!r} has no weight_map; expected an object of tensor name -> shard file name")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise SpecError(f"{str(file)!r}: tensor {name!r} has shard {shard!r}; expected a file name", tensor=name)
    return weight_map


def _read_file(file: Path) -> tuple[TensorLocation, ...]:
    """Locations of one file in data order. Raises SpecError naming the file and both numbers."""
    label = f"{str(file)!r}"
    if not file.is_file():
        raise SpecError(f"{label} is no file; give a .safetensors file")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise SpecError(f"{label} is truncated: it has {size} bytes, expected at least the 8 of a header length")
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise SpecError(
                f"{label} declares a header of {header_bytes} bytes, more than the {MAX_HEADER_BYTES} allowed; "
                "it is no safetensors file, or damaged"
            )
        if 8 + header_bytes > size:
            raise SpecError(
                f"{label} is truncated: its header needs {8 + header_bytes} bytes and the file has {size}; fetch it again"
            )
        header = _parse_json(stream.read(header_bytes), f"the header of {label}")
    data_begin = 8 + header_bytes
    found = [_location(file, name, entry, data_begin, size) for name, entry in header.items() if name != "__metadata__"]
    if not found:
        raise SpecError(f"{label} holds no tensors; expected the weights of a model")
    found.sort(key=lambda location: (location.begin, location.end, location.tensor.name))
    for before, after in pairwise(found):
        if after.begin < before.end:
            raise SpecError(
                f"{label}: the data of {after.tensor.name!r} begin at byte {after.begin}, inside those of "
                f"{before.tensor.name!r}, which end at {before.end}; the file is damaged",
                tensor=after.tensor.name,
            )
    return tuple(found)


def _location(file: Path, name: str, entry: Any, data_begin: int, file_size: int) -> TensorLocation:
    label = f"tensor {name!r} of {str(file)!r}"
    if not isinstance(entry, dict):
        raise SpecError(f"{label} is described by {entry!r}; expected dtype, shape and data_offsets", tensor=name)
    shape, offsets, dtype_name = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets")), entry.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2 or not isinstance(dtype_name, str):
        raise SpecError(
            f"{label} has dtype {dtype_name!r}, shape {entry.get('shape')!r} and data_offsets {entry.get('data_offsets')!r}; "
            "expected a name, a list of sizes and two offsets",
            tensor=name,
        )
    try:
        dtype = dtype_named(dtype_name)
    except SpecError as error:
        raise SpecError(f"{label}: {error.message}", tensor=name, dtype=dtype_name) from None
    nbytes = prod(shape) * dtype.itemsize
    begin, end = offsets
    if end - begin != nbytes:
        raise SpecError(
            f"{label} has data of {end - begin} bytes; shape {tuple(shape)} of {dtype.name} needs {nbytes}", tensor=name
        )
    if data_begin + end > file_size:
        raise SpecError(
            f"{str(file)!r} is truncated: tensor {name!r} ends at byte {data_begin + end} and the file has {file_size} bytes; "
            "fetch it again",
            tensor=name,
        )
    tensor = TensorSpec(name=name, shape=tuple(shape), dtype=dtype)
    return TensorLocation(tensor=tensor, file=file, begin=data_begin + begin, end=data_begin + end)


def _sizes(value: Any) -> list[int] | None:
    """The value if it is a list of sensible sizes."""
    if isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value):
        return value
    return None


def _parse_json(raw: bytes, label: str) -> dict[str, Any]:
    """A JSON object; a name that appears twice is an error, where json would keep the last one in silence."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                raise SpecError(f"{label} names {key!r} twice; names must be unique", tensor=key)
            seen[key] = value
        return seen

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{label} is no valid JSON ({error}); it is no safetensors model, or damaged") from None
    if not isinstance(parsed, dict):
        raise SpecError(f"{label} is no JSON object; it is no safetensors model, or damaged")
    return parsed
