"""What a checkpoint holds, as data: names, shapes and dtypes in an order that numbers every element.

A `CheckpointSpec` comes from the headers of a safetensors folder (`spec_from_folder`), from a state dict
(`CheckpointSpec.from_state_dict`) or from triples (`CheckpointSpec.from_iterable`). No tensor data is read here and torch
is not imported.
"""

from __future__ import annotations

from weightbridge.checkpoint.dtypes import DType, dtype_named, dtype_of_torch_name
from weightbridge.checkpoint.safetensors_reader import (
    TensorLocation,
    read_safetensors_spec,
    spec_from_folder,
    tensor_locations,
)
from weightbridge.checkpoint.spec import CheckpointSpec, TensorSpec

__all__ = [
    "CheckpointSpec",
    "DType",
    "TensorLocation",
    "TensorSpec",
    "dtype_named",
    "dtype_of_torch_name",
    "read_safetensors_spec",
    "spec_from_folder",
    "tensor_locations",
]
