"""The control plane: messages between a hub and its workers, lines that drop and come back, and lives after the first."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq
from tests.multiprocess import test_session_in_process as session
from tests.multiprocess import toy_job as toy

from weightbridge.coordinator import Options, control, line, wire
from weightbridge.coordinator.control import ControlThread
from weightbridge.coordinator.hub import Hub
from weightbridge.coordinator.wire import PART_BYTES, Assembly, HubSocket, WorkerSocket, cut
from weightbridge.errors import ConnectError, TransportError, UsageError, WeightBridgeError
from weightbridge.machine import messages as w
from weightbridge.machine import session as s
from weightbridge.testing.ports import free_port

TOKEN = b"a shared secret"
SIZES = (0, 1, 1000, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 7 * PART_BYTES + 13)


class End:
    """One end of the wire, served when asked. heard: what came, in order."""

    def __init__(self, sock: HubSocket | WorkerSocket) -> None:
        self.socket = sock
        self.heard: list = []

    def serve(self) -> None:
        if isinstance(self.socket, HubSocket):
            self.socket.poll(0.01)
        else:
            self.socket.poll(0.01, NEVER)
        self.heard += self.socket.receive()


class Idle(End):
    """Nobody, for a moment."""

    def __init__(self) -> None:
        self.heard = []

    def serve(self) -> None:
        select.select([NEVER], [], [], 0.01)


IDLE = Idle()
NEVER, _ = os.pipe()  # a descriptor that nobody writes to


def until(done: Callable[[], bool], *ends: End, what: str = "it") -> None:
    give_up = time.monotonic() + 20
    while not done():
        assert time.monotonic() < give_up, f"{what} did not happen; heard: {[len(end.heard) for end in ends]}"
        for end in ends:
            end.serve()


@contextmanager
def wires(num_workers: int = 1, through: Callable[[str], str] = lambda endpoint: endpoint) -> Iterator[list[End]]:
    """[hub, workers...]. through: what the workers dial instead of the hub's endpoint."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    ends = [End(HubSocket(endpoint, TOKEN))]
    try:
        for _ in range(num_workers):
            ends.append(End(WorkerSocket(through(endpoint), TOKEN)))
        yield ends
    finally:
        for end in reversed(ends):
            end.socket.close()


# --- messages ---------------------------------------------------------------------------------------------------------


def test_messages_of_all_sizes_arrive_whole_and_in_order_both_ways() -> None:
    rng = random.Random(1)
    words = [rng.randbytes(n) for n in SIZES]
    with wires(num_workers=2) as (hub, one, two):
        for word in words:
            one.socket.send(word)
            two.socket.send(word[::-1])
        until(lambda: len(hub.heard) == 2 * len(words), hub, one, two)
        names = {name for name, _ in hub.heard}
        assert len(names) == 2
        by_name = {name: [m for n, m in hub.heard if n == name] for name in names}
        assert sorted(by_name.values()) == sorted([words, [word[::-1] for word in words]])
        first = next(name for name in names if by_name[name] == words)
        for word in words:
            for name in names:  # to both, and then one more to one of them
                hub.socket.send(name, word)
            hub.socket.send(first, word[::-1])
        until(lambda: len(one.heard) + len(two.heard) == 3 * len(words), hub, one, two)
        assert one.heard == [m for word in words for m in (word, word[::-1])]
        assert two.heard == words


def feed(assembly: Assembly, parts: list[tuple[bytes, bytes]]) -> None:
    for part in parts:
        assert assembly.add(*part) is None


def test_parts_that_do_not_follow_one_another_are_no_message() -> None:
    rng = random.Random(2)
    one, two = ([(h, bytes(p.bytes)) for h, p in cut(n, rng.randbytes(3 * PART_BYTES))] for n in (5, 6))
    orders = {
        "lost": one[:1] + one[2:],
        "two messages": one[:2] + two[2:],
        "doubled": one[:2] + one[1:],
        "late": one[1:],
        "reordered": [one[0], one[2], one[1]],
    }
    for parts in orders.values():
        assembly = Assembly()
        with pytest.raises(TransportError, match="some were lost"):
            feed(assembly, parts)
        *most, last = [assembly.add(*part) for part in two]
        assert most == [None, None]
        assert last == b"".join(p for _, p in two)  # the next message is as good as ever


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b"", "0 bytes"),
        (b"x" * 17, "17 bytes"),
        (wire._HEADER.pack(0, 0, 0), "part 0 of 0"),
        (wire._HEADER.pack(0, 3, 3), "part 3 of 3"),
        (wire._HEADER.pack(0, 0, 2**32 - 1), "at most 16384"),
        (wire._HEADER.pack(0, 1, 2), "expected part 0"),
    ],
)
def test_headers_that_make_no_sense_are_refused(header: bytes, match: str) -> None:
    with pytest.raises(TransportError, match=match):
        Assembly().add(header, b"part")


