"""Three small loaders to see the contract at work: one that copies, one that computes, one that is broken.

    weightbridge check weightbridge.testing.example_loaders:good
    weightbridge check weightbridge.testing.example_loaders:computed
    weightbridge check weightbridge.testing.example_loaders:broken

Each factory returns a `LoaderUnderTest` of a small torch module: tensor-parallel worker 1 of 2 of a made-up engine.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.probe.live import discover_tensors
from weightbridge.testing.loader_contract import LoaderUnderTest

__all__ = ["broken", "computed", "good"]

HIDDEN, QUERY, KEY_VALUE, INNER, VOCAB, VOCAB_PADDED = 24, 24, 6, 30, 97, 128
RANK, SIZE = 1, 2
FLOAT8_MAX = 448.0

NamedWeights = Iterable[tuple[str, torch.Tensor]]


def _parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


def _spec(tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> CheckpointSpec:
    return CheckpointSpec.from_iterable((name, shape, dtype) for name, (shape, dtype) in tensors.items())


def _under_test(spec: CheckpointSpec, module: CopyingWorker | ComputingWorker) -> LoaderUnderTest:
    return LoaderUnderTest(spec=spec, load_weights=module.load_weights, tensors=lambda: discover_tensors(module))


_DENSE = {
    "embed.weight": ((VOCAB, HIDDEN), torch.bfloat16),
    "q_proj.weight": ((QUERY, HIDDEN), torch.bfloat16),
    "k_proj.weight": ((KEY_VALUE, HIDDEN), torch.bfloat16),
    "v_proj.weight": ((KEY_VALUE, HIDDEN), torch.bfloat16),
    "o_proj.weight": ((HIDDEN, QUERY), torch.bfloat16),
    "gate_proj.weight": ((INNER, HIDDEN), torch.bfloat16),
    "up_proj.weight": ((INNER, HIDDEN), torch.bfloat16),
    "down_proj.weight": ((HIDDEN, INNER), torch.bfloat16),
    "norm.weight": ((HIDDEN,), torch.bfloat16),
}


class CopyingWorker(nn.Module):
    """Fused q, k, v and fused gate, up by rows; o and down by columns; a vocabulary padded with zero rows.

    swaps_halves: from the second load on, the loader puts `up` where `gate` belongs.
    """

    def __init__(self, *, swaps_halves: bool = False) -> None:
        super().__init__()
        self.embed = _parameter(VOCAB_PADDED // SIZE, HIDDEN)
        self.qkv = _parameter(QUERY // SIZE + 2 * KEY_VALUE, HIDDEN)
        self.o = _parameter(HIDDEN, QUERY // SIZE)
        self.gate_up = _parameter(2 * INNER // SIZE, HIDDEN)
        self.down = _parameter(HIDDEN, INNER // SIZE)
        self.norm = _parameter(HIDDEN, dtype=torch.float32)
        self.register_buffer("inverse_frequencies", 1.0 / 10000 ** (torch.arange(0, 6, 2) / 6))
        self._swaps_halves = swaps_halves
        self._loaded = False

    def load_weights(self, weights: NamedWeights) -> None:
        """What an engine's own loader does: slices of what it is given, copied to where the kernels want them."""
        query, inner = QUERY // SIZE, INNER // SIZE
        gate_at, up_at = (inner, 0) if self._swaps_halves and self._loaded else (0, inner)
        places = {
            "q_proj.weight": (self.qkv[:query], 0),
            "o_proj.weight": (self.o, 1),
            "gate_proj.weight": (self.gate_up[gate_at : gate_at + inner], 0),
            "up_proj.weight": (self.gate_up[up_at : up_at + inner], 0),
            "down_proj.weight": (self.down, 1),
        }
        replicated = {
            "k_proj.weight": self.qkv[query : query + KEY_VALUE],
            "v_proj.weight": self.qkv[query + KEY_VALUE :],
            "norm.weight": self.norm,
        }
        for name, tensor in weights:
            if name == "embed.weight":
                rows = tensor[RANK * len(self.embed) : (RANK + 1) * len(self.embed)]
                self.embed[: len(rows)] = rows
                self.embed[len(rows) :] = 0
            elif name in replicated:
                replicated[name].copy_(tensor)
            else:
                place, dim = places[name]
                place.copy_(tensor.narrow(dim, RANK * place.shape[dim], place.shape[dim]))
        self._loaded = True


_COMPUTED = {
    "norm.weight": ((HIDDEN,), torch.bfloat16),
    "A_log": ((2 * KEY_VALUE,), torch.float32),
    "gate_proj.weight": ((INNER, HIDDEN), torch.float8_e4m3fn),
    "gate_proj.weight_scale": ((), torch.float32),
    "up_proj.weight": ((INNER, HIDDEN), torch.float8_e4m3fn),
    "up_proj.weight_scale": ((), torch.float32),
    "down_proj.weight": ((HIDDEN, INNER), torch.bfloat16),
}


class ComputingWorker(nn.Module):
    """A norm kept as w + 1, A = -exp(A_log), and two fp8 matrices fused under one scale, the larger of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = _parameter(HIDDEN, dtype=torch.float32)
        self.a = _parameter(2 * KEY_VALUE // SIZE, dtype=torch.float32)
        self.gate_up = _parameter(2 * INNER // SIZE, HIDDEN, dtype=torch.float8_e4m3fn)
        self.gate_up_scale = _parameter(dtype=torch.float32)
        self.down = _parameter(HIDDEN, INNER // SIZE)

    def load_weights(self, weights: NamedWeights) -> None:
        """The four tensors of the fused matrix are wanted in one call: with less it leaves the matrix as it is."""
        parts: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name == "norm.weight":
                self.norm.copy_(tensor.float() + 1)
            elif name == "A_log":
                self.a.copy_(-torch.exp(tensor.narrow(0, RANK * len(self.a), len(self.a))))
            elif name == "down_proj.weight":
                self.down.copy_(tensor.narrow(1, RANK * self.down.shape[1], self.down.shape[1]))
            else:
                parts[name] = tensor.clone()
        if len(parts) == 4:
            self._requantise(parts)

    def _requantise(self, parts: dict[str, torch.Tensor]) -> None:
        inner = INNER // SIZE
        scales = {name: parts[f"{name}.weight_scale"].abs() for name in ("gate_proj", "up_proj")}
        scale = torch.maximum(scales["gate_proj"], scales["up_proj"])
        for i, name in enumerate(scales):
            mine = parts[f"{name}.weight"].narrow(0, RANK * inner, inner).float() * (scales[name] / scale)
            self.gate_up[i * inner : (i + 1) * inner] = mine.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
        self.gate_up_scale.copy_(scale)


def good() -> LoaderUnderTest:
    """Everything is copied: the whole model takes the copy path."""
    return _under_test(_spec(_DENSE), CopyingWorker())


def computed() -> LoaderUnderTest:
    """Four live tensors are computed: they go through the loader itself, the fifth is copied."""
    return _under_test(_spec(_COMPUTED), ComputingWorker())


def broken() -> LoaderUnderTest:
    """Right once, wrong ever after: the halves of `gate_up` change places from the second load on."""
    return _under_test(_spec(_DENSE), CopyingWorker(swaps_halves=True))
