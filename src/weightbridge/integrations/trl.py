"""TRL trainers: weights from AsyncGRPOTrainer, and from any trainer that generates through VLLMGeneration, to vLLM servers.

    AsyncGRPOTrainer(..., weight_transfer=GatheredTransfer(endpoint=..., checkpoint=spec, engines=("a",)))

    with without_communicator():  # no NCCL group to the server is wanted
        trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="server"))
    route_sync(trainer.vllm_generation, GatheredTransfer(...))

A `GatheredTransfer` takes what TRL streams on the main process, whatever the sharding (FSDP, ZeRO-3, PEFT that is merged): one
copy in host memory, sent by one process. A `ShardedTransfer` sends from every rank what it holds, and gathers nothing.
TRL is imported when it is asked for, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import Options, SenderAdapter, UpdateReport
from weightbridge.errors import SpecError, UnsupportedError, UsageError

__all__ = ["GatheredTransfer", "ShardedTransfer", "route_sync", "without_communicator"]


class _Transfer:
    """What both kinds have in common: TRL's WeightTransferProtocol around one SenderAdapter.

    pause and resume do nothing: engines stop by themselves, between two steps, and a paused vLLM server makes none.
    """

    def __init__(self, first_version: int, after_update: Callable[[UpdateReport], None] | None) -> None:
        self._sender: SenderAdapter | None = None
        self._version = first_version - 1
        self._after_update = after_update
        self.last_report: UpdateReport | None = None
        """How the newest version went; None before the first."""

    @property
    def version(self) -> int:
        """The version sent last; `first_version - 1` before the first."""
        return self._version

    def pause(self) -> None:
        """Nothing to do."""

    def resume(self) -> None:
        """Nothing to do."""

    def destroy(self) -> None:
        """Leave the session; engines keep what they have. TRL calls it when training ends."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _make_sender(self) -> SenderAdapter:
        raise NotImplementedError

    def _connect(self) -> SenderAdapter:
        if self._sender is None:
            sender = self._make_sender()
            sender.connect()
            self._sender = sender
        return self._sender

    def _send(self) -> None:
        sender = self._connect()
        self._version += 1
        self.last_report = sender.send_weights(self._version).wait()
        if self._after_update is not None:
            self._after_update(self.last_report)


