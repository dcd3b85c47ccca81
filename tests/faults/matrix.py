"""The fault matrix with real processes, printed as a table.

    python -m tests.faults.matrix [--only TEXT]... [--parallel N] [--json]

Cells with a cut link need root, for network namespaces; without it they are left out, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from benchmarks.cluster.netns import Testbed, TestbedError, address_of
from tests.faults.cell_run import DEADLINE_SECONDS, STOPPED_SECONDS, Lane, run_cell
from tests.faults.cells import KINDS, MODES, PHASES, VICTIMS, WORKERS, Cell, Outcome, all_cells

_RATE_BITS = 1e10


@contextlib.contextmanager
def cluster_lanes(count: int) -> Iterator[list[Lane]]:
    """Lanes of namespaces, side by side. Raises TestbedError where there can be none."""
    size = len(WORKERS)
    with Testbed([_RATE_BITS] * (count * size)):
        yield [
            Lane(nodes := tuple(range(i * size, (i + 1) * size)), tuple(address_of(n) for n in nodes))
            for i in range(count)
        ]


def run_cells(cells: Sequence[Cell], parallel: int, say: bool = False) -> tuple[dict[Cell, Outcome], str]:
    """All cells, `parallel` at once. Returns outcomes, and why cells with cut links were left out ("" when they were not)."""
    outcomes: dict[Cell, Outcome] = {}
    with contextlib.ExitStack() as stack:
        lanes, why_not = [Lane() for _ in range(parallel)], ""
        if any(c.kind == "cut" for c in cells):
            try:
                lanes = stack.enter_context(cluster_lanes(parallel))
            except TestbedError as error:
                why_not = str(error)
        chosen = [c for c in cells if not c.strikes_nothing and not (why_not and c.kind == "cut")]
        free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        for lane in lanes:
            free.put(lane)

        def run(cell: Cell) -> Outcome:
            lane = free.get()
            try:
                return run_cell(cell, lane)
            finally:
                free.put(lane)

        pool = stack.enter_context(ThreadPoolExecutor(parallel))
        for i, outcome in enumerate(pool.map(run, chosen)):
            outcomes[outcome.cell] = outcome
            if say:
                told = "" if outcome.seconds is None else f", told within {outcome.seconds:.1f} s"
                print(
                    f"{i + 1}/{len(chosen)} {outcome.cell}: {outcome.word}{told}; {outcome.took_seconds:.0f} s"
                    + "".join(f"\n    WRONG: {w}" for w in outcome.wrong),
                    file=sys.stderr, flush=True,
                )  # fmt: skip
    return outcomes, why_not


def table(outcomes: dict[Cell, Outcome]) -> str:
    """Markdown: a row for each fault and victim, a column for each phase and mode."""
    columns = [(phase, mode) for phase in PHASES for mode in MODES]
    lines = [
        "| fault | victim | " + " | ".join(f"{p}, {m}" for p, m in columns) + " |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for kind in KINDS:
        for victim in VICTIMS:
            row = []
            for phase, mode in columns:
                cell = Cell(kind=kind, victim=victim, phase=phase, mode=mode)
                outcome = outcomes.get(cell)
                if outcome is None:
                    row.append("-")
                else:
                    told = "" if outcome.seconds is None else f", {outcome.seconds:.1f} s"
                    row.append(("WRONG " if outcome.wrong else "") + outcome.word + told)
            lines.append(f"| {kind} | {victim} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description="The fault matrix, for real.")
    parser.add_argument("--only", action="append", default=[], help="cells whose name contains this, as printed")
    parser.add_argument("--parallel", type=int, default=2, help="cells at once (default 2)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout instead of the table")
    parsed = parser.parse_args()
    cells = [c for c in all_cells() if all(text in str(c) for text in parsed.only)]
    begun = time.monotonic()
    outcomes, why_not = run_cells(cells, parsed.parallel, say=True)
    bad = [o for o in outcomes.values() if o.wrong]
    if parsed.json:
        print(json.dumps([{**asdict(o), "cell": o.cell.to_json()} for o in outcomes.values()]))
    else:
        print(table(outcomes))
        print(
            f"\n{len(outcomes)} cells run in {time.monotonic() - begun:.0f} s at a load of {os.getloadavg()[0]:.1f}: "
            f"{len(bad)} wrong; deadline {DEADLINE_SECONDS:.0f} s, stops of {STOPPED_SECONDS:.0f} s; times are from the strike "
            "to the last survivor's word of it; \"-\": nothing to strike"
        )  # fmt: skip
    if why_not:
        print(f"cells with a cut link were left out: {why_not}", file=sys.stderr)
    for outcome in bad:
        print(f"{outcome.cell}:\n  " + "\n  ".join(outcome.wrong), file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
