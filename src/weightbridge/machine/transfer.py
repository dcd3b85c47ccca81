"""The transfer machine: one worker's part in one attempt at one version. Events in, instructions out.

No clock, no I/O, no threads: the executor and the simulator drive the same object. The protocol keeps
a slot copy from being written while anyone may still read it, by signals alone:

    trainer   Pack k -> PostWrites k, one the receiver has credited, oldest round first (WorkerProgram.post_order)
    rollout   DATA k in -> forwards k -> (Decode k) -> READY k to the readers -> READY k from all it reads -> Assemble k
              -> ASSEMBLED k to all it reads -> own forwards done, own assembly done, ASSEMBLED k from all readers
              -> CREDIT k to whoever writes into that slot copy next, that is in round k + num_slots

Credits go to the *next* writers, not to those of round k: a worker that skipped a round shares the slot all the same. The
first num_slots rounds need none, because an attempt starts with all slots free. Every wait is for a lower round, or for
the same round at an earlier step, so programs that fit together cannot deadlock.
"""

from __future__ import annotations

from weightbridge.errors import InternalError
from weightbridge.machine.events import (
    Arrived,
    Assemble,
    AssembleAllowed,
    AssembleDone,
    Decode,
    DecodeDone,
    Event,
    Failed,
    Finished,
    Instruction,
    Kind,
    Pack,
    PackDone,
    PeerLost,
    PostWrites,
    Released,
    Signal,
    Tag,
    WriteDone,
)
from weightbridge.plan.plan import STAGES
from weightbridge.program.program import OLDEST_ROUND_FIRST, WorkerProgram

__all__ = ["TransferMachine"]

_Key = tuple[int, str, int]  # round, stage, peer


class _ProtocolError(Exception):
    """A peer sent what it cannot have sent: the attempt is over."""


