"""The contract of a loader: the shipped examples, and for every oracle a loader that breaks it and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.cli import main
from weightbridge.probe import NamedTensors, discover_tensors, num_loads
from weightbridge.probe.map_files import load_map
from weightbridge.testing import example_loaders
from weightbridge.testing.loader_contract import CHECKS, ContractReport, LoaderUnderTest, Status, check_loader

BF16 = torch.bfloat16
SPEC = CheckpointSpec.from_iterable(
    [("w", (9, 13), BF16), ("u", (5, 13), BF16), ("b", (11,), torch.float32), ("s", (), torch.float32)]
)
NamedWeights = Iterable[tuple[str, torch.Tensor]]


class Worker:
    """Copies w above u into one padded tensor, b and s into their own. Subclasses are wrong in one way each."""

    def __init__(self) -> None:
        self.wu = torch.zeros(16, 13, dtype=BF16)
        self.b, self.s = torch.zeros(11), torch.zeros(())
        self.calls = 0

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == "w":
            self.wu[:9] = tensor
        elif name == "u":
            self.wu[9:14] = tensor
            self.wu[14:] = 0
        else:
            getattr(self, name).copy_(tensor)

    def load_weights(self, weights: NamedWeights) -> None:
        self.calls += 1
        for name, tensor in weights:
            self.place(name, tensor)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"wu": self.wu, "b": self.b, "s": self.s}


def report_on(worker: Worker, **options: frozenset[str]) -> ContractReport:
    return check_loader(LoaderUnderTest(spec=SPEC, load_weights=worker.load_weights, tensors=worker.tensors, **options))


def bad(report: ContractReport) -> dict[str, str]:
    """Check -> status of every row that did not pass."""
    assert tuple(f.check for f in report.findings) == CHECKS
    assert report.passed == all(f.status in {Status.PASS, Status.WARN} for f in report.findings)
    assert all(f.remedy for f in report.findings if f.status in {Status.FAIL, Status.WARN})
    return {f.check: f.status.value for f in report.findings if f.status is not Status.PASS}


def finding(report: ContractReport, check: str) -> tuple[str | None, tuple[int, ...] | None]:
    row = report.findings[CHECKS.index(check)]
    return row.tensor, row.element


# --- loaders that keep it ------------------------------------------------------------------------------------------------


def test_a_loader_that_copies_keeps_the_contract() -> None:
    worker = Worker()
    report = report_on(worker)
    assert bad(report) == {}
    assert report.num_calls == worker.calls
    assert report.source_map is not None
    assert len(report.source_map.copies) == 4


def test_a_module_s_parameters_buffers_and_attributes_are_checked_as_an_adapter_would_see_them() -> None:
    module = nn.Linear(13, 9, bias=False, dtype=BF16)
    module.register_buffer("table", torch.arange(4.0))
    spec = CheckpointSpec.from_iterable([("weight", (9, 13), BF16)])
    report = check_loader(
        LoaderUnderTest(
            spec=spec,
            load_weights=lambda ws: [module.weight.data.copy_(t) for _, t in ws],
            tensors=lambda: discover_tensors(module),
        )
    )
    assert bad(report) == {}
    assert module.table.tolist() == [0, 1, 2, 3]  # the poison is taken away again


def test_every_number_of_calls_is_made_with_every_tensor_once() -> None:
    worker, calls = Worker(), []

    def load(weights: NamedWeights) -> None:
        drained = list(weights)
        calls.append([name for name, _ in drained])
        for name, tensor in drained:
            worker.place(name, tensor)

    check_loader(LoaderUnderTest(spec=SPEC, load_weights=load, tensors=worker.tensors))
    whole = ["w", "u", "b", "s"]
    assert calls[:8] == [whole, whole, ["w", "u"], ["b", "s"], ["w"], ["u"], ["b"], ["s"]]


def test_two_checks_of_one_loader_agree() -> None:
    worker = Worker()
    first, second = report_on(worker), report_on(worker)
    assert (first.findings, first.num_calls) == (second.findings, second.num_calls)


# --- loaders that break it -----------------------------------------------------------------------------------------------


class SwapsLater(Worker):
    """Post-processing that was to run once runs from the second load on."""

    def load_weights(self, weights: NamedWeights) -> None:
        super().load_weights(weights)
        if self.calls > 1:
            self.wu[:14] = self.wu[:14].flip(0)


class Clears(Worker):
    """Takes any call for the first of a whole load."""

    def load_weights(self, weights: NamedWeights) -> None:
        self.wu.zero_()
        super().load_weights(weights)


class Accumulates(Worker):
    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            self.b += tensor
        else:
            super().place(name, tensor)


class OnlyOnce(Worker):
    def load_weights(self, weights: NamedWeights) -> None:
        if not self.calls:
            super().load_weights(weights)


class Rebinds(Worker):
    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            self.b = tensor.clone()
        else:
            super().place(name, tensor)


class KeepsReferences(Worker):
    """`b` is the tensor it was given: whoever frees or changes that changes the model."""

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            self.b = tensor
        else:
            super().place(name, tensor)


class LeavesPads(Worker):
    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == "u":
            self.wu[9:14] = tensor
        else:
            super().place(name, tensor)


class PadsWithGarbage(Worker):
    """Assembles in fresh memory and copies all of it."""

    def load_weights(self, weights: NamedWeights) -> None:
        self.calls += 1
        state = dict(weights)
        if {"w", "u"} <= set(state):
            fresh = torch.empty(16, 13, dtype=BF16)
            fresh[:9], fresh[9:14] = state["w"], state["u"]
            self.wu.copy_(fresh)
        for name in {"b", "s"} & set(state):
            self.place(name, state[name])


class ReadsOldPads(Worker):
    """The last row of u is a mean with the padding below it, which is zero in a model that was just made."""

    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name == "u":
            old = self.wu[14].clone()
            super().place(name, tensor)
            self.wu[13] += old
        else:
            super().place(name, tensor)


class Swallows(Worker):
    def load_weights(self, weights: NamedWeights) -> None:
        try:
            super().load_weights(weights)
        except Exception:
            return


class RemembersInterruption(Worker):
    """Collects across calls and writes when it has everything; a call that died leaves its part behind."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: NamedWeights) -> None:
        self.calls += 1
        for name, tensor in weights:
            self.parts.setdefault(name, tensor)
        if len(self.parts) == 4:
            for name, tensor in self.parts.items():
                self.place(name, tensor)
            self.parts.clear()


