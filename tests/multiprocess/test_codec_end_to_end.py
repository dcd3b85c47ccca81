"""A codec that changes lengths, through executor, transports and forwards."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.multiprocess import test_session_in_process as session
from tests.multiprocess import toy_job as toy

from weightbridge.coordinator import Options
from weightbridge.errors import UsageError
from weightbridge.executor import Codec, register_codec


class Deflate(Codec):
    """As long as the segment means: sent as it is."""

    name = "toy-deflate"

    def __init__(self) -> None:
        self.saved_bytes = 0
        self.kept_segments = 0

    def encode(self, segment: npt.NDArray[np.uint8]) -> int:
        packed = zlib.compress(segment.tobytes(), 1)
        if len(packed) > 0.8 * len(segment):  # random weights shrink a little, zeros a lot
            self.kept_segments += 1
            return len(segment)
        self.saved_bytes += len(segment) - len(packed)
        segment[: len(packed)] = np.frombuffer(packed, np.uint8)
        segment[len(packed) :] = 0xA5  # nothing may be read beyond the actual length
        return len(packed)

    def decode(self, segment: npt.NDArray[np.uint8], length: int) -> None:
        if length < len(segment):
            segment[:] = np.frombuffer(zlib.decompress(segment[:length].tobytes()), np.uint8)


DEFLATE = Deflate()
register_codec(DEFLATE)


def half_zero(spec: object, version: int) -> dict[str, torch.Tensor]:
    """Weights of which the first half of each tensor is zero: some segments shrink, others do not."""
    full = original(spec, version)  # type: ignore[arg-type]
    for tensor in full.values():
        tensor.view(-1)[: tensor.numel() // 2] = 0
    return full


original = toy.weights


def test_encoded_segments_arrive_whole_and_cost_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "weights", half_zero)
    options = Options(
        slot_bytes=24576, connect_timeout_seconds=20, update_timeout_seconds=15, heartbeat_seconds=0.2,
        heartbeat_timeout_seconds=5, codec=DEFLATE.name,
    )  # fmt: skip
    job = session.Job(options=options)
    job.run_to_end()
    assert DEFLATE.saved_bytes > job.spec.nbytes  # of three versions
    assert DEFLATE.kept_segments > 0


def test_an_unknown_codec_is_named_on_every_worker() -> None:
    options = Options(
        codec="nobody-registered-it", connect_timeout_seconds=20, heartbeat_seconds=0.2, heartbeat_timeout_seconds=5
    )
    job = session.Job(options=options)
    with job.running() as workers:
        for worker in workers.values():
            worker.join(60)
    assert all(isinstance(w.error, UsageError) for w in workers.values()), [w.error for w in workers.values()]
    assert all("nobody-registered-it" in str(w.error) for w in workers.values())


def test_names_of_codecs_are_not_taken_over() -> None:
    with pytest.raises(UsageError, match="toy-deflate"):
        register_codec(Deflate())
