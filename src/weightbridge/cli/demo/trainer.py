"""A trainer worker of the demo: FSDP2 fine-tuning in fp32, every version sent with `send_weights`."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weightbridge.cli.demo.config import TRAINERS_NODE, DemoConfig
from weightbridge.cli.demo.digests import digest, full_parameters
from weightbridge.cli.demo.faults import arm_fault
from weightbridge.cli.demo.generation import Generation, teacher_forced
from weightbridge.cli.demo.messages import Channel, Digested, Phase, PlanMade, Referenced, Trained, Updated
from weightbridge.cli.demo.models import Chat, join_group, trainer_model, transfer_spec, undistributed_model
from weightbridge.coordinator import Options, SenderAdapter
from weightbridge.errors import InternalError, TransferTimeout
from weightbridge.integrations import fsdp

__all__ = ["Training", "run_trainer"]

_ORDER_SECONDS = 300.0


class Training:
    """Full fine-tuning of a sharded model on one question and its new answer. Every method is a collective."""

    def __init__(self, model: nn.Module, chat: Chat, learning_rate: float) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        self._ids = torch.tensor([chat.trained_ids])
        self._labels = self._ids.clone()
        self._labels[:, : len(chat.prompt_ids)] = -100  # the loss is of the answer alone

    def step(self) -> float:
        """One step of AdamW; returns the loss before it."""
        loss: torch.Tensor = self._model(input_ids=self._ids, labels=self._labels, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())


def run_trainer(config: DemoConfig, rank: int, channel: Channel) -> None:
    """The whole life of trainer `rank`, until the launcher says stop. Raises whatever ends it early."""
    channel.send(Phase(text="loading the model"))
    mesh = join_group(config.work_dir, "trainers", rank, config.num_trainers)
    model = trainer_model(config, mesh)
    chat = Chat(config)
    training = Training(model, chat, config.learning_rate)
    sender = _sender(config, rank, model, mesh)
    channel.send(Phase(text="connecting"))
    started = time.monotonic()
    sender.connect()
    if rank == 0:
        channel.send(_plan_message(sender, time.monotonic() - started))
    weights: dict[str, torch.Tensor] = {}
    for version in range(1, config.steps + 1):
        weights = _one_version(config, rank, channel, training, sender, model, version)
    if rank == 0:
        channel.send(_reference(config, channel, chat, weights))
    channel.send(Phase(text="done"))
    channel.wait_for_stop(_ORDER_SECONDS)
    sender.close()


def _plan_message(sender: SenderAdapter, connect_seconds: float) -> PlanMade:
    plan, facts = sender.plan, sender.plan_facts
    if plan is None or facts is None:
        raise InternalError("trainer/0 is connected and has no plan")
    return PlanMade(
        model_bytes=facts.model_bytes,
        trainer_egress_bytes=dict(facts.trainer_egress_per_worker),
        rollout_node_ingress_bytes=dict(facts.rollout_node_ingress_bytes),
        rollout_node_needed_bytes=dict(facts.needed_bytes),
        rounds=plan.rounds,
        num_pairs=facts.num_pairs,
        t_min_seconds=plan.bounds.t_min_seconds,
        connect_seconds=connect_seconds,
    )


def _sender(config: DemoConfig, rank: int, model: nn.Module, mesh: DeviceMesh) -> SenderAdapter:
    return SenderAdapter(
        group=(rank, mesh.size()),
        endpoint=config.endpoint,
        checkpoint=transfer_spec(config, model),
        load_weights=fsdp.load_weights_fn(model),
        tensors=fsdp.tensors_fn(model),
        node=TRAINERS_NODE,
        engines=config.expected_engines,
        options=Options(
            connect_timeout_seconds=config.connect_timeout_seconds,
            update_timeout_seconds=config.update_timeout_seconds,
            slot_bytes=config.slot_bytes,
            bandwidth=config.bandwidth,
        ),
    )


def _one_version(
    config: DemoConfig,
    rank: int,
    channel: Channel,
    training: Training,
    sender: SenderAdapter,
    model: nn.Module,
    version: int,
) -> dict[str, torch.Tensor]:
    """Train, send, and say what was sent. Returns rank 0's full weights as sent (bf16); elsewhere nothing."""
    channel.send(Phase(text=f"training version {version}"))
    started = time.monotonic()
    loss = training.step()
    if rank == 0:
        channel.send(Trained(version=version, loss=loss, seconds=time.monotonic() - started))
    channel.send(Phase(text=f"sending version {version}"))
    arm_fault(config, f"trainer/{rank}", version)
    report = sender.send_weights(version=version).wait()
    if rank == 0:
        channel.send(
            Updated(
                version=version,
                ewtt_seconds=report.ewtt_seconds,
                agst_seconds=report.agst_seconds,
                network_bytes={name: (int(out), int(into)) for name, (out, into) in report.network_bytes.items()},
                engines=dict(report.engines),
            )
        )
    channel.send(Phase(text=f"digesting version {version}"))
    fsdp.reshard(model)
    weights: dict[str, torch.Tensor] = {}
    for name, whole in full_parameters(model, torch.bfloat16):  # a collective: every rank takes part
        if rank == 0:
            weights[name] = whole
    if rank == 0:
        parameters = {name: digest(whole) for name, whole in weights.items()}
        channel.send(Digested(version=version, parameters=parameters, buffers={}))
    return weights


def _reference(config: DemoConfig, channel: Channel, chat: Chat, weights: dict[str, torch.Tensor]) -> Referenced:
    """Answer with a single-process model that holds the trainers' weights, then judge the engines' answers by it."""
    channel.send(Phase(text="answering as a single process"))
    model = undistributed_model(config, weights)
    own = Generation(model, chat.prompt_ids, max_new_tokens=config.max_new_tokens, end_ids=chat.end_ids)
    own.run()
    compare = channel.wait_for_compare(_ORDER_SECONDS)
    if compare is None:
        raise TransferTimeout(
            f"the launcher handed over no answers of the engines within {_ORDER_SECONDS:.0f} s",
            waiting_for=("launcher",),
            seconds=_ORDER_SECONDS,
        )
    forced = {name: teacher_forced(model, chat.prompt_ids, steps) for name, steps in compare.answers.items()}
    return Referenced(version=config.steps, text=chat.decode(own.tokens), forced=forced)
