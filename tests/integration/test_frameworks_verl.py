"""verl's own registry, CheckpointEngineManager, worker groups and CheckpointEngineWorker drive our checkpoint engine.

On a local Ray cluster of three nodes: an actor of two ranks, a replica of three tensor-parallel workers and one of one worker.
What each toy engine's loader makes of what it was given is compared, bit for bit, with what it makes of the version itself.
`make test-frameworks` sets the environment up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("verl") is None:
    pytest.skip("verl is not installed in this environment: make test-frameworks", allow_module_level=True)

import ray
from tests.integration.frameworks.cluster import local_cluster
from tests.integration.frameworks.verl_workers import SPEC, Actor, Replica
from tests.multiprocess import toy_job as toy
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from weightbridge.errors import WeightBridgeError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SECONDS = 60
ACTORS = 2
CHECKPOINT_ENGINE = {
    # [verl config]
    "backend": "weightbridge",
    "custom_backend_module": "weightbridge.integrations.verl",
    # [/verl config]
}
FAST = {"slot_bytes": 24576, "connect_timeout_seconds": 20, "update_timeout_seconds": 15}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with local_cluster(tmp_path_factory.mktemp("cluster"), (4, 4, 4), "verl"):
        yield


class Job:
    def __init__(self) -> None:
        self.config = CheckpointEngineConfig(**CHECKPOINT_ENGINE, engine_kwargs={"weightbridge": {"options": FAST}})
        self.rollout_config = RolloutConfig(name="vllm", checkpoint_engine=self.config)
        self.actors = RayWorkerGroup(
            resource_pool=RayResourcePool(process_on_nodes=[ACTORS], use_gpu=False, max_colocate_count=1),
            ray_cls_with_init=RayClassWithInitArgs(
                cls=ray.remote(Actor), backend="weightbridge", module=CHECKPOINT_ENGINE["custom_backend_module"],
                engine_kwargs={"options": FAST},
            ),
            device_name="cpu",
        )  # fmt: skip
        self.tp = Replica(0, toy.TP, self.rollout_config, [toy.TP])
        self.solo = Replica(1, 1, self.rollout_config, [1])
        self.manager = CheckpointEngineManager(self.config, self.actors, [self.tp, self.solo])

    def update(self, version: int, fault: str = "") -> dict[str, Any]:
        self.actors.train(version, fault)
        return self.manager.update_weights(global_steps=version)  # type: ignore[no-any-return]

    def check(self, replicas: Sequence[Replica], version: int) -> None:
        for replica in replicas:
            for rank, worker in enumerate(replica.workers):
                held, steps = ray.get(worker.held.remote(), timeout=SECONDS)
                engine = toy.engine_worker(SPEC, "tp" if replica.world_size == toy.TP else "solo", rank)
                engine.load_weights(toy.rounded(SPEC, version).items())
                assert toy.same_bytes(engine.tensors(), held) == []
                assert steps[-1] == version


@pytest.fixture(scope="module")
def job(cluster: None) -> Job:
    return Job()


def identities(job: Job) -> list[str]:
    """Who the engines say they are: a new one means that a worker left its session."""
    found = ray.get(job.actors.execute_checkpoint_engine(["prepare"] * ACTORS))
    return [m["identity"] for m in found]


def test_three_updates_through_verl_s_manager(job: Job) -> None:
    for version in (1, 2, 3):
        metrics = job.update(version)
        job.check([job.tp, job.solo], version)
        assert metrics["weightbridge/ewtt_seconds"] > 0
        assert metrics["weightbridge/network_bytes"] > 0  # nodes have names of their own


def test_replicas_come_and_go(job: Job) -> None:
    late = Replica(2, 1, job.rollout_config, [1])
    job.manager.add_replicas([late])
    job.update(4)
    job.check([job.tp, job.solo, late], 4)
    job.manager.remove_replicas([job.solo])
    job.update(5)
    job.check([job.tp, late], 5)
    job.check([job.solo], 4)
    job.manager.remove_replicas([late])
    job.manager.add_replicas([job.solo])
    job.update(6)
    job.check([job.tp, job.solo], 6)
    for worker in late.workers:
        ray.kill(worker)


@pytest.mark.parametrize("fault", ["shape", "missing"])
def test_an_update_that_fails_raises_and_the_next_one_works(job: Job, fault: str) -> None:
    first = 7 if fault == "shape" else 10
    job.update(first)
    before = identities(job)
    with pytest.raises(WeightBridgeError):  # rank 1's own, or that of a rank that lost it: whichever Ray shows first
        job.update(first + 1, fault)
    job.update(first + 2)
    job.check([job.tp, job.solo], first + 2)
    assert identities(job)[1] != before[1]


def test_the_engine_is_registered_under_its_name(cluster: None) -> None:
    assert CheckpointEngineRegistry.get("weightbridge").__name__ == "WeightBridgeCheckpointEngine"
    assert omega_conf_to_dataclass(CheckpointEngineConfig(**CHECKPOINT_ENGINE)).backend == "weightbridge"
