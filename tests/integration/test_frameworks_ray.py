"""Trainers and engines as Ray actors on a local cluster of several nodes, each with an address of its own.

Three trainers with uneven shards on two nodes, an engine of three workers over two nodes that steps, an engine of one that
idles, and one that comes later and finds the session by name. Every weight of every engine is compared, bit for bit, with what
its own loader makes of the version. `make test-frameworks` sets the environment up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("ray") is None:
    pytest.skip("Ray is not installed in this environment: make test-frameworks", allow_module_level=True)

import ray
from tests.integration.frameworks.cluster import ADDRESSES, local_cluster
from tests.integration.frameworks.ray_actors import FAST, SPEC, EngineWorker, LateEngine, Trainer
from tests.multiprocess import toy_job as toy

from weightbridge.errors import TransferTimeout, UsageError
from weightbridge.integrations.ray import Session, find_session, host_session, publish_session
from weightbridge.integrations.vllm_seat import JoinSettings

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SECONDS = 60
TRAINERS = 3


def test_without_ray_running_it_says_so() -> None:
    """Before the cluster is there."""
    assert not ray.is_initialized()
    with pytest.raises(UsageError, match="Ray is not running"):
        host_session()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with local_cluster(tmp_path_factory.mktemp("cluster"), (8, 8, 8), "toy"):
        yield


def start(cls: type, node: int, *args: Any) -> Any:
    return ray.remote(cls).options(num_cpus=1, resources={f"node{node}": 1}).remote(*args)


class Job:
    def __init__(self) -> None:
        self.trainers = [start(Trainer, node, rank, TRAINERS) for rank, node in enumerate((0, 0, 1))]
        self.tp = [start(EngineWorker, node, "tp", rank, toy.TP) for rank, node in enumerate((1, 2, 2))]
        self.solo = start(EngineWorker, 2, "solo", 0, 1)
        # [ray driver]
        self.session = host_session(self.trainers[0])
        ray.get([worker.join.remote(self.session, **FAST) for worker in self.tp])
        ray.get(self.solo.join.remote(self.session, idle_install=True, **FAST))
        connecting = [t.join.remote(self.session, ["tp", "solo"], **FAST) for t in self.trainers]
        # [/ray driver]
        self.step_until(connecting)
        ray.get(connecting)

    def step_until(self, calls: list[Any]) -> None:
        """Let the engine "tp" go on computing until the calls are done; "solo" gets no request at all."""
        for _ in range(100_000):
            ray.get([worker.step.remote() for worker in self.tp], timeout=SECONDS)
            if len(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) == len(calls):
                return
        pytest.fail("the calls did not end")

    def send(self, version: int) -> list[Any]:
        ray.get([t.train.remote(version) for t in self.trainers])
        sending = [t.send.remote(version) for t in self.trainers]
        self.step_until(sending)
        return ray.get(sending)  # type: ignore[no-any-return]

    def close(self) -> None:
        actors = [*self.tp, self.solo, *self.trainers]
        ray.get([actor.close.remote() for actor in actors], timeout=SECONDS)
        for actor in actors:
            ray.kill(actor)


@pytest.fixture(scope="module")
def job(cluster: None) -> Iterator[Job]:
    found = Job()
    yield found
    found.close()


def expected(engine: str, rank: int, version: int) -> Mapping[str, torch.Tensor]:
    worker = toy.engine_worker(SPEC, engine, rank)
    worker.load_weights(toy.rounded(SPEC, version).items())
    return worker.tensors()


def check_engines(job: Job, version: int) -> None:
    held = ray.get([worker.held.remote() for worker in (*job.tp, job.solo)], timeout=SECONDS)
    for rank in range(toy.TP):
        assert toy.same_bytes(expected("tp", rank, version), held[rank]) == []
    assert toy.same_bytes(expected("solo", 0, version), held[toy.TP]) == []


def test_three_versions_reach_every_engine_bit_for_bit(job: Job) -> None:
    for version in (1, 2, 3):
        reports = job.send(version)
        assert [r.version for r in reports] == [version] * TRAINERS
        assert dict(reports[0].engines) == {"tp": "ready", "solo": "ready"}
        check_engines(job, version)
        assert ray.get([worker.step.remote() for worker in job.tp]) == [version] * toy.TP
        # Nodes have different names, so bytes went over connections between their addresses, not through shared memory.
        assert reports[0].network_bytes["solo/0"][1] + sum(reports[0].network_bytes[f"tp/{r}"][1] for r in (1, 2)) > 0


def test_every_actor_joins_with_its_own_node_and_address(job: Job) -> None:
    places = ray.get([a.place.remote(job.session) for a in (*job.trainers, *job.tp, job.solo)])
    nodes = {info["NodeManagerAddress"]: info["NodeID"] for info in ray.nodes()}
    wanted = [ADDRESSES[i] for i in (0, 0, 1, 1, 2, 2, 2)]
    assert places == [(nodes[address], address) for address in wanted]
    assert job.session.endpoint.startswith(f"tcp://{ADDRESSES[0]}:")  # trainer rank 0's, not the driver's


def test_an_engine_that_comes_later_finds_the_session_by_name(job: Job) -> None:
    publish_session(job.session, "toy")
    late = start(LateEngine, 0, "late")
    assert ray.get(late.place.remote(job.session), timeout=SECONDS)[1] == ADDRESSES[0]  # it has found the session
    for version in range(4, 400):  # it joins between two versions, whichever they are
        if "late" in job.send(version)[0].engines:
            break
    assert ray.get(late.wait.remote(SECONDS), timeout=SECONDS) == version
    assert toy.same_bytes(expected("solo", 0, version), ray.get(late.held.remote())) == []
    check_engines(job, version)
    ray.get(late.close.remote())
    ray.kill(late)


def test_the_last_session_published_under_a_name_is_found(cluster: None) -> None:
    with pytest.raises(TransferTimeout, match="no session named 'nobody'"):
        find_session("nobody", timeout_seconds=0.3)
    for port in (29701, 29702):
        publish_session(Session(endpoint=f"tcp://127.0.0.1:{port}", token=b"t"), "twice")
    assert find_session("twice", timeout_seconds=10).endpoint == "tcp://127.0.0.1:29702"


def test_a_session_keeps_its_token_out_of_sight_and_takes_it_along(cluster: None) -> None:
    first, second = host_session(), host_session()
    assert first.token != second.token
    assert len(bytes.fromhex(first.token.decode())) == 32
    assert repr(first.token) not in repr(first)
    told = JoinSettings.from_environment(first.environment("a", stage_receive=True))
    assert (told.endpoint, told.engine, told.token.encode()) == (first.endpoint, "a", first.token)
    assert told.node == first.here()["node"]
    assert told.options == {"data_host": first.here()["options"].data_host, "stage_receive": True}
    options = first.here(data_host="127.0.0.9", stage_send=True)["options"]
    assert (options.token, options.data_host, options.stage_send) == (first.token, "127.0.0.9", True)


def test_an_error_of_an_actor_comes_to_the_driver_as_what_it_is(cluster: None) -> None:
    alone = start(Trainer, 0, 0, 1)
    with pytest.raises(TransferTimeout, match="nobody") as caught:
        ray.get(alone.join.remote(host_session(alone), ["nobody"], connect_timeout_seconds=1), timeout=SECONDS)
    assert isinstance(caught.value, ray.exceptions.RayError)
    assert any("nobody" in worker for worker in caught.value.waiting_for)
    ray.kill(alone)
