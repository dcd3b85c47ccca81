"""Host copies of live tensors: which bytes pass, in both directions, and that no other byte of live memory changes.

The oracle marks elements by NumPy indexing in one piece of memory that all live tensors of a worker lie in, with poison
between, around and beneath them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
from itertools import product

import numpy as np
import pytest
from tests import toy_programs as toy
from tests.kernel_cases import row
from tests.unit.program_cases import house, twins

from weightbridge.checkpoint.dtypes import dtype_named
from weightbridge.errors import RegistrationError, UsageError
from weightbridge.executor import HostCopy
from weightbridge.kernels import Buffer, ReferenceKernels, choose_kernels
from weightbridge.layout.source_map import CopyTable, LiveTensor, SourceMap
from weightbridge.plan.topology import Role
from weightbridge.program.program import Assemble, Op, Round, WorkerProgram

BF16, F32, U8 = dtype_named("BF16"), dtype_named("F32"), dtype_named("U8")


class CountingKernels(ReferenceKernels):
    """The reference, with a count of tables and rows that were bound."""

    def __init__(self) -> None:
        self.prepared: list[int] = []

    def prepare(self, table, sources, destinations):
        self.prepared.append(len(table))
        return super().prepare(table, sources, destinations)


class Memory:
    """Random bytes with the live tensors at places of their own choice. starts: bytes, one for each."""

    def __init__(self, live: tuple[LiveTensor, ...], starts: list[int], seed: int = 0) -> None:
        self.live, self.starts = live, starts
        spans = [t.span_numel * t.dtype.itemsize for t in live]
        total = max((s + n for s, n in zip(starts, spans, strict=True)), default=0) + 77
        self.bytes = np.random.default_rng(seed).integers(0, 256, total, dtype=np.uint8)
        self.buffers = tuple(Buffer(self.bytes.ctypes.data + s, n) for s, n in zip(starts, spans, strict=True))

    @classmethod
    def apart(cls, live: tuple[LiveTensor, ...], seed: int = 0) -> Memory:
        """One after the other, with odd gaps."""
        rng, starts, at = random.Random(seed), [], 13
        for t in live:
            starts.append(at)
            at += t.span_numel * t.dtype.itemsize + rng.randrange(1, 90)
        return cls(live, starts, seed)

    def mask_of(self, elements: list[np.ndarray]) -> np.ndarray:
        """Bytes of elements: one bool array [span] for each live tensor."""
        mask = np.zeros(len(self.bytes), dtype=bool)
        for start, t, named in zip(self.starts, self.live, elements, strict=True):
            wide = np.repeat(named, t.dtype.itemsize)
            mask[start : start + len(wide)] |= wide
        return mask


def held(buffers: tuple[Buffer, ...]) -> list[np.ndarray]:
    """What buffers of some bytes hold; views."""
    return [np.frombuffer((ctypes.c_uint8 * b.nbytes).from_address(b.address), np.uint8) for b in buffers]


def named_by(source_map: SourceMap) -> list[np.ndarray]:
    """[span] of each live tensor: the elements that the map names, index by index."""
    found = [np.zeros(t.span_numel, dtype=bool) for t in source_map.live]
    c = source_map.copies
    for i in range(len(c)):
        for index in product(*map(range, c.count[i].tolist())):
            found[c.live[i]][c.live_start[i] + np.dot(index, c.live_stride[i])] = True
    return found


def map_of(live: tuple[LiveTensor, ...], rows) -> SourceMap:
    return SourceMap(spec_digest="", live=live, copies=CopyTable.from_rows(rows))


def tensor(shape, strides, dtype=BF16, name="t") -> LiveTensor:
    return LiveTensor(name=name, shape=shape, strides=strides, dtype=dtype)


def check(copy: HostCopy, memory: Memory, elements: list[np.ndarray]) -> None:
    """Capture, change all of live memory, install: the marked bytes are what they were, all others as changed."""
    marked, before = memory.mask_of(elements), memory.bytes.copy()
    hosts = [h.copy() for h in held(copy.buffers)]
    nbytes = sum(int(e.sum()) * t.dtype.itemsize for e, t in zip(elements, memory.live, strict=True))
    assert copy.capture(memory.buffers) == nbytes
    assert (memory.bytes == before).all()
    memory.bytes ^= 0xFF
    for host, old, live, start, e in zip(
        held(copy.buffers), hosts, memory.buffers, memory.starts, elements, strict=True
    ):
        assert host.size == (live.nbytes if e.any() else 0)
        wide = np.repeat(e, live.nbytes // max(e.size, 1))[: host.size]
        assert (host == np.where(wide, before[start : start + host.size], old)).all()
    for host, e, t in zip(held(copy.buffers), elements, memory.live, strict=True):
        host[~np.repeat(e, t.dtype.itemsize)[: host.size]] = 0x5A
    assert copy.install(memory.buffers) == nbytes
    np.testing.assert_array_equal(memory.bytes, np.where(marked, before, before ^ 0xFF))


@pytest.mark.parametrize("name", ["native", "reference"])
def test_the_elements_a_map_names_pass_and_no_others(name: str) -> None:
    kernels, reached = choose_kernels(name), {"gaps": 0, "whole": 0, "workers": 0}
    for seed in range(40 if name == "native" else 6):
        job = toy.random_job(seed)
        for worker, source_map in enumerate(job.maps):
            elements = named_by(source_map)
            reached["gaps"] += any(e.any() and not e.all() for e in elements)
            reached["whole"] += any(e.size and e.all() for e in elements)
            reached["workers"] += 1
            copy = HostCopy(source_map, kernels)
            check(copy, Memory.apart(source_map.live, seed + worker), elements)
            copy.close()
    assert reached["workers"] > 20
    assert reached["gaps"] * 3 > reached["workers"]
    assert reached["whole"] * 3 > reached["workers"]


FORMS = {
    "rows with gaps": (tensor((5, 3), (7, 1)), [(0, 0, 0, 0, ((5, 3, 7), (3, 1, 1)))]),
    "turned, with gaps": (tensor((3, 5), (1, 4), F32), [(0, 0, 0, 0, ((3, 5, 1), (5, 1, 4)))]),
    "two copies side by side": (
        tensor((9, 4), (4, 1)),
        [(0, 0, 0, 0, ((20, 1, 1),)), (1, 0, 3, 20, ((4, 4, 4), (4, 1, 1)))],
    ),
    "part of it": (
        tensor((30,), (1,), U8),
        [(0, 0, 0, 1, ((7, 1, 1),)), (0, 0, 9, 8, ((3, 1, 1),)), (0, 0, 20, 29, ((1, 1, 1),))],
    ),
    "one row many times, as long as what it spans": (
        tensor((2, 3), (5, 0)),
        [(0, 0, 0, 0, ((2, 1, 5), (3, 0, 0)))],
    ),
    "interlaced rows": (tensor((3, 2), (2, 3)), [(0, 0, 0, 0, ((3, 2, 2), (2, 1, 3)))]),
    "backwards, with a gap at the end": (tensor((12,), (1,)), [(0, 0, 0, 10, ((11, 1, -1),))]),
    "no element": (tensor((0, 4), (4, 1)), []),
    "nothing of it named": (tensor((6,), (1,)), []),
    "one number": (tensor((), (), F32), [(0, 0, 0, 0, ())]),
    "more axes than a descriptor has": (
        tensor((2,) * 8, tuple(3**k for k in range(8, 0, -1)), U8),
        [(0, 0, 0, 0, tuple((2, 2**k, 3 ** (k + 1)) for k in range(7, -1, -1)))],
    ),
}


@pytest.mark.parametrize("name", ["native", "reference"])
@pytest.mark.parametrize("form", list(FORMS))
def test_forms_of_a_tensor(form: str, name: str) -> None:
    live, rows = FORMS[form]
    other = tensor((3,), (1,), F32, "other")  # so that buffers before and behind it are there
    rows = [(t, 1, s, at, axes) for t, _, s, at, axes in rows]
    ends = [(0, i, 0, 0, ((3, 1, 1),)) for i in (0, 2)]
    source_map = map_of((other, live, other), [*ends, *rows])
    elements = named_by(source_map)
    numel = sum(int(e.sum()) * t.dtype.itemsize for e, t in zip(elements, source_map.live, strict=True))
    copy, memory = HostCopy(source_map, choose_kernels(name)), Memory.apart(source_map.live, 3)
    if form.startswith("one row many times"):  # each of its elements is copied three times
        before = memory.bytes.copy()
        assert copy.capture(memory.buffers) == numel + 2 * 2 * BF16.itemsize
        memory.bytes ^= 0xFF
        copy.install(memory.buffers)
        np.testing.assert_array_equal(memory.bytes, np.where(memory.mask_of(elements), before, before ^ 0xFF))
        return
    check(copy, memory, elements)


def test_tensors_that_share_memory_are_written_by_their_named_elements_only() -> None:
    """A whole tensor, a view of its middle, and a tensor beside it of which only what lies outside the others is named."""
    live = (tensor((40,), (1,)), tensor((6, 4), (4, 1)), tensor((50,), (1,)))
    rows = [(0, 0, 0, 0, ((40, 1, 1),)), (0, 1, 16, 0, ((24, 1, 1),)), (1, 2, 0, 40, ((10, 1, 1),))]
    memory = Memory(live, [10, 10 + 2 * 16, 10])
    copy = HostCopy(map_of(live, rows), choose_kernels(None))
    whole, part, beside = held(copy.buffers)
    values = np.arange(100, dtype=np.uint8)
    whole[:], part[:] = values[:80], values[32:80]
    beside[:80], beside[80:] = 0xEE, values[80:]  # stale where the map names nothing of it
    before = memory.bytes.copy()
    copy.install(memory.buffers)
    np.testing.assert_array_equal(memory.bytes[10:110], values)
    np.testing.assert_array_equal(memory.bytes[:10], before[:10])
    np.testing.assert_array_equal(memory.bytes[110:], before[110:])


@pytest.mark.parametrize("case", [house, twins])
def test_a_program_reads_and_writes_within_what_the_map_names(case) -> None:
    """What all programs of a job touch: engines every element of their maps, the trainers each tensor once between them."""
    job, _, programs = case()
    sent = 0
    for worker, (program, source_map) in enumerate(zip(programs, job.maps, strict=True)):
        copy = HostCopy.for_program(program, source_map.live, choose_kernels(None))
        named, memory = named_by(source_map), Memory.apart(source_map.live, worker)
        if job.topology.workers[worker].role is Role.ROLLOUT:
            check(copy, memory, named)
            continue
        elements = [np.zeros(len(e), dtype=bool) for e in named]
        for pack in (r.pack for r in program.rounds):
            for one in pack:
                itemsize = source_map.live[one["src_buffer"]].dtype.itemsize
                for index in product(*map(range, one["count"].tolist())):
                    at = int(one["src_offset"] + np.dot(index, one["src_stride"]))
                    elements[one["src_buffer"]][at // itemsize] = True
        assert all((e <= n).all() for e, n in zip(elements, named, strict=True))
        check(copy, memory, elements)
        sent += sum(int(e.sum()) for e in elements)
    assert sent == sum(t.numel for t in job.spec.tensors)


def test_a_program_that_casts_and_one_that_sends_rows_twice() -> None:
    live = (tensor((8,), (1,)), tensor((4, 3), (5, 1), F32), tensor((9,), (1,), F32))
    narrowed = row([5], [4], [2], dst_offset=4, op=Op.F32_TO_BF16, itemsize=4)
    widened = row([4, 3], [6, 2], [20, 4], op=Op.BF16_TO_F32, dst_buffer=1)
    cast = Round(assemble=Assemble(sources=((0, "send"),), table=np.concatenate([narrowed, widened])))
    elements = [np.zeros(t.span_numel, dtype=bool) for t in live]
    elements[0][2:7] = True
    elements[1][[5 * i + j for i in range(4) for j in range(3)]] = True
    check(HostCopy.for_program(program_of(cast), live, choose_kernels(None)), Memory.apart(live), elements)

    half = row([4], [2], [2], src_offset=2)
    elements = [np.zeros(t.span_numel, dtype=bool) for t in live]
    elements[0][1:5] = True
    twice = program_of(Round(pack=half), Round(pack=half))
    check(HostCopy.for_program(twice, live, choose_kernels(None)), Memory.apart(live), elements)


def test_a_program_that_moves_nothing_takes_nothing() -> None:
    live = (tensor((4,), (1,), F32), tensor((9,), (1,), F32))
    for program in (program_of(Round()), program_of()):
        copy = HostCopy.for_program(program, live, choose_kernels(None))
        assert [b.nbytes for b in copy.buffers] == [0, 0]
        check(copy, Memory.apart(live), [np.zeros(4, dtype=bool), np.zeros(9, dtype=bool)])


def program_of(*rounds: Round) -> WorkerProgram:
    return WorkerProgram(worker=0, plan_digest="", slots=(), rounds=rounds)


def test_tables_are_bound_once_and_again_when_memory_moves() -> None:
    live = tuple(tensor((n, 3), (4, 1), F32, f"t{n}") for n in (2, 5, 7))
    source_map = map_of(live, [(i, i, 0, 0, ((t.shape[0], 3, 4), (3, 1, 1))) for i, t in enumerate(live)])
    kernels, elements = CountingKernels(), named_by(source_map)
    copy, here, there = HostCopy(source_map, kernels), Memory.apart(live, 1), Memory.apart(live, 2)
    for _ in range(3):
        check(copy, here, elements)
    here.buffers = tuple(Buffer(*b) for b in here.buffers)  # equal, not the same
    check(copy, here, elements)
    assert kernels.prepared == [3, 3]  # one row for each tensor, one table for each direction
    check(copy, there, elements)
    assert kernels.prepared == [3] * 4
    before = here.bytes.copy()
    copy.install(there.buffers)
    assert (here.bytes == before).all()


def test_a_copy_of_another_model_is_refused() -> None:
    live = (tensor((8,), (1,), F32),)
    copy = HostCopy(map_of(live, [(0, 0, 0, 0, ((8, 1, 1),))]), choose_kernels(None))
    memory = Memory.apart(live)
    before = memory.bytes.copy()
    with pytest.raises(UsageError, match="ends at byte 32, but buffer 0 has 28"):
        copy.install((Buffer(memory.buffers[0].address, 28),))
    with pytest.raises(UsageError, match="only 0 are bound"):
        copy.capture(())
    assert (memory.bytes == before).all()
    check(copy, memory, [np.ones(8, dtype=bool)])


def test_fifty_thousand_tiny_tensors_are_one_table_and_little_memory() -> None:
    shapes = [((2, 3), (4, 1)), ((5,), (1,)), ((1, 1), (9, 9))]
    live = tuple(tensor(*shapes[i % 3], F32 if i % 5 else BF16, f"t{i}") for i in range(50_000))
    rows = [(i, i, 0, 0, ((2, 3, 4), (3, 1, 1)) if i % 3 == 0 else ((t.numel, 1, 1),)) for i, t in enumerate(live)]
    copy = HostCopy(map_of(live, rows), choose_kernels(None))
    assert copy.nbytes == 50_000 * 64
    memory = Memory.apart(live, 5)
    before = memory.bytes.copy()
    two_rows = np.array([True] * 3 + [False] + [True] * 3)
    marked = memory.mask_of([two_rows if i % 3 == 0 else np.ones(t.numel, dtype=bool) for i, t in enumerate(live)])
    assert copy.capture(memory.buffers) == marked.sum()
    memory.bytes ^= 0xFF
    assert copy.install(memory.buffers) == marked.sum()
    np.testing.assert_array_equal(memory.bytes, np.where(marked, before, before ^ 0xFF))


def test_rows_that_lie_end_to_end_are_one() -> None:
    live = (tensor((100,), (1,)),)
    rows = [(0, 0, 10 * k, 10 * k, ((10, 1, 1),)) for k in (3, 1, 0, 2, 5, 8, 7)]
    kernels = CountingKernels()
    copy, memory = HostCopy(map_of(live, rows), kernels), Memory.apart(live)
    check(copy, memory, named_by(map_of(live, rows)))
    assert kernels.prepared == [3, 3]  # 0 to 40, 50 to 60, 70 to 90


def test_memory_goes_with_the_copy_and_takes_no_descriptor() -> None:
    def mapped() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")

    live = (tensor((32 << 20,), (1,), U8),)
    source_map = map_of(live, [(0, 0, 0, 0, ((32 << 20, 1, 1),))])
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    copy = HostCopy(source_map, choose_kernels(None))
    assert copy.nbytes == 32 << 20
    assert mapped() - before >= 32 << 20
    assert len(os.listdir("/proc/self/fd")) == files
    region = region_of(copy.buffers[0].address)
    assert int(region["Rss"].split()[0]) >= 32 << 10  # KiB: every page is there already
    assert "dc" in region["VmFlags"].split()  # a forked child goes without
    copy.close()
    copy.close()
    assert copy.nbytes == 0
    with pytest.raises(UsageError, match="cannot install: the host copy is closed"):
        copy.install(Memory.apart(live).buffers)
    again = HostCopy(source_map, choose_kernels(None))
    del again, copy
    gc.collect()
    assert mapped() - before < 32 << 20


def region_of(address: int) -> dict[str, str]:
    """What the kernel says of the mapping that this address lies in."""
    found: dict[str, str] = {}
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if bounds and found:
                break
            inside = bounds is not None and int(bounds[1], 16) <= address < int(bounds[2], 16)
            if inside or found:
                name, _, value = line.partition(":")
                found[name] = value
    return found


def test_memory_that_cannot_be_had_is_refused() -> None:
    live = (tensor((1 << 50,), (1,), F32),)
    with pytest.raises(RegistrationError, match="bytes of host memory for a copy of the weights"):
        HostCopy(map_of(live, [(0, 0, 0, 0, ((1 << 50, 1, 1),))]), choose_kernels(None))
