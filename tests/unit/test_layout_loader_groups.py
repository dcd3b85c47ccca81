"""Source maps with loader groups: on the wire, in words, in fingerprints, and as boxes."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from weightbridge.checkpoint import CheckpointSpec, dtype_named
from weightbridge.errors import LayoutError
from weightbridge.layout import (
    CopyTable,
    LiveTensor,
    LoaderGroup,
    SourceMap,
    decode_source_map,
    encode_source_map,
    expand,
    explain,
    unused_tensors,
)

BF16, F32 = dtype_named("BF16"), dtype_named("F32")
SPEC = CheckpointSpec.from_iterable([("w", (3, 5), BF16), ("norm", (5,), BF16), ("scale", (), F32)])
MAP = SourceMap(
    spec_digest=SPEC.digest,
    live=(
        LiveTensor(name="norm", shape=(5,), strides=(1,), dtype=BF16),
        LiveTensor(name="dequantised", shape=(3, 5), strides=(5, 1), dtype=F32),
        LiveTensor(name="carried:w", shape=(3, 5), strides=(5, 1), dtype=BF16, parameter=False, carried=True),
        LiveTensor(name="carried:scale", shape=(), strides=(), dtype=F32, parameter=False, carried=True),
    ),
    copies=CopyTable.from_rows([(1, 0, 0, 0, ((5, 1, 1),)), (0, 2, 0, 0, ((15, 1, 1),)), (2, 3, 0, 0, ())]),
    loader_groups=(LoaderGroup(live=(1,), tensors=(0, 2)),),
)


def test_groups_and_carried_tensors_survive_the_wire() -> None:
    again = decode_source_map(encode_source_map(MAP), spec=SPEC)
    assert again.live == MAP.live
    assert again.loader_groups == MAP.loader_groups
    assert again.fingerprint == MAP.fingerprint
    assert again.computed == {1}
    assert [t.name for t in again.carried] == ["carried:w", "carried:scale"]


def test_a_carried_tensor_is_a_copy_like_any_other() -> None:
    boxes = expand(MAP, SPEC)
    rows = list(zip(boxes.tensor.tolist(), boxes.live.tolist(), boxes.count.tolist(), strict=True))
    assert rows == [(1, 0, [5, 1]), (0, 2, [3, 5]), (2, 3, [1, 1])]
    assert unused_tensors(SPEC, [MAP]) == ()
    assert MAP.copied_nbytes(np.array([2, 2, 4])) == 10 + 30 + 4


@pytest.mark.parametrize(
    "other",
    [
        replace(MAP, loader_groups=(LoaderGroup(live=(0,), tensors=(0, 2)),)),
        replace(MAP, loader_groups=(LoaderGroup(live=(1,), tensors=(0,)),)),
        replace(MAP, loader_groups=()),
        replace(MAP, live=(*MAP.live[:3], replace(MAP.live[3], carried=False))),
    ],
)
def test_a_change_of_groups_changes_the_fingerprint(other: SourceMap) -> None:
    assert other.fingerprint != MAP.fingerprint


@pytest.mark.parametrize(
    ("groups", "part"),
    [
        ((LoaderGroup(live=(4,), tensors=(0, 2)),), "there are 4"),
        ((LoaderGroup(live=(-1,), tensors=(0, 2)),), "there are 4"),
        ((LoaderGroup(live=(2,), tensors=(0, 2)),), "carried ones are not computed"),
        ((LoaderGroup(live=(1,), tensors=(0, 3)),), "below 3"),
        ((LoaderGroup(live=(1,), tensors=(2, 0)),), "ascending"),
        ((LoaderGroup(live=(1,), tensors=(0, 0)),), "ascending"),
        ((LoaderGroup(live=(1,), tensors=()),), "ascending"),
        ((LoaderGroup(live=(0, 1), tensors=(0, 2)),), "both copies and computes live tensor 'norm'"),
        ((LoaderGroup(live=(1,), tensors=(0,)),), "groups need 1"),
        ((LoaderGroup(live=(1,), tensors=(0, 1)),), "groups need 2"),
        ((), "groups need 0"),
    ],
)
def test_groups_that_contradict_the_map_are_refused(groups: tuple[LoaderGroup, ...], part: str) -> None:
    with pytest.raises(LayoutError, match=part):
        decode_source_map(encode_source_map(replace(MAP, loader_groups=groups)), spec=SPEC)


def test_maps_of_the_format_before_are_refused_by_number() -> None:
    old = [1, *msgspec.msgpack.decode(encode_source_map(MAP))[1:]]
    with pytest.raises(LayoutError, match="format 1 is not known, expected 2"):
        decode_source_map(msgspec.msgpack.encode(old))


def test_explain_says_what_is_computed_and_what_is_carried() -> None:
    assert explain(MAP, SPEC).splitlines() == [
        "norm [5] BF16, parameter",
        "  [:] <- norm[:]  (5 elements)",
        "dequantised [3, 5] F32, parameter",
        "  computed by the loader, called at install with 2 checkpoint tensors: w, scale",
        "carried:w [3, 5] BF16, carried whole for the loader",
        "  <- w, whole  (15 elements)",
        "carried:scale [] F32, carried whole for the loader",
        "  <- scale, whole  (1 elements)",
    ]