class Skips(Worker):
    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name != "s":
            super().place(name, tensor)


class AddsOne(Worker):
    """Goes wrong when the probe has seen enough."""

    def place(self, name: str, tensor: torch.Tensor) -> None:
        super().place(name, tensor)
        if name == "b" and self.calls >= FIRST_AFTER_THE_PROBE:
            self.b[7] += 1


class StopsLater(Worker):
    def place(self, name: str, tensor: torch.Tensor) -> None:
        if name != "b" or self.calls < FIRST_AFTER_THE_PROBE:
            super().place(name, tensor)


FIRST_AFTER_THE_PROBE = 8 + num_loads(SPEC, {"BF16", "F32"}) + 1
"""Calls: 1 + 1 + 2 + 4 of the identity loads, the probe's, and then this one."""

SKIPPED = {"coverage of live tensors": "skip", "coverage of the checkpoint": "skip"}


@pytest.mark.parametrize(
    ("made", "rows", "where"),
    [
        (SwapsLater, {"identity, 1 call": "fail", **{f"identity, {n} calls": "fail" for n in (2, 7)}}, ("wu", (0, 0))),
        (Clears, {f"identity, {n} calls": "fail" for n in (2, 7)}, ("wu", (0, 0))),
        (LeavesPads, {"coverage of live tensors": "fail"}, ("wu", None)),
        (Swallows, {"failure visible": "fail"}, (None, None)),
        (RemembersInterruption, {"failure visible": "fail"}, ("wu", (0, 0))),
    ],
)
def test_a_loader_that_breaks_one_thing_fails_there_with_the_element_named(
    made: Callable[[], Worker], rows: dict[str, str], where: tuple[str | None, tuple[int, ...] | None]
) -> None:
    report = report_on(made())
    assert bad(report) == rows
    assert finding(report, next(iter(rows))) == where
    assert not report.passed


