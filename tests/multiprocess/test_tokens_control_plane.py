"""Who may speak to a job's hub: workers without the token, with an old one, recorded and altered bytes, a second trainer job.
Real sockets; each is refused and logged while a job runs, nothing is written, and the job's next update succeeds."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from tests.multiprocess import test_session_in_process as session
from tests.multiprocess import toy_job as toy

from weightbridge.coordinator import Options, wire
from weightbridge.coordinator.hub import Hub
from weightbridge.coordinator.wire import HubSocket, WorkerSocket
from weightbridge.errors import ConnectError
from weightbridge.machine import messages as w
from weightbridge.testing.ports import free_port
from weightbridge.transports import TcpTransport
from weightbridge.transports.base import Identity
from weightbridge.transports.handshake import dial_handshake

TOKEN = b"the token of this job"
OPTIONS = replace(session.FAST, token=TOKEN)
_GREETING_BYTES = 64  # of ZMTP, which answers it before it reads on
HUB_LOG = "weightbridge.coordinator.hub"
WIRE_LOG = "weightbridge.coordinator.wire"
SOCKETS_LOG = "weightbridge.transports.sockets"


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
    job = session.Job(options=replace(OPTIONS, **{"connect_timeout_seconds": 10, **options}))
    job.endpoint = endpoint
    return job


def outcome(work: Callable[[], None]) -> BaseException | None:
    worker = session.Worker(work, "stranger")
    worker.join(30)
    return worker.error


def test_workers_without_the_token_are_refused_and_logged(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    """None, an old one, nearly the right one: of each kind an engine of one worker, a rank of an engine and a trainer."""
    caplog.set_level(logging.WARNING)
    attacked = Attacked(monkeypatch)
    strangers = [stranger_job(attacked.job.endpoint, token=x) for x in (b"", b"the token of yesterday", TOKEN[:-1])]

    def attack() -> None:
        works = [
            work
            for x in strangers
            for work in (partial(x.receiver, "solo", 0), partial(x.receiver, "tp", 1), partial(x.trainer, 1))
        ]
        with ThreadPoolExecutor(len(works)) as pool:
            errors = list(pool.map(outcome, works))
        for error in errors:
            assert isinstance(error, ConnectError)
            assert "token" in error.message
        assert [x.installed for x in strangers] == [{"solo/0": [], "tp/1": []}] * 3

    attacked.between_updates(attack)
    found = [line for line in refusals(caplog, WIRE_LOG) if "refused a stranger" in line]
    assert len(found) >= 9 * 3  # a worker takes the third no for an answer
    assert any("127.0.0.1:" in line for line in found)
    assert refusals(caplog, HUB_LOG) == []  # they did not get as far
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
        second = stranger_job(attacked.job.endpoint, token=token, connect_timeout_seconds=1.5)
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
    assert len([x for x in refusals(caplog, SOCKETS_LOG) if "another session" in x]) == 8
    if token == TOKEN:
        assert any("did not let a worker in: " in line for line in refusals(caplog, HUB_LOG))
    else:
        assert any("refused a stranger" in line for line in refusals(caplog, WIRE_LOG))


def test_two_jobs_side_by_side_do_not_meet(monkeypatch) -> None:
    """Same machine, same names, same token, other ports: both arrive whole."""
    attacked = Attacked(monkeypatch)
    second = session.Job(options=OPTIONS, versions=1)

    def meanwhile() -> None:
        second.run_to_end()

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


def parts_of(recorded: bytes) -> list[bytes]:
    """The greeting, the first command, and the rest: a dialler waits for the hub's answer after each."""
    first = _GREETING_BYTES + 2 + recorded[_GREETING_BYTES + 1]
    return [recorded[:_GREETING_BYTES], recorded[_GREETING_BYTES:first], recorded[first:]]


