"""Small modules whose loaders compute, as real engines do, each beside tensors that are copied.

Every one has the checkpoint's `rows` (name, shape, dtype), its live tensors, a loader, the names of what it computes and of
what it needs for that. Sizes are uneven on purpose.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.probe import NamedTensors

BF16, F32, FP8, U8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8
Stream = Iterable[tuple[str, torch.Tensor]]
Row = tuple[str, tuple[int, ...], torch.dtype]


class Part:
    """A copied projection, and something computed; all names begin with the part's own."""

    name = ""
    own_rows: tuple[Row, ...] = ()
    computed: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.live = {"proj": torch.zeros(7, 5, dtype=BF16), **self.make()}
        self.buffers: frozenset[str] = frozenset()

    @classmethod
    def rows(cls) -> tuple[Row, ...]:
        return (("proj", (7, 5), BF16), *cls.own_rows)

    def make(self) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def load(self, given: dict[str, torch.Tensor]) -> None:
        raise NotImplementedError

    def load_weights(self, tensors: Stream) -> None:
        given = dict(tensors)
        if "proj" in given:
            self.live["proj"].copy_(given.pop("proj"))
        self.load(given)
        for tensor in given.values():
            tensor.reshape(-1).view(torch.uint8).fill_(0x55)  # what a loader is given is its own

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return NamedTensors(self.live, buffers=self.buffers)


class PlusOne(Part):
    """A norm kept as w + 1."""

    own_rows = (("norm", (13,), BF16), ("bias", (13,), BF16))
    computed, needed = frozenset({"norm"}), frozenset({"norm"})
    by = 1.0

    def make(self) -> dict[str, torch.Tensor]:
        return {"norm": torch.zeros(13, dtype=BF16), "bias": torch.zeros(13, dtype=BF16)}

    def load(self, given: dict[str, torch.Tensor]) -> None:
        for name, tensor in given.items():
            self.live[name].copy_(tensor + self.by if name == "norm" else tensor)


class MinusOne(PlusOne):
    by = -1.0


class NegativeExponential(Part):
    """The decay of a state space model: live A is -exp(A_log)."""

    own_rows = (("A_log", (6,), F32), ("D", (6,), F32))
    computed, needed = frozenset({"A"}), frozenset({"A_log"})

    def make(self) -> dict[str, torch.Tensor]:
        return {"A": torch.zeros(6), "D": torch.zeros(6)}

    def load(self, given: dict[str, torch.Tensor]) -> None:
        for name, tensor in given.items():
            self.live[name.removesuffix("_log")].copy_(-torch.exp(tensor) if name == "A_log" else tensor)


class DerivedClone(Part):
    """A router kept as bf16 parameter and, outside the parameters, as a scaled fp32 clone made after each load."""

    own_rows = (("gate", (4, 9), BF16), ("up", (4, 9), BF16))
    computed, needed = frozenset({"gate_fp32"}), frozenset({"gate"})

    def __init__(self) -> None:
        super().__init__()
        self.buffers = frozenset({"gate_fp32"})

    def make(self) -> dict[str, torch.Tensor]:
        zeros = torch.zeros(4, 9, dtype=BF16)
        return {"gate": zeros, "up": zeros.clone(), "gate_fp32": torch.zeros(4, 9)}

    def load(self, given: dict[str, torch.Tensor]) -> None:
        for name, tensor in given.items():
            self.live[name].copy_(tensor)
        self.live["gate_fp32"].copy_(self.live["gate"].float() * 0.1)


class BlockFp8(Part):
    """Block-quantised on disk, bf16 in memory. Weight and scales must meet in one call."""

    block = 4
    own_rows = (("weight", (8, 12), FP8), ("weight_scale_inv", (2, 3), F32), ("bias", (8,), BF16))
    computed, needed = frozenset({"weight"}), frozenset({"weight", "weight_scale_inv"})

    def make(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(8, 12, dtype=BF16), "bias": torch.zeros(8, dtype=BF16)}

    def load(self, given: dict[str, torch.Tensor]) -> None:
        if "bias" in given:
            self.live["bias"].copy_(given["bias"])
        if ("weight" in given) != ("weight_scale_inv" in given):
            raise ValueError("weight and weight_scale_inv must come in one call")
        if "weight" in given:
            scales = given["weight_scale_inv"].repeat_interleave(self.block, 0).repeat_interleave(self.block, 1)
            self.live["weight"].copy_(given["weight"].float() * scales)


class FusedScale(Part):
    """Three fp8 shards with a scale each become one fp8 tensor with their largest scale."""

    shards = ("k", "q", "v")
    own_rows = tuple(
        row
        for s in shards
        for row in ((f"{s}_weight", (3, 5), FP8), (f"{s}_scale", (), F32), (f"{s}_bias", (3,), BF16))
    )
    computed = frozenset({"qkv", "scale"})
    needed = frozenset({f"{s}_{kind}" for s in shards for kind in ("weight", "scale")})

    def make(self) -> dict[str, torch.Tensor]:
        return {
            "qkv": torch.zeros(9, 5, dtype=FP8),
            "scale": torch.zeros(()),
            "bias": torch.zeros(9, dtype=BF16),
        }

    def load(self, given: dict[str, torch.Tensor]) -> None:
        for i, s in enumerate(self.shards):
            if f"{s}_bias" in given:
                self.live["bias"][3 * i : 3 * i + 3] = given[f"{s}_bias"]
        scales = [given[f"{s}_scale"] for s in self.shards if f"{s}_scale" in given]
        if not scales:
            return
        largest = torch.stack(scales).max()
        self.live["scale"].copy_(largest)
        for i, s in enumerate(self.shards):
            if f"{s}_weight" in given:
                shard = given[f"{s}_weight"].float() * (given[f"{s}_scale"] / largest)
                self.live["qkv"][3 * i : 3 * i + 3] = shard.clamp(-448, 448).to(FP8)


