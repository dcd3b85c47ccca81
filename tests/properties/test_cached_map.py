"""A cached map is used when one load proves it, on every worker of the side; else all of them probe, and it is said."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
import torch

from weightbridge.checkpoint import CheckpointSpec
from weightbridge.errors import CoverageError, LayoutError, ProbeError
from weightbridge.layout import Constant, SourceMap
from weightbridge.layout.saved import decode_saved_map, encode_saved_map
from weightbridge.probe import NamedTensors, ProbeOptions, num_loads, probe
from weightbridge.probe.cached import probe_or_verify, verify_cached

BF16 = torch.bfloat16
SPEC = CheckpointSpec.from_iterable([("w", (9, 13), BF16), ("u", (5, 13), BF16), ("n", (13,), torch.float32)])
PROBE_LOADS = num_loads(SPEC, {"BF16", "F32"})
NamedWeights = Iterable[tuple[str, torch.Tensor]]


class Worker:
    """w above u in one tensor with a row of pads, n beside it, and a table that no load writes.

    order: which comes first. adds: what is added to n. collective: called at the beginning of every load.
    """

    def __init__(self, *, first: str = "w", adds: float = 0.0, collective: Callable[[], object] = lambda: None) -> None:
        self.wu = torch.randn(15, 13).to(BF16)
        self.n, self.table = torch.randn(13), torch.arange(3.0)
        self.first, self.adds, self.collective = first, adds, collective
        self.fails = self.touches_table = False
        self.num_loads = 0

    def load_weights(self, weights: NamedWeights) -> None:
        self.num_loads += 1
        self.collective()
        if self.fails:
            raise KeyError("layer 3")
        for name, tensor in weights:
            if name == "n":
                self.n.copy_(tensor + self.adds)
                continue
            start = 0 if name == self.first else 14 - len(tensor)
            self.wu[start : start + len(tensor)] = tensor
            self.wu[14] = -1.0
        if self.touches_table:
            self.table[1] = 5.0

    def tensors(self) -> NamedTensors:
        return NamedTensors({"wu": self.wu, "n": self.n, "table": self.table}, buffers={"table"})

    def probe(self) -> SourceMap:
        found = probe(spec=SPEC, load_weights=self.load_weights, tensors=self.tensors, allow_loader_path=True)
        self.num_loads = 0
        return found

    def run(self, cached: SourceMap | None, **more: object) -> SourceMap:
        options = {"allow_loader_path": True, **more}
        return probe_or_verify(
            spec=SPEC, load_weights=self.load_weights, tensors=self.tensors, cached=cached, **options
        )  # type: ignore[arg-type]

    def bits(self) -> list[bytes]:
        return [t.view(torch.uint8).numpy().tobytes() for t in (self.wu, self.n, self.table)]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, logger="weightbridge")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_map_that_holds_costs_one_load_and_is_returned(said: Callable[[], list[str]]) -> None:
    worker = Worker()
    cached = decode_saved_map(encode_saved_map(worker.probe(), SPEC)).source_map
    before, progress = worker.bits(), list[tuple[str, int, int]]()
    assert worker.run(cached, progress=lambda *what: progress.append(what)) is cached
    assert worker.num_loads == 1
    assert worker.bits() == before  # the weights are back
    assert progress == [("verification of the cached map", 1, 1)]
    assert said() == []


def test_without_a_map_it_is_a_probe_and_nothing_is_said(said: Callable[[], list[str]]) -> None:
    worker = Worker()
    expected = worker.probe()
    assert worker.run(None).fingerprint == expected.fingerprint
    assert worker.num_loads == PROBE_LOADS
    assert said() == []


def test_weights_may_be_left_as_the_verification_left_them() -> None:
    worker = Worker()
    cached, before = worker.probe(), worker.bits()
    worker.run(cached, options=ProbeOptions(backup=False))
    assert worker.bits() != before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"first": "u"},
            r"live tensor 'wu', element \[\d+, \d+\]: expected element \[\d+, \d+\] of checkpoint tensor 'w', ",
        ),
        ({"adds": 1.0}, r"live tensor 'n', element \[\d+\]: expected element \[\d+\] of checkpoint tensor 'n'"),
        ({"fails": True}, r"load_weights raised KeyError: 'layer 3'"),
        (
            {"touches_table": True},
            r"live tensor 'table', element \[1\]: the loader writes it, the map says it never does",
        ),
    ],
)
def test_a_map_that_does_not_hold_names_the_element(changed: dict[str, object], message: str) -> None:
    worker = Worker()
    cached, before = worker.probe(), worker.bits()
    for name, value in changed.items():
        setattr(worker, name, value)
    with pytest.raises(ProbeError, match=f"the cached map does not hold: {message}"):
        verify_cached(cached, spec=SPEC, load_weights=worker.load_weights, tensors=worker.tensors)
    assert worker.num_loads == 1
    assert worker.bits() == before


def test_a_map_that_does_not_hold_is_said_and_replaced_by_a_probe(said: Callable[[], list[str]]) -> None:
    worker = Worker()
    cached, before, progress = worker.probe(), worker.bits(), list[str]()
    worker.first = "u"
    found = worker.run(cached, progress=lambda what, *_: progress.append(what))
    assert found.fingerprint == worker.probe().fingerprint != cached.fingerprint
    assert worker.bits() == before
    assert len(said()) == 1
    assert said()[0].startswith(
        "a cached map is not used, probing instead: the cached map does not hold: live tensor 'wu'"
    )
    assert progress[:2] == ["verification of the cached map", "a cached map is not used: probing"]
    assert len(progress) == 2 + PROBE_LOADS


def test_other_constants_and_rebound_tensors_are_seen() -> None:
    worker = Worker()
    cached = worker.probe()
    wrong = replace(cached, constants=(Constant(live=0, live_start=14 * 13, axes=((13, 1),), bits=0),))
    with pytest.raises(
        ProbeError, match=r"'wu', element \[14, 0\]: expected a constant, 0\.0 \(bits 0x0000\), found -1\.0"
    ):
        verify_cached(wrong, spec=SPEC, load_weights=worker.load_weights, tensors=worker.tensors)

    def rebinds(weights: NamedWeights) -> None:
        worker.load_weights(weights)
        worker.n = worker.n.clone()

    before, original = worker.bits(), worker.n
    with pytest.raises(ProbeError, match="does not write in place: live tensor 'n' was"):
        verify_cached(cached, spec=SPEC, load_weights=rebinds, tensors=worker.tensors)
    assert worker.n is not original
    assert worker.bits() == before
    assert torch.equal(worker.n, original)


def test_a_map_of_something_else_is_refused_before_any_load(said: Callable[[], list[str]]) -> None:
    worker = Worker()
    cached = worker.probe()
    other = CheckpointSpec.from_iterable([*((t.name, t.shape, t.dtype) for t in SPEC.tensors), ("more", (2,), BF16)])
    for spec, live, message in (
        (other, {}, f"made for checkpoint {SPEC.digest}, the checkpoint is {other.digest}"),
        (
            SPEC,
            {"n": torch.zeros(13, dtype=BF16)},
            "live tensor 'n' is a parameter [13] BF16 strides [1], the map has a",
        ),
        (SPEC, {"extra": torch.zeros(2)}, "live tensor 'extra' is a parameter [2] F32 strides [1], the map has absent"),
    ):
        tensors = lambda live=live: NamedTensors({**worker.tensors(), **live}, buffers={"table"})  # noqa: E731
        with pytest.raises(LayoutError) as caught:
            verify_cached(cached, spec=spec, load_weights=worker.load_weights, tensors=tensors)
        assert message in str(caught.value)
        assert worker.num_loads == 0
    with pytest.raises(CoverageError):  # the probe that takes its place finds that nobody fills `extra`
        probe_or_verify(spec=SPEC, load_weights=worker.load_weights, tensors=tensors, cached=cached)
    assert worker.num_loads == PROBE_LOADS
    assert "probing instead: live tensor 'extra'" in said()[0]


def test_a_map_with_gaps_holds_only_where_gaps_are_expected(said: Callable[[], list[str]]) -> None:
    worker = Worker()
    everything = lambda: dict(worker.tensors())  # noqa: E731  # the table is a parameter now
    expected = ProbeOptions(expected_untouched=frozenset({"table"}))
    cached = probe(spec=SPEC, load_weights=worker.load_weights, tensors=everything, options=expected)
    again = probe_or_verify(
        spec=SPEC, load_weights=worker.load_weights, tensors=everything, options=expected, cached=cached
    )
    assert again is cached
    with pytest.raises(CoverageError, match="'table'"):
        probe_or_verify(spec=SPEC, load_weights=worker.load_weights, tensors=everything, cached=cached)
    assert "live parameter 'table' that the loader never writes" in said()[0]


# --- the loader path -----------------------------------------------------------------------------------------------------


def computing() -> tuple[Worker, SourceMap]:
    worker = Worker(adds=1.0)
    cached = worker.probe()
    assert [cached.live[i].name for i in cached.computed] == ["n"]
    return worker, decode_saved_map(encode_saved_map(cached, SPEC)).source_map


def test_computed_tensors_cost_one_load_more_of_the_carried_tensors_alone() -> None:
    worker, cached = computing()
    before, seen = worker.bits(), list[list[str]]()
    load = worker.load_weights

    def watched(weights: NamedWeights) -> None:
        drained = list(weights)
        seen.append([name for name, _ in drained])
        load(drained)

    worker.load_weights = watched  # type: ignore[method-assign]
    assert worker.run(cached) is cached
    assert seen == [["w", "u", "n"], ["n"]]
    assert worker.bits() == before


def test_a_computed_tensor_that_needs_more_than_the_map_carries_is_found_out(said: Callable[[], list[str]]) -> None:
    worker, cached = computing()
    load = worker.load_weights

    def needs_w(weights: NamedWeights) -> None:
        state = dict(weights)
        load(state.items())
        if "n" in state:
            worker.n += state["w"][0].float() if "w" in state else 0.0

    worker.load_weights = needs_w  # type: ignore[method-assign]
    found = worker.run(cached)
    assert found.fingerprint != cached.fingerprint
    assert "live tensor 'n', element [" in said()[0]
    assert "when the carried tensors alone were loaded instead of all" in said()[0]


@pytest.mark.parametrize("fault", ["leaves n as it was", "clears the rest"])
def test_what_a_load_of_the_carried_tensors_alone_must_not_do(fault: str) -> None:
    worker, cached = computing()
    load = worker.load_weights

    def partial(weights: NamedWeights) -> None:
        state = dict(weights)
        if len(state) == len(SPEC.tensors) or fault == "clears the rest":
            load(state.items())
        if len(state) < len(SPEC.tensors) and fault == "clears the rest":
            worker.wu.zero_()

    where = "'n'" if fault == "leaves n as it was" else "'wu'"
    with pytest.raises(ProbeError, match=f"the cached map does not hold: live tensor {where}"):
        verify_cached(cached, spec=SPEC, load_weights=partial, tensors=worker.tensors)


def test_a_carried_set_that_is_not_allowed_is_not_used(said: Callable[[], list[str]]) -> None:
    worker, cached = computing()
    with pytest.raises(ProbeError, match="'n'"):
        worker.run(cached, allow_loader_path=False)
    assert "this side takes no loader path" in said()[0]
    with pytest.raises(Exception, match="loader_path_bytes"):
        worker.run(cached, options=ProbeOptions(loader_path_bytes=51))
    assert "carries 52 bytes for the loader, allowed are 51" in said()[1]


# --- a side of several workers -------------------------------------------------------------------------------------------


class Side:
    """Ranks in threads whose loads are collective: a rank that makes another number of them breaks the barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._loads, self._words = (threading.Barrier(size, timeout=20) for _ in range(2))
        self._said: list[bytes] = [b""] * size
        self.num_rounds = 0

    def agree(self, rank: int) -> Callable[[bytes], Sequence[bytes]]:
        def ask(word: bytes) -> Sequence[bytes]:
            self._said[rank] = word
            self._words.wait()
            heard = tuple(self._said)
            self.num_rounds += rank == 0
            self._words.wait()
            return heard

        return ask

    def run(self, caches: Sequence[SourceMap | None], prepare: Callable[[int, Worker], None]) -> list[object]:
        """What each rank returned or raised."""
        workers = [Worker(first="w" if rank else "u", collective=self._loads.wait) for rank in range(self.size)]
        results: list[object] = [None] * self.size
        for rank, worker in enumerate(workers):
            prepare(rank, worker)

        def rank_main(rank: int) -> None:
            try:
                results[rank] = workers[rank].run(caches[rank], agree=self.agree(rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        self.num_loads = [worker.num_loads for worker in workers]
        return results


MAPS = [Worker(first="u").probe(), Worker(first="w").probe(), Worker(first="w").probe()]


def nothing(_rank: int, _worker: Worker) -> None: ...


def test_all_ranks_use_their_maps_together() -> None:
    side = Side(3)
    assert all(a is b for a, b in zip(side.run(MAPS, nothing), MAPS, strict=True))
    assert (side.num_loads, side.num_rounds) == ([1, 1, 1], 2)


@pytest.mark.parametrize("missing", [0, 2])
def test_one_rank_without_a_map_makes_all_of_them_probe(missing: int, said: Callable[[], list[str]]) -> None:
    side = Side(3)
    found = side.run([None if rank == missing else m for rank, m in enumerate(MAPS)], nothing)
    assert [getattr(f, "fingerprint", f) for f in found] == [m.fingerprint for m in MAPS]
    assert side.num_loads == [PROBE_LOADS] * 3
    assert said() == ["a cached map is not used, probing instead: another worker has none that holds"] * 2


def test_one_rank_whose_map_does_not_hold_makes_all_of_them_probe(said: Callable[[], list[str]]) -> None:
    side = Side(3)
    found = side.run([MAPS[0], MAPS[0], MAPS[2]], nothing)
    assert [getattr(f, "fingerprint", f) for f in found] == [m.fingerprint for m in MAPS]
    assert side.num_loads == [1 + PROBE_LOADS] * 3
    assert sorted("another worker" in text for text in said()) == [False, True, True]


def test_a_rank_whose_loader_fails_makes_every_load_all_the_same() -> None:
    side = Side(2)
    found = side.run(MAPS[:2], lambda rank, worker: setattr(worker, "fails", rank == 1))
    assert all(isinstance(f, ProbeError) for f in found), found
    assert side.num_loads == [1 + PROBE_LOADS] * 2
