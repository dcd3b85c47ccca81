"""Everything the guide shows, one run after the other: `python -m examples.rl.suite`. About forty minutes on two cores.

A long run in one mode and the same with a learning rate of 0; short runs in the other three modes, the last of them sampling a
batch ahead; one run in which an update is left out on purpose; and the same updates by broadcast and by checkpoint files.
Writes suite.json, a plot, and the tables in Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from examples.rl import report
from examples.rl.lifetime import clean_up_when_terminated
from examples.rl.run import RunFailed, add_options, config_of, run

__all__ = ["RUNS", "main", "tables"]

RUNS: dict[str, str] = {
    "direct": "",
    "learning rate 0": "--steps 20 --learning-rate 0",
    "an update skipped": "--short --skip-updates 4",
    "staged send": "--short --stage-send",
    "staged receive": "--short --stage-receive",
    "staged both": "--short --stage-send --stage-receive --ahead 1",
    "same node": "--short --same-node",
    "broadcast": "--short --method broadcast",
    "files": "--short --method files",
}
"""Name -> what it adds to the command line. --short stands for --steps of a short run."""


def main(arguments: Sequence[str] | None = None) -> int:
    clean_up_when_terminated()
    parser = argparse.ArgumentParser(prog="python -m examples.rl.suite", description=__doc__)
    parser.add_argument(
        "--only", nargs="*", choices=tuple(RUNS), default=tuple(RUNS), help="these runs; others are kept"
    )
    parser.add_argument("--short-steps", type=int, default=6, help="steps of a short run")
    add_options(parser)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "suite.json"
    found: dict[str, Any] = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
    failed = False
    for name in given.only:
        print(f"== {name}", file=sys.stderr, flush=True)
        try:
            found[name] = run(
                config_of(_options(arguments, RUNS[name], given.short_steps)), engine_python=given.engine_python,
                on_record=lambda record: print(report.line(record), file=sys.stderr, flush=True),
            )  # fmt: skip
        except RunFailed as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            failed = True
            continue
        print(report.summary(found[name]), file=sys.stderr, flush=True)
        file.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    found = {name: found[name] for name in RUNS if name in found}
    _write(found, given.out)
    return 0 if not failed and all(document["verdict"]["passed"] for document in found.values()) else 1


def _options(arguments: Sequence[str] | None, added: str, short_steps: int) -> argparse.Namespace:
    """The options of one run: those of the suite's own command line, then what the run adds."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    words = added.replace("--short", f"--steps {short_steps}").split()
    common, _ = parser.parse_known_args(list(sys.argv[1:] if arguments is None else arguments))
    return parser.parse_args(words, namespace=common)


def _write(found: Mapping[str, Any], out: Path) -> None:
    shown = {name: found[name] for name in ("direct", "learning rate 0", "staged both") if name in found}
    if "direct" in shown:
        report.draw(shown, out / "suite.svg")
    (out / "suite.md").write_text(tables(found))
    print(tables(found))


def tables(found: Mapping[str, Any]) -> str:
    """Two Markdown tables: what each run shows, and what an update takes by each way."""
    rows = [
        "| run | steps | held-out reward | staleness | apart before an update | after it | after a skipped one | "
        "exactly as direct | verdict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, document in found.items():
        v = report.verdict(document["config"], document["evaluations"], document["steps"])
        stale = [s["staleness"] for s in document["steps"]]
        skipped = "" if v["apart_after_skipped"] is None else f"{v['apart_after_skipped']:.3f}"
        rows.append(
            f"| {name} | {len(stale)} | {v['reward_before']:.2f} -> {v['reward_after']:.2f} | "
            f"{min(stale)} to {max(stale)} | {v['apart_before']:.3f} | {v['apart_after_sent']:.4f} | {skipped} | "
            f"{_same_steps(document, found.get('direct'))} | "
            f"{'passed' if v['passed'] else 'failed'} |"
        )
    rows += ["", "| weights by | one update | trainers stand still | EWTT | AGST |", "|---|---|---|---|---|"]
    for name, document in found.items():
        if name in ("learning rate 0", "an update skipped"):
            continue
        u = document["update"]
        rows.append(
            f"| {name} | {u['total']:.2f} s | {u['trainer_stall']:.2f} s | {u['ewtt']:.2f} s | {u['agst']:.2f} s |"
        )
    return "\n".join(rows) + "\n"


def _same_steps(document: Mapping[str, Any], direct: Mapping[str, Any] | None) -> str:
    """Of how many steps all samples and all distances are, to the last bit, those of the direct run: the engine held the very
    same weights. Said of runs that train alike and sample with the version before: there seeds decide everything else.
    """
    config = document["config"]
    if (
        direct is None
        or document is direct
        or config["ahead"]
        or config["skip_updates"]
        or config["learning_rate"] == 0
    ):
        return ""
    pairs = list(zip(document["steps"], direct["steps"], strict=False))
    compared = ("texts", "apart_as_sampled", "apart_before", "apart_after")
    same = sum(all(one[key] == other[key] for key in compared) for one, other in pairs)
    return f"{same} of {len(pairs)}"


if __name__ == "__main__":
    sys.exit(main())
