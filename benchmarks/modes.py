"""What an update costs workers that work, in each of the four modes, against the same workers left alone.

    python -m benchmarks.modes [--json] [--repeats 5] [--rate 1] [--trace FILE] [--unshaped]

On the emulated cluster (root; `--unshaped` on loopback): one trainer node and one engine node with two workers each, a model of
more than 256 MB. Trainers take steps of 50 ms, engines decode steps of 10 ms; the time a GPU would take is slept. In a
window of fixed length a version is sent once; the control window has none. Four figures for each worker:

- in calls: wall time inside `send_weights` or `poll_requests` beyond what these calls took in the control window.
- lost: the window's length times the share of steps missing against the control window: what the worker did not do.
- stall: the larger of the two, so that neither a slow call nor slow steps are left out; the worst worker of a side counts.
- tokens during the update: what the engine decoded between the call of `send_weights` and the install.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cluster.crew import Crew, CrewError, Message
from benchmarks.cluster.netns import WORK_DIR_PREFIX, Testbed, TestbedError
from benchmarks.cluster.run import Session, Settings
from benchmarks.cluster.scenarios import Case, build, cases_of
from benchmarks.cluster.working import TOKENS_PER_STEP

MODES = {"off/off": "", "on/off": "send", "off/on": "receive", "on/on": "send,receive"}
"""SS/RS: sender staging, receiver staging."""

_LEAD_SECONDS = 0.5  # between the order and the window's begin
_SEND_AFTER_SECONDS = 0.5

Window = Mapping[str, Message]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--repeats", type=int, default=5, help="windows with an update, and as many without")
    parser.add_argument("--rate", type=float, default=1.0, metavar="GBIT", help="of each node's link")
    parser.add_argument("--layers", type=int, help="another size of the model, for a quick look")
    parser.add_argument("--modes", default=",".join(MODES), help="some of them")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the last window of each mode, for Perfetto")
    parser.add_argument("--unshaped", action="store_true", help="on loopback, without namespaces")
    parsed = parser.parse_args(arguments)
    keys = cases_of("replicas", rate_bits=parsed.rate * 1e9, slot_bytes=32 << 20, layers=parsed.layers)
    case = build(keys[0])
    settings = Settings(methods=(), shaped=not parsed.unshaped, trace=parsed.trace is not None)
    results, spans = [], []
    try:
        with ExitStack() as stack:
            testbed = stack.enter_context(Testbed(case.rates_bits)) if settings.shaped else None
            for mode in parsed.modes.split(","):
                found, last = _measure(case, mode, settings, testbed, parsed.repeats)
                results.append(found)
                spans.append((mode, last))
                print(f"  {mode}: {json.dumps({k: v for k, v in found.items() if k != 'samples'})}", file=sys.stderr)
    except (TestbedError, CrewError) as error:
        print(f"benchmarks.modes: {error}", file=sys.stderr)
        return 2 if isinstance(error, TestbedError) else 1
    document = _document(case, parsed, results)
    if parsed.trace is not None:
        _write_trace(parsed.trace, spans)
    print(json.dumps(document, indent=1) if parsed.json else _table(document))
    return 0 if all(r["verified"] for r in results) else 1


def _measure(
    case: Case, mode: str, settings: Settings, testbed: Testbed | None, repeats: int
) -> tuple[dict[str, Any], Window]:
    samples: list[dict[str, Any]] = []
    wrong: list[str] = []
    window = 3.0 * case.t_min_seconds + 2.0 if testbed is not None else 4.0
    with tempfile.TemporaryDirectory(prefix=WORK_DIR_PREFIX) as folder, Crew(Path(folder)) as crew:
        session = Session(case, f"working:{MODES[mode]}", settings, testbed, crew, Path(folder))
        session.start()
        done: Window = {}
        for version in range(1, repeats + 2):  # the first warms up
            session.prepare(version)
            control = _window(session, window, None)
            done = _window(session, window, version)
            wrong += session.wrong(version)
            if version > 1:
                samples.append(_sample(session, control, done, version))
        session.stop()
    median = {name: statistics.median(s[name] for s in samples) for name in samples[0]}
    ss, rs = mode.split("/")
    return {"sender_staging": ss, "receiver_staging": rs, **median, "verified": not wrong, "samples": samples}, done


def _window(session: Session, seconds: float, version: int | None) -> Window:
    begin = time.monotonic() + _LEAD_SECONDS
    order: Message = {"kind": "window", "begin": begin, "end": begin + seconds}
    if version is not None:
        order |= {"version": version, "send_at": begin + _SEND_AFTER_SECONDS}
    answers = session.ask(session.names, order, "windowed", seconds + 60)
    return {name: answer | {"begin": begin, "end": begin + seconds} for name, answer in answers.items()}


def _sample(session: Session, control: Window, done: Window, version: int) -> dict[str, Any]:
    stalls = {name: _stall(control[name], done[name]) for name in session.names}
    trainer = done[session.trainers[0]]
    sent_at = min(done[name]["calls"][0][0] for name in session.trainers)
    installed = {name: _installed_at(done[name]) for name in session.rollouts}
    tokens = sum(
        TOKENS_PER_STEP
        for name in session.rollouts[:1]
        for _, end in done[name]["steps"]
        if sent_at <= end <= installed[name]
    )
    if any(done[name]["version"] != version for name in session.rollouts):
        raise CrewError(f"version {version} was not installed within the window")
    return {
        "trainer_stall_seconds": max(stalls[name] for name in session.trainers),
        "rollout_stall_seconds": max(stalls[name] for name in session.rollouts),
        "agst_seconds": trainer["agst_seconds"],
        "ewtt_seconds": trainer["ewtt_seconds"],
        "generation_tokens_during_update": tokens,
        "control_tokens": TOKENS_PER_STEP * len(control[session.rollouts[0]]["steps"]),
        "load": os.getloadavg()[0],
    }


def _stall(control: Message, done: Message) -> float:
    """Seconds that an update cost a worker; see the module's docstring."""
    in_calls = sum(end - begin for begin, end in done["calls"]) - sum(end - begin for begin, end in control["calls"])
    length = done["end"] - done["begin"]
    lost = length * (1 - len(done["steps"]) / len(control["steps"]))
    return float(max(in_calls, lost, 0.0))


