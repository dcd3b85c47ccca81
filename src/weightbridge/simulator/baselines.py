"""The usual ways to bring weights over, on the same cluster, over the same flow model, each at its best.

broadcast: the trainers gather to the first of them, which sends everything down a ring through all rollout workers; each
keeps what it needs. p2p: one engine after the other, every rollout worker is written by one trainer, which first gathers
from the others what it does not hold. pull: every rollout worker reads each piece it needs from one trainer that holds it.

"At its best": whatever can overlap does (gathering with sending, kernels and posts with bytes on their way), buckets are
pipelined without a gap, and concurrent flows share links max-min fairly. What remains is what the method's traffic pattern
costs. A real implementation is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weightbridge.errors import UsageError
from weightbridge.plan import Plan
from weightbridge.simulator.costs import Costs
from weightbridge.simulator.flows import DEFAULT_WINDOW_SECONDS, EventLoop, FlowModel
from weightbridge.simulator.links import Links
from weightbridge.simulator.result import MethodResult

__all__ = ["BASELINES", "baseline"]

BASELINES: tuple[str, ...] = ("broadcast", "p2p", "pull")

BUCKET_BYTES = 256 << 20
"""What a method handles at a time: gathered before it can be sent, received before it can be unpacked."""

_RING_CHUNK_BYTES = 4 << 20  # what a worker of the ring has received before it begins to pass it on
_WINDOW_SHARE = 1e-5  # of the update's length: ends of flows so close together count as one


def baseline(name: str, plan: Plan, costs: Costs, *, bucket_bytes: int = BUCKET_BYTES) -> MethodResult:
    """One update of the job that `plan` was made for, by one of BASELINES. Only its classes and its topology count.

    bucket_bytes: what the method handles at a time. Raises UsageError for a name that is not known.
    """
    methods: dict[str, Callable[[_Job], MethodResult]] = {"broadcast": _broadcast, "p2p": _p2p, "pull": _pull}
    if name not in methods:
        raise UsageError(f"method {name!r} is not known; known are {', '.join(BASELINES)}")
    links = Links(topology=plan.topology, costs=costs)
    return methods[name](_Job(plan=plan, costs=costs, links=links, bucket_bytes=bucket_bytes))


Pairs = Mapping[tuple[int, int], float]
"""(from, to) worker positions -> bytes."""


@dataclass(kw_only=True)
class _Job:
    plan: Plan
    costs: Costs
    links: Links
    bucket_bytes: int
    nbytes: npt.NDArray[np.float64] = field(init=False)
    messages: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        atoms = self.plan.atoms
        self.nbytes = np.zeros(len(self.links))
        distinct = np.unique(np.stack([atoms.class_id, atoms.tensor]), axis=1)
        self.messages = np.bincount(distinct[0], minlength=len(self.plan.classes))  # tensors with a piece in each class

    def source_of(self, class_id: int, near: int | None = None) -> int:
        """The one trainer that a class is taken from: `near` if it holds it, else a holder on its node, else the first."""
        holders, workers = self.plan.classes[class_id].holders, self.plan.topology.workers
        if near is None:
            return holders[0]
        if near in holders:
            return near
        return next((h for h in holders if workers[h].node == workers[near].node), holders[0])

    def run(self, pairs: Pairs) -> float:
        """Seconds until all bytes are over, when every pair starts at once; counts the bytes of each link."""
        flows = FlowModel(self.links.bandwidth)
        paths = {pair: self.links.path(*pair) for pair in pairs}
        least = np.zeros(len(self.links))
        for pair, nbytes in pairs.items():
            least[list(paths[pair])] += nbytes
        seconds = float((least / flows.bandwidth).max(initial=0.0))
        loop = EventLoop(flows, window_seconds=max(DEFAULT_WINDOW_SECONDS, seconds * _WINDOW_SHARE))
        ends = [0.0]
        for pair, nbytes in pairs.items():
            loop.send(paths[pair], nbytes, lambda: ends.append(loop.now))
        loop.run()
        self.nbytes += flows.nbytes
        return max(ends) + self.costs.latency_seconds

    def bucket_seconds(self, nbytes: float) -> float:
        """A kernel over the last bucket, which no transfer hides."""
        return self.costs.launch_seconds + min(nbytes, self.bucket_bytes) / self.costs.memory_bandwidth

    def result(
        self, name: str, *, stalls: npt.NDArray[np.float64], communication: float, posts: float, conversion: float,
        note: str,
    ) -> MethodResult:  # fmt: skip
        """posts: seconds of CPU of the busiest sender, hidden behind `communication` as far as it goes."""
        hidden = max(0.0, posts - communication)
        ewtt = self.costs.agreement_seconds + communication + hidden + conversion
        return MethodResult(
            name=name, ewtt_seconds=ewtt, agst_seconds=float(np.minimum(stalls, ewtt).mean()),
            control_seconds=self.costs.agreement_seconds + hidden, conversion_seconds=conversion,
            communication_seconds=communication, links=self.links.use(np.rint(self.nbytes).astype(np.int64)), note=note,
        )  # fmt: skip

    def needs(self, worker: int) -> list[int]:
        """Classes that a rollout worker needs."""
        return [c for c, replica in enumerate(self.plan.classes) if worker in replica.needers]


def _broadcast(job: _Job) -> MethodResult:
    """The head's one link takes the model in and, while it does, gives it out again; the ring visits node after node."""
    plan, costs = job.plan, job.costs
    head = plan.topology.trainers[0]
    total = float(sum(c.nbytes for c in plan.classes))
    pairs: dict[tuple[int, int], float] = {}
    for c, replica in enumerate(plan.classes):
        _count(pairs, job.source_of(c, head), head, replica.nbytes)
    ring = [head, *(w for node in plan.topology.nodes for w in plan.topology.rollouts if _is_on(plan, w, node))]
    for here, there in pairwise(ring):
        _count(pairs, here, there, total)
    slowest = min(job.links.bandwidth[link] for pair in pairs for link in job.links.path(*pair))
    fill = min(total, job.bucket_bytes) / slowest  # the first bucket is gathered before it is sent
    fill += (len(ring) - 2) * (min(total, _RING_CHUNK_BYTES) / slowest + costs.latency_seconds)
    communication = job.run(pairs) + fill
    buckets = -(-total // job.bucket_bytes)
    return job.result(
        "broadcast", communication=communication, posts=buckets * 2 * costs.python_seconds_per_round,
        conversion=2 * job.bucket_seconds(total), stalls=np.full(len(plan.topology.workers), np.inf),
        note="gathered to one trainer, one ring through all rollout workers, every step pipelined",
    )  # fmt: skip


def _p2p(job: _Job) -> MethodResult:
    """Engine after engine: rank i is written by trainer i (modulo their number)."""
    plan, costs = job.plan, job.costs
    trainers = plan.topology.trainers
    engines: dict[str, list[int]] = {}
    for w in plan.topology.rollouts:
        engines.setdefault(plan.topology.workers[w].engine, []).append(w)
    stalls = np.full(len(plan.topology.workers), np.inf)
    communication = posts = conversion = 0.0
    for members in engines.values():
        pairs: dict[tuple[int, int], float] = {}
        num_posts = dict.fromkeys(trainers, 0)
        most = 0.0
        for w in members:
            source = trainers[plan.topology.workers[w].rank % len(trainers)]
            needed = 0.0
            for c in job.needs(w):
                nbytes = float(plan.classes[c].nbytes)
                needed += nbytes
                holder = job.source_of(c, source)
                _count(pairs, holder, source, nbytes)
                num_posts[source] += int(job.messages[c])
                num_posts[holder] += int(job.messages[c]) * (holder != source)
            _count(pairs, source, w, needed)
            most = max(most, needed)
        slowest = min((job.links.bandwidth[link] for pair in pairs for link in job.links.path(*pair)), default=np.inf)
        took = job.run(pairs) + min(most, job.bucket_bytes) / slowest
        unpack = 2 * job.bucket_seconds(most)
        stalls[members] = costs.agreement_seconds + took + unpack
        communication, conversion = communication + took, conversion + unpack
        posts += max(num_posts.values()) * costs.post_seconds
    return job.result(
        "p2p", communication=communication, posts=posts, conversion=conversion, stalls=stalls,
        note="one source a rollout worker, which gathers what it lacks; one engine after the other, each parked for its turn",
    )  # fmt: skip


def _pull(job: _Job) -> MethodResult:
    """All engines at once; a piece that several workers need leaves the same trainer once for each of them."""
    plan = job.plan
    pairs: dict[tuple[int, int], float] = {}
    num_posts = dict.fromkeys(range(len(plan.topology.workers)), 0)
    for c, replica in enumerate(plan.classes):
        for w in replica.needers:
            _count(pairs, job.source_of(c), w, replica.nbytes)
            num_posts[w] += int(job.messages[c])
    most: dict[int, float] = {}
    for (_, w), nbytes in pairs.items():
        most[w] = most.get(w, 0.0) + nbytes
    return job.result(
        "pull", communication=job.run(pairs) + job.costs.latency_seconds,  # the request goes first
        posts=max(num_posts.values()) * job.costs.post_seconds, conversion=job.bucket_seconds(max(most.values())),
        stalls=np.full(len(plan.topology.workers), np.inf),
        note="every shard has one source and is read from it once for each worker that needs it",
    )  # fmt: skip


def _count(pairs: dict[tuple[int, int], float], source: int, target: int, nbytes: float) -> None:
    if source != target:
        pairs[source, target] = pairs.get((source, target), 0.0) + nbytes


def _is_on(plan: Plan, worker: int, node: str) -> bool:
    return plan.topology.workers[worker].node == node
