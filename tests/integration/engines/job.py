"""The test's side of a real-loader test: start the workers, read what they leave, plan and carry out an update."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.layout import SourceMap, decode_source_map, missing_elements, unused_tensors
from weightbridge.plan import Role, Topology, Worker
from weightbridge.plan.planner import PlanOptions, make_plan
from weightbridge.program import lower, verify_program, verify_programs
from weightbridge.testing.memory_driver import MemoryDriver

__all__ = [
    "CONSTANT", "UNTOUCHED", "Rank", "check_coverage", "check_layout", "check_update", "engine_python", "held", "indices",
    "num_copies", "read_side", "run_workers",
]  # fmt: skip

ROOT = Path(__file__).parents[3]
CONSTANT, UNTOUCHED = -1, -2

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rank:
    """What one worker left: its map, and the bytes of its live tensors after the loads of versions 1 and 2."""

    source_map: SourceMap
    versions: Mapping[int, list[npt.NDArray[np.uint8]]]


def engine_python(name: str) -> str:
    """The interpreter of an engine's own environment; skips the test where it has not been made."""
    python = ROOT / ".venvs" / name / "bin" / "python"
    if not (ROOT / ".venvs" / name / ".installed").exists():
        pytest.skip(f"{name} is not set up here; `make test-{name}` does it")
    return str(python)


