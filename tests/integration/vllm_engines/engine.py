"""One vLLM engine on CPU, and one session with it, as the test process drives them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.integration.vllm_engines import checkpoints
from vllm import LLM, SamplingParams

from weightbridge import Options, SenderAdapter, spec_from_folder
from weightbridge.testing.ports import free_port

__all__ = ["Engine", "Session", "running"]

_OPTIONS = {"connect_timeout_seconds": 150.0, "update_timeout_seconds": 60.0, "slot_bytes": 1 << 20}
_LIMIT_SECONDS = 240.0
_EXTENSION = "tests.integration.vllm_engines.extension.ProbingExtension"


class Engine:
    """An offline engine: eager, short contexts, nothing kept between requests, greedy answers to token prompts."""

    def __init__(self, folder: Path, *, tensor_parallel: int = 1, dtype: str = "bfloat16") -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cpu) for cpu in _cpus(tensor_parallel))
        self.llm = LLM(
            model=str(folder), dtype=dtype, tensor_parallel_size=tensor_parallel, enforce_eager=True, max_model_len=256,
            max_num_seqs=8, kv_cache_memory_bytes=1 << 26, gpu_memory_utilization=0.3, enable_prefix_caching=False,
            skip_tokenizer_init=True, worker_extension_cls=_EXTENSION, seed=0,
        )  # fmt: skip

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int = 24) -> list[list[Any]]:
        """For each prompt the greedy tokens, and their logprob rounded to what is sure to be the same in two runs."""
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        asked = [{"prompt_token_ids": list(p)} for p in prompts]
        outputs = [r.outputs[0] for r in self.llm.generate(asked, sampling, use_tqdm=False)]
        return [[list(o.token_ids), round(float(o.cumulative_logprob), 2)] for o in outputs]

    def rpc(self, method: str, **kwargs: Any) -> list[dict[str, Any]]:
        """The answers of all workers."""
        return self.llm.collective_rpc(method, timeout=_LIMIT_SECONDS, kwargs=kwargs)

    def rpc_fine(self, method: str, **kwargs: Any) -> list[dict[str, Any]]:
        answers = self.rpc(method, **kwargs)
        bad = [a["error"] for a in answers if a["error"]]
        if bad:
            raise RuntimeError(f"{method}: {bad}")
        return answers

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _cpus(tensor_parallel: int) -> list[str]:
    """The CPUs of each worker: all of them for one, its own share for each of several."""
    cpus = sorted(os.sched_getaffinity(0))
    if tensor_parallel == 1:
        return [",".join(str(c) for c in cpus)]
    return [str(cpus[rank % len(cpus)]) for rank in range(tensor_parallel)]


class Session:
    """A trainer in this process that sends to one engine."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine = engine
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.folder = folder
        self.spec = spec_from_folder(folder)
        self.live = checkpoints.read(folder)
        self.sender = SenderAdapter(
            group=None, endpoint=self.endpoint, checkpoint=self.spec, load_weights=self._load, tensors=lambda: self.live,
            engines=("vllm",), options=Options(**_OPTIONS),
        )  # fmt: skip

    def join(self) -> None:
        self.engine.rpc_fine(
            "weightbridge_join", endpoint=self.endpoint, engine="vllm", checkpoint=str(self.folder), options=_OPTIONS
        )

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.live[name].copy_(tensor)

    def connect(self) -> None:
        """Connect while the engine is idle."""
        self._alongside(self.sender.connect, self._poll)

    def send(self, version: int, folder: Path, meanwhile: Callable[[], Any] | None = None) -> None:
        """Send what the checkpoint in `folder` holds. The engine is polled idle, or does `meanwhile` again and again."""
        for name, tensor in checkpoints.read(folder).items():
            self.live[name].copy_(tensor)
        self._alongside(lambda: self.sender.send_weights(version).wait(), meanwhile or self._poll)

    def _poll(self) -> None:
        self.engine.rpc_fine("weightbridge_poll")
        time.sleep(0.01)

    def _alongside(self, call: Callable[[], Any], step: Callable[[], Any]) -> None:
        """Run `call` on a thread of its own, and `step` again and again here until it ends."""
        raised: list[BaseException] = []

        def work() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001
                raised.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        give_up = time.monotonic() + _LIMIT_SECONDS
        while thread.is_alive():
            if time.monotonic() > give_up:
                raise TimeoutError(f"{call} did not end in {_LIMIT_SECONDS:.0f} s")
            try:
                step()
            except RuntimeError as error:
                thread.join(5)
                raise (raised[0] if raised else error) from error
        if raised:
            raise raised[0]


@contextmanager
def running(folder: Path, *, tensor_parallel: int = 1, dtype: str = "bfloat16") -> Iterator[Engine]:
    engine = Engine(folder, tensor_parallel=tensor_parallel, dtype=dtype)
    try:
        yield engine
    finally:
        engine.stop()
