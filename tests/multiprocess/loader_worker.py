"""One rank of test_demo_loaders, a process. Exits 0 when all it checks holds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from weightbridge.integrations import dtensor, fsdp

SHAPES = {"first.weight": (7, 5), "first.bias": (7,), "second.weight": (3, 7), "tail": (1, 4)}


class Model(nn.Module):
    """Uneven sizes, one parameter that most ranks hold nothing of, a tied one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3, bias=False)
        self.tied = nn.Linear(7, 3, bias=False)
        self.tied.weight = self.second.weight
        self.tail = nn.Parameter(torch.zeros(1, 4))
        self.register_buffer("scale", torch.full((3,), 0.5))


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in SHAPES.items()}


def one_by_one(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor in memory of its own that is spoilt as soon as the next one is asked for."""
    for name, tensor in tensors.items():
        handed_out = tensor.clone()
        yield name, handed_out
        handed_out.fill_(float("nan"))


def own_part(parameter: torch.Tensor, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What this rank must hold of a whole tensor, by torch.chunk; nothing where there are fewer chunks than ranks."""
    if not isinstance(parameter, DTensor) or isinstance(parameter.placements[0], Replicate):
        return whole
    (placement,) = parameter.placements
    chunks = whole.chunk(dist.get_world_size(), placement.dim)  # type: ignore[attr-defined]
    return chunks[rank] if rank < len(chunks) else whole.narrow(placement.dim, 0, 0)  # type: ignore[attr-defined]


def check(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"wrong: {what}")


def check_loads(model: nn.Module, load: dtensor.LoadWeights, tensors: dtensor.Tensors, rank: int) -> None:
    """Load twice, the ranks one after the other and each from values of its own: nothing may come from a peer."""
    pointers = {name: t.data_ptr() for name, t in tensors().items()}
    for load_number in (1, 2):
        given = checkpoint(10 * load_number + rank)
        for turn in range(dist.get_world_size()):
            if turn == rank:
                load(one_by_one(given))
            dist.barrier()
        for name, parameter in model.named_parameters():
            held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            expected = own_part(parameter, given[name], rank).to(held.dtype)
            check(torch.equal(held, expected), f"{name} on rank {rank} after load {load_number}")
    check({name: t.data_ptr() for name, t in tensors().items()} == pointers, "storage moved")
    named = tensors()
    check("tied.weight" not in named and "second.weight" in named, f"aliases are folded, found {sorted(named)}")
    check(named.buffers == {"scale"}, f"buffers are told apart, found {sorted(named.buffers)}")
    check(bool((named["scale"] == 0.5).all()), "the buffer is untouched")
    check(all(not isinstance(t, DTensor) and not t.requires_grad for t in named.values()), "local tensors")


def run_fsdp(mesh: DeviceMesh, rank: int) -> None:
    model = Model()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tensors = fsdp.tensors_fn(model)
    check_loads(model, fsdp.load_weights_fn(model), tensors, rank)
    sharded = {name: tuple(t.shape) for name, t in tensors().items()}
    hidden = model.first(torch.ones(2, 5))
    model.unshard()
    check(
        {name: tuple(t.shape) for name, t in tensors().items()} == sharded, "gathered parameters were taken for shards"
    )
    check(hidden.shape == (2, 7), "the model runs")


def run_tensor_parallel(mesh: DeviceMesh, rank: int) -> None:
    model = Model()
    placements: dict[str, Placement] = {"first.weight": Shard(0), "first.bias": Shard(0), "tail": Replicate()}
    for name, placement in placements.items():
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        local = distribute_tensor(getattr(owner, attribute).detach(), mesh, [placement])
        setattr(owner, attribute, nn.Parameter(local))
    columns = nn.Parameter(distribute_tensor(model.second.weight.detach(), mesh, [Shard(1)]))
    model.second.weight = model.tied.weight = columns
    check_loads(model, dtensor.load_weights_fn(model), dtensor.tensors_fn(model), rank)
    rows = [3, 3, 1][rank]
    check(tuple(dtensor.tensors_fn(model)()["first.weight"].shape) == (rows, 5), "uneven rows")


def main(rank: int, world_size: int, folder: str) -> None:
    """folder: where the ranks meet, and where rank-N says which cases hold."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    mesh = init_device_mesh("cpu", (world_size,))
    for case, run in {"fsdp": run_fsdp, "tensor-parallel": run_tensor_parallel}.items():
        run(mesh, rank)
        with (Path(folder) / f"rank-{rank}").open("a") as file:
            file.write(f"{case} holds\n")
    dist.destroy_process_group()
    # torch's threads can abort the interpreter while it winds down, long after the checks have passed.
    os._exit(0)
