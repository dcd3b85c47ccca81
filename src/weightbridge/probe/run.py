"""The probe: learn one worker's layout by watching where its own `load_weights` puts coded checkpoints.

Design: layout discovery by values (arXiv 2609.25442, correspondence extractor). Each coded pass gives every checkpoint
element the residue of its index modulo one prime; the live tensors are read after it, and only sparse differences are
kept. From all passes follows which checkpoint element each live element holds. One more load of pseudo-random values
must then be predicted bit for bit. Live tensors that are not are computed by the loader: they take the loader path
(`loader_path.py`) where that is allowed, else the layout is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import CoverageError, InfeasibleError, LayoutError, ProbeError, WeightBridgeError
from weightbridge.layout.source_map import Constant, CopyTable, LiveTensor, SourceMap
from weightbridge.probe.backup import Backup, back_up
from weightbridge.probe.carried import subset_tensors, with_loader_group
from weightbridge.probe.codes import CodeTables, code_table
from weightbridge.probe.difference import PositionPool
from weightbridge.probe.explained import Explanation, TensorRecord
from weightbridge.probe.irregular import warn_if_irregular
from weightbridge.probe.lattice import Lattice
from weightbridge.probe.live import distinct_elements, live_tensors, local_tensor, raw_bits, to_numpy_bits
from weightbridge.probe.loader_path import Agree, find_loader_path
from weightbridge.probe.observe import fill_sentinel, sentinel_bits
from weightbridge.probe.perturbed import OpposedValues, has_small_tensors
from weightbridge.probe.repeats import Explainer
from weightbridge.probe.snapshot import Snapshot
from weightbridge.probe.values import VerificationValues, coded_tensors, describe_bits, verification_tensors
from weightbridge.probe.verify import Mismatch, Values, mismatches

__all__ = ["ProbeOptions", "num_loads", "probe"]

_DIGEST_NUMEL = 1 << 20

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Tensors = Callable[[], Mapping[str, torch.Tensor]]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """backup: put the weights back afterwards: True keeps a copy of them in host memory meanwhile, a folder one in a file
    there; False when they are about to be overwritten anyway. expected_untouched: live parameters the loader is right not
    to write. seed: of the verification values; equal on all ranks of a side. loader_path_bytes: of the checkpoint tensors
    that may be carried whole for the loader."""

    backup: bool | str | Path = True
    expected_untouched: frozenset[str] = frozenset()
    seed: int = 0
    loader_path_bytes: int = 1 << 30


def num_loads(spec: CheckpointSpec, dtypes: Iterable[str]) -> int:
    """How often `probe` calls `load_weights` when nothing is computed: the coded passes and one verification, two for a
    checkpoint with very small tensors. Equal on all ranks of a side."""
    return code_table(spec, dtypes).num_passes + 1 + has_small_tensors(spec)


def probe(
    *,
    spec: CheckpointSpec,
    load_weights: LoadWeights,
    tensors: Tensors,
    dtypes: frozenset[str] | None = None,
    options: ProbeOptions | None = None,
    progress: Progress | None = None,
    allow_loader_path: bool = False,
    agree: Agree | None = None,
) -> SourceMap:
    """The SourceMap of this worker. Blocks for `num_loads(spec, dtypes)` calls of `load_weights`, and for more if any rank
    of the side has live tensors that its loader computes.

    All workers of a side call it at the same time with equal spec, `dtypes` (the union of their live dtypes; by default
    this worker's) and seed, because a load may be collective: then number and content of the loads agree. A worker
    that finds a fault takes part in every load all the same and raises at the end. The live tensors are read anew through
    `tensors` after each load. With `options.backup` they hold what they held before, whatever happens.

    allow_loader_path: computed tensors get a loader group in the map instead of being refused; for sides that only take
    weights in. agree: an all-gather of bytes among the ranks of the side, by rank, for a side of more than one; called
    the same number of times on all of them, and only with `allow_loader_path`.

    progress: called with (what was done, loads done, loads in all). Raises ProbeError (the loader computes, rebinds,
    resizes or fails) and CoverageError (a parameter's elements are never written), naming tensor and element, and
    InfeasibleError (the loader path needs more than `loader_path_bytes`). An error that another rank met has its rank as
    `side_rank`.
    """
    chosen = options or ProbeOptions()
    live = live_tensors(tensors())
    union = dtypes if dtypes is not None else frozenset(t.dtype.name for t in live)
    run = _Run(spec, load_weights, tensors, live, union, chosen, progress, allow_loader_path)
    with back_up(run._read_locals(), chosen.backup) as kept:
        try:
            run.all_loads()
            if allow_loader_path:
                run.follow_loader(agree or (lambda data: (data,)))
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
    allow_loader_path: bool
    locals: list[torch.Tensor] = field(default_factory=list)
    before: Snapshot | None = None  # where the live tensors lay when the loads began
    failure: Exception | None = None
    source_map: SourceMap | None = None
    computed: dict[int, ProbeError] = field(default_factory=dict)  # live tensors that are no copies, and what was seen
    untouched: list[Constant] = field(default_factory=list)  # bits of no meaning; see fixed_lattices
    num_done: int = 0
    num_planned: int = 0

    def restore(self, kept: Backup) -> None:
        """Put the copies back, and into whatever storage the loader put in the tensors' place."""
        kept.restore()
        now = self.tensors()
        if self.options.backup is False or self.before is None or self.before.moved(now) is None:
            return
        kept.restore([local_tensor(now[t.name]) if t.name in now else None for t in self.live])

    def all_loads(self) -> None:
        """Every load that finds copies. Keeps the first failure and goes on: a load may be collective."""
        table = code_table(self.spec, self.dtypes)
        last = table.num_passes
        self.num_planned = num_loads(self.spec, self.dtypes)
        values = VerificationValues(self.spec, self.options.seed, zeros=True)
        self.locals = self._read_locals()
        self.before = Snapshot(self.tensors(), contents=False)
        pool = PositionPool()
        records = [TensorRecord.of(t, pool) for t in self.live]
        for pass_ in range(table.num_passes):
            self._load(coded_tensors(self.spec, table, pass_), pass_)
            self._guarded(partial(self._read, records, table, pass_))
            self._report(f"coded load {pass_ + 1}")
        explained: dict[int, Explanation] = {}
        self._guarded(lambda: self._explain(records, table, explained))
        records.clear()
        self._load(verification_tensors(self.spec, values), last)
        self._guarded(lambda: self._verify(explained, values, last))
        self._report("verification load")
        if has_small_tensors(self.spec):
            opposed = OpposedValues(self.spec, table, self.options.seed)
            self._load(verification_tensors(self.spec, opposed), last + 1)
            self._guarded(lambda: self._verify(explained, opposed, last + 1))
            self._report("second verification load")

    def _read(self, records: list[TensorRecord], table: CodeTables, pass_: int) -> None:
        for i, (record, tensor) in enumerate(zip(records, self.locals, strict=True)):
            if i not in self.computed:
                try:
                    record.read(tensor, table, pass_)
                except ProbeError as error:
                    self.computed[i] = error

    def _explain(self, records: list[TensorRecord], table: CodeTables, explained: dict[int, Explanation]) -> None:
        explainer = Explainer(self.spec, table)
        for i, record in enumerate(records):
            if i not in self.computed:
                try:
                    explained[i] = explainer.explain(record)
                except ProbeError as error:
                    self.computed[i] = error

    # --- the loader path: what probe.loader_path asks of a rank ------------------------------------------------------------

    def follow_loader(self, agree: Agree) -> None:
        """Find out what the loader needs for the tensors that it computes on this rank or another one of the side."""
        why = {i: str(getattr(e, "seen", e.message)) for i, e in sorted(self.computed.items())}
        try:
            needed = find_loader_path(self, agree, why, self.options.seed + 1000)
        except WeightBridgeError as error:  # the side fell apart
            self.failure = self.failure or error
            return
        if needed is None or self.failure is not None or self.source_map is None:
            return
        sizes = {self.spec.tensors[i].name: self.spec.tensors[i].nbytes for i in needed}
        budget = self.options.loader_path_bytes
        if sum(sizes.values()) > budget:
            largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
            self.failure = InfeasibleError(
                f"the loader computes live tensors (among them {self._names(why)}) and has to be given {len(needed)} "
                f"checkpoint tensors whole to make them, {sum(sizes.values())} bytes of host memory on every worker (the "
                f"largest are {', '.join(map(repr, largest))}); allowed are {budget}: raise loader_path_bytes, or turn the "
                "transformation off",
                needed_bytes=sum(sizes.values()),
                budget_bytes=budget,
            )
            return
        self.source_map = with_loader_group(self.source_map, self.spec, tuple(why), needed)

    def full(self, values: VerificationValues) -> None:
        self._load(verification_tensors(self.spec, values), 0)
        self._report("load of a whole checkpoint for the loader path")

    def subset(self, values: VerificationValues, positions: Sequence[int]) -> str:
        raised = ""
        try:
            self.load_weights(subset_tensors(self.spec, values, positions))
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
        self._synchronise()
        self._guarded(self._check_addresses)
        self._report(f"load of {len(positions)} tensors for the loader path")
        return raised

    def digests(self, computed: Collection[int]) -> dict[int, bytes]:
        return {i: _digest(self.locals[i], self.live[i]) for i in computed}

    def differing(self, values: Values) -> dict[int, Mismatch]:
        if self.source_map is None:
            return {}
        return mismatches(self.spec, self.source_map, self.locals, values, self.untouched)

    def plan_loads(self, more: int) -> None:
        self.num_planned += more

    def _names(self, computed: Collection[int]) -> str:
        return ", ".join(repr(self.live[i].name) for i in sorted(computed)[:5]) or "none of this rank"

    def result(self) -> SourceMap:
        if self.failure is not None:
            raise self.failure
        if self.source_map is None:
            raise ProbeError("the probe ended without a map")
        if self.computed and not self.allow_loader_path:
            raise self.computed[min(self.computed)]
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
        self._refuse_nan_constants(self.source_map)
        warn_if_irregular(self.source_map)
        return self.source_map

    def _refuse_nan_constants(self, source_map: SourceMap) -> None:
        """No loader pads a parameter with NaN; one that computes with what it finds there makes NaN of the probe's fill.

        Such an element would look like a constant and stay behind at every update.
        """
        for constant in source_map.constants:
            live = source_map.live[constant.live]
            if live.parameter and live.dtype.is_nan(constant.bits):
                raise ProbeError(
                    f"live parameter {live.name!r}, storage element {constant.live_start}: every load leaves NaN there. It "
                    "held NaN before each load, so the loader computes with what it finds; make it write the element outright",
                    tensor=live.name,
                )

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
        self._synchronise()
        self._guarded(self._check_addresses)

    def _synchronise(self) -> None:
        for device in {t.device for t in self.locals if t.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def _guarded(self, step: Callable[[], object]) -> None:
        """Run a step unless something failed before; keep its failure for the end."""
        if self.failure is not None:
            return
        try:
            step()
        except LayoutError as error:
            self.failure = error

    def _check_addresses(self) -> None:
        change = None if self.before is None else self.before.moved(self.tensors())
        if change is not None:
            raise ProbeError(
                f"load_weights does not write in place: {change}. Addresses must stay, since captured graphs and registered "
                "memory rely on them; make the loader copy into the tensors that exist"
            )

    def _verify(self, explained: dict[int, Explanation], values: VerificationValues, pass_: int) -> None:
        """Compare with the map, and leave out of it what the loader turns out to compute."""
        first = _build_map(self.spec, self.live, explained)
        wrong = mismatches(self.spec, first, self.locals, values.bits, self._fixed_lattices(explained, pass_))
        for i, mismatch in wrong.items():
            self.computed[i] = self._not_copied(mismatch)
            del explained[i]
        self.source_map = _build_map(self.spec, self.live, explained) if wrong else first
        self.untouched = self._fixed_lattices(explained, 0)  # loads of the loader path fill like pass 0

    def _fixed_lattices(self, explained: dict[int, Explanation], pass_: int) -> list[Constant]:
        """Untouched elements, which still hold what they were filled with before a pass."""
        return [
            _constant(i, x, sentinel_bits(self.live[i].dtype, pass_)) for i, e in explained.items() for x in e.untouched
        ]

    def _not_copied(self, wrong: Mismatch) -> ProbeError:
        target = self.live[wrong.live]
        seen = (
            f"coded loads showed {wrong.source} in element {list(wrong.element)}, a load of ordinary values put "
            f"{describe_bits(wrong.found, target.dtype)} there, expected {describe_bits(wrong.expected, target.dtype)}"
        )
        return ProbeError(
            f"live tensor {target.name!r}, element {list(wrong.element)}: the loader does not copy it: {seen}. Only copies and "
            "constants can be followed. Turn the transformation off, or leave the tensor out of `tensors`",
            tensor=target.name,
            index=wrong.element,
            expected=wrong.expected,
            found=wrong.found,
            seen=seen,
        )

    def _report(self, what: str) -> None:
        self.num_done += 1
        if self.progress is not None:
            self.progress(what, self.num_done, self.num_planned)


def _constant(live: int, lattice: Lattice, bits: int) -> Constant:
    return Constant(live=live, live_start=lattice.live, axes=tuple((n, step) for n, _, step in lattice.axes), bits=bits)


def _digest(local: torch.Tensor, described: LiveTensor) -> bytes:
    """Of a live tensor's bits, a piece of bounded size at a time."""
    found = hashlib.blake2b(digest_size=16)
    target = distinct_elements(local)
    if not target.numel():
        return found.digest()
    bits = raw_bits(target, 0, tuple(target.shape), tuple(target.stride()))
    rows = bits.reshape(1, -1) if bits.dim() < 2 else bits
    each = max(1, _DIGEST_NUMEL * len(rows) // target.numel())
    for row in range(0, len(rows), each):
        found.update(to_numpy_bits(rows[row : row + each], described.dtype).tobytes())
    return found.digest()


def _build_map(spec: CheckpointSpec, live: tuple[LiveTensor, ...], explained: dict[int, Explanation]) -> SourceMap:
    rows = [(x.group, i, x.start, x.live, x.axes) for i, e in sorted(explained.items()) for x in e.copies]
    constants = [_constant(i, x, x.group) for i, e in sorted(explained.items()) for x in e.constants]
    untouched = {live[i].name: e.num_untouched for i, e in sorted(explained.items()) if e.untouched}
    return SourceMap(
        spec_digest=spec.digest,
        live=live,
        copies=CopyTable.from_rows(rows),
        constants=tuple(constants),
        untouched=untouched,
    )
