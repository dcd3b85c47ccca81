"""Prompts of the vLLM tests, and how greedy answers of two engines are compared."""

from __future__ import annotations

from typing import Any

__all__ = [
    "BLOCK_SIZE", "CROSSING_TOKENS", "LONG_PROMPTS", "NOISE", "NUM_TOKENS", "NUM_VERSIONS", "PROMPTS", "STREAMED_TOKENS",
    "differing", "versions_of",
]  # fmt: skip

NUM_TOKENS = 24
"""Tokens of an answer that is compared."""

CROSSING_TOKENS = 200
"""Tokens of each answer during which an offline engine is updated."""

NUM_VERSIONS = 5
"""Versions that a server gets under load."""

STREAMED_TOKENS = 60
"""Tokens of each completion of that load."""

BLOCK_SIZE = 32
"""Tokens in a block of the prefix cache of every engine here."""

PROMPTS = [[5, 17, 250, 8], [99, 3, 42, 7, 7, 181, 12, 60, 33], [210, 11], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]

# Each longer than a block, none beginning as another does: 71, 108, 145 tokens.
LONG_PROMPTS = [[3 + (7 * i * i + 31 * i + 13 * k) % 290 for i in range(71 + 37 * k)] for k in range(3)]

NOISE = 0.1
"""Nats by which the log-probabilities of the two best tokens must differ for the best one to be sure: bf16 weights and
activations make some hundredths of difference between two ways of computing the same."""


def differing(seen: list[dict[str, Any]], expected: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare greedy answers token by token up to the first that differ, since what follows is of another text.

    An answer is a dict of tokens and margins: by how much the chosen token beat the next one, in nats. wrong: differing
    tokens, [answer, position], that were sure in `expected`; unsure: those that were not; compared: tokens that were equal.
    """
    wrong, unsure, compared = [], [], 0
    for number, (one, other) in enumerate(zip(seen, expected, strict=True)):
        for position, (a, b) in enumerate(zip(one["tokens"][:NUM_TOKENS], other["tokens"], strict=True)):
            if a != b:
                (wrong if other["margins"][position] > NOISE else unsure).append([number, position])
                break
            compared += 1
    return {"wrong": wrong, "unsure": unsure, "compared": compared}


def versions_of(spans: list[list[Any]], num_tokens: int) -> list[str]:
    """The versions of spans [version, start, end], which must follow on each other over all tokens."""
    starts, ends = [s[1] for s in spans], [s[2] for s in spans]
    if starts != [0, *ends[:-1]] or ends[-1] != num_tokens:
        raise ValueError(f"spans {spans} do not cover {num_tokens} tokens")
    return [s[0] for s in spans]
