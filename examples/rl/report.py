"""What a run has shown: the document, its verdict, a line a step, and the plot."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from examples.rl.config import RunConfig

__all__ = ["FORMAT", "document", "draw", "line", "method_name", "summary", "verdict"]

FORMAT = "weightbridge-rl/1"

RISE_IN_STANDARD_ERRORS = 3.0
EARLY_STEPS = 10
"""Later on a policy that has learnt all there is to learn hardly changes any more."""

NOISE_FACTOR = 2.0
"""After an update the policies may be apart by this many times what they were before any update, when both held the very same
bf16 weights and only the arithmetic differed."""


def document(
    config: RunConfig, records: list[dict[str, Any]], *, seconds: float, cpu_seconds: float, load_before: float
) -> dict[str, Any]:
    """Everything a run has recorded, its median times and its verdict, as JSON."""
    kinds: dict[str, list[dict[str, Any]]] = {"connected": [], "evaluation": [], "step": []}
    for record in records:
        kinds[record["kind"]].append({key: value for key, value in record.items() if key != "kind"})
    settings = msgspec.to_builtins(config)
    for private in ("checkpoint", "work_dir", "launcher", "endpoint", "broadcast_port"):
        settings.pop(private)
    found = {
        "format": FORMAT,
        "config": settings,
        "machine": {
            "cpus": len(os.sched_getaffinity(0)), "processor": _processor(), "system": platform.system(),
            "load_before": round(load_before, 2), "load_after": round(os.getloadavg()[0], 2),
        },
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "connect_seconds": round(kinds["connected"][0]["seconds"], 2),
        "evaluations": kinds["evaluation"],
        "steps": kinds["step"],
    }  # fmt: skip
    return {
        **found,
        "update": update_medians(kinds["step"]),
        "verdict": verdict(settings, kinds["evaluation"], kinds["step"]),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [row.partition(":")[2].strip() for row in text.splitlines() if row.startswith("model name")]
    return names[0] if names else platform.processor()


def update_medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of one update, the first one left out where there are more: it pays for what later ones reuse."""
    updates = [step["update"] for step in steps if step["update"] is not None]
    counted = updates[1:] or updates
    if not counted:
        return {}
    return {key: round(median(u[key] for u in counted), 4) for key in ("total", "trainer_stall", "ewtt", "agst")}


def verdict(
    settings: Mapping[str, Any], evaluations: list[dict[str, Any]], steps: list[dict[str, Any]]
) -> dict[str, Any]:
    """Whether the run shows what it has to: learning where there is a learning rate, and one policy on both sides.

    The noise is how far the two policies are apart on the first batch, before any update. After each update that was sent they
    may be apart by NOISE_FACTOR times that; after one that was skipped they must be further apart.
    """
    first, last = evaluations[0], evaluations[-1]
    rise = last["reward"] - first["reward"]
    error = (first["standard_error"] ** 2 + last["standard_error"] ** 2) ** 0.5
    noise = steps[0]["apart_as_sampled"]["mean"]
    bound = NOISE_FACTOR * noise
    sent = [s["apart_after"]["mean"] for s in steps if not s["skipped"]]
    skipped = [s["apart_after"]["mean"] for s in steps if s["skipped"]]
    learns = settings["learning_rate"] > 0
    long_enough = settings["steps"] >= 20
    rose = rise > RISE_IN_STANDARD_ERRORS * error
    same_policy = all(apart <= bound for apart in sent)
    skip_shows = all(apart > bound for apart in skipped)
    right_versions = all(s["engine_version"] == s["version"] for s in steps if not s["skipped"])
    as_expected = rose if learns and long_enough else (True if learns else not rose)
    return {
        "reward_before": round(first["reward"], 4), "reward_after": round(last["reward"], 4),
        "rise": round(rise, 4), "rise_in_standard_errors": round(rise / error, 2) if error else 0.0, "rose": rose,
        "noise": round(noise, 5), "bound": round(bound, 5),
        "apart_after_sent": round(max(sent), 5) if sent else None,
        "apart_before": round(median([s["apart_before"]["mean"] for s in steps[:EARLY_STEPS]]), 5),
        "apart_after_skipped": round(min(skipped), 5) if skipped else None,
        "same_policy_after_updates": same_policy, "skipped_updates_show": skip_shows, "versions_right": right_versions,
        "passed": same_policy and skip_shows and right_versions and as_expected,
    }  # fmt: skip


def line(record: Mapping[str, Any]) -> str:
    """One record for people."""
    match record["kind"]:
        case "connected":
            return f"connected after {record['seconds']:.1f} s"
        case "evaluation":
            return (
                f"held-out prompts at version {record['version']}: reward {record['reward']:.3f} "
                f"+- {record['standard_error']:.3f}  {record['example']!r}"
            )
        case _:
            update = record["update"]
            took = "skipped"
            if update is not None:
                took = f"{update['total']:.2f} s (EWTT {update['ewtt']:.2f}, AGST {update['agst']:.2f})"
            return (
                f"step {record['step']:3d}: reward {record['reward']:.3f}, staleness {record['staleness']}, "
                f"sample {record['seconds']['sample']:.1f} s, train {record['seconds']['train']:.1f} s, update {took}; "
                f"apart {record['apart_before']['mean']:.3f} before, {record['apart_after']['mean']:.4f} after"
            )


