"""Planning a whole job: CPU time of every stage from SourceMaps to verified programs of all workers, memory, and growth.

    python -m benchmarks.planning [--preset kimi-k2] [--runs 3] [--json]

Every run is a process of its own with one thread for linear algebra, so that it begins with cold caches and has a peak of its
own. Seconds are CPU seconds of the process (user and system), which neighbours on the machine disturb less than the wall
clock. Each number is the median of `--runs` runs; by default 3 where a job has more than 300 workers and 5 elsewhere, and the
number of runs stands in the result. The maps of a preset are made first and are not counted.

- expand: fingerprints, boxes of every distinct map, side by side. overlay: atoms. classes: replica classes. lp: the linear
  programs. routes: cutting classes into routes and hops. bound: the certificate. rounds: number and cut of the rounds.
- verify_plan: the independent check of the plan. lower: the programs of all workers. verify_programs: the independent check of
  all of them. Programs are made one after the other and not kept.
- planning_seconds: all of these together. peak_rss_bytes: of the process; maps_rss_bytes: what was resident before planning
  began (interpreter, libraries, checkpoint spec and maps).
- growth: planning_seconds of the same deployment with twice the experts, and with twice the engines, over those of the
  deployment itself. The bound is 2.5.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from weightbridge.deployments import PRESETS, Deployment, preset
from weightbridge.plan import PlanOptions, make_plan, planner, verify_plan
from weightbridge.program import WorkerProgram, lower_job, verify_job

STAGES = (
    "expand", "overlay", "classes", "lp", "routes", "bound", "rounds", "rest_of_make_plan",
    "verify_plan", "lower", "verify_programs",
)  # fmt: skip
PARTS_OF_MAKE_PLAN = {
    "overlay": "overlay",
    "classify": "classes",
    "solve": "lp",
    "make_routes": "routes",
    "certified": "bound",
    "fit_rounds": "rounds",
}
GROWTH_BOUND = 2.5
MANY_WORKERS = 300


class Stopwatch:
    """CPU seconds by stage."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def timed(self, stage: str, call: Callable[[], Any]) -> Any:
        begin = time.process_time()
        try:
            return call()
        finally:
            self.seconds[stage] += time.process_time() - begin

    def watch_make_plan(self) -> None:
        """Let `make_plan` time its own parts, for the rest of this process."""
        for name, stage in PARTS_OF_MAKE_PLAN.items():
            setattr(planner, name, self._watched(getattr(planner, name), stage))

    def _watched(self, part: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if stage == "overlay":
                self.timed("expand", lambda: arguments[0].rows)  # kept by the job, so the overlay finds it
            return self.timed(stage, lambda: part(*arguments, **options))

        return call

    def each(self, stage: str, programs: Iterator[WorkerProgram]) -> Iterator[WorkerProgram]:
        """The same programs; what making each one takes is counted for `stage`."""
        while True:
            program = self.timed(stage, lambda: next(programs, None))
            if program is None:
                return
            yield program


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"/proc/self/status has no {key}")


def plan_all(job: Deployment) -> dict[str, Any]:
    """From the maps to verified programs of all workers, each stage timed."""
    watch, before = Stopwatch(), resident("VmRSS")
    watch.watch_make_plan()
    options = PlanOptions(slot_bytes=job.slot_bytes)
    begin = time.process_time()
    plan = make_plan(job.spec, job.topology, job.maps, options=options)
    rest = time.process_time() - begin - sum(watch.seconds.values())
    watch.seconds["rest_of_make_plan"] = rest
    watch.timed("verify_plan", lambda: verify_plan(plan, job.spec, job.maps))
    begin = time.process_time()
    programs = watch.each("lower", watch.timed("lower", lambda: lower_job(plan, job.spec, job.maps)))
    verify_job(plan, job.spec, job.maps, programs)
    watch.seconds["verify_programs"] = time.process_time() - begin - watch.seconds["lower"]
    return {
        "num_workers": len(job.topology.workers),
        "num_tensors": len(job.spec.tensors),
        "num_maps": len({id(m) for m in job.maps}),
        "num_boxes": sum(len(m.copies) for m in job.maps),
        "num_atoms": len(plan.atoms),
        "num_classes": len(plan.classes),
        "num_routes": len(plan.routes),
        "num_hops": len(plan.hops),
        "rounds": plan.rounds,
        "seconds": watch.seconds,
        "planning_seconds": sum(watch.seconds.values()),
        "maps_rss_bytes": before,
        "peak_rss_bytes": resident("VmHWM"),
    }


