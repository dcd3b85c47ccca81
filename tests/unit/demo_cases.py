"""A checkpoint folder and a finished run of the demo as data, for tests of what is made of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from weightbridge.cli.demo.config import DemoConfig, EngineConfig
from weightbridge.cli.demo.messages import (
    Answered,
    Digested,
    Message,
    PlanMade,
    Referenced,
    Step,
    Trained,
    Updated,
)
from weightbridge.cli.demo.record import DemoRecord

MODEL_BYTES = 1000

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 21,
    "vocab_size": 9,
}


def safetensors_bytes(shapes: dict[str, tuple[int, ...]], cut: int = 0) -> bytes:
    """A bf16 safetensors file made by hand, `cut` bytes short."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + bytes(range(256)) * (offset // 256) + bytes(offset % 256)
    return whole[: len(whole) - cut]


def write_folder(
    path: Path, *, config: Any = CONFIG, shapes: dict[str, tuple[int, ...]] | None = None, cut: int = 0
) -> Path:
    path.mkdir(exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    shapes = {"model.embed_tokens.weight": (9, 12), "model.norm.weight": (12,)} if shapes is None else shapes
    (path / "model.safetensors").write_bytes(safetensors_bytes(shapes, cut))
    return path


def config(**changes: object) -> DemoConfig:
    fields: dict[str, object] = {
        "checkpoint": "/models/m",
        "work_dir": "/scratch",
        "endpoint": "tcp://127.0.0.1:29700",
        "num_trainers": 2,
        "engines": (
            EngineConfig(name="tp3", num_workers=3, node="rollout-a"),
            EngineConfig(name="single", num_workers=1, node="rollout-b"),
        ),
        "expected_engines": ("tp3", "single"),
        "steps": 2,
        "learning_rate": 1e-4,
        "prompt": "?",
        "answer": "!",
        "max_new_tokens": 5,
        "bandwidth": 1.25e9,
        "slot_bytes": 1 << 20,
        "connect_timeout_seconds": 9.0,
        "update_timeout_seconds": 8.0,
    }
    return DemoConfig(**(fields | changes))  # type: ignore[arg-type]


def step(token: int, margin: float, other: int = 99) -> Step:
    return Step(token=token, top=((token, 20.0), (other, 20.0 - margin)))


def updated(version: int) -> Updated:
    """The counters of a run in which everything is 0.5 % above the payload."""
    return Updated(
        version=version,
        ewtt_seconds=1.5,
        agst_seconds=0.5,
        network_bytes={
            "trainer/0": (700, 40),
            "trainer/1": (305, 40),
            "tp3/0": (505, 600),
            "tp3/1": (3, 200),
            "tp3/2": (3, 205),
            "single/0": (505, 1005),
        },
        engines={"tp3": "ready", "single": "ready"},
    )


def digested(version: int, worker: str) -> Digested:
    """Trainers report no buffers; their weights change with each version, the engines' first ones are version 0's."""
    parameters = {"a.weight": f"a{max(version, 0)}", "b.weight": f"b{max(version, 0)}"}
    return Digested(
        version=version, parameters=parameters, buffers={} if worker.startswith("trainer") else {"inv_freq": "f"}
    )


ANSWERS = {"tp3": (step(5, 3.0), step(6, 3.0)), "single": (step(5, 3.0), step(7, 0.25, other=6))}
FORCED = {
    "tp3": (((5, 20.5), (99, 17.0), (5, 20.5), (99, 17.0)), ((6, 20.0), (99, 17.0), (6, 20.0), (99, 17.0))),
    "single": (((5, 20.0), (99, 17.0), (5, 20.0), (99, 17.0)), ((6, 20.0), (7, 19.75), (7, 19.75), (6, 20.0))),
}


def messages_of_a_good_run(one: DemoConfig) -> list[tuple[str, Message]]:
    """What the workers of a right run send, in a possible order."""
    engine_workers = [w for e in one.engines for w in e.workers]
    found: list[tuple[str, Message]] = []
    for worker in engine_workers:
        found.append((worker, digested(-1, worker)))
    for engine in one.engines:
        found.append((f"{engine.name}/0", Answered(version=-1, text="before", steps=(step(1, 3.0),))))
    found.append(
        (
            "trainer/0",
            PlanMade(
                model_bytes=MODEL_BYTES,
                trainer_egress_bytes={"trainer/0": 700, "trainer/1": 300},
                rollout_node_ingress_bytes={"rollout-a": 1000, "rollout-b": 1000},
                rollout_node_needed_bytes={"rollout-a": 1000, "rollout-b": 1000},
                rounds=7,
                num_pairs=13,
                t_min_seconds=0.2,
                connect_seconds=4.0,
            ),
        )
    )
    for version in range(1, one.steps + 1):
        found.append(("trainer/0", Trained(version=version, loss=1.0 / version, seconds=2.0)))
        found.append(("trainer/0", updated(version)))
        found.extend((worker, digested(version, worker)) for worker in ("trainer/0", *engine_workers))
    for engine, steps in ANSWERS.items():
        found.append((f"{engine}/0", Answered(version=one.steps, text="after", steps=steps)))
    found.append(("trainer/0", Referenced(version=one.steps, text="after", forced=FORCED)))
    return found


def record_of_a_good_run() -> DemoRecord:
    one = config()
    record = DemoRecord(config=one)
    for worker, message in messages_of_a_good_run(one):
        record.apply(worker, message)
    return record
