"""GRPO in its plain form: a reward, advantages within a group, and a clipped policy gradient against the engine's logprobs.

Shapes: n completions of one prompt, at most T tokens each; P is the prompt's length in tokens. Rows are padded on the right,
which a causal model does not see.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Group", "advantages", "clipped_loss", "difference", "make_group", "reward", "token_logprobs"]

_WANTED = 4


def reward(text: str) -> float:
    """How often the word "the" occurs, four times or more being worth 1.0. Verifiable, and soon learned."""
    return min(1.0, len(re.findall(r"\bthe\b", text.lower())) / _WANTED)


def advantages(rewards: Sequence[float]) -> list[float]:
    """By how many standard deviations each completion is better than its group. All zero when they are all alike."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / (deviation + 1e-4) for r in rewards]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Completions of one prompt. ids: [n, P + T] int64. mask, engine_logprobs: [n, T] fp32, mask 1.0 on real tokens.

    advantages: [n] fp32. engine_logprobs: of each token by the policy that sampled it.
    """

    ids: torch.Tensor
    prompt_length: int
    mask: torch.Tensor
    engine_logprobs: torch.Tensor
    advantages: torch.Tensor

    def rows(self, first: int, step: int) -> Group:
        """Every `step`-th completion from `first` on: one rank's share."""
        return Group(
            ids=self.ids[first::step], prompt_length=self.prompt_length, mask=self.mask[first::step],
            engine_logprobs=self.engine_logprobs[first::step], advantages=self.advantages[first::step],
        )  # fmt: skip


def make_group(
    prompt: Sequence[int], tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]],
    advantage: Sequence[float],
) -> Group:  # fmt: skip
    """A group of completions as the engine returned them, each with a logprob a token; at least one token each."""
    width = max(len(t) for t in tokens)
    ids = torch.zeros(len(tokens), len(prompt) + width, dtype=torch.int64)
    mask, sampled = torch.zeros(len(tokens), width), torch.zeros(len(tokens), width)
    for row, (made, given) in enumerate(zip(tokens, logprobs, strict=True)):
        ids[row, : len(prompt) + len(made)] = torch.tensor([*prompt, *made])
        mask[row, : len(made)] = 1.0
        sampled[row, : len(made)] = torch.tensor(given)
    return Group(
        ids=ids, prompt_length=len(prompt), mask=mask, engine_logprobs=sampled, advantages=torch.tensor(advantage)
    )


def token_logprobs(model: Any, group: Group) -> torch.Tensor:
    """[n, T] fp32: what the trainer's policy gives each token of the completions. One forward pass."""
    made = group.ids[:, group.prompt_length :]
    logits = model(input_ids=group.ids, use_cache=False, logits_to_keep=made.shape[1] + 1).logits[:, :-1]
    found: torch.Tensor = logits.float().log_softmax(-1).gather(-1, made[..., None]).squeeze(-1)
    return found


def clipped_loss(logprobs: torch.Tensor, group: Group, *, clip: float) -> torch.Tensor:
    """The sum over tokens of PPO's clipped objective, negated; divide by the number of tokens of the whole step.

    logprobs: [n, T], by the trainer, with gradients. The ratio is against the engine's logprobs, so samples that are a version
    old are weighted rightly, and clipped.
    """
    ratio = (logprobs - group.engine_logprobs).exp()
    advantage = group.advantages[:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -(gain * group.mask).sum()


def difference(ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """How far two policies are apart on the same tokens: mean and largest |logprob difference|. All [n, T]."""
    apart = (ours - theirs).abs()[mask > 0]
    return {"mean": float(apart.mean()), "max": float(apart.max())}
