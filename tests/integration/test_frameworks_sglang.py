"""A session between trainers and SGLang's real model class under its scheduler class with our plugin. `make test-sglang`."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.integration.engines import models
from tests.integration.engines.job import engine_python
from tests.integration.engines.job import run_workers as run_engine_workers
from tests.integration.engines.side import rng_weights

from weightbridge import CheckpointSpec, Options, SenderAdapter, spec_from_folder
from weightbridge.errors import UsageError
from weightbridge.integrations import sglang
from weightbridge.testing.ports import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SPEC = models.moe_spec(models.SPARSE_MOE)
TRAINERS, TP, VERSIONS = 2, 2, 3
TOKEN = "a token"


class Rows:
    """A trainer that keeps rows of everything in fp32; the last rank has fewer."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.live = {t.name: self._rows(torch.zeros(t.shape)).clone() for t in SPEC.tensors}

    def _rows(self, full: torch.Tensor) -> torch.Tensor:
        per_rank = -(-full.shape[0] // TRAINERS)
        return full[self.rank * per_rank : (self.rank + 1) * per_rank]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, full in tensors:
            self.live[name].copy_(self._rows(full))


def train(rank: int, endpoint: str, checkpoint: CheckpointSpec, errors: list[BaseException]) -> None:
    shard = Rows(rank)
    sender = SenderAdapter(
        group=(rank, TRAINERS), endpoint=endpoint, checkpoint=checkpoint, load_weights=shard.load_weights,
        tensors=lambda: shard.live, engines=["a"],
        options=Options(token=TOKEN.encode(), connect_timeout_seconds=200, update_timeout_seconds=60),
    )  # fmt: skip
    try:
        sender.connect()
        for version in range(1, VERSIONS + 1):
            shard.load_weights(rng_weights(SPEC, version))
            sender.send_weights(version).wait()
    except BaseException as error:  # noqa: BLE001
        errors.append(error)
    finally:
        sender.close()


def test_versions_reach_sglang_s_model_through_its_scheduler(tmp_path: Path) -> None:
    python, endpoint = engine_python("sglang"), f"tcp://127.0.0.1:{free_port()}"
    save_file(dict(rng_weights(SPEC, 1000)), tmp_path / "model.safetensors")
    told = {
        "WEIGHTBRIDGE_ENDPOINT": endpoint,
        "WEIGHTBRIDGE_ENGINE": "a",
        "WEIGHTBRIDGE_CHECKPOINT": str(tmp_path),
        "WEIGHTBRIDGE_TOKEN": TOKEN,
        "WEIGHTBRIDGE_OPTIONS": '{"connect_timeout_seconds": 200}',
    }
    errors: list[BaseException] = []
    spec = spec_from_folder(str(tmp_path))
    trainers = [threading.Thread(target=train, args=(r, endpoint, spec, errors), daemon=True) for r in range(TRAINERS)]
    for trainer in trainers:
        trainer.start()
    run_engine_workers(
        "sglang_scheduler.py", "sparse", TP, tmp_path / "run", python=python,
        environ=told,
    )  # fmt: skip
    for trainer in trainers:
        trainer.join(60)
    assert errors == []
    # Each version was told to SGLang; one flush each, that of version 2 put off until no request ran.
    assert [(tmp_path / "run" / f"seen{r}").read_text() for r in range(TP)] == ["['1', '2', '3'] 3 []"] * TP


@pytest.mark.parametrize("text", ["{", '["a"]', "3"])
def test_options_that_cannot_be_read_are_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WEIGHTBRIDGE_ENDPOINT", "tcp://127.0.0.1:29700")
    monkeypatch.setenv("WEIGHTBRIDGE_OPTIONS", text)
    with pytest.raises(UsageError, match="WEIGHTBRIDGE_OPTIONS"):
        sglang.plugin()


def test_without_an_endpoint_nothing_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTBRIDGE_ENDPOINT", raising=False)
    sglang.plugin()  # SGLang is not even installed here
