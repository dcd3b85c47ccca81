"""What `poll_requests` costs when nothing happens.

    python -m benchmarks.poll [--json]

The fast path is timed in a loop beside an empty method call in the same loop, best of five; aim: under 2 microseconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import Options, ReceiverAdapter

CALLS = 200_000
REPEATS = 5


class Empty:
    def call(self) -> bool:
        return False


def seconds_per_call(call: Callable[[], bool]) -> list[float]:
    samples = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter() - begin) / CALLS)
    return samples


def main() -> None:
    live = {"w": torch.zeros(3)}
    receiver = ReceiverAdapter(
        group=None, endpoint="tcp://127.0.0.1:9", checkpoint=CheckpointSpec.from_state_dict(live), load_weights=lambda _: None,
        tensors=lambda: live, engine="bench", options=Options(connect_timeout_seconds=600),
    )  # fmt: skip
    try:
        poll, empty = seconds_per_call(receiver.poll_requests), seconds_per_call(Empty().call)
    finally:
        receiver.close()
    result = {
        "poll_seconds": poll,
        "empty_call_seconds": empty,
        "best_poll_microseconds": min(poll) * 1e6,
        "ratio_to_empty_call": min(poll) / min(empty),
        "aim_microseconds": 2.0,
    }
    if "--json" in sys.argv:
        print(json.dumps(result))
    else:
        print(
            f"poll_requests with nothing to do: {min(poll) * 1e6:.3f} us (an empty method call: {min(empty) * 1e6:.3f} us)"
        )


if __name__ == "__main__":
    main()
