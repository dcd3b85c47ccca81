"""Source maps on disk: save, load, and the file names of a cache. Does not import torch.

A file is written beside its place and moved there, so that a reader sees a whole map or none, whatever dies when.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import LayoutError, UsageError
from weightbridge.layout.saved import MAX_SAVED_BYTES, SavedMap, decode_saved_map, encode_saved_map
from weightbridge.layout.source_map import LiveTensor, SourceMap

__all__ = ["cached_map_path", "load_map", "save_map"]


def save_map(path: str | Path, source_map: SourceMap, spec: CheckpointSpec) -> Path:
    """Write a map and the spec it was probed with; returns the path. Atomic; blocks on the disk.

    Raises LayoutError when map and spec do not belong together, UsageError when the place cannot be written.
    """
    target = Path(path)
    data = encode_saved_map(source_map, spec)
    try:
        handle, scratch = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    except OSError as error:
        raise UsageError(
            f"{target}: the map cannot be written: {error.strerror}; name a file in a folder you can write to"
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(scratch, 0o644)  # mkstemp's 0600 would hide the map from the rest of a team
        os.replace(scratch, target)
    except OSError as error:
        Path(scratch).unlink(missing_ok=True)
        raise UsageError(f"{target}: the map cannot be written: {error.strerror}") from error
    return target


def load_map(path: str | Path) -> SavedMap:
    """The map and spec that `save_map` wrote. Blocks on the disk.

    Raises UsageError when there is no such file, LayoutError, with the reason, when it is no sound map.
    """
    source = Path(path)
    try:
        size = source.stat().st_size
        if size > MAX_SAVED_BYTES:
            raise LayoutError(f"{source}: {size} bytes are more than the {MAX_SAVED_BYTES} a saved map may have")
        data = source.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{source}: expected a saved map, cannot read it: {error.strerror}; `weightbridge check MODULE:FACTORY "
            "--save-map FILE` writes one"
        ) from error
    try:
        return decode_saved_map(data)
    except LayoutError as error:
        raise LayoutError(f"{source}: {error.message}") from None


def cached_map_path(folder: str | Path, worker: str, spec: CheckpointSpec, live: Sequence[LiveTensor]) -> Path:
    """Where the map of `worker` ("a/1") is cached: a name that changes with the checkpoint and the live tensors.

    Workers of one engine may have equal live tensors and different maps, hence the worker's name. Pure.
    """
    h = hashlib.blake2b(digest_size=12)
    h.update(repr((worker, spec.digest)).encode())
    for t in live:
        h.update(repr((t.name, t.shape, t.strides, t.dtype.name, t.parameter)).encode())
    return Path(folder) / f"{re.sub('[^A-Za-z0-9_.-]', '-', worker)}-{h.hexdigest()}.wbmap"
