"""Loaders for frameworks, by their public API only: what to hand to `SenderAdapter` and `ReceiverAdapter`.

Each module offers the same two functions: `load_weights_fn(module)`, a callable that streams checkpoint tensors into a
live module, and `tensors_fn(module)`, a callable that names the module's live tensors. Import the module you need;
this package imports no framework by itself.

- `dtensor`: any `torch.nn.Module` whose parameters are plain tensors or DTensors.
- `fsdp`: a module wrapped by FSDP2 (`fully_shard`).
- `transformers`: a Hugging Face model, plain or tensor-parallel (`tp_plan`).
- `vllm`: a worker extension for vLLM engines, and what it takes to load their weights again once they are prepared.
"""

from __future__ import annotations

__all__ = ["dtensor", "fsdp", "transformers", "vllm"]


def __getattr__(name: str) -> object:
    """Import a framework's module on first use: naming this package must not cost an import of torch."""
    if name in __all__:
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
