"""Events as sentences, and numbers as people read them: for logs, bars and `weightbridge top`."""

from __future__ import annotations

from collections.abc import Mapping

from weightbridge.coordinator import session_events as e

__all__ = ["bytes_text", "causes_text", "in_words", "ratio_text", "seconds_text", "slowest_text"]

_SHOWN_CAUSES = 3


def bytes_text(nbytes: float) -> str:
    """ "1.50 GB"; decimal units, since links are sold in those."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """ "12.3 ms", "4.56 s", "7.9 min" or "3.2 h"."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def ratio_text(ewtt_seconds: float, ideal_seconds: float) -> str:
    """Achieved over ideal, "-" where nothing had to cross the network."""
    return f"{ewtt_seconds / ideal_seconds:.2f}" if ideal_seconds > 0 else "-"


def slowest_text(worker: str, stage: str) -> str:
    """ "rollout-a/3 in transfer"; "-" where nobody knows."""
    return (f"{worker} in {stage}" if stage else worker) or "-"


def causes_text(causes: Mapping[str, str]) -> str:
    """ "w/1: died; w/2: ... and 4 more"."""
    shown = [f"{worker}: {what}" for worker, what in list(causes.items())[:_SHOWN_CAUSES]]
    more = len(causes) - len(shown)
    return "; ".join(shown) + (f" and {more} more" if more else "")


def in_words(event: e.SessionEvent) -> str:
    """One line for a log, without time and worker."""
    match event:
        case e.Joined(session=session):
            return f"joined session {session}"
        case e.PhaseChanged(phase=phase):
            return f"session is {phase}"
        case e.Probing(what=what, done=done, total=total):
            return f"learning the layout, {done} of {total}: {what}"
        case e.Planned():
            return (
                f"plan of epoch {event.epoch} made in {seconds_text(event.planning_seconds)}: {event.rounds} rounds, "
                f"{event.pairs} pairs, {event.ratio_to_bound:.3f} x the least time"
            )
        case e.Connected(epoch=epoch, attempt=attempt):
            return f"connected to all peers, epoch {epoch}, attempt {attempt}"
        case e.EngineChanged(engine=engine, state=state, version=version, reason=reason):
            return f"engine {engine} is {state} at version {version}" + (f": {reason}" if reason else "")
        case e.SessionEnded(kind=kind, causes=causes):
            return f"session failed, {kind}: {causes_text(causes)}" if kind else "session closed in good order"
        case _:
            return _update_in_words(event)


def _update_in_words(event: e.SessionEvent) -> str:
    match event:
        case e.UpdateStarted(version=version, attempt=attempt):
            return f"version {version} begins, attempt {attempt}"
        case e.Progress(version=version, round=round_, rounds=rounds):
            return f"version {version}: round {round_} of {rounds}"
        case e.Installed(version=version, stall_seconds=stall):
            return f"version {version} installed, stood still for {seconds_text(stall)}"
        case e.UpdateFinished():
            again = f", {event.attempts} attempts" if event.attempts > 1 else ""
            skipped = ", left out by an engine for a newer one" if event.superseded else ""
            return (
                f"version {event.version} done{again}{skipped}: EWTT {seconds_text(event.ewtt_seconds)}, "
                f"AGST {seconds_text(event.agst_seconds)}, "
                f"achieved/ideal {ratio_text(event.ewtt_seconds, event.ideal_seconds)}, "
                f"{bytes_text(event.received_bytes)}, slowest {slowest_text(event.slowest_worker, event.slowest_stage)}"
            )
        case e.UpdateFailed(version=version, causes=causes, poisoned=poisoned):
            mixed = f"; engines with mixed weights: {', '.join(poisoned)}" if poisoned else ""
            return f"version {version} given up: {causes_text(causes)}{mixed}"
        case e.Superseded(version=version, by=by):
            return f"version {version} is left out for version {by}"
        case _:
            return type(event).__name__
