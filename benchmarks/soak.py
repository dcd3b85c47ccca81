"""Many updates in a row: does a session grow, and is its last update as quick as its first?

    python -m benchmarks.soak [--json] [--updates N]

Two trainers and an engine of two, each a process, as on two nodes: shared memory inside, TCP between. Every element of every
version is compared. Each worker looks at its own /proc entries on the way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import Options, ReceiverAdapter, SenderAdapter
from weightbridge.testing.ports import free_port

UPDATES = 1000
NUM_TENSORS = 24
SHAPE = (96, 130)
ALLOWED_GROWTH_BYTES = 2 << 20
"""Of a resident set between the first look and the last one: what an allocator moves about. A leak of a page an update is twice
as much in 1,000."""

_ROOT = Path(__file__).parents[1]
_FORMS = [(f"layers.{i}.weight", SHAPE, "bfloat16") for i in range(NUM_TENSORS)]
_OPTIONS = Options(slot_bytes=64 << 10, connect_timeout_seconds=120, heartbeat_timeout_seconds=30)


class Shard:
    """Rows of every tensor on a trainer, columns on an engine: one of two equal parts, as raw bits that count up."""

    def __init__(self, rank: int, *, by_rows: bool) -> None:
        self._axis = 0 if by_rows else 1
        self._rank = rank
        numbers = torch.arange(NUM_TENSORS * SHAPE[0] * SHAPE[1], dtype=torch.int32)
        self._full = numbers.to(torch.int16).reshape(NUM_TENSORS, *SHAPE)
        self.live = {name: self._part(torch.zeros(SHAPE, dtype=torch.bfloat16)).clone() for name, _, _ in _FORMS}

    def _part(self, full: torch.Tensor) -> torch.Tensor:
        half = full.shape[self._axis] // 2
        return full.narrow(self._axis, self._rank * half, half)

    def load_weights(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in stream:
            self.live[name].copy_(self._part(tensor))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self.live

    def _bits(self, full: torch.Tensor, version: int) -> torch.Tensor:
        return self._part(full) + version % (1 << 15)

    def fill(self, version: int) -> None:
        for tensor, full in zip(self.live.values(), self._full, strict=True):
            tensor.view(torch.int16).copy_(self._bits(full, version))

    def is_version(self, version: int) -> bool:
        return all(
            torch.equal(tensor.view(torch.int16), self._bits(full, version))
            for tensor, full in zip(self.live.values(), self._full, strict=True)
        )


def look() -> dict[str, int]:
    """This process's resident set in bytes, open descriptors and threads."""
    own = Path("/proc/self")
    resident = int((own / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "resident_bytes": resident,
        "descriptors": len(os.listdir(own / "fd")),
        "threads": len(os.listdir(own / "task")),
    }


def run_worker(role: str, rank: int, endpoint: str, updates: int) -> dict[str, Any]:
    """One worker's life; returns what it saw. looks: every tenth part of the updates, the first after a tenth.

    One more update follows the last one, so that nobody has begun to leave when that is looked at.
    """
    spec = CheckpointSpec.from_iterable(_FORMS)
    shard = Shard(rank, by_rows=role == "trainer")
    common: dict[str, Any] = {
        "group": (rank, 2), "endpoint": endpoint, "checkpoint": spec, "load_weights": shard.load_weights,
        "tensors": shard.tensors, "options": _OPTIONS,
    }  # fmt: skip
    looks: list[dict[str, int]] = []
    seconds: list[float] = []
    wrong = 0
    every = max(updates // 10, 1)
    if role == "trainer":
        sender = SenderAdapter(engines=("engine",), **common)
        sender.connect()
        for version in range(1, updates + 2):
            shard.fill(version)
            seconds.append(sender.send_weights(version).wait().ewtt_seconds)
            if version % every == 0:
                looks.append(look())
        sender.close()
    else:
        receiver = ReceiverAdapter(engine="engine", **common)
        while receiver.version <= updates:
            if not receiver.poll_requests():
                time.sleep(0.001)
                continue
            wrong += not shard.is_version(receiver.version)
            if receiver.version % every == 0:
                looks.append(look())
        receiver.close()
    return {"worker": f"{role}/{rank}", "looks": looks, "ewtt_seconds": seconds[:updates], "wrong": wrong}


def measure(updates: int) -> dict[str, Any]:
    """All workers, each in a process of its own. Raises RuntimeError with what a worker that failed has said."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{_ROOT / 'src'}{os.pathsep}{_ROOT}"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.soak", "--updates", str(updates), "--worker", role, str(rank), endpoint],
            env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for role in ("trainer", "engine") for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=60 + updates) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"a worker ended with {process.returncode}: {errors.strip()[-2000:]}")
    return summary(updates, [json.loads(out) for out, _ in said])


def summary(updates: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """growth: of each worker, its last look less its first. ewtt_first, ewtt_last: medians of a tenth of the updates, the very
    first one left out."""
    tenth = max(updates // 10, 1)
    ewtt = found[0]["ewtt_seconds"]
    first, last = median(ewtt[1 : tenth + 1] or ewtt), median(ewtt[-tenth:])
    workers = {
        w["worker"]: at_end | {"growth": {k: at_end[k] - w["looks"][0][k] for k in at_end}}
        for w in found
        for at_end in w["looks"][-1:]
    }
    growth = {k: max(w["growth"][k] for w in workers.values()) for k in ("resident_bytes", "descriptors", "threads")}
    wrong = sum(w["wrong"] for w in found)
    return {
        "updates": updates,
        "model_bytes": CheckpointSpec.from_iterable(_FORMS).nbytes,
        "workers": workers,
        "largest_growth": growth,
        "allowed_growth_bytes": ALLOWED_GROWTH_BYTES,
        "ewtt_seconds_first": first,
        "ewtt_seconds_last": last,
        "last_to_first": last / first,
        "wrong_versions": wrong,
        "load_average": os.getloadavg()[0],
        "ok": not wrong
        and growth["resident_bytes"] <= ALLOWED_GROWTH_BYTES
        and growth["descriptors"] <= 0
        and growth["threads"] <= 0,
    }


def _text(found: dict[str, Any]) -> str:
    first, last = (found[f"ewtt_seconds_{when}"] * 1e3 for when in ("first", "last"))
    most = found["largest_growth"]
    return (
        f"{found['updates']} updates of {found['model_bytes'] / 1e6:.2f} MB: EWTT {first:.2f} ms at first, "
        f"{last:.2f} ms at last\n"
        f"the worker that grew most grew by {most['resident_bytes'] / 1024:.0f} KiB, {most['descriptors']} descriptors, "
        f"{most['threads']} threads\n{found['wrong_versions']} versions wrong"
    )


def main() -> int:
    """0: every value was right and nothing grew; 1: something did."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description="Many updates in a row.")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"how many (default {UPDATES})")
    parser.add_argument("--worker", nargs=3, metavar=("ROLE", "RANK", "ENDPOINT"), help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.updates < 2:
        parser.error(f"--updates: expected at least 2, got {parsed.updates}")
    if parsed.worker:
        torch.set_num_threads(1)
        role, rank, endpoint = parsed.worker
        print(json.dumps(run_worker(role, int(rank), endpoint, parsed.updates)))
        return 0
    found = measure(parsed.updates)
    if parsed.json:
        print(json.dumps(found))
    else:
        print(_text(found))
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
