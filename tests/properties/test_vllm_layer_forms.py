"""`EngineWeights` on layers that prepare their weights in each way there is, with vLLM's few names stood in for.

The real engine is under test in tests/integration/test_vllm_engines.py; this shows the logic where vLLM is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import IncompleteUpdateError, ProbeError, UnsupportedError, WorkerError
from weightbridge.integrations import vllm_seat
from weightbridge.integrations.vllm import EngineWeights, WorkerExtension
from weightbridge.layout.coverage_live import missing_elements
from weightbridge.probe import probe

ROWS, COLS = 6, 10


class Method:
    """Stands for vLLM's QuantizeMethodBase; `prepare` is what a layer does with its loaded weights."""

    def __init__(self, prepare: Callable[[nn.Module], None]) -> None:
        self.prepare = prepare

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.prepare(layer)


class Layer(nn.Module):
    def __init__(self, prepare: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLS, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("peak", torch.zeros((), dtype=torch.bfloat16))
        self.quant_method = Method(prepare)
        self.run: Callable[[], torch.Tensor] = lambda: self.weight


def keep(layer: Any) -> None:
    layer.run = _nothing


def _nothing() -> torch.Tensor:
    raise AssertionError("plain layers are read by their parameter")


def pack(layer: Any) -> None:
    """Same shape, blocks of two rows transposed; a new parameter, as vLLM's replace_parameter makes."""
    blocks = layer.weight.detach().reshape(ROWS // 2, 2, COLS).transpose(1, 2)
    layer.weight = nn.Parameter(blocks.reshape(ROWS, COLS).contiguous(), requires_grad=False)


def hide(layer: Any) -> None:
    """Into an object of a library, by way of the parameter's own memory; an empty parameter stays behind."""
    layer.weight.data.mul_(2)
    taken = layer.weight.detach().clone()
    layer.run = lambda: taken
    layer.weight = nn.Parameter(torch.empty(0, dtype=taken.dtype), requires_grad=False)


def copy_aside(layer: Any) -> None:
    """The weight stays, a copy is what is multiplied by."""
    taken = layer.weight.detach().clone()
    layer.run = lambda: taken


def note_peak(layer: Any) -> None:
    """A buffer keeps something made of the weight."""
    layer.peak.copy_(layer.weight.abs().max())


def refuse(layer: Any) -> None:
    if layer.__dict__.setdefault("prepared", 0):
        raise RuntimeError("only once")
    layer.prepared += 1


class Model(nn.Module):
    def __init__(self, **prepare: Callable[[nn.Module], None]) -> None:
        super().__init__()
        for name, how in prepare.items():
            setattr(self, name, Layer(how))
        self.norm = nn.Parameter(torch.zeros(COLS, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            assert parameters[name].shape == tensor.shape, f"{name} does not fit"
            parameters[name].data.copy_(tensor)

    def start(self, values: dict[str, torch.Tensor]) -> None:
        self.load_weights(values.items())
        for layer in self.children():
            layer.quant_method.prepare(layer)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of vLLM that are used, with the least behind them."""
    shapes = {"weight": (ROWS, COLS)}

    def restore(module: nn.Module, info: object) -> None:
        module._parameters.clear()

    def materialize(module: nn.Module, info: object) -> None:
        for name, shape in shapes.items() if isinstance(module, Layer) else ():
            fresh = nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False)
            module.register_parameter(name, fresh)

    @contextmanager
    def configured(config: object) -> Iterator[None]:
        yield

    reload = "vllm.model_executor.model_loader.reload"
    names: dict[str, dict[str, Any]] = {
        "vllm.model_executor.model_loader": {"get_model_loader": lambda config: object()},
        "vllm.distributed.parallel_state": {"get_world_group": lambda: SimpleNamespace(rank_in_group=1, world_size=2)},
        "vllm.config": {"set_current_vllm_config": configured},
        "vllm.model_executor.layers.quantization.base_config": {"QuantizeMethodBase": Method},
        "vllm.model_executor.layers.attention": {"is_deferred_attention_layer": lambda module: False},
        f"{reload}.layerwise": {"get_layerwise_info": lambda module: None},
        f"{reload}.meta": {"restore_layer_on_meta": restore, "materialize_layer": materialize},
    }
    for name, content in names.items():
        for depth in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:depth])
            if part not in sys.modules or part == name:
                monkeypatch.setitem(sys.modules, part, ModuleType(part))
        vars(sys.modules[name]).update(content)


def spec_of(*names: str) -> CheckpointSpec:
    rows = [(f"{n}.weight", (ROWS, COLS), "bfloat16") for n in names]
    return CheckpointSpec.from_iterable([*rows, ("norm", (COLS,), "bfloat16")])


def values(spec: CheckpointSpec, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {t.name: torch.randn(t.shape, generator=generator).bfloat16() for t in spec.tensors}


ALL = {"plain": keep, "packed": pack, "hidden": hide, "aside": copy_aside, "noted": note_peak}


def started(seed: int = 0) -> tuple[Model, EngineWeights, CheckpointSpec]:
    spec, model = spec_of(*ALL), Model(**ALL)
    model.start(values(spec, seed))
    return model, EngineWeights(model, SimpleNamespace()), spec


def reads(model: Any) -> dict[str, torch.Tensor]:
    """What the kernels of each layer would use."""
    return {
        "plain": model.plain.weight.clone(), "packed": model.packed.weight.clone(), "hidden": model.hidden.run(),
        "aside": model.aside.run(), "lookup": model.aside.weight.clone(), "norm": model.norm.clone(),
        "peak": model.noted.peak.clone(),
    }  # fmt: skip


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return [n for n in a if not torch.equal(a[n], b[n])]


def test_each_layer_is_put_into_its_class_and_left_as_it_was() -> None:
    spec, model = spec_of(*ALL), Model(**ALL)
    model.start(values(spec, 0))
    before, addresses = reads(model), [p.data_ptr() for p in model.parameters()]
    weights = EngineWeights(model, SimpleNamespace())
    assert {x.name: (x.kind, x.staged) for x in weights.layers} == {
        "plain": ("plain", ()), "packed": ("packed", ("weight",)), "hidden": ("hidden", ("weight",)),
        "aside": ("hidden", ()), "noted": ("hidden", ()),
    }  # fmt: skip
    assert weights.kinds == {"plain": 1, "packed": 1, "hidden": 3}
    assert same(before, reads(model)) == []
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_loading_what_is_there_changes_nothing_and_the_map_is_the_kernel_s_layout() -> None:
    model, weights, spec = started()
    before = reads(model)
    assert weights.adopt(values(spec, 0).items()) == ()
    assert same(before, reads(model)) == []
    found = probe(spec=spec, load_weights=weights.load_weights, tensors=weights.tensors)
    assert {n for n in found.untouched if not n.endswith(".peak")} == set()
    assert missing_elements(spec, [found]) == {}
    assert {t.name for t in found.live if t.parameter} == {*spec.index}
    live = {t.name: i for i, t in enumerate(found.live)}
    copies = found.copies
    (packed,) = np.flatnonzero(copies.live == live["packed.weight"])
    assert sorted(copies.count[packed].tolist())[-3:] == [2, 3, 10]  # three blocks of two rows, transposed
    assert same(before, reads(model)) == []


def test_an_update_reaches_what_kernels_read_and_moves_no_parameter() -> None:
    model, weights, spec = started()
    weights.adopt(values(spec, 0).items())
    addresses = [p.data_ptr() for p in model.parameters()]
    weights.load_weights(values(spec, 1).items())
    assert torch.equal(model.hidden.run(), 2 * values(spec, 0)["hidden.weight"])  # the old one until renewed
    weights.renew()
    fresh, _, _ = started(seed=1)
    assert same(reads(fresh), reads(model)) == []
    assert [p.data_ptr() for p in model.parameters()] == addresses
    weights.renew()
    assert same(reads(fresh), reads(model)) == []


def test_a_load_in_parts_is_followed_layer_by_layer_and_half_a_packed_layer_is_refused() -> None:
    model, weights, spec = started()
    weights.adopt(values(spec, 0).items())
    for item in values(spec, 1).items():
        weights.load_weights([item])
    weights.renew()
    fresh, _, _ = started(seed=1)
    assert same(reads(fresh), reads(model)) == []

    whole = model.load_weights
    model.load_weights = lambda tensors: [model.packed.weight[:4].copy_(t[:4]) for _, t in tensors]  # type: ignore[assignment]
    with pytest.raises(ProbeError, match=r"layer 'packed': the load left 20 of 60 elements of 'weight' unwritten"):
        weights.load_weights([("packed.weight", values(spec, 2)["packed.weight"])])
    model.load_weights = whole  # type: ignore[method-assign]
    assert same(reads(fresh), reads(model)) == []


def test_an_engine_that_holds_something_else_is_found_out() -> None:
    model, weights, spec = started()
    with torch.no_grad():
        model.packed.weight.copy_(values(spec, 0)["packed.weight"])  # as vLLM's own reload leaves it
    assert weights.adopt(values(spec, 0).items()) == ("packed.weight",)


def test_what_cannot_be_repeated_is_refused_by_name() -> None:
    model = Model(odd=refuse)
    model.start(values(spec_of("odd"), 0))
    with pytest.raises(UnsupportedError, match=r"layer 'odd' .*cannot be repeated, it raised RuntimeError: only once"):
        EngineWeights(model, SimpleNamespace())
    whole = Model(plain=keep)
    whole.process_weights_after_loading = lambda: None  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="hook of the whole model"):
        EngineWeights(whole, SimpleNamespace())


def test_rpcs_answer_with_a_status() -> None:
    worker: Any = WorkerExtension()
    nothing = {"ok": True, "error": "", "updated": False, "state": "none", "version": -1, "requested": False}
    assert worker.weightbridge_status() == nothing
    assert worker.weightbridge_leave() == nothing
    assert "UsageError: this worker is in no session" in worker.weightbridge_poll()["error"]
    idle = worker.weightbridge_join("tcp://127.0.0.1:1", "a", "nowhere", options={"idle_install": True})
    assert "UsageError: idle_install is not for vLLM" in idle["error"]
    assert not idle["ok"]


class Receiver:
    """Stands for a ReceiverAdapter: each poll gives the next of `polls`, or raises it."""

    polls: list[Any]

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.version, self.state, self.requested, self.closed = -1, "ready", True, False
        Receiver.made = self

    def poll_requests(self) -> bool:
        outcome = Receiver.polls.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)

    def close(self) -> None:
        self.closed = True

    made: Any = None


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker of a two-worker engine of dummy weights; what its steps saw is in `steps`."""
    model, _, spec = started()
    monkeypatch.setattr(vllm_seat, "ReceiverAdapter", Receiver)
    monkeypatch.setattr(vllm_seat, "spec_from_folder", lambda folder: spec)
    made: Any = WorkerExtension()
    made.vllm_config = SimpleNamespace(load_config=None)
    made.model_runner = SimpleNamespace(get_model=lambda: model)
    made.steps = []
    made.execute_model = lambda output: made.steps.append((output, model.hidden.run().clone()))
    assert made.weightbridge_join("tcp://127.0.0.1:1", "a", "folder", options={"slot_bytes": 4096})["ok"]
    return made


def test_a_step_polls_first_and_runs_on_what_a_version_brought(worker: Any) -> None:
    assert Receiver.made.given["group"] == (1, 2)
    assert Receiver.made.given["options"].slot_bytes == 4096
    weights = worker._weightbridge.weights
    brought = torch.full((ROWS, COLS), 3.0).bfloat16()
    Receiver.polls = [False, True, False]
    worker.execute_model("one")
    weights.tensors()["hidden.weight"].copy_(brought)
    worker.execute_model("two")
    worker.execute_model("three")
    assert Receiver.polls == []
    assert [torch.equal(held, 2 * brought) for _, held in worker.steps] == [False, True, True]
    assert "has joined a session before" in worker.weightbridge_join("tcp://127.0.0.1:1", "a", "folder")["error"]
    assert worker.weightbridge_leave()["ok"]
    assert Receiver.made.closed
    worker.execute_model("four")  # in no session: no poll


def test_a_failed_session_lets_the_engine_serve_on_unless_its_weights_are_mixed(worker: Any) -> None:
    Receiver.polls = [WorkerError("trainer/0 died", causes={"trainer/0": "died"})]
    worker.execute_model("one")
    worker.execute_model("two")  # polls no more
    assert [name for name, _ in worker.steps] == ["one", "two"]
    said = worker.weightbridge_poll()
    assert (said["error"], said["requested"]) == ("WorkerError: trainer/0 died", False)
    assert worker.weightbridge_leave()["ok"]

    assert worker.weightbridge_join("tcp://127.0.0.1:1", "a", "folder")["ok"]
    half = IncompleteUpdateError("half of it", version=3, causes={}, poisoned=("a",))
    Receiver.polls = [half, half, True, half]
    for name in ("three", "four"):
        with pytest.raises(IncompleteUpdateError):
            worker.execute_model(name)
    worker.execute_model("five")  # a later version has made it whole
    assert "half of it" in worker.weightbridge_poll()["error"]
    worker.weightbridge_leave()
    assert "halves of two versions" in worker.weightbridge_join("tcp://127.0.0.1:1", "a", "folder")["error"]
    assert [name for name, _ in worker.steps] == ["one", "two", "five"]
