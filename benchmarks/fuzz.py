"""Damaged, forged and senseless bytes into every decoder that takes bytes from outside.

    python -m benchmarks.fuzz [--control 1000000] [--data 10000] [--seed 0] [--json]
    python -m benchmarks.fuzz --replay messages:226 [--seed 0]

Control plane: connections of strangers, messages in parts, typed messages, source maps, plans, programs, tags, and whole
sessions of words that make no sense. Data plane: handshakes with peers that lack the token or whose words are altered on
the way, and the frames of a joined connection over tcp and over shm, each on a socket of its own.

A case must end in the decoder's documented error or in a value that makes sense. Findings, with which the command fails: any
other exception; a word heard from somebody without the token; a document accepted that is not the genuine one; a byte
written outside the registered memory; a link that does not end; more memory taken than `MEMORY_BASE_BYTES` and
`MEMORY_PER_BYTE` allow for the size of the message (one case in 64 is traced, on the data plane each).

- refused: with the documented error. understood: well-formed after all (a number in a message has changed, say), which is no
  acceptance: who may say it is decided when the connection is made. accepted: forgeries that came through.
- slowest_seconds: CPU time of the slowest case. peak_bytes: the most that a traced case took at once.
- rss_growth_bytes: how far the peak of the resident set rose from when the targets stood until the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import sys
import time
import traceback
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks._fuzz_data import data_targets
from benchmarks._fuzz_targets import Target, Violation, control_targets

__all__ = ["CONTROL_CASES", "DATA_CASES", "Outcome", "fuzz"]

CONTROL_CASES = 1_000_000
DATA_CASES = 10_000
MEMORY_BASE_BYTES = 4 << 20
MEMORY_PER_BYTE = 64
_MAX_FINDINGS = 20


@dataclass
class Outcome:
    """Of one target. findings: "TARGET:INDEX: what happened", the first few."""

    cases: int = 0
    refused: int = 0
    understood: int = 0
    accepted: int = 0
    slowest_seconds: float = 0.0
    peak_bytes: int = 0
    cpu_seconds: float = 0.0
    num_findings: int = 0
    findings: list[str] = field(default_factory=list)

    def found(self, target: Target, index: int | str, what: str) -> None:
        self.num_findings += 1
        if len(self.findings) < _MAX_FINDINGS:
            self.findings.append(f"{target.name}:{index}: {what}")


def draw(target: Target, seed: int, index: int) -> Any:
    """The input of a case, the same in every process."""
    return target.draw(random.Random(f"{seed}/{target.name}/{index}"))


def _attempt(target: Target, data: Any, outcome: Outcome, index: int) -> None:
    try:
        if target.feed(data):
            outcome.understood += target.inputs_per_case
        else:
            outcome.refused += target.inputs_per_case
    except target.refusals:
        outcome.refused += target.inputs_per_case
    except Violation as error:
        outcome.accepted += target.inputs_per_case
        outcome.found(target, index, str(error))
    except Exception as error:  # noqa: BLE001  (that is what is looked for)
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome.found(target, index, f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})")


def _traced(target: Target, data: Any, outcome: Outcome, index: int) -> None:
    tracemalloc.start()
    try:
        _attempt(target, data, outcome, index)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    outcome.peak_bytes = max(outcome.peak_bytes, peak)
    allowed = MEMORY_BASE_BYTES + MEMORY_PER_BYTE * (len(data) if isinstance(data, bytes) else 0)
    if peak > allowed:
        outcome.found(target, index, f"took {peak} bytes at once, {allowed} are allowed for its size")


def fuzz(targets: Sequence[Target], num_inputs: int, *, seed: int = 0) -> dict[str, Outcome]:
    """Give every target its share of `num_inputs` inputs; outcome by name."""
    outcomes: dict[str, Outcome] = {}
    weights = sum(t.weight * t.inputs_per_case for t in targets)
    for target in targets:
        outcome = outcomes[target.name] = Outcome()
        begun = time.process_time()
        for index in range(-int(-num_inputs * target.weight // weights)):
            data = draw(target, seed, index)
            before = time.process_time()
            (_traced if index % target.traced_every == 0 else _attempt)(target, data, outcome, index)
            outcome.slowest_seconds = max(outcome.slowest_seconds, time.process_time() - before)
            outcome.cases += target.inputs_per_case
        try:
            target.finish()
        except Violation as error:
            outcome.found(target, "end", str(error))
        outcome.cpu_seconds = time.process_time() - begun
    return outcomes


def replay(name: str, index: int, seed: int) -> None:
    """Show one case and let its exception out."""
    target = next(t for t in (*control_targets(), *data_targets()) if t.name == name)
    data = draw(target, seed, index)
    print(data.hex() if isinstance(data, bytes) else data)
    try:
        print("understood" if target.feed(data) else "refused")
    finally:
        target.finish()


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.fuzz", description="Damaged bytes into every decoder.")
    parser.add_argument("--control", type=int, default=CONTROL_CASES, help="inputs for the control plane")
    parser.add_argument("--data", type=int, default=DATA_CASES, help="inputs for the data plane")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", metavar="TARGET:INDEX", help="run this case alone")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def main() -> int:
    options = _parse(sys.argv[1:])
    if options.replay:
        name, _, index = options.replay.partition(":")
        replay(name, int(index), options.seed)
        return 0
    logging.getLogger("weightbridge").addHandler(logging.NullHandler())  # thousands of refusals, each of them logged
    begun, (control, data) = time.process_time(), (control_targets(), data_targets())
    rss = _peak_rss()
    outcomes = fuzz(control, options.control, seed=options.seed) | fuzz(data, options.data, seed=options.seed)
    result = {
        "seed": options.seed,
        "control_cases": sum(outcomes[t.name].cases for t in control),
        "data_cases": sum(outcomes[t.name].cases for t in data),
        "accepted": sum(o.accepted for o in outcomes.values()),
        "num_findings": sum(o.num_findings for o in outcomes.values()),
        "cpu_seconds": time.process_time() - begun,
        "rss_growth_bytes": _peak_rss() - rss,
        "targets": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }
    print(json.dumps(result) if options.json else _table(result))
    return 1 if result["num_findings"] else 0


def _table(result: dict[str, Any]) -> str:
    lines = [
        f"{'target':12}{'cases':>9}{'refused':>9}{'understood':>11}{'accepted':>9}{'slowest ms':>11}{'peak KiB':>9}"
    ]
    for name, o in result["targets"].items():
        lines.append(
            f"{name:12}{o['cases']:>9}{o['refused']:>9}{o['understood']:>11}{o['accepted']:>9}"
            f"{o['slowest_seconds'] * 1e3:>11.1f}{o['peak_bytes'] >> 10:>9}"
        )
    lines += [f for o in result["targets"].values() for f in o["findings"]]
    lines.append(
        f"{result['control_cases']} control and {result['data_cases']} data cases, seed {result['seed']}: "
        f"{result['num_findings']} findings, {result['accepted']} accepted, {result['cpu_seconds']:.0f} s of CPU time, "
        f"peak memory rose by {result['rss_growth_bytes'] / 1e6:.1f} MB"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
