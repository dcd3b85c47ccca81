"""Codecs: how a segment's dense bytes travel. A write has a capacity in the plan and an actual length at run time.

A codec works in place on the segment's own slot bytes, so that nothing is allocated per update beyond what the codec
itself needs, and so that a forward can pass on the encoded bytes as they came.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UsageError

__all__ = ["IDENTITY", "Codec", "codec_named", "register_codec"]

Bytes = npt.NDArray[np.uint8]
IDENTITY = "identity"


class Codec(ABC):
    """Stateless; called by the kernel lane of a worker, one segment at a time."""

    name: str

    @abstractmethod
    def encode(self, segment: Bytes) -> int:
        """Replace the dense bytes of `segment` ([capacity_bytes]) by encoded ones; return their length <= capacity."""

    @abstractmethod
    def decode(self, segment: Bytes, length: int) -> None:
        """Inverse: the first `length` bytes of `segment` are encoded; afterwards all of it is dense."""


_CODECS: dict[str, Codec] = {}


def register_codec(codec: Codec) -> None:
    """Make a codec known by its name to every executor of this process. UsageError when the name is taken by another."""
    if codec.name == IDENTITY or _CODECS.get(codec.name, codec) is not codec:
        raise UsageError(f"codec name {codec.name!r} is taken; choose another")
    _CODECS[codec.name] = codec


def codec_named(name: str) -> Codec | None:
    """The codec of that name, None for "identity". UsageError naming the known ones."""
    if name == IDENTITY:
        return None
    if name not in _CODECS:
        raise UsageError(f"codec {name!r} is not registered in this process; known are {sorted([IDENTITY, *_CODECS])}")
    return _CODECS[name]