class Repack(Part):
    """4-bit values, two a byte, laid out anew for a kernel: nibbles of byte columns c and c + 1 trade places."""

    own_rows = (("qweight", (6, 8), U8), ("scales", (6, 2), BF16))
    computed, needed = frozenset({"packed"}), frozenset({"qweight"})

    def make(self) -> dict[str, torch.Tensor]:
        return {"packed": torch.zeros(8, 6, dtype=U8), "scales": torch.zeros(6, 2, dtype=BF16)}

    def load(self, given: dict[str, torch.Tensor]) -> None:
        if "scales" in given:
            self.live["scales"].copy_(given["scales"])
        if "qweight" in given:
            even, odd = given["qweight"][:, ::2], given["qweight"][:, 1::2]
            low = (even & 15) | (odd & 15) << 4
            high = (even >> 4) | (odd & 0xF0)
            self.live["packed"].copy_(torch.stack([low, high], dim=2).reshape(6, 8).t())


PARTS: tuple[type[Part], ...] = (PlusOne, MinusOne, NegativeExponential, DerivedClone, BlockFp8, FusedScale, Repack)


class Together(Part):
    """All parts in one module, names with the part's name in front."""

    def __init__(self) -> None:
        self.parts = {cls.__name__: cls() for cls in PARTS}
        self.live = {f"{p}.{n}": t for p, part in self.parts.items() for n, t in part.live.items()}
        self.buffers = frozenset(f"{p}.{n}" for p, part in self.parts.items() for n in part.buffers)

    @classmethod
    def rows(cls) -> tuple[Row, ...]:
        return tuple((f"{c.__name__}.{n}", shape, dtype) for c in PARTS for n, shape, dtype in c.rows())

    def load_weights(self, tensors: Stream) -> None:
        given = list(tensors)
        for name, part in self.parts.items():
            prefix = f"{name}."
            part.load_weights((n.removeprefix(prefix), t) for n, t in given if n.startswith(prefix))

    computed = frozenset(f"{c.__name__}.{n}" for c in PARTS for n in c.computed)
    needed = frozenset(f"{c.__name__}.{n}" for c in PARTS for n in c.needed)


def spec_of(rows: Iterable[Row]) -> CheckpointSpec:
    return CheckpointSpec.from_iterable(rows)


def weights(spec: CheckpointSpec, version: int) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, exact in fp32 and in the checkpoint's dtype; scales are positive."""
    generator = torch.Generator().manual_seed(77 + version)
    made = {}
    for t in spec.tensors:
        dtype = getattr(torch, t.dtype.torch_name)
        if dtype is U8:
            made[t.name] = torch.randint(0, 256, t.shape, generator=generator, dtype=torch.int64).to(U8)
        else:
            values = torch.randn(t.shape, generator=generator)
            made[t.name] = (values.abs() + 0.1 if "scale" in t.name else values).to(dtype)
    return made


class Collective:
    """What the ranks of an engine have in common: every call must bring the same names on all of them, or all fail."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[list[tuple[str, ...]]] = [[] for _ in range(size)]
        self._barrier = threading.Barrier(size)

    def meet(self, rank: int, names: tuple[str, ...]) -> None:
        self.calls[rank].append(names)
        self._barrier.wait(20)
        if len({calls[-1] for calls in self.calls}) != 1:
            raise RuntimeError(f"ranks were given different tensors: {[calls[-1] for calls in self.calls]}")
        self._barrier.wait(20)


class TensorParallelPart:
    """Worker `rank` of three: rows of a tensor divided by its largest magnitude, and on rank 1 alone a shifted norm."""

    ROWS: tuple[Row, ...] = (
        ("first", (9, 4), BF16),
        ("normed", (10, 4), F32),
        ("norm", (4,), BF16),
        ("last", (9, 4), BF16),
    )
    SIZE = 3
    NEEDED = frozenset({"normed", "norm"})

    def __init__(self, rank: int, together: Collective) -> None:
        self.rank, self.together = rank, together
        mine = len(torch.zeros(10)[rank * 4 : rank * 4 + 4])
        self.live = {
            "first": torch.zeros(3, 4, dtype=BF16),
            "normed": torch.zeros(mine, 4),
            "norm": torch.zeros(4, dtype=BF16),
            "last": torch.zeros(3, 4, dtype=BF16),
        }
        self.computed = {"normed", "norm"} if rank == 1 else {"normed"}

    def load_weights(self, tensors: Stream) -> None:
        given = dict(tensors)
        self.together.meet(self.rank, tuple(given))
        for name, tensor in given.items():
            if name == "normed":
                whole = tensor / tensor.abs().max()
                self.live[name].copy_(whole[self.rank * 4 : self.rank * 4 + 4])
            elif name == "norm":
                self.live[name].copy_(tensor + 1 if self.rank == 1 else tensor)
            else:
                self.live[name].copy_(tensor[3 * self.rank : 3 * self.rank + 3])

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.live
