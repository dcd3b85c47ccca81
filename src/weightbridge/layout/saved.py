"""A source map as a document of its own: the map's wire form, the checkpoint it is about, and a seal over both.

    8 bytes magic | 2 bytes version | 16 bytes checksum of the body | 8 bytes length of the body | body

all little-endian; the body is typed MessagePack. A map alone names checkpoint tensors by position; with the spec beside it,
it can be read years later. Decoding believes nothing: a document comes from a disk. Bytes only; `probe/map_files.py` reads
and writes the files.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec
from weightbridge.errors import LayoutError
from weightbridge.layout.source_map import SourceMap
from weightbridge.layout.wire import MAX_WIRE_BYTES, decode_source_map, encode_source_map

__all__ = ["MAX_SAVED_BYTES", "SavedMap", "decode_saved_map", "encode_saved_map"]

_MAGIC = b"\x89WBMAP\r\n"  # a transfer that rewrites line ends or strips the eighth bit damages it visibly
_VERSION = 1
_HEAD = struct.Struct("<8sH16sQ")
_MAX_DIMS = 64
_LIMIT = 1 << 62

MAX_SAVED_BYTES = MAX_WIRE_BYTES + (256 << 20)
"""Bound on a whole document: the map, and the names and shapes of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class SavedMap:
    """spec: the checkpoint that the map was probed against. source_map: one worker's layout."""

    spec: CheckpointSpec
    source_map: SourceMap


class _Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    name: str
    shape: tuple[int, ...]
    dtype: str


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    tensors: tuple[_Tensor, ...]
    constants: dict[str, float]
    fingerprint: str
    source_map: bytes


_DECODER = msgspec.msgpack.Decoder(_Body)


def encode_saved_map(source_map: SourceMap, spec: CheckpointSpec) -> bytes:
    """The document; equal maps give equal bytes. Pure. Raises LayoutError when the map is not of this checkpoint."""
    if source_map.spec_digest != spec.digest:
        raise LayoutError(
            f"the map was probed against checkpoint {source_map.spec_digest} and is to be saved with {spec.digest}; save it "
            "with the spec it was probed with"
        )
    body = msgspec.msgpack.encode(
        _Body(
            tuple(_Tensor(t.name, t.shape, t.dtype.name) for t in spec.tensors),
            dict(sorted(spec.constants.items())),
            source_map.fingerprint,
            encode_source_map(source_map),
        )
    )
    return _HEAD.pack(_MAGIC, _VERSION, _checksum(body), len(body)) + body


def decode_saved_map(data: bytes) -> SavedMap:
    """What `encode_saved_map` wrote. Pure. Raises LayoutError saying what is wrong with anything else."""
    if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
        raise LayoutError(
            f"these {len(data)} bytes are no saved map: expected them to begin with {_MAGIC!r}, found {data[:8]!r}"
        )
    _, version, checksum, length = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise LayoutError(
            f"a saved map of version {version}, expected {_VERSION}; read it with the library that wrote it, or probe again"
        )
    body = memoryview(data)[_HEAD.size :]
    if len(body) != length:
        raise LayoutError(
            f"a saved map that declares {length} bytes and holds {len(body)}: it was cut or added to; probe again"
        )
    if _checksum(body) != checksum:
        raise LayoutError("a saved map whose bytes do not match its checksum: it was damaged; probe again")
    try:
        wire = _DECODER.decode(body)
        spec = _spec(wire)
        source_map = decode_source_map(wire.source_map, spec=spec)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LayoutError(f"a saved map that does not follow its format: {error}; probe again") from None
    if source_map.fingerprint != wire.fingerprint:
        raise LayoutError(
            f"a saved map with fingerprint {wire.fingerprint}, its content has {source_map.fingerprint}; probe again"
        )
    return SavedMap(spec=spec, source_map=source_map)


def _spec(wire: _Body) -> CheckpointSpec:
    for tensor in wire.tensors:
        if len(tensor.shape) > _MAX_DIMS or any(not 0 <= n < _LIMIT for n in tensor.shape):
            raise LayoutError(f"a saved map whose checkpoint tensor {tensor.name!r} has shape {tensor.shape}")
    return CheckpointSpec(
        tensors=tuple(TensorSpec(name=t.name, shape=t.shape, dtype=dtype_named(t.dtype)) for t in wire.tensors),
        constants=MappingProxyType(dict(wire.constants)),
    )


def _checksum(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
