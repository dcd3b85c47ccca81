"""24 cells of the fault matrix with real processes, sockets and signals; `make faults` runs all of them.

They run side by side, once for the module: each spends most of its time waiting for a deadline.
"""

from __future__ import annotations

import pytest
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

# The hub wakes up among those who gave it up: it must not take them for the culprits, nor drop engines for what they did not do
# in time; tp/0, which slept through it too, must hear of the hub.
WAKES_UP = Cell(kind="stop", victim="trainer/0", phase="install", mode="direct", beside=("tp/0",))
# As a container or a machine that is suspended.
FROZEN = Cell(kind="stop", victim="trainer/0", phase="exchange", mode="direct", beside=WORKERS[1:])


@pytest.fixture(scope="module")
def ran() -> tuple[dict[Cell, Outcome], str]:
    return run_cells((*CELLS, WAKES_UP, FROZEN), parallel=3)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_ends_names_the_culprit_and_serves_no_mixture(ran: tuple[dict[Cell, Outcome], str], cell: Cell) -> None:
    outcomes, why_not = ran
    if cell not in outcomes:
        pytest.skip(why_not)
    assert not outcomes[cell].wrong, outcomes[cell]


def test_whoever_slept_through_it_too_hears_that_it_was_the_hub(ran: tuple[dict[Cell, Outcome], str]) -> None:
    outcome = ran[0][WAKES_UP]
    assert not outcome.wrong, outcome
    assert [set(line["causes"]) for line in outcome.workers["tp/0"] if "causes" in line] == [{"trainer/0"}]


def test_a_job_that_is_frozen_as_a_whole_loses_nobody(ran: tuple[dict[Cell, Outcome], str]) -> None:
    outcome = ran[0][FROZEN]
    assert not outcome.wrong, outcome
    assert outcome.word in ("unharmed", "sent again"), outcome
