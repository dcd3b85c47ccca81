"""DeepSpeed ZeRO-3: a trainer's partitioned parameters as load target and as source.

ZeRO-3 cuts each flattened parameter into one piece a rank, `parameter.ds_tensor`, all of one size, so that the last ones
may end in padding or hold nothing else. The piece is what training keeps; the parameter itself is empty, or a gathered
copy of all pieces while a module runs, and between steps too when it is small ("persistent"). The pieces are what forward
computes with (bf16 or fp16 where DeepSpeed trains in it), not the optimizer's fp32 masters.

Only attributes of the parameters are read, so this imports no DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from weightbridge.errors import SpecError, UsageError
from weightbridge.integrations import dtensor
from weightbridge.integrations.dtensor import LoadWeights, Tensors
from weightbridge.probe import NamedTensors

__all__ = ["load_weights_fn", "tensors_fn"]


def load_weights_fn(engine: nn.Module) -> LoadWeights:
    """A loader that copies checkpoint tensors into this rank's pieces in place, by parameter or buffer name.

    engine: what `deepspeed.initialize` returned, or its module. Names are the module's, tied ones included. The loader
    takes (name, full tensor of the global shape) in any order and in any number of calls, casts by `copy_`, is no
    collective, and leaves padding alone. Copies that were gathered before are released, as they are stale; the optimizer's
    masters are not written, so it learns a layout and does not resume training. Raises SpecError for a name the module
    lacks or a shape that differs, UsageError for a module that ZeRO-3 does not partition, or not into host or device memory.
    """
    module = _partitioned_module(engine)
    load_others = dtensor.load_weights_fn(module)

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        targets = {n: p for n, p in module.named_parameters(remove_duplicate=False) if hasattr(p, "ds_tensor")}

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, full in tensors:
                if name in targets:
                    _copy_own_piece(targets[name], name, full)
                else:
                    yield name, full

        load_others(others())

    return load_weights


def tensors_fn(engine: nn.Module) -> Tensors:
    """A callable that names this rank's pieces, without their padding and tied ones once, and the module's buffers.

    engine: what `deepspeed.initialize` returned, or its module. It is no collective and gathers nothing. Pieces are read
    anew each time, since DeepSpeed may move them. Raises UsageError as `load_weights_fn` does.
    """
    module = _partitioned_module(engine)

    def tensors() -> NamedTensors:
        pieces = {
            name: _own_piece(parameter, name)[0] if hasattr(parameter, "ds_tensor") else parameter
            for name, parameter in module.named_parameters()
        }
        buffers = dict(module.named_buffers())
        return NamedTensors({**pieces, **buffers}, buffers=buffers)

    return tensors


def _partitioned_module(engine: nn.Module) -> nn.Module:
    """The module that an engine trains, or the one given. Raises UsageError when none of its parameters is in pieces."""
    module: Any = engine.module if callable(getattr(engine, "zero_optimization_stage", None)) else engine
    if not any(hasattr(parameter, "ds_tensor") for parameter in module.parameters()):
        raise UsageError(
            f"{type(module).__name__} holds no parameter that ZeRO-3 has partitioned; call deepspeed.initialize with stage 3 "
            f"first. With stages 0 to 2 every rank has whole parameters: use weightbridge.integrations.dtensor on the module"
        )
    return cast(nn.Module, module)


def _own_piece(parameter: Any, name: str) -> tuple[torch.Tensor, int]:
    """(this rank's piece without its padding, shape [numel]; the index of its first element in the flattened parameter)."""
    piece: torch.Tensor = parameter.ds_tensor.detach()
    group = parameter.ds_process_group
    size, numel = dist.get_world_size(group), int(parameter.ds_numel)
    expected = -(-numel // size)
    if hasattr(parameter.ds_tensor, "ds_quant_scale") or piece.numel() != expected:
        raise UsageError(
            f"parameter {name!r}: this rank's piece has {piece.numel()} elements of {piece.dtype} in memory, expected "
            f"{expected} ({numel} elements over {size} ranks), not quantized; bring weights that are offloaded to NVMe or "
            f"partitioned over another group into memory first, or leave quantized ones out"
        )
    start = min(numel, dist.get_rank(group) * expected)
    return piece.narrow(0, 0, min(expected, numel - start)), start


def _copy_own_piece(parameter: Any, name: str, full: torch.Tensor) -> None:
    if tuple(full.shape) != tuple(parameter.ds_shape):
        raise SpecError(
            f"checkpoint tensor {name!r} has shape {tuple(full.shape)} and the module expects {tuple(parameter.ds_shape)}; "
            f"the checkpoint belongs to another model or is already sharded",
            tensor=name,
        )
    piece, start = _own_piece(parameter, name)
    piece.copy_(full.detach().reshape(-1).narrow(0, start, piece.numel()))
    if parameter.ds_status.name == "AVAILABLE":
        parameter.partition()  # no collective: the gathered copy goes, the next use gathers the pieces again
