"""The demo's own failures, on a small model: who died is named, everybody hears of it, nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

WORKERS = {"trainer/0", "trainer/1", "tp3/0", "tp3/1", "tp3/2", "single/0"}
LIMIT_SECONDS = 200.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 4 M parameters; uneven on purpose."""
    return save_model(
        tmp_path_factory.mktemp("tiny-llama"), "Llama", vocab_size=96, hidden_size=264, intermediate_size=519,
        num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=3, head_dim=44, tie_word_embeddings=False,
    )  # fmt: skip


def save_model(folder: Path, family: str, **dims: Any) -> Path:
    """A model of random weights with a tokenizer of single characters, as a Hugging Face folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    config = getattr(transformers, f"{family}Config")(bos_token_id=1, eos_token_id=2, pad_token_id=2, **dims)
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)
    characters = ["<unk>", "<s>", "</s>", *(chr(i) for i in range(32, 125))]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def nobody_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No worker of a demo that this test started outlives it; logs of failures go where pytest clears up."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    deadline = time.monotonic() + 5
    while (left := _workers_of_mine()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def _workers_of_mine() -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        line, environ = process.info["cmdline"] or [], process.info["environ"] or {}
        if "weightbridge.cli.demo.worker" in line and environ.get("DEMO_TEST") == str(os.getpid()):
            found.append(" ".join(line))
    return found


def _command(checkpoint: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "weightbridge.cli.main", "demo", "--json", "--checkpoint", str(checkpoint)]
    return [*command, "--max-new-tokens", "4", *options]


def _environ() -> dict[str, str]:
    return {**os.environ, "DEMO_TEST": str(os.getpid()), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def _demo(checkpoint: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON document, the people's text."""
    done = subprocess.run(
        _command(checkpoint, *options),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        env=_environ(),
        check=False,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def test_any_llama_folder_runs(checkpoint: Path) -> None:
    status, document, text = _demo(checkpoint, "--steps", "2", "--slot-mib", "1")
    assert status == 0, text
    assert document["all_verified"]
    assert document["passed"]
    assert [v["version"] for v in document["versions"]] == [1, 2]
    assert document["plan"]["model_bytes"] == 2 * document["num_params"]
    for version in document["versions"]:
        assert version["network_bytes"]["trainers"]["sent"] == pytest.approx(document["plan"]["model_bytes"], rel=0.01)
    assert "Traceback" not in text


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_any_qwen_folder_runs(family: str, tmp_path: Path) -> None:
    """Biases (Qwen2), per-head norms (Qwen3), tied embeddings; two workers, since three divide none of the dimensions."""
    folder = save_model(
        tmp_path / family, family, vocab_size=98, hidden_size=64, intermediate_size=106, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    status, document, text = _demo(folder, "--steps", "1", "--slot-mib", "1")
    assert status == 0, text
    assert document["all_verified"]
    assert [e["workers"] for e in document["engines"]] == [2, 1]


@pytest.mark.parametrize("victim", ["trainer/1", "tp3/0", "tp3/2"])
def test_a_killed_worker_is_named_by_every_other_one(checkpoint: Path, victim: str) -> None:
    status, document, text = _demo(checkpoint, "--fail", f"kill:{victim}@version=2,after=0")
    assert status == 1
    error = document["error"]
    assert error["dead"] == [victim]
    assert error["causes"][victim] == "was killed by SIGKILL"
    assert set(error["causes"]) == WORKERS
    for worker in WORKERS - {victim}:
        assert victim in error["causes"][worker], worker
        assert "said nothing" not in error["causes"][worker]
    assert "Traceback" not in text
    assert error["log_dir"] in text


def test_a_receiver_that_never_comes_is_named(checkpoint: Path) -> None:
    status, document, text = _demo(checkpoint, "--engine-missing", "single", "--connect-timeout", "15")
    assert status == 1
    assert document["error"]["dead"] == []
    assert "single" in document["error"]["causes"]["trainer/0"]
    assert "Traceback" not in text


def test_a_loader_that_wants_more_is_named_with_the_tensor(checkpoint: Path) -> None:
    status, document, _ = _demo(checkpoint, "--loader-wants", "model.layers.9.extra.weight")
    assert status == 1
    assert "model.layers.9.extra.weight" in document["error"]["message"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_ending_the_launcher_ends_everybody(checkpoint: Path, how: signal.Signals) -> None:
    process = subprocess.Popen(
        _command(checkpoint),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_environ(),
        # A job in the background of a script ignores Ctrl-C, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("before"):  # everybody is up and generating
                break
        process.send_signal(how)
        text = process.stderr.read()
        assert process.wait(30) == (130 if how == signal.SIGINT else -9)
        if how == signal.SIGINT:
            assert "interrupted" in text
    finally:
        process.kill()
        process.wait()
