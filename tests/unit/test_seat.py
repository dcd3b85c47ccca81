"""A worker's seat without a hub: when it takes the hub for dead, and how it stops waiting when there is nothing to wait for."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator

import pytest
import torch
from tests.unit.conftest import Clock

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import Options, ReceiverAdapter
from weightbridge.coordinator.seat import Outlived, Seat
from weightbridge.errors import IncompleteUpdateError, ProbeError, WeightBridgeError, WorkerError
from weightbridge.machine import messages as w
from weightbridge.testing.ports import free_port

LATER = 6.0  # seconds: more than a worker waits for the hub's verdict on an attempt that failed


@pytest.fixture
def receiver() -> Iterator[ReceiverAdapter]:
    live = {"w": torch.zeros(3)}
    receiver = ReceiverAdapter(
        group=None, endpoint=f"tcp://127.0.0.1:{free_port()}", checkpoint=CheckpointSpec.from_state_dict(live),
        load_weights=lambda _: None, tensors=lambda: live, engine="e", options=Options(),
    )  # fmt: skip
    yield receiver
    receiver.close()


def tick_on(seat: Seat, clock: Clock, seconds: float) -> None:
    until = clock.now + seconds
    while clock.now < until:
        clock.now += 0.25
        seat._on_tick()


def fail_an_attempt(seat: Seat) -> None:
    seat.machine.hear(w.PlanReady(epoch=1, attempt=1, plan=b""))
    seat._attempt_failed(seat.machine, 1, WorkerError("e/0 lost a/0", causes={"a/0": "the connection broke"}))


def test_a_hub_that_does_not_end_an_attempt_that_failed_is_taken_for_dead(
    receiver: ReceiverAdapter, clock: Clock
) -> None:
    seat = receiver._seat
    fail_an_attempt(seat)
    seat._on_tick()
    assert seat.failure is None
    tick_on(seat, clock, LATER)
    assert seat.failure is not None
    assert set(seat.failure.causes) == {"a/0"}


def test_a_verdict_is_not_late_when_it_was_this_worker_that_stood_still(
    receiver: ReceiverAdapter, clock: Clock
) -> None:
    seat = receiver._seat
    fail_an_attempt(seat)
    clock.now += 10 * LATER
    seat._on_tick()
    assert seat.failure is None


def test_an_attempt_that_the_hub_has_ended_is_forgotten_when_the_next_one_runs(
    receiver: ReceiverAdapter, clock: Clock
) -> None:
    seat = receiver._seat
    fail_an_attempt(seat)
    seat.machine.hear(w.AbortAttempt(attempt=1))
    seat.machine.stopped(1)
    seat.machine.hear(w.PlanReady(epoch=1, attempt=2, plan=b""))
    tick_on(seat, clock, LATER)
    assert seat.failure is None


@pytest.mark.timeout(30)
def test_nobody_waits_on_in_a_session_that_was_closed(receiver: ReceiverAdapter) -> None:
    """The rest of an engine has left: the hub says Closed to those who may be in the middle of a poll."""
    seat, agreement = receiver._seat, receiver._agreement
    seat._on_message(w.Closed())
    assert receiver.state == "closed"
    with pytest.raises(Outlived):
        seat.wait_for(lambda machine: False, "something", 60, of=seat.machine)
    with pytest.raises(WorkerError, match="e/0 waited for a first version, and the session was closed"):
        receiver.wait_ready(60)
    assert agreement.wait_at_gate(1, seat.check, 60) is None
    assert receiver.poll_requests() is False


def test_an_engine_that_polls_on_while_it_is_poisoned_piles_nothing_up(receiver: ReceiverAdapter) -> None:
    receiver._seat._on_message(w.UpdateFailed(kind="WorkerError", causes={"a/0": "died"}, poisoned=("e",), version=3))
    raised: set[WeightBridgeError] = set()
    for _ in range(20):
        with pytest.raises(IncompleteUpdateError) as caught:
            receiver.poll_requests()
        raised.add(caught.value)
    (error,) = raised  # the same object each time
    assert len(traceback.extract_tb(error.__traceback__)) < 10


def test_a_word_said_after_closing_goes_to_no_other_descriptor(receiver: ReceiverAdapter) -> None:
    receiver.close()
    pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(50)]  # one of them has the number of the descriptor that was closed
    try:
        receiver._seat.post(w.Heartbeat())
        for read, _ in pipes:
            with pytest.raises(BlockingIOError):
                os.read(read, 1)
    finally:
        for pipe in pipes:
            for end in pipe:
                os.close(end)


@pytest.mark.parametrize("mate", [None, 2])
def test_what_a_mate_met_at_the_probe_names_the_mate_and_ones_own_error_stays_as_it_is(
    receiver: ReceiverAdapter, monkeypatch: pytest.MonkeyPatch, mate: int | None
) -> None:
    seat = receiver._seat
    met = ProbeError("load_weights raised", **({} if mate is None else {"side_rank": mate}))

    def agree(data: bytes) -> tuple[bytes, ...]:
        raise met

    monkeypatch.setattr(seat, "_agree", agree)
    seat.machine.hear(w.RunProbe(request=1, dtypes=("BF16",)))
    with pytest.raises(ProbeError) as caught:
        seat.run_probe(seat.machine)
    if mate is None:
        assert caught.value is met
        assert met.__cause__ is None
    else:
        assert caught.value.causes == {"e/2": "load_weights raised"}
        assert "e/2" in str(caught.value)
