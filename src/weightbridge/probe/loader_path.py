"""The loader path: which checkpoint tensors the loader must be given again to make the live tensors that it computes.

Everything here is by experiment. Loads whose content is agreed on by all ranks of a side, because a load may be collective,
tell the dependencies (`dependencies.py`); they are accepted only if a load of just those tensors, over the state of another
checkpoint, makes every computed live tensor what a load of all tensors makes it, bit for bit, and every other live tensor
what the map says, on three fresh checkpoints that differ from one another in all other tensors by more than a maximum or
a minimum can hide. Else the set is widened, at last to the whole checkpoint, or the layout is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np

from weightbridge import errors
from weightbridge.checkpoint.spec import CheckpointSpec
from weightbridge.errors import ProbeError, WeightBridgeError
from weightbridge.layout.source_map import LiveTensor, SourceMap
from weightbridge.probe.dependencies import Refiner, candidates, coded_groups, widened
from weightbridge.probe.perturbed import Level, PerturbedValues
from weightbridge.probe.values import VerificationValues
from weightbridge.probe.verify import Mismatch, Values

__all__ = ["Agree", "Loads", "find_loader_path"]

Agree = Callable[[bytes], Sequence[bytes]]
"""An all-gather among the ranks of a side: what every rank said, by rank. All ranks call it the same number of times."""

_MAX_REFINING_ROUNDS = 24
"""Questions (three loads each) to make candidate sets smaller. What is left undecided is carried."""

_NUM_TRIALS = 3
_NUM_WIDENINGS = 4


class Loads(Protocol):
    """What the probe of one rank offers. A load that fails is kept as `failure`; later loads are made all the same."""

    spec: CheckpointSpec
    live: tuple[LiveTensor, ...]
    failure: Exception | None
    source_map: SourceMap | None

    def full(self, values: VerificationValues) -> None:
        """Load a whole checkpoint over live tensors that hold no weights."""

    def subset(self, values: VerificationValues, positions: Sequence[int]) -> str:
        """Load some tensors over what is there; what the loader raised, or ""."""

    def digests(self, computed: Collection[int]) -> dict[int, bytes]:
        """Of the bits of live tensors."""

    def differing(self, values: Values) -> dict[int, Mismatch]:
        """Live tensors that are not what the map says."""

    def plan_loads(self, more: int) -> None:
        """That many loads more are to come, for the report of progress."""


class _Word(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a rank tells the others. failure, kind: its error and the class of it, "" for none. The step of the search says
    what the answers mean; positions are among the checkpoint tensors with content."""

    failure: str = ""
    kind: str = ""
    computed: bool = False
    answers: tuple[bytes, ...] = ()
    positions: tuple[int, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Word)


class _Stopped(Exception):
    """A rank of the side has failed; all ranks know, and stop at the same word."""


