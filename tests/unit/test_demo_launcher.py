"""The launcher's part of a run, with scripted workers in place of processes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.unit.demo_cases import ANSWERS, config, messages_of_a_good_run, write_folder

from weightbridge.cli.demo import launcher
from weightbridge.cli.demo.config import Fault
from weightbridge.cli.demo.launcher import DemoOptions, Observer, WorkersFailed
from weightbridge.cli.demo.messages import Compare, Failed, Order, Phase, Stop
from weightbridge.cli.demo.record import DemoRecord
from weightbridge.cli.demo.supervisor import Event, Exited
from weightbridge.errors import UsageError


class ScriptedSupervisor:
    """Hands out given events, one batch a call, then nothing; lets workers that are told to stop exit well."""

    def __init__(self, batches: Iterable[list[Event]], status: int = 0) -> None:
        self._batches = list(batches)
        self._status = status
        self._gone: set[str] = set()
        self.told: list[tuple[str, Order]] = []

    @property
    def alive(self) -> tuple[str, ...]:
        return tuple(w for w in config().workers if w not in self._gone)

    def send(self, name: str, order: Order) -> None:
        self.told.append((name, order))
        if isinstance(order, Stop):
            self._batches.append([(name, Exited(returncode=self._status))])

    def events(self, timeout_seconds: float = 0.0) -> list[Event]:
        batch = self._batches.pop(0) if self._batches else []
        self._gone |= {name for name, message in batch if isinstance(message, Exited)}
        return batch


def run_of(supervisor: ScriptedSupervisor) -> launcher._Run:
    return launcher._Run(config(), DemoRecord(config=config()), supervisor, Observer(), launcher._Clock())  # type: ignore[arg-type]


def test_a_good_run_is_gathered_compared_and_closed() -> None:
    supervisor = ScriptedSupervisor([[event] for event in messages_of_a_good_run(config())])
    run = run_of(supervisor)
    run.gather()
    assert supervisor.told == [("trainer/0", Compare(answers=ANSWERS))]
    run.close()
    stopped = [name for name, order in supervisor.told if isinstance(order, Stop)]
    assert stopped == ["tp3/0", "tp3/1", "tp3/2", "single/0", "trainer/0", "trainer/1"]


def test_a_worker_that_closes_badly_fails_the_run() -> None:
    supervisor = ScriptedSupervisor([[event] for event in messages_of_a_good_run(config())], status=3)
    run = run_of(supervisor)
    run.gather()
    with pytest.raises(WorkersFailed, match="exited with status 3") as caught:
        run.close()
    assert set(caught.value.causes) <= {"tp3/0", "tp3/1", "tp3/2", "single/0"}


def test_the_dead_come_first_and_every_survivor_is_heard() -> None:
    survivors = [w for w in config().workers if w != "tp3/1"]
    late = [[(w, Failed(kind="WorkerError", text="tp3/1 is gone", traceback="T"))] for w in survivors]
    supervisor = ScriptedSupervisor([[late[0][0]], [("tp3/1", Exited(returncode=-9))], *late[1:]])
    with pytest.raises(WorkersFailed, match=r"^tp3/1 was killed by SIGKILL$") as caught:
        run_of(supervisor).gather()
    assert caught.value.dead == ("tp3/1",)
    assert next(iter(caught.value.causes)) == "tp3/1"
    assert caught.value.causes["trainer/1"] == "WorkerError: tp3/1 is gone"
    assert set(caught.value.causes) == set(config().workers)
    assert caught.value.tracebacks["single/0"] == "T"
    assert not caught.value.usage


def test_a_survivor_that_never_hears_of_it_is_told_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_GRACE_SECONDS", 0.05)
    phase: Event = ("trainer/0", Phase(text="training version 2"))
    supervisor = ScriptedSupervisor([[phase], [("tp3/1", Exited(returncode=-9))]])
    with pytest.raises(WorkersFailed) as caught:
        run_of(supervisor).gather()
    assert caught.value.causes["trainer/0"] == "said nothing of it within 0 s (training version 2)"


def test_without_a_death_the_first_failure_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_GRACE_SECONDS", 0.05)
    events: list[list[Event]] = [[("tp3/0", Failed(kind="UsageError", text="bad option", usage=True))]]
    with pytest.raises(WorkersFailed, match=r"^tp3/0 failed: bad option$") as caught:
        run_of(ScriptedSupervisor(events)).gather()
    assert caught.value.usage
    assert caught.value.dead == ()


def test_an_early_end_is_a_failure_even_with_status_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_GRACE_SECONDS", 0.05)
    with pytest.raises(WorkersFailed, match=r"^single/0 exited with status 0$"):
        run_of(ScriptedSupervisor([[("single/0", Exited(returncode=0))]])).gather()


def test_silence_ends_and_names_whom_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher._Run, "_silence_seconds", lambda _: 0.05)
    with pytest.raises(WorkersFailed, match=r"waited for trainer/0, .*single/0 to report") as caught:
        run_of(ScriptedSupervisor([[("tp3/0", Phase(text="generating"))]])).gather()
    assert caught.value.causes["tp3/0"] == "was last seen generating"
    assert caught.value.causes["tp3/1"] == "was last seen starting"


def test_faults_for_workers_that_do_not_exist_are_refused(tmp_path: Path) -> None:

    folder = write_folder(tmp_path)
    for options, message in (
        (
            DemoOptions(checkpoint=folder, fault=Fault(worker="tp3/9", version=1, delay_seconds=0)),
            r"tp3/9.*expected one of",
        ),
        (DemoOptions(checkpoint=folder, engine_missing="tp9"), r"tp9: expected one of tp3, single"),
    ):
        with pytest.raises(UsageError, match=message):
            launcher.run_demo(options, Observer())


def test_missing_packages_are_named_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_spec", lambda name: None if name in {"gguf", "transformers"} else object())
    monkeypatch.setenv("WEIGHTBRIDGE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=r"packages transformers, gguf, which .*\[demo\]"):
        launcher.run_demo(DemoOptions(), Observer())
    with pytest.raises(UsageError, match=r"the package transformers, which"):
        launcher.run_demo(DemoOptions(checkpoint=write_folder(tmp_path / "model")), Observer())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
