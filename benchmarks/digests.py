"""What the digests of travelling bytes cost: the kernel alone, and a whole update with and without them.

    python -m benchmarks.digests [--mib 256] [--samples 7] [--json]

Kernel: bytes a second of one thread, in C and in NumPy, beside libc's memcpy of as many bytes. The contestants (NumPy in the
first only) take turns inside every sample; the median of the samples' ratios is shown. `segments` says how the bytes lie: in
one piece, or in pieces with 64 bytes between them.

Update: a trainer and an engine of one worker each in this process, real executors, over tcp (loopback) and over shared
memory. `cpu_seconds_per_gb` is CPU time of the whole process, both ends included, that digests add for 10**9 bytes;
`ewtt_ratio` is the time of an update with digests over the time without. Loopback is much faster than a network between nodes
and both ends share these cores, so the ratio is the worst case.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import threading
import time
from contextlib import ExitStack, closing

import numpy as np

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.executor import Executor
from weightbridge.kernels import Buffer, choose_kernels
from weightbridge.kernels.digests import digest_in_c, digest_in_numpy
from weightbridge.layout import CopyTable, LiveTensor, SourceMap
from weightbridge.plan import PlanOptions, Role, Topology, Worker, make_plan
from weightbridge.program import lower
from weightbridge.transports import Identity

GAP_BYTES = 64
SIZES = ((1 << 18, "256 KiB"), (4 << 20, "4 MiB"), (64 << 20, "64 MiB"))
SEGMENTS = (64, 1 << 10, 64 << 10, 0)  # 0: one piece
SAMPLE_BYTES = 256 << 20
SLOT_BYTES = 8 << 20
SECONDS = 60


# --- the kernel -------------------------------------------------------------------------------------------------------


def kernel_rows(samples: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for nbytes, size in SIZES:
        for piece in SEGMENTS:
            length = piece or nbytes
            offsets = np.arange(nbytes // length) * (length + GAP_BYTES)
            segments = np.stack([offsets, np.full(len(offsets), length)], axis=1)
            memory = np.ones(int(offsets[-1]) + length, dtype=np.uint8)
            target = np.zeros(nbytes, dtype=np.uint8)
            found: dict[str, list[float]] = {"c": [], "numpy": [], "memcpy": []}
            for sample in range(samples):
                for name in found:
                    if name == "numpy" and sample:
                        continue  # slow, and the same every time
                    times = 1 if name == "numpy" else SAMPLE_BYTES // nbytes
                    begin = time.thread_time()
                    for _ in range(times):
                        if name == "memcpy":
                            ctypes.memmove(target.ctypes.data, memory.ctypes.data, nbytes)
                        else:
                            (digest_in_c if name == "c" else digest_in_numpy)(memory.ctypes.data, segments)
                    found[name].append(times * nbytes / (time.thread_time() - begin) / 1e9)
            ratios = [c / m for c, m in zip(found["c"], found["memcpy"], strict=True)]
            rows.append(
                {
                    "bytes": size,
                    "segments": f"{piece} B" if piece else "one",
                    "ratio_to_memcpy": statistics.median(ratios),
                    **{f"{name}_gb_per_second": statistics.median(rates) for name, rates in found.items()},
                }
            )
    return rows


# --- an update --------------------------------------------------------------------------------------------------------


class Pair:
    """A trainer and an engine with one bf16 matrix, joined; `update` is one version."""

    def __init__(self, stack: ExitStack, mib: int, nodes: tuple[str, str], *, digests: bool) -> None:
        shape = (mib << 9, 1024)
        spec = CheckpointSpec.from_iterable([("w", shape, "bfloat16")])
        dtype = spec.tensors[0].dtype
        live = LiveTensor(name="w", shape=shape, strides=(shape[1], 1), dtype=dtype)
        rows = [(0, 0, 0, 0, ((shape[0], shape[1], shape[1]), (shape[1], 1, 1)))]
        source_map = SourceMap(spec_digest=spec.digest, live=(live,), copies=CopyTable.from_rows(rows))
        workers = (
            Worker(name="trainer/0", role=Role.TRAINER, node=nodes[0], rank=0),
            Worker(name="engine/0", role=Role.ROLLOUT, node=nodes[1], rank=0, engine="engine"),
        )
        options = PlanOptions(slot_bytes=SLOT_BYTES)
        plan = make_plan(spec, Topology(workers=workers), [source_map] * 2, options=options)
        self.memory = [np.full(spec.nbytes, 7 * w, dtype=np.uint8) for w in range(2)]
        self.executors = [
            stack.enter_context(
                closing(
                    Executor(
                        workers=workers, program=lower(plan, spec, source_map, w), kernels=choose_kernels(),
                        identity=Identity(worker=workers[w].name, session=str(digests)), digests=digests,
                    )
                )
            )
            for w in range(2)
        ]  # fmt: skip
        self.version = 0
        endpoints = {w: x.endpoint for w, x in enumerate(self.executors)}
        self._both(lambda w: self._prepare(w, endpoints))

    def _prepare(self, w: int, endpoints: dict) -> None:
        self.executors[w].connect(endpoints)
        self.executors[w].bind([Buffer(self.memory[w].ctypes.data, self.memory[w].nbytes)])

    @staticmethod
    def _both(work) -> None:
        errors: list[BaseException] = []

        def guarded(w: int) -> None:
            try:
                work(w)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(w,)) for w in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def update(self) -> tuple[float, float]:
        """(seconds, CPU seconds of the process)."""
        self.version += 1
        version = self.version
        begin, cpu = time.perf_counter(), time.process_time()
        self._both(
            lambda w: self.executors[w].run(
                session=1, epoch=0, version=version, attempt=0, assemble_allowed=True, timeout_seconds=SECONDS
            )
        )
        return time.perf_counter() - begin, time.process_time() - cpu


def update_rows(mib: int, samples: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for transport, nodes in (("tcp", ("n0", "n1")), ("shm", ("n0", "n0"))):
        with ExitStack() as stack:
            pairs = {digests: Pair(stack, mib, nodes, digests=digests) for digests in (True, False)}
            found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for pair in pairs.values():
                pair.update()  # everything touched once
            for sample in range(samples):
                for digests in (True, False) if sample % 2 else (False, True):
                    found[digests].append(pairs[digests].update())
        pair_of = list(zip(found[True], found[False], strict=True))
        gigabytes = (mib << 20) / 1e9
        rows.append(
            {
                "transport": transport,
                "mib": mib,
                "cpu_seconds_per_gb": statistics.median((a[1] - b[1]) / gigabytes for a, b in pair_of),
                "cpu_seconds_per_gb_without": statistics.median(b[1] / gigabytes for _, b in pair_of),
                "ewtt_ratio": statistics.median(a[0] / b[0] for a, b in pair_of),
                "gb_per_second": statistics.median(gigabytes / a[0] for a, _ in pair_of),
                "gb_per_second_without": statistics.median(gigabytes / b[0] for _, b in pair_of),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the model of an update")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = {"kernel": kernel_rows(args.samples), "update": update_rows(args.mib, args.samples)}
    if args.json:
        print(json.dumps(result))
        return
    for rows in result.values():
        for row in rows:
            print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))


if __name__ == "__main__":
    main()
