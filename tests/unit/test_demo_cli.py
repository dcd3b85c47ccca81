"""The command line: one message, the right exit status, no stack trace, nothing on stdout that is no JSON."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from tests.unit.demo_cases import CONFIG, write_folder
from typer.testing import CliRunner, Result

import weightbridge
from weightbridge.cli import main
from weightbridge.cli.demo.launcher import DemoOptions, Observer, WorkersFailed


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.app, list(arguments))


def one_message(result: Result) -> str:
    assert "Traceback" not in result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def test_a_missing_checkpoint(tmp_path: Path) -> None:
    result = invoke("demo", "--checkpoint", str(tmp_path / "absent"))
    assert result.exit_code == 2
    message = one_message(result)
    assert f"{tmp_path}/absent: expected a folder, found nothing; name a Hugging Face model folder" in message
    assert result.stdout == ""


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    result = invoke("demo", "--checkpoint", str(tmp_path))
    assert result.exit_code == 2
    assert "this folder is no model" in one_message(result)


def test_a_truncated_checkpoint(tmp_path: Path) -> None:
    result = invoke("demo", "--json", "--checkpoint", str(write_folder(tmp_path, cut=5)))
    assert result.exit_code == 1
    assert "model.safetensors" in one_message(result)
    document = json.loads(result.stdout)
    assert document["all_verified"] is False
    assert document["error"]["kind"] == "SpecError"


def test_a_tensor_in_the_index_that_is_absent(tmp_path: Path) -> None:
    path = write_folder(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "lm_head.weight": "model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    result = invoke("demo", "--checkpoint", str(path))
    assert result.exit_code == 1
    assert "lm_head.weight" in one_message(result)


def test_a_model_that_no_degree_divides(tmp_path: Path) -> None:
    path = write_folder(tmp_path, config=CONFIG | {"num_attention_heads": 5, "num_key_value_heads": 5})
    result = invoke("demo", "--checkpoint", str(path))
    assert result.exit_code == 2
    assert "3 or 2 does not divide the model (num_attention_heads=5" in one_message(result)
    result = invoke("demo", "--checkpoint", str(write_folder(tmp_path)), "--tensor-parallel", "4")
    assert result.exit_code == 2
    assert "--tensor-parallel: 4 does not divide" in one_message(result)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        result = invoke("demo", "--checkpoint", str(write_folder(tmp_path)), "--port", str(port))
    assert result.exit_code == 2
    assert f"--port {port}: cannot be bound on 127.0.0.1 (Address already in use)" in one_message(result)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--steps", "0"),
        ("--learning-rate", "-1"),
        ("--bandwidth", "nan"),
        ("--slot-mib", "0"),
        ("--connect-timeout", "0"),
        ("--port", "70000"),
        ("--prompt", " "),
        ("--fail", "kill:everybody"),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, option: str, value: str) -> None:
    result = invoke("demo", "--checkpoint", str(write_folder(tmp_path)), option, value)
    assert result.exit_code == 2
    assert option in one_message(result) or "fault" in one_message(result)


def test_unknown_options_and_words_are_usage_errors() -> None:
    assert invoke("demo", "--stepz", "3").exit_code == 2
    assert invoke("demonstrate").exit_code == 2
    assert invoke("demo", "--steps", "three").exit_code == 2


def test_the_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout.strip()) == (0, weightbridge.__version__)


def test_a_failed_run_names_everybody_and_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: DemoOptions, observer: Observer) -> None:
        raise WorkersFailed(
            "tp3/1 was killed by SIGKILL",
            causes={"tp3/1": "was killed by SIGKILL", "trainer/0": "WorkerError: [tp3/1] is gone"},
            dead=("tp3/1",),
            log_dir="/scratch/logs",
            usage=False,
            tracebacks={"trainer/0": "Traceback of trainer/0"},
        )

    monkeypatch.setattr(main, "run_demo", fail)
    result = invoke("demo")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "error: tp3/1 was killed by SIGKILL",
        "  tp3/1: was killed by SIGKILL",
        "  trainer/0: WorkerError: [tp3/1] is gone",
        "  the workers' logs are in /scratch/logs",
    ]
    assert "Traceback of trainer/0" in invoke("demo", "--debug").stderr


def test_an_interrupted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(options: DemoOptions, observer: Observer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "run_demo", interrupt)
    result = invoke("demo")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