class TransferMachine:
    """Drives one program once. Not thread-safe: one caller at a time hands in events, in the order they happened.

    session, epoch, version, attempt: tie tags to this run; whatever carries others is dropped, so the owner must keep
    tags of a *later* version or attempt until it has made that machine. assemble_allowed: False holds all assembly back
    until AssembleAllowed (direct mode before every engine is parked).
    """

    def __init__(
        self,
        program: WorkerProgram,
        *,
        session: int,
        epoch: int,
        version: int,
        attempt: int,
        stages: tuple[str, ...] = STAGES,
        assemble_allowed: bool = True,
    ) -> None:
        self.program = program
        self.finished = False
        self.failed = False
        self._run = (session, epoch, version, attempt)
        self._stages = stages
        self._allowed = assemble_allowed
        self._started = False
        self._released = False
        rounds = program.rounds
        self._num_rounds = len(rounds)
        self._num_slots = program.slots[0].num_slots if program.slots else 1
        self._sends = any(s.stage not in stages for s in program.slots)  # has live weights to give away
        self._encoded = program.codec != "identity"
        self._oldest_first = program.post_order == OLDEST_ROUND_FIRST
        self._awaited: set[_Key] = {(k, a.stage, a.peer) for k, r in enumerate(rounds) for a in r.awaits}
        self._posts: dict[_Key, int] = {
            (k, p.stage, p.peer): i for k, r in enumerate(rounds) for i, p in enumerate(r.posts)
        }
        self._unwritten = [len(r.posts) for r in rounds]
        self._unarrived = [len(r.awaits) for r in rounds]
        self._issued: set[_Key] = set()
        self._written: set[_Key] = set()
        self._arrived: set[_Key] = set()
        self._credits: set[_Key] = set()
        self._ready: set[tuple[int, int]] = set()
        self._assembled: set[tuple[int, int]] = set()
        # Cursors: the first round that has not passed the step. Each only grows, so a whole run is linear in its events.
        self._pack_round = 0
        self._post_round = 0
        self._ready_round = 0
        self._assemble_round = 0
        self._release_round = 0
        self._packing = False
        self._decoding = False
        self._decoded = -1
        self._assembling = False
        self._unsignalled: int | None = None  # a round just assembled whose ASSEMBLED signals are due

    # --- the two entry points -----------------------------------------------------------------------------------------

    def start(self) -> tuple[Instruction, ...]:
        """The first instructions. Call once."""
        if self._started:
            raise InternalError("a transfer machine was started twice; make a new one for each attempt")
        self._started = True
        return self._advance()

    def handle(self, event: Event) -> tuple[Instruction, ...]:
        """What follows from `event`. Nothing follows after Finished or Failed.

        Stale tags are dropped. A lost peer ends the attempt only while it is needed, so the owner must tell the next
        machine of it too. A tag that the program cannot explain ends the attempt with Failed, naming its sender. A local
        event that answers no instruction is a defect of the caller: InternalError.
        """
        if not self._started:
            raise InternalError(f"{event} reached a transfer machine before start()")
        if self.finished or self.failed:
            return ()
        if isinstance(event, PeerLost):
            return self._fail(event.peer, event.cause) if self._needs(event.peer) else ()
        if isinstance(event, Arrived):
            tag = event.tag
            if (tag.session, tag.epoch, tag.version, tag.attempt) != self._run:
                return ()
            try:
                self._take_tag(event.peer, tag)
            except _ProtocolError as error:
                return self._fail(event.peer, str(error))
        else:
            self._take_local(event)
        return self._advance()

    def waiting_for(self) -> tuple[tuple[int, str], ...]:
        """(worker, what is awaited from it) of everything the oldest unfinished rounds wait for now; for messages.

        The own worker's id stands for local work and for the permission to assemble.
        """
        if self.finished or self.failed or not self._started:
            return ()
        found = [*self._waits_of_posts(), *self._waits_of_assembly()]
        return tuple(dict.fromkeys(found))

    # --- events -------------------------------------------------------------------------------------------------------

    def _take_local(self, event: Event) -> None:
        if isinstance(event, AssembleAllowed):
            self._allowed = True
        elif isinstance(event, PackDone) and self._packing and event.round == self._pack_round:
            self._packing = False
            self._pack_round += 1
        elif isinstance(event, DecodeDone) and self._decoding and event.round == self._ready_round:
            self._decoding = False
            self._decoded = event.round
        elif isinstance(event, AssembleDone) and self._assembling and event.round == self._assemble_round:
            self._assembling = False
            self._assemble_round += 1
            self._unsignalled = event.round
        elif isinstance(event, WriteDone) and self._is_open(key := (event.round, event.stage, event.peer)):
            self._written.add(key)
            self._unwritten[event.round] -= 1
        else:
            raise InternalError(f"{event} answers no instruction of worker {self.program.worker}")

    def _is_open(self, key: _Key) -> bool:
        return key in self._issued and key not in self._written

    def _take_tag(self, peer: int, tag: Tag) -> None:
        what = f"{tag.kind.name} of round {tag.round}"
        if not 0 <= tag.round < self._num_rounds or tag.stage >= len(self._stages):
            raise _ProtocolError(f"sent {what}, stage {tag.stage}, which this program does not have")
        stage = self._stages[tag.stage]
        key = (tag.round, stage, peer)
        if tag.kind is Kind.DATA:
            self._take_once(key in self._awaited, self._arrived, key, f"{what} ({stage})")
            if tag.round - self._num_slots >= self._release_round:
                raise _ProtocolError(f"sent {what} ({stage}) without a credit; the slot was still in use")
            self._unarrived[tag.round] -= 1
        elif tag.kind is Kind.CREDIT:
            mine = (tag.round + self._num_slots, stage, peer) in self._posts
            fresh = key not in self._posts or key in self._issued  # it cannot be done with bytes it never got
            self._take_once(mine and fresh, self._credits, key, f"{what} ({stage})")
        elif tag.kind is Kind.READY:
            expected = peer in self.program.rounds[tag.round].reads
            self._take_once(expected, self._ready, (tag.round, peer), what)
        else:
            expected = peer in self.program.rounds[tag.round].readers and tag.round < self._ready_round
            self._take_once(expected, self._assembled, (tag.round, peer), what)

    @staticmethod
    def _take_once(expected: bool, seen: set[_Key] | set[tuple[int, int]], key: object, what: str) -> None:
        if not expected:
            raise _ProtocolError(f"sent {what}, which was not expected from it")
        if key in seen:
            raise _ProtocolError(f"sent {what} twice")
        seen.add(key)  # type: ignore[arg-type]

    def _needs(self, peer: int) -> bool:
        """Whether this attempt still depends on `peer`: one that has done its part may leave while others go on."""
        rounds = self.program.rounds
        return (
            any(key[2] == peer and key not in self._written for key in self._posts)
            or any(key[2] == peer and key not in self._arrived for key in self._awaited)
            or any(peer in rounds[k].reads for k in range(self._assemble_round, self._num_rounds))
            or any(
                peer in rounds[k].readers and (k, peer) not in self._assembled
                for k in range(self._release_round, self._num_rounds)
            )
        )

    def _fail(self, peer: int, cause: str) -> tuple[Instruction, ...]:
        self.failed = True
        return (Failed(peer, cause),)

    # --- progress -----------------------------------------------------------------------------------------------------

    def _advance(self) -> tuple[Instruction, ...]:
        """Everything that may happen now; messages before kernels, so that peers wait for no kernel of ours."""
        out: list[Instruction] = []
        kernels: list[Instruction] = []
        self._advance_posts(out)
        self._advance_ready(out, kernels)
        self._advance_assembly(out, kernels)
        self._advance_release(out)
        self._advance_pack(kernels)
        out += kernels
        if self._sends and not self._released and self._post_round == self._num_rounds:
            self._released = True
            out.append(Released())
        if self._release_round == self._num_rounds:
            self.finished = True
            out.append(Finished())
        return tuple(out)

    def _advance_pack(self, kernels: list[Instruction]) -> None:
        while not self._packing and self._pack_round < self._num_rounds:
            k = self._pack_round
            if not len(self.program.rounds[k].pack):
                self._pack_round += 1
            elif k - self._num_slots < self._post_round:  # the copy's last round has left
                self._packing = True
                kernels.append(Pack(k))
            else:
                return

    def _advance_posts(self, out: list[Instruction]) -> None:
        """Oldest round first: nothing of round k + 1 is posted while a post of round k is not done. Or else all that can."""
        while self._post_round < self._num_rounds and self._unwritten[self._post_round] == 0:
            self._post_round += 1
        # Own slot copies hold no round that is further ahead than this.
        ahead = 1 if self._oldest_first else self._num_slots
        for k in range(self._post_round, min(self._post_round + ahead, self._num_rounds)):
            self._post_what_can(k, out)

    def _post_what_can(self, k: int, out: list[Instruction]) -> None:
        for index, post in enumerate(self.program.rounds[k].posts):
            key = (k, post.stage, post.peer)
            if key in self._issued or not self._credited(key):
                continue
            packed = post.source in self._stages or k < self._pack_round
            if packed and all((k, s, p) in self._arrived for s, p in post.after):
                self._issued.add(key)
                out.append(PostWrites(k, index))

    def _credited(self, key: _Key) -> bool:
        k, stage, peer = key
        return k < self._num_slots or (k - self._num_slots, stage, peer) in self._credits

    def _advance_ready(self, out: list[Instruction], kernels: list[Instruction]) -> None:
        while self._ready_round < self._num_rounds and self._unarrived[self._ready_round] == 0 and not self._decoding:
            k = self._ready_round
            round_ = self.program.rounds[k]
            if self._encoded and round_.awaits and self._decoded < k:
                if self._post_round > k:  # forwards pass on the encoded bytes, so they go first
                    self._decoding = True
                    kernels.append(Decode(k))
                return
            out += [self._signal(reader, Kind.READY, k) for reader in round_.readers]
            self._ready_round += 1

    def _advance_assembly(self, out: list[Instruction], kernels: list[Instruction]) -> None:
        if self._unsignalled is not None:
            k, self._unsignalled = self._unsignalled, None
            out += [self._signal(peer, Kind.ASSEMBLED, k) for peer in self.program.rounds[k].reads]
        while not self._assembling and self._assemble_round < self._ready_round:
            k = self._assemble_round
            round_ = self.program.rounds[k]
            if not len(round_.assemble.table):
                self._assemble_round += 1
            elif self._allowed and all((k, peer) in self._ready for peer in round_.reads):
                self._assembling = True
                kernels.append(Assemble(k))
            else:
                return

    def _advance_release(self, out: list[Instruction]) -> None:
        while self._release_round < min(self._assemble_round, self._post_round):
            k = self._release_round
            if not all((k, reader) in self._assembled for reader in self.program.rounds[k].readers):
                return
            self._release_round += 1
            if k + self._num_slots < self._num_rounds:
                for await_ in self.program.rounds[k + self._num_slots].awaits:
                    out.append(self._signal(await_.peer, Kind.CREDIT, k, await_.stage))

    def _signal(self, peer: int, kind: Kind, round_: int, stage: str | None = None) -> Signal:
        session, epoch, version, attempt = self._run
        index = 0 if stage is None else self._stages.index(stage)
        tag = Tag(session=session, epoch=epoch, version=version, attempt=attempt, round=round_, kind=kind, stage=index)
        return Signal(peer, tag)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _waits_of_posts(self) -> list[tuple[int, str]]:
        me, k = self.program.worker, self._post_round
        found: list[tuple[int, str]] = [(me, f"pack of round {self._pack_round}")] if self._packing else []
        if k == self._num_rounds:
            return found
        for post in self.program.rounds[k].posts:
            key = (k, post.stage, post.peer)
            if self._is_open(key):
                found.append((post.peer, f"acknowledgement of the write of round {k} ({post.stage})"))
            elif key not in self._issued and not self._credited(key):
                found.append((post.peer, f"credit for round {k - self._num_slots} ({post.stage})"))
        return found

    def _waits_of_assembly(self) -> list[tuple[int, str]]:
        me, rounds = self.program.worker, self.program.rounds
        found: list[tuple[int, str]] = []
        if (k := self._ready_round) < self._num_rounds:
            missing = [a for a in rounds[k].awaits if (k, a.stage, a.peer) not in self._arrived]
            found += [(a.peer, f"data of round {k} ({a.stage})") for a in missing]
            if self._decoding:
                found.append((me, f"decode of round {k}"))
        if (k := self._assemble_round) < self._ready_round:
            unready = [p for p in rounds[k].reads if (k, p) not in self._ready]
            found += [(p, f"ready signal of round {k}") for p in unready]
            if self._assembling:
                found.append((me, f"assembly of round {k}"))
            elif not self._allowed:
                found.append((me, "permission to assemble"))
        if (k := self._release_round) < self._assemble_round:
            late = [p for p in rounds[k].readers if (k, p) not in self._assembled]
            found += [(p, f"assembled signal of round {k}") for p in late]
        return found
