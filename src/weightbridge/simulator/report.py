"""What planning and simulating found, as documents for programs and as facts for people. No formatting beyond text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np

from weightbridge.plan import Role
from weightbridge.simulator.costs import Cost
from weightbridge.simulator.planned import Planned
from weightbridge.simulator.result import METHODS, LinkUse, MethodResult
from weightbridge.simulator.studies import PAPER, Comparison, Study

__all__ = [
    "METHODS_HEAD",
    "Fact",
    "bytes_text",
    "cost_text",
    "link_text",
    "methods_document",
    "methods_rows",
    "plan_document",
    "plan_facts",
    "seconds_text",
    "simulation_document",
    "study_document",
    "study_head",
    "study_rows",
]

_JUST_BELOW = 0.99995  # of a unit: with four digits this is written as one


class Fact(NamedTuple):
    """One line of a table: what, how much, and what there is to say about it."""

    what: str
    value: str
    remark: str = ""


def plan_document(planned: Planned) -> dict[str, Any]:
    """The plan for programs. Keys are stable; `_bytes` are bytes, `_seconds` seconds of one update or, where they begin
    with `planning` or `stage`, of this process."""
    plan, facts, quality = planned.plan, planned.facts, planned.quality
    return {
        "preset": planned.deployment.name,
        "num_workers": len(plan.topology.workers),
        "model_bytes": facts.model_bytes,
        "num_tensors": len(planned.deployment.spec.tensors),
        "num_boxes": _num_boxes(planned),
        "num_classes": len(plan.classes),
        "num_pairs": facts.num_pairs,
        "max_out_pairs": facts.max_out_pairs,
        "rounds": plan.rounds,
        "t_min_seconds": plan.bounds.t_min_seconds,
        "bound_seconds": plan.bounds.link_bound_seconds,
        "busiest_link_seconds": quality.busiest.busy_seconds,
        "ratio_to_bound": quality.ratio_to_bound,
        "worst_round_ratio_to_bound": quality.worst_round_ratio_to_bound,
        "rollout_egress_worst_over_mean": quality.rollout_egress_worst_over_mean,
        "trainer_egress_bytes": facts.trainer_egress_bytes,
        "max_rollout_node_ingress_bytes": max(facts.rollout_node_ingress_bytes.values(), default=0),
        "planning_seconds": planned.planning_seconds,
        "peak_rss_bytes": planned.peak_rss_bytes,
        "verified": True,  # what is not verified raises
        "busiest_link": {"name": quality.busiest.name, "what": link_text(quality.busiest), "why": quality.why},
        "bytes_by_link_class": planned.traffic.by_class(),
        "slot_bytes": plan.slot_bytes,
        "max_arena_bytes": max(planned.arena_bytes, default=0),
        "num_descriptors": planned.num_descriptors,
        "planning_cpu_seconds": planned.planning_cpu_seconds,
        "stage_seconds": {name: cost.seconds for name, cost in planned.stages.items()},
    }


def plan_facts(planned: Planned) -> list[Fact]:
    """The plan for people, in the order in which one asks."""
    plan, facts, quality = planned.plan, planned.facts, planned.quality
    ingress = max(facts.rollout_node_ingress_bytes.values(), default=0)
    traffic = ", ".join(f"{name} {bytes_text(n)}" for name, n in planned.traffic.by_class().items())
    stages = ", ".join(f"{name} {seconds_text(cost.seconds)}" for name, cost in planned.stages.items())
    return [
        Fact("workers", f"{len(plan.topology.workers):,}", _workers_text(planned)),
        Fact("model", bytes_text(facts.model_bytes), f"{len(planned.deployment.spec.tensors):,} tensors"),
        Fact("replica classes", f"{len(plan.classes):,}", f"from {_num_boxes(planned):,} slice copies in all layouts"),
        Fact("T_min", seconds_text(plan.bounds.t_min_seconds), "no method is faster on these links"),
        Fact("lower bound", seconds_text(plan.bounds.link_bound_seconds), "of the linear program, proven by its dual"),
        Fact(
            "busiest link",
            seconds_text(quality.busiest.busy_seconds),
            f"{quality.ratio_to_bound:.6f} x the bound: {link_text(quality.busiest)}; {quality.why}",
        ),
        Fact("within a round", f"{quality.worst_round_ratio_to_bound:.4f}", "x the bound's share of a round, at worst"),
        Fact("rollout egress", f"{quality.rollout_egress_worst_over_mean:.3f}", "worst worker over the mean"),
        Fact("trainer egress", bytes_text(facts.trainer_egress_bytes), "all trainers together"),
        Fact("rollout node takes in", bytes_text(ingress), "at most, over the network"),
        Fact("bytes", bytes_text(int(planned.traffic.nbytes.sum())), traffic),
        Fact("rounds", f"{plan.rounds}", f"slots of {_mebibytes(plan.slot_bytes)}, two a direction"),
        Fact("pairs", f"{facts.num_pairs:,}", f"of workers; one has {facts.max_out_pairs} receivers at most"),
        Fact("memory a worker", _mebibytes(max(planned.arena_bytes, default=0)), _arena_text(planned)),
        Fact("descriptors", f"{planned.num_descriptors:,}", "strided copies in all packs and assembles"),
        Fact("planning", seconds_text(planned.planning_seconds), f"{stages}; CPU {planned.planning_cpu_seconds:.3g} s"),
        Fact("peak memory", bytes_text(planned.peak_rss_bytes), "of this process"),
    ]


def methods_document(results: Sequence[MethodResult], t_min_seconds: float, costs: Sequence[Cost]) -> dict[str, Any]:
    """A simulation for programs: T_min, an object per method, and every cost with its unit and source.

    Times that never came, because the update did not end, are null.
    """
    document: dict[str, Any] = {"t_min_seconds": t_min_seconds}
    for result in results:
        document[result.name] = {
            "ewtt_seconds": _finite(result.ewtt_seconds),
            "agst_seconds": _finite(result.agst_seconds),
            "ratio": _finite(_over(result.ewtt_seconds, t_min_seconds)),
            "agst_ratio": _finite(_over(result.agst_seconds, t_min_seconds)),
            "breakdown": {
                "control_seconds": _finite(result.control_seconds),
                "conversion_seconds": _finite(result.conversion_seconds),
                "communication_seconds": _finite(result.communication_seconds),
            },
            "bytes_by_link_kind": _by_kind(result.links),
            "note": result.note,
        }
    document["costs"] = {c.name: {"value": c.value, "unit": c.unit, "source": c.source} for c in costs}
    return document


def methods_rows(results: Sequence[MethodResult], t_min_seconds: float) -> list[tuple[str, ...]]:
    """A row per method, under METHODS_HEAD."""
    rows = []
    for r in results:
        parts = (r.control_seconds, r.conversion_seconds, r.communication_seconds)
        rows.append(
            (
                r.name, seconds_text(r.ewtt_seconds), _ratio_text(r.ewtt_seconds, t_min_seconds),
                seconds_text(r.agst_seconds), _ratio_text(r.agst_seconds, t_min_seconds), *map(seconds_text, parts),
            )
        )  # fmt: skip
    return rows


METHODS_HEAD = ("method", "EWTT", "/ T_min", "AGST", "/ T_min", "control", "conversion", "communication")


def simulation_document(comparison: Comparison, costs: Sequence[Cost]) -> dict[str, Any]:
    """`methods_document` of a comparison, and what else there is to say about this library's run."""
    simulation = comparison.simulation
    workers = comparison.planned.plan.topology.workers
    document = {
        "preset": comparison.planned.deployment.name,
        "num_workers": len(workers),
        **methods_document(comparison.results, comparison.t_min_seconds, costs),
    }
    document["simulation"] = {
        "completed": simulation.completed,
        "rounds": comparison.planned.plan.rounds,
        "rounds_simulated": simulation.num_rounds,
        "extrapolated": simulation.extrapolated,
        "num_events": simulation.num_events,
        "failures": [
            {
                "worker": workers[f.worker].name,
                "at_seconds": f.at_seconds,
                "peer": workers[f.peer].name,
                "cause": f.cause,
            }
            for f in simulation.failures
        ],
    }
    document["plan"] = plan_document(comparison.planned)
    return document


