"""The executor: drives one worker's transfer machine on real memory, with kernels and transports.

Called from one thread, the worker's progress thread, apart from `bind`, `allow_assemble` and `abort`. Everything that
happens (transport events, kernel completions, words from the coordinator) arrives in one queue; the machine says what to
do next.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from weightbridge.errors import (
    CorruptionError,
    InternalError,
    TransferTimeout,
    TransportError,
    UsageError,
    WorkerError,
)
from weightbridge.executor.codecs import codec_named
from weightbridge.executor.device import HostWindows
from weightbridge.executor.heap import give_back_free_memory
from weightbridge.executor.lane import KernelLane, LaneDone, LaneFailed
from weightbridge.executor.observation import KernelRan, Observation, Observe, Prepared
from weightbridge.kernels.base import Buffer, Kernels, Ticket
from weightbridge.kernels.digests import Digest, fastest_digest
from weightbridge.machine import events as m
from weightbridge.machine.transfer import TransferMachine
from weightbridge.plan.plan import STAGES
from weightbridge.plan.topology import Worker
from weightbridge.program.program import Await, Post, SlotSpec, WorkerProgram
from weightbridge.transports import base as t
from weightbridge.transports.memory import SharedMemory
from weightbridge.transports.selection import Choice, choose_transport, open_transports

__all__ = ["Aborted", "Endpoint", "Executor", "NetworkBytes"]

_LOG = logging.getLogger(__name__)
_CONNECT_THREADS = 16
_LARGE_TABLES_BYTES = 1 << 20  # of a program: what came before it took many times that, worth asking the allocator for


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What peers must know of a worker before bytes can move: transport name -> address, and where its slots lie."""

    addresses: Mapping[str, str]
    slots: tuple[SlotSpec, ...]


class NetworkBytes(NamedTuple):
    """Bytes the kernel counted on this worker's connections between nodes, since they were made."""

    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class _Abort:
    error: BaseException


@dataclass(frozen=True, slots=True)
class _Allow:
    version: int
    attempt: int


