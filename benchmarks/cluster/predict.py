"""What the simulator says of a case: the session's own plan on links of the nominal rate, or the usual method's model."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.cluster.scenarios import Case
from weightbridge.plan import Plan, PlanOptions, Topology, make_plan
from weightbridge.program.job import lower_job
from weightbridge.simulator.baselines import baseline
from weightbridge.simulator.costs import Costs
from weightbridge.simulator.update import simulate

__all__ = ["Prediction", "machine_costs", "plan_of", "predict"]

_COPY_BYTES = 64 << 20
_BUCKET_BYTES = 4 << 20  # what the methods here handle at a time

_MODELS = {
    "weightbridge": "weightbridge",
    "broadcast": "broadcast",
    "p2p": "pull",
    "file": "pull",
    "peer:mooncake": "pull",
}
"""Method -> the simulator's method with the same traffic. "p2p" here has one source for each shard, like "pull" there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """model: the simulator's name of what was simulated."""

    ewtt_seconds: float
    model: str


def machine_costs() -> Costs:
    """Of this machine. Copies are measured now, one thread, best of five; the others were measured on the machine of
    docs/benchmarks.md: half a round trip of 40 bytes over an idle link (8 us) and a thread that wakes up; an event of the
    executor, and of a thread lane."""
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - begin)
    rate = _COPY_BYTES / best
    return Costs(
        latency_seconds=50e-6, post_seconds=50e-6, signal_seconds=20e-6, launch_seconds=50e-6,
        python_seconds_per_round=500e-6, agreement_seconds=5e-3, memory_bandwidth=rate, inside_bandwidth=rate,
    )  # fmt: skip


def plan_of(case: Case) -> Plan:
    """The plan that a session of this case makes."""
    return make_plan(case.spec, case.topology, case.maps, options=PlanOptions(slot_bytes=case.key.slot_bytes))


def predict(case: Case, method: str, plan: Plan, costs: Costs) -> Prediction:
    """One update of `case` by `method` in virtual time. plan: the one that the session made; its routes and rounds are kept,
    and its workers have what they have on the emulated cluster: a node's link together, so that one may use all of it."""
    model = _MODELS[method]
    plan = replace(plan, topology=_shared_links(case))
    if model != "weightbridge":
        batched = replace(costs, post_seconds=0.0)  # one write for some MiB, where the model counts one for each tensor
        seconds = baseline(model, plan, batched, bucket_bytes=_BUCKET_BYTES).ewtt_seconds
    else:
        seconds = simulate(plan, lower_job(plan, case.spec, case.maps), costs=costs).ewtt_seconds
    return Prediction(ewtt_seconds=seconds, model=model)


def _shared_links(case: Case) -> Topology:
    rates = {node: case.rates_bits[i] / 8 for i, node in enumerate(case.topology.nodes)}
    workers = tuple(replace(w, bandwidth=rates[w.node]) for w in case.topology.workers)
    return replace(case.topology, workers=workers, node_bandwidth=tuple(rates.items()))