def study_document(study: Study, comparisons: Sequence[Comparison], costs: Sequence[Cost]) -> dict[str, Any]:
    """A study for programs: an object per case, with the paper's own ratios where it has any."""
    cases = []
    for label, comparison in zip(study.labels, comparisons, strict=True):
        case: dict[str, Any] = {study.parameter: label, "num_workers": len(comparison.planned.plan.topology.workers)}
        case |= methods_document(comparison.results, comparison.t_min_seconds, ())
        del case["costs"]
        if study.name == "deployments":
            case["paper"] = dict(zip(("ewtt_ratio", "agst_ratio"), PAPER[label], strict=True))
        cases.append(case)
    return {"study": study.name, "cases": cases, "costs": methods_document((), 1.0, costs)["costs"]}


def study_rows(study: Study, comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """A row per case and method, under `study_head`."""
    rows: list[tuple[str, ...]] = []
    for label, comparison in zip(study.labels, comparisons, strict=True):
        for row in methods_rows(comparison.results, comparison.t_min_seconds):
            if study.name == "deployments":
                ewtt, agst = [f"{r:.2f}" for r in PAPER[label]] if row[0] == METHODS[0] else ["", ""]
                row = (*row[:3], ewtt, *row[3:5], agst, *row[5:])
            rows.append((label, *row))
    return rows


def study_head(study: Study) -> tuple[str, ...]:
    """paper: the ratio before it, as the paper measured it."""
    head: tuple[str, ...] = METHODS_HEAD
    if study.name == "deployments":
        head = (*head[:3], "paper", *head[3:5], "paper", *head[5:])
    return (study.parameter, *head)


def _over(seconds: float, t_min_seconds: float) -> float:
    return seconds / t_min_seconds if t_min_seconds > 0 else inf


def _ratio_text(seconds: float, t_min_seconds: float) -> str:
    ratio = _over(seconds, t_min_seconds)
    return f"{ratio:.3f}" if ratio < 1000 else f"{ratio:.3g}"


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _by_kind(links: Sequence[LinkUse]) -> Mapping[str, int]:
    """Bytes out of all links of each kind."""
    found: dict[str, int] = {}
    for link in links:
        if link.outgoing:
            found[link.kind] = found.get(link.kind, 0) + link.nbytes
    return found


def _num_boxes(planned: Planned) -> int:
    return sum(len(m.copies) for m in planned.deployment.maps)


def _workers_text(planned: Planned) -> str:
    topology = planned.plan.topology
    engines = len({topology.workers[i].engine for i in topology.rollouts})
    sides = []
    for role, ids in ((Role.TRAINER, topology.trainers), (Role.ROLLOUT, topology.rollouts)):
        nodes = len({topology.workers[i].node for i in ids})
        sides.append(f"{len(ids)} {role.value}s on {nodes} node{'s' if nodes != 1 else ''}")
    return f"{' and '.join(sides)}, {engines} engine{'s' if engines != 1 else ''}"


def _arena_text(planned: Planned) -> str:
    topology, arena = planned.plan.topology, np.array(planned.arena_bytes, dtype=np.int64)
    most = [
        f"{role.value} {_mebibytes(int(arena[list(ids)].max(initial=0)))}"
        for role, ids in ((Role.TRAINER, topology.trainers), (Role.ROLLOUT, topology.rollouts))
    ]
    return f"of slots, at most: {', '.join(most)}"


def link_text(link: LinkUse) -> str:
    """ "out of trainer/3 at 50 GB/s" """
    whose = {"node": "node ", "group": "group ", "inside": "the inside link of ", "rollouts": "the rollouts of "}
    return f"{'out of' if link.outgoing else 'into'} {whose.get(link.kind, '')}{link.name} at {bytes_text(link.bandwidth)}/s"


def bytes_text(nbytes: float) -> str:
    """Decimal units, three digits or so: "269.1 MB"."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size * _JUST_BELOW:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """Some digits: "1.234 s", "76.4 ms", "12 us"; "never" where it is infinite."""
    if not isfinite(seconds):
        return "never"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size * _JUST_BELOW:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def cost_text(cost: Cost) -> str:
    """The value in a unit that suits it."""
    return f"{bytes_text(cost.value)}/s" if cost.unit == "bytes/s" else seconds_text(cost.value)


def _mebibytes(nbytes: float) -> str:
    return f"{nbytes / (1 << 20):.4g} MiB"
