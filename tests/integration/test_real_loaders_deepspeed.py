"""DeepSpeed's ZeRO-3 engine on a CPU: the layout of its pieces, and a training that feeds an engine through a session.

`make test-deepspeed` sets it up.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.integration.engines import models
from tests.integration.engines.deepspeed_models import LAST_VERSION, tied_spec
from tests.integration.engines.job import (
    Rank,
    check_coverage,
    check_layout,
    check_update,
    engine_python,
    indices,
    read_side,
    run_workers,
)

from weightbridge.testing.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SPEC = models.dense_spec()
TRAINERS, WORKERS = 3, 2
ON_CPU = {"DS_ACCELERATOR": "cpu"}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Rank]]:
    folder = tmp_path_factory.mktemp("layouts")
    python = engine_python("deepspeed")
    run_workers("deepspeed_worker.py", "layouts", TRAINERS, folder, python=python, environ=ON_CPU)
    return {n: read_side(folder, TRAINERS, SPEC, label=f"{n}-") for n in ("bfloat16", "float32", "stage2")}


def piece_of(whole: np.ndarray, rank: int) -> np.ndarray:
    """ZeRO-3's rule: the flattened parameter, padded until the ranks divide it, in equal pieces; here without the padding."""
    padded = np.concatenate([whole.reshape(-1), np.full(-whole.size % TRAINERS, -9)])
    piece = np.split(padded, TRAINERS)[rank]
    return piece[piece != -9]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_zero3_cuts_flattened_parameters_in_equal_pieces(layouts: dict[str, list[Rank]], dtype: str) -> None:
    ranks = layouts[dtype]
    check_coverage(ranks, SPEC)
    for r, rank in enumerate(ranks):
        check_layout(rank, SPEC, {name: piece_of(whole, r) for name, whole in indices(SPEC).items()})
        assert {t.dtype.name for t in rank.source_map.live if t.parameter} == {"BF16" if dtype == "bfloat16" else "F32"}
    shapes = [{t.name: t.shape for t in r.source_map.live} for r in ranks]
    assert [s["lm_head.weight"] for s in shapes] == [(2184,), (2184,), (2182,)]
    assert [s["model.layers.1.self_attn.q_norm.weight"] for s in shapes] == [(2,), (2,), (0,)]


def test_stage_2_leaves_parameters_whole(layouts: dict[str, list[Rank]]) -> None:
    check_coverage(layouts["stage2"], SPEC)
    for rank in layouts["stage2"]:
        check_layout(rank, SPEC, indices(SPEC))


def test_updates_from_bf16_and_from_fp32_pieces(layouts: dict[str, list[Rank]]) -> None:
    check_update(SPEC, layouts["bfloat16"], {"fp32": layouts["float32"], "whole": layouts["stage2"]})
    check_update(SPEC, layouts["float32"], {"bf16": layouts["bfloat16"]})


# --- a training that feeds an engine ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which trainers leave alone<step> and sent<version>, the engine's workers received<version>-<rank>."""
    python, folder = engine_python("deepspeed"), tmp_path_factory.mktemp("job")
    endpoint = {"WB_ENDPOINT": f"tcp://127.0.0.1:{free_port()}"}
    with ThreadPoolExecutor(2) as pool:
        sides = [
            pool.submit(
                run_workers, "deepspeed_worker.py", "train", TRAINERS, folder / "trainers",
                python=python, environ={**ON_CPU, **endpoint},
            ),
            pool.submit(run_workers, "deepspeed_rollout.py", "", WORKERS, folder / "engine", environ=endpoint),
        ]  # fmt: skip
        failures = [error for error in (side.exception() for side in sides) if error is not None]
    assert not failures, "\n".join(map(str, failures))
    return folder


def kept(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as found:
        return {name: found[name] for name in found.files}


def differing(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> set[str]:
    assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in expected.items()}
    return {name for name in expected if not np.array_equal(found[name], expected[name])}


@pytest.mark.parametrize("rank", range(WORKERS))
def test_each_version_is_received_as_deepspeed_gathers_it(job: Path, rank: int) -> None:
    names = {t.name for t in tied_spec().tensors}
    for version in range(1, LAST_VERSION + 1):
        sent = kept(job / "trainers" / f"sent{version}.npz")
        assert set(sent) == names
        received = kept(job / "engine" / f"received{version}-{rank}.npz")
        assert differing(received, sent) == set(), f"version {version}"


def test_every_step_changes_all_matrices(job: Path) -> None:
    """Otherwise the test above proves little."""
    matrices = {t.name for t in tied_spec().tensors if len(t.shape) == 2}
    for version in range(1, LAST_VERSION):
        before, after = (kept(job / "trainers" / f"sent{v}.npz") for v in (version, version + 1))
        assert differing(after, before) >= matrices


def test_training_goes_on_as_if_nothing_was_learnt_or_sent(job: Path) -> None:
    for version in range(1, LAST_VERSION + 1):
        sent, alone = (kept(job / "trainers" / f"{label}{version}.npz") for label in ("sent", "alone"))
        assert differing(sent, alone) == set(), f"version {version}"
