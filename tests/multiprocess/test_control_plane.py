"""The control plane against strangers: what is forged, replayed, reflected or malformed changes nothing."""

from __future__ import annotations

import threading
import time

import pytest
import zmq
from tests.multiprocess import test_session_in_process as session
from tests.multiprocess import toy_job as toy

from weightbridge.coordinator import Options
from weightbridge.coordinator.channel import Channel
from weightbridge.coordinator.hub import Hub
from weightbridge.errors import ConnectError, TransportError, UsageError
from weightbridge.machine import messages as w
from weightbridge.testing.ports import free_port


def pair(token: bytes = b"secret", other: bytes | None = None) -> tuple[Channel, Channel]:
    mine, theirs = Channel.nonce(), Channel.nonce()
    common = {"dialler_nonce": mine, "hub_nonce": theirs}
    return (
        Channel(token=token, is_hub=False, **common),
        Channel(token=token if other is None else other, is_hub=True, **common),
    )


def test_frames_arrive_in_both_directions() -> None:
    worker, hub = pair()
    for payload in (b"", b"one", b"two" * 1000):
        assert hub.open(worker.seal(payload)) == payload
        assert worker.open(hub.seal(payload)) == payload


def test_forged_frames_are_refused() -> None:
    worker, hub = pair()
    frame = bytearray(worker.seal(b"payload"))
    for position in (0, 7, 8, 39, 40, len(frame) - 1):
        bent = bytearray(frame)
        bent[position] ^= 1
        with pytest.raises(TransportError, match="authentic"):
            hub.open(bytes(bent))
    with pytest.raises(TransportError):
        hub.open(b"")
    assert hub.open(bytes(frame)) == b"payload"


def test_a_frame_is_accepted_once() -> None:
    worker, hub = pair()
    first, second = worker.seal(b"1"), worker.seal(b"2")
    assert hub.open(first) == b"1"
    with pytest.raises(TransportError, match="replay"):
        hub.open(first)
    assert hub.open(second) == b"2"


def test_frames_are_not_accepted_on_another_connection_direction_or_token() -> None:
    worker, _ = pair()
    _, other_hub = pair()
    frame = worker.seal(b"x")
    with pytest.raises(TransportError):
        other_hub.open(frame)  # other nonces
    with pytest.raises(TransportError):
        worker.open(frame)  # reflected
    stranger, hub_of_another = pair(b"secret", other=b"another")
    with pytest.raises(TransportError):
        hub_of_another.open(stranger.seal(b"x"))


def test_a_hub_survives_garbage_and_goes_on_serving() -> None:
    job = session.Job(versions=1)
    stop = threading.Event()

    def babble() -> None:
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(job.endpoint)
        sealed = Channel(token=b"", dialler_nonce=b"\0" * 16, hub_nonce=b"\0" * 16, is_hub=False)
        junk = [
            b"",
            b"H",
            b"H" + b"x" * 15,
            b"M",
            b"M" + b"x" * 100,
            b"C" + b"x" * 16,
            b"\xff" * 5000,
            b"H" + b"x" * 16,
        ]
        junk.append(b"M" + sealed.seal(w.encode(w.SendReady(version=9))))
        while not stop.is_set():
            for frame in junk:
                socket.send(frame)
            socket.send_multipart([b"M", b"two", b"parts"])
            time.sleep(0.01)
        socket.close(0)

    stranger = threading.Thread(target=babble, daemon=True)
    stranger.start()
    try:
        with job.running() as workers:
            for rank in range(2):
                workers[f"trainer/{rank}"].join(60)
    finally:
        stop.set()
        stranger.join(5)
    assert [worker.error for worker in workers.values()] == [None] * 6
    assert job.wrong == []


def test_hellos_that_were_said_before_the_hub_listened_count_as_one() -> None:
    """A dialler repeats its hello until it is answered, and makes its keys from the first answer."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    spec = toy.checkpoint_spec()
    nonce = Channel.nonce()
    dialler = zmq.Context.instance().socket(zmq.DEALER)
    dialler.setsockopt(zmq.LINGER, 0)
    dialler.connect(endpoint)
    for _ in range(3):
        dialler.send(b"H" + nonce)
    hub = Hub(endpoint=endpoint, spec=spec, num_trainers=1, engines=("a",), options=Options())
    try:
        answers = [receive(dialler) for _ in range(3)]
        assert len(set(answers)) == 1
        channel = Channel(token=b"", dialler_nonce=nonce, hub_nonce=answers[0][1:], is_hub=False)
        join = w.Join(
            protocol=w.PROTOCOL_VERSION, worker="trainer/0", role="trainer", engine="", rank=0, size=1, node="n",
            bandwidth=1.0, spec_digest=spec.digest, dtypes=("F32",),
        )  # fmt: skip
        dialler.send(b"M" + channel.seal(w.encode(join)))
        assert isinstance(w.decode(channel.open(receive(dialler)[1:])), w.Welcome)
        dialler.send(b"H" + nonce)  # admitted: it cannot start over
        dialler.send(b"M" + channel.seal(w.encode(w.Heartbeat())))
        assert isinstance(w.decode(channel.open(receive(dialler)[1:])), w.Heartbeat)
    finally:
        dialler.close(0)
        hub.close()


def receive(socket: zmq.Socket[bytes]) -> bytes:
    assert socket.poll(5000), "no answer"
    return socket.recv()


def test_a_job_with_a_token_runs() -> None:
    options = Options(
        token=b"a shared secret", slot_bytes=24576, connect_timeout_seconds=20, update_timeout_seconds=15,
        heartbeat_seconds=0.2, heartbeat_timeout_seconds=5,
    )  # fmt: skip
    job = session.Job(options=options, versions=1)
    with job.running() as workers:
        for rank in range(2):
            workers[f"trainer/{rank}"].join(60)
    assert [worker.error for worker in workers.values()] == [None] * 6
    assert job.wrong == []


def test_a_hub_gives_its_port_back() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    spec = toy.checkpoint_spec()
    for _ in range(20):
        hub = Hub(endpoint=endpoint, spec=spec, num_trainers=1, engines=("a",), options=Options())
        with pytest.raises(ConnectError, match=endpoint):
            Hub(endpoint=endpoint, spec=spec, num_trainers=1, engines=("a",), options=Options())
        hub.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", 0),
        ("slot_bytes", 0),
        ("bandwidth", -1.0),
        ("update_timeout_seconds", 0.0),
        ("heartbeat_timeout_seconds", 1.5),
    ],
)
def test_options_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(UsageError, match=field):
        Options(**{field: value})  # type: ignore[arg-type]
