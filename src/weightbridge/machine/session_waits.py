"""Who is being waited for, in words: what the session machine says when a deadline has passed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weightbridge.machine.roster import Roster, Side, SideState
from weightbridge.machine.session_words import Phase
from weightbridge.machine.update import Update

__all__ = ["awaited", "late_engines"]


def awaited(
    phase: Phase, roster: Roster, update: Update | None, missing: Mapping[Phase, list[str]], *, been_ready: bool
) -> list[tuple[str, str]]:
    """(worker, what is awaited from it) in a phase, for the message of a deadline. missing: phase -> who has not spoken
    in it."""
    match phase:
        case Phase.GATHERING if not been_ready:
            return [(n, "did not join the session; start it with the sender's endpoint") for n in roster.missing()]
        case Phase.PROBING:
            return _waiting_for_layouts([side for side in roster.required() if side is not None])
        case Phase.LOWERING:
            return [(n, "did not lower its program") for n in missing[phase]]
        case Phase.CONNECTING:
            return [(n, "did not connect to its peers") for n in missing[phase]]
        case Phase.READY | Phase.GATHERING:
            late = [(n, "did not call send_weights") for n in missing[Phase.READY] if update is None]
            busy = [side for side in roster.engines if side.leader is not None and not side.leader.at_rest]
            return late or [(n, "did not end its last install") for side in busy for n in side.workers]
        case Phase.ABORTING:
            return [(n, "did not end the attempt") for n in missing[phase]]
        case Phase.UPDATING if update is not None:
            return _waiting_for_update(update)
        case _:
            return [("planner", "did not finish")]


def late_engines(roster: Roster, now: float, limit_seconds: float) -> list[dict[str, str]]:
    """Engines that have not come through to their layout in time: for each, its workers that are late, and with what."""
    out = []
    for side in roster.engines:
        waited = now - side.since
        if side.state is not SideState.MAPPED and waited > limit_seconds:
            late = [n for n in side.workers if n not in side.maps] or side.workers
            missing = ", ".join(side.missing())
            what = "did not report its layout" if side.complete else f"is incomplete: missing {missing}"
            out.append(dict.fromkeys(late, f"{what} (waited {waited:.0f} s)"))
    return out


def _waiting_for_layouts(sides: Iterable[Side]) -> list[tuple[str, str]]:
    """(worker, what is awaited from it) while sides are probed."""
    sides = list(sides)
    quiet = [
        (name, f"did not speak at step {side.step} of its side's probe")
        for side in sides
        if side.words
        for name in side.workers
        if name not in side.words
    ]
    late = [(n, "did not report its layout") for side in sides for n in side.workers if n not in side.maps]
    return quiet or late or [("hub", "is still probing")]


def _waiting_for_update(update: Update) -> list[tuple[str, str]]:
    """(worker, what is awaited from it) while a version is in flight: first who has to stop, then who moves, then who
    resumes."""
    stopping = []
    for side in update.engines.values():
        due = not side.staged or side.name in update.committed
        if due and side.name not in update.agreed and not update.done(side) and side.leader is not None:
            owed = side.leader.waiting_for()
            stopping += [(side.joins[m].worker, f"engine did not stop at one step: {what}") for m, what in owed]
    workers = update.workers
    moving = [(n, "did not finish its part of the transfer") for n in workers if n not in update.transferred]
    resuming = [(n, "did not resume") for n in workers if n not in update.resumed]
    return stopping or moving or resuming
