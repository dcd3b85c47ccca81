"""Layout discovery of one worker's share of a mixture-of-experts model, against memcpy of the same bytes.

    python -m benchmarks.discovery [--layers 7] [--samples 5] [--json]

The live tensors (bf16, 2.3 GiB by default) are those of rank 1 of 2 of an engine: fused qkv, o_proj sharded by columns,
half of the experts with gate and up stacked, embeddings with padded rows, norms and router replicated. They lie in one block,
are loaded once a coded pass, and each pass is then read `--samples` times, taking turns with memcpy of the block into
touched memory. One thread, native kernel.

- seconds_per_pass: decode + difference of all passes + reconstruction, over the number of passes; one value a sample.
- copy_ratio: best memcpy over best seconds_per_pass (wall clock). The _cpu forms use the thread's CPU time of both, which
  neighbours on the machine disturb less.
- all_slow_ratio: decode + difference of the same block when each row of 2048 is a row from a random place, so that no row is
  predicted by those before it; without reconstruction.
- reconstruct_seconds_per_30000: from the sparse entries to slice copies, settling constants included; the mean number of
  non-zeros a pass counts. Of the shard; and of one tensor of 16,128 rows of 64: two halves row by row (`interleaved_...`),
  heads of 8 rows of three parts in turn (`heads_...`), rows in random order (`permuted_...`: as many copies as rows).
- extra_bytes: the peak resident set during a whole `probe` (coded loads, verification), less what was resident before it
  began: no backup is made, and the loader keeps nothing. extra_bound_bytes: the largest checkpoint tensor + 64 MiB + the
  sparse entries.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from weightbridge.checkpoint import CheckpointSpec, dtype_named
from weightbridge.kernels.differences import NativeDifferencer, native_differences_available
from weightbridge.probe import NamedTensors, ProbeOptions, live_tensors, probe
from weightbridge.probe.codes import CodeTable, CodeTables, code_table
from weightbridge.probe.explained import TensorRecord
from weightbridge.probe.observe import fill_sentinel
from weightbridge.probe.values import coded_tensors

RANK, SIZE = 1, 2
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, EXPERT_DIM, VOCAB = 2048, 32, 4, 128, 64, 768, 49155
PADDED_VOCAB = 49216
TILE_BYTES = 64 << 20
SLOW_COLS = 2048


class Shard(NamedTuple):
    """spec: the whole checkpoint. block: all live tensors, one after the other. write: puts a checkpoint tensor in place."""

    spec: CheckpointSpec
    live: NamedTensors
    block: torch.Tensor
    write: dict[str, Callable[[torch.Tensor], object]]

    def load(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        iterator = iter(stream)
        while True:
            item = next(iterator, None)
            if item is None:
                return
            write = self.write.get(item[0])
            if write is not None:
                write(item[1])
            del item  # the next tensor is made when this one is gone


def shard(layers: int) -> Shard:
    """The share of one worker, its memory touched."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCAB, HIDDEN)}
    live_shapes: dict[str, tuple[int, ...]] = {"embed": (PADDED_VOCAB // SIZE, HIDDEN)}
    q, kv, own = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, EXPERTS // SIZE
    for i in range(layers):
        at = f"layers.{i}."
        shapes |= {at + "q": (q, HIDDEN), at + "k": (kv, HIDDEN), at + "v": (kv, HIDDEN), at + "o": (HIDDEN, q)}
        small = {
            at + "norm1": (HIDDEN,),
            at + "norm2": (HIDDEN,),
            at + "q_norm": (HEAD_DIM,),
            at + "k_norm": (HEAD_DIM,),
        }
        small[at + "router"] = (EXPERTS, HIDDEN)
        shapes |= small
        for e in range(EXPERTS):
            expert = f"{at}experts.{e}."
            shapes |= {expert + "gate": (EXPERT_DIM, HIDDEN), expert + "up": (EXPERT_DIM, HIDDEN)}
            shapes[expert + "down"] = (HIDDEN, EXPERT_DIM)
        live_shapes |= {at + "qkv": ((q + 2 * kv) // SIZE, HIDDEN), at + "o": (HIDDEN, q // SIZE)} | small
        live_shapes |= {at + "w13": (own, 2 * EXPERT_DIM, HIDDEN), at + "w2": (own, HIDDEN, EXPERT_DIM)}
    shapes |= {"norm": (HIDDEN,), "head": (VOCAB, HIDDEN)}
    live_shapes |= {"norm": (HIDDEN,), "head": (PADDED_VOCAB // SIZE, HIDDEN)}
    sizes = [int(np.prod(s)) for s in live_shapes.values()]
    block = torch.zeros(sum(sizes), dtype=torch.bfloat16)
    live = {n: x.view(s) for (n, s), x in zip(live_shapes.items(), block.split(sizes), strict=True)}
    spec = CheckpointSpec.from_iterable((n, s, dtype_named("BF16")) for n, s in shapes.items())
    return Shard(spec, NamedTensors(live), block, _writers(live, layers))


def _writers(live: dict[str, torch.Tensor], layers: int) -> dict[str, Callable[[torch.Tensor], object]]:
    write: dict[str, Callable[[torch.Tensor], object]] = {}
    rows = PADDED_VOCAB // SIZE

    def vocab(name: str) -> Callable[[torch.Tensor], object]:
        def put(source: torch.Tensor) -> None:
            own = source[RANK * rows : (RANK + 1) * rows]
            live[name][: len(own)] = own
            live[name][len(own) :] = 0

        return put

    def cut(target: torch.Tensor, dim: int) -> Callable[[torch.Tensor], object]:
        return lambda source: target.copy_(source.chunk(SIZE, dim)[RANK])

    write |= {"embed": vocab("embed"), "head": vocab("head"), "norm": live["norm"].copy_}
    q, kv = HEADS * HEAD_DIM // SIZE, KV_HEADS * HEAD_DIM // SIZE
    for i in range(layers):
        at = f"layers.{i}."
        for part, target in zip("qkv", live[at + "qkv"].split([q, kv, kv]), strict=True):
            write[at + part] = cut(target, 0)
        write[at + "o"] = cut(live[at + "o"], 1)
        for name in ("norm1", "norm2", "q_norm", "k_norm", "router"):
            write[at + name] = live[at + name].copy_
        for slot in range(EXPERTS // SIZE):
            expert = f"{at}experts.{RANK * (EXPERTS // SIZE) + slot}."
            w13 = live[at + "w13"][slot]
            write[expert + "gate"] = w13[:EXPERT_DIM].copy_
            write[expert + "up"] = w13[EXPERT_DIM:].copy_
            write[expert + "down"] = live[at + "w2"][slot].copy_
    return write


class Seconds(NamedTuple):
    wall: float
    cpu: float


def timed(run: Callable[[], object]) -> Seconds:
    wall, cpu = time.perf_counter(), time.thread_time()
    run()
    return Seconds(time.perf_counter() - wall, time.thread_time() - cpu)


def memcpy(target: torch.Tensor, source: torch.Tensor) -> Seconds:
    """libc's memcpy of the whole block, one thread."""
    copy = ctypes.CDLL(None).memcpy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return timed(lambda: copy(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size()))


def measure_passes(case: Shard, table: CodeTables, target: torch.Tensor, samples: int) -> dict[str, Any]:
    """Every coded pass, read `samples` times; then the reconstruction of each sample."""
    described = live_tensors(case.live)
    records = [[TensorRecord.of(t) for t in described] for _ in range(samples)]
    reading = np.zeros((samples, 2))
    copying: list[Seconds] = []

    def read(sample: int, pass_: int) -> None:
        for record, tensor in zip(records[sample], case.live.values(), strict=True):
            record.read(tensor, table, pass_)

    for pass_ in range(table.num_passes):
        for tensor, live in zip(case.live.values(), described, strict=True):
            fill_sentinel(tensor, live.dtype, pass_)
        case.load(coded_tensors(case.spec, table, pass_))
        for sample in range(samples):
            copying.append(memcpy(target, case.block))
            reading[sample] += timed(lambda sample=sample, pass_=pass_: read(sample, pass_))
    entries = [e for record in records[0] for passes in record.entries for e in passes]
    num_entries = sum(len(e.row) for e in entries) / table.num_passes
    copies: list[int] = []

    def rebuild(sample: int) -> None:
        copies.append(sum(len(r.explain(case.spec, table).copies) for r in records[sample]))

    rebuilding = np.array([timed(lambda s=s: rebuild(s)) for s in range(samples)])
    per_pass = (reading + rebuilding) / table.num_passes
    return {
        "seconds_per_pass": per_pass[:, 0].tolist(),
        "seconds_per_pass_cpu": per_pass[:, 1].tolist(),
        "memcpy_seconds": [c.wall for c in copying],
        "memcpy_seconds_cpu": [c.cpu for c in copying],
        "copy_ratio": min(c.wall for c in copying) / per_pass[:, 0].min(),
        "copy_ratio_cpu": min(c.cpu for c in copying) / per_pass[:, 1].min(),
        "reconstruct_seconds": rebuilding[:, 0].tolist(),
        "reconstruct_seconds_cpu": rebuilding[:, 1].tolist(),
        "reconstruct_seconds_per_30000": rebuilding[:, 0].min() / num_entries * 30000,
        "reconstruct_seconds_per_30000_cpu": rebuilding[:, 1].min() / num_entries * 30000,
        "nonzeros_per_pass": num_entries,
        "sparse_bytes": sum(column.nbytes for e in entries for column in e),
        "num_copies": copies[0],
    }  # fmt: skip


def measure_all_slow(case: Shard, table: CodeTable, target: torch.Tensor, samples: int) -> dict[str, Any]:
    """The block as one field of rows from random places. Overwrites the live tensors."""
    p, first = table.moduli[0], table.first_bits(dtype_named("BF16"), 0)
    bits = case.block.view(torch.int16).numpy().view(np.uint16)
    field = bits[: len(bits) // SLOW_COLS * SLOW_COLS].reshape(-1, SLOW_COLS)
    starts = np.random.default_rng(0).integers(0, p, (len(field), 1)).astype(np.uint16)
    columns = (np.arange(SLOW_COLS) % p).astype(np.uint16)
    for row in range(0, len(field), 4096):
        residues = starts[row : row + 4096] + columns
        np.add(np.minimum(residues, residues - np.uint16(p)), np.uint16(first), out=field[row : row + 4096])

    def difference() -> None:
        differencer = NativeDifferencer(cols=SLOW_COLS, modulus=p, first_bits=first, bit_step=0, numel=field.size)
        for _ in differencer.push(field):
            pass

    copying, reading = [], []
    for _ in range(samples):
        copying.append(memcpy(target, case.block))
        reading.append(timed(difference))
    return {
        "all_slow_ratio": min(c.wall for c in copying) / min(r.wall for r in reading),
        "all_slow_ratio_cpu": min(c.cpu for c in copying) / min(r.cpu for r in reading),
        "all_slow_seconds": [r.wall for r in reading],
        "all_slow_seconds_cpu": [r.cpu for r in reading],
    }


def measure_rows(name: str, order: np.ndarray) -> dict[str, Any]:
    """Reconstruction of a tensor of rows of 64 in this order: every row differs from what those before it predict."""
    spec = CheckpointSpec.from_iterable([("w", (len(order), 64), dtype_named("BF16"))])
    table = code_table(spec, ["BF16"])
    live = torch.zeros(len(order), 64, dtype=torch.bfloat16)
    record = TensorRecord.of(live_tensors({"w": live})[0])
    for pass_ in range(table.num_passes):
        for _, tensor in coded_tensors(spec, table, pass_):
            live.copy_(tensor[torch.from_numpy(order)])
        record.read(live, table, pass_)
    num_entries = sum(len(e.row) for passes in record.entries for e in passes) / table.num_passes
    copies: list[int] = []
    seconds = [timed(lambda: copies.append(len(record.explain(spec, table).copies))) for _ in range(3)]
    return {
        f"{name}_nonzeros_per_pass": num_entries,
        f"{name}_num_copies": copies[0],
        f"{name}_reconstruct_seconds_per_30000": min(s.wall for s in seconds) / num_entries * 30000,
        f"{name}_reconstruct_seconds_per_30000_cpu": min(s.cpu for s in seconds) / num_entries * 30000,
    }


def measure_layouts() -> dict[str, Any]:
    """Layouts with many sparse entries: two halves row by row, heads of three projections, rows at random."""
    rows = np.arange(16128)
    heads = np.concatenate([rows.reshape(3, -1)[:, i : i + 8].reshape(-1) for i in range(0, len(rows) // 3, 8)])
    return (
        measure_rows("interleaved", rows.reshape(2, -1).T.reshape(-1))
        | measure_rows("heads", heads)
        | measure_rows("permuted", np.random.default_rng(0).permutation(rows))
    )


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"/proc/self/status has no {key}")


def measure_memory(case: Shard, sparse_bytes: int) -> dict[str, Any]:
    """The peak of a whole probe, beyond what was there before."""
    tiny = {"w": torch.zeros(7, 70, dtype=torch.bfloat16)}
    tiny_spec = CheckpointSpec.from_state_dict(tiny)
    options = ProbeOptions(backup=False)
    # Imports and caches are not the probe's: let a small one bring them in.
    probe(
        spec=tiny_spec, load_weights=lambda s: [tiny[n].copy_(t) for n, t in s], tensors=lambda: tiny, options=options
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = resident("VmRSS")
    found = probe(spec=case.spec, load_weights=case.load, tensors=lambda: case.live, options=options)
    largest = max(t.numel * t.dtype.itemsize for t in case.spec.tensors)
    return {
        "extra_bytes": resident("VmHWM") - before,
        "extra_bound_bytes": largest + TILE_BYTES + sparse_bytes,
        "largest_checkpoint_tensor_bytes": largest,
        "num_copies_of_probe": len(found.copies.tensor),
    }


def main() -> None:
    """Run everything; print a few lines, or JSON with all samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not native_differences_available():
        raise SystemExit("the native kernels were not built")
    torch.set_num_threads(1)
    case = shard(arguments.layers)
    table = code_table(case.spec, ["BF16"])
    bf16 = table.of(dtype_named("BF16"))
    if not isinstance(bf16, CodeTable):
        raise SystemExit("bf16 has no table of codes")
    target = torch.ones_like(case.block)
    result: dict[str, Any] = {
        "live_bytes": case.block.numel() * 2,
        "checkpoint_bytes": case.spec.numel * 2,
        "num_passes": table.num_passes,
        "samples": arguments.samples,
    }
    result |= measure_passes(case, table, target, arguments.samples)
    result |= measure_memory(case, result["sparse_bytes"])
    result |= measure_all_slow(case, bf16, target, arguments.samples)
    result |= measure_layouts()
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for key, value in result.items():
        shown = min(value) if isinstance(value, list) else value
        print(f"{key:45} {shown:,}" if isinstance(shown, int) else f"{key:45} {shown:.3f}")


if __name__ == "__main__":
    main()
