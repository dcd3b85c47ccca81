"""What the live tensors held before a probe, kept in host memory, in a file, or not at all, and put back afterwards.

Nothing is interpreted: raw bits go out and come back. To a file they go tile by tile, so that memory stays bounded
whatever the size of the weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch

from weightbridge.errors import ProbeError, UsageError
from weightbridge.probe.live import distinct_elements, raw_bits

__all__ = ["Backup", "back_up"]

_TILE_BYTES = 16 << 20


class Backup:
    """The bits of some tensors, by position. `restore` as often as needed, then `close`; also a context manager."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [distinct_elements(t) for t in tensors]

    def restore(self, targets: Sequence[torch.Tensor | None] | None = None) -> None:
        """Put everything back where it came from, or into `targets`: one tensor for each that was kept, in their order.

        None, and a target of another shape or dtype, is left alone. Blocks. Raises ProbeError when the backup cannot be
        read; what was not put back by then holds whatever the last load left there.
        """
        chosen = self._tensors if targets is None else [None if t is None else distinct_elements(t) for t in targets]
        with torch.no_grad():
            for position, (kept, target) in enumerate(zip(self._tensors, chosen, strict=True)):
                if target is not None and target.shape == kept.shape and target.dtype == kept.dtype:
                    self._put(position, target)

    def _put(self, position: int, target: torch.Tensor) -> None:
        """This one keeps nothing."""

    def close(self) -> None:
        """Give up the copies."""

    def __enter__(self) -> Backup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _InMemory(Backup):
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(tensors)
        self._copies = [t.to("cpu", copy=True) for t in self._tensors]

    def _put(self, position: int, target: torch.Tensor) -> None:
        target.copy_(self._copies[position])

    def close(self) -> None:
        self._copies = []


class _InFile(Backup):
    """One file without a name, so that nothing is left of it when the process ends, however it ends."""

    def __init__(self, tensors: Sequence[torch.Tensor], folder: Path) -> None:
        super().__init__(tensors)
        self._folder = folder
        self._starts: list[int] = []
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, prefix="weightbridge-backup-")  # noqa: SIM115
        except OSError as error:
            raise UsageError(
                f"backup of the live weights: {folder} does not take files ({error}); name a folder"
            ) from error
        try:
            for tensor in self._tensors:
                self._starts.append(self._file.tell())
                for tile in _tiles(tensor):
                    self._file.write(_bytes(tile.cpu().contiguous().numpy()))
            self._file.flush()
        except OSError as error:
            self._file.close()
            needed = sum(t.numel() * t.element_size() for t in self._tensors)
            raise UsageError(
                f"backup of the live weights: {needed} bytes do not fit into {folder} ({error}); name a folder with more "
                "room, keep them in host memory, or skip the backup when they are about to be overwritten anyway"
            ) from error

    def _put(self, position: int, target: torch.Tensor) -> None:
        try:
            self._file.seek(self._starts[position])
            for tile in _tiles(target):
                in_place = tile.device.type == "cpu" and tile.is_contiguous()
                host = tile if in_place else torch.empty(tile.shape, dtype=tile.dtype)
                given = self._file.readinto(_bytes(host.numpy()))  # type: ignore[attr-defined]
                if given != host.numel() * host.element_size():
                    raise OSError("the file ends early")
                if not in_place:
                    tile.copy_(host)
        except OSError as error:
            raise ProbeError(
                f"the backup of the live weights in {self._folder} cannot be read back ({error}); load the weights anew"
            ) from error

    def close(self) -> None:
        self._file.close()


def back_up(tensors: Sequence[torch.Tensor], where: bool | str | Path) -> Backup:
    """Copy the bits of local tensors away. Blocks.

    where: True for host memory (as much as the tensors take), a folder for a file in it that has no name and vanishes with
    the process (`_TILE_BYTES` of memory at most; a folder in memory, as /dev/shm, saves none), False for no copy: then
    `restore` does nothing. Raises UsageError when the folder is none or has no room; nothing was changed then.
    """
    if where is True:
        return _InMemory(tensors)
    if where is False:
        return Backup(tensors)
    return _InFile(tensors, Path(where))


def _tiles(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views, as integers, that cover every element once, in an order that depends on shape and element size alone."""
    yield from _cut(raw_bits(tensor, 0, tuple(tensor.shape), tuple(tensor.stride())))


def _cut(bits: torch.Tensor) -> Iterator[torch.Tensor]:
    nbytes = bits.numel() * bits.element_size()
    dim = next((d for d, n in enumerate(bits.shape) if n > 1), None)
    if nbytes <= _TILE_BYTES or dim is None:
        if nbytes:
            yield bits
        return
    step = max(1, _TILE_BYTES * bits.shape[dim] // nbytes)
    for lo in range(0, bits.shape[dim], step):
        yield from _cut(bits.narrow(dim, lo, min(step, bits.shape[dim] - lo)))


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    """The memory of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
