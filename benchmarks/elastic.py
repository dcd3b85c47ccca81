"""Engines join, leave and are killed at random while versions are sent: is every installed version right, does anything grow?

    python -m benchmarks.elastic [--json] [--versions N] [--seed S] [--stage-send] [--when-engine-fails drop|fail]

Two trainers with uneven rows in fp32 and two engines stay for the whole run: one of two workers takes bf16 into its live
weights, one of one worker has stage_receive. Up to three more are there at a time, of one or two workers, staged or not, on a
node of their own or on the trainers'. All are processes (see `_elastic_workers`) and compare every element of every version
they install. Who comes and goes follows from the seed; what that meets in a session depends on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from statistics import median
from typing import Any

from benchmarks._elastic_job import CALM_VERSIONS, HangError, Job, Settings
from benchmarks._elastic_workers import SPEC

VERSIONS = 2000
ALLOWED_GROWTH_BYTES = 4 << 20
"""Of a resident set between the look at which it was warm and the last one, however many came and went."""
ALLOWED_GROWTH_OBJECTS = 1000
"""Of those that Python's collector knows, likewise. The last 17 failures are kept with their tracebacks: some 400."""
WARM_LOOKS = 2
"""Looks before the one from which growth counts: by then planner, allocator and libraries have met most sizes of a job."""


def measure(settings: Settings) -> dict[str, Any]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    job = Job(settings)
    try:
        job.run()
    except HangError as error:
        waiting = [f"{m.role.name} ({m.installed}, {m.ending})" for m in job.members]
        job.problems.append(f"{error}; there are {', '.join(waiting)}")
    finally:
        if job.members:
            job.stop()
    print(file=sys.stderr)
    looks = {m.role.name: m.looks for m in (*job.trainers, *job.stayers)}
    return summary(settings, job.sent, looks, job.counts, job.problems, wall_seconds=time.monotonic() - job.began)


def summary(
    settings: Settings, sent: list[dict[str, Any]], looks: dict[str, list[dict[str, int]]], counts: Counter[str],
    problems: list[str], *, wall_seconds: float,
) -> dict[str, Any]:  # fmt: skip
    """growth: of each who stays, its last look less the one at which it was warm. ewtt_seconds_first, _last: medians over
    the first and the last half of the calm versions that took one attempt."""
    calm = [v["ewtt_seconds"] for v in sent if v["calm"] and v["attempts"] == 1 and v["ewtt_seconds"] is not None]
    calm = calm or [0.0]
    half = max(len(calm) // 2, 1)
    first, last = median(calm[:half]), median(calm[-half:])
    warm = {name: seen[min(WARM_LOOKS, max(len(seen) - 2, 0))] for name, seen in looks.items() if seen}
    growth = {name: {k: looks[name][-1][k] - at_first[k] for k in at_first} for name, at_first in warm.items()}
    allowed = {
        "resident_bytes": ALLOWED_GROWTH_BYTES, "objects": ALLOWED_GROWTH_OBJECTS, "descriptors": 0, "threads": 0
    }  # fmt: skip
    most = {k: max((g[k] for g in growth.values()), default=0) for k in allowed}
    small = all(most[k] <= allowed[k] for k in allowed)
    complete = len(sent) == settings.versions and len(growth) == len(looks)
    return {
        "versions": len(sent), "seed": settings.seed, "stage_send": settings.stage_send,
        "when_engine_fails": settings.when_engine_fails, "model_bytes": SPEC.nbytes,
        **{k: counts[k] for k in ("joins", "leaves", "kills", "retries", "poisoned", "installed")},
        "versions_given_up": counts["given up"], "wrong_values": counts["wrong values"],
        "growth": growth, "largest_growth": most, "allowed_growth": allowed,
        "ewtt_seconds_first": first, "ewtt_seconds_last": last,
        "wall_seconds": wall_seconds, "load_average": os.getloadavg()[0],
        "looks": looks, "problems": problems, "ok": complete and small and not problems and not counts["wrong values"],
    }  # fmt: skip


def _text(found: dict[str, Any]) -> str:
    first, last = (found[f"ewtt_seconds_{when}"] * 1e3 for when in ("first", "last"))
    most = found["largest_growth"]
    lines = [
        f"{found['versions']} versions of {found['model_bytes'] / 1e3:.1f} kB in {found['wall_seconds']:.0f} s: "
        f"{found['joins']} engines joined, {found['leaves']} left, {found['kills']} were killed; {found['retries']} retries, "
        f"{found['versions_given_up']} versions given up, {found['poisoned']} workers poisoned for a while",
        f"{found['installed']} installs compared, {found['wrong_values']} wrong",
        f"who stayed and grew most grew by {most['resident_bytes'] / 1024:.0f} KiB, {most['objects']} objects, "
        f"{most['descriptors']} descriptors, {most['threads']} threads; EWTT {first:.1f} ms at first, {last:.1f} ms at last",
        *found["problems"][:20],
    ]
    return "\n".join(lines)


def main() -> int:
    """0: every value was right, nobody hung and nothing grew; 1: otherwise, and it says what."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elastic", description="Engines come and go at random.")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--versions", type=int, default=VERSIONS, help=f"how many (default {VERSIONS})")
    parser.add_argument("--seed", type=int, default=1, help="of who comes and goes (default 1)")
    parser.add_argument("--stage-send", action="store_true", help="trainers send from a host copy")
    parser.add_argument("--when-engine-fails", choices=["drop", "fail"], default="drop", help="default drop")
    parsed = parser.parse_args()
    if parsed.versions < 2 * (CALM_VERSIONS + 1):
        parser.error(f"--versions: expected at least {2 * (CALM_VERSIONS + 1)}, got {parsed.versions}")
    found = measure(
        Settings(
            versions=parsed.versions,
            seed=parsed.seed,
            stage_send=parsed.stage_send,
            when_engine_fails=parsed.when_engine_fails,
        )
    )
    print(json.dumps(found) if parsed.json else _text(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