def _installed_at(done: Message) -> float:
    """The longest poll of the window is the one that installed."""
    _, end = max(done["calls"], key=lambda call: call[1] - call[0])
    return float(end)


def _document(case: Case, parsed: argparse.Namespace, results: list[dict[str, Any]]) -> dict[str, Any]:
    by_mode = {f"{r['sender_staging']}/{r['receiver_staging']}": r for r in results}
    direct = by_mode.get("off/off")
    ratios = {}
    if direct is not None:
        for mode, found in by_mode.items():
            ratios[mode] = {
                "trainer_stall_to_direct": found["trainer_stall_seconds"] / direct["trainer_stall_seconds"],
                "rollout_stall_to_direct": found["rollout_stall_seconds"] / direct["rollout_stall_seconds"],
            }
    return {
        "rate_bits_per_second": None if parsed.unshaped else parsed.rate * 1e9, "model_bytes": case.spec.nbytes,
        "t_min_seconds": case.t_min_seconds, "workers": len(case.topology.workers), "results": results, "ratios": ratios,
    }  # fmt: skip


def _table(document: dict[str, Any]) -> str:
    head = (
        "| SS | RS | trainer stall | rollout stall | AGST | EWTT | tokens meanwhile |\n|---|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(
        f"| {r['sender_staging']} | {r['receiver_staging']} | {r['trainer_stall_seconds']:.3f} s | "
        f"{r['rollout_stall_seconds']:.3f} s | {r['agst_seconds']:.3f} s | {r['ewtt_seconds']:.3f} s | "
        f"{r['generation_tokens_during_update']:.0f} |"
        for r in document["results"]
    )


def _write_trace(path: Path, windows: list[tuple[str, Window]]) -> None:
    """Chrome's trace format: a process for each mode, rows for each worker's steps, calls and transfer."""
    events: list[dict[str, Any]] = []
    for pid, (mode, window) in enumerate(windows):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"SS/RS {mode}"}})
        for index, (name, done) in enumerate(sorted(window.items())):
            rows = {
                "steps": done["steps"],
                "calls": done["calls"],
                "transfer": [done["moving"]] if done["moving"] else [],
            }
            for row, (kind, spans) in enumerate(rows.items()):
                tid = 3 * index + row
                events.append(
                    {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": f"{name} {kind}"}}
                )
                events += [
                    {
                        "ph": "X", "pid": pid, "tid": tid, "name": kind, "ts": (begin - done["begin"]) * 1e6,
                        "dur": (end - begin) * 1e6,
                    }
                    for begin, end in spans
                ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))


if __name__ == "__main__":
    sys.exit(main())
