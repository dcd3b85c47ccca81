"""A small deployment whose traffic can be worked out by hand. Not a test module.

Two trainers on two nodes hold half of the rows each; two engines of one worker, on nodes of their own, need everything. All
links have 1 GB/s. M = (100 x 24 + 6 x 16) x 2 = 4,992 bytes.
"""

from __future__ import annotations

import numpy as np
from tests.unit.plan_cases import everything, rollout, rows, spec_of, takes, topology, trainer

from weightbridge.deployments import Deployment
from weightbridge.simulator.result import LANES, SPAN, LinkUse, MethodResult

M = 4992
NAMES = ("trainer/0", "trainer/1", "a/0", "b/0")


def small_deployment(*, slot_bytes: int = 2048) -> Deployment:
    spec = spec_of((100, 24), (6, 16))
    trainers = [takes(spec, *((i, rows(t.shape[0], r, 2)) for i, t in enumerate(spec.tensors))) for r in range(2)]
    workers = (trainer(0, "node-0"), trainer(1, "node-1"), rollout("a", 0, "node-2"), rollout("b", 0, "node-3"))
    return Deployment(
        name="small",
        description="two trainers, two engines",
        spec=spec,
        topology=topology(*workers),
        maps=(*trainers, everything(spec), everything(spec)),
        slot_bytes=slot_bytes,
    )


def result(name: str = "weightbridge", ewtt: float = 2.0) -> MethodResult:
    return MethodResult(
        name=name, ewtt_seconds=ewtt, agst_seconds=ewtt / 2, control_seconds=0.25, conversion_seconds=0.5,
        communication_seconds=ewtt - 0.75,
        links=(
            LinkUse(name="n", kind="node", outgoing=True, nbytes=10, bandwidth=5.0),
            LinkUse(name="m", kind="node", outgoing=True, nbytes=7, bandwidth=5.0),
            LinkUse(name="n", kind="node", outgoing=False, nbytes=3, bandwidth=5.0),
        ),
    )  # fmt: skip


def spans(*rows: tuple[int, str, int, float, float, int]) -> np.ndarray:
    return np.array([(w, LANES.index(lane), k, a, b, n) for w, lane, k, a, b, n in rows], dtype=SPAN)


SPANS = spans(
    (0, "pack", 0, 0.0, 0.5, 100),
    (0, "send", 0, 0.5, 1.5, 100),
    (0, "send", 1, 1.0, 2.0, 50),  # overlaps the round before
    (0, "send", 2, 1.5, 2.5, 50),  # begins when round 0 ends
    (2, "assemble", 0, 1.5, 1.75, 100),
)
