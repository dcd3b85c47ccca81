"""Digests of what a module really holds, by means that share nothing with the library's path.

Full tensors come from DTensor's own `full_tensor()` and rounding from torch's own cast; neither probes, plans nor
programs are asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["buffer_digests", "digest", "full_parameters", "parameter_digests"]


def full_parameters(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor rounded to nearest even in `dtype`), tied names once. Collective over the module's mesh."""
    for name, parameter in module.named_parameters():
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        yield name, whole.to(dtype) if whole.is_floating_point() else whole


def parameter_digests(module: nn.Module, dtype: torch.dtype) -> dict[str, str]:
    """Parameter name -> digest of the whole tensor in `dtype`. Collective over the module's mesh, every rank digests.

    A sharded tensor's whole is gathered from all ranks, so a wrong element on any rank changes every rank's digest;
    a tensor that each rank holds for itself is digested by each.
    """
    return {name: digest(whole) for name, whole in full_parameters(module, dtype)}


def buffer_digests(module: nn.Module) -> dict[str, str]:
    """Buffer name -> digest of this rank's tensor as it is. No collective."""
    return {name: digest(buffer) for name, buffer in module.named_buffers()}


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's shape, type and bytes in row-major order."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    whole = local.detach().contiguous().cpu()
    sha = hashlib.sha256(f"{tuple(whole.shape)} {whole.dtype} ".encode())
    if whole.numel():
        sha.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
