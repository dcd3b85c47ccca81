"""The planner: from all workers' source maps and the topology to one verified Plan. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import PlanError, UsageError
from weightbridge.layout.correspondence import Correspondence
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.bound import certified
from weightbridge.plan.classes import classify
from weightbridge.plan.flow import solve
from weightbridge.plan.network import Network
from weightbridge.plan.overlay import overlay
from weightbridge.plan.plan import Plan
from weightbridge.plan.rounds import SEGMENT_ALIGNMENT_BYTES, fit_rounds
from weightbridge.plan.routing import busiest_link_seconds, make_routes
from weightbridge.plan.topology import Role, Topology

__all__ = ["PlanOptions", "make_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """slot_bytes: most bytes one slot of one stage holds on any worker. alignment: bytes, where streams may be cut; a
    multiple of 64. epoch: number of this plan among the session's. min_rounds: cut into at least so many rounds, so that
    a small model still overlaps its stages. round_seconds: what one more round costs everybody whatever its size; with it
    the planner weighs more rounds against a longer fill and drain. Workers with 2 to 4 messages a round each way were
    measured at 0.9 to 1.2 ms of CPU a round (docs/design/0002-planning-at-scale.md). unit_bytes: as in `Plan`, a multiple
    of `alignment`; None: the coarsest that needs no more rounds and keeps every round even. balanced: False keeps the first
    LP's routes, which hold the bound but crowd links in turn; for studies."""

    slot_bytes: int = 64 << 20
    alignment: int = 256
    epoch: int = 0
    min_rounds: int = 1
    round_seconds: float = 1e-3
    unit_bytes: int | None = None
    balanced: bool = True

    def __post_init__(self) -> None:
        if self.alignment <= 0 or self.alignment % SEGMENT_ALIGNMENT_BYTES:
            raise UsageError(
                f"alignment must be a positive multiple of {SEGMENT_ALIGNMENT_BYTES} bytes, got {self.alignment}"
            )
        if self.slot_bytes <= 0 or self.min_rounds < 1 or self.epoch < 0:
            raise UsageError(
                f"slot_bytes and min_rounds must be positive and epoch not negative, got {self.slot_bytes}, "
                f"{self.min_rounds} and {self.epoch}"
            )
        if not self.round_seconds > 0:
            raise UsageError(f"round_seconds must be positive, got {self.round_seconds}")
        if self.unit_bytes is not None and (self.unit_bytes <= 0 or self.unit_bytes % self.alignment):
            raise UsageError(
                f"unit_bytes must be a positive multiple of alignment, {self.alignment} bytes, got {self.unit_bytes}"
            )


def make_plan(
    spec: CheckpointSpec, topology: Topology, maps: Sequence[SourceMap], *, options: PlanOptions | None = None
) -> Plan:
    """Plan one update. maps[i] belongs to topology.workers[i].

    Called by rank 0 of the trainers at connect, and by the simulator. Does not block, does no I/O. Equal arguments give
    plans of equal digest. Raises CoverageError (a needed element has no holder), InfeasibleError (slots too small),
    LayoutError (maps and spec do not belong together), PlanError (no trainer, or no rollout worker).
    """
    options = options or PlanOptions()
    if len(maps) != len(topology.workers):
        raise UsageError(
            f"{len(maps)} source maps for {len(topology.workers)} workers; give one for each, in their order"
        )
    for role, found in ((Role.TRAINER, topology.trainers), (Role.ROLLOUT, topology.rollouts)):
        if not found:
            raise PlanError(f"the topology has no {role.value} worker; a plan needs at least one on each side")
    job = Correspondence(
        spec=spec,
        workers=tuple(w.name for w in topology.workers),
        holds=tuple(w.role is Role.TRAINER for w in topology.workers),
        maps=tuple(maps),
    )
    atoms, classes = classify(job, overlay(job))
    net = Network(topology=topology, classes=classes)
    flow = solve(net, balanced=options.balanced)
    routes, hops = make_routes(net, flow, options.alignment)
    bounds = certified(net, flow, busiest_link_seconds(net, routes, hops))
    draft = Plan(
        epoch=options.epoch, spec_digest=spec.digest, topology=topology, atoms=atoms, classes=classes,
        routes=routes, hops=hops, rounds=1, alignment=options.alignment,
        unit_bytes=options.alignment, slot_bytes=options.slot_bytes,
        bounds=bounds,
    )  # fmt: skip
    return fit_rounds(
        draft, min_rounds=options.min_rounds, unit_bytes=options.unit_bytes, round_seconds=options.round_seconds
    )
