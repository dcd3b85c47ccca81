"""Saved maps: what was written is what is read, and whatever else lies in the file is refused with the reason."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from types import MappingProxyType

import msgspec
import pytest

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.errors import LayoutError, UsageError
from weightbridge.layout import Constant, CopyTable, LiveTensor, SourceMap
from weightbridge.layout.saved import SavedMap, decode_saved_map, encode_saved_map
from weightbridge.probe.map_files import cached_map_path, load_map, save_map

BF16, F32 = dtype_named("BF16"), dtype_named("F32")
SPEC = CheckpointSpec.from_iterable(
    [("q", (6, 4), BF16), ("k", (3, 4), BF16), ("scale", (), F32)], constants={"scale": 0.5}
)
LIVE = (
    LiveTensor(name="qk", shape=(7, 4), strides=(4, 1), dtype=BF16),
    LiveTensor(name="table", shape=(5,), strides=(1,), dtype=F32, parameter=False),
)


def source_map(first_row: int = 2) -> SourceMap:
    """Rows `first_row`... of q, then k in full, then one row of pads."""
    return SourceMap(
        spec_digest=SPEC.digest,
        live=LIVE,
        copies=CopyTable.from_rows([(0, 0, 4 * first_row, 0, ((12, 1, 1),)), (1, 0, 0, 12, ((12, 1, 1),))]),
        constants=(Constant(live=0, live_start=24, axes=((4, 1),), bits=0xFF80),),
        untouched=MappingProxyType({"table": 5}),
    )


def test_a_document_gives_back_the_map_and_the_checkpoint_it_is_about() -> None:
    saved = decode_saved_map(encode_saved_map(source_map(), SPEC))
    assert isinstance(saved, SavedMap)
    assert saved.spec.tensors == SPEC.tensors
    assert dict(saved.spec.constants) == {"scale": 0.5}
    assert saved.spec.digest == SPEC.digest
    assert saved.source_map.fingerprint == source_map().fingerprint
    assert (saved.source_map.live, saved.source_map.constants) == (LIVE, source_map().constants)
    assert dict(saved.source_map.untouched) == {"table": 5}


def test_equal_maps_give_equal_bytes_and_others_do_not() -> None:
    assert encode_saved_map(source_map(), SPEC) == encode_saved_map(source_map(), SPEC)
    assert encode_saved_map(source_map(), SPEC) != encode_saved_map(source_map(1), SPEC)


def test_a_map_is_not_saved_with_the_spec_of_another_checkpoint() -> None:
    other = CheckpointSpec.from_iterable([("q", (6, 4), BF16)])
    with pytest.raises(
        LayoutError, match=f"probed against checkpoint {SPEC.digest} and is to be saved with {other.digest}"
    ):
        encode_saved_map(source_map(), other)


def test_every_flipped_bit_is_refused() -> None:
    data = encode_saved_map(source_map(), SPEC)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(LayoutError):
            decode_saved_map(bytes(damaged))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: b"", "0 bytes are no saved map"),
        (lambda d: b"{}" * 40, "no saved map: expected them to begin with .*found b'{}{}{}{}'"),
        (lambda d: d[:-1], "declares [0-9]+ bytes and holds [0-9]+: it was cut"),
        (lambda d: d + b"\0", "it was cut or added to"),
        (lambda d: d[:8] + b"\x02\0" + d[10:], "version 2, expected 1"),
        (lambda d: d[:-1] + bytes([d[-1] ^ 1]), "do not match its checksum: it was damaged"),
        (lambda d: d.replace(b"\r\n", b"\n"), "no saved map|declares"),
    ],
)
def test_what_is_wrong_with_a_document_is_said(change, reason) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LayoutError, match=reason):
        decode_saved_map(change(encode_saved_map(source_map(), SPEC)))


def _sealed(body: bytes) -> bytes:
    """A body of someone's own making under a right checksum."""
    head = b"\x89WBMAP\r\n" + b"\x01\0" + hashlib.blake2b(body, digest_size=16).digest()
    return head + len(body).to_bytes(8, "little") + body


def test_a_forged_body_is_refused_by_what_it_says() -> None:
    def body(**changes: object) -> bytes:
        data = encode_saved_map(source_map(), SPEC)
        fields = msgspec.msgpack.decode(data[34:])
        for position, value in changes.items():
            fields[int(position[1:])] = value
        return _sealed(msgspec.msgpack.encode(fields))

    assert decode_saved_map(body()).spec.digest == SPEC.digest
    for document, reason in (
        (_sealed(b"\xc1"), "does not follow its format"),
        (_sealed(msgspec.msgpack.encode(["a", {}, "", b""])), "does not follow its format"),
        (body(_2="0" * 32), "with fingerprint 0{32}, its content has"),
        (body(_0=[("q", (6, -4), "BF16")]), "'q' has shape"),
        (body(_0=[("q", (6, 4), "BF17")]), "'BF17' is not known"),
        (body(_0=[("q", (6, 4), "BF16")], _1={}), "was made for checkpoint"),
        (body(_3=b"\xff"), "no source map"),
    ):
        with pytest.raises(LayoutError, match=reason):
            decode_saved_map(document)


# --- files ---------------------------------------------------------------------------------------------------------------


def test_a_saved_file_is_loaded_again_and_others_may_read_it(tmp_path: Path) -> None:
    path = save_map(tmp_path / "a.wbmap", source_map(), SPEC)
    assert load_map(path).source_map.fingerprint == source_map().fingerprint
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    save_map(path, source_map(1), SPEC)
    assert load_map(str(path)).source_map.fingerprint == source_map(1).fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["a.wbmap"]


def test_a_write_that_fails_leaves_the_old_file_and_no_scrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_map(tmp_path / "a.wbmap", source_map(), SPEC)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"a\.wbmap: the map cannot be written: No space left on device"):
        save_map(path, source_map(1), SPEC)
    assert load_map(path).source_map.fingerprint == source_map().fingerprint
    assert [p.name for p in tmp_path.iterdir()] == ["a.wbmap"]


def test_places_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent/a\.wbmap: the map cannot be written: No such file"):
        save_map(tmp_path / "absent" / "a.wbmap", source_map(), SPEC)
    with pytest.raises(UsageError, match=r"a\.wbmap: expected a saved map, cannot read it: No such file"):
        load_map(tmp_path / "a.wbmap")


def test_a_damaged_file_is_named_with_the_reason(tmp_path: Path) -> None:
    path = save_map(tmp_path / "a.wbmap", source_map(), SPEC)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(LayoutError, match=r"a\.wbmap: a saved map that declares \d+ bytes and holds 16: it was cut"):
        load_map(path)


def test_a_cached_map_is_filed_by_worker_checkpoint_and_live_tensors() -> None:
    other = CheckpointSpec.from_iterable([("q", (6, 4), BF16)])
    paths = [
        cached_map_path("folder", "a/0", SPEC, LIVE),
        cached_map_path("folder", "a/1", SPEC, LIVE),
        cached_map_path("folder", "a/0", other, LIVE),
        cached_map_path("folder", "a/0", SPEC, LIVE[:1]),
    ]
    assert len(set(paths)) == 4
    assert paths[0] == cached_map_path(Path("folder"), "a/0", SPEC, list(LIVE))
    assert all(p.parent == Path("folder") and p.name.startswith("a-") and p.suffix == ".wbmap" for p in paths)