def play(endpoint: str, recorded: bytes) -> bytes:
    """Say the recorded bytes again, in step with the hub; what came back until it hung up."""
    answer = b""
    with dial(endpoint) as sock, contextlib.suppress(ConnectionError):
        for part in parts_of(recorded):
            sock.sendall(part)
            if select.select([sock], [], [], 2)[0]:
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
    assert len([line for line in refusals(caplog, WIRE_LOG) if "refused a stranger" in line]) == 3
    recorded = b"".join(kept)
    assert len(recorded) > 2000
    assert b"LayoutReady" not in recorded  # the words cannot be read
    assert b"solo" not in recorded
    caplog.clear()
    hub = Hub(endpoint=endpoint, spec=toy.checkpoint_spec(), num_trainers=1, engines=("solo",), options=OPTIONS)
    try:
        answer = play(endpoint, recorded)
        assert hub._workers == {}
    finally:
        hub.close()
    assert len(answer) < 64 + 2 + 168 + 1  # its greeting and its WELCOME, which is made of nonces and says nothing
    assert any("refused a stranger" in line for line in refusals(caplog, WIRE_LOG))


def test_words_altered_on_the_way_are_not_heard() -> None:
    """One byte of what a worker says is changed, wherever: what comes through is what was said before it."""
    words = [b"word %d" % n for n in range(4)]
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    heard_at = {}
    # 64 bytes of greeting, 202 of HELLO, about 320 of INITIATE; the words lie behind them, 92 each.
    for at in (12, 70, 150, 265, 300, 500, 690, 760, 830, 900, 10**6):
        with contextlib.closing(HubSocket(endpoint, TOKEN)) as hub:
            heard, passed = said_through(hub, endpoint, words, at)
        assert heard == words[: len(heard)], at
        assert (len(heard) == len(words)) == (at >= passed), at
        heard_at[at] = len(heard)
    assert set(heard_at.values()) == {0, 1, 2, 3, 4}


def said_through(hub: HubSocket, endpoint: str, words: list[bytes], at: int) -> tuple[list[bytes], int]:
    """(what the hub hears, bytes that passed) when byte `at` of a worker's stream is flipped."""
    heard: list[bytes] = []
    passed = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = WorkerSocket("tcp://{}:{}".format(*listener.getsockname()), TOKEN)
        near, _ = listener.accept()
    with near, dial(endpoint) as far, contextlib.closing(worker):
        for word in words:
            worker.send(word)
        until = time.monotonic() + 10
        has_hung_up = False
        while len(heard) < len(words) and not has_hung_up and time.monotonic() < until:
            try:
                for source, sink in ((near, far), (far, near)):
                    if select.select([source], [], [], 0.001)[0]:
                        data = bytearray(source.recv(65536))
                        has_hung_up = has_hung_up or not data
                        if source is near:
                            if passed <= at < passed + len(data):
                                data[at - passed] ^= 4
                            passed += len(data)
                        sink.sendall(data)
            except ConnectionError:
                has_hung_up = True
            hub.poll(0.2 if has_hung_up else 0.001)
            heard += [message for _, message in hub.receive() if message is not None]
    return heard, passed


def test_a_hub_lets_in_who_has_the_workers_key_too(caplog: pytest.LogCaptureFixture) -> None:
    """The hub's own key is known to whoever has the token alone; were it lost, the workers' is asked for all the same."""
    caplog.set_level(logging.WARNING)
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.curve_serverkey = wire._keys(TOKEN, b"hub")[0]
    dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
    with contextlib.closing(HubSocket(endpoint, TOKEN)) as hub, contextlib.closing(dealer):
        dealer.connect(endpoint)
        dealer.send_multipart([wire._HEADER.pack(0, 0, 1), w.encode(w.Goodbye())])
        until = time.monotonic() + 10
        while not refusals(caplog, WIRE_LOG) and time.monotonic() < until:
            hub.poll(0.02)
            assert list(hub.receive()) == []
    assert any("refused a stranger" in line for line in refusals(caplog, WIRE_LOG))


