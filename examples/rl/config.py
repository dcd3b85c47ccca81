"""What one run is: written by the launcher as JSON, read by every process of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

__all__ = ["ENGINE", "METHODS", "RunConfig"]

ENGINE = "vllm"
"""The engine's name in the session."""

METHODS = ("weightbridge", "broadcast", "files")


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the processes of one run agree on.

    checkpoint: a Hugging Face folder, what trainers and engine start from. work_dir: scratch of this run, private to its
    user; the channel's socket lies in it. launcher: its process id. endpoint: where trainer 0 hosts the session.
    broadcast_port: for method "broadcast". ahead: batches that the engine samples while trainers work on an older one, 0 or 1.
    skip_updates: steps after which no weights are sent, on purpose. same_node: trainers and engine share memory instead of
    using the network.
    """

    checkpoint: str
    work_dir: str
    launcher: int
    endpoint: str
    broadcast_port: int
    method: str = "weightbridge"
    stage_send: bool = False
    stage_receive: bool = False
    same_node: bool = False
    num_trainers: int = 2
    ahead: int = 0
    steps: int = 50
    prompts_per_step: int = 1
    completions: int = 8
    max_tokens: int = 16
    learning_rate: float = 1e-4
    clip: float = 0.2
    seed: int = 0
    evaluate_every: int = 10
    evaluate_completions: int = 8
    skip_updates: tuple[int, ...] = ()
    start_seconds: float = 300.0
    answer_seconds: float = 180.0
    update_seconds: float = 120.0

    @property
    def channel(self) -> str:
        return f"ipc://{self.work_dir}/engine.sock"

    @property
    def records(self) -> Path:
        """Where trainer 0 writes one JSON object a line."""
        return Path(self.work_dir) / "records.jsonl"

    def options(self) -> dict[str, Any]:
        """Fields of weightbridge.Options, the same on both sides."""
        return {
            "stage_send": self.stage_send,
            "stage_receive": self.stage_receive,
            "connect_timeout_seconds": self.start_seconds,
            "update_timeout_seconds": self.update_seconds,
            "window": 1,  # a step of this engine takes some 30 ms, agreeing on one a few: a second poll is waited for in vain
        }

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: Path) -> RunConfig:
        return msgspec.json.decode(path.read_bytes(), type=cls)
