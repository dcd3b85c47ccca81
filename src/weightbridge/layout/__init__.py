"""Where checkpoint elements lie: one worker's `SourceMap`, its boxes, the `Correspondence` of all workers.

Also the wire form of a map, coverage over a side, and `explain`, which says in index ranges where each part of a live
tensor comes from.
"""

from __future__ import annotations

from weightbridge.layout.boxes import BoxTable, expand
from weightbridge.layout.correspondence import Correspondence
from weightbridge.layout.coverage_live import missing_elements, unused_tensors
from weightbridge.layout.explain import explain
from weightbridge.layout.source_map import CARRIED_PREFIX, Constant, CopyTable, LiveTensor, LoaderGroup, SourceMap
from weightbridge.layout.wire import decode_source_map, encode_source_map

__all__ = [
    "CARRIED_PREFIX",
    "BoxTable",
    "Constant",
    "CopyTable",
    "Correspondence",
    "LiveTensor",
    "LoaderGroup",
    "SourceMap",
    "decode_source_map",
    "encode_source_map",
    "expand",
    "explain",
    "missing_elements",
    "unused_tensors",
]
