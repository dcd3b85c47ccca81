"""`simulate`: what one update of a whole job costs, round by round, or from some rounds and their period."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import inf

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UsageError
from weightbridge.plan.plan import Plan
from weightbridge.plan.topology import Role, Topology
from weightbridge.program.program import WorkerProgram
from weightbridge.simulator.costs import Costs
from weightbridge.simulator.faults import Fault
from weightbridge.simulator.flows import DEFAULT_WINDOW_SECONDS
from weightbridge.simulator.links import Links
from weightbridge.simulator.run import Observe, Run
from weightbridge.simulator.simulation import STEP, Simulation
from weightbridge.simulator.skeleton import Skeleton, skeleton_of

__all__ = ["MIN_EXTRAPOLATED_ROUNDS", "simulate"]

MIN_EXTRAPOLATED_ROUNDS = 8
"""Fewer rounds have no middle that knows nothing of their fill and drain."""


def simulate(
    plan: Plan,
    programs: Iterable[WorkerProgram | Skeleton],
    *,
    costs: Costs | None = None,
    extrapolate: int | None = None,
    faults: Sequence[Fault] = (),
    observe: Observe | None = None,
    window_seconds: float = DEFAULT_WINDOW_SECONDS,
) -> Simulation:
    """Drive the machines of all workers through one update in direct mode. Deterministic.

    programs: of every worker, any order; taken one by one, and only the skeleton of each is kept. extrapolate: simulate a plan
    of only so many of the rounds, of the same size, and add the period of a round in its middle for each of the others; None
    or a number that is not smaller than the plan's runs them all. faults: not together with `extrapolate`. observe: told of
    every event and instruction of every machine. window_seconds: see `flows.py`.
    Raises UsageError when the programs are not those of the plan's workers, or an argument makes no sense.
    """
    topology, costs = plan.topology, costs or Costs()
    skeletons = _in_order(plan, programs)
    links = Links(topology=topology, costs=costs)
    carried = _bytes_on_links(links, skeletons)
    num_rounds = min(extrapolate or plan.rounds, plan.rounds)
    if num_rounds < plan.rounds:
        if num_rounds < MIN_EXTRAPOLATED_ROUNDS:
            raise UsageError(f"extrapolate is {num_rounds}, expected at least {MIN_EXTRAPOLATED_ROUNDS} rounds")
        if faults:
            raise UsageError("an update with faults has no steady state to extrapolate; leave one of the two out")
        skeletons = [s.first_rounds(num_rounds) for s in skeletons]
    run = Run(topology, skeletons, costs=costs, faults=faults, observe=observe, window_seconds=window_seconds)
    run.run()
    more, how = _extrapolated(run, num_rounds, plan.rounds)
    own = [s.released if w in set(topology.trainers) else s.finished for w, s in enumerate(run.seats)]
    own = [seconds + more for seconds in own]
    ends = _whole_engines(topology, own)
    stall = [e - b for b, e in zip(run.stall_begin, ends, strict=True)]
    own_stall = [max(e - b, 0.0) for b, e in zip(run.stall_begin, own, strict=True)]
    alive = [w for w, s in enumerate(run.seats) if s.died == inf and not s.machine.failed and not s.machine.finished]
    return Simulation(
        topology=topology,
        t_min_seconds=plan.bounds.t_min_seconds,
        ewtt_seconds=max(ends) - min(run.stall_begin),
        agst_seconds=sum(stall) / len(stall),
        agst_own_seconds=sum(own_stall) / len(own_stall),
        stall_begin_seconds=tuple(run.stall_begin),
        stall_end_seconds=tuple(ends),
        links=links.use(carried if not run.failures and not alive else run.flows.nbytes.round().astype(np.int64)),
        link_busy_seconds=tuple(run.flows.busy_seconds.tolist()),
        steps=np.array(run.steps, dtype=STEP),
        num_rounds=num_rounds,
        num_events=run.loop.num_events,
        extrapolated=how,
        failures=tuple(run.failures),
        waiting={w: run.seats[w].machine.waiting_for() for w in alive},
    )


def _in_order(plan: Plan, programs: Iterable[WorkerProgram | Skeleton]) -> list[Skeleton]:
    """One skeleton for each worker of the plan."""
    found: dict[int, Skeleton] = {}
    for program in programs:
        skeleton = program if isinstance(program, Skeleton) else skeleton_of(program)
        if skeleton.program.plan_digest != plan.digest or len(skeleton.program.rounds) != plan.rounds:
            raise UsageError(
                f"the program of worker {skeleton.program.worker} is for plan {skeleton.program.plan_digest}, expected "
                f"{plan.digest}; lower it again"
            )
        found[skeleton.program.worker] = skeleton
    expected = range(len(plan.topology.workers))
    if set(found) != set(expected):
        raise UsageError(f"programs of workers {sorted(found)} were given, expected those of 0 to {len(expected) - 1}")
    return [found[w] for w in expected]


def _bytes_on_links(links: Links, skeletons: Sequence[Skeleton]) -> npt.NDArray[np.int64]:
    """[num_links] bytes that all rounds put on each link: posts, and reads of neighbours' slots."""
    total = np.zeros(len(links), dtype=np.int64)
    for skeleton in skeletons:
        worker, num_workers = skeleton.program.worker, len(skeletons)
        rounds = skeleton.program.rounds
        ends: dict[int, tuple[list[int], tuple[int, ...]]] = {}  # rounds are few objects: id -> (peers, neighbours)
        for r in rounds:
            if id(r) not in ends:
                ends[id(r)] = ([p.peer for p in r.posts], r.reads)
        peers = [peer for r in rounds for peer in ends[id(r)][0]]
        neighbours = [peer for r in rounds for peer in ends[id(r)][1]]
        sent = np.bincount(np.array(peers, dtype=np.int64), skeleton.post_bytes, num_workers)
        read = np.bincount(np.array(neighbours, dtype=np.int64), skeleton.read_bytes, num_workers)
        for other in np.flatnonzero(sent).tolist():
            total[list(links.path(worker, other))] += int(sent[other])
        for other in np.flatnonzero(read).tolist():
            total[list(links.path(other, worker))] += int(read[other])
    return total


def _extrapolated(run: Run, num_rounds: int, all_rounds: int) -> tuple[float, str]:
    """Seconds that the rounds left out add, and how that was found."""
    if num_rounds == all_rounds:
        return 0.0, ""
    ends = np.maximum.accumulate(run.assembled)
    last = num_rounds - 3  # the links get emptier from the round after next on
    first = last - (num_rounds - 4) // 4 * 2
    middle = (first + last) // 2
    period = (ends[last] - ends[first]) / (last - first)
    halves = [(ends[b] - ends[a]) / (b - a) for a, b in pairwise((first, middle, last))]
    apart = abs(halves[0] - halves[1]) / period
    how = (
        f"{num_rounds} of {all_rounds} rounds were simulated; for each of the others the period of rounds {first} to {last} "
        f"was added, {period * 1e3:.3f} ms (its halves differ by {apart:.2%})"
    )
    return float(period) * (all_rounds - num_rounds), how


def _whole_engines(topology: Topology, own: Sequence[float]) -> list[float]:
    """When each worker resumes: a trainer by itself, a rollout worker when its engine is whole."""
    whole: dict[str, float] = {}
    for worker, seconds in zip(topology.workers, own, strict=True):
        whole[worker.engine] = max(whole.get(worker.engine, 0.0), seconds)
    return [
        seconds if worker.role is Role.TRAINER else whole[worker.engine]
        for worker, seconds in zip(topology.workers, own, strict=True)
    ]
