"""What WeightBridge does in vLLM's engine core, on a core that is made up here and can be put into any state. Seconds.

Real engines are in test_vllm_engines.py; this is for what they seldom do: steps in flight, others that pause and resume,
engines that sleep or hold the halves of two versions. Run by `make test-vllm`.
"""

from __future__ import annotations

import queue
import sys
from collections import deque
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed in this environment: make test-vllm", allow_module_level=True)

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore

from weightbridge.errors import IncompleteUpdateError, InternalError, UnsupportedError, UsageError
from weightbridge.integrations import vllm_backend, vllm_core, vllm_plugin
from weightbridge.integrations.vllm_prefixes import Salt

QUIET = {"error": "", "updated": False, "state": "ready", "version": -1, "requested": False, "prefix_cache": "reset"}


def said(**changed: Any) -> dict[str, Any]:
    return {**QUIET, "patience_seconds": 60.0, **changed}


class Scheduler:
    def __init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED
        self.running: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.preempted: list[str] = []

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def reset_encoder_cache(self) -> None:
        pass

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool) -> None:
        assert drop_stale_output
        request.num_computed_tokens = 0
        self.preempted.append(request.request_id)


class Core:
    """A core whose workers answer polls as told. log: what happened to it, in order."""

    def __init__(self, **parallel: Any) -> None:
        settings = {"data_parallel_size": 1, "data_parallel_index": 0, "distributed_executor_backend": "mp", **parallel}
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(**settings))
        self.log: list[Any] = []
        self.polls: deque[list[dict[str, Any]]] = deque()
        self.scheduler = Scheduler()
        self.model_executor = SimpleNamespace(is_sleeping=False)
        self.batch_queue: deque[str] = deque()
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self._idle_state_callbacks: list[Any] = []
        self.added: list[Any] = []
        self.joins = [said(), said()]

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        if method is vllm_backend.attach_worker:
            return [True, True]
        if method is vllm_backend.join_worker:
            self.log.append(("join", args[0]["engine"]))
            return self.joins
        if method is vllm_backend.leave_worker:
            return [self.log.append("leave")]
        if method == "other":
            return [(timeout, args, kwargs)]
        assert method is vllm_backend.poll_worker
        assert not self.batch_queue, "polled while steps are in flight"
        self.log.append("poll")
        return self.polls.popleft() if self.polls else [said(), said()]

    def step(self) -> str:
        return self.step_with_batch_queue()

    def step_with_batch_queue(self) -> str:
        if self.scheduler.pause_state != PauseState.PAUSED_ALL:
            self.batch_queue.append("step")
        if self.batch_queue:
            self.batch_queue.popleft()
        self.log.append("step")
        return "outputs"

    def preprocess_add_request(self, request: Any) -> Any:
        return request

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.added.append(request)

    def set_weight_version(self, version: str) -> None:
        self.log.append(("version", version))

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests
        assert reset_connector
        self.log.append("reset")
        return True


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    monkeypatch.delenv("WEIGHTBRIDGE_ENDPOINT", raising=False)
    return Core()


def wanted(core: Core) -> vllm_core.CorePolls:
    polls = vllm_core.attach(core)
    polls._wake()
    return polls


def test_without_news_a_step_is_a_step(core: Core) -> None:
    vllm_core.attach(core)
    assert [core.step_with_batch_queue() for _ in range(3)] == ["outputs"] * 3
    assert core.log == ["step"] * 3


def test_a_version_is_installed_before_what_is_scheduled_next(core: Core) -> None:
    wanted(core)
    core.polls.extend([[said(requested=True)] * 2, [said(updated=True, version=7)] * 2])
    core.step()
    assert core.log == ["poll", "poll", ("version", "7"), "reset", "step"]


def test_steps_in_flight_end_before_the_workers_poll(core: Core) -> None:
    core.batch_queue.extend(["old", "older"])
    wanted(core)
    core.polls.append([said(updated=True, version=7)] * 2)
    core.step_with_batch_queue()
    assert core.scheduler.pause_state is PauseState.PAUSED_ALL
    core.step_with_batch_queue()
    assert core.log == ["step", "step"]
    core.step_with_batch_queue()
    assert core.log == ["step", "step", "poll", ("version", "7"), "reset", "step"]
    assert core.scheduler.pause_state is PauseState.UNPAUSED


def test_an_idle_engine_is_woken(core: Core) -> None:
    wanted(core)
    assert not core.input_queue.empty()  # the loop comes round
    assert len(core._idle_state_callbacks) == 1
    core.polls.append([said(updated=True, version=2)] * 2)
    core._idle_state_callbacks.pop()(core)
    assert core.log == ["poll", ("version", "2"), "reset"]


@pytest.mark.parametrize("state", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW, PauseState.UNPAUSED])
def test_what_others_ask_of_the_scheduler_meanwhile_holds_afterwards(core: Core, state: PauseState) -> None:
    core.batch_queue.append("old")
    wanted(core)
    core.step_with_batch_queue()
    core.scheduler.set_pause_state(state)
    assert core.scheduler.pause_state is PauseState.PAUSED_ALL
    core.step_with_batch_queue()
    assert core.scheduler.pause_state is state


