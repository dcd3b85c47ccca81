"""The usual method "broadcast": trainers gather to one head, which broadcasts every tensor to every rollout worker.

torch.distributed with gloo, in buckets of whole tensors, several in flight at once; the gathering of the next buckets goes on
meanwhile. The broadcast has two levels, so that it is not a matter of luck which worker of a node hears from where: the head
and the first worker of every rollout node, then each of these and its neighbour. Between nodes gloo's tree sends more than
one copy from the head as soon as there are two engines.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.cluster.model import Rectangle
from benchmarks.cluster.shards import Copies, aligned, given_rectangles, matrix, tensor_buckets
from benchmarks.cluster.worker import Context

__all__ = ["BUCKET_BYTES", "Broadcast"]

BUCKET_BYTES = 8 << 20
_IN_FLIGHT = 3


class Broadcast:
    """Process groups that stay, buffers and copies that are prepared."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._spec = context.case.spec
        self._buckets = tensor_buckets(self._spec, BUCKET_BYTES)
        workers = context.case.topology.workers
        self._leaders = [context.case.topology.trainers[0]]
        self._pairs: list[list[int]] = []
        for node in context.case.topology.nodes[context.case.key.trainer_nodes :]:
            members = list(context.case.topology.on_node(node))
            self._leaders.append(members[0])
            self._pairs.append(members)
        self._is_head = context.me == self._leaders[0]
        self._rollout = workers[context.me].engine != ""

    def connect(self) -> dict[str, Any]:
        """Every process makes all groups, in one order; a first broadcast in each makes the connections."""
        context = self._context
        begin = time.monotonic()
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if context.shaped else "lo"
        dist.init_process_group(
            "gloo", init_method=f"tcp://{context.hosts[0]}:{context.port}", rank=context.me,
            world_size=len(context.case.topology.workers), timeout=timedelta(seconds=context.seconds),
        )  # fmt: skip
        leaders = dist.new_group(self._leaders)
        pairs = [dist.new_group(members) for members in self._pairs]
        self._leader_group = leaders if context.me in self._leaders else None
        self._pair_group, self._pair = None, [context.me]
        for group, members in zip(pairs, self._pairs, strict=True):
            if context.me in members:
                self._pair_group, self._pair = group, members
        self._prepare()
        dist.barrier()
        return {"connect_seconds": time.monotonic() - begin}

    def _prepare(self) -> None:
        sizes = [sum(aligned(self._spec.tensors[i].nbytes) for i in bucket) for bucket in self._buckets]
        self._sizes = sizes
        depth = _IN_FLIGHT if max(sizes) <= 8 * BUCKET_BYTES else 1
        self._depth = depth
        self._buffers = [np.zeros(max(sizes), dtype=np.uint8) for _ in range(depth)] if self._takes_buckets else []
        given = given_rectangles(self._context.case)
        by_bucket = {i: k for k, bucket in enumerate(self._buckets) for i in bucket}
        self._gives: dict[int, list[list[Rectangle]]] = {}
        for trainer, parts in given.items():
            of_bucket: list[list[Rectangle]] = [[] for _ in self._buckets]
            for r in parts:
                of_bucket[by_bucket[r.tensor]].append(r)
            self._gives[trainer] = of_bucket
        self._views = (
            [matrix(self._spec, self._buffers[k % depth], b) for k, b in enumerate(self._buckets)]
            if self._buffers
            else []
        )
        if self._is_head:
            others = [t for t in given if t != self._context.me]
            self._parts = {
                t: [np.zeros(max(map(self._packed, self._gives[t])) + 1, np.uint8) for _ in range(depth)]
                for t in others
            }
        elif not self._rollout:
            mine = self._gives[self._context.me]
            most = max(map(self._packed, mine)) + 1
            self._part = [np.zeros(most, np.uint8) for _ in range(depth)]
            self._packs = [Copies(self._context.model, self._part[k % depth], parts) for k, parts in enumerate(mine)]

    @property
    def _takes_buckets(self) -> bool:
        return self._is_head or self._rollout

    def _packed(self, parts: list[Rectangle]) -> int:
        return sum(aligned(r.numel * self._spec.tensors[r.tensor].dtype.itemsize) for r in parts)

    def go(self, version: int) -> None:
        begin = time.monotonic()
        if self._is_head:
            self._run_head()
        elif not self._rollout:
            self._run_giver()
        else:
            self._run_taker()
        self._context.done(version, begin, time.monotonic())

    def _run_giver(self) -> None:
        """A trainer that is not the head: pack and send, bucket by bucket."""
        works: list[Any] = []
        for k, copies in enumerate(self._packs):
            if k >= self._depth and works[k - self._depth] is not None:
                works[k - self._depth].wait()
            copies.pack()
            part = torch.from_numpy(self._part[k % self._depth][: copies.nbytes])
            works.append(dist.isend(part, self._leaders[0], tag=k) if copies.nbytes else None)
        for work in works[-self._depth :]:
            if work is not None:
                work.wait()

    def _run_head(self) -> None:
        depth, num = self._depth, len(self._buckets)
        coming: dict[tuple[int, int], Any] = {}

        def expect(k: int) -> None:
            for t, buffers in self._parts.items():
                nbytes = self._packed(self._gives[t][k])
                if nbytes:
                    coming[t, k] = dist.irecv(torch.from_numpy(buffers[k % depth][:nbytes]), t, tag=k)

        for k in range(min(depth, num)):
            expect(k)
        works: list[Any] = []
        for k in range(num):
            if k >= depth:
                works[k - depth].wait()
            place, model = self._views[k], self._context.model
            for r in self._gives[self._context.me][k]:
                np.copyto(place(r), model.bits(r))
            for t, buffers in self._parts.items():
                if (t, k) in coming:
                    coming.pop((t, k)).wait()
                    self._unpack_part(buffers[k % depth], self._gives[t][k], k)
            if k + depth < num:
                expect(k + depth)
            works.append(dist.broadcast(self._tensor(k), self._leaders[0], group=self._leader_group, async_op=True))
        for work in works[-depth:]:
            work.wait()

    def _unpack_part(self, buffer: np.ndarray[Any, Any], parts: list[Rectangle], k: int) -> None:
        at = 0
        for r in parts:
            target = self._views[k](r)
            np.copyto(target, buffer[at : at + target.nbytes].view(target.dtype).reshape(target.shape))
            at += aligned(target.nbytes)

    def _run_taker(self) -> None:
        """The first worker of a node hears from the head and passes on; all load as buckets come in."""
        leads = self._leader_group is not None
        source, group = (self._leaders[0], self._leader_group) if leads else (self._pair[0], self._pair_group)
        num, depth = len(self._buckets), self._depth
        works = [dist.broadcast(self._tensor(k), source, group=group, async_op=True) for k in range(min(depth, num))]
        for k in range(num):
            works[k].wait()
            passed = None
            if leads and len(self._pair) > 1:
                passed = dist.broadcast(self._tensor(k), self._context.me, group=self._pair_group, async_op=True)
            self._load(k)
            if passed is not None:
                passed.wait()
            if k + depth < num:
                works.append(dist.broadcast(self._tensor(k + depth), source, group=group, async_op=True))

    def _tensor(self, k: int) -> torch.Tensor:
        return torch.from_numpy(self._buffers[k % self._depth][: self._sizes[k]])

    def _load(self, k: int) -> None:
        """Hand whole tensors to the engine's loader."""
        buffer = torch.from_numpy(self._buffers[k % self._depth])
        at, named = 0, []
        for i in self._buckets[k]:
            t = self._spec.tensors[i]
            named.append((t.name, buffer[at : at + t.nbytes].view(getattr(torch, t.dtype.torch_name)).view(t.shape)))
            at += aligned(t.nbytes)
        self._context.model.load_weights(named)

    def idle(self) -> None:
        pass

    def close(self) -> None:
        dist.destroy_process_group()
