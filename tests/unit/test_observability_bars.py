"""Progress bars, as they come out of a terminal that is a buffer."""

from __future__ import annotations

import io

from rich.console import Console

from weightbridge.coordinator import session_events as e
from weightbridge.observability import ProgressBars


def shown(events: list[e.SessionEvent], *, terminal: bool = True, keep: bool = False) -> tuple[str, ProgressBars]:
    """What is on the terminal while the last of the events is (keep), or all that was ever written."""
    out = io.StringIO()
    bars = ProgressBars(Console(file=out, force_terminal=terminal, width=100, color_system=None))
    for event in events:
        bars(event)
    if keep and bars._bars is not None:
        bars._bars.refresh()
    return out.getvalue(), bars


def progress(at: float, round_: int, version: int = 3) -> e.Progress:
    return e.Progress(at=at, worker="a/0", version=version, round=round_, rounds=8)


STARTED = e.UpdateStarted(at=10.0, worker="a/0", version=3, attempt=1)


def test_a_quick_update_draws_nothing() -> None:
    text, bars = shown([STARTED, progress(10.5, 2), progress(11.5, 7)])
    assert text == ""
    bars(e.Installed(at=11.75, worker="a/0", version=3, stall_seconds=1.0))
    assert bars._begun == {}


def test_an_update_that_lasts_gets_a_bar_which_goes_when_it_ends() -> None:
    text, bars = shown([STARTED, progress(10.5, 2), progress(12.25, 6)], keep=True)
    assert "a/0: version 3" in text
    assert "75%" in text
    bars(e.Installed(at=13.0, worker="a/0", version=3, stall_seconds=1.0))
    assert bars._bars is None  # no thread is left that draws


def test_a_second_attempt_goes_on_counting_from_the_first() -> None:
    again = e.UpdateStarted(at=11.5, worker="a/0", version=3, attempt=2)
    text, bars = shown([STARTED, progress(10.5, 7), again, progress(12.0, 4)], keep=True)
    assert "50%" in text
    bars.close()
    bars.close()
    bars(progress(13.0, 5))
    assert bars._bars is None


def test_connecting_shows_the_phase_and_every_worker_that_is_probed() -> None:
    text, bars = shown(
        [
            e.PhaseChanged(at=0.0, worker="trainer/0", phase="probing"),
            e.Probing(at=0.1, worker="trainer/0", what="load 1", done=1, total=4),
            e.Probing(at=0.2, worker="a/[bold]0", what="load 3", done=3, total=4),
        ],
        keep=True,
    )
    for said in ("session: probing", "trainer/0: load 1", "25%", "a/[bold]0: load 3", "75%"):
        assert said in text
    bars(e.Probing(at=0.3, worker="a/[bold]0", what="done", done=4, total=4))
    bars(e.Connected(at=0.4, worker="trainer/0", epoch=1, attempt=1))
    assert bars._tasks == {}
    assert bars._bars is None


def test_the_end_of_a_session_leaves_nothing_drawn() -> None:
    _, bars = shown([e.PhaseChanged(at=0.0, worker="trainer/0", phase="gathering"), STARTED, progress(20.0, 1)])
    assert len(bars._tasks) == 2
    bars(e.SessionEnded(at=21.0, worker="a/0", kind="WorkerError", causes={}))
    bars(e.PhaseChanged(at=21.0, worker="trainer/0", phase="failed"))
    assert (bars._tasks, bars._bars) == ({}, None)


def test_what_is_no_terminal_stays_clean() -> None:
    text, bars = shown([STARTED, progress(20.0, 1)], terminal=False)
    assert (text, bars._tasks) == ("", {})
