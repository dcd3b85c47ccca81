"""From the layouts that came in to a verified plan: what the hub asks of the pure layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator.options import Options
from weightbridge.errors import CoverageError
from weightbridge.layout import decode_source_map, unused_tensors
from weightbridge.machine.session import MakePlan
from weightbridge.plan import Plan, PlanFacts, PlanOptions, Role, Topology, Worker, encode_plan, make_plan, verify_plan

__all__ = ["Planned", "plan_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, what the verifier counted in it, and its wire form."""

    plan: Plan
    facts: PlanFacts
    wire: bytes


def plan_job(spec: CheckpointSpec, request: MakePlan, options: Options) -> Planned:
    """Pure. Raises LayoutError and PlanError; the verifier has passed on what it returns."""
    maps = tuple(decode_source_map(data) for data in request.maps)
    topology = Topology(
        workers=tuple(
            Worker(name=j.worker, role=Role(j.role), node=j.node, rank=j.rank, engine=j.engine, bandwidth=j.bandwidth)
            for j in request.joins
        )
    )
    for engine in dict.fromkeys(j.engine for j in request.joins if j.engine):
        of_engine = tuple(m for m, j in zip(maps, request.joins, strict=True) if j.engine == engine)
        unused = [name for name in unused_tensors(spec, of_engine) if name not in options.expected_unused]
        if unused:
            raise CoverageError(
                f"engine {engine!r} takes nothing from checkpoint tensor {unused[0]!r}"
                + (f" and {len(unused) - 1} more" if len(unused) > 1 else "")
                + "; its loader drops them: mend the loader or name them in Options(expected_unused=...)",
                tensor=unused[0],
            )
    plan = make_plan(spec, topology, maps, options=PlanOptions(slot_bytes=options.slot_bytes, epoch=request.epoch))
    _check_taken_whole(plan, spec, options)
    facts = verify_plan(plan, spec, maps)
    return Planned(plan=plan, facts=facts, wire=encode_plan(plan))


def _check_taken_whole(plan: Plan, spec: CheckpointSpec, options: Options) -> None:
    """Every engine takes all elements of every tensor it takes any of: ranks that all load the first shard do not.

    Counted on the plan's atoms, which are disjoint: no work per element. Raises CoverageError.
    """
    numel = np.diff(spec.numel_offsets)
    atom_numel = plan.atoms.count.prod(axis=1)
    workers = plan.topology.workers
    for engine in dict.fromkeys(w.engine for w in workers if w.engine):
        needs = np.array([any(workers[n].engine == engine for n in c.needers) for c in plan.classes], dtype=bool)
        mine = needs[plan.atoms.class_id] if len(plan.atoms) else np.zeros(0, dtype=bool)
        taken = np.bincount(plan.atoms.tensor[mine], weights=atom_numel[mine], minlength=len(spec.tensors))
        for i in np.flatnonzero((taken > 0) & (taken < numel)).tolist():
            name = spec.tensors[i].name
            if name not in options.expected_unused:
                raise CoverageError(
                    f"engine {engine!r} takes {int(taken[i])} of the {int(numel[i])} elements of checkpoint tensor {name!r}: "
                    "ranks load the same shard, or the loader cuts the tensor off; mend the loader or name the tensor in "
                    "Options(expected_unused=...)",
                    tensor=name,
                )
