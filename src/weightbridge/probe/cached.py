"""A layout known from an earlier run: proved by one load of pseudo-random values instead of being probed again.

The load is the verification that ends every probe. Where the map has a loader group, one more load follows, of the carried
tensors alone, which must bring the computed ones back. A load may be collective, so the workers of a side agree first on
whether all of them have a map to verify, and afterwards on whether all of them hold; else all of them probe.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import LayoutError, ProbeError, WeightBridgeError
from weightbridge.layout.coverage_live import lattice_offsets
from weightbridge.layout.source_map import LiveTensor, SourceMap
from weightbridge.probe.backup import back_up
from weightbridge.probe.carried import subset_tensors
from weightbridge.probe.live import live_tensors, local_tensor, raw_bits, to_numpy_bits
from weightbridge.probe.loader_path import Agree
from weightbridge.probe.map_files import cached_map_path, load_map, save_map
from weightbridge.probe.observe import fill_sentinel, sentinel_bits
from weightbridge.probe.run import ProbeOptions, probe
from weightbridge.probe.snapshot import Snapshot
from weightbridge.probe.values import VerificationValues, describe_bits, verification_tensors
from weightbridge.probe.verify import live_index, verify_live

__all__ = ["probe_or_verify", "probe_with_cache", "verify_cached"]

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Tensors = Callable[[], Mapping[str, torch.Tensor]]
Progress = Callable[[str, int, int], None]

_LOG = logging.getLogger(__name__)


def probe_or_verify(
    *,
    spec: CheckpointSpec,
    load_weights: LoadWeights,
    tensors: Tensors,
    cached: SourceMap | None,
    dtypes: frozenset[str] | None = None,
    options: ProbeOptions | None = None,
    progress: Progress | None = None,
    allow_loader_path: bool = False,
    agree: Agree | None = None,
) -> SourceMap:
    """`cached` if every worker of the side has a map and all of them hold; else what `probe` finds.

    Called by all workers of a side at the same time, each with its own map or None; otherwise as `probe`. `agree` is called
    once, and once more when all have a map (None: this worker is a side of its own). A map that is not used is
    said aloud: in the log as a warning, and through `progress`. Raises what `probe` raises.
    """
    chosen = options or ProbeOptions()
    ask: Agree = agree or (lambda said: (said,))
    reason = _unusable(cached, spec, tensors)
    if cached is not None and not reason:
        reason = _not_allowed(cached, spec, chosen, allow_loader_path)
    mine = b"" if cached is None or reason else _loads_of(cached)
    said = ask(mine)
    if cached is not None and mine and all(s == mine for s in said):
        try:
            verify_cached(
                cached, spec=spec, load_weights=load_weights, tensors=tensors, options=chosen, progress=progress
            )
        except WeightBridgeError as error:
            reason = error.message
        if all(s == b"holds" for s in ask(b"fails" if reason else b"holds")):
            return cached
    if cached is not None:
        _LOG.warning("a cached map is not used, probing instead: %s", reason or "another worker has none that holds")
    if progress is not None and any(said):
        progress("a cached map is not used: probing", 0, 1)
    return probe(
        spec=spec, load_weights=load_weights, tensors=tensors, dtypes=dtypes, options=chosen, progress=progress,
        allow_loader_path=allow_loader_path, agree=agree,
    )  # fmt: skip


def probe_with_cache(
    *,
    folder: str | Path,
    worker: str,
    spec: CheckpointSpec,
    load_weights: LoadWeights,
    tensors: Tensors,
    dtypes: frozenset[str] | None = None,
    options: ProbeOptions | None = None,
    progress: Progress | None = None,
    allow_loader_path: bool = False,
    agree: Agree | None = None,
) -> SourceMap:
    """`probe_or_verify` with the map that `folder` has of `worker` ("a/1"), and what is found put there for the next time.

    A file that cannot be used or written is said in the log as a warning: the cache costs or saves time, nothing else.
    """
    path = cached_map_path(folder, worker, spec, live_tensors(tensors()))
    cached = None
    if path.exists():
        try:
            cached = load_map(path).source_map
        except WeightBridgeError as error:
            _LOG.warning("a cached map is not used, probing instead: %s", error.message)
    found = probe_or_verify(
        spec=spec, load_weights=load_weights, tensors=tensors, cached=cached, dtypes=dtypes, options=options,
        progress=progress, allow_loader_path=allow_loader_path, agree=agree,
    )  # fmt: skip
    if found is not cached:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            save_map(path, found, spec)
        except (WeightBridgeError, OSError) as error:
            _LOG.warning("a map is not cached: %s", error)
    return found


def verify_cached(
    source_map: SourceMap,
    *,
    spec: CheckpointSpec,
    load_weights: LoadWeights,
    tensors: Tensors,
    options: ProbeOptions | None = None,
    progress: Progress | None = None,
) -> None:
    """Returns when the map holds for this loader, bit for bit; raises ProbeError naming tensor and element when not.

    Blocks for one load, two when the map has loader groups, whatever it finds. With `options.backup` the live tensors hold
    afterwards what they held before. Raises LayoutError without any load for a map of another checkpoint or other tensors.
    """
    chosen = options or ProbeOptions()
    reason = _unusable(source_map, spec, tensors)
    if reason:
        raise LayoutError(f"{reason}; probe again")
    before = tensors()
    names = [t.name for t in source_map.live if not t.carried]
    with back_up([local_tensor(before[name]) for name in names], chosen.backup) as kept:
        try:
            _Verification(source_map, spec, load_weights, tensors, chosen.seed, progress).run()
        finally:
            kept.restore()
            now = tensors()
            kept.restore([local_tensor(now[name]) if name in now else None for name in names])


def _unusable(source_map: SourceMap | None, spec: CheckpointSpec, tensors: Tensors) -> str | None:
    """Why a map cannot be about these tensors, in words."""
    if source_map is None:
        return None
    if source_map.spec_digest != spec.digest:
        return f"the map was made for checkpoint {source_map.spec_digest}, the checkpoint is {spec.digest}"
    then, now = (t for t in source_map.live if not t.carried), live_tensors(tensors())
    pairs = {t.name: t for t in then}, {t.name: t for t in now}
    for name in sorted({*pairs[0], *pairs[1]}):
        before, after = (side.get(name) for side in pairs)
        if before != after:
            return f"live tensor {name!r} is {_describe(after)}, the map has {_describe(before)}"
    return None


def _not_allowed(
    source_map: SourceMap, spec: CheckpointSpec, options: ProbeOptions, allow_loader_path: bool
) -> str | None:
    """Why a map may not be used although it may hold, in words."""
    for tensor in source_map.live:
        if tensor.parameter and tensor.name in source_map.untouched and tensor.name not in options.expected_untouched:
            return f"the map has elements of live parameter {tensor.name!r} that the loader never writes"
    carried = [spec.tensors[i].nbytes for i in _carried(source_map)]
    if carried and not allow_loader_path:
        return "the map has computed tensors, and this side takes no loader path"
    if sum(carried) > options.loader_path_bytes:
        return f"the map carries {sum(carried)} bytes for the loader, allowed are {options.loader_path_bytes}"
    return None


def _describe(tensor: LiveTensor | None) -> str:
    if tensor is None:
        return "absent"
    kind = "parameter" if tensor.parameter else "buffer"
    return f"a {kind} {list(tensor.shape)} {tensor.dtype.name} strides {list(tensor.strides)}"


def _loads_of(source_map: SourceMap) -> bytes:
    """What decides the number and the content of the verification loads; equal on all workers that may make them."""
    return hashlib.blake2b(repr((source_map.spec_digest, _carried(source_map))).encode(), digest_size=16).digest()


def _carried(source_map: SourceMap) -> list[int]:
    return sorted({t for group in source_map.loader_groups for t in group.tensors})


class _Verification:
    """One call of `verify_cached`. Goes through all loads; keeps the first failure."""

    def __init__(
        self, source_map: SourceMap, spec: CheckpointSpec, load_weights: LoadWeights, tensors: Tensors, seed: int,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self._map = source_map
        self._model = [t for t in source_map.live if not t.carried]
        self._spec = spec
        self._load_weights = load_weights
        self._tensors = tensors
        self._before = Snapshot(tensors(), contents=False)
        self._values = VerificationValues(spec, seed, zeros=True)
        self._progress = progress
        self._failure: LayoutError | None = None
        self._cause: Exception | None = None

    def run(self) -> None:
        carried = _carried(self._map)
        total = 2 if carried else 1
        self._fill(self._model)
        self._load(verification_tensors(self._spec, self._values))
        self._guarded(self._check)
        self._report("verification of the cached map", 1, total)
        if carried:
            computed = self._computed()
            whole = Snapshot(computed)
            self._fill([self._map.live[i] for i in sorted(self._map.computed)])
            self._load(subset_tensors(self._spec, self._values, carried))
            self._guarded(lambda: self._check_computed(whole))
            self._report("verification of the loader path", 2, total)
        if self._failure is not None:
            raise self._failure from self._cause

    def _computed(self) -> dict[str, torch.Tensor]:
        now, names = self._tensors(), {self._map.live[i].name for i in self._map.computed}
        return {name: tensor for name, tensor in now.items() if name in names}

    def _fill(self, which: Iterable[LiveTensor]) -> None:
        now = self._tensors()
        if self._failure is None:
            for described in which:
                fill_sentinel(local_tensor(now[described.name]), described.dtype, 0)

    def _load(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        try:
            self._load_weights(stream)
        except Exception as error:
            self._cause = self._cause or error
            self._fail(f"load_weights raised {type(error).__name__}: {error}")
            return
        for device in {t.device for t in self._tensors().values() if t.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        moved = self._before.moved(self._tensors())
        if moved is not None:
            self._fail(f"load_weights does not write in place: {moved}")

    def _fail(self, what: str, **fields: object) -> None:
        if self._failure is None:
            self._failure = ProbeError(f"the cached map does not hold: {what}", **fields)

    def _guarded(self, step: Callable[[], None]) -> None:
        if self._failure is None:
            step()

    def _locals(self) -> list[torch.Tensor]:
        now = self._tensors()
        return [local_tensor(now[t.name]) for t in self._model]

    def _check(self) -> None:
        """Every element that is no part of a computed tensor."""
        local = self._locals()
        wrong = verify_live(self._spec, self._map, local, self._values.bits)
        if wrong is not None:
            target = self._model[wrong.live]
            self._fail(
                f"live tensor {target.name!r}, element {list(wrong.element)}: expected {wrong.source}, "
                f"{describe_bits(wrong.expected, target.dtype)}, found {describe_bits(wrong.found, target.dtype)}",
                tensor=target.name, index=wrong.element,
            )  # fmt: skip
            return
        for i, target in enumerate(self._model):
            if target.name in self._map.untouched and i not in self._map.computed:
                self._check_untouched(i, target, local[i])

    def _check_untouched(self, live: int, target: LiveTensor, local: torch.Tensor) -> None:
        """What is neither copied nor constant must still be the sentinel."""
        rest = np.zeros(target.span_numel, dtype=bool)
        rest[lattice_offsets(0, np.array(target.shape, np.int64), np.array(target.strides, np.int64))] = True
        copies = self._map.copies
        for row in np.flatnonzero(copies.live == live).tolist():
            rest[lattice_offsets(int(copies.live_start[row]), copies.count[row], copies.live_stride[row])] = False
        for constant in self._map.constants:
            if constant.live == live:
                axes = np.array(constant.axes, dtype=np.int64).reshape(-1, 2)
                rest[lattice_offsets(constant.live_start, axes[:, 0], axes[:, 1])] = False
        held = to_numpy_bits(raw_bits(local, 0, (target.span_numel,), (1,)), target.dtype)
        written = np.flatnonzero(rest & (held != target.dtype.bits.type(sentinel_bits(target.dtype, 0))))
        if len(written):
            index = live_index(target, int(written[0]))
            self._fail(
                f"live tensor {target.name!r}, element {list(index)}: the loader writes it, the map says it never does",
                tensor=target.name, index=index,
            )  # fmt: skip

    def _check_computed(self, whole: Snapshot) -> None:
        """The carried tensors alone bring the computed ones back, and leave the copied ones as they were."""
        wrong = whole.difference(self._computed())
        if wrong is not None:
            self._fail(
                f"{wrong}, when the carried tensors alone were loaded instead of all",
                tensor=wrong.tensor,
                index=wrong.element,
            )
            return
        self._check()

    def _report(self, what: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(what, done, total)
