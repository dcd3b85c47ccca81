"""Which rounds carry one unit more: every link and every slot as level over the rounds as whole units allow.

A route of u units has u / K of them to carry in each of K rounds: some rounds get one more than others, and the route's phase
says which. Routes are taken one after the other; each gets the phase whose extra units fall into the rounds where the links
and slots it uses have most room left, given the routes before it. All K phases are compared at once: the rounds k with an
extra unit are those where (u k + phase) mod K is at least K - u mod K, a window of the residues, so one cumulative sum over
the rounds in the order of their residues has the load that each phase would meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = ["Chain", "Uses", "chains", "level"]

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_SQUARINGS = 4
"""A link's or slot's load counts with its 16th power: what is nearly full decides, what has room hardly counts."""

_CHAINED_USE = 0.95
"""A link or slot may be used so far by routes that follow each other, whichever of them are due in a round."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Routes that go the same way from their entry worker on and follow each other, at the pace of all together.

    One route by itself is a chain as well. routes: [n] ascending. units: [n] of each.
    """

    routes: Int64Array
    units: Int64Array

    def pieces(self, rounds: int, phase: int) -> tuple[Int64Array, Int64Array]:
        """[n] `pace` and `phase` of each route when the first round gets what the phase of the chain says."""
        before = np.cumsum(self.units) - self.units
        return np.full(len(self.units), self.units.sum()), phase - before * rounds


class Uses:
    """Which links and slots routes use, and how much room these have in all rounds together.

    use: [num_rows, num_routes] bytes on each link or slot per byte of the route. room: [num_rows] bytes.
    """

    def __init__(self, use: csr_matrix, room: FloatArray, sizes: Int64Array) -> None:
        self.room, self.sizes = room, sizes
        self.load: FloatArray = use @ sizes / room
        by_route = use.tocsc()
        self._rows, self._times, self._ends = by_route.indices, by_route.data, by_route.indptr.tolist()

    def of(self, route: int) -> tuple[Int64Array, FloatArray]:
        """Rows that a route uses, and how often each."""
        mine = slice(self._ends[route], self._ends[route + 1])
        return self._rows[mine], self._times[mine]

    def shared(self, routes: Int64Array) -> tuple[Int64Array, FloatArray]:
        """The rows that all of the routes use, equally often."""
        rows, times = self.of(int(routes[0]))
        for route in routes[1:].tolist():
            same = np.isin(rows, self.of(route)[0])
            rows, times = rows[same], times[same]
        return rows, times


def chains(alike: list[Int64Array], uses: Uses, unit_bytes: int) -> list[Chain]:
    """Chains of the routes that are `alike`, where all links and slots can bear it; every other route by itself.

    alike: partition of the routes. While a route of a chain is due, its sender sends at the pace of the whole chain; links
    and slots that only some routes of their chains use must bear all these chains at once.
    """
    sizes, load = uses.sizes, uses.load.copy()
    units = -(-sizes // unit_bytes)
    found: list[Chain] = []
    for routes in sorted(alike, key=lambda routes: (int(sizes[routes].sum()), int(routes[0]))):
        more: dict[int, float] = {}
        total = int(sizes[routes].sum())
        common = set(uses.shared(routes)[0].tolist())
        for route in routes.tolist():
            for row, times in zip(*(x.tolist() for x in uses.of(route)), strict=True):
                if row not in common:
                    more[row] = more.get(row, times * total) - times * int(sizes[route])
        if all(load[row] + nbytes / uses.room[row] <= _CHAINED_USE for row, nbytes in more.items()):
            for row, nbytes in more.items():
                load[row] += nbytes / uses.room[row]
            found.append(Chain(routes, units[routes]))
        else:
            found += [Chain(routes[i : i + 1], units[routes[i : i + 1]]) for i in range(len(routes))]
    return found


def level(parts: list[Chain], uses: Uses, rounds: int, unit_bytes: int) -> tuple[Int64Array, Int64Array]:
    """[num_routes] pace and phase of each route."""
    sizes = uses.sizes
    load = np.repeat(uses.load[:, None], rounds, axis=1)  # of each row in each round; routes not yet placed are flat
    scale = rounds / uses.room
    pace, phase = np.zeros((2, len(sizes)), dtype=np.int64)
    width = [len(uses.of(i)[0]) for i in range(len(sizes))]
    k = np.arange(rounds + 1, dtype=np.int64)[:, None]
    for chain in sorted(parts, key=lambda chain: (-width[chain.routes[0]], int(chain.routes[0]))):
        rows, times = uses.shared(chain.routes)
        pressure = load[rows]
        pressure /= pressure.max(initial=0.0) or 1.0
        for _ in range(_SQUARINGS):
            pressure *= pressure
        short = int(chain.units[-1]) * unit_bytes - int(sizes[chain.routes[-1]])
        start = _best_phase((scale[rows] * times) @ pressure, int(chain.units.sum()), short / unit_bytes)
        pace[chain.routes], phase[chain.routes] = chain.pieces(rounds, start)
        units = np.maximum((pace[chain.routes] * k + phase[chain.routes]) // rounds, 0)
        due = np.diff(np.minimum(units * unit_bytes, sizes[chain.routes]), axis=0) - sizes[chain.routes] / rounds
        for route, part in zip(chain.routes.tolist(), due.T, strict=True):
            rows, times = uses.of(route)
            load[rows] += (scale[rows] * times)[:, None] * part
    return pace, phase


def _best_phase(pressure: FloatArray, units: int, short: float) -> int:
    """The phase whose extra units meet the least pressure. pressure: [rounds]. short: share that the last unit lacks."""
    rounds = len(pressure)
    extra = units % rounds
    residue = np.arange(rounds, dtype=np.int64) * extra % rounds
    by_residue = np.bincount(residue, weights=pressure, minlength=rounds)
    below = np.concatenate([[0.0], np.cumsum(np.concatenate([by_residue, by_residue]))])
    phases = np.arange(rounds, dtype=np.int64)
    first = (rounds - extra - phases) % rounds
    met = below[first + extra] - below[first]
    met -= short * pressure[rounds - 1 - np.minimum(phases // units, rounds - 1)]
    return int(met.argmin())
