"""The run as one JSON document, for programs."""

from __future__ import annotations

from typing import Any

from weightbridge.cli.demo.launcher import DemoResult, WorkersFailed
from weightbridge.cli.demo.verdict import NETWORK_TOLERANCE, NOISE_BOUND_LOGITS, VersionVerdict
from weightbridge.errors import WeightBridgeError

__all__ = ["failure_document", "result_document"]


def result_document(result: DemoResult) -> dict[str, Any]:
    """Everything a run showed. Keys are stable: programs read this."""
    record, verdict, config = result.record, result.verdict, result.record.config
    plan = record.plan
    reference = record.reference
    return {
        "checkpoint": {"name": result.name, "path": config.checkpoint, "model_type": result.folder.model_type},
        "num_params": result.folder.spec.numel,
        "trainers": config.num_trainers,
        "engines": [{"name": e.name, "workers": e.num_workers, "node": e.node} for e in config.engines],
        "plan": {
            "model_bytes": plan.model_bytes if plan else 0,
            "trainer_egress_bytes": plan.trainer_egress_bytes if plan else {},
            "rollout_node_ingress_bytes": plan.rollout_node_ingress_bytes if plan else {},
            "rollout_node_needed_bytes": plan.rollout_node_needed_bytes if plan else {},
            "rounds": plan.rounds if plan else 0,
            "num_pairs": plan.num_pairs if plan else 0,
            "t_min_seconds": plan.t_min_seconds if plan else None,
            "bandwidth_bytes_per_second": config.bandwidth,
        },
        "versions": [_version(result, version) for version in verdict.versions],
        "answer_before": _answers(result, -1),
        "answer_after": _answers(result, config.steps),
        "answer_reference": reference.text if reference else None,
        "answer_changed": verdict.answer_changed,
        "tokens": {
            name: {
                "agreeing": tokens.agreeing,
                "inconclusive": tokens.inconclusive,
                "differing": tokens.differing,
                "noise_logits": tokens.noise_logits,
                "noise_bound_logits": NOISE_BOUND_LOGITS,
            }
            for name, tokens in verdict.tokens.items()
        },
        "tokens_agree": verdict.tokens_agree,
        "network_within_1_percent": verdict.network_within_tolerance,
        "network_tolerance": NETWORK_TOLERANCE,
        "all_verified": verdict.all_verified,
        "passed": verdict.passed,
        "seconds": result.seconds,
    }


def _version(result: DemoResult, version: VersionVerdict) -> dict[str, Any]:
    updated, trained = (table.get(version.version) for table in (result.record.updated, result.record.trained))
    return {
        "version": version.version,
        "loss": getattr(trained, "loss", None),
        "ewtt_seconds": getattr(updated, "ewtt_seconds", None),
        "agst_seconds": getattr(updated, "agst_seconds", None),
        "network_bytes": {
            node: {
                "sent": traffic.sent_bytes,
                "received": traffic.received_bytes,
                "expected": traffic.expected_bytes,
                "within_1_percent": traffic.within_tolerance,
            }
            for node, traffic in version.network.items()
        },
        "verified": version.verified,
        "differing": list(version.differing),
    }


def _answers(result: DemoResult, version: int) -> dict[str, str | None]:
    names = [engine.name for engine in result.record.config.engines]
    found = {name: result.record.answers.get((version, name)) for name in names}
    return {name: answered.text if answered else None for name, answered in found.items()}


def failure_document(error: WeightBridgeError, exit_status: int) -> dict[str, Any]:
    """What went wrong, for a run without a verdict."""
    facts: dict[str, Any] = {"kind": type(error).__name__, "message": error.message, "exit_status": exit_status}
    if isinstance(error, WorkersFailed):
        facts |= {"causes": error.causes, "dead": list(error.dead), "log_dir": error.log_dir}
    return {"all_verified": False, "passed": False, "error": facts}