@pytest.mark.parametrize(
    ("made", "failing"),
    [
        (Accumulates, {"identity, 1 call", "coverage of live tensors", "no-op visible", "failure visible"}),
        (OnlyOnce, {"coverage of live tensors", "coverage of the checkpoint", "no-op visible"}),
        (PadsWithGarbage, {"poison"}),
        (Rebinds, {"addresses", "distinct values"}),
        (KeepsReferences, {"addresses", "distinct values", "poison"}),
        (ReadsOldPads, {"poison", "distinct values"}),
        (AddsOne, {"poison", "no-op visible"}),
        (StopsLater, {"poison", "no-op visible"}),
    ],
)
def test_a_loader_that_is_wrong_in_general_fails_in_several_places(
    made: Callable[[], Worker], failing: set[str]
) -> None:
    found = bad(report_on(made()))
    assert failing <= {check for check, status in found.items() if status == "fail"}, found


def test_an_unused_checkpoint_tensor_fails_unless_it_is_expected() -> None:
    worker = Skips()
    tensors = lambda: NamedTensors(worker.tensors(), buffers={"s"})  # noqa: E731
    made = LoaderUnderTest(spec=SPEC, load_weights=worker.load_weights, tensors=tensors)
    report = check_loader(made)
    assert bad(report) == {"coverage of the checkpoint": "fail"}
    assert finding(report, "coverage of the checkpoint") == ("s", None)
    expected = LoaderUnderTest(
        spec=SPEC, load_weights=worker.load_weights, tensors=tensors, expected_unused=frozenset({"s"})
    )
    assert bad(check_loader(expected)) == {}


def test_a_parameter_with_gaps_fails_unless_it_is_expected() -> None:
    assert bad(report_on(LeavesPads(), expected_untouched=frozenset({"wu"}))) == {}


def test_a_loader_that_writes_into_its_input_is_warned_of() -> None:
    worker = Worker()

    def load(weights: NamedWeights) -> None:
        for name, tensor in weights:
            worker.place(name, tensor)
            if name == "u":
                tensor.view(-1)[-1] = 0

    report = check_loader(LoaderUnderTest(spec=SPEC, load_weights=load, tensors=worker.tensors))
    assert bad(report) == {"inputs unchanged": "warn"}
    assert finding(report, "inputs unchanged") == ("u", None)
    assert report.passed


def test_a_loader_that_wants_tensors_in_one_call_and_says_so_is_warned_of() -> None:
    worker = Worker()

    def load(weights: NamedWeights) -> None:
        state = dict(weights)
        if ("w" in state) != ("s" in state):
            raise ValueError("w and its scale must meet in one call")
        for name, tensor in state.items():
            worker.place(name, tensor)

    report = check_loader(LoaderUnderTest(spec=SPEC, load_weights=load, tensors=worker.tensors))
    assert bad(report) == {"identity, 2 calls": "warn", "identity, 7 calls": "warn"}
    assert "must meet in one call" in report.findings[CHECKS.index("identity, 2 calls")].found
    assert report.passed


def test_a_loader_that_reads_no_further_than_its_own_tensors_is_not_blamed() -> None:
    worker = Worker()

    def load(weights: NamedWeights) -> None:
        for name, tensor in weights:
            if name == "w":
                worker.place(name, tensor)
                return

    spec = CheckpointSpec.from_iterable([("w", (9, 13), BF16), ("later", (3,), BF16), ("last", (3,), BF16)])
    made = LoaderUnderTest(
        spec=spec,
        load_weights=load,
        tensors=lambda: {"wu": worker.wu[:9]},
        expected_unused=frozenset({"later", "last"}),
    )
    assert bad(check_loader(made)) == {}


def test_a_loader_that_fails_at_once_is_asked_nothing_more() -> None:
    worker = Worker()

    def load(_: NamedWeights) -> None:
        raise KeyError("lm_head.weight")

    report = check_loader(LoaderUnderTest(spec=SPEC, load_weights=load, tensors=worker.tensors))
    assert bad(report) == {check: "fail" if check == "first load" else "skip" for check in CHECKS}
    assert "KeyError: 'lm_head.weight'" in report.findings[0].found
    assert report.num_calls == 1