def run_once(name: str, changes: dict[str, int]) -> dict[str, Any]:
    """One deployment in a process of its own."""
    single = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    command = [sys.executable, "-m", "benchmarks.planning", "--once", json.dumps([name, changes])]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | single, check=False)
    if done.returncode:
        raise SystemExit(f"{name} {changes} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(name: str, changes: dict[str, int], runs: int | None) -> dict[str, Any]:
    """The median of some runs, stage by stage."""
    found = [run_once(name, changes)]
    runs = runs or (3 if found[0]["num_workers"] > MANY_WORKERS else 5)
    found += [run_once(name, changes) for _ in range(runs - 1)]
    medians = {stage: statistics.median(f["seconds"][stage] for f in found) for stage in STAGES}
    totals = [f["planning_seconds"] for f in found]
    measured = {"preset": name, "changes": changes, "runs": runs, **found[0], "seconds": medians}
    measured |= {"planning_seconds": statistics.median(totals), "planning_seconds_of_runs": totals}
    measured["peak_rss_bytes"] = max(f["peak_rss_bytes"] for f in found)
    return measured


def measure_growth(base: dict[str, Any], runs: int | None) -> dict[str, Any]:
    """The same deployment with twice the experts and with twice the engines."""
    job = preset(base["preset"])
    experts = len({t.name.split(".experts.")[1].split(".")[0] for t in job.spec.tensors if ".experts." in t.name})
    engines = len({w.engine for w in job.topology.workers if w.engine})
    doubled = {"engines": {"engines": 2 * engines}}
    if experts:
        doubled["experts"] = {"num_experts": 2 * experts}
    result: dict[str, Any] = {"bound": GROWTH_BOUND}
    for what, changes in doubled.items():
        larger = measure(base["preset"], changes, runs)
        result[what] = {
            "ratio": larger["planning_seconds"] / base["planning_seconds"],
            "ratio_of_stages": {
                s: larger["seconds"][s] / base["seconds"][s] if base["seconds"][s] else None for s in STAGES
            },
            "doubled": larger,
        }
    return result


def show(measured: list[dict[str, Any]]) -> None:
    for m in measured:
        changed = "".join(f", {key} {value}" for key, value in m["changes"].items())
        print(f"{m['preset']}{changed}: median of {m['runs']} runs")
        print(
            f"  {m['num_workers']} workers, {m['num_boxes']:,} boxes, {m['num_classes']} classes, {m['rounds']} rounds"
        )
        for stage in STAGES:
            print(f"  {stage:20} {m['seconds'][stage]:8.3f} s")
        runs = ", ".join(f"{s:.2f}" for s in m["planning_seconds_of_runs"])
        print(f"  {'all':20} {m['planning_seconds']:8.3f} s   of the runs: {runs}")
        print(
            f"  memory: {m['peak_rss_bytes'] / 1e6:,.0f} MB at the peak, {m['maps_rss_bytes'] / 1e6:,.0f} MB before planning"
        )


def main() -> None:
    """Measure; print tables, or JSON with everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--preset", choices=list(PRESETS), help="only this one, and its growth; else all, and kimi-k2's"
    )
    parser.add_argument("--runs", type=int)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        name, changes = json.loads(arguments.once)
        print(json.dumps(plan_all(preset(name, **changes))))
        return
    names = [arguments.preset] if arguments.preset else list(PRESETS)
    result: dict[str, Any] = {"presets": [measure(name, {}, arguments.runs) for name in names]}
    grown = next(m for m in result["presets"] if m["preset"] == (arguments.preset or "kimi-k2"))
    result["growth"] = {grown["preset"]: measure_growth(grown, arguments.runs)}
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    growth = result["growth"][grown["preset"]]
    doubled = [what for what in growth if what != "bound"]
    show(result["presets"] + [growth[what]["doubled"] for what in doubled])
    for what in doubled:
        print(
            f"{grown['preset']} with twice the {what}: {growth[what]['ratio']:.2f} times the time (bound {GROWTH_BOUND})"
        )


if __name__ == "__main__":
    main()
