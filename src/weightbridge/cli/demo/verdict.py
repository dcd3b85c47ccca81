"""The judgement over a finished run, from what the workers reported. Pure.

Nothing here trusts the library's own word for correctness: weights are compared by digests that trainers and engines
took by themselves, bytes by the kernel's counters, answers by a model that was never sent anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from weightbridge.cli.demo.config import TRAINERS_NODE
from weightbridge.cli.demo.messages import Step
from weightbridge.cli.demo.record import DemoRecord

__all__ = [
    "NETWORK_TOLERANCE",
    "NOISE_BOUND_LOGITS",
    "NodeTraffic",
    "TokenComparison",
    "Verdict",
    "VersionVerdict",
    "compare_tokens",
    "judge",
    "judge_version",
]

NOISE_BOUND_LOGITS = 1.0
"""Where the reference's best token leads by no more than this, another token says nothing. Two correct bf16 runs of
SmolLM2-135M, one of them tensor-parallel, were seen 0.5 apart in a single logit, so 1.0 apart in a margin; each run
states what it saw as `noise_logits`."""

NETWORK_TOLERANCE = 0.01
"""What the network may carry beyond the payload, as a fraction: framing, tags and credits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTraffic:
    """TCP payload bytes of one node in one update, from the kernel, summed over its workers. expected_bytes: what it
    must send (trainers, `counts_sent`) or receive (rollout nodes).
    """

    sent_bytes: int
    received_bytes: int
    counts_sent: bool
    expected_bytes: int

    @property
    def moved_bytes(self) -> int:
        """The figure that is held against `expected_bytes`."""
        return self.sent_bytes if self.counts_sent else self.received_bytes

    @property
    def within_tolerance(self) -> bool:
        return abs(self.moved_bytes - self.expected_bytes) <= NETWORK_TOLERANCE * self.expected_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionVerdict:
    """verified: every live element of every engine worker is the trainers' weight rounded to bf16, and every buffer is
    as it was. differing: "worker tensor" for each that is not.
    """

    version: int
    verified: bool
    differing: tuple[str, ...]
    network: dict[str, NodeTraffic]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenComparison:
    """One engine's answer against the reference's, given the same tokens before each place.

    noise_logits: the largest difference seen between the two in one logit.
    """

    agreeing: int
    inconclusive: int
    differing: int
    noise_logits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """all_verified: the weights. passed: that, and network bytes and tokens too. answer_changed: on every engine."""

    versions: tuple[VersionVerdict, ...]
    tokens: dict[str, TokenComparison]
    all_verified: bool
    network_within_tolerance: bool
    tokens_agree: bool
    answer_changed: bool

    @property
    def passed(self) -> bool:
        return self.all_verified and self.network_within_tolerance and self.tokens_agree


def judge(record: DemoRecord) -> Verdict:
    """Judge what is there; versions that were never fully reported count as not verified."""
    versions = tuple(judge_version(record, version) for version in range(1, record.config.steps + 1))
    tokens = _compare_answers(record)
    names = [engine.name for engine in record.config.engines]
    return Verdict(
        versions=versions,
        tokens=tokens,
        all_verified=bool(versions) and all(v.verified for v in versions),
        network_within_tolerance=all(t.within_tolerance for v in versions for t in v.network.values())
        and all(v.network for v in versions),
        tokens_agree=set(tokens) == set(names) and all(t.differing == 0 for t in tokens.values()),
        answer_changed=all(_answer(record, -1, name) != _answer(record, record.config.steps, name) for name in names),
    )


def _answer(record: DemoRecord, version: int, engine: str) -> str | None:
    answered = record.answers.get((version, engine))
    return None if answered is None else answered.text


def judge_version(record: DemoRecord, version: int) -> VersionVerdict:
    """Judge one version by itself, as soon as all of it is reported."""
    differing = tuple(_differences(record, version))
    network = _traffic(record, version)
    return VersionVerdict(
        version=version,
        verified=record.version_is_reported(version) and not differing,
        differing=differing,
        network=network,
    )


def _differences(record: DemoRecord, version: int) -> Iterable[str]:
    expected = record.digests.get((version, record.config.trainers[0]))
    if expected is None:
        return
    for worker in record.engine_workers:
        held, initial = record.digests.get((version, worker)), record.digests.get((-1, worker))
        if held is None or initial is None:
            continue
        yield from (f"{worker} {name}" for name in _unequal(expected.parameters, held.parameters))
        yield from (f"{worker} {name}" for name in _unequal(initial.buffers, held.buffers))


def _unequal(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _traffic(record: DemoRecord, version: int) -> dict[str, NodeTraffic]:
    """Node -> bytes over the network in one update; empty while the report or the plan is missing."""
    updated, plan = record.updated.get(version), record.plan
    if updated is None or plan is None:
        return {}
    sums: dict[str, list[int]] = {}
    for worker, (sent, received) in updated.network_bytes.items():
        counts = sums.setdefault(record.config.node_of(worker), [0, 0])
        counts[0] += sent
        counts[1] += received
    traffic = {}
    for node in (TRAINERS_NODE, *plan.rollout_node_needed_bytes):
        sent, received = sums.get(node, [0, 0])
        traffic[node] = NodeTraffic(
            sent_bytes=sent,
            received_bytes=received,
            counts_sent=node == TRAINERS_NODE,
            expected_bytes=plan.model_bytes if node == TRAINERS_NODE else plan.rollout_node_needed_bytes[node],
        )
    return traffic


def _compare_answers(record: DemoRecord) -> dict[str, TokenComparison]:
    answers, reference = record.final_answers, record.reference
    if answers is None or reference is None:
        return {}
    return {
        name: compare_tokens(steps, reference.forced[name])
        for name, steps in answers.items()
        if len(reference.forced.get(name, ())) == len(steps)
    }


def compare_tokens(
    steps: Sequence[Step],
    forced: Sequence[Sequence[tuple[int, float]]],
    bound: float = NOISE_BOUND_LOGITS,
) -> TokenComparison:
    """Compare an answer with what the reference says at each of its places (see `messages.Referenced`).

    A token must be the reference's own best where that leads its runner-up by more than `bound` logits.
    """
    agreeing = inconclusive = differing = 0
    noise = 0.0
    for step, row in zip(steps, forced, strict=True):
        logits = dict(row)
        noise = max([noise, *(abs(logits[token] - logit) for token, logit in step.top if token in logits)])
        (best, lead), (_, second) = row[0], row[1]
        if step.token == best:
            agreeing += 1
        elif lead - second > bound:
            differing += 1
        else:
            inconclusive += 1
    return TokenComparison(agreeing=agreeing, inconclusive=inconclusive, differing=differing, noise_logits=noise)
