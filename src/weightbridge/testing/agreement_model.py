"""The agreement on the step as a model for the checker: an engine's workers, their leader and a hostile network.

Every worker has a poll thread and a control thread that share `count`, `gate` and the step lock; a transition is one load
or store of these, or one message handled. The machines under test are the real ones. What is checked:

- all workers install a request at one count, the agreed one, and none before the leader says Agreed;
- nobody returns from a poll it promised not to pass before it has heard the decision, nobody passes a decided target;
- from Agreed until it has installed, every worker stands still at the agreed count;
- no install begins after the request was aborted on that worker;
- from every state the model can come to a good end (see `AgreementModel.is_goal`).

The workers are alike, so states that differ only in who is who are one state. What a worker can do next depends on its
own record alone; it is computed once per record. That is what makes millions of interleavings cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from weightbridge.errors import InternalError
from weightbridge.machine import agreement as a
from weightbridge.testing.model_checker import PropertyViolated, freeze, slot_names, thaw

__all__ = ["AgreementModel", "Scenario", "State"]

State = tuple[int, ...]
"""(number of the leader's record, then one number per worker, sorted)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What the workers and the world may do.

    num_workers: of the engine. window: W. starts: poll counts at the start, one per worker. num_polls: the count at which
    every worker falls idle for good. lock_step: a step ends only when every worker has begun it. num_requests: updates, one
    after the other. idle_attempts: how often the leader may ask for idleness while the engine still runs (it may always
    once the engine rests, else an idle engine could not end). The network keeps every message and may deliver each at any
    time and any number of times: delay, doubling and reordering. drops: how often the connection of a worker may lose all
    that it carries, both ways, for good. prompt: the leader hears at once what workers say (what it says to them is as
    late as ever, so workers see all they could see otherwise, bar what depends on the order of the leader's own
    inputs). single_steps: let others act between any two loads or stores of a worker, see _blocks.
    deaths: workers that may die. aborts: requests that may be given up.
    leader_dies: the leader may vanish; every worker notices at some time. by_hub: a hub says InstallAllowed in place of
    IdleInstall too.
    """

    window: int
    num_polls: int
    starts: tuple[int, ...] = (0, 0, 0)
    lock_step: bool = False
    num_requests: int = 1
    idle_attempts: int = 0
    drops: int = 0
    prompt: bool = False
    single_steps: bool = False
    deaths: int = 0
    aborts: int = 0
    leader_dies: bool = False
    by_hub: bool = False


class _At(IntEnum):
    """Where the poll thread is."""

    OUTSIDE = 0  # between steps, without the lock
    LOCKED = 1  # holds the lock; next: store count
    COUNTED = 2  # next: load gate
    WAITING = 3  # at the gate
    INSTALLING = 4
    STEPPING = 5


class _Lock(IntEnum):
    FREE = 0
    POLL = 1
    CONTROL = 2


class _Worker(NamedTuple):
    """Everything of one worker, its two channels included. The last three fields are the checker's own notes."""

    at: _At
    polls: int  # the shared word `count`
    gate: int
    lock: _Lock
    mailbox: int  # request that the poll thread is told to install, 0 for none
    local: tuple[a.MemberEvent, ...]  # from the own poll thread to the control thread
    todo: tuple[a.MemberInstruction, ...]  # what the control thread still has to perform of its last event
    member: tuple[Any, ...]
    inbox: frozenset[a.MemberEvent]
    outbox: frozenset[a.MemberInstruction]
    alive: bool
    limit: tuple[
        int, int
    ]  # (request, the poll it may not return from): its promise, then the decision; NO_GATE: may go on
    installs: tuple[tuple[int, int], ...]  # (request, count)
    aborted: int  # newest request whose abort was confirmed


class _Leader(NamedTuple):
    """The leader without its views of the members, which are kept beside the workers; and what it was heard to say:
    agreed (request, target), the newest request that failed or was done."""

    machine: tuple[Any, ...]
    started: int
    agreed: tuple[tuple[int, int], ...]
    failed: int
    done: int
    alive: bool
    deaths: int  # still allowed
    aborts: int  # still allowed
    drops: int  # still allowed


class _Slot(NamedTuple):
    """The number of the leader's view of a worker, and the worker's own."""

    view: int
    worker: int


class _Facts(NamedTuple):
    """What other workers and the checks need to know of a worker."""

    polls: int
    alive: bool
    begun: int  # newest step that this worker has begun
    installs: dict[int, int]
    held_at: int  # count at which it stands still until told otherwise, -1 if it may move
    rests: bool  # has made all its polls and is between steps
    quiet: bool  # nothing of any request is left here
    aborted: int


class _Answer(NamedTuple):
    """What the leader does on an event. attempt: of the idle attempt it asks for, 0 if it asks for none. told: for each
    member, what becomes of a slot by it, as far as that was worked out."""

    leader: int
    views: tuple[int, ...]
    sent: tuple[frozenset[a.MemberEvent], ...]
    attempt: int
    told: tuple[dict[int, int], ...]


class _Touches(IntEnum):
    """What a move reads or writes of what the worker's two threads share; a poll thread's moves add POLL."""

    NOTHING = 0
    COUNT = 1
    LOCK = 2
    GATE = 4
    LOCAL = 8
    POLL = 16


class _Move(NamedTuple):
    """One thing that a worker can do. step: the step that has to have begun everywhere first, -1 for none."""

    label: str
    after: int
    touches: int
    step: int = -1


_POLL = _Touches.POLL
_ENDS_STEP = _Touches.POLL | _Touches.LOCK
_CONTROL_TOUCHES = {
    a.ReadCount: _Touches.COUNT,
    a.WriteGate: _Touches.GATE,
    a.TryLock: _Touches.LOCK,
    a.ReleaseLock: _Touches.LOCK,
}
_SENDS = (a.SendPromise, a.SendIdle, a.SendParked, a.SendInstalled, a.SendAborted)


class AgreementModel:
    """Give `initial`, `successors`, `check` and `is_goal` to `model_checker.explore`. The classes may be mutants."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        member: type[a.AgreementMember] = a.AgreementMember,
        leader: type[a.AgreementLeader] = a.AgreementLeader,
    ) -> None:
        self.scenario = scenario
        self._member_kind, self._leader_kind = member, leader
        self._workers: list[_Worker] = []
        self._slots: list[_Slot] = []
        self._leaders: list[_Leader] = []
        self._views: list[Any] = []
        self._events: list[a.LeaderEvent] = []
        self._numbers: dict[Any, int] = {}
        self._slot_numbers: dict[tuple[int, int], int] = {}
        self._facts: list[_Facts] = []
        self._found_blocks: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._moves: dict[int, list[_Move]] = {}
        self._answers: dict[tuple[int, ...], _Answer] = {}
        self._sayings: dict[tuple[int, int], list[int]] = {}
        self._labels: dict[tuple[str, int], str] = {}
        self._less: dict[tuple[int, str], int] = {}
        self._where_views = slot_names(leader).index("_views")

    # --- what the checker calls ---

    def initial(self) -> list[State]:
        """All workers idle at their starts, request 1 started."""
        s = self.scenario
        leader = self._leader_kind(tuple(range(len(s.starts))))
        workers = [self._fresh(polls) for polls in s.starts]
        machine, views = self._split(leader)
        at = self._number(self._leaders, _Leader(machine, 0, (), 0, 0, True, s.deaths, s.aborts, s.drops))
        slots = [self._slot(view, self._worker(worker)) for view, worker in zip(views, workers, strict=True)]
        return [state for _, state in self._tell("start", at, slots, self._event(a.Start(1)))]

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Every single thing that can happen next."""
        at, *slots = state
        seen = -1
        for position, number in enumerate(slots):
            if number == seen:
                continue  # a worker in the very state of the one before: the same thing under another name
            seen = number
            slot = self._slots[number]
            floor = self._steps_begun_by_others(position, slots) if self.scenario.lock_step else 0
            for label, worker in self._blocks(slot.worker, floor):
                changed = slots.copy()
                changed[position] = self._slot(slot.view, worker)
                yield label, self._settle(at, changed, position, slot.worker)
            yield from self._leader_hears(at, slots, position, slot)
            yield from self._world_strikes(at, slots, position, slot)
        yield from self._leader_acts(at, slots)

    def check(self, state: State) -> None:
        """The properties that a state shows by itself."""
        leader = self._leaders[state[0]]
        facts = [self._facts[self._slots[number].worker] for number in state[1:]]
        agreed = dict(leader.agreed)
        newest, newest_target = leader.agreed[-1] if leader.agreed else (0, 0)
        for fact in facts:
            for request, count in fact.installs.items():
                if agreed.get(request) != count:
                    where = "nothing" if request not in agreed else f"poll {agreed[request]}"
                    raise PropertyViolated(f"a worker installed request {request} at {count}, agreed was {where}")
            pending = fact.alive and newest > max(leader.failed, fact.aborted) and newest not in fact.installs
            if pending and fact.held_at != newest_target:
                raise PropertyViolated(
                    f"a worker moves (count {fact.polls}) between Agreed({newest_target}) and its install"
                )

    def is_goal(self, state: State) -> bool:
        """All requests ended well; or, if the world may strike, ended anyhow. In both cases nothing of a request is left
        on any living worker, no poll thread waits at a gate, and (where it can) each has made all its polls."""
        last, leader = self.scenario.num_requests, self._leaders[state[0]]
        facts = [self._facts[self._slots[number].worker] for number in state[1:]]
        living = [fact for fact in facts if fact.alive]
        died = len(living) < len(facts)
        if not all(fact.quiet and (fact.rests or (died and self.scenario.lock_step)) for fact in living):
            return False
        if leader.done == last:
            return all(last in fact.installs for fact in living)
        return not leader.alive or leader.failed == last or (died and leader.failed == leader.started)

    def agreed(self, state: State) -> tuple[tuple[int, int], ...]:
        """(request, poll count) of every agreement that was reached on the way to this state; to see what a run covers."""
        return self._leaders[state[0]].agreed

    def _fresh(self, polls: int) -> _Worker:
        return _Worker(
            at=_At.OUTSIDE,
            polls=polls,
            gate=a.NO_GATE,
            lock=_Lock.FREE,
            mailbox=0,
            local=(),
            todo=(),
            member=freeze(self._member_kind(self.scenario.window)),
            inbox=frozenset(),
            outbox=frozenset(),
            alive=True,
            limit=(0, a.NO_GATE),
            installs=(),
            aborted=0,
        )

    # --- numbering ---

    def _number(self, table: list[Any], record: Any) -> int:
        key = (type(record), record)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(table)
            table.append(record)
        return number

    def _worker(self, worker: _Worker) -> int:
        number = self._number(self._workers, worker)
        if number == len(self._facts):
            self._facts.append(self._look_at(worker))
        return number

    def _slot(self, view: int, worker: int) -> int:
        number = self._slot_numbers.get((view, worker))
        if number is None:
            number = self._slot_numbers[view, worker] = len(self._slots)
            self._slots.append(_Slot(view, worker))
        return number

    def _event(self, event: a.LeaderEvent) -> int:
        return self._number(self._events, event)

    def _spend(self, at: int, what: str) -> int:
        """The leader's record with one of its allowed deaths, aborts or drops used up."""
        number = self._less.get((at, what))
        if number is None:
            leader = self._leaders[at]
            left = leader._replace(**{what: getattr(leader, what) - 1})
            number = self._less[at, what] = self._number(self._leaders, left)
        return number

    def _settle(self, at: int, slots: list[int], position: int, before: int) -> State:
        """If the scenario says so, the leader hears at once what the worker at `position` has just said."""
        if self.scenario.prompt and self._leaders[at].alive:
            now = self._slots[slots[position]].worker
            if self._workers[now].outbox != self._workers[before].outbox:
                for event in set(self._says(now, position)).difference(self._says(before, position)):
                    at, slots, _ = self._hear(at, slots, event)
        return (at, *sorted(slots))

    def _with(self, at: int, slots: list[int], position: int, number: int) -> State:
        changed = slots.copy()
        changed[position] = number
        changed.sort()
        return (at, *changed)

    def _look_at(self, worker: _Worker) -> _Facts:
        waits = worker.at is _At.WAITING and worker.gate <= worker.polls
        held = waits or worker.at is _At.INSTALLING or worker.lock is _Lock.CONTROL
        idle = not worker.todo and not worker.local and not worker.mailbox
        return _Facts(
            polls=worker.polls,
            alive=worker.alive,
            begun=worker.polls - (worker.at in (_At.COUNTED, _At.WAITING, _At.INSTALLING)),
            installs=dict(worker.installs),
            held_at=worker.polls if held else -1,
            rests=self._has_made_all_polls(worker) and worker.at is _At.OUTSIDE,
            quiet=idle and worker.gate == a.NO_GATE and not held,
            aborted=worker.aborted,
        )

    def _split(self, leader: a.AgreementLeader) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        values, where = freeze(leader), self._where_views
        return (*values[:where], *values[where + 1 :]), tuple(self._number(self._views, v) for v in values[where])

    # --- what a worker does ---

    def _moves_of(self, number: int, floor: int) -> list[_Move]:
        """Every single thing this worker can do while all others have begun step `floor`."""
        moves = self._moves.get(number)
        if moves is None:
            worker = self._workers[number]
            found = [*self._poll_moves(worker), *self._control_moves(worker)] if worker.alive else []
            moves = [_Move(label, self._worker(after), touches) for label, after, touches in found]
            if self.scenario.lock_step and worker.at is _At.STEPPING:
                moves = [m._replace(step=worker.polls) if m.touches == _ENDS_STEP else m for m in moves]
            moves = self._moves[number] = [move for move in moves if move.after != number]
        return [move for move in moves if move.step <= floor]

    def _blocks(self, number: int, floor: int) -> list[tuple[str, int]]:
        """(label, new number) for everything this worker can do up to the next thing that others could notice.

        Whatever nobody notices can be put off until just before something that is noticed and needs it: the worker's inbox
        only grows meanwhile. So it is enough to let others act at those points, and at the ends where nothing is left to
        do. All orders of the worker's own two threads in which one can tell the difference are gone through, load by load
        and store by store; a poll move that no later control move of the block could tell is left to the next block.
        """
        blocks = self._found_blocks.get((number, floor))
        if blocks is not None:
            return blocks
        found: dict[int, str] = {}
        seen = {(number, 0)}
        ways = [(number, 0, "")]
        while ways:
            at, untold, way = ways.pop()
            try:
                moves = self._moves_of(at, floor)
            except PropertyViolated as violated:
                raise PropertyViolated(f"{violated}; the worker's last moves: {way or 'none'}") from violated
            if not moves and at != number:
                found[at] = way
            for move in moves:
                label = f"{way}; {move.label}" if way else move.label
                by_poll = move.touches & _Touches.POLL
                left = move.touches if by_poll else (0 if untold & move.touches else untold)
                if self.scenario.single_steps or (self._is_noticed(at, move.after) and (by_poll or not left)):
                    found.setdefault(move.after, label)
                elif not self._is_noticed(at, move.after) and (move.after, left) not in seen:
                    seen.add((move.after, left))
                    ways.append((move.after, left, label))
        blocks = self._found_blocks[number, floor] = [(label, after) for after, label in found.items()]
        return blocks

    def _is_noticed(self, before: int, after: int) -> bool:
        was, now = self._workers[before], self._workers[after]
        begins = self.scenario.lock_step and self._facts[before].begun < self._facts[after].begun
        heard = self.scenario.drops > 0 and was.member != now.member  # what was heard cannot be dropped any more
        return begins or heard or was.installs != now.installs or not now.outbox <= was.outbox

    def _steps_begun_by_others(self, position: int, slots: list[int]) -> int:
        facts = [self._facts[self._slots[number].worker] for number in (*slots[:position], *slots[position + 1 :])]
        return min((fact.begun for fact in facts if not fact.rests), default=a.NO_GATE)

    # --- the poll thread ---

    def _poll_moves(self, w: _Worker) -> Iterator[tuple[str, _Worker, int]]:
        match w.at:
            case _At.OUTSIDE:
                if not self._has_made_all_polls(w) and w.lock is _Lock.FREE:
                    yield "poll takes the step lock", w._replace(at=_At.LOCKED, lock=_Lock.POLL), _POLL | _Touches.LOCK
            case _At.LOCKED:
                counted = w._replace(at=_At.COUNTED, polls=w.polls + 1)
                yield f"poll stores count {w.polls + 1}", counted, _POLL | _Touches.COUNT
            case _At.COUNTED if w.polls < w.gate:
                yield f"poll {w.polls} goes on", self._return_from_poll(w), _POLL | _Touches.GATE
            case _At.COUNTED:
                waits = w._replace(at=_At.WAITING, local=(*w.local, a.Reached(w.polls)))
                yield f"poll {w.polls} waits at gate {w.gate}", waits, _POLL | _Touches.GATE | _Touches.LOCAL
            case _At.WAITING:
                if w.mailbox:
                    installs = self._install(w, w.mailbox)._replace(at=_At.INSTALLING, mailbox=0)
                    yield f"poll {w.polls} installs request {w.mailbox}", installs, _POLL
                if w.gate > w.polls:
                    yield f"poll {w.polls} is let go", self._return_from_poll(w), _POLL | _Touches.GATE
            case _At.INSTALLING:
                done = (*w.local, a.InstallDone(w.installs[-1][0]))
                yield (
                    f"poll {w.polls} has installed",
                    self._return_from_poll(w)._replace(local=done),
                    _POLL | _Touches.LOCAL,
                )
            case _At.STEPPING:
                yield f"step {w.polls} ends", w._replace(at=_At.OUTSIDE, lock=_Lock.FREE), _ENDS_STEP

    def _has_made_all_polls(self, w: _Worker) -> bool:
        """Polls after the last request is over are left out: they can show nothing new."""
        over = max(w.aborted, w.installs[-1][0] if w.installs else 0)
        return w.polls >= self.scenario.num_polls or (over >= self.scenario.num_requests and w.gate == a.NO_GATE)

    def _return_from_poll(self, w: _Worker) -> _Worker:
        request, poll = w.limit
        if w.polls >= poll:
            raise PropertyViolated(
                f"a worker went on from poll {w.polls}, bound by request {request} not to pass {poll}"
            )
        return w._replace(at=_At.STEPPING)

    def _install(self, w: _Worker, request: int) -> _Worker:
        if request <= w.aborted:
            raise PropertyViolated(f"a worker installed request {request} after it was aborted")
        if any(request <= earlier for earlier, _ in w.installs):
            raise PropertyViolated(f"a worker installed request {request} after {w.installs}")
        return w._replace(installs=(*w.installs, (request, w.polls)), limit=(request, a.NO_GATE))

    # --- the control thread ---

    def _control_moves(self, w: _Worker) -> Iterator[tuple[str, _Worker, int]]:
        if w.todo:
            yield f"control performs {w.todo[0]}", self._perform(w), _CONTROL_TOUCHES.get(type(w.todo[0]), 0)
            return
        if w.local:
            event = w.local[0]
            yield f"control handles {event}", self._handle(w._replace(local=w.local[1:]), event), _Touches.LOCAL
        for message in w.inbox:
            yield f"control handles {message}", self._handle(w, message), 0

    def _handle(self, w: _Worker, event: a.MemberEvent) -> _Worker:
        member = thaw(self._member_kind, w.member)
        try:
            todo = member.handle(event)
        except InternalError as error:
            raise PropertyViolated(f"the member's machine raised: {error}") from error
        ended = event.request if isinstance(event, a.Aborted) else 0
        ended = event.request - 1 if isinstance(event, a.Proposed) else ended
        if ended and w.limit[0] <= ended:
            w = w._replace(limit=(ended, a.NO_GATE))
        if isinstance(event, a.Committed) and event.request == w.limit[0] and w.limit[1] != a.NO_GATE:
            w = self._decided(w, event.target)
        return self._send(w._replace(member=freeze(member), todo=(*todo, *w.todo)))

    def _decided(self, w: _Worker, target: int) -> _Worker:
        gone_on = w.at in (_At.STEPPING, _At.OUTSIDE, _At.LOCKED)
        if w.polls > target or (w.polls == target and gone_on):
            raise PropertyViolated(
                f"a worker is past poll {target} (at {w.polls}, {w.at.name}) when it hears that as the target"
            )
        return w._replace(limit=(w.limit[0], target))

    def _send(self, w: _Worker) -> _Worker:
        """Perform the sends that come next: nobody can tell when a message left, so they are no steps of their own."""
        while w.todo and isinstance(w.todo[0], _SENDS):
            sent, *left = w.todo
            w = w._replace(todo=tuple(left), outbox=w.outbox | {sent})
            if isinstance(sent, a.SendAborted):
                w = w._replace(aborted=max(w.aborted, sent.request))
            if isinstance(sent, a.SendPromise) and sent.request > w.limit[0]:
                w = w._replace(limit=(sent.request, sent.bound))
        return w

    def _perform(self, w: _Worker) -> _Worker:
        instruction, *left = w.todo
        w = w._replace(todo=tuple(left))
        match instruction:
            case a.ReadCount():
                return self._handle(w, a.CountRead(w.polls))
            case a.WriteGate(value=value):
                return self._send(w._replace(gate=value))
            case a.TryLock():
                held = w.lock is _Lock.FREE
                return self._handle(w._replace(lock=_Lock.CONTROL) if held else w, a.LockTried(held, w.polls))
            case a.ReleaseLock():
                if w.lock is not _Lock.CONTROL:
                    raise PropertyViolated("the control thread gave back a lock it did not hold")
                return self._send(w._replace(lock=_Lock.FREE))
            case a.Install(request=request, idle=True):
                if w.lock is not _Lock.CONTROL:
                    raise PropertyViolated("the control thread installed without the step lock")
                w = self._install(w, request)
                return self._send(w._replace(local=(*w.local, a.InstallDone(request))))
            case a.Install(request=request):
                return self._send(w._replace(mailbox=request))
            case a.CancelInstall():
                return self._send(w._replace(mailbox=0))
        raise PropertyViolated(f"no control thread can perform {instruction}")

    # --- the leader and the world ---

    def _leader_hears(self, at: int, slots: list[int], position: int, slot: _Slot) -> Iterator[tuple[str, State]]:
        if self._leaders[at].alive:
            for event in self._says(slot.worker, position):
                yield from self._tell("leader hears", at, slots, event)

    def _says(self, number: int, position: int) -> list[int]:
        """The leader events that the outbox of worker `number` stands for when it is member `position`."""
        said = self._sayings.get((number, position))
        if said is None:
            outbox = self._workers[number].outbox
            said = self._sayings[number, position] = [self._event(_heard_from(position, sent)) for sent in outbox]
        return said

    def _leader_acts(self, at: int, slots: list[int]) -> Iterator[tuple[str, State]]:
        leader, s = self._leaders[at], self.scenario
        if not leader.alive:
            return
        yield from self._tell("timer:", at, slots, self._event(a.Tick()))
        if s.drops:
            yield from self._tell("timer:", at, slots, self._event(a.Tick(ask_idle=False)))
        ended = leader.started in (leader.done, leader.failed)
        if ended and leader.started < s.num_requests:
            yield from self._tell("leader begins", at, slots, self._event(a.Start(leader.started + 1)))
        if leader.aborts and not ended:
            abort = self._event(a.Abort(leader.started, "deadline"))
            yield from self._tell("caller:", self._spend(at, "aborts"), slots, abort)
        if s.leader_dies:  # what every worker's shell will then tell its machine, soon or late
            gone = frozenset([a.Aborted(leader.started)])
            told = [self._slot(view, self._post(worker, gone)) for view, worker in (self._slots[n] for n in slots)]
            yield "leader dies", (self._number(self._leaders, leader._replace(alive=False)), *sorted(told))

    def _world_strikes(self, at: int, slots: list[int], position: int, slot: _Slot) -> Iterator[tuple[str, State]]:
        leader, worker = self._leaders[at], self._workers[slot.worker]
        if worker.alive and leader.deaths:
            dead = self._slot(slot.view, self._worker(worker._replace(alive=False)))
            yield "a worker dies", self._with(self._spend(at, "deaths"), slots, position, dead)
        if leader.drops and (worker.inbox or worker.outbox):
            cut = self._slot(slot.view, self._worker(worker._replace(inbox=frozenset(), outbox=frozenset())))
            yield "a connection drops what it carries", self._with(self._spend(at, "drops"), slots, position, cut)
        if not worker.alive and leader.alive:
            yield from self._tell("leader notices", at, slots, self._event(a.MemberLost(position, "died")))

    def _tell(self, why: str, at: int, slots: list[int], event: int) -> Iterator[tuple[str, State]]:
        """The leader handles an event; nothing is yielded if that changes nothing or asks for idleness too often."""
        leader, after, attempt = self._hear(at, slots, event)
        if attempt > self.scenario.idle_attempts and not self._at_rest(attempt, slots):
            return
        if leader != at or after != slots:
            label = self._labels.get((why, event))
            if label is None:
                label = self._labels[why, event] = f"{why} {self._events[event]}"
            yield label, (leader, *sorted(after))

    def _hear(self, at: int, slots: list[int], event: int) -> tuple[int, list[int], int]:
        """(leader, workers in the same order, number of the idle attempt that is asked for or 0) after the event."""
        key = (at, event, *[self._slots[number].view for number in slots])
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._answer(at, key[2:], self._events[event])
        after = [told.get(number, -1) for told, number in zip(answer.told, slots, strict=True)]
        for position, number in enumerate(after):
            if number < 0:
                worker = self._post(self._slots[slots[position]].worker, answer.sent[position])
                number = after[position] = self._slot(answer.views[position], worker)
                answer.told[position][slots[position]] = number
        return answer.leader, after, answer.attempt

    def _post(self, number: int, messages: frozenset[a.MemberEvent]) -> int:
        worker = self._workers[number]
        return number if messages <= worker.inbox else self._worker(worker._replace(inbox=worker.inbox | messages))

    def _at_rest(self, attempt: int, slots: list[int]) -> bool:
        facts = [self._facts[self._slots[number].worker] for number in slots]
        return attempt == self.scenario.idle_attempts + 1 and all(fact.rests or not fact.alive for fact in facts)

    def _answer(self, at: int, views: tuple[int, ...], event: a.LeaderEvent) -> _Answer:
        said = self._leaders[at]
        where = self._where_views
        shown = tuple(self._views[number] for number in views)
        machine = thaw(self._leader_kind, (*said.machine[:where], shown, *said.machine[where:]))
        sent: list[set[a.MemberEvent]] = [set() for _ in views]
        attempt = 0
        if isinstance(event, a.Start):
            said = said._replace(started=event.request)
        for instruction in machine.handle(event):
            match instruction:
                case a.Agreed(request=request, target=target):
                    said = said._replace(agreed=(*said.agreed, (request, target)))
                case a.AgreementFailed(request=request):
                    said = said._replace(failed=request)
                case a.AllInstalled(request=request):
                    said = said._replace(done=request)
                case _:
                    if isinstance(instruction, a.AskIdle):
                        attempt = instruction.attempt
                    sent[instruction.member].add(self._as_event(instruction))
        values, views = self._split(machine)
        number = self._number(self._leaders, said._replace(machine=values))
        messages = tuple(frozenset(to_member) for to_member in sent)
        return _Answer(number, views, messages, attempt, tuple({} for _ in views))

    def _as_event(self, sent: a.LeaderInstruction) -> a.MemberEvent:
        match sent:
            case a.SendPropose():
                return a.Proposed(sent.request)
            case a.SendCommit():
                return a.Committed(sent.request, sent.target)
            case a.AskIdle():
                return a.IdleAsked(sent.request, sent.attempt)
            case a.SendIdleRelease():
                return a.IdleReleased(sent.request, sent.attempt)
            case a.SendIdleInstall() if not self.scenario.by_hub:
                return a.IdleInstall(sent.request, sent.attempt)
            case a.SendIdleInstall() | a.SendInstall():
                return a.InstallAllowed(sent.request)
            case a.SendAbort():
                return a.Aborted(sent.request)
        raise PropertyViolated(f"nobody can receive {sent}")


def _heard_from(member: int, sent: a.MemberInstruction) -> a.LeaderEvent:
    match sent:
        case a.SendPromise():
            return a.PromiseFrom(member, sent.request, sent.bound)
        case a.SendIdle():
            return a.IdleFrom(member, sent.request, sent.attempt, sent.held, sent.count)
        case a.SendParked():
            return a.ParkedFrom(member, sent.request)
        case a.SendInstalled():
            return a.InstalledFrom(member, sent.request)
        case a.SendAborted():
            return a.AbortedFrom(member, sent.request)
    raise PropertyViolated(f"nobody can receive {sent}")
