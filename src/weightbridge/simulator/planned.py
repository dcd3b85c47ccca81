"""From a deployment to a verified plan and verified programs of all workers: what a session does at connect, on one machine.

Programs of a large job together would take gigabytes: they are made, verified and dropped one after another, and what is
kept of each is what reports need.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weightbridge.deployments import Deployment
from weightbridge.plan import Plan, PlanFacts, PlanOptions, make_plan, verify_plan
from weightbridge.program.job import lower_job
from weightbridge.program.program import OLDEST_ROUND_FIRST, WorkerProgram
from weightbridge.program.verify_job import verify_job
from weightbridge.simulator.quality import Quality, quality_of
from weightbridge.simulator.skeleton import Skeleton, skeleton_of
from weightbridge.simulator.traffic import Traffic

__all__ = ["STAGES", "Planned", "Progress", "StageCost", "peak_rss_bytes", "plan_deployment"]

STAGES: tuple[str, ...] = ("plan", "verify plan", "lower and verify programs")
"""What planning goes through, in order. "plan": overlay, linear programs, routes, rounds."""

Progress = Callable[[str, int, int], None]
"""progress(stage, done, total): called when a stage starts (done 0), goes on, and ends (done == total)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """seconds: by the clock. cpu_seconds: of all threads of this process."""

    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A deployment, its plan, and what was counted on the way; the plan and every worker's program are verified.

    facts: counted by the plan's verifier. quality: how far the plan is from its bound. arena_bytes: per worker, memory of its
    slots. num_descriptors: strided copies in all packs and assembles. stages: cost per entry of STAGES.
    peak_rss_bytes: most memory this process ever had resident, whatever it did before included. skeletons: of all programs,
    in no order; empty where nobody asked to keep them.
    """

    deployment: Deployment
    plan: Plan
    facts: PlanFacts
    quality: Quality
    arena_bytes: tuple[int, ...]
    num_descriptors: int
    stages: dict[str, StageCost]
    peak_rss_bytes: int
    skeletons: tuple[Skeleton, ...] = ()

    @property
    def planning_seconds(self) -> float:
        """By the clock, from source maps to verified programs of all workers."""
        return sum(s.seconds for s in self.stages.values())

    @property
    def planning_cpu_seconds(self) -> float:
        return sum(s.cpu_seconds for s in self.stages.values())

    @property
    def traffic(self) -> Traffic:
        return Traffic(plan=self.plan)


def plan_deployment(
    deployment: Deployment,
    *,
    options: PlanOptions | None = None,
    keep_programs: bool = False,
    post_order: str = OLDEST_ROUND_FIRST,
    progress: Progress | None = None,
) -> Planned:
    """Plan `deployment`, lower every worker's program and verify it all; nothing is executed.

    options: by default the deployment's slot size. keep_programs: for the simulator, in `skeletons`. post_order: of the
    programs. progress: told where it is. Blocks for some seconds on large jobs.
    Raises what `make_plan` raises, and InternalError if a plan or program is wrong.
    """
    tell = progress or _silent
    options = options or PlanOptions(slot_bytes=deployment.slot_bytes)
    costs: dict[str, StageCost] = {}
    tell("plan", 0, 1)
    with _stage("plan", costs):
        plan = make_plan(deployment.spec, deployment.topology, deployment.maps, options=options)
    tell("plan", 1, 1)
    tell("verify plan", 0, 1)
    with _stage("verify plan", costs):
        facts = verify_plan(plan, deployment.spec, deployment.maps)
    tell("verify plan", 1, 1)
    kept = _Kept(arena_bytes=[0] * len(deployment.maps), skeletons=[] if keep_programs else None)
    with _stage("lower and verify programs", costs):
        programs = lower_job(plan, deployment.spec, deployment.maps, post_order=post_order)
        verified = verify_job(plan, deployment.spec, deployment.maps, kept.passing(programs, tell))
    return Planned(
        deployment=deployment,
        plan=plan,
        facts=facts,
        quality=quality_of(plan),
        arena_bytes=tuple(kept.arena_bytes),
        num_descriptors=verified.num_descriptors,
        stages=costs,
        peak_rss_bytes=peak_rss_bytes(),
        skeletons=tuple(kept.skeletons or ()),
    )


@dataclass(kw_only=True)
class _Kept:
    """What is left of programs that have gone by. skeletons: None where they are not wanted."""

    arena_bytes: list[int]
    skeletons: list[Skeleton] | None

    def passing(self, programs: Iterable[WorkerProgram], tell: Progress) -> Iterator[WorkerProgram]:
        """The programs, noted on their way."""
        total = len(self.arena_bytes)
        for done, program in enumerate(programs):
            tell(STAGES[2], done, total)
            self.arena_bytes[program.worker] = program.arena_bytes
            if self.skeletons is not None:
                self.skeletons.append(skeleton_of(program))
            yield program
        tell(STAGES[2], total, total)


@contextmanager
def _stage(name: str, costs: dict[str, StageCost]) -> Iterator[None]:
    clock, cpu = time.perf_counter(), time.process_time()
    yield
    costs[name] = StageCost(seconds=time.perf_counter() - clock, cpu_seconds=time.process_time() - cpu)


def peak_rss_bytes() -> int:
    """Most memory this process had resident so far, in bytes; 0 where the system does not say.

    From /proc: what getrusage says of a process includes what its parent had before exec.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    peak = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), "0")
    return int(peak) * 1024


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass
