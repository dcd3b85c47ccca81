"""Programs of all workers of a job, one at a time: for whoever plans a job without running it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import UsageError
from weightbridge.layout.source_map import SourceMap
from weightbridge.plan.plan import Plan
from weightbridge.program.lower import Lowering
from weightbridge.program.program import OLDEST_ROUND_FIRST, WorkerProgram

__all__ = ["lower_job"]


def lower_job(
    plan: Plan,
    spec: CheckpointSpec,
    maps: Sequence[SourceMap],
    *,
    codec: str = "identity",
    base_version: int = -1,
    post_order: str = OLDEST_ROUND_FIRST,
) -> Iterator[WorkerProgram]:
    """The program of every worker, each as `lower` makes it. maps[i] belongs to plan.topology.workers[i].

    Programs are made as they are asked for and not kept. Workers with equal maps come one after the other, in the order
    in which their maps first appear; `WorkerProgram.worker` says whose it is. Raises as `lower` does; what is wrong with
    the plan as a whole at once, what is wrong with one worker when its turn comes.
    """
    if len(maps) != len(plan.topology.workers):
        raise UsageError(
            f"{len(maps)} source maps for {len(plan.topology.workers)} workers; give one for each, in their order"
        )
    workers: dict[str, list[int]] = {}
    for worker, source_map in enumerate(maps):
        workers.setdefault(source_map.fingerprint, []).append(worker)
    lowering = Lowering.of(plan, spec, codec=codec, base_version=base_version, post_order=post_order)
    return (lowering.program(maps[worker], worker) for group in workers.values() for worker in group)
