"""What the contract of a loader is asked about, and what it answers. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.layout.source_map import SourceMap

if TYPE_CHECKING:
    import torch

__all__ = ["CHECKS", "ContractReport", "Finding", "LoadWeights", "LoaderUnderTest", "Status", "Tensors"]

LoadWeights = Callable[[Iterable[tuple[str, "torch.Tensor"]]], object]
Tensors = Callable[[], Mapping[str, "torch.Tensor"]]

CHECKS = (
    "first load", "identity, 1 call", "identity, 2 calls", "identity, 7 calls", "addresses", "distinct values",
    "coverage of live tensors", "coverage of the checkpoint", "poison", "no-op visible", "failure visible",
    "inputs unchanged",
)  # fmt: skip
"""The rows of a report, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderUnderTest:
    """One worker's loader, as an adapter would be given it.

    spec: the checkpoint. load_weights: takes an iterable of (name, tensor). tensors: gives the live tensors by name,
    usually `lambda: discover_tensors(model)`. expected_untouched: live parameters the loader is right not to write.
    expected_unused: checkpoint tensors this worker need not take (those of other workers, under pipeline or expert
    parallelism).
    """

    spec: CheckpointSpec
    load_weights: LoadWeights
    tensors: Tensors
    expected_untouched: frozenset[str] = frozenset()
    expected_unused: frozenset[str] = frozenset()


class Status(str, Enum):
    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row. found: what was seen, in words. remedy: what to do; empty when it passed. tensor, element: where, if known."""

    check: str
    status: Status
    found: str
    remedy: str = ""
    tensor: str | None = None
    element: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractReport:
    """findings: one for each of CHECKS. source_map: the layout, when the probe could tell it. num_calls: of the loader."""

    findings: tuple[Finding, ...]
    source_map: SourceMap | None
    num_calls: int

    @property
    def passed(self) -> bool:
        """Nothing failed and nothing was left out; warnings may remain."""
        return all(f.status in {Status.PASS, Status.WARN} for f in self.findings)
