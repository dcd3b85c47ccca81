"""Tables for docs/benchmarks.md from documents of `python -m benchmarks.cluster SCENARIO --json`.

    python -m benchmarks.cluster.markdown FILE... [--write PAGE]

Prints them, or puts them between the two marks of a page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["BEGIN", "END", "main", "put", "tables"]

BEGIN = "<!-- cluster tables: begin (python -m benchmarks.cluster.markdown) -->"
END = "<!-- cluster tables: end -->"

_HEAD = (
    "trainer nodes", "replicas", "method", "T_min, s", "EWTT, s", "/ T_min", "/ bound", "AGST, s", "egress / model",
    "ingress / model", "extra MiB", "CPU busy", "load", "predicted, s", "predicted / measured", "bare kernels",
)  # fmt: skip


def tables(documents: Sequence[Mapping[str, Any]]) -> str:
    """One section for each document: a line on the job, then a row for each case and method."""
    return "\n\n".join(_section(d) for d in documents)


def _section(d: Mapping[str, Any]) -> str:
    rate = d["rate_bits_per_second"]
    where = f"{rate / 1e9:g} Gbit/s a node" if rate else "loopback, unshaped"
    samples = max((len(r["ewtt_seconds"]) for r in d["results"]), default=0)
    job = (
        f"`{d['scenario']}`: {d['model_bytes'] / 1e6:.1f} MB in {d['num_tensors']:,} tensors, {where}, slots of "
        f"{d['slot_bytes'] / (1 << 20):g} MiB; medians of {samples}, all samples in brackets."
    )
    skipped = "".join(f"\n\n{method} was left out: {why}." for method, why in d.get("skipped", {}).items())
    rows = [_HEAD, tuple("---" for _ in _HEAD), *(_row(r) for r in d["results"])]
    return f"#### {d['scenario']}\n\n{job}{skipped}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(r: Mapping[str, Any]) -> tuple[str, ...]:
    ewtt = r["ewtt_seconds"]
    peak = max(r["peak_extra_bytes"].values(), default=0) / (1 << 20)
    verified = "" if r["verified"] else " **WRONG VALUES**"
    return (
        str(r["trainer_nodes"]), str(r["replicas"]), r["method"] + verified, _number(r["t_min_seconds"], 3),
        f"{median(ewtt):.3f} ({' '.join(f'{s:.3f}' for s in ewtt)})", _number(r["ratio_to_t_min"], 3),
        _number(r["ratio_to_bound"], 3), _number(median(r["agst_seconds"]), 3), _number(r["trainer_egress_ratio"], 3),
        _number(r["rollout_ingress_ratio"], 3), f"{peak:.0f}", _number(median(r["cpu_busy"]), 2),
        _number(median(r["load_average"]), 1), _number(r["predicted_ewtt_seconds"], 3),
        _number(r["predicted_over_measured"], 3), _percent(r["unoverlapped_kernel_share"]),
    )  # fmt: skip


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"


def put(page: str, text: str) -> str:
    """`page` with `text` between its two marks. Raises ValueError when it does not have both, once and in order."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must have the lines {BEGIN!r} and {END!r} once each, in this order")
    return page[: page.index(BEGIN) + len(BEGIN)] + f"\n\n{text}\n\n" + page[page.index(END) :]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.markdown", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    parsed = parser.parse_args(arguments)
    text = tables([json.loads(path.read_text()) for path in parsed.files])
    if parsed.write is None:
        print(text)
    else:
        parsed.write.write_text(put(parsed.write.read_text(), text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
