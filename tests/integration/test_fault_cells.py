"""24 cells of the fault matrix with real processes, sockets and signals; `make faults` runs all of them.

They run side by side, once for the module: each spends most of its time waiting for a deadline.
"""

from __future__ import annotations

import pytest
from tests.faults.cell_run import Lane, run_cell
from tests.faults.cells import WORKERS, Cell, Outcome
from tests.faults.matrix import run_cells

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CELLS = tuple(
    Cell(kind=kind, victim=victim, phase=phase, mode=mode)
    for kind, victim, phase, mode in (
        ("kill", "trainer/0", "exchange", "direct"),
        ("kill", "trainer/1", "receive", "staged"),
        ("kill", "tp/0", "install", "staged"),
        ("kill", "tp/1", "exchange", "direct"),
        ("stop", "trainer/0", "install", "direct"),
        ("stop", "tp/0", "install", "direct"),
        ("stop", "tp/1", "receive", "staged"),
        ("cut", "trainer/0", "receive", "direct"),
        ("cut", "tp/0", "exchange", "staged"),
        ("cut", "tp/1", "connect", "direct"),
        ("half-open", "trainer/0", "receive", "staged"),
        ("half-open", "trainer/1", "exchange", "direct"),
        ("half-open", "tp/0", "connect", "direct"),
        ("full memory", "trainer/1", "connect", "staged"),
        ("full memory", "tp/0", "receive", "direct"),
        ("full memory", "tp/1", "install", "staged"),
        ("corrupted byte", "trainer/0", "receive", "direct"),
        ("corrupted byte", "trainer/1", "exchange", "staged"),
        ("corrupted byte", "tp/1", "exchange", "direct"),
        ("duplicated messages", "trainer/0", "exchange", "direct"),
        ("duplicated messages", "tp/0", "install", "staged"),
        ("reordered messages", "trainer/1", "receive", "staged"),
        ("reordered messages", "tp/0", "connect", "direct"),
        ("reordered messages", "tp/1", "exchange", "direct"),
    )
)


@pytest.fixture(scope="module")
def ran() -> tuple[dict[Cell, Outcome], str]:
    return run_cells(CELLS, parallel=3)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_ends_names_the_culprit_and_serves_no_mixture(ran: tuple[dict[Cell, Outcome], str], cell: Cell) -> None:
    outcomes, why_not = ran
    if cell not in outcomes:
        pytest.skip(why_not)
    assert not outcomes[cell].wrong, outcomes[cell]


def test_a_hub_that_wakes_up_is_named_to_whoever_slept_through_it_too() -> None:
    """trainer/0 and tp/0 stand still for three times the deadline. Meanwhile everybody else gives the hub up, and goes. The
    hub, awake again, must not take them for the culprits, nor drop engines for what they did not do in time."""
    cell = Cell(kind="stop", victim="trainer/0", phase="install", mode="direct")
    outcome = run_cell(cell, Lane(), with_victim=("tp/0",))
    assert not outcome.wrong, outcome
    assert [set(line["causes"]) for line in outcome.workers["tp/0"] if "causes" in line] == [{"trainer/0"}]


def test_a_job_that_is_frozen_as_a_whole_goes_on() -> None:
    """As a container or a machine that is suspended: all six processes stand still, and nobody is lost by it."""
    cell = Cell(kind="stop", victim="trainer/0", phase="exchange", mode="direct")
    outcome = run_cell(cell, Lane(), with_victim=tuple(name for name in WORKERS if name != "trainer/0"))
    assert not outcome.wrong, outcome
    assert outcome.word in ("unharmed", "sent again"), outcome
