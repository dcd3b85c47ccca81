"""What the policy is asked in training, and what it is asked when it is measured: no topic is in both."""

from __future__ import annotations

from typing import Any

__all__ = ["HELD_OUT", "TRAINING", "encode"]

_TRAINING_TOPICS = (
    "a river", "the moon", "a market town", "winter", "a train journey", "an old house", "a garden", "the sea",
    "a football match", "a library", "a mountain", "breakfast", "a storm", "a village school", "a violin", "the desert",
)  # fmt: skip
_HELD_OUT_TOPICS = ("a castle", "the sun", "a harbour", "autumn", "a long walk", "a bakery", "a forest", "a bridge")

TRAINING = tuple(f"Describe {topic} in one sentence." for topic in _TRAINING_TOPICS)
HELD_OUT = tuple(f"Describe {topic} in one sentence." for topic in _HELD_OUT_TOPICS)


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of a prompt as a chat, up to where the model's answer begins."""
    chat = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
    return [int(token) for token in encoded["input_ids"]]
