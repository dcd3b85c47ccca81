"""`vllm serve` in a process of its own, and clients that ask its OpenAI endpoints, over plain HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.vllm_engines.engine import EXTENSION, cpus
from tests.integration.vllm_engines.prompts import BLOCK_SIZE, NUM_TOKENS, versions_of

from weightbridge.testing.ports import free_port

__all__ = ["Load", "Server", "serving"]

_START_SECONDS = 240.0
_ANSWER_SECONDS = 120.0


class Server:
    def __init__(self, port: int) -> None:
        self.port = port

    def get(self, path: str) -> Any:
        return json.loads(self._call("GET", path)[0])

    def post(self, path: str, **body: Any) -> tuple[Any, Mapping[str, str]]:
        """The answer and its headers."""
        text, headers = self._call("POST", path, body)
        return json.loads(text), headers

    def one_by_one(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Greedy answers as `Engine.one_by_one` gives them, with the header that says their versions."""
        return [self._complete(p) for p in prompts]

    def stream(self, prompt: Sequence[int], num_tokens: int, on_token: Any) -> dict[str, Any]:
        """One streamed completion: its tokens, how it ended, what its last line and the server's route say of it."""
        tokens: list[int] = []
        finish, stamp, name = "", "", ""
        with self._request("POST", "/v1/completions", _asked(prompt, num_tokens, stream=True)) as response:
            for raw in response:
                line = raw.decode().rstrip("\n")
                if line.startswith(": x-weight-versions: "):
                    stamp = line.removeprefix(": x-weight-versions: ")
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "choices" not in event:
                    raise RuntimeError(f"the stream says {event}")
                name = event["id"]
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    finish = choice["finish_reason"] or finish
                    on_token()
        said = self.get(f"/weightbridge/completions/{name}")
        spans = [[s["version"], s["start"], s["end"]] for s in said["choices"][0]["weight_versions"]]
        return {
            "tokens": tokens, "finish": finish, "stamp": stamp, "spans": spans, "mixed": said["mixed"],
            "versions": versions_of(spans, num_tokens),
        }  # fmt: skip

    def _complete(self, prompt: Sequence[int]) -> dict[str, Any]:
        answer, headers = self.post(
            "/v1/completions", **_asked(prompt, NUM_TOKENS, logprobs=2, return_tokens_as_token_ids=True)
        )
        (choice,) = answer["choices"]
        tops = [sorted(top.values(), reverse=True)[:2] for top in choice["logprobs"]["top_logprobs"]]
        return {
            "tokens": choice["token_ids"],
            "margins": [first - second for first, second in tops],
            "stamp": headers.get("x-weight-versions", ""),
        }

    def _call(self, method: str, path: str, body: Any = None) -> tuple[bytes, Mapping[str, str]]:
        with self._request(method, path, body) as response:
            return response.read(), {k.lower(): v for k, v in response.getheaders()}

    @contextmanager
    def _request(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_SECONDS)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{method} {path}: {response.status} {response.read().decode()}")
            yield response
        finally:
            connection.close()


def _asked(prompt: Sequence[int], num_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "m", "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip


class Load:
    """Clients that stream one completion after the other until they are told to stop."""

    def __init__(self, server: Server, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        self._server = server
        self._num_tokens = num_tokens
        self._changed = threading.Condition()
        self._num_streamed = 0
        self._enough = False
        self.completions: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._client, args=asked, daemon=True) for asked in enumerate(prompts)]
        for thread in self._threads:
            thread.start()

    def let_stream(self, num_tokens: int) -> None:
        """Until so many more tokens have come."""
        with self._changed:
            until = self._num_streamed + num_tokens
            if not self._changed.wait_for(lambda: self._num_streamed >= until or self.failures, _ANSWER_SECONDS):
                raise TimeoutError(f"{num_tokens} tokens did not come in {_ANSWER_SECONDS:.0f} s")

    def stop(self) -> None:
        """Let every client end the completion it is at."""
        self._enough = True
        for thread in self._threads:
            thread.join(_ANSWER_SECONDS)

    def _client(self, number: int, prompt: Sequence[int]) -> None:
        while not self._enough:
            try:
                seen = self._server.stream(prompt, self._num_tokens, self._count)
                self.completions.append({"prompt": number, **seen})
            except Exception as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                return

    def _count(self) -> None:
        with self._changed:
            self._num_streamed += 1
            self._changed.notify_all()


@contextmanager
def serving(model: Path, folder: Path, *, tensor_parallel: int = 1, **environment: str) -> Iterator[Server]:
    """`vllm serve` with the backend, one line of the command and some variables; ends with the block."""
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "m",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "256",
        "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(1 << 26), "--gpu-memory-utilization", "0.3",
        "--block-size", str(BLOCK_SIZE), "--tensor-parallel-size", str(tensor_parallel), "--seed", "0",
        "--worker-extension-cls", EXTENSION, "--weight-transfer-config", '{"backend":"weightbridge"}',
    ]  # fmt: skip
    paths = [str(_vllm_by_its_name(folder)), *os.environ["PYTHONPATH"].split(os.pathsep)]
    environ = {
        **os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": "weightbridge",
        "VLLM_CPU_OMP_THREADS_BIND": cpus(tensor_parallel), "VLLM_LOGGING_LEVEL": "INFO",
    }  # fmt: skip
    process = subprocess.Popen(command, env=environ, cwd=folder)
    try:
        server = Server(port)
        _wait_until_up(server, process)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _vllm_by_its_name(folder: Path) -> Path:
    """`vllm serve` asks for the version of a package called vllm; the one for CPUs has another name."""
    metadata = folder / "named" / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return metadata.parent.parent


def _wait_until_up(server: Server, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + _START_SECONDS
    while True:
        try:
            server._call("GET", "/health")
            return
        except (OSError, RuntimeError) as error:
            if process.poll() is not None:
                raise RuntimeError(f"the server has ended with status {process.returncode}") from error
            if time.monotonic() > give_up:
                raise TimeoutError(f"the server was not up in {_START_SECONDS:.0f} s") from error
        time.sleep(0.2)
