"""The contract of a `load_weights`, as a function: six oracles run against a loader of your own.

    report = check_loader(LoaderUnderTest(spec=spec, load_weights=model.load_weights, tensors=lambda: discover_tensors(model)))
    if not report.passed: ...

Needs no test framework. `weightbridge check MODULE:FACTORY` prints its report as a table. The oracles:

1. identity: the same weights again, in 1, 2 and 7 calls, change no bit and no address;
2. distinct values: the probe explains every live element;
3. coverage both ways: each live element has a source, each checkpoint tensor a taker;
4. poison: live tensors, uninitialised and freed memory hold NaN before a load, and nothing of it shows afterwards;
5. inputs unchanged: the loader does not write into the tensors it is given;
6. no-op and failure are visible: other weights show, and an interrupted load is reported to the caller.

What is wrong in silence fails; what the library copes with, or what the loader says aloud, is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import torch

from weightbridge.errors import LayoutError, ProbeError
from weightbridge.layout.coverage_live import unused_tensors
from weightbridge.layout.source_map import SourceMap
from weightbridge.probe.live import live_tensors, local_tensor
from weightbridge.probe.loader_path import Agree
from weightbridge.probe.run import ProbeOptions, probe
from weightbridge.probe.snapshot import Difference, Snapshot
from weightbridge.probe.values import VerificationValues, verification_tensors
from weightbridge.probe.verify import verify_live
from weightbridge.testing.contract_report import CHECKS, ContractReport, Finding, LoaderUnderTest, Status
from weightbridge.testing.poison import is_poison, poison_live, poison_tensor, poisoned_memory

__all__ = ["CHECKS", "ContractReport", "Finding", "LoaderUnderTest", "Status", "check_loader"]

Progress = Callable[[str], None]


def check_loader(
    loader: LoaderUnderTest, *, seed: int = 0, progress: Progress | None = None, agree: Agree | None = None
) -> ContractReport:
    """Run the contract. Blocks for some twenty loads, more where the loader computes; the live tensors are overwritten and
    hold pseudo-random weights afterwards. Memory: one copy of the checkpoint and two of the live tensors.

    A load that is collective is checked on all workers of the side at once: the loads are the same on all of them unless
    the very first one fails. seed: of the weights, equal on all. agree: an all-gather of bytes among them, as `probe` wants
    it. progress: called with what is being done. Raises nothing for a bad loader: whatever it does is a finding.
    """
    return _Contract(loader, seed, progress or (lambda _: None), agree).run()


class _InterruptedLoad(Exception):
    """What the iterator raises halfway to see whether the loader tells its caller."""


@dataclass(slots=True)
class _Contract:
    """One call of `check_loader`."""

    loader: LoaderUnderTest
    seed: int
    progress: Progress
    agree: Agree | None
    findings: dict[str, Finding] = field(default_factory=dict)
    num_calls: int = 0
    mutated: dict[str, None] = field(default_factory=dict)  # names, in order
    moved: str | None = None
    reference: Snapshot | None = None
    source_map: SourceMap | None = None

    def run(self) -> ContractReport:
        if self._first_load():
            self._guarded("identity, 1 call", self._identity)
            self._guarded("distinct values", self._distinct_values)
            self._guarded("poison", self._poison)
            self._guarded("no-op visible", self._other_weights)
            self._guarded("failure visible", self._failure)
            self._addresses()
            self._inputs()
        for check in CHECKS:
            if check not in self.findings:
                self._add(check, Status.SKIP, "not run: it needs what failed above")
        return ContractReport(
            findings=tuple(self.findings[c] for c in CHECKS), source_map=self.source_map, num_calls=self.num_calls
        )

    def _add(self, check: str, status: Status, found: str, remedy: str = "", at: object = None) -> None:
        element = getattr(at, "index" if isinstance(at, LayoutError) else "element", None)
        self.findings[check] = Finding(
            check=check, status=status, found=found, remedy=remedy, tensor=getattr(at, "tensor", None), element=element
        )

    def _guarded(self, check: str, oracle: Callable[[], None]) -> None:
        """A loader, or a `tensors`, can be so broken that a question about it cannot even be asked."""
        try:
            oracle()
        except Exception as error:
            self._add(
                check, Status.FAIL, f"could not be checked: {type(error).__name__}: {error}",
                "`tensors` must give the same tensors, in memory, before and after every load", error,
            )  # fmt: skip

    # --- loads ------------------------------------------------------------------------------------------------------------

    def _now(self) -> Mapping[str, torch.Tensor]:
        return self.loader.tensors()

    def _load(self, seed: int, *, num_calls: int = 1, spoil: bool = False) -> str | None:
        """Load the weights of a seed; returns what the loader raised, in words. Notes what it does to addresses and inputs.

        num_calls: how many calls the tensors are spread over. spoil: fill what it was given with NaN afterwards, for a
        loader that keeps references instead of copies.
        """
        spec = self.loader.spec
        values = VerificationValues(spec, seed)
        stream, again = verification_tensors(spec, values), verification_tensors(spec, values)
        failure = None
        for size in _chunks(len(spec.tensors), num_calls):
            given: list[tuple[str, torch.Tensor]] = []
            chunk = islice(stream, size)
            self.num_calls += 1
            try:
                self.loader.load_weights(_keeping(chunk, given))
            except Exception as error:
                failure = failure or f"{type(error).__name__}: {error}"
            for _ in _keeping(chunk, given):  # what the loader did not ask for
                pass
            _wait_for_devices(self._now())
            for (name, tensor), (_, fresh) in zip(given, islice(again, size), strict=True):
                if not _same_bits(tensor, fresh):
                    self.mutated[name] = None
                if spoil:
                    poison_tensor(tensor)
        if self.reference is not None and self.moved is None:
            self.moved = self.reference.moved(self._now())
        return failure

    def _first_load(self) -> bool:
        """Whether the loader took the whole checkpoint, so that the rest can be asked."""
        self.progress("first load")
        try:
            live = live_tensors(self._now())
            self.reference = Snapshot(self._now())
        except LayoutError as error:
            self._add("first load", Status.FAIL, error.message, "mend `tensors`", error)
            return False
        failure = self._load(self.seed + 1)
        if failure is not None:
            self._add(
                "first load", Status.FAIL, f"load_weights raised {failure}",
                "it is given every tensor of the spec, with its global shape and dtype: a tensor it misses must be in the "
                "spec, and one whose value it checks in CheckpointSpec(constants=...)",
            )  # fmt: skip
            return False
        self.reference = Snapshot(self._now())
        numel = sum(t.numel for t in live)
        self._add(
            "first load", Status.PASS,
            f"took {len(self.loader.spec.tensors)} checkpoint tensors into {len(live)} live ones of {numel} elements",
        )  # fmt: skip
        return True

    # --- the oracles --------------------------------------------------------------------------------------------------------

    def _identity(self) -> None:
        for calls in (1, 2, 7):
            check = f"identity, {calls} call{'s' if calls > 1 else ''}"
            self.progress(check)
            failure = self._load(self.seed + 1, num_calls=calls)
            changed = self._changed()
            if failure is not None:
                self._identity_refused(check, calls, failure)
            elif changed is not None and calls == 1:
                self._add(
                    check, Status.FAIL, f"{changed}, after the same weights were loaded a second time",
                    "a second load must do what the first did: look for post-processing that runs once, or for state that "
                    "the loader keeps between loads",
                    changed,
                )  # fmt: skip
                # Later questions are about the state that an engine really runs with.
                self.reference = Snapshot(self._now())
            elif changed is not None:
                self._add(
                    check, Status.FAIL, f"{changed}, after the same weights were loaded in {calls} calls",
                    "a call may write only what the tensors of that call determine: it must leave the rest as it is",
                    changed,
                )  # fmt: skip
            else:
                self._add(check, Status.PASS, "no bit changed")
            if calls > 1 and (failure is not None or changed is not None) and self.reference is not None:
                self.reference.restore(self._now())

    def _identity_refused(self, check: str, calls: int, failure: str) -> None:
        if calls == 1:
            self._add(check, Status.FAIL, f"load_weights raised {failure}", "a loader must load more than once")
            return
        self._add(
            check, Status.WARN, f"load_weights raised {failure}",
            "it wants tensors that belong together in one call; the library gives it all of them in one, other callers "
            "(engines that load in buckets) may not",
        )  # fmt: skip

    def _changed(self) -> Difference | None:
        return None if self.reference is None else self.reference.difference(self._now())

    def _distinct_values(self) -> None:
        """The probe; it is asked for a map even where parameters have gaps, which are judged here."""
        self.progress("distinct values: probing")
        loader = self.loader
        names = frozenset(t.name for t in live_tensors(self._now()))
        calls = 0

        def counted(tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
            nonlocal calls
            calls += 1
            return loader.load_weights(tensors)

        try:
            self.source_map = found = probe(
                spec=loader.spec, load_weights=counted, tensors=loader.tensors, allow_loader_path=True, agree=self.agree,
                options=ProbeOptions(expected_untouched=names, seed=self.seed),
            )  # fmt: skip
        except LayoutError as error:
            self._add("distinct values", Status.FAIL, error.message, _probe_remedy(error), error)
            return
        finally:
            self.num_calls += calls
        self._add("distinct values", Status.PASS, _describe_map(found))
        self._coverage(found)

    def _coverage(self, found: SourceMap) -> None:
        check, loader = "coverage of live tensors", self.loader
        gaps = {
            t.name: n
            for t in found.live
            if t.parameter and t.name not in loader.expected_untouched and (n := found.untouched.get(t.name, 0))
        }
        if gaps:
            listed = ", ".join(f"{name!r} ({n} elements)" for name, n in list(gaps.items())[:5])
            self._add(
                check, Status.FAIL, f"live parameters that the loader never writes, or not wholly: {listed}",
                "add their tensors to the spec, mend the loader, or name them in expected_untouched; what is no parameter "
                "belongs in the buffers of NamedTensors, as discover_tensors(module) gives them",
                _At(next(iter(gaps))),
            )  # fmt: skip
        else:
            rest = sum(found.untouched.values())
            self._add(check, Status.PASS, f"every parameter is written; {rest} other elements are not")
        check = "coverage of the checkpoint"
        unused = [n for n in unused_tensors(loader.spec, [found]) if n not in loader.expected_unused]
        if unused:
            self._add(
                check, Status.FAIL, f"{len(unused)} checkpoint tensors land nowhere: {', '.join(unused[:5])}",
                "mend the loader, leave them out of the spec, or name them in expected_unused if other workers take them",
                _At(unused[0]),
            )  # fmt: skip
        else:
            self._add(check, Status.PASS, "every tensor lands somewhere")

    def _poison(self) -> None:
        self.progress("poison")
        reference, now = self.reference, self._now()
        if reference is None:
            return
        described = {t.name: t for t in live_tensors(now)}
        poison_live(described, now)
        with poisoned_memory(now):
            failure = self._load(self.seed + 1, spoil=True)
        now = self._now()
        left: dict[str, int] = {}
        wrong: Difference | None = None
        for name, tensor in described.items():
            pair = reference.bits(name, now)
            if pair is None:
                continue
            differs = pair[0] != pair[1]
            poisoned = is_poison(pair[1], tensor)
            if wrong is None and bool((differs & ~poisoned).any()):
                wrong = reference.first(name, pair, differs & ~poisoned)
            kept = int((differs & poisoned).sum())
            if kept and self._should_be_written(name, kept, tensor.parameter) and wrong is None:
                wrong = reference.first(name, pair, differs & poisoned)
            elif kept:
                left[name] = kept
        self._judge_poison(failure, wrong, left)
        reference.restore(now)

    def _should_be_written(self, name: str, kept: int, parameter: bool) -> bool:
        """Whether so many elements that still hold the poison contradict what else is known of the tensor."""
        if self.source_map is not None:
            return kept > self.source_map.untouched.get(name, 0)
        return parameter and name not in self.loader.expected_untouched

    def _judge_poison(self, failure: str | None, wrong: Difference | None, left: Mapping[str, int]) -> None:
        remedy = (
            "what a load writes may depend on the tensors it is given and on nothing else: not on what the live tensors, "
            "their padding or fresh memory held before, nor on references to tensors of an earlier call"
        )
        if failure is not None:
            self._add("poison", Status.FAIL, f"load_weights raised {failure} over live tensors of NaN", remedy)
        elif wrong is not None:
            self._add("poison", Status.FAIL, f"{wrong}, when all memory held NaN before the load", remedy, wrong)
        elif left:
            self._add("poison", Status.PASS, f"no trace of it but in {sum(left.values())} elements no load writes")
        else:
            self._add("poison", Status.PASS, "no trace of it; padding is as it was")

    def _other_weights(self) -> None:
        """Other weights must show, where the map says; the old ones again must bring the old state back."""
        self.progress("no-op visible")
        check = "no-op visible"
        failure = self._load(self.seed + 2)
        changed = self._changed()
        wrong = self._against_map(self.seed + 2) if failure is None else None
        failure_back = self._load(self.seed + 1)
        back = self._changed()
        if failure is not None or failure_back is not None:
            self._add(check, Status.FAIL, f"load_weights raised {failure or failure_back}", "a loader must load again")
        elif changed is None:
            self._add(
                check, Status.FAIL, "other weights were loaded and no live element changed",
                "a loader must not take a later load for one already done, and `tensors` must give what it writes",
            )  # fmt: skip
        elif wrong is not None:
            self._add(
                check, Status.FAIL, wrong[0],
                "this load wrote something else than those of the probe: a loader must do the same each time", wrong[1],
            )  # fmt: skip
        elif back is not None:
            self._add(
                check, Status.FAIL, f"{back}, after other weights and then the first ones were loaded",
                "the loader keeps state between loads", back,
            )  # fmt: skip
        else:
            self._add(check, Status.PASS, "other weights show, and the first ones again bring the first state back")

    def _against_map(self, seed: int) -> tuple[str, _At] | None:
        """Where the live tensors are not what the map makes of the weights of this seed."""
        if self.source_map is None or self.moved is not None:
            return None
        now, spec = self._now(), self.loader.spec
        local = [local_tensor(now[t.name]) for t in self.source_map.live if not t.carried]
        found = verify_live(spec, self.source_map, local, VerificationValues(spec, seed).bits)
        if found is None:
            return None
        name = self.source_map.live[found.live].name
        return (
            f"live tensor {name!r}, element {list(found.element)}: expected {found.source}, bits {found.expected:#x}, found "
            f"{found.found:#x}"
        ), _At(name, found.element)

    def _failure(self) -> None:
        self.progress("failure visible")
        check, reached = "failure visible", False
        spec = self.loader.spec
        half = len(spec.tensors) // 2

        def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal reached
            yield from islice(verification_tensors(spec, VerificationValues(spec, self.seed + 2)), half)
            reached = True
            raise _InterruptedLoad(f"the source of weights failed after {half} tensors (this is a test of the loader)")

        self.num_calls += 1
        raised = False
        try:
            self.loader.load_weights(interrupted())
        except Exception:
            raised = True
        _wait_for_devices(self._now())
        failure = self._load(self.seed + 1)
        back = self._changed()
        if reached and not raised:
            self._add(
                check, Status.FAIL, f"the iterator raised after {half} of {len(spec.tensors)} tensors, load_weights returned",
                "let exceptions through: a load that ended half way must not look like one that worked",
            )  # fmt: skip
        elif failure is not None:
            self._add(
                check, Status.WARN, f"after an interrupted load the next one raised {failure}",
                "clear what an interrupted call left behind, so that a load can be tried again",
            )  # fmt: skip
        elif back is not None:
            self._add(
                check, Status.FAIL, f"{back}, in a whole load after an interrupted one",
                "clear what an interrupted call left behind", back,
            )  # fmt: skip
        elif not reached:
            self._add(check, Status.PASS, "the loader stopped reading before the interruption")
        else:
            self._add(check, Status.PASS, "an interrupted load raises, and the next whole one is right")

    def _addresses(self) -> None:
        if self.moved is None:
            self._add("addresses", Status.PASS, "every live tensor stayed where it was")
            return
        self._add(
            "addresses", Status.FAIL, self.moved,
            "write into the tensors that exist (`tensor.copy_`): captured graphs and registered memory rely on addresses",
        )  # fmt: skip

    def _inputs(self) -> None:
        if not self.mutated:
            self._add("inputs unchanged", Status.PASS, "as they were given")
            return
        names = list(self.mutated)
        self._add(
            "inputs unchanged", Status.WARN,
            f"load_weights writes into {len(names)} of the tensors it is given: {', '.join(names[:5])}",
            "nothing, with this library, which hands out private copies; callers that share theirs are hurt",
            _At(names[0]),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _At:
    tensor: str
    element: tuple[int, ...] | None = None


def _probe_remedy(error: LayoutError) -> str:
    if isinstance(error, ProbeError) and getattr(error, "tensor", None):
        return "make the loader copy, the same way each time, or leave the tensor out of `tensors`"
    return "see the message"


def _describe_map(found: SourceMap) -> str:
    num_carried, num_computed = len(found.carried), len(found.computed)
    text = (
        f"{len(found.live) - num_carried - num_computed} live tensors are {len(found.copies) - num_carried} slice copies and "
        f"{len(found.constants)} constants"
    )
    if not num_computed:
        return text
    names = ", ".join(repr(found.live[i].name) for i in sorted(found.computed)[:5])
    return f"{text}; through the loader path: {num_computed} computed from {num_carried} checkpoint tensors ({names})"


def _chunks(num_tensors: int, num_calls: int) -> list[int]:
    """Sizes of `num_calls` nearly equal parts, larger ones first; fewer parts than that when there are few tensors."""
    parts = max(1, min(num_calls, num_tensors))
    return [num_tensors // parts + (i < num_tensors % parts) for i in range(parts)]


def _keeping(
    stream: Iterable[tuple[str, torch.Tensor]], given: list[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for item in stream:
        given.append(item)
        yield item


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _wait_for_devices(tensors: Mapping[str, torch.Tensor]) -> None:
    for device in {t.device for t in tensors.values() if t.device.type == "cuda"}:
        torch.cuda.synchronize(device)
