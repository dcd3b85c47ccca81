"""The Python snippets of README.md, docs/quickstart.md and docs/integrate.md run as they are written.

Names that a page takes from its reader (a model, a training step) are given here; the endpoint's port is replaced.
Workers are threads. What needs frameworks is run by tests/integration/test_page_snippets_frameworks.py.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.page_snippets import ENDPOINT, Snippet, run, snippets, values_of
from torch import nn

from weightbridge import CheckpointSpec, UpdateReport, discover_tensors, spec_from_folder
from weightbridge.integrations import dtensor
from weightbridge.testing.ports import free_port

PAGES = ("README.md", "docs/quickstart.md", "docs/integrate.md")
# Snippets that are run, here or in tests/integration, by page and the beginning of their heading.
RUN = {
    ("README.md", "WeightBridge"),
    ("docs/quickstart.md", "A whole job"),
    ("docs/integrate.md", "1. "),
    ("docs/integrate.md", "2. "),
    ("docs/integrate.md", "3. "),
    ("docs/integrate.md", "4. "),
    ("docs/integrate.md", "5. "),
}
NOT_RUN = 0  # marked <!-- not run: why -->: a number that should not grow
LIMIT_SECONDS = 30


def _snippet(page: str, heading: str) -> Snippet:
    (found,) = [s for s in snippets(page) if s.heading.startswith(heading) and not s.not_run]
    return found


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


class _Engine(nn.Module):
    """A rollout worker's model: bf16, gate and up in one tensor, as engines have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(37, 12, dtype=torch.bfloat16), requires_grad=False)
        self.gate_up = nn.Parameter(torch.zeros(22, 12, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = {"embed": self.embed, "gate": self.gate_up[:11], "up": self.gate_up[11:]}
        for name, tensor in tensors:
            places[name].copy_(tensor)

    def holds(self, state: dict[str, torch.Tensor]) -> bool:
        """Whether this is what the trainer's weights are, rounded and fused."""
        fused = torch.cat([state["gate"], state["up"]]).bfloat16()
        return torch.equal(self.embed, state["embed"].bfloat16()) and torch.equal(self.gate_up, fused)


class _Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(37, 12))
        self.gate = nn.Parameter(torch.zeros(11, 12))
        self.up = nn.Parameter(torch.zeros(11, 12))

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointSpec:
    """The pages' path/to/checkpoint, in the working directory."""
    folder = tmp_path / "path" / "to" / "checkpoint"
    folder.mkdir(parents=True)
    save_file({name: tensor.bfloat16() for name, tensor in _Trainer().state().items()}, folder / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    return spec_from_folder(folder)


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor() as threads:
        yield threads.submit


def test_every_snippet_is_run_or_says_why_not() -> None:
    found = [(page, s) for page in PAGES for s in snippets(page)]
    unknown = [
        f"{s.place}, under {s.heading!r}: run it in a test, or put '<!-- not run: why -->' before it"
        for page, s in found
        if not s.not_run and not any(page == p and s.heading.startswith(h) for p, h in RUN)
    ]
    assert unknown == []
    assert len([s for _, s in found if not s.not_run]) == len(RUN)
    assert len([s for _, s in found if s.not_run]) == NOT_RUN
    assert [s.place for _, s in found if "tcp://" in s.code and ENDPOINT not in s.code] == []


def test_the_readme_sends_a_step_from_a_trainer_to_an_engine(
    checkpoint: CheckpointSpec, endpoint: str, start: Callable[..., Future[Any]]
) -> None:
    snippet = _snippet("README.md", "WeightBridge")
    head, trainer_code, engine_code = snippet.at(endpoint).split("\n# on every ")
    trainer, engine = _Trainer(), _Engine()
    trainer.step()
    load = dtensor.load_weights_fn(trainer)
    sending = start(
        run, f"{head}\n# {trainer_code}", snippet.place, trainers=(0, 1), load=load, model=trainer, step=7
    )  # fmt: skip
    names = run(f"{head}\n# {engine_code}", snippet.place, workers=(0, 1), model=engine)
    receiver = names["receiver"]
    until = time.monotonic() + LIMIT_SECONDS
    while receiver.version < 7 and time.monotonic() < until and not (sending.done() and sending.exception()):
        receiver.poll_requests()
    report = sending.result(LIMIT_SECONDS)["report"]
    sending.result()["sender"].close()
    receiver.close()
    assert isinstance(report, UpdateReport)
    assert (report.version, dict(report.engines)) == (7, {"a": "ready"})
    assert engine.holds(trainer.state())
    assert names["spec"].digest == checkpoint.digest


def test_the_quickstart_is_a_whole_job(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    snippet = _snippet("docs/quickstart.md", "A whole job")
    names = run(snippet.at(endpoint), snippet.place)
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" is in")[0] for line in said] == ["version 1", "version 2", "version 3", "equal: True"]
    # Not by the page's own comparison: element by element, rounded by hand to the upper 16 bits, ties to even.
    bits = names["master"].t().contiguous().view(torch.int32).to(torch.int64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(torch.int16)
    assert torch.equal(names["served"].view(torch.int16), rounded)
    assert len(names["master"].unique()) > 3000  # weights were really drawn


def test_the_specs_of_integrate_are_of_one_checkpoint(checkpoint: CheckpointSpec) -> None:
    snippet = _snippet("docs/integrate.md", "1. ")
    state = {name: tensor.bfloat16() for name, tensor in _Trainer().state().items()}
    folder, from_state, by_hand = values_of(snippet.code, snippet.place, "spec", full_state_dict=state)
    assert folder.digest == checkpoint.digest
    assert {(t.name, t.shape, t.dtype) for t in folder.tensors} == {
        (t.name, t.shape, t.dtype) for t in from_state.tensors
    }
    assert [(t.name, t.shape) for t in by_hand.tensors] == [("embed.weight", (49152, 576))]


def test_the_live_tensors_of_integrate_are_those_of_the_model() -> None:
    snippet = _snippet("docs/integrate.md", "3. ")
    model = _Engine()
    live = run(snippet.code, snippet.place, model=model)["tensors"]()
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == {
        "embed": model.embed.data_ptr(),
        "gate_up": model.gate_up.data_ptr(),
    }


def test_trainer_and_engines_of_integrate_are_a_job(
    checkpoint: CheckpointSpec, endpoint: str, start: Callable[..., Future[Any]]
) -> None:
    trainer, engines = _Trainer(), {"a": _Engine(), "b": _Engine()}
    sent: list[dict[str, torch.Tensor]] = []
    hooked: list[int] = []
    snippet = _snippet("docs/integrate.md", "4. ")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        sending = start(
            run, snippet.at(endpoint), snippet.place, spec=checkpoint, load_weights=dtensor.load_weights_fn(trainer),
            tensors=lambda: discover_tensors(trainer), num_steps=2,
            train_one_step=lambda: (trainer.step(), sent.append(trainer.state())),
        )  # fmt: skip
        serving = [start(_serve, name, model, endpoint, checkpoint, sending, hooked) for name, model in engines.items()]
        names = sending.result(LIMIT_SECONDS)
        receivers = [s.result(LIMIT_SECONDS) for s in serving]
    finally:
        dist.destroy_process_group()
    assert (names["report"].version, dict(names["report"].engines)) == (1, {"a": "ready", "b": "ready"})
    assert [r.version for r in receivers] == [1, 1]
    assert [engine.holds(sent[1]) for engine in engines.values()] == [True, True]
    assert not engines["a"].holds(sent[0])
    assert sorted(hooked) == [0, 0, 1, 1]


def _serve(
    name: str, model: _Engine, endpoint: str, spec: CheckpointSpec, sending: Future[Any], hooked: list[int]
) -> Any:
    """Run the page's engine as engine `name` until the trainer is done; its receiver, closed."""
    snippet = _snippet("docs/integrate.md", "5. ")
    code = snippet.at(endpoint).replace('engine="a"', f'engine="{name}"')
    assert code.count(f'engine="{name}"') == 1
    until = time.monotonic() + LIMIT_SECONDS
    names: dict[str, Any] = {}

    def engine_step() -> None:  # the engine serves until the trainer has closed: who leaves earlier is a failed engine
        names["serving"] = not sending.done() and time.monotonic() < until

    # What earlier snippets of the page import, and what the reader's engine has. The hook is told versions by its lambda.
    names |= {"socket": socket, "discover_tensors": discover_tensors, "spec": spec, "engine_group": (0, 1)}
    names |= {"model": model, "engine_step": engine_step, "serving": True}
    names["reset_prefix_cache"] = lambda: hooked.append(names["receiver"].version + 1)
    exec(compile(code, snippet.place, "exec"), names)
    names["receiver"].close()
    return names["receiver"]
