"""Five deployments of public models, from their configurations and real sharding rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

from weightbridge.deployments.architecture import Architecture, GroupedAttention, LatentAttention, checkpoint_spec
from weightbridge.deployments.cluster import Seats, node_names, place_workers, topology_of
from weightbridge.deployments.deployment import DEFAULT_SLOT_BYTES, Deployment
from weightbridge.deployments.job_file import ClusterTable
from weightbridge.deployments.rollout_rules import EngineDegrees, engine_maps
from weightbridge.deployments.trainer_rules import MegatronDegrees, megatron_maps
from weightbridge.errors import UsageError
from weightbridge.plan.topology import Role

__all__ = ["PRESETS", "preset"]

_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    description: str
    architecture: Callable[[], Architecture]
    trainer_nodes: int
    tp: int
    pp: int = 1
    cp: int = 1
    ep: int = 1
    engines: int
    engine_nodes: int
    engine: EngineDegrees


def _moonlight() -> Architecture:
    return Architecture(
        num_layers=27, hidden=2048, vocab=163_840, dense_width=11_264, dense_layers=frozenset({0}),
        attention=LatentAttention(
            num_heads=16, q_lora_rank=None, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128
        ),
        num_experts=64, expert_width=1408, shared_width=2 * 1408, router_correction=True,
    )  # fmt: skip


def _kimi() -> Architecture:
    return Architecture(
        num_layers=61, hidden=7168, vocab=163_840, dense_width=18_432, dense_layers=frozenset({0}),
        attention=LatentAttention(
            num_heads=64, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128
        ),
        num_experts=384, expert_width=2048, shared_width=2048, router_correction=True,
    )  # fmt: skip


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, *, dense: int = 0, expert: int = 0) -> Architecture:
    return Architecture(
        num_layers=layers, hidden=hidden, vocab=151_936, dense_width=dense,
        attention=GroupedAttention(num_heads=heads, num_kv_heads=kv_heads, head_dim=128, head_norms=True),
        num_experts=128 if expert else 0, expert_width=expert,
    )  # fmt: skip


_PRESETS = {
    "moonlight-16b": _Preset(
        description="Moonlight 16B: 1 trainer node TP2 EP8, one 1-node engine EP8 with replicated attention",
        architecture=_moonlight, trainer_nodes=1, tp=2, ep=8, engines=1, engine_nodes=1,
        engine=EngineDegrees(tp=8, ep=8, attention="replicated"),
    ),
    "qwen3-30b-a3b": _Preset(
        description="Qwen3 30B-A3B: 2 trainer nodes TP4 EP8, two 1-node engines TP8 EP8",
        architecture=lambda: _qwen3(48, 2048, 32, 4, expert=768), trainer_nodes=2, tp=4, ep=8, engines=2, engine_nodes=1,
        engine=EngineDegrees(tp=8, ep=8),
    ),
    "qwen3-235b-a22b": _Preset(
        description="Qwen3 235B-A22B: 8 trainer nodes TP4 PP4 CP2 EP16, two 4-node engines TP32 EP32",
        architecture=lambda: _qwen3(94, 4096, 64, 4, expert=1536), trainer_nodes=8, tp=4, pp=4, cp=2, ep=16, engines=2,
        engine_nodes=4, engine=EngineDegrees(tp=32, ep=32),
    ),
    "kimi-k2": _Preset(
        description="Kimi K2: 32 trainer nodes TP8 PP8 CP4 EP32, eight 4-node engines EP32 with replicated attention",
        architecture=_kimi, trainer_nodes=32, tp=8, pp=8, cp=4, ep=32, engines=8, engine_nodes=4,
        engine=EngineDegrees(tp=32, ep=32, attention="replicated"),
    ),
    "qwen3-32b": _Preset(
        description="Qwen3 32B (dense): 2 trainer nodes TP8 PP2, two 1-node engines TP8",
        architecture=lambda: _qwen3(64, 5120, 64, 8, dense=25_600), trainer_nodes=2, tp=8, pp=2, engines=2, engine_nodes=1,
        engine=EngineDegrees(tp=8),
    ),
}  # fmt: skip

PRESETS = MappingProxyType({name: p.description for name, p in _PRESETS.items()})
"""Name -> one line of description."""


def preset(
    name: str,
    *,
    engines: int | None = None,
    trainer_nodes: int | None = None,
    num_experts: int | None = None,
    node_bandwidth: float = 400e9,
    slot_bytes: int = DEFAULT_SLOT_BYTES,
) -> Deployment:
    """The deployment of this name, or one like it that differs in what is given.

    engines: rollout replicas. trainer_nodes: with the other degrees as they are, so it changes the data-parallel degree.
    num_experts: routed experts of a layer. node_bandwidth: bytes per second of a node's link, each direction; its 8 GPUs have
    equal shares. Pure; some tenths of a second for the largest. Raises UsageError naming the known presets, or the degrees
    that do not fit; LayoutError where a degree does not divide a size.
    """
    chosen = _PRESETS.get(name)
    if chosen is None:
        raise UsageError(f"preset {name!r} is not known; known are {', '.join(PRESETS)}")
    for key, value in (("engines", engines), ("trainer_nodes", trainer_nodes), ("num_experts", num_experts)):
        if value is not None and value < 1:
            raise UsageError(f"preset {name!r}: {key} must be at least 1, got {value}")
    architecture = chosen.architecture()
    if num_experts is not None:
        if not architecture.num_experts:
            raise UsageError(f"preset {name!r}: num_experts is {num_experts}, but the model is dense; leave it out")
        architecture = replace(architecture, num_experts=num_experts)
    num_engines = chosen.engines if engines is None else engines
    num_workers = (chosen.trainer_nodes if trainer_nodes is None else trainer_nodes) * _GPUS_PER_NODE
    spec = checkpoint_spec(architecture)
    degrees = MegatronDegrees(num_workers=num_workers, tp=chosen.tp, pp=chosen.pp, cp=chosen.cp, ep=chosen.ep)
    trainer = megatron_maps(architecture, spec, degrees)
    engine = engine_maps(architecture, spec, chosen.engine)
    seats = [Seats.filling(Role.TRAINER, "", len(trainer), _nodes("trainer", len(trainer)), _GPUS_PER_NODE)]
    for i in range(num_engines):
        nodes = _nodes(f"engine-{i}", len(engine))
        seats.append(Seats.filling(Role.ROLLOUT, f"engine-{i}", len(engine), nodes, _GPUS_PER_NODE))
    cluster = ClusterTable(gpus_per_node=_GPUS_PER_NODE, node_bandwidth=node_bandwidth / 1e9)
    return Deployment(
        name=name, description=_described(chosen, num_workers // _GPUS_PER_NODE, num_engines, num_experts), spec=spec,
        topology=topology_of(place_workers(seats, cluster), cluster), maps=(*trainer, *engine * num_engines),
        slot_bytes=slot_bytes,
    )  # fmt: skip


def _nodes(prefix: str, num_workers: int) -> list[str]:
    return node_names(None, num_workers, _GPUS_PER_NODE, prefix)


def _described(chosen: _Preset, trainer_nodes: int, engines: int, num_experts: int | None) -> str:
    """The preset's line, with what was changed after it."""
    changed = [f"{trainer_nodes} trainer nodes"] * (trainer_nodes != chosen.trainer_nodes)
    changed += [f"{engines} engines"] * (engines != chosen.engines)
    changed += [] if num_experts is None else [f"{num_experts} experts"]
    return chosen.description + (f"; here with {', '.join(changed)}" if changed else "")
