"""What `poll_requests` costs when nothing happens.

    python -m benchmarks.poll [--json]

10,000,000 polls, timed in a loop in five parts, each beside as many calls of an empty method in the same loop; aim: under 2
microseconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.coordinator import Options, ReceiverAdapter

CALLS = 2_000_000
REPEATS = 5


class Empty:
    def call(self) -> bool:
        return False


def seconds_per_call(call: Callable[[], bool]) -> tuple[float, float]:
    """By the clock, and of this thread's CPU time."""
    begin, begin_cpu = time.perf_counter(), time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS, (time.thread_time() - begin_cpu) / CALLS


def main() -> None:
    live = {"w": torch.zeros(3)}
    receiver = ReceiverAdapter(
        group=None, endpoint="tcp://127.0.0.1:9", checkpoint=CheckpointSpec.from_state_dict(live), load_weights=lambda _: None,
        tensors=lambda: live, engine="bench", options=Options(connect_timeout_seconds=600),
    )  # fmt: skip
    try:
        samples = [(seconds_per_call(receiver.poll_requests), seconds_per_call(Empty().call)) for _ in range(REPEATS)]
    finally:
        receiver.close()
    poll, empty = ([sample[i][0] for sample in samples] for i in range(2))
    poll_cpu = [sample[0][1] for sample in samples]
    result = {
        "polls": CALLS * REPEATS,
        "poll_seconds": poll,
        "poll_cpu_seconds": poll_cpu,
        "empty_call_seconds": empty,
        "mean_poll_microseconds": sum(poll) / REPEATS * 1e6,
        "mean_poll_cpu_microseconds": sum(poll_cpu) / REPEATS * 1e6,
        "best_poll_microseconds": min(poll) * 1e6,
        "ratio_to_empty_call": min(poll) / min(empty),
        "aim_microseconds": 2.0,
    }
    if "--json" in sys.argv:
        print(json.dumps(result))
    else:
        print(
            f"{CALLS * REPEATS:,} polls, nothing to do: {sum(poll_cpu) / REPEATS * 1e6:.3f} us of CPU time each, by the clock "
            f"{min(poll) * 1e6:.3f} us in the best part (an empty method call: {min(empty) * 1e6:.3f} us)"
        )


if __name__ == "__main__":
    main()