def test_workers_that_sleep_are_not_polled(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[float] = []
    monkeypatch.setattr(vllm_core.CorePolls, "_wake_later", lambda self: later.append(1.0))
    wanted(core)
    core.model_executor.is_sleeping = True
    core.step()
    assert core.log == ["step"]
    assert later == [1.0]


def test_an_engine_with_halves_of_two_versions_makes_no_step_until_a_later_one_mends_it(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_core.CorePolls, "_wake_later", lambda self: None)
    polls = wanted(core)
    core.polls.append([said(state="poisoned", error="IncompleteUpdateError: v3"), said()])
    core.step()
    assert core.scheduler.pause_state is PauseState.PAUSED_ALL
    core.scheduler.set_pause_state(PauseState.UNPAUSED)  # somebody resumes it
    assert core.scheduler.pause_state is PauseState.PAUSED_ALL
    core.polls.append([said(updated=True, version=4)] * 2)
    polls._wake()
    core.step()
    assert core.scheduler.pause_state is PauseState.UNPAUSED
    assert ("version", "4") in core.log


def test_an_engine_that_nobody_mends_ends(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_core.CorePolls, "_wake_later", lambda self: None)
    wanted(core)
    bad = said(state="poisoned", error="IncompleteUpdateError: v3", patience_seconds=-1.0)
    core.polls.extend([[bad, said()]] * 2)
    with pytest.raises(IncompleteUpdateError, match=r"start it anew.*v3"):
        core.step()


def test_workers_that_part_are_an_error_of_ours(core: Core) -> None:
    wanted(core)
    core.polls.append([said(updated=True, version=7), said()])
    with pytest.raises(InternalError, match=r"versions \[-1, 7\]"):
        core.step()


def request(name: str, *, computed: int = 0, output: int = 0, salt: str | None = None) -> Any:
    made = SimpleNamespace(
        request_id=name, num_computed_tokens=computed, num_output_tokens=output, cache_salt=salt, block_hashes=["old"]
    )
    made.update_block_hashes = lambda: made.block_hashes.append(f"hash of {made.cache_salt}")
    return made


def test_salted_by_version(core: Core) -> None:
    """Waiting requests and those without an answer yet belong to the new version; those that answer go on as they are."""
    wanted(core)
    waiting, begun, answering = request("w", salt="own"), request("b", computed=40), request("a", computed=80, output=3)
    core.scheduler.running = [begun, answering]
    core.scheduler.requests = {r.request_id: r for r in (waiting, begun, answering)}
    core.polls.append([said(updated=True, version=5, prefix_cache="salt")] * 2)
    core.step()
    assert core.log == ["poll", ("version", "5"), "step"]
    assert core.scheduler.preempted == ["b"]
    assert core.scheduler.running == [answering]
    assert answering.block_hashes == ["old"]
    assert waiting.block_hashes == ["hash of own\x1fweightbridge:5"]
    assert begun.block_hashes == ["hash of \x1fweightbridge:5"]
    # One that arrives now is hashed once, one that was hashed for the version before is hashed again.
    new, late = request("n"), request("l", salt="x\x1fweightbridge:4")
    core.add_request(core.preprocess_add_request(new))
    core.add_request(late)
    assert new.block_hashes == ["old"]
    assert late.block_hashes == ["hash of x\x1fweightbridge:5"]
    assert core.added == [new, late]


def test_nothing_is_salted_before_the_first_version() -> None:
    salt, arrived = Salt(), request("r", salt="own")
    salt.on_arrival(arrived)
    salt.renew(arrived)
    assert (arrived.cache_salt, arrived.block_hashes) == ("own", ["old"])


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"data_parallel_size": 2}, "engine of its own"),
        ({"distributed_executor_backend": "external_launcher"}, "WorkerExt"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(parallel: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        vllm_core.attach(Core(**parallel))


@pytest.mark.parametrize("method", ["start_weight_update", "update_weights"])
def test_updates_cannot_be_asked_for_and_other_calls_pass(core: Core, method: str) -> None:
    vllm_core.attach(core)
    with pytest.raises(UsageError, match=rf"{method} has nothing to fetch.*trainers send"):
        core.collective_rpc(method)
    assert core.collective_rpc("other", 3.0, (1,), {"a": 2}) == [(3.0, (1,), {"a": 2})]


def test_workers_that_cannot_join_keep_the_engine_from_starting(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTBRIDGE_ENDPOINT", "tcp://127.0.0.1:1")
    monkeypatch.setenv("WEIGHTBRIDGE_ENGINE", "a")
    core.joins = [said(error="no such folder"), said()]
    with pytest.raises(UsageError, match="worker 0: no such folder"):
        vllm_core.attach(core)
    assert core.log == [("join", "a"), "leave"]


def test_a_vllm_without_a_place_for_the_backend_starts_as_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [EngineCore._initialize_kv_caches]
    vllm_plugin.register()
    vllm_plugin.register()  # in one process vLLM may call it more than once
    seen.append(EngineCore._initialize_kv_caches)
    assert seen[1].__wrapped__ is seen[0]
    monkeypatch.setattr(EngineCore, "_initialize_kv_caches", seen[0])
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.factory", None)
    vllm_plugin.register()
    assert EngineCore._initialize_kv_caches is seen[0]


def test_joining_by_a_call(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTBRIDGE_ENGINE", "a")
    vllm_core.attach(core)
    core.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"endpoint": "tcp://127.0.0.1:1"}})
    core.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"engine": "b"}})
    assert core.log == [("join", "a"), ("join", "b")]
    with pytest.raises(UsageError, match="init_info has no field engines, host; there are checkpoint, endpoint"):
        core.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"host": "x", "engines": "a"}})