class GatheredTransfer(_Transfer):
    """Takes whole tensors as TRL streams them on the main process, and sends them from there."""

    def __init__(
        self, *, endpoint: str, checkpoint: CheckpointSpec, engines: Sequence[str], node: str = "trainers",
        options: Options | None = None, first_version: int = 1,
        after_update: Callable[[UpdateReport], None] | None = None,
    ) -> None:  # fmt: skip
        """endpoint, checkpoint, engines, node, options: as for SenderAdapter; values are cast to the checkpoint's dtypes.

        first_version: more than any that an engine holds, when training resumes. after_update(report): called when every
        engine has the version, before TRL goes on.
        """
        super().__init__(first_version, after_update)
        self._where: dict[str, Any] = {"endpoint": endpoint, "engines": engines, "node": node, "options": options}
        self._checkpoint = checkpoint
        self._live: dict[str, torch.Tensor] = {}

    def init_weight_transfer(self) -> None:
        """Connect. TRL calls it on the main process when training begins. Blocks until the engines have joined."""
        self._connect()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Keep the tensors, send them, and wait until every engine has them. Raises what SenderAdapter raises, and SpecError
        for a tensor that the checkpoint lacks, has in another shape, or expects and did not get."""
        self._connect()
        missing = set(self._live)
        for name, full in iterator:
            self._copy(name, full)
            missing.discard(name)
        if missing:
            raise SpecError(
                f"{len(missing)} tensors of the checkpoint were not among the weights that TRL sent, {min(missing)!r} among "
                "them (frozen ones are left out); give a CheckpointSpec of what is trained, and name the engine's tensors that "
                "stay in Options(expected_untouched=...)",
                tensor=min(missing),
            )
        self._send()

    def _make_sender(self) -> SenderAdapter:
        self._live = {
            t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype.torch_name)) for t in self._checkpoint.tensors
        }
        return SenderAdapter(
            group=(0, 1),
            checkpoint=self._checkpoint,
            load_weights=self._load,
            tensors=lambda: self._live,
            **self._where,
        )

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, full in tensors:
            self._copy(name, full)

    def _copy(self, name: str, full: torch.Tensor) -> None:
        own = self._live.get(name)
        if own is None or own.shape != full.shape:
            expected = f"shape {tuple(own.shape)}" if own is not None else "no such tensor"
            raise SpecError(
                f"TRL sent {name!r} of shape {tuple(full.shape)} and the checkpoint has {expected}; give the spec of the model "
                "that is trained, under the names that vLLM loads",
                tensor=name,
            )
        own.copy_(full.detach())


class ShardedTransfer(_Transfer):
    """Every rank sends what it holds of the model. Make one on every rank; nothing is gathered and nothing copied."""

    def __init__(
        self, make_sender: Callable[[], SenderAdapter], *, first_version: int = 1,
        after_update: Callable[[UpdateReport], None] | None = None,
    ) -> None:  # fmt: skip
        """make_sender: called once on every rank at the first update, when the model has been sharded.

        first_version, after_update: as for GatheredTransfer; after_update is called on every rank.
        """
        super().__init__(first_version, after_update)
        self._maker = make_sender
        self._attached = False

    def attach(self, trainer: Any) -> None:
        """On every rank, once the AsyncGRPOTrainer is made: its updates send shards from now on, and destroy leaves on each.

        The trainer's stream of whole tensors, which it walks on every rank at every update, becomes empty; walking it sends.
        """
        if not hasattr(trainer, "_streaming_iter"):
            raise UnsupportedError(
                f"{type(trainer).__name__} has no stream of weights that every rank walks; this version of TRL is not "
                "known. Use GatheredTransfer, which keeps to TRL's WeightTransferProtocol"
            )
        trainer._streaming_iter = self._stream
        callbacks: Any = import_module("transformers.trainer_callback")

        class _Leave(callbacks.TrainerCallback):  # type: ignore[misc]
            def on_train_end(_self, *_args: Any, **_kwargs: Any) -> None:
                self.destroy()

        trainer.add_callback(_Leave())
        self._attached = True

    def send(self) -> None:
        """Send this rank's part of a new version and wait until every engine has it. Collective over the ranks."""
        self._send()

    def init_weight_transfer(self) -> None:
        """TRL calls it on the main process alone, so nothing happens yet: all ranks connect at the first update."""
        if not self._attached:
            raise UsageError("ShardedTransfer: call attach(trainer) on every rank before trainer.train()")

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """On the main process: walk the stream as the other ranks do, which sends."""
        for _ in iterator:
            pass

    def _make_sender(self) -> SenderAdapter:
        return self._maker()

    def _stream(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._send()
        yield from ()


def route_sync(generation: Any, transfer: GatheredTransfer | ShardedTransfer) -> None:
    """On every rank: `generation.sync_weights()` sends through `transfer` from now on, then resets the server's prefix cache.

    generation: a trainer's `vllm_generation` in server mode. A GatheredTransfer is used on the main process only.
    Raises UnsupportedError for colocated engines: there TRL copies within the process, and nothing has to travel.
    """
    if generation.mode != "server":
        raise UnsupportedError(
            f"vllm_mode={generation.mode!r}: the engine shares the trainer's process and TRL copies weights within it; use "
            "vllm_mode='server' to have engines of their own"
        )
    is_main = generation.accelerator.is_main_process

    def sync_weights() -> None:
        if isinstance(transfer, ShardedTransfer):
            transfer.send()
        elif is_main:
            transfer.send_weights(generation._iter_named_params())
        else:
            for _ in generation._iter_named_params():  # making them is collective
                pass
        if is_main:
            generation.vllm_client.reset_prefix_cache()

    generation.sync_weights = sync_weights


@contextmanager
def without_communicator() -> Iterator[None]:
    """Within, a VLLMGeneration is made without the NCCL group to its server that TRL would open and keep."""
    client: Any = import_module("trl.generation.vllm_client").VLLMClient
    own = client.init_communicator
    client.init_communicator = _no_communicator
    try:
        yield
    finally:
        client.init_communicator = own


def _no_communicator(_client: Any, device: Any = None) -> None:
    """In place of VLLMClient.init_communicator."""
