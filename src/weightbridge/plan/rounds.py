"""Rounds: the smallest K for which the parts of all routes fit everybody's slots.

Fill and drain cost little and more rounds buy nothing, so K is the smallest number that keeps the budget (design 4).
"""

from __future__ import annotations

from itertools import count

import numpy as np
import numpy.typing as npt

from weightbridge.errors import InfeasibleError
from weightbridge.plan.plan import Plan, with_rounds

__all__ = ["SEGMENT_ALIGNMENT_BYTES", "fit_rounds", "slot_loads"]

SEGMENT_ALIGNMENT_BYTES = 64
"""Each segment of a slot begins at a multiple of this: a cache line, and a divisor of every alignment."""

_CELLS_AT_ONCE = 1 << 21
_EXHAUSTIVE = 64  # so many values of K are tried one by one before the search jumps
_SPARSE = 4  # rounds per alignment unit of the fullest slot at which the search gives up


def slot_loads(plan: Plan, rounds: range) -> npt.NDArray[np.int64]:
    """[len(rounds), num_workers, 3] bytes in each worker's slots ("send", "receive", "exchange") in these rounds.

    Every segment counts rounded up to a multiple of SEGMENT_ALIGNMENT_BYTES.
    """
    cuts = plan.cuts(range(rounds.start, rounds.stop + 1))
    parts = np.diff(cuts, axis=0)
    parts += -parts % SEGMENT_ALIGNMENT_BYTES
    loads = np.zeros((3, len(plan.topology.workers), len(rounds)), dtype=np.int64)
    for kind, (worker, sizes) in enumerate(
        (
            (plan.routes["sender"], parts),
            (plan.routes["entry"], parts),
            (plan.hops["dst"], parts[:, plan.hops["route"]]),
        )
    ):
        np.add.at(loads[kind], worker, sizes.T)
    found: npt.NDArray[np.int64] = loads.transpose(2, 1, 0)
    return found


def _worst(plan: Plan) -> int:
    """Bytes of the fullest slot of any worker in any round."""
    chunk = max(1, _CELLS_AT_ONCE // max(1, len(plan.routes)))
    worst = 0
    for first in range(0, plan.rounds, chunk):
        worst = max(worst, int(slot_loads(plan, range(first, min(first + chunk, plan.rounds))).max(initial=0)))
    return worst


def fit_rounds(plan: Plan, min_rounds: int) -> Plan:
    """`plan` with the smallest number of rounds >= min_rounds whose slots fit `plan.slot_bytes`.

    Raises InfeasibleError when parts of one alignment unit each do not fit.
    """
    if not len(plan.routes):
        return with_rounds(plan, min_rounds)
    sizes = plan.routes["hi"] - plan.routes["lo"]
    needed = int(np.minimum(sizes, plan.alignment).max())
    needed += -needed % SEGMENT_ALIGNMENT_BYTES
    if needed <= plan.slot_bytes:
        whole = _worst(with_rounds(plan, 1))
        # beyond this every worker has far fewer units than rounds: more rounds do not spread them any further
        most = max(min_rounds, _SPARSE * -(-whole // min(plan.alignment, needed)))
        rounds = max(min_rounds, -(-whole // plan.slot_bytes))
        for tried in count():
            trial = with_rounds(plan, rounds)
            needed = _worst(trial)
            if needed <= plan.slot_bytes:
                return trial
            if rounds >= most:
                break
            jump = 1 if tried < _EXHAUSTIVE else max(1, rounds * (needed - plan.slot_bytes) // plan.slot_bytes)
            rounds = min(rounds + jump, most)
    raise InfeasibleError(
        f"a slot must hold {needed} bytes even when every route is cut into parts of {plan.alignment} bytes, the budget is "
        f"{plan.slot_bytes}; raise slot_bytes to at least {needed}",
        needed_bytes=needed,
        budget_bytes=plan.slot_bytes,
    )
