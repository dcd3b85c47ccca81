"""A Ray cluster of several nodes on this machine, each with an address of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from tests.integration.frameworks.importable import python_path

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
STORE_BYTES = 80 << 20


@contextmanager
def local_cluster(folder: Path, num_cpus: Sequence[int], namespace: str) -> Iterator[None]:
    """Within, Ray is connected to a head without room for actors and nodes with so many CPUs each.

    Node i has address ADDRESSES[i] and a resource "node<i>". Actors import this repository's packages. folder: for files.
    """
    variables = {
        "PYTHONPATH": python_path(folder),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RAY_DEDUP_LOGS": "0",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES},
    )
    try:
        for i, cpus in enumerate(num_cpus):
            cluster.add_node(
                node_ip_address=ADDRESSES[i],
                num_cpus=cpus,
                object_store_memory=STORE_BYTES,
                resources={f"node{i}": 100},
            )
        ray.init(address=cluster.address, namespace=namespace, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
