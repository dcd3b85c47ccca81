"""Is a slot ever written while somebody may still read it? Answered by happens-before, never by time.

The programs of all workers, replayed by the protocol of `machine/transfer.py`, define a partial order of steps. Two steps
that the order leaves open can meet in some run. So each read of a slot copy must come after the writes of its round
and before every later write of that copy, in the order itself. `check_order` asks that of each pair of steps, one bit a
pair: for small jobs. For jobs of any size it follows from conditions on one worker at a time, which `ProgramVerifier`
checks against the plan (names of checks in brackets):

 A  The awaits of w in round k are the writes of the plan into w, the posts of w are its writes out, segment by segment
    and in one order [check_transfers]. So each await has its post, and each post its await.
 B  A post takes its routes from the slot where they lie, an earlier stage than its own, and its `after` are exactly those
    who write these routes there in round k [check_transfers]; a trainer's is packed, and packed whole [check_contents].
 C  `reads` of w in round k are exactly the others whose slots its assembly draws on, and `readers` exactly the others on
    its node that need bytes that lie in its slots then; both are what the plan says, so that n reads w just where w has n
    among its readers [check_neighbours].
 D  All slots of a job have N copies, one order of posts and one codec; copies do not overlap and all that is written or
    read lies inside [check_slots, check_transfers, check_contents, verify_job].

*Never overwritten.* Let round k >= N be written into slot s of w, by a post of v, over what lies there of a round j = k - mN,
m >= 1. The post waits for the credit that w gives to the writers of its awaits of round k when it releases round k - N, and
by A the post is awaited. Releases come in the order of rounds, so that round j has been released. For that all awaits of j
had arrived (no write of j is under way), the own assembly of j was done, the own posts of j were done (their reads
of s with them), and all `readers` had assembled j: by C all neighbours whose assembly of j reads s. Nobody else reads s. For
a send slot pack k waits until all own posts up to round k - N are done, which are its only readers.
*Never read unfilled.* An assembly of round k starts when the own awaits of k have arrived and all of `reads` have said READY,
which they say to their `readers` when their own awaits have arrived: by A and C all writes of round k into all slots it
draws on. A post waits for pack k or, by B, for whoever brings its routes.
*No circle.* Order steps by round, within a round pack, posts by stage, ready, load, assembled, release. By B a post waits for
posts of earlier stages only; all other waits are for an earlier round or an earlier step of the same round as it stands.
By A and C whatever is waited for does come.

Neither order of posts changes this: oldest round first adds waits for an earlier round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from weightbridge.errors import InternalError
from weightbridge.program.program import OLDEST_ROUND_FIRST, WorkerProgram

__all__ = ["check_order"]

_Node = tuple[str, int, int, int]  # step, worker, round, index of the post or -1


def check_order(programs: Mapping[int, WorkerProgram], names: Mapping[int, str]) -> None:
    """Raises InternalError naming the slot, the round and the two workers of a conflict, or those in a circular wait.

    programs: worker -> program; posts and awaits already found to match. names: worker -> name, for messages.
    """
    order = _Order(programs=programs)
    order.build()
    before = order.closure(names)
    for worker in programs:
        for slot in programs[worker].slots:
            _check_slot(order, before, worker, slot.stage, slot.num_slots, names)


@dataclass(kw_only=True)
class _Order:
    """Steps and what each must wait for. writers: (worker, stage, round) -> (post node pairs start, done, post owner).

    A `pack` step stands for the write of a send slot. `load` is the begin of an assembly, `assembled` its end. `posted` is the
    end of all posts up to its round.
    """

    programs: Mapping[int, WorkerProgram]
    number: dict[_Node, int] = field(default_factory=dict)
    waits: list[list[int]] = field(default_factory=list)
    writes: dict[tuple[int, str, int], list[tuple[int, int, int]]] = field(default_factory=dict)
    reads: dict[tuple[int, str, int], list[tuple[int, int, int, int]]] = field(default_factory=dict)

    def node(self, step: str, worker: int, round_: int, index: int = -1) -> int:
        key = (step, worker, round_, index)
        if key not in self.number:
            self.number[key] = len(self.waits)
            self.waits.append([])
        return self.number[key]

    def build(self) -> None:
        for worker, program in self.programs.items():
            for k in range(len(program.rounds)):
                self._steps_of(worker, program, k)

    def _steps_of(self, worker: int, program: WorkerProgram, k: int) -> None:
        round_ = program.rounds[k]
        num_slots = program.slots[0].num_slots if program.slots else 1
        own = {s.stage for s in program.slots}
        pack, posted = self.node("pack", worker, k), self.node("posted", worker, k)
        ahead = (
            1 if program.post_order == OLDEST_ROUND_FIRST else num_slots
        )  # rounds that may be in the posting at once
        if k >= num_slots:
            self._after(pack, self.node("posted", worker, k - num_slots))
        if k:
            self._after(posted, self.node("posted", worker, k - 1))
        if len(round_.pack):
            self.writes.setdefault((worker, "send", k), []).append((pack, pack, worker))
        for i, post in enumerate(round_.posts):
            start, done = self.node("post", worker, k, i), self.node("done", worker, k, i)
            self._after(done, start)
            self._after(posted, done)
            if k >= ahead:
                self._after(start, self.node("posted", worker, k - ahead))
            if post.source in own and not post.after:
                self._after(start, pack)
            self._after(start, *(self._arrival(worker, stage, peer, k) for stage, peer in post.after))
            if k >= num_slots:
                self._after(start, self.node("release", post.peer, k - num_slots))
            self.writes.setdefault((post.peer, post.stage, k), []).append((start, done, worker))
            for route in post.segments["route"].tolist():
                self.reads.setdefault((worker, post.source, k), []).append((start, done, post.peer, route))
        ready, load = self.node("ready", worker, k), self.node("load", worker, k)
        assembled, release = self.node("assembled", worker, k), self.node("release", worker, k)
        self._after(ready, *(self._arrival(worker, a.stage, a.peer, k) for a in round_.awaits))
        if program.codec != "identity":  # decoding rewrites the slot, so forwards have left before
            self._after(ready, posted)
        self._after(load, ready, *(self.node("ready", peer, k) for peer in round_.reads))
        self._after(assembled, load)
        self._after(release, assembled, posted, *(self.node("assembled", r, k) for r in round_.readers))
        if k:
            self._after(load, self.node("assembled", worker, k - 1))
            self._after(release, self.node("release", worker, k - 1))
        for source, stage in round_.assemble.sources:
            self.reads.setdefault((source, stage, k), []).append((load, assembled, worker, -1))

    def _after(self, node: int, *others: int) -> None:
        self.waits[node].extend(others)

    def _arrival(self, worker: int, stage: str, peer: int, k: int) -> int:
        posts = self.programs[peer].rounds[k].posts if peer in self.programs else ()
        for i, post in enumerate(posts):
            if (post.stage, post.peer) == (stage, worker):
                return self.node("done", peer, k, i)
        raise InternalError(
            f"worker {worker} waits in round {k} for a write of worker {peer} into its slot {stage!r}, which there is not"
        )

    def closure(self, names: Mapping[int, str]) -> list[int]:
        """[num_nodes] bit set of the steps that come before each one."""
        followers: list[list[int]] = [[] for _ in self.waits]
        open_ = [len(w) for w in self.waits]
        for node, waits in enumerate(self.waits):
            for other in waits:
                followers[other].append(node)
        before = [0] * len(self.waits)
        queue = deque(n for n, count in enumerate(open_) if not count)
        num_done = 0
        while queue:
            node = queue.popleft()
            num_done += 1
            for other in self.waits[node]:
                before[node] |= before[other] | (1 << other)
            for follower in followers[node]:
                open_[follower] -= 1
                if not open_[follower]:
                    queue.append(follower)
        if num_done < len(self.waits):
            stuck = sorted(key for key, n in self.number.items() if open_[n])
            shown = ", ".join(f"{step} of round {k} at {names[w]}" for step, w, k, _ in stuck[:6])
            raise InternalError(f"the programs wait for each other in a circle: {shown}; the plan cannot run")
        return before


def _check_slot(
    order: _Order, before: list[int], worker: int, stage: str, num_slots: int, names: Mapping[int, str]
) -> None:
    """Both rules for one slot of one worker, copy by copy."""
    num_rounds = len(order.programs[worker].rounds)
    for copy in range(num_slots):
        used: list[tuple[int, int, str]] = []  # (last step, round, what it does) of all earlier rounds of this copy
        mask = 0
        for k in range(copy, num_rounds, num_slots):
            writes = order.writes.get((worker, stage, k), [])
            reads = order.reads.get((worker, stage, k), [])
            for start, _, writer in writes:
                if mask & ~before[start]:
                    end, round_, doing = next(u for u in used if not before[start] >> u[0] & 1)
                    raise InternalError(
                        f"slot {stage!r} of {names[worker]} is released while {doing} it: round {round_} may still be in use "
                        f"when {names[writer]} writes round {k} over it"
                    )
            _check_filled(order, before, (worker, stage, k), names)
            for _, end, writer in writes:
                used.append((end, k, f"{names[writer]} writes"))
            for _, end, reader, route in reads:
                who = f"neighbour {names[reader]} reads" if reader != worker else "its own assembly reads"
                if route >= 0:
                    who = f"a write to {names[reader]} reads"
                used.append((end, k, who))
            for end, round_, _ in used[::-1]:
                if round_ != k:
                    break
                mask |= 1 << end


def _check_filled(order: _Order, before: list[int], slot: tuple[int, str, int], names: Mapping[int, str]) -> None:
    """Each read of a round comes after the writes it depends on: all of the slot's, or those of the route passed on."""
    worker, stage, k = slot
    writes = order.writes.get(slot, [])
    carried = {
        a.peer: set(a.segments["route"].tolist()) for a in order.programs[worker].rounds[k].awaits if a.stage == stage
    }
    for start, _, reader, route in order.reads.get(slot, []):
        for _, done, writer in writes:
            needed = route < 0 or done == start or route in carried.get(writer, {route})
            if needed and not before[start] >> done & 1:
                raise InternalError(
                    f"slot {stage!r} of {names[worker]} is read for {names[reader]} in round {k} before {names[writer]} has "
                    "written it; a wait is missing"
                )
