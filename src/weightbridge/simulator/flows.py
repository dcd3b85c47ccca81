"""Bytes that flow through shared links in virtual time, and the loop of events around them. Knows nothing of machines.

    links = FlowModel(bandwidth)                      # bytes per second of each link
    loop = EventLoop(links)
    loop.at(0.5, start, worker)                       # start(worker) is called at 0.5 s
    loop.send((nic_out, nic_in), nbytes, arrived, 7)  # from now on; arrived(7) is called when the last byte is through
    loop.run()

Concurrent flows share links max-min fairly (`kernels/fair_sharing.py`). Equal calls in equal order give equal results: ties
in time are resolved by the order of the calls.

Coalescing: rates are not computed anew for every start and end of a flow, but once for all that happen within
`window_seconds` after the first of them. A flow that starts in a window begins to move at its last event, and what a flow
that ended leaves free is used from there on. So each start or end costs its neighbours at most one window; an event alone
in its window, and everything with a window of 0, is exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InternalError, UsageError
from weightbridge.kernels.fair_sharing import FairRates, fastest_fair_rates

__all__ = ["DEFAULT_WINDOW_SECONDS", "MAX_LINKS_OF_FLOW", "EventLoop", "FlowModel"]

DEFAULT_WINDOW_SECONDS = 2e-6
"""Below the latency of one message, 3 us."""

MAX_LINKS_OF_FLOW = 8

_FIRST_ROOM = 64


class FlowModel:
    """The flows under way and their rates. `now` is when the rates were last computed; times are seconds.

    bandwidth: [num_links] bytes per second. Afterwards `nbytes` [num_links] is what each link carried, `busy_seconds`
    [num_links] for how long it had any flow. rates: for tests; by default the fastest there is.
    """

    def __init__(self, bandwidth: Sequence[float], *, rates: FairRates | None = None) -> None:
        self.bandwidth = np.array(bandwidth, dtype=np.float64)
        if not ((self.bandwidth > 0) & np.isfinite(self.bandwidth)).all():
            raise UsageError(f"bandwidths must be positive and finite, got {self.bandwidth.tolist()}")
        self._rates = rates or fastest_fair_rates()
        self.now = 0.0
        self.nbytes = np.zeros(len(self.bandwidth))
        self.busy_seconds = np.zeros(len(self.bandwidth))
        self.num_rebalances = 0
        self._load = np.zeros(len(self.bandwidth), dtype=np.int64)
        self._links: npt.NDArray[np.int32] = np.full((_FIRST_ROOM, MAX_LINKS_OF_FLOW), -1, dtype=np.int32)
        self._total = np.zeros(_FIRST_ROOM)
        self._left = np.zeros(_FIRST_ROOM)
        self._rate = np.zeros(_FIRST_ROOM)
        self._finish = np.full(_FIRST_ROOM, inf)
        self._free = list(range(_FIRST_ROOM))[::-1]
        self._used = 0  # rows up to here have been used
        self._dirty = False

    @property
    def num_flows(self) -> int:
        return len(self._left) - len(self._free)

    def add(self, links: Sequence[int], nbytes: float) -> int:
        """A flow of `nbytes` > 0 through `links`, each named once; moves from the next `rebalance` on. Returns its number,
        which is used again after it has ended."""
        if not 0 < len(links) <= MAX_LINKS_OF_FLOW or nbytes <= 0:
            raise InternalError(
                f"a flow of {nbytes} bytes over {len(links)} links; expected more than 0 bytes and 1 to "
                f"{MAX_LINKS_OF_FLOW} links"
            )
        if not self._free:
            self._grow()
        flow = self._free.pop()
        self._used = max(self._used, flow + 1)
        self._links[flow, : len(links)] = links
        self._total[flow] = self._left[flow] = nbytes
        self._dirty = True
        return flow

    def end(self, flow: int) -> None:
        """Take a flow out that is through, by the times of `finishing`."""
        self._left[flow] = 0
        self._remove(flow)

    def cancel(self, flow: int, now: float) -> None:
        """Take a flow out at `now`, wherever it stands; what it has carried counts."""
        self._left[flow] = max(0.0, self._left[flow] - self._rate[flow] * (now - self.now))
        self._remove(flow)

    def set_bandwidth(self, link: int, bandwidth: float) -> None:
        """From the next `rebalance` on."""
        if not 0 < bandwidth < inf:
            raise UsageError(f"bandwidth must be positive and finite, got {bandwidth}")
        self.bandwidth[link] = bandwidth
        self._dirty = True

    def next_finish(self) -> float:
        """When the next flow is through if nothing changes; infinity if none moves."""
        return float(self._finish[: self._used].min(initial=inf))

    def finishing(self, until: float) -> list[tuple[float, int]]:
        """(time, flow) of all that are through by `until` if nothing changes, in order of time."""
        due = np.flatnonzero(self._finish[: self._used] <= until)
        order = np.argsort(self._finish[due], kind="stable")
        return [(float(self._finish[f]), int(f)) for f in due[order]]

    def rebalance(self, now: float) -> None:
        """Let the flows move on to `now` and, if any came or went since the last call, share the links anew."""
        if not self._dirty:
            return
        n, seconds = self._used, now - self.now
        if seconds > 0:
            self._left[:n] = np.maximum(self._left[:n] - self._rate[:n] * seconds, 0)
            self.busy_seconds += np.where(self._load > 0, seconds, 0)
        self.now = now
        self._rate[:n], self._load = self._rates(self._links[:n], self.bandwidth)
        moving = self._rate[:n] > 0
        self._finish[:n] = inf
        np.divide(self._left[:n], self._rate[:n], out=self._finish[:n], where=moving)
        self._finish[:n] += now
        self.num_rebalances += 1
        self._dirty = False

    def _remove(self, flow: int) -> None:
        carried = self._total[flow] - self._left[flow]
        for link in self._links[flow].tolist():
            if link >= 0:
                self.nbytes[link] += carried
        self._links[flow] = -1
        self._left[flow] = self._rate[flow] = 0
        self._finish[flow] = inf
        self._free.append(flow)
        self._dirty = True

    def _grow(self) -> None:
        room = len(self._left)
        self._links = np.concatenate([self._links, np.full_like(self._links, -1)])
        self._total, self._left, self._rate = (
            np.concatenate([a, np.zeros(room)]) for a in (self._total, self._left, self._rate)
        )
        self._finish = np.concatenate([self._finish, np.full(room, inf)])
        self._free = list(range(room, 2 * room))[::-1]


class EventLoop:
    """Calls what is due, in order of time, and lets the flows move in between. See the module for `window_seconds`.

    now: of the event under way, seconds.
    """

    def __init__(self, flows: FlowModel, *, window_seconds: float = DEFAULT_WINDOW_SECONDS) -> None:
        if not 0 <= window_seconds < inf:
            raise UsageError(f"window_seconds must be 0 or more, got {window_seconds}")
        self.flows = flows
        self.now = 0.0
        self.num_events = 0
        self._window_seconds = window_seconds
        self._heap: list[tuple[float, int, Callable[..., object] | None, tuple[object, ...]]] = []
        self._order = 0
        self._when_done: dict[int, tuple[Callable[..., object], tuple[object, ...]]] = {}
        self._ending: dict[int, int] = {}  # flow -> number of the entry of the heap that ends it

    def at(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        """Have `call(*arguments)` made at that time, or now if it has passed."""
        self._order += 1
        heapq.heappush(self._heap, (max(seconds, self.now), self._order, call, arguments))

    def send(self, links: Sequence[int], nbytes: float, done: Callable[..., object], *arguments: object) -> int:
        """Start a flow now; `done(*arguments)` is called when its last byte is through. Returns its number, or -1 when
        there is nothing to share: no bytes, or no link on the way; that is done at once."""
        if not len(links) or nbytes <= 0:
            self.at(self.now, done, *arguments)
            return -1
        flow = self.flows.add(links, nbytes)
        self._when_done[flow] = (done, arguments)
        return flow

    def cancel(self, flow: int) -> None:
        """End a flow that `send` returned and that is not done: `done` is not called."""
        del self._when_done[flow]
        self._ending.pop(flow, None)
        self.flows.cancel(flow, self.now)

    def run(self) -> None:
        """Until nothing is left to happen."""
        flows, heap = self.flows, self._heap
        flows.rebalance(self.now)
        while True:
            begin = min(heap[0][0] if heap else inf, flows.next_finish())
            if begin == inf:
                return
            end = begin + self._window_seconds
            for seconds, flow in flows.finishing(end):
                self._order += 1
                self._ending[flow] = self._order
                heapq.heappush(heap, (seconds, self._order, None, (flow,)))
            while heap and heap[0][0] <= end:
                self.now, order, call, arguments = heapq.heappop(heap)
                if call is None:
                    self._end(arguments[0], order)  # type: ignore[arg-type]
                else:
                    self.num_events += 1
                    call(*arguments)
            flows.rebalance(self.now)

    def _end(self, flow: int, order: int) -> None:
        if self._ending.get(flow) != order:
            return  # cancelled within the window
        del self._ending[flow]
        self.num_events += 1
        self.flows.end(flow)
        call, arguments = self._when_done.pop(flow)
        call(*arguments)