@pytest.mark.parametrize("key", ["none", "another token's", "its own"])
def test_a_false_hub_learns_nothing_and_moves_nobody(key: str) -> None:
    """Somebody without the token listens at the endpoint, with whatever key, and would say what he likes."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    if key != "none":
        router.curve_server = True
        router.curve_secretkey = wire._keys(b"guess", b"hub")[1] if key != "its own" else zmq.curve_keypair()[1]
    router.bind(endpoint)
    stop, heard = threading.Event(), []

    def answer() -> None:
        while not stop.is_set():
            if router.poll(20):
                who, *frames = router.recv_multipart()
                heard.append(frames)
                router.send_multipart([who, wire._HEADER.pack(0, 0, 1), w.encode(w.Welcome(session=1))])

    false_hub = threading.Thread(target=answer, daemon=True)
    false_hub.start()
    try:
        job = session.Job(options=replace(OPTIONS, connect_timeout_seconds=10))
        job.endpoint = endpoint
        error = outcome(lambda: job.receiver("solo", 0))
    finally:
        stop.set()
        false_hub.join(10)
        router.close(0)
    assert isinstance(error, ConnectError)
    assert "token" in error.message
    assert heard == []
    assert job.installed == {"solo/0": []}


# --- floods -----------------------------------------------------------------------------------------------------------

MIB = 1 << 20
FLOOD_BYTES = 100 * MIB  # of each kind
_KEYLESS = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE = _KEYLESS.replace(b"NULL\0", b"CURVE")
_READY = b"\x04\x1c\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
FLOODS = {
    "one message without end, in parts": (_KEYLESS + _READY, b"\x03" + struct.pack(">Q", MIB)),
    "one giant frame": (_KEYLESS + _READY + b"\x02" + struct.pack(">Q", FLOOD_BYTES), b""),
    "a giant handshake": (_CURVE + b"\x06" + struct.pack(">Q", FLOOD_BYTES), b""),
    "a handshake in pieces": (_CURVE, b"\x06" + struct.pack(">Q", 60_000)),
    "nothing that makes sense": (b"", b""),
}


def peak_bytes(start_anew: bool = False) -> int:
    """The largest that this process has been in memory, since it was last asked to start anew."""
    if start_anew:
        Path("/proc/self/clear_refs").write_text("5")
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def test_strangers_cannot_fill_the_hubs_memory() -> None:
    """500 MiB in five ways, by one stranger after another, and two hundred who stay: the peak hardly moves, and a worker is
    heard all the while."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    stop, heard = threading.Event(), []

    def serve() -> None:
        with contextlib.closing(HubSocket(endpoint, TOKEN)) as hub:
            while not stop.is_set():
                hub.poll(0.02)
                heard.extend(message for _, message in hub.receive() if message is not None)

    def is_heard(word: bytes) -> None:
        worker.send(word)
        until = time.monotonic() + 20
        while word not in heard:
            assert time.monotonic() < until, f"{word!r} is not heard"
            time.sleep(0.005)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    held: list[socket.socket] = []
    try:
        with contextlib.closing(WorkerSocket(endpoint, TOKEN)) as worker:
            is_heard(b"before")
            before = peak_bytes(start_anew=True)
            for name, (first, repeated) in FLOODS.items():
                num_bytes = 0
                while num_bytes < FLOOD_BYTES:
                    num_bytes += flood(endpoint, first, repeated)
                is_heard(name.encode())
            for _ in range(200):
                held.append(dial(endpoint))
                held[-1].sendall(_CURVE + b"\x06" + struct.pack(">Q", 60_000) + bytes(50_000))
            is_heard(b"after")
        assert peak_bytes() - before < 64 * MIB
        assert heard == [b"before", *(name.encode() for name in FLOODS), b"after"]
    finally:
        stop.set()
        thread.join(20)
        for sock in held:
            sock.close()


def flood(endpoint: str, first: bytes, repeated: bytes) -> int:
    """Push until cut off; the bytes that went out."""
    num_bytes, block = 0, repeated + bytes(MIB if not repeated else struct.unpack(">Q", repeated[1:])[0])
    with dial(endpoint) as sock, contextlib.suppress(OSError):
        sock.sendall(first)
        while num_bytes < FLOOD_BYTES:
            num_bytes += sock.send(block)
    return max(num_bytes, 1)


def test_options_do_not_show_the_token() -> None:
    assert TOKEN.decode() not in repr(OPTIONS)
    assert OPTIONS.token == TOKEN
