"""How a fully sharded data-parallel trainer (FSDP) lays out a model.

`sharding="rows"`: each parameter is cut along its first dim as torch.chunk cuts (ceil(n / shard) rows each, the last ranks
short or empty). `sharding="flat"`: the parameters of a layer, flattened and laid end to end, are padded with zeros and cut
evenly, wherever that falls. Router correction biases are buffers and stay whole. With shard < workers, consecutive groups of
`shard` ranks are replicas of one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.deployments.architecture import Architecture, TensorForm, layer_tensors, outer_tensors
from weightbridge.deployments.placement import Block, BlockBuilder, Mapper, Piece, Placed, cut
from weightbridge.errors import UsageError
from weightbridge.layout.source_map import SourceMap

__all__ = ["ShardedDegrees", "sharded_maps"]

_BUFFER = "e_score_correction_bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedDegrees:
    """shard: ranks a parameter is spread over; num_workers / shard replicas of the model result."""

    num_workers: int
    shard: int
    sharding: Literal["rows", "flat"] = "rows"

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.shard < 1 or self.num_workers % self.shard:
            raise UsageError(
                f"trainer: shard must divide its {self.num_workers} workers and be at least 1, got {self.shard}; change shard "
                "or the number of nodes"
            )


def sharded_maps(architecture: Architecture, spec: CheckpointSpec, degrees: ShardedDegrees) -> tuple[SourceMap, ...]:
    """One map for each trainer rank; replicas share one object. Raises LayoutError."""
    mapper = Mapper(spec)
    kinds = {dense: layer_tensors(architecture, dense=dense) for dense in _kinds(architecture)}
    made = []
    for rank in range(degrees.shard):
        layers = {dense: _block(forms, rank, degrees) for dense, forms in kinds.items()}
        outer = _block(outer_tensors(architecture), rank, degrees)
        parts = [Placed(outer, "", "")]
        for layer in range(architecture.num_layers):
            prefix = f"model.layers.{layer}."
            parts.append(Placed(layers[architecture.is_dense(layer)], prefix, prefix))
        made.append(mapper.source_map(parts))
    return tuple(made) * (degrees.num_workers // degrees.shard)


def _kinds(architecture: Architecture) -> set[bool]:
    return {architecture.is_dense(layer) for layer in range(architecture.num_layers)}


def _block(forms: Mapping[str, TensorForm], rank: int, degrees: ShardedDegrees) -> Block:
    sharded = {name: form for name, form in forms.items() if not name.endswith(_BUFFER)}
    buffers = [name for name in forms if name.endswith(_BUFFER)]
    if degrees.sharding == "rows":
        builder = BlockBuilder(forms)
        for name, form in sharded.items():
            size = -(-form.shape[0] // degrees.shard)
            pieces = cut([Piece(name, 0, form.shape[0])], rank * size, (rank + 1) * size)
            num_rows = sum(piece.num_rows for piece in pieces)
            builder.put(name, pieces, shape=(num_rows, *form.shape[1:]), like=name)
    else:
        flat = {name: TensorForm((prod(form.shape),), form.dtype) for name, form in forms.items()}
        builder = BlockBuilder(flat)
        pieces = [Piece(name, 0, flat[name].shape[0]) for name in sharded]
        share = -(-sum(piece.num_rows for piece in pieces) // degrees.shard)
        builder.put(
            "_flat_param",
            cut(pieces, rank * share, (rank + 1) * share),
            rows=share,
            shape=(share,),
            like=pieces[0].tensor,
        )
    for name in buffers:
        builder.whole(name, name, parameter=False)
    return builder.block()
