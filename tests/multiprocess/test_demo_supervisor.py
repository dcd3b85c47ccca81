"""Child processes: their messages, their ends, and that none is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from weightbridge.cli.demo.messages import Message, Phase, Stop
from weightbridge.cli.demo.supervisor import Event, Exited, Supervisor, how_it_ended

CHILD = """
import os, signal, socket, sys, time
line = socket.socket(fileno=int(sys.argv[-1]))
say = lambda text: line.sendall(b'{"type":"phase","text":"' + text.encode() + b'"}\\n')
print("to the log", flush=True)
what = sys.argv[1]
say("hello")
if what == "chatter":
    for i in range(2000):
        say("x" * 500)
    sys.exit(7)
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say("ignoring")
    time.sleep(60)
if what == "obedient":
    sys.exit(0 if b'"stop"' in line.recv(100) else 1)
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def until(supervisor: Supervisor, found: list[Event], what: Message | Exited, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while what not in [message for _, message in found]:
        assert time.monotonic() < deadline, found[-3:]
        found.extend(supervisor.events())


def test_messages_come_before_the_exit(tmp_path: Path, environ: dict[str, str]) -> None:
    found: list[Event] = []
    with Supervisor(tmp_path / "logs") as supervisor:
        supervisor.start("side/0", "child_of_a_test", ["chatter"], environ)
        until(supervisor, found, Exited(returncode=7))
        assert supervisor.alive == ()
    assert len(found) == 2002
    assert found[-1] == ("side/0", Exited(returncode=7))
    assert supervisor.log_path("side/0").read_text() == "to the log\n"


def test_what_a_child_said_last_is_heard_though_it_is_gone(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightbridge.cli.demo.supervisor._RECV_BYTES", 10)
    with Supervisor(tmp_path / "logs") as supervisor:
        supervisor.start("a/0", "child_of_a_test", ["brief"], environ)
        os.waitid(os.P_PID, supervisor.pid("a/0"), os.WEXITED | os.WNOWAIT)
        assert supervisor.events() == [("a/0", Phase(text="hello")), ("a/0", Exited(returncode=0))]


def test_orders_are_heard_and_the_gone_are_not_told(tmp_path: Path, environ: dict[str, str]) -> None:
    found: list[Event] = []
    with Supervisor(tmp_path / "logs") as supervisor:
        supervisor.start("a/0", "child_of_a_test", ["obedient"], environ)
        until(supervisor, found, Phase(text="hello"))
        supervisor.send("a/0", Stop())
        until(supervisor, found, Exited(returncode=0))
        supervisor.send("a/0", Stop())


def test_leaving_ends_even_those_who_ignore_it(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightbridge.cli.demo.supervisor._TERM_SECONDS", 0.2)
    pids = []

    def interrupted() -> None:
        with Supervisor(tmp_path / "logs") as supervisor:
            supervisor.start("a/0", "child_of_a_test", ["stubborn"], environ)
            until(supervisor, [], Phase(text="ignoring"))
            pids.append(supervisor.pid("a/0"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_a_killed_child_is_reported(tmp_path: Path, environ: dict[str, str]) -> None:
    found: list[Event] = []
    with Supervisor(tmp_path / "logs") as supervisor:
        supervisor.start("a/0", "child_of_a_test", ["stubborn"], environ)
        until(supervisor, found, Phase(text="ignoring"))
        os.kill(supervisor.pid("a/0"), signal.SIGKILL)
        until(supervisor, found, Exited(returncode=-9))


def test_ends_in_words() -> None:
    assert how_it_ended(3) == "exited with status 3"
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-250) == "was killed by signal 250"
