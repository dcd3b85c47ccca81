"""Loaders for frameworks, by their public API only: what to hand to `SenderAdapter` and `ReceiverAdapter`.

Those of models offer the same two functions: `load_weights_fn(module)`, a callable that streams checkpoint tensors into a
live module, and `tensors_fn(module)`, a callable that names the module's live tensors. Those of frameworks put the adapters
where the framework has a place for them. Import the module you need; this package imports no framework by itself.

- `dtensor`: any `torch.nn.Module` whose parameters are plain tensors or DTensors.
- `deepspeed`: a DeepSpeed engine with ZeRO-3.
- `fsdp`: a module wrapped by FSDP2 (`fully_shard`).
- `transformers`: a Hugging Face model, plain or tensor-parallel (`tp_plan`).
- `vllm`: a weight transfer backend for vLLM, found by entry point; a worker extension; and what it takes to load weights of
  vLLM's again once they are prepared.
- `ray`: trainers and engines as Ray actors: endpoint, token and addresses without writing any of them down.
- `sglang`: a plugin for SGLang servers.
- `trl`: TRL's trainers, asynchronous GRPO and those that generate with vLLM servers.
- `verl`: a checkpoint engine in verl's registry; importing it imports verl.
"""

from __future__ import annotations

__all__ = ["deepspeed", "dtensor", "fsdp", "ray", "sglang", "transformers", "trl", "verl", "vllm"]


def __getattr__(name: str) -> object:
    """Import a framework's module on first use: naming this package must not cost an import of torch."""
    if name in __all__:
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
