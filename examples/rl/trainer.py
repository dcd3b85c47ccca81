"""One trainer rank: FSDP2 with fp32 masters, GRPO on what the engine samples, weights sent each step. `trainer CONFIG RANK`.

Rank 0 talks to the engine and writes the run's records; the others follow it. What a trainer of yours needs of the library
stands in `updates.ByWeightBridge`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.rl import grpo, prompts
from examples.rl.channel import Done, Sample, Sampled, Score, Scored, Stop, TrainerEnd
from examples.rl.config import RunConfig
from examples.rl.lifetime import end_with_parent
from examples.rl.updates import Update, updates_by

__all__ = ["main"]

_EVALUATION_SEED = 1_000_000


def sharded_model(config: RunConfig, mesh: DeviceMesh) -> nn.Module:
    """Each decoder layer and the root wrapped by FSDP2: masters and gradients in fp32, computing in bf16.

    So the policy that is trained is the one that is sent. Computing with the unrounded masters would train another one: a small
    step changes every master and, at first, few of the rounded weights.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(config.checkpoint, dtype=torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    wrapped: nn.Module = fully_shard(model, mesh=mesh, mp_policy=policy)
    return wrapped


class Rollouts:
    """Rank 0's view of the engine: batches to train on, and what the engine's policy is worth."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.channel = TrainerEnd(config.channel, timeout_seconds=config.answer_seconds)
        self._tokenizer = AutoTokenizer.from_pretrained(config.checkpoint)
        self._training = [tuple(prompts.encode(self._tokenizer, p)) for p in prompts.TRAINING]
        self._held_out = [tuple(prompts.encode(self._tokenizer, p)) for p in prompts.HELD_OUT]
        self._asked: dict[int, tuple[int, list[tuple[int, ...]]]] = {}

    def ask(self, step: int) -> None:
        """Let the engine sample the batch of `step`, if it has not been asked and there is such a step."""
        config = self._config
        if step in self._asked or step > config.steps:
            return
        first = (step - 1) * config.prompts_per_step
        chosen = [self._training[(first + i) % len(self._training)] for i in range(config.prompts_per_step)]
        seed = config.seed * 10_000_019 + step * 1000
        number = self.channel.ask(
            Sample(prompts=tuple(chosen), completions=config.completions, max_tokens=config.max_tokens, seed=seed)
        )
        self._asked[step] = (number, chosen)

    def take(self, step: int) -> tuple[list[grpo.Group], list[float], list[str], Sampled]:
        """The batch of `step`: a group a prompt, all rewards, all texts, and the engine's reply."""
        number, chosen = self._asked.pop(step)
        sampled = self.channel.reply(number, Sampled)
        groups, rewards, texts = [], [], []
        for prompt, tokens, logprobs in zip(chosen, sampled.tokens, sampled.logprobs, strict=True):
            said = self._texts(tokens)
            of_group = [grpo.reward(text) for text in said]
            groups.append(grpo.make_group(prompt, tokens, logprobs, grpo.advantages(of_group)))
            rewards += of_group
            texts += said
        return groups, rewards, texts, sampled

    def score(self, groups: Sequence[grpo.Group]) -> tuple[list[torch.Tensor], int]:
        """The engine's logprobs, now, of each group's completions, [n, T] each; and the version it holds."""
        sequences, lengths = [], []
        for group in groups:
            for ids, mask in zip(group.ids, group.mask, strict=True):
                sequences.append(tuple(ids[: group.prompt_length + int(mask.sum())].tolist()))
                lengths.append(group.prompt_length)
        scored = self.channel.call(Score(sequences=tuple(sequences), prompt_lengths=tuple(lengths)), Scored)
        rows = iter(scored.logprobs)
        found = []
        for group in groups:
            theirs = torch.zeros_like(group.mask)
            for row in theirs:
                given = next(rows)
                row[: len(given)] = torch.tensor(given)
            found.append(theirs)
        return found, scored.version

    def evaluate(self) -> dict[str, Any]:
        """Mean reward on the held-out prompts, always sampled with the same seeds."""
        config = self._config
        sampled = self.channel.call(
            Sample(
                prompts=tuple(self._held_out), completions=config.evaluate_completions,
                max_tokens=config.max_tokens, seed=_EVALUATION_SEED,
            ), Sampled,
        )  # fmt: skip
        texts = [text for tokens in sampled.tokens for text in self._texts(tokens)]
        rewards = [grpo.reward(text) for text in texts]
        mean = sum(rewards) / len(rewards)
        variance = sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)
        return {
            "version": sampled.last_version, "reward": mean, "standard_error": (variance / len(rewards)) ** 0.5,
            "num_completions": len(rewards), "example": texts[0],
        }  # fmt: skip

    def stop(self) -> None:
        self.channel.call(Stop(), Done)

    def _texts(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        return [str(self._tokenizer.decode(list(t), skip_special_tokens=True)) for t in tokens]


class Trainer:
    """One rank of the training loop. Every method is a collective."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        self._config, self._rank = config, rank
        mesh = init_device_mesh("cpu", (config.num_trainers,))
        self._model = sharded_model(config, mesh)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=config.learning_rate, weight_decay=0.0, foreach=False
        )
        self._rollouts = Rollouts(config) if rank == 0 else None
        self._updates = updates_by(config, rank, self._model, self._rollouts.channel if self._rollouts else None)
        self._sent = 0

    def run(self) -> None:
        config, rollouts = self._config, self._rollouts
        began = time.monotonic()
        self._updates.connect()
        if rollouts is not None:
            self._record("connected", seconds=time.monotonic() - began)
            self._evaluate(0)
            for step in range(1, 1 + config.ahead):
                rollouts.ask(step)
        for step in range(1, config.steps + 1):
            self._step(step)
            if rollouts is not None and (step % config.evaluate_every == 0 or step == config.steps):
                self._evaluate(step)
        if rollouts is not None:
            rollouts.stop()
        self._updates.close()

    def _step(self, step: int) -> None:
        """Sample, train, send, and compare the two policies on the step's own tokens."""
        clock, rollouts, facts = _Clock(), self._rollouts, {}
        groups: list[grpo.Group] = []
        if rollouts is not None:
            rollouts.ask(step)
            groups, rewards, texts, sampled = rollouts.take(step)
            rollouts.ask(step + self._config.ahead)
            facts = {
                "reward": sum(rewards) / len(rewards), "rewards": rewards, "texts": texts,
                "first_version": sampled.first_version, "last_version": sampled.last_version,
                "staleness": step - 1 - sampled.first_version, "sampling_seconds": sampled.seconds,
            }  # fmt: skip
        groups = _shared(groups, self._rank, self._config)
        clock.mark("sample")
        before = self._train(groups)
        clock.mark("train")
        after = self._logprobs(groups)
        clock.mark("look")
        update = self._send(step)
        clock.mark("update")
        ours = [[_gathered(x, self._config.num_trainers) for x in side] for side in (before, after)]
        if rollouts is not None:
            scored, version = rollouts.score(groups)
            clock.mark("score")
            self._record(
                "step", step=step, version=step, engine_version=version, skipped=update is None,
                update=None if update is None else dataclasses.asdict(update), seconds=clock.seconds,
                apart_as_sampled=_apart(ours[0], [g.engine_logprobs for g in groups], groups),
                apart_before=_apart(ours[1], [g.engine_logprobs for g in groups], groups),
                apart_after=_apart(ours[1], scored, groups), **facts,
            )  # fmt: skip

    def _train(self, groups: Sequence[grpo.Group]) -> list[torch.Tensor]:
        """One step of AdamW on this rank's completions. Returns its logprobs of them from before the step."""
        config, seen = self._config, []
        num_tokens = sum(float(group.mask.sum()) for group in groups)
        for group in groups:
            own = group.rows(self._rank, config.num_trainers)
            logprobs = grpo.token_logprobs(self._model, own)
            # FSDP averages gradients over the ranks, the loss is a mean over all ranks' tokens
            loss = grpo.clipped_loss(logprobs, own, clip=config.clip) * config.num_trainers / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            seen.append(logprobs.detach())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return seen

    @torch.no_grad()
    def _logprobs(self, groups: Sequence[grpo.Group]) -> list[torch.Tensor]:
        return [grpo.token_logprobs(self._model, g.rows(self._rank, self._config.num_trainers)) for g in groups]

    def _send(self, step: int) -> Update | None:
        return None if step in self._config.skip_updates else self._updates.send(step)

    def _evaluate(self, step: int) -> None:
        if self._rollouts is not None:
            began = time.monotonic()
            self._record("evaluation", step=step, **self._rollouts.evaluate(), seconds=time.monotonic() - began)

    def _record(self, kind: str, **facts: Any) -> None:
        with self._config.records.open("ab") as file:
            file.write(msgspec.json.encode({"kind": kind, **facts}) + b"\n")


class _Clock:
    """Seconds spent, by what they were spent on."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def mark(self, what: str) -> None:
        now = time.monotonic()
        self.seconds[what], self._last = now - self._last, now


def _shared(groups: list[grpo.Group], rank: int, config: RunConfig) -> list[grpo.Group]:
    """Rank 0's groups, on every rank. Tensors of sizes that are told first: nothing is pickled."""
    if config.num_trainers == 1:
        return groups
    shared = []
    for i in range(config.prompts_per_step):
        sizes = torch.tensor([groups[i].prompt_length, *groups[i].ids.shape] if rank == 0 else [0, 0, 0])
        dist.broadcast(sizes, src=0)
        prompt_length, rows, width = sizes.tolist()
        if rank == 0:
            ids, rest = (
                groups[i].ids,
                torch.cat([groups[i].mask, groups[i].engine_logprobs, groups[i].advantages[:, None]], dim=1),
            )
        else:
            ids = torch.empty(rows, width, dtype=torch.int64)
            rest = torch.empty(rows, 2 * (width - prompt_length) + 1)
        dist.broadcast(ids, src=0)
        dist.broadcast(rest, src=0)
        made = width - prompt_length
        shared.append(
            grpo.Group(
                ids=ids,
                prompt_length=prompt_length,
                mask=rest[:, :made],
                engine_logprobs=rest[:, made : 2 * made],
                advantages=rest[:, -1],
            )
        )
    return shared


def _gathered(own: torch.Tensor, num_trainers: int) -> torch.Tensor:
    """All ranks' rows, [n, T], put back into their places (rank r has r, r + ranks, ...)."""
    if num_trainers == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(num_trainers)]
    dist.all_gather(parts, own.contiguous())
    return torch.stack(parts, dim=1).flatten(0, 1)


def _apart(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], groups: Sequence[grpo.Group]
) -> dict[str, float]:
    """The difference over all groups' tokens."""
    flat = [torch.cat([x.flatten() for x in side]) for side in (ours, theirs, [g.mask for g in groups])]
    return grpo.difference(*flat)


def main() -> None:
    config, rank = RunConfig.read(Path(sys.argv[1])), int(sys.argv[2])
    end_with_parent(config.launcher)
    dist.init_process_group(
        "gloo", init_method=f"file://{config.work_dir}/rendezvous", rank=rank, world_size=config.num_trainers,
        timeout=timedelta(seconds=config.start_seconds),
    )  # fmt: skip
    torch.manual_seed(config.seed)
    Trainer(config, rank).run()
    sys.stdout.flush()
    os._exit(0)  # a process full of torch takes seconds to shut down


if __name__ == "__main__":
    main()
