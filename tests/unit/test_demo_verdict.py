"""The verdict: right on a right run, and wrong as soon as any one fact is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.unit.demo_cases import ANSWERS, FORCED, config, messages_of_a_good_run, record_of_a_good_run, step

from weightbridge.cli.demo.messages import Answered, Referenced
from weightbridge.cli.demo.record import DemoRecord
from weightbridge.cli.demo.verdict import compare_tokens, judge

change = msgspec.structs.replace


def test_a_good_run_passes() -> None:
    verdict = judge(record_of_a_good_run())
    assert verdict.passed
    assert verdict.all_verified
    assert verdict.answer_changed
    traffic = verdict.versions[0].network
    assert {n: (t.sent_bytes, t.received_bytes, t.moved_bytes) for n, t in traffic.items()} == {
        "trainers": (1005, 80, 1005),
        "rollout-a": (511, 1005, 1005),
        "rollout-b": (505, 1005, 1005),
    }
    assert (verdict.tokens["tp3"].agreeing, verdict.tokens["tp3"].noise_logits) == (2, 0.5)
    assert (verdict.tokens["single"].agreeing, verdict.tokens["single"].inconclusive) == (1, 1)


@pytest.mark.parametrize("worker", ["tp3/0", "tp3/2", "single/0"])
@pytest.mark.parametrize("field", ["parameters", "buffers"])
def test_one_wrong_digest_on_one_worker_in_one_version(worker: str, field: str) -> None:
    record = record_of_a_good_run()
    held = record.digests[(1, worker)]
    name = next(iter(getattr(held, field)))
    record.digests[(1, worker)] = change(held, **{field: getattr(held, field) | {name: "other"}})
    verdict = judge(record)
    assert not verdict.all_verified
    assert not verdict.passed
    assert [v.verified for v in verdict.versions] == [False, True]
    assert verdict.versions[0].differing == (f"{worker} {name}",)


def test_a_tensor_that_one_side_lacks_differs() -> None:
    record = record_of_a_good_run()
    held = record.digests[(2, "tp3/1")]
    record.digests[(2, "tp3/1")] = change(held, parameters={"a.weight": "a2"})
    assert judge(record).versions[1].differing == ("tp3/1 b.weight",)


@pytest.mark.parametrize("key", [(2, "tp3/1"), (2, "trainer/0")])
def test_a_version_that_was_not_fully_reported_is_not_verified(key: tuple[int, str]) -> None:
    record = record_of_a_good_run()
    del record.digests[key]
    assert not record.complete
    assert [v.verified for v in judge(record).versions] == [True, False]


@pytest.mark.parametrize(("worker", "sent", "received"), [("trainer/0", 6, 0), ("tp3/1", 0, 6), ("single/0", 0, -16)])
def test_bytes_beyond_one_percent(worker: str, sent: int, received: int) -> None:
    record = record_of_a_good_run()
    counts = dict(record.updated[2].network_bytes)
    counts[worker] = (counts[worker][0] + sent, counts[worker][1] + received)
    record.updated[2] = change(record.updated[2], network_bytes=counts)
    verdict = judge(record)
    assert verdict.all_verified
    assert not verdict.network_within_tolerance
    assert not verdict.passed


def test_a_run_without_a_plan_has_no_network_verdict() -> None:
    record = record_of_a_good_run()
    record.plan = None
    assert not judge(record).network_within_tolerance


def test_a_wrong_token_with_a_clear_margin_fails() -> None:
    steps = (step(5, 3.0), step(8, 0.25))
    record = record_of_a_good_run()
    key = (2, "tp3")
    record.answers[key] = change(record.answers[key], steps=steps)
    verdict = judge(record)
    assert verdict.tokens["tp3"].differing == 1
    assert not verdict.tokens_agree
    assert not verdict.passed


def test_tokens_at_the_bound() -> None:
    row = [(1, 10.0), (2, 9.0), (2, 9.0)]
    assert compare_tokens([step(2, 0.1)], [row], bound=1.0).inconclusive == 1
    assert compare_tokens([step(2, 0.1)], [row], bound=0.99).differing == 1
    assert compare_tokens([step(1, 0.1)], [row], bound=0.0).agreeing == 1


def test_answers_that_were_never_compared_do_not_agree() -> None:
    record = record_of_a_good_run()
    record.reference = Referenced(version=2, text="after", forced={"tp3": FORCED["tp3"]})
    assert not judge(record).tokens_agree
    record.reference = Referenced(version=2, text="after", forced=FORCED | {"single": FORCED["single"][:1]})
    assert not judge(record).tokens_agree


def test_an_unchanged_answer_is_reported_and_fails_nothing() -> None:
    record = record_of_a_good_run()
    record.answers[(-1, "single")] = Answered(version=-1, text="after", steps=())
    verdict = judge(record)
    assert not verdict.answer_changed
    assert verdict.passed


def test_the_record_is_complete_with_the_last_message_and_not_before() -> None:
    one = config()
    messages = messages_of_a_good_run(one)
    for left_out in range(len(messages)):
        record = DemoRecord(config=one)
        for i, (worker, message) in enumerate(messages):
            if i != left_out:
                record.apply(worker, message)
        kind: Any = type(messages[left_out][1]).__name__
        needed = kind in {"Updated", "Referenced"} or (
            getattr(messages[left_out][1], "version", -1) > 0 and kind != "Trained"
        )
        assert record.complete == (not needed), messages[left_out]


def test_the_first_report_counts() -> None:
    record = record_of_a_good_run()
    record.apply("tp3/0", Answered(version=2, text="another", steps=()))
    assert record.answers[(2, "tp3")].steps == ANSWERS["tp3"]
    assert record.final_answers == ANSWERS
    assert replace(record, answers={}).final_answers is None
