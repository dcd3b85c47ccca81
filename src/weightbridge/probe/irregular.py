"""A layout that no slices describe: its copies are then an index table, element by element, and somebody should know."""

from __future__ import annotations

import warnings

import numpy as np

from weightbridge.errors import IrregularLayoutWarning
from weightbridge.layout.source_map import SourceMap

__all__ = ["warn_if_irregular"]

_MIN_COPIES = 1024


def warn_if_irregular(source_map: SourceMap) -> None:
    """Warn of each live tensor whose copies are many and take more memory than the tensor itself. Plans and programs are
    made of them, so the cost is paid again on every worker that meets them."""
    row_bytes = 8 * (4 + 3 * source_map.copies.count.shape[1])
    num_copies = np.bincount(source_map.copies.live, minlength=len(source_map.live))
    for live, pieces in zip(source_map.live, num_copies.tolist(), strict=True):
        nbytes = live.numel * live.dtype.itemsize
        if pieces < _MIN_COPIES or pieces * row_bytes <= nbytes:
            continue
        warnings.warn(
            f"live tensor {live.name!r} has an irregular layout: its {live.numel} elements ({nbytes} bytes) come from the "
            f"checkpoint in {pieces} pieces, an explicit index table of {pieces * row_bytes} bytes. Updates are right but "
            "slow to plan and to carry out; where the loader permutes or gathers single elements, keep the tensor in "
            "checkpoint order and permute where it is used",
            IrregularLayoutWarning,
            stacklevel=2,
        )
