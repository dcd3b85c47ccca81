"""Who may speak to a job's hub: workers without the token, with an old one, recorded frames and bytes, a second trainer job.
Real sockets; each is refused and logged while a job runs, nothing is written, and the job's next update succeeds."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import zmq
from tests.multiprocess import test_session_in_process as session
from tests.multiprocess import toy_job as toy

from weightbridge.coordinator import Options
from weightbridge.coordinator.channel import Channel
from weightbridge.coordinator.hub import Hub
from weightbridge.errors import ConnectError, TransferTimeout, WeightBridgeError
from weightbridge.machine import messages as w
from weightbridge.testing.ports import free_port
from weightbridge.transports import TcpTransport
from weightbridge.transports.base import Identity
from weightbridge.transports.handshake import dial_handshake

TOKEN = b"the token of this job"
OPTIONS = replace(session.FAST, token=TOKEN)
_GREETING_BYTES = 64  # of ZMTP, which answers it before it reads on
HUB_LOG = "weightbridge.coordinator.hub"
HANDSHAKE_LOG = "weightbridge.transports.handshake"


class Attacked:
    """A job that has installed version 1 and waits before version 2 until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, options: Options = OPTIONS) -> None:
        self.job = session.Job(options=options, versions=2)
        self.transports: list[TcpTransport] = []  # of the job's workers, in the order in which they began to listen
        self._go = threading.Event()
        genuine, listen = toy.weights, TcpTransport._listen

        def gated(spec: Any, version: int) -> dict[str, torch.Tensor]:
            if version == 2:
                assert self._go.wait(60)
            return genuine(spec, version)

        def noted(transport: TcpTransport) -> socket.socket:
            self.transports.append(transport)
            return listen(transport)

        monkeypatch.setattr(toy, "weights", gated)
        monkeypatch.setattr(TcpTransport, "_listen", noted)

    def between_updates(self, attack: Callable[[], None]) -> None:
        """Run the attack between two updates; then both must have been installed bit for bit, with nobody lost."""
        with self.job.running() as workers:
            try:
                until = time.monotonic() + 60
                while not self.job.reports and time.monotonic() < until and workers["trainer/0"].thread.is_alive():
                    time.sleep(0.01)
                assert len(self.job.reports) == 1
                attack()
            finally:
                self._go.set()
            for rank in range(2):
                workers[f"trainer/{rank}"].join(60)
        assert [worker.error for worker in workers.values()] == [None] * 6
        assert self.job.wrong == []  # whenever an engine looked, each live byte was that of the version it served
        assert set(map(tuple, self.job.installed.values())) == {(1, 2)}


