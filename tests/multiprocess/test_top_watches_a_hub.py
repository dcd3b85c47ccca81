"""Looking on at a job over the real control plane, with a hub that says what the test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
from typer.testing import CliRunner

from weightbridge.cli.main import app
from weightbridge.coordinator import line
from weightbridge.coordinator.wire import HubSocket
from weightbridge.errors import ConnectError, UsageError, WorkerError
from weightbridge.machine import messages as w
from weightbridge.machine.status import EngineStatus, Status
from weightbridge.observability import watch
from weightbridge.testing.ports import free_port

TOKEN = b"the job's token"


def status(version: int, phase: str = "ready") -> Status:
    engine = EngineStatus(name="a", state="ready", version=version, num_workers=2)
    return Status(session=7, phase=phase, version=version, engines=(engine,), num_trainers=1)


class ToyHub:
    """Answers each Join with `answers`; keeps everything it hears. A context manager."""

    def __init__(self, *answers: w.Message) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.heard: list[w.Message] = []
        self._answers = answers
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._socket = HubSocket(self.endpoint, TOKEN)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._socket.poll(0.02)
            for connection, data in self._socket.receive():
                message = None if data is None else w.decode(data)
                if isinstance(message, w.Join):
                    for answer in self._answers:
                        self._socket.send(connection, w.encode(answer))
                if message is not None:
                    with self._changed:
                        self.heard.append(message)
                        self._changed.notify_all()
        self._socket.close()

    def wait_for(self, kind: type[w.Message]) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: any(isinstance(m, kind) for m in self.heard), 10)

    def __enter__(self) -> ToyHub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(10)


def look(hub: ToyHub, **options: float) -> Iterator[Status]:
    return watch(hub.endpoint, token=TOKEN, **options)


def test_an_observer_joins_beats_hears_every_state_and_says_goodbye() -> None:
    with ToyHub(w.Welcome(session=7), status(3), w.Heartbeat(), status(4)) as hub:
        states = look(hub)
        assert [next(states), next(states)] == [status(3), status(4)]
        assert not any(isinstance(m, w.Goodbye) for m in hub.heard)
        states.close()  # type: ignore[attr-defined]
        assert hub.wait_for(w.Goodbye)
    join = hub.heard[0]
    assert isinstance(join, w.Join)
    assert (join.role, join.engine, join.rank, join.size, join.protocol) == ("observer", "", 0, 1, w.PROTOCOL_VERSION)
    assert join.worker.startswith("observer/")
    assert {type(m) for m in hub.heard[1:]} <= {w.Heartbeat, w.Goodbye}  # it says nothing else


def test_two_observers_have_names_of_their_own() -> None:
    with ToyHub(w.Welcome(session=7), status(3)) as hub:
        lines = [look(hub), look(hub)]
        assert [next(x) for x in lines] == [status(3)] * 2
        for line in lines:
            line.close()  # type: ignore[attr-defined]
    assert len({m.worker for m in hub.heard if isinstance(m, w.Join)}) == 2


def test_the_end_of_a_session_ends_the_states() -> None:
    with ToyHub(w.Welcome(session=7), status(9), w.Closed()) as hub:
        assert list(look(hub)) == [status(9)]
    with ToyHub(w.Welcome(session=7), status(9, "closed")) as hub:
        assert list(look(hub)) == [status(9, "closed")]


def test_a_hub_that_hangs_up_is_missed_long_before_its_silence_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "GONE_SECONDS", 0.3)
    hub = ToyHub(w.Welcome(session=7), status(9))
    with hub:
        states = look(hub)  # whose patience with silence is 15 s
        next(states)
    with pytest.raises(ConnectError, match="closed its connection"):
        next(states)


def failure() -> w.Failure:
    return w.Failure(kind="TransferTimeout", causes={"a/1": "gave no sign of life for 15 s"})


@pytest.mark.parametrize(
    ("answers", "options", "error", "says"),
    [
        ((w.Welcome(session=7), failure()), {}, WorkerError, "TransferTimeout: a/1: gave no sign of life for 15 s"),
        ((w.Welcome(session=7), status(9, "failed"), failure()), {}, WorkerError, "a/1: gave no sign"),
        ((w.Rejected(reason="says it is a 'observer'"),), {}, ConnectError, "does not let observers in: says it is"),
        ((w.Welcome(session=7),), {"silence_timeout_seconds": 0.3}, ConnectError, "has said nothing"),
        ((), {"connect_timeout_seconds": 0.3}, ConnectError, r"nobody answered at tcp://.* within 0.3 s"),
    ],
)
def test_what_goes_wrong_is_said(
    answers: tuple[w.Message, ...], options: dict[str, float], error: type[Exception], says: str
) -> None:
    with ToyHub(*answers) as hub, pytest.raises(error, match=says) as raised:
        list(look(hub, **options))
    if error is WorkerError:
        assert raised.value.causes == {"a/1": "gave no sign of life for 15 s"}  # type: ignore[attr-defined]


def test_without_the_token_nothing_is_heard() -> None:
    with ToyHub(w.Welcome(session=7), status(3)) as hub:
        with pytest.raises(ConnectError, match="the token is not the session's"):
            next(watch(hub.endpoint, token=b"another"))
        assert hub.heard == []
    with pytest.raises(UsageError, match="no token"):
        next(watch("tcp://192.0.2.1:29700"))


def run_top(hub: ToyHub, folder: Path, *options: str) -> tuple[int, str, str]:
    token_file = folder / "token"
    token_file.write_bytes(TOKEN + b"\n")
    done = CliRunner().invoke(app, ["top", hub.endpoint, "--token-file", str(token_file), *options])
    return done.exit_code, done.stdout, done.stderr


def test_the_command_shows_a_state_once(tmp_path: Path) -> None:
    with ToyHub(w.Welcome(session=7), status(12), status(13)) as hub:
        code, out, _ = run_top(hub, tmp_path, "--once", "--json")
        assert code == 0
        assert json.loads(out)["engines"] == [
            {"name": "a", "state": "ready", "version": 12, "num_workers": 2, "size": 0, "since_seconds": 0.0}
        ]
        code, out, _ = run_top(hub, tmp_path, "--once")
        assert code == 0
        assert "session 7  ready" in out
        assert hub.wait_for(w.Goodbye)


def test_the_command_ends_as_the_job_does(tmp_path: Path) -> None:
    with ToyHub(w.Welcome(session=7), status(12), w.Closed()) as hub:
        code, out, _ = run_top(hub, tmp_path)
        assert code == 0
        assert "ended in good order" in out
    with ToyHub(w.Welcome(session=7), status(12), failure()) as hub:
        code, out, err = run_top(hub, tmp_path, "--json")
        assert code == 1
        first, error = out.split("\n", 1)
        assert json.loads(first)["version"] == 12
        assert json.loads(error)["error"]["kind"] == "WorkerError"
        assert "a/1: gave no sign of life" in err.replace("\n", " ")
