"""Boxes in checkpoint coordinates: arithmetic progressions per dim, their intersection, refinement and exact cover.

NumPy only, vectorised over parallel arrays; nothing here knows workers, dtypes or live memory.
"""

from weightbridge.geometry.boxes import Boxes, first_overlap, inside, intersection_numel, meeting_pairs, numel
from weightbridge.geometry.progressions import (
    Cells,
    contains,
    cut_into_progressions,
    intersection,
    inverse_modulo,
    last,
    refine,
)

__all__ = [
    "Boxes",
    "Cells",
    "contains",
    "cut_into_progressions",
    "first_overlap",
    "inside",
    "intersection",
    "intersection_numel",
    "inverse_modulo",
    "last",
    "meeting_pairs",
    "numel",
    "refine",
]
