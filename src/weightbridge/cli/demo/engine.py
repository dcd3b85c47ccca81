"""A rollout worker of the demo: a transformers model that really generates and polls for weights between tokens."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from weightbridge.cli.demo.config import DemoConfig, EngineConfig
from weightbridge.cli.demo.digests import buffer_digests, parameter_digests
from weightbridge.cli.demo.faults import arm_fault, insist_on
from weightbridge.cli.demo.generation import Generation
from weightbridge.cli.demo.messages import Answered, Channel, Digested, Phase
from weightbridge.cli.demo.models import Chat, engine_model, join_group, transfer_spec
from weightbridge.coordinator import Options, ReceiverAdapter
from weightbridge.errors import WeightBridgeError
from weightbridge.integrations import transformers as integration

__all__ = ["LockStep", "run_engine"]

PAUSE_SECONDS = 0.15
"""Between tokens while others train: the demo's machine does everything at once, on two cores perhaps."""

_ASK_SECONDS = 30.0


class LockStep:
    """Keeps the workers of one engine on the same token and lets them stop together. Rank 0 decides."""

    def __init__(self, rank: int, world_size: int, channel: Channel) -> None:
        self._rank, self._world_size, self._channel = rank, world_size, channel
        self.stopped = False

    def agree(self, token: int) -> int:
        """Rank 0's token; its order to stop travels with it. A collective over the engine where it has many workers."""
        decision = torch.tensor([token, int(self._channel.stop_requested)])
        if self._world_size > 1:
            dist.broadcast(decision, src=0)
        self.stopped = self.stopped or bool(decision[1])
        return int(decision[0])


class _EngineWorker:
    """The decoding loop of one worker. Its peers run the same one, step by step."""

    def __init__(self, config: DemoConfig, engine: EngineConfig, rank: int, channel: Channel) -> None:
        self._config, self._engine, self._rank, self._channel = config, engine, rank, channel
        if engine.num_workers > 1:
            join_group(config.work_dir, engine.name, rank, engine.num_workers)
        self._model: nn.Module = engine_model(config, engine.num_workers)
        self._chat = Chat(config)
        self._lock_step = LockStep(rank, engine.num_workers, channel)
        self._answered: set[int] = set()

    def run(self) -> None:
        """Answer once with the initial weights, then generate and poll until the launcher says stop."""
        self._channel.send(Phase(text="answering with the initial weights"))
        generation = self._new_generation()
        generation.run()
        self._report_answer(generation, version=-1)
        self._report_digests(version=-1)
        self._channel.send(Phase(text="generating"))
        receiver = self._receiver()
        try:
            self._serve(receiver)
        except RuntimeError as error:
            self._ask_library(receiver, error)
            raise
        receiver.close()

    def _serve(self, receiver: ReceiverAdapter) -> None:
        generation = self._new_generation()
        while not self._lock_step.stopped:
            generation.advance()
            self._pause()
            updated = receiver.poll_requests()
            if receiver.last_failure is not None:  # this engine is whole and could go on; a demo of failures ends here
                raise receiver.last_failure
            if updated:
                self._report_digests(receiver.version)
                self._channel.send(Phase(text=f"generating with version {receiver.version}"))
                generation = self._new_generation()  # what was generated so far is another policy's, its cache too
            elif generation.finished:
                self._report_answer(generation, receiver.version)
                generation = self._new_generation()

    def _receiver(self) -> ReceiverAdapter:
        config, name = self._config, f"{self._engine.name}/{self._rank}"
        load = integration.load_weights_fn(self._model)
        if config.loader_wants and self._engine == config.engines[0]:
            load = insist_on(config.loader_wants, load)
        return ReceiverAdapter(
            group=(self._rank, self._engine.num_workers),
            endpoint=config.endpoint,
            checkpoint=transfer_spec(config, self._model),
            load_weights=load,
            tensors=integration.tensors_fn(self._model),
            engine=self._engine.name,
            node=self._engine.node,
            options=Options(
                connect_timeout_seconds=config.connect_timeout_seconds,
                update_timeout_seconds=config.update_timeout_seconds,
                slot_bytes=config.slot_bytes,
                bandwidth=config.bandwidth,
                # a step takes 0.2 s and more here, deciding a few milliseconds: each further poll is waited for in vain
                window=1,
            ),
            before_update_hook=lambda version: arm_fault(config, name, version),
        )

    def _new_generation(self) -> Generation:
        return Generation(
            self._model,
            self._chat.prompt_ids,
            max_new_tokens=self._config.max_new_tokens,
            end_ids=self._chat.end_ids,
            agree=self._lock_step.agree,
        )

    def _pause(self) -> None:
        time.sleep(PAUSE_SECONDS)

    def _report_answer(self, generation: Generation, version: int) -> None:
        if self._rank == 0 and version not in self._answered:
            self._answered.add(version)
            text = self._chat.decode(generation.tokens)
            self._channel.send(Answered(version=version, text=text, steps=tuple(generation.steps)))

    def _report_digests(self, version: int) -> None:
        """Say what this worker holds. Collective over the engine: whole tensors are gathered from its workers."""
        self._channel.send(
            Digested(
                version=version,
                parameters=parameter_digests(self._model, torch.bfloat16),
                buffers=buffer_digests(self._model),
            )
        )

    def _ask_library(self, receiver: ReceiverAdapter, error: RuntimeError) -> None:
        """The engine's own collective broke. Its error says that a peer is gone; the library's can say which.

        Raises the library's error when it comes in time, so that the people's message names the worker that died.
        """
        self._channel.send(Phase(text=f"asking the library who is gone, after: {error}"))
        deadline = time.monotonic() + _ASK_SECONDS
        while time.monotonic() < deadline:
            try:
                receiver.poll_requests()
            except WeightBridgeError as named:
                raise named from error
            if receiver.last_failure is not None:
                raise receiver.last_failure from error
            time.sleep(PAUSE_SECONDS)


def run_engine(config: DemoConfig, name: str, rank: int, channel: Channel) -> None:
    """The whole life of worker `rank` of engine `name`, until the launcher says stop. Raises whatever ends it early."""
    channel.send(Phase(text="loading the model"))
    _EngineWorker(config, config.engine(name), rank, channel).run()
