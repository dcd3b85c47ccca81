"""A small job with the layouts that matter, written by hand: uneven shards, fused and padded tensors, replicas.

Trainers keep fp32 masters cut along dim 0 (the last rank is short). The engine "tp" runs on three workers: fused qkv with the
KV rows replicated, fused gate/up, column shards, a vocabulary padded with zeros. The engine "solo" holds everything plainly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from weightbridge.checkpoint import CheckpointSpec

HIDDEN, VOCAB, KV, INTER, LAYERS = 24, 97, 8, 30, 3
TP = 3


def checkpoint_spec(scale: int = 1) -> CheckpointSpec:
    """scale: multiplies the vocabulary, to make transfers last."""
    rows: list[tuple[str, tuple[int, ...], str]] = [("embed", (VOCAB * scale, HIDDEN), "bfloat16")]
    for i in range(LAYERS):
        rows += [
            (f"layers.{i}.q", (HIDDEN, HIDDEN), "bfloat16"),
            (f"layers.{i}.k", (KV, HIDDEN), "bfloat16"),
            (f"layers.{i}.v", (KV, HIDDEN), "bfloat16"),
            (f"layers.{i}.o", (HIDDEN, HIDDEN), "bfloat16"),
            (f"layers.{i}.gate", (INTER, HIDDEN), "bfloat16"),
            (f"layers.{i}.up", (INTER, HIDDEN), "bfloat16"),
            (f"layers.{i}.down", (HIDDEN, INTER), "bfloat16"),
            (f"layers.{i}.norm", (HIDDEN,), "float32"),
        ]
    return CheckpointSpec.from_iterable(rows)


def weights(spec: CheckpointSpec, version: int) -> dict[str, torch.Tensor]:
    """The full fp32 weights of a version; the same in every process."""
    generator = torch.Generator().manual_seed(1000 + version)
    return {t.name: torch.randn(t.shape, generator=generator) for t in spec.tensors}


def rounded(spec: CheckpointSpec, version: int) -> dict[str, torch.Tensor]:
    """What engines must hold: the weights rounded to the checkpoint's dtypes."""
    full = weights(spec, version)
    return {t.name: full[t.name].to(getattr(torch, t.dtype.torch_name)) for t in spec.tensors}


class TrainerShard:
    """Rank `rank` of `size`: the rows torch.chunk would give it, in fp32; may be none."""

    def __init__(self, spec: CheckpointSpec, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.live = {t.name: self._rows(torch.zeros(t.shape)).clone() for t in spec.tensors}

    def _rows(self, full: torch.Tensor) -> torch.Tensor:
        per_rank = -(-full.shape[0] // self.size)
        return full[self.rank * per_rank : (self.rank + 1) * per_rank]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.live[name].copy_(self._rows(tensor))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.live


class SoloEngine:
    def __init__(self, spec: CheckpointSpec) -> None:
        self.live = {t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype.torch_name)) for t in spec.tensors}

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.live[name].copy_(tensor)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.live


class TensorParallelEngine:
    """Worker `rank` of TP: what its loader does is all the library may know of it."""

    def __init__(self, spec: CheckpointSpec, rank: int) -> None:
        self.rank = rank
        self.live: dict[str, torch.Tensor] = {}
        self.vocab = spec.tensors[0].shape[0]
        self.vocab_rows = -(-self.vocab // TP)
        rows, inner = HIDDEN // TP, INTER // TP
        self.live["embed"] = torch.zeros(self.vocab_rows, HIDDEN, dtype=torch.bfloat16)
        for i in range(LAYERS):
            self.live[f"layers.{i}.qkv"] = torch.zeros(rows + 2 * KV, HIDDEN, dtype=torch.bfloat16)
            self.live[f"layers.{i}.gate_up"] = torch.zeros(2 * inner, HIDDEN, dtype=torch.bfloat16)
            self.live[f"layers.{i}.o"] = torch.zeros(HIDDEN, rows, dtype=torch.bfloat16)
            self.live[f"layers.{i}.down_t"] = torch.zeros(inner, HIDDEN, dtype=torch.bfloat16)
            self.live[f"layers.{i}.norm"] = torch.zeros(HIDDEN, dtype=torch.float32)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        r, rows, inner = self.rank, HIDDEN // TP, INTER // TP
        for name, tensor in tensors:
            layer, _, kind = name.rpartition(".")
            if kind == "embed":
                mine = tensor[r * self.vocab_rows : (r + 1) * self.vocab_rows]
                self.live["embed"][: len(mine)] = mine
                self.live["embed"][len(mine) :] = 0
            elif kind == "q":
                self.live[f"{layer}.qkv"][:rows] = tensor[r * rows : (r + 1) * rows]
            elif kind == "k":
                self.live[f"{layer}.qkv"][rows : rows + KV] = tensor
            elif kind == "v":
                self.live[f"{layer}.qkv"][rows + KV :] = tensor
            elif kind == "o":
                self.live[f"{layer}.o"].copy_(tensor[:, r * rows : (r + 1) * rows])
            elif kind == "gate":
                self.live[f"{layer}.gate_up"][:inner] = tensor[r * inner : (r + 1) * inner]
            elif kind == "up":
                self.live[f"{layer}.gate_up"][inner:] = tensor[r * inner : (r + 1) * inner]
            elif kind == "down":
                self.live[f"{layer}.down_t"].copy_(tensor[:, r * inner : (r + 1) * inner].t())
            else:
                self.live[f"{layer}.norm"].copy_(tensor)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.live


def engine_worker(spec: CheckpointSpec, engine: str, rank: int) -> SoloEngine | TensorParallelEngine:
    return SoloEngine(spec) if engine == "solo" else TensorParallelEngine(spec, rank)


def same_bytes(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ in any bit."""
    return [name for name in a if not torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))]
