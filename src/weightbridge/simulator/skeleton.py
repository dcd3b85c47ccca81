"""What is left of a program when only the numbers of bytes matter: small enough to hold those of a whole job at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from weightbridge.program.program import DESCRIPTOR, SEGMENT, Assemble, Await, Post, Round, WorkerProgram

__all__ = ["Skeleton", "skeleton_of"]

Int64Array = npt.NDArray[np.int64]

_ROW = np.zeros(1, dtype=DESCRIPTOR)
_NO_ROWS = np.zeros(0, dtype=DESCRIPTOR)
_NO_SEGMENTS = np.zeros(0, dtype=SEGMENT)


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A program whose tables have one row or none, and the bytes that they had.

    program: runs on a TransferMachine just as the original does. pack_bytes, assemble_bytes: [rounds] source bytes of the
    kernels. post_bytes: of every post, round after round, those of round k from post_first[k] ([rounds + 1]) on.
    read_bytes: of what assembly reads from each of `Round.reads`, those of round k from read_first[k] on.
    await_bytes: [rounds] bytes that arrive.
    """

    program: WorkerProgram
    pack_bytes: Int64Array
    assemble_bytes: Int64Array
    await_bytes: Int64Array
    post_bytes: Int64Array
    post_first: Int64Array
    read_bytes: Int64Array
    read_first: Int64Array

    def first_rounds(self, num_rounds: int) -> Skeleton:
        """The same worker, for a plan that ends after that many rounds."""
        return replace(self, program=replace(self.program, rounds=self.program.rounds[:num_rounds]))


def skeleton_of(program: WorkerProgram) -> Skeleton:
    """The skeleton of a worker's program; keeps nothing of the program's arrays alive."""
    post_bytes, read_bytes = [], []
    rounds: dict[tuple[object, ...], Round] = {}  # rounds that differ in bytes only are one object
    posts: dict[tuple[object, ...], Post] = {}
    awaits: dict[tuple[str, int], Await] = {}
    bare = []
    kernels = np.zeros((3, len(program.rounds)), dtype=np.int64)
    for k, r in enumerate(program.rounds):
        post_bytes.append([p.nbytes for p in r.posts])
        by_worker = _bytes_by_source(r.assemble)
        read_bytes.append([by_worker.get(n, 0) for n in r.reads])
        kernels[:, k] = (
            _source_bytes(r.pack).sum(),
            sum(by_worker.values()),
            sum(int(a.segments["capacity_bytes"].sum()) for a in r.awaits),
        )
        post_keys = tuple((p.stage, p.source, p.peer, p.after) for p in r.posts)
        await_keys = tuple((a.stage, a.peer) for a in r.awaits)
        key = (post_keys, await_keys, r.reads, r.readers, len(r.pack) > 0, len(r.assemble.table) > 0)
        if key not in rounds:
            for stage, source, peer, after in post_keys:
                bare_post = Post(stage=stage, source=source, peer=peer, after=after, segments=_NO_SEGMENTS)
                posts.setdefault((stage, source, peer, after), bare_post)
            for stage, peer in await_keys:
                awaits.setdefault((stage, peer), Await(stage=stage, peer=peer, segments=_NO_SEGMENTS))
            rounds[key] = Round(
                pack=_ROW if len(r.pack) else _NO_ROWS,
                posts=tuple(posts[p] for p in post_keys),
                awaits=tuple(awaits[a] for a in await_keys),
                assemble=Assemble(sources=(), table=_ROW if len(r.assemble.table) else _NO_ROWS),
                reads=r.reads,
                readers=r.readers,
            )
        bare.append(rounds[key])
    return Skeleton(
        program=replace(program, rounds=tuple(bare)),
        pack_bytes=kernels[0], assemble_bytes=kernels[1], await_bytes=kernels[2],
        post_bytes=_flat(post_bytes), post_first=_first(post_bytes),
        read_bytes=_flat(read_bytes), read_first=_first(read_bytes),
    )  # fmt: skip


def _source_bytes(table: npt.NDArray[np.void]) -> Int64Array:
    """[n] bytes that each descriptor reads."""
    found: Int64Array = table["count"].prod(axis=1) * table["itemsize"]
    return found


def _bytes_by_source(assemble: Assemble) -> dict[int, int]:
    """Worker -> bytes that the assembly reads from its slots."""
    per_buffer = np.zeros(len(assemble.sources), dtype=np.int64)
    np.add.at(per_buffer, assemble.table["src_buffer"], _source_bytes(assemble.table))
    found: dict[int, int] = {}
    for (worker, _), nbytes in zip(assemble.sources, per_buffer.tolist(), strict=True):
        found[worker] = found.get(worker, 0) + nbytes
    return found


def _flat(lists: list[list[int]]) -> Int64Array:
    return np.array([n for part in lists for n in part], dtype=np.int64)


def _first(lists: list[list[int]]) -> Int64Array:
    return np.concatenate([[0], np.cumsum([len(part) for part in lists])]).astype(np.int64)