@dataclass(slots=True)
class _Search:
    loads: Loads
    agree: Agree
    why: Mapping[int, str]
    seed: int
    reason: str = ""  # what the last trial got wrong on this rank
    blamed: int | None = None  # and of which live tensor

    @property
    def computed(self) -> Collection[int]:
        return self.why.keys()

    def tell(self, word: _Word) -> list[_Word]:
        """Exchange words. Raises _Stopped on all ranks when one of them has failed."""
        if self.loads.failure is not None:
            word = _Word(failure=_text(self.loads.failure), kind=type(self.loads.failure).__name__)
        try:
            words = [_DECODER.decode(data) for data in self.agree(_ENCODER.encode(word))]
        except msgspec.MsgspecError as error:
            raise ProbeError(f"a word between the ranks of this side was not understood: {error}") from None
        for rank, other in enumerate(words):
            if other.failure:
                if self.loads.failure is None:
                    cls = getattr(errors, other.kind, ProbeError) if other.kind in errors.__all__ else ProbeError
                    self.loads.failure = cls(other.failure, side_rank=rank)
                raise _Stopped
        return words

    def run(self) -> tuple[int, ...] | None:
        if not any(word.computed for word in self.tell(_Word(computed=bool(self.why)))):
            return None
        spec = self.loads.spec
        content = [i for i, t in enumerate(spec.tensors) if t.numel and t.name not in spec.constants]
        chosen = self._dependencies(content)
        names = [spec.tensors[i].name for i in content]
        tried: list[int] = []
        for attempt in range(_NUM_WIDENINGS + 2):
            tried.append(len(chosen))
            suffices, missing = self._try(content, chosen, attempt)
            if suffices:
                return tuple(content[i] for i in chosen)
            if len(chosen) == len(content):
                break
            grown = tuple(sorted({*chosen, *missing}))
            if attempt >= _NUM_WIDENINGS:
                grown = tuple(range(len(content)))
            elif grown == chosen:
                grown = widened(names, chosen)
            chosen = grown
        if self.reason:
            self._refuse(tried, len(content))
        self.tell(_Word())
        return None

    # --- which tensors ----------------------------------------------------------------------------------------------------

    def _dependencies(self, content: list[int]) -> tuple[int, ...]:
        """Positions in `content`; all of them when some tensor depends on nothing that could be seen."""
        groups = coded_groups(len(content))
        self.loads.plan_loads(2 + 3 * sum(1 for g in groups if g))
        self._perturb(content, ())
        base = self.loads.digests(self.computed)
        self._perturb(content, ())
        self._check_determinism(base)
        changed: dict[int, list[bool]] = {i: [] for i in self.computed}
        for group in groups:
            moved = self._moved_by(content, group, base)
            for i, answers in changed.items():
                answers.append(i in moved)
        words = self.tell(_Word(answers=tuple(sorted({bytes(a) for a in changed.values()}))))
        sets = {a: candidates(len(content), list(map(bool, a))) for word in words for a in word.answers}
        if not all(sets.values()):
            return tuple(range(len(content)))
        mine = {i: sets[bytes(a)] for i, a in changed.items()}
        refiner = Refiner(sets.values())
        for _ in range(_MAX_REFINING_ROUNDS):
            group = refiner.next_group()
            if not group:
                break
            self.loads.plan_loads(3)
            moved = self._moved_by(content, group, base)
            mine_moved = {mine[i] for i in moved}
            answer = bytes(s in mine_moved for s in refiner.sets)
            said = self.tell(_Word(answers=(answer,)))
            refiner.learn([any(word.answers[0][k] for word in said) for k in range(len(refiner.sets))])
        return refiner.found()

    def _perturb(self, content: list[int], group: Sequence[int], level: Level = Level.BASE) -> None:
        levels = dict.fromkeys((content[i] for i in group), level)
        self.loads.full(PerturbedValues(self.loads.spec, self.seed + 1, self.seed + 2, levels))

    def _moved_by(self, content: list[int], group: Sequence[int], base: Mapping[int, bytes]) -> set[int]:
        """Computed live tensors that a change of the group's tensors changes, in one direction at least."""
        moved: set[int] = set()
        for level in Level.others() if group else ():
            self._perturb(content, group, level)
            moved |= {i for i, digest in self.loads.digests(self.computed).items() if digest != base[i]}
        return moved

    def _check_determinism(self, base: Mapping[int, bytes]) -> None:
        again = self.loads.digests(self.computed)
        for i, digest in base.items():
            if again[i] != digest and self.loads.failure is None:
                name = self._name(i)
                self.loads.failure = ProbeError(
                    f"live tensor {name!r}: two loads of the same checkpoint put different values there ({self.why[i]}), so it "
                    "depends on more than the checkpoint: on what was there before, on the number of loads, or on chance. Make "
                    "load_weights a function of what it is given, or leave the tensor out of `tensors`",
                    tensor=name,
                )

    # --- whether they suffice ---------------------------------------------------------------------------------------------

    def _try(self, content: list[int], chosen: tuple[int, ...], attempt: int) -> tuple[bool, tuple[int, ...]]:
        """(whether the chosen tensors suffice on all ranks, further positions that may help if not)."""
        self.loads.plan_loads(1 + 2 * _NUM_TRIALS)
        positions = [content[i] for i in chosen]
        others = set(content) - set(positions)
        order = (Level.HIGH, Level.LOW, Level.SMALL, Level.BASE)
        checkpoints = [
            PerturbedValues(
                self.loads.spec, self._fresh(attempt, k), self._fresh(attempt, k + 4), dict.fromkeys(others, level)
            )
            for k, level in enumerate(order)
        ]
        reason, missing = "", set[int]()
        self.blamed = None
        self.loads.full(checkpoints[0])
        target = self.loads.digests(self.computed)
        for wanted, state in pairwise(checkpoints):
            self.loads.full(state)
            next_target = self.loads.digests(self.computed)
            raised = self.loads.subset(wanted, positions)
            reason = reason or (f"raised {raised}" if raised else "")
            if not raised:
                found, sources = self._compare(target, wanted, state, set(positions))
                reason, missing = reason or found, missing | sources
            target = next_target
        place = {position: i for i, position in enumerate(content)}
        self.reason = reason
        mine = tuple(sorted(place[p] for p in missing if p in place))
        words = self.tell(_Word(answers=(reason.encode(),), positions=mine))
        return not any(word.answers[0] for word in words), tuple(i for word in words for i in word.positions)

    def _fresh(self, attempt: int, number: int) -> int:
        return self.seed + 100 * (attempt + 1) + number

    def _compare(
        self, target: Mapping[int, bytes], wanted: VerificationValues, state: VerificationValues, loaded: set[int]
    ) -> tuple[str, set[int]]:
        """After a load of some tensors of `wanted` over `state`: (what is wrong, checkpoint tensors that may mend it)."""
        digests = self.loads.digests(self.computed)
        for i, digest in target.items():
            if digests[i] != digest:
                self.blamed = i
                return f"did not make live tensor {self._name(i)!r} what a load of all tensors makes it", set()

        def expected(tensor: int, lo: int, hi: int) -> np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]:
            return (wanted if tensor in loaded else state).bits(tensor, lo, hi)

        wrong = self.loads.differing(expected)
        source_map = self.loads.source_map
        if not wrong or source_map is None:
            return "", set()
        copies = source_map.copies
        sources = set(copies.tensor[np.isin(copies.live, list(wrong))].tolist()) - loaded
        return f"changed live tensor {self._name(min(wrong))!r}, which holds copies of other tensors", sources

    def _refuse(self, tried: list[int], num_content: int) -> None:
        first = min(self.computed, default=None) if self.blamed is None else self.blamed
        what = (
            "this side has live tensors that its loader computes"
            if first is None
            else f"live tensor {self._name(first)!r}: the loader computes it ({self.why[first]})"
        )
        self.loads.failure = ProbeError(
            f"{what}, and no set of checkpoint tensors was found that its loader can be given again to make it: loads of "
            f"{', '.join(map(str, tried))} of {num_content} tensors over another checkpoint were tried, and the last one "
            f"{self.reason}. "
            "A loader that keeps something between calls cannot be followed: make load_weights a function of what it is given, "
            "or leave the tensor out of `tensors`",
            **({} if first is None else {"tensor": self._name(first)}),
        )

    def _name(self, live: int) -> str:
        return self.loads.live[live].name


def _text(error: Exception) -> str:
    return error.message if isinstance(error, WeightBridgeError) else f"{type(error).__name__}: {error}"


def find_loader_path(loads: Loads, agree: Agree, why: Mapping[int, str], seed: int) -> tuple[int, ...] | None:
    """Checkpoint tensors (positions in the spec, ascending) that all workers of the side must be given whole, so that their
    loaders make what they compute of them. None when no rank has a computed live tensor, or with `loads.failure` set.

    why: computed live tensors (positions) of this rank, and what was seen of them. All ranks call it, those with a failure
    too. Blocks for some 6 log2(number of tensors) + 9 loads when there is anything computed, for none otherwise.
    """
    try:
        return _Search(loads, agree, why, seed).run()
    except _Stopped:
        return None