class Aborted(Exception):  # noqa: N818 (a control flow signal between coordinator and executor, never shown to users)
    """The coordinator ended the transfer; `error` says why."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Executor:
    """One worker's data plane for one plan and one connection attempt: arena, transports, bound kernels."""

    def __init__(
        self,
        *,
        workers: Sequence[Worker],
        program: WorkerProgram,
        kernels: Kernels,
        identity: t.Identity,
        host: str = "127.0.0.1",
        deadline_seconds: float = 30.0,
        transports: Sequence[str] = ("tcp",),
        trusted_network: bool = False,
        digests: bool = True,
        observe: Observe | None = None,
    ) -> None:
        """workers: of the plan's topology, in its order. host: address the network transports listen on.

        kernels: those for where the live tensors lie; on a GPU the slots are pinned for it in `bind`, before the first update.
        transports: kinds to use between nodes, the preferred one first. trusted_network: see OneSidedTransport.
        digests: tag what is sent with a digest and check what arrives against it; the same on all workers.
        observe: told of everything that happens; see Observe.
        """
        self._workers = workers
        self._program = program
        self._kernels = kernels
        self._deadline_seconds = deadline_seconds
        self._observe = observe
        self._me = workers[program.worker]
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._codec = codec_named(program.codec)
        self._index = {w.name: i for i, w in enumerate(workers)}
        self._memory = SharedMemory(max(program.arena_bytes, 4096), prefault=True)
        self._windows = HostWindows()
        self._opened = open_transports(
            transports,
            identity,
            self._events,
            host=host,
            deadline_seconds=deadline_seconds,
            trusted_network=trusted_network,
        )
        self._transports = self._opened.transports
        for transport in self._transports.values():
            transport.register(self._memory.memory)
        self._lane = KernelLane(self._events, f"wb-kernels-{self._me.name}")
        self._peer_transport: dict[int, t.Transport] = {}
        self._choices: dict[str, Choice] = {}
        self._peer_slots: dict[int, tuple[SlotSpec, ...]] = {}
        self._dense_writes: list[list[npt.NDArray[np.int64]]] = []  # by round and post
        self._digest: Digest | None = fastest_digest() if digests else None
        self._awaits = {(k, a.stage, a.peer): a for k, r in enumerate(program.rounds) for a in r.awaits}
        self._due = {
            key: _merged(self._lying(key[0], a, a.segments["capacity_bytes"])) for key, a in self._awaits.items()
        }
        self._passed_on = _passed_on(program)
        self._bound_to: tuple[Buffer, ...] | None = None
        self._packs: list[Any] = []
        self._assembles: list[Any] = []
        self._early: list[t.Arrived] = []  # tags of an update that this worker has not begun yet
        self._lost: dict[int, str] = {}  # peers that are gone, and why; each later run is told
        self._last_run: tuple[int, int] = (-1, -1)  # (version, attempt) of the latest run: older tags are stale
        self._closed = False
        self.tell_observer(Prepared(program=program, workers=tuple(workers)))

    @property
    def endpoint(self) -> Endpoint:
        """To hand to every peer, over the authenticated control plane."""
        return Endpoint(
            addresses={name: transport.address for name, transport in self._transports.items()},
            slots=self._program.slots,
        )

    def connect(self, endpoints: Mapping[int, Endpoint]) -> None:
        """Join with all peers of the program; `endpoints` by worker id. Blocks up to the deadline.

        Raises ConnectError or TransferTimeout naming the peer.
        """

        def join(peer: int) -> None:
            where, worker, me = endpoints[peer], self._workers[peer], self._me
            choice = choose_transport(self._opened, me.name, me.node, worker.name, worker.node, where.addresses)
            transport = self._transports[choice.name]
            transport.connect(worker.name, where.addresses[choice.name])
            self._choices[worker.name] = choice
            self._peer_transport[peer] = transport
            self._peer_slots[peer] = where.slots

        if self._program.peers:
            with ThreadPoolExecutor(min(_CONNECT_THREADS, len(self._program.peers))) as pool:
                for _ in pool.map(join, self._program.peers):
                    pass
        self._dense_writes = [
            [_merged(self._writes(k, post, post.segments["capacity_bytes"])) for post in round_.posts]
            for k, round_ in enumerate(self._program.rounds)
        ]
        if sum(r.pack.nbytes + r.assemble.table.nbytes for r in self._program.rounds) >= _LARGE_TABLES_BYTES:
            give_back_free_memory()

    def bind(self, live: Sequence[Buffer]) -> None:
        """Bind pack and assemble tables to the live tensors' memory (order of SourceMap.live).

        Touches no tensor; pins the slots when it is called for the first time. Costs nothing when it is given the tuple
        that it is bound to. What a stream still writes into the tensors, `Kernels.follow_caller` waits for.
        """
        if self._bound_to is live or self._bound_to == tuple(live):
            return
        self._bound_to = None
        self._packs, self._assembles = [], []
        for k, round_ in enumerate(self._program.rounds):
            packed = assembled = None
            if len(round_.pack):
                table, used = _only_used(round_.pack, "src_buffer", live)
                packed = self._kernels.prepare(table, used, [self._slot_buffer("send", k)])
            if len(round_.assemble.table):
                sources = [self._source_buffer(worker, stage, k) for worker, stage in round_.assemble.sources]
                table, used = _only_used(round_.assemble.table, "dst_buffer", live)
                assembled = self._kernels.prepare(table, sources, used)
            self._packs.append(packed)
            self._assembles.append(assembled)
        self._bound_to = tuple(live)

    def run(
        self, *, session: int, epoch: int, version: int, attempt: int, assemble_allowed: bool, timeout_seconds: float,
        released: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Carry one version through. Blocks until this worker has done its part.

        released: called once, when a trainer's weights are free to change. Raises WorkerError naming a lost peer,
        CorruptionError naming who sent bytes that changed on their way (none of them has been used), TransferTimeout
        naming who is waited for, Aborted when the coordinator ended it.
        """
        transfer = _Transfer(self, session=session, epoch=epoch, version=version, attempt=attempt, released=released,
                             assemble_allowed=assemble_allowed)  # fmt: skip
        early, self._early = self._early, []
        self._last_run = (version, attempt)
        transfer.perform(transfer.machine.start())
        for peer, cause in self._lost.items():
            transfer.tell(m.PeerLost(peer, cause))
        for arrived in early:
            self._dispatch(arrived, transfer)
        give_up = time.monotonic() + timeout_seconds
        while not transfer.machine.finished:
            try:
                item = self._events.get(timeout=max(0.0, give_up - time.monotonic()))
            except queue.Empty:
                raise self._timeout(transfer.machine, timeout_seconds) from None
            self._dispatch(item, transfer)

    def allow_assemble(self, version: int, attempt: int) -> None:
        """From any thread, also before `run`: live weights may be overwritten by this version."""
        self._events.put(_Allow(version, attempt))

    def abort(self, error: BaseException) -> None:
        """From any thread: end the transfer; `run` raises Aborted(error)."""
        self._events.put(_Abort(error))

    @property
    def choices(self) -> Mapping[str, Choice]:
        """The kind of transport used with each joined peer, by the peer's name, and why that one."""
        return dict(self._choices)

    def network_bytes(self) -> NetworkBytes:
        """What the kernel counted on connections between nodes, closed ones included; nothing where bytes bypass it."""
        between = [x for x in self._transports.values() if x.capabilities.crosses_nodes]
        counted = [count for transport in between for count in transport.kernel_bytes().values()]
        return NetworkBytes(sum(c.sent for c in counted), sum(c.received for c in counted))

    def close(self) -> None:
        """Fence every peer, end all threads, give the arena back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._peer_transport:  # side by side: there are kinds that take a second
            with ThreadPoolExecutor(min(_CONNECT_THREADS, len(self._peer_transport))) as pool:
                names = [self._workers[peer].name for peer in self._peer_transport]
                list(pool.map(lambda x, name: x.fence(name), self._peer_transport.values(), names))
        ended = self._lane.close(self._deadline_seconds)
        self._packs, self._assembles, self._bound_to = [], [], None
        if ended:
            self._windows.close()  # unpinned before it is unmapped
        for transport in self._transports.values():
            transport.close()
        if ended:
            self._memory.close()
        else:
            _LOG.warning(
                "%s: a kernel has not ended within %.0f s; its memory is kept", self._me.name, self._deadline_seconds
            )

    def tell_observer(self, what: m.Event | m.Instruction | KernelRan | Prepared) -> None:
        """From any thread; nearly free without an observer."""
        if self._observe is not None:
            self._observe(Observation(worker=self._me.name, at=time.monotonic(), what=what))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _dispatch(self, item: Any, transfer: _Transfer) -> None:
        """One thing from the queue; raises when it ends the transfer."""
        match item:
            case t.Arrived():
                tag = m.Tag.unpack(item.tag)
                if (tag.version, tag.attempt) > self._last_run:
                    self._early.append(item)
                elif (tag.version, tag.attempt) == self._last_run:
                    transfer.arrived(item, tag)
            case t.WriteDone():
                transfer.write_done(item)
            case t.PeerLost():
                self._lost[self._index[item.peer]] = item.cause
                transfer.tell(m.PeerLost(self._index[item.peer], item.cause))
            case LaneDone():
                transfer.lane_done(item.event)
            case LaneFailed():
                raise item.error
            case _Allow(version=version, attempt=attempt):
                if (version, attempt) == self._last_run:
                    transfer.tell(m.AssembleAllowed())
            case _Abort():
                raise Aborted(item.error)
            case _:
                raise InternalError(f"executor of {self._me.name}: unknown event {item!r}")

    def _slot_buffer(self, stage: str, round_: int) -> Buffer:
        return self._seen(self._memory.memory.buffer, self._program.slot(stage), round_)

    def _seen(self, arena: Buffer, slot: SlotSpec, round_: int) -> Buffer:
        """A slot copy where the kernels find it."""
        window = self._windows.of(arena, self._kernels.device)
        return Buffer(window.address + slot.offset(round_), slot.capacity_bytes, window.device)

    def _source_buffer(self, worker: int, stage: str, round_: int) -> Buffer:
        """A slot copy to assemble from: an own one, or a neighbour's, read in place."""
        if worker == self._program.worker:
            return self._slot_buffer(stage, round_)
        slot = _slot_of(self._peer_slots[worker], stage, self._workers[worker].name)
        mapped = self._peer_transport[worker].map(self._workers[worker].name)
        if slot.arena_offset + slot.capacity_bytes * slot.num_slots > mapped.nbytes:
            raise TransportError(
                f"{self._workers[worker].name} announced a slot {stage!r} that ends beyond its {mapped.nbytes} bytes of "
                "memory; both sides must run the same version of the library"
            )
        return self._seen(mapped, slot, round_)

    def _segment(self, stage: str, round_: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        begin = self._program.slot(stage).offset(round_) + offset
        return self._memory.array[begin : begin + nbytes]

    def _writes(self, round_: int, post: Post, nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[N, 3] (offset in the own arena, offset in the peer's, bytes) of a post whose segments are `nbytes` long."""
        remote = _slot_of(self._peer_slots[post.peer], post.stage, self._workers[post.peer].name)
        local = post.segments["local_offset"] + self._program.slot(post.source).offset(round_)
        return np.stack([local, post.segments["remote_offset"] + remote.offset(round_), nbytes], axis=1).astype(
            np.int64
        )

    def _lying(self, round_: int, a: Await, nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[N, 2] (offset in the own arena, bytes) of what a peer wrote, by this worker's own program."""
        here = a.segments["remote_offset"] + self._program.slot(a.stage).offset(round_)
        return np.stack([here, nbytes], axis=1).astype(np.int64)

    def _digest_of(self, rows: npt.NDArray[np.int64]) -> int:
        """rows: [N, 2] (offset in the own arena, bytes). 0 without digests."""
        return 0 if self._digest is None else self._digest(self._memory.memory.buffer.address, rows)

    def _timeout(self, machine: TransferMachine, seconds: float) -> TransferTimeout:
        waiting = [(self._workers[peer].name, what) for peer, what in machine.waiting_for()]
        who = "; ".join(f"{what} from {name}" for name, what in waiting) or "its own kernels or the engines' agreement"
        return TransferTimeout(
            f"{self._me.name} waited {seconds:.1f} s for {who}; look at those workers, or raise update_timeout_seconds",
            waiting_for=tuple(name for name, _ in waiting),
            seconds=seconds,
        )


def _slot_of(slots: Sequence[SlotSpec], stage: str, owner: str) -> SlotSpec:
    for slot in slots:
        if slot.stage == stage:
            return slot
    raise UsageError(f"{owner} has no slot {stage!r}; both sides must run the same plan")


def _only_used(
    table: npt.NDArray[np.void], column: Literal["src_buffer", "dst_buffer"], live: Sequence[Buffer]
) -> tuple[npt.NDArray[np.void], list[Buffer]]:
    """The table with its live tensors numbered anew, and just those: a round needs few of the tensors there are."""
    numbers, renumbered = np.unique(table[column], return_inverse=True)
    if numbers[0] < 0 or numbers[-1] >= len(live):
        return table, list(live)  # a damaged table: the kernels refuse it
    table = table.copy()
    table[column] = renumbered.reshape(-1)
    return table, [live[i] for i in numbers.tolist()]


def _merged(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same bytes in fewer rows of (offset at each end..., bytes): what continues the row before everywhere joins it."""
    if not len(rows):
        return rows
    follows = (rows[1:, :-1] == rows[:-1, :-1] + rows[:-1, -1:]).all(axis=1)
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    merged: npt.NDArray[np.int64] = rows[first].copy()
    merged[:, -1] = np.add.reduceat(rows[:, -1], first)
    return merged


_Key = tuple[int, str, int]
"""Round, stage of the slot that bytes came into, peer that wrote them."""


def _passed_on(program: WorkerProgram) -> dict[tuple[int, int], _Key]:
    """(round, index of the post) of each forward of just what one peer wrote, and where that came in."""
    found: dict[tuple[int, int], _Key] = {}
    pairs = (("remote_offset", "local_offset"), ("capacity_bytes", "capacity_bytes"), ("route", "route"))
    for k, round_ in enumerate(program.rounds):
        awaits = {(a.stage, a.peer): a.segments for a in round_.awaits}
        for i, post in enumerate(round_.posts):
            came = awaits.get(post.after[0]) if len(post.after) == 1 else None
            if came is None or post.after[0][0] != post.source or len(came) != len(post.segments):
                continue
            if all((came[there] == post.segments[here]).all() for there, here in pairs):
                found[k, i] = (k, *post.after[0])
    return found


def _no_kernel() -> None:
    """The launch of work that is the CPU's alone."""


def _nothing(_round: int) -> None:
    """What the CPU does after an assembly."""


class _Parcel(NamedTuple):
    """What a post hands to the transport. writes: [N, 3] as `Transport.post` takes them."""

    writes: npt.NDArray[np.int64]
    payload: bytes
    digest: int


class _Transfer:
    """One run of the machine: tickets in flight and, for a codec, the actual length of each segment."""

    def __init__(
        self, executor: Executor, *, session: int, epoch: int, version: int, attempt: int, assemble_allowed: bool,
        released: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        self._x = executor
        self._released = released
        self._ids = {"session": session, "epoch": epoch, "version": version, "attempt": attempt}
        self.machine = TransferMachine(
            executor._program, session=session, epoch=epoch, version=version, attempt=attempt, stages=STAGES,
            assemble_allowed=assemble_allowed,
        )  # fmt: skip
        self._tickets: dict[tuple[str, int], m.WriteDone] = {}
        self._lengths: dict[_Key, dict[int, int]] = {}  # (round, slot, peer) -> route -> actual bytes
        self._checked: dict[_Key, int] = {}  # digests of what has arrived whole
        self._packed: dict[tuple[int, int], _Parcel] = {}  # (round, index of the post) of what waits for its turn

    def tell(self, event: m.Event) -> None:
        self._x.tell_observer(event)
        self.perform(self.machine.handle(event))

    def perform(self, instructions: Sequence[m.Instruction]) -> None:
        x = self._x
        for instruction in instructions:
            x.tell_observer(instruction)
            match instruction:
                case m.Pack(round=k):
                    self._run_kernel("pack", k, partial(self._launch, x._packs, k), self._packed_round, m.PackDone(k))
                case m.PostWrites(round=k, index=i):
                    self._post(k, i)
                case m.Decode(round=k):
                    self._run_kernel("decode", k, _no_kernel, self._decode, m.DecodeDone(k))
                case m.Assemble(round=k):
                    launch = partial(self._launch, x._assembles, k)
                    self._run_kernel("assemble", k, launch, _nothing, m.AssembleDone(k))
                case m.Signal(peer=peer, tag=tag):
                    self._transport_post(peer, np.zeros((0, 3), dtype=np.int64), tag, b"")
                case m.Released():
                    if self._released is not None:
                        self._released()
                case m.Failed(peer=peer, cause=cause):
                    name = x._workers[peer].name
                    raise WorkerError(
                        f"{x._me.name} lost {name} during version {self._ids['version']}: {cause}", causes={name: cause}
                    )
                case m.Finished():
                    pass

    def write_done(self, done: t.WriteDone) -> None:
        event = self._tickets.pop((done.peer, done.ticket), None)
        if event is not None:  # None: a signal's acknowledgement, or one of an earlier version
            self.tell(event)

    def arrived(self, arrived: t.Arrived, tag: m.Tag) -> None:
        peer = self._x._index[arrived.peer]
        if tag.kind is m.Kind.DATA:
            if arrived.payload:
                self._note_lengths(peer, tag, arrived.payload)
            self._check(peer, tag)
        self.tell(m.Arrived(peer, tag))

    def lane_done(self, event: Any) -> None:
        self.tell(event)

    def _run_kernel(
        self, work: Literal["pack", "decode", "assemble"], k: int, launch: Callable[[], Ticket | None],
        then: Callable[[int], None], event: m.Event,
    ) -> None:  # fmt: skip
        """Queue a kernel of round k on the lane, and what the CPU does when the kernel is done; the machine hears of `event`
        when that is done too, and nobody touches the slots before."""
        x = self._x
        if x._observe is None:
            x._lane.submit(launch, partial(then, k), event)
            return
        began_at = 0.0

        def launch_observed() -> Ticket | None:
            nonlocal began_at
            began_at = time.monotonic()
            return launch()

        def then_observed() -> None:
            then(k)
            x.tell_observer(KernelRan(work=work, round=k, began_at=began_at))

        x._lane.submit(launch_observed, then_observed, event)

    def _launch(self, tables: Sequence[Any], k: int) -> Ticket | None:
        prepared = tables[k] if tables else None
        return None if prepared is None else self._x._kernels.launch(prepared)

    def _packed_round(self, k: int) -> None:
        """Encode, and take digests: a post then leaves at once when its turn comes, and the link does not wait."""
        x = self._x
        for index, post in enumerate(x._program.rounds[k].posts):
            if x._codec is not None:
                lengths = {}
                for s in post.segments:
                    segment = x._segment(post.source, k, int(s["local_offset"]), int(s["capacity_bytes"]))
                    lengths[int(s["route"])] = x._codec.encode(segment)
                self._lengths[k, "send", post.peer] = lengths
            if not post.after:
                self._packed[k, index] = self._parcel(k, index)

    def _decode(self, k: int) -> None:
        x = self._x
        if x._codec is None:
            raise InternalError(f"{x._me.name}: asked to decode round {k} of a dense program")
        for a in x._program.rounds[k].awaits:
            lengths = self._lengths.pop((k, a.stage, a.peer))
            for s in a.segments:
                segment = x._segment(a.stage, k, int(s["remote_offset"]), int(s["capacity_bytes"]))
                x._codec.decode(segment, lengths[int(s["route"])])

    def _post(self, k: int, index: int) -> None:
        x = self._x
        post = x._program.rounds[k].posts[index]
        parcel = self._packed.pop((k, index), None) or self._parcel(k, index)
        tag = m.Tag(**self._ids, round=k, kind=m.Kind.DATA, stage=STAGES.index(post.stage), digest=parcel.digest)
        ticket = self._transport_post(post.peer, parcel.writes, tag, parcel.payload)
        self._tickets[x._workers[post.peer].name, ticket] = m.WriteDone(k, post.stage, post.peer)

    def _parcel(self, k: int, index: int) -> _Parcel:
        """What the index-th post of round k sends, once its bytes lie in their slot."""
        x = self._x
        post = x._program.rounds[k].posts[index]
        payload = b""
        if x._codec is None:
            writes = x._dense_writes[k][index]
        else:
            known = self._known_lengths(k, post)
            lengths = np.array([known[int(route)] for route in post.segments["route"]], dtype=np.int64)
            writes, payload = x._writes(k, post, lengths), lengths.astype("<i8").tobytes()
        came_as = x._passed_on.get((k, index))
        # A digest that came with the bytes is the better one: it also finds what changes in this worker's memory.
        digest = x._digest_of(writes[:, ::2]) if came_as is None else self._checked.get(came_as, 0)
        return _Parcel(writes, payload, digest)

    def _transport_post(self, peer: int, writes: npt.NDArray[np.int64], tag: m.Tag, payload: bytes) -> int:
        transport = self._x._peer_transport[peer]
        return transport.post(self._x._workers[peer].name, writes, tag.pack(), payload)

    def _known_lengths(self, k: int, post: Post) -> dict[int, int]:
        """Actual bytes by route: as packed here, or for a forward as they arrived."""
        if not post.after:
            return self._lengths[k, "send", post.peer]
        known: dict[int, int] = {}
        for stage, peer in post.after:
            known |= self._lengths[k, stage, peer]
        return known

    def _note_lengths(self, peer: int, tag: m.Tag, payload: bytes) -> None:
        """Check and keep the actual lengths that rode with a tag. They come from outside: nothing is taken on trust."""
        x = self._x
        name = x._workers[peer].name
        if tag.round >= len(x._program.rounds) or tag.stage >= len(STAGES):
            raise TransportError(
                f"{name} tagged round {tag.round}, stage {tag.stage}: the plan has no such round or stage"
            )
        key = (tag.round, STAGES[tag.stage], peer)
        if key not in x._awaits:
            return  # the machine refuses it
        segments = x._awaits[key].segments
        lengths = np.frombuffer(payload, dtype="<i8") if len(payload) % 8 == 0 else np.zeros(0, "<i8")
        capacity = segments["capacity_bytes"]
        if len(lengths) != len(capacity) or (lengths < 0).any() or (lengths > capacity).any():
            raise TransportError(
                f"{name} sent lengths {lengths.tolist()} for segments of {capacity.tolist()} bytes; "
                "both sides must use the same codec"
            )
        self._lengths[key] = dict(zip(segments["route"].tolist(), lengths.tolist(), strict=True))

    def _check(self, peer: int, tag: m.Tag) -> None:
        """Compare what lies in the own slots with what was sent, before the machine hears of it and anything is made of it.

        What the machine drops or refuses is left to it.
        """
        x = self._x
        key = (tag.round, STAGES[tag.stage], peer) if tag.stage < len(STAGES) else None
        foreign = (tag.session, tag.epoch) != (self._ids["session"], self._ids["epoch"])
        if x._digest is None or foreign or key is None or key not in x._awaits or key in self._checked:
            return
        rows = x._due[key]
        if x._codec is not None:
            a, known = x._awaits[key], self._lengths.get(key, {})
            rows = x._lying(tag.round, a, np.array([known.get(r, 0) for r in a.segments["route"].tolist()]))
        found = x._digest_of(rows)
        if found != tag.digest:
            raise self._corrupted(x._workers[peer].name, tag, found, int(rows[:, 1].sum()))
        self._checked[key] = found

    def _corrupted(self, sender: str, tag: m.Tag, found: int, nbytes: int) -> CorruptionError:
        me, version, stage = self._x._me.name, self._ids["version"], STAGES[tag.stage]
        cause = (
            f"{nbytes} bytes of round {tag.round} ({stage}) have digest {found:016x} at {me}, {tag.digest:016x} was sent, and "
            "none was used; if it happens again, look for bad memory, network cards or switches on the way"
        )
        return CorruptionError(
            f"{me} received corrupted bytes from {sender} in version {version}: {cause}", causes={sender: cause},
            version=version, round=tag.round, stage=stage, sent_digest=tag.digest, found_digest=found,
        )  # fmt: skip
