"""Plan: who sends which bytes to whom, through which stages, in how many rounds. Data only.

The planner makes it (`plan/planner.py`), `plan/verify.py` checks it, each worker lowers its own program from it.

The unit of routing is the *replica class*: all checkpoint elements with the same holders and the same needers. Its
*stream* is its atoms laid end to end: offsets into it are bytes in checkpoint dtypes, and an atom's own elements are
row-major in checkpoint coordinates. Workers are integers, positions in `Topology.workers`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from weightbridge.plan.topology import Topology

__all__ = ["HOP", "ROUTE", "STAGES", "AtomTable", "Bounds", "Plan", "ReplicaClass", "with_rounds"]

STAGES: tuple[str, ...] = ("receive", "exchange", "relay")
"""Stages that move bytes into a slot of their own, in order: trainer -> first worker, first worker -> its counterparts on
other nodes, gateway of another group of nodes -> its counterparts there (used only where the topology has groups; a slot
that nothing comes into has no bytes). The last stage of the paper, inside the node, moves nothing: assembling reads the
neighbour's slots."""

ROUTE = np.dtype([(name, "<i8") for name in ("class_id", "lo", "hi", "sender", "entry", "pace", "phase")])
"""Bytes [lo, hi) of a class stream go from worker `sender` (a trainer) to worker `entry` (a rollout) in stage 0.

pace, phase: in which rounds, see `Plan.cuts`."""

HOP = np.dtype([("route", "<i8"), ("stage", "<i8"), ("src", "<i8"), ("dst", "<i8")])
"""A further copy of a whole route: from worker `src`, which has it from an earlier stage, to `dst`, in `STAGES[stage]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaClass:
    """holders, needers: sorted worker ids. nbytes: length of the class stream."""

    holders: tuple[int, ...]
    needers: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class AtomTable:
    """Disjoint strided boxes in global checkpoint coordinates that tile all needed elements.

    tensor: [n] position in CheckpointSpec.tensors. start, step, count: [n, D] per dim of that tensor (trailing unused
    dims: start 0, step 1, count 1; a scalar has none used). class_id: [n]. stream_offset: [n] bytes in the class stream.
    Rows are sorted by (class_id, stream_offset). On an atom every holder's and every needer's map is affine.
    """

    tensor: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    step: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    class_id: npt.NDArray[np.int64]
    stream_offset: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds on one update, in seconds, on the topology's bandwidths.

    t_min: the paper's, max(M / B_T, max_v M_v / B_v). link_bound: optimum of the routing LP, no plan of this kind beats
    it. busiest_link: what this plan's busiest link takes. dual: the LP's dual solution, the certificate of `link_bound`
    (one multiplier per row, in the order `plan/bound.py` documents).
    """

    t_min_seconds: float
    link_bound_seconds: float
    busiest_link_seconds: float
    dual: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One routing plan for one set of workers.

    epoch: grows with every replanning. rounds: K; each route is cut into at most K nearly equal parts (`part`).
    alignment: bytes; every cut of a stream is at a multiple of it (or at the stream's end) and never inside an element.
    unit_bytes: a multiple of `alignment`; rounds deal a route out in units of it, so that what is small is not cut into
    crumbs. slot_bytes: capacity of one slot of one stage on one worker never exceeds it.
    """

    epoch: int
    spec_digest: str
    topology: Topology
    atoms: AtomTable
    classes: tuple[ReplicaClass, ...]
    routes: npt.NDArray[np.void]
    hops: npt.NDArray[np.void]
    rounds: int
    alignment: int
    unit_bytes: int
    slot_bytes: int
    bounds: Bounds

    def part(self, route: int, round_: int) -> tuple[int, int]:
        """Bytes [lo, hi) of the class stream that `route` carries in round `round_`; may be empty."""
        cuts = self.cuts(range(round_, round_ + 2), routes=slice(route, route + 1))
        return int(cuts[0, 0]), int(cuts[1, 0])

    def cuts(self, rounds: range, *, routes: slice = slice(None)) -> npt.NDArray[np.int64]:
        """[len(rounds), num_routes] stream offsets at which each of `routes` enters round k: part k is cuts k to k + 1.

        A route is counted in units of `unit_bytes` (the last may be short). Before round k come
        floor((pace * k + phase) / rounds) of them, at least 0 and at most all. So its units are dealt to the rounds as evenly
        as whole units allow, `pace` of them in `rounds` rounds, and the phase says which rounds get one more. A route with
        a pace of its own number of units lasts from the first round to the last. Short routes that go the same way can
        share a higher pace and follow each other, each with the phase that makes it begin where the one before ends.
        """
        part = self.routes[routes]
        lo, hi = part["lo"], part["hi"]
        k = np.clip(np.asarray(rounds, dtype=np.int64), 0, self.rounds)[:, None]
        units = np.maximum((part["pace"] * k + part["phase"]) // self.rounds, 0)
        found: npt.NDArray[np.int64] = np.minimum(lo + units * self.unit_bytes, hi)
        return found

    @cached_property
    def digest(self) -> str:
        """Hex digest; all workers of a session must agree on it before the first byte moves."""
        h = hashlib.blake2b(digest_size=16)
        sizes = (self.rounds, self.alignment, self.unit_bytes, self.slot_bytes)
        h.update(repr((self.epoch, self.spec_digest, self.topology, self.classes, sizes)).encode())
        a = self.atoms
        for column in (a.tensor, a.start, a.step, a.count, a.class_id, a.stream_offset, self.routes, self.hops):
            h.update(np.ascontiguousarray(column).tobytes())
        return h.hexdigest()


def with_rounds(plan: Plan, rounds: int, *, unit_bytes: int | None = None) -> Plan:
    """The same routes cut into another number of rounds, in other units: all last to the end, and all phases are 0."""
    routes, unit = plan.routes.copy(), unit_bytes or plan.unit_bytes
    routes["pace"], routes["phase"] = -(-(routes["hi"] - routes["lo"]) // unit), 0
    return replace(plan, routes=routes, rounds=rounds, unit_bytes=unit)
