"""The paper's studies (arXiv 2609.25442) in virtual time: one parameter of a deployment varied, all methods at each value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightbridge.deployments import Deployment, preset
from weightbridge.errors import UsageError
from weightbridge.simulator.baselines import BASELINES, baseline
from weightbridge.simulator.costs import Costs
from weightbridge.simulator.faults import Fault
from weightbridge.simulator.planned import Planned, Progress, plan_deployment
from weightbridge.simulator.result import METHODS, MethodResult
from weightbridge.simulator.simulation import Simulation
from weightbridge.simulator.update import simulate

__all__ = [
    "PAPER",
    "STUDIES",
    "Comparison",
    "Study",
    "compare",
    "replicas_study",
    "rounds_to_simulate",
    "run_case",
    "study",
]

PAPER = {
    "moonlight-16b": (1.27, 0.90),
    "qwen3-30b-a3b": (1.18, 0.89),
    "qwen3-235b-a22b": (1.69, 1.46),
    "kimi-k2": (2.12, 2.02),
}
"""Deployment -> (EWTT / T_min, AGST / T_min) that the paper measured on real clusters."""

STUDIES = {
    "replicas": "one-node rollout engines, 1 to 16",
    "trainer-nodes": "trainer nodes, 1 to 8, for four rollout nodes",
    "tdp-rdp": "trainer nodes (data parallel) by rollout replicas, each 1, 2 and 4",
    "deployments": "the four deployments of the paper, beside its own ratios",
}
"""Name -> what is varied."""

EXTRAPOLATED_ROUNDS = 24
"""Rounds that are simulated of a plan of many more."""

_FULL_WORKER_ROUNDS = 2000  # a run of so many rounds of a worker takes some seconds


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All methods on one deployment. results: this library's first. simulation: of this library."""

    planned: Planned
    simulation: Simulation
    results: tuple[MethodResult, ...]

    @property
    def t_min_seconds(self) -> float:
        return self.planned.plan.bounds.t_min_seconds


@dataclass(frozen=True, kw_only=True)
class Study:
    """A parameter and how to make the deployment of each of its values. numbers: the values as x coordinates, or ()."""

    name: str
    parameter: str
    labels: tuple[str, ...]
    numbers: tuple[float, ...]
    deployments: tuple[Callable[[], Deployment], ...]


def compare(
    planned: Planned,
    *,
    costs: Costs,
    methods: Sequence[str] = METHODS,
    faults: Sequence[Fault] = (),
    extrapolate: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Simulate one update by this library, and by each of `methods` besides. Deterministic; seconds to minutes.

    planned: made with keep_programs. extrapolate: see `simulate`. faults: happen to this library's update only.
    """
    tell = progress or (lambda _stage, _done, _total: None)
    tell("simulate", 0, 1)
    simulation = simulate(planned.plan, planned.skeletons, costs=costs, extrapolate=extrapolate, faults=tuple(faults))
    tell("simulate", 1, 1)
    others = [name for name in BASELINES if name in methods]
    results = [simulation.as_result()]
    for i, name in enumerate(others):
        tell("baselines", i, len(others))
        results.append(baseline(name, planned.plan, costs))
        tell("baselines", i + 1, len(others))
    return Comparison(planned=planned, simulation=simulation, results=tuple(results))


def rounds_to_simulate(planned: Planned, faults: Sequence[Fault] = ()) -> int | None:
    """Where nobody chose: all rounds (None) of a small job or one with faults, else EXTRAPOLATED_ROUNDS."""
    plan = planned.plan
    few = len(plan.topology.workers) * plan.rounds <= _FULL_WORKER_ROUNDS or plan.rounds <= EXTRAPOLATED_ROUNDS
    return None if few or faults else EXTRAPOLATED_ROUNDS


def study(name: str, preset_name: str | None = None) -> Study:
    """The study of this name on a preset, by default qwen3-30b-a3b, whose engines have one node each.

    Raises UsageError for a name that is not known, or a preset where there is none to choose.
    """
    if name not in STUDIES:
        raise UsageError(f"study {name!r} is not known; known are {', '.join(STUDIES)}")
    if name == "deployments":
        if preset_name is not None:
            raise UsageError("the study 'deployments' is about the four deployments of the paper; leave --preset out")
        return _study(name, "deployment", [(label, 0.0, _maker(label)) for label in PAPER], numbered=False)
    chosen = preset_name or "qwen3-30b-a3b"
    if name == "replicas":
        return replicas_study(chosen)
    if name == "trainer-nodes":
        cases = [(str(n), float(n), _maker(chosen, trainer_nodes=n, engines=4)) for n in (1, 2, 4, 8)]
        return _study(name, "trainer nodes", cases)
    grid = [(t, r) for t in (1, 2, 4) for r in (1, 2, 4)]
    cases = [(f"{t} x {r}", 0.0, _maker(chosen, trainer_nodes=t, engines=r)) for t, r in grid]
    return _study(name, "trainer nodes x rollout replicas", cases, numbered=False)


def replicas_study(
    preset_name: str, numbers: Sequence[int] = (1, 2, 4, 8, 16), *, trainer_nodes: int | None = None
) -> Study:
    """A preset with these numbers of engines."""
    cases = [(str(n), float(n), _maker(preset_name, engines=n, trainer_nodes=trainer_nodes)) for n in numbers]
    return _study("replicas", "rollout replicas", cases)


def _study(
    name: str, parameter: str, cases: Sequence[tuple[str, float, Callable[[], Deployment]]], *, numbered: bool = True
) -> Study:
    labels, numbers, makers = zip(*cases, strict=True)
    return Study(name=name, parameter=parameter, labels=labels, numbers=numbers if numbered else (), deployments=makers)


def _maker(name: str, *, engines: int | None = None, trainer_nodes: int | None = None) -> Callable[[], Deployment]:
    return lambda: preset(name, engines=engines, trainer_nodes=trainer_nodes)


def run_case(
    make: Callable[[], Deployment],
    *,
    costs: Costs,
    methods: Sequence[str] = METHODS,
    progress: Progress | None = None,
) -> Comparison:
    """One deployment of a study: planned, verified and simulated."""
    planned = plan_deployment(make(), keep_programs=True, progress=progress)
    return compare(planned, costs=costs, methods=methods, extrapolate=rounds_to_simulate(planned), progress=progress)
