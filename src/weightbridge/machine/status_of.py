"""The state of a session as one message for those who look on."""

from __future__ import annotations

from collections.abc import Sequence

from weightbridge.machine.roster import Side
from weightbridge.machine.session import SessionMachine
from weightbridge.machine.status import (
    MAX_AWAITED,
    MAX_ENGINES,
    MAX_UPDATES,
    EngineStatus,
    Status,
    UpdateStatus,
    WaitingFor,
)

__all__ = ["status_of"]


def status_of(machine: SessionMachine, updates: Sequence[UpdateStatus], now: float) -> Status:
    """updates: the versions that have ended, the newest last. now: of the machine's clock."""
    update, trainers = machine.update, machine.roster.trainers
    waiting = machine.waiting_for()
    return Status(
        session=machine.session,
        phase=machine.phase.value,
        phase_seconds=max(0.0, now - machine.since),
        epoch=machine.epoch.number,
        attempt=machine.attempt,
        version=machine.version,
        in_flight=-1 if update is None else update.version,
        in_flight_seconds=0.0 if update is None else max(0.0, now - update.began),
        in_flight_done=0 if update is None else len(update.transferred),
        in_flight_of=0 if update is None else len(update.workers),
        num_trainers=len(trainers.joins),
        size_trainers=trainers.size,
        engines=tuple(_engine(machine, side, now) for side in machine.roster.engines[:MAX_ENGINES]),
        updates=tuple(updates[-MAX_UPDATES:]),
        waiting_for=tuple(WaitingFor(worker=name, what=what) for name, what in waiting[:MAX_AWAITED]),
        num_waiting_for=len(waiting),
    )


def _engine(machine: SessionMachine, side: Side, now: float) -> EngineStatus:
    update = machine.update
    if side.poisoned:
        state = "poisoned"
    elif side.version < 0:
        state = "joining"
    else:
        state = "updating" if update is not None and side.name in update.engines and not update.done(side) else "ready"
    return EngineStatus(
        name=side.name, state=state, version=side.version, num_workers=len(side.joins), size=side.size,
        since_seconds=max(0.0, now - side.since),
    )  # fmt: skip
