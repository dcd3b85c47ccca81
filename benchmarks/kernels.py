"""Pack and assemble kernels against memcpy and against one torch `copy_` per view.

    python benchmarks/kernels.py [--mib 64] [--repeat 7] [--json]

Each case moves about the same number of bytes; shown is the best of `--repeat` runs, the contestants taking turns so that
all meet the same neighbours on a shared machine. Ratios are against memcpy of as many bytes (one thread).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from weightbridge.kernels import Buffer, NativeKernels, ReferenceKernels
from weightbridge.program.program import DESCRIPTOR, MAX_AXES, Op


class Case(NamedTuple):
    """table: one row a slice. views: the same as pairs of torch tensors. moved: bytes written."""

    name: str
    table: np.ndarray
    source: torch.Tensor
    target: torch.Tensor
    views: list[tuple[torch.Tensor, torch.Tensor]]
    moved: int


def rows(
    views: list[tuple[torch.Tensor, torch.Tensor]], source: torch.Tensor, target: torch.Tensor, op: int
) -> np.ndarray:
    """Descriptor rows of (destination view, source view) pairs."""
    table = np.zeros(len(views), DESCRIPTOR)
    table["count"] = 1
    for row, (dst, src) in zip(table, views, strict=True):
        row["src_offset"], row["dst_offset"] = src.data_ptr() - source.data_ptr(), dst.data_ptr() - target.data_ptr()
        axes = src.dim()
        row["count"][MAX_AXES - axes :] = src.shape
        row["src_stride"][MAX_AXES - axes :] = [s * src.element_size() for s in src.stride()]
        row["dst_stride"][MAX_AXES - axes :] = [s * dst.element_size() for s in dst.stride()]
        row["op"], row["itemsize"] = op, src.element_size()
    return table


def cases(nbytes: int) -> Iterator[Case]:
    """Layouts that packing and assembling meet; bf16 elements unless the name says otherwise."""
    bf16, numel = torch.bfloat16, nbytes // 2

    def case(name: str, source: torch.Tensor, target: torch.Tensor, views: Any, op: int = Op.COPY) -> Case:
        views = list(views)
        moved = sum(dst.numel() * dst.element_size() for dst, _ in views)
        return Case(name, rows(views, source, target, op), source, target, views, moved)

    flat, out = torch.randn(numel).to(bf16), torch.zeros(numel, dtype=bf16)
    yield case("one run", flat, out, [(out, flat)])
    size = 576 * 192
    yield case(
        "runs of 216 KiB", flat, out, ((out[i : i + size], flat[i : i + size]) for i in range(0, numel - size, size))
    )
    yield case("runs of 1152 B", flat, out, ((out[i : i + 576], flat[i : i + 576]) for i in range(0, numel - 576, 576)))
    wide = flat[: numel // 1536 * 1536].view(-1, 1536)
    third = torch.zeros(len(wide), 512, dtype=bf16)
    yield case("column shard, 1 of 3", wide, third, [(third, wide[:, 512:1024])])
    squares = flat[: numel // 576**2 * 576**2].view(-1, 576, 576)
    turned = torch.zeros_like(squares)
    yield case("transposes 576 x 576", squares, turned, zip(turned.transpose(1, 2), squares, strict=True))
    words = torch.randn(nbytes // 4)[: nbytes // 4 // 1024**2 * 1024**2].view(-1, 1024, 1024)
    turned = torch.zeros_like(words)
    yield case("transposes 1024 x 1024, fp32", words, turned, zip(turned.transpose(1, 2), words, strict=True))
    pairs = flat[: numel // 128 * 128].view(-1, 64, 2)
    apart = torch.zeros(len(pairs), 2, 64, dtype=bf16)
    yield case("rotary interleave", pairs, apart, [(apart.transpose(1, 2), pairs)])
    wide32 = torch.randn(numel)
    for name, op, kind in (
        ("cast fp32 to bf16", Op.F32_TO_BF16, bf16),
        ("cast fp32 to fp16", Op.F32_TO_F16, torch.float16),
    ):
        narrow = torch.zeros(numel, dtype=kind)
        yield case(name, wide32, narrow, [(narrow, wide32)], op)
    back = torch.zeros(numel)
    yield case("cast bf16 to fp32", flat, back, [(back, flat)], Op.BF16_TO_F32)


def best(contestants: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Seconds of each contestant's best run."""
    seconds = dict.fromkeys(contestants, float("inf"))
    for _ in range(repeat):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def measure(case: Case, repeat: int) -> dict[str, Any]:
    """One line of the report; the result of the native kernels is compared with torch's."""
    buffers = [Buffer(t.data_ptr(), t.numel() * t.element_size()) for t in (case.source, case.target)]
    contestants: dict[str, Callable[[], object]] = {}
    for name, kernels in (("native", NativeKernels()), ("native_1_thread", NativeKernels(1))):
        prepared = kernels.prepare(case.table, buffers[:1], buffers[1:])
        contestants[name] = lambda kernels=kernels, prepared=prepared: kernels.launch(prepared)
    if len(case.table) < 1000:
        reference = ReferenceKernels()
        bound = reference.prepare(case.table, buffers[:1], buffers[1:])
        contestants["reference"] = lambda: reference.launch(bound)
    a, b = np.ones(case.moved, np.uint8), np.ones(case.moved, np.uint8)
    contestants["memcpy"] = lambda: np.copyto(a, b)
    contestants["torch_copy"] = lambda: [dst.copy_(src) for dst, src in case.views]
    case.target.zero_()
    contestants["native"]()
    found = case.target.clone()
    contestants["torch_copy"]()
    if not torch.equal(found, case.target):
        raise SystemExit(f"{case.name}: native and torch differ")
    seconds = best(contestants, repeat)
    speeds = {name: case.moved / s / 1e9 for name, s in seconds.items()}
    return {
        "case": case.name,
        "slices": len(case.table),
        "moved_bytes": case.moved,
        "gb_per_second": {name: round(v, 3) for name, v in speeds.items()},
        "native_vs_memcpy": round(speeds["native"] / speeds["memcpy"], 3),
        "native_vs_torch": round(speeds["native"] / speeds["torch_copy"], 3),
    }


def main() -> None:
    """Run all cases and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="bytes moved a case")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    columns = ("native", "native_1_thread", "memcpy", "torch_copy", "reference")
    print(
        f"{'GB/s written':30} {'slices':>7} " + " ".join(f"{c:>15}" for c in columns) + "  vs memcpy, torch",
        file=sys.stderr,
    )
    results = []
    for case in cases(arguments.mib << 20):
        result = measure(case, arguments.repeat)
        results.append(result)
        speeds = result["gb_per_second"]
        cells = " ".join(f"{speeds[c]:15.2f}" if c in speeds else f"{'-':>15}" for c in columns)
        ratios = f"{result['native_vs_memcpy']:6.2f} {result['native_vs_torch']:8.2f}"
        print(f"{result['case']:30} {result['slices']:7d} {cells}  {ratios}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"mib": arguments.mib, "torch_threads": arguments.threads, "results": results}, indent=1))


if __name__ == "__main__":
    main()
