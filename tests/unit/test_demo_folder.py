"""What the demo accepts as a checkpoint folder, and what it says of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.demo_cases import CONFIG, write_folder

from weightbridge.cli.demo.folder import choose_tensor_parallel, inspect_folder
from weightbridge.errors import SpecError, UsageError


def test_a_good_folder(tmp_path: Path) -> None:
    folder = inspect_folder(write_folder(tmp_path))
    assert folder.model_type == "llama"
    assert folder.spec.numel == 9 * 12 + 12
    assert folder.dims == {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 9,
        "intermediate_size": 21,
    }


def test_heads_without_groups_count_as_key_value_heads(tmp_path: Path) -> None:
    config = {k: v for k, v in CONFIG.items() if k != "num_key_value_heads"}
    assert inspect_folder(write_folder(tmp_path, config=config)).dims["num_key_value_heads"] == 6


def test_a_missing_folder_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent: expected a folder, found nothing"):
        inspect_folder(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file: expected a folder, found a file"):
        inspect_folder(tmp_path / "file")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "expected config.json, found none; this folder is no model"),
        ({"hidden_size": 3}, "names no model_type"),
        ([1], "names no model_type"),
        ({"model_type": "bert", "hidden_size": 3}, "bert lacks num_attention_heads, vocab_size"),
        (CONFIG | {"num_experts": 8}, r"mixture of experts \(num_experts=8\)"),
    ],
)
def test_a_folder_that_is_no_model_of_ours(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        inspect_folder(write_folder(tmp_path, config=config))


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config.json is no JSON"):
        inspect_folder(tmp_path)


def test_a_folder_without_weights_or_tokenizer(tmp_path: Path) -> None:
    (write_folder(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"expected model.safetensors"):
        inspect_folder(tmp_path)
    (write_folder(tmp_path) / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"expected a tokenizer"):
        inspect_folder(tmp_path)


def test_a_truncated_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"model.safetensors"):
        inspect_folder(write_folder(tmp_path, cut=1))


def test_a_tensor_in_the_index_that_no_file_holds(tmp_path: Path) -> None:
    path = write_folder(tmp_path)
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    names = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match=r"lm_head\.weight"):
        inspect_folder(path)


def test_tensor_parallel_degrees() -> None:
    assert choose_tensor_parallel({"num_attention_heads": 9, "num_key_value_heads": 3}) == 3
    assert choose_tensor_parallel({"num_attention_heads": 6, "num_key_value_heads": 2}) == 2
    assert choose_tensor_parallel({"num_attention_heads": 8}, 4) == 4
    with pytest.raises(UsageError, match=r"3 or 2 does not divide the model \(num_attention_heads=7\)"):
        choose_tensor_parallel({"num_attention_heads": 7})
    with pytest.raises(UsageError, match=r"4 does not divide the model \(num_attention_heads=9"):
        choose_tensor_parallel({"num_attention_heads": 9, "num_key_value_heads": 3}, 4)
    with pytest.raises(UsageError, match=r"--tensor-parallel 1: expected at least 2"):
        choose_tensor_parallel({"num_attention_heads": 9}, 1)