def test_a_message_of_the_largest_size_is_allowed_and_none_beyond_it() -> None:
    parts = wire._HEADER.pack(0, 0, w.MAX_MESSAGE_BYTES // PART_BYTES)
    assert Assembly().add(parts, b"") is None
    with pytest.raises(TransportError, match="at most"):
        Assembly().add(wire._HEADER.pack(0, 0, w.MAX_MESSAGE_BYTES // PART_BYTES + 1), b"")


# --- lines that drop ----------------------------------------------------------------------------------------------------


@contextmanager
def proxy() -> Iterator[tuple[Callable[[str], str], Callable[[], None]]]:
    """(through, cut): a path on which `cut` ends the connections there are; later ones pass."""
    listener = socket.create_server(("127.0.0.1", 0))
    target: list[tuple[str, int]] = []
    passing: list[socket.socket] = []

    def through(endpoint: str) -> str:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        target.append((host, int(port)))
        return "tcp://{}:{}".format(*listener.getsockname())

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(target[0])
                passing.extend((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def cut_all() -> None:
        for sock in passing:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        passing.clear()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield through, cut_all
    finally:
        listener.close()
        cut_all()


def test_the_end_of_a_connection_is_told_after_its_last_word() -> None:
    with wires(num_workers=2) as (hub, one, two):
        for end in (one, two):
            end.socket.send(b"first")
        until(lambda: len(hub.heard) == 2, hub, one, two)
        for n in range(50):
            one.socket.send(b"%d" % n)
        one.socket.close()
        until(lambda: (hub.heard[-1][1]) is None, hub)
        (gone,) = [name for name, message in hub.heard if message is None]
        assert [m for n, m in hub.heard if n == gone] == [b"first", *(b"%d" % n for n in range(50)), None]
        two.socket.send(b"still here")
        until(lambda: hub.heard[-1][1] == b"still here", hub, two)


def test_the_end_of_a_worker_that_spoke_once_and_died_is_told() -> None:
    with wires(num_workers=0) as (hub,):
        for _ in range(10):
            worker = WorkerSocket(hub.socket._socket.last_endpoint.decode(), TOKEN)
            worker.send(b"only word")
            worker.close()
            hub.heard.clear()
            until(lambda: len(hub.heard) == 2, hub)
            assert [message for _, message in hub.heard] == [b"only word", None]
        assert (hub.socket._fds, hub.socket._assemblies) == ({}, {})


def test_a_worker_that_dials_again_is_the_same_connection() -> None:
    with proxy() as (through, cut_all), wires(through=through) as (hub, worker):
        for n in range(3):
            worker.socket.send(b"word %d" % n)
            until(lambda n=n: (hub.heard or [(b"", b"")])[-1][1] == b"word %d" % n, hub, worker)
            name = hub.heard[-1][0]
            hub.socket.send(name, b"answer %d" % n)
            until(lambda n=n: worker.heard[-1:] == [b"answer %d" % n], hub, worker)
            cut_all()
            until(lambda: hub.heard[-1][1] is None, hub, worker)
            until(lambda n=n: worker.socket.num_connections == n + 2, hub, worker)
        assert {n for n, _ in hub.heard} == {name}
        assert [m for _, m in hub.heard] == [b"word 0", None, b"word 1", None, b"word 2", None]
        assert worker.socket.is_connected


# --- a worker's lives ---------------------------------------------------------------------------------------------------


def join_of(worker: str, **changes: object) -> w.Join:
    side, rank = worker.split("/")
    return w.Join(**{
        "protocol": w.PROTOCOL_VERSION, "worker": worker, "role": "rollout", "engine": side, "rank": int(rank), "size": 1,
        "node": "n", "bandwidth": 1.0, "spec_digest": "d", "dtypes": ("F32",), **changes,
    })  # fmt: skip


class Life:
    """A worker's control thread, and a hub that does as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control, "_RETRY_SECONDS", 0.05)
        monkeypatch.setattr(line, "GONE_SECONDS", 0.3)
        monkeypatch.setattr(control, "STEP_SECONDS", 0.02)
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.heard: list[w.Message] = []
        self.failures: list[WeightBridgeError] = []
        options = Options(token=TOKEN, heartbeat_seconds=0.1, heartbeat_timeout_seconds=30, connect_timeout_seconds=30)
        self.thread = ControlThread(
            endpoint=self.endpoint, join=join_of("e/0"), options=options, on_message=self.heard.append,
            on_failure=self.failures.append, on_tick=lambda: None,
        )  # fmt: skip
        self.hub: End | None = None

    def __enter__(self) -> Life:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.close()
        self.kill_hub()

    def start_hub(self, token: bytes = TOKEN) -> None:
        self.hub = End(HubSocket(self.endpoint, token))

    def kill_hub(self) -> None:
        if self.hub is not None:
            self.hub.socket.close()
            self.hub = None

    def next(self, kind: type[w.Message]) -> tuple[bytes, w.Message]:
        """(connection, message): the next word of this kind that the hub hears."""
        while True:
            until(lambda: bool(self.hub.heard), self.hub, what=kind.__name__)
            name, data = self.hub.heard.pop(0)
            if data is not None and isinstance(message := w.decode(data), kind):
                return name, message

    def say(self, name: bytes, message: w.Message) -> None:
        self.hub.socket.send(name, w.encode(message))

    def wait(self, done: Callable[[], bool], what: str) -> None:
        until(done, self.hub if self.hub is not None else IDLE, what=what)


def test_a_worker_outlives_the_hub_and_joins_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hub gone; then one with another token, one that does not take it yet; then it is let in, as somebody new."""
    with Life(monkeypatch) as life:
        life.start_hub()
        first, join = life.next(w.Join)
        assert join == join_of("e/0")
        life.say(first, w.Welcome(session=1))
        life.wait(lambda: life.heard == [w.Welcome(session=1)], "the first welcome")
        assert life.next(w.Heartbeat)[0] == first
        life.kill_hub()
        life.wait(lambda: len(life.failures) == 1, "the hub's death")
        assert "has died" in life.failures[0].message
        life.thread.rejoin(join_of("e/0", version=7))
        life.start_hub(token=b"another job's")
        life.wait(lambda: life.hub.socket._refusals.count >= 2, "being refused")
        life.kill_hub()
        life.start_hub()
        names = set()
        for _ in range(3):
            name, join = life.next(w.Join)
            assert join == join_of("e/0", version=7)
            names.add(name)
            life.say(name, w.Rejected(reason="the session is ready"))
        name, _ = life.next(w.Join)
        assert len(names | {first, name}) == 5  # a connection of its own each time
        life.say(name, w.Welcome(session=2))
        life.say(name, w.Closed())
        life.wait(lambda: life.heard[1:] == [w.Welcome(session=2), w.Closed()], "the second welcome")
        life.thread.post(w.SendReady(version=3))
        assert life.next(w.SendReady) == (name, w.SendReady(version=3))
        assert len(life.failures) == 1


def test_a_failure_heard_is_confirmed_before_the_next_life(monkeypatch: pytest.MonkeyPatch) -> None:
    with Life(monkeypatch) as life:
        life.start_hub()
        first, _ = life.next(w.Join)
        life.say(first, w.Welcome(session=1))
        life.wait(lambda: len(life.heard) == 1, "the welcome")
        life.thread.post(w.Heard())
        life.thread.rejoin(join_of("e/0", version=2))
        life.thread.post(w.Heard())  # of no session: said to nobody
        assert life.next(w.Heard)[0] == first
        second, join = life.next(w.Join)
        assert (join.version, second != first) == (2, True)
        life.thread.post(w.Stopped(request=1))
        name, message = life.next(w.Message)
        while name == first:
            name, message = life.next(w.Message)
        assert (name, message) == (second, w.Stopped(request=1))
        assert life.failures == []


def test_a_hub_that_starts_anew_is_not_taken_for_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line comes back by itself, but to another session."""
    spec = toy.checkpoint_spec()
    with Life(monkeypatch) as life:
        monkeypatch.setattr(line, "GONE_SECONDS", 20.0)
        life.start_hub()
        name, _ = life.next(w.Join)
        life.say(name, w.Welcome(session=1))
        life.wait(lambda: len(life.heard) == 1, "the welcome")
        life.kill_hub()
        hub = Hub(endpoint=life.endpoint, spec=spec, num_trainers=1, engines=("e",), options=Options(token=TOKEN))
        try:
            life.wait(lambda: len(life.failures) == 1, "the refusal")
            assert "trainer/0, which hosts the session, has died" in life.failures[0].message
            assert hub._workers == {}
            life.thread.rejoin(join_of("e/0", spec_digest=spec.digest))
            life.wait(lambda: len(life.heard) == 2, "the new hub's welcome")
            assert life.heard[1] == w.Welcome(session=hub._machine.session)
        finally:
            hub.close()


def test_whatever_listens_before_the_hub_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that hangs up, or a server of another kind, is not said to have another token."""
    with contextlib.ExitStack() as stack:
        life = Life(monkeypatch)
        host, port = life.endpoint.removeprefix("tcp://").split(":")
        listener = stack.enter_context(socket.create_server((host, int(port))))
        dials = []

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    if len(dials) % 2:
                        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10)
                    dials.append(sock.close())

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        stack.enter_context(life)
        life.wait(lambda: len(dials) > 20, "twenty dials")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        listener.close()
        life.start_hub()
        name, _ = life.next(w.Join)
        life.say(name, w.Welcome(session=1))
        life.wait(lambda: len(life.heard) == 1, "the welcome")
        assert life.failures == []


def test_the_worker_that_the_hub_lives_with_hears_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may exit on a word of the hub, and the hub with it, before the others are told."""
    said: list[tuple[str, str]] = []
    hub = Hub(
        endpoint=f"tcp://127.0.0.1:{free_port()}",
        spec=toy.checkpoint_spec(),
        num_trainers=1,
        engines=("e",),
        options=Options(),
    )
    hub.close()
    names = ("trainer/0", "trainer/1", "e/0")
    hub._connections = {name: name.encode() for name in names}
    hub._workers = {name.encode(): name for name in names}
    hub._welcomes = {name.encode(): w.Welcome(session=1) for name in names}
    monkeypatch.setattr(
        hub, "_send", lambda connection, message: said.append((connection.decode(), type(message).__name__))
    )
    words = [s.Send(name, word) for word in (w.Ready(attempt=1), w.Heartbeat()) for name in names]
    words = [*words[:4], s.Forget("trainer/0"), *words[4:]]
    monkeypatch.setattr(hub._machine, "handle", lambda event, now: tuple(words))
    hub._handle(s.Tick())
    assert said == [
        *((name, "Ready") for name in names[1:]),
        *((name, "Heartbeat") for name in names[1:]),
        ("trainer/0", "Ready"),
        ("trainer/0", "Heartbeat"),
    ]
    assert set(hub._connections) == set(names[1:])


# --- whole jobs -----------------------------------------------------------------------------------------------------------


def test_a_hub_survives_garbage_and_goes_on_serving() -> None:
    """Of strangers, and of a member without manners: without a token anybody on this machine is one."""
    job = session.Job(versions=1)
    stop = threading.Event()

    def babble() -> None:
        keyless = zmq.Context.instance().socket(zmq.DEALER)
        keyless.setsockopt(zmq.LINGER, 0)
        keyless.connect(job.endpoint)
        member = WorkerSocket(job.endpoint, b"")
        word = w.encode(w.SendReady(version=9))
        while not stop.wait(0.01):
            with contextlib.suppress(zmq.Again):
                keyless.send(word, zmq.NOBLOCK)
            for junk in (b"", b"x" * 100, b"\xff" * 5000, word):
                member.send(junk)
            for frames in ([b"one"], [b"header", b"part"], [b"one", b"two", b"three"], [b"x" * 16, b"x" * 100]):
                member._socket.send_multipart(frames)
            for _ in member.receive():
                pass
        keyless.close(0)
        member.close()

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


def test_a_job_with_a_token_runs() -> None:
    options = Options(
        token=b"a shared secret", slot_bytes=24576, connect_timeout_seconds=20, update_timeout_seconds=15,
        heartbeat_seconds=0.2, heartbeat_timeout_seconds=5,
    )  # fmt: skip
    job = session.Job(options=options, versions=1)
    job.run_to_end()


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
