"""The engine's process: vLLM's offline LLM, which samples what it is asked and polls for weights. `engine CONFIG_FILE`.

It runs in vLLM's own environment. What an engine of yours needs of it is in `_join` and `_idle`: join once, poll while idle,
and drop the prefix cache when the version has changed. While it generates, its workers poll by themselves.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from examples.rl.channel import (
    Done,
    Failed,
    Load,
    Receive,
    Reply,
    Request,
    Sample,
    Sampled,
    Score,
    Scored,
    ServingEnd,
    Stop,
)
from examples.rl.config import ENGINE, RunConfig
from examples.rl.lifetime import end_with_parent

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and worker in this one process, which saves half a gigabyte
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams

__all__ = ["Engine", "main"]

_IDLE_POLL_SECONDS = 0.01


class Engine:
    """One engine and its end of the channel."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._channel = ServingEnd(config.channel)
        library = config.method == "weightbridge"
        extension = "weightbridge.integrations.vllm.WorkerExtension" if library else "examples.rl.extension.OtherWays"
        self._llm = LLM(
            model=config.checkpoint, dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=64, block_size=32,
            kv_cache_memory_bytes=1 << 27, gpu_memory_utilization=0.3, enable_prefix_caching=True,
            skip_tokenizer_init=True, generation_config="vllm", worker_extension_cls=extension, seed=config.seed,
        )  # fmt: skip
        self._version = 0  # 0: what it started from
        self._join()

    def serve(self) -> None:
        """Until told to stop. Raises when it is asked nothing for longer than a run may be silent."""
        silent_since = time.monotonic()
        while True:
            request = self._channel.take(_IDLE_POLL_SECONDS)
            if request is None:
                self._idle()
                if time.monotonic() - silent_since > self._config.start_seconds + self._config.answer_seconds:
                    raise TimeoutError("the trainers have asked nothing for too long; see their logs")
                continue
            try:
                reply = self._answer(request)
            except Exception as error:
                reply = Failed(error=f"{type(error).__name__}: {error}")
            self._channel.answer(request, reply)
            if isinstance(request, Stop):
                return
            silent_since = time.monotonic()

    def _join(self) -> None:
        config = self._config
        if config.method == "weightbridge":
            self._rpc(
                "weightbridge_join", endpoint=config.endpoint, engine=ENGINE, checkpoint=config.checkpoint,
                node=_node(config), options=config.options(),
            )  # fmt: skip
        elif config.method == "broadcast":
            self._rpc("broadcast_join", port=config.broadcast_port, timeout_seconds=config.start_seconds)

    def _idle(self) -> None:
        """An engine without requests makes no steps: poll for it."""
        if self._config.method == "weightbridge" and self._rpc("weightbridge_poll")["updated"]:
            self._look_at_version()

    def _look_at_version(self) -> int:
        """The version held now. Keys and values of another one are dropped: they would be taken for this one's."""
        version = self._version
        if self._config.method == "weightbridge":
            version = max(0, int(self._rpc("weightbridge_status")["version"]))
        if version != self._version:
            self._version = version
            self._llm.reset_prefix_cache()
        return version

    def _answer(self, request: Request) -> Reply:
        match request:
            case Sample():
                return self._sample(request)
            case Score():
                return self._score(request)
            case Receive():
                return self._take("broadcast_receive", request.version, checkpoint=self._config.checkpoint)
            case Load():
                return self._take("files_load", request.version, folder=request.folder)
            case Stop():
                if self._config.method == "weightbridge":
                    self._rpc("weightbridge_leave")
                return Done()

    def _sample(self, request: Sample) -> Sampled:
        began, first = time.monotonic(), self._look_at_version()
        sampling = SamplingParams(
            n=request.completions, temperature=1.0, max_tokens=request.max_tokens, logprobs=0, seed=request.seed,
            detokenize=False,
        )  # fmt: skip
        asked = [{"prompt_token_ids": list(prompt)} for prompt in request.prompts]
        outputs = [answer.outputs for answer in self._llm.generate(asked, sampling, use_tqdm=False)]
        return Sampled(
            tokens=[[list(o.token_ids) for o in group] for group in outputs],
            logprobs=[[_of_tokens(o.token_ids, o.logprobs) for o in group] for group in outputs],
            first_version=first, last_version=self._look_at_version(), seconds=time.monotonic() - began,
        )  # fmt: skip

    def _score(self, request: Score) -> Scored:
        version = self._look_at_version()
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        asked = [{"prompt_token_ids": list(sequence)} for sequence in request.sequences]
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        scores = [
            _of_tokens(sequence[length:], output.prompt_logprobs[length:])
            for sequence, length, output in zip(request.sequences, request.prompt_lengths, outputs, strict=True)
        ]
        return Scored(logprobs=scores, version=version)

    def _take(self, method: str, version: int, **arguments: Any) -> Done:
        """A new version by one of the other ways."""
        began = time.monotonic()
        self._rpc(method, **arguments)
        self._version = version
        self._llm.reset_prefix_cache()
        return Done(seconds=time.monotonic() - began)

    def _rpc(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call the extension on every worker; the first one's status. Raises RuntimeError when a worker's is not ok."""
        statuses: list[dict[str, Any]] = self._llm.collective_rpc(
            method, timeout=self._config.answer_seconds, kwargs=arguments
        )
        for status in statuses:
            if not status["ok"]:
                raise RuntimeError(f"{method}: {status['error']}")
        return statuses[0]


def _of_tokens(tokens: Any, logprobs: Any) -> list[float]:
    """The logprob of each token itself, out of vLLM's dict a place."""
    return [float(place[token].logprob) for token, place in zip(tokens, logprobs, strict=True)]


def _node(config: RunConfig) -> str:
    return "trainers" if config.same_node else "rollout"


def main() -> None:
    config = RunConfig.read(Path(sys.argv[1]))
    end_with_parent(config.launcher)
    Engine(config).serve()
    sys.stdout.flush()
    os._exit(0)  # the interpreter's own shutdown of an engine takes seconds


if __name__ == "__main__":
    main()
