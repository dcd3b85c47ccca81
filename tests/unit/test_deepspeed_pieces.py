"""Pieces of ZeRO-3 without DeepSpeed: names, padding and refusals. tests/integration runs DeepSpeed's own engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weightbridge.errors import SpecError, UsageError
from weightbridge.integrations import deepspeed

SIZE = 4


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[the rank that asks]."""
    asking = [0]
    monkeypatch.setattr(deepspeed.dist, "get_world_size", lambda group: SIZE)
    monkeypatch.setattr(deepspeed.dist, "get_rank", lambda group: asking[0])
    return asking


class Tied(nn.Module):
    """Partitioned as ZeRO-3 does it: each parameter empty, its piece padded to the ranks' common size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.norm = nn.LayerNorm(5, bias=False)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int32))
        self.released: list[str] = []
        for name, parameter in self.named_parameters():
            parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
            parameter.ds_tensor = torch.full((-(-parameter.numel() // SIZE),), -9.0, dtype=torch.bfloat16)
            parameter.ds_process_group = None
            parameter.ds_status = SimpleNamespace(name="AVAILABLE" if name == "norm.weight" else "NOT_AVAILABLE")
            parameter.partition = lambda name=name: self.released.append(name)
            parameter.data = torch.empty(0)


EMBED, NORM = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([11.0, 12, 13, 14, 15])


@pytest.mark.parametrize(
    ("asking", "embed", "norm"),
    [
        (0, [1, 2], [11, 12]),
        (1, [3, 4], [13, 14]),
        (2, [5, 6], [15, -9]),
        (3, [-9, -9], [-9, -9]),
    ],
)
@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_rank_copies_its_piece_and_leaves_padding_alone(
    rank: list[int], asking: int, embed: list[int], norm: list[int], name: str
) -> None:
    rank[0], model = asking, Tied()
    engine = nn.Module()
    engine.module, engine.zero_optimization_stage = model, lambda: 3
    deepspeed.load_weights_fn(engine)([("norm.weight", NORM), (name, EMBED), ("steps", torch.tensor([7]))])
    assert model.embed.weight.ds_tensor.tolist() == embed
    assert model.norm.weight.ds_tensor.tolist() == norm
    assert model.steps.tolist() == [7]
    assert model.released == ["norm.weight"]
    found = deepspeed.tensors_fn(model)()
    assert {n: t.tolist() for n, t in found.items()} == {
        "embed.weight": [x for x in embed if x != -9],
        "norm.weight": [x for x in norm if x != -9],
        "steps": [7],
    }
    assert found.buffers == {"steps"}
    if len(found["norm.weight"]):
        assert found["norm.weight"].data_ptr() == model.norm.weight.ds_tensor.data_ptr()


def test_pieces_are_read_anew(rank: list[int]) -> None:
    model = Tied()
    tensors = deepspeed.tensors_fn(model)
    tensors()
    model.norm.weight.ds_tensor.data = torch.tensor([21.0, 22], dtype=torch.bfloat16)
    assert tensors()["norm.weight"].tolist() == [21, 22]


def test_what_is_no_partitioned_module_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"Linear holds no parameter that ZeRO-3 has partitioned; .*integrations\.dtensor"
    ):
        deepspeed.load_weights_fn(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"call deepspeed\.initialize with stage 3"):
        deepspeed.tensors_fn(nn.Linear(2, 2))


def test_wrong_names_and_shapes_are_refused(rank: list[int]) -> None:
    load = deepspeed.load_weights_fn(Tied())
    with pytest.raises(SpecError, match=r"'norm\.bias' is no parameter or buffer of Tied"):
        load([("norm.bias", NORM)])
    with pytest.raises(SpecError, match=r"'embed\.weight' has shape \(6,\) and the module expects \(3, 2\)"):
        load([("embed.weight", EMBED.reshape(-1))])


def test_pieces_that_are_elsewhere_or_otherwise_are_refused(rank: list[int]) -> None:
    model = Tied()
    tensors = deepspeed.tensors_fn(model)
    model.norm.weight.ds_tensor.data = torch.empty(0, dtype=torch.bfloat16)  # what is left of a piece that is on NVMe
    with pytest.raises(UsageError, match=r"'norm\.weight'.* has 0 elements .* expected 2 \(5 elements over 4 ranks\)"):
        tensors()
    model = Tied()
    model.embed.weight.ds_tensor.ds_quant_scale = torch.ones(1)
    with pytest.raises(UsageError, match=r"'embed\.weight'.*not quantized"):
        deepspeed.tensors_fn(model)()
