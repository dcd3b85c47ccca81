"""What the demo must know of a checkpoint folder before it starts anything: read without torch or transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightbridge.checkpoint import CheckpointSpec, spec_from_folder
from weightbridge.errors import UsageError

__all__ = ["TENSOR_PARALLEL_DEGREES", "CheckpointFolder", "choose_tensor_parallel", "inspect_folder"]

TENSOR_PARALLEL_DEGREES = (3, 2)
"""Degrees tried for the first engine, in order. An odd one first: it makes the shards of the two sides cross."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """A folder that holds a dense decoder the demo can run.

    spec: names, shapes and types as the files have them. dims: the model's dimensions that tensor parallelism must
    divide, by their names in config.json.
    """

    path: Path
    model_type: str
    spec: CheckpointSpec
    dims: dict[str, int]


def inspect_folder(path: Path) -> CheckpointFolder:
    """Look into a checkpoint folder; reads config.json and safetensors headers only.

    Raises UsageError when the folder is missing or is no model that the demo can run, SpecError when it is one but is
    damaged (a truncated file, a tensor in the index that no file holds).
    """
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing"
        raise UsageError(f"--checkpoint {path}: expected a folder, found {found}; name a Hugging Face model folder")
    config = _read_config(path)
    _require_dense_decoder(path, config)
    if not (any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").exists()):
        raise UsageError(
            f"--checkpoint {path}: expected model.safetensors (or shards with model.safetensors.index.json), found none; "
            f"save the model with save_pretrained"
        )
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        raise UsageError(
            f"--checkpoint {path}: expected a tokenizer ({', '.join(_TOKENIZER_FILES)}), found none; "
            f"save it beside the model with tokenizer.save_pretrained"
        )
    return CheckpointFolder(
        path=path, model_type=str(config["model_type"]), spec=spec_from_folder(path), dims=_parallel_dims(config)
    )


def choose_tensor_parallel(dims: dict[str, int], requested: int | None = None) -> int:
    """The tensor-parallel degree of the first engine: the requested one, or the first that divides all dimensions.

    Raises UsageError naming the dimension that does not divide.
    """
    if requested is not None and requested < 2:
        raise UsageError(f"--tensor-parallel {requested}: expected at least 2 workers; the other engine has the one")
    for degree in TENSOR_PARALLEL_DEGREES if requested is None else (requested,):
        if all(size % degree == 0 for size in dims.values()):
            return degree
    tried = " or ".join(str(degree) for degree in TENSOR_PARALLEL_DEGREES) if requested is None else str(requested)
    sizes = ", ".join(f"{name}={size}" for name, size in dims.items())
    raise UsageError(
        f"--tensor-parallel: {tried} does not divide the model ({sizes}); "
        f"choose a number that divides each of them, or another checkpoint"
    )


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.exists():
        raise UsageError(f"--checkpoint {path}: expected config.json, found none; this folder is no model")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"--checkpoint {path}: config.json is no JSON ({error}); the folder is damaged") from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise UsageError(f"--checkpoint {path}: config.json names no model_type; this folder is no model")
    return config


def _require_dense_decoder(path: Path, config: dict[str, Any]) -> None:
    experts = [key for key in _EXPERT_KEYS if int(config.get(key) or 0) > 1]
    if experts:
        raise UsageError(
            f"--checkpoint {path}: {config['model_type']} is a mixture of experts ({experts[0]}={config[experts[0]]}); "
            f"the demo runs dense Llama- or Qwen-style models"
        )
    missing = [key for key in ("hidden_size", "num_attention_heads", "vocab_size") if key not in config]
    if missing:
        raise UsageError(
            f"--checkpoint {path}: config.json of {config['model_type']} lacks {', '.join(missing)}; "
            f"the demo runs dense Llama- or Qwen-style models"
        )


def _parallel_dims(config: dict[str, Any]) -> dict[str, int]:
    heads = int(config["num_attention_heads"])
    dims = {
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "vocab_size": int(config["vocab_size"]),
    }
    if "intermediate_size" in config:
        dims["intermediate_size"] = int(config["intermediate_size"])
    return dims
