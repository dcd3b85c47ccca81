"""Pack and assemble kernels against a plain memcpy of the same bytes and against torch's `copy_`, all in one run.

    python -m benchmarks.kernels [--mib 64] [--samples 5] [--only WORD] [--json]

The contestants take turns inside every sample, so that all meet the same neighbours on a shared machine. A ratio is taken
inside each sample and the median over the samples is shown; above 1 the native kernels are faster. `wall` is what a clock on
the wall says; `cpu` is CPU time, which other processes disturb less: of the one thread, or of both together.

- memcpy: libc's, one thread, of as many bytes as the case writes, between tensors of its own (torch's memory has
  small pages, as live tensors do; NumPy would ask for huge ones).
- torch: one `copy_` per view, a view being what one descriptor moves. Of several ways to write the same copy (turning the
  source or the destination, a batch at once or one by one) the fastest one here is taken. As many threads as native has.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weightbridge.kernels import Buffer, NativeKernels
from weightbridge.program.program import DESCRIPTOR, MAX_AXES, Op

Views = list[tuple[torch.Tensor, torch.Tensor]]
TORCH_VIEWS = (
    1 << 14
)  # torch runs at most so many views of a case a sample: at microseconds a view more would take minutes
ALONE = ("native_1", "memcpy", "torch_1")
TOGETHER = ("native_1", "native_2", "torch_2")
NAMES = (*ALONE, "native_2", "torch_2")
SPIN_SECONDS = 0.005  # torch's second thread spins for a while after its work: nobody else is measured meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """views: (destination, source) pairs, one a descriptor. forms: other ways to say all of them to torch, by name."""

    group: str
    name: str
    source: torch.Tensor
    target: torch.Tensor
    views: Views
    forms: dict[str, Views]
    op: int = Op.COPY

    @property
    def moved_bytes(self) -> int:
        """Bytes written by the whole case."""
        return _moved(self.views)


def _moved(views: Views) -> int:
    return sum(dst.numel() * dst.element_size() for dst, _ in views)


def table_of(case: Case) -> np.ndarray:
    """One descriptor a view."""
    table = np.zeros(len(case.views), DESCRIPTOR)
    table["count"] = 1
    table["op"] = case.op
    table["itemsize"] = case.source.element_size()
    base = case.source.data_ptr(), case.target.data_ptr()
    for side, which, start in (("src", 1, base[0]), ("dst", 0, base[1])):
        table[f"{side}_offset"] = [pair[which].data_ptr() - start for pair in case.views]
        axes, size = case.views[0][which].dim(), case.views[0][which].element_size()
        strides = np.array([pair[which].stride() for pair in case.views], np.int64).reshape(-1, axes)
        table[f"{side}_stride"][:, MAX_AXES - axes :] = strides * size
        table["count"][:, MAX_AXES - axes :] = np.array([tuple(pair[which].shape) for pair in case.views])
    return table


# --- cases ----------------------------------------------------------------------------------------------------------


def row_cases(nbytes: int) -> Iterator[Case]:
    """Rows of one length: at irregular places (one descriptor and one view a row), and in a regular pitch (one for all)."""
    rng = np.random.default_rng(0)
    for row_bytes in (64, 256, 1 << 10, 4 << 10, 64 << 10):
        name = f"{row_bytes} B" if row_bytes < 1024 else f"{row_bytes >> 10} KiB"
        numel, rows = row_bytes // 2, nbytes // row_bytes
        wide = torch.ones(rows, 3 * numel, dtype=torch.bfloat16)
        dense = torch.zeros(rows, numel, dtype=torch.bfloat16)
        third = wide[:, numel : 2 * numel]
        gap = rng.integers(0, 2 * numel // 32 + 1, rows) * 32  # whole cache lines
        scattered = [(dense[i], wide[i, g : g + numel]) for i, g in enumerate(gap.tolist())]
        yield Case(group="rows", name=f"{name}, pack, scattered", source=wide, target=dense, views=scattered, forms={})
        back = [(src, dst) for dst, src in scattered]
        yield Case(group="rows", name=f"{name}, assemble, scattered", source=dense, target=wide, views=back, forms={})
        yield Case(
            group="rows", name=f"{name}, pack, pitch", source=wide, target=dense, views=[(dense, third)], forms={}
        )
        yield Case(
            group="rows", name=f"{name}, assemble, pitch", source=dense, target=wide, views=[(third, dense)], forms={}
        )
        del scattered, back
    odd = torch.ones(nbytes // 1026, 1539, dtype=torch.bfloat16)
    dense = torch.zeros(len(odd), 513, dtype=torch.bfloat16)
    yield Case(
        group="rows", name="1026 B, pack, pitch, unaligned", source=odd, target=dense, views=[(dense, odd[:, 7:520])],
        forms={},
    )  # fmt: skip
    flat, out = torch.ones(nbytes // 2, dtype=torch.bfloat16), torch.zeros(nbytes // 2, dtype=torch.bfloat16)
    yield Case(group="rows", name="dense", source=flat, target=out, views=[(out, flat)], forms={})
    yield Case(
        group="rows", name="dense, unaligned", source=flat, target=out, views=[(out[3:-8], flat[9:-2])], forms={}
    )


# (bytes of an element, rows, columns); a batch of them fills the case
TRANSPOSES = (
    (2, 576, 576), (2, 1024, 1024), (2, 4096, 4096), (2, 2051, 2049), (2, 5120, 2880), (2, 4096, 128), (2, 128, 4096),
    (2, 65536, 64), (2, 64, 65536), (2, 100003, 8), (2, 8, 100003), (2, 100003, 4), (2, 4, 100003), (2, 64, 2), (2, 2, 64),
    (2, 100003, 2), (2, 2, 100003), (2, 100003, 3), (2, 3, 100003), (2, 100003, 17), (2, 17, 100003), (2, 33, 65), (2, 7, 11),
    (2, 16, 16), (2, 128, 32), (2, 32, 128),
    (4, 576, 576), (4, 1024, 1024), (4, 4096, 4096), (4, 2051, 2049), (4, 4096, 128), (4, 128, 4096), (4, 100003, 8),
    (4, 8, 100003), (4, 100003, 2), (4, 2, 100003), (4, 100003, 3), (4, 3, 100003), (4, 33, 65), (4, 7, 11), (4, 16, 16),
    (1, 1024, 1024), (1, 2051, 2049), (1, 100003, 8), (1, 8, 100003), (1, 33, 65),
    (8, 1024, 1024), (8, 2051, 2049), (8, 100003, 3), (8, 3, 100003), (8, 33, 65),
)  # fmt: skip
DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def transpose_cases(nbytes: int) -> Iterator[Case]:
    """[batch, rows, columns] to [batch, columns, rows], one descriptor for the batch; and two permutations of three axes."""
    for size, rows, columns in TRANSPOSES:
        batch = max(1, nbytes // (rows * columns * size))
        source = torch.randint(0, 255, (batch, rows, columns), dtype=torch.uint8).to(DTYPES[size])
        target = torch.zeros(batch, columns, rows, dtype=DTYPES[size])
        turned = target.transpose(1, 2)
        forms = {"source turned": [(target, source.transpose(1, 2))]}
        if batch <= TORCH_VIEWS:
            forms["one by one"] = list(zip(turned, source, strict=True))
            forms["one by one, source turned"] = list(zip(target, source.transpose(1, 2), strict=True))
        name = f"{size} B, {rows} x {columns}" + (f", {batch} at once" if batch > 1 else "")
        yield Case(group="transpose", name=name, source=source, target=target, views=[(turned, source)], forms=forms)
    for shape, order in (((96, 512, 640), (2, 1, 0)), ((512, 64, 1024), (1, 0, 2)), ((512, 64, 1024), (0, 2, 1))):
        source = torch.randint(0, 255, shape, dtype=torch.uint8).to(torch.bfloat16)
        target = torch.zeros([shape[i] for i in order], dtype=torch.bfloat16)
        back = [order.index(i) for i in range(3)]
        yield Case(
            group="transpose", name=f"2 B, {shape} permuted {order}", source=source, target=target,
            views=[(target.permute(back), source)], forms={"source turned": [(target, source.permute(order))]},
        )  # fmt: skip


def cast_cases(nbytes: int) -> Iterator[Case]:
    """Contiguous casts, and the commonest one out of a column shard and turned."""
    kinds = {"bf16": ("BF16", torch.bfloat16), "fp16": ("F16", torch.float16), "fp32": ("F32", torch.float32)}
    for source_name, (source_code, source_dtype) in kinds.items():
        for target_name, (target_code, target_dtype) in kinds.items():
            if source_name == target_name:
                continue
            op, target = (
                Op.BY_DTYPES[source_code, target_code],
                torch.zeros(nbytes // target_dtype.itemsize, dtype=target_dtype),
            )
            source = torch.randn(target.numel()).to(source_dtype)
            yield Case(
                group="cast", name=f"{source_name} to {target_name}", source=source, target=target,
                views=[(target, source)], forms={}, op=op,
            )  # fmt: skip
    rows = nbytes // 1024
    wide, dense = torch.randn(rows, 1536), torch.zeros(rows, 512, dtype=torch.bfloat16)
    yield Case(
        group="cast", name="fp32 to bf16, rows of 512", source=wide, target=dense, views=[(dense, wide[:, 512:1024])],
        forms={}, op=Op.F32_TO_BF16,
    )  # fmt: skip


# --- measuring ------------------------------------------------------------------------------------------------------


def _copy_all(views: Views) -> None:
    for dst, src in views:
        dst.copy_(src)


def _fastest_form(case: Case) -> tuple[str, Views]:
    """The quickest way to ask torch for the case (or for its first views, where there are very many), one thread."""
    forms = {"as described": case.views[:TORCH_VIEWS], **case.forms}
    if len(forms) == 1:
        return next(iter(forms.items()))
    torch.set_num_threads(1)
    seconds = {}
    for name, views in forms.items():
        _copy_all(views)
        seconds[name] = min(_thread_seconds(views) for _ in range(2))
    best = min(seconds, key=lambda name: seconds[name])
    return best, forms[best]


def _thread_seconds(views: Views) -> float:
    began = time.thread_time()
    _copy_all(views)
    return time.thread_time() - began


def _contestants(case: Case, views: Views) -> dict[str, tuple[Callable[[], object], int]]:
    """name -> (what to run, bytes it writes). Raises SystemExit when native and torch differ."""
    buffers = [Buffer(t.data_ptr(), t.numel() * t.element_size()) for t in (case.source, case.target)]
    table, moved = table_of(case), case.moved_bytes
    found: dict[str, tuple[Callable[[], object], int]] = {}
    for threads in (1, 2):
        kernels = NativeKernels(threads)
        prepared = kernels.prepare(table, buffers[:1], buffers[1:])
        found[f"native_{threads}"] = (lambda kernels=kernels, prepared=prepared: kernels.launch(prepared)), moved
        found[f"torch_{threads}"] = (lambda: _copy_all(views)), _moved(views)
    memcpy = ctypes.CDLL(None).memcpy
    a, b = torch.ones(moved, dtype=torch.uint8), torch.ones(moved, dtype=torch.uint8)
    arguments = ctypes.c_void_p(a.data_ptr()), ctypes.c_void_p(b.data_ptr()), ctypes.c_size_t(moved)
    found["memcpy"] = (lambda: (memcpy(*arguments), a, b)), moved
    case.target.zero_()
    found["native_2"][0]()
    copied = case.target.clone()
    case.target.zero_()
    _copy_all(case.views)
    if not torch.equal(copied, case.target):
        raise SystemExit(f"{case.name}: native and torch differ")
    return found


def measure(case: Case, samples: int, runs: int) -> dict[str, Any]:
    """One line of the report. Seconds are of one run: the mean of `runs` in a row."""
    form, views = _fastest_form(case)
    contestants = _contestants(case, views)
    load = os.getloadavg()[0]
    series = {}
    for kind, names, clock in (("alone", ALONE, time.thread_time), ("together", TOGETHER, time.process_time)):
        torch.set_num_threads(1 if kind == "alone" else 2)
        series[kind] = _samples({name: contestants[name] for name in names}, samples, runs, clock)

    def ratio(kind: str, a: str, b: str) -> dict[str, float]:
        pair = series[kind][a], series[kind][b]
        return {
            clock: round(statistics.median(x / y for x, y in zip(pair[0][clock], pair[1][clock], strict=True)), 3)
            for clock in ("wall", "cpu")
        }

    return {
        "group": case.group,
        "case": case.name,
        "descriptors": len(case.views),
        "moved_bytes": case.moved_bytes,
        "torch_form": form,
        "load": [round(load, 2), round(os.getloadavg()[0], 2)],
        "ratio": {
            "native_1 to memcpy": ratio("alone", "native_1", "memcpy"),
            "native_1 to torch_1": ratio("alone", "native_1", "torch_1"),
            "native_2 to torch_2": ratio("together", "native_2", "torch_2"),
            "native_2 to native_1": ratio("together", "native_2", "native_1"),
        },
        "gb_per_second": series,
    }


def _samples(
    contestants: dict[str, tuple[Callable[[], object], int]], samples: int, runs: int, clock: Callable[[], float]
) -> dict[str, dict[str, list[float]]]:
    """name -> {"wall": GB/s of each sample, "cpu": the same by `clock`}; the contestants take turns."""
    found: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in contestants}
    for name in (*contestants,) * samples:
        run, moved = contestants[name]
        wall, cpu = time.perf_counter(), clock()
        for _ in range(runs):
            run()
        wall, cpu = time.perf_counter() - wall, clock() - cpu
        found[name]["wall"].append(round(runs * moved / wall / 1e9, 3))
        found[name]["cpu"].append(round(runs * moved / cpu / 1e9, 3))
        if name == "torch_2":
            time.sleep(SPIN_SECONDS)
    return found


GROUPS: dict[str, Callable[[int], Iterator[Case]]] = {
    "rows": row_cases,
    "transpose": transpose_cases,
    "cast": cast_cases,
}
_HEAD = (
    f"{'':38} {'median GB/s written, by the wall':>44}   native_1 to    native_1 to    native_2 to    native_2 to\n"
    f"{'':38} "
    + " ".join(f"{name:>8}" for name in NAMES)
    + "       memcpy         torch_1        torch_2       native_1    load\n"
    f"{'':83} " + " ".join(["   wall    cpu "] * 4)
)


def _line(result: dict[str, Any]) -> str:
    series = result["gb_per_second"]
    medians = [
        statistics.median(series["alone" if name in series["alone"] else "together"][name]["wall"]) for name in NAMES
    ]
    cells = " ".join(f"{m:8.2f}" for m in medians)
    ratios = "  ".join(f"{pair['wall']:6.2f} {pair['cpu']:6.2f}" for pair in result["ratio"].values())
    return f"{result['case']:38} {cells}  {ratios}  {result['load'][1]:5.1f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the cases; a table goes to stderr, and with --json all samples to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="MiB written a case")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--runs", type=int, default=3, help="runs of a contestant in a row that make one sample")
    parser.add_argument("--only", default="", help="cases whose group and name contain this")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    print(_HEAD, file=sys.stderr)
    results = []
    for group, cases in GROUPS.items():
        for case in cases(arguments.mib << 20):
            if arguments.only in f"{group}: {case.name}":
                results.append(measure(case, arguments.samples, arguments.runs))
                print(_line(results[-1]), file=sys.stderr)
    if arguments.json:
        print(json.dumps({"mib": arguments.mib, "runs": arguments.runs, "results": results}, indent=1))


if __name__ == "__main__":
    main()
