"""Greedy decoding with a key-value cache, one token at a time, so that an engine can do other things in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from weightbridge.cli.demo.messages import Step
from weightbridge.integrations.transformers import cache_argument

__all__ = ["Generation", "teacher_forced"]

NUM_TOP = 4
"""How many of the best logits are kept per token."""


class Generation:
    """One answer in the making.

    agree: turns the token this worker chose into the one its engine goes on with; workers of one engine must not part
    ways over a last bit.
    """

    def __init__(
        self,
        model: nn.Module,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        end_ids: frozenset[int],
        agree: Callable[[int], int] = int,
    ) -> None:
        self._model, self._agree = model, agree
        self._end_ids, self._max_new_tokens = end_ids, max_new_tokens
        self._cache_argument = cache_argument(model)
        self._next = list(prompt_ids)
        self._cache: Any = None
        self.steps: list[Step] = []
        self.logits = torch.empty(0)

    @property
    def finished(self) -> bool:
        if len(self.steps) >= self._max_new_tokens:
            return True
        return bool(self.steps) and self.steps[-1].token in self._end_ids

    @property
    def tokens(self) -> list[int]:
        return [step.token for step in self.steps]

    @torch.no_grad()
    def advance(self) -> None:
        """Choose one more token; its logits, [vocab] fp32, are then in `logits`.

        One forward pass, a collective over the workers of the engine.
        """
        inputs = torch.tensor([self._next])
        output = self._model(input_ids=inputs, use_cache=True, **{self._cache_argument: self._cache})
        self._cache = output[self._cache_argument]
        self.logits = output.logits[0, -1].float()
        values, tokens = self.logits.topk(NUM_TOP)
        chosen = self._agree(int(tokens[0]))
        top = tuple((int(t), float(v)) for t, v in zip(tokens.tolist(), values.tolist(), strict=True))
        self.steps.append(Step(token=chosen, top=top))
        self._next = [chosen]

    def run(self) -> None:
        """Go on to the end without a break."""
        while not self.finished:
            self.advance()


def teacher_forced(
    model: nn.Module, prompt_ids: Sequence[int], steps: Sequence[Step]
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """What `model` says at each place of another model's answer, given that answer's own tokens before it.

    For each step: the best few (token, logit) of `model`, then its logits of the tokens that the step itself names.
    Runs token by token like the engines, so that the shapes of the products, and with them their rounding, agree.
    """
    given = iter(steps)
    generation = Generation(
        model,
        prompt_ids,
        max_new_tokens=len(steps),
        end_ids=frozenset(),
        agree=lambda _: next(given).token,
    )
    result = []
    for step in steps:
        generation.advance()
        named = ((token, float(generation.logits[token])) for token, _ in step.top)
        result.append((*generation.steps[-1].top, *named))
    return tuple(result)