def run_workers(
    worker: str, case: str, world_size: int, folder: Path, *, python: str = sys.executable,
    environ: Mapping[str, str] | None = None, seconds: float = 240,
) -> None:  # fmt: skip
    """Start `world_size` ranks of a worker script of this folder and wait at most `seconds` for all.

    Fails with their output when one ends otherwise than well; none is left running.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "src"), str(ROOT)]
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        **(environ or {}),
    }
    logs = [folder / f"log{rank}" for rank in range(world_size)]
    started = []
    deadline = time.monotonic() + seconds
    try:
        for rank, log in enumerate(logs):
            command = [python, str(Path(__file__).with_name(worker)), case, str(rank), str(world_size), str(folder)]
            with log.open("wb") as output:
                started.append(
                    subprocess.Popen(command, env=variables, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
                )
        for process in started:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in started:
            process.kill()
            process.wait()
    codes = [process.returncode for process in started]
    text = "\n".join(f"--- rank {r}\n{log.read_text(errors='replace')[-4000:]}" for r, log in enumerate(logs))
    assert codes == [0] * world_size, f"exit statuses {codes} within {seconds:.0f} s\n{text}"


def read_side(folder: Path, world_size: int, spec: CheckpointSpec, *, label: str = "") -> list[Rank]:
    """What the ranks left under this label."""
    return [_read(folder / f"{label}{rank}", spec) for rank in range(world_size)]


def _read(folder: Path, spec: CheckpointSpec) -> Rank:
    source_map = decode_source_map((folder / "map").read_bytes(), spec=spec)
    versions = {}
    for version in (1, 2):
        with np.load(folder / f"version{version}.npz") as kept:
            versions[version] = [kept[str(i)] for i in range(len(source_map.live))]
    return Rank(source_map, versions)


# --- maps -----------------------------------------------------------------------------------------------------------------


def indices(spec: CheckpointSpec) -> dict[str, Indices]:
    """The checkpoint in which every element is its own number: what a layout formula is applied to."""
    return {
        t.name: np.arange(low, low + t.numel, dtype=np.int64).reshape(t.shape)
        for t, low in zip(spec.tensors, spec.numel_offsets.tolist(), strict=False)
    }


def held(source_map: SourceMap, spec: CheckpointSpec) -> dict[str, Indices]:
    """Live tensor -> the number of the checkpoint element that each of its elements holds, as the map says."""
    copies, found = source_map.copies, {}
    for position, tensor in enumerate(source_map.live):
        flat = np.full(tensor.span_numel, UNTOUCHED, dtype=np.int64)
        for row in np.flatnonzero(copies.live == position).tolist():
            count = copies.count[row]
            put = _offsets(int(copies.live_start[row]), count, copies.live_stride[row])
            assert (flat[put] == UNTOUCHED).all(), f"{tensor.name}: an element is accounted for twice"
            flat[put] = _offsets(int(copies.src_start[row]), count, copies.src_stride[row])
            flat[put] += spec.numel_offsets[copies.tensor[row]]
        for constant in source_map.constants:
            if constant.live == position:
                axes = np.array(constant.axes, dtype=np.int64).reshape(-1, 2)
                flat[_offsets(constant.live_start, axes[:, 0], axes[:, 1])] = CONSTANT
        put = _offsets(0, np.array(tensor.shape, np.int64), np.array(tensor.strides, np.int64))
        found[tensor.name] = flat[put].reshape(tensor.shape) if prod(tensor.shape) else np.zeros(tensor.shape, np.int64)
    return found


def _offsets(start: int, count: npt.NDArray[np.int64], stride: npt.NDArray[np.int64]) -> Indices:
    out = np.array([start], dtype=np.int64)
    for n, s in zip(count.tolist(), stride.tolist(), strict=True):
        out = (out[:, None] + np.arange(n, dtype=np.int64) * s).reshape(-1)
    return out


def num_copies(source_map: SourceMap) -> dict[str, int]:
    """Live tensor -> in how many slice copies it is described."""
    return {t.name: int((source_map.copies.live == i).sum()) for i, t in enumerate(source_map.live)}


def check_layout(
    rank: Rank, spec: CheckpointSpec, expected: Mapping[str, Indices], *, others: Mapping[str, Indices] | None = None
) -> None:
    """The map says exactly `expected` of the live parameters and `others` of some buffers; the rest is never written."""
    found = held(rank.source_map, spec)
    parameters = {t.name for t in rank.source_map.live if t.parameter}
    assert parameters == set(expected)
    expected = {**expected, **(others or {})}
    for name, numbers in found.items():
        if name in expected:
            assert numbers.shape == expected[name].shape, name
            assert np.array_equal(numbers, expected[name]), name
        else:
            assert (numbers == UNTOUCHED).all(), f"buffer {name} is written"


def check_coverage(ranks: Sequence[Rank], spec: CheckpointSpec) -> None:
    """Every element of the checkpoint lands on some worker, every element of every parameter comes from somewhere."""
    maps = [r.source_map for r in ranks]
    assert unused_tensors(spec, maps) == ()
    assert missing_elements(spec, maps) == {}
    for source_map in maps:
        parameters = {t.name for t in source_map.live if t.parameter}
        assert parameters & set(source_map.untouched) == set()


# --- an update ----------------------------------------------------------------------------------------------------------


def check_update(
    spec: CheckpointSpec, trainers: Sequence[Rank], engines: Mapping[str, Sequence[Rank]], *, slot_bytes: int = 1 << 14
) -> None:
    """Plan, lower, verify, and move version 2 from trainers that hold it to engines that hold version 1.

    Each engine must then hold, byte for byte, what its own loader made of version 2; trainers are only read.
    """
    workers = [Worker(name=f"trainer/{i}", role=Role.TRAINER, node="trainers", rank=i) for i in range(len(trainers))]
    ranks = list(trainers)
    for engine, members in engines.items():
        workers += [
            Worker(name=f"{engine}/{i}", role=Role.ROLLOUT, node=engine, rank=i, engine=engine)
            for i in range(len(members))
        ]
        ranks += members
    topology = Topology(workers=tuple(workers))
    maps = [r.source_map for r in ranks]
    plan = make_plan(spec, topology, maps, options=PlanOptions(slot_bytes=slot_bytes, alignment=64, min_rounds=3))
    programs = [lower(plan, spec, source_map, i) for i, source_map in enumerate(maps)]
    for program, source_map in zip(programs, maps, strict=True):
        verify_program(program, plan, spec, source_map)
    verify_programs(programs, plan)
    live = {i: [a.copy() for a in r.versions[2 if i in topology.trainers else 1]] for i, r in enumerate(ranks)}
    outcome = MemoryDriver(programs, live).run(seed=3)
    assert not outcome.failed
    assert outcome.finished == frozenset(range(len(ranks)))
    for i, rank in enumerate(ranks):
        for tensor, found, expected in zip(rank.source_map.live, live[i], rank.versions[2], strict=True):
            assert np.array_equal(found, expected), f"{tensor.name} on {workers[i].name}"
        changed = [not np.array_equal(a, b) for a, b in zip(rank.versions[1], rank.versions[2], strict=True)]
        assert any(changed), "versions 1 and 2 are the same: the update proves nothing"
