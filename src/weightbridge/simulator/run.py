"""One update of all workers: their transfer machines, driven by an event loop over the model of links and costs.

What the executor does on real memory is done here in virtual time. A worker has
  - a progress thread: handles events in the order they come; the first that concerns a new round costs the round's Python,
    each post and signal its own cost; what an event leads to leaves when the thread gets there;
  - a kernel lane: one pack or assembly after the other. An assembly ends when its bytes have gone through memory and all
    neighbours' slots have come over the inside links;
  - its links, as `links.py` numbers them. One flow for each post.
A tag arrives one latency after the last byte has left; the sender learns of it one latency later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from weightbridge.errors import InternalError, UsageError
from weightbridge.machine import events as m
from weightbridge.machine.transfer import TransferMachine
from weightbridge.plan.plan import STAGES
from weightbridge.plan.topology import Topology
from weightbridge.simulator.costs import Costs
from weightbridge.simulator.faults import Fault, LateEngine, LostWorker, SlowNode
from weightbridge.simulator.flows import DEFAULT_WINDOW_SECONDS, EventLoop, FlowModel
from weightbridge.simulator.links import Links
from weightbridge.simulator.result import LANES
from weightbridge.simulator.simulation import Failure
from weightbridge.simulator.skeleton import Skeleton

__all__ = ["Observe", "Run"]

Observe = Callable[[float, int, "m.Event | m.Instruction"], None]
"""observe(seconds, worker, event or instruction): everything that goes into and comes out of a machine, in order."""

_LANE = {name: i for i, name in enumerate(LANES)}
_Kernel = m.Pack | m.Decode | m.Assemble


@dataclass(slots=True, kw_only=True)
class _Seat:
    """One worker. thread_free: when its progress thread has done all it was given. python_round: latest round whose Python
    is paid for. kernels: (when launched, what) that wait for the lane; running: in the lane, since `began`."""

    machine: TransferMachine
    skeleton: Skeleton
    thread_free: float = 0.0
    python_round: int = -1
    kernels: deque[tuple[float, _Kernel]] = field(default_factory=deque)
    running: _Kernel | None = None
    began: float = 0.0
    parts_open: int = 0
    released: float = inf
    finished: float = inf
    died: float = inf
    writes: dict[m.PostWrites, tuple[int, int]] = field(default_factory=dict)  # under way -> (flow, target)


class Run:
    """skeletons: one for each worker of the topology, in its order. Afterwards `seats`, `steps`, `failures` say what was.

    Raises UsageError for a fault that names nothing of this job.
    """

    def __init__(
        self,
        topology: Topology,
        skeletons: Sequence[Skeleton],
        *,
        costs: Costs,
        faults: Sequence[Fault] = (),
        observe: Observe | None = None,
        window_seconds: float = DEFAULT_WINDOW_SECONDS,
    ) -> None:
        self.topology, self.costs = topology, costs
        self.links = Links(topology=topology, costs=costs)
        self.flows = FlowModel(self.links.bandwidth)
        self.loop = EventLoop(self.flows, window_seconds=window_seconds)
        self.steps: list[tuple[int, int, int, float, float, int, int]] = []
        self.failures: list[Failure] = []
        self.assembled: list[float] = [0.0] * max((len(s.program.rounds) for s in skeletons), default=0)
        self.stall_begin = [0.0] * len(topology.workers)
        self._observe = observe
        late = [f for f in faults if isinstance(f, LateEngine)]
        self.seats = [
            _Seat(
                machine=TransferMachine(s.program, session=0, epoch=0, version=0, attempt=0, assemble_allowed=not late),
                skeleton=s,
            )
            for s in skeletons
        ]
        for fault in faults:
            self._prepare(fault)
        if late:
            allowed = max(f.seconds for f in late) + costs.agreement_seconds
            for worker in topology.rollouts:
                self.loop.at(allowed, self._tell, worker, m.AssembleAllowed())

    def run(self) -> None:
        """Until nothing can happen any more."""
        for worker in range(len(self.seats)):
            self.loop.at(self.costs.agreement_seconds, self._start, worker)
        self.loop.run()

    def _start(self, worker: int) -> None:
        seat, now = self.seats[worker], self.loop.now
        if seat.died <= now:
            return
        seat.thread_free = now
        self._note(worker, "control", -1, 0.0, now)
        self._perform(worker, seat.machine.start())

    # --- faults -------------------------------------------------------------------------------------------------------

    def _prepare(self, fault: Fault) -> None:
        if isinstance(fault, SlowNode):
            if fault.node not in self.topology.nodes:
                raise UsageError(f"there is no node {fault.node!r} to slow down; it is one of {self.topology.nodes}")
            self.loop.at(fault.at_seconds, self._slow_down, fault)
        elif isinstance(fault, LostWorker):
            if fault.worker not in self.topology.index:
                raise UsageError(f"there is no worker {fault.worker!r} to lose")
            self.loop.at(fault.at_seconds, self._lose, self.topology.index[fault.worker], fault)
        else:
            members = [i for i in self.topology.rollouts if self.topology.workers[i].engine == fault.engine]
            if not members:
                raise UsageError(f"there is no engine {fault.engine!r} to be late")
            for worker in members:
                self.stall_begin[worker] = fault.seconds

    def _slow_down(self, fault: SlowNode) -> None:
        for link in self.links.of_node(fault.node):
            self.flows.set_bandwidth(link, self.links.links[link].bandwidth * fault.fraction)

    def _lose(self, worker: int, fault: LostWorker) -> None:
        self.seats[worker].died = self.loop.now
        for source, seat in enumerate(self.seats):
            for write, (flow, target) in list(seat.writes.items()):
                if worker in (source, target):
                    self.loop.cancel(flow)
                    del seat.writes[write]
        for other in range(len(self.seats)):
            if other != worker:
                lost = m.PeerLost(worker, "lost")
                self.loop.at(self.loop.now + fault.detection_seconds, self._tell, other, lost)

    # --- the progress thread ------------------------------------------------------------------------------------------

    def _tell(self, worker: int, event: m.Event) -> None:
        seat = self.seats[worker]
        if seat.died <= self.loop.now or seat.machine.finished or seat.machine.failed:
            return
        if self._observe is not None:
            self._observe(self.loop.now, worker, event)
        if type(event) is m.Arrived:
            self._pay_python(worker, seat, event.tag.round)
        self._perform(worker, seat.machine.handle(event))

    def _pay_python(self, worker: int, seat: _Seat, round_: int) -> None:
        if round_ > seat.python_round:
            seat.python_round = round_
            begin = self._work(seat, 0)
            self._note(worker, "control", round_, begin, self._work(seat, self.costs.python_seconds_per_round))

    def _work(self, seat: _Seat, seconds: float) -> float:
        """Take the progress thread for so long, as soon as it is free. Returns when that is over."""
        now = self.loop.now
        seat.thread_free = (seat.thread_free if seat.thread_free > now else now) + seconds
        return seat.thread_free

    def _perform(self, worker: int, instructions: Sequence[m.Instruction]) -> None:
        seat, costs, loop = self.seats[worker], self.costs, self.loop
        for instruction in instructions:
            if self._observe is not None:
                self._observe(loop.now, worker, instruction)
            kind = type(instruction)
            if kind is m.Signal:
                sent = self._work(seat, costs.signal_seconds)
                loop.at(sent + costs.latency_seconds, self._deliver, worker, sent, instruction)
            elif kind is m.PostWrites:
                loop.at(self._work(seat, costs.post_seconds), self._post, worker, instruction)
            elif isinstance(instruction, _Kernel):
                self._pay_python(worker, seat, instruction.round)
                seat.kernels.append((self._work(seat, 0), instruction))
                self._run_kernels(worker, seat)
            elif kind is m.Released:
                seat.released = self._work(seat, 0)
            elif kind is m.Finished:
                seat.finished = self._work(seat, 0)
            elif isinstance(instruction, m.Failed):
                self.failures.append(
                    Failure(worker=worker, at_seconds=loop.now, peer=instruction.peer, cause=instruction.cause)
                )
            else:
                raise InternalError(f"the simulator does not know {instruction}")

    # --- messages and writes ------------------------------------------------------------------------------------------

    def _deliver(self, source: int, sent: float, signal: m.Signal) -> None:
        if sent < self.seats[source].died:
            self._tell(signal.peer, m.Arrived(source, signal.tag))

    def _post(self, worker: int, instruction: m.PostWrites) -> None:
        seat, k = self.seats[worker], instruction.round
        post = seat.skeleton.program.rounds[k].posts[instruction.index]
        if self.loop.now >= min(seat.died, self.seats[post.peer].died) or seat.machine.failed:
            return
        nbytes = int(seat.skeleton.post_bytes[seat.skeleton.post_first[k] + instruction.index])
        path = self.links.path(worker, post.peer)
        flow = self.loop.send(path, nbytes, self._written, worker, instruction, nbytes, self.loop.now)
        if flow >= 0:
            seat.writes[instruction] = (flow, post.peer)

    def _written(self, worker: int, done: m.PostWrites, nbytes: int, begin: float) -> None:
        seat, k, latency = self.seats[worker], done.round, self.costs.latency_seconds
        post = seat.skeleton.program.rounds[k].posts[done.index]
        seat.writes.pop(done, None)
        arrival = self.loop.now + latency
        stage = STAGES.index(post.stage)
        tag = m.Tag(session=0, epoch=0, version=0, attempt=0, round=k, kind=m.Kind.DATA, stage=stage)
        self.loop.at(arrival, self._tell, post.peer, m.Arrived(worker, tag))
        self.loop.at(arrival + latency, self._tell, worker, m.WriteDone(k, post.stage, post.peer))
        self._note(worker, "forward" if post.after else "send", k, begin, arrival, nbytes, post.peer)

    # --- the kernel lane ----------------------------------------------------------------------------------------------

    def _run_kernels(self, worker: int, seat: _Seat) -> None:
        """Start the next kernel if the lane is free."""
        if seat.running is not None or not seat.kernels:
            return
        launched, seat.running = seat.kernels.popleft()
        seat.began = max(launched, self.loop.now)
        self.loop.at(seat.began + self.costs.launch_seconds, self._execute, worker)

    def _execute(self, worker: int) -> None:
        """The kernel's first instruction: it takes its time in memory, an assembly its neighbours' bytes besides."""
        seat = self.seats[worker]
        skeleton, kernel = seat.skeleton, seat.running
        if kernel is None:
            raise InternalError(f"worker {worker} has no kernel to execute")
        if seat.died <= self.loop.now:
            return
        k = kernel.round
        seat.parts_open = 1
        if isinstance(kernel, m.Assemble):
            nbytes = skeleton.assemble_bytes[k]
            for i, neighbour in enumerate(skeleton.program.rounds[k].reads):
                part = int(skeleton.read_bytes[skeleton.read_first[k] + i])
                if part:
                    seat.parts_open += 1
                    self.loop.send(self.links.path(neighbour, worker), part, self._part_done, worker)
        else:
            nbytes = skeleton.pack_bytes[k] if isinstance(kernel, m.Pack) else skeleton.await_bytes[k]
        self.loop.at(self.loop.now + int(nbytes) / self.costs.memory_bandwidth, self._part_done, worker)

    def _part_done(self, worker: int) -> None:
        seat, now = self.seats[worker], self.loop.now
        seat.parts_open -= 1
        if seat.parts_open or seat.running is None or seat.died <= now:
            return
        kernel, seat.running = seat.running, None
        k = kernel.round
        done: m.Event
        if isinstance(kernel, m.Assemble):
            done = m.AssembleDone(k)
            self._note(worker, "assemble", k, seat.began, now, int(seat.skeleton.assemble_bytes[k]))
            self.assembled[k] = now
        elif isinstance(kernel, m.Pack):
            done = m.PackDone(k)
            self._note(worker, "pack", k, seat.began, now, int(seat.skeleton.pack_bytes[k]))
        else:
            done = m.DecodeDone(k)
            self._note(worker, "assemble", k, seat.began, now, int(seat.skeleton.await_bytes[k]))
        self._run_kernels(worker, seat)
        self._tell(worker, done)

    def _note(
        self, worker: int, lane: str, round_: int, start: float, end: float, nbytes: int = 0, peer: int = -1
    ) -> None:
        if end > start:
            self.steps.append((worker, _LANE[lane], round_, start, end, nbytes, peer))
