"""Host copies of live tensors against a plain memcpy of the same bytes and against torch's `copy_` per tensor, all in one run.

    python -m benchmarks.staging [--mib 256] [--samples 7] [--json]

What a trainer with `stage_send` stands still for (capture) and what an engine with `stage_receive` does (install), without
the waiting of an engine's workers for each other. The contestants take turns inside every sample; a ratio is taken inside each
sample and the median over the samples is shown; above 1 the host copy is faster. `wall` is what a clock on the wall says;
`cpu` is CPU time, which other processes disturb less: of the one thread, or of both together.

- memcpy: libc's, one thread, as many bytes as the elements have, between two pieces of memory of its own.
- torch: one `copy_` per tensor between the same two places, one thread, the list of pairs made before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weightbridge.checkpoint.dtypes import dtype_of_torch_name
from weightbridge.executor import HostCopy
from weightbridge.kernels import Buffer, NativeKernels
from weightbridge.layout.source_map import CopyTable, LiveTensor, SourceMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """named: of each live tensor the elements that the checkpoint has, a view of it."""

    name: str
    live: list[torch.Tensor]
    named: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.named)


def cases(nbytes: int) -> Iterator[Case]:
    """Whole matrices, rows of padded ones, halves of rows (a column shard inside a fused tensor), and 50,000 tiny ones."""
    columns = 4096
    rows = nbytes // (2 * columns) // 16
    whole = [torch.ones(rows + i, columns, dtype=torch.bfloat16) for i in range(16)]
    yield Case(name="16 dense matrices", live=whole, named=whole)
    padded = [torch.ones(rows + i, columns + 64, dtype=torch.bfloat16)[:, :columns] for i in range(16)]
    yield Case(name="16 matrices, rows padded", live=padded, named=padded)
    fused = [torch.ones(rows + i, 2 * columns, dtype=torch.bfloat16) for i in range(16)]
    yield Case(name="16 matrices, half of each row", live=fused, named=[t[:, columns:] for t in fused])
    numel = max(1, nbytes // (2 * 50_000))
    tiny = [torch.ones(numel + i % 7, dtype=torch.bfloat16) for i in range(50_000)]
    yield Case(name=f"50,000 tensors of {numel} elements", live=tiny, named=tiny)


def map_of(case: Case) -> SourceMap:
    """Each named view is one copy of a checkpoint tensor of its shape."""
    live = tuple(
        LiveTensor(
            name=str(i), shape=tuple(t.shape), strides=tuple(t.stride()), dtype=dtype_of_torch_name(str(t.dtype))
        )
        for i, t in enumerate(case.live)
    )
    rows: list[Any] = []
    for i, (whole, part) in enumerate(zip(case.live, case.named, strict=True)):
        pitches = torch.empty(part.shape, device="meta").stride()
        start = part.storage_offset() - whole.storage_offset()
        rows.append((i, i, 0, start, tuple(zip(part.shape, pitches, part.stride(), strict=True))))
    return SourceMap(spec_digest="", live=live, copies=CopyTable.from_rows(rows))


def _buffers(tensors: Sequence[torch.Tensor], source_map: SourceMap) -> tuple[Buffer, ...]:
    return tuple(
        Buffer(t.data_ptr(), d.span_numel * d.dtype.itemsize) for t, d in zip(tensors, source_map.live, strict=True)
    )


def _copy_all(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


def measure(case: Case, samples: int) -> dict[str, Any]:
    """One line of the report."""
    torch.set_num_threads(1)
    source_map = map_of(case)
    live = _buffers(case.live, source_map)
    runs: dict[str, tuple[Callable[[], object], Callable[[], float]]] = {}
    bound: dict[int, float] = {}
    for threads in (1, 2):
        copy = HostCopy(source_map, NativeKernels(threads))
        began = time.perf_counter()
        if copy.capture(live) != case.nbytes:
            raise SystemExit(f"{case.name}: the host copy moves other bytes than are named")
        bound[threads] = time.perf_counter() - began
        clock = time.thread_time if threads == 1 else time.process_time
        runs[f"capture_{threads}"] = partial(copy.capture, live), clock
        runs[f"install_{threads}"] = partial(copy.install, live), clock
    away = [torch.empty_like(t) for t in case.named]
    out = list(zip(away, case.named, strict=True))
    back = [(source, target) for target, source in out]
    runs["torch_capture"] = partial(_copy_all, out), time.thread_time
    runs["torch_install"] = partial(_copy_all, back), time.thread_time
    memcpy = ctypes.CDLL(None).memcpy
    a, b = torch.ones(case.nbytes, dtype=torch.uint8), torch.ones(case.nbytes, dtype=torch.uint8)
    arguments = ctypes.c_void_p(a.data_ptr()), ctypes.c_void_p(b.data_ptr()), ctypes.c_size_t(case.nbytes)
    runs["memcpy"] = partial(memcpy, *arguments), time.thread_time
    load = os.getloadavg()[0]
    seconds = _samples(runs, samples)

    def ratio(other: str, one: str) -> dict[str, float]:
        return {
            clock: round(
                statistics.median(x / y for x, y in zip(seconds[other][clock], seconds[one][clock], strict=True)), 3
            )
            for clock in ("wall", "cpu")
        }

    compared = {
        f"{way}_{threads} to {other}": ratio(other, f"{way}_{threads}")
        for way in ("capture", "install")
        for threads in (1, 2)
        for other in ("memcpy", f"torch_{way}")
    }
    return {
        "case": case.name,
        "bytes": case.nbytes,
        "first_capture_seconds": bound,
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "ratio": compared,
        "gb_per_second": {
            name: {clock: [round(case.nbytes / s / 1e9, 3) for s in found] for clock, found in by.items()}
            for name, by in seconds.items()
        },
    }


def _samples(
    runs: dict[str, tuple[Callable[[], object], Callable[[], float]]], samples: int
) -> dict[str, dict[str, list[float]]]:
    """name -> {"wall", "cpu"} -> seconds of each sample, after one run that is not counted."""
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in runs}
    for sample in range(samples + 1):
        for name, (run, clock) in runs.items():
            wall, cpu = time.perf_counter(), clock()
            run()
            wall, cpu = time.perf_counter() - wall, clock() - cpu
            if sample:
                found[name]["wall"].append(wall)
                found[name]["cpu"].append(cpu)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases; a table, or with --json all samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="MiB of weights a case")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    results = []
    for case in cases(arguments.mib << 20):
        results.append(measure(case, arguments.samples))
        if arguments.json:
            continue
        print(f"{case.name} ({case.nbytes / 1e6:.0f} MB), load {results[-1]['load'][1]}")
        for name, by in results[-1]["gb_per_second"].items():
            print(f"  {name:14} {statistics.median(by['wall']):7.2f} GB/s")
        for name, pair in results[-1]["ratio"].items():
            print(f"  {name:28} {pair['wall']:6.2f} (wall) {pair['cpu']:6.2f} (cpu)")
    if arguments.json:
        print(json.dumps({"mib": arguments.mib, "samples": arguments.samples, "results": results}))


if __name__ == "__main__":
    main()
