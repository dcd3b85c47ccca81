"""The probe: learn one worker's layout by watching where its own `load_weights` puts coded checkpoints.

Design: layout discovery by values (arXiv 2609.25442, correspondence extractor). Each coded pass gives every checkpoint
element the residue of its index modulo one prime; the live tensors are read after it, and only sparse differences are
kept. From all passes follows which checkpoint element each live element holds. One more load of pseudo-random values
must then be predicted bit for bit, or the layout is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import CoverageError, LayoutError, ProbeError
from weightbridge.layout.source_map import Constant, CopyTable, LiveTensor, SourceMap
from weightbridge.probe.codes import CodeTable, code_table
from weightbridge.probe.explained import Explanation, TensorRecord
from weightbridge.probe.lattice import Lattice
from weightbridge.probe.live import distinct_elements, live_tensors, local_tensor
from weightbridge.probe.observe import fill_sentinel, sentinel_bits
from weightbridge.probe.values import VerificationValues, coded_tensors, describe_bits, verification_tensors
from weightbridge.probe.verify import verify_live

__all__ = ["ProbeOptions", "num_loads", "probe"]

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Tensors = Callable[[], Mapping[str, torch.Tensor]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """backup: put the weights back afterwards (a copy of them in host memory meanwhile); False when they are about to be
    overwritten anyway. expected_untouched: live parameters the loader is right not to write. expected_unused: checkpoint
    tensors that need land nowhere (judged over a whole side, by the coordinator). seed: of the verification values;
    equal on all ranks of a side."""

    backup: bool = True
    expected_untouched: frozenset[str] = frozenset()
    expected_unused: frozenset[str] = frozenset()
    seed: int = 0


def num_loads(spec: CheckpointSpec, dtypes: Iterable[str]) -> int:
    """How often `probe` calls `load_weights`: the coded passes and one verification. Equal on all ranks of a side."""
    return code_table(spec, dtypes).num_passes + 1


def probe(
    *,
    spec: CheckpointSpec,
    load_weights: LoadWeights,
    tensors: Tensors,
    dtypes: frozenset[str] | None = None,
    options: ProbeOptions | None = None,
    progress: Progress | None = None,
) -> SourceMap:
    """The SourceMap of this worker. Blocks for `num_loads(spec, dtypes)` calls of `load_weights`.

    All workers of a side call it at the same time with equal spec, `dtypes` (the union of their live dtypes; by default
    this worker's) and seed, because a load may be collective: then number and content of the loads agree. A worker
    that finds a fault takes part in every load all the same and raises at the end. The live tensors are read anew through
    `tensors` after each load. With `options.backup` they hold what they held before, whatever happens.

    progress: called with (what was done, loads done, loads in all). Raises ProbeError (the loader computes, rebinds,
    resizes or fails) and CoverageError (a parameter's elements are never written), naming tensor and element.
    """
    chosen = options or ProbeOptions()
    live = live_tensors(tensors())
    union = dtypes if dtypes is not None else frozenset(t.dtype.name for t in live)
    run = _Run(spec, load_weights, tensors, live, union, chosen, progress)
    kept = run.backup() if chosen.backup else []
    try:
        run.all_loads()
    finally:
        run.restore(kept)
    return run.result()


@dataclass(slots=True)
class _Run:
    """One call of `probe`."""

    spec: CheckpointSpec
    load_weights: LoadWeights
    tensors: Tensors
    live: tuple[LiveTensor, ...]
    dtypes: frozenset[str]
    options: ProbeOptions
    progress: Progress | None
    locals: list[torch.Tensor] = field(default_factory=list)
    addresses: list[tuple[Any, ...]] = field(default_factory=list)
    failure: Exception | None = None
    source_map: SourceMap | None = None

    def backup(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(live tensor, copy of it in host memory) of every live tensor."""
        targets = [distinct_elements(t) for t in self._read_locals()]
        return [(t, t.to("cpu", copy=True)) for t in targets]

    def restore(self, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put the copies back, and into whatever storage the loader put in the tensors' place."""
        with torch.no_grad():
            for tensor, copy in kept:
                tensor.copy_(copy)
            if not kept or not self._moved(self.tensors()):
                return
            now = self.tensors()
            for described, (_, copy) in zip(self.live, kept, strict=True):
                target = now.get(described.name)
                target = None if target is None else distinct_elements(local_tensor(target))
                if target is not None and target.shape == copy.shape:
                    target.copy_(copy)

    def all_loads(self) -> None:
        """Every load of the probe. Keeps the first failure and goes on: a load may be collective."""
        table = code_table(self.spec, self.dtypes)
        total = table.num_passes + 1
        values = VerificationValues(self.spec, self.options.seed)
        self.locals = self._read_locals()
        self.addresses = [_address(t) for t in self.locals]
        records = [TensorRecord.of(t) for t in self.live]
        for pass_ in range(table.num_passes):
            self._load(coded_tensors(self.spec, table, pass_), pass_)
            self._guarded(partial(self._read, records, table, pass_))
            self._report(f"coded load {pass_ + 1}", pass_ + 1, total)
        explained: list[Explanation] = []
        self._guarded(lambda: explained.extend(r.explain(self.spec, table) for r in records))
        records.clear()
        self._load(verification_tensors(self.spec, values), total - 1)
        self._guarded(lambda: self._verify(explained, values, total - 1))
        self._report("verification load", total, total)

    def _read(self, records: list[TensorRecord], table: CodeTable, pass_: int) -> None:
        for record, tensor in zip(records, self.locals, strict=True):
            record.read(tensor, table, pass_)

    def result(self) -> SourceMap:
        if self.failure is not None:
            raise self.failure
        if self.source_map is None:
            raise ProbeError("the probe ended without a map")
        gaps = {
            t.name: self.source_map.untouched[t.name]
            for t in self.live
            if t.parameter and t.name in self.source_map.untouched and t.name not in self.options.expected_untouched
        }
        if gaps:
            name, missing = next(iter(gaps.items()))
            numel = next(t.numel for t in self.live if t.name == name)
            raise CoverageError(
                f"live parameter {name!r}: the loader never writes {missing} of its {numel} elements"
                f"{f' (with gaps in {len(gaps) - 1} more parameters)' if len(gaps) > 1 else ''}; add its tensor to the "
                "checkpoint, mend the loader, or name it in expected_untouched. If it is no parameter, list tensors with "
                "discover_tensors(module), which tells buffers apart",
                tensor=name,
                tensors=tuple(gaps),
            )
        return self.source_map

    def _read_locals(self) -> list[torch.Tensor]:
        now = self.tensors()
        return [local_tensor(now[t.name]) for t in self.live]

    def _load(self, stream: Iterable[tuple[str, torch.Tensor]], pass_: int) -> None:
        """One call of the user's loader on tensors that were filled with the sentinel."""
        if self.failure is None:
            for tensor, described in zip(self.locals, self.live, strict=True):
                fill_sentinel(tensor, described.dtype, pass_)
        try:
            self.load_weights(stream)
        except Exception as error:
            if self.failure is None:
                self.failure = ProbeError(
                    f"load_weights raised {type(error).__name__}: {error}. It was given the {len(self.spec.tensors)} tensors "
                    "of the checkpoint spec with probe values; a tensor it misses must be in the spec, and one whose value it "
                    "checks in CheckpointSpec(constants=...)",
                    load=pass_,
                )
                self.failure.__cause__ = error
            return
        for device in {t.device for t in self.locals if t.device.type == "cuda"}:
            torch.cuda.synchronize(device)
        self._guarded(self._check_addresses)

    def _guarded(self, step: Callable[[], object]) -> None:
        """Run a step unless something failed before; keep its failure for the end."""
        if self.failure is not None:
            return
        try:
            step()
        except LayoutError as error:
            self.failure = error

    def _moved(self, now: Mapping[str, torch.Tensor]) -> str | None:
        """What a load changed about the tensors themselves, in words."""
        if set(now) != {t.name for t in self.live}:
            changed = set(now) ^ {t.name for t in self.live}
            return f"the set of live tensors changed by {min(changed)!r}"
        for described, before in zip(self.live, self.addresses, strict=True):
            after = _address(local_tensor(now[described.name]))
            if after != before:
                old, new = _describe_address(before), _describe_address(after)
                return f"live tensor {described.name!r} was {old} and is now {new}"
        return None

    def _check_addresses(self) -> None:
        change = self._moved(self.tensors())
        if change is not None:
            raise ProbeError(
                f"load_weights does not write in place: {change}. Addresses must stay, since captured graphs and registered "
                "memory rely on them; make the loader copy into the tensors that exist"
            )

    def _verify(self, explained: list[Explanation], values: VerificationValues, pass_: int) -> None:
        self.source_map = _build_map(self.spec, self.live, explained)
        untouched = [
            _constant(i, x, sentinel_bits(t.dtype, pass_))
            for i, (t, e) in enumerate(zip(self.live, explained, strict=True))
            for x in e.untouched
        ]
        wrong = verify_live(self.spec, self.source_map, self.locals, values.bits, untouched)
        if wrong is not None:
            target = self.live[wrong.live]
            raise ProbeError(
                f"live tensor {target.name!r}, element {list(wrong.element)}: the loader does not copy it. Coded loads showed "
                f"{wrong.source}; a load of ordinary values put {describe_bits(wrong.found, target.dtype)} there, expected "
                f"{describe_bits(wrong.expected, target.dtype)}. Computed tensors need the loader path, which is not available "
                "yet; turn the transformation off, or leave the tensor out of `tensors`",
                tensor=target.name,
                index=wrong.element,
                expected=wrong.expected,
                found=wrong.found,
            )

    def _report(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)


def _address(local: torch.Tensor) -> tuple[Any, ...]:
    # An empty tensor has no address to keep.
    pointer = local.data_ptr() if local.numel() else 0
    return pointer, tuple(local.shape), tuple(local.stride()), str(local.dtype), str(local.device)


def _describe_address(address: tuple[Any, ...]) -> str:
    pointer, shape, strides, dtype, device = address
    return f"{dtype} {list(shape)} strides {list(strides)} on {device} at {pointer:#x}"


def _constant(live: int, lattice: Lattice, bits: int) -> Constant:
    return Constant(live=live, live_start=lattice.live, axes=tuple((n, step) for n, _, step in lattice.axes), bits=bits)


def _build_map(spec: CheckpointSpec, live: tuple[LiveTensor, ...], explained: list[Explanation]) -> SourceMap:
    rows = [(x.group, i, x.start, x.live, x.axes) for i, e in enumerate(explained) for x in e.copies]
    constants = [_constant(i, x, x.group) for i, e in enumerate(explained) for x in e.constants]
    untouched = {t.name: e.num_untouched for t, e in zip(live, explained, strict=True) if e.untouched}
    return SourceMap(
        spec_digest=spec.digest,
        live=live,
        copies=CopyTable.from_rows(rows),
        constants=tuple(constants),
        untouched=untouched,
    )
