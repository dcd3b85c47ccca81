"""From what workers and counters say to the figures of one case, to JSON and to a table. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.cluster.netns import Counters
from benchmarks.cluster.overlap import kernel_seconds
from benchmarks.cluster.predict import Prediction
from benchmarks.cluster.scenarios import Case

__all__ = ["CpuTimes", "Update", "document", "kernel_shares", "node_bytes", "parse_cpu", "result", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """Seconds (any unit) of all CPUs since boot: at work, and in all."""

    busy: int
    total: int


def parse_cpu(stat: str) -> CpuTimes:
    """The first line of /proc/stat; waiting for disks counts as idle."""
    fields = [int(x) for x in stat.splitlines()[0].split()[1:9]]
    total = sum(fields)
    return CpuTimes(busy=total - fields[3] - fields[4], total=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One measured update. stalls: worker -> (begin, end) on one clock. links: node -> bytes over its link, None unshaped.

    wrong: "worker: tensor" for whatever was not bit for bit as sent. own_cpu_seconds: of the worker processes together.
    spans, samples: of workers and of links, when traced.
    """

    stalls: Mapping[str, tuple[float, float]]
    links: Mapping[int, Counters] | None
    cpu_busy: float
    own_cpu_seconds: float
    load_average: float
    wrong: tuple[str, ...] = ()
    spans: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[int, Any] = field(default_factory=dict)

    @property
    def ewtt_seconds(self) -> float:
        """From the first worker that stopped computing to the last that resumed."""
        return max(end for _, end in self.stalls.values()) - min(begin for begin, _ in self.stalls.values())

    @property
    def agst_seconds(self) -> float:
        """Total stall of all workers over their number."""
        return sum(end - begin for begin, end in self.stalls.values()) / len(self.stalls)


def node_bytes(before: Mapping[int, Counters], after: Mapping[int, Counters]) -> dict[int, Counters]:
    """What crossed each node's link between two readings."""
    return {
        node: Counters(received=after[node].received - before[node].received, sent=after[node].sent - before[node].sent)
        for node in before
    }


def result(
    case: Case, method: str, updates: Sequence[Update], memory: Mapping[str, Mapping[str, int]], told: Mapping[str, Any],
    *, predicted: Prediction | None = None, traced: Update | None = None,
) -> dict[str, Any]:  # fmt: skip
    """One entry of `results`. Lists have one value for each measured update; bytes are medians over them.

    predicted: what the simulator says of it. traced: one more update of the same, for how long kernels took.
    """
    ewtt = [u.ewtt_seconds for u in updates]
    shaped = all(u.links is not None for u in updates)
    num_trainer_nodes = case.key.trainer_nodes
    nodes = range(num_trainer_nodes + case.key.replicas)
    crossed = {node: [(u.links or {})[node] for u in updates] for node in nodes} if shaped else {}
    egress = [sum(crossed[n][i].sent for n in range(num_trainer_nodes)) for i in range(len(updates))] if shaped else []
    model_bytes = case.spec.nbytes
    bound = told.get("link_bound_seconds")
    ingress = {
        f"n{n}": round(median(c.received for c in crossed[n])) for n in nodes if n >= num_trainer_nodes and shaped
    }
    return {
        "method": method,
        "replicas": case.key.replicas,
        "trainer_nodes": num_trainer_nodes,
        "t_min_seconds": case.t_min_seconds if shaped else None,
        "ewtt_seconds": ewtt,
        "agst_seconds": [u.agst_seconds for u in updates],
        "ratio_to_t_min": median(ewtt) / case.t_min_seconds if shaped else None,
        "ratio_to_bound": median(ewtt) / bound if shaped and bound else None,
        "predicted_ewtt_seconds": predicted.ewtt_seconds if shaped and predicted else None,
        "predicted_over_measured": predicted.ewtt_seconds / median(ewtt) if shaped and predicted else None,
        "predicted_as": predicted.model if shaped and predicted else None,
        "trainer_egress_bytes": round(median(egress)) if shaped else None,
        "trainer_egress_ratio": median(egress) / model_bytes if shaped else None,
        "rollout_ingress_bytes": ingress if shaped else None,
        "rollout_ingress_ratio": max(ingress.values()) / model_bytes if shaped else None,
        "peak_extra_bytes": {name: m["peak_extra_bytes"] for name, m in memory.items()},
        "connect_peak_extra_bytes": {name: m["connect_peak_extra_bytes"] for name, m in memory.items()},
        "cpu_busy": [u.cpu_busy for u in updates],
        "own_cpu_seconds": [u.own_cpu_seconds for u in updates],
        "load_average": [u.load_average for u in updates],
        **kernel_shares(traced),
        "verified": not any(u.wrong for u in (*updates, *([traced] if traced else []))),
        "wrong": [w for u in updates for w in u.wrong][:20],
        "plan": dict(told),
    }


def kernel_shares(traced: Update | None) -> dict[str, float | None]:
    """Of the EWTT of a traced update, at the worker where it is most: kernels, and kernels that no transfer hides."""
    seconds = list(kernel_seconds(traced.spans).values()) if traced and traced.spans else []
    ewtt = traced.ewtt_seconds if traced else 1.0
    return {
        "kernel_share": max(all_of_them for all_of_them, _ in seconds) / ewtt if seconds else None,
        "unoverlapped_kernel_share": max(bare for _, bare in seconds) / ewtt if seconds else None,
    }


def document(
    scenario: str,
    rate_bits: float | None,
    cases: Sequence[Case],
    results: Sequence[dict[str, Any]],
    skipped: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The whole of `--json`. t_min_seconds: of the first case; each result has its own. skipped: method -> why."""
    return {
        "scenario": scenario,
        "rate_bits_per_second": rate_bits,
        "workers_per_node": 2,
        "slot_bytes": cases[0].key.slot_bytes,
        "model_bytes": cases[0].spec.nbytes,
        "num_tensors": len(cases[0].spec.tensors),
        "t_min_seconds": cases[0].t_min_seconds if rate_bits is not None else None,
        "skipped": dict(skipped or {}),
        "results": list(results),
    }


_COLUMNS = (
    "trainer nodes", "replicas", "method", "T_min s", "EWTT s", "AGST s", "EWTT/T_min", "egress/M", "ingress/M", "extra MiB",
    "CPU busy", "predicted/measured", "bare kernels", "verified",
)  # fmt: skip


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """For people: one line a result, medians."""
    rows = [_COLUMNS]
    for r in results:
        peak = max(r["peak_extra_bytes"].values(), default=0) / (1 << 20)
        ratios = [_number(r[key], 3) for key in ("ratio_to_t_min", "trainer_egress_ratio", "rollout_ingress_ratio")]
        rows.append(
            (
                str(r["trainer_nodes"]), str(r["replicas"]), r["method"], _number(r["t_min_seconds"], 3),
                _number(median(r["ewtt_seconds"]), 3), _number(median(r["agst_seconds"]), 3), *ratios, f"{peak:.0f}",
                _number(median(r["cpu_busy"]), 2), _number(r["predicted_over_measured"], 3),
                _number(r["unoverlapped_kernel_share"], 4), "yes" if r["verified"] else "NO",
            )
        )  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
