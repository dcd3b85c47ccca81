"""The command line: `python -m benchmarks.cluster SCENARIO [--json]`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.cluster.crew import CrewError
from benchmarks.cluster.netns import TestbedError
from benchmarks.cluster.peers import PEERS, missing
from benchmarks.cluster.report import Update, document, table
from benchmarks.cluster.run import METHODS, Measured, Settings, measure_case
from benchmarks.cluster.scenarios import SCENARIOS, Case, CaseKey, cases_of
from benchmarks.cluster.tracing import link_losses, summary, write_trace

__all__ = ["main", "parse"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)  # both set by hand: a shell's background jobs start with SIGINT ignored


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options. Exits with status 2 when they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cluster",
        description="Updates on an emulated cluster of network namespaces with shaped links; needs root.",
        epilog="scenarios:\n" + "\n".join(f"  {name:13} {text}" for name, text in SCENARIOS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", choices=list(SCENARIOS))
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"some of {','.join(METHODS)}")
    parser.add_argument("--cases", default="", help="TRAINERNODESxREPLICAS,..., some of the scenario's: 1x1,1x3")
    parser.add_argument("--rate", type=float, default=1.0, metavar="GBIT", help="of each node's link (default 1)")
    parser.add_argument("--slot-mib", type=float, default=32.0, help="memory of one slot (default 32)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--layers", type=int, help="another size of the scenario's model, for a quick look")
    parser.add_argument(
        "--unshaped", action="store_true", help="on loopback, without namespaces: no rate, no link counters"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the last traced update for Perfetto")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots there; needs matplotlib")
    parser.add_argument("--no-trace", action="store_true", help="leave out the traced update after the measured ones")
    parser.add_argument(
        "--connect-timeout", type=float, default=300.0, metavar="SECONDS", help="to be probed and connected"
    )
    parser.add_argument("--update-timeout", type=float, default=120.0, metavar="SECONDS")
    parsed = parser.parse_args(arguments)
    if parsed.no_trace and parsed.trace is not None:
        parser.error("--no-trace: --trace wants the update that it leaves out")
    parsed.methods = [m for m in parsed.methods.split(",") if m]
    if unknown := [m for m in parsed.methods if m not in METHODS]:
        parser.error(f"--methods: {unknown[0]!r} is not known; known are {', '.join(METHODS)}")
    for name in ("rate", "slot_mib", "repeats", "update_timeout", "connect_timeout"):
        if not getattr(parsed, name) > 0:
            parser.error(f"--{name.replace('_', '-')}: expected a number above 0, got {getattr(parsed, name)}")
    parsed.keys = _keys(parser, parsed)
    return parsed


def _keys(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> list[CaseKey]:
    keys = cases_of(
        parsed.scenario, rate_bits=parsed.rate * 1e9, slot_bytes=int(parsed.slot_mib * (1 << 20)), layers=parsed.layers
    )  # fmt: skip
    if not parsed.cases:
        return keys
    by_name = {f"{k.trainer_nodes}x{k.replicas}": k for k in keys}
    wanted = parsed.cases.split(",")
    if unknown := [name for name in wanted if name not in by_name]:
        parser.error(f"--cases: {parsed.scenario} has no case {unknown[0]!r}; it has {', '.join(by_name)}")
    return [by_name[name] for name in wanted]


def main(arguments: list[str] | None = None) -> int:
    """0: all values arrived; 1: a measurement failed; 2: the cluster cannot be made here, or wrong usage."""
    parsed = parse(arguments)
    for which in _SIGNALS:
        signal.signal(which, _end)
    skipped = {method: why for method in parsed.methods if method in PEERS and (why := missing(method))}
    for method, why in skipped.items():
        print(f"benchmarks.cluster: {method} is left out: {why}", file=sys.stderr)
    settings = Settings(
        methods=[m for m in parsed.methods if m not in skipped], repeats=parsed.repeats, warmups=parsed.warmups,
        shaped=not parsed.unshaped, trace=not parsed.no_trace, update_seconds=parsed.update_timeout,
        connect_seconds=parsed.connect_timeout,
    )  # fmt: skip
    if not settings.methods:
        return 2
    measured: list[Measured] = []
    try:
        for key in parsed.keys:
            measured.extend(measure_case(key, settings))
    except TestbedError as error:
        print(f"benchmarks.cluster: {error}", file=sys.stderr)
        return 2
    except CrewError as error:
        print(f"benchmarks.cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("benchmarks.cluster: interrupted; namespaces and processes are removed", file=sys.stderr)
        return 130
    rate = None if parsed.unshaped else parsed.rate * 1e9
    found = document(parsed.scenario, rate, [m.case for m in measured], [m.entry for m in measured], skipped)
    traced = [(m.case, m.traced) for m in measured if m.traced is not None]
    if parsed.trace is not None and traced:
        found["trace"] = _traced(parsed.trace, *traced[-1])
    if parsed.plots is not None:
        from benchmarks.cluster.plots import write_plots

        for path in write_plots(parsed.plots, found, traced):
            print(f"benchmarks.cluster: wrote {path}", file=sys.stderr)
    print(json.dumps(found, indent=1) if parsed.json else _text(found))
    return 0 if all(m.entry["verified"] for m in measured) else 1


def _traced(path: Path, case: Case, update: Update) -> dict[str, Any]:
    """Write the trace file; returns what it says in figures."""
    write_trace(path, case.topology, update.spans, update.samples)
    begin = min(begin for begin, _ in update.stalls.values())
    links = {
        f"n{node}": link_losses(samples, case.rates_bits[node], begin, begin + update.ewtt_seconds)
        for node, samples in update.samples.items()
    }
    return {"workers": summary(update.stalls, update.spans), "links": links}


def _text(found: dict[str, Any]) -> str:
    rate = found["rate_bits_per_second"]
    where = f"{rate / 1e9:g} Gbit/s a node" if rate else "loopback, unshaped"
    head = f"{found['scenario']}: {found['model_bytes'] / 1e6:.1f} MB in {found['num_tensors']} tensors, {where}"
    shown = head + "\n" + table(found["results"])
    return shown + ("\n" + json.dumps(found["trace"], indent=1) if "trace" in found else "")


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    for which in _SIGNALS:  # a second one must not break off the cleaning up
        signal.signal(which, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
