"""One vLLM engine on CPU, and one session with it, as the test process drives them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.integration.vllm_engines import checkpoints
from tests.integration.vllm_engines.prompts import BLOCK_SIZE, NUM_TOKENS
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from weightbridge import Options, SenderAdapter, spec_from_folder
from weightbridge.testing.ports import free_port

__all__ = ["ENGINE", "EXTENSION", "OPTIONS", "Engine", "Session", "Trainer", "cpus", "running"]

ENGINE = "vllm"
OPTIONS = {"connect_timeout_seconds": 150.0, "update_timeout_seconds": 60.0, "slot_bytes": 1 << 20}
EXTENSION = "tests.integration.vllm_engines.extension.ProbingExtension"
_LIMIT_SECONDS = 240.0


class Engine:
    """An offline engine: eager, short contexts, small blocks of prefixes, greedy answers to token prompts.

    backend: with the weight transfer backend `weightbridge`, which vLLM finds by entry point.
    """

    def __init__(
        self, folder: Path, *, tensor_parallel: int = 1, dtype: str = "bfloat16", backend: bool = False
    ) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cpus(tensor_parallel)
        self.backend = backend
        self.llm = LLM(
            model=str(folder), dtype=dtype, tensor_parallel_size=tensor_parallel, enforce_eager=True, max_model_len=256,
            max_num_seqs=8, kv_cache_memory_bytes=1 << 26, gpu_memory_utilization=0.3, block_size=BLOCK_SIZE,
            skip_tokenizer_init=True, worker_extension_cls=EXTENSION, seed=0,
            weight_transfer_config=WeightTransferConfig(backend="weightbridge") if backend else None,
        )  # fmt: skip

    def complete(self, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> list[dict[str, Any]]:
        """For each prompt, all of them together: greedy tokens, margins to the next best, versions of weights."""
        asked = [{"prompt_token_ids": list(p)} for p in prompts]
        outputs = self.llm.generate(asked, _sampling(num_tokens), use_tqdm=False)
        return [_seen(output) for output in outputs]

    def complete_stepwise(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, when_begun: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """The same, with something done when the first tokens have come and many are still to come."""
        engine, begun, ended = self.llm.llm_engine, False, {}
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": list(prompt)}, _sampling(num_tokens))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not begun:
                    begun = True
                    when_begun()
                if output.finished:
                    ended[output.request_id] = _seen(output)
        return list(ended.values())

    def answers(self, prompts: Sequence[Sequence[int]], num_tokens: int = NUM_TOKENS) -> list[list[Any]]:
        """For each prompt the greedy tokens, and their logprob rounded to what is sure to be the same in two runs."""
        return [[c["tokens"], round(c["logprob"], 2)] for c in self.complete(prompts, num_tokens)]

    def one_by_one(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Each prompt by itself: the batches are those of anybody else who asks so."""
        return [self.complete([p])[0] for p in prompts]

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


def _sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=2, detokenize=False)


def _seen(output: Any) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "tokens": list(completion.token_ids),
        "logprob": float(completion.cumulative_logprob),
        "margins": [_margin(p) for p in completion.logprobs],
        "spans": [[s.version, s.start, s.end] for s in completion.weight_versions],
    }


def _margin(position: Mapping[int, Any]) -> float:
    first, second = sorted((p.logprob for p in position.values()), reverse=True)[:2]
    return float(first - second)


def cpus(tensor_parallel: int) -> str:
    """The CPUs of each worker as vLLM wants them: all of them for one, its own share for each of several."""
    have = sorted(os.sched_getaffinity(0))
    if tensor_parallel == 1:
        return ",".join(str(c) for c in have)
    return "|".join(str(have[rank % len(have)]) for rank in range(tensor_parallel))


class Trainer:
    """A trainer in this process: it holds a whole checkpoint and sends it to one engine."""

    def __init__(self, folder: Path, endpoint: str = "") -> None:
        self.endpoint = endpoint or f"tcp://127.0.0.1:{free_port()}"
        self.live = checkpoints.read(folder)
        self.sender = SenderAdapter(
            group=None, endpoint=self.endpoint, checkpoint=spec_from_folder(folder), load_weights=self.load,
            tensors=lambda: self.live, engines=(ENGINE,), options=Options(**OPTIONS),
        )  # fmt: skip

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.live[name].copy_(tensor)

    def send(self, version: int) -> None:
        self.sender.send_weights(version).wait()


class Session(Trainer):
    """A trainer and one offline engine, which joins by RPC to the extension or by init_weight_transfer_engine."""

    def __init__(self, engine: Engine, folder: Path, endpoint: str = "") -> None:
        super().__init__(folder, endpoint)
        self.engine = engine
        self.folder = folder

    def join(self, **settings: Any) -> None:
        settings = {"endpoint": self.endpoint, "engine": ENGINE, "options": OPTIONS, **settings}
        if self.engine.backend:
            self.engine.llm.init_weight_transfer_engine({"init_info": settings})
        else:
            self.engine.rpc_fine("weightbridge_join", checkpoint=str(self.folder), **settings)

    def pull(self) -> None:
        """What other backends want to be called for an update, and this one refuses."""
        self.engine.llm.start_weight_update()

    def connect(self) -> None:
        """Connect while the engine is idle."""
        self._while_idle(_Call(self.sender.connect))

    def send_folder(self, version: int, folder: Path) -> None:
        """Send what the checkpoint in `folder` holds while the engine is idle."""
        self.load(iter(checkpoints.read(folder).items()))
        self._while_idle(_Call(lambda: self.send(version)))

    def send_under_way(
        self, version: int, folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int
    ) -> list[dict[str, Any]]:
        """Send while the engine generates, and as long as that takes. Returns what it has generated."""
        self.load(iter(checkpoints.read(folder).items()))
        sending = _Call(lambda: self.send(version))
        seen = self.engine.complete_stepwise(prompts, num_tokens, when_begun=sending.start)
        while not sending.ended():
            seen += self.engine.complete(prompts, num_tokens)
        return seen

    def _while_idle(self, call: _Call) -> None:
        """The backend wakes its engine; the extension wants to be polled."""
        call.start()
        while not call.ended():
            if not self.engine.backend:
                bad = [a["error"] for a in self.engine.rpc("weightbridge_poll") if a["error"]]
                if bad and not call.ended(5):
                    raise RuntimeError(f"weightbridge_poll: {bad}")
            time.sleep(0.01)


class _Call:
    """A call on a thread of its own, with a limit."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._raised: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._give_up = 0.0

    def start(self) -> None:
        self._give_up = time.monotonic() + _LIMIT_SECONDS
        self._thread.start()

    def ended(self, seconds: float = 0.0) -> bool:
        """Whether it has come to its end, in so many seconds from now; raises what it raised."""
        self._thread.join(seconds)
        if self._raised is not None:
            raise self._raised
        if self._thread.is_alive() and time.monotonic() > self._give_up:
            raise TimeoutError(f"{self._call} did not end in {_LIMIT_SECONDS:.0f} s")
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001
            self._raised = error


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Engine]:
    engine = Engine(folder, **settings)
    try:
        yield engine
    finally:
        engine.stop()
