"""GGUF -> a bf16 safetensors folder with tokenizer. A program: `convert SOURCE TARGET CHANNEL_FD`.

The quantised weights are expanded to bf16, and the result must still answer a question rightly before it is kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from weightbridge.cli.demo.messages import Channel, Failed, Progress

__all__ = ["convert", "main"]

_QUESTION, _EXPECTED = "What is the capital of France?", "Paris"


def convert(source: Path, target: Path, channel: Channel) -> None:
    """Write `target` from the GGUF file `source`. Raises RuntimeError when the model's answer is wrong."""
    _report(channel, "loading the converter", 0)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _report(channel, "expanding the weights to bf16", 1)
    folder, name = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    _report(channel, "reading the tokenizer", 3)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    _report(channel, "asking it a question", 4)
    answer = _ask(model, tokenizer)
    if _EXPECTED not in answer:
        raise RuntimeError(
            f"the converted model answers {answer!r} to {_QUESTION!r}; expected a mention of {_EXPECTED}"
        )
    _report(channel, "saving", 5)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _report(channel, "saved", 6)


def _report(channel: Channel, text: str, done: int) -> None:
    channel.send(Progress(text=text, done=float(done), total=6.0))


def _ask(model: Any, tokenizer: Any) -> str:
    chat = [{"role": "user", "content": _QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> int:
    """Entry point of the child process."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    channel = Channel(int(sys.argv[3]))
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]), channel)
    except Exception as error:
        channel.send(Failed(kind=type(error).__name__, text=str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