def test_live_tensors_that_have_no_memory_or_vanish_are_findings() -> None:
    meta = LoaderUnderTest(spec=SPEC, load_weights=list, tensors=lambda: {"w": torch.empty(3, device="meta")})
    report = check_loader(meta)
    assert bad(report)["first load"] == "fail"
    assert finding(report, "first load") == ("w", None)

    worker, state = Worker(), {"gone": False}

    def load(weights: NamedWeights) -> None:
        worker.load_weights(weights)
        state["gone"] = worker.calls > 1

    def tensors() -> dict[str, torch.Tensor]:
        found = worker.tensors()
        if state["gone"]:
            found["b"] = found["b"].to("meta")
        return found

    vanishing = bad(check_loader(LoaderUnderTest(spec=SPEC, load_weights=load, tensors=tensors)))
    assert vanishing["addresses"] == vanishing["distinct values"] == "fail"


def test_torch_s_settings_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    seen = []

    class Looks(Worker):
        def load_weights(self, weights: NamedWeights) -> None:
            super().load_weights(weights)
            seen.append(bool(torch.empty(5).isnan().all()))

    report_on(Looks())
    assert sum(seen) >= 1  # uninitialised memory was NaN in the poisoned load
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # its default


# --- the command, on the shipped examples ----------------------------------------------------------------------------------


def invoke(name: str, *options: str) -> tuple[int, dict[str, object], str]:
    result = CliRunner().invoke(main.app, ["check", f"weightbridge.testing.example_loaders:{name}", "--json", *options])
    assert "Traceback" not in result.stderr
    return result.exit_code, json.loads(result.stdout), result.stderr


def test_the_good_example_passes_and_its_map_can_be_saved_and_explained(tmp_path: Path) -> None:
    path = tmp_path / "good.wbmap"
    status, document, text = invoke("good", "--save-map", str(path))
    assert (status, document["passed"]) == (0, True)
    assert [c["status"] for c in document["checks"]] == ["pass"] * len(CHECKS)  # type: ignore[attr-defined]
    assert "the loader keeps the contract" in text
    assert load_map(path).source_map.fingerprint == document["fingerprint"]
    explained = CliRunner().invoke(main.app, ["explain", str(path), "qkv"])
    assert explained.exit_code == 0
    assert explained.stdout.splitlines()[1:] == [
        "qkv [24, 24] BF16, parameter",
        "  [0:12, :] <- q_proj.weight[12:24, :]  (288 elements)",
        "  [12:18, :] <- k_proj.weight[:, :]  (144 elements)",
        "  [18:24, :] <- v_proj.weight[:, :]  (144 elements)",
    ]


def test_the_computed_example_passes_through_the_loader_path(tmp_path: Path) -> None:
    path = tmp_path / "computed.wbmap"
    status, document, text = invoke("computed", "--save-map", str(path))
    assert (status, document["passed"]) == (0, True), text
    assert document["computed"] == ["norm", "a", "gate_up", "gate_up_scale"]
    assert "through the loader path: 4 computed from 6 checkpoint tensors" in str(document["checks"])
    saved = load_map(path)
    assert {t.name for t in saved.source_map.carried} == {
        f"carried:{t.name}" for t in saved.spec.tensors if t.name != "down_proj.weight"
    }
    assert [saved.source_map.live[i].name for i in set(saved.source_map.copies.live) if i < 5] == ["down"]


def test_the_broken_example_fails_with_the_element_named() -> None:
    status, document, text = invoke("broken")
    assert (status, document["passed"]) == (1, False)
    failed = [c for c in document["checks"] if c["status"] == "fail"]  # type: ignore[attr-defined]
    assert [(c["check"], c["tensor"], c["element"]) for c in failed] == [("identity, 1 call", "gate_up", [0, 0])]
    assert "fail: identity, 1 call: live tensor 'gate_up', element [0, 0]: expected" in text
    assert "  to do: a second load must do what the first did" in text


def test_what_a_loader_prints_stays_out_of_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    def loud() -> LoaderUnderTest:
        print("loading model")
        return example_loaders.good()

    monkeypatch.setattr(example_loaders, "loud", loud, raising=False)
    status, document, text = invoke("loud")
    assert (status, document["passed"]) == (0, True)
    assert "loading model" in text


def test_a_map_that_cannot_be_saved_is_a_usage_error(tmp_path: Path) -> None:
    status, document, text = invoke("good", "--save-map", str(tmp_path / "absent" / "good.wbmap"))
    assert status == 2
    assert "the map cannot be written: No such file or directory" in document["error"]["message"]  # type: ignore[index]
    assert len(text.strip().splitlines()) == 1
