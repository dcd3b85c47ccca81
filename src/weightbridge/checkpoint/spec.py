"""CheckpointSpec: the names, shapes and dtypes that give every weight element its global coordinates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from weightbridge.checkpoint.dtypes import DType, dtype_of_torch_name
from weightbridge.errors import SpecError

__all__ = ["CheckpointSpec", "TensorSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One checkpoint tensor. shape: global, as the checkpoint has it; () for a scalar."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("a checkpoint tensor has an empty name")
        if any(n < 0 for n in self.shape):
            raise SpecError(f"tensor {self.name!r} has a negative extent in shape {self.shape}", tensor=self.name)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """The checkpoint that trainers and engines have in common, as data. Sender and receiver must agree on its digest.

    tensors: in checkpoint order; this order numbers the elements.
    constants: name -> value for tensors whose value a loader inspects (a scale it insists is 1.0). They are handed
        to the loader filled with that value, never probed and never transferred.
    """

    tensors: tuple[TensorSpec, ...]
    constants: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not self.tensors:
            raise SpecError("the checkpoint holds no tensors; expected at least one")
        seen: set[str] = set()
        for t in self.tensors:
            if t.name in seen:
                raise SpecError(
                    f"tensor {t.name!r} appears twice in the checkpoint; names must be unique", tensor=t.name
                )
            seen.add(t.name)
        for name in self.constants:
            if name not in seen:
                raise SpecError(f"constant {name!r} is no tensor of the checkpoint; check the name", tensor=name)

    @cached_property
    def index(self) -> dict[str, int]:
        """Tensor name -> position in `tensors`."""
        return {t.name: i for i, t in enumerate(self.tensors)}

    @cached_property
    def numel_offsets(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[num_tensors + 1] first global element index g of each tensor; the last entry is the total."""
        return np.concatenate([[0], np.cumsum([t.numel for t in self.tensors], dtype=np.int64)]).astype(np.int64)

    @property
    def numel(self) -> int:
        return int(self.numel_offsets[-1])

    @cached_property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def digest(self) -> str:
        """Hex digest of names, shapes, dtypes and constants, in order."""
        h = hashlib.blake2b(digest_size=16)
        for t in self.tensors:
            h.update(repr((t.name, t.shape, t.dtype.name)).encode())
        h.update(repr(sorted(self.constants.items())).encode())
        return h.hexdigest()

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], *, constants: Mapping[str, float] | None = None
    ) -> CheckpointSpec:
        """From name -> tensor (anything with `.shape` and a torch `.dtype`). Shapes must be the global ones."""
        return cls.from_iterable(((name, t.shape, t.dtype) for name, t in state.items()), constants=constants)

    @classmethod
    def from_iterable(
        cls, tensors: Iterable[tuple[str, Iterable[int], Any]], *, constants: Mapping[str, float] | None = None
    ) -> CheckpointSpec:
        """From (name, global shape, dtype) triples; dtype is a DType, a torch dtype or a torch dtype's name."""
        return cls(
            tensors=tuple(
                TensorSpec(
                    name=name,
                    shape=tuple(int(n) for n in shape),
                    dtype=dtype if isinstance(dtype, DType) else dtype_of_torch_name(str(dtype)),
                )
                for name, shape, dtype in tensors
            ),
            constants=MappingProxyType(dict(constants or {})),
        )
