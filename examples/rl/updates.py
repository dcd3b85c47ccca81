"""How a new version gets from the trainers into the engine: by the library, by broadcast, or by a file.

Each class is used by all trainer ranks alike; `channel` is there on rank 0 only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from examples.rl.channel import Done, Load, Receive, TrainerEnd
from examples.rl.config import ENGINE, RunConfig
from examples.rl.extension import broadcast_group
from weightbridge import Options, SenderAdapter, spec_from_folder
from weightbridge.integrations import fsdp

__all__ = ["Update", "Updates", "updates_by"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One version's way, in seconds. total: from the call to the engine holding it. trainer_stall: of the caller.

    ewtt: from the first worker that stops to the last that goes on. agst: stall of all workers over their number.
    network_bytes: between nodes, where it is counted.
    """

    total: float
    trainer_stall: float
    ewtt: float
    agst: float
    network_bytes: int | None = None


class Updates(Protocol):
    def connect(self) -> None: ...

    def send(self, version: int) -> Update:
        """Collective. Returns when the engine holds the version."""

    def close(self) -> None: ...


class ByWeightBridge:
    """The library: the three calls that a trainer makes."""

    def __init__(self, config: RunConfig, rank: int, model: nn.Module, channel: TrainerEnd | None) -> None:
        self._sender = SenderAdapter(
            group=(rank, config.num_trainers),
            endpoint=config.endpoint,
            checkpoint=spec_from_folder(config.checkpoint),
            load_weights=fsdp.load_weights_fn(model),
            tensors=fsdp.tensors_fn(model),
            node="trainers",
            engines=(ENGINE,),
            options=Options(**config.options()),
        )

    def connect(self) -> None:
        self._sender.connect()

    def send(self, version: int) -> Update:
        began = time.monotonic()
        handle = self._sender.send_weights(version=version)
        stalled = time.monotonic() - began
        report = handle.wait()
        return Update(
            total=time.monotonic() - began, trainer_stall=stalled, ewtt=report.ewtt_seconds, agst=report.agst_seconds,
            network_bytes=sum(received for _, received in report.network_bytes.values()),
        )  # fmt: skip

    def close(self) -> None:
        self._sender.close()


class _Gathered:
    """What the other two ways share: every rank gathers every tensor whole, rank 0 passes it on, all wait."""

    def __init__(self, config: RunConfig, rank: int, model: nn.Module, channel: TrainerEnd | None) -> None:
        self._config, self._rank, self._model, self._channel = config, rank, model, channel

    def connect(self) -> None:
        pass

    def send(self, version: int) -> Update:
        began = time.monotonic()
        engine_stall = self._pass_on(version, self._whole_tensors())
        _wait_for_all()
        total = time.monotonic() - began
        trainers = self._config.num_trainers
        return Update(
            total=total, trainer_stall=total, ewtt=total, agst=(trainers * total + engine_stall) / (trainers + 1)
        )

    def close(self) -> None:
        pass

    def _whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        fsdp.reshard(self._model)
        parameters = dict(self._model.named_parameters())
        for spec in spec_from_folder(self._config.checkpoint).tensors:
            parameter = parameters[spec.name].detach()
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield spec.name, whole.to(torch.bfloat16)

    def _pass_on(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> float:
        """Rank 0 hands the tensors over, the others drain them. Returns how long the engine stood still (rank 0 knows)."""
        raise NotImplementedError


class ByBroadcast(_Gathered):
    """Rank 0 broadcasts tensor after tensor to the engine's worker, in a gloo group of the two."""

    def connect(self) -> None:
        if self._rank == 0:
            self._group = broadcast_group(self._config.broadcast_port, 0, self._config.start_seconds)

    def _pass_on(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> float:
        number = self._channel.ask(Receive(version=version)) if self._channel is not None else 0
        for _, tensor in tensors:
            if self._channel is not None:
                self._group.broadcast(tensor, 0).wait()
        return self._channel.reply(number, Done).seconds if self._channel is not None else 0.0


class ByFiles(_Gathered):
    """Rank 0 writes a safetensors file and tells the engine to load it."""

    def _pass_on(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> float:
        whole = {name: tensor for name, tensor in tensors if self._channel is not None}
        if self._channel is None:
            return 0.0
        folder = Path(self._config.work_dir) / "version"
        folder.mkdir(exist_ok=True)
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        return self._channel.call(Load(version=version, folder=str(folder)), Done).seconds


def _wait_for_all() -> None:
    torch.distributed.barrier()


def updates_by(config: RunConfig, rank: int, model: nn.Module, channel: TrainerEnd | None) -> Updates:
    """The way that the run's configuration names."""
    kinds: dict[str, Any] = {"weightbridge": ByWeightBridge, "broadcast": ByBroadcast, "files": ByFiles}
    made: Updates = kinds[config.method](config, rank, model, channel)
    return made
