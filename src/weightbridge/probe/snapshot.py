"""What a worker's live tensors were at one moment: their addresses, and their bits in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from weightbridge.checkpoint.dtypes import DType, dtype_of_torch_name
from weightbridge.probe.live import distinct_elements, local_tensor, raw_bits
from weightbridge.probe.values import describe_bits

__all__ = ["Address", "Difference", "Snapshot", "address_of"]


class Address(NamedTuple):
    """What a captured graph or registered memory relies on."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} strides {list(self.strides)} on {self.device} at {self.pointer:#x}"


def address_of(local: torch.Tensor) -> Address:
    """Of a local tensor. An empty one has no pointer to keep."""
    pointer = local.data_ptr() if local.numel() else 0
    return Address(pointer, tuple(local.shape), tuple(local.stride()), str(local.dtype), str(local.device))


class Difference(NamedTuple):
    """The first element of a live tensor that differs, and the raw bits before and after."""

    tensor: str
    element: tuple[int, ...]
    before: int
    after: int
    dtype: DType

    def __str__(self) -> str:
        return (
            f"live tensor {self.tensor!r}, element {list(self.element)}: expected {describe_bits(self.before, self.dtype)}, "
            f"found {describe_bits(self.after, self.dtype)}"
        )


class Snapshot:
    """Taken of live tensors by name; compares them with a later moment and puts them back. Memory: one host copy.

    contents: False for the addresses alone; there is nothing to compare or to put back then.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, contents: bool = True) -> None:
        local = {name: local_tensor(t) for name, t in tensors.items()}
        self.addresses = {name: address_of(t) for name, t in local.items()}
        self._originals = {name: distinct_elements(t) for name, t in local.items()} if contents else {}
        self._copies = {name: t.to("cpu", copy=True) for name, t in self._originals.items()}

    def moved(self, now: Mapping[str, torch.Tensor]) -> str | None:
        """What changed about the tensors themselves, in words; None when all stand where they stood."""
        if set(now) != set(self.addresses):
            changed = min(set(now) ^ set(self.addresses))
            return f"the set of live tensors changed by {changed!r}"
        for name, before in self.addresses.items():
            after = address_of(local_tensor(now[name]))
            if after != before:
                return f"live tensor {name!r} was {before} and is now {after}"
        return None

    def bits(self, name: str, now: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(bits then, bits now) of one tensor, as integers of its size, on the host; None when they cannot be compared."""
        if name not in now:
            return None
        current, then = distinct_elements(local_tensor(now[name])), self._copies[name]
        if current.shape != then.shape or current.dtype != then.dtype:
            return None
        return _bits(then), _bits(current.to("cpu"))

    def difference(self, now: Mapping[str, torch.Tensor]) -> Difference | None:
        """The first element whose bits differ, by order of the names; None when all are the same.

        Tensors that are gone or have another shape are left to `moved`.
        """
        for name in self._copies:
            pair = self.bits(name, now)
            if pair is not None and not torch.equal(*pair):
                return self.first(name, pair, pair[0] != pair[1])
        return None

    def first(self, name: str, pair: tuple[torch.Tensor, torch.Tensor], where: torch.Tensor) -> Difference:
        """The first element of `where` ([shape] bool, with at least one True) as a Difference."""
        element = tuple(int(i) for i in where.nonzero()[0])
        dtype = dtype_of_torch_name(self.addresses[name].dtype)
        mask = (1 << 8 * dtype.itemsize) - 1
        before, after = (int(bits[element].item()) & mask for bits in pair)
        return Difference(name, element, before, after, dtype)

    def restore(self, now: Mapping[str, torch.Tensor]) -> None:
        """Put the bits back where they were, and into whatever stands there under the same name and shape now."""
        with torch.no_grad():
            for name, copy in self._copies.items():
                self._originals[name].copy_(copy)
                if name in now:
                    target = distinct_elements(local_tensor(now[name]))
                    if target.shape == copy.shape and target.data_ptr() != self._originals[name].data_ptr():
                        target.copy_(copy)


def _bits(tensor: torch.Tensor) -> Any:
    return raw_bits(tensor, 0, tuple(tensor.shape), tuple(tensor.stride()))