def summary(document: Mapping[str, Any]) -> str:
    """The verdict in a few lines."""
    found = document["verdict"]
    skipped = found["apart_after_skipped"]
    lines = [
        f"{len(document['steps'])} steps in {document['seconds']:.0f} s ({document['cpu_seconds']:.0f} s of CPU time); "
        f"held-out reward {found['reward_before']:.3f} -> "
        f"{found['reward_after']:.3f} ({found['rise_in_standard_errors']:+.1f} standard errors)",
        f"logprobs of trainer and engine on the same tokens: {found['apart_before']:.3f} apart before an update "
        f"(median of the first {EARLY_STEPS}), "
        f"at most {found['apart_after_sent']} after one, {found['noise']:.4f} before all"
        + ("" if skipped is None else f", at least {skipped:.3f} where one was skipped"),
        f"verdict: {'passed' if found['passed'] else 'FAILED'}",
    ]
    return "\n".join(lines)


def method_name(settings: Mapping[str, Any]) -> str:
    """A run's way of moving weights, in words."""
    if settings["method"] != "weightbridge":
        return {"broadcast": "broadcast (gloo)", "files": "checkpoint file"}[settings["method"]]
    staged = [side for side in ("send", "receive") if settings[f"stage_{side}"]]
    return "direct" if not staged else "staged " + " and ".join(staged)


def draw(documents: Mapping[str, Mapping[str, Any]], target: Path) -> None:
    """An SVG of four panels: reward, staleness, EWTT and AGST, distance of the policies. The first run is drawn in each of
    them, the others beside it except in the last.
    """
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = FORMAT
    figure, panels = plt.subplots(2, 2, figsize=(10, 6.4), constrained_layout=True)
    _rewards(panels[0][0], documents)
    _staleness(panels[0][1], documents)
    _updates(panels[1][0], documents)
    _distances(panels[1][1], next(iter(documents.values())))
    for axis in panels.flat:
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, format="svg", metadata={"Date": None})
    plt.close(figure)


def _rewards(axis: Any, documents: Mapping[str, Mapping[str, Any]]) -> None:
    for at, (name, document) in enumerate(documents.items()):
        if at == 0:
            steps = document["steps"]
            axis.plot(
                [s["step"] for s in steps], [s["reward"] for s in steps], color="lightgrey", label="training batches"
            )
        points = document["evaluations"]
        axis.errorbar(
            [p["step"] for p in points], [p["reward"] for p in points], yerr=[p["standard_error"] for p in points],
            marker="o", markersize=4, capsize=2, label=f"held-out prompts, {name}", linestyle="--" if at else "-",
        )  # fmt: skip
    axis.set(title="reward", ylabel="mean reward", ylim=(0, 1.05))
    axis.legend(frameon=False, loc="center right")


def _staleness(axis: Any, documents: Mapping[str, Mapping[str, Any]]) -> None:
    for at, (name, document) in enumerate(documents.items()):
        steps = document["steps"]
        axis.plot([s["step"] for s in steps], [s["staleness"] for s in steps], "--." if at else "-", label=name)
    axis.set(title="staleness of the batch's first token", ylabel="versions", ylim=(-0.2, 2.2), yticks=(0, 1, 2))
    axis.legend(frameon=False)


def _updates(axis: Any, documents: Mapping[str, Mapping[str, Any]]) -> None:
    for at, document in enumerate(documents.values()):
        if at and method_name(document["config"]) == method_name(next(iter(documents.values()))["config"]):
            continue  # the same way of moving weights: nothing new
        sent = [s for s in document["steps"] if s["update"] is not None]
        for key, label in (("ewtt", "EWTT"), ("agst", "AGST")):
            values = [s["update"][key] for s in sent]
            shown = f"{label}, {method_name(document['config'])}"
            axis.plot([s["step"] for s in sent], values, "--." if at else "-", label=shown)
    axis.set(title="one update", ylabel="seconds", ylim=(0, None))
    axis.legend(frameon=False)


def _distances(axis: Any, document: Mapping[str, Any]) -> None:
    steps = document["steps"]
    at = [s["step"] for s in steps]
    axis.semilogy(at, [s["apart_before"]["mean"] for s in steps], label="before the update")
    axis.semilogy(at, [s["apart_after"]["mean"] for s in steps], label="after it")
    noise = document["verdict"]["noise"]
    axis.axhline(noise, color="grey", linestyle=":", label="same weights, before all updates")
    axis.set(title="trainer against engine, same tokens", ylabel="mean |logprob difference|")
    axis.legend(frameon=False)
