"""One case of the vLLM tests in a process of its own: `python -m tests.integration.vllm_engines.scenario CASE FOLDER`.

Starts an engine on one checkpoint and updates it to another one and back; does the same with a server, under load; then
starts an engine on the other checkpoint for comparison. What was seen is written to FOLDER/result.json; the test judges it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

os.environ |= {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

from tests.integration.vllm_engines import checkpoints, served
from tests.integration.vllm_engines.engine import ENGINE, OPTIONS, Engine, Session, running
from tests.integration.vllm_engines.prompts import CROSSING_TOKENS, LONG_PROMPTS, PROMPTS, STREAMED_TOKENS

from weightbridge.testing.ports import free_port


@dataclass(frozen=True, slots=True)
class Case:
    """way: how the offline engine joins: "extension", "init" (backend, by init_weight_transfer_engine) or "environment"
    (backend, by itself). served: the policy for cached prefixes of a server, empty for none."""

    tensor_parallel: int = 1
    dtype: str = "bfloat16"
    experts: bool = False
    real: bool = False
    onednn: bool = True
    way: str = "extension"
    served: str = ""


CASES = {
    "smollm2": Case(real=True, served="reset"),
    "dense-tp2": Case(tensor_parallel=2, way="init", served="reset"),
    "experts": Case(experts=True, onednn=False, served="salt"),
    "dense-fp32": Case(dtype="float32", way="environment"),
}


def make(case: Case, folder: Path) -> tuple[Path, Path]:
    first, second = folder / "first", folder / "second"
    if case.real:
        first = Path(os.environ["WEIGHTBRIDGE_TEST_SMOLLM2"])
        checkpoints.make_variant(first, second)
    else:
        for seed, target in enumerate((first, second)):
            checkpoints.make_tiny(target, experts=case.experts, dtype=getattr(torch, case.dtype), seed=seed)
    return first, second


def run(case: Case, folder: Path, note: Callable[..., None]) -> None:
    if not case.onednn:
        os.environ["WEIGHTBRIDGE_TEST_WITHOUT_ONEDNN"] = "1"  # read by the extension, in the workers
    first, second = make(case, folder)
    note("made")
    settings = {"tensor_parallel": case.tensor_parallel, "dtype": case.dtype}
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with environment(case, endpoint), running(first, backend=case.way != "extension", **settings) as engine:
        note("started", first=engine.answers(PROMPTS), again=engine.answers(PROMPTS))
        session = Session(engine, first, endpoint)
        note("naive", naive_probe=engine.rpc("test_naive_probe", folder=str(first)))
        if case.way == "extension":
            session.join()
        elif case.way == "init":
            note("refused", refused=[refusal(lambda: session.join(checkpoint="/nowhere")), refusal(session.pull)])
            session.join(prefix_cache="none")  # what goes wrong then is shown
        note("joined", probe=engine.rpc("test_probe", folder=str(first)), after_probe=engine.answers(PROMPTS))
        if case.experts:
            look_at_experts(engine, first, second, note)
        try:
            update(engine, session, first, second, note)
        finally:
            session.sender.close()
        note("left", left=engine.rpc("weightbridge_leave"))
    if case.served:
        served.run(
            first, second, folder / "served", note, prefix_cache=case.served, tensor_parallel=case.tensor_parallel
        )
    with running(second, **settings) as engine:
        note("compared", fresh=engine.answers(PROMPTS), reference=engine.one_by_one(LONG_PROMPTS))


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


@contextmanager
def environment(case: Case, endpoint: str) -> Iterator[None]:
    """What makes the engine join by itself, in the cases where it does."""
    given = {"ENDPOINT": endpoint, "ENGINE": ENGINE, "OPTIONS": json.dumps(OPTIONS)}
    names = {f"WEIGHTBRIDGE_{name}": value for name, value in given.items() if case.way == "environment"}
    os.environ.update(names)
    yield
    for name in names:
        del os.environ[name]


def update(engine: Engine, session: Session, first: Path, second: Path, note: Callable[..., None]) -> None:
    """To the second checkpoint while idle, back while generating."""
    addresses = engine.rpc("test_addresses")
    session.connect()
    note("connected", after_connect=engine.answers(PROMPTS))
    if engine.backend:  # whose matter cached prefixes are
        note("asked", long_first=engine.one_by_one(LONG_PROMPTS))
    session.send_folder(1, second)
    if engine.backend:
        note("sent 1", stale=engine.one_by_one(LONG_PROMPTS), version=engine.llm.get_weight_version())
        engine.llm.reset_prefix_cache()
        note("reset", long_second=engine.one_by_one(LONG_PROMPTS))
    note("asked 1", second=engine.answers(PROMPTS), holds_second=engine.rpc("test_holds", folder=str(second)))
    crossing = session.send_under_way(2, first, PROMPTS * 2, CROSSING_TOKENS if engine.backend else STREAMED_TOKENS)
    note(
        "sent 2", crossing=[c["spans"] for c in crossing], status=engine.rpc("weightbridge_status"),
        after=engine.complete(PROMPTS), back=engine.answers(PROMPTS),
        holds_first=engine.rpc("test_holds", folder=str(first)),
        same_addresses=addresses == engine.rpc("test_addresses"),
    )  # fmt: skip


def look_at_experts(engine: Engine, first: Path, second: Path, note: Callable[..., None]) -> None:
    """What goes wrong with the engine's own loader alone, and that the integration's puts it right again."""
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    naive = engine.rpc("test_naive_load", folder=str(first))
    naive_first = engine.answers(PROMPTS)
    note(
        "experts", naive=naive, naive_first=naive_first, reloaded=engine.rpc("test_load", folder=str(second)),
        loaded_second=engine.answers(PROMPTS), rows=engine.rpc("test_expert_rows", folder=str(first), name=name),
        partial=engine.rpc("test_partial_load", folder=str(first), left_out=name),
    )  # fmt: skip
    engine.rpc_fine("test_load", folder=str(first))
    note("repaired", repaired=engine.answers(PROMPTS), again_changed=engine.rpc("test_load", folder=str(first)))


def end_with_parent() -> None:
    """Engines must not outlive the test, however it ends: its group, which is this process's own, is killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    if os.getpgrp() == os.getpid():
        threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    end_with_parent()
    case, folder = CASES[sys.argv[1]], Path(sys.argv[2])
    result: dict[str, Any] = {}
    begun = time.monotonic()

    def note(step: str, **facts: Any) -> None:
        print(f"--- {step} ({time.monotonic() - begun:.0f} s)", flush=True)
        result.update(facts)
        (folder / "result.json").write_text(json.dumps(result))

    run(case, folder, note)


if __name__ == "__main__":
    main()