def refusals(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [r.getMessage() for r in list(caplog.records) if r.name == name and r.levelno == logging.WARNING]


def stranger_job(endpoint: str, **options: Any) -> session.Job:
    """Another job of the same shape, aimed at the first one's hub."""
    job = session.Job(options=replace(OPTIONS, connect_timeout_seconds=10, **options))
    job.endpoint = endpoint
    return job


def outcome(work: Callable[[], None]) -> BaseException | None:
    worker = session.Worker(work, "stranger")
    worker.join(30)
    return worker.error


@pytest.mark.parametrize("token", [b"", b"the token of yesterday", TOKEN[:-1]], ids=["none", "old", "almost"])
def test_workers_without_the_token_are_refused_and_logged(token, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    attacked = Attacked(monkeypatch)

    def attack() -> None:
        stranger = stranger_job(attacked.job.endpoint, token=token)
        for work in (
            lambda: stranger.receiver("solo", 0),
            lambda: stranger.receiver("tp", 1),
            lambda: stranger.trainer(1),
        ):
            error = outcome(work)
            assert isinstance(error, ConnectError)
            assert "token" in error.message
        assert stranger.installed == {"solo/0": [], "tp/1": []}

    attacked.between_updates(attack)
    found = refusals(caplog, HUB_LOG)
    assert len(found) == 3
    assert all("stranger" in line and "127.0.0.1" in line and "not authentic" in line for line in found)
    assert TOKEN.decode() not in caplog.text


# --- a second trainer job ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [TOKEN, b"its own token"], ids=["same token", "other token"])
def test_a_second_trainer_job_cannot_write_into_the_first_ones_engines(
    token: bytes, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By its hub's port, as a worker of the first job's hub, and by dialling the engines' own ports with all names right."""
    caplog.set_level(logging.WARNING)
    attacked = Attacked(monkeypatch)

    def attack() -> None:
        second = stranger_job(attacked.job.endpoint, token=token)
        error = outcome(lambda: second.trainer(0))  # its rank 0 wants to be the hub
        assert isinstance(error, ConnectError)
        assert "another session may use the port" in error.message
        error = outcome(lambda: second.trainer(1))  # the others dial whoever is there
        assert isinstance(error, ConnectError)
        assert ("takes no more workers" if token == TOKEN else "token") in error.message
        engines = [t for t in list(attacked.transports) if not t.identity.worker.startswith("trainer")]
        assert len(engines) == 4
        for engine in engines:
            for name in ("trainer/0", "trainer/1"):
                identity = Identity(worker=name, session="4711", token=token)
                with dial(engine.address) as sock, pytest.raises(ConnectError, match="another session"):
                    dial_handshake(sock, identity, engine.identity.worker, time.monotonic() + 5)

    attacked.between_updates(attack)
    assert len([x for x in refusals(caplog, HANDSHAKE_LOG) if "another session" in x]) == 8
    expected = "did not let a worker in: the session is ready" if token == TOKEN else "not authentic"
    assert any(expected in line for line in refusals(caplog, HUB_LOG))


def test_two_jobs_side_by_side_do_not_meet(monkeypatch) -> None:
    """Same machine, same names, same token, other ports: both arrive whole."""
    attacked = Attacked(monkeypatch)
    second = session.Job(options=OPTIONS, versions=1)

    def meanwhile() -> None:
        with second.running() as workers:
            for rank in range(2):
                workers[f"trainer/{rank}"].join(60)
        assert [worker.error for worker in workers.values()] == [None] * 6
        assert second.wrong == []

    attacked.between_updates(meanwhile)


def dial(address: str) -> socket.socket:
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=5)


# --- recordings -------------------------------------------------------------------------------------------------------


@contextmanager
def recorder(endpoint: str) -> Iterator[tuple[str, list[bytes]]]:
    """A listener on the path to the hub. It passes everything on and keeps what the first dialler sent, byte for byte."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept: list[bytes] = []

    def pump(source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if keep:
                    kept.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):
            dialler, _ = listener.accept()
            onward = None
            while onward is None:  # the hub may not be up yet
                with contextlib.suppress(ConnectionRefusedError):
                    onward = dial(endpoint)
            onward.settimeout(None)
            with dialler, onward, ThreadPoolExecutor(2) as pool:
                pool.submit(pump, dialler, onward, True)
                pool.submit(pump, onward, dialler, False)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", kept
    finally:
        listener.close()
        thread.join(10)


def play(endpoint: str, recorded: bytes) -> bytes:
    """Say the recorded bytes again; what came back."""
    answer = b""
    with dial(endpoint) as sock:
        sock.settimeout(0.5)
        with contextlib.suppress(OSError):
            for part in (recorded[:_GREETING_BYTES], recorded[_GREETING_BYTES:]):
                sock.sendall(part)
                answer += sock.recv(65536)
            while data := sock.recv(65536):
                answer += data
    return answer


def test_a_recorded_worker_cannot_be_played_again(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    """Into the same session while its original lives, and into the next session at the same address."""
    caplog.set_level(logging.WARNING)
    attacked = Attacked(monkeypatch)
    endpoint = attacked.job.endpoint
    adapter = session.ReceiverAdapter

    with recorder(endpoint) as (address, kept):

        def adapter_of(**arguments: Any) -> Any:
            return adapter(**{**arguments, "endpoint": address if arguments["engine"] == "solo" else endpoint})

        monkeypatch.setattr(session, "ReceiverAdapter", adapter_of)
        attacked.between_updates(lambda: [play(endpoint, b"".join(kept)) for _ in range(3)] and None)
    recorded = b"".join(kept)
    assert b"LayoutReady" in recorded  # the words are readable, for the channel does not encrypt
    caplog.clear()
    hub = Hub(endpoint=endpoint, spec=toy.checkpoint_spec(), num_trainers=1, engines=("solo",), options=OPTIONS)
    try:
        answer = play(endpoint, recorded)
        assert answer.endswith(b"X")
        assert b"Welcome" not in answer
        assert hub._workers == {}
    finally:
        hub.close()
    assert any("a stranger" in line and "not authentic" in line for line in refusals(caplog, HUB_LOG))


def test_recorded_frames_are_refused_on_a_connection_of_the_attackers_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    spec = toy.checkpoint_spec()
    hub = Hub(endpoint=endpoint, spec=spec, num_trainers=1, engines=("a",), options=OPTIONS)
    dealers = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(2)]
    try:
        for dealer in dealers:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(endpoint)
        genuine, attacker = dealers
        nonce = Channel.nonce()
        genuine.send(b"H" + nonce)
        channel = Channel(token=TOKEN, dialler_nonce=nonce, hub_nonce=receive(genuine)[1:], is_hub=False)
        join = w.Join(
            protocol=w.PROTOCOL_VERSION, worker="trainer/0", role="trainer", engine="", rank=0, size=1, node="n",
            bandwidth=1.0, spec_digest=spec.digest, dtypes=("F32",),
        )  # fmt: skip
        frames = [b"M" + channel.seal(w.encode(m)) for m in (join, w.Heartbeat(), w.Goodbye())]
        genuine.send(frames[0])
        assert isinstance(w.decode(channel.open(receive(genuine)[1:])), w.Welcome)
        for frame in frames:
            attacker.send(b"H" + nonce)
            assert receive(attacker)[:1] == b"C"
            attacker.send(frame)
            assert receive(attacker) == b"X"
        assert len([x for x in refusals(caplog, HUB_LOG) if "a stranger" in x]) == 3
        genuine.send(frames[0])  # again on its own connection
        genuine.send(frames[1])
        assert isinstance(
            w.decode(channel.open(receive(genuine)[1:])), w.Heartbeat
        )  # the hub's own; nobody was cut off
        until = time.monotonic() + 5
        while (
            not any("trainer/0" in x and "replay" in x for x in refusals(caplog, HUB_LOG)) and time.monotonic() < until
        ):
            time.sleep(0.01)
        assert any("trainer/0" in x and "replay" in x for x in refusals(caplog, HUB_LOG))
    finally:
        for dealer in dealers:
            dealer.close(0)
        hub.close()


def receive(dealer: zmq.Socket[bytes]) -> bytes:
    assert dealer.poll(5000), "no answer"
    return dealer.recv()


def test_a_false_hub_learns_nothing_and_moves_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Somebody without the token listens at the endpoint and says what he likes, a recording of another hub included."""
    caplog.set_level(logging.WARNING)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind(endpoint)
    other = Channel(token=b"guess", dialler_nonce=bytes(16), hub_nonce=bytes(16), is_hub=True)
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            if not router.poll(50):
                continue
            who, frame = router.recv_multipart()
            if frame[:1] == b"H":
                router.send_multipart([who, b"C" + bytes(16)])
            assert TOKEN not in frame
            for word in (w.Welcome(session=1), w.RunProbe(request=1, dtypes=("F32",)), w.Closed()):
                router.send_multipart([who, b"M" + other.seal(w.encode(word))])
            router.send_multipart([who, b"M" + frame[1:]])  # reflected

    false_hub = threading.Thread(target=answer, daemon=True)
    false_hub.start()
    try:
        job = session.Job(options=replace(OPTIONS, connect_timeout_seconds=1.5))
        job.endpoint = endpoint
        error = outcome(lambda: job.receiver("solo", 0))
    finally:
        stop.set()
        false_hub.join(10)
        router.close(0)
    assert isinstance(error, ConnectError | TransferTimeout)
    assert isinstance(error, WeightBridgeError)
    assert any("solo/0 ignores a frame" in x for x in refusals(caplog, "weightbridge.coordinator.control"))
    assert job.installed == {"solo/0": []}


def test_options_do_not_show_the_token() -> None:
    assert TOKEN.decode() not in repr(OPTIONS)
    assert OPTIONS.token == TOKEN
