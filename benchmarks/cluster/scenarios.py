"""The jobs that are run: checkpoint, who sits where, how each worker is laid out. Pure, and the same in every process.

All but two models are mixtures of experts laid out by the rules of `weightbridge.deployments`, two workers a node:

replicas      trainer nodes x engines: (1,1) (2,1) (1,2) (2,2) (1,3); trainers TP2, experts over all of them; engines TP2 EP2
a             Moonlight 16B at 1/64 of the bytes: trainer TP2 EP2, one engine EP2 with replicated attention
b             Qwen3 30B-A3B at 1/64 of the bytes: 2 trainer nodes TP2 EP4, two engines TP2 EP2
tdp-rdp       trainer replicas 1, 2 x rollout replicas 1, 2: every trainer node holds the whole model
slow-node     two engines, one behind a link of a quarter of the rate, which the topology says
tiny-tensors  50,000 tensors of 5 KiB, trainers cut by rows, engines by columns
huge-tensor   one tensor of 1 GiB, trainers cut by rows, the engine by columns
small-budget  as replicas (1,2), with slots of 8 MiB
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.deployments.architecture import (
    Architecture,
    GroupedAttention,
    LatentAttention,
    TensorForm,
    checkpoint_spec,
)
from weightbridge.deployments.placement import BlockBuilder, Mapper, Piece, Placed
from weightbridge.deployments.rollout_rules import EngineDegrees, engine_maps
from weightbridge.deployments.trainer_rules import MegatronDegrees, megatron_maps
from weightbridge.layout import SourceMap
from weightbridge.plan import Role, Topology, Worker

__all__ = ["SCENARIOS", "WORKERS_PER_NODE", "Case", "CaseKey", "build", "cases_of"]

WORKERS_PER_NODE = 2
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseKey:
    """Everything a case follows from. layers: None for the scenario's own. slow: rollout node at a quarter of the rate."""

    scenario: str
    replicas: int
    trainer_nodes: int
    rate_bits: float
    slot_bytes: int
    layers: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job on one cluster. maps[i] is the layout of topology.workers[i]; node i is called "n<i>", trainers first.

    rates_bits: of each node's link, each direction.
    """

    key: CaseKey
    spec: CheckpointSpec
    topology: Topology
    maps: tuple[SourceMap, ...]
    rates_bits: tuple[float, ...]

    @property
    def t_min_seconds(self) -> float:
        """The paper's bound at the nominal rates: the model over all trainer links, or what an engine's node needs over its
        own, whichever takes longer. Every engine here sits on one node and needs the whole model once."""
        trainers = sum(self.rates_bits[: self.key.trainer_nodes])
        return self.spec.nbytes * 8 / min(trainers, *self.rates_bits[self.key.trainer_nodes :])

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w.engine for w in self.topology.workers if w.engine))

    def node_of(self, worker: str) -> int:
        return int(self.topology.workers[self.topology.index[worker]].node[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scenario:
    """shapes: (trainer nodes, replicas) of each case. layouts: (layers, trainer workers) -> spec, trainer maps, engine maps."""

    shapes: tuple[tuple[int, int], ...]
    layouts: Callable[[int | None, int], tuple[CheckpointSpec, tuple[SourceMap, ...], tuple[SourceMap, ...]]]
    slow_rollout: int | None = None
    slot_bytes: int | None = None


def cases_of(scenario: str, *, rate_bits: float, slot_bytes: int, layers: int | None = None) -> list[CaseKey]:
    """The cases of a scenario, in the order in which they are run. Raises KeyError for an unknown one."""
    chosen = _SCENARIOS[scenario]
    slot = slot_bytes if chosen.slot_bytes is None else chosen.slot_bytes
    return [
        CaseKey(
            scenario=scenario,
            replicas=replicas,
            trainer_nodes=nodes,
            rate_bits=rate_bits,
            slot_bytes=slot,
            layers=layers,
        )
        for nodes, replicas in chosen.shapes
    ]


def build(key: CaseKey) -> Case:
    """The job of a key. Equal keys give equal jobs in every process."""
    chosen = _SCENARIOS[key.scenario]
    num_trainers = key.trainer_nodes * WORKERS_PER_NODE
    spec, trainer, engine = chosen.layouts(key.layers, num_trainers)
    rates = [key.rate_bits] * (key.trainer_nodes + key.replicas)
    if chosen.slow_rollout is not None:
        rates[key.trainer_nodes + chosen.slow_rollout] /= 4
    workers = []
    for i in range(len(rates) * WORKERS_PER_NODE):
        node, place = divmod(i, WORKERS_PER_NODE)
        is_trainer = i < num_trainers
        engine_name = "" if is_trainer else f"engine-{node - key.trainer_nodes}"
        workers.append(
            Worker(
                name=f"{engine_name or 'trainer'}/{i if is_trainer else place}", node=f"n{node}", engine=engine_name,
                role=Role.TRAINER if is_trainer else Role.ROLLOUT, rank=i if is_trainer else place,
                bandwidth=rates[node] / 8 / WORKERS_PER_NODE,
            )
        )  # fmt: skip
    return Case(
        key=key, spec=spec, topology=Topology(workers=tuple(workers)), maps=(*trainer, *engine * key.replicas),
        rates_bits=tuple(rates),
    )  # fmt: skip


Layouts = tuple[CheckpointSpec, tuple[SourceMap, ...], tuple[SourceMap, ...]]


def _transformer(
    architecture: Architecture, layers: int | None, trainer: MegatronDegrees, engine: EngineDegrees
) -> Layouts:
    if layers is not None:
        dense = frozenset(i for i in architecture.dense_layers if i < layers)
        architecture = replace(architecture, num_layers=layers, dense_layers=dense)
    spec = checkpoint_spec(architecture)
    return spec, megatron_maps(architecture, spec, trainer), engine_maps(architecture, spec, engine)


def _mixture(layers: int | None, num_trainers: int, *, expert_degree: int | None = None) -> Layouts:
    """273 MB: 16 experts of 512, 4 layers of 1024; a vocabulary that no degree divides."""
    architecture = Architecture(
        num_layers=4, hidden=1024, vocab=12_345, dense_width=0, num_experts=16, expert_width=512,
        attention=GroupedAttention(num_heads=16, num_kv_heads=4, head_dim=64, head_norms=True),
    )  # fmt: skip
    trainer = MegatronDegrees(num_workers=num_trainers, tp=2, ep=expert_degree or num_trainers)
    return _transformer(architecture, layers, trainer, EngineDegrees(tp=2, ep=2))


def _moonlight(layers: int | None, num_trainers: int) -> Layouts:
    """Every size a quarter, so a tensor is 1/16; 7 of 27 layers."""
    architecture = Architecture(
        num_layers=7, hidden=512, vocab=40_960, dense_width=2816, dense_layers=frozenset({0}),
        attention=LatentAttention(
            num_heads=16, q_lora_rank=None, kv_lora_rank=128, nope_dim=32, rope_dim=16, value_dim=32
        ),
        num_experts=64, expert_width=352, shared_width=2 * 352, router_correction=True,
    )  # fmt: skip
    trainer = MegatronDegrees(num_workers=num_trainers, tp=2, ep=2)
    return _transformer(architecture, layers, trainer, EngineDegrees(tp=2, ep=2, attention="replicated"))


def _qwen3(layers: int | None, num_trainers: int) -> Layouts:
    """Every size a quarter, so a tensor is 1/16; 12 of 48 layers."""
    architecture = Architecture(
        num_layers=12, hidden=512, vocab=37_984, dense_width=0, num_experts=128, expert_width=192,
        attention=GroupedAttention(num_heads=32, num_kv_heads=4, head_dim=32, head_norms=True),
    )  # fmt: skip
    trainer = MegatronDegrees(num_workers=num_trainers, tp=2, ep=4)
    return _transformer(architecture, layers, trainer, EngineDegrees(tp=2, ep=2))


def _rows_to_columns(num_tensors: int, shape: tuple[int, int], num_trainers: int) -> Layouts:
    """Matrices that trainers cut by rows and the two workers of an engine by columns, with one whole norm."""
    forms = [(f"layers.{i}.weight", shape, "bfloat16") for i in range(num_tensors)] + [
        ("norm", (shape[1],), "bfloat16")
    ]
    spec = CheckpointSpec.from_iterable(forms)
    relative = {t.name: TensorForm(t.shape, t.dtype) for t in spec.tensors}
    mapper = Mapper(spec)

    def side(degree: int, *, by_rows: bool) -> tuple[SourceMap, ...]:
        maps = []
        for rank in range(degree):
            builder = BlockBuilder(relative)
            for name, _, _ in forms[:-1]:
                share = shape[0 if by_rows else 1] // degree
                if by_rows:
                    builder.put(name, [Piece(name, rank * share, share)])
                else:
                    builder.put(name, [Piece(name, 0, shape[0])], columns=(rank * share, (rank + 1) * share))
            builder.whole("norm", "norm")
            maps.append(mapper.source_map([Placed(builder.block(), "", "")]))
        return tuple(maps)

    return spec, side(num_trainers, by_rows=True), side(WORKERS_PER_NODE, by_rows=False)


_SCENARIOS = {
    "replicas": _Scenario(shapes=((1, 1), (2, 1), (1, 2), (2, 2), (1, 3)), layouts=_mixture),
    "a": _Scenario(shapes=((1, 1),), layouts=_moonlight),
    "b": _Scenario(shapes=((2, 2),), layouts=_qwen3),
    "tdp-rdp": _Scenario(
        shapes=((1, 1), (2, 1), (1, 2), (2, 2)), layouts=lambda layers, n: _mixture(layers, n, expert_degree=2)
    ),
    "slow-node": _Scenario(shapes=((1, 2),), layouts=_mixture, slow_rollout=1),
    "tiny-tensors": _Scenario(
        shapes=((1, 1),), layouts=lambda layers, n: _rows_to_columns(layers or 50_000, (56, 48), n)
    ),
    "huge-tensor": _Scenario(
        shapes=((1, 1),), layouts=lambda layers, n: _rows_to_columns(1, (64 * (layers or 256), 1 << 15), n)
    ),
    "small-budget": _Scenario(shapes=((1, 2),), layouts=_mixture, slot_bytes=8 * _MIB),
}

SCENARIOS: Mapping[str, str] = MappingProxyType(
    {
        line.split()[0]: " ".join(line.split()[1:])
        for line in (__doc__ or "").splitlines()
        if line.split() and line.split()[0] in _SCENARIOS
    }
)
"""Name -> one line of description."""
