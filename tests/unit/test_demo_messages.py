"""The line between a worker and the launcher."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

from weightbridge.cli.demo.messages import (
    Answered,
    Channel,
    Compare,
    Failed,
    LineBuffer,
    Phase,
    Step,
    Stop,
    Updated,
    encode,
)

MESSAGES = (
    Phase(text="größer\nals"),
    Updated(version=1, ewtt_seconds=0.5, agst_seconds=0.25, network_bytes={"a": (1, 2)}, engines={"e": "ready"}),
    Answered(version=-1, text="x", steps=(Step(token=3, top=((3, 1.5), (4, 1.0))),)),
    Failed(kind="SpecError", text="bad", causes={"trainer/0": "gone"}),
)


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_messages_may_come_in_pieces(piece: int) -> None:
    stream = b"".join(encode(m) for m in MESSAGES)
    buffer = LineBuffer()
    found = [m for at in range(0, len(stream), piece) for m in buffer.feed(stream[at : at + piece])]
    assert tuple(found) == MESSAGES


def test_a_line_that_is_no_message_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        LineBuffer().feed(b'{"type":"exec","code":"1"}\n')
    with pytest.raises(msgspec.ValidationError):
        LineBuffer().feed(b'{"type":"phase","text":3}\n')


def test_orders_reach_the_worker_and_its_end_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    channel = Channel(theirs.detach(), on_lost=lost.set)
    with ours:
        channel.send(MESSAGES[0])
        assert LineBuffer().feed(ours.recv(4096)) == [MESSAGES[0]]
        assert not channel.stop_requested
        assert channel.wait_for_compare(0.01) is None
        order = Compare(answers={"tp3": (Step(token=1, top=()),)})
        ours.sendall(encode(order)[:9])
        ours.sendall(encode(order)[9:] + encode(Stop()))
        assert channel.wait_for_stop(5.0)
        assert channel.wait_for_compare(5.0) == order
        assert not lost.is_set()
    assert lost.wait(5.0)
