"""Where a session's live tensors lie: bound at connect, bound anew when they move, and at no other time; what observers see."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from benchmarks.cluster.tracing import LANES, Recorder
from tests.multiprocess import toy_job as toy

from weightbridge.coordinator import Options, ReceiverAdapter, SenderAdapter, progress
from weightbridge.executor import KernelRan, Observation, Prepared, executor
from weightbridge.kernels import Buffer, ReferenceKernels
from weightbridge.machine import events as m
from weightbridge.testing.ports import free_port


class CountingKernels(ReferenceKernels):
    """Counts the tables that are prepared, at all workers together."""

    prepared: dict[str, int]

    def prepare(self, table: npt.NDArray[np.void], sources: Sequence[Buffer], destinations: Sequence[Buffer]) -> Any:
        self.prepared["all"] = self.prepared.get("all", 0) + 1
        return super().prepare(table, sources, destinations)


class Pair:
    """One trainer and one engine of one worker, both replacing their memory where the test says."""

    def __init__(self, observe: Any = None) -> None:
        self.spec = toy.checkpoint_spec()
        self.options = Options(slot_bytes=24576, connect_timeout_seconds=20, update_timeout_seconds=15, observe=observe)
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.engine = toy.SoloEngine(self.spec)
        self.shard = toy.TrainerShard(self.spec, 0, 1)
        self.move_engine_before: set[int] = set()
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="engine under test", daemon=True)

    def __enter__(self) -> Pair:
        self._thread.start()
        self.sender = SenderAdapter(
            group=None, endpoint=self.endpoint, checkpoint=self.spec, load_weights=self.shard.load_weights,
            tensors=self.shard.tensors, engines=("solo",), options=self.options,
        )  # fmt: skip
        self.sender.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self._stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        def hook(version: int) -> None:
            if version in self.move_engine_before:
                self.engine.live |= {n: torch.full_like(t, 7) for n, t in self.engine.live.items()}

        receiver = ReceiverAdapter(
            group=None, endpoint=self.endpoint, checkpoint=self.spec, load_weights=self.engine.load_weights,
            tensors=self.engine.tensors, engine="solo", options=self.options, before_update_hook=hook,
        )  # fmt: skip
        while not self._stop.wait(0.001):
            if receiver.poll_requests():
                held = toy.rounded(self.spec, receiver.version)
                self.wrong += toy.same_bytes(held, self.engine.live)
        receiver.close()

    def update(self, version: int) -> None:
        self.shard.load_weights(iter(toy.weights(self.spec, version).items()))
        self.sender.send_weights(version).wait()


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts: dict[str, int] = {}
    monkeypatch.setattr(CountingKernels, "prepared", counts, raising=False)
    monkeypatch.setattr(progress, "choose_kernels", lambda name: CountingKernels())
    return counts


def test_kernels_are_bound_at_connect_and_again_only_for_memory_that_moved(prepared: dict[str, int]) -> None:
    with Pair() as pair:
        at_connect = prepared["all"]
        rounds = pair.sender.plan.rounds if pair.sender.plan is not None else 0
        assert rounds <= at_connect <= 2 * rounds  # one table a round at each of the two
        pair.update(1)
        pair.update(2)
        assert prepared["all"] == at_connect
        for name in ("embed", "layers.1.q"):  # as a trainer that gathers its weights anew
            pair.shard.live[name] = pair.shard.live[name].clone()
        pair.update(3)
        by_trainer = prepared["all"] - at_connect
        assert 0 < by_trainer <= rounds
        pair.update(4)
        assert prepared["all"] == at_connect + by_trainer
        pair.move_engine_before = {5}
        pair.update(5)
        assert at_connect < at_connect + by_trainer < prepared["all"] <= 2 * at_connect
        pair.update(6)
        assert prepared["all"] <= 2 * at_connect
    assert pair.wrong == []


@pytest.mark.parametrize("worth_it", [True, False])
def test_memory_freed_on_the_way_to_large_tables_goes_back_at_connect_alone(
    worth_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(executor, "give_back_free_memory", lambda: asked.append(threading.current_thread().name))
    if worth_it:
        monkeypatch.setattr(executor, "_LARGE_TABLES_BYTES", 1)
    with Pair() as pair:
        at_connect = sorted(asked)
        pair.update(1)
    assert pair.wrong == []
    assert sorted(asked) == at_connect == (["wb-progress-solo/0", "wb-progress-trainer/0"] if worth_it else [])


def test_an_observer_is_told_of_every_step_of_a_worker() -> None:
    seen: dict[str, list[Observation]] = {"trainer/0": [], "solo/0": []}
    with Pair(observe=lambda o: seen[o.worker].append(o)) as pair:
        first = {name: len(told) for name, told in seen.items()}
        pair.update(1)
        pair.update(2)
    assert pair.wrong == []
    assert first == {"trainer/0": 1, "solo/0": 1}
    for name, told in seen.items():
        start = told[0].what
        assert isinstance(start, Prepared)
        assert start.workers[start.program.worker].name == name
        rounds = start.program.rounds
        events = [o for o in told if not isinstance(o.what, KernelRan)]
        assert [o.at for o in events] == sorted(o.at for o in events)
        packs = [k for k, r in enumerate(rounds) if len(r.pack)]
        assembles = [k for k, r in enumerate(rounds) if len(r.assemble.table)]
        assert bool(packs) == (name == "trainer/0") == (not assembles)
        ran = [(o.what.work, o.what.round) for o in told if isinstance(o.what, KernelRan)]
        assert ran == 2 * ([("pack", k) for k in packs] + [("assemble", k) for k in assembles])
        for o in told:
            if isinstance(o.what, KernelRan):
                asked = m.Pack(o.what.round) if o.what.work == "pack" else m.Assemble(o.what.round)
                assert o.what.began_at <= o.at
                assert any(e.what == asked and e.at <= o.what.began_at for e in events)
        posts = [o.what for o in told if isinstance(o.what, m.PostWrites)]
        assert sorted((p.round, p.index) for p in posts) == sorted(
            (k, i) for k, r in enumerate(rounds) for i in range(len(r.posts)) for _ in range(2)
        )


def test_the_testbeds_recorder_turns_what_it_sees_into_spans() -> None:
    recorders = {"trainer/0": Recorder(), "solo/0": Recorder()}
    rounds = {}

    def observe(seen: Observation) -> None:
        if isinstance(seen.what, Prepared):
            rounds[seen.worker] = seen.what.program.rounds
        recorders[seen.worker].observe(seen)

    with Pair(observe=observe) as pair:
        pair.update(1)
        for recorder in recorders.values():
            recorder.begin(2)
        pair.update(2)
    for name, recorder in recorders.items():
        spans = recorder.take()
        assert recorder.take() == []
        assert all(begin <= end for _, _, begin, end, _, _ in spans)
        of_lane = {lane: sorted((k, n) for what, k, _, _, n, _ in spans if what == lane) for lane in LANES}
        assert of_lane["pack"] == [(k, 0) for k, r in enumerate(rounds[name]) if len(r.pack)]
        assert of_lane["assemble"] == [(k, 0) for k, r in enumerate(rounds[name]) if len(r.assemble.table)]
        assert of_lane["post"] == sorted((k, p.nbytes) for k, r in enumerate(rounds[name]) for p in r.posts)
        assert len(of_lane["arrive"]) == sum(len(r.awaits) for r in rounds[name])
        peer = "solo/0" if name == "trainer/0" else "trainer/0"
        assert {who.split()[0] for *_, who in spans if who} == {peer}
